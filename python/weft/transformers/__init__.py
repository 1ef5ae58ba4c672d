"""Models of the library transformers on packed batches spread over ranks: attn_implementation="weft".

    import weft.transformers                                             # registers "weft"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="weft")
    packing = weft.Packing(cu_seqlens)                                   # of the whole pack, the same on every rank
    batch = weft.transformers.inputs(input_ids, packing, group)          # this rank's rows
    with weft.transformers.packed(packing, group, schedule="ring"):
        loss = model(**batch, use_cache=False).loss                      # of this rank's rows
    loss.backward()                                                      # then sum gradients over the group

Whatever would change the result and is not understood raises weft.Error: nothing is ignored. docs/transformers.md says
what is mapped and what is refused.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Dict, List, NoReturn, Optional, Tuple, TypedDict, Union

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .. import _outside
from .. import torch as _torch
from .._arrays import error
from .._core import Mask, Packing
from ..schedule import unexpected
from ..torch.group import name_of, rank_and_ranks
from ..torch.op import how_of
from ..torch.packed import OWN, AnyPacking, packing_of
from ..torch.sharding import place
from ..torch.trees import TreeMasks, tree_position_ids, tree_positions
from ..trees import Tree
from ..types import AnySchedule, LayoutName
from . import _latent, _recurrent, _routers
from ._batches import (
    Batch,
    current,
    only_attention,
    only_known_layers,
    other_layers,
    plain_batch,
    rule_of,
    told_batch,
    unmasked_batch,
    varlen_batch,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["inputs", "packed", "register"]

NAME = "weft"


class _Passed(TypedDict, total=False):
    """Options that packed() passes on to attention, beside schedule; everything else comes from the model."""

    deterministic: bool
    kernel: Optional[str]
    checked: bool


_OPTIONS = ("schedule", *_Passed.__annotations__)

# Keyword arguments that models hand down to attention and that do not change it.
_HARMLESS = frozenset((
    "cache_position", "labels", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "seq_idx", "shift_labels",
    "use_cache",
))

_REASONS = {
    "cache": ("a paged cache", "generate with another attn_implementation"),
    "head_mask": ("weights of heads", "leave it out"),
    "output_attentions": ("the weights of attention, which are never all at hand",
                          'use attn_implementation="eager" to look at them'),
    "position_bias": ("a bias on the logits, which Weft does not have", "use another attn_implementation"),
}

_current = current
_entered, _lock = 0, threading.Lock()


def _pack_of(packing: Union[AnyPacking, Tree], mask: Optional[Mask]) -> Tuple[Optional[TreeMasks], Packing, Mask]:
    """(masks of layers if it is a tree, the packing, the mask that layouts go by)."""
    masks, rule = TreeMasks(packing) if isinstance(packing, Tree) else None, mask or Mask(causal=True)
    return (None, packing_of(packing), rule) if masks is None else (masks, masks.packing, masks.mask(rule))


class packed:
    """While it is open, models with attn_implementation="weft" take their rows for this rank's rows of a pack.

    packing is that of the whole pack, the same on every rank, or a weft.prepare.Tree: then each layer has the tree's slices for
    its own window or chunks. group is a process group or its name, None the default one; without any the rows are the whole pack.
    layout and mask must be those of the inputs: `balanced`, by the causal mask, unless said otherwise. Other options as in
    weft.torch: schedule (a name, or a weft.Schedule), deterministic, kernel, checked.

    latent=True: of layers with multi-head latent attention (DeepSeek-V2, V3 and others that have a method expand_kv) the latent
    moves, and each rank makes the keys and values that it attends (docs/latent.md); again in the backward, unless
    recompute=False, which keeps them.

    Only the forward pass has to be inside. Rows are checked against their positions wherever a model shows them;
    check_positions=False is for models whose positions are meant to be other than those in the document.

        >>> import torch, transformers, weft, weft.transformers
        >>> config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                                   num_attention_heads=2)
        >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="weft")
        >>> packing = weft.Packing([0, 7, 10, 16])
        >>> batch = weft.transformers.inputs(torch.arange(16), packing)
        >>> with weft.transformers.packed(packing):
        ...     result = model(**batch, use_cache=False)
        >>> result.logits.shape, bool(result.loss > 0)
        (torch.Size([1, 16, 32]), True)
    """

    def __init__(
        self, packing: Union[AnyPacking, Tree], group: Any = None, layout: Optional[LayoutName] = None,
        schedule: AnySchedule = "auto", *, mask: Optional[Mask] = None, check_positions: bool = True, latent: bool = False,
        recompute: bool = True, **given: Unpack[_Passed],
    ) -> None:
        options: Dict[str, Any] = {"schedule": schedule, **given}
        for name in options:
            if name not in _OPTIONS:
                unexpected("packed", name, ("group", "layout", "mask", "check_positions", "latent", "recompute", *_OPTIONS))
        if not isinstance(layout, (str, type(None))):
            raise error(f"layout is a {type(layout).__name__}", "give its name")
        how_of(layout=layout, **options)  # refuses unknown names and wrong types at once
        self.masks, packing, mask = _pack_of(packing, mask)
        if not packing.self_attention:
            raise error("the packing has other sequences for k than for q", "give one of cu_seqlens_q alone")
        self.rank, self.placed = place(packing, group, layout, mask)
        self.packing, self.mask = packing, mask
        self.rows = self.placed.rows
        self.positions = torch.from_numpy(self.placed.position_ids(self.rank)) if self.masks is None else tree_positions(
            self.masks.tree, self.placed, self.rank)
        if not latent and recompute is not True:
            raise error("recompute is given without latent=True", "leave it out: it is about keys and values made of a latent")
        self.check_positions, self.latent, self.recompute = check_positions, latent, recompute
        if latent and not _latent.take_over():
            raise error("latent=True, and no model that is loaded makes keys and values of a latent by a method expand_kv",
                        "make the model first; the version of transformers that docs/transformers.md names has DeepSeek-V3's")
        self.options = {"group": name_of(group), "layout": layout, "layout_mask": mask if self.masks is None else OWN, **options}
        self.used = False
        self.recurrent: Optional[bool] = None  # whether a recurrent layer has run; None: the model has none
        self.tokens: List[Any] = []
        self._documents: Optional[_recurrent.Documents] = None

    def __enter__(self) -> packed:
        global _entered
        self.tokens.append(_current.set(self))
        with _lock:
            _entered += 1
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        global _entered
        with _lock:
            _entered -= 1
        _current.reset(self.tokens.pop())
        if kind is None and not self.used:
            raise error("no layer of a model asked Weft for attention inside packed()",
                        'make the model with attn_implementation="weft", and call it inside; not every model of transformers '
                        "lets its attention be chosen")
        if kind is None and self.recurrent is False:
            raise error("the model has recurrent layers, and none of them ran on whole documents",
                        "use the version of transformers that docs/transformers.md names")

    def documents(self) -> _recurrent.Documents:
        """Where documents lie while a recurrent layer of a hybrid model runs."""
        if self.masks is not None:
            raise error("a recurrent layer on rows of a tree, of which one may have several next ones",
                        "give the sequences one by one, as a weft.Packing")
        if self._documents is None:
            self._documents = _recurrent.Documents(self.packing, self.placed, self.rank, self.options["group"])
        return self._documents


def _open() -> Optional[packed]:
    """The pack that this thread is in."""
    here = _current.get()
    if here is None and _entered:
        raise error("packed() is open in another thread than the one that calls the model", "open it in the thread of the call")
    return here


def inputs(input_ids: Tensor, packing: Union[AnyPacking, Tree], group: Any = None, *, layout: Optional[LayoutName] = None,
           mask: Optional[Mask] = None, labels: Union[bool, None, Tensor] = True) -> Dict[str, Tensor]:
    """This rank's inputs of a model, from all tokens of the pack: input_ids [tokens] or [1, tokens]. packing: a
    weft.Packing, or cu_seqlens. The model must be called inside packed(): outside, on more than one rank, it raises.
    Of a weft.prepare.Tree, input_ids are its tokens, a row each, and there are no labels, because a row may have several next
    tokens: tree.log_probs and tree.cross_entropy take the model's results.

    Gives input_ids and position_ids, both [1, rows]; and unless labels is False: labels and shift_labels, both the next
    token of the same document (-100 at its end and in padding), and num_items_in_batch, how many there are in the pack.
    labels=True means input_ids; give a tensor like it to train on some tokens only (-100 at the others).

    A model that is given labels alone shifts them, by rows, which on one rank's rows is wrong; given shift_labels it does
    not. Its loss is then the sum over this rank's rows over num_items_in_batch: summed over the ranks, it is the mean over
    the pack, and so are gradients.

        >>> import torch, weft, weft.transformers
        >>> batch = weft.transformers.inputs(torch.tensor([5, 6, 7, 8, 9]), weft.Packing([0, 3, 5]))
        >>> {name: value.tolist() for name, value in batch.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'input_ids': [[5, 6, 7, 8, 9]], 'position_ids': [[0, 1, 2, 0, 1]], 'labels': [[6, 7, -100, 9, -100]],
         'shift_labels': [[6, 7, -100, 9, -100]], 'num_items_in_batch': 3}
    """
    def whole(x: Any, name: str) -> Tensor:
        x = x[0] if x.dim() == 2 and x.shape[0] == 1 else x
        if x.dim() != 1 or x.shape[0] != all_tokens:
            raise error(f"{name} has shape {list(x.shape)} and the packing {all_tokens} tokens",
                        "give all tokens of the pack, in one dimension")
        return x

    masks, packing, mask = _pack_of(packing, mask)
    all_tokens = packing.tokens_q
    how: Dict[str, Any] = dict(layout=layout, mask=mask)
    ids = whole(torch.as_tensor(input_ids), "input_ids")
    if masks is None:
        positions = _torch.position_ids(packing, group, device=ids.device, **how)
    else:
        if labels is not None and not isinstance(labels, bool):
            raise error("labels of rows of a tree, of which one may have several next tokens",
                        "leave them out, and take the loss by tree.cross_entropy(hidden, lm_head, weights=...)")
        positions, labels = tree_position_ids(masks.tree, packing, group, device=ids.device, **how), False
    batch = {"input_ids": _torch.shard(ids, packing, group, **how)[None], "position_ids": positions[None]}
    if rank_and_ranks(group)[1] > 1 or masks is not None:
        _outside.mark(batch["position_ids"])
    if labels is False or labels is None:
        return batch
    following = _torch.next_token_labels(ids if labels is True else whole(labels, "labels"), packing)
    batch["labels"] = batch["shift_labels"] = _torch.shard(following, packing, group, fill=-100, **how)[None]
    batch["num_items_in_batch"] = (following != -100).sum()
    return batch


def _mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Any = masking_utils.causal_mask_function, attention_mask: Any = None, config: Any = None, **_: Any,
) -> Batch:
    """In the place of a mask: what the rows are."""
    rule = rule_of(mask_function)
    here = _open()
    if isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor):
        raise error("a static cache", "use the dynamic one, or another attn_implementation")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise error(f"an attention_mask of shape {list(attention_mask.shape)}", "give one of [batch, length] or none")
    if here is None:
        if rule.documents is not None and config is not None:
            only_known_layers(config, _recurrent.known_layers(config, _mask))
        batch = plain_batch(rule, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask)
        batch.silent = attention_mask is None and rule.documents is None and q_offset == kv_offset == 0
        return batch
    if batch_size != 1 or q_length != here.rows or kv_length != here.rows or q_offset != 0:
        raise error(
            f"a batch of {batch_size} with {q_length} queries and {kv_length} keys, where this rank has {here.rows} rows of "
            "the pack",
            "give the model a batch of one with this rank's rows (weft.transformers.inputs) and no past keys")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise error("an attention_mask with zeros together with packed()",
                    "say in the packing what is padding: Packing(cu_seqlens_q_padded=..., seqused_q=...)")
    known = _recurrent.known_layers(config, _mask)
    only_attention(config, known)
    _routers.take_over(config)
    if here.recurrent is None and any(x in known for x in other_layers(config)):
        here.recurrent = False
    batch = Batch(here.packing, rule, (1, q_length, kv_length), positions=here.positions, pack=here)
    if here.masks is not None:
        batch.own, layer = True, Mask(causal=rule.causal, window=rule.window, chunk_size=rule.chunk)
        batch.flat = here.masks.packed(layer, here.mask)
    return batch


def _check_positions(batch: Batch, given: Optional[Tensor]) -> None:
    """That the positions which the model has are those of the rows."""
    which: Any = given if given is not None and given.dim() == 2 else batch
    if batch.checked is which:
        return
    if which is not batch:
        right = which.shape == (1, len(batch.positions)) and torch.equal(which[0].cpu(), batch.positions)
    else:  # some models pass only where positions restart
        seen = batch.rule.documents
        expected = _outside.documents(batch.positions)
        right = torch.equal(torch.zeros_like(expected) if seen is None else seen[0].cpu(), expected)
    if not right:
        hidden = which is batch and batch.rule.documents is None
        raise error("the model's position_ids are not those of this rank's rows" + (", or it does not show them to its attention"
                                                                                    if hidden else ""),
                    "give position_ids of weft.transformers.inputs, with the same packing, group and layout, and use_cache=False"
                    + ("; if that is so, packed(check_positions=False)" if hidden else ""))
    batch.checked = which


class _Probe(Batch):
    """A batch that keeps the queries which come."""

    def __init__(self) -> None:
        self.query: Any = None


_by_row: Dict[type, bool] = {}  # by class of layer: whether its temperature goes by the row number


def _goes_by_row(layer: Any) -> bool:
    """Whether this version of a layer takes a row's number for its position, found out on a small one."""
    kind = type(layer)
    if kind not in _by_row:
        probe, rows = _Probe(), torch.arange(5)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
                small = kind(type(layer.config)(
                    hidden_size=2, num_attention_heads=1, num_key_value_heads=1, head_dim=2, num_hidden_layers=1,
                    no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=1, attn_scale=1.0, attention_bias=False,
                    attn_implementation=NAME), 0).eval()
                torch.nn.init.ones_(small.q_proj.weight)
                small(torch.ones(1, len(rows), 2), position_embeddings=None, attention_mask=probe,
                      position_ids=rows.flip(0)[None])
        except (AttributeError, TypeError, ValueError):  # a version of transformers that this was not written for
            _by_row[kind] = False
        else:
            scales, expected = probe.query[0, 0, :, 0].float(), _temperature(small, rows)
            _by_row[kind] = torch.allclose(scales / scales[0], expected / expected[0])
    return _by_row[kind]


def _temperature(layer: Any, positions: Tensor) -> Tensor:
    return torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0


def _tuned(layer: Any, query: Tensor, batch: Batch) -> Tensor:
    """Queries with the temperature of their positions: Llama 4 gives them that of their rows."""
    if not getattr(layer, "attn_temperature_tuning", False) or getattr(layer, "use_rope", True):
        return query
    if batch.positions is None:
        if batch.format == "thd":
            raise error(f"{type(layer).__name__} with attn_temperature_tuning, cu_seq_lens and past keys", "leave the cache out")
        return query
    if not _goes_by_row(layer):
        raise error(f"{type(layer).__name__} of this version of transformers takes the positions of attn_temperature_tuning "
                    "from elsewhere",
                    "set attn_temperature_tuning=False, or use another version")
    rows = torch.arange(query.shape[2])
    ratio = _temperature(layer, batch.positions.view(-1, query.shape[2])) / _temperature(layer, rows)
    return (query * ratio[:, None, :, None].to(query.device)).to(query.dtype)


def _refuse(name: str, value: Any) -> NoReturn:
    what, remedy = _REASONS.get(name, ("which Weft does not know", "leave it out, or use another attn_implementation"))
    raise error(f"attention is given {name}: {what}", remedy)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
               scaling: Optional[float] = None, dropout: float = 0.0, sliding_window: Optional[int] = None,
               softcap: Optional[float] = None, is_causal: Optional[bool] = None, s_aux: Optional[Tensor] = None,
               cu_seq_lens_q: Optional[Tensor] = None, cu_seq_lens_k: Optional[Tensor] = None,
               **kwargs: Any) -> Tuple[Tensor, None]:
    """Attention of a layer: query [batch, heads, rows, dim] and the same of key and value; gives [batch, rows, heads, dim]."""
    if isinstance(attention_mask, _Probe):
        attention_mask.query = query
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    for name, given in kwargs.items():
        if name not in _HARMLESS and given is not None and not (name == "output_attentions" and given is False):
            _refuse(name, given)
    if dropout:
        raise error(f"dropout {dropout}",
                    "Weft computes exact attention: set attention_dropout=0 in the config, or call model.eval()")
    if attention_mask is not None and not isinstance(attention_mask, Batch):
        like = f" of shape {list(attention_mask.shape)}" if hasattr(attention_mask, "shape") else ""
        raise error(f"a mask that is a {type(attention_mask).__name__}{like}",
                    "say what is padding by an attention_mask of [batch, length], documents by packed()")

    batch = (
        unmasked_batch(_current.get(), module, query, key, is_causal, sliding_window)
        if attention_mask is None
        else attention_mask
    )
    shape = query.shape[0], query.shape[2], key.shape[2]
    if shape != batch.shape_of:
        raise error("{} x {} queries and {} keys, and a mask for {} x {} and {}".format(*shape, *batch.shape_of),
                    "use another attn_implementation for this cache or model")
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        batch = varlen_batch(batch, cu_seq_lens_q, cu_seq_lens_k, query, key)
    elif batch.pack is None:
        batch = told_batch(batch, kwargs.get("position_ids"))
    rule = batch.rule
    if rule.causal and sliding_window is not None and rule.window != (sliding_window - 1, 0):
        raise error(f"the layer has sliding_window {sliding_window}, and its mask window {rule.window}",
                    "use another attn_implementation")
    options: Dict[str, Any] = {"one_rank": True}
    if batch.pack is not None:
        options, batch.pack.used = batch.pack.options, True
        if options.get("checked") and getattr(module, "layer_idx", None) is not None:
            options = {**options, "layer": module.layer_idx}
        if batch.pack.check_positions:
            _check_positions(batch, kwargs.get("position_ids"))
    elif _outside.anything_dealt():
        _outside.refuse(batch, kwargs.get("position_ids"))
    if s_aux is not None:
        s_aux = s_aux.reshape(-1).to(torch.float64 if query.dtype == torch.float64 else torch.float32)

    latent = _latent.latent_of(key)
    if batch.pack is None or not batch.pack.latent:
        key, value = (key, value) if latent is None else latent.heads()
        latent = None
    elif latent is None:
        raise error(f"latent=True, and {type(module).__name__} makes its keys and values itself",
                    "leave latent out for this model")
    views: List[Any] = []
    for x in (_tuned(module, query, batch),) if latent is not None else (_tuned(module, query, batch), key, value):
        x = x[0].transpose(0, 1) if batch.format == "thd" else x.transpose(1, 2)
        views.append(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())
    q, k, v = (*views, None, None)[:3]
    if not batch.own:  # else the slices say it
        options = {**options, "causal": rule.causal, "bottom_right": batch.bottom_right, "window": rule.window,
                   "chunk_size": rule.chunk}
    if latent is not None:
        recompute = batch.pack is None or batch.pack.recompute
        options, k, v = {**options, "expand": latent.expand, "recompute": recompute}, latent.rows, None
    out: Any = _torch.context_parallel_attention(
        q, k, v, packing=batch.flat, sink=s_aux, scale=scaling, softcap=softcap or 0.0, format=batch.format, **options)
    return out[None] if batch.format == "thd" else out, None


def register() -> None:
    """Makes attn_implementation="weft" known to transformers. Importing this module does it."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


register()
