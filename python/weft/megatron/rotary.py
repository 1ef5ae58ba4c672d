"""Rotary embeddings by the position of each row, for layouts of the whole pack.

Megatron's take rows for two chunks of each document. The positions of the rows travel in the number that says how many angles
are wanted, which every model hands from get_rotary_seq_len to the embedding, also where a layer is computed again.
"""

from __future__ import annotations

from typing import Any, Dict

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from .._arrays import error
from .attention import WeftCoreAttention
from .batch import WholePackParams


class _Length(int):
    """A number of angles, and the rows' positions."""

    positions: Tensor


class _ByRow:
    """Beside a rotary embedding of Megatron, whose angles it takes."""

    flat = False  # MLA gives rows without a batch dimension

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        params = next((x for x in (*args, *kwargs.values()) if isinstance(x, WholePackParams)), None)
        length: int = super().get_rotary_seq_len(*args, **kwargs)  # type: ignore[misc]
        if params is None or params.weft_positions is None:
            return length
        found = _Length(length)
        found.positions = params.weft_positions
        return found

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(max_seq_len, _Length):
            return super().forward(max_seq_len, *args, **kwargs)  # type: ignore[misc]
        found = self.get_emb(int(max_seq_len))  # type: ignore[attr-defined]
        angles, *rest = found if isinstance(found, tuple) else (found,)  # YaRN gives a scale too
        rows = angles[max_seq_len.positions]  # [t, 1, 1, d]
        rows = rows[:, 0] if self.flat else rows
        return (rows, *rest) if rest else rows


_classes: Dict[Any, Any] = {}


def use_row_positions(model: Any) -> int:
    """Makes a model's rotary embeddings go by the rows' positions in batches of get_batch_on_this_cp_rank(..., layout=...).

    Once, after the model is built; other batches are treated as before. Returns how many embeddings there are, 0 in a
    model whose positions are learned or none. An Error if one cannot do so (multimodal ones).
    """
    flat = {id(m.rotary_pos_emb) for m in model.modules() if isinstance(m, MultiLatentAttention)}
    found = 0
    for module in model.modules():
        kind = type(module)
        if isinstance(module, _ByRow):
            found += 1
        elif kind in (RotaryEmbedding, YarnRotaryEmbedding):
            if (kind, id(module) in flat) not in _classes:
                _classes[kind, id(module) in flat] = type(f"{kind.__name__}ByRow", (_ByRow, kind), {"flat": id(module) in flat})
            module.__class__ = _classes[kind, id(module) in flat]
            found += 1
        elif "Rotary" in kind.__name__:
            raise error(f"{kind.__name__} gives positions by dual chunks alone", "use layout dual_chunk")
        if isinstance(module, WeftCoreAttention):
            module.by_row = True
        if getattr(getattr(module, "config", None), "apply_rope_fusion", False) and isinstance(module, MultiLatentAttention):
            raise error("apply_rope_fusion with MLA takes its angles by dual chunks", "give the config apply_rope_fusion=False")
    return found
