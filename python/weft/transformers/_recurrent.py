"""Layers of hybrid models that are no attention: gated delta nets, state-space layers, short convolutions.

Such a layer carries a state from each token of a document to the next, so it needs documents whole and in order. While it runs,
each document lies on one rank, and ranks have about as many tokens: rows are sent there, the layer runs on each document alone,
and its results go back to the rows of attention's layout. Gradients take the same way back.
"""

from __future__ import annotations

import functools
import heapq
import importlib
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor
from transformers import masking_utils

from .._arrays import error
from .._core import Layout, Packing
from ..torch.relayout import rows_between
from ..torch.sharding import place
from ._batches import Batch, Rule, current, restarts

# By model_type of the config: where transformers has the model, the class of its recurrent layers, and the kinds of layers, in
# the config's words, that are these or go row by row.
_MODELS = {
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridMambaLayer", ("linear_attention",)),
    "jamba": ("jamba", "JambaMambaMixer", ("linear_attention", "mamba")),
    "kimi_linear": ("kimi_linear", "KimiLinearDeltaAttention", ("linear_attention",)),
    "lfm2": ("lfm2", "Lfm2ShortConv", ("conv",)),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeShortConv", ("conv",)),
    "nemotron_h": ("nemotron_h", "NemotronHMamba2Mixer", ("linear_attention", "mlp", "moe")),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridGatedDeltaNet", ("linear_attention",)),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", ("linear_attention",)),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5GatedDeltaNet", ("linear_attention",)),
    "qwen3_next": ("qwen3_next", "Qwen3NextGatedDeltaNet", ("linear_attention",)),
}
_MASK = "create_recurrent_attention_mask"
_replaced: Set[str] = set()
_lock = threading.Lock()


class Documents:
    """Which rank has which documents of a pack while a recurrent layer runs: the longest first, each to who has the least.

    placed: where rows lie otherwise, on the ranks of a group.
    """

    def __init__(self, packing: Packing, placed: Layout, rank: int, group: str) -> None:
        self.packing, self.placed, self.rank, self.group = packing, placed, rank, group
        ranks = placed.ranks
        begins, lengths = packing.cu_seqlens_q_padded.tolist(), packing.lengths_q.tolist()
        least = [(0, r) for r in range(ranks)]  # a heap of (tokens, rank)
        held: List[List[int]] = [[] for _ in range(ranks)]
        for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i)):
            tokens, to = least[0]
            heapq.heapreplace(least, (tokens + lengths[i], to))
            held[to].append(i)
        runs: List[List[Tuple[int, int, int]]] = []
        for mine in held:
            row, own = 0, []
            for i in sorted(mine):
                own.append((row, begins[i], lengths[i]))
                row += lengths[i]
            runs.append(own)
        self.layout = Layout.explicit(packing, runs)
        self.lengths = [count for _, _, count in runs[rank]]  # of this rank's documents, one after another

    def run(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The layer, of batches [documents, length, dim], on x [rows, dim]."""
        if self.layout.rows == 0:
            return x
        there = rows_between(x, self.placed, self.layout, self.rank, self.group)
        return rows_between(_on_each(layer, there, self.lengths), self.layout, self.placed, self.rank, self.group)


class RecurrentBatch(Batch):
    """What a recurrent layer takes for its mask."""

    def __init__(self, documents: Documents, shape: Tuple[int, int, int], pack: Any = None) -> None:
        super().__init__(documents.packing, Rule(causal=True), shape, pack=pack)
        self.documents = documents

    def check(self, given: Dict[str, Any]) -> None:
        """Refuses what would say once more, or otherwise, where documents begin."""
        for name in ("cu_seq_lens_q", "seq_idx") if self.pack is not None else ("seq_idx",):
            if given.get(name) is not None:
                raise error(f"{name} is given to a recurrent layer, which has documents from the packing or position_ids",
                            "leave it out")
        cu = given.get("cu_seq_lens_q")
        if cu is not None and cu.tolist() != self.documents.packing.cu_seqlens_q.tolist():
            raise error(f"cu_seq_lens_q {cu.tolist()} and position_ids that restart elsewhere", "give both of the same documents")


def _on_each(layer: Callable[[Tensor], Tensor], x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The layer on each document alone: x [rows, dim] holds them one after another, and rows of no document behind them.

    Documents of about one length go together as a batch. Padding at their ends, at most a quarter, changes nothing: these layers
    look back only. A rank without documents runs the layer on a row of nobody, so that all parameters have a gradient on it too.
    """
    parts = list(x[:sum(lengths)].split(list(lengths))) if lengths else [x[:1]]
    waiting = sorted(range(len(parts)), key=lambda i: -len(parts[i]))
    found: List[Tensor] = [x] * len(parts)
    while waiting:
        longest = len(parts[waiting[0]])
        together = [i for i in waiting if 4 * len(parts[i]) >= 3 * longest]
        waiting = waiting[len(together):]
        results = layer(torch.nn.utils.rnn.pad_sequence([parts[i] for i in together], batch_first=True))
        for i, result in zip(together, results):
            found[i] = result[:len(parts[i])]
    y = torch.cat(found)
    return torch.nn.functional.pad(y, (0, 0, 0, x.shape[0] - y.shape[0]))


def _forward(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A recurrent layer's forward: as it was, but on whole documents where its mask says that rows are those of a pack."""

    @functools.wraps(forward)
    def run(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows_are = kwargs.get("attention_mask")
        if not isinstance(rows_are, RecurrentBatch):
            return forward(self, hidden_states, *args, **kwargs)
        if args or any(kwargs.get(name) is not None for name in ("cache_params", "past_key_values")):
            raise error("a cache, and recurrent layers on a pack of documents", "give use_cache=False")
        rows_are.check(kwargs)
        if rows_are.pack is not None:
            rows_are.pack.recurrent = True
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        # Other keyword arguments are the model's, for its loss and its outputs.
        return rows_are.documents.run(lambda batch: forward(self, batch), rows).view_as(hidden_states)

    return run


def _chooses(config: Any, attention_mask_of: Any) -> bool:
    """Whether the masks of the model's attention are made by that function."""
    try:
        return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation] is attention_mask_of
    except (AttributeError, KeyError):
        return False


def _mask(original: Callable[..., Any], attention_mask_of: Any) -> Callable[..., Any]:
    """In the place of a recurrent layer's mask of padding: what the rows are, which is still there when it is computed again."""

    @functools.wraps(original)
    def create(config: Any, inputs_embeds: Tensor, attention_mask: Any = None, past_key_values: Any = None,
               position_ids: Optional[Tensor] = None, **kwargs: Any) -> Any:
        here, ours = current.get(), _chooses(config, attention_mask_of)
        if ours and here is not None:
            return RecurrentBatch(here.documents(), (1, here.rows, here.rows), here)
        if ours and position_ids is not None and attention_mask is None and past_key_values is None:
            batch, length = inputs_embeds.shape[:2]
            packing = restarts(position_ids.expand(batch, length))
            if packing is not None:
                return RecurrentBatch(Documents(packing, place(packing, "", None, None)[1], 0, ""), (batch, length, length))
        return original(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask,
                        past_key_values=past_key_values, position_ids=position_ids, **kwargs)

    return create


def known_layers(config: Any, attention_mask_of: Any) -> Sequence[str]:
    """Which layers of the model, beside attention, run on whole documents inside packed(); from now on they do, in models whose
    masks of attention are made by that function."""
    found: Optional[Tuple[str, str, Sequence[str]]] = _MODELS.get(getattr(config, "model_type", ""))
    if found is None:
        return ()
    path, name, layers = found
    with _lock:
        if path not in _replaced:
            module: Any = importlib.import_module(f"transformers.models.{path}.modeling_{path}")
            kind = getattr(module, name, None)
            if kind is None or not hasattr(module, _MASK):
                raise error(f"this version of transformers has no {name if kind is None else _MASK} in {module.__name__}",
                            "use the version that docs/transformers.md names")
            kind.forward = _forward(kind.forward)
            setattr(module, _MASK, _mask(getattr(module, _MASK), attention_mask_of))
            _replaced.add(path)
    return layers
