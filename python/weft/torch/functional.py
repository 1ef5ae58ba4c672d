"""Attention over a process group, as a function."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Dict, Literal, Optional, Tuple, Union, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .._arrays import error, refuse_strange
from .._core import Mask, Packing
from .._options import constant
from ..cost import machine_number
from ..schedule import Schedule, constant_result
from ..spellings import own_words
from ..types import TorchOptions
from . import expand as expansion
from . import offsets
from .group import name_of
from .how import OPTIONS, how_of
from .op import attend
from .packed import OWN, AnyPacking, is_packed, pack
from .runs import call_of, forward, plain

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LENGTHS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
_KNOWN = (*OPTIONS, *_LENGTHS, "group", "sink", "one_rank", "return_lse", "return_max_logit")


@constant_result
def _how(mask: Optional[Mask], group: Any, options: Dict[str, Any]) -> str:
    if mask is not None:
        clash = [name for name in ("causal", "bottom_right", "window", "chunk_size") if name in options]
        if clash:
            raise error(f"mask is given together with {clash[0]}", "a mask says it all: leave the others out")
        options = {**options, "causal": mask.causal, "bottom_right": mask.bottom_right, "window": mask.window,
                   "chunk_size": mask.chunk_size}
    return how_of(**options, group=name_of(group))


def _layout_mask(layout_mask: Any, mask: Optional[Mask]) -> Tuple[Any, Any]:
    """What layouts balanced and placed go by, as an operator can take it; its slices if the packing has to bring them."""
    if isinstance(layout_mask, str) and layout_mask == OWN:
        return OWN, None
    if not isinstance(layout_mask, Mask):
        raise error(f"layout_mask is of type {type(layout_mask).__name__}", "give the weft.Mask that shard was given")
    if layout_mask.slices is None:
        return [layout_mask.causal, layout_mask.bottom_right, list(layout_mask.window), layout_mask.chunk_size], None
    return OWN, None if mask == layout_mask else layout_mask.slices


def in_own_words(options: Dict[str, Any], group: Any = None) -> Dict[str, Any]:
    """Keywords of attention by Weft's names (spellings); `group` among them if it has another name."""
    for name in options:
        if name not in _KNOWN:
            return own_words("context_parallel_attention", options, _KNOWN, () if group is None else ("group",))
    return options


def _packing_of(packing: Optional[AnyPacking], options: Dict[str, Any]) -> AnyPacking:
    """The packing, given as it is or as cu_seqlens, which are taken out of the options."""
    both, q, k = (options.pop(name, None) for name in _LENGTHS)
    given = [name for name, value in zip(("packing", *_LENGTHS), (packing, both, q, k)) if value is not None]
    if given == ["cu_seqlens_q", "cu_seqlens_k"]:
        return q if q is k else Packing(q, k)
    if len(given) > 1:
        raise error(f"{given[0]} is given together with {given[1]}", "give one of them: packing, or cu_seqlens of both sides, or "
                    "cu_seqlens_q and cu_seqlens_k")
    if not given or given == ["cu_seqlens_k"]:
        raise error("there is no packing", "give a weft.Packing, its tensor (weft.torch.pack), or cu_seqlens")
    return next(x for x in (packing, both, q) if x is not None)


_initialized = dist.is_initialized if dist.is_available() else lambda: False
_MEMOISED = frozenset(OPTIONS)
_hows: Dict[Any, str] = {}  # settings that were read before
_packings: Dict[int, Tuple[Packing, Tensor]] = {}  # by id of the Packing, which is kept so that no other has the id


def _packed(packing: Any) -> Optional[Tensor]:
    """The packing as a tensor, if that is simple; a tensor may also be cu_seqlens, which the operator finds out."""
    if isinstance(packing, Tensor):
        return packing
    if type(packing) is not Packing:
        return None
    known = _packings.get(id(packing))
    if known is None:
        if len(_packings) >= 64:
            _packings.clear()
        known = _packings[id(packing)] = packing, pack(packing)
    return known[1]


def _refuse_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if value is not True and value is not False:
            raise error(f"{name} is {value!r}", "give True or False")


def _settled(packing: Any, mask: Any, group: Any, sink: Any, max_logit: bool, one_rank: bool,
             given: Dict[str, Any]) -> Tuple[str, Tensor, Optional[Tensor]]:
    """The settings as a text, the packing as a tensor, and the sink if it is one."""
    whole = None if torch.compiler.is_compiling() else _packed(packing)
    if whole is None or not _MEMOISED.issuperset(given):
        return _read(packing, mask, group, sink, max_logit, one_rank, given)
    # None where nobody has named a group and there is none, which is another thing than "": it may be refused.
    name = "" if one_rank else None if group is None and not _initialized() else name_of(group)
    # Types too, because 1 and True are equal and not the same; the machine, because auto goes by it.
    key = (name, one_rank, mask, sink if isinstance(sink, str) else None, max_logit, machine_number(), *given.items(),
           *map(type, given.values()))
    try:
        how = _hows.get(key)
    except TypeError:  # a list or an array
        return _read(packing, mask, group, sink, max_logit, one_rank, given)
    if how is not None:
        return how, whole, None if isinstance(sink, str) else sink
    result = _read(packing, mask, group, sink, max_logit, one_rank, given)
    dealt = given.get("layout_mask")
    # Slices are in the packing and not in the text.
    if (mask is None or mask.slices is None) and not (isinstance(dealt, Mask) and dealt.slices is not None):
        if len(_hows) >= 1024:
            _hows.clear()
        _hows[key] = result[0]
    return result


def _read(packing: Any, mask: Any, group: Any, sink: Any, max_logit: bool, one_rank: bool,
          given: Dict[str, Any]) -> Tuple[str, Tensor, Optional[Tensor]]:
    options: Dict[str, Any] = dict(in_own_words(given, group))
    group, packing = options.pop("group", group), _packing_of(packing, options)
    if mask is not None and not isinstance(mask, Mask):
        raise error(f"mask is of type {type(mask).__name__}", "give a weft.Mask, or causal, window and the like")
    slices, dealt = None if mask is None else mask.slices, None
    if options.get("layout_mask") is not None:
        options["layout_mask"], dealt = _layout_mask(options["layout_mask"], mask)
    if slices is not None or dealt is not None:
        if isinstance(packing, torch.Tensor) and (torch.compiler.is_compiling() or is_packed(packing)):
            raise error("a mask of slices with a packing that is a tensor",
                        "put the slices into it: weft.torch.pack(packing, slices)")
        packing, mask = pack(packing, slices, layout_slices=dealt), Mask() if slices is not None else mask
    if not isinstance(packing, torch.Tensor):  # a tensor may also be cu_seqlens, which the operator finds out
        packing = pack(packing)
    if isinstance(sink, str):
        if sink != "off_by_one":
            raise error(f"there is no sink {sink!r}", "use None, 'off_by_one', or a tensor of one logit a query head")
        sink, options["off_by_one"] = None, True
    if max_logit:
        options["max_logit"] = True
    if torch.compiler.is_compiling():
        if isinstance(options.get("schedule"), Schedule):
            options["schedule"] = [options["schedule"].name, options["schedule"].given]
        options = {name: constant(value) for name, value in options.items()}
    return _how(mask, "" if one_rank else group, options), packing, sink


def _expanded(q: Tensor, source: Any, v: Any, packing: Any, mask: Any, group: Any, sink: Any, statistics: Tuple[bool, bool],
              one_rank: bool, expand: expansion.Expand, recompute: bool, given: Dict[str, Any]) -> Any:
    """The call with a source in the place of k, after which come the packing and the mask."""
    if source is None:
        source = given.pop("source", None)
    if v is not None:
        if mask is not None:
            raise error("expand= is given with k, v and a packing", "give a source in place of both: (q, source, packing, ...)")
        packing, mask = (v, mask) if packing is None else (v, packing)
    if not isinstance(source, Tensor):
        raise error(f"the source is a {type(source).__name__}", "give this rank's rows of what moves: [rows, width]")
    if offsets.given_on_gpu(packing, given):
        raise error("expand= with lengths in the memory of a GPU, where which rows are seen is known",
                    "give the lengths on the host")
    if one_rank or not name_of(group):
        # An executor of one rank, because it expands only rows that are seen.
        group, given = expansion.one_rank(), {**given, "layout": "contiguous", "layout_mask": None}
    return_lse, return_max_logit = statistics
    how, whole, logits = _settled(packing, mask, group, sink, return_max_logit, False, given)
    results = expansion.attend(q, source, logits, whole, call_of(how), expand, recompute)
    found = [x for x, asked in zip(results, (True, return_lse, return_max_logit)) if asked]
    return found[0] if len(found) == 1 else tuple(found)


@functools.lru_cache(None)
def _eager() -> Any:
    """_expanded, where torch.compile breaks the graph: it calls back into Python. Made when first called, because it imports
    torch's compiler."""
    return torch.compiler.disable(_expanded)


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Optional[AnyPacking] = ..., mask: Optional[Mask] = ..., *, group: Any = ...,
    sink: Union[None, str, Tensor] = ..., return_lse: Literal[False] = ..., return_max_logit: Literal[False] = ...,
    one_rank: bool = ..., **options: Unpack[TorchOptions],
) -> Tensor: ...


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Optional[AnyPacking] = ..., mask: Optional[Mask] = ..., *, group: Any = ...,
    sink: Union[None, str, Tensor] = ..., return_lse: bool = ..., return_max_logit: bool = ..., one_rank: bool = ...,
    **options: Unpack[TorchOptions],
) -> Any: ...


@overload
def context_parallel_attention(
    q: Tensor, source: Tensor, packing: Optional[AnyPacking] = ..., mask: Optional[Mask] = ..., *, expand: expansion.Expand,
    recompute: bool = ..., group: Any = ..., sink: Union[None, str, Tensor] = ..., return_lse: bool = ...,
    return_max_logit: bool = ..., one_rank: bool = ..., **options: Unpack[TorchOptions],
) -> Any: ...


def context_parallel_attention(  # type: ignore[misc]  # the third form has its names in another order
    q: Tensor, k: Any = None, v: Any = None, packing: Any = None, mask: Optional[Mask] = None, *, group: Any = None,
    sink: Union[None, str, Tensor] = None, return_lse: bool = False, return_max_logit: bool = False, one_rank: bool = False,
    expand: Optional[expansion.Expand] = None, recompute: bool = True, **given: Any,
) -> Union[Tensor, Tuple[Tensor, ...]]:
    """Exact attention of this rank's queries over the whole pack, differentiable in q, k, v and the sink.

    q [rows, hq, d], k [rows, hk, d], v [rows, hk, dv] are this rank's rows (shard); packing is that of the whole pack, the
    same on every rank: a weft.Packing, its tensor (pack), or cu_seqlens (also by keyword, or cu_seqlens_q and cu_seqlens_k if
    keys are other sequences than queries). mask is a weft.Mask, or say causal, bottom_right,
    window, chunk_size. group is a process group, its name or a DeviceMesh of one dimension, None the default one; without any
    (or with one_rank=True) the tensors are the whole pack. Inside torch.compile give the packing as its tensor and the mask
    by its parts: objects of the library break the graph.

    Other options, as in weft.attention: format, scale, softcap, head_map, schedule (a name, or a weft.Schedule; auto unless
    given), layout, deterministic, kernel, checked, layer, and other libraries' names of these (docs/coming-from.md). The layout
    is that of shard; "balanced", which is the default (dual_chunk for batches), and "auto" go by a mask which need not be the
    layer's: give that of shard as layout_mask, unless it was causal, the default. Under a layout that rows were not dealt out in,
    attention raises (use_layout), and with checked also if rows of the packing were dealt out under two layouts. sink: None,
    "off_by_one", or a tensor [hq] (f32 or f64).

    The packing may also be cu_seqlens on the GPU where q is, with cu_seqlens_q_padded or seqused_q, and cu_seqlens_k,
    cu_seqlens_k_padded, seqused_k if keys are other sequences: planned there, in the current stream, without waiting. Layouts
    contiguous, dual_chunk, zigzag (the default then) and striped, all schedules but exact and mesh; the call can be captured in a
    CUDA graph, over ranks with NCCL too.

    expand: context_parallel_attention(q, source, packing, ..., expand=fn) moves rows of one tensor, source [rows, width], and
    each rank makes K and V of them: fn(rows) -> (k [rows, hk, d], v [rows, hk, dv]), or fn(rows, positions) with each row's
    position in its document, differentiable and row by row; fn may take heads= too, a slice of the K/V heads that are wanted. It
    is called with rows of other ranks, several times, and again in the backward, unless recompute=False: then K and V are kept in
    between. Parameters and other leaves that it uses get their gradients: on each rank that rank's share, as of all parameters
    (docs/latent.md). Under torch.compile the graph breaks there.

    Returns out, or a tuple of out and what was asked for: lse [rows, hq], max_logit [hq] over all ranks. Both carry no
    gradient.

        >>> import torch, weft, weft.torch
        >>> q = torch.randn(16, 2, 8, requires_grad=True)
        >>> out = weft.torch.context_parallel_attention(q, q, q, weft.Packing([0, 7, 16]), weft.Mask(causal=True))
        >>> out.sum().backward()
        >>> q.grad.shape
        torch.Size([16, 2, 8])
    """
    if not type(one_rank) is type(return_lse) is type(return_max_logit) is type(recompute) is bool:
        _refuse_flags(one_rank=one_rank, return_lse=return_lse, return_max_logit=return_max_logit, recompute=recompute)
    if expand is not None:
        call = _eager() if torch.compiler.is_compiling() else _expanded
        return call(q, k, v, packing, mask, group, sink, (return_lse, return_max_logit), one_rank, expand, recompute, given)
    if recompute is not True:
        raise error("recompute is given without expand=", "leave it out: K and V that are given are kept by whoever made them")
    if offsets.given_on_gpu(packing, given):
        found = offsets.offsets_of(packing, given)
        options = dict(in_own_words(given, group))
        group = options.pop("group", group)
        result = offsets.context_parallel(q, k, v, found, mask, "" if one_rank else group, sink, options,
                                          return_max_logit)
        kept = [x for x, asked in zip(result, (True, return_lse, return_max_logit)) if asked]
        return kept[0] if len(kept) == 1 else tuple(kept)
    if k is None or v is None:
        raise error("k or v is left out", "give both, or a source and the function that makes them of its rows (expand=)")
    how, whole, logits = _settled(packing, mask, group, sink, return_max_logit, one_rank, given)
    statistics = return_lse or return_max_logit
    if torch.compiler.is_compiling() or not plain(q, k, v):
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            if getattr(x, "is_nested", False):
                refuse_strange(x, name)
        out, lse, max_logit = torch.ops.weft.attention(q, k, v, logits, whole, how)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad
                                      or (logits is not None and logits.requires_grad)):
        result = attend(q, k, v, logits, whole, call_of(how), statistics)
        if not statistics:
            return result
        out, lse, max_logit = result
    else:
        out, lse, max_logit = forward(q, k, v, logits, whole, call_of(how))
    if not statistics:
        return out
    return (out, *([lse.detach()] if return_lse else []), *([max_logit.detach()] if return_max_logit else []))
