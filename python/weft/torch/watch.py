"""A thread that looks after the messages of a process group in which nobody else would notice that they do not come."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch

STORE_SECONDS = 2.0  # that an error waits for the store, which may live in the process that is lost
_PATIENCE = 1.0  # seconds that a rank waits before it compares what it computes with the ranks that it waits for
_SELDOM = 16.0  # seconds between such questions where nobody may be waiting: a GPU may have done its calls long ago

_threads: List[threading.Thread] = []  # of watches
_exits = threading.Event()


def _end_threads() -> None:
    """A thread must not be in a call of torch when the interpreter ends."""
    _exits.set()
    for thread in _threads:
        thread.join(STORE_SECONDS)


atexit.register(_end_threads)


class Watch:
    """Looks after the last messages of NCCL, and tells others what this rank is at when they ask (roll_call.py).

    NCCL connects two ranks when they first have messages for each other: the call that hands these over does not return before
    the other rank has made its own, so such a call is looked after too.

    A stream that has not come past its messages within the time limit never will, and nobody else would notice soon: the CPU
    has gone on, or waits for the stream, and torch gives up when its own, longer limit has passed. The event is asked only
    when the limit has passed, because a question may disturb the capture of a graph. The store is asked only after a while
    without a call: then this rank waits, or others may wait for it.
    """

    def __init__(self, transport: Any) -> None:
        self.transport = weakref.ref(transport)
        self.last: Optional[Tuple[float, Any, int, List[int]]] = None  # since when, what is recorded behind them, GPU, peers
        self.events: Dict[int, Any] = {}  # by GPU
        self.runs = self.answered = False
        # Of the last question: `touched` as it was then, and after how many seconds without a call the next one is due.
        self.asked = 0.0, _PATIENCE

    def start(self) -> None:
        if self.runs:
            return
        self.runs = True
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        _threads.append(threading.Thread(target=self._look, name="weft.torch watches ranks", daemon=True))
        _threads[-1].start()

    def see(self, device: int, peers: List[int]) -> None:
        """Messages from and to these peers have been put into the current stream."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        event = self.events.get(device)
        if event is None:
            event = self.events[device] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self.last = time.monotonic(), event, device, peers

    def _look(self) -> None:
        pause = 0.05
        while pause > 0 and not _exits.wait(pause):
            pause = self._next_look()

    def _is_due(self, quiet: float, since: float, limit: float) -> bool:
        """Whether to ask others now, after so many seconds without a call: the longer those are, the more seldom."""
        patience = self.asked[1] if self.asked[0] == since else min(limit / 2, _PATIENCE)
        due = quiet >= patience
        self.asked = since, patience + min(patience, _SELDOM) if due else patience
        return due

    def _next_look(self) -> float:
        """Seconds until the next look; 0 if there is nothing to look after any more."""
        transport, last = self.transport(), self.last
        if transport is None or transport.broken:
            return 0.0
        now, launching = time.monotonic(), transport.launching
        if launching is not None:
            # No event is asked meanwhile: that could wait for the same lock of CUDA.
            began, device, peers = launching
            if now - began >= transport.time_limit:
                transport.waited(f"in a call of NCCL on GPU {device} ", peers)
                transport.abort()
                return 0.0
        elif last is not None and now - last[0] >= transport.time_limit:
            if not last[1].query():
                transport.waited(f"on GPU {last[2]} ", last[3])
                transport.abort()
                return 0.0
            if self.last is last:
                self.last = None
        under_way = launching[1:] if launching is not None else last[2:] if last is not None else None
        if under_way is not None and transport.has_nccl_error():
            transport.lost_on_gpu(under_way[1], under_way[0], "NCCL tells of an error")
            return 0.0
        quiet = min(transport.time_limit / 2, 1.0 if transport.on_gpus else 5.0)
        if not self.answered and now - transport.touched >= quiet:
            self.answered = transport.answer()
        if transport.waiting and now - transport.touched >= min(transport.time_limit / 2, _PATIENCE):
            transport.compare()
        elif (under_way is not None and self._is_due(now - transport.touched, transport.touched, transport.time_limit)
              and transport.compare_on_gpu(under_way[1], lambda: launching is not None or last is None or not last[1].query())):
            transport.abort()
            return 0.0
        if last is None and transport.gone:
            return 0.0
        return min(transport.time_limit / 4, 0.25 if transport.on_gpus else 1.0)
