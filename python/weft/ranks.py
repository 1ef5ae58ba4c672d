"""Ranks that are threads of this process."""

from . import _core


def spawn(ranks, fn, *, time_limit=300.0, bandwidth=0.0, latency=0.0):
    """Runs fn(comm) on `ranks` threads and returns the list of what they return: for tests and notebooks.

    An exception of fn is raised here, and ranks that wait for the one that failed end too. A communicator ends with
    spawn, so call backward inside fn. bandwidth (bytes a second into each rank) and latency (seconds a call) make a
    slower link, to see what would overlap; 0 is as fast as memory.

        >>> import weft
        >>> weft.spawn(3, lambda comm: comm.rank * 10)
        [0, 10, 20]
    """
    return _core.spawn(ranks, fn, time_limit, bandwidth, latency)
