"""Rows between orders, valid rows and offsets of each rank, as differentiable functions of tensors (docs/rows.md).

cu_seqlens are int32 or int64 tensors on the CPU or on the GPU where the rows are: there each function is one launch in the
current stream, does not wait for the host, and can be captured in a CUDA graph. Sizes come from shapes and arguments alone: rows
of a rank are those that suffice for any cu_seqlens within the tokens (rows_for). Wrong cu_seqlens raise on the CPU; on a GPU
rows that cannot be placed are zero, and check_offsets raises what was found.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import _arrays, _core
from .._arrays import error
from .._core import Mask

RegularLayoutName = Literal["contiguous", "dual_chunk", "zigzag", "striped"]  # what can be dealt out from cu_seqlens alone

_WAYS = {"to_ranks": "from_ranks", "from_ranks": "to_ranks", "shard": "unshard", "unshard": "shard", "valid": "valid",
         "valid_of_rank": "valid_of_rank"}  # each with what takes gradients back


def _checked(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() != 1 or x.dtype not in (torch.int32, torch.int64) or x.shape[0] < 1:
        said = f"of shape {list(x.shape)} and {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise error(f"{name}: {said}", "give a tensor [sequences + 1] of int32 or int64")


def _offsets(cu_seqlens: Tensor, padded: Optional[Tensor], device: Any = None) -> Tuple[Tensor, Optional[Tensor]]:
    """The offsets as the library takes them, on `device`: those of a CPU are copied to a GPU, which nobody waits for."""
    _checked("cu_seqlens", cu_seqlens)
    if padded is not None:
        _checked("cu_seqlens_padded", padded)
        if padded.dtype != cu_seqlens.dtype or padded.shape != cu_seqlens.shape or padded.device != cu_seqlens.device:
            raise error(
                f"cu_seqlens are {list(cu_seqlens.shape)} of {cu_seqlens.dtype} on {cu_seqlens.device}, cu_seqlens_padded "
                f"{list(padded.shape)} of {padded.dtype} on {padded.device}", "give both of one shape and dtype, in one place")
    device = cu_seqlens.device if device is None else device
    if cu_seqlens.device != device and cu_seqlens.device.type != "cpu":
        raise error(f"cu_seqlens lie on {cu_seqlens.device} and rows on {device}",
                    "keep them where the rows are, or on the CPU: to fetch them would wait for the GPU")

    def there(x: Tensor) -> Tensor:
        x = x.contiguous()
        return x if x.device == device else x.pin_memory().to(device, non_blocking=True)

    return there(cu_seqlens), None if padded is None else there(padded)


def rows_for(tokens: int, ranks: int, layout: RegularLayoutName = "zigzag") -> int:
    """Rows of a rank that suffice for any cu_seqlens within the tokens.

        >>> import weft.torch
        >>> weft.torch.rows.rows_for(100, 4)
        26
    """
    pieces = 2 * ranks if layout == "zigzag" else ranks  # as Layout deals them out; in Python, for torch.compile
    return tokens // ranks if layout == "dual_chunk" else -(-tokens // pieces) * (pieces // ranks)


def _copy(x: Tensor, cu: Tensor, padded: Optional[Tensor], way: str, layout: str, ranks: int, rank: int, rows: int) -> Tensor:
    x = x.contiguous()
    out = x.new_zeros((rows, *x.shape[1:])) if x.device.type == "cpu" else x.new_empty((rows, *x.shape[1:]))
    if out.numel() == 0:
        return out
    if x.numel() == 0:
        return out.zero_()
    tokens = None if way == "valid_of_rank" else x.shape[0] if way in ("to_ranks", "shard", "valid") else rows
    _core.copy_rows(_core.RowCopy[way], _arrays.array(x, name="x"), _arrays.array(out, True), _arrays.array(cu),
                    None if padded is None else _arrays.array(padded), tokens, layout, ranks, rank, _arrays.stream_of(x))
    return out


@torch.library.custom_op("weft::copy_rows", mutates_args=())
def _operator(x: Tensor, cu: Tensor, padded: Optional[Tensor], way: str, layout: str, ranks: int, rank: int,
              rows: int) -> Tensor:
    return _copy(x, cu, padded, way, layout, ranks, rank, rows)


@_operator.register_fake
def _(x: Tensor, cu: Tensor, padded: Optional[Tensor], way: str, layout: str, ranks: int, rank: int, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, cu, padded, way, layout, ranks, rank, _ = inputs
    ctx.save_for_backward(cu, padded)
    ctx.rest = (_WAYS[way], layout, ranks, rank, x.shape[0])


def _backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
    cu, padded = ctx.saved_tensors
    return torch.ops.weft.copy_rows(gradient, cu, padded, *ctx.rest), None, None, None, None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


class _Function(torch.autograd.Function):
    """The same without the operator, whose way through the dispatcher takes longer than the launch."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _setup_context(ctx, inputs, None)
        return _copy(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        cu, padded = ctx.saved_tensors
        if gradient.requires_grad and torch.is_grad_enabled():
            moved: Tensor = _Function.apply(gradient, cu, padded, *ctx.rest)
        else:
            moved = _copy(gradient, cu, padded, *ctx.rest)
        return moved, None, None, None, None, None, None, None


def _moved(x: Tensor, cu: Tensor, padded: Optional[Tensor], way: str, layout: str, ranks: int, rank: int, rows: int) -> Tensor:
    if x.dim() < 1:
        raise error("x has no dimension of rows", "give [rows, ...]")
    inputs = (x, *_offsets(cu, padded, x.device), way, layout, ranks, rank, rows)
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return torch.ops.weft.copy_rows(*inputs)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Function.apply(*inputs)
    return _copy(*inputs)


def sequence_to_rank_order(x: Tensor, cu_seqlens: Tensor, ranks: int, *, cu_seqlens_padded: Optional[Tensor] = None,
                           layout: RegularLayoutName = "dual_chunk") -> Tensor:
    """All ranks' rows one after another, [ranks * rows, ...], of x [tokens, ...]; zeros where a row holds no token.

        >>> import torch, weft.torch
        >>> weft.torch.rows.sequence_to_rank_order(torch.arange(8), torch.tensor([0, 8]), 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _moved(x, cu_seqlens, cu_seqlens_padded, "to_ranks", layout, ranks, 0, ranks * rows_for(x.shape[0], ranks, layout))


def rank_to_sequence_order(x: Tensor, cu_seqlens: Tensor, ranks: int, *, tokens: Optional[int] = None,
                           cu_seqlens_padded: Optional[Tensor] = None, layout: RegularLayoutName = "dual_chunk") -> Tensor:
    """The way back: [tokens, ...], zeros for tokens that no rank holds. tokens: of the stream, as many as rows unless said."""
    return _moved(
        x, cu_seqlens, cu_seqlens_padded, "from_ranks", layout, ranks, 0, _tokens(x.shape[0], tokens, ranks, layout, ranks)
    )


def shard(x: Tensor, cu_seqlens: Tensor, ranks: int, rank: int, *, cu_seqlens_padded: Optional[Tensor] = None,
          layout: RegularLayoutName = "zigzag") -> Tensor:
    """One rank's rows of x [tokens, ...]: [rows_for(tokens, ranks, layout), ...], zeros where a row holds no token."""
    return _moved(x, cu_seqlens, cu_seqlens_padded, "shard", layout, ranks, rank, rows_for(x.shape[0], ranks, layout))


def _tokens(rows: int, tokens: Optional[int], ranks: int, layout: RegularLayoutName, members: int) -> int:
    """Of the stream whose rows these are, on `members` ranks."""
    whole = rows // members * ranks if tokens is None else tokens
    if tokens is not None and rows != members * rows_for(tokens, ranks, layout):
        raise error(f"x has {rows} rows, and {tokens} tokens on {ranks} ranks have {members * rows_for(tokens, ranks, layout)}",
                    "give the tokens of the stream that x was made of")
    return whole


def unshard(x: Tensor, cu_seqlens: Tensor, ranks: int, rank: int, *, tokens: Optional[int] = None,
            cu_seqlens_padded: Optional[Tensor] = None, layout: RegularLayoutName = "zigzag") -> Tensor:
    """One rank's rows at their tokens [tokens, ...], zeros elsewhere: the sum over the ranks is the whole."""
    return _moved(x, cu_seqlens, cu_seqlens_padded, "unshard", layout, ranks, rank, _tokens(x.shape[0], tokens, ranks, layout, 1))


def copy_valid_rows(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Optional[Tensor] = None, *, ranks: int = 1, rank: int = 0,
                    layout: RegularLayoutName = "zigzag") -> Tensor:
    """x with exact zeros in rows that hold no real token: padding, rows past the last sequence.

    x is in sequence order, or with ranks > 1 one rank's rows. A NaN in padding does not survive, forward or backward.

        >>> import torch, weft.torch
        >>> weft.torch.rows.copy_valid_rows(torch.ones(6), torch.tensor([0, 2, 3]), torch.tensor([0, 3, 6])).tolist()
        [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    """
    return _moved(x, cu_seqlens, cu_seqlens_padded, "valid" if ranks == 1 else "valid_of_rank", layout, ranks, rank, x.shape[0])


def partition_indices(cu_seqlens: Tensor, tokens: int, ranks: int, rank: int, *, cu_seqlens_padded: Optional[Tensor] = None,
                      layout: RegularLayoutName = "dual_chunk") -> Tensor:
    """Token of each of a rank's rows, int32 [rows_for(tokens, ranks, layout)]; -1 where a row holds none.

    With dual_chunk the numbers of Transformer Engine's thd_get_partitioned_indices(cu_seqlens, tokens, ranks, rank), which is
    given the padded offsets.

        >>> import torch, weft.torch
        >>> weft.torch.rows.partition_indices(torch.tensor([0, 8, 12]), 12, 2, 0).tolist()
        [0, 1, 6, 7, 8, 11]
    """
    cu, padded = _offsets(cu_seqlens, cu_seqlens_padded)
    out = torch.empty(rows_for(tokens, ranks, layout), dtype=torch.int32, device=cu.device)
    _core.partition_indices(_arrays.array(cu), None if padded is None else _arrays.array(padded), tokens, layout, ranks, rank,
                            _arrays.array(out, True), _arrays.stream_of(cu))
    return out


class RankOffsets(NamedTuple):
    """Where sequences lie in a rank's rows, both int32 [sequences + 1]."""

    cu_seqlens: Tensor  # prefix sums of the rank's real tokens
    cu_seqlens_padded: Tensor  # the rank's first row of each sequence; the last: rows that hold a token


def cu_seqlens_on_rank(cu_seqlens: Tensor, tokens: int, ranks: int, rank: int, *, cu_seqlens_padded: Optional[Tensor] = None,
                       layout: RegularLayoutName = "dual_chunk") -> RankOffsets:
    """The sequences of a stream of `tokens` rows, as they lie in one rank's rows: (cu_seqlens, cu_seqlens_padded).

        >>> import torch, weft.torch
        >>> cu, padded = torch.tensor([0, 7, 10]), torch.tensor([0, 8, 12])
        >>> there = weft.torch.rows.cu_seqlens_on_rank(cu, 12, 2, 1, cu_seqlens_padded=padded)
        >>> there.cu_seqlens.tolist(), there.cu_seqlens_padded.tolist()
        ([0, 4, 6], [0, 4, 6])
    """
    cu, padded = _offsets(cu_seqlens, cu_seqlens_padded)
    out = torch.empty((2, cu.shape[0]), dtype=torch.int32, device=cu.device)
    _core.cu_seqlens_on_rank(_arrays.array(cu), None if padded is None else _arrays.array(padded), tokens, layout, ranks, rank,
                             _arrays.array(out[0], True), _arrays.array(out[1], True), _arrays.stream_of(cu))
    return RankOffsets(out[0], out[1])


class Step(NamedTuple):
    """One call of a varlen kernel, as weft.rows.VarlenStep, in int32 arrays with room for every cu_seqlens of these shapes.

    Past the last entry offsets stay at the end, lengths are 0 and sequence is -1. count: entries, and the longest entry's
    queries and keys. lo and hi are ±(2^31 - 1) where there is no limit.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    cu_seqlens_q_padded: Tensor
    cu_seqlens_k_padded: Tensor
    seqused_q: Tensor
    seqused_k: Tensor
    lo: Tensor
    hi: Tensor
    sequence: Tensor
    count: Tensor


def _step(kind: str, cu: Tensor, padded: Optional[Tensor], tokens: int, keys: Any, mask: Optional[Mask], ranks: int, rank: int,
          step: int) -> Step:
    def side(cu: Tensor, padded: Optional[Tensor], tokens: int) -> Any:
        cu, padded = _offsets(cu, padded, device)
        return _arrays.array(cu), None if padded is None else _arrays.array(padded), tokens

    device = cu.device if isinstance(cu, torch.Tensor) else None
    question = (side(cu, padded, tokens), keys and side(*keys), mask or Mask(causal=True), ranks, rank, step)
    n = _core.step_capacity(*question)
    out = torch.empty(9 * (n + 1) + 3, dtype=torch.int32, device=cu.device)
    _core.make_step(kind, *question, _arrays.array(out, True), _arrays.stream_of(cu))
    sizes = (n + 1,) * 4 + (n,) * 5 + (3,)
    return Step(*(out[i * (n + 1):i * (n + 1) + size] for i, size in enumerate(sizes)))


def all_gather_step(cu_seqlens: Tensor, tokens: int, ranks: int, rank: int, step: int, *, mask: Optional[Mask] = None,
                    cu_seqlens_padded: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None,
                    cu_seqlens_k_padded: Optional[Tensor] = None, tokens_k: Optional[int] = None) -> Step:
    """The varlen call of step 0 or 1 of all-gather attention over a dual_chunk layout; mask: causal unless one is given."""
    keys = None if cu_seqlens_k is None else (cu_seqlens_k, cu_seqlens_k_padded, tokens if tokens_k is None else tokens_k)
    return _step("all_gather", cu_seqlens, cu_seqlens_padded, tokens, keys, mask, ranks, rank, step)


def ring_step(cu_seqlens: Tensor, tokens: int, ranks: int, rank: int, step: int, *, mask: Optional[Mask] = None,
              cu_seqlens_padded: Optional[Tensor] = None) -> Step:
    """The varlen call of a step of causal ring attention over a dual_chunk layout."""
    return _step("ring", cu_seqlens, cu_seqlens_padded, tokens, None, mask, ranks, rank, step)


def check_offsets(device: Any = None) -> None:
    """Raises what work on a GPU that is done has found wrong with cu_seqlens there; does not wait for the work."""
    number = _arrays.gpu_number("cuda" if device is None else device)
    if number is not None:
        _core.check_offsets(number)


__all__ = [
    "RankOffsets",
    "Step",
    "all_gather_step",
    "check_offsets",
    "copy_valid_rows",
    "cu_seqlens_on_rank",
    "partition_indices",
    "rank_to_sequence_order",
    "ring_step",
    "rows_for",
    "sequence_to_rank_order",
    "shard",
    "unshard",
]
