"""Attention over a process group, as a layer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Dict, Literal, Optional, Tuple, Union

import torch
from torch import Tensor

from .._arrays import error
from .._core import Mask
from ..types import TorchOptions
from .functional import context_parallel_attention, in_own_words
from .group import by_name
from .how import how_of
from .packed import AnyPacking

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Numbers(threading.local):
    """How many layers a thread has made: ranks may be threads, and each builds a model of its own."""

    next = 0


_numbers = _Numbers()


def own_number() -> int:
    """The number of a new layer, which checked ranks compare: the order in which they are built."""
    _numbers.next += 1
    return _numbers.next - 1


class ContextParallelAttention(torch.nn.Module):
    """A layer that calls context_parallel_attention with settings of its own; each can be overridden in a call.

    sink: None, "off_by_one", or "learnable" (then heads=, and the parameter `sink` is one logit a query head).
    layer: its number, which checked ranks compare. Unless given it is counted as layers are built, which ranks must then do in
    the same order; layers with one_rank=True do not count.

        >>> import torch, weft, weft.torch
        >>> layer = weft.torch.ContextParallelAttention(window=(4, 0), softcap=30.0)
        >>> q = torch.randn(16, 2, 8)
        >>> layer(q, q, q, weft.Packing([0, 7, 16])).shape
        torch.Size([16, 2, 8])
        >>> layer(q, q, q, weft.Packing([0, 7, 16]), window=(-1, 0)).shape
        torch.Size([16, 2, 8])
    """

    def __init__(
        self, *, sink: Optional[Literal["off_by_one", "learnable"]] = None, heads: Optional[int] = None, group: Any = None,
        one_rank: bool = False, return_lse: bool = False, return_max_logit: bool = False, **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__()
        given = in_own_words({**options}, group)
        group = given.pop("group", group)
        self.settings: Dict[str, Any] = {"causal": True, **given, "one_rank": one_rank, "return_lse": return_lse,
                                         "return_max_logit": return_max_logit}
        how_of(**{name: value for name, value in given.items() if name != "layout_mask"})  # refuses what is wrong at once
        self.number = own_number() if given.get("layer") is None and not one_rank else None
        self.group = by_name(group)
        self.sink_kind = sink
        if sink == "learnable":
            if heads is None:
                raise error("a learnable sink of how many heads?", "give heads=, the number of query heads")
            self.sink = torch.nn.Parameter(torch.zeros(heads))
        elif sink not in (None, "off_by_one"):
            raise error(f"there is no sink {sink!r}", "use None, 'off_by_one' or 'learnable'")
        else:
            self.register_parameter("sink", None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packing: AnyPacking, mask: Optional[Mask] = None,
                **changes: Any) -> Union[Tensor, Tuple[Tensor, ...]]:
        """Attention of this rank's rows; mask and changes take the place of the layer's settings in this call."""
        overrides = in_own_words(changes)
        settings = {**self.settings, **overrides}
        if mask is not None:
            for name in ("causal", "bottom_right", "window", "chunk_size"):
                if name in overrides:
                    raise error(f"mask is given together with {name}", "a mask says it all: leave the others out")
                settings.pop(name, None)
        settings.setdefault("sink", self.sink if self.sink_kind == "learnable" else self.sink_kind)
        settings.setdefault("group", self.group)
        if settings.get("checked") and settings.get("layer") is None:
            settings["layer"] = getattr(self, "number", None)  # layers saved by an earlier version have none
        return context_parallel_attention(q, k, v, packing, mask, **settings)

    def extra_repr(self) -> str:
        """The settings, for print(model)."""
        said = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{said}, sink={self.sink_kind!r}"
