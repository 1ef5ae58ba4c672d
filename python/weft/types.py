"""Types that Weft's signatures are written with: names as Literal, and options as TypedDict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, Sequence, Tuple, TypedDict, TypeVar, Union

from ._arrays import Array as Array
from ._core import Layout, Mask

if TYPE_CHECKING:
    from .schedule import Schedule

A = TypeVar("A")  # one of those: results are of the type that the arguments have
Numbers = Union[Sequence[int], Array]  # whole numbers: a list, or a one-dimensional integer array

FormatName = Literal["thd", "bshd", "sbhd"]
DTypeName = Literal["f64", "f32", "bf16", "f16"]
LayoutName = Literal["contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed", "auto"]
ScheduleName = Literal["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh", "auto",
                       "p2p", "a2a", "ulysses", "a2a+p2p", "usp"]
Side = Literal["q", "k"]

AnyLayout = Union[LayoutName, Layout]  # by name, or as it is
AnySchedule = Union[ScheduleName, "Schedule"]


class ScheduleOptions(TypedDict, total=False):
    """Options of weft.Schedule; which schedule has which is checked when one is made."""

    key_order: Literal["auto", "sequence", "rank"]
    head_groups: int
    ulysses: int
    outer: Literal["ring", "all_gather"]
    stages: int
    ranks_per_step: int
    node: int
    query_ranks: int


class CommonOptions(TypedDict, total=False):
    """Keywords that weft.attention and weft.torch.context_parallel_attention have beside their named parameters."""

    causal: bool
    bottom_right: bool
    window: Tuple[int, int]
    chunk_size: Optional[int]
    cu_seqlens: Optional[Numbers]
    cu_seqlens_q: Optional[Numbers]
    cu_seqlens_k: Optional[Numbers]
    kernel: Optional[str]
    layout_mask: Optional[Mask]
    layer: Optional[int]
    # Other libraries' spellings (weft.spellings).
    is_causal: bool
    window_size: Tuple[int, int]
    cu_seqlens_kv: Optional[Numbers]
    softmax_scale: Optional[float]
    sm_scale: Optional[float]
    logits_soft_cap: float
    qkv_format: FormatName
    cp_comm_type: ScheduleName
    max_seqlen: Optional[int]
    max_seqlen_q: Optional[int]
    max_seqlen_k: Optional[int]
    max_seqlen_kv: Optional[int]
    enable_gqa: bool


class AttentionOptions(CommonOptions, total=False):
    """Keywords of weft.attention."""

    slices: Any
    cu_seqlens_padded: Optional[Numbers]
    cu_seqlens_q_padded: Optional[Numbers]
    cu_seqlens_k_padded: Optional[Numbers]
    cu_seqlens_kv_padded: Optional[Numbers]
    seqused: Optional[Numbers]
    seqused_q: Optional[Numbers]
    seqused_k: Optional[Numbers]
    stream: Any


class TorchOptions(CommonOptions, total=False):
    """Keywords of weft.torch.context_parallel_attention and ContextParallelAttention."""

    format: FormatName
    scale: Optional[float]
    softcap: float
    head_map: Optional[Numbers]
    schedule: AnySchedule
    layout: Optional[LayoutName]
    deterministic: bool
    checked: bool
    cp_group: Any
