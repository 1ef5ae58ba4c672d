"""What a schedule will take on a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional, Sequence, Tuple, Union

from . import _core
from ._arrays import dtype_of, listed
from ._core import Mask, Packing, Problem
from .cost import RATED, AnyMachine, chosen_schedule
from .cost import machine as machine_of
from .packings import as_packing
from .schedule import schedule_of, unexpected
from .sharding import layout_of
from .types import AnyLayout, AnySchedule, DTypeName, Numbers

if TYPE_CHECKING:
    from typing_extensions import Never


def simulate(packing: Union[Packing, Numbers], mask: Mask, *, ranks: int, schedule: AnySchedule = "all_gather",
             layout: AnyLayout = "balanced", layout_mask: Optional[Mask] = None, heads: Tuple[int, int] = (32, 8),
             dim: Union[int, Tuple[int, int]] = 128, dtype: DTypeName = "bf16", machine: AnyMachine = None,
             backward: bool = False, detail: Sequence[int] = (), **unknown: Never) -> Dict[str, Any]:
    """One pass of a schedule on a machine, event by event: seconds, efficiency, ranks, and timelines of `detail` ranks.

    schedule: a name, or a weft.Schedule. Layouts "balanced" (the default) and "auto" go by layout_mask, and by the mask itself
    where there is none.

        >>> import weft
        >>> t = weft.simulate(weft.Packing([0, 65536]), weft.Mask(causal=True), ranks=8, schedule="ring", detail=[0])
        >>> t["seconds"] >= t["ideal"], t["timelines"][0]["events"][0]["kind"]
        (True, 'exchange')
    """
    for name in unknown:
        unexpected("simulate", name, ("layout", "schedule", "ranks", "heads", "dim", "machine"))
    packing, dims = as_packing(packing), dim if isinstance(dim, tuple) else (dim, dim)
    shape = (dtype_of(dtype, RATED), *dims)
    problem, schedule, where = Problem(packing, mask), schedule_of(schedule), machine_of(machine)
    placed = layout_of(layout, packing, ranks, layout_mask or mask, machine)
    if schedule.name == "auto":
        schedule = chosen_schedule(problem, placed, *heads, *shape, where)
    return _core.simulate(problem, placed, *heads, schedule.name, schedule.options, *shape, where, backward,
                          listed(detail, "detail"))
