"""Weft in Megatron-Core: exact attention of packed documents over its context-parallel group, without Transformer Engine.

    spec = weft.megatron.with_weft(get_gpt_layer_local_spec(...))             # the layer spec, with Weft's core attention
    model = GPTModel(config, spec, ...)
    batch, packed = weft.megatron.get_batch_on_this_cp_rank(batch, cu_seqlens, cu_seqlens_padded)
    loss = model(**batch, attention_mask=None, packed_seq_params=packed)

Written for and tested with megatron-core 0.16.1; docs/megatron.md says what is mapped and what is refused.
"""

try:
    import megatron.core as _  # noqa: F401
except ModuleNotFoundError as e:
    if e.name not in ("megatron", "megatron.core"):
        raise
    raise ModuleNotFoundError("weft.megatron needs Megatron-Core; pip install megatron-core", name=e.name) from e

from .attention import WeftCoreAttention
from .batch import WholePackParams, get_batch_on_this_cp_rank, partition_indices
from .rotary import use_row_positions
from .spec import with_weft

__all__ = [
    "WeftCoreAttention",
    "WholePackParams",
    "get_batch_on_this_cp_rank",
    "partition_indices",
    "use_row_positions",
    "with_weft",
]
