"""A packing as one tensor: what an operator can take, and what torch.compile can see through."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from .. import _core
from .._arrays import error
from .._core import Packing
from ..packings import as_packing
from ..types import Numbers

AnyPacking = Union[Packing, Tensor, Numbers]  # an object, its tensor (pack), or cu_seqlens

_FIRST = -0x57454654_0003  # the first number of a packing's tensor, version 3; cu_seqlens are never negative
OWN = "own"  # as layout_mask: the slices in the packing's tensor, those of the layout's mask or else the layer's
_HEAD = 7  # that number, sequences, tokens of q and of k, whether they are the same, slices, slices of the layout's mask


def pack(packing: AnyPacking, slices: Any = None, *, layout_slices: Any = None) -> Tensor:
    """The packing (and user slices, if the mask is made of them) as an int64 tensor.

    context_parallel_attention takes a Packing or cu_seqlens as well; inside torch.compile give it this instead, made outside.
    layout_slices: of the mask that layouts balanced and auto go by, if it is one of slices, and not the layer's.

        >>> import weft, weft.torch
        >>> weft.torch.pack(weft.Packing([0, 7, 10])).dtype
        torch.int64
    """
    if isinstance(packing, torch.Tensor) and (torch.compiler.is_compiling() or is_packed(packing)):
        if slices is not None or layout_slices is not None:
            raise error("slices for a packing that is a tensor already", "give pack the weft.Packing and the slices at once")
        return packing
    packing = packing_of(packing)
    head = [_FIRST, packing.sequences, packing.tokens_q, packing.tokens_k, int(packing.self_attention), 0, 0]
    parts = [packing.cu_seqlens_q_padded, packing.lengths_q]
    if not packing.self_attention:
        parts += [packing.cu_seqlens_k_padded, packing.lengths_k]
    for at, given in ((-2, slices), (-1, layout_slices)):
        if given is not None:
            parts.append(np.asarray(given, np.int64).reshape(-1))
            head[at] = 1 + len(parts[-1]) // 6  # 0: none are given
    return torch.from_numpy(np.concatenate([np.asarray(head, np.int64), *parts]))


def pack_offsets(cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
    """The same of cu_seqlens without and with padding, by operations on tensors alone, which torch.compile sees through."""
    begins, cu = cu_seqlens_padded.to(torch.int64), cu_seqlens.to(torch.int64)
    first, flags = torch.tensor([_FIRST, cu.shape[0] - 1], device="cpu"), torch.tensor([1, 0, 0], device="cpu")
    return torch.cat((first, begins[-1:], begins[-1:], flags, begins, cu[1:] - cu[:-1]))


def pack_batch(batch: int, length: int, lengths: Optional[Tensor] = None) -> Tensor:
    """The same of a batch of sequences that are `length` long, of which `lengths` are real."""
    real = torch.full((batch,), length, device="cpu") if lengths is None else lengths.to(torch.int64)
    head = torch.tensor([_FIRST, batch, batch * length, batch * length, 1, 0, 0], device="cpu")
    return torch.cat((head, torch.arange(batch + 1, device="cpu") * length, real))


def is_packed(x: Tensor) -> bool:
    """Whether a tensor is one that pack made."""
    like = x.dim() == 1 and x.dtype == torch.int64 and x.device.type == "cpu" and x.shape[0] >= _HEAD
    return like and int(x.numpy()[0]) == _FIRST


def packing_of(packing: AnyPacking) -> Packing:
    """The Packing: as it is, of the tensor that pack made of it, or of cu_seqlens."""
    if not isinstance(packing, torch.Tensor):
        return as_packing(packing)
    if packing.device.type != "cpu":
        raise error(f"the packing lies on {packing.device}", "keep it on the CPU: plans are made there")
    return unpack(packing)[0]


def unpack(flat: Tensor) -> Tuple[Packing, Any, Any]:
    """(packing, slices, slices of the layout's mask) of a tensor that pack made, or of cu_seqlens."""
    values = flat.numpy()
    if not is_packed(flat):
        if flat.dim() != 1 or flat.dtype not in (torch.int32, torch.int64):
            raise error(f"a packing was expected, not a tensor of shape {list(flat.shape)} and {flat.dtype}",
                        "give a weft.Packing, weft.torch.pack of one, or cu_seqlens of int32 or int64")
        return as_packing(values), None, None
    _, n, tokens_q, tokens_k, same, *slices = (int(x) for x in values[:_HEAD])
    at = _HEAD

    def take(count: int) -> Any:
        nonlocal at
        at += count
        return values[at - count:at]

    q = dict(cu_seqlens_q_padded=take(n + 1), seqused_q=take(n), tokens_q=tokens_q)
    k = {} if same else dict(cu_seqlens_k_padded=take(n + 1), seqused_k=take(n), tokens_k=tokens_k)
    own, dealt = (take(6 * (count - 1)).reshape(-1, 6) if count else None for count in slices)
    if at != len(values):
        raise error(f"a packing as a tensor of {len(values)} numbers, of which {at} belong to it", "make it with weft.torch.pack")
    return _core.Packing(**q, **k), own, dealt
