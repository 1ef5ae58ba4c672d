"""Ranks: a communicator over an existing torch.distributed process group, or one of weft.spawn."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import re
import threading
import time
import warnings
import weakref
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Set, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _arrays, _core, _placed, ranks
from .._arrays import error
from .._core import Communicator, Error

T = TypeVar("T")

# Weft's tags are far from those that users choose. No message has the last one.
_FIRST_TAG, _TAGS = 1 << 30, (1 << 30) - 2
_UNUSED_TAG = _FIRST_TAG + _TAGS
_CAUSE = "weft: first failure"  # in the store of the group

_communicators: Dict[str, Tuple[Any, _Transport, Communicator]] = {}  # by name of the group: (group, transport, communicator)
_making = threading.Lock()
_given: Dict[str, Communicator] = {}  # by name: communicators that were given as a group, such as those of weft.spawn
_given_by: Dict[str, int] = {}  # by the same name: the thread that gave it last
_scopes: Dict[str, Tuple[Any, Any]] = {}  # by name of the group: (weak reference to it, its scope in _placed)
_warned = False


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

    def __init__(self, transport: _Transport, works: List[Any]) -> None:
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
                    failure = self.transport.fail(f"waited {self.transport.time_limit:g} seconds for rank {peer}",
                                                  "it is slow, has gone, or was given another problem (checked=True finds out)")
                else:
                    failure = self.transport.fail(f"lost rank {peer} ({text})")
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

    def __init__(self, works: List[Any], tensors: Any, place: Tuple[int, int]) -> None:
        self.works, self.tensors, self.place = works, tensors, place

    def wait(self) -> None:
        with _in_stream(*self.place):
            for work in self.works:
                work.wait()
        self.works, self.tensors = [], []

    abandon = wait


def _in_stream(device: int, stream: int) -> ContextManager[Any]:
    if torch.cuda.current_stream(device).cuda_stream == stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device))


def _tag(number: int, size: int) -> int:
    """Of the number-th message between two ranks. One of another size is not taken for it: gloo would end the process if it
    were longer, and say nothing if it were shorter."""
    return _FIRST_TAG + (number * 1000003 + size) % _TAGS


class _Transport:
    """Messages as point-to-point operations. Between two ranks they are numbered, so that they are matched in order."""

    def __init__(self, group: Any, time_limit: float) -> None:
        self.group, self.time_limit = group, time_limit
        self.rank, self.ranks = group.rank(), group.size()
        self.on_cpus = _backend(group, "cpu") is not None
        self.sent, self.received = [0] * self.ranks, [0] * self.ranks
        self.exchanges = 0
        self.broken: Optional[str] = None
        self.met: Set[int] = set()  # GPUs on which NCCL has been initialized

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
            failure = self.fail(f"lost rank {peer} ({_words(e)})")
            works.clear()
            raise failure from None
        return _Handle(self, works)

    def meet_on_gpu(self, device: int) -> None:
        """Before the first messages, which need not concern all ranks: NCCL begins with all of them, or hangs."""
        if device not in self.met:
            dist.all_reduce(torch.zeros(1, device=torch.device("cuda", device)), group=self.group)
            self.met.add(device)

    def exchange_on_gpu(self, sends: Any, receives: Any, device: int, stream: int) -> _GpuHandle:
        if self.broken:
            raise error(self.broken, "make a new process group")
        self.exchanges += 1
        sends, receives = ([(peer, torch.from_dlpack(data)) for peer, data in some] for some in (sends, receives))
        operations = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
        operations += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        try:
            with _in_stream(device, stream):
                works = dist.batch_isend_irecv(operations)
        except RuntimeError as e:
            raise self.fail(f"could not start messages on GPU {device} ({_words(e)})") from None
        return _GpuHandle(works, (sends, receives), (device, stream))

    def fail(self, text: str, hint: str = "see what became of it") -> Error:
        """The error of this rank, after which nobody waits for it: others that do end at once, and learn how it began."""
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
        return error(self.broken, f"{hint}; the process group cannot be used any more")

    def _first_failure(self) -> Optional[str]:
        """What the first rank that failed said; it is this one's if nobody has."""
        try:
            store = dist.distributed_c10d._get_process_group_store(self.group)
            return store.compare_set(_CAUSE, "", self.broken).decode()
        except (AttributeError, RuntimeError):
            return None  # the store may have lived on the rank that is lost


def _backend(group: Any, kind: str) -> Optional[str]:
    """The name of what moves tensors of "cpu" or "cuda"; None if nothing does."""
    try:
        return group._get_backend(torch.device(kind)).name()
    except RuntimeError:
        return None


def _is_mesh(group: Any) -> bool:
    return type(group).__module__ == "torch.distributed.device_mesh" and hasattr(group, "get_group")


def _warn_of_many_processes() -> None:
    """torchrun started several, and none of them has met the others: each would take the pack for its own, in silence."""
    global _warned
    said = os.environ.get("WORLD_SIZE", "")
    if _warned or not said.isdigit() or int(said) < 2:
        return
    _warned = True
    warnings.warn(f"WORLD_SIZE is {said} and there is no process group, so this process computes the whole pack by itself, as "
                  "every other does; call torch.distributed.init_process_group first, or say that it is meant: one_rank=True "
                  'for attention, group="" for shard and the like', stacklevel=4)


def resolve(group: Any) -> Any:
    """The process group: given as one, by name, as a DeviceMesh of one dimension, or None for the default one. None if
    there is none, or for "".

    Or a weft.Communicator, which is as good as a group.
    """
    if isinstance(group, Communicator):  # a communicator of a process group stands for that group
        return next((g for g, _, c in list(_communicators.values()) if c is group), group)
    if isinstance(group, str):
        if group == "":
            return None
        if group in _given:
            return _given[group]
        try:
            return dist.distributed_c10d._resolve_process_group(group)
        except (LookupError, RuntimeError, ValueError):
            raise error(f"there is no process group named {group!r}",
                        "it may have been destroyed: give one that is there") from None
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        _warn_of_many_processes()
        return None
    if _is_mesh(group):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("cp",)
            raise error(f"a DeviceMesh of {group.ndim} dimensions ({', '.join(map(str, names))}) as a group",
                        f'give the one that sequences are spread over: mesh["{names[-1]}"]')
        return group.get_group()
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):  # new_group returns a number on ranks outside
        raise error(f"a group was expected, not {group!r}",
                    "give a torch.distributed process group that this rank is in, a DeviceMesh of one dimension, or the "
                    "communicator of weft.spawn")
    return group


def scope_of(group: Any) -> Any:
    """What layouts of the group's rows are remembered by, as long as it is there."""
    group = resolve(group)
    if group is None or isinstance(group, Communicator):
        return None if group is None else _placed.scope_of(group)
    name = group.group_name
    known = _scopes.get(name)
    if known is None or known[0]() is not group:
        # Local names, because modules may be gone at the end of the process.
        scope, gone, scopes = _placed.Scope(), _placed.gone, _scopes

        def ended(reference: Any) -> None:
            gone.append(scope)
            if scopes.get(name, (None,))[0] is reference:
                del scopes[name]

        known = _scopes[name] = weakref.ref(group, ended), scope
    return known[1]


def own_name(comm: Communicator) -> str:
    """The name of a communicator that is given as a group."""
    return f"weft.Communicator {id(comm):#x}"


ended: List[Callable[[str], None]] = []  # called with the name of a communicator that was given as a group and has ended


def _forget(comm: Communicator) -> None:
    """A rank of weft.spawn ends, and with it its communicator and all splits, which it alone has given as groups."""
    here = threading.get_ident()
    for name in {own_name(comm), *(name for name, thread in list(_given_by.items()) if thread == here)}:
        _given.pop(name, None)
        _given_by.pop(name, None)
        for end in ended:
            end(name)


ranks.ends.append(_forget)


def rank_and_ranks(group: Any) -> Tuple[int, int]:
    group = resolve(group)
    if group is None:
        return 0, 1
    return (group.rank, group.ranks) if isinstance(group, Communicator) else (group.rank(), group.size())


def name_of(group: Any) -> str:
    """The name that operators pass on; "" if there is no group."""
    group = resolve(group)
    if isinstance(group, Communicator):
        name = own_name(group)
        _given[name], _given_by[name] = group, threading.get_ident()
        return name
    return "" if group is None else group.group_name


def by_name(group: Any) -> Any:
    """A group as a layer keeps it: by name, because a layer may be copied, and a process group may not."""
    known = isinstance(group, Communicator) or _is_mesh(group) or (dist.is_available() and isinstance(group, dist.ProcessGroup))
    return name_of(group) if known else group


@contextlib.contextmanager
def all_or_nobody(group: str) -> Iterator[None]:
    """Around a collective call: a rank that fails after it has sent messages closes its connections, so that no other waits."""
    known = _communicators.get(group)  # none for ranks that are threads: weft.spawn ends them
    if known is None or known[1].ranks == 1:
        yield
        return
    _, transport, comm = known
    with comm.turn():  # a second thread is refused here, before it counts exchanges
        before = transport.exchanges
        try:
            yield
        except BaseException as e:
            if transport.exchanges > before and not transport.broken:
                transport.fail(f"failed ({type(e).__name__}: {e})")
            raise


def communicator(group: Any = None, *, time_limit: Optional[float] = None) -> Communicator:
    """Weft's communicator over a process group (None: the default one), made once for each group.

    A rank that waits longer than time_limit seconds (300 unless said here) for another raises weft.Error. Gloo moves
    tensors of CPUs, and NCCL those on GPUs, where its own time limit holds. Where there is gloo alone, tensors on GPUs go
    by way of the CPU.
    """
    group = resolve(group)
    if group is None:
        raise error("there is no process group", "call torch.distributed.init_process_group first, or give one")
    if isinstance(group, Communicator):
        return group
    if time_limit is not None:
        time_limit = _seconds(time_limit)
    name = name_of(group)
    with _making:  # one transport numbers all messages of a group
        known = _communicators.get(name)
        if known is None or known[0] is not group:
            known = _communicators[name] = _made(group, name)
            _placed.join(known[2], scope_of(group))
    if time_limit is not None:
        known[1].time_limit = time_limit
    return known[2]


def _seconds(time_limit: float) -> float:
    seconds = float(time_limit)
    if not 1e-3 <= seconds <= 1e8:
        raise error(f"a time limit of {seconds:g} seconds", "give 0.001 to 100000000")
    return seconds


def _made(group: Any, name: str) -> Tuple[Any, _Transport, Communicator]:
    on_gpus = _backend(group, "cuda") == "nccl"
    if not on_gpus and _backend(group, "cpu") is None:
        raise error(f"the process group {name} has neither gloo nor nccl ({dist.get_backend(group)})",
                    "make one with backend 'gloo', 'nccl', or 'cpu:gloo,cuda:nccl'")
    transport = _Transport(group, 300.0)
    return group, transport, _core.python_communicator(group.rank(), group.size(), "torch", transport, on_gpus)


def all_gather(x: Tensor, group: Any = None) -> List[Tensor]:
    """Every rank's x, all of one shape and dtype, in the order of ranks. Carries no gradient."""
    mine = x.detach().contiguous()
    name = name_of(group)
    if not name:
        return [mine]
    comm = communicator(name)
    parts = [torch.empty_like(mine) for _ in range(comm.ranks)]
    if mine.numel() > 0:
        with all_or_nobody(name):
            comm.all_gather(_arrays.array(mine.view(-1)), [_arrays.array(part.view(-1), True) for part in parts],
                            _arrays.stream_of(mine))
    return parts
