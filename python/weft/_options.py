"""Options by name: what each of them may be, said in one sentence if it is something else."""

import functools
from typing import Any, List, Sequence

import numpy as np

from . import _core
from ._arrays import error

LAYOUTS = ("contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed", "auto")
FLAGS = frozenset(("deterministic", "max_logit", "checked", "off_by_one", "one_rank", "return_lse",
                   "return_max_logit", "check_positions"))
_NAMES = {"layout": LAYOUTS, "format": ("thd", "bshd", "sbhd")}
_MAY_BE_NONE = frozenset(("scale", "layout", "kernel"))


def constant(value: Any) -> Any:
    """Numbers as constants of torch.compile, which may take one for a variable; a key of a dict cannot be one."""
    if isinstance(value, (tuple, list)):
        return [constant(x) for x in value]
    return next(iter({value: None})) if isinstance(value, (int, float)) else value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise error(f"{name} is {value!r}", "give True or False")
    return bool(value)


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (str, bytes, bool, np.bool_)):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise error(f"{name} is {value!r}", "give a number" + (" or None" if name in _MAY_BE_NONE else ", 0 for none"))


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in _NAMES[name]:
        raise error(f"there is no {name} {value!r}", f"use {', '.join(sorted(_NAMES[name]))}")
    return value


@functools.lru_cache(None)
def _kernels() -> List[str]:
    return [kernel["name"] for kernel in _core.kernels()]


def _kernel(value: Any) -> str:
    if isinstance(value, str) and (value in ("", "cpu") or value in _kernels()):
        return value
    instead = f"use one of {', '.join(_kernels())}, or cpu for the best CPU target"
    if isinstance(value, str) and value.startswith("cuda") and not any(name.startswith("cuda") for name in _kernels()):
        raise error(f"there is no kernel {value!r} in a build of Weft without CUDA",
                    f"install the wheel of version +cu13, or build with -DWEFT_CUDA=ON; or {instead}")
    raise error(f"there is no kernel {value!r}", instead)


def option(name: str, value: Any) -> Any:
    """The value, as the core takes it; an Error that names it if it is of another kind."""
    if value is None and name in _MAY_BE_NONE:
        return None
    if name in FLAGS:
        return _flag(name, value)
    if name in ("scale", "softcap"):
        return _number(name, value)
    if name in _NAMES:
        return _name(name, value)
    return _kernel(value) if name == "kernel" else value


def heads(heads_q: int, heads_k: int, head_map: Any) -> None:
    """Query heads share K/V heads evenly unless a map says how."""
    if head_map is None and heads_k > 0 and heads_q % heads_k:
        fewer = f"{heads_q // heads_k * heads_k} or " if heads_q > heads_k else ""
        raise error(f"q has {heads_q} heads and k has {heads_k}: query heads must be a multiple of key heads",
                    f"use {fewer}{(heads_q // heads_k + 1) * heads_k} query heads, or give head_map=, the K/V head of each")


def sink(shape: Sequence[int], heads_q: int) -> None:
    if list(shape) != [heads_q]:
        raise error(f"sink has shape {list(shape)} and q has {heads_q} heads", f"give one logit a query head: [{heads_q}]")
