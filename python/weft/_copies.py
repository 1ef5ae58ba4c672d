"""Packings and masks are values: they can be copied, and sent from a data loader's worker."""

import copyreg

from ._core import Mask, Packing


def _packing(q, k):
    return Packing(**q, **k)


def _reduce_packing(packing):
    q = dict(cu_seqlens_q_padded=packing.cu_seqlens_q_padded, seqused_q=packing.lengths_q, tokens_q=packing.tokens_q)
    if packing.self_attention:
        return _packing, (q, {})
    return _packing, (q, dict(cu_seqlens_k_padded=packing.cu_seqlens_k_padded, seqused_k=packing.lengths_k, tokens_k=packing.tokens_k))


def _reduce_mask(mask):
    return Mask, (mask.causal, mask.bottom_right, mask.window, mask.chunk_size, mask.slices)


copyreg.pickle(Packing, _reduce_packing)
copyreg.pickle(Mask, _reduce_mask)
