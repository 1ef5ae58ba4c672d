"""A packing as one tensor: what an operator can take, and what torch.compile can see through."""

from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from .. import _core
from .._arrays import error
from .._core import Packing

_VERSION = 1


def pack(packing: Union[Packing, Tensor], slices: Any = None) -> Tensor:
    """The packing (and user slices, if the mask is made of them) as an int64 tensor.

    context_parallel_attention takes a Packing as well; inside torch.compile give it this instead, made outside.

        >>> import weft, weft.torch
        >>> weft.torch.pack(weft.Packing([0, 7, 10])).dtype
        torch.int64
    """
    if isinstance(packing, torch.Tensor):
        return packing
    if not isinstance(packing, _core.Packing):
        raise error(f"a packing was expected, not {type(packing).__name__}", "give a weft.Packing, or weft.torch.pack of one")
    head = [_VERSION, packing.sequences, packing.tokens_q, packing.tokens_k, int(packing.self_attention), 0]
    parts = [packing.cu_seqlens_q_padded, packing.lengths_q]
    if not packing.self_attention:
        parts += [packing.cu_seqlens_k_padded, packing.lengths_k]
    if slices is not None:
        parts.append(np.asarray(slices, np.int64).reshape(-1))
        head[-1] = len(parts[-1]) // 6
    return torch.from_numpy(np.concatenate([np.asarray(head, np.int64), *parts]))


def unpack(flat):
    """(packing, slices) of a tensor that pack made."""
    values = flat.numpy()
    if values.ndim != 1 or values.dtype != np.int64 or len(values) < 6 or values[0] != _VERSION:
        raise error(f"a packing as a tensor was expected, not shape {list(flat.shape)} of {flat.dtype}",
                    "make it with weft.torch.pack")
    _, n, tokens_q, tokens_k, same, slices = (int(x) for x in values[:6])
    at = 6

    def take(count):
        nonlocal at
        at += count
        return values[at - count:at]

    q = dict(cu_seqlens_q_padded=take(n + 1), seqused_q=take(n), tokens_q=tokens_q)
    k = {} if same else dict(cu_seqlens_k_padded=take(n + 1), seqused_k=take(n), tokens_k=tokens_k)
    own = take(6 * slices).reshape(-1, 6) if slices else None
    if at != len(values):
        raise error(f"a packing as a tensor of {len(values)} numbers, of which {at} belong to it", "make it with weft.torch.pack")
    return _core.Packing(**q, **k), own
