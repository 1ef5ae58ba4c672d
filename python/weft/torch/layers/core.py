"""Attention of a layer: which ranks, which rows, and the call of Weft's own attention."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..._arrays import error
from ...schedule import Schedule, schedule_of
from ...types import AnySchedule, LayoutName
from ..functional import context_parallel_attention
from ..group import name_of, rank_and_ranks, resolve
from ..packed import AnyPacking, pack_batch, pack_offsets
from ..sharding import place, position_ids
from .parts import Part
from .words import SOFTMAX, one_of


class Rows(NamedTuple):
    """What a call says of its rows."""

    packing: Optional[AnyPacking]  # what attention is given; None for offsets on a GPU
    offsets: Optional[Tensor]  # cu_seqlens_q, if it was given
    padded: Optional[Tensor]  # cu_seqlens_q_padded, if it was given
    cp: Any  # the ContextParallel, if it was given


def _ranks_of(group: Any) -> Optional[List[int]]:
    """Global ranks of a process group; None of a communicator."""
    found = resolve(group)
    return list(dist.get_process_group_ranks(found)) if dist.is_available() and isinstance(found, dist.ProcessGroup) else None


def _group_of_ranks(ranks: List[int]) -> Any:
    """A process group that has just these ranks, in this order; None if there is none."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.GroupMember.NON_GROUP_MEMBER and _ranks_of(group) == ranks:
            return group
    return None


def _hierarchical(groups: Any, cp_global_ranks: Any) -> Tuple[Any, Schedule]:
    """The group of all ranks and the schedule, of [the group that swaps heads, the ring's], as a2a+p2p has them."""
    if len(groups) != 2 or cp_global_ranks is None:
        raise error(f"cp_group is a list of {len(groups)} groups, cp_global_ranks {cp_global_ranks}",
                    "give [the a2a group, the p2p group] and the global ranks of all of them")
    inner, outer = (rank_and_ranks(group) for group in groups)
    ranks = [int(r) for r in cp_global_ranks]
    whole = _group_of_ranks(ranks)
    if whole is None:
        raise error(f"there is no process group of ranks {ranks}, over which Weft runs a2a+p2p",
                    "make it once, on all ranks: torch.distributed.new_group(cp_global_ranks)")
    rank, count = rank_and_ranks(whole)
    if count != inner[1] * outer[1] or rank != inner[1] * outer[0] + inner[0]:
        raise error(f"rank {rank} of {count} is rank {inner[0]} of {inner[1]} in the a2a group and {outer[0]} of {outer[1]} in "
                    "the p2p group", "let each a2a group have consecutive ranks of cp_global_ranks")
    return whole, Schedule("hybrid", ulysses=inner[1])


class CoreAttention(Part):
    """Attention of queries, keys and values of this rank's rows; the parameter softmax_offset is the learnable sink."""

    def __init__(self, heads: int, *, qkv_format: str, softmax_type: str, cp_comm_type: Optional[AnySchedule],
                 layout: Optional[LayoutName],
                 layer_number: Optional[int], options: Dict[str, Any], dtype: Optional[torch.dtype], device: Any) -> None:
        # A sink is never narrower than f32.
        super().__init__(torch.float64 if dtype is torch.float64 else torch.float32, device)
        self.format, self.softmax_type = qkv_format, one_of("softmax_type", softmax_type, SOFTMAX)
        self.schedule = None if cp_comm_type is None else schedule_of(cp_comm_type)
        self.own_layout, self.options = layout, options
        self.layout: LayoutName = layout or "dual_chunk"  # Transformer Engine's
        self.layer_number = layer_number
        self.group, self.rank, self.ranks = "", 0, 1
        self.add("softmax_offset", (heads,), torch.nn.init.zeros_ if softmax_type == "learnable" else None)
        self.reset_parameters()

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Any = None,
                                   cp_comm_type: Optional[AnySchedule] = None) -> None:
        """The ranks that rows are spread over, and the schedule."""
        if cp_comm_type is not None:
            self.schedule = schedule_of(cp_comm_type)
        if isinstance(cp_group, (list, tuple)):
            name = "ring" if self.schedule is None else self.schedule.name
            if name != "hybrid":
                raise error(f"cp_group is a list of {len(cp_group)} groups and cp_comm_type {name}",
                            "give one group, or cp_comm_type='a2a+p2p'")
            cp_group, self.schedule = _hierarchical(cp_group, cp_global_ranks)
        self.group, self.rank, self.ranks = "", 0, 1
        if cp_group is None or cp_group == "":
            return
        said, known = None if cp_global_ranks is None else [int(r) for r in cp_global_ranks], _ranks_of(cp_group)
        if said is not None and known is not None and said != known:
            raise error(f"cp_global_ranks are {said} and those of cp_group {known}", "give the group's own, or leave them out")
        rank, ranks = rank_and_ranks(cp_group)
        if ranks > 1:  # on one rank dual_chunk would still want even lengths
            self.group, self.rank, self.ranks = name_of(cp_group), rank, ranks

    def rows_of(self, shape: Tuple[int, ...], call: Dict[str, Any], padding: bool) -> Rows:
        """What the call says of hidden_states of this shape; padding: whether the mask's name says that there is some."""
        cp, packing, offsets = (call.get(name) for name in ("cp", "packing", "cu_seqlens_q"))
        padded = call.get("cu_seqlens_q_padded")
        given = [name for name, x in (("cp", cp), ("packing", packing), ("cu_seqlens_q", offsets)) if x is not None]
        if len(given) > 1:
            raise error(f"{given[0]} is given together with {given[1]}", "give one of them: each says which documents there are")
        if padded is not None and offsets is None:
            raise error("cu_seqlens_q_padded are given without cu_seqlens_q", "give both, or a weft.Packing as packing=")
        if offsets is not None:
            offsets, padded = _tensor(offsets), None if padded is None else _tensor(padded)
        _check_keys(offsets, padded, call)
        if cp is not None:
            return self._rows_of_cp(cp)
        if self.format != "thd":
            return self._batch(shape, packing, offsets, padded, padding)
        if not given:
            raise error("qkv_format is thd, and nobody has said which documents there are",
                        "give cu_seqlens_q, a weft.Packing as packing=, or a ContextParallel as cp=")
        if packing is not None:
            return Rows(packing, None, None, None)
        assert offsets is not None
        if offsets.is_cuda:
            return Rows(None, offsets, padded, None)
        return Rows(offsets if padded is None else pack_offsets(offsets, padded), offsets, padded, None)

    def _rows_of_cp(self, cp: Any) -> Rows:
        if self.format != "thd":
            raise error(f"a ContextParallel is given and qkv_format is {self.format}", "it is of packs: use qkv_format='thd'")
        if self.group and self.group != cp.group:
            raise error("a ContextParallel is given whose group is not that of set_context_parallel_group",
                        "leave set_context_parallel_group out: cp says which ranks there are")
        if self.own_layout is not None and cp.ranks > 1 and self.own_layout != cp.layout.kind:
            raise error(f"the layer's layout is {self.own_layout} and that of the ContextParallel {cp.layout.kind}",
                        "leave the layer's out: cp says where rows lie")
        return Rows(None, None, None, cp)

    def _batch(self, shape: Tuple[int, ...], packing: Any, offsets: Any, padded: Any, padding: bool) -> Rows:
        batch, length = (shape[0], shape[1]) if self.format == "bshd" else (shape[1], shape[0])
        if packing is not None:
            return Rows(packing, None, None, None)
        if padded is not None:
            raise error(f"cu_seqlens_q_padded are given and qkv_format is {self.format}",
                        "sequences of a batch are equally long: leave them out")
        if offsets is None:
            if padding:
                raise error("the mask's name says that sequences have padding, and nobody has said how long they are",
                            "give cu_seqlens_q, prefix sums of the real lengths, on the CPU; or leave 'padding' out of its name")
            return Rows(pack_batch(batch, length * self.ranks), None, None, None)
        if not padding:
            raise error(f"cu_seqlens_q are given with qkv_format {self.format} and a mask without padding in its name",
                        "use attn_mask_type='padding_causal' or 'padding', or qkv_format='thd'")
        if offsets.is_cuda or offsets.dim() != 1 or offsets.shape[0] != batch + 1:
            raise error(f"cu_seqlens_q have shape {list(offsets.shape)} on {offsets.device}, for a batch of {batch}",
                        f"give {batch + 1} of them, on the CPU: lengths of batches are read there")
        return Rows(pack_batch(batch, length * self.ranks, offsets[1:] - offsets[:-1]), None, None, None)

    def positions(self, shape: Tuple[int, ...], rows: Rows, device: torch.device) -> Tensor:
        """Position of each row in its document: [t], or [s] of batches."""
        if self.format != "thd" and self.layout in ("dual_chunk", "striped"):
            return self._batch_positions(shape[1] if self.format == "bshd" else shape[0], device)
        if self.ranks == 1 and rows.cp is None and rows.offsets is not None:
            begins = (rows.offsets if rows.padded is None else rows.padded).to(device, torch.int64)
            row = torch.arange(shape[0], device=device)
            # All of begins: torch.compile fails on a search in a part of them.
            at = torch.searchsorted(begins, row, right=True) - 1
            return row - begins[at.clamp(0, begins.shape[0] - 2)]
        if torch.compiler.is_compiling():
            raise error("positions of rows are asked for inside torch.compile, which does not see where they lie",
                        "give position_ids=, made outside: weft.torch.position_ids(packing, group, layout=...)")
        if rows.cp is not None:
            return _host(rows.cp.layout.position_ids(rows.cp.rank, "q"), device)
        if rows.packing is None:
            return position_ids(rows.offsets, self.group, layout=self.layout, cu_seqlens_padded=rows.padded,
                                tokens=shape[0] * self.ranks)
        # Not by position_ids, which would tell attention that rows were dealt out so.
        rank, placed = place(rows.packing, self.group, self.layout, None, self.format)
        return _host(placed.position_ids(rank, "q"), device)

    def _batch_positions(self, length: int, device: torch.device) -> Tensor:
        row = torch.arange(length, device=device)
        if self.ranks == 1:
            return row
        if self.layout == "striped":
            return row * self.ranks + self.rank
        half = length // 2  # two chunks: the rank's own from the front, and from the back
        return torch.where(row < half, self.rank * half + row, (2 * self.ranks - 1 - self.rank) * half + row - half)

    def _sink(self, dtype: torch.dtype) -> Union[None, str, Tensor]:
        if self.softmax_type != "learnable":
            return "off_by_one" if self.softmax_type == "off-by-one" else None
        offset: Tensor = self.softmax_offset
        return offset.to(torch.float64 if dtype is torch.float64 else torch.float32)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Dict[str, Any], rows: Rows, again: bool) -> Tensor:
        """Attention under these parts of a mask; again: computed once more in the backward, and not kept."""
        options: Dict[str, Any] = {**self.options, **mask, "sink": self._sink(q.dtype)}
        if self.layer_number is not None:
            options["layer"] = self.layer_number

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if rows.cp is not None:
                if self.schedule is not None:
                    options["schedule"] = self.schedule
                out: Tensor = rows.cp.attention(q, k, v, **options)
                return out
            if self.group:
                options.update(group=self.group, schedule=self.schedule or "ring", layout=self.layout)
            if rows.packing is None:
                options.update(cu_seqlens_q=rows.offsets, cu_seqlens_q_padded=rows.padded)
            if self.format != "thd":
                options["format"] = self.format
            return context_parallel_attention(q, k, v, rows.packing, one_rank=not self.group, **options)

        if again and torch.is_grad_enabled():
            result: Tensor = checkpoint(attend, q, k, v, use_reentrant=False)
            return result
        return attend(q, k, v)

    def extra_repr(self) -> str:
        """The settings, for print(model)."""
        how = f"{self.schedule or 'ring'}, layout={self.layout!r}"
        ranks = f", rank {self.rank} of {self.ranks}, {how}" if self.group else ""
        return f"qkv_format={self.format!r}, softmax_type={self.softmax_type!r}{ranks}"


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")


def _host(x: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(x).to(device)


def _check_keys(offsets: Optional[Tensor], padded: Optional[Tensor], call: Dict[str, Any]) -> None:
    """Keys are the queries' own tokens; of offsets on a GPU nobody reads the values, so they must be the same tensor."""
    for name, mine in (("cu_seqlens_kv", offsets), ("cu_seqlens_kv_padded", padded)):
        theirs, whose = call.get(name), name.replace("kv", "q")
        if theirs is None or theirs is call.get(whose):
            continue
        if mine is None:
            raise error(f"{name} are given without {whose}", f"give {whose}: keys are the queries' own tokens")
        theirs = _tensor(theirs)
        if torch.compiler.is_compiling() or mine.is_cuda or theirs.is_cuda:
            raise error(f"{name} are another tensor than {whose}, and nobody reads them here",
                        f"give the same one, or {whose} alone")
        if not torch.equal(theirs.to(mine.dtype), mine):
            raise error(f"{name} are not those of the queries",
                        "self-attention has the same documents on both sides: leave them out")
