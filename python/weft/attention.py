"""Attention: one call on one rank, and the same call on each of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Generic, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _arrays, _core, _options, _placed
from ._arrays import error
from ._core import Communicator, DType, Layout, Mask, Packing, Plan, Problem
from .cost import chosen_schedule
from .packings import as_packing
from .schedule import Schedule, schedule_of
from .sharding import batch_shape, layout_of
from .spellings import own_words
from .types import A, AnyLayout, AnySchedule, Array, AttentionOptions, FormatName, Numbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SIX = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded", "seqused_q", "seqused_k")
_THREE = ("cu_seqlens", "cu_seqlens_padded", "seqused")
_MASK = ("causal", "bottom_right", "window", "chunk_size", "slices")
_OPTIONS = (*_THREE, *_SIX, *_MASK, "kernel", "layout_mask", "layer", "stream")
_RENAMED = {"scale": None, "softcap": 0.0, "format": "thd", "schedule": "auto"}  # parameters with other names elsewhere


class Gradients(NamedTuple):
    """What Attended.backward returns."""

    dq: Array
    dk: Array
    dv: Array
    dsink: Array  # None unless the sink is learnable


def _mask_of(mask: Optional[Mask], parts: Dict[str, Any]) -> Mask:
    """The Mask that a caller means: an object, or its parts."""
    given = [name for name in _MASK if name in parts]
    if mask is None:
        return Mask(**{name: parts[name] for name in given})
    if given:
        raise error(f"mask is given together with {given[0]}", "a mask says it all: leave the others out")
    if not isinstance(mask, Mask):
        raise error(f"mask is of type {type(mask).__name__}", "give a weft.Mask, or causal, window and the like")
    return mask


def _settings_of(scale: Optional[float], softcap: float, sink: Union[None, str, Array], head_map: Optional[Numbers], heads: int,
                 stream: int) -> _core.Settings:
    """What a model sets, checked as far as Python can tell."""
    scale, softcap = _options.option("scale", scale), _options.option("softcap", softcap)
    if sink is None or isinstance(sink, str):
        if sink not in (None, "none", "off_by_one"):
            raise error(f"there is no sink {sink!r}", "use None, 'off_by_one', or an array of one logit a query head")
        return _core.Settings(scale, softcap, None, sink == "off_by_one", head_map)
    view = _arrays.array(sink, name="sink", stream=stream)
    _options.sink(view.shape, heads)
    return _core.Settings(scale, softcap, view, False, head_map)


def _lengths_of(parts: Dict[str, Any]) -> List[Optional[Numbers]]:
    """The six arrays that a Packing is made of. cu_seqlens, cu_seqlens_padded and seqused are of queries and keys alike."""
    six = [parts.get(name) for name in _SIX]
    clash = [name for name, given in zip(_SIX, six) if given is not None]
    for i, name in enumerate(_THREE):
        if parts.get(name) is not None:
            if clash:
                raise error(f"{name} is given together with {clash[0]}",
                            f"it is of both sides: give {name}_q and {name}_k instead, if keys are not where the queries are")
            six[2 * i] = parts[name]
    return six


def _packing_of(q: Sequence[int], k: Sequence[int], format: str, ranks: int, packing: Union[None, Packing, Numbers],
                six: List[Optional[Numbers]]) -> Packing:
    """The packing of the whole problem, from the shapes of q and k and the six arrays that a caller may give."""
    if packing is None and format == "thd":
        # On one rank rows past the last sequence are padding; on many only the global packing knows.
        return Packing(*six, q[0], k[0]) if ranks == 1 else Packing(*six)
    given = [name for name, value in zip(_SIX, six) if value is not None]
    if packing is not None:
        if given:
            raise error(f"packing is given together with {', '.join(given)}", "a packing says it all: leave the others out")
        return as_packing(packing)
    if any(name.startswith("cu_") for name in given):
        raise error(f"{given[0]} is given with format {format}",
                    "a batch has none; say how long its sequences are with seqused_q and seqused_k")
    batch, length = (0, 1) if format == "bshd" else (1, 0)
    if q[batch] != k[batch]:
        raise error(f"q has a batch of {q[batch]} and k one of {k[batch]}", "give as many sequences on both sides")
    return Packing.from_batch(q[batch], q[length] * ranks, k[length] * ranks, *six[4:])


class Attended(Generic[A]):
    """The result of attention: `out` as q, `lse` [rows, heads] in natural log and with the sink, `max_logit` [heads] or None."""

    __slots__ = ("_k", "_layer", "_q", "_run", "_sink", "_stream", "_v", "_views", "lse", "max_logit", "out")

    out: A
    lse: A
    max_logit: Optional[A]
    _q: A
    _k: Array
    _v: Array
    _sink: Union[None, str, Array]
    _views: Tuple[Any, ...]  # q, k, v, settings, format, dtype
    _run: Any  # OneRank or Executor
    _stream: Any
    _layer: int

    def _attend(self, out_shape: List[int], max_logit: bool, stream: int) -> None:
        """The forward pass: fills out, lse and max_logit."""
        q, k, v, settings, format, dtype = self._views
        rows, statistics = out_shape[:-1], _statistics(dtype)
        out, out_view = _arrays.empty(self._q, out_shape, dtype, q.device, stream)
        lse, lse_view = _arrays.empty(self._q, rows, statistics, q.device, stream)
        largest, largest_view = _arrays.empty(self._q, rows[-1:], statistics, q.device, stream) if max_logit else (None, None)
        self._run.forward(q, k, v, format, settings, out_view, lse_view, largest_view, stream=stream, layer=self._layer)
        _arrays.finish(self._q, q.device, stream)
        self.out, self.lse = _arrays.give(self._q, out), _arrays.give(self._q, lse)
        self.max_logit = None if largest is None else _arrays.give(self._q, largest)

    def backward(self, dout: Array) -> Gradients:
        """Gradients (dq, dk, dv, dsink) of sum(out * dout), in the dtypes of q, k, v; dsink is f32, None without a sink.

        May be called more than once. On many ranks every rank must call it; dsink is the sum over them.
        """
        q, k, v, settings, format, dtype = self._views
        device, stream = q.device, _arrays.stream_of(self._q, self._stream)
        grads = [_arrays.empty(x, view.shape, dtype, device, stream) for x, view in zip((self._q, self._k, self._v), (q, k, v))]
        dsink = (None, None)
        if self._sink is not None and not isinstance(self._sink, str):
            dsink = _arrays.empty(self._sink, _arrays.array(self._sink).shape, _statistics(dtype), device, stream)
        out, lse, dout = (_arrays.array(x, name=name, stream=stream)
                          for x, name in ((self.out, "out"), (self.lse, "lse"), (dout, "dout")))
        self._run.backward(q, k, v, format, settings, out, lse, dout, *(g[1] for g in grads), dsink[1], stream=stream,
                           layer=self._layer)
        _arrays.finish(self._q, device, stream)
        dq, dk, dv = (_arrays.give(x, g[0]) for x, g in zip((self._q, self._k, self._v), grads))
        return Gradients(dq, dk, dv, None if dsink[0] is None else _arrays.give(self._sink, dsink[0]))


def _statistics(dtype: DType) -> DType:
    return DType.f64 if dtype is DType.f64 else DType.f32


def rank_schedule(schedule: Schedule, problem: Problem, placed: _core.Layout, rank: int, heads: Tuple[int, int],
                  head_map: Optional[Numbers], shape: Tuple[DType, int, int], machine: Any = None) -> _core.RankSchedule:
    """What the rank does by this schedule or, with auto, by the best predicted one. shape: dtype, dim of q and k, dim of v.

    What a map of heads takes is not predicted: auto is all_gather then.
    """
    if schedule.name == "auto":
        schedule = chosen_schedule(problem, placed, *heads, *shape, machine) if head_map is None else Schedule("all_gather")
    return _core.RankSchedule(problem, placed, rank, *heads, head_map, schedule.name, schedule.options)


def _views_of(tensors: Dict[str, Array], format: str, stream: int) -> List[_core.Array]:
    views = [_arrays.array(x, name=name, stream=stream) for name, x in tensors.items()]
    for name, view in zip(tensors, views):
        if len(view.shape) != (3 if format == "thd" else 4):
            raise error(f"{name} has shape {view.shape} and format {format}",
                        "thd is [t, h, d], bshd [b, s, h, d], sbhd [s, b, h, d]")
    return views


def _own_words(parts: Dict[str, Any], *values: Any) -> Sequence[Any]:
    """The values of _RENAMED's options, taken from `parts` where they stand there under another library's name."""
    if all(name in _OPTIONS for name in parts):
        return values
    named = dict(zip(_RENAMED, values))
    own = own_words("attention", parts, (*_OPTIONS, *named), [name for name in named if named[name] != _RENAMED[name]])
    parts.clear()
    parts.update(own)
    return [parts.pop(name, value) for name, value in named.items()]


def _check_batch(placed: Layout, format: str, shape: Sequence[int], ranks: int) -> None:
    """Raises for batches of which the layout does not give each rank as much as it has."""
    if format != "thd":
        whole = list(shape)
        whole[1 if format == "bshd" else 0] *= ranks
        batch_shape(placed, format, whole, ranks)


def attention(q: A, k: Array, v: Array, packing: Union[None, Packing, Numbers] = None, mask: Optional[Mask] = None, *,
              format: FormatName = "thd", scale: Optional[float] = None, softcap: float = 0.0,
              sink: Union[None, str, Array] = None, head_map: Optional[Numbers] = None, max_logit: bool = False,
              deterministic: bool = False, comm: Optional[Communicator] = None, schedule: AnySchedule = "auto",
              layout: Optional[AnyLayout] = None, checked: bool = False, **options: Unpack[AttentionOptions]) -> Attended[A]:
    """Exact attention over packed sequences.

    q [t, hq, d], k [t, hk, d], v [t, hk, dv] (format "thd"; also "bshd" and "sbhd" batches), f32, bf16 or f16; on CPUs f64 too,
    by kernel "reference", and what ranks sum is then f64. Query head h uses K/V head h // (hq // hk), or head_map[h].

    packing says which sequences there are: a Packing, or cu_seqlens. Or give what it is made of by keyword: cu_seqlens (prefix
    sums of lengths), cu_seqlens_padded if there is padding between sequences, seqused for how much of each is real; if keys
    are not where the queries are, cu_seqlens_q, cu_seqlens_k and so on.
    mask says which keys a query sees: a Mask, or by keyword causal (aligned to the first tokens, or to the last with
    bottom_right), window=(left, right) with -1 for no limit, chunk_size, or your own slices.
    sink: None, "off_by_one", or an array of one logit a query head.

    On many ranks make the same call on each with its own rows (weft.shard), the packing of the whole, a communicator, and a
    schedule (docs/schedules.md): its name or, with options, a weft.Schedule; auto, the default, is the best predicted for the
    machine of weft.set_machine (docs/cost.md), with a head_map all_gather. layout is that of weft.shard; `balanced`, which is the
    default (dual_chunk for batches), goes by the causal mask, whatever this call's mask is. Under a layout that these rows were
    not dealt out in, attention raises (weft.use_layout is for rows from elsewhere).
    checked: ranks compare what they were given, messages carry checksums, and rows that were dealt out under two layouts raise.

    Rarely needed keywords: kernel, by name; layout_mask, what `balanced` goes by instead of the causal mask; layer, the number
    of the model's layer, which checked ranks compare too: without it a rank that has left out a layer looks like the others;
    stream, for arrays on a GPU that are not torch's (torch has a current stream), instead of the default one.

    Names of other libraries are taken where they mean the same (docs/coming-from.md): softmax_scale and sm_scale for scale,
    window_size for window, is_causal, cu_seqlens_kv, qkv_format, cp_comm_type for schedule. max_seqlen_q and max_seqlen_k, the
    length of the longest sequence, are taken and not used: cu_seqlens say it.

    Returns Attended: out, lse, max_logit (with max_logit=True all ranks' largest logit of each head, else None), and
    backward(dout). What cannot be computed raises weft.Error; there is no fallback.

        >>> import numpy as np, weft
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = (rng.standard_normal((16, 2, 8), np.float32) for _ in range(3))
        >>> cu = [0, 7, 10, 16]
        >>> one = weft.attention(q, k, v, cu_seqlens=cu, causal=True)
        >>> def rank(comm):
        ...     mine = [weft.shard(x, comm, cu_seqlens=cu) for x in (q, k, v)]
        ...     return weft.attention(*mine, cu_seqlens=cu, causal=True, comm=comm, schedule="ring").out
        >>> many = weft.unshard(weft.spawn(4, rank), cu_seqlens=cu)
        >>> bool(np.abs(many - one.out).max() < 1e-6)
        True
    """
    parts: Dict[str, Any] = {**options}
    scale, softcap, format, schedule = _own_words(parts, scale, softcap, format, schedule)
    layer, layout_mask, stream = parts.get("layer"), parts.get("layout_mask"), parts.get("stream")
    fmt, how = _arrays.format_of(format), schedule_of(schedule)
    deterministic, max_logit, checked = (_options.option(name, value) for name, value in (
        ("deterministic", deterministic), ("max_logit", max_logit), ("checked", checked)))
    kernel = _options.option("kernel", parts.get("kernel")) or ""
    if comm is not None and not isinstance(comm, Communicator):
        raise error(f"comm is of type {type(comm).__name__}", "give what weft.spawn hands out, or weft.torch.communicator(group)")
    ranks = 1 if comm is None else comm.ranks
    _arrays.refuse_autograd(q, k, v, sink)
    r: Attended[A] = Attended()
    r._q, r._k, r._v, r._sink, r._stream, r._layer = q, k, v, sink, stream, _arrays.layer_number(layer)
    stream = _arrays.stream_of(q, stream)
    views = _views_of({"q": q, "k": k, "v": v}, format, stream)
    q_shape, k_shape, v_shape = (view.shape for view in views)
    packing = _packing_of(q_shape, k_shape, format, ranks, packing, _lengths_of(parts))
    problem = Problem(packing, _mask_of(mask, parts))
    heads, dtype = (q_shape[-2], k_shape[-2]), views[0].dtype
    _options.heads(*heads, head_map)
    r._views = (*views, _settings_of(scale, softcap, sink, head_map, heads[0], stream), fmt, dtype)
    if comm is None:
        # Not used on one rank, but an unknown name is a mistake.
        _options.option("layout", layout if isinstance(layout, str) else None)
        r._run = _core.OneRank(problem, kernel, deterministic)
    else:
        placed = layout_of(layout, packing, ranks, layout_mask, format=format)
        _check_batch(placed, format, q_shape, ranks)
        made = rank_schedule(how, problem, placed, comm.rank, heads, head_map, (dtype, q_shape[-1], v_shape[-1]))
        r._run = _core.Executor(comm, made, kernel, deterministic, checked, views[0].device, stream)
        # After checked ranks have compared their problems.
        _placed.check(placed, comm.rank, _placed.scope_of(comm), checked=checked)
    r._attend([*q_shape[:-1], v_shape[-1]], max_logit, stream)
    return r


def plan(packing: Union[Packing, Numbers], mask: Optional[Mask] = None, *, layout: Optional[AnyLayout] = None,
         layout_mask: Optional[Mask] = None, ranks: int = 1, rank: int = 0, keys: Union[str, int] = "sequence") -> Plan:
    """The slices that one rank attends, in rows of its queries and of a key buffer.

    keys: "sequence" (row = token), "rank" (all ranks' buffers one after another), or the number of the rank whose keys
    are at hand. Without a layout: the whole problem on one rank. layout_mask: as in attention.

        >>> import weft
        >>> weft.plan(weft.Packing([0, 5, 8]), weft.Mask(causal=True), layout="zigzag", ranks=2).slices.tolist()
        [[0, 2, 0, 2, -1152921504606846976, 0], [2, 4, 5, 8, -1152921504606846976, 4]]
    """
    packing = as_packing(packing)
    problem = Problem(packing, mask or Mask())
    if layout is None:
        return _core.whole_plan(problem)
    return _core.rank_plan(problem, layout_of(layout, packing, ranks, layout_mask), rank, keys)
