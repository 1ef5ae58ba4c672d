"""Weft for PyTorch: context parallelism over a torch.distributed process group, with autograd, on CPUs and GPUs.

    packing = weft.Packing(cu_seqlens)                        # of the whole pack, the same on every rank
    ids = weft.torch.shard(input_ids, packing, group)         # this rank's rows
    positions = weft.torch.position_ids(packing, group)       # for rotary embeddings
    out = weft.torch.context_parallel_attention(q, k, v, packing, weft.Mask(causal=True), group=group, schedule="ring")

Gradients of parameters are those of this rank's rows, sinks included: sum them over the group, as always.
"""

try:
    import torch as _  # noqa: F401
except ModuleNotFoundError as e:
    raise ModuleNotFoundError("weft.torch needs PyTorch; pip install '.[torch]' where Weft was cloned", name="torch") from e

from . import rows
from .functional import context_parallel_attention
from .group import all_gather, communicator
from .micro import MicroSequenceAttention, micro_sequence_attention
from .module import ContextParallelAttention
from .op import clear_cache
from .packed import pack
from .relayout import relayout
from .sharding import next_token_labels, position_ids, shard, unshard, use_layout, valid_rows

__all__ = [
    "ContextParallelAttention",
    "MicroSequenceAttention",
    "all_gather",
    "clear_cache",
    "communicator",
    "context_parallel_attention",
    "micro_sequence_attention",
    "next_token_labels",
    "pack",
    "position_ids",
    "relayout",
    "rows",
    "shard",
    "unshard",
    "use_layout",
    "valid_rows",
]
