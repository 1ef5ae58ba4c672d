"""The last calls of this process's ranks, for those that hang or fail.

    weft.flight.keep(f"flight.{rank}")     # written when a call fails, and whenever the process gets SIGUSR1

    weft explain --flight flight.*         # all ranks as one timeline, and the call at which they parted
"""

import os
import signal as signals
from typing import Optional, Union

from . import _core


def records() -> str:
    """The last 64 calls of each communicator of this process: an object of JSON a line. Times are seconds since 1970."""
    return _core.flight_records()


def keep(path: Union[str, "os.PathLike[str]"], *, signal: Optional[int] = signals.SIGUSR1, on_failure: bool = True) -> None:
    """Writes records() to this file when a call of a communicator fails for the first time, and at every such signal.

    Give each process a file of its own. The file is replaced as a whole each time, by a thread that also works while Python
    waits inside Weft, gloo or NCCL. Takes the handler of the signal (None: of none), and ends with keep("").
    """
    _core.keep_flight_file(os.fspath(path), on_failure, 0 if signal is None else int(signal))
