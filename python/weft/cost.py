"""Machines, and the schedule and layout that are predicted to be the best on one."""

import functools
import os
from typing import Any, List, Optional, Sequence, Tuple, Union

from . import _core
from ._arrays import dtype_of, error, listed
from ._core import BatchChoice, DType, Layout, Machine, Mask, Packing, Placement, Problem
from .packings import as_packing
from .schedule import Schedule
from .types import DTypeName, Numbers

AnyMachine = Union[None, str, "os.PathLike[str]", Machine]
_machines: List[Union[str, Machine]] = ["h100-400g"]  # every default so far: a backward may need an earlier one
_MOST_BYTES = 1 << 20
RATED = ("f32", "bf16", "f16")  # dtypes that machines have rates for


def machine(which: AnyMachine = None) -> Machine:
    """A machine: by a preset's name, from a machine file (weft bench --calibrate writes one), as it is, or the default.

        >>> import weft
        >>> weft.machine("h200-400g").name
        'h200-400g'
    """
    if which is None:
        which = _machines[-1]
    if isinstance(which, Machine):
        return which
    name = os.fspath(which)
    if not any(c in name for c in "./"):
        return Machine(name)
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise error(
            f"cannot read {name!r}: {getattr(e, 'strerror', None) or e}", "give a machine file, or a preset's name"
        ) from e
    return Machine.from_json(text, name)


_machine_of = machine  # for functions with a parameter of that name


def set_machine(which: AnyMachine) -> None:
    """What schedule="auto" and layout="auto" predict for from now on; must be the same on all ranks."""
    _machines.append(machine(which))


def machine_number() -> int:
    """The number of today's default, by which machine_numbered finds it after another set_machine."""
    return len(_machines) - 1


def machine_numbered(number: int) -> Machine:
    return machine(_machines[number])


def batch_layouts(packing: Packing, ranks: int) -> List[str]:
    """Layouts that leave each rank a batch of its own; whether they can be made is asked when they are."""
    lengths = [x for cu in (packing.cu_seqlens_q_padded, packing.cu_seqlens_k_padded) for x in (cu[1:] - cu[:-1]).tolist()]
    return ["dual_chunk"] + (["striped"] if all(x % ranks == 0 for x in lengths) else [])


@functools.lru_cache(maxsize=256)
def _chosen_layout(packing: Packing, mask: Mask, ranks: int, where: Machine, batch: bool) -> str:
    # Typical heads: the best layout hardly depends on them, and shard does not know them.
    return _core.choose([Problem(packing, mask)], [1], ranks, 32, 8, DType.bf16, 128, 128, where,
                        layouts=batch_layouts(packing, ranks) if batch else []).layout


def chosen_layout(packing: Packing, mask: Mask, ranks: int, where: AnyMachine = None, format: str = "thd") -> str:
    """The name that layout="auto" stands for: the same wherever packing, mask, ranks, machine and format are the same.

    Rows of bshd and sbhd have to stay a batch on each rank, so only layouts that do that are chosen among.
    """
    return _chosen_layout(packing, mask, ranks, machine(where), format != "thd" and ranks > 1)


@functools.lru_cache(maxsize=256)
def _chosen_schedule(packing: Packing, mask: Mask, kind: str, dealt_by: Optional[Mask], ranks: int, heads_q: int, heads_k: int,
                     dtype: DType, dim_qk: int, dim_v: int, where: Machine, source: int, keeps: bool) -> Schedule:
    placed = _core.Layout(kind, packing, ranks, dealt_by)
    return _best_schedule(source, keeps, Problem(packing, mask), placed, heads_q, heads_k, dtype, dim_qk, dim_v, where)


def _best_schedule(source: int, keeps: bool, *question: Any) -> Schedule:
    choice = _core.choose_schedule(*question, source=source, keeps_expanded=keeps)
    return Schedule(choice.schedule, **choice.options)


def chosen_schedule(problem: Problem, placed: Layout, heads_q: int, heads_k: int, dtype: DType, dim_qk: int, dim_v: int,
                    where: AnyMachine = None, source: int = 0, keeps: bool = False) -> Schedule:
    """What schedule="auto" stands for. Cached, so that layers and steps that ask the same are answered at once.

    source: numbers in a row that moves in place of K and V, which each rank makes of it. keeps: for the backward, too.
    """
    if dtype is DType.f64:
        dtype = DType.f32  # machines have no rates for f64, which is for checks: any schedule will do
    on = machine(where)
    if placed.kind == "explicit" or placed.own_options:
        return _best_schedule(source, keeps, problem, placed, heads_q, heads_k, dtype, dim_qk, dim_v, on)
    return _chosen_schedule(placed.packing, problem.mask, placed.kind, placed.mask, placed.ranks, heads_q, heads_k,
                            dtype, dim_qk, dim_v, on, source, keeps)


def choose(packing: Union[Packing, Numbers], masks: Union[Mask, Sequence[Mask]], ranks: int, *, heads: Tuple[int, int] = (32, 8),
           dim: Union[int, Tuple[int, int]] = 128, dtype: DTypeName = "bf16", counts: Optional[Sequence[int]] = None,
           machine: AnyMachine = None, backward: bool = True, memory_bytes: float = 0) -> BatchChoice:
    """The layout for a batch and the schedule for each kind of layer (one mask each, `counts` layers of it).

        >>> import weft
        >>> full, window = weft.Mask(causal=True), weft.Mask(causal=True, window=(512, 0))
        >>> c = weft.choose(weft.Packing([0, 8192, 65536]), [full, window], ranks=8, machine="h100-400g")
        >>> c.layout, [layer.schedule for layer in c.layers]
        ('dual_chunk', ['all_gather', 'exact'])
        >>> print(c.layers[0].why().split(";")[0].split(":")[0])
        all_gather head_groups=4
    """
    packing = as_packing(packing)
    masks = [masks] if isinstance(masks, Mask) else listed(masks, "masks")
    dims = dim if isinstance(dim, tuple) else (dim, dim)
    counts = [1] * len(masks) if counts is None else listed(counts, "counts")
    if len(counts) != len(masks):
        raise error(f"{len(counts)} counts for {len(masks)} masks", "give one for each mask")
    return _core.choose([Problem(packing, mask) for mask in masks], counts, ranks, *heads, dtype_of(dtype, RATED), *dims,
                        _machine_of(machine), backward, memory_bytes)


def place(packing: Union[Packing, Numbers], ranks: int, *, mask: Optional[Mask] = None, capacity: int = 0, node: int = 0,
          machine: AnyMachine = None, heads: Tuple[int, int] = (64, 8), dim: Union[int, Tuple[int, int]] = 128,
          dtype: DTypeName = "bf16", backward: bool = True) -> Placement:
    """Layout "placed" with options: each sequence on as few ranks as balance and memory allow, and why.

    The result's `layout` is for shard, attention and unshard. capacity: rows of a rank at most; 0: a sixteenth more than an
    even share. node: ranks that fast links join. machine: a name, a file or a weft.Machine whose rates
    and links are weighed for heads, dim and dtype, and which says the node; without one all are as in layout="placed".
    All ranks have to give the same.

        >>> import weft
        >>> p = weft.place(weft.Packing([0, 300, 8300, 8500, 9000]), ranks=4, node=4)
        >>> p.ranks.tolist(), p.reasons
        ([1, 4, 1, 2], ['whole', 'rows', 'whole', 'room'])
        >>> x = p.layout.tokens(0)
    """
    packing = as_packing(packing)
    dims = dim if isinstance(dim, tuple) else (dim, dim)
    for name, pair in (("heads", heads), ("dim", dims)):
        if not all(1 <= n < 2**31 for n in pair):
            raise error(f"{name} is {pair}", "give numbers of 1 and more")
    return _core.place(packing, ranks, mask or _core.usual_mask(packing), capacity, node,
                       None if machine is None else _machine_of(machine), heads, dtype_of(dtype, RATED), dims, backward)
