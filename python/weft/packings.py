"""Packings made of what other libraries say about packs."""

from __future__ import annotations

from typing import Any, Union

import numpy as np

from ._arrays import error
from ._core import Layout, Mask, Packing
from .trees import Tree
from .types import Numbers


def as_packing(packing: Union[Packing, Numbers]) -> Packing:
    """A Packing, or the cu_seqlens that it is made of."""
    if isinstance(packing, Packing):
        return packing
    if isinstance(packing, Tree):
        raise error(f"packing is a {packing}", "give tree.packing, and tree.mask() as the mask")
    if packing is None or isinstance(packing, (str, bytes, Layout, Mask)) or not hasattr(packing, "__len__"):
        raise error(f"packing is of type {type(packing).__name__}",
                    "give a weft.Packing, or cu_seqlens: [0, len0, len0 + len1, ...]")
    return Packing(packing)


def packing_from_position_ids(position_ids: Any) -> Packing:
    """The packing of a pack whose position_ids count anew from 0 in each document, as a flattening collator makes them.

    position_ids: [tokens], or [1, tokens], a batch of one row; an array, a tensor on any device, or a list. Also
    weft.Packing.from_position_ids. Padding that has position 0 throughout becomes documents of one token, which have no
    next token and so no label.

        >>> import weft
        >>> weft.Packing.from_position_ids([[0, 1, 2, 0, 1]])
        Packing([3, 2] in 5 tokens)
    """
    on_device = hasattr(position_ids, "detach") and getattr(position_ids, "is_cuda", False)
    ids = np.asarray(position_ids.detach().cpu() if on_device else position_ids)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise error(f"position_ids of shape {list(ids.shape)}",
                    "give those of one row, [tokens] or [1, tokens]; of a batch of several rows weft.Packing.from_batch is the "
                    "packing")
    if len(ids) and ids.dtype.kind not in "iu":
        raise error(f"position_ids of type {ids.dtype}", "give whole numbers")
    ids = ids.astype(np.int64)
    begins = np.flatnonzero(ids == 0)
    if len(ids) and ids[0] != 0:
        raise error(f"position_ids begin with {ids[0]}", "give those of the whole pack, before anything is sharded: its first "
                    "document begins with 0")
    jumps = np.flatnonzero((np.diff(ids) != 1) & (ids[1:] != 0)) + 1
    if len(jumps):
        at = int(jumps[0])
        raise error(f"position_ids[{at}] is {ids[at]} after {ids[at - 1]}",
                    "positions of a document follow each other from 0; give a weft.Packing if these do not say where documents "
                    "begin")
    return Packing(np.append(begins, len(ids)))


Packing.from_position_ids = staticmethod(packing_from_position_ids)
