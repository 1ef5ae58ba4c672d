"""How rows lie on a rank by cu_seqlens in the memory of a GPU, which the host does not read."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._arrays import error
from . import rows
from .group import all_gather, rank_and_ranks, resolve


def on_gpu(packing: Any) -> bool:
    """Whether a packing is given by cu_seqlens on a GPU."""
    return isinstance(packing, torch.Tensor) and packing.is_cuda


class Dealt(NamedTuple):
    """cu_seqlens, and the rank whose rows are meant. Nothing here waits for the GPU."""

    cu: Tensor
    padded: Optional[Tensor]
    layout: Any
    ranks: int
    rank: int

    def shard(self, x: Tensor, fill: float = 0) -> Tensor:
        local = rows.shard(x, self.cu, self.ranks, self.rank, cu_seqlens_padded=self.padded, layout=self.layout)
        if fill != 0:
            empty = self.tokens(x.shape[0]) < 0
            local.masked_fill_(empty.view(-1, *[1] * (local.dim() - 1)), fill)
        return local

    def unshard(self, x: Tensor, group: Any, tokens: Optional[int]) -> Tensor:
        return rows.rank_to_sequence_order(torch.cat(all_gather(x, group)), self.cu, self.ranks, tokens=tokens,
                                           cu_seqlens_padded=self.padded, layout=self.layout)

    def tokens(self, tokens: int) -> Tensor:
        return rows.partition_indices(self.cu, tokens, self.ranks, self.rank, cu_seqlens_padded=self.padded, layout=self.layout)

    def positions(self, tokens: int) -> Tensor:
        """Position of each row in its document, -1 where it holds no real token."""
        held, begins = self.tokens(tokens), self.cu if self.padded is None else self.padded
        last = max(begins.shape[0] - 2, 0)
        which = (torch.searchsorted(begins, held.to(begins.dtype), right=True) - 1).clamp(0, last)
        if begins.shape[0] < 2:  # no documents at all
            return torch.full_like(held, -1, dtype=torch.int64)
        position, used = held - begins[which], self.cu[which + 1] - self.cu[which]
        return position.masked_fill((held < 0) | (position < 0) | (position >= used), -1).long()


def dealt(packing: Tensor, padded: Optional[Tensor], group: Any, layout: Any, side: str) -> Dealt:
    """The rows of this rank of a group; layout: zigzag unless said."""
    if side != "q":
        raise error(f"side {side!r} with cu_seqlens on a GPU", "give the keys' own cu_seqlens as the packing")
    if layout is not None and not isinstance(layout, str):
        raise error(f"layout is a {type(layout).__name__}, and cu_seqlens lie on a GPU", "give its name")
    if layout not in (None, "contiguous", "dual_chunk", "zigzag", "striped"):
        raise error(f"layout {layout}, and cu_seqlens lie on a GPU, where the host does not see lengths",
                    "use zigzag, dual_chunk, contiguous or striped, or keep them on the CPU")
    group = resolve(group)
    rank, ranks = rank_and_ranks(group if group is not None else "")
    # On one rank rows are tokens, those past the last document too.
    return Dealt(packing, padded, "contiguous" if ranks == 1 else layout or "zigzag", ranks, rank)
