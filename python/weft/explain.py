"""Who holds which tokens, who sees whom, what each rank does and what each schedule moves."""

from __future__ import annotations

import html
import pathlib
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Literal, Optional, Sequence, Tuple, Union

import numpy as np
from numpy.typing import NDArray

from . import _arrays, _core
from ._core import Layout, Mask, Packing, Problem
from ._files import replace_file
from .cost import AnyMachine
from .cost import machine as machine_of
from .packings import as_packing
from .schedule import Schedule, schedule_of, unexpected
from .sharding import layout_of
from .types import AnyLayout, AnySchedule, DTypeName, Numbers

if TYPE_CHECKING:
    from typing_extensions import Never

_PICTURE = 64  # tokens and ranks that fit a screen
_LETTERS = 26


class Explanation:
    """A problem on ranks: print it for numbers, leave it at the end of a notebook's cell for a page to look into.

    packing, mask, layout (the first one); pairs [ranks] visible pairs of each rank's queries, imbalance (the largest over
    the mean); traffic {schedule: bytes that the busiest rank receives in (forward, backward), or the reason why not}.
    html(), svg(): the page and the picture, with a panel for each layout and schedule; save(path) writes either.
    """

    def __init__(
        self, packing: Packing, mask: Mask, layouts: List[Layout], heads: Tuple[int, int], dims: Tuple[int, int], dtype: str,
        schedules: List[Schedule], drawn: Dict[str, Any],
    ) -> None:
        self.packing, self.mask, self.layout, self.layouts = packing, mask, layouts[0], layouts
        self.schedules, self._drawn, self._scene = schedules, drawn, None
        self.problem = Problem(packing, mask)
        self.pairs = _core.pairs_by_rank(self.problem, self.layout)
        mean = self.pairs.mean() if len(self.pairs) else 0
        self.imbalance = float(self.pairs.max() / mean) if mean else 1.0
        self.heads, self.dims, self.dtype = heads, dims, dtype
        self._dtype = _arrays.dtype_of(dtype)
        self.traffic = {kind: self._traffic(kind) for kind in _core.schedules()}

    def _traffic(self, kind: str) -> Union[str, Tuple[int, int]]:
        busiest = [0, 0]
        try:
            for rank in range(self.layout.ranks):
                made = _core.RankSchedule(self.problem, self.layout, rank, *self.heads, None, kind)
                for at, backward in enumerate((False, True)):
                    moved = made.traffic(self._dtype, *self.dims, backward)
                    busiest[at] = max(busiest[at], moved["bytes_received"])
        except _core.Error as e:
            return str(e)
        return busiest[0], busiest[1]

    def _made(self) -> _core.Scene:
        if self._scene is None:
            schedules = [(one.name, one.options) for one in self.schedules]
            self._scene = _core.Scene(self.problem, self.layouts, schedules, *self.heads, self._dtype, *self.dims, **self._drawn)
        return self._scene

    def html(self) -> str:
        """The page: mask, work, bytes and timeline, in one file that needs no network."""
        return self._made().html()

    def svg(self) -> str:
        """The same as a static picture."""
        return self._made().svg()

    def save(self, path: Union[str, pathlib.Path]) -> None:
        """Writes the page (.html), the picture (.svg) or the text (.txt)."""
        forms: Dict[str, Callable[[], str]] = {".html": self.html, ".svg": self.svg, ".txt": lambda: f"{self}\n"}
        path = pathlib.Path(path)
        if path.suffix not in forms:
            raise _arrays.error(f"save('{path}'): there is no '{path.suffix}'", f"use {', '.join(forms)}")
        replace_file(path, forms[path.suffix]().encode("utf-8"))

    def _repr_html_(self) -> str:
        # An iframe keeps the styles and scripts of page and notebook apart.
        return (f'<iframe title="weft.explain" sandbox="allow-scripts" style="width:100%;height:860px;border:0" '
                f'srcdoc="{html.escape(self.html())}"></iframe>')

    def __str__(self) -> str:
        ranks = self.layout.ranks
        lines = [f"{self.packing!r}, {self.mask!r}, {self.layout!r}",
                 f"{self.problem.visible_pairs:,} visible pairs, imbalance {self.imbalance:.3f}", ""]
        most = max(int(self.pairs.max()), 1) if len(self.pairs) else 1
        for rank in range(min(ranks, _LETTERS)):
            bar = "█" * round(24 * int(self.pairs[rank]) / most)
            lines.append(f"{_letter(rank)} rank {rank:<3} {bar:<24} {int(self.pairs[rank]):>12,} pairs")
        if ranks > _LETTERS:
            lines.append(f"… and {ranks - _LETTERS} more ranks")
        if ranks <= _LETTERS and max(self.packing.tokens_q, self.packing.tokens_k) <= _PICTURE:
            lines += ["", "A line a query, a column a key; a capital where the key is on the query's rank."] + self._picture()
        heads, dims = (f"{a}:{b}" for a, b in (self.heads, self.dims))
        lines += ["", f"Bytes into the busiest rank, heads {heads}, dims {dims}, {self.dtype}:"]
        for kind, moved in self.traffic.items():
            said = moved if isinstance(moved, str) else f"forward {moved[0]:>14,}   backward {moved[1]:>14,}"
            lines.append(f"  {kind:<12}{said}")
        return "\n".join(lines)

    __repr__ = __str__

    def _picture(self) -> List[str]:
        owner_q, owner_k = self._owners("q"), self._owners("k")
        seen = visible(self.problem)
        lines = []
        for i, row in enumerate(seen):
            mine = owner_q[i]
            cells = "".join(" " if not see else _letter(owner_k[j]) if owner_k[j] == mine else _letter(owner_k[j]).lower()
                            for j, see in enumerate(row))
            lines.append(f"{i:>6} {_letter(mine)}  {cells}".rstrip())
        return lines

    def _owners(self, side: str) -> NDArray[np.int64]:
        owner = np.full(self.packing.tokens_q if side == "q" else self.packing.tokens_k, -1)
        for rank in range(self.layout.ranks):
            tokens = self.layout.tokens(rank, side)
            owner[tokens[tokens >= 0]] = rank
        return owner


def visible(problem: Problem) -> NDArray[np.bool_]:
    """The whole mask as a matrix of bool [tokens_q, tokens_k]: for small problems."""
    out = np.zeros((problem.packing.tokens_q, problem.packing.tokens_k), bool)
    for q0, q1, k0, k1, lo, hi in problem.slices:
        q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None, :]
        out[q0:q1, k0:k1] |= (k - q >= lo) & (k - q <= hi)
    return out


def _letter(rank: int) -> str:
    return "." if rank < 0 else chr(ord("A") + int(rank) % _LETTERS)


def explain(packing: Union[Packing, Numbers], mask: Optional[Mask] = None, *,
            layout: Union[AnyLayout, Sequence[AnyLayout]] = "balanced", layout_mask: Optional[Mask] = None, ranks: int = 1,
            heads: Tuple[int, int] = (8, 8), dims: Tuple[int, int] = (128, 128), dtype: DTypeName = "bf16",
            schedule: Union[AnySchedule, Sequence[AnySchedule]] = "all_gather", machine: AnyMachine = None, title: str = "",
            colour: Literal["rank", "step"] = "rank", **unknown: Never) -> Explanation:
    """What happens to a problem on ranks: each rank's work, bytes by schedule and, if it is small, a picture.

        >>> import weft
        >>> e = weft.explain(weft.Packing([0, 7, 10, 16]), weft.Mask(causal=True), ranks=4)
        >>> e.pairs.tolist(), round(e.imbalance, 3)
        ([14, 13, 14, 14], 1.018)

    A notebook shows it as a page, with a panel for each layout and schedule: both may be lists. Layouts "balanced" and
    "auto" go by layout_mask, and by the mask itself where there is none.
    """
    for name in unknown:
        unexpected("explain", name, ("layout", "schedule", "ranks", "heads", "dims", "machine"))
    mask = mask or Mask()
    packing = as_packing(packing)
    layouts = [layout_of(one, packing, ranks, layout_mask or mask, machine) for one in _list(layout, "layout")]
    drawn = {"machine": machine_of(machine), "title": title, "colour": colour}
    schedules = [schedule_of(one) for one in _list(schedule, "schedule")]
    return Explanation(packing, mask, layouts, (heads[0], heads[1]), (dims[0], dims[1]), dtype, schedules, drawn)


def _list(given: Any, name: str) -> List[Any]:
    if isinstance(given, (str, Layout, Schedule)):
        return [given]
    if not given:
        raise _arrays.error(f"{name} is an empty list", f"name at least one {name}")
    return _arrays.listed(given, name)
