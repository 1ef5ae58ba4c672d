"""Is an attention right? Any callable, with any way of dealing out rows, against the definition in f64."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Literal, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from .. import sharding
from .._arrays import error
from .._core import Packing
from ..ranks import spawn

Floats = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class AuditCase:
    """What one call of the audited function is to compute, for self-attention of packed documents."""

    cu_seqlens: Tuple[int, ...]  # where documents begin, padding included, and the end; the first may be above 0
    lengths: Tuple[int, ...]  # real tokens of each, at its beginning
    causal: bool = True
    window: Tuple[int, int] = (-1, -1)  # tokens seen to the left and to the right; -1: all
    sink: Optional[Floats] = None  # [query heads], a logit in the denominator
    heads: Tuple[int, int] = (4, 2)  # of queries, and of keys and values
    rank: int = 0
    ranks: int = 1
    comm: Any = None  # the rank's weft.Communicator, where there are several ranks

    @property
    def packing(self) -> Packing:
        """The same as a weft.Packing."""
        return Packing(cu_seqlens_q_padded=self.cu_seqlens, seqused_q=self.lengths)

    def real(self) -> NDArray[np.bool_]:
        """Which tokens belong to a document."""
        found = np.zeros(self.cu_seqlens[-1], bool)
        for begin, length in zip(self.cu_seqlens, self.lengths):
            found[begin:begin + length] = True
        return found

    def visible(self) -> NDArray[np.bool_]:
        """[queries, keys]: who sees whom, from the meaning of each option."""
        tokens = self.cu_seqlens[-1]
        seen = np.zeros((tokens, tokens), bool)
        left, right = self.window
        for begin, length in zip(self.cu_seqlens, self.lengths):
            for i in range(length):
                for j in range(length):
                    seen[begin + i, begin + j] = not (
                        (self.causal and j > i) or (left >= 0 and i - j > left) or (right >= 0 and j - i > right))
        return seen


class Verdict(NamedTuple):
    """What was found of one property."""

    property: str
    result: Literal["right", "wrong", "refused", "not tried"]
    detail: str


class Audit(List[Verdict]):
    """The verdicts, one a property; print it to read them."""

    @property
    def right(self) -> bool:
        """Whether nothing is wrong. What the function refuses (NotImplementedError) is not wrong."""
        return all(v.result != "wrong" for v in self)

    def summary(self) -> str:
        """One line: how many properties are right, and how many are not."""
        counts = [(n, word) for word in ("right", "wrong", "refused", "not tried")
                  if (n := sum(v.result == word for v in self)) or word in ("right", "wrong")]
        return ", ".join(f"{n} {word}" for n, word in counts)

    def __str__(self) -> str:
        return "\n".join(f"{v.result:9}  {v.property:28}{v.detail}".rstrip() for v in self)


class BalancedSharder:
    """Weft's own rows: layout balanced. A sharder is anything that has these two functions."""

    def shard(self, x: Floats, case: AuditCase) -> Floats:
        """The rows of rank case.rank, of all tokens."""
        return sharding.shard(x, case.comm, packing=case.packing)

    def unshard(self, parts: List[Floats], case: AuditCase) -> Floats:
        """All tokens, of each rank's rows in the order of ranks."""
        return sharding.unshard(parts, packing=case.packing)


class _Answer(NamedTuple):
    out: Floats
    gradients: Optional[Tuple[Floats, ...]]  # of q, k, v


def _definition(tensors: List[Floats], case: AuditCase) -> _Answer:
    """Attention and its gradients in f64, pair by pair."""
    seen, real, group = case.visible(), case.real(), case.heads[0] // case.heads[1]
    q, k, v, dout = (np.where(real[:, None, None], x, 0).astype(np.float64) for x in tensors)
    scale, out = q.shape[-1] ** -0.5, np.zeros((*q.shape[:2], v.shape[-1]))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for h in range(case.heads[0]):
        g = h // group
        weights = np.where(seen, np.exp(np.where(seen, q[:, h] @ k[:, g].T * scale, 0)), 0)
        total = weights.sum(1) + (0 if case.sink is None else np.exp(float(case.sink[h])))
        p = weights / np.where(total > 0, total, 1)[:, None]
        out[:, h] = p @ v[:, g]
        dp = dout[:, h] @ v[:, g].T
        ds = p * (dp - (p * dp).sum(1, keepdims=True))
        dq[:, h] = ds @ k[:, g] * scale
        dk[:, g] += ds.T @ q[:, h] * scale
        dv[:, g] += p.T @ dout[:, h]
    return _Answer(out, (dq, dk, dv))


def _numpy(x: Any) -> Floats:
    """An array of numpy, of a tensor that needs a gradient or lies on a GPU too."""
    return np.asarray(x.detach().cpu().double() if hasattr(x, "detach") else x)


def _call(fn: Callable[..., Any], sharder: Any, tensors: List[Floats], case: AuditCase) -> _Answer:
    """The function's answer, put together from all ranks."""
    def rank(comm: Any) -> List[Floats]:
        mine = dataclasses.replace(case, rank=0 if comm is None else comm.rank, comm=comm)
        q, k, v, dout = tensors if comm is None else [sharder.shard(x, mine) for x in tensors]
        result = fn(q, k, v, mine)
        out, backward = result if isinstance(result, tuple) else (result, None)
        return [_numpy(x) for x in (out, *(() if backward is None else tuple(backward(dout))[:3]))]

    whole = rank(None) if case.ranks == 1 else [sharder.unshard(list(x), case) for x in zip(*spawn(case.ranks, rank))]
    return _Answer(whole[0], tuple(whole[1:]) if len(whole) == 4 else None)


def _wrong_pair(fn: Callable[..., Any], sharder: Any, tensors: List[Floats], case: AuditCase) -> str:
    """The first (query, key) pair that is seen and must not be, or the other way round: each value in turn is changed."""
    q, k, v, dout = tensors
    before, expected, real = _call(fn, sharder, tensors, case).out, case.visible(), case.real()
    for token in range(len(v)):
        other = v.copy()
        other[token] = 1e3 if real[token] else np.nan
        after = _call(fn, sharder, [q, k, other, dout], case).out
        same = (np.abs(after - before) < 1e-3) | (np.isnan(after) & np.isnan(before))
        wrong = np.flatnonzero((~same.all((1, 2)) != expected[:, token]) & real)
        if len(wrong):
            at = int(wrong[0])
            verb = "does not see" if expected[at, token] else "sees"
            return f"query token {at} {verb} key token {token}{'' if real[token] else ', which is padding'}"
    return ""


def _difference(found: Floats, expected: Floats, case: AuditCase, name: str, tolerance: float) -> str:
    """The worst element of real tokens, if it is too far off."""
    if tuple(found.shape) != tuple(expected.shape):
        return f"{name} has shape {list(found.shape)} instead of {list(expected.shape)}"
    off = np.where(case.real()[:, None, None], np.abs(found - expected), 0)
    off = np.where(np.isnan(off), np.inf, off)
    if off.max(initial=0) <= tolerance * max(1.0, np.abs(expected).max(initial=0)):
        return ""
    token, head, column = (int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
    return (f"{name} of token {token}, head {head} is {float(found[token, head, column]):.4g} instead of "
            f"{float(expected[token, head, column]):.4g}")


def _cases(heads: Tuple[int, int], ranks: int, sink: Floats) -> Dict[str, AuditCase]:
    def packed(*lengths: int, **options: Any) -> AuditCase:
        return AuditCase((0, *(int(x) for x in np.cumsum(lengths))), lengths, heads=heads, ranks=ranks, **options)

    one = packed(16)
    return {
        "causal": one,
        "full": packed(16, causal=False),
        "documents": packed(8, 4, 12),
        "documents, full": packed(8, 4, 12, causal=False),
        "odd lengths": packed(7, 1, 9, 3),
        "documents of no tokens": packed(0, 5, 0, 6, 0),
        "window to the left": packed(13, 6, window=(3, 0)),
        "window to the right": packed(13, 6, causal=False, window=(2, 3)),
        "window of the token itself": packed(5, 4, window=(0, 0)),
        "sink": packed(9, 6, sink=sink),
        "one K/V head": dataclasses.replace(packed(9, 6), heads=(heads[0], 1)),
        "as many K/V heads": dataclasses.replace(packed(9, 6), heads=(heads[0], heads[0])),
        "padding": AuditCase((0, 8, 12, 20), (5, 4, 1), heads=heads, ranks=ranks),
        "first offset above 0": AuditCase((3, 10, 16), (7, 6), heads=heads, ranks=ranks),
    }


def audit(fn: Callable[..., Any], sharder: Any = None, ranks: int = 1, *, mask: Optional[Literal["causal", "full"]] = None,
          heads: Tuple[int, int] = (4, 2), dim: int = 8, dtype: Any = np.float32, tolerance: float = 1e-4,
          seed: int = 0) -> Audit:
    """Calls an attention on small cases and compares it with the definition in f64: a verdict a property.

    fn(q, k, v, case) gets arrays of numpy [rows, heads, dim] and an AuditCase, and gives out, or (out, backward) where
    backward(dout) gives dq, dk, dv: arrays or tensors. A case that it cannot do it refuses with NotImplementedError. Padding is
    NaN. With several ranks, which are threads, it is called on each of them with the rows that sharder.shard(x, case) gave, and
    case.comm; sharder.unshard(parts, case) puts results together. mask: only the cases that have this one. A wrong answer
    comes with the first (query, key) pair that is wrong. The same from a shell: python -m weft audit module:function.

        >>> import weft
        >>> def plain(q, k, v, case):
        ...     if case.sink is not None:
        ...         raise NotImplementedError
        ...     r = weft.attention(q, k, v, case.packing, causal=True, window=case.window)      # forgets case.causal
        ...     return r.out, r.backward
        >>> report = weft.audit(plain)
        >>> report.right, [v.property for v in report if v.result == "wrong"]
        (False, ['full', 'documents, full', 'window to the right'])
        >>> print(report[1].detail)
        query token 0 does not see key token 1
    """
    if heads[0] % heads[1]:
        raise error(f"{heads[0]} query heads and {heads[1]} K/V heads", "query heads must divide by K/V heads")
    if mask not in (None, "causal", "full"):
        raise error(f"there is no mask {mask!r} to audit", 'give "causal", "full", or None for both')
    rng, report = np.random.default_rng(seed), Audit()
    sharder = BalancedSharder() if sharder is None else sharder
    slopes, tried = "", False
    for name, case in _cases(heads, ranks, rng.standard_normal(heads[0]).astype(dtype)).items():
        if mask is not None and case.causal != (mask == "causal"):
            continue
        tokens, (hq, hk) = case.cu_seqlens[-1], case.heads
        tensors = [rng.standard_normal((tokens, h, dim)).astype(dtype) for h in (hq, hk, hk, hq)]
        for x in tensors:
            x[~case.real()] = np.nan
        expected = _definition(tensors, case)
        try:
            found = _call(fn, sharder, tensors, case)
        except NotImplementedError as e:
            report.append(Verdict(name, "refused", str(e)))
            continue
        except Exception as e:
            report.append(Verdict(name, "wrong", f"{type(e).__name__}: {e}"))
            continue
        wrong = _difference(found.out, expected.out, case, "out", tolerance)
        if wrong and found.out.shape == expected.out.shape:
            wrong = _wrong_pair(fn, sharder, tensors, case) or wrong
        report.append(Verdict(name, "wrong" if wrong else "right", wrong))
        if found.gradients is not None and not wrong and not slopes:
            tried = True
            for which, mine, right in zip(("dq", "dk", "dv"), found.gradients, expected.gradients or ()):
                off = _difference(mine, right, case, which, tolerance)
                slopes = slopes or (f"{name}: {off}" if off else "")
    report.append(Verdict("gradients", "wrong" if slopes else "right" if tried else "not tried", slopes))
    return report
