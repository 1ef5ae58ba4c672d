"""weft.torch.log: a line for every call of attention, in the log `weft.torch` of Python's logging."""

from __future__ import annotations

import logging
from typing import Any, Optional

from torch import Tensor

from .. import _core
from .._arrays import error

logger = logging.getLogger("weft.torch")
_level = 0
_handler: Optional[logging.Handler] = None


def level() -> int:
    """What log was told."""
    return _level


def set_level(wanted: int) -> None:
    """Of log; lines go to standard error unless logging has another place for them."""
    global _level, _handler
    if isinstance(wanted, bool) or wanted not in (0, 1, 2):
        raise error(f"a log of level {wanted!r}", "give 0 for none, 1 for a line a call, 2 for the steps of each too")
    _level = int(wanted)
    if _level and not logger.hasHandlers():
        _handler = logging.StreamHandler()
        logger.addHandler(_handler)
    if not _level and _handler is not None:
        logger.removeHandler(_handler)
        _handler = None
    logger.setLevel(logging.INFO if _level else logging.NOTSET)


def _bytes(n: int) -> str:
    return f"{n} bytes" if n < 10_000 else f"{n / 1e6:.3g} MB"


def say(backward: bool, run: Any, q: Tensor, k: Tensor, v: Tensor, said: Any, view: Any) -> None:
    """A line about a pass that was done."""
    dtype, device, name = view.dtype, view.device, "backward" if backward else "forward"
    kernel, refused = _core.kernel_choice(said["kernel"], backward, dtype, q.shape[-1], v.shape[-1], device, run.schedule)
    why = "asked for" if said["kernel"] == kernel else "the best that can"
    parts = [f"{name}: q {list(q.shape)}, k {list(k.shape)}, {dtype.name} on {q.device}"]
    if run.schedule is None:
        parts.append("one rank")
    else:
        moved = run.schedule.traffic(dtype, q.shape[-1], v.shape[-1], backward)
        parts.append(f"rank {run.comm.rank} of {run.comm.ranks}")
        parts.append(f"schedule {run.schedule.kind} of {run.schedule.steps} steps")
        parts.append(f"sends {_bytes(moved['bytes_sent'])} in {moved['messages_sent']} messages, "
                     f"receives {_bytes(moved['bytes_received'])} in {moved['messages_received']}")
    parts.append(f"kernel {kernel} ({'; '.join([why, *(f'{other}: {reason}' for other, reason in refused)])})")
    logger.info("%s", ", ".join(parts))
    if _level > 1 and run.schedule is not None and run.core is not None:
        for kind, step, slices, begin, end in run.core.events:
            logger.info("%s: step %d of %d, %s %.0f us, %d slices", name, step, run.schedule.steps, kind, 1e6 * (end - begin),
                        slices)
