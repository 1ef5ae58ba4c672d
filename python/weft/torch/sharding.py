"""Rows of inputs, labels and positions between the whole pack and this rank."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from .. import _placed
from .. import sharding as _sharding
from .._arrays import error
from .._core import Layout, Mask
from ..types import AnyLayout, FormatName, Side
from .dealt import Dealt, dealt, on_gpu
from .group import all_gather, rank_and_ranks, resolve, scope_of
from .packed import AnyPacking, packing_of

USE = "weft.torch.use_layout(packing, group, layout=...)"

watchers: List[Callable[[Tensor], Any]] = []  # called with each rank's position_ids where there are several ranks


def place(
    packing: AnyPacking, group: Any, layout: Optional[AnyLayout], mask: Optional[Mask], format: str = "thd"
) -> Tuple[int, Layout]:
    """(rank, Layout) of this rank; without a group it has everything, rows past the last sequence too."""
    group, packing = resolve(group), packing_of(packing)
    if group is None:
        return 0, Layout.explicit(packing, [[(0, 0, packing.tokens_q)]], [[(0, 0, packing.tokens_k)]])
    rank, ranks = rank_and_ranks(group)
    return rank, _sharding.layout_of(layout, packing, ranks, mask, format=format)


def _deal(
    packing: AnyPacking, group: Any, layout: Optional[AnyLayout], mask: Optional[Mask], format: str = "thd", used: bool = False
) -> Tuple[int, Layout]:
    """The same, and the layout is registered, because attention must use the same one."""
    rank, placed = place(packing, group, layout, mask, format)
    if placed.ranks > 1:
        _placed.register(placed, rank, scope_of(group), used)
    return rank, placed


def _on(device: Any, x: Tensor) -> Tensor:
    """A tensor of the CPU on a device; the CPU does not wait until it is there."""
    if device is None:
        return x
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def _rows_first(x: Tensor, dim: int) -> Tensor:
    if dim == 0:
        return x
    if dim != 1 or x.dim() < 2 or x.shape[0] != 1:
        raise error(f"dim {dim} of shape {list(x.shape)}", "tokens are in dimension 0, or in dimension 1 of a batch of one")
    return x[0]


def _by_offsets(packing: Any, padded: Optional[Tensor], group: Any, layout: Optional[AnyLayout],
                side: Side) -> Optional[Dealt]:
    """How rows lie by cu_seqlens on a GPU; None if the packing is one that the host can read."""
    if on_gpu(packing):
        return dealt(packing, padded, group, layout, side)
    if padded is not None:
        raise error("cu_seqlens_padded are given with a packing on the CPU", "put them into it: weft.Packing(cu_seqlens, "
                    "cu_seqlens_q_padded=...)")
    return None


def _of_how_many(tokens: Optional[int]) -> int:
    if tokens is None:
        raise error("cu_seqlens lie on a GPU, and the number of tokens is not given", "give tokens=..., those of the pack")
    return tokens


def shard(x: Tensor, packing: AnyPacking, group: Any = None, *, layout: Optional[AnyLayout] = None,
          mask: Optional[Mask] = None, side: Side = "q", dim: int = 0, fill: float = 0,
          cu_seqlens_padded: Optional[Tensor] = None) -> Tensor:
    """This rank's rows of x, which holds all tokens of the pack in dimension `dim` (0, or 1 of a batch of one).

    Rows that hold no token become `fill`: -100 for labels. side: "k" for keys that are not where the queries are; layout:
    "balanced" unless said otherwise, which goes by mask, causal unless one is given. The layout is remembered for the group
    and packing: attention under another raises.

    The packing may also be cu_seqlens on x's GPU (with cu_seqlens_padded, if they are): nobody waits for it then, the layout is
    zigzag unless said, a rank has rows for any offsets within x (weft.torch.rows.rows_for), and nothing is remembered.

        >>> import torch, weft, weft.torch
        >>> weft.torch.shard(torch.arange(16), weft.Packing([0, 7, 16])).tolist() == list(range(16))
        True
    """
    if x.requires_grad:
        raise error("shard of a tensor that requires a gradient", "shard inputs, not activations; detach it if that is meant")
    there = _by_offsets(packing, cu_seqlens_padded, group, layout, side)
    if there is not None:
        local = there.shard(_rows_first(x, dim), fill)
        return local if dim == 0 else local[None]
    rank, placed = _deal(packing, group, layout, mask)
    local = _sharding.shard_rows(_rows_first(x, dim).contiguous(), placed, rank, side)
    if fill != 0:
        empty = _on(x.device, torch.from_numpy(placed.tokens(rank, side) < 0))
        local.masked_fill_(empty.view(-1, *[1] * (local.dim() - 1)), fill)
    return local if dim == 0 else local[None]


def unshard(x: Tensor, packing: AnyPacking, group: Any = None, *, layout: Optional[AnyLayout] = None,
            mask: Optional[Mask] = None, side: Side = "q", dim: int = 0, cu_seqlens_padded: Optional[Tensor] = None,
            tokens: Optional[int] = None) -> Tensor:
    """All ranks' rows as the whole pack, on every rank. Carries no gradient. layout and mask: those of shard.

    cu_seqlens on a GPU as in shard; tokens: of the whole pack then, all ranks' rows unless said.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise error("unshard of a tensor that requires a gradient",
                    "it carries none: detach it first, or compute the loss on the rank's rows")
    there = _by_offsets(packing, cu_seqlens_padded, group, layout, side)
    if there is not None:
        whole = there.unshard(_rows_first(x, dim), group, tokens)
        return whole if dim == 0 else whole[None]
    rank, placed = place(packing, group, layout, mask)
    _placed.check(placed, rank, scope_of(group), "unshard", USE)
    whole = _sharding.unshard_rows(all_gather(_rows_first(x, dim), group), placed, side)
    return whole if dim == 0 else whole[None]


def position_ids(packing: AnyPacking, group: Any = None, *, layout: Optional[AnyLayout] = None, mask: Optional[Mask] = None,
                 side: Side = "q", format: FormatName = "thd", device: Any = None, cu_seqlens_padded: Optional[Tensor] = None,
                 tokens: Optional[int] = None) -> Tensor:
    """Position of each of this rank's rows in its document, int64; 0 where a row is padding. device: where it is wanted.

    layout and mask: those of shard; format: that of attention, which for batches has another usual layout. cu_seqlens on a GPU
    as in shard; tokens, the rows of the whole pack, must be given then.

        >>> import weft, weft.torch
        >>> weft.torch.position_ids(weft.Packing([0, 3, 5])).tolist()
        [0, 1, 2, 0, 1]
    """
    there = _by_offsets(packing, cu_seqlens_padded, group, layout, side)
    if there is not None:
        return there.positions(_of_how_many(tokens)).clamp(min=0)
    rank, placed = _deal(packing, group, layout, mask, format)
    positions = torch.from_numpy(placed.position_ids(rank, side))
    if placed.ranks > 1:
        for seen in watchers:
            seen(positions)
    return _on(device, positions)


def valid_rows(packing: AnyPacking, group: Any = None, *, layout: Optional[AnyLayout] = None, mask: Optional[Mask] = None,
               side: Side = "q", format: FormatName = "thd", device: Any = None, cu_seqlens_padded: Optional[Tensor] = None,
               tokens: Optional[int] = None) -> Tensor:
    """True where this rank's row holds a real token. Arguments as of position_ids."""
    there = _by_offsets(packing, cu_seqlens_padded, group, layout, side)
    if there is not None:
        return there.positions(_of_how_many(tokens)) >= 0
    rank, placed = _deal(packing, group, layout, mask, format)
    return _on(device, torch.from_numpy(placed.valid(rank, side)).bool())


def use_layout(packing: AnyPacking, group: Any = None, *, layout: Optional[AnyLayout] = None, mask: Optional[Mask] = None,
               format: FormatName = "thd") -> None:
    """Says that this rank's rows of the pack lie so, which were dealt out elsewhere: in a worker of a data loader, say.

    shard, position_ids and valid_rows say it themselves, in the process that calls them; attention and unshard under a
    layout of which nobody has said it raise. Arguments as of position_ids.
    """
    _deal(packing, group, layout, mask, format, used=True)


def next_token_labels(input_ids: Tensor, packing: AnyPacking, *, ignore_index: int = -100) -> Tensor:
    """Labels of all tokens [tokens]: the next token of the same document; ignore_index at its end and in padding.

    Made before sharding, because a rank's next token may lie on another one.

        >>> import torch, weft, weft.torch
        >>> weft.torch.next_token_labels(torch.tensor([5, 6, 7, 8, 9]), weft.Packing([0, 3, 5])).tolist()
        [6, 7, -100, 9, -100]
    """
    packing = packing_of(packing)
    if input_ids.dim() != 1 or input_ids.shape[0] != packing.tokens_q:
        raise error(f"input_ids has shape {list(input_ids.shape)} and the packing {packing.tokens_q} tokens",
                    "give all tokens, in one dimension")
    labels = torch.full_like(input_ids, ignore_index)
    begins, lengths = torch.from_numpy(packing.cu_seqlens_q_padded)[:-1], torch.from_numpy(packing.lengths_q)
    owners = torch.repeat_interleave(torch.arange(len(lengths)), (lengths - 1).clamp(min=0))
    first = torch.cumsum((lengths - 1).clamp(min=0), 0) - (lengths - 1).clamp(min=0)
    at = _on(input_ids.device, begins[owners] + torch.arange(len(owners)) - first[owners])
    labels[at] = input_ids[at + 1]
    return labels


__all__ = ["Layout", "next_token_labels", "position_ids", "shard", "unshard", "use_layout", "valid_rows"]
