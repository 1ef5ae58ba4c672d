"""Layers of a transformer around Weft's attention, with the words and parameter names of Transformer Engine.

    layer = weft.torch.TransformerLayer(4096, 14336, 32, num_gqa_groups=8, normalization="RMSNorm", activation="swiglu",
                                        bias=False, qkv_format="thd", rotary_base=500000.0, window_size=(4095, 0))
    layer.set_context_parallel_group(mesh["cp"], cp_comm_type="p2p")
    y = layer(x, cu_seqlens_q=cu_seqlens)        # this rank's rows; offsets of the whole pack

docs/layers.md says what is taken, what is refused, and what is otherwise than in Transformer Engine.
"""

from .attention import MultiheadAttention
from .transformer import TransformerLayer

__all__ = ["MultiheadAttention", "TransformerLayer"]
