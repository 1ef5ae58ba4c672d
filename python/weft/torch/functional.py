"""Attention over a process group, as a function."""

from typing import Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from .._arrays import error, refuse_strange
from .._core import Mask
from .._options import constant
from ..schedule import Schedule
from .group import name_of
from .op import how_of
from .packed import AnyPacking, is_packed, pack


@torch.compiler.assume_constant_result
def _how(mask: Optional[Mask], group: Any, options: Dict[str, Any]) -> str:
    if mask is not None:
        clash = [name for name in ("causal", "bottom_right", "window", "chunk_size") if name in options]
        if clash:
            raise error(f"mask is given together with {clash[0]}", "a mask says it all: leave the others out")
        options = {**options, "causal": mask.causal, "bottom_right": mask.bottom_right, "window": mask.window,
                   "chunk_size": mask.chunk_size}
    return how_of(**options, group=name_of(group))


def _layout_mask(layout_mask: Any, mask: Optional[Mask]) -> Any:
    """The mask that layout balanced goes by, as an operator can take it."""
    if not isinstance(layout_mask, Mask):
        raise error(f"layout_mask is of type {type(layout_mask).__name__}", "give the weft.Mask that shard was given")
    if layout_mask.slices is None:
        return [layout_mask.causal, layout_mask.bottom_right, list(layout_mask.window), layout_mask.chunk_size]
    if mask != layout_mask:
        raise error("layout_mask is one of slices, and not the layer's mask", "use another layout")
    return "own"


def context_parallel_attention(q: Tensor, k: Tensor, v: Tensor, packing: AnyPacking, mask: Optional[Mask] = None, *,
                               group: Any = None, sink: Union[None, str, Tensor] = None, return_lse: bool = False,
                               return_max_logit: bool = False, one_rank: bool = False,
                               **options: Any) -> Union[Tensor, Tuple[Tensor, ...]]:
    """Exact attention of this rank's queries over the whole pack, differentiable in q, k, v and the sink.

    q [rows, hq, d], k [rows, hk, d], v [rows, hk, dv] are this rank's rows (shard); packing is that of the whole pack, the
    same on every rank: a weft.Packing, its tensor (pack), or cu_seqlens. mask is a weft.Mask, or say causal, bottom_right,
    window, chunk_size. group is a process group, its name or a DeviceMesh of one dimension, None the default one; without any
    (or with one_rank=True) the tensors are the whole pack. Inside torch.compile give the packing as its tensor and the mask
    by its parts: objects of the library break the graph.

    Other options, as in weft.attention: format, scale, softcap, head_map, schedule (a name, or a weft.Schedule), layout,
    deterministic, kernel, checked, layer. The layout is that of shard; "balanced", which is the default
    (dual_chunk for batches), and "auto" go by a mask which need not be the layer's: give that of shard as layout_mask, unless
    it was causal, the default. Under a layout that rows were not dealt out in, attention raises (use_layout). sink: None,
    "off_by_one", or a tensor [hq] (f32 or f64).

    Returns out, or a tuple of out and what was asked for: lse [rows, hq], max_logit [hq] over all ranks. Both carry no
    gradient.

        >>> import torch, weft, weft.torch
        >>> q = torch.randn(16, 2, 8, requires_grad=True)
        >>> out = weft.torch.context_parallel_attention(q, q, q, weft.Packing([0, 7, 16]), weft.Mask(causal=True))
        >>> out.sum().backward()
        >>> q.grad.shape
        torch.Size([16, 2, 8])
    """
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if getattr(x, "is_nested", False):
            refuse_strange(x, name)
    if mask is not None and not isinstance(mask, Mask):
        raise error(f"mask is of type {type(mask).__name__}", "give a weft.Mask, or causal, window and the like")
    if options.get("layout_mask") is not None:
        options["layout_mask"] = _layout_mask(options["layout_mask"], mask)
    if mask is not None and mask.slices is not None:
        if isinstance(packing, torch.Tensor) and (torch.compiler.is_compiling() or is_packed(packing)):
            raise error("a mask of slices with a packing that is a tensor",
                        "put the slices into it: weft.torch.pack(packing, slices)")
        packing, mask = pack(packing, mask.slices), Mask()
    if not isinstance(packing, torch.Tensor):  # a tensor may also be cu_seqlens, which the operator finds out
        packing = pack(packing)
    if isinstance(sink, str):
        if sink != "off_by_one":
            raise error(f"there is no sink {sink!r}", "use None, 'off_by_one', or a tensor of one logit a query head")
        sink, options["off_by_one"] = None, True
    for name, value in (("one_rank", one_rank), ("return_lse", return_lse), ("return_max_logit", return_max_logit)):
        if value is not True and value is not False:
            raise error(f"{name} is {value!r}", "give True or False")
    if return_max_logit:
        options["max_logit"] = True
    if torch.compiler.is_compiling():
        if isinstance(options.get("schedule"), Schedule):
            options["schedule"] = [options["schedule"].name, options["schedule"].given]
        options = {name: constant(value) for name, value in options.items()}
    how = _how(mask, "" if one_rank else group, options)
    out, lse, max_logit = torch.ops.weft.attention(q, k, v, sink, packing, how)
    if not return_lse and not return_max_logit:
        return out
    return (out, *([lse.detach()] if return_lse else []), *([max_logit.detach()] if return_max_logit else []))
