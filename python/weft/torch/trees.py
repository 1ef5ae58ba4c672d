"""Prefix trees with torch: masks of layers, and what rows of a tree say of its sequences' tokens (methods of weft.prepare.Tree).

Rows are those of the tree; results are of the sequences' tokens in the order in which they were given, so that advantages, masks
and old log-probabilities stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .._arrays import error
from .._core import Layout, Mask, Packing
from ..trees import Tree
from . import sharding
from .edges import EdgeLogProbs, Edges, Place, Whole, edges_of
from .packed import pack

if TYPE_CHECKING:
    from .context import ContextParallel
    from .micro_steps import MicroStep


class TreeMasks:
    """Masks of a tree's layers, as slices: what each sequence by itself would see. Each is made once."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.packing = tree, tree.packing
        self._masks: Dict[Mask, Mask] = {}
        self._packed: Dict[Tuple[Mask, Optional[Mask]], Tensor] = {}

    def mask(self, rule: Mask) -> Mask:
        """The slices of a layer with this mask: causal, with a window or chunks. One of slices is taken as it is."""
        if rule.slices is not None:
            return rule
        if rule not in self._masks:
            if not rule.causal:
                raise error("a mask that is not causal, for a tree", "rows of a tree see what is before them in their sequence: "
                            "leave out causal=False, or give slices of your own: mask=weft.Mask(slices=...)")
            # Aligned at either end: queries and keys are the same rows.
            self._masks[rule] = self.tree.mask(rule.window, rule.chunk_size)
        return self._masks[rule]

    def packed(self, rule: Mask, layout_mask: Optional[Mask]) -> Tensor:
        """The packing with these slices and, where they are others, those that the layout goes by, as one tensor."""
        key = rule, layout_mask
        if key not in self._packed:
            mask = self.mask(rule)
            dealt = None if layout_mask is None or mask == layout_mask else layout_mask.slices
            self._packed[key] = pack(self.packing, mask.slices, layout_slices=dealt)
        return self._packed[key]


def tree_positions(tree: Tree, placed: Layout, rank: int) -> Tensor:
    """Position of each of a rank's rows in the sequences that pass it; 0 where a row is padding."""
    held = torch.from_numpy(placed.tokens(rank))
    return torch.where(held < 0, 0, torch.as_tensor(tree.positions)[held])


def tree_position_ids(tree: Tree, packing: Packing, group: Any, *, device: Any = None, **how: Any) -> Tensor:
    """The same of this rank's rows under a layout, which is registered."""
    positions = sharding.shard(torch.as_tensor(tree.positions), packing, group, **how)
    for seen in sharding.watchers:  # on one rank too: a model by itself would take each branch for a document
        seen(positions)
    return sharding._on(device, positions)


class _Held(NamedTuple):
    """Which edges and rows of a tree are at hand. Indices are on the CPU."""

    order: Tensor  # [n] the edges whose row is on this rank, sorted by row
    rows: Tensor  # [n] these rows, as this rank numbers them
    edges: Place  # of all edges, over ranks that have a part of as many numbers each
    part: int  # how many
    tokens: Place  # of rows of the sequences' tokens, over ranks


def _held(tree: Tree, cp: Optional[ContextParallel]) -> _Held:
    edge_rows, token_rows = (torch.as_tensor(x) for x in (tree.edge_rows, tree.rows_of_tokens))
    owners, local = torch.zeros(tree.rows, dtype=torch.int64), torch.arange(tree.rows)
    mine, ranks, each = 0, 1, tree.rows
    if cp is not None:
        mine, ranks, each = cp.rank, cp.ranks, cp.rows
        for rank in range(ranks):
            held = torch.from_numpy(cp.layout.tokens(rank))
            rows = (held >= 0).nonzero()[:, 0]
            owners[held[rows]], local[held[rows]] = rank, rows
    # Edges by rank and row, and where each of them is among those of its rank.
    order = torch.argsort(owners[edge_rows] * max(each, 1) + local[edge_rows], stable=True)
    counts = torch.bincount(owners[edge_rows], minlength=ranks)
    begins, part = F.pad(counts.cumsum(0), (1, 0)), int(counts.max())
    at = torch.empty_like(order)
    at[order] = torch.arange(len(order)) - begins[owners[edge_rows[order]]] + part * owners[edge_rows[order]]
    here = order[begins[mine]:begins[mine + 1]]
    tokens = (owners[token_rows] == mine).nonzero()[:, 0]
    return _Held(here, local[edge_rows[here]], Place(at, here, torch.arange(len(here))), part,
                 Place(owners[token_rows] * each + local[token_rows], tokens, local[token_rows[tokens]]))


def _held_by(tree: Tree, cp: Optional[ContextParallel]) -> _Held:
    """The same, made once for a ContextParallel."""
    if cp is None:
        return _held(tree, None)
    if cp.tree is not tree:
        raise error("the ContextParallel is not of this tree", "make it of the tree: weft.torch.ContextParallel(tree, ...)")
    if cp._held is None:
        cp._held = _held(tree, cp)
    return cp._held


def _held_in(tree: Tree, step: MicroStep) -> _Held:
    """The same of the rows of one micro-sequence on this rank."""
    if step.owner.tree is not tree:
        raise error("the step is not of this tree", "make its MicroSequences of the tree: weft.torch.MicroSequences(tree, ...)")
    begin, end = step.rows.start, step.rows.stop
    edge_rows, token_rows = (torch.as_tensor(x) for x in (tree.edge_rows, tree.rows_of_tokens))
    here = ((edge_rows >= begin) & (edge_rows < end)).nonzero()[:, 0]
    here = here[torch.argsort(edge_rows[here], stable=True)]
    tokens = ((token_rows >= begin) & (token_rows < end)).nonzero()[:, 0]
    return _Held(here, edge_rows[here] - begin, Place(here, here, torch.arange(len(here))), len(here),
                 Place(tokens, tokens, token_rows[tokens] - begin))


def _held_here(tree: Tree, cp: Optional[ContextParallel], step: Optional[MicroStep]) -> _Held:
    if cp is not None and step is not None:
        raise error("cp and step are given", "give step alone: its MicroSequences know the group")
    return _held_by(tree, cp) if step is None else _held_in(tree, step)


def predicted_tokens(tree: Tree, step: MicroStep) -> Tensor:
    """MicroStep.predicts."""
    edges = torch.zeros(len(tree.edge_rows) + 1, dtype=torch.bool)  # the last one: first tokens, which nothing predicts
    edges[_held_in(tree, step).order] = True
    return edges[torch.as_tensor(tree.edge_of_token)]


def _rows_of(x: Tensor, tree: Tree, cp: Optional[ContextParallel], what: str, dims: Optional[int] = None,
             step: Optional[MicroStep] = None) -> Tensor:
    """x without the dimension of a batch of one, checked."""
    rows = step.rows.stop - step.rows.start if step is not None else tree.rows if cp is None else cp.rows
    if x.dim() >= 2 and x.shape[0] == 1 and x.shape[1] == rows and x.dim() != dims and (dims is not None or rows != 1):
        x = x[0]
    if x.dim() < 1 or x.shape[0] != rows or (dims is not None and x.dim() != dims):
        whose = "this rank has of the step" if step is not None else "the tree has" if cp is None else "this rank has"
        raise error(f"{what} of shape {list(x.shape)}, where {whose} {rows} rows",
                    "give those of all rows in dimension 0, or in dimension 1 of a batch of one"
                    + ("" if cp is not None or step is not None else "; cp= says that they are one rank's, step= that they are "
                       "those of one micro-sequence"))
    return x


def _of_tokens(x: Any, tree: Tree, name: str) -> Tensor:
    """Numbers of the sequences' tokens, given so or one a sequence."""
    x = x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))
    cu = torch.as_tensor(tree.cu_seqlens)
    total = int(cu[-1])
    if x.dim() == 1 and x.shape[0] == total:
        return x
    if x.dim() == 1 and x.shape[0] == tree.sequences:
        return torch.repeat_interleave(x, (cu[1:] - cu[:-1]).to(x.device), output_size=total)
    raise error(f"{name} of shape {list(x.shape)}, where {tree.sequences} sequences have {total} tokens",
                "give one number a token of the sequences, in their order, or one a sequence")


def _labels(tree: Tree, tokens: Any) -> Tensor:
    """The token that each edge predicts."""
    if tokens is None:
        if tree.tokens is None and tree.rows:
            raise error("the tree was made of nodes and has no tokens", "give tokens=, the id of each row's token")
        return torch.as_tensor(tree.edge_labels)
    ids = torch.as_tensor(tokens).to("cpu", torch.int64)
    if ids.shape != (tree.rows,):
        raise error(f"tokens of shape {list(ids.shape)}, where the tree has {tree.rows} rows",
                    "give the ids of all rows of the tree, on every rank")
    return ids[torch.as_tensor(tree.edge_next_rows)]


def _head(lm_head: Any) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(weight [vocabulary, dim], bias or None)."""
    if lm_head is None or isinstance(lm_head, Tensor):
        return lm_head, None
    if type(lm_head) is torch.nn.Linear:
        return lm_head.weight, lm_head.bias
    raise error(f"lm_head is a {type(lm_head).__name__}", "give the weight [vocabulary, dim], or a torch.nn.Linear; with "
                "another, give its logits in place of the hidden states")


def _local(tree: Tree, x: Tensor, lm_head: Any, held: _Held, keep: Optional[Tensor], tokens: Any, temperature: float,
           cp: Optional[ContextParallel], step: Optional[MicroStep]) -> Tensor:
    """Log-probabilities of this rank's edges, in the order of held; 0 for those that are not to be kept."""
    if not temperature > 0:
        raise error(f"a temperature of {temperature}", "give one above 0")
    weight, bias = _head(lm_head)
    x = _rows_of(x, tree, cp, "logits" if weight is None else "hidden states", 2, step)
    if torch.is_autocast_enabled(x.device.type) and weight is not None:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if weight is not None and (weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype):
        raise error(f"hidden states of shape {list(x.shape)} and {x.dtype}, lm_head of {list(weight.shape)} and {weight.dtype}",
                    "give [rows, dim] and [vocabulary, dim] of one dtype, or open torch.autocast")
    words = int(x.shape[1] if weight is None else weight.shape[0])
    labels = _labels(tree, tokens)[held.order]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < words:
        raise error(f"tokens {int(labels.min())} to {int(labels.max())}, where there are logits of {words}",
                    "give logits of the whole vocabulary")
    rows = held.rows
    kept = None if keep is None else keep[held.order].nonzero()[:, 0]
    if kept is not None and len(kept) < len(rows):
        rows, labels = rows[kept], labels[kept]
    edges: Edges = edges_of(rows, labels).on(x.device)
    found = EdgeLogProbs.apply(x, weight, bias, edges, temperature)
    if kept is None or len(kept) == len(held.rows):
        return found
    return found.new_zeros(len(held.rows)).index_put((kept.to(x.device),), found)


def _kept(tree: Tree, mask: Any) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(mask of tokens, of edges that any of these wants), on the CPU; None: all."""
    if mask is None:
        return None, None
    wanted = _of_tokens(mask, tree, "mask").to("cpu", torch.bool)
    edge = torch.as_tensor(tree.edge_of_token)
    keep = torch.zeros(len(tree.edge_rows), dtype=torch.bool)
    keep[edge[wanted & (edge >= 0)]] = True
    return wanted, keep


def log_probs(tree: Tree, x: Tensor, lm_head: Any = None, *, cp: Optional[ContextParallel] = None, mask: Any = None,
              tokens: Any = None, temperature: float = 1.0, step: Optional[MicroStep] = None) -> Tensor:
    """Tree.log_probs."""
    held, (wanted, keep) = _held_here(tree, cp, step), _kept(tree, mask)
    found = _local(tree, x, lm_head, held, keep, tokens, temperature, cp, step)
    place, edge = held.edges.on(x.device), torch.as_tensor(tree.edge_of_token).to(x.device)
    if cp is None or cp.ranks == 1:
        every = found.new_zeros(len(tree.edge_rows)).index_put((place.mine,), found)
    else:
        part = F.pad(found, (0, held.part - len(found)))
        every = Whole.apply(part, place, cp.group, cp._times() if part.requires_grad else 1)
    values = F.pad(every, (0, 1))[edge]  # edge -1, of first tokens, is the 0 at the end
    return values if wanted is None else torch.where(wanted.to(x.device), values, 0)


def cross_entropy(tree: Tree, x: Tensor, lm_head: Any = None, *, weights: Any = None, mask: Any = None, reduction: str = "mean",
                  targets: Union[None, int, Tensor] = None, cp: Optional[ContextParallel] = None, tokens: Any = None,
                  temperature: float = 1.0, step: Optional[MicroStep] = None) -> Tensor:
    """Tree.cross_entropy."""
    if reduction not in ("mean", "sum"):
        raise error(f"there is no reduction {reduction!r}", 'give "mean" or "sum"; tree.log_probs gives numbers of all tokens')
    if reduction == "sum" and targets is not None:
        raise error("targets are given with reduction 'sum'", "leave one of them out")
    held, (wanted, keep) = _held_here(tree, cp, step), _kept(tree, mask)
    found = _local(tree, x, lm_head, held, keep, tokens, temperature, cp, step)
    edge = torch.as_tensor(tree.edge_of_token)
    counted = (edge >= 0) if wanted is None else (edge >= 0) & wanted
    which = counted.nonzero()[:, 0]
    of_tokens = torch.ones(len(which), dtype=found.dtype, device=x.device) if weights is None else \
        _of_tokens(weights, tree, "weights").to(x.device, found.dtype)[which.to(x.device)]
    every = found.new_zeros(len(tree.edge_rows)).index_put((edge[which].to(x.device),), of_tokens, accumulate=True)
    total = -(found * every[held.order.to(x.device)]).sum()
    count = 1 if reduction == "sum" else len(which) if targets is None else targets
    if isinstance(count, Tensor):
        count = count.to(x.device).clamp(min=1)
    return total * (1 if cp is None else cp._times()) / (count if isinstance(count, Tensor) else max(count, 1))


def gather(tree: Tree, x: Tensor, *, cp: Optional[ContextParallel] = None, step: Optional[MicroStep] = None) -> Tensor:
    """Tree.gather."""
    held = _held_here(tree, cp, step)
    x = _rows_of(x, tree, cp, "a tensor", step=step)
    place = held.tokens.on(x.device)
    if step is not None:
        return x.new_zeros((len(tree.rows_of_tokens), *x.shape[1:])).index_put((place.mine,), x[place.local])
    if cp is None or cp.ranks == 1:
        return x[place.at]
    return Whole.apply(x, place, cp.group, cp._times() if x.requires_grad else 1)
