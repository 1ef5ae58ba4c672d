"""Pieces of sequence parallelism that frameworks already have, one by one (docs/rows.md)."""

from typing import Optional

from . import _arrays, _core, _placed
from ._core import (
    Layout,
    Mask,
    Packing,
    Problem,
    VarlenStep,
    rank_rows_of_sequence_order,
    ring_tile,
    sequence_rows_of_rank_order,
    sequences_to_chunks,
    valid_rows,
)
from .sharding import layout_of
from .types import AnyLayout, Array

__all__ = [
    "VarlenStep",
    "all_gather_step",
    "rank_rows_of_sequence_order",
    "rank_to_sequence_order",
    "ring_step",
    "ring_tile",
    "sequence_rows_of_rank_order",
    "sequence_to_rank_order",
    "sequences_to_chunks",
    "valid_rows",
]


def sequence_to_rank_order(layout: Layout, sequence: Array, ranks: Array) -> None:
    """Copies rows of `sequence` (row = token) to `ranks` (all ranks' buffers one after another)."""
    _core.sequence_to_rank_order(layout, _arrays.array(sequence), _arrays.array(ranks, True), _arrays.stream_of(sequence))
    for rank in range(layout.ranks):
        _placed.register(layout, rank)


def rank_to_sequence_order(layout: Layout, ranks: Array, sequence: Array) -> None:
    """The way back."""
    _core.rank_to_sequence_order(layout, _arrays.array(ranks), _arrays.array(sequence, True), _arrays.stream_of(ranks))


def all_gather_step(packing: Packing, mask: Mask, *, ranks: int, rank: int, step: int,
                    layout: AnyLayout = "dual_chunk") -> VarlenStep:
    """The varlen call of step 0 or 1 of all-gather attention over a dual_chunk layout.

        >>> import weft
        >>> step = weft.rows.all_gather_step(weft.Packing([0, 8, 16]), weft.Mask(causal=True), ranks=2, rank=0, step=1)
        >>> step.seqused_q.tolist(), step.seqused_k.tolist()
        ([2, 2], [8, 8])
    """
    return _core.all_gather_step(Problem(packing, mask), layout_of(layout, packing, ranks), rank, step)


def ring_step(packing: Packing, mask: Optional[Mask] = None, *, ranks: int, rank: int, step: int,
              layout: AnyLayout = "dual_chunk") -> VarlenStep:
    """The varlen call of a step of causal ring attention over a dual_chunk layout."""
    return _core.ring_step(Problem(packing, mask or Mask(causal=True)), layout_of(layout, packing, ranks), rank, step)
