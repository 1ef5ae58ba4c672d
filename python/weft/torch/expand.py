"""Attention whose K and V each rank makes itself, of rows that move in their place: a latent, say."""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _arrays, _core, _options
from .._arrays import error
from .group import Alone, communicator
from .runs import Call, Run, _settings, _using, call_of, chosen_for_source, run_of, statistics, usable

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
Expand = Callable[..., Tuple[Tensor, Tensor]]


class _Wanted(NamedTuple):
    """What a function asks for beside the rows."""

    positions: bool
    heads: bool


def wanted(function: Expand) -> _Wanted:
    if not callable(function):
        raise error(f"expand is a {type(function).__name__}", "give a function: expand(rows) -> (k, v)")
    try:
        parameters = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function).parameters
    except (TypeError, ValueError):  # of no Python function
        return _Wanted(False, False)
    places = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "heads"]
    second = len(places) > 1 and places[1].default is inspect.Parameter.empty
    return _Wanted(second or "positions" in parameters, "heads" in parameters)


class _Autocast(NamedTuple):
    """torch.autocast as it was in the forward: what is made again in the backward must be the same."""

    device: str
    enabled: bool
    dtype: Any

    def __call__(self) -> Any:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled) if self.enabled else contextlib.nullcontext()


def _autocast(x: Tensor) -> _Autocast:
    device = x.device.type
    return _Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


class _Function:
    """The caller's function, called in one way."""

    def __init__(self, function: Expand, source: Tensor) -> None:
        self.function, self.wanted, self.autocast = function, wanted(function), _autocast(source)

    def __call__(self, rows: Tensor, positions: Tensor, heads: slice) -> Tuple[Tensor, Tensor]:
        given: Dict[str, Any] = {"heads": heads} if self.wanted.heads else {}
        with self.autocast():
            made = self.function(rows, positions, **given) if self.wanted.positions else self.function(rows, **given)
        if not isinstance(made, (tuple, list)) or len(made) != 2 or not all(isinstance(x, Tensor) for x in made):
            raise error(f"expand returns a {type(made).__name__}", "let it return two tensors, k and v")
        for x, name in zip(made, "kv"):
            if x.dim() != 3 or x.shape[0] != rows.shape[0]:
                raise error(f"{name} of expand has shape {list(x.shape)} for {rows.shape[0]} rows",
                            "let it return [rows, heads, dim], one row for each row that it is given")
            if x.dtype != rows.dtype:
                raise error(f"{name} of expand is {x.dtype} and the source {rows.dtype}", "let it return the source's dtype")
        return made[0], made[1]


class _Shape(NamedTuple):
    """Of the K and V that a function makes."""

    heads: int
    dim_v: int


def _leaves(made: Sequence[Tensor], source: Tensor, first: int) -> List[Tensor]:
    """The leaves that a result depends on. Nodes that are older than the first of the call belong to another computation."""
    found: Dict[int, Tensor] = {}
    seen, todo = set(), [x.grad_fn for x in made if x.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if leaf is not source:
                found.setdefault(id(leaf), leaf)
            continue
        if node._sequence_nr() < first:
            raise error(f"expand uses a tensor that was computed before, with a gradient ({node.name()})",
                        "compute it inside of expand, of parameters or other leaves: its gradient is made once for each call")
        todo.extend(before for before, _ in node.next_functions if before is not None)
    for x in made:
        if x.is_leaf and x.requires_grad and x is not source:
            found.setdefault(id(x), x)
    return list(found.values())


def _probe(function: _Function, source: Tensor) -> Tuple[_Shape, List[Tensor]]:
    """Calls the function with one row of zeros: what it makes, and the tensors whose gradients it needs."""
    with torch.enable_grad():
        row = torch.zeros_like(source[:1] if len(source) else source.new_empty((1, source.shape[1]))).requires_grad_()
        x = row.view_as(row)
        k, v = function(x, torch.zeros(1, dtype=torch.int64, device=source.device), slice(None))
    if k.shape[1] != v.shape[1]:
        raise error(f"expand makes {k.shape[1]} heads of k and {v.shape[1]} of v", "let it make as many of both")
    made = (k, v)
    return _Shape(k.shape[1], v.shape[2]), _leaves(made, row, x.grad_fn._sequence_nr())


class _Made(NamedTuple):
    """K and V with the graph to the rows that they were made of."""

    rows: Tensor
    k: Tensor
    v: Tensor


_Kept = Dict[Tuple[int, int, int], _Made]  # from the forward for the backward, by step, first and last head


class _Maker:
    """What the executor asks for K and V of a step, and gives their gradients: both of one pass.

    known: by step, which rows are seen and where they are in their sequences, as the executor says once; then on the device of
    the tensors. kept: None if K and V are made again in the backward.
    """

    def __init__(self, function: _Function, run: Run, device: torch.device, kept: Optional[_Kept], params: Sequence[Tensor] = (),
                 backward: bool = False) -> None:
        self.function, self.device, self.kept, self.backward_pass = function, device, kept, backward
        self.known: Dict[int, Any] = run.source_rows
        self.params = list(params)
        self.sums: List[Optional[Tensor]] = [None] * len(self.params)
        self.made: Optional[_Made] = None  # of the last expand of a backward

    def _seen(self, step: int) -> Tuple[Optional[Tensor], Tensor]:
        seen, positions = self.known[step]
        if not isinstance(positions, Tensor):
            rows = None if seen is None else torch.from_numpy(seen).to(self.device)
            self.known[step] = seen, positions = rows, torch.from_numpy(positions).to(self.device)
        return seen, positions

    def _make(self, rows: Tensor, step: int, first: int, last: int) -> _Made:
        """Of the rows that are seen."""
        seen, positions = self._seen(step)
        keep, heads = self.kept is not None, slice(first, last)
        if seen is not None:
            rows = rows.index_select(0, seen)
        elif keep:  # the executor's memory, where other rows come
            rows = rows.clone()
        graph = keep or self.backward_pass
        x = rows.detach().requires_grad_(graph)
        with torch.set_grad_enabled(graph):
            k, v = self.function(x, positions, heads)
            if not self.function.wanted.heads:
                k, v = k[:, heads], v[:, heads]
                if keep:  # a view would keep the heads of all other groups as well
                    k, v = k.contiguous(), v.contiguous()
            return _Made(x, k, v)

    def expand(self, buffer: Any, step: int, first: int, last: int) -> Tuple[Any, Any]:
        key = step, first, last
        made = self.kept.pop(key, None) if self.backward_pass and self.kept is not None else None
        if made is None:  # of a second backward, too: it has nothing left
            made = self._make(torch.from_dlpack(buffer), *key)
        if self.backward_pass:
            self.made = made
        elif self.kept is not None:
            self.kept[key] = made
        return tuple(_arrays.array(usable(x.detach()), name=f"{name} of expand") for x, name in ((made.k, "k"), (made.v, "v")))

    def reduce(self, buffer: Any, step: int, first: int, last: int, dk: Any, dv: Any, gradient: Any) -> None:
        made, self.made = self.made, None
        assert made is not None
        pairs = [(x, torch.from_dlpack(d)) for x, d in ((made.k, dk), (made.v, dv)) if x.requires_grad]
        if not pairs:
            return
        results, given = zip(*pairs)
        grads = torch.autograd.grad(results, [made.rows, *self.params], given, allow_unused=True)
        if grads[0] is not None:
            to, seen = torch.from_dlpack(gradient), self._seen(step)[0]
            if seen is None:
                to.add_(grads[0])
            else:
                to.index_add_(0, seen, grads[0].to(to.dtype))
        for i, grad in enumerate(grads[1:]):
            if grad is not None:
                before = self.sums[i]
                # A copy: gradients of several leaves may be one tensor, or the executor's memory.
                self.sums[i] = grad.to(statistics(grad.dtype), copy=True) if before is None else before.add_(grad)


_hows: Dict[Any, str] = {}  # settings with the schedule that auto stands for


def _chosen(q: Tensor, source: Tensor, shape: _Shape, packing: Tensor, call: Call, recompute: bool) -> Call:
    """The call with the schedule that auto stands for: the bytes of the source count, and what it takes to expand it."""
    if call.said["schedule"][0] != "auto":
        return call
    heads, widths = (q.shape[1], shape.heads), (_arrays.array(q).dtype, q.shape[2], shape.dim_v)
    key = (call.how, packing.numpy().tobytes(), heads, widths, source.shape[1], recompute)
    how = _hows.get(key)
    if how is None:
        best = chosen_for_source(packing, call.said, communicator(call.group).ranks, heads, widths, source.shape[1],
                                 not recompute)
        how = json.dumps({**json.loads(call.how), "schedule": [best.name, best.options]}, sort_keys=True)
        if len(_hows) >= 256:
            _hows.clear()
        _hows[key] = how
    return call_of(how)


def _run_of(q: Tensor, source: Tensor, shape: _Shape, packing: Tensor, call: Call) -> Run:
    like = source.new_empty((source.shape[0], shape.heads, 1), device="meta")
    return run_of(q, like, like.new_empty((1, 1, shape.dim_v)), packing, call)


_INPUTS = 8  # of _ExpandedAttention, before the parameters


class _ExpandedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, source: Tensor, sink: Optional[Tensor], packing: Tensor, call: Call, function: _Function,
                shape: _Shape, kept: Optional[_Kept], *params: Tensor) -> Tuple[Tensor, ...]:
        if sink is not None:
            _options.sink(sink.shape, q.shape[-2])
        out = q.new_empty((*q.shape[:-1], shape.dim_v))
        lse = q.new_empty(q.shape[:-1], dtype=statistics(q.dtype))
        largest = q.new_empty(q.shape[-2:-1] if call.max_logit else (0,), dtype=statistics(q.dtype))
        run = _run_of(q, source, shape, packing, call)
        with _using(run, call) as it:
            run.check_rows()
            it.forward_source(
                _arrays.array(q, name="q"), _arrays.array(source[:, None], name="source"),
                _Maker(function, run, source.device, kept), _settings(sink, call), _arrays.array(out, True),
                _arrays.array(lse, True), _arrays.array(largest, True) if call.max_logit else None,
                stream=_arrays.stream_of(q), layer=_arrays.layer_number(call.said["layer"]))
        ctx.save_for_backward(q, source, sink, out, lse, packing)
        # Not saved: the function has them, and hooks of saved tensors may give others back.
        ctx.call, ctx.function, ctx.shape, ctx.kept, ctx.params = call, function, shape, kept, params
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse, largest)
        return out, lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Optional[Tensor], *others: Any) -> Tuple[Optional[Tensor], ...]:
        if dout is None:
            return (None,) * (_INPUTS + len(ctx.params))
        q, source, sink, out, lse, packing = ctx.saved_tensors
        call, params = ctx.call, ctx.params
        dq, dsource = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(source)
        dsink = None if sink is None else q.new_empty(sink.shape, dtype=statistics(q.dtype))
        run = _run_of(q, source, ctx.shape, packing, call)
        asked = [i for i, _ in enumerate(params) if ctx.needs_input_grad[_INPUTS + i]]
        maker = _Maker(ctx.function, run, source.device, ctx.kept, [params[i] for i in asked], backward=True)
        with _using(run, call) as it:
            it.backward_source(
                _arrays.array(q, name="q"), _arrays.array(source[:, None], name="source"), maker, _settings(sink, call),
                _arrays.array(out), _arrays.array(lse), _arrays.array(usable(dout), name="dout"), _arrays.array(dq, True),
                _arrays.array(dsource[:, None], True), None if dsink is None else _arrays.array(dsink, True),
                stream=_arrays.stream_of(q), layer=_arrays.layer_number(call.said["layer"]))
        of_params: List[Optional[Tensor]] = [None] * len(params)
        for i, total in zip(asked, maker.sums):
            of_params[i] = torch.zeros_like(params[i]) if total is None else total.to(params[i].dtype)
        # dsink is summed over the ranks already; divided by them, the sum over the group is right.
        share = None if sink is None or dsink is None else (dsink / run.ranks).to(sink.dtype)
        return (dq, dsource, share, None, None, None, None, None, *of_params)


def _check(q: Tensor, source: Tensor, call: Call) -> None:
    for x, name in ((q, "q"), (source, "source")):
        if not isinstance(x, Tensor) or type(x) not in _PLAIN:
            raise error(f"{name} is a {type(x).__name__}", "expand= takes plain tensors: give the local part, or k and v")
    if call.said["format"] != "thd":
        raise error(f"format {call.said['format']} with expand=", "give the rows of the batch one after another: thd")
    if source.dim() != 2:
        raise error(f"the source has shape {list(source.shape)}", "give [rows, width]: one row for each of this rank's keys")
    if source.dtype != q.dtype or source.device != q.device:
        raise error(f"the source is {source.dtype} on {source.device} and q {q.dtype} on {q.device}",
                    "give both in one dtype on one device")


_alone = threading.local()


def one_rank() -> _core.Communicator:
    """The communicator of one rank, whose executor expands as those of several do: one for each thread."""
    if not hasattr(_alone, "comm"):
        _alone.comm = _core.python_communicator(0, 1, "one rank", Alone(), True)
    return _alone.comm


_saving_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def _kept(recompute: bool, q: Tensor, source: Tensor, sink: Optional[Tensor], params: Sequence[Tensor]) -> Optional[_Kept]:
    """Where K and V are kept for the backward, if there will be one. Not where hooks decide what is kept (torch.utils.checkpoint
    computes again, others move tensors to the host), which would not see these."""
    if recompute or not torch.is_grad_enabled() or _saving_hooks(True) is not None:
        return None
    return {} if any(x is not None and x.requires_grad for x in (q, source, sink, *params)) else None


def attend(q: Tensor, source: Tensor, sink: Optional[Tensor], packing: Tensor, call: Call, expand: Expand,
           recompute: bool) -> Tuple[Tensor, ...]:
    _check(q, source, call)
    function = _Function(expand, source)
    shape, params = _probe(function, source)
    call = _chosen(q, source, shape, packing, call, recompute)
    kept = _kept(recompute, q, source, sink, params)
    return _ExpandedAttention.apply(q, source.contiguous(), sink, packing, call, function, shape, kept, *params)
