"""weft.Schedule: the name of a schedule with its options."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, NoReturn, Tuple, TypeVar, Union

from . import _core
from ._arrays import error
from ._options import constant
from .types import AnySchedule, ScheduleName, ScheduleOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

Value = Union[int, str]
F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = tuple(name for name, _, _, _ in _core.schedule_options())


def constant_result(function: F) -> F:
    """torch.compile takes what `function` returns for a constant, as with torch.compiler.assume_constant_result. That one needs
    torch, and imports its compiler, which takes as long as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result
def _checked(name: str, given: Tuple[Tuple[str, Any], ...]) -> Tuple[str, Tuple[Tuple[str, Value], ...]]:
    """Weft's own name of the schedule, and its options, sorted; Error for what it does not have."""
    if not isinstance(name, str):
        raise error(f"schedule is {name!r}", f"give a name ({', '.join(_core.schedules())}, auto), or a weft.Schedule")
    if name == "auto":
        for option, value in given:
            raise error(f"{option} = {value!r} with schedule auto", "leave it out: it is chosen too")
        return name, ()
    try:
        _core.check_schedule(name, {})
    except _core.Error as e:
        raise error(e.problem, f"{e.remedy}, or auto") from None
    name, options = _core.check_schedule(name, dict(given))
    return name, tuple(sorted(options.items()))


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """A schedule with its options, for every `schedule=` where its name alone would do. Cannot be changed.

        >>> import weft
        >>> weft.Schedule("ring", ranks_per_step=1)
        Schedule('ring', ranks_per_step=1)
        >>> weft.Schedule("hybrid", ulysses=4, outer="all_gather").options
        {'outer': 'all_gather', 'ulysses': 4}

    An option that the schedule does not have is refused. Options:
    """

    name: str
    given: Tuple[Tuple[str, Value], ...]

    def __init__(self, name: ScheduleName, **options: Unpack[ScheduleOptions]) -> None:
        own, given = _checked(name, tuple((option, constant(value)) for option, value in options.items()))
        object.__setattr__(self, "name", own)
        object.__setattr__(self, "given", given)

    @property
    def options(self) -> Dict[str, Value]:
        """The options that were given, by name."""
        return dict(self.given)

    def __repr__(self) -> str:
        return f"Schedule({', '.join([repr(self.name), *(f'{name}={value!r}' for name, value in self.given)])})"


Schedule.__doc__ = f"{Schedule.__doc__}\n" + "".join(
    f"    {name} ({schedules}; {default!r} unless given): {text}.\n"
    for name, schedules, default, text in _core.schedule_options()
)


@functools.lru_cache(64)
def _named(name: ScheduleName) -> Schedule:
    return Schedule(name)


def schedule_of(schedule: AnySchedule) -> Schedule:
    """The Schedule that a caller means, by name or as it is."""
    if isinstance(schedule, Schedule):
        return schedule
    return _named(schedule) if isinstance(schedule, str) else Schedule(schedule)


def unexpected(function: str, name: str, known: Iterable[str]) -> NoReturn:
    """Refuses a keyword as Python does, and says which there are and where options of schedules go."""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; use {', '.join(known)}; options of a schedule "
                    f"({', '.join(OPTIONS)}) go with its name: schedule=weft.Schedule('ring', ranks_per_step=2)")
