"""Packed batches: which rows a rank of the context-parallel group has, and what attention is told of them."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
import weft
import weft.torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from .._arrays import error
from ..types import LayoutName

_KEPT = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")  # of a batch, not a row a token


@dataclasses.dataclass
class WholePackParams(PackedSeqParams):
    """The packed_seq_params of rows that lie under one of Weft's layouts of the whole pack, where nothing is padded to 2·cp.

    qkv_format is "sbhd" with a batch of one: Megatron's thd stands for two chunks of each padded document.
    """

    weft_packing: Optional[Tensor] = None  # weft.torch.pack of it
    weft_layout: LayoutName = "balanced"
    weft_mask: Optional[weft.Mask] = None  # which the layout goes by
    weft_group: Any = None  # None: one rank
    weft_positions: Optional[Tensor] = None  # [rows], of each row in its document


@dataclasses.dataclass(frozen=True)
class Rows:
    """What attention has to know of a batch's rows."""

    packing: Tensor  # weft.torch.pack
    group: Any  # None: one rank, which has all rows
    format: str
    layout: LayoutName = "dual_chunk"
    layout_mask: Optional[weft.Mask] = None


def group_of(group: Any) -> Any:
    """The group, or None if it has one rank: dual_chunk wants even lengths even there."""
    return None if group is None or group.size() == 1 else group


def _numbers(x: Any, name: str) -> Optional[List[int]]:
    """cu_seqlens as a list; [1, n] is what a data loader's collation makes of [n]."""
    if x is None:
        return None
    values = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
    if values.ndim == 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise error(f"{name} has shape {list(values.shape)} and dtype {values.dtype}", "give whole numbers in one dimension")
    return [int(n) for n in values]


def packing_of(cu_seqlens: Any, cu_seqlens_padded: Any, tokens: Optional[int] = None) -> weft.Packing:
    """The packing of the whole pack; tokens: how many rows it has, if not those up to the last document's end."""
    cu, padded = _numbers(cu_seqlens, "cu_seqlens_q"), _numbers(cu_seqlens_padded, "cu_seqlens_q_padded")
    if cu is None:
        raise error("there are no cu_seqlens_q", "give those of the whole pack, the same on every rank")
    return weft.Packing(cu, cu_seqlens_q_padded=padded, **({} if tokens is None else {"tokens_q": tokens}))


def longest(packing: weft.Packing) -> int:
    """The longest document with its padding: the last position for which RoPE needs an angle, plus one."""
    return int(np.diff(packing.cu_seqlens_q_padded).max(initial=0))


def partition_indices(cu_seqlens_padded: Any, total_tokens: Optional[int] = None, cp_size: Optional[int] = None,
                      cp_rank: Optional[int] = None, *, cp_group: Any = None) -> Tensor:
    """Tokens of a thd pack that lie on this rank, int64, in the order of its rows.

    The same numbers as Transformer Engine's thd_get_partitioned_indices, whose arguments these are: of each padded document,
    which must divide by 2·cp, chunks `rank` and 2·cp - 1 - `rank`. Size and rank are those of cp_group, or of Megatron's
    context-parallel group, unless given.
    """
    if cp_size is None or cp_rank is None:
        group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
        cp_size, cp_rank = group.size(), group.rank()
    packing = packing_of(cu_seqlens_padded, None)
    if total_tokens is not None and total_tokens != packing.tokens_q:
        raise error(f"cu_seqlens_padded end at {packing.tokens_q} and there are {total_tokens} tokens",
                    "give the padded offsets of the whole pack: the last one is the number of tokens")
    tokens = np.arange(packing.tokens_q)
    if cp_size > 1:
        tokens = weft.shard(tokens, cp_rank, ranks=cp_size, packing=packing, layout="dual_chunk")
    device = cu_seqlens_padded.device if isinstance(cu_seqlens_padded, Tensor) else None
    return torch.from_numpy(tokens).to(device)


def _int32(values: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(values)).to(device, torch.int32)


def _tokens_of(batch: Dict[str, Any], packing: weft.Packing) -> Dict[str, Tensor]:
    """What of the batch has a row a token; an Error where it has not as many as the pack."""
    rows = {name: x for name, x in batch.items() if isinstance(x, Tensor) and name not in _KEPT}
    if not rows:
        raise error(f"there is no tensor of tokens in the batch, but {', '.join(batch) or 'nothing'}",
                    "give tokens, labels, loss_mask, position_ids of the whole pack, [1, tokens]")
    for name, x in rows.items():
        if x.dim() < 2 or x.shape[0] != 1 or x.shape[1] != packing.tokens_q:
            raise error(f"{name} has shape {list(x.shape)} and the pack {packing.tokens_q} tokens",
                        f"give the whole pack, padding included: [1, {packing.tokens_q}]")
    return rows


def get_batch_on_this_cp_rank(
    batch: Dict[str, Any], cu_seqlens: Any, cu_seqlens_padded: Any = None, max_seqlen: Any = None, *, cp_group: Any = None,
    layout: LayoutName = "dual_chunk", mask: Optional[weft.Mask] = None,
) -> Tuple[Dict[str, Any], PackedSeqParams]:
    """(this rank's rows of a packed batch, packed_seq_params for the model).

    What Megatron's get_thd_batch_on_this_cp_rank gives, without Transformer Engine. Tensors of the batch are [1, tokens, ...]
    of the whole pack, the same on every rank, and so are cu_seqlens (without padding) and cu_seqlens_padded (None: there
    is none). Every padded length must divide by 2·cp; not so with another layout ("balanced", which goes by `mask`, causal
    unless given, "zigzag", "striped", "contiguous"): then call use_row_positions(model) once. Rows without a token are
    zero, in loss_mask too. cp_group: Megatron's context-parallel group unless given.
    """
    given = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
    group, packing = group_of(given), packing_of(cu_seqlens, cu_seqlens_padded)
    rows = _tokens_of(batch, packing)
    device = next(iter(rows.values())).device
    most = longest(packing)
    said = most if max_seqlen is None else int(torch.as_tensor(max_seqlen).reshape(-1)[0])
    if said < most:
        raise error(f"max_seqlen is {said} and the longest document with its padding has {most} tokens",
                    "leave max_seqlen out: cu_seqlens say it")
    cu, padded = _int32(packing.cu_seqlens_q, device), _int32(packing.cu_seqlens_q_padded, device)
    lengths = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, max_seqlen_q=said,
                   max_seqlen_kv=said)
    if layout == "dual_chunk":
        if group is not None:
            at = partition_indices(padded, cp_size=group.size(), cp_rank=group.rank())
            rows = {name: x.index_select(1, at) for name, x in rows.items()}
        return {**batch, **rows}, PackedSeqParams(qkv_format="thd", **lengths)
    place: Dict[str, Any] = dict(layout=layout, mask=mask)
    if group is not None:
        if "labels" in rows and "loss_mask" not in rows and not _full(packing, group, place):
            raise error("labels without a loss_mask, and some rows hold no token", "give a loss_mask: it is 0 in those rows")
        rows = {name: weft.torch.shard(x, packing, group, dim=1, **place) for name, x in rows.items()}
        positions = weft.torch.position_ids(packing, group, device=device, **place)
    else:
        positions = weft.torch.position_ids(packing, "", device=device)  # all rows
    return {**batch, **rows}, WholePackParams(qkv_format="sbhd", weft_packing=weft.torch.pack(packing), weft_layout=layout,
                                              weft_mask=mask, weft_group=group, weft_positions=positions, **lengths)


def _full(packing: weft.Packing, group: Any, place: Dict[str, Any]) -> bool:
    """Whether every row of every rank holds a token: the same answer on all of them."""
    rows = weft.torch.valid_rows(packing, group, **place).shape[0]
    return rows * group.size() == int(packing.lengths_q.sum())


_batches: Dict[Tuple[int, int], Tensor] = {}  # (sequences, length): their packing
_dealt: Dict[int, Tuple[Any, set[Tuple[int, int]]]] = {}  # by id of a group: it, and the batches it was told of


def _batch_rows(query: Tensor, group: Any) -> Rows:
    """Of [s, b, h, d], which Megatron's get_batch_on_this_cp_rank has dealt out, or nobody."""
    length, sequences = query.shape[0] * (1 if group is None else group.size()), query.shape[1]
    shape = (sequences, length)
    if shape not in _batches:
        while len(_batches) >= 64:
            del _batches[next(iter(_batches))]
        _batches[shape] = weft.torch.pack(weft.Packing.from_batch(sequences, length))
    if group is not None:
        key = id(group)
        if key not in _dealt:
            _dealt[key] = weakref.ref(group, lambda _: _dealt.pop(key, None)), set()
        if shape not in _dealt[key][1]:
            weft.torch.use_layout(_batches[shape], group, layout="dual_chunk", format="sbhd")
            _dealt[key][1].add(shape)
    return Rows(_batches[shape], group, "sbhd")


def _check_lengths(params: PackedSeqParams, packing: weft.Packing, rows: int, group: Any, config: Any) -> None:
    """Refuses what other parts of Megatron would get wrong on these documents, on every rank alike."""
    ranks, most = 1 if group is None else group.size(), longest(packing)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        said = getattr(params, name)
        if said is not None and int(said) < most:
            raise error(f"{name} is {int(said)} and the longest document with its padding has {most} tokens, for which RoPE "
                        "needs an angle", f"give {name}={most}")
    if rows * ranks != packing.tokens_q:
        raise error(f"there are {rows} rows a rank on {ranks} ranks, and cu_seqlens_q_padded end at {packing.tokens_q}",
                    "give offsets of the whole pack, padding included, and each rank its rows (get_batch_on_this_cp_rank)")
    padded = list(packing.cu_seqlens_q) != list(packing.cu_seqlens_q_padded)
    if getattr(config, "mtp_num_layers", None) and padded:
        raise error("multi-token prediction with documents that are padded: Megatron shifts its labels by cu_seqlens_q, which "
                    "leave padding out", "pack documents whose lengths divide by 2·cp, or turn mtp_num_layers off")


def _thd_rows(params: PackedSeqParams, query: Tensor, group: Any, config: Any) -> Rows:
    """Of [t, h, d]. The packing is made once a batch, in which all layers share params."""
    tensors = [params.cu_seqlens_q, params.cu_seqlens_q_padded, params.cu_seqlens_kv, params.cu_seqlens_kv_padded]
    key = [(id(x), getattr(x, "_version", 0)) for x in tensors], group, query.shape[0]
    known = getattr(params, "_weft_rows", None)
    if known is not None and known[0] == key:
        return known[1]
    q = packing_of(params.cu_seqlens_q, params.cu_seqlens_q_padded)
    for mine, others, name in ((params.cu_seqlens_q, params.cu_seqlens_kv, "cu_seqlens_kv"),
                               (params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded, "cu_seqlens_kv_padded")):
        if others is not None and others is not mine and _numbers(others, name) != _numbers(mine, name):
            raise error(f"{name} are others than those of queries", "self-attention has the same documents on both sides")
    _check_lengths(params, q, query.shape[0], group, config)
    rows = Rows(weft.torch.pack(q), group, "thd")
    if group is not None:
        weft.torch.use_layout(rows.packing, group, layout="dual_chunk")
    params._weft_rows = key, rows, tensors  # tensors: an id is theirs as long as they live
    return rows


def _same_ranks(a: Any, b: Any) -> bool:
    ranks = [None if g is None else torch.distributed.get_process_group_ranks(g) for g in (a, b)]
    return ranks[0] == ranks[1]


def rows_of(query: Tensor, params: Optional[PackedSeqParams], group: Any, config: Any) -> Rows:
    """What attention has to know of a batch. group: the layer's, None if it is off; the batch may bring another one."""
    if isinstance(params, WholePackParams):
        if getattr(config, "mtp_num_layers", None):
            raise error(f"multi-token prediction under layout {params.weft_layout}: Megatron shifts labels by dual chunks",
                        "use layout dual_chunk, or turn mtp_num_layers off")
        assert params.weft_packing is not None
        return Rows(params.weft_packing, params.weft_group, "thd", params.weft_layout, params.weft_mask)
    if params is not None:
        own, size = getattr(params, "cp_group", None), getattr(params, "local_cp_size", None)
        if own is not None and size is not None and own.size() != size:
            raise error(f"local_cp_size is {size} and cp_group of the batch has {own.size()} ranks", "give the group's size")
        if own is None and size is not None and size != 1:
            raise error(f"local_cp_size is {size} and the batch has no cp_group", "give its group, or local_cp_size=1")
        if own is not None or size is not None:
            theirs = group_of(own)
            if params.qkv_format == "thd" and not _same_ranks(theirs, group):
                raise error("a thd batch with a context-parallel group of its own: Megatron's RoPE goes by the model's group",
                            "give such batches as sbhd, or place documents with get_batch_on_this_cp_rank(..., layout=...)")
            group = theirs
    if params is None or params.qkv_format == "sbhd":
        return _batch_rows(query, group)
    if params.qkv_format != "thd":
        raise error(f"qkv_format is {params.qkv_format!r}", "use thd or sbhd")
    return _thd_rows(params, query, group, config)

