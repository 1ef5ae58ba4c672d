"""Weft's messages as operations of a torch.distributed process group: gloo's for memory of CPUs, NCCL's for that of GPUs."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import re
import socket
import threading
import time
import weakref
from typing import Any, Callable, ContextManager, Dict, List, Optional, Set, Tuple, TypeVar

import torch
import torch.distributed as dist

from .._arrays import error
from .._core import Error

T = TypeVar("T")

# Weft's tags are far from those that users choose. No message has the last one.
_FIRST_TAG, _TAGS = 1 << 30, (1 << 30) - 2
_UNUSED_TAG = _FIRST_TAG + _TAGS
_CAUSE = "weft: first failure"  # in the store of the group
_PROCESS = "weft: process of rank {}"  # the same
_WAITS = "weft: rank {} waits for"  # the same
_STORE_SECONDS = 2.0  # that an error waits for the store, which may live in the process that is lost
_SHOWN_CALLS = 4  # of the record, in an error


def _words(e: BaseException) -> str:
    """What gloo says, without the line of its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(e)).strip().rstrip(".")


_jobs: Optional[queue.SimpleQueue[Any]] = None  # jobs of the thread that waits on behalf of the main thread


def _serve(jobs: Any) -> None:
    while True:
        call, answer, done = jobs.get()
        try:
            answer.append((call(), None))
        except BaseException as e:  # raised again in the thread that waits
            answer.append((None, e))
        del call, answer
        done.release()


def _forget_thread() -> None:  # also after a fork, which does not copy threads
    global _jobs
    _jobs = None


os.register_at_fork(after_in_child=_forget_thread)


def _interruptibly(call: Callable[[], T]) -> T:
    """call(), so that signals are handled meanwhile: Python does that in the main thread alone, and not while gloo waits."""
    global _jobs
    if threading.current_thread() is not threading.main_thread():
        return call()
    if _jobs is None:
        _jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(_jobs,), name="weft.torch waits for gloo", daemon=True).start()
    answer: List[Any] = []
    done = threading.Lock()
    done.acquire()
    _jobs.put((call, answer, done))
    try:
        done.acquire()  # a signal handler may run and raise here
    except BaseException as e:
        _forget_thread()  # that thread may wait for long
        raise _Interrupted(done) from e
    result, raised = answer.pop()
    if raised is not None:
        raise raised
    return result


class _Interrupted(BaseException):
    """What interrupted is its cause; `done` is released when nobody waits any more."""

    def __init__(self, done: threading.Lock) -> None:
        self.done = done


class _Handle:
    """Sends and receives in flight. Once connections are closed, their memory is not touched any more."""

    def __init__(self, transport: Transport, works: List[Any]) -> None:
        self.transport, self.works = transport, works

    def wait(self) -> None:
        if not self.works:
            return
        try:
            failure = _interruptibly(self._wait)
        except _Interrupted as e:
            interrupt = e.__cause__
            self.transport.fail(f"was interrupted ({type(interrupt).__name__})")
            e.done.acquire(timeout=5)  # connections are closed, so this returns soon
            self.works = []
            assert interrupt is not None
            raise interrupt from None
        if failure is not None:
            raise failure

    def _wait(self) -> Optional[Error]:
        """None, or the error."""
        ends = time.monotonic() + self.transport.time_limit
        while self.works:
            peer, work = self.works[0]
            try:
                done = work.wait(datetime.timedelta(seconds=max(ends - time.monotonic(), 1e-3)))
                text = "it was given up"
            except RuntimeError as e:
                done, text = False, _words(e)
            del work  # a traceback would keep it alive
            if not done:
                if time.monotonic() >= ends - 0.01:
                    failure = self.transport.waited("", [peer])
                else:
                    failure = self.transport.fail(f"lost rank {self.transport.named(peer, text)}")
                self.works = []
                return failure
            self.works.pop(0)
        return None

    def abandon(self) -> None:
        """Gives the messages up: afterwards nobody may touch their memory."""
        if self.works:
            self.transport.fail("gave up an exchange after an error")
            self.works = []


class _GpuHandle:
    """Operations of NCCL, which are ordered in a stream: to wait for them is that the stream does."""

    def __init__(self, transport: Transport, works: List[Any], tensors: Any, place: Tuple[int, int], peers: List[int]) -> None:
        self.transport, self.works, self.tensors, self.place, self.peers = transport, works, tensors, place, peers

    def wait(self) -> None:
        works, self.works = self.works, []
        try:
            with _in_stream(*self.place):
                for work in works:
                    work.wait()
                if works:
                    self.transport.watch.see(self.place[0], self.peers)
        except RuntimeError as e:  # what torch's watchdog has found
            ranks = ", ".join(map(self.transport.named, self.peers))
            raise self.transport.fail(f"lost one of the ranks {ranks} on GPU {self.place[0]} ({_words(e)})") from None
        finally:
            self.tensors = []

    abandon = wait


class _Watch:
    """Looks after the last messages of NCCL: a stream that has not come past them within the time limit never will.

    Nobody else would notice soon: the CPU has gone on, or waits for the stream, and torch gives up when its own, longer limit
    has passed. The event is asked only when the limit has passed, because a question may disturb the capture of a graph.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = weakref.ref(transport)
        self.last: Optional[Tuple[float, Any, int, List[int]]] = None  # since when, what is recorded behind them, GPU, peers
        self.events: Dict[int, Any] = {}  # by GPU
        self.runs = False

    def see(self, device: int, peers: List[int]) -> None:
        """Messages from and to these peers have been put into the current stream."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        event = self.events.get(device)
        if event is None:
            event = self.events[device] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self.last = time.monotonic(), event, device, peers
        if not self.runs:
            self.runs = True
            threading.Thread(target=self._look, name="weft.torch watches NCCL", daemon=True).start()

    def _look(self) -> None:
        pause = 0.05
        while pause > 0:
            time.sleep(pause)
            pause = self._next_look()

    def _next_look(self) -> float:
        """Seconds until the next look; 0 if there is nothing to look after any more."""
        transport, last = self.transport(), self.last
        if transport is None or transport.broken:
            return 0.0
        if last is not None and time.monotonic() - last[0] >= transport.time_limit:
            if not last[1].query():
                self._give_up(transport, *last[2:])
                return 0.0
            if self.last is last:
                self.last = None
        return min(transport.time_limit / 4, 1.0)

    @staticmethod
    def _give_up(transport: Transport, device: int, peers: List[int]) -> None:
        transport.waited(f"on GPU {device} ", peers)
        with contextlib.suppress(AttributeError, RuntimeError):  # torch before 2.6: its watchdog ends the process
            transport.group.abort()  # the stream goes on, and what follows raises


def _in_stream(device: int, stream: int) -> ContextManager[Any]:
    if torch.cuda.current_stream(device).cuda_stream == stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device))


def _tag(number: int, size: int) -> int:
    """Of the number-th message between two ranks. One of another size is not taken for it: gloo would end the process if it
    were longer, and say nothing if it were shorter."""
    return _FIRST_TAG + (number * 1000003 + size) % _TAGS


class Transport:
    """Messages as point-to-point operations. Between two ranks they are numbered, so that they are matched in order."""

    def __init__(self, group: Any, time_limit: float) -> None:
        self.group, self.time_limit = group, time_limit
        self.rank, self.ranks = group.rank(), group.size()
        self.on_cpus = backend_of(group, "cpu") is not None
        self.sent, self.received = [0] * self.ranks, [0] * self.ranks
        self.exchanges = 0
        self.broken: Optional[str] = None
        self.failure: Optional[Error] = None  # with which it broke
        self.mute = False  # the store did not answer once
        self.met: Set[int] = set()  # GPUs on which NCCL has been initialized
        self.watch = _Watch(self)
        self.calls: Callable[[], str] = str  # the last calls, a line each
        self._store(lambda store: store.set(_PROCESS.format(self.rank), f"pid {os.getpid()} on {socket.gethostname()}"))

    def exchange(self, sends: Any, receives: Any) -> _Handle:
        if self.broken:
            raise error(self.broken, "make a new process group")
        if (sends or receives) and not self.on_cpus:  # before any message is sent, so the group can still be used
            raise error(f"the process group {self.group.group_name} moves no tensors of CPUs ({dist.get_backend(self.group)})",
                        "make one with backend 'gloo' or 'cpu:gloo,cuda:nccl', or use tensors on GPUs")
        self.exchanges += 1
        works = []
        try:
            for peer, data in receives:
                works.append((peer, self.group.recv([torch.from_numpy(data)], peer, _tag(self.received[peer], data.nbytes))))
                self.received[peer] += 1
            for peer, data in sends:
                works.append((peer, self.group.send([torch.from_numpy(data)], peer, _tag(self.sent[peer], data.nbytes))))
                self.sent[peer] += 1
        except RuntimeError as e:
            failure = self.fail(f"lost rank {self.named(peer, _words(e))}")
            works.clear()
            raise failure from None
        return _Handle(self, works)

    def meet_on_gpu(self, device: int) -> None:
        """Before the first messages, which need not concern all ranks: NCCL begins with all of them, or hangs."""
        if device not in self.met:
            if torch.cuda.is_current_stream_capturing():
                raise error(f"the first call over {self.ranks} ranks on GPU {device} is inside the capture of a CUDA graph, "
                            "where NCCL cannot begin", "make one such call outside of the capture first, as graphs are warmed up")
            dist.all_reduce(torch.zeros(1, device=torch.device("cuda", device)), group=self.group)
            self.met.add(device)

    def exchange_on_gpu(self, sends: Any, receives: Any, device: int, stream: int) -> _GpuHandle:
        if self.broken:
            raise self._again()
        self.exchanges += 1
        sends, receives = ([(peer, torch.from_dlpack(data)) for peer, data in some] for some in (sends, receives))
        operations = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
        operations += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        try:
            with _in_stream(device, stream):
                works = dist.batch_isend_irecv(operations)
        except RuntimeError as e:
            raise self.fail(f"could not start messages on GPU {device} ({_words(e)})") from None
        return _GpuHandle(self, works, (sends, receives), (device, stream), sorted({peer for peer, _ in (*sends, *receives)}))

    def collective_on_gpu(self, kind: str, sent: Any, sent_bytes: List[int], received: Any, received_bytes: List[int],
                          device: int, stream: int) -> _GpuHandle:
        """all_gather, reduce_scatter of f32, or all_to_all, by torch's own, of bytes in the order of ranks."""
        if self.broken:
            raise self._again()
        self.exchanges += 1
        mine, into = torch.from_dlpack(sent), torch.from_dlpack(received)
        try:
            with _in_stream(device, stream):
                if kind == "all_gather":
                    work = dist.all_gather_into_tensor(into, mine, group=self.group, async_op=True)
                elif kind == "reduce_scatter":
                    work = dist.reduce_scatter_tensor(into.view(torch.float32), mine.view(torch.float32), group=self.group,
                                                      async_op=True)
                else:
                    work = dist.all_to_all_single(into, mine, received_bytes, sent_bytes, group=self.group, async_op=True)
        except RuntimeError as e:
            raise self.fail(f"could not start {kind} on GPU {device} ({_words(e)})") from None
        return _GpuHandle(self, [work], (mine, into), (device, stream), [r for r in range(self.ranks) if r != self.rank])

    def _again(self) -> Error:
        """The error of a call after the one that failed, which the watch may have found, so that nobody has seen it yet."""
        assert self.failure is not None
        return error(self.failure.problem, self.failure.remedy)

    def fail(self, text: str, slow: bool = False) -> Error:
        """The error of this rank, after which nobody waits for it: others that do end at once, and learn how it began.

        slow: a time limit passed. A process that is stopped stays then, and somebody has to end it.
        """
        self.broken = f"rank {self.rank} {text}"
        first = self._first_failure()
        if first and first != self.broken:
            self.broken += f"; before that, {first}"
        # A wait that times out is the only way to make gloo close all connections of a group.
        for peer in range(self.ranks):
            if peer != self.rank:
                try:
                    nothing = self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG)
                    nothing.wait(datetime.timedelta(milliseconds=1))
                except RuntimeError:
                    pass  # the connection is closed
        last = "; ".join(self.calls().splitlines()[-_SHOWN_CALLS:])
        problem = f"{self.broken} (last calls: {last})" if last else self.broken
        hint = "see what became of it"
        if slow:
            hint = "it is slow, has gone, or was given another problem (checked=True finds out)"
            process = re.findall(r"pid (\d+) on ([^,)]+)", text)
            if process:
                hint += "; if it still runs, it has to be ended: kill -9 {} on {}".format(*process[-1])
        self.failure = error(problem, f"{hint}; the process group cannot be used any more")
        return self.failure

    def waited(self, where: str, peers: List[int]) -> Error:
        """The error after the time limit. A rank that is waited for may wait itself, for the one that is to blame."""
        text = f"waited {self.time_limit:g} seconds {where}for rank{'s' if len(peers) > 1 else ''} "
        text += ", ".join(self.named(peer) for peer in peers)
        if len(peers) == 1:
            self._store(lambda store: store.set(_WAITS.format(self.rank), str(peers[0])))
            time.sleep(0.2)  # others whose limit has passed say so meanwhile
            chain = [self.rank, peers[0]]
            while True:
                said = self._said(_WAITS.format(chain[-1]))
                if said is None or int(said) in chain:
                    break
                chain.append(int(said))
                text += f", which waits for rank {self.named(chain[-1])}"
        return self.fail(text, slow=True)

    def named(self, peer: int, text: str = "") -> str:
        """A rank with its process, as far as that is known."""
        known = ", ".join(x for x in (self._process_of(peer), text) if x)
        return f"{peer} ({known})" if known else str(peer)

    def _process_of(self, peer: int) -> Optional[str]:
        return self._said(_PROCESS.format(peer))

    def _said(self, key: str) -> Optional[str]:
        return self._store(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _first_failure(self) -> Optional[str]:
        """What the first rank that failed said; it is this one's if nobody has."""
        return self._store(lambda store: store.compare_set(_CAUSE, "", self.broken).decode())

    def _store(self, ask: Callable[[Any], T]) -> Optional[T]:
        """What the group's store answers; None if it does not, because it lived in a process that is lost."""
        if self.mute:
            return None
        answer: List[T] = []

        def asked() -> None:
            with contextlib.suppress(AttributeError, KeyError, RuntimeError):
                answer.append(ask(dist.distributed_c10d._get_process_group_store(self.group)))

        thread = threading.Thread(target=asked, name="weft.torch asks the store", daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        self.mute = thread.is_alive()
        return answer[0] if answer else None


def backend_of(group: Any, kind: str) -> Optional[str]:
    """The name of what moves tensors of "cpu" or "cuda"; None if nothing does."""
    try:
        return group._get_backend(torch.device(kind)).name()
    except RuntimeError:
        return None
