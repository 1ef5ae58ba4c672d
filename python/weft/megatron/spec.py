"""Layer specs with Weft's core attention in the place of Megatron's."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, List, TypeVar

from megatron.core.transformer.attention import CrossAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from .._arrays import error
from .attention import OPTIONS, WeftCoreAttention
from .latent import LatentSelfAttention, UpProjection

S = TypeVar("S")

# What computes softmax(QK)V and nothing else. Another core attention (sparse, say) has a meaning that Weft's has not.
_REPLACED = ("DotProductAttention", "TEDotProductAttention", "WeftCoreAttention")

_GATHERED = ("ColumnParallelLinear", "TEColumnParallelLinear")  # down projections of MLA whose parts are gathered


def _name(core: Any) -> str:
    module = core.module if isinstance(core, ModuleSpec) else core
    return module[1] if isinstance(module, tuple) else getattr(module, "__name__", str(module))


def _latent(attention: ModuleSpec, recompute: bool) -> None:
    """The layer's self-attention as one whose latent moves."""
    if _name(attention) not in ("MLASelfAttention", "LatentSelfAttention"):
        raise error(f"latent=True and the spec's self-attention is {_name(attention)}, which has no latent",
                    "give get_gpt_layer_local_spec multi_latent_attention=True, or leave latent out")
    parts: Any = attention.submodules
    if _name(parts.linear_kv_up_proj) not in ("ColumnParallelLinear", "UpProjection"):
        raise error(f"latent=True and linear_kv_up_proj is {_name(parts.linear_kv_up_proj)}: rows of other ranks are multiplied "
                    "by its weight, which is written for Megatron's own ColumnParallelLinear",
                    "use the spec of get_gpt_layer_local_spec, or leave latent out")
    attention.module, attention.params = LatentSelfAttention, {**attention.params, "recompute": recompute}
    parts.linear_kv_up_proj = UpProjection


def _self_attentions(part: Any) -> List[ModuleSpec]:
    """Those inside."""
    if isinstance(part, (list, tuple)):
        return [found for x in part for found in _self_attentions(x)]
    if isinstance(part, ModuleSpec) and getattr(part.submodules, "core_attention", None) is not None and not isinstance(
            part.submodules, CrossAttentionSubmodules):
        return [part]
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return []
    return [found for field in dataclasses.fields(part) for found in _self_attentions(getattr(part, field.name))]


def _replace(part: Any, weft: ModuleSpec) -> int:
    """Puts `weft` wherever a core attention of self-attention stands inside; how many there were."""
    if isinstance(part, (list, tuple)):
        return sum(_replace(x, weft) for x in part)
    if isinstance(part, CrossAttentionSubmodules) or not dataclasses.is_dataclass(part) or isinstance(part, type):
        return 0
    found = 0
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "core_attention" and value is not None:
            if _name(value) not in _REPLACED:
                raise error(f"the spec's core attention is {_name(value)}, which is not plain attention",
                            f"with_weft takes the place of {', '.join(_REPLACED[:2])}")
            gathered = _name(getattr(part, "linear_kv_down_proj", None)) in _GATHERED
            params = {**weft.params, "gathered_latent": True} if gathered else weft.params
            setattr(part, field.name, ModuleSpec(module=weft.module, params=params))
            found += 1
        else:
            found += _replace(value, weft)
    return found


def with_weft(spec: S, *, latent: bool = False, recompute: bool = True, **options: Any) -> S:
    """A copy of a layer spec, or of a block of them, in which self-attention computes with Weft.

    Takes what get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec, get_gpt_decoder_block_spec and their like
    return. Options, for what Megatron's config has no word for, each one value or a list of one a layer: schedule (a name
    or a weft.Schedule, in the place of cp_comm_type), chunk_size, softcap, kernel, checked.

    latent=True: of multi-head latent attention (get_gpt_layer_local_spec(multi_latent_attention=True)) the latent moves, and
    each context-parallel rank makes the keys and values that it attends (docs/latent.md); again in the backward, unless
    recompute=False, which keeps them.
    """
    if not latent and recompute is not True:
        raise error("recompute is given without latent=True", "leave it out: it is about keys and values made of a latent")
    for name in options:
        if name not in OPTIONS:
            raise error(f"with_weft has no option {name}",
                        f"use latent, recompute, {', '.join(OPTIONS)}; the rest comes from Megatron's config")
    changed = copy.deepcopy(spec)
    if not _replace(changed, ModuleSpec(module=WeftCoreAttention, params=options)):
        raise error(f"there is no core_attention in a {type(spec).__name__}",
                    "give the spec of a layer or block with self-attention, such as get_gpt_layer_local_spec() returns")
    attentions = _self_attentions(changed) if latent else []
    if latent and not attentions:
        raise error(f"latent=True and a {type(spec).__name__}, which does not say what its self-attention is",
                    "give the spec of the layer or of its self-attention, a ModuleSpec")
    for attention in attentions:
        _latent(attention, recompute)
    return changed
