"""The loss that balances the experts of a router, over all rows of a pack.

It is a product of two means over tokens, so it cannot be taken of each rank's rows and added up: each rank gives its share, with
the number of tokens of each expert summed over the ranks. Shares of all ranks, and their gradients, add up to those of the pack.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from typing import Any, Callable, Optional, Set, Tuple

import torch
from torch import Tensor

from .._arrays import error
from ..torch.group import all_gather
from ._batches import current

_NAME = "load_balancing_loss_func"
_seen: Set[str] = set()  # modules of models
_lock = threading.Lock()


def _share(gates: Tuple[Tensor, ...], experts: int, top_k: int, rows: Optional[Tensor], tokens: int, group: str) -> Tensor:
    """This rank's part of the loss. gates: logits [rows, experts] of each layer; rows: those that hold tokens, None for all."""
    counts = torch.zeros(experts, dtype=torch.float64, device=gates[0].device)
    sums = torch.zeros(experts, device=gates[0].device)
    for logits in gates:
        weights = torch.softmax(logits.to(sums.device), dim=-1)
        weights = weights if rows is None else weights[rows]
        counts += torch.bincount(weights.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
        sums = sums + weights.float().sum(0)
    counts = torch.stack(all_gather(counts, group)).sum(0)
    return (counts / (tokens * len(gates))).float() @ (sums / (tokens * len(gates))) * experts


def _is_known(original: Callable[..., Any]) -> bool:
    """Whether the function of this version of transformers is the one that _share computes."""
    if list(inspect.signature(original).parameters) != ["gate_logits", "num_experts", "top_k", "attention_mask"]:
        return False
    gates = tuple(torch.linspace(-1, 1, 77).mul(1 + i).sin().mul(9).cos().view(11, 7) for i in range(2))
    try:
        return torch.allclose(_share(gates, 7, 2, None, 11, ""), torch.as_tensor(original(gates, 7, 2, None)))
    except (TypeError, ValueError, RuntimeError):
        return False


def _replaced(original: Callable[..., Any], known: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss(gate_logits: Any, *args: Any, **kwargs: Any) -> Any:
        here = current.get()
        if here is None or not isinstance(gate_logits, tuple) or not gate_logits or gate_logits[0].shape[0] != here.rows:
            return original(gate_logits, *args, **kwargs)
        if here.masks is not None:
            raise error("a loss of routers on rows of a tree, each of which stands for as many tokens as sequences pass it",
                        "set output_router_logits=False")
        if not known:
            raise error(f"{original.__module__}.{_NAME} is not known here: it would be a loss of one rank's rows",
                        "set output_router_logits=False")
        given = inspect.signature(original).bind(gate_logits, *args, **kwargs)
        given.apply_defaults()
        rows = torch.from_numpy(here.placed.valid(here.rank)).bool().to(gate_logits[0].device)
        tokens = max(1, int(here.packing.lengths_q.sum()))
        return _share(gate_logits, given.arguments["num_experts"], given.arguments["top_k"], rows, tokens, here.options["group"])

    return loss


def take_over(config: Any) -> None:
    """From now on the routers of this model are balanced over the whole pack inside packed()."""
    path = type(config).__module__.replace(".configuration_", ".modeling_")
    if path in _seen:
        return
    with _lock:
        module = sys.modules.get(path)
        original = getattr(module, _NAME, None)
        if path not in _seen and original is not None:
            setattr(module, _NAME, _replaced(original, _is_known(original)))
        _seen.add(path)
