"""What a schedule will take on a machine, and which one to take."""

import functools
import os
from typing import Any, Optional, Sequence, Tuple, Union

from . import _core
from ._arrays import error, listed
from ._core import BatchChoice, Machine, Mask, Packing, Problem
from ._options import schedule_name

AnyMachine = Union[None, str, "os.PathLike[str]", Machine]
_machines = ["h100-400g"]  # all defaults so far; the last one counts
_MOST_BYTES = 1 << 20


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
    except (OSError, ValueError) as e:  # ValueError: a name with a zero in it, which no file has
        raise error(f"cannot read {name!r}: {getattr(e, 'strerror', None) or e}", "give a machine file, or a preset's name") from e
    return Machine.from_json(text, name)


def set_machine(which: AnyMachine) -> None:
    """What schedule="auto" and layout="auto" predict for from now on; must be the same on all ranks."""
    _machines.append(machine(which))


def machine_number() -> int:
    """Of the default: what is chosen by it can be chosen again later, when there is another."""
    return len(_machines) - 1


def machine_numbered(number: int) -> Machine:
    return machine(_machines[number])


def batch_layouts(packing, ranks):
    """Layouts that leave each rank a batch of its own; whether they can be made is asked when they are."""
    lengths = [x for cu in (packing.cu_seqlens_q_padded, packing.cu_seqlens_k_padded) for x in (cu[1:] - cu[:-1]).tolist()]
    return ["dual_chunk"] + (["striped"] if all(x % ranks == 0 for x in lengths) else [])


@functools.lru_cache(maxsize=256)
def _chosen_layout(packing, mask, ranks, where, batch):
    # Heads of a model of today: which layout is best hardly depends on them, and shard knows nothing of them.
    return _core.choose([Problem(packing, mask)], [1], ranks, 32, 8, _core.DType.bf16, 128, 128, where,
                        layouts=batch_layouts(packing, ranks) if batch else []).layout


def chosen_layout(packing, mask, ranks, where=None, format="thd"):
    """The name that layout="auto" stands for: the same wherever packing, mask, ranks, machine and format are the same.

    Rows of bshd and sbhd have to stay a batch on each rank, so only layouts that do that are chosen among.
    """
    return _chosen_layout(packing, mask, ranks, machine(where), format != "thd" and ranks > 1)


@functools.lru_cache(maxsize=256)
def _chosen_schedule(packing, mask, kind, dealt_by, ranks, heads_q, heads_k, dtype, dim_qk, dim_v, where):
    placed = _core.Layout(kind, packing, ranks, dealt_by)
    return _core.choose_schedule(Problem(packing, mask), placed, heads_q, heads_k, dtype, dim_qk, dim_v, where)


def chosen_schedule(problem, placed, heads_q, heads_k, dtype, dim_qk, dim_v, where=None):
    """What schedule="auto" stands for. Kept, so that layers and steps that ask the same are answered at once."""
    if dtype is _core.DType.f64:
        dtype = _core.DType.f32  # machines have no rates for it: f64 is for checks, and any schedule is right
    where = machine(where)
    if placed.kind == "explicit":
        return _core.choose_schedule(problem, placed, heads_q, heads_k, dtype, dim_qk, dim_v, where)
    return _chosen_schedule(placed.packing, problem.mask, placed.kind, placed.mask, placed.ranks, heads_q, heads_k,
                            dtype, dim_qk, dim_v, where)


def _dtype(name):
    for dtype in (_core.DType.f32, _core.DType.bf16, _core.DType.f16):
        if dtype.name == name:
            return dtype
    raise error(f"there is no dtype {name!r} here", "use f32, bf16 or f16")


def choose(packing: Packing, masks: Union[Mask, Sequence[Mask]], ranks: int, *, heads: Tuple[int, int] = (32, 8),
           dim: Union[int, Tuple[int, int]] = 128, dtype: str = "bf16", counts: Optional[Sequence[int]] = None,
           machine: AnyMachine = None, backward: bool = True, memory_bytes: float = 0) -> BatchChoice:
    """The layout for a batch and the schedule for each kind of layer (one mask each, `counts` layers of it).

        >>> import weft
        >>> full, window = weft.Mask(causal=True), weft.Mask(causal=True, window=(512, 0))
        >>> c = weft.choose(weft.Packing([0, 8192, 65536]), [full, window], ranks=8, machine="h100-400g")
        >>> c.layout, [layer.schedule for layer in c.layers]
        ('dual_chunk', ['all_gather', 'exact'])
        >>> print(c.layers[0].why().split(";")[0].split(":")[0])
        all_gather in 4 groups of heads
    """
    masks = [masks] if isinstance(masks, Mask) else listed(masks, "masks")
    dims = dim if isinstance(dim, tuple) else (dim, dim)
    counts = [1] * len(masks) if counts is None else listed(counts, "counts")
    if len(counts) != len(masks):
        raise error(f"{len(counts)} counts for {len(masks)} masks", "give one for each mask")
    return _core.choose([Problem(packing, mask) for mask in masks], counts, ranks, *heads, _dtype(dtype), *dims,
                        _module_machine(machine), backward, memory_bytes)


def simulate(packing: Packing, mask: Mask, *, ranks: int, schedule: str = "all_gather", layout: Any = "balanced",
             layout_mask: Optional[Mask] = None, heads: Tuple[int, int] = (32, 8), dim: Union[int, Tuple[int, int]] = 128,
             dtype: str = "bf16",
             key_order: str = "auto", head_groups: int = 1, inside: int = 2, across: str = "ring", stages: int = 4,
             abreast: int = 2, machine: AnyMachine = None, backward: bool = False, detail: Sequence[int] = ()) -> dict:
    """One pass of a schedule on a machine, event by event: seconds, efficiency, ranks, and timelines of `detail` ranks.

    Layouts "balanced" (the default) and "auto" go by layout_mask, and by the mask itself where there is none.

        >>> import weft
        >>> t = weft.simulate(weft.Packing([0, 65536]), weft.Mask(causal=True), ranks=8, schedule="ring", detail=[0])
        >>> t["seconds"] >= t["ideal"], t["timelines"][0]["events"][0]["kind"]
        (True, 'exchange')
    """
    from .sharding import layout_of

    dims = dim if isinstance(dim, tuple) else (dim, dim)
    problem = Problem(packing, mask)
    placed = layout_of(layout, packing, ranks, layout_mask or mask, machine)
    schedule, across = schedule_name(schedule), schedule_name(across)
    options = dict(schedule=schedule, key_order=key_order, head_groups=head_groups, inside=inside, across=across, stages=stages,
                   abreast=abreast)
    if schedule == "auto":
        options = _core.choose_schedule(problem, placed, *heads, _dtype(dtype), *dims, _module_machine(machine)).options
    return _core.simulate(problem, placed, *heads, *options.values(), _dtype(dtype), *dims, _module_machine(machine), backward,
                          listed(detail, "detail"))


_module_machine = machine
