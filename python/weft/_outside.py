"""A rank's rows outside weft.transformers.packed(): a model would take them for a sequence, and its loss would be wrong."""

import collections
import functools
import hashlib
import threading
import weakref
from typing import Any, Dict, Optional, OrderedDict, Tuple

import torch
from torch import Tensor

from ._arrays import error
from .torch.sharding import watchers

_MOST_DEALT = 1024
# Digests of positions of a rank's rows, and of where these restart.
_dealt: OrderedDict[Tuple[str, bytes], None] = collections.OrderedDict()
_lock = threading.Lock()
_marked: Dict[int, Any] = {}  # by id: weak references to position_ids that inputs() gave


def documents(positions: Tensor) -> Tensor:
    """Numbers of the runs of following positions, as transformers counts them."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), (torch.diff(positions) != 1).cumsum(0)]) if len(positions) else positions


def anything_dealt() -> bool:
    return bool(_dealt or _marked)


def _digest(kind: str, numbers: Tensor) -> Tuple[str, bytes]:
    return kind, hashlib.blake2b(numbers.to("cpu", torch.int64).contiguous().numpy(), digest_size=16).digest()


def remember(positions: Tensor) -> None:
    """Rows of which some have their document's beginning elsewhere; a plain batch has no such rows."""
    begins = torch.cat([torch.ones(1, dtype=torch.bool), torch.diff(positions) != 1]) if len(positions) else positions.bool()
    if not bool(positions[begins].any()):
        return
    restarts = documents(positions)
    keys = [_digest("positions", positions)] + ([_digest("documents", restarts)] if int(restarts[-1]) else [])
    with _lock:
        for key in keys:
            _dealt[key] = None
            _dealt.move_to_end(key)
        while len(_dealt) > _MOST_DEALT:
            _dealt.popitem(last=False)


def _unmark(key: int, _: Any) -> None:
    _marked.pop(key, None)


def mark(positions: Tensor) -> None:
    """This very tensor is of a rank's rows, also where its numbers could be those of whole documents."""
    with _lock:
        _marked[id(positions)] = weakref.ref(positions, functools.partial(_unmark, id(positions)))


watchers.append(remember)


def _are_dealt(batch: Any, given: Optional[Tensor]) -> bool:
    """Whether these are rows that inputs() or position_ids() made for one rank of many."""
    if given is not None and id(given) in _marked:
        return True
    if given is not None and given.dim() == 2:
        return _digest("positions", given[0]) in _dealt
    seen = batch.rule.documents  # some models pass only where positions restart
    return seen is not None and _digest("documents", seen[0]) in _dealt


@torch.compiler.disable
def refuse(batch: Any, given: Optional[Tensor]) -> None:
    rows, queries, keys = batch.shape_of
    if rows != 1 or queries != keys or batch.checked is (batch if given is None else given):
        return
    if _are_dealt(batch, given):
        raise error(
            f"a model is called on one rank's {queries} rows of a pack outside packed(): it would take them for a sequence",
            "call it inside: with weft.transformers.packed(packing, group): ...",
        )
    batch.checked = batch if given is None else given
