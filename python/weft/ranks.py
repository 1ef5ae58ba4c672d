"""Ranks that are threads of this process."""

import sys
from typing import Any, Callable, List

from . import _core, _placed
from ._core import Communicator

ends = [_placed.leave]  # called with a rank's communicator when it is over


def spawn(ranks: int, fn: Callable[[Communicator], Any], *, time_limit: float = 300.0, bandwidth: float = 0.0,
          latency: float = 0.0) -> List[Any]:
    """Runs fn(comm) on `ranks` threads and returns the list of what they return: for tests and notebooks.

    An exception of fn is raised here, and ranks that wait for the one that failed end too. A communicator ends with
    spawn, so call backward inside fn. On a GPU the ranks share it, or have one each; a backward of torch runs in its rank's
    thread, not in that of the device, where ranks would wait behind each other. bandwidth (bytes a second into each rank) and latency (seconds a call) make a
    slower link, to see what would overlap; 0 is as fast as memory.

        >>> import weft
        >>> weft.spawn(3, lambda comm: comm.rank * 10)
        [0, 10, 20]
    """
    scope = _placed.Scope()
    return _core.spawn(ranks, fn, lambda comm: _begin(comm, scope), _end, time_limit, bandwidth, latency)


def _begin(comm, scope):
    _placed.join(comm, scope)
    if "torch" in sys.modules:
        sys.modules["torch"].autograd.set_multithreading_enabled(False)  # of this thread, which ends with the rank


def _end(comm):
    for end in ends:
        end(comm)
