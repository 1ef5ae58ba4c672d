"""Ranks: a communicator over an existing torch.distributed process group, or one of weft.spawn."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _arrays, _core, _placed, ranks
from .._arrays import error
from .._core import Communicator
from .transport import Transport, backend_of

_communicators: Dict[str, Tuple[Any, Transport, Communicator]] = {}  # by name of the group: (group, transport, communicator)
_making = threading.Lock()
_given: Dict[str, Communicator] = {}  # by name: communicators that were given as a group, such as those of weft.spawn
_given_by: Dict[str, int] = {}  # by the same name: the thread that gave it last
_scopes: Dict[str, Tuple[Any, Any]] = {}  # by name of the group: (weak reference to it, its scope in _placed)


class Alone:
    """The transport of one rank where there is no process group: nothing moves."""

    ranks = 1

    def exchange(self, sends: Any, receives: Any) -> Alone:
        return self

    def wait(self) -> None:
        pass

    abandon = wait


def _is_mesh(group: Any) -> bool:
    return type(group).__module__ == "torch.distributed.device_mesh" and hasattr(group, "get_group")


def _refuse_many_processes() -> None:
    """torchrun started several, and none of them has met the others: each would take the pack for its own, in silence."""
    said = os.environ.get("WORLD_SIZE", "")
    if said.isdigit() and int(said) > 1:
        raise error(f"WORLD_SIZE is {said} and there is no process group, so every process would compute the whole pack",
                    'call torch.distributed.init_process_group first, or say that it is meant: group="", in attention also '
                    "one_rank=True")


def _of_mesh(name: str) -> Any:
    """The dimension of that name of the innermost `with mesh:`; None if there is none, or this version of torch has no such
    thing."""
    stack = getattr(getattr(getattr(dist, "device_mesh", None), "_mesh_resources", None), "mesh_stack", None)
    if not stack or name not in (stack[-1].mesh_dim_names or ()):
        return None
    return stack[-1][name] if stack[-1].ndim > 1 else stack[-1]


def _named(name: str) -> Any:
    """The communicator, the dimension of the mesh in use, or the process group of that name."""
    if name in _given:
        return _given[name]
    mesh = _of_mesh(name)
    if mesh is not None:
        return mesh.get_group()
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (AttributeError, LookupError, RuntimeError, ValueError):
        raise error(f"there is neither a process group nor a dimension of a mesh in use that is named {name!r}",
                    f'give a group that is there (it may have been destroyed), or mesh["{name}"], or call this inside '
                    "`with mesh:`") from None


def resolve(group: Any) -> Any:
    """The process group: given as one, by its name, as a DeviceMesh of one dimension, by the name of a dimension inside
    `with mesh:`, or None for the default one. None if there is none, or for "".

    Or a weft.Communicator, which is as good as a group.
    """
    if isinstance(group, Communicator):  # a communicator of a process group stands for that group
        return next((g for g, _, c in list(_communicators.values()) if c is group), group)
    if isinstance(group, str):
        return _named(group) if group else None
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        _refuse_many_processes()
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
    if isinstance(group, str):
        return name_of(group) if group and _of_mesh(group) is not None else group  # a dimension is known inside `with mesh:`
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
    tensors of CPUs, and NCCL those on GPUs, where the next call raises it. Where there is gloo alone, tensors on GPUs go by
    way of the CPU.
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


def _made(group: Any, name: str) -> Tuple[Any, Transport, Communicator]:
    on_gpus = backend_of(group, "cuda") == "nccl"
    if not on_gpus and backend_of(group, "cpu") is None:
        raise error(f"the process group {name} has neither gloo nor nccl ({dist.get_backend(group)})",
                    "make one with backend 'gloo', 'nccl', or 'cpu:gloo,cuda:nccl'")
    transport = Transport(group, 300.0)
    comm = _core.python_communicator(group.rank(), group.size(), "torch", transport, on_gpus)
    transport.calls = lambda: _asked(name, lambda c: c.flight_record())
    transport.fingerprint = lambda: _asked(name, lambda c: c.fingerprint())
    transport.disagreement = lambda others: _asked(name, lambda c: c.disagreement(others))
    return group, transport, comm


def _asked(name: str, question: Callable[[Communicator], str]) -> str:
    """What the communicator of the group of that name says, which keeps the transport and not the other way round."""
    known = _communicators.get(name)
    return "" if known is None else question(known[2])


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
