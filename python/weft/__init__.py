"""Weft: exact attention, forward and backward, over packed sequences whose tokens are spread over many ranks.

    >>> import numpy as np, weft
    >>> q = k = v = np.ones((16, 2, 8), np.float32)                      # [tokens, heads, dim]
    >>> r = weft.attention(q, k, v, cu_seqlens_q=[0, 7, 10, 16], causal=True)
    >>> r.out.shape, r.lse.shape, float(r.out[3, 0, 0])
    ((16, 2, 8), (16, 2), 1.0)
    >>> dq, dk, dv, dsink = r.backward(np.ones_like(r.out))

Arrays come from any framework that speaks DLPack, and results are arrays of the same one. `weft.torch` is the front for
training with PyTorch, `weft.transformers` for models of that library.
"""

from . import flight, prepare, rows, types
from ._core import UNLIMITED as _UNLIMITED
from ._core import Communicator, Error, Layout, Machine, Mask, Packing, Placement, Plan, Problem, set_cpu_threads
from ._core import __version__ as __version__
from .attention import Attended, Gradients, attention, plan
from .audit import Audit, AuditCase, audit
from .cost import choose, machine, place, set_machine
from .explain import Explanation, explain
from .packings import packing_from_position_ids
from .ranks import spawn
from .schedule import Schedule
from .sharding import position_ids, shard, unshard, use_layout
from .simulate import simulate
from .support import Support, support

UNLIMITED: int = _UNLIMITED
"""A bound of a slice without limit: lo = -UNLIMITED, hi = UNLIMITED."""

__all__ = [
    "UNLIMITED",
    "Attended",
    "Audit",
    "AuditCase",
    "Communicator",
    "Error",
    "Explanation",
    "Gradients",
    "Layout",
    "Machine",
    "Mask",
    "Packing",
    "Placement",
    "Plan",
    "Problem",
    "Schedule",
    "Support",
    "attention",
    "audit",
    "choose",
    "explain",
    "flight",
    "machine",
    "packing_from_position_ids",
    "place",
    "plan",
    "position_ids",
    "prepare",
    "rows",
    "set_cpu_threads",
    "set_machine",
    "shard",
    "simulate",
    "spawn",
    "support",
    "types",
    "unshard",
    "use_layout",
]
