"""Which rows were dealt out to whom.

A tensor does not say under which layout its rows lie, and after a projection nobody can tell. So whatever deals rows out
(shard, position_ids and the like) writes down here which tokens a rank's rows are, and attention asks before it computes.
"""

import collections
import threading
from typing import Any, Dict, Iterable, List, NoReturn, OrderedDict, Tuple

from ._arrays import error
from ._core import Communicator, Layout

_MOST = 4096  # entries of _known; the least recently used are forgotten
_MOST_LAYOUTS = 64  # of one packing

_lock = threading.Lock()


class _Rows:
    """One way in which a rank's rows of a packing lie."""

    __slots__ = ("layout", "used")

    def __init__(self, layout: str) -> None:
        self.layout = layout  # in words
        self.used = False  # attended, gathered or moved since, or said to lie so (use_layout)


# (scope, rank, packing): {fingerprint of the rank's rows: how they lie}
_known: OrderedDict[Tuple[Any, int, int], Dict[int, _Rows]] = collections.OrderedDict()
_scopes: Dict[int, Any] = {}  # by id of a communicator
gone: List[Any] = []  # scopes to forget later: the garbage collector, which finds them, must not wait for the lock


class Scope:
    """Stands for ranks that belong together: those of a process group, or of one call of weft.spawn."""


def join(comm: Communicator, scope: Any) -> None:
    """From now on the communicator is one of this scope's."""
    with _lock:
        _scopes[id(comm)] = scope


def scope_of(comm: Communicator) -> Any:
    return _scopes.get(id(comm))


def leave(comm: Communicator) -> None:
    """The communicator has ended. With the last one its scope is forgotten."""
    with _lock:
        scope = _scopes.pop(id(comm), None)
        last = scope is not None and scope not in _scopes.values()
    if last:
        forget(scope)


def forget(scope: Any) -> None:
    with _lock:
        for key in [key for key in _known if key[0] is scope]:
            del _known[key]


def _words(placed: Layout) -> str:
    return f"{placed.kind} by {placed.mask}" if placed.kind in ("balanced", "placed") else placed.kind


def _sides(placed: Layout) -> Tuple[Tuple[str, int], ...]:
    packing = placed.packing
    numbers = packing.fingerprints
    return (("q", numbers[0]),) if packing.self_attention else (("q", numbers[0]), ("k", numbers[1]))


def register(placed: Layout, rank: int, scope: Any = None, used: bool = False) -> None:
    """The rank's rows are those of this layout. For the ranks of the scope and, where nobody names ranks, for their number.

    used: somebody says so who knows that there may be others of the packing (check).
    """
    while gone:
        forget(gone.pop())
    found = [(number, placed.fingerprint(rank, side)) for side, number in _sides(placed)]
    with _lock:
        for number, rows in found:
            for key in {(scope, rank, number), (placed.ranks, rank, number)}:
                layouts = _known.setdefault(key, {})
                _known.move_to_end(key)
                entry = layouts.setdefault(rows, _Rows(_words(placed)))
                entry.used = entry.used or used
                if len(layouts) > _MOST_LAYOUTS:
                    del layouts[next(iter(layouts))]
        while len(_known) > _MOST:
            _known.popitem(last=False)


def _layouts_of(scope: Any, ranks: int, rank: int, number: int) -> Dict[int, _Rows]:
    """What is known of a rank's rows: of its own group or, if that has said nothing, of as many ranks."""
    with _lock:
        for key in ((scope, rank, number), (ranks, rank, number)):
            layouts = _known.get(key)
            if layouts and key[0] is not None:
                _known.move_to_end(key)
                return dict(layouts)
    return {}


def _names(layouts: Iterable[_Rows]) -> str:
    return ", ".join(sorted({x.layout for x in layouts}))


def _rows(placed: Layout, side: str) -> str:
    return "rows" if placed.packing.self_attention else "query rows" if side == "q" else "key rows"


def _refuse(placed: Layout, rank: int, side: str, layouts: Dict[int, _Rows], what: str, call: str) -> NoReturn:
    rows = _rows(placed, side)
    have = f"were dealt out under {_names(layouts.values())}" if layouts else "were never dealt out in this process"
    remedy = "give shard, position_ids and attention the same packing and layout, and the same mask for it to go by (mask=, " \
             f"layout_mask=), or say so if rows were dealt out elsewhere: {call}"
    raise error(f"{what} under layout {_words(placed)}, and rank {rank}'s {rows} of this packing {have}", remedy)


def check(
    placed: Layout, rank: int, scope: Any, what: str = "attention", call: str = "weft.use_layout(packing, comm, layout=...)",
    checked: bool = False,
) -> None:
    """An Error unless this rank's rows are known to lie so. On one rank nobody has to deal out rows.

    checked: also if there are others of the packing, dealt out under another layout and used by nobody yet: inputs that
    were dealt out under one layout and positions under another look like this.
    """
    for side, number in _sides(placed):
        layouts, mine = _layouts_of(scope, placed.ranks, rank, number), placed.fingerprint(rank, side)
        if mine not in layouts and (layouts or placed.ranks > 1):
            _refuse(placed, rank, side, layouts, what, call)
        others = [x for number_of, x in layouts.items() if number_of != mine and not x.used]
        if checked and others and placed.ranks > 1:
            rows = _rows(placed, side)
            raise error(f"{what} under layout {_words(placed)}, and rank {rank}'s {rows} of this packing were dealt out under "
                        f"{_names(others)} too, which nothing has used", "give shard, position_ids and attention the same "
                        f"layout, and the same mask for it to go by, or say that both are meant: {call}")
        if mine in layouts:
            _use(scope, placed.ranks, rank, number, mine)


def _use(scope: Any, ranks: int, rank: int, number: int, rows: int) -> None:
    with _lock:
        # Without a scope the ranks of this process are meant, whatever communicators their rows were dealt out over.
        keys = [key for key in _known if key[1:] == (rank, number)] if scope is None else [(scope, rank, number),
                                                                                           (ranks, rank, number)]
        for key in keys:
            entry = _known.get(key, {}).get(rows)
            if entry is not None:
                entry.used = True


def check_all(placed: Layout, side: str, call: str = "weft.use_layout(packing, ranks=..., layout=...)") -> None:
    """The same of all ranks' rows. Those of which this process knows nothing are another's, but not all can be."""
    number = dict(_sides(placed)).get(side, placed.packing.fingerprints[0])
    known = 0
    for rank in range(placed.ranks):
        layouts = _layouts_of(None, placed.ranks, rank, number)
        known += bool(layouts)
        if layouts and placed.fingerprint(rank, side) not in layouts:
            _refuse(placed, rank, side, layouts, "unshard", call)
        _use(None, placed.ranks, rank, number, placed.fingerprint(rank, side))
    if not known and placed.ranks > 1:
        _refuse(placed, 0, side, {}, "unshard", call)
