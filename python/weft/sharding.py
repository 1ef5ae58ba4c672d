"""From whole arrays to each rank's rows and back."""

from typing import Optional, Sequence, Union

import numpy as np
from numpy.typing import NDArray

from . import _arrays
from ._arrays import error
from ._core import Communicator, Layout, Mask, Packing
from ._types import AnyLayout, Array, Numbers
from .cost import chosen_layout


def packing_of(x, format, *, packing=None, cu_seqlens=None, cu_seqlens_padded=None, seqused=None, length_factor=1):
    """The packing that a caller means: an object, cu_seqlens, or the shape of a batch (`length_factor` times as long)."""
    if packing is not None:
        if cu_seqlens is not None or cu_seqlens_padded is not None or seqused is not None:
            raise error("packing is given together with cu_seqlens or seqused", "a packing says it all: leave the others out")
        return packing
    if format != "thd":
        if cu_seqlens is not None or cu_seqlens_padded is not None:
            raise error(f"cu_seqlens are given with format {format}",
                        "a batch has none; say how long its sequences are with seqused")
        if len(x.shape) < 2:
            raise error(f"format {format} and shape {list(x.shape)}", "the first two dimensions are batch and length")
        batch, length = (x.shape[0], x.shape[1]) if format == "bshd" else (x.shape[1], x.shape[0])
        return Packing.from_batch(batch, length * length_factor, seqused_q=seqused)
    return Packing(cu_seqlens, cu_seqlens_q_padded=cu_seqlens_padded, seqused_q=seqused)


def layout_of(layout, packing, ranks, mask=None, machine=None, format="thd"):
    """The Layout that a caller means: by name, or as it is. auto: the best on the machine that the format allows."""
    if not isinstance(layout, Layout):
        if layout in ("balanced", "auto") and mask is None:
            raise error(f"layout {layout} without a mask",
                        "it deals out work, so it must know the mask: give the same one everywhere")
        if layout == "auto":
            layout = chosen_layout(packing, mask, ranks, machine, format)
        return Layout(layout, packing, ranks, mask)
    if layout.ranks != ranks:
        raise error(f"the layout is of {layout.ranks} ranks, not {ranks}", "make it for as many ranks as there are")
    if layout.packing != packing:
        raise error(f"the layout was made for {layout.packing}, not for {packing}", "make it for the packing at hand")
    return layout


def batch_shape(layout, format, shape, ranks):
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


def _rank_of(comm, ranks):
    if hasattr(comm, "ranks"):
        return comm.rank, comm.ranks
    if ranks is None:
        raise error(f"rank {comm} of how many?", "give ranks=..., or a communicator")
    return int(comm), int(ranks)


def shard(x: Array, comm: Union[Communicator, int], *, ranks: Optional[int] = None, cu_seqlens: Optional[Numbers] = None,
          cu_seqlens_padded: Optional[Numbers] = None, seqused: Optional[Numbers] = None, packing: Optional[Packing] = None,
          layout: AnyLayout = "zigzag", mask: Optional[Mask] = None, side: str = "q", format: str = "thd") -> Array:
    """This rank's rows of an array of all tokens: [t, ...], or a batch [b, s, ...] / [s, b, ...].

    `comm` is a communicator, or the number of a rank (then give `ranks`). `layout` is a name or a Layout; `balanced`
    and `auto` want the `mask` too. Rows that hold no token are zero.

        >>> import numpy as np, weft
        >>> weft.shard(np.arange(16), 0, ranks=4, cu_seqlens=[0, 7, 10, 16], layout="zigzag").tolist()
        [0, 1, 14, 15]
    """
    rank, ranks = _rank_of(comm, ranks)
    fmt = _arrays.format_of(format)
    if isinstance(layout, Layout) and packing is None and cu_seqlens is None and cu_seqlens_padded is None:
        packing = layout.packing
    source = _arrays.writable_kind(x)
    packing = packing_of(source, format, packing=packing, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded,
                         seqused=seqused)
    placed = layout_of(layout, packing, ranks, mask, format=format)
    if format == "thd":
        rows = placed.rows if side == "q" else placed.rows_k
        shape = [rows, *source.shape[1:]]
    else:
        shape = batch_shape(placed, format, source.shape, ranks)
    local = _arrays.empty_rows(source, shape)
    placed.shard(side, rank, _arrays.array(source), fmt, _arrays.array(local, True), fmt, _arrays.stream_of(source))
    return local if source is x else _arrays.from_numpy(x, local)


def unshard(parts: Sequence[Array], *, cu_seqlens: Optional[Numbers] = None, cu_seqlens_padded: Optional[Numbers] = None,
            seqused: Optional[Numbers] = None, packing: Optional[Packing] = None, layout: AnyLayout = "zigzag",
            mask: Optional[Mask] = None, side: str = "q", format: str = "thd") -> Array:
    """All ranks' rows, a list in the order of ranks, as one array of all tokens. Tokens that nobody holds are zero.

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
    fmt = _arrays.format_of(format)
    if isinstance(layout, Layout) and packing is None and cu_seqlens is None and cu_seqlens_padded is None:
        packing = layout.packing
    packing = packing_of(first, format, packing=packing, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded,
                         seqused=seqused, length_factor=ranks)
    placed = layout_of(layout, packing, ranks, mask, format=format)
    if format == "thd":
        shape = [packing.tokens_q if side == "q" else packing.tokens_k, *first.shape[1:]]
    else:
        shape = list(first.shape)
        shape[1 if format == "bshd" else 0] *= ranks
        batch_shape(placed, format, shape, ranks)
    whole = _arrays.empty_rows(first, shape)
    to = _arrays.array(whole, True)
    for rank, part in enumerate(sources):
        if tuple(part.shape[len(part.shape) - len(shape) + 1:]) != tuple(first.shape[1:]) or part.dtype != first.dtype:
            raise error(f"part {rank} has shape {list(part.shape)} and dtype {part.dtype}, "
                        f"part 0 {list(first.shape)} and {first.dtype}",
                        "give parts of one shape and dtype")
        placed.unshard(side, rank, _arrays.array(part), fmt, to, fmt, _arrays.stream_of(first))
    return whole if first is parts[0] else _arrays.from_numpy(parts[0], whole)


def position_ids(comm: Union[Communicator, int], *, ranks: Optional[int] = None, cu_seqlens: Optional[Numbers] = None,
                 cu_seqlens_padded: Optional[Numbers] = None, seqused: Optional[Numbers] = None,
                 packing: Optional[Packing] = None, layout: AnyLayout = "zigzag", mask: Optional[Mask] = None,
                 side: str = "q", format: str = "thd") -> NDArray[np.int64]:
    """Position in its sequence of each of this rank's rows, int64: what rotary embeddings want. 0 where a row is padding.

    `format`: that of `shard`, which layout auto goes by.

        >>> import weft
        >>> weft.position_ids(0, ranks=4, cu_seqlens=[0, 7, 10, 16]).tolist()
        [0, 1, 4, 5]
    """
    rank, ranks = _rank_of(comm, ranks)
    if isinstance(layout, Layout) and packing is None and cu_seqlens is None and cu_seqlens_padded is None:
        packing = layout.packing
    packing = packing_of(None, "thd", packing=packing, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded,
                         seqused=seqused)
    return layout_of(layout, packing, ranks, mask, format=format).position_ids(rank, side)
