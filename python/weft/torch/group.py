"""A communicator over an existing torch.distributed process group."""

import contextlib
import datetime
import re
import time
from typing import Any, Optional

import torch
import torch.distributed as dist

from .. import _core
from .._arrays import error
from .._core import Communicator

# Weft's tags lie apart from those that people use; nobody sends the last one.
_FIRST_TAG, _TAGS = 1 << 30, (1 << 30) - 2
_UNUSED_TAG = _FIRST_TAG + _TAGS
_CAUSE = "weft: first failure"  # in the store of the group

_communicators = {}  # by name of the group: (group, transport, communicator)


def _words(e):
    """What gloo says, without the line of its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(e)).strip().rstrip(".")


class _Handle:
    """Sends and receives under way. Where connections are closed, nobody touches their memory."""

    def __init__(self, transport, works):
        self.transport, self.works = transport, works

    def wait(self):
        ends = time.monotonic() + self.transport.time_limit
        while self.works:
            peer, work = self.works[0]
            try:
                done = work.wait(datetime.timedelta(seconds=max(ends - time.monotonic(), 1e-3)))
                text = "it was given up"
            except RuntimeError as e:
                done, text = False, _words(e)
            del work  # else the traceback would keep it
            if not done:
                if time.monotonic() >= ends - 0.01:
                    failure = self.transport.fail(f"waited {self.transport.time_limit:g} seconds for rank {peer}",
                                                  "it is slow, has gone, or was given another problem (checked=True finds out)")
                else:
                    failure = self.transport.fail(f"lost rank {peer} ({text})")
                self.works = []
                raise failure
            self.works.pop(0)

    def abandon(self):
        """Whoever does not wait goes on without the answer, and nobody may touch the memory afterwards."""
        if self.works:
            self.transport.fail("gave up an exchange after an error")
            self.works = []


def _tag(number, size):
    """Of the number-th message between two ranks. One of another size is not taken for it: gloo would end the process if it
    were longer, and say nothing if it were shorter."""
    return _FIRST_TAG + (number * 1000003 + size) % _TAGS


class _Transport:
    """Messages as point-to-point operations. Between two ranks they are numbered, so that they are matched in order."""

    def __init__(self, group, time_limit):
        self.group, self.time_limit = group, time_limit
        self.rank, self.ranks = group.rank(), group.size()
        self.sent, self.received = [0] * self.ranks, [0] * self.ranks
        self.exchanges = 0
        self.broken = None

    def exchange(self, sends, receives):
        if self.broken:
            raise error(self.broken, "make a new process group")
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

    def fail(self, text, hint="see what became of it"):
        """The error of this rank, after which nobody waits for it: others that do end at once, and learn how it began."""
        self.broken = f"rank {self.rank} {text}"
        first = self._first_failure()
        if first and first != self.broken:
            self.broken += f"; before that, {first}"
        # Gloo closes all connections of a group when one wait runs out, and has no other way to say it.
        for peer in range(self.ranks):
            if peer != self.rank:
                try:
                    nothing = self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG)
                    nothing.wait(datetime.timedelta(milliseconds=1))
                except RuntimeError:
                    pass  # closed before, or now
        return error(self.broken, f"{hint}; the process group cannot be used any more")

    def _first_failure(self):
        """What the first rank that failed said; it is this one's if nobody has."""
        try:
            store = dist.distributed_c10d._get_process_group_store(self.group)
            return store.compare_set(_CAUSE, "", self.broken).decode()
        except (AttributeError, RuntimeError):
            return None  # the store may have been that rank's


def resolve(group):
    """The process group: given as one, by name, or None for the default one. None if there is none, or for ""."""
    if isinstance(group, str):
        if group == "":
            return None
        try:
            return dist.distributed_c10d._resolve_process_group(group)
        except (LookupError, RuntimeError, ValueError):
            raise error(f"there is no process group named {group!r}",
                        "it may have been destroyed: give one that is there") from None
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):  # new_group gives a number to ranks outside
        raise error(f"a group was expected, not {group!r}", "give a torch.distributed process group that this rank is in")
    return group


def name_of(group):
    """The name that operators pass on; "" if there is no group."""
    group = resolve(group)
    return "" if group is None else group.group_name


def kept(group):
    """A group as a layer keeps it: by name, because a layer may be copied, and a process group may not."""
    return group.group_name if dist.is_available() and isinstance(group, dist.ProcessGroup) else group


@contextlib.contextmanager
def all_or_nobody(group):
    """Around what ranks do together: one that fails after it has begun leaves the others, and does not let them wait."""
    transport = _communicators[group][1] if group else None
    before = transport.exchanges if group else 0
    try:
        yield
    except BaseException as e:
        if group and transport.exchanges > before and not transport.broken:
            transport.fail(f"failed ({type(e).__name__}: {e})")
        raise


def communicator(group: Any = None, *, time_limit: Optional[float] = None) -> Communicator:
    """Weft's communicator over a process group (None: the default one), made once for each group.

    A rank that waits longer than time_limit seconds (300 unless said here) for another raises weft.Error. Gloo moves the
    bytes; NCCL is for tensors on GPUs, for which this build has no kernels.
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
        transport = _Transport(group, 300.0)
        known = (group, transport, _core.python_communicator(group.rank(), group.size(), "torch", transport))
        _communicators[name] = known
    if time_limit is not None:
        known[1].time_limit = float(time_limit)
    return known[2]
