"""Attention over a process group, as a layer."""

import threading
from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from .._arrays import error
from .._core import Mask
from ..schedule import AnySchedule
from .functional import context_parallel_attention
from .group import by_name
from .op import how_of
from .packed import AnyPacking


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

    def __init__(self, *, causal: bool = True, bottom_right: bool = False, window: Tuple[int, int] = (-1, -1),
                 chunk_size: Optional[int] = None, softcap: float = 0.0, sink: Optional[str] = None,
                 heads: Optional[int] = None, scale: Optional[float] = None, schedule: AnySchedule = "all_gather",
                 layout: Optional[str] = None, deterministic: bool = False, return_max_logit: bool = False, group: Any = None,
                 one_rank: bool = False, **options: Any) -> None:
        super().__init__()
        self.settings = dict(causal=causal, bottom_right=bottom_right, window=window, chunk_size=chunk_size,
                             softcap=softcap, scale=scale, schedule=schedule, layout=layout, deterministic=deterministic,
                             return_max_logit=return_max_logit, one_rank=one_rank, **options)
        how_of(**{name: value for name, value in self.settings.items()
                  if name not in ("one_rank", "return_lse", "return_max_logit", "layout_mask")})  # refuses unknown options
        self.number = own_number() if options.get("layer") is None and not one_rank else None
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
                **overrides: Any) -> Union[Tensor, Tuple[Tensor, ...]]:
        """Attention of this rank's rows; mask and overrides take the place of the layer's settings in this call."""
        settings = {**self.settings, **overrides}
        if mask is not None:
            for name in ("causal", "bottom_right", "window", "chunk_size"):
                if name in overrides:
                    raise error(f"mask is given together with {name}", "a mask says it all: leave the others out")
                settings.pop(name)
        settings.setdefault("sink", self.sink if self.sink_kind == "learnable" else self.sink_kind)
        settings.setdefault("group", self.group)
        if settings.get("checked") and settings.get("layer") is None:
            settings["layer"] = getattr(self, "number", None)  # layers saved by an earlier version have none
        return context_parallel_attention(q, k, v, packing, mask, **settings)

    def extra_repr(self) -> str:
        """The settings, for print(model)."""
        said = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{said}, sink={self.sink_kind!r}"
