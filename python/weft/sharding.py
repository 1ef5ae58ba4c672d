"""From whole arrays to each rank's rows and back."""

from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np
from numpy.typing import NDArray

from . import _arrays, _core, _placed
from ._arrays import error
from ._core import Communicator, Layout, Mask, Packing
from .cost import chosen_layout
from .packings import as_packing
from .types import A, AnyLayout, Array, FormatName, LayoutName, Numbers, Side


def packing_of(
    x: Any, format: str, *, packing: Union[None, Packing, Numbers] = None, cu_seqlens: Optional[Numbers] = None,
    cu_seqlens_padded: Optional[Numbers] = None, seqused: Optional[Numbers] = None,
    layout: Optional[AnyLayout] = None, length_factor: int = 1,
) -> Packing:
    """The packing that a caller means: an object, cu_seqlens, or the shape of a batch (`length_factor` times as long)."""
    if isinstance(layout, Layout) and packing is None and cu_seqlens is None and cu_seqlens_padded is None:
        packing = layout.packing
    if packing is not None:
        if cu_seqlens is not None or cu_seqlens_padded is not None or seqused is not None:
            raise error("packing is given together with cu_seqlens or seqused", "a packing says it all: leave the others out")
        return as_packing(packing)
    if format != "thd":
        if cu_seqlens is not None or cu_seqlens_padded is not None:
            raise error(f"cu_seqlens are given with format {format}",
                        "a batch has none; say how long its sequences are with seqused")
        if len(x.shape) < 2:
            raise error(f"format {format} and shape {list(x.shape)}", "the first two dimensions are batch and length")
        batch, length = (x.shape[0], x.shape[1]) if format == "bshd" else (x.shape[1], x.shape[0])
        return Packing.from_batch(batch, length * length_factor, seqused_q=seqused)
    return Packing(cu_seqlens, cu_seqlens_q_padded=cu_seqlens_padded, seqused_q=seqused)


def usual_layout(packing: Packing, ranks: int, format: str) -> LayoutName:
    """The default layout."""
    if format == "thd" or ranks == 1:
        return "balanced"
    for cu in (packing.cu_seqlens_q_padded, packing.cu_seqlens_k_padded):
        for length in (cu[1:] - cu[:-1]).tolist():
            if length % (2 * ranks):
                raise error(f"format {format} with a sequence of {length} tokens on {ranks} ranks: a rank's rows are no batch",
                            f"pad sequences to a multiple of 2*ranks = {2 * ranks}, for layout dual_chunk, or use format thd")
    return "dual_chunk"


def layout_of(
    layout: Optional[AnyLayout], packing: Packing, ranks: int, mask: Optional[Mask] = None, machine: Any = None,
    format: str = "thd",
) -> Layout:
    """The Layout that a caller means: by name, as it is, or None for the usual one (usual_layout).

    balanced, placed and auto go by the mask: causal unless one is given (full, where keys are other sequences than queries).
    auto: the best on the machine that the format allows.
    """
    if mask is not None and not isinstance(mask, Mask):
        raise error(f"the mask that the layout goes by is of type {type(mask).__name__}", "give a weft.Mask")
    if layout is None:
        layout = usual_layout(packing, ranks, format)
    if not isinstance(layout, Layout):
        if not isinstance(layout, str):
            raise error(f"layout is of type {type(layout).__name__}", "give a name or a weft.Layout")
        if layout == "auto":
            mask = mask or _core.usual_mask(packing)
            layout = chosen_layout(packing, mask, ranks, machine, format)
        return Layout(layout, packing, ranks, mask)
    if layout.ranks != ranks:
        raise error(f"the layout is of {layout.ranks} ranks, not {ranks}", "make it for as many ranks as there are")
    if layout.packing != packing:
        raise error(f"the layout was made for {layout.packing}, not for {packing}", "make it for the packing at hand")
    return layout


def batch_shape(layout: Layout, format: str, shape: Sequence[int], ranks: int) -> List[int]:
    """Shape of a rank's rows of a batch. Only some layouts leave a batch a batch."""
    length = 1 if format == "bshd" else 0
    whole = shape[length]
    if ranks > 1 and layout.kind != "dual_chunk" and not (layout.kind == "striped" and whole % ranks == 0):
        raise error(
            f"format {format} with layout {layout.kind} on {ranks} ranks: a rank's rows are no batch",
            "use layout dual_chunk (or striped, with lengths that divide by the ranks), or format thd",
        )
    local = list(shape)
    local[length] = whole // ranks
    return local


def _rank_of(comm: Any, ranks: Optional[int]) -> Tuple[int, int, Any]:
    """(rank, ranks, what is common to the ranks)."""
    if hasattr(comm, "ranks"):
        return comm.rank, comm.ranks, _placed.scope_of(comm)
    if ranks is None:
        raise error(f"rank {comm} of how many?", "give ranks=..., or a communicator")
    return int(comm), int(ranks), None


def shard(x: A, comm: Union[Communicator, int], *, ranks: Optional[int] = None, cu_seqlens: Optional[Numbers] = None,
          cu_seqlens_padded: Optional[Numbers] = None, seqused: Optional[Numbers] = None,
          packing: Union[None, Packing, Numbers] = None, layout: Optional[AnyLayout] = None, mask: Optional[Mask] = None,
          side: Side = "q", format: FormatName = "thd") -> A:
    """This rank's rows of an array of all tokens: [t, ...], or a batch [b, s, ...] / [s, b, ...].

    `comm` is a communicator, or the number of a rank (then give `ranks`). `layout` is a name or a Layout; `balanced`, which
    is the default (dual_chunk for batches), and `auto` go by `mask`, causal unless one is given. Rows that hold no token are
    zero. The layout is remembered: attention under another raises.

        >>> import numpy as np, weft
        >>> weft.shard(np.arange(16), 0, ranks=4, cu_seqlens=[0, 7, 10, 16], layout="zigzag").tolist()
        [0, 1, 14, 15]
    """
    rank, ranks, scope = _rank_of(comm, ranks)
    _arrays.format_of(format)
    source = _arrays.writable_kind(x)
    packing = packing_of(source, format, packing=packing, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded,
                         seqused=seqused, layout=layout)
    placed = layout_of(layout, packing, ranks, mask, format=format)
    local = shard_rows(source, placed, rank, side, format)
    _placed.register(placed, rank, scope)
    return local if source is x else _arrays.from_numpy(x, local)


def shard_rows(source: Array, placed: Layout, rank: int, side: str, format: str = "thd") -> Array:
    """The rank's rows of an array; the layout is not registered."""
    if format == "thd":
        rows = placed.rows if side == "q" else placed.rows_k
        shape = [rows, *source.shape[1:]]
    else:
        shape = batch_shape(placed, format, source.shape, placed.ranks)
    fmt, local = _arrays.format_of(format), _arrays.empty_rows(source, shape)
    placed.shard(side, rank, _arrays.array(source), fmt, _arrays.array(local, True), fmt, _arrays.stream_of(source))
    return local


def unshard(parts: Sequence[A], *, cu_seqlens: Optional[Numbers] = None, cu_seqlens_padded: Optional[Numbers] = None,
            seqused: Optional[Numbers] = None, packing: Union[None, Packing, Numbers] = None,
            layout: Optional[AnyLayout] = None, mask: Optional[Mask] = None, side: Side = "q", format: FormatName = "thd") -> A:
    """All ranks' rows, a list in the order of ranks, as one array of all tokens. Tokens that nobody holds are zero.

    `layout` and `mask` as in shard; a layout that this process has not dealt these rows out under raises (use_layout).

        >>> import numpy as np, weft
        >>> parts = [weft.shard(np.arange(16), r, ranks=4, cu_seqlens=[0, 7, 10, 16]) for r in range(4)]
        >>> weft.unshard(parts, cu_seqlens=[0, 7, 10, 16]).tolist() == list(range(16))
        True
    """
    parts = _arrays.listed(parts, "parts")
    if not parts:
        raise error("no parts to put together", "give the rows of every rank, in order")
    sources = [_arrays.writable_kind(p) for p in parts]
    first, ranks = sources[0], len(sources)
    _arrays.format_of(format)
    for rank, part in enumerate(sources):
        if tuple(part.shape[1:]) != tuple(first.shape[1:]) or part.dtype != first.dtype:
            raise error(f"part {rank} has shape {list(part.shape)} and dtype {part.dtype}, "
                        f"part 0 {list(first.shape)} and {first.dtype}",
                        "give parts of one shape and dtype")
    packing = packing_of(first, format, packing=packing, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded,
                         seqused=seqused, layout=layout, length_factor=ranks)
    placed = layout_of(layout, packing, ranks, mask, format=format)
    _placed.check_all(placed, side)
    whole = unshard_rows(sources, placed, side, format)
    return whole if first is parts[0] else _arrays.from_numpy(parts[0], whole)


def unshard_rows(parts: Sequence[Array], placed: Layout, side: str, format: str = "thd") -> Array:
    """All ranks' rows as one array; the layout is not checked."""
    first, packing, fmt = parts[0], placed.packing, _arrays.format_of(format)
    if format == "thd":
        shape = [packing.tokens_q if side == "q" else packing.tokens_k, *first.shape[1:]]
    else:
        shape = list(first.shape)
        shape[1 if format == "bshd" else 0] *= placed.ranks
        batch_shape(placed, format, shape, placed.ranks)
    whole = _arrays.empty_rows(first, shape)
    to = _arrays.array(whole, True)
    for rank, part in enumerate(parts):
        placed.unshard(side, rank, _arrays.array(part), fmt, to, fmt, _arrays.stream_of(first))
    return whole


def position_ids(comm: Union[Communicator, int], *, ranks: Optional[int] = None, cu_seqlens: Optional[Numbers] = None,
                 cu_seqlens_padded: Optional[Numbers] = None, seqused: Optional[Numbers] = None,
                 packing: Union[None, Packing, Numbers] = None, layout: Optional[AnyLayout] = None, mask: Optional[Mask] = None,
                 side: Side = "q", format: FormatName = "thd") -> NDArray[np.int64]:
    """Position in its sequence of each of this rank's rows, int64: what rotary embeddings want. 0 where a row is padding.

    `layout`, `mask` and `format`: those of `shard`.

        >>> import weft
        >>> weft.position_ids(0, ranks=4, cu_seqlens=[0, 7, 10, 16], layout="zigzag").tolist()
        [0, 1, 4, 5]
    """
    rank, ranks, scope = _rank_of(comm, ranks)
    packing = packing_of(None, "thd", packing=packing, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded,
                         seqused=seqused, layout=layout)
    placed = layout_of(layout, packing, ranks, mask, format=format)
    positions = placed.position_ids(rank, side)
    _placed.register(placed, rank, scope)
    return positions


def use_layout(packing: Union[Packing, Numbers], comm: Union[None, Communicator, int] = None, *, ranks: Optional[int] = None,
               layout: Optional[AnyLayout] = None, mask: Optional[Mask] = None, format: FormatName = "thd") -> None:
    """Says that rows of a packing lie so, which were dealt out elsewhere: by another process, or by another tool.

    `shard` and `position_ids` say it themselves; attention and `unshard` under a layout of which nobody has said it raise.
    `comm` is a communicator or the number of a rank, None all of `ranks`; the rest is as in `shard`.

        >>> import numpy as np, weft
        >>> cu, parts = [0, 7, 10, 16], [np.arange(8), np.arange(8, 16)]     # read from a file, say
        >>> weft.use_layout(cu, ranks=2, layout="contiguous")
        >>> weft.unshard(parts, cu_seqlens=cu, layout="contiguous").tolist() == list(range(16))
        True
    """
    if comm is None and ranks is None:
        raise error("neither comm nor ranks is given", "give a communicator, or ranks=...")
    packing, rank, scope = as_packing(packing), 0, None
    count = int(ranks or 0)
    if comm is not None:
        rank, count, scope = _rank_of(comm, ranks)
    placed = layout_of(layout, packing, count, mask, format=format)
    for one in range(count) if comm is None else (rank,):
        _placed.register(placed, one, scope, used=True)
