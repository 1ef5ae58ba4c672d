"""Log-probabilities at the edges of a tree: what rows say of next tokens, with neither logits nor softmax kept for all rows.

One row may predict several tokens, one a branch: its logits and their logsumexp are computed once. Rows are taken in chunks; the
backward pass makes logits again from hidden states, or reads those that it was given.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .group import all_gather

# Logits of so many numbers are in memory at once: 2^27 in f32 are 512 MiB, 1,024 rows of a vocabulary of 131,072, where the sum
# of the vocabulary's gradient over chunks costs less than its products.
_CHUNK = 1 << 27


class Edges(NamedTuple):
    """Edges of rows at hand, row by row."""

    rows: Tensor  # [n] the rows that have any
    begins: Tensor  # [n + 1] edges of row i are begins[i] to begins[i + 1]; on the CPU
    owners: Tensor  # [edges] which of the rows
    labels: Tensor  # [edges] the token that is predicted

    def on(self, device: Any) -> Edges:
        """The same, with indices where the rows are."""
        return Edges(self.rows.to(device), self.begins, self.owners.to(device), self.labels.to(device))

    def chunks(self, words: int) -> Iterator[Tuple[slice, slice]]:
        """(rows, their edges) of which logits are made at once."""
        count, most = len(self.rows), max(1, _CHUNK // max(words, 1))
        for first in range(0, count, most):
            last = min(first + most, count)
            yield slice(first, last), slice(int(self.begins[first]), int(self.begins[last]))


def edges_of(rows: Tensor, labels: Tensor) -> Edges:
    """Of edges that are sorted by their rows."""
    distinct, owners, counts = torch.unique_consecutive(rows, return_inverse=True, return_counts=True)
    return Edges(distinct, F.pad(counts.cumsum(0), (1, 0)), owners, labels)


def _logits(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], temperature: float) -> Tensor:
    """Logits of some rows, in f32 at least, as a new tensor."""
    made = x if weight is None else F.linear(x, weight, bias)
    exact = made.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return exact if temperature == 1 else exact / temperature


class EdgeLogProbs(torch.autograd.Function):
    """log softmax(logits / temperature)[row, label] of each edge; x: logits, or hidden states if there is a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], edges: Edges,
                temperature: float) -> Tensor:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        found, lse = x.new_empty(len(edges.labels), dtype=exact), x.new_empty(len(edges.rows), dtype=exact)
        with torch.autocast(x.device.type, enabled=False):
            for rows, at in edges.chunks((x if weight is None else weight).shape[-1 if weight is None else 0]):
                logits = _logits(x[edges.rows[rows]], weight, bias, temperature)
                lse[rows] = torch.logsumexp(logits, -1)
                owners = edges.owners[at]
                found[at] = logits[owners - rows.start, edges.labels[at]] - lse[owners]
        ctx.save_for_backward(x, weight, bias, lse)
        ctx.edges, ctx.temperature = edges, temperature
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, weight, bias, lse = ctx.saved_tensors
        edges, temperature = ctx.edges, ctx.temperature
        wanted = ctx.needs_input_grad
        dx = torch.zeros_like(x) if wanted[0] else None
        # Sums over chunks are rounded once, at the end.
        dw = torch.zeros_like(weight, dtype=lse.dtype) if wanted[1] else None
        db = torch.zeros_like(bias, dtype=lse.dtype) if wanted[2] else None
        with torch.autocast(x.device.type, enabled=False):
            for rows, at in edges.chunks((x if weight is None else weight).shape[-1 if weight is None else 0]):
                taken = edges.rows[rows]
                some = x[taken]
                logits = _logits(some, weight, bias, temperature)
                owners, mine = edges.owners[at] - rows.start, gradient[at]
                # index_put_ adds in a fixed order, index_add_ on a GPU does not.
                of_rows = lse.new_zeros(logits.shape[0]).index_put_((owners,), mine, accumulate=True)
                d = logits.sub_(lse[rows, None]).exp_().mul_(-of_rows[:, None])
                d.index_put_((owners, edges.labels[at]), mine, accumulate=True)
                if temperature != 1:
                    d /= temperature
                if db is not None:
                    db += d.sum(0)
                d = d.to(x.dtype)
                if dx is not None:
                    dx[taken] = d if weight is None else d @ weight
                if dw is not None:
                    dw += d.t() @ some
        return (dx, None if dw is None else dw.to(weight.dtype), None if db is None else db.to(bias.dtype), None, None)


class Place(NamedTuple):
    """Where numbers lie that ranks have a part of each: number i is row `at[i]` of all ranks' parts, one after another."""

    at: Tensor
    mine: Tensor  # the numbers that this rank has
    local: Tensor  # and in which rows of its part

    def on(self, device: Any) -> Place:
        return Place(*(x.to(device) for x in self))


class Whole(torch.autograd.Function):
    """All numbers on every rank, from each rank's part. All ranks compute the same from them, so that a rank's gradient is that
    of its part, `times` over: gradients of parameters then add up over the ranks, or with times = ranks their mean is right."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, place: Place, group: str, times: int) -> Tensor:
        ctx.place, ctx.times, ctx.shape = place, times, part.shape
        return torch.cat(all_gather(part, group))[place.at]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        part = gradient.new_zeros(ctx.shape)
        part.index_put_((ctx.place.local,), gradient[ctx.place.mine] * ctx.times, accumulate=True)
        return part, None, None, None
