"""The capability table: what works with what and, if not, why."""

from typing import Any, Dict, List, Optional, Tuple

from . import _core


class Support:
    """Rows of (group, name, {column: None or the reason why not}), and the kernels of this machine."""

    def __init__(self, rows: List[Tuple[str, str, Dict[str, Optional[str]]]], kernels: List[Dict[str, Any]]) -> None:
        self.rows, self.kernels = rows, kernels

    def why_not(self, name: str, column: str) -> Optional[str]:
        """The reason why `name` does not go with `column` (a schedule, or "one rank"); None if it does."""
        for _, row, cells in self.rows:
            if row == name:
                return cells[column]
        raise KeyError(f"{name}: rows are {', '.join(sorted({row for _, row, _ in self.rows}))}")

    def __str__(self) -> str:
        columns = list(self.rows[0][2])
        notes = []
        lines = [f"{'':<40}" + "".join(f"{c:>12}" for c in columns)]
        for group, name, cells in self.rows:
            marks = []
            for column in columns:
                if cells[column] is None:
                    marks.append("yes")
                else:
                    if cells[column] not in notes:
                        notes.append(cells[column])
                    marks.append(f"no [{notes.index(cells[column]) + 1}]")
            lines.append(f"{group + ' ' + name:<40}" + "".join(f"{m:>12}" for m in marks))
        lines += [""] + [f"[{i + 1}] {note}" for i, note in enumerate(notes)]
        lines += [""] + [f"kernel {k['name']:<18}{k['refusal'] or k['about']}" for k in self.kernels]
        return "\n".join(lines)

    __repr__ = __str__


def support() -> Support:
    """What works with what, by schedule, and why not where it does not.

        >>> import weft
        >>> weft.support().why_not("zigzag", "ring") is None
        True
    """
    return Support(_core.support_table(), _core.kernels())
