"""Megatron-Core's core_attention, computed by Weft."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import megatron.core
import torch
import weft
import weft.torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from .._arrays import error
from ..schedule import schedule_of
from .batch import Rows, WholePackParams, group_of, rows_of

OPTIONS = ("schedule", "chunk_size", "softcap", "kernel", "checked")  # of with_weft

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.padding_causal: True, AttnMaskType.causal_bottom_right: True,
           AttnMaskType.no_mask: False, AttnMaskType.padding: False}
_PADDING = (AttnMaskType.padding, AttnMaskType.padding_causal)


def _refuse_config(config: Any, attention_type: str, attention_dropout: Optional[float], other: Dict[str, Any]) -> None:
    """What the config asks for and Weft does not compute."""
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    if dropout != 0:
        raise error(f"attention_dropout is {dropout}, Megatron's default if you have not said it: Weft's attention is exact and "
                    "drops nothing", "give the config attention_dropout=0.0")
    if attention_type != "self":
        raise error(f"attention_type is {attention_type!r}: keys are not those of the queries' documents",
                    "leave cross-attention to Megatron")
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(config, name, False):
            raise error(f"{name} is on: Weft's attention takes bf16, f16 and f32", f"turn {name} off")
    for name, value in other.items():
        if value is not None:
            raise error(f"core attention is built with {name}={value!r}, which Weft's does not have", "leave it out")


def _check_group(config: Any, group: Any) -> Any:
    """The context-parallel group, None where it is off: Megatron's config decides, and a larger group may exist."""
    if config.context_parallel_size == 1:
        return None
    size = 1 if group is None else group.size()
    if size != config.context_parallel_size:
        raise error(f"context_parallel_size is {config.context_parallel_size} in the config and the group has {size} ranks",
                    "give initialize_model_parallel the same context_parallel_size")
    return group_of(group)


def _hierarchical(groups: Any, ranks: int) -> weft.Schedule:
    """a2a+p2p: Megatron's first hierarchical group is the one that swaps heads, of consecutive ranks as Weft's is."""
    if not groups:
        groups = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    sizes = [g.size() for g in groups or ()]
    if len(sizes) != 2 or sizes[0] * sizes[1] != ranks:
        raise error(f"cp_comm_type a2a+p2p on {ranks} ranks with hierarchical groups of {sizes or 'no'} ranks",
                    "give initialize_model_parallel hierarchical_context_parallel_sizes=[ulysses, ring], or with_weft "
                    "schedule=weft.Schedule('hybrid', ulysses=...)")
    return weft.Schedule("hybrid", ulysses=sizes[0])


def _of_layer(name: str, value: Any, layer_number: int) -> Any:
    """The layer's entry of a list of one a layer; layers count from 1."""
    if not isinstance(value, (list, tuple)):
        return value
    if layer_number > len(value):
        raise error(f"{name} has {len(value)} entries and there is a layer {layer_number}", "give one a layer")
    return value[layer_number - 1]


def _sink(config: Any, tp_group: Any) -> torch.nn.Parameter:
    """softmax_offset: this tensor-parallel rank's part of one logit a head, initialised as a part of the whole."""
    ranks = tp_group.size()
    heads = config.num_attention_heads // ranks
    if config.use_cpu_initialization:
        whole = torch.empty(config.num_attention_heads, dtype=torch.float32)
        if config.perform_initialization:
            config.init_method(whole)
        values = whole[tp_group.rank() * heads:][:heads].to(config.params_dtype, copy=True)
    else:
        values = torch.empty(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        if config.perform_initialization and ranks > 1 and tracker.is_initialized():
            with tracker.fork():
                config.init_method(values)
        elif config.perform_initialization:
            config.init_method(values)
    parameter = torch.nn.Parameter(values)
    # So that norms and checkpoints know it for a part, and not for a copy of another rank's.
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, ranks > 1, 0, 1)
    return parameter


def _sums_position_gradient(config: Any, gathered: bool, ranks: int) -> bool:
    """Whether gradients of the positional part of MLA's keys have to be summed over the tensor-parallel ranks here.

    That part is one for all heads. Where the latent is gathered from column-parallel parts, Megatron 0.16 takes each rank's
    gradient, that of its own heads, for the whole: with its own attention too.
    """
    if not (gathered and getattr(config, "multi_latent_attention", False) and ranks > 1):
        return False
    if not megatron.core.__version__.startswith("0.16."):
        raise error(f"MLA with a column-parallel down projection on {ranks} tensor-parallel ranks and megatron-core "
                    f"{megatron.core.__version__}: 0.16 gives the keys' positional part a wrong gradient, which Weft mends, and "
                    "of others nobody knows", "use tensor_model_parallel_size=1, or megatron-core 0.16")
    return True


_seen: Tuple[Any, bool] = (lambda: None, False)  # the mask that was compared last, and with what


def _check_mask(mask: Tensor, causal: bool, rows: Rows, query: Tensor) -> None:
    """A tensor that says no more than causal, or nothing, is what Megatron's data loader makes; any other is refused."""
    global _seen
    if _seen[0]() is mask and _seen[1] is causal:
        return
    ranks = 1 if rows.group is None else rows.group.size()
    length = query.shape[0] * ranks
    positions = weft.torch.position_ids([0, length], "" if rows.group is None else rows.group, layout="dual_chunk",
                                        device=mask.device)
    hidden = torch.arange(length, device=mask.device) > (positions[:, None] if causal else length)
    if tuple(mask.shape[-2:]) != (query.shape[0], length) or not bool((mask.bool() == hidden).all()):
        raise error(f"attention_mask of shape {list(mask.shape)} hides other keys than {'a causal mask' if causal else 'none'}",
                    "give attention_mask=None; documents of a pack are said by packed_seq_params (thd), a window by window_size")
    _seen = weakref.ref(mask), causal


class WeftCoreAttention(MegatronModule):
    """Core attention of a layer spec: what SelfAttention and MLASelfAttention of Megatron-Core build and call (with_weft).

    Takes thd, whose rows lie as Transformer Engine's do, sbhd, and WholePackParams. From the config come the window of the
    layer, the sink (softmax_type; the parameter softmax_offset, as Megatron's own), the maximum logits of qk_clip
    (current_max_attn_logits), deterministic_mode, and cp_comm_type, which names the schedule. What it cannot compute (biases,
    dropout, masks as tensors) is refused with the reason.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
        attention_dropout: Optional[float] = None, softmax_scale: Optional[float] = None, k_channels: Optional[int] = None,
        v_channels: Optional[int] = None, cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None, *, schedule: Any = None, chunk_size: Any = None,
        softcap: Any = None, kernel: Any = None, checked: Any = None, gathered_latent: bool = False, **other: Any,
    ) -> None:
        super().__init__(config=config)
        _refuse_config(config, attention_type, attention_dropout, other)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number, self.attn_mask_type, self.tp_group = layer_number, attn_mask_type, pg_collection.tp
        self.group = _check_group(config, pg_collection.cp)
        self.sums_position_gradient = _sums_position_gradient(config, gathered_latent, self.tp_group.size())
        self.widths, self.by_row = (k_channels, v_channels), False  # by_row: use_row_positions was called
        # Set by a layer whose latent moves: what makes keys and values of its rows, and whether the backward does so again.
        self.expand: Optional[Callable[..., Tuple[Tensor, Tensor]]] = None
        self.recompute = True
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        own = dict(chunk_size=chunk_size, softcap=softcap, kernel=kernel, checked=checked)
        settings = {name: _of_layer(name, value, layer_number) for name, value in own.items()}
        self.settings: Dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        self.settings.update(window=tuple(config.window_size) if windowed else (-1, -1), scale=softmax_scale,
                             layer=layer_number)
        if config.deterministic_mode:
            self.settings["deterministic"] = True
        self.schedule = self._schedule(schedule, cp_comm_type, getattr(pg_collection, "hcp", None))
        self.current_max_attn_logits: Optional[Tensor] = None
        if config.softmax_type not in ("vanilla", "off-by-one", "learnable"):
            raise error(f"softmax_type is {config.softmax_type!r}", "use vanilla, off-by-one or learnable")
        self.softmax_offset = _sink(config, self.tp_group) if config.softmax_type == "learnable" else None

    def _schedule(self, own: Any, cp_comm_type: Any, hierarchical: Any) -> weft.Schedule:
        if own is not None:
            return schedule_of(_of_layer("schedule", own, self.layer_number))
        listed = self.config.cp_comm_type
        if isinstance(listed, list):  # 0.16 hands over the next layer's entry
            cp_comm_type = _of_layer("cp_comm_type", listed, self.layer_number)
        if cp_comm_type == "a2a+p2p" and self.group is not None:
            return _hierarchical(hierarchical, self.group.size())
        return schedule_of(cp_comm_type or "p2p")

    def _sink(self) -> Union[None, str, Tensor]:
        if self.softmax_offset is not None:
            return self.softmax_offset.float()
        return "off_by_one" if self.config.softmax_type == "off-by-one" else None

    def _check(self, query: Tensor, key: Tensor, value: Optional[Tensor], kind: AttnMaskType, bias: Any,
               other: Dict[str, Any]) -> None:
        if bias is not None:
            raise error("attention_bias is given: logits have no bias in Weft", "leave it out; a window is window_size")
        if kind not in _CAUSAL:
            raise error(f"attn_mask_type is {kind.name}: its keys are said by a tensor alone",
                        "use causal, padding_causal, no_mask or padding")
        for name, given in other.items():
            if given is not None:
                raise error(f"core attention is called with {name}, which Weft's does not have", "leave it out")
        if key.shape[0] != query.shape[0]:
            raise error(f"there are {query.shape[0]} rows of queries and {key.shape[0]} of keys",
                        "weft.megatron is for training: leave generation with a cache to Megatron")
        if value is None and self.expand is None:
            raise error("there are no values", "give them, or with_weft latent=True")
        made = () if value is None else (("k_channels", key, self.widths[0]), ("v_channels", value, self.widths[1]))
        for name, x, width in made:
            if width is not None and x.shape[-1] != width:
                raise error(f"{name} is {width} and the tensor is {x.shape[-1]} wide", f"give {name}={x.shape[-1]}")

    def _shared_position(self, key: Tensor) -> Tensor:
        """The same keys; the gradient of their positional part is that of all ranks' heads."""
        own = self.config.qk_head_dim
        one = tensor_parallel.copy_to_tensor_model_parallel_region(key[..., :1, own:], self.tp_group)
        return torch.cat([key[..., :own], one.expand(*key.shape[:-1], -1)], -1)

    def forward(
        self, query: Tensor, key: Tensor, value: Optional[Tensor], attention_mask: Optional[Tensor] = None,
        attn_mask_type: Optional[AttnMaskType] = None, attention_bias: Optional[Tensor] = None,
        packed_seq_params: Optional[PackedSeqParams] = None, **other: Any,
    ) -> Tensor:
        """Attends [t, h, d] (thd) to [t, h·dv], or [s, b, h, d] (sbhd) to [s, b, h·dv]; t and s are this rank's rows. Without
        values the keys are what both are made of (expand), [t, width] or [s, b, width]."""
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        self._check(query, key, value, kind, attention_bias, other)
        rows = rows_of(query, packed_seq_params, self.group, self.config)
        if attention_mask is not None:
            if rows.format == "thd" or kind in _PADDING:
                raise error(f"attention_mask is given with {rows.format} and attn_mask_type {kind.name}: Weft takes no mask as a "
                            "tensor", "give attention_mask=None; padding is said by cu_seqlens_q_padded of packed_seq_params")
            _check_mask(attention_mask, _CAUSAL[kind], rows, query)
        whole = isinstance(packed_seq_params, WholePackParams)
        if whole and not self.by_row:
            raise error(f"rows lie under layout {rows.layout} and the model's rotary embeddings do not know it",
                        "call weft.megatron.use_row_positions(model) once, after the model is built")
        tensors = [query, key] if value is None else [query, key, value]
        if whole and query.dim() == 4:  # [t, 1, h, d]; those of MLA are [t, h, d] already
            tensors = [x.squeeze(1) for x in tensors]
        out = self._attend(tensors, rows, _CAUSAL[kind])
        return out.flatten(-2)[:, None] if whole else out.flatten(-2)

    def _attend(self, tensors: List[Tensor], rows: Rows, causal: bool) -> Tensor:
        """[..., heads, dim] of queries, keys and values, or of queries and what keys and values are made of."""
        if self.sums_position_gradient and self.expand is None:
            tensors[1] = self._shared_position(tensors[1])
        batch = None
        options: Dict[str, Any] = {**self.settings, "format": rows.format, "layout": rows.layout, "layout_mask": rows.layout_mask}
        if self.expand is not None:
            options.update(expand=self.expand, recompute=self.recompute)
            if rows.format == "sbhd":  # the same rows, one after another
                batch, options["format"] = tensors[0].shape[1], "thd"
                tensors = [x.transpose(0, 1).flatten(0, 1) for x in tensors]
        want_logits = self.config.qk_clip or self.config.log_max_attention_logit
        if rows.group is not None:
            options["schedule"] = self.schedule
        attend: Any = weft.torch.context_parallel_attention
        out = attend(
            *tensors, packing=rows.packing, causal=causal, sink=self._sink(), group=rows.group, one_rank=rows.group is None,
            return_max_logit=want_logits, **options)
        if want_logits:
            out, top = out
            known = self.current_max_attn_logits
            self.current_max_attn_logits = top if known is None else torch.maximum(known, top)
        return out if batch is None else out.unflatten(0, (batch, -1)).transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Tuple[Tuple[int, int, int], ...] = (), metadata: Optional[Dict[str, Any]] = None,
    ) -> Any:
        """The sink's softmax_offset, split over the tensor-parallel ranks, or nothing: as of Megatron's own core attention."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"))
