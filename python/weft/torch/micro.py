"""Micro-sequences: a pack goes through a layer in parts, whose keys stay in a K/V buffer (docs/prepare.md)."""

from __future__ import annotations

import itertools
import threading
from typing import Any, ContextManager, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor

from .. import _arrays, _core, _options
from .._arrays import error
from .._core import Communicator, Mask, MicroSequences
from .group import Alone, all_or_nobody, by_name, communicator, name_of, resolve
from .micro_steps import MicroStep
from .module import own_number
from .runs import statistics, usable

_lock = threading.Lock()  # of the free buffers of all layers


class MicroSequenceAttention(torch.nn.Module):
    """Attention of one layer over the micro-sequences of a pack: one at a time, or all of them at once.

    With a step of weft.torch.MicroSequences the tensors are this rank's rows of that micro-sequence, and the call is one
    node of the autograd graph: its backward returns the gradients of these rows, to which later ones have added.

    With weft.prepare.MicroSequences they are this rank's windows one after another, and all are one node, whose backward goes
    through the windows in reverse. Either way each window's keys are gathered from all ranks straight into their rows of the
    buffer, and its output is written to its place: nothing is concatenated.

    Buffers are used again: one for each micro-batch or call whose backward is still to come. drop: keys that no later query
    sees leave the buffer. checked: ranks compare what they do, and messages carry checksums; layer as in
    ContextParallelAttention. deterministic: gradients have the same bits on every run.

        >>> import torch, weft, weft.torch
        >>> micros = weft.prepare.MicroSequences(weft.Packing([0, 5, 12]), ranks=1, micros=3)
        >>> layer = weft.torch.MicroSequenceAttention()
        >>> q = torch.randn(12, 4, 8, requires_grad=True)
        >>> kv = torch.randn(12, 2, 8)
        >>> layer(q, kv, kv, micros).sum().backward()
        >>> q.grad.shape
        torch.Size([12, 4, 8])
    """

    def __init__(self, *, mask: Optional[Mask] = None, scale: Optional[float] = None, softcap: float = 0.0,
                 drop: bool = False, kernel: Optional[str] = None, group: Any = None, checked: bool = False,
                 layer: Optional[int] = None, deterministic: bool = False) -> None:
        super().__init__()
        self.mask, self.scale, self.softcap = mask or Mask(causal=True), scale, softcap
        self.drop, self.kernel, self.group = drop, kernel or "", by_name(group)
        self.deterministic: bool = _options.option("deterministic", deterministic)
        self.checked, self.number = checked, own_number() if layer is None else _arrays.layer_number(layer)
        self._free: List[Any] = []  # (shape of the keys, buffer)
        self._alone: Optional[Communicator] = None

    def __getstate__(self) -> Dict[str, Any]:
        return {**super().__getstate__(), "_free": [], "_alone": None}  # a copy takes buffers of its own

    def _communicator(self) -> Communicator:
        if resolve(self.group) is not None:
            return communicator(self.group)
        if self._alone is None:
            self._alone = _core.python_communicator(0, 1, "alone", Alone(), True)
        return self._alone

    def _settings(self, sink: Optional[Tensor]) -> _core.Settings:
        return _core.Settings(self.scale, self.softcap, None if sink is None else _arrays.array(sink, name="sink"))

    def _take(self, rows: int, k: Tensor, v: Tensor) -> Any:
        """A buffer for these keys: a free one that is large enough, or a new one."""
        shape = (k.shape[1], k.shape[2], v.shape[2], k.dtype, k.device)
        with _lock:
            for at, (have, size, _) in enumerate(self._free):
                if have == shape and size >= rows:
                    return self._free.pop(at)
        view = _arrays.array(k, name="k")
        return shape, rows, _core.KvBuffer(self._communicator(), rows, k.shape[1], k.shape[2], v.shape[2], view.dtype, self.drop,
                                           self.kernel, view.device, _arrays.stream_of(k), self.checked, self.number)

    def _together(self) -> ContextManager[None]:
        # Checked ranks fail together, so their group can be used again.
        return all_or_nobody("" if self.checked else name_of(self.group))

    def _give_back(self, taken: Any) -> None:
        with _lock:
            self._free.append(taken)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, micros: Union[MicroStep, MicroSequences], *, mask: Optional[Mask] = None,
                sink: Optional[Tensor] = None) -> Tensor:
        """Attention of this rank's rows of a step, or of its windows of all micro-sequences. sink: a tensor [hq], f32."""
        if isinstance(micros, MicroStep):
            if mask is not None:
                raise error("a mask in the call of one step", "give it to the layer: all steps of a pass have the same")
            return micros.owner.attend(self, q, k, v, sink, micros)
        comm = self._communicator()
        if not isinstance(micros, MicroSequences):
            raise error(f"micros is {type(micros).__name__}",
                        "give a step of weft.torch.MicroSequences, or weft.prepare.MicroSequences for all at once")
        if micros.ranks != comm.ranks:
            raise error(f"the micro-sequences are for {micros.ranks} ranks, and there are {comm.ranks}",
                        "make them with the ranks of the group")
        windows = windows_of(micros, comm.rank)
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            if x.dim() != 3 or x.shape[0] != windows[-1].stop:
                raise error(f"{name} has shape {list(x.shape)}",
                            f"give all windows of this rank: [{windows[-1].stop}, heads, dim]")
        return _Region.apply(q, k, v, sink, self, micros, windows, mask or self.mask)


def windows_of(micros: MicroSequences, rank: int) -> List[slice]:
    """Where each of a rank's windows lies if they are put one after another."""
    ends = list(itertools.accumulate(end - begin for begin, end in (micros.rows(rank, m) for m in range(micros.micros))))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


def micro_sequence_attention(q: Tensor, k: Tensor, v: Tensor, micros: MicroSequences, mask: Optional[Mask] = None, *,
                             sink: Optional[Tensor] = None, **settings: Any) -> Tensor:
    """MicroSequenceAttention for one call."""
    layer = MicroSequenceAttention(mask=mask, **settings)
    if settings.get("layer") is None:
        layer.number = _arrays.layer_number(None)  # calls are not numbered
    return layer(q, k, v, micros, sink=sink)


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], layer: MicroSequenceAttention,
        micros: MicroSequences, windows: List[slice], mask: Mask,
    ) -> Tensor:
        # Checked ranks fail together and go on, so nothing may be on its way when they do.
        ahead = not layer.checked
        taken = layer._take(micros.key_rows(mask, layer.drop, ahead), k, v)
        buffer = taken[2]
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=statistics(q.dtype))
        settings, stream = layer._settings(sink), _arrays.stream_of(q)
        buffer.begin(micros, mask)
        with layer._together():
            for m, here in enumerate(windows):
                for n in range(m and m + 1, min(m + 2, len(windows)) if ahead else 0):  # the next keys come meanwhile
                    buffer.start_gather(n, *(_arrays.array(x[windows[n]], name=name) for x, name in ((k, "k"), (v, "v"))), stream)
                keys = [None, None] if ahead else [_arrays.array(x[here], name=name) for x, name in ((k, "k"), (v, "v"))]
                buffer.forward(m, _arrays.array(q[here], name="q"), *keys, settings,
                               *(_arrays.array(x[here], True) for x in (out, lse)), stream)
        if not any(ctx.needs_input_grad[:4]):
            layer._give_back(taken)
            return out
        # The buffer has the keys; those that it drops must be given again.
        ctx.save_for_backward(q, out, lse, sink, *((k, v) if layer.drop else ()))
        ctx.shapes, ctx.region = (k.shape, v.shape), (layer, micros.ranks, windows, taken)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tuple[Optional[Tensor], ...]:
        if ctx.region is None:
            raise error("a second backward through micro-sequences", "the buffer's gradients are used up: run the forward again")
        q, out, lse, sink, *dropped = ctx.saved_tensors
        layer, ranks, windows, taken = ctx.region
        ctx.region = None
        buffer = taken[2]
        dq, dk, dv = q.new_empty(q.shape), q.new_empty(ctx.shapes[0]), q.new_empty(ctx.shapes[1])
        dsink = None if sink is None else sink.new_zeros(sink.shape, dtype=statistics(q.dtype))
        part = None if sink is None else torch.empty_like(dsink)
        settings, stream = layer._settings(sink), _arrays.stream_of(q)
        dout = usable(dout)
        with layer._together():
            for m in reversed(range(len(windows))):
                here = windows[m]
                while layer.drop and (again := buffer.missing(m)) is not None:
                    buffer.gather_again(again, *(_arrays.array(x[windows[again]]) for x in dropped), stream)
                buffer.backward(m, *(_arrays.array(x[here]) for x in (q, out, lse, dout)), settings,
                                *(_arrays.array(x[here], True) for x in (dq, dk, dv)),
                                None if part is None else _arrays.array(part, True), stream,
                                getattr(layer, "deterministic", False),  # layers saved by an earlier version have none
                                deferred=True)  # dk and dv come under the next backward
                if part is not None:
                    dsink += part
        layer._give_back(taken)
        # dsink is summed over the ranks already; divided by them, the sum over the group is right.
        return dq, dk, dv, None if dsink is None else (dsink / ranks).to(sink.dtype), None, None, None, None
