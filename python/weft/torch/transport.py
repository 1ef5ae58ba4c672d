"""Weft's messages as operations of a torch.distributed process group: gloo's for memory of CPUs, NCCL's for that of GPUs."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import re
import threading
import time
from typing import Any, Callable, Iterator, List, Optional, Sequence, Set, Tuple, TypeVar

import torch
import torch.distributed as dist

from .._arrays import error
from .._core import Error
from . import gpu_calls, roll_call
from .watch import STORE_SECONDS, Watch

T = TypeVar("T")

# Weft's tags are far from those that users choose. No message has the last one.
_FIRST_TAG, _TAGS = 1 << 30, (1 << 30) - 2
_UNUSED_TAG = _FIRST_TAG + _TAGS
_CAUSE = "weft: first failure"  # in the store of the group
_MEETING_PAUSES = 0.01, 1.0  # seconds between questions whether all have come: the first, which doubles, and the longest
_ABORT_SECONDS = 10.0  # that NCCL has to end its communicators; streams go on at once
_SHOWN_CALLS = 4  # of the record, in an error
_COMPARED = 4  # neighbours that a rank asks; enough, because where any two ranks differ, some two neighbours do
_SAME_PROBLEM, _OTHER_RANK = "give every rank the same problem, options and calls", "see to the rank that failed first"


def _words(e: BaseException) -> str:
    """What gloo or NCCL says, on one line, without that of its source."""
    return " ".join(re.sub(r"^\[\S+:\d+\] ", "", str(e)).split()).rstrip(".")


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
        self.transport.waiting = sorted({peer for peer, _ in self.works})
        failure = self._wait_until(ends)
        self.transport.waiting, self.transport.touched = [], time.monotonic()
        return failure

    def _wait_until(self, ends: float) -> Optional[Error]:
        while self.works:
            peer, work = self.works[0]
            try:
                done = work.wait(datetime.timedelta(seconds=max(ends - time.monotonic(), 1e-3)))
                text = "it was given up"
            except RuntimeError as e:
                done, text = False, _words(e)
            del work  # a traceback would keep it alive
            if not done:
                if self.transport.broken:  # the watch was sooner
                    failure = self.transport._again()
                elif time.monotonic() >= ends - 0.01:
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


def _nearest(rank: int, ranks: int, peers: Sequence[int]) -> List[int]:
    """Those that follow or precede a rank, at most _COMPARED: so all ranks together ask the store for few things."""
    return sorted(peers, key=lambda peer: min((peer - rank) % ranks, (rank - peer) % ranks))[:_COMPARED]


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
        self.on_gpus = backend_of(group, "cuda") == "nccl"
        self.mute = False  # the store did not answer once
        self.gone = False  # the group has been destroyed
        self.met: Set[int] = set()  # GPUs on which NCCL has been initialized
        self.waiting: List[int] = []  # for these ranks, on the CPU
        # Since when NCCL is being given messages, of which GPU, with which ranks. It waits there for those that it has not met.
        self.launching: Optional[Tuple[float, int, List[int]]] = None
        self.touched = time.monotonic()  # when a call began or ended
        self.watch = Watch(self)
        self.calls: Callable[[], str] = str  # the last calls, a line each
        self.fingerprint: Callable[[], str] = str  # of the pass that this rank is in
        # In words, how it differs from those of other ranks in the same pass; "" if it does not.
        self.disagreement: Callable[[List[Tuple[int, str]]], str] = lambda others: ""
        self._failing = threading.RLock()
        self._store(lambda store: roll_call.sign(store, self.rank))

    def exchange(self, sends: Any, receives: Any) -> _Handle:
        if self.broken:
            raise error(self.broken, "make a new process group")
        if (sends or receives) and not self.on_cpus:  # before any message is sent, so the group can still be used
            raise error(f"the process group {self.group.group_name} moves no tensors of CPUs ({dist.get_backend(self.group)})",
                        "make one with backend 'gloo' or 'cpu:gloo,cuda:nccl', or use tensors on GPUs")
        self._count()
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
            self.meet_in_store(f"to begin with NCCL on GPU {device}", len(self.met))
            try:
                dist.all_reduce(torch.zeros(1, device=torch.device("cuda", device)), group=self.group)
                torch.cuda.current_stream(device).synchronize()
            except RuntimeError as e:
                raise self.lost_on_gpu([r for r in range(self.ranks) if r != self.rank], device, e) from None
            self.met.add(device)

    def meet_in_store(self, purpose: str, number: int) -> None:
        """Returns when all ranks have come here: what begins with all of them has no time limit, and nothing can end it."""
        if self.broken:
            raise self._again()
        self._count()
        key, until, pause = f"weft: meet {number}", time.monotonic() + self.time_limit, _MEETING_PAUSES[0]
        # A store that outlives the group has counted its meetings, too.
        all_here = -(-(self._store(lambda store: store.add(key, 1)) or 1) // self.ranks) * self.ranks
        while True:
            met = self._store(lambda store: (store.add(key, 0) >= all_here, store.check([_CAUSE])))
            if met is None or met[0]:  # a store that does not answer holds up nobody
                return
            if met[1]:
                raise self.fail("cannot go on", hint=_OTHER_RANK)
            if time.monotonic() > until:
                raise self.waited(f"{purpose} ", [r for r in range(self.ranks) if r != self.rank])
            time.sleep(pause)
            pause = min(2 * pause, _MEETING_PAUSES[1], max(0.01, self.time_limit / 4))

    def exchange_on_gpu(self, sends: Any, receives: Any, device: int, stream: int) -> gpu_calls.Handle:
        if self.broken:
            raise self._again()
        self._count()
        sends, receives = ([(peer, torch.from_dlpack(data)) for peer, data in some] for some in (sends, receives))
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        with self._launch(device, stream, peers):
            works = gpu_calls.exchange(self.group, sends, receives)
        return self._handle(works, (sends, receives), (device, stream), peers)

    def collective_on_gpu(self, kind: str, sent: Any, sent_bytes: List[int], received: Any, received_bytes: List[int],
                          device: int, stream: int, signs: Optional[Tuple[Any, Any]] = None) -> gpu_calls.Handle:
        """all_gather, reduce_scatter of f32, or all_to_all, by torch's own, of bytes in the order of ranks.

        signs: the fingerprints of this rank and of all, in memory of the host that the GPU reaches; an all_gather brings them
        along in the same launch.
        """
        if self.broken:
            raise self._again()
        self._count()
        tensors = [torch.from_dlpack(x) for x in (sent, received, *(signs or ()))]
        peers = [r for r in range(self.ranks) if r != self.rank]
        with self._launch(device, stream, peers):
            work = gpu_calls.collective(self.group, kind, tensors, sent_bytes, received_bytes)
        return self._handle([work], tensors, (device, stream), peers)

    def _handle(self, works: List[Any], tensors: Any, place: Tuple[int, int], peers: List[int]) -> gpu_calls.Handle:
        handle = gpu_calls.Handle(self, works, tensors, place, peers)
        if self.broken:  # meanwhile; the caller's memory is NCCL's until the stream has come past the call
            handle.wait()
            raise self._again()
        return handle

    @contextlib.contextmanager
    def _launch(self, device: int, stream: int, peers: List[int]) -> Iterator[None]:
        """Around a call of NCCL, in that stream: the watch ends one that does not return."""
        # torch's own watchdog, once it has found an error, holds the next call for as long as it waits for others to tell
        # what they know (TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, four times 15 s).
        if self.has_nccl_error():
            raise self._nccl_error()
        self.launching = time.monotonic(), device, peers
        try:
            with gpu_calls.in_stream(device, stream):
                yield
        except RuntimeError as e:
            raise self.lost_on_gpu(peers, device, e) from None
        finally:
            self.launching = None

    def _count(self) -> None:
        """A call begins."""
        self.exchanges += 1
        self.touched = time.monotonic()
        if self.ranks > 1:
            self.watch.start()

    def _again(self) -> Error:
        """The error of a call after the one that failed, which the watch may have found, so that nobody has seen it yet."""
        assert self.failure is not None
        return error(self.failure.problem, self.failure.remedy)

    def fail(self, text: str, slow: bool = False, blame: Sequence[int] = (), hint: str = "see what became of it") -> Error:
        """The error of this rank, after which nobody waits for it: others that do end at once, and learn how it began.

        slow: a time limit passed. A process that is stopped stays then, and somebody has to end it. blame: the ranks that are
        the reason.
        """
        with self._failing:  # the watch and the thread that waits may both have found something
            return self._again() if self.broken else self._fail(text, slow, blame, hint)

    def _fail(self, text: str, slow: bool, blame: Sequence[int], hint: str) -> Error:
        broken = f"rank {self.rank} {text}"
        first = self._first_failure(broken)
        if first and first != broken:
            broken += f"; before that, {first}"
        # A wait that times out is the only way to make gloo close all connections of a group.
        for peer in range(self.ranks):
            if peer != self.rank:
                try:
                    nothing = self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG)
                    nothing.wait(datetime.timedelta(milliseconds=1))
                except RuntimeError:
                    pass  # the connection is closed
        last = "; ".join(self.calls().splitlines()[-_SHOWN_CALLS:])
        problem = f"{broken} (last calls: {last})" if last else broken
        if slow:
            hint = "it is slow, has gone, or makes other calls"
            process = self._process_of(blame[0]) if blame else None
            if process:
                hint += "; if it still runs, it has to be ended: kill -9 {1} {2} {3}".format(*process.split(maxsplit=3))
                if f"rank {blame[0]} ({process}) is stopped" in text:
                    hint += " (or let it go on, and it ends with an error of its own: kill -CONT {1})".format(*process.split())
        self.failure = failure = error(problem, f"{hint}; the process group cannot be used any more")
        self.broken = broken  # last, because another thread that sees it takes the failure
        return failure

    def waited(self, where: str, peers: List[int]) -> Error:
        """The error after the time limit. A rank that is waited for may wait itself, for the one that is to blame."""
        text = f"waited {self.time_limit:g} seconds {where}for rank{'s' if len(peers) > 1 else ''} "
        text += ", ".join(self.named(peer) for peer in peers) + roll_call.waiting_call(self.calls())
        said, blame = self._ask(peers)
        return self.fail(f"{text}; {said}" if said else text, slow=True, blame=blame or peers)

    def lost_on_gpu(self, peers: List[int], device: int, reason: Any) -> Error:
        """The error after one of torch or NCCL, which does not say whose fault it is."""
        if self.broken:  # the watch was sooner
            return self._again()
        ranks = ", ".join(map(str, peers))
        # The end of a batch tells of NCCL's errors without a type of their own.
        of_nccl = isinstance(reason, getattr(dist, "DistError", RuntimeError)) or re.search(r"\bNCCL\b", str(reason))
        if isinstance(reason, RuntimeError) and not of_nccl:
            return self.fail(f"could not exchange messages with ranks {ranks} on GPU {device} ({_words(reason)})")
        words = _words(reason) if isinstance(reason, BaseException) else reason
        said, blame = self._ask([])
        failure = self.fail(f"lost one of the ranks {ranks} on GPU {device}; {said} ({words})", blame=blame)
        self.abort()
        return failure

    def abort(self) -> None:
        """Lets the streams go on that wait for NCCL; what follows raises."""
        def call() -> None:
            with contextlib.suppress(AttributeError, RuntimeError):  # torch before 2.6: its watchdog ends the process
                self.group.abort()

        thread = threading.Thread(target=call, name="weft.torch aborts NCCL", daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)

    def check(self) -> None:
        """Raises if calls on GPUs were given up since they began, here or by another rank."""
        if not self.broken and self.met:
            if self.has_nccl_error():
                raise self._nccl_error()
            if self._store(lambda store: store.check([_CAUSE])):
                self.fail("cannot go on", hint=_OTHER_RANK)
                self.abort()
        if self.broken:
            raise self._again()

    def disagree(self, words: str) -> None:
        """Raises, because fingerprints that came with messages of GPUs differ."""
        if self.broken:  # where NCCL was given up, those of an earlier pass may lie there
            raise self._again()
        if self.has_nccl_error():
            raise self._nccl_error()
        failure = self.fail(f"cannot go on: {words}", hint=_SAME_PROBLEM)
        self.abort()
        raise failure

    def _nccl_error(self) -> Error:
        return self.lost_on_gpu([r for r in range(self.ranks) if r != self.rank], min(self.met, default=0),
                                "NCCL tells of an error")

    def has_nccl_error(self) -> bool:
        """What torch's watchdog has found; it waits before it ends the process."""
        try:
            found = self.group._get_backend(torch.device("cuda")).get_error()
        except (AttributeError, RuntimeError):  # torch before 2.7
            return False
        return bool(getattr(found, "name", "SUCCESS") != "SUCCESS")

    def _state(self, waits: List[int], failed: bool = False) -> roll_call.State:
        return roll_call.state_of(self.calls(), waits, failed, self.fingerprint())

    def answer(self) -> bool:
        """Tells others what this rank is at, if one asks; whether it has."""
        def told(store: Any) -> bool:
            asked = roll_call.is_asked(store)
            if asked:
                roll_call.answer(store, self.rank, self._state(self.waiting))
            return asked

        return bool(self._store(told))

    def _ask(self, peers: List[int]) -> Tuple[str, List[int]]:
        """What the other ranks are at, in words, and those that are to blame."""
        state = self._state(peers)
        self.watch.answered = True
        answers = self._store(lambda store: roll_call.ask(store, self.rank, self.ranks, state), roll_call.SECONDS)
        if answers is None:
            return "the group's store does not answer; the process of its first rank may have held it" if self.mute else "", []
        said, blame = roll_call.report(self.rank, self.ranks, state, answers)
        differ = self.disagreement([(peer, other.fingerprint) for peer, other in answers.states.items()])
        return f"{differ}; {said}" if differ else said, blame

    def compare(self) -> None:
        """Breaks the connections if a rank that this one waits for is in the same pass with another problem: their messages
        have other sizes, and would not meet before the time limit."""
        differ, _ = self._others(list(self.waiting))
        if differ and self.waiting:
            self.fail(f"cannot go on: {differ}", hint=_SAME_PROBLEM)

    def compare_on_gpu(self, peers: Sequence[int], waits: Callable[[], bool]) -> bool:
        """The same for ranks of calls in a stream, where also nobody else notices that another rank has given up. Whether it
        broke them. waits: whether the stream still waits for those calls."""
        differ, failed = self._others(_nearest(self.rank, self.ranks, peers))
        if differ:
            self.fail(f"cannot go on: {differ}", hint=_SAME_PROBLEM)
        elif failed and waits():
            self.fail("cannot go on", hint=_OTHER_RANK)
        return bool(self.broken)

    def _others(self, peers: List[int]) -> Tuple[str, bool]:
        """How some ranks differ from this one that are in the same pass; and whether any rank has failed."""
        mine = self.fingerprint()

        def asked(store: Any) -> Tuple[List[Tuple[int, str]], bool]:
            return roll_call.passes(store, self.rank, mine, peers) if mine else [], bool(store.check([_CAUSE]))

        others, failed = (self._store(asked) or ([], False)) if peers else ([], False)
        return self.disagreement(others), failed

    def named(self, peer: int, text: str = "") -> str:
        """A rank with its process, as far as that is known."""
        known = ", ".join(x for x in (self._process_of(peer), text) if x)
        return f"{peer} ({known})" if known else str(peer)

    def _process_of(self, peer: int) -> Optional[str]:
        return self._store(lambda store: roll_call.process_of(store, peer))

    def _first_failure(self, mine: str) -> Optional[str]:
        """What the first rank that failed said; it is this one's if nobody has."""
        state = None if self.watch.answered else self._state([], failed=True)  # this rank's watch ends

        def asked(store: Any) -> str:
            if state is not None:
                roll_call.answer(store, self.rank, state)
            return str(store.compare_set(_CAUSE, "", mine).decode())

        return self._store(asked)

    def _store(self, ask: Callable[[Any], T], seconds: float = 0.0) -> Optional[T]:
        """What the group's store answers; None if it does not, because it lived in a process that is lost.
        seconds: that the question takes by itself."""
        if self.mute:
            return None
        answer: List[T] = []

        def asked() -> None:
            with contextlib.suppress(AttributeError, RuntimeError):
                try:
                    store = dist.distributed_c10d._get_process_group_store(self.group)
                except KeyError:
                    self.gone = True
                    return
                answer.append(ask(store))

        thread = threading.Thread(target=asked, name="weft.torch asks the store", daemon=True)
        thread.start()
        thread.join(STORE_SECONDS + seconds)
        self.mute = thread.is_alive()
        return answer[0] if answer else None


def backend_of(group: Any, kind: str) -> Optional[str]:
    """The name of what moves tensors of "cpu" or "cuda"; None if nothing does."""
    try:
        return group._get_backend(torch.device(kind)).name()
    except RuntimeError:
        return None
