"""Context parallelism of one batch as one object: who holds which rows, attention over all of them, and the loss."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Literal, Optional, Sequence, Tuple, TypedDict, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _core
from .._arrays import error
from .._core import Layout, Mask
from ..schedule import schedule_of, unexpected
from ..trees import Tree
from ..types import AnySchedule, LayoutName, Numbers, Side
from . import sharding
from .expand import Expand, wanted
from .functional import context_parallel_attention, in_own_words
from .group import all_gather, name_of, rank_and_ranks
from .packed import OWN, AnyPacking, pack, packing_of
from .trees import TreeMasks, tree_position_ids

if TYPE_CHECKING:
    from typing_extensions import Unpack

Reduction = Literal["sum", "mean"]


class LayerOptions(TypedDict, total=False):
    """Keywords of ContextParallel for all layers, beside its named parameters; a call of attention may give others."""

    causal: bool
    bottom_right: bool
    window: Tuple[int, int]
    chunk_size: Optional[int]
    scale: Optional[float]
    softcap: float
    head_map: Optional[Numbers]
    deterministic: bool
    kernel: Optional[str]
    checked: bool
    sink: Union[None, str, Tensor]
    return_lse: bool
    return_max_logit: bool
    # Other libraries' spellings (weft.spellings).
    is_causal: bool
    window_size: Tuple[int, int]
    softmax_scale: Optional[float]
    sm_scale: Optional[float]
    logits_soft_cap: float
    enable_gqa: bool


class CallOptions(LayerOptions, total=False):
    """Keywords of ContextParallel.attention."""

    schedule: AnySchedule
    cp_comm_type: AnySchedule
    layer: Optional[int]


_MASK = ("causal", "bottom_right", "window", "chunk_size")
# What is said when the object is made, and so is not said again in a call.
_ONCE = ("packing", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "group", "one_rank", "layout", "layout_mask", "format")
_OF_A_LAYER = ("scale", "softcap", "head_map", "schedule", "deterministic", "kernel", "checked", "layer", "sink", "return_lse",
               "return_max_logit")


def _refuse_said_twice(options: Dict[str, Any], what: str) -> None:
    for name in options:
        if name in _ONCE:
            remedy = "rows are those of a pack, [rows, heads, dim]; for batches there is context_parallel_attention" \
                if name == "format" else "make another one (next) if this batch is to have another"
            raise error(f"{name} is given to {what}: it belongs to the ContextParallel", remedy)
        if name not in _MASK and name not in _OF_A_LAYER:
            unexpected(what, name, (*_MASK, *_OF_A_LAYER))


def _mask_of(base: Mask, mask: Optional[Mask], options: Dict[str, Any]) -> Mask:
    """The base, or the mask in its place, or the base with those parts that are among the options, which are taken out."""
    parts = {name: options.pop(name) for name in _MASK if name in options}
    if mask is not None and not isinstance(mask, Mask):
        raise error(f"mask is of type {type(mask).__name__}", "give a weft.Mask, or causal, window and the like")
    if parts and mask is not None:
        raise error(f"mask is given together with {next(iter(parts))}", "a mask says it all: leave the others out")
    if not parts:
        return base if mask is None else mask
    if base.slices is not None:
        raise error(f"{next(iter(parts))} is given where the mask is one of slices", "give the layer's whole mask: mask=")
    return Mask(**{name: parts.get(name, getattr(base, name)) for name in _MASK})


class ContextParallel:
    """One batch spread over ranks: its packing, the ranks, and what they have agreed on, said once.

    packing: of the whole pack, the same on every rank: a weft.Packing, cu_seqlens as a list, an array or a tensor, or a
    weft.prepare.Tree, whose log_probs and cross_entropy then take the place of labels and loss.
    group_or_mesh: a process group, a DeviceMesh of one dimension, the name of a dimension (inside `with mesh:`) or of a
    group, None for the default group. Without any group, and with "", this process has the whole pack; under torchrun without
    init_process_group None is an error.

    mask: causal unless given, here or by its parts (window=...); a layer may have another. layout: a name; balanced, placed
    and auto go by the mask. reduction: what happens to gradients of the ranks, "mean" where they are averaged (DDP, FSDP),
    "sum" where they are added up; loss and scale need it wherever there are several ranks. Other options (schedule, scale,
    softcap, deterministic, kernel, checked) are those of context_parallel_attention, for all layers.

        >>> import torch, weft, weft.torch
        >>> cp = weft.torch.ContextParallel([0, 7, 16])
        >>> ids = cp.shard(torch.arange(16))
        >>> q = torch.randn(len(ids), 2, 8)
        >>> cp.attention(q, q, q).shape, cp.attention(q, q, q, window=(4, 0)).shape
        (torch.Size([16, 2, 8]), torch.Size([16, 2, 8]))
        >>> cp.labels(torch.arange(16)).tolist()[5:9], cp.position_ids().tolist()[5:9]
        ([6, -100, 8, 9], [5, 6, 0, 1])
    """

    def __init__(
        self, packing: Union[AnyPacking, Tree], group_or_mesh: Any = None, *, mask: Optional[Mask] = None,
        layout: LayoutName = "balanced", schedule: AnySchedule = "auto", reduction: Optional[Reduction] = None,
        ignore_index: int = -100, **options: Unpack[LayerOptions],
    ) -> None:
        if not isinstance(layout, str):
            raise error(f"layout is a {type(layout).__name__}", "give its name: it is made anew for every packing")
        if reduction not in (None, "sum", "mean"):
            raise error(f"there is no reduction {reduction!r}", 'give "sum" or "mean": what happens to gradients of the ranks')
        given = dict(in_own_words({**options}))
        _refuse_said_twice(given, "ContextParallel")
        schedule_of(schedule)  # refuses what is none
        self.group = name_of(group_or_mesh)
        self.tree = packing if isinstance(packing, Tree) else None
        masks = self._masks = None if self.tree is None else TreeMasks(self.tree)
        self.packing = packing_of(packing) if masks is None else masks.packing
        self.reduction, self.ignore_index = reduction, ignore_index
        self._settings = dict(given, mask=mask, layout=layout, schedule=schedule, reduction=reduction, ignore_index=ignore_index)
        by_mask = mask is not None or any(name in given for name in _MASK)
        # Of a tree, the rule of which its slices are made.
        self._rule = _mask_of(_core.usual_mask(self.packing), mask, given)
        self.mask = self._rule if masks is None else masks.mask(self._rule)
        self.rank, self.ranks = rank_and_ranks(self.group)
        _, self._layout = sharding.place(self.packing, self.group, layout, self.mask)
        self._options: Dict[str, Any] = {**given, "schedule": schedule, "group": self.group}
        if self.group:
            self._options["layout"] = self._layout.kind
            if (by_mask or masks is not None) and self._layout.kind in ("balanced", "placed"):
                self._options["layout_mask"] = self.mask if masks is None else OWN
        self._packed = pack(self.packing) if masks is None else masks.packed(self._rule, None)
        self._parts = {} if self.mask.slices is not None else {name: getattr(self.mask, name) for name in _MASK}
        self._held: Any = None  # of a tree: its edges on this rank
        self._rows, self._rows_k = int(self._layout.rows), int(self._layout.rows_k)
        self._targets: Union[None, int, Tensor] = None

    def __repr__(self) -> str:
        return (f"ContextParallel({self.packing}, rank {self.rank} of {self.ranks}, {self.mask}, layout="
                f"{self._settings['layout']!r}, schedule={self._settings['schedule']!r}, reduction={self.reduction!r})")

    @property
    def layout(self) -> Layout:
        """Who holds which tokens of this batch."""
        return self._layout

    @property
    def rows(self) -> int:
        """How many rows this rank has, those that hold no token included."""
        return self._rows

    def next(self, packing: Union[AnyPacking, Tree]) -> ContextParallel:
        """The same settings for the next batch."""
        return ContextParallel(packing, self.group, **self._settings)

    def _no_tree(self, what: str) -> None:
        if self.tree is not None:
            raise error(f"{what} of rows of a tree, of which one may have several next tokens",
                        "use tree.log_probs(logits, cp=...) or tree.cross_entropy(hidden, lm_head, cp=...)")

    def _dim(self, x: Tensor, count: int, what: str) -> int:
        """The dimension of tokens or rows: 0, or 1 of a batch of one."""
        if x.dim() >= 1 and x.shape[0] == count:
            return 0
        if x.dim() >= 2 and x.shape[0] == 1 and x.shape[1] == count:
            return 1
        raise error(f"a tensor of shape {list(x.shape)}, where there are {count} {what}",
                    f"give all {what} in dimension 0, or in dimension 1 of a batch of one")

    def shard(self, x: Tensor, *, fill: float = 0, side: Side = "q") -> Tensor:
        """This rank's rows of x, which holds all tokens of the pack: [tokens, ...] or [1, tokens, ...].

        Rows that hold no token become `fill`. side: "k" for keys that are not where the queries are.
        """
        dim = self._dim(x, self.packing.tokens_q if side == "q" else self.packing.tokens_k, "tokens of the pack")
        return sharding.shard(x, self.packing, self.group, layout=self._layout, side=side, dim=dim, fill=fill)

    def unshard(self, x: Tensor, *, side: Side = "q") -> Tensor:
        """All ranks' rows as the whole pack, on every rank. Carries no gradient."""
        dim = self._dim(x, self.rows if side == "q" else self._rows_k, "rows of this rank")
        return sharding.unshard(x, self.packing, self.group, layout=self._layout, side=side, dim=dim)

    def labels(self, input_ids: Tensor, *, shifted: bool = False) -> Tensor:
        """Labels of this rank's rows: the next token of the same document, ignore_index at its end and in padding.

        input_ids: all tokens of the pack, [tokens] or [1, tokens]; or labels of all tokens, ignore_index at those which are
        not to be learned. shifted: these are next tokens already. Counts the targets of the whole pack, for loss and scale.
        """
        self._no_tree("labels")
        dim = self._dim(input_ids, self.packing.tokens_q, "tokens of the pack")
        whole = input_ids[0] if dim == 1 else input_ids
        if not shifted:
            whole = sharding.next_token_labels(whole, self.packing, ignore_index=self.ignore_index)
        self._targets = (whole != self.ignore_index).sum()
        local = self.shard(whole, fill=self.ignore_index)
        return local[None] if dim == 1 else local

    def log_probs(self, logits: Tensor, input_ids: Tensor, *, shifted: bool = False, temperature: float = 1.0) -> Tensor:
        """Log-probability that this rank's rows give to their next token: [rows], in f32 at least, with a gradient.

        logits: of this rank's rows, [rows, vocabulary] or [1, rows, vocabulary]; input_ids and shifted as for labels, so that the
        token after a rank's last row may lie on another one. 0 where there is no next token, or one that is not to be learned.
        temperature: logits are divided by it. unshard gives those of the whole pack, if detached: the row of a token has what is
        said of the one after it.

            >>> import torch, weft.torch
            >>> cp = weft.torch.ContextParallel([0, 2, 3])
            >>> cp.log_probs(torch.zeros(3, 4), torch.tensor([1, 2, 3])).exp()
            tensor([0.2500, 1.0000, 1.0000])
        """
        self._no_tree("log-probabilities")
        if not temperature > 0:
            raise error(f"a temperature of {temperature}", "give one above 0")
        dim = self._dim(logits, self.rows, "rows of this rank")
        if logits.dim() != dim + 2:
            raise error(f"logits of shape {list(logits.shape)}", "give those of all words a row: [rows, vocabulary]")
        labels = self.labels(input_ids, shifted=shifted).view(-1).to(logits.device)
        exact = logits if logits.dtype == torch.float64 else logits.float()
        rows = (exact if temperature == 1 else exact / temperature).flatten(0, -2)
        found = -F.cross_entropy(rows, labels, ignore_index=self.ignore_index, reduction="none")
        return found.view(logits.shape[:-1])

    def position_ids(self, *, side: Side = "q", device: Any = None) -> Tensor:
        """Position of each of this rank's rows in its document; 0 where a row is padding. device: where it is wanted."""
        if self.tree is not None:
            return tree_position_ids(self.tree, self.packing, self.group, layout=self._layout, device=device)
        return sharding.position_ids(self.packing, self.group, layout=self._layout, side=side, device=device)

    def valid_rows(self, *, side: Side = "q", device: Any = None) -> Tensor:
        """True where this rank's row holds a real token."""
        return sharding.valid_rows(self.packing, self.group, layout=self._layout, side=side, device=device)

    def use_layout(self) -> None:
        """Says that rows were dealt out so elsewhere, in a worker of a data loader, say: else attention refuses them."""
        sharding.use_layout(self.packing, self.group, layout=self._layout)

    def _check_rows(self, q: Tensor, k: Tensor, v: Optional[Tensor], expand: Optional[Expand]) -> None:
        if expand is None and v is None:
            raise error("v is left out", "give k and v, or a source and the function that makes them of its rows (expand=)")
        if expand is not None and v is not None:
            raise error("v is given together with expand=", "give a source in place of k and v: attention(q, source, expand=fn)")
        name = "k" if expand is None else "the source"
        for x, what, rows, dims in ((q, "q", self._rows, 3), (k, name, self._rows_k, 3 if expand is None else 2),
                                    (v, "v", self._rows_k, 3)):
            if x is not None and (x.dim() != dims or x.shape[0] != rows):
                shape = "[rows, heads, dim]" if dims == 3 else "[rows, width]"
                raise error(f"{what} has shape {list(x.shape)}, and this rank {rows} rows of the pack",
                            f"give {shape} of the rows that this object's shard gave")
        if expand is not None and self.tree is not None and wanted(expand).positions:
            raise error("expand takes positions, and of rows of a tree it would get those in the packed stream",
                        "apply rotary embeddings to the source, by this object's position_ids")

    def attention(self, q: Tensor, k: Tensor, v: Optional[Tensor] = None, *, mask: Optional[Mask] = None,
                  expand: Optional[Expand] = None, recompute: bool = True, **overrides: Unpack[CallOptions]) -> Any:
        """Attention of this rank's queries [rows, heads, dim] over the whole pack, as of context_parallel_attention: k and v are
        like q, or k is a source [rows, width] of which expand= makes them.

        mask, or parts of it (window=(w, 0), chunk_size=c: the others stay as they are), sink, scale, softcap, schedule and the
        like are this layer's own. Rows must have been dealt out under this object's layout.
        """
        self._check_rows(q, k, v, expand)
        options = dict(in_own_words({**overrides}))
        _refuse_said_twice(options, "attention")
        if expand is not None or recompute is not True:
            options.update(expand=expand, recompute=recompute)
        if mask is None and self._parts:  # numbers alone, which torch.compile can see through
            return context_parallel_attention(q, k, v, self._packed, **{**self._options, **self._parts, **options})
        if self._masks is not None:
            packed, rule = self._packed, self._rule if mask is None and not options else _mask_of(self._rule, mask, options)
            if rule is not self._rule:
                packed = self._masks.packed(rule, self.mask if "layout_mask" in self._options else None)
            return context_parallel_attention(q, k, v, packed, **{**self._options, **options})
        used = _mask_of(self.mask, mask, options)
        return context_parallel_attention(q, k, v, self.packing, used, **{**self._options, **options})

    def _times(self) -> int:
        """How often a gradient is divided by the ranks' number too much."""
        if self.ranks > 1 and self.reduction is None:
            raise error(f"a loss on {self.ranks} ranks, and nobody has said what happens to their gradients",
                        'give ContextParallel reduction="mean" if they are averaged (DDP, FSDP), "sum" if they are added up')
        return self.ranks if self.reduction == "mean" else 1

    def _scale(self, targets: Union[None, int, Tensor]) -> Union[float, Tensor]:
        targets = self._targets if targets is None else targets
        if targets is None:
            raise error("nobody has said how many targets the pack has",
                        "make labels with this object's labels, or give loss targets=, their number over all ranks")
        if isinstance(targets, Tensor):
            return self._times() / targets.clamp(min=1)
        return self._times() / max(targets, 1)

    @property
    def scale(self) -> Union[float, Tensor]:
        """What the sum of this rank's losses is multiplied by, so that gradients become those of the mean over all targets.

        That is 1 / targets where gradients are added up, and ranks / targets where they are averaged.
        """
        return self._scale(None)

    def loss(self, per_token_loss: Tensor, *, targets: Union[None, int, Tensor] = None) -> Tensor:
        """The loss to call backward on: this rank's part of the mean over all targets of the pack, for `reduction`.

        per_token_loss: [rows] or [1, rows], 0 where there is no target (cross_entropy with reduction="none"). Rows that hold
        no token do not count. targets: their number over all ranks, if labels were not made by this object; with several packs
        a step (accumulation, or data parallelism, which takes the mean of the packs) their number in a pack, on average.
        """
        self._no_tree("losses")
        if per_token_loss.dim() == 0:
            raise error("a loss that is one number", 'give one of each row: cross_entropy(..., reduction="none")')
        dim = self._dim(per_token_loss, self.rows, "rows of this rank")
        if per_token_loss.dim() != dim + 1:
            raise error(f"losses of shape {list(per_token_loss.shape)}", "give one number a row: [rows] or [1, rows]")
        rows = per_token_loss[0] if dim == 1 else per_token_loss
        real = torch.from_numpy(self._layout.valid(self.rank)).bool().to(rows.device)
        return torch.where(real, rows, 0).sum() * self._scale(targets)

    def reduce(self, loss: Tensor) -> Tensor:
        """The mean over all targets, from each rank's loss: the same on every rank, for printing. Carries no gradient."""
        return torch.stack(all_gather(loss, self.group)).sum(0) / self._times()


def _labels_among(buffers: Sequence[Tensor], fills: Optional[Sequence[float]], ignore_index: int) -> List[float]:
    """What rows without a token become, of each buffer: ignore_index in those that have it somewhere, unless it is said."""
    if fills is not None:
        if len(fills) != len(buffers):
            raise error(f"{len(buffers)} buffers and {len(fills)} fills", "give one for each buffer, in their order")
        return list(fills)
    return [ignore_index if not x.is_floating_point() and bool((x == ignore_index).any()) else 0 for x in buffers]


@contextlib.contextmanager
def context_parallel(
    packing: AnyPacking, group_or_mesh: Any = None, *, buffers: Sequence[Tensor] = (), fills: Optional[Sequence[float]] = None,
    **settings: Any,
) -> Iterator[ContextParallel]:
    """While it is open, each of the buffers is this rank's rows of what it was; gives the ContextParallel.

    buffers: tensors of all tokens, [tokens, ...] or [1, tokens, ...], none of which needs a gradient; afterwards each is what
    it was before. fills: what rows without a token become, a number a buffer. Unless given it is 0, and ignore_index in a buffer
    where that occurs: such a one holds labels, already shifted, and says how many targets there are. Call backward inside.
    Other arguments are those of ContextParallel.

        >>> import torch, weft, weft.torch
        >>> ids, labels = torch.arange(16), torch.arange(1, 17)
        >>> with weft.torch.context_parallel([0, 7, 16], buffers=[ids, labels]) as cp:
        ...     ids.shape[0] == cp.rows
        True
    """
    cp = ContextParallel(packing, group_or_mesh, **settings)
    if len({id(x) for x in buffers}) < len(buffers):
        raise error("a buffer is given twice", "give each of them once")
    fill_of = _labels_among(buffers, fills, cp.ignore_index)
    counts = [(x != cp.ignore_index).sum() for x, fill in zip(buffers, fill_of) if fill == cp.ignore_index]
    if counts and all(bool(count == counts[0]) for count in counts):
        cp._targets = counts[0]
    before: List[Tuple[Tensor, Tensor]] = []
    try:
        for x, rows in [(x, cp.shard(x, fill=fill)) for x, fill in zip(buffers, fill_of)]:
            whole = x.detach()  # another tensor of the same memory, which nobody writes to meanwhile
            x.set_(rows)
            before.append((x, whole))
        yield cp
    finally:
        for x, whole in before:
            x.set_(whole)
