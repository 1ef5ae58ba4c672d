"""Layer specs with Weft's core attention in the place of Megatron's."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar

from megatron.core.transformer.attention import CrossAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from .._arrays import error
from .attention import OPTIONS, WeftCoreAttention

S = TypeVar("S")

# What computes softmax(QK)V and nothing else. Another core attention (sparse, say) has a meaning that Weft's has not.
_REPLACED = ("DotProductAttention", "TEDotProductAttention", "WeftCoreAttention")

_GATHERED = ("ColumnParallelLinear", "TEColumnParallelLinear")  # down projections of MLA whose parts are gathered


def _name(core: Any) -> str:
    module = core.module if isinstance(core, ModuleSpec) else core
    return module[1] if isinstance(module, tuple) else getattr(module, "__name__", str(module))


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


def with_weft(spec: S, **options: Any) -> S:
    """A copy of a layer spec, or of a block of them, in which self-attention computes with Weft.

    Takes what get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec, get_gpt_decoder_block_spec and their like
    return. Options, for what Megatron's config has no word for, each one value or a list of one a layer: schedule (a name
    or a weft.Schedule, in the place of cp_comm_type), chunk_size, softcap, kernel, checked.
    """
    for name in options:
        if name not in OPTIONS:
            raise error(f"with_weft has no option {name}", f"use {', '.join(OPTIONS)}; the rest comes from Megatron's config")
    changed = copy.deepcopy(spec)
    if not _replace(changed, ModuleSpec(module=WeftCoreAttention, params=options)):
        raise error(f"there is no core_attention in a {type(spec).__name__}",
                    "give the spec of a layer or block with self-attention, such as get_gpt_layer_local_spec() returns")
    return changed
