"""Weft for PyTorch: context parallelism over a torch.distributed process group, with autograd, on CPUs and GPUs.

    cp = weft.torch.ContextParallel(cu_seqlens, mesh["cp"], reduction="mean")   # of the whole pack, the same on every rank
    ids, labels, positions = cp.shard(input_ids), cp.labels(input_ids), cp.position_ids()    # this rank's rows
    out = cp.attention(q, k, v)                                                 # in each layer
    loss = cp.loss(F.cross_entropy(logits, labels, reduction="none"))

ContextParallel is one pack with its ranks, layout and schedule; the free functions take each of these by itself. Gradients of
parameters are those of this rank's rows, sinks included: they add up over the group.
"""

try:
    import torch as _  # noqa: F401
except ModuleNotFoundError as e:
    raise ModuleNotFoundError("weft.torch needs PyTorch; pip install '.[torch]' where Weft was cloned", name="torch") from e

from . import rows
from .context import ContextParallel, context_parallel
from .functional import context_parallel_attention
from .group import all_gather, communicator
from .layers import MultiheadAttention, TransformerLayer
from .micro import MicroSequenceAttention, micro_sequence_attention
from .micro_steps import MicroSequences, MicroStep
from .module import ContextParallelAttention
from .op import clear_cache
from .packed import pack
from .relayout import relayout
from .runs import log
from .sharding import next_token_labels, position_ids, shard, unshard, use_layout, valid_rows

__all__ = [
    "ContextParallel",
    "ContextParallelAttention",
    "MicroSequenceAttention",
    "MicroSequences",
    "MicroStep",
    "MultiheadAttention",
    "TransformerLayer",
    "all_gather",
    "clear_cache",
    "communicator",
    "context_parallel",
    "context_parallel_attention",
    "log",
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
