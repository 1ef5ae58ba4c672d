"""Attention from cu_seqlens where the tensors are: on a GPU the plan is made there, in the current stream, and the host
never waits. On a CPU, for comparison, it is made by the host's planner, and wrong offsets raise.

Lengths are not known on the host, so what depends on them there is refused: layouts balanced and placed, slices of the user's
own, schedules exact and mesh. Over ranks messages have the sizes of whole buffers. Wrong offsets (falling, past the end) let the
documents of the call see nothing; what was found is raised by weft.torch.rows.check_offsets.
"""

from __future__ import annotations

import contextlib
import functools
import json
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import _arrays, _core, _options
from .._arrays import error
from ..cost import machine_number, machine_numbered
from ..schedule import Schedule, constant_result
from . import runs, step_log
from .group import all_or_nobody, communicator, name_of, rank_and_ranks
from .rows import _offsets

if _core.has_cuda and torch.version.cuda is not None:
    _core.use_graph_memory(torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete)

_MASK = ("causal", "bottom_right", "window", "chunk_size")
_LAYOUTS = ("contiguous", "dual_chunk", "zigzag", "striped")
_DEFAULTS: Dict[str, Any] = dict(
    causal=False, bottom_right=False, window=(-1, -1), chunk_size=None, scale=None, softcap=0.0, off_by_one=False, head_map=None,
    deterministic=False, kernel="", layout="zigzag", group="", schedule=["all_gather", {}], max_logit=True)


@functools.lru_cache(1024)
def _read(how: str) -> Dict[str, Any]:
    return {**_DEFAULTS, **json.loads(how)}


def _statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _side(cu: Tensor, padded: Optional[Tensor], tokens: int) -> Any:
    return _arrays.array(cu), None if padded is None else _arrays.array(padded), tokens


# Schedules that are planned on the host, and why.
_BY_LENGTHS = {"exact": "whose messages depend on lengths", "mesh": "whose steps attend other ranks' queries"}


@functools.lru_cache(256)
def _chosen(rows: Tuple[int, int], ranks: int, layout: str, mask: _core.Mask, heads: Tuple[int, int], dtype: _core.DType,
            dims: Tuple[int, int], of_machine: int) -> List[Any]:
    """What schedule auto stands for: the best one predicted for a document that fills all rows, and never exact or mesh."""
    packing = _core.Packing(*([0, ranks * n] for n in rows))
    dtype = _core.DType.f32 if dtype is _core.DType.f64 else dtype  # machines have no rates for f64
    try:
        placed = _core.Layout(layout, packing, ranks)
        choice = _core.choose_schedule(_core.Problem(packing, mask), placed, *heads, dtype, *dims,
                                       machine_numbered(of_machine))
    except _core.Error:  # no document can fill all rows
        return ["all_gather", {}]
    able = [c for c in choice.candidates if c["schedule"] not in _BY_LENGTHS and c["fits"] and not c["refused"]]
    if not able:
        return ["all_gather", {}]
    best = min(able, key=lambda c: c["seconds"])
    forced = ("ranks_per_step", "key_order")  # as lengths on a GPU want them
    return [best["schedule"], {name: value for name, value in best["options"].items() if name not in forced}]


class _Run(NamedTuple):
    """An executor, and the communicator that it was made for: a group may end, and another one have its name. None: one rank."""

    comm: Optional[_core.Communicator] = None
    executor: Optional[_core.OffsetsExecutor] = None
    core: None = None  # steps of it are not watched

    @property
    def schedule(self) -> Optional[_core.RankSchedule]:
        return None if self.executor is None else self.executor.schedule


class _Problem:
    """What both passes need: the question of the plan and, over ranks, the executor that answers it."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], offsets: Tuple[Optional[Tensor], ...],
                 how: str) -> None:
        self.said = said = _read(how)
        self.group = said["group"]
        self.ranks = rank_and_ranks(self.group)[1]
        cu_q, padded_q, cu_k, padded_k = offsets
        assert cu_q is not None
        keys = None if cu_k is None else _side(cu_k, padded_k, self.ranks * k.shape[0])
        self.mask = mask = _core.Mask(said["causal"], said["bottom_right"], tuple(said["window"]), said["chunk_size"])
        self.asked = _core.OffsetsProblem(_side(cu_q, padded_q, self.ranks * q.shape[0]), keys, mask, said["layout"], self.ranks,
                                          q.shape[0], k.shape[0])
        self.settings = _core.Settings(said["scale"], said["softcap"], None if sink is None else _arrays.array(sink, name="sink"),
                                       said["off_by_one"], said["head_map"])
        self.views = [_arrays.array(x, name=name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
        self.stream = _arrays.stream_of(q)
        self.run = _Run() if self.ranks == 1 else self._run(q, k, v)

    def _run(self, q: Tensor, k: Tensor, v: Tensor) -> _Run:
        """The group's executor for such tensors, from the cache of its executors or new."""
        said, view = self.said, self.views[0]
        heads, comm = (q.shape[1], k.shape[1]), communicator(self.group)
        _options.heads(*heads, said["head_map"])
        what = [said[name] for name in ("schedule", "head_map", "kernel", "deterministic")]
        of_auto = [machine_number(), *(said[name] for name in (*_MASK, "layout"))] if said["schedule"][0] == "auto" else []
        # No number of settings is below 0, and the text stands where others have their packing.
        key = (-1, heads, view.dtype, (q.shape[2], v.shape[2]), view.device,
               json.dumps([q.shape[0], k.shape[0], what, of_auto]).encode())
        self.cache = runs.cache_of(self.group)
        run: Optional[_Run] = self.cache.get(*key)
        if run is None or run.comm is not comm:
            (name, options), head_map, kernel, deterministic = what
            if name == "auto":
                rows, dims = (q.shape[0], k.shape[0]), (q.shape[2], v.shape[2])
                name, options = ("all_gather", {}) if head_map is not None else _chosen(
                    rows, comm.ranks, said["layout"], self.mask, heads, view.dtype, dims, machine_number())
            run = _Run(comm, _core.OffsetsExecutor(comm, q.shape[0], k.shape[0], *heads, head_map, name, options, kernel,
                                                   deterministic, view.device, self.stream))
            self.cache.put(*key, run, None, runs.most_cached(view.device))
        return run

    @contextlib.contextmanager
    def executor(self) -> Iterator[Any]:
        """For one call. After a failure its state is undefined, so it is made anew."""
        try:
            with all_or_nobody(self.group):
                yield self.run.executor
        except BaseException:
            self.cache.drop(self.run)
            raise


def _attend(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], cu_q: Tensor, padded_q: Optional[Tensor],
            cu_k: Optional[Tensor], padded_k: Optional[Tensor], how: str) -> Tuple[Tensor, Tensor, Tensor]:
    problem = _Problem(q, k, v, sink, (cu_q, padded_q, cu_k, padded_k), how)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=_statistics(q.dtype))
    largest = q.new_empty((q.shape[1] if problem.said["max_logit"] else 0,), dtype=_statistics(q.dtype))
    results = (_arrays.array(out, True), _arrays.array(lse, True),
               _arrays.array(largest, True) if problem.said["max_logit"] else None)
    if problem.ranks == 1:
        _core.attend_offsets(problem.asked, *problem.views, problem.settings, *results, problem.said["kernel"], problem.stream)
    else:
        with problem.executor() as executor:
            executor.forward(problem.asked, *problem.views, problem.settings, *results, problem.stream)
    if step_log.level():
        step_log.say(False, problem.run, q, k, v, problem.said, problem.views[0])
    return out, lse, largest


@torch.library.custom_op("weft::attention_offsets", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], cu_q: Tensor, padded_q: Optional[Tensor],
             cu_k: Optional[Tensor], padded_k: Optional[Tensor], how: str) -> Tuple[Tensor, Tensor, Tensor]:
    return _attend(q, k, v, sink, cu_q, padded_q, cu_k, padded_k, how)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], cu_q: Tensor, padded_q: Optional[Tensor], cu_k: Optional[Tensor],
      padded_k: Optional[Tensor], how: str) -> Tuple[Tensor, ...]:
    return (q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=_statistics(q.dtype)),
            q.new_empty((q.shape[1] if _read(how)["max_logit"] else 0,), dtype=_statistics(q.dtype)))


def _attend_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor,
                     cu_q: Tensor, padded_q: Optional[Tensor], cu_k: Optional[Tensor], padded_k: Optional[Tensor],
                     how: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = _Problem(q, k, v, sink, (cu_q, padded_q, cu_k, padded_k), how)
    dout = dout if dout.stride(-1) == 1 or dout.shape[-1] == 1 else dout.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsink = q.new_empty((0,) if sink is None else sink.shape, dtype=_statistics(q.dtype))
    given = (_arrays.array(out), _arrays.array(lse), _arrays.array(dout, name="dout"),
             *(_arrays.array(x, True) for x in (dq, dk, dv)), None if sink is None else _arrays.array(dsink, True))
    if problem.ranks == 1:
        _core.attend_offsets_backward(problem.asked, *problem.views, problem.settings, *given, problem.said["kernel"],
                                      problem.said["deterministic"], problem.stream)
    else:
        with problem.executor() as executor:
            executor.backward(problem.asked, *problem.views, problem.settings, *given, problem.stream)
        dsink /= problem.ranks  # it is summed over the ranks already; so the sum over the group is right
    if step_log.level():
        step_log.say(True, problem.run, q, k, v, problem.said, problem.views[0])
    return dq, dk, dv, dsink


@torch.library.custom_op("weft::attention_offsets_backward", mutates_args=())
def _backward_op(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor, cu_q: Tensor,
                 padded_q: Optional[Tensor], cu_k: Optional[Tensor], padded_k: Optional[Tensor],
                 how: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    return _attend_backward(dout, q, k, v, sink, out, lse, cu_q, padded_q, cu_k, padded_k, how)


@_backward_op.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor, cu_q: Tensor,
      padded_q: Optional[Tensor], cu_k: Optional[Tensor], padded_k: Optional[Tensor], how: str) -> Tuple[Tensor, ...]:
    return (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
            q.new_empty((0,) if sink is None else sink.shape, dtype=_statistics(q.dtype)))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.how = inputs
    out, lse, largest = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.mark_non_differentiable(lse, largest)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Optional[Tensor], dlse: Any, dlargest: Any) -> Tuple[Optional[Tensor], ...]:
    q, k, v, sink, cu_q, padded_q, cu_k, padded_k, out, lse = ctx.saved_tensors
    if dout is None:
        return (None,) * 9
    dq, dk, dv, dsink = torch.ops.weft.attention_offsets_backward(dout, q, k, v, sink, out, lse, cu_q, padded_q, cu_k, padded_k,
                                                                  ctx.how)
    return dq, dk, dv, None if sink is None else dsink.to(sink.dtype), None, None, None, None, None


_forward.register_autograd(_backward, setup_context=_setup_context)


class _Function(torch.autograd.Function):
    """The same without the operators, whose way through the dispatcher takes the host longer than all the launches."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tuple[Tensor, Tensor, Tensor]:
        output = _attend(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Any, dlargest: Any) -> Tuple[Optional[Tensor], ...]:
        if torch.is_grad_enabled() or dout is None:  # create_graph: the operator refuses a second derivative, if there is one
            return _backward(ctx, dout, dlse, dlargest)
        q, k, v, sink, cu_q, padded_q, cu_k, padded_k, out, lse = ctx.saved_tensors
        dq, dk, dv, dsink = _attend_backward(dout, q, k, v, sink, out, lse, cu_q, padded_q, cu_k, padded_k, ctx.how)
        return dq, dk, dv, None if sink is None else dsink.to(sink.dtype), None, None, None, None, None


def _lengths(cu: Optional[Tensor], padded: Optional[Tensor], seqused: Optional[Tensor],
             side: str) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """cu_seqlens and cu_seqlens_padded, also from seqused, which are then summed on the GPU."""
    if seqused is not None:
        if cu is not None and padded is not None:
            raise error(f"cu_seqlens_{side}, cu_seqlens_{side}_padded and seqused_{side} are all given",
                        "say where sequences begin, and their lengths once")
        begins = padded if padded is not None else cu
        if begins is None:
            raise error(f"seqused_{side} without cu_seqlens_{side}", "say where sequences begin")
        if seqused.device != begins.device or seqused.shape[0] != begins.shape[0] - 1:
            raise error(f"seqused_{side} has shape {list(seqused.shape)} on {seqused.device}, and offsets "
                        f"{list(begins.shape)} on {begins.device}", "give a length for each sequence, in the same place")
        return torch.nn.functional.pad(torch.cumsum(seqused, 0, dtype=begins.dtype), (1, 0)), begins
    return (padded, None) if cu is None else (cu, padded)


_OFFSETS = ("cu_seqlens_q_padded", "seqused_q", "cu_seqlens_k", "cu_seqlens_k_padded", "seqused_k")
_KNOWN = ("cu_seqlens", "cu_seqlens_q", *_OFFSETS)
_IDLE: Dict[str, Any] = dict(format="thd", checked=False, layout_mask=None)  # what says nothing here


def given_on_gpu(packing: Any, options: Dict[str, Any]) -> bool:
    """Whether the packing of a call is given by cu_seqlens on a GPU."""
    if isinstance(packing, torch.Tensor):
        return packing.is_cuda
    return packing is None and any(isinstance(options.get(name), torch.Tensor) and options[name].is_cuda for name in _KNOWN)


def offsets_of(packing: Any, options: Dict[str, Any]) -> Dict[str, Optional[Tensor]]:
    """The offsets of a call by the names of attention; they are taken out of the options."""
    for theirs, own in (("cu_seqlens_kv", "cu_seqlens_k"), ("cu_seqlens_kv_padded", "cu_seqlens_k_padded")):
        if theirs in options:
            if options.get(own) is not None:
                raise error(f"{theirs} and {own} are both given", f"they are the same: leave {theirs} out")
            options[own] = options.pop(theirs)
    found = {name: options.pop(name, None) for name in _KNOWN}
    first = [(name, x) for name, x in (("packing", packing), *((n, found.pop(n)) for n in ("cu_seqlens", "cu_seqlens_q")))
             if x is not None]
    if len(first) > 1:
        raise error(f"{first[0][0]} is given together with {first[1][0]}", "give one of them")
    begins = first[0][1] if first else found["cu_seqlens_q_padded"]
    if begins is None:
        raise error("there are no cu_seqlens of the queries", "give cu_seqlens_q")
    if not first:
        found["cu_seqlens_q_padded"] = None
    same = found["cu_seqlens_k"] is not None and found["cu_seqlens_k"] is begins
    if same and all(found[name] is None for name in _OFFSETS if name != "cu_seqlens_k"):
        found["cu_seqlens_k"] = None  # the queries' own
    return {"cu_seqlens_q": begins, **found}


def context_parallel(q: Tensor, k: Tensor, v: Tensor, found: Dict[str, Any], mask: Any, group: Any, sink: Any,
                     options: Dict[str, Any], max_logit: bool = True) -> Tuple[Tensor, Tensor, Tensor]:
    """context_parallel_attention of offsets_of(...); options by Weft's names. max_logit: it is wanted."""
    # Only checked ranks compare a layer's number.
    options = {name: value for name, value in options.items()
               if name != "layer" and (name not in _IDLE or value != _IDLE[name])}
    if mask is not None:
        if mask.slices is not None:
            raise error("a mask of slices, and cu_seqlens lie on a GPU", "keep cu_seqlens on the CPU: slices are planned there")
        parts = {name: getattr(mask, name) for name in _MASK}
        clash = [name for name in parts if name in options]
        if clash:
            raise error(f"mask is given together with {clash[0]}", "a mask says it all: leave the others out")
        options.update(parts)
    if isinstance(sink, str):
        if sink != "off_by_one":
            raise error(f"there is no sink {sink!r}", "use None, 'off_by_one', or a tensor of one logit a query head")
        sink, options["off_by_one"] = None, True
    return attention(q, k, v, sink=sink, group=group, max_logit=max_logit, **found, **options)


@functools.lru_cache(64)
def _schedule(name: Any, given: Tuple[Tuple[str, Any], ...]) -> List[Any]:
    """Its name and options."""
    named = Schedule(name, **dict(given))
    if named.name in _BY_LENGTHS:
        raise error(f"schedule {named.name}, {_BY_LENGTHS[named.name]}, and cu_seqlens lie on a GPU",
                    "use all_gather, ring, all_to_all or hybrid, or keep them on the CPU")
    if named.options.get("ranks_per_step", 1) != 1:
        raise error(f"ranks_per_step = {named.options['ranks_per_step']}, and cu_seqlens lie on a GPU, where a step is planned "
                    "against one rank's keys", "leave it out, or keep them on the CPU")
    return [named.name, named.options]


@constant_result
def _how(group: Any, schedule: Any, options: Dict[str, Any]) -> str:
    """The settings as a text; what cannot be done without lengths on the host is refused here."""
    for option in options:
        if option not in _DEFAULTS or option in ("group", "schedule"):
            raise error(f"{option} is given, and cu_seqlens lie on a GPU", "leave it out, or keep cu_seqlens on the CPU")
    layout = options.get("layout") or "zigzag"
    if layout not in _LAYOUTS:
        raise error(f"layout {layout}, and cu_seqlens lie on a GPU, where the host does not see lengths",
                    "use zigzag, dual_chunk, contiguous or striped, or the CPU")
    ranks = rank_and_ranks(group)[1]
    unsaid = "auto" if ranks > 1 else "all_gather"
    name, given = schedule if isinstance(schedule, (list, tuple)) else (schedule or unsaid, ())
    options = {**options, "schedule": _schedule(name, tuple(map(tuple, given)))}
    said = {name: value for name, value in options.items() if value != _DEFAULTS[name] and value is not None}
    if ranks > 1:
        said["group"] = name_of(group)
    return json.dumps(said, sort_keys=True)


def attention(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Optional[Tensor] = None,
              seqused_q: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None,
              cu_seqlens_k_padded: Optional[Tensor] = None, seqused_k: Optional[Tensor] = None, sink: Optional[Tensor] = None,
              group: Any = "", schedule: Any = None, **options: Any) -> Tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logit) of this rank's rows, q and k and v [rows, heads, dim] on the GPU where cu_seqlens are.

    Without cu_seqlens_k keys are the queries' own sequences. Over a group rows lie by `layout`, zigzag unless said.
    max_logit=False: the last result is empty.
    """
    how = _how(group, [schedule.name, schedule.given] if isinstance(schedule, Schedule) else schedule, options)
    cu_q, padded_q = _lengths(cu_seqlens_q, cu_seqlens_q_padded, seqused_q, "q")
    cu_k, padded_k = _lengths(cu_seqlens_k, cu_seqlens_k_padded, seqused_k, "k")
    assert cu_q is not None
    cu_q, padded_q = _offsets(cu_q, padded_q, q.device)
    if cu_k is not None:
        cu_k, padded_k = _offsets(cu_k, padded_k, q.device)
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if x.dim() != 3:
            raise error(f"{name} has shape {list(x.shape)}, and cu_seqlens are given", "give [rows, heads, dim]")
    inputs = (q, k, v, sink, cu_q, padded_q, cu_k, padded_k, how)
    if torch.compiler.is_compiling() or not runs.plain(q, k, v):
        return torch.ops.weft.attention_offsets(*inputs)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:4]):
        return _Function.apply(*inputs)
    return _attend(*inputs)
