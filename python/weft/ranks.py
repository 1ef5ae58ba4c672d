"""Ranks that are threads of this process."""

import sys
import time
from typing import Any, Callable, List

from . import _core, _placed
from ._core import Communicator

ends: List[Callable[[Communicator], Any]] = [_placed.leave]  # called with a rank's communicator when the rank ends


def spawn(ranks: int, fn: Callable[[Communicator], Any], *, time_limit: float = 300.0, bandwidth: float = 0.0,
          latency: float = 0.0) -> List[Any]:
    """Runs fn(comm) on `ranks` threads and returns the list of what they return: for tests and notebooks.

    An exception of fn is raised here, and ranks that wait for the one that failed end too. A communicator ends with
    spawn, so call backward inside fn. On a GPU the ranks share it, or have one each; a backward of torch runs in its rank's
    thread, not in that of the device, where ranks would wait for each other. bandwidth (bytes a second into each rank) and
    latency (seconds a call) make a slower link, to see what would overlap; 0 is as fast as memory.

    Ctrl-C ends it: ranks that run Python code get a KeyboardInterrupt, and those that wait for others end with an Error. A
    rank that is in a long call (of the operating system, or computing) goes on alone until that returns.

        >>> import weft
        >>> weft.spawn(3, lambda comm: comm.rank * 10)
        [0, 10, 20]
    """
    scope = _placed.Scope()
    run = _core.Ranks(ranks, fn, lambda comm: _begin(comm, scope), _end, time_limit, bandwidth, latency)
    try:
        run.start()
        while not run.wait(0.1):  # Python handles signals between the calls
            pass
    except BaseException as e:  # raised by a signal handler: Ctrl-C
        run.stop()
        _wait_for_a_while(run, e)
        del run  # it holds the ranks' exceptions, whose tracebacks hold this frame
        raise
    return run.results()


def _wait_for_a_while(run: Any, e: BaseException) -> None:
    ends = time.monotonic() + 1
    while not run.wait(0.05):
        if time.monotonic() > ends:
            if hasattr(e, "add_note"):
                e.add_note("ranks of weft.spawn are in calls that cannot be interrupted, and end when these return")
            return


def _begin(comm: Communicator, scope: Any) -> None:
    _placed.join(comm, scope)
    autograd: Any = getattr(sys.modules.get("torch"), "autograd", None)  # torch has none yet while another rank imports it
    if hasattr(autograd, "set_multithreading_enabled"):
        autograd.set_multithreading_enabled(False)  # for this thread only


def _end(comm: Communicator) -> None:
    for end in ends:
        end(comm)
