"""The names with which ring-flash-attn is put into models of transformers, with Weft's attention behind them.

    from weft.compat.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params

    substitute_hf_flash_attn(group, heads_k_stride=1)      # once; the model asks for attn_implementation="flash_attention_2"
    update_ring_flash_attn_params(cu_seqlens, group)       # before each batch: cu_seqlens of the whole pack
    model(ids.chunk(ranks, 1)[rank], position_ids=positions.chunk(ranks, 1)[rank], use_cache=False)

flash_attn need not be there. Each rank has a contiguous part of the pack, all of one length, as ring-flash-attn has it; positions
are those in the document. For other layouts and schedules there is weft.transformers.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .. import _outside
from .. import torch as _torch
from .. import transformers as _transformers
from .._arrays import error
from .._core import Mask
from ..schedule import Schedule
from ..torch.group import name_of, rank_and_ranks
from ..torch.packed import AnyPacking, packing_of
from ..transformers._batches import current, only_attention

__all__ = ["substitute_hf_flash_attn", "update_ring_flash_attn_params"]

NAME = "weft.compat"  # of the attention; transformers would look for flash_attn if the word flash were in it
_given: Optional[Tuple[str, int]] = None  # of substitute_hf_flash_attn: name of the group, heads_k_stride


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
               **kwargs: Any) -> Tuple[Tensor, None]:
    """Weft's attention, of heads_k_stride K/V heads at a time."""
    pack = getattr(attention_mask, "pack", None)
    if pack is not None and _given is not None:
        heads, stride = key.shape[1], _given[1]
        if heads % stride != 0:
            raise error(f"heads_k_stride is {stride}, and a layer has {heads} K/V heads", "give a number that divides them")
        pack.options["schedule"] = Schedule("all_gather", head_groups=heads // stride)
    return _transformers._attention(module, query, key, value, attention_mask, **kwargs)


def _mask(**kwargs: Any) -> Any:
    """Weft's description of the rows; of models whose rows meet in attention alone."""
    only_attention(kwargs.get("config"))
    return _transformers._mask(**kwargs)


def _substitute_in_new_models() -> None:
    """Models that ask for flash attention get Weft's, without a look for the package flash_attn."""
    plain: Any = getattr(PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if plain is None:
        raise error("this version of transformers chooses the attention of a model in a way not known here",
                    'make models with attn_implementation="weft", and call update_ring_flash_attn_params alone')
    if getattr(plain, "_weft", False):
        return

    @functools.wraps(plain)
    def chosen(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        flash = isinstance(attn_implementation, str) and attn_implementation.startswith("flash_attention_")
        return plain(self, NAME if flash else attn_implementation, *args, **kwargs)

    chosen._weft = True  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = chosen


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int = 1) -> None:
    """From now on models of transformers with attn_implementation="flash_attention_2" or "_3" use Weft's attention.

    Also those that were made before. process_group: a process group, or None for the default one; heads_k_stride: so many K/V
    heads are gathered at a time, each while those before are attended; it changes no result.
    """
    global _given
    if not isinstance(heads_k_stride, int) or heads_k_stride < 1:
        raise error(f"heads_k_stride is {heads_k_stride!r}", "give how many K/V heads are gathered at a time, 1 or more")
    _substitute_in_new_models()
    for name in (NAME, "flash_attention_2", "flash_attention_3"):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)
    _given = name_of(process_group), heads_k_stride


def update_ring_flash_attn_params(cu_seqlens: AnyPacking, process_group: Any) -> None:
    """The next calls of models, in this thread, are on this rank's part of a pack with these offsets, until the next update.

    cu_seqlens: of the whole pack, the same on every rank: tokens rank · n to (rank + 1) · n are this rank's, n a part of as many
    as there are ranks.
    """
    name = name_of(process_group)
    if _given is not None and _given[0] != name:
        raise error("update_ring_flash_attn_params is given another group than substitute_hf_flash_attn was",
                    "give both the same")
    packing = packing_of(cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
    _, ranks = rank_and_ranks(process_group)
    if packing.tokens_q % ranks != 0:
        raise error(f"a pack of {packing.tokens_q} tokens on {ranks} ranks", f"pad it to a multiple of {ranks}")
    mask = Mask(causal=True)
    _torch.use_layout(packing, process_group, layout="contiguous", mask=mask)
    pack = _transformers.packed(packing, process_group, "contiguous", mask=mask)
    if ranks > 1:
        _outside.remember(pack.positions)  # so that a call in another thread, which does not see the pack, is refused
    current.set(pack)
