"""What the rows of a batch of transformers are: the sequences and masks that a model means, as Weft's packings and masks."""

from __future__ import annotations

import contextvars
import inspect
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from transformers import masking_utils

from .. import torch as _torch
from .._arrays import error
from .._core import Packing
from ..types import FormatName

current: contextvars.ContextVar[Any] = contextvars.ContextVar("weft.transformers.packed", default=None)  # the open packed()

_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


class Rule:
    """Which keys a layer's query may see, apart from where sequences begin and end."""

    def __init__(
        self, causal: bool, window: Tuple[int, int] = (-1, -1), chunk: Optional[int] = None, documents: Optional[Tensor] = None
    ) -> None:
        self.causal, self.window, self.chunk, self.documents = causal, window, chunk, documents


class Batch:
    """What the rows of a batch are. The model takes it for its mask: so it is still there when a layer is computed again."""

    def __init__(
        self, packing: Packing, rule: Rule, shape: Tuple[int, int, int], *, format: FormatName = "thd",
        bottom_right: bool = False, positions: Optional[Tensor] = None, padded: bool = False, pack: Any = None,
    ) -> None:
        self.flat = _torch.pack(packing)
        self.own = False  # its slices are those of a tree
        self.rule = rule
        self.shape_of = shape  # batch, queries, keys
        self.format = format
        self.bottom_right = bottom_right
        self.positions: Any = positions  # of the rows; None: 0, 1, 2, ...
        self.padded = padded  # an attention_mask has zeros
        self.pack = pack  # the packed() that it was made in
        self.checked: Any = None  # the positions that were checked last
        self.silent = False  # nothing was said of documents: positions that a layer is given may still tell of them
        self.told: Any = None  # the positions that a layer was given last, and the batch with documents as they say

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise error(f"the model computes its attention itself ({getattr(function, '__name__', function)} of the mask)",
                    "use another attn_implementation for it")

    def __getitem__(self, _: Any) -> Any:
        self.__torch_function__("a part")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a mask of Weft has no {name}: a model that computes with its mask needs another "
                             "attn_implementation")


def _parts(function: Any) -> List[Tuple[str, Dict[str, Any]]]:
    """The conditions that must all hold for a key to be seen: (name, variables) of each."""
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return [(f"{getattr(function, '__module__', '')}.{name}", {})]
    name = name.split(".")[0]
    variables = dict(inspect.getclosurevars(function).nonlocals)
    if name == "and_masks":
        return [part for one in variables["mask_functions"] for part in _parts(one)]
    return [(name, variables)]


def rule_of(function: Any) -> Rule:
    """The rule that a mask function of transformers states; refused unless each part of it is known."""
    rule = Rule(causal=False)
    for name, variables in _parts(function):
        if name == "causal_mask_function":
            rule.causal = True
        elif name == "sliding_window_overlay":
            rule.window = (variables["sliding_window"] - 1, -1)
        elif name == "sliding_window_bidirectional_overlay":
            rule.window = (variables["sliding_window"],) * 2
        elif name == "chunked_overlay":
            rule.chunk = variables["chunk_size"]
        elif name == "packed_sequence_mask_function":
            rule.documents = variables["packed_sequence_mask"]
        elif name != "bidirectional_mask_function":
            raise error(f"the model's mask is made by {name}",
                        "Weft knows causal, full, sliding and chunked masks: use another attn_implementation")
    if rule.causal and rule.window[0] >= 0:
        rule.window = (rule.window[0], 0)
    return rule


def other_layers(config: Any) -> List[str]:
    """Kinds of layers of a model, as its config calls them, in which rows meet in another way than by attention."""
    types = [x for name in ("layer_types", "layers_block_type", "block_types") for x in getattr(config, name, None) or ()]
    return [x for x in types or (name for name in dir(config) if name.startswith(("mamba_", "ssm_"))) if x not in _LAYERS]


def only_known_layers(config: Any, known: Sequence[str] = ()) -> None:
    """Refuses models in which rows meet in other layers than attention and those known."""
    for name in other_layers(config):
        if name not in known:
            raise error(f"the model has layers of {name}", "packs are for models in which rows meet in attention only, and for "
                        "the hybrid ones that docs/transformers.md names")


def only_attention(config: Any, known: Sequence[str] = ()) -> None:
    """The same, and models of two streams, or that count positions themselves."""
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "decoder_layers"):
        raise error("the model has an encoder and a decoder", "packed() is for models of one stream")
    only_known_layers(config, known)


def _runs(valid: Tensor) -> Optional[Tuple[List[int], List[int]]]:
    """Where each sequence of a batch begins and how long it is; None if padding lies inside one."""
    lengths = valid.sum(1)
    begins = valid.int().argmax(1)
    columns = torch.arange(valid.shape[1], device=valid.device)
    inside = (columns >= begins[:, None]) & (columns < (begins + lengths)[:, None])
    return (begins.tolist(), (begins + lengths).tolist()) if bool((inside == valid).all()) else None


def _packing(new: Tensor) -> Packing:
    """Of the rows of a batch one after another: documents begin where each begins, and where new [batch, length - 1] says so."""
    first = torch.nn.functional.pad(new.cpu(), (1, 0), value=True)
    return Packing(torch.cat([first.flatten().nonzero()[:, 0], torch.tensor([first.numel()])]).numpy())


def restarts(position_ids: Tensor) -> Optional[Packing]:
    """Documents of a batch by its positions [batch, length], as transformers sees them; None if each row of it is one."""
    new = torch.diff(position_ids, dim=-1) != 1
    return _packing(new) if bool(new.any()) else None


def told_batch(batch: Batch, position_ids: Optional[Tensor]) -> Batch:
    """The batch, with documents by the positions of a layer: some models (gpt-oss) show them to it, and not to their masks."""
    rows, length, keys = batch.shape_of
    if not batch.silent or length != keys or position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != length:
        return batch
    if batch.told is None or batch.told[0] is not position_ids:
        packing, found = restarts(position_ids.expand(rows, length)), batch
        if packing is not None:
            found = Batch(packing, batch.rule, batch.shape_of, format="bshd", positions=_torch.position_ids(packing, ""))
        batch.told = position_ids, found
    return batch.told[1]


def plain_batch(
    rule: Rule, batch: int, q_length: int, k_length: int, q_offset: int, k_offset: int, padding: Optional[Tensor]
) -> Batch:
    """A batch [batch, length], with its padding, documents, or past keys."""
    shape = (batch, q_length, k_length)
    if rule.documents is not None:
        packing = _packing(rule.documents[:, 1:] != rule.documents[:, :-1])
        return Batch(packing, rule, shape, format="bshd", positions=_torch.position_ids(packing, ""))
    if padding is not None and padding.shape[1] >= k_offset + k_length and bool(padding.all()):
        padding = None
    q_end, k_end = q_offset + q_length, k_offset + k_length
    aligned = rule.causal or rule.window != (-1, -1) or rule.chunk is not None
    if aligned and q_end != k_end:
        raise error(f"queries {q_offset} to {q_end} and keys {k_offset} to {k_end}",
                    "the last of both must be the same: use a dynamic cache, or another attn_implementation")
    if padding is None and (rule.chunk is None or k_offset == 0):
        packing = Packing.from_batch(batch, q_length, None if k_length == q_length else k_length)
        return Batch(packing, rule, shape, format="bshd", bottom_right=aligned and k_length != q_length)
    if padding is None:
        runs: Optional[Tuple[List[int], List[int]]] = ([0] * batch, [k_end] * batch)
    elif padding.shape[1] < k_end:
        raise error(f"an attention_mask of {padding.shape[1]} for {k_end} keys", "give one number for each, past ones too")
    else:
        runs = _runs(padding[:, :k_end])
    if runs is None:
        raise error("an attention_mask with zeros inside a sequence",
                    "padding may be before and after it; use another attn_implementation")
    q_begins, q_lengths, k_begins, k_lengths = [], [], [], []
    for i, (begin, end) in enumerate(zip(*runs)):
        # Without causal, window or chunk, keys may belong to other sequences than the queries.
        first, last = (max(begin, q_offset), max(begin, q_offset, end)) if aligned else (q_offset, q_end)
        key = max(begin, k_offset)
        if rule.chunk is not None:
            chunk = begin + (first - begin) // rule.chunk * rule.chunk
            if chunk < key:
                raise error(f"the cache begins at key {k_offset}, inside the chunk of query {first}",
                            "use another attn_implementation")
            key = chunk
        q_begins.append(i * q_length + first - q_offset)
        q_lengths.append(last - first)
        k_begins.append(i * k_length + key - k_offset)
        k_lengths.append(max(end - key, 0))
    q = dict(cu_seqlens_q_padded=[*q_begins, batch * q_length], seqused_q=q_lengths, tokens_q=batch * q_length)
    k = dict(cu_seqlens_k_padded=[*k_begins, batch * k_length], seqused_k=k_lengths, tokens_k=batch * k_length)
    same = q_length == k_length and (q_begins, q_lengths) == (k_begins, k_lengths)
    return Batch(Packing(**q) if same else Packing(**q, **k), rule, shape, format="bshd", bottom_right=aligned and not same,
                  padded=padding is not None)


def unmasked_batch(
    here: Any, module: Any, query: Tensor, key: Tensor, is_causal: Optional[bool], sliding_window: Optional[int]
) -> Batch:
    """The batch of a model that says nothing about it. here: the packed() that is open."""
    (batch, _, q_length, _), k_length = query.shape, key.shape[2]
    if here is not None and batch == 1 and q_length == here.rows:
        raise error(f"{type(module).__name__} has no mask inside packed()",
                    "Weft learns what the rows are from the masks of transformers.masking_utils, which this model does not make")
    rule = Rule(causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal))
    if rule.causal and q_length != k_length:
        raise error(f"{q_length} queries and {k_length} keys, and no mask that says which is which",
                    "leave the cache out, or use another attn_implementation")
    if sliding_window is not None:
        if not rule.causal:
            raise error(f"sliding_window {sliding_window} without a mask and not causal", "use another attn_implementation")
        rule.window = (sliding_window - 1, 0)
    config: Any = getattr(module, "config", None)
    types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types and layer is not None and types[layer] == "chunked_attention":
        rule.chunk = config.attention_chunk_size
    return Batch(Packing.from_batch(batch, q_length, None if q_length == k_length else k_length), rule,
                  (batch, q_length, k_length), format="bshd")


def varlen_batch(batch: Batch, cu_q: Optional[Tensor], cu_k: Optional[Tensor], query: Tensor, key: Tensor) -> Batch:
    """The batch, with sequences as cu_seq_lens say."""
    if batch.pack is not None:
        raise error("cu_seq_lens_q together with packed()", "the packing says it: leave cu_seq_lens out")
    if batch.padded:
        raise error("cu_seq_lens_q together with an attention_mask that has zeros", "give one of them")
    if query.shape[0] != 1 or cu_q is None:
        raise error(f"cu_seq_lens_{'k' if cu_q is None else 'q'} with a batch of {query.shape[0]}",
                    "cu_seq_lens_q (and cu_seq_lens_k) are for a batch of one")
    q, k = {"cu_seqlens_q": cu_q.cpu().numpy(), "tokens_q": query.shape[2]}, {}
    if cu_k is not None and cu_k is not cu_q and not torch.equal(cu_k, cu_q):
        k = {"cu_seqlens_k": cu_k.cpu().numpy(), "tokens_k": key.shape[2]}
    own = not k
    if own and key.shape[2] != query.shape[2]:
        raise error(f"cu_seq_lens_q with {query.shape[2]} queries and {key.shape[2]} keys", "give cu_seq_lens_k too")
    packing = Packing(**q, **k)
    rule = Rule(batch.rule.causal, batch.rule.window, batch.rule.chunk)
    return Batch(packing, rule, batch.shape_of, bottom_right=not own,
                 positions=_torch.position_ids(packing, "") if own else None)
