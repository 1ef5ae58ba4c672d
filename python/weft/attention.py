"""Attention: one call on one rank, and the same call on each of many."""

from typing import Any, NamedTuple, Optional, Tuple, Union

from . import _arrays, _core, _options, _placed
from ._arrays import error
from ._core import Communicator, DType, Mask, Packing, Plan, Problem
from ._types import AnyLayout, Array, Numbers
from .cost import chosen_schedule
from .sharding import as_packing, batch_shape, layout_of


class Gradients(NamedTuple):
    """What Attended.backward returns."""

    dq: object
    dk: object
    dv: object
    dsink: object  # None unless the sink is learnable


def mask_of(mask, causal, bottom_right, window, chunk_size, slices):
    """The Mask that a caller means: an object, or its parts."""
    causal, bottom_right, window, chunk_size = (_options.option(name, value) for name, value in (
        ("causal", causal), ("bottom_right", bottom_right), ("window", window), ("chunk_size", chunk_size)))
    if mask is None:
        return Mask(causal, bottom_right, window, chunk_size, slices)
    if causal or bottom_right or window != (-1, -1) or chunk_size is not None or slices is not None:
        raise error("mask is given together with causal, bottom_right, window, chunk_size or slices",
                    "a mask says it all: leave the others out")
    if not isinstance(mask, Mask):
        raise error(f"mask is of type {type(mask).__name__}", "give a weft.Mask, or causal, window and the like")
    return mask


def settings_of(scale, softcap, sink, head_map, heads, stream=0):
    """What a model sets, checked as far as Python can tell."""
    scale, softcap = _options.option("scale", scale), _options.option("softcap", softcap)
    if sink is None or isinstance(sink, str):
        if sink not in (None, "none", "off_by_one"):
            raise error(f"there is no sink {sink!r}", "use None, 'off_by_one', or an array of one logit a query head")
        return _core.Settings(scale, softcap, None, sink == "off_by_one", head_map)
    view = _arrays.array(sink, name="sink", stream=stream)
    _options.sink(view.shape, heads)
    return _core.Settings(scale, softcap, view, False, head_map)


_SIX = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded", "seqused_q", "seqused_k")


def _both_sides(six, three):
    """cu_seqlens, cu_seqlens_padded and seqused are those of the queries, and keys are where these are."""
    clash = [other for other, given in zip(_SIX, six) if given is not None]
    for name, value in zip(("cu_seqlens", "cu_seqlens_padded", "seqused"), three):
        if value is not None and clash:
            raise error(f"{name} is given together with {clash[0]}",
                        f"it is of both sides: give {name}_q and {name}_k instead, if keys are not where the queries are")
    return tuple(three[at // 2] if at % 2 == 0 and three[at // 2] is not None else value for at, value in enumerate(six))


def _packing(q, k, format, ranks, packing, six):
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


class Attended:
    """The result of attention: `out` as q, `lse` [rows, heads] in natural log and with the sink, `max_logit` [heads] or None."""

    __slots__ = ("out", "lse", "max_logit", "_q", "_k", "_v", "_sink", "_views", "_run", "_stream", "_layer")

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
        given = [_arrays.give(x, g[0]) for x, g in zip((self._q, self._k, self._v), grads)]
        return Gradients(*given, None if dsink[0] is None else _arrays.give(self._sink, dsink[0]))


def _statistics(dtype):
    return DType.f64 if dtype is DType.f64 else DType.f32


class _OneRank:
    """A plan of the whole problem, run where the tensors are."""

    def __init__(self, problem, kernel, deterministic):
        self.plan, self.kernel, self.deterministic = _core.whole_plan(problem), kernel, deterministic

    def forward(self, *args, stream=0, layer=-1):
        _core.attend(self.plan, *args, self.kernel, stream)

    def backward(self, *args, stream=0, layer=-1):
        _core.attend_backward(self.plan, *args, self.kernel, self.deterministic, stream)


def attention(q: Array, k: Array, v: Array, *, cu_seqlens: Optional[Numbers] = None,
              cu_seqlens_padded: Optional[Numbers] = None, seqused: Optional[Numbers] = None,
              cu_seqlens_q: Optional[Numbers] = None, cu_seqlens_k: Optional[Numbers] = None,
              cu_seqlens_q_padded: Optional[Numbers] = None,
              cu_seqlens_k_padded: Optional[Numbers] = None, seqused_q: Optional[Numbers] = None,
              seqused_k: Optional[Numbers] = None, packing: Union[None, Packing, Numbers] = None,
              format: str = "thd", causal: bool = False, bottom_right: bool = False, window: Tuple[int, int] = (-1, -1),
              chunk_size: Optional[int] = None, slices: Any = None, mask: Optional[Mask] = None,
              scale: Optional[float] = None, softcap: float = 0.0, sink: Union[None, str, Array] = None,
              head_map: Optional[Numbers] = None, deterministic: bool = False, kernel: Optional[str] = None,
              max_logit: bool = False, comm: Optional[Communicator] = None, schedule: str = "all_gather",
              layout: Optional[AnyLayout] = None, layout_mask: Optional[Mask] = None, key_order: str = "auto",
              head_groups: int = 1, inside: int = 2, across: str = "ring", stages: int = 4, abreast: int = 2,
              checked: bool = False, layer: Optional[int] = None, stream: Any = None) -> Attended:
    """Exact attention over packed sequences.

    q [t, hq, d], k [t, hk, d], v [t, hk, dv] (format "thd"; also "bshd" and "sbhd" batches), f32, bf16 or f16; on
    CPUs f64 too, by kernel "reference", and what ranks sum is then f64. Query head h uses K/V
    head h // (hq // hk), or head_map[h].

    Which sequences: cu_seqlens (prefix sums of lengths), with cu_seqlens_padded if there is padding between them or seqused
    for how much of each is real; if keys are not where the queries are, cu_seqlens_q, cu_seqlens_k and so on. Or a Packing.
    Which keys: causal (aligned to the first tokens, or to the last with bottom_right), window=(left, right) with -1 for
    no limit, chunk_size, or your own slices. Or a Mask.
    sink: None, "off_by_one", or an array of one logit a query head.

    On many ranks make the same call on each with its own rows (weft.shard), the packing of the whole, a communicator,
    and a schedule: all_gather, ring, all_to_all, hybrid or exact (docs/schedules.md has their options), or auto: the best
    predicted for the machine of weft.set_machine (docs/cost.md). layout is that of weft.shard; `balanced`, which is the
    default (dual_chunk for batches), goes by layout_mask, causal unless one is given, whatever this call's mask is. Under a
    layout that these rows were not dealt out in, attention raises (weft.use_layout is for rows from elsewhere).

    checked: ranks compare what they were given, and messages carry checksums. layer: the number of the layer of a model that
    asks, which checked ranks compare too: without it a rank that has left out a layer looks like the others.

    Arrays on a GPU (all of them on one): work is put into torch's current stream; for arrays of others into the default
    stream, or into `stream`.

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
    fmt = _arrays.format_of(format)
    schedule, key_order, head_groups, inside, across, stages, abreast, deterministic, kernel, max_logit, checked = (
        _options.option(name, value) for name, value in (
            ("schedule", schedule), ("key_order", key_order), ("head_groups", head_groups), ("inside", inside),
            ("across", across), ("stages", stages), ("abreast", abreast), ("deterministic", deterministic), ("kernel", kernel),
            ("max_logit", max_logit), ("checked", checked)))
    if comm is not None and not isinstance(comm, Communicator):
        raise error(f"comm is of type {type(comm).__name__}", "give what weft.spawn hands out, or weft.torch.communicator(group)")
    ranks, layer = 1 if comm is None else comm.ranks, _arrays.layer_number(layer)
    _arrays.refuse_autograd(q, k, v, sink)
    given_stream, stream = stream, _arrays.stream_of(q, stream)
    q_view, k_view, v_view = (_arrays.array(x, name=name, stream=stream) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    q_shape, k_shape, v_shape = q_view.shape, k_view.shape, v_view.shape
    dimensions = 3 if format == "thd" else 4
    for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        if len(shape) != dimensions:
            raise error(f"{name} has shape {shape} and format {format}", "thd is [t, h, d], bshd [b, s, h, d], sbhd [s, b, h, d]")
    six = _both_sides((cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded, seqused_q, seqused_k),
                      (cu_seqlens, cu_seqlens_padded, seqused))
    packing = _packing(q_shape, k_shape, format, ranks, packing, six)
    problem = Problem(packing, mask_of(mask, causal, bottom_right, window, chunk_size, slices))
    heads = q_shape[-2]
    _options.heads(heads, k_shape[-2], head_map)
    settings = settings_of(scale, softcap, sink, head_map, heads, stream)
    if comm is None:
        if isinstance(layout, str):  # says nothing on one rank, but a name that there is not is a mistake
            _options.option("layout", layout)
        run = _OneRank(problem, kernel or "", deterministic)
    else:
        placed = layout_of(layout, packing, ranks, layout_mask, format=format)
        if format != "thd":
            whole = list(q_shape)
            whole[1 if format == "bshd" else 0] *= ranks
            batch_shape(placed, format, whole, ranks)
        options = (schedule, key_order, head_groups, inside, across, stages, abreast)
        if schedule == "auto":
            if head_map is not None:
                raise error("schedule auto with head_map", "name a schedule: what a map of heads takes is not predicted")
            options = chosen_schedule(problem, placed, heads, k_shape[-2], q_view.dtype, q_shape[-1],
                                      v_shape[-1]).options.values()
        made = _core.Schedule(problem, placed, comm.rank, heads, k_shape[-2], head_map, *options)
        run = _core.Executor(comm, made, kernel or "", deterministic, checked, q_view.device, stream)
        _placed.check(placed, comm.rank, _placed.scope_of(comm))  # after checked ranks have compared their problems

    dtype, device = q_view.dtype, q_view.device
    statistics = _statistics(dtype)
    rows = q_shape[:-1]
    out, out_view = _arrays.empty(q, [*rows, v_shape[-1]], dtype, device, stream)
    lse, lse_view = _arrays.empty(q, rows, statistics, device, stream)
    largest, largest_view = _arrays.empty(q, [heads], statistics, device, stream) if max_logit else (None, None)
    run.forward(q_view, k_view, v_view, fmt, settings, out_view, lse_view, largest_view, stream=stream, layer=layer)
    _arrays.finish(q, device, stream)

    r = Attended()
    r.out, r.lse = _arrays.give(q, out), _arrays.give(q, lse)
    r.max_logit = None if largest is None else _arrays.give(q, largest)
    r._q, r._k, r._v, r._sink = q, k, v, sink
    r._views = (q_view, k_view, v_view, settings, fmt, dtype)
    r._run, r._stream, r._layer = run, given_stream, layer
    return r


def plan(packing: Packing, mask: Optional[Mask] = None, *, layout: Optional[AnyLayout] = None,
         layout_mask: Optional[Mask] = None, ranks: int = 1, rank: int = 0, keys: Union[str, int] = "sequence") -> Plan:
    """The slices that one rank attends, in rows of its queries and of a key buffer.

    keys: "sequence" (row = token), "rank" (all ranks' buffers one after another), or the number of the rank whose keys
    are at hand. Without a layout: the whole problem on one rank. layout_mask: as in attention.

        >>> import weft
        >>> weft.plan(weft.Packing([0, 5, 8]), weft.Mask(causal=True), layout="zigzag", ranks=2).slices.tolist()
        [[0, 2, 0, 2, -1152921504606846976, 0], [2, 4, 5, 8, -1152921504606846976, 4]]
    """
    problem = Problem(packing, mask or Mask())
    if layout is None:
        return _core.whole_plan(problem)
    return _core.rank_plan(problem, layout_of(layout, packing, ranks, layout_mask), rank, keys)
