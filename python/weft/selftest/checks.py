"""Answers of every schedule on all ranks against the definition in f64, and bytes against traffic()."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from .. import _core
from .._core import DType, Error, Mask, Packing, Problem
from ..attention import attention, rank_schedule
from ..schedule import Schedule, schedule_of
from ..sharding import layout_of, shard
from ..types import LayoutName, ScheduleName
from .world import World

HEADS, DIM = (4, 2), 64
MASKS = {
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=(37, 0)),
    "full": Mask(),
    "chunks": Mask(causal=True, chunk_size=48),
}
LAYOUTS: Tuple[LayoutName, ...] = ("balanced", "zigzag", "contiguous", "striped")
# Relative errors in norm of results and of gradients: some times what rounding to the dtype alone gives.
BOUNDS = {"f32": (2e-6, 6e-6), "bf16": (6e-3, 1.2e-2), "f16": (8e-4, 2e-3)}
NAMES = ("out", "dq", "dk", "dv")


@dataclasses.dataclass
class Row:
    """A line of the table: what a schedule gave for a dtype."""

    schedule: str
    dtype: str
    runs: int = 0
    refused: int = 0
    why: str = ""  # of the last refusal
    forward: float = 0.0  # the worst error in norm of this rank
    backward: float = 0.0
    bytes: int = 0  # that this rank sent
    messages: int = 0
    wrong: List[str] = dataclasses.field(default_factory=list)


def packing_for(ranks: int) -> Packing:
    """Documents of uneven lengths, one of them a single token: about 48 tokens a rank, and 200 at least."""
    tokens = max(200, 48 * ranks)
    cuts = [0, tokens // 3 + 1, tokens // 3 + 2, tokens * 5 // 7, tokens]
    return Packing(cuts)


def _shapes(tokens: int, heads: Tuple[int, int]) -> Tuple[Tuple[int, int, int], ...]:
    return tuple((tokens, h, DIM) for h in (heads[0], heads[1], heads[1], heads[0]))


class Inputs:
    """q, k, v and dout of all tokens, the same on every rank, and what the definition in f64 makes of them."""

    def __init__(self, world: World, ranks: int, dtype: str) -> None:
        self.packing = packing_for(ranks)
        draw = np.random.default_rng(7)
        made = [draw.standard_normal(s).astype(np.float32) for s in _shapes(self.packing.tokens_q, HEADS)]
        self.tensors = [world.tensor(x, dtype) for x in made]
        self._exact = [world.numbers(x) for x in self.tensors]  # as they were rounded
        self._known: Dict[str, List[Any]] = {}

    def wanted(self, mask: str) -> List[Any]:
        if mask not in self._known:
            q, k, v, dout = self._exact
            r = attention(q, k, v, self.packing, MASKS[mask], kernel="reference")
            self._known[mask] = [r.out, *r.backward(dout)[:3]]
        return self._known[mask]


def _worst(name: str, got: Any, want: Any, tokens: Any) -> str:
    row, head, dim = (int(i) for i in np.unravel_index(int(np.nanargmax(_off(got, want))), got.shape))
    return (f"{name} of token {tokens[row]}, head {head}, element {dim} is {got[row, head, dim]:.6g} instead of "
            f"{want[row, head, dim]:.6g}")


def _tokens(world: World, place: Dict[str, Any]) -> Any:
    """The token of each of this rank's rows; -1 where there is none."""
    return np.asarray(shard(np.arange(1, place["packing"].tokens_q + 1), world.comm, **place)) - 1


def _off(got: Any, want: Any) -> Any:
    return np.where(np.isfinite(got), np.abs(got - want), 1e300)


def _judge(world: World, row: Row, case: str, got: Sequence[Any], wanted: Sequence[Any], tokens: Any) -> None:
    """Compares this rank's rows. A result is wrong by norm, or by its worst element."""
    for name, x, want in zip(NAMES, got, wanted):
        x, bound = world.numbers(x), BOUNDS[row.dtype][name != "out"]
        off = _off(x, want)
        norm = float(np.linalg.norm(np.minimum(off, 1e100)) / max(float(np.linalg.norm(want)), 1e-30)) if off.size else 0.0
        if name == "out":
            row.forward = max(row.forward, norm)
        else:
            row.backward = max(row.backward, norm)
        if off.size and (norm > bound or off.max() > 8 * bound * max(float(np.abs(want).max()), 1e-30)):
            row.wrong.append(f"{case}: rank {world.rank}: {_worst(name, x, want, tokens)}; off by {norm:.1e} in norm, "
                             f"{bound:.1e} is allowed")


def _schedules(name: ScheduleName, ranks: int) -> List[Schedule]:
    """A schedule as it is, and with the options that change what it moves."""
    made = [schedule_of(name)]
    if name == "hybrid":
        made = [Schedule("hybrid", ulysses=u, outer=outer) for u in (2, ranks // 2) for outer in ("ring", "all_gather")
                if u >= 2 and ranks % u == 0]
        made = list(dict.fromkeys(made))
    return made


def run_case(world: World, row: Row, inputs: Inputs, schedule: Schedule, mask: str, layout: LayoutName) -> None:
    """One forward and backward on all ranks."""
    case = f"{schedule} {row.dtype} {mask} {layout}"
    packing, asked = inputs.packing, MASKS[mask]
    placed = layout_of(layout, packing, world.ranks, asked)
    try:
        made = rank_schedule(schedule, Problem(packing, asked), placed, world.rank, HEADS, None, (DType[row.dtype], DIM, DIM))
    except Error as e:  # the same on every rank, before anything was sent
        row.refused, row.why = row.refused + 1, f"{case}: {e}"
        return
    place: Dict[str, Any] = dict(packing=packing, layout=layout, mask=asked)
    q, k, v, dout = (shard(x, world.comm, **place) for x in inputs.tensors)
    tokens = _tokens(world, place)
    passes, moved = [], []
    world.comm.reset_traffic()
    r = attention(q, k, v, packing, asked, comm=world.comm, schedule=schedule, layout=layout, layout_mask=asked)
    passes.append(r.out)
    moved.append((world.comm.bytes_sent, world.comm.bytes_received, world.comm.messages_sent))
    world.comm.reset_traffic()
    passes += r.backward(dout)[:3]
    moved.append((world.comm.bytes_sent, world.comm.bytes_received, world.comm.messages_sent))
    row.runs += 1
    for backward, counted in enumerate(moved):
        t = made.traffic(DType[row.dtype], DIM, DIM, bool(backward))
        said = (t["bytes_sent"], t["bytes_received"], t["messages_sent"])
        if counted != said:
            row.wrong.append(f"{case}: rank {world.rank}: {'backward' if backward else 'forward'}: bytes sent, bytes received, "
                             f"messages sent are {counted}, and traffic() says {said}")
        row.bytes, row.messages = row.bytes + counted[0], row.messages + counted[2]
    whole = [shard(x, world.comm, **place) for x in inputs.wanted(mask)]
    rows = list(np.flatnonzero(tokens >= 0))
    _judge(world, row, case, [x[rows] for x in passes], [x[rows] for x in whole], tokens[rows])


def _cases(quick: bool, names: Sequence[ScheduleName], ranks: int) -> Iterator[Tuple[str, Schedule, str, LayoutName]]:
    """Every schedule with every mask, and layouts in turn; in full every layout."""
    masks = ("causal", "window") if quick else tuple(MASKS)
    turn = 0
    for name in names:
        for schedule, mask in itertools.product(_schedules(name, ranks), masks):
            for layout in LAYOUTS[:3][turn % 3:turn % 3 + 1] if quick else LAYOUTS:
                yield name, schedule, mask, layout
            turn += 1


def answers(world: World, quick: bool, names: Sequence[ScheduleName], dtypes: Sequence[str]) -> Iterator[Row]:
    """A row for each schedule and dtype, as this rank sees it."""
    cases = list(_cases(quick, names, world.ranks))
    for dtype in dtypes:
        inputs = Inputs(world, world.ranks, dtype)
        for name in names:
            row = Row(name, dtype)
            for of, schedule, mask, layout in cases:
                if of == name:
                    run_case(world, row, inputs, schedule, mask, layout)
            yield row


def _same(world: World, a: Any, b: Any) -> Optional[int]:
    """The first row that differs in a bit; None if none does."""
    a, b = world.numbers(a), world.numbers(b)
    if a.size == 0 or bool((a == b).all()):
        return None
    return int(np.flatnonzero((a != b).reshape(len(a), -1).any(1))[0])


def bits(world: World, dtypes: Sequence[str]) -> Tuple[int, List[str]]:
    """all_gather has the bits of one rank; deterministic gradients have the same bits every time. (comparisons, what is not)"""
    wrong, compared, mask = [], 0, MASKS["causal"]
    for dtype in dtypes:
        inputs = Inputs(world, world.ranks, dtype)
        place: Dict[str, Any] = dict(packing=inputs.packing, layout="balanced", mask=mask)
        q, k, v, dout = (shard(x, world.comm, **place) for x in inputs.tensors)
        whole_q, whole_k, whole_v, _ = inputs.tensors
        one = attention(whole_q, whole_k, whole_v, inputs.packing, mask)
        results = []
        for _ in range(5):
            r = attention(q, k, v, inputs.packing, mask, comm=world.comm, schedule="all_gather", layout="balanced",
                          layout_mask=mask, deterministic=True)
            results.append([r.out, *r.backward(dout)[:3]])
        row = _same(world, results[0][0], shard(one.out, world.comm, **place))
        compared += 1
        if row is not None:
            wrong.append(f"all_gather {dtype}: rank {world.rank}: row {row} has not the bits of one rank")
        for run, again in enumerate(results[1:], 2):
            for name, x, y in zip(NAMES, results[0], again):
                row = _same(world, x, y)
                compared += 1
                if row is not None:
                    wrong.append(f"deterministic {dtype}: rank {world.rank}: row {row} of {name} has other bits in run {run}")
    return compared, wrong


def autograd(world: World) -> Tuple[int, List[str]]:
    """The operator of weft.torch, as models use it. (runs, what was wrong)"""
    import weft.torch

    inputs, mask, row = Inputs(world, world.ranks, "f32"), MASKS["window"], Row("", "f32")
    names: Tuple[ScheduleName, ...] = ("ring", "all_to_all")
    for name in names:
        q, k, v, dout = (weft.torch.shard(x, inputs.packing, world.comm) for x in inputs.tensors)
        q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
        out = weft.torch.context_parallel_attention(q, k, v, inputs.packing, mask, group=world.comm, schedule=schedule_of(name))
        out.backward(dout)
        place: Dict[str, Any] = dict(packing=inputs.packing)
        wanted = [shard(x, world.comm, **place) for x in inputs.wanted("window")]
        tokens = _tokens(world, place)
        rows = list(np.flatnonzero(tokens >= 0))
        got = [x[rows] for x in (out.detach(), *(x.grad for x in (q, k, v)))]
        _judge(world, row, f"weft.torch {name}", got, [x[rows] for x in wanted], tokens[rows])
        row.runs += 1
    return row.runs, row.wrong


def kernel_names() -> List[str]:
    """Kernels that run on this machine."""
    return [k["name"] for k in _core.kernels() if k["refusal"] is None]
