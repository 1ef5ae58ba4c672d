"""Rows from one layout to another over a group: what changes hands is sent, the rest is copied."""

from __future__ import annotations

import collections
import threading
from typing import Any, List, NamedTuple, Optional, OrderedDict, Tuple

import torch
from torch import Tensor

from .. import _arrays, _core, _placed
from .._arrays import error
from .._core import Layout, Mask
from ..types import AnyLayout, Side
from .group import all_or_nobody, communicator, name_of, scope_of
from .packed import AnyPacking, packing_of
from .sharding import USE, place


class _Moves(NamedTuple):
    """One rank's part: rows to send, in the order of the ranks and of tokens, and where those that arrive belong."""

    send: Tensor
    send_counts: List[int]
    receive: Tensor
    receive_counts: List[int]
    rows: Tuple[int, int]  # of both layouts


_MOST = 64
_known: OrderedDict[Any, _Moves] = collections.OrderedDict()
_lock = threading.Lock()


def _tokens(placed: Layout, side: str) -> List[Tensor]:
    return [torch.from_numpy(placed.tokens(rank, side)) for rank in range(placed.ranks)]


def _owners(held: List[Tensor], tokens: int) -> Tensor:
    owner = torch.full((tokens,), -1)
    for rank, mine in enumerate(held):
        owner[mine[mine >= 0]] = rank
    return owner


def _one_way(mine: Tensor, owner: Tensor, ranks: int) -> Tuple[Tensor, List[int]]:
    """This rank's rows, by the rank that has their tokens on the other side and by token, and how many each has."""
    rows = torch.nonzero(mine >= 0).view(-1)
    rows = rows[torch.argsort(mine[rows])]
    rows = rows[owner[mine[rows]] >= 0]  # padding that the other layout gives to nobody
    other = owner[mine[rows]]
    order = torch.argsort(other, stable=True)
    return rows[order], torch.bincount(other, minlength=ranks).tolist()


def _moves(first: Layout, second: Layout, rank: int, side: str, device: torch.device) -> _Moves:
    key = (first.packing.fingerprints, first.ranks, rank, side, str(device), first.rows, second.rows,
           *(tuple(x.fingerprint(r, side) for r in range(x.ranks)) for x in (first, second)))
    with _lock:
        found = _known.get(key)
        if found is not None:
            _known.move_to_end(key)
            return found
    packing = first.packing
    before, after = _tokens(first, side), _tokens(second, side)
    tokens = packing.tokens_q if side == "q" else packing.tokens_k
    send, send_counts = _one_way(before[rank], _owners(after, tokens), first.ranks)
    receive, receive_counts = _one_way(after[rank], _owners(before, tokens), first.ranks)
    found = _Moves(send.to(device), send_counts, receive.to(device), receive_counts, (len(before[rank]), len(after[rank])))
    with _lock:
        _known[key] = found
        while len(_known) > _MOST:
            _known.popitem(last=False)
    return found


@torch.library.custom_op("weft::exchange_rows", mutates_args=())
def _exchange(x: Tensor, send: Tensor, send_counts: List[int], receive: Tensor, receive_counts: List[int], rows: int,
              group: str) -> Tensor:
    out = x.new_zeros((rows, *x.shape[1:]))
    if x.shape[1:].numel() == 0:  # rows without elements
        return out
    leaving = x.index_select(0, send)
    if not group:
        return out.index_copy_(0, receive, leaving)
    arriving = leaving.new_empty((receive.shape[0], *x.shape[1:]))
    with all_or_nobody(group):
        _core.exchange_rows(communicator(group), _arrays.array(leaving), send_counts, _arrays.array(arriving, True),
                            receive_counts, _arrays.stream_of(x))
    return out.index_copy_(0, receive, arriving)


@_exchange.register_fake
def _(x: Tensor, send: Tensor, send_counts: List[int], receive: Tensor, receive_counts: List[int], rows: int,
      group: str) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, send, ctx.send_counts, receive, ctx.receive_counts, _, ctx.group = inputs
    ctx.save_for_backward(send, receive)
    ctx.rows = x.shape[0]


def _backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
    send, receive = ctx.saved_tensors
    back = torch.ops.weft.exchange_rows(gradient, receive, ctx.receive_counts, send, ctx.send_counts, ctx.rows, ctx.group)
    return back, None, None, None, None, None, None


_exchange.register_autograd(_backward, setup_context=_setup_context)


def rows_between(x: Tensor, first: Layout, second: Layout, rank: int, group: Any, side: Side = "q") -> Tensor:
    """The rank's rows under another layout, as relayout gives them; who lays rows where is neither looked up nor remembered."""
    moves = _moves(first, second, rank, side, x.device)
    if x.dim() < 1 or x.shape[0] != moves.rows[0]:
        raise error(f"x has shape {list(x.shape)}, and rank {rank} has {moves.rows[0]} rows under layout {first.kind}",
                    "give this rank's rows under from_layout, as shard makes them")
    return torch.ops.weft.exchange_rows(x, moves.send, moves.send_counts, moves.receive, moves.receive_counts, moves.rows[1],
                                        name_of(group) if first.ranks > 1 else "")


def relayout(x: Tensor, from_layout: Optional[AnyLayout], to_layout: Optional[AnyLayout], packing: Optional[AnyPacking] = None,
             group: Any = None, *, mask: Optional[Mask] = None, side: Side = "q") -> Tensor:
    """This rank's rows under another layout: [rows, ...] of from_layout to those of to_layout, differentiable in x.

    Each rank sends what changes hands, once; rows that hold no token become zero, and gradients go the other way. x has any
    dtype and any shape after its rows. Layouts are names, of the packing (its mask as in shard), or weft.Layout objects, both of
    one packing and of the group's ranks. Collective: every rank calls it. Attention may then be asked for under to_layout.
    Without a group rows are tokens, whatever the layouts.

        >>> import torch, weft, weft.torch
        >>> x = torch.arange(5.0)
        >>> weft.torch.relayout(x, "zigzag", "contiguous", weft.Packing([0, 5])).tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    given = [x.packing for x in (from_layout, to_layout) if isinstance(x, Layout)]
    if packing is None and not given:
        raise error(f"layouts {from_layout!r} and {to_layout!r} of no packing", "give packing=..., or a weft.Layout")
    whole = given[0] if packing is None else packing_of(packing)
    rank, first = place(whole, group, from_layout, mask)
    second = place(whole, group, to_layout, mask)[1]
    if first.ranks > 1:
        _placed.check(first, rank, scope_of(group), "relayout", USE)
    moved = rows_between(x, first, second, rank, group, side)
    if first.ranks > 1:
        _placed.register(second, rank, scope_of(group), used=True)
    return moved
