"""A communicator over an existing torch.distributed process group."""

import datetime

import torch
import torch.distributed as dist

from .. import _core
from .._arrays import error

# Weft's tags lie apart from those that people use.
_FIRST_TAG, _TAGS = 1 << 30, (1 << 30) - 1

_communicators = {}  # by name of the group


class _Handle:
    """Sends and receives under way."""

    def __init__(self, transport):
        self.transport, self.works, self.arrays = transport, [], []

    def add(self, peer, start, data, numbers):
        array = torch.from_numpy(data)
        self.arrays.append(array)
        self.works.append((peer, start([array], peer, _FIRST_TAG + numbers[peer] % _TAGS)))
        numbers[peer] += 1

    def wait(self):
        limit = datetime.timedelta(seconds=self.transport.time_limit)
        for peer, work in self.works:
            try:
                work.wait(limit)
            except RuntimeError as e:
                self.transport.broken = f"rank {self.transport.rank}: the exchange with rank {peer} failed: {e}"
                raise error(self.transport.broken,
                            "see what became of that rank; the process group cannot be used any more") from e
        self.works = []

    def abandon(self):
        """Whoever does not wait goes on without the answer: nobody may touch the memory afterwards, so the works end here."""
        for _, work in self.works:
            try:
                work.wait(datetime.timedelta(seconds=1))
            except RuntimeError:
                pass
        self.works = []
        self.transport.broken = f"rank {self.transport.rank}: an exchange was given up after an error"


class _Transport:
    """Messages as point-to-point operations. Between two ranks they are numbered, so that they are matched in order."""

    def __init__(self, group, time_limit):
        self.group, self.time_limit = group, time_limit
        self.rank, self.ranks = group.rank(), group.size()
        self.sent, self.received = [0] * self.ranks, [0] * self.ranks
        self.broken = None

    def exchange(self, sends, receives):
        if self.broken:
            raise error(self.broken, "make a new process group")
        started = _Handle(self)
        try:
            for peer, data in receives:
                started.add(peer, self.group.recv, data, self.received)
            for peer, data in sends:
                started.add(peer, self.group.send, data, self.sent)
        except BaseException:
            started.abandon()
            raise
        return started


def resolve(group):
    """The process group: given as one, by name, or None for the default one. None if there is none, or for ""."""
    if isinstance(group, str):
        return None if group == "" else dist.distributed_c10d._resolve_process_group(group)
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def name_of(group):
    """The name that operators pass on; "" if there is no group."""
    group = resolve(group)
    if group is None:
        return ""
    if not isinstance(group, dist.ProcessGroup):
        raise error(f"a group was expected, not {type(group).__name__}",
                    "give a torch.distributed process group that this rank is in")
    return group.group_name


def communicator(group=None, *, time_limit=300.0):
    """Weft's communicator over a process group (None: the default one), made once for each group.

    A rank that waits longer than time_limit seconds for another raises weft.Error. Gloo moves the bytes; NCCL is for
    tensors on GPUs, for which this build has no kernels.
    """
    group = resolve(group)
    if group is None:
        raise error("there is no process group", "call torch.distributed.init_process_group first, or give one")
    name = name_of(group)
    known = _communicators.get(name)
    if known is None or known[0] is not group:
        try:
            group._get_backend(torch.device("cpu"))
        except RuntimeError:
            raise error(f"the process group {name} moves no tensors of CPUs ({dist.get_backend(group)})",
                        "make one with backend 'gloo', or 'cpu:gloo,cuda:nccl'") from None
        known = (group, _core.python_communicator(group.rank(), group.size(), "torch", _Transport(group, time_limit)))
        _communicators[name] = known
    return known[1]
