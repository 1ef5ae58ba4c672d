"""Files that are written as a whole or not at all."""

import os
import pathlib
import threading
from typing import Union


def replace_file(path: Union[str, "os.PathLike[str]"], data: bytes) -> None:
    """Writes a temporary file and renames it, so that a failure leaves the old file. Pipes and devices are written directly."""
    named = pathlib.Path(path)
    if (named.exists() and not named.is_file()) or str(named).startswith(("/dev/", "/proc/")):
        named.write_bytes(data)
        return
    target = pathlib.Path(os.path.realpath(named))  # the file behind links is replaced, not the link
    beside = target.with_name(f".weft-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(beside, "xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
