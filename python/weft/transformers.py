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

import contextvars
import inspect
import threading
from typing import Any, Dict, Optional

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from . import _outside, torch as _torch
from ._arrays import error
from ._core import Mask, Packing
from .schedule import AnySchedule, unexpected
from .torch.group import name_of, rank_and_ranks
from .torch.op import how_of
from .torch.packed import packing_of
from .torch.sharding import AnyPacking, _place

__all__ = ["inputs", "packed", "register"]

NAME = "weft"

# What packed() passes on; everything else is said by the model.
_OPTIONS = ("schedule", "deterministic", "kernel", "checked")

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

_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


class _Rule:
    """Which keys a layer's query may see, apart from where sequences begin and end."""

    def __init__(self, causal, window=(-1, -1), chunk=None, documents=None):
        self.causal, self.window, self.chunk, self.documents = causal, window, chunk, documents


class _Batch:
    """What the rows of a batch are. The model takes it for its mask: so it is still there when a layer is computed again."""

    def __init__(self, packing, rule, shape, *, format="thd", bottom_right=False, positions=None, padded=False, pack=None):
        self.flat = _torch.pack(packing)
        self.rule = rule
        self.shape_of = shape         # batch, queries, keys
        self.format = format
        self.bottom_right = bottom_right
        self.positions = positions    # of the rows, where these are not their numbers
        self.padded = padded          # by an attention_mask
        self.pack = pack              # the packed() that it was made in
        self.checked = None           # positions that were found to be right

    @classmethod
    def __torch_function__(cls, function, *_):
        raise error(f"the model computes its attention itself ({getattr(function, '__name__', function)} of the mask)",
                    "use another attn_implementation for it")

    def __getitem__(self, _):
        self.__torch_function__("a part")

    def __getattr__(self, name):
        raise AttributeError(f"a mask of Weft has no {name}: a model that computes with its mask needs another "
                             "attn_implementation")


# Packed batches.

_current = contextvars.ContextVar("weft.transformers.packed", default=None)
_entered, _lock = 0, threading.Lock()


class packed:
    """While it is open, models with attn_implementation="weft" take their rows for this rank's rows of a pack.

    packing is that of the whole pack, the same on every rank. group is a process group or its name, None the default one;
    without any the rows are the whole pack. layout and mask must be those of the inputs: `balanced`, by the causal mask,
    unless said otherwise. Other options as in weft.torch: schedule (a name, or a
    weft.Schedule), deterministic, kernel, checked.

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

    def __init__(self, packing: AnyPacking, group: Any = None, layout: Optional[str] = None, schedule: AnySchedule = "all_gather", *,
                 mask: Optional[Mask] = None, check_positions: bool = True, **options: Any) -> None:
        options = {"schedule": schedule, **options}
        for name in options:
            if name not in _OPTIONS:
                unexpected("packed", name)
        if not isinstance(layout, (str, type(None))):
            raise error(f"layout is a {type(layout).__name__}", "give its name")
        packing = packing_of(packing)
        if not packing.self_attention:
            raise error("the packing has other sequences for k than for q", "give one of cu_seqlens_q alone")
        how_of(layout=layout, **options)  # refuses what there is not, at once
        mask = mask or Mask(causal=True)
        rank, placed = _place(packing, group, layout, mask)
        self.packing = packing
        self.rows = placed.rows
        self.positions = torch.from_numpy(placed.position_ids(rank))
        self.check_positions = check_positions
        self.options = {"group": name_of(group), "layout": layout, "layout_mask": mask, **options}
        self.used, self.tokens = False, []

    def __enter__(self):
        global _entered
        self.tokens.append(_current.set(self))
        with _lock:
            _entered += 1
        return self

    def __exit__(self, kind, *_):
        global _entered
        with _lock:
            _entered -= 1
        _current.reset(self.tokens.pop())
        if kind is None and not self.used:
            raise error("no layer of a model asked Weft for attention inside packed()",
                        'make the model with attn_implementation="weft", and call it inside; not every model of transformers '
                        "lets its attention be chosen")


def _open():
    """The pack that this thread is in."""
    here = _current.get()
    if here is None and _entered:
        raise error("packed() is open in another thread than the one that calls the model", "open it in the thread of the call")
    return here


def inputs(input_ids: torch.Tensor, packing: AnyPacking, group: Any = None, *, layout: Optional[str] = None,
           mask: Optional[Mask] = None, labels: bool = True) -> Dict[str, torch.Tensor]:
    """This rank's inputs of a model, from all tokens of the pack: input_ids [tokens] or [1, tokens]. packing: a
    weft.Packing, or cu_seqlens. The model must be called inside packed(): outside, on more than one rank, it raises.

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
    def whole(x, name):
        x = x[0] if x.dim() == 2 and x.shape[0] == 1 else x
        if x.dim() != 1 or x.shape[0] != packing.tokens_q:
            raise error(f"{name} has shape {list(x.shape)} and the packing {packing.tokens_q} tokens",
                        "give all tokens of the pack, in one dimension")
        return x

    packing, place = packing_of(packing), dict(layout=layout, mask=mask or Mask(causal=True))
    ids = whole(input_ids, "input_ids")
    batch = {
        "input_ids": _torch.shard(ids, packing, group, **place)[None],
        "position_ids": _torch.position_ids(packing, group, device=ids.device, **place)[None],
    }
    if rank_and_ranks(group)[1] > 1:
        _outside.mark(batch["position_ids"])
    if labels is False or labels is None:
        return batch
    following = _torch.next_token_labels(ids if labels is True else whole(labels, "labels"), packing)
    batch["labels"] = batch["shift_labels"] = _torch.shard(following, packing, group, fill=-100, **place)[None]
    batch["num_items_in_batch"] = (following != -100).sum()
    return batch


# Masks: what transformers says about a batch, before the layers.

def _parts(function):
    """The conditions that must all hold for a key to be seen: (name, variables) of each."""
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return [(f"{getattr(function, '__module__', '')}.{name}", {})]
    name = name.split(".")[0]
    variables = dict(inspect.getclosurevars(function).nonlocals)
    if name == "and_masks":
        return [part for one in variables["mask_functions"] for part in _parts(one)]
    return [(name, variables)]


def _rule_of(function):
    """The rule that a mask function of transformers states; refused unless each part of it is known."""
    rule = _Rule(causal=False)
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


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=masking_utils.causal_mask_function,
          attention_mask=None, config=None, **_):
    """In the place of a mask: what the rows are."""
    rule = _rule_of(mask_function)
    here = _open()
    if isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor):
        raise error("a static cache", "use the dynamic one, or another attn_implementation")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise error(f"an attention_mask of shape {list(attention_mask.shape)}", "give one of [batch, length] or none")
    if here is None:
        return _plain(rule, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask)
    if batch_size != 1 or q_length != here.rows or kv_length != here.rows or q_offset != 0:
        raise error(
            f"a batch of {batch_size} with {q_length} queries and {kv_length} keys, where this rank has {here.rows} rows of "
            "the pack",
            "give the model a batch of one with this rank's rows (weft.transformers.inputs) and no past keys")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise error("an attention_mask with zeros together with packed()",
                    "say in the packing what is padding: Packing(cu_seqlens_q_padded=..., seqused_q=...)")
    _only_attention(config)
    return _Batch(here.packing, rule, (1, q_length, kv_length), positions=here.positions, pack=here)


def _only_attention(config):
    """Layers that mix rows in another way than by attention would take the rows of a rank for a sequence."""
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "decoder_layers"):  # whose decoders count rows themselves
        raise error("the model has an encoder and a decoder", "packed() is for models of one stream")
    types = [x for name in ("layer_types", "layers_block_type", "block_types") for x in getattr(config, name, None) or ()]
    for name in types or (name for name in dir(config) if name.startswith(("mamba_", "ssm_"))):
        if name not in _LAYERS:
            raise error(f"the model has layers of {name}", "packed() is for models in which rows meet in attention only")


def _runs(valid):
    """Where each sequence of a batch begins and how long it is; None if padding lies inside one."""
    lengths = valid.sum(1)
    begins = valid.int().argmax(1)
    columns = torch.arange(valid.shape[1], device=valid.device)
    inside = (columns >= begins[:, None]) & (columns < (begins + lengths)[:, None])
    return (begins.tolist(), (begins + lengths).tolist()) if bool((inside == valid).all()) else None


def _plain(rule, batch, q_length, k_length, q_offset, k_offset, padding):
    """A batch [batch, length], with its padding, documents, or past keys."""
    shape = (batch, q_length, k_length)
    if rule.documents is not None:
        ids = rule.documents.cpu()
        new = torch.ones_like(ids, dtype=torch.bool)
        new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        cu = torch.cat([new.flatten().nonzero()[:, 0], torch.tensor([ids.numel()])])
        packing = Packing(cu.numpy())
        return _Batch(packing, rule, shape, format="bshd", positions=_torch.position_ids(packing, ""))
    if padding is not None and padding.shape[1] >= k_offset + k_length and bool(padding.all()):
        padding = None
    q_end, k_end = q_offset + q_length, k_offset + k_length
    aligned = rule.causal or rule.window != (-1, -1) or rule.chunk is not None
    if aligned and q_end != k_end:
        raise error(f"queries {q_offset} to {q_end} and keys {k_offset} to {k_end}",
                    "the last of both must be the same: use a dynamic cache, or another attn_implementation")
    if padding is None and (rule.chunk is None or k_offset == 0):
        packing = Packing.from_batch(batch, q_length, None if k_length == q_length else k_length)
        return _Batch(packing, rule, shape, format="bshd", bottom_right=aligned and k_length != q_length)
    if padding is None:
        runs = [0] * batch, [k_end] * batch
    elif padding.shape[1] < k_end:
        raise error(f"an attention_mask of {padding.shape[1]} for {k_end} keys", "give one number for each, past ones too")
    else:
        runs = _runs(padding[:, :k_end])
    if runs is None:
        raise error("an attention_mask with zeros inside a sequence",
                    "padding may be before and after it; use another attn_implementation")
    q_begins, q_lengths, k_begins, k_lengths = [], [], [], []
    for i, (begin, end) in enumerate(zip(*runs)):
        # Where all keys are seen from everywhere, they may be of other sequences than the queries.
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
    return _Batch(Packing(**q) if same else Packing(**q, **k), rule, shape, format="bshd", bottom_right=aligned and not same,
                  padded=padding is not None)


def _unmasked(module, query, key, is_causal, sliding_window):
    """The batch of a model that says nothing about it."""
    here = _current.get()
    (batch, _, q_length, _), k_length = query.shape, key.shape[2]
    if here is not None and batch == 1 and q_length == here.rows:
        raise error(f"{type(module).__name__} has no mask inside packed()",
                    "Weft learns what the rows are from the masks of transformers.masking_utils, which this model does not make")
    rule = _Rule(causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal))
    if rule.causal and q_length != k_length:
        raise error(f"{q_length} queries and {k_length} keys, and no mask that says which is which",
                    "leave the cache out, or use another attn_implementation")
    if sliding_window is not None:
        if not rule.causal:
            raise error(f"sliding_window {sliding_window} without a mask and not causal", "use another attn_implementation")
        rule.window = (sliding_window - 1, 0)
    config = getattr(module, "config", None)
    types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types and layer is not None and types[layer] == "chunked_attention":
        rule.chunk = config.attention_chunk_size
    return _Batch(Packing.from_batch(batch, q_length, None if q_length == k_length else k_length), rule,
                  (batch, q_length, k_length), format="bshd")


def _varlen(batch, cu_q, cu_k, query, key):
    """The batch, with sequences as cu_seq_lens say."""
    if batch.pack is not None:
        raise error("cu_seq_lens_q together with packed()", "the packing says it: leave cu_seq_lens out")
    if batch.padded:
        raise error("cu_seq_lens_q together with an attention_mask that has zeros", "give one of them")
    if query.shape[0] != 1 or cu_q is None:
        raise error(f"cu_seq_lens_{'k' if cu_q is None else 'q'} with a batch of {query.shape[0]}",
                    "cu_seq_lens_q (and cu_seq_lens_k) are for a batch of one")
    q = dict(cu_seqlens_q=cu_q.cpu().numpy(), tokens_q=query.shape[2])
    own = cu_k is None or cu_k is cu_q or torch.equal(cu_k, cu_q)
    if own and key.shape[2] != query.shape[2]:
        raise error(f"cu_seq_lens_q with {query.shape[2]} queries and {key.shape[2]} keys", "give cu_seq_lens_k too")
    packing = Packing(**q) if own else Packing(**q, cu_seqlens_k=cu_k.cpu().numpy(), tokens_k=key.shape[2])
    rule = _Rule(batch.rule.causal, batch.rule.window, batch.rule.chunk)
    return _Batch(packing, rule, batch.shape_of, bottom_right=not own,
                  positions=_torch.position_ids(packing, "") if own else None)


# Attention, of each layer.

def _check_positions(batch, given):
    """That the positions which the model has are those of the rows."""
    known = given is not None and given.dim() == 2
    which = given if known else batch
    if batch.checked is which:
        return
    if known:
        right = given.shape == (1, len(batch.positions)) and torch.equal(given[0].cpu(), batch.positions)
    else:  # for some models only where they restart
        seen = batch.rule.documents
        expected = _outside.documents(batch.positions)
        right = torch.equal(torch.zeros_like(expected) if seen is None else seen[0].cpu(), expected)
    if not right:
        raise error("the model's position_ids are not those of this rank's rows",
                    "give position_ids of weft.transformers.inputs, with the same packing, group and layout, and use_cache=False")
    batch.checked = which


class _Probe(_Batch):
    """A batch that keeps the queries which come."""

    def __init__(self):
        self.query = None


_by_row = {}  # classes of layers: whether their temperature goes by the number of the row


def _goes_by_row(layer):
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
        except (AttributeError, TypeError, ValueError):  # another version than this was written for
            _by_row[kind] = False
        else:
            scales, expected = probe.query[0, 0, :, 0].float(), _temperature(small, rows)
            _by_row[kind] = torch.allclose(scales / scales[0], expected / expected[0])
    return _by_row[kind]


def _temperature(layer, positions):
    return torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0


def _tuned(layer, query, batch):
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


def _refuse(name, value):
    what, remedy = _REASONS.get(name, ("which Weft does not know", "leave it out, or use another attn_implementation"))
    raise error(f"attention is given {name}: {what}", remedy)


def _attention(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
               is_causal=None, s_aux=None, cu_seq_lens_q=None, cu_seq_lens_k=None, **kwargs):
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
    if attention_mask is not None and not isinstance(attention_mask, _Batch):
        shape = f" of shape {list(attention_mask.shape)}" if hasattr(attention_mask, "shape") else ""
        raise error(f"a mask that is a {type(attention_mask).__name__}{shape}",
                    "say what is padding by an attention_mask of [batch, length], documents by packed()")

    batch = _unmasked(module, query, key, is_causal, sliding_window) if attention_mask is None else attention_mask
    shape = query.shape[0], query.shape[2], key.shape[2]
    if shape != batch.shape_of:
        raise error("{} x {} queries and {} keys, and a mask for {} x {} and {}".format(*shape, *batch.shape_of),
                    "use another attn_implementation for this cache or model")
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        batch = _varlen(batch, cu_seq_lens_q, cu_seq_lens_k, query, key)
    rule = batch.rule
    if rule.causal and sliding_window is not None and rule.window != (sliding_window - 1, 0):
        raise error(f"the layer has sliding_window {sliding_window}, and its mask window {rule.window}",
                    "use another attn_implementation")
    mask, options = (rule.causal, batch.bottom_right, rule.window, rule.chunk), {"one_rank": True}
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

    views = []
    for x in (_tuned(module, query, batch), key, value):
        x = x[0].transpose(0, 1) if batch.format == "thd" else x.transpose(1, 2)
        views.append(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())
    causal, bottom_right, window, chunk = mask
    out = _torch.context_parallel_attention(
        *views, batch.flat, causal=causal, bottom_right=bottom_right, window=window, chunk_size=chunk, sink=s_aux, scale=scaling,
        softcap=softcap or 0.0, format=batch.format, **options)
    return out[None] if batch.format == "thd" else out, None


def register():
    """Makes attn_implementation="weft" known to transformers. Importing this module does it."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


register()
