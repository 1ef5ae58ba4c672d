"""Attention from its definition: all pairs, in f64. What the package's answers are compared with.

Nothing here knows slices, runs, layouts or ranks; visibility is asked of each pair of positions.
"""

import numpy as np


def places(offsets, lengths, tokens):
    """(sequence, position) of each token, both -1 where it is padding."""
    sequence, position = np.full(tokens, -1), np.full(tokens, -1)
    for i, length in enumerate(lengths):
        here = slice(offsets[i], offsets[i] + length)
        sequence[here], position[here] = i, np.arange(length)
    return sequence, position


def visible(q, k, *, causal=False, bottom_right=False, window=(-1, -1), chunk_size=None):
    """[tokens_q, tokens_k] of bool; q and k are (offsets, lengths, tokens)."""
    sequence_q, i = (x[:, None] for x in places(*q))
    sequence_k, j = (x[None, :] for x in places(*k))
    more = np.array([b - a for a, b in zip(q[1], k[1])] + [0]) if bottom_right else np.zeros(len(q[1]) + 1, int)
    at = i + more[sequence_q]  # where the query stands among the keys
    see = (sequence_q == sequence_k) & (sequence_q >= 0)
    if causal:
        see &= j <= at
    if window[0] >= 0:
        see &= j - at >= -window[0]
    if window[1] >= 0:
        see &= j - at <= window[1]
    if chunk_size is not None:
        see &= j // chunk_size == at // chunk_size
    return see


class Dense:
    """out [tq, hq, dv], lse [tq, hq], max_logit [hq], and backward(dout), all in f64.

    Beside each comes how large its terms are (`..._terms`): the sum of their absolute values, which is what rounding is
    measured by. sink: None, or logits [hq].
    """

    def __init__(self, q, k, v, see, *, scale=None, softcap=0.0, sink=None, head_map=None):
        heads_q, heads_k = q.shape[1], k.shape[1]
        self.map = np.arange(heads_q) // (heads_q // heads_k) if head_map is None else np.asarray(head_map)
        # Padding may hold anything, and nobody reads it.
        rows, keys = see.any(1), see.any(0)
        self.q, self.k, self.v = (np.where(seen[:, None, None], x, 0.0) for x, seen in ((q, rows), (k, keys), (v, keys)))
        self.see, self.heads_k = see, heads_k
        self.scale = q.shape[2] ** -0.5 if scale is None else scale
        raw = self.scale * np.einsum("qhd,khd->hqk", self.q, self.k[:, self.map])
        self.steepness = 1.0 + abs(self.scale) * np.einsum("qhd,khd->hqk", abs(self.q), abs(self.k[:, self.map])).max(initial=0.0)
        self.slope = 1 - np.tanh(raw / softcap) ** 2 if softcap else np.ones_like(raw)
        logits = np.where(see, softcap * np.tanh(raw / softcap) if softcap else raw, -np.inf)
        self.max_logit = logits.max((1, 2), initial=-np.inf)
        sink = np.full(heads_q, -np.inf) if sink is None else sink
        beside = np.broadcast_to(sink[:, None, None], (heads_q, len(q), 1))
        every = np.concatenate([logits, beside], 2)
        top = every.max(2, initial=-np.inf)
        with np.errstate(divide="ignore"):
            lse = np.where(np.isinf(top), -np.inf,
                           np.log(np.exp(every - np.where(np.isinf(top), 0, top)[..., None]).sum(2)) + top)
        shift = np.where(np.isinf(lse), 0, lse)
        self.p = np.where(see, np.exp(logits - shift[..., None]), 0.0)
        self.p_sink = np.where(rows, np.exp(beside[..., 0] - shift), 0.0)
        self.lse = lse.T
        self.out = np.einsum("hqk,khd->qhd", self.p, self.v[:, self.map])
        self.out_terms = np.einsum("hqk,khd->qhd", self.p, abs(self.v[:, self.map]))

    def _to_keys(self, per_query_head):
        out = np.zeros((per_query_head.shape[0], self.heads_k, per_query_head.shape[2]))
        np.add.at(out, (slice(None), self.map), per_query_head)
        return out

    def backward(self, dout):
        """{name: (gradient, its terms)} of dq, dk, dv and dsink."""
        dout = np.where(self.see.any(1)[:, None, None], dout, 0.0)
        dp = np.einsum("qhd,khd->hqk", dout, self.v[:, self.map])
        dp_terms = np.einsum("qhd,khd->hqk", abs(dout), abs(self.v[:, self.map]))
        d = np.einsum("qhd,qhd->hq", dout, self.out)[..., None]
        d_terms = np.einsum("qhd,qhd->hq", abs(dout), self.out_terms)[..., None]
        ds = self.p * (dp - d) * self.slope * self.scale
        ds_terms = self.p * (dp_terms + d_terms) * abs(self.scale)
        return {
            "dq": (np.einsum("hqk,khd->qhd", ds, self.k[:, self.map]),
                   np.einsum("hqk,khd->qhd", ds_terms, abs(self.k[:, self.map]))),
            "dk": (self._to_keys(np.einsum("hqk,qhd->khd", ds, self.q)),
                   self._to_keys(np.einsum("hqk,qhd->khd", ds_terms, abs(self.q)))),
            "dv": (self._to_keys(np.einsum("hqk,qhd->khd", self.p, dout)),
                   self._to_keys(np.einsum("hqk,qhd->khd", self.p, abs(dout)))),
            "dsink": (-(self.p_sink * d[..., 0]).sum(1), (self.p_sink * d_terms[..., 0]).sum(1)),
        }


# What rounding may do to each term, by dtype: one unit of f16 and bf16, which the result is rounded to in the end, and a
# few of f32 and f64, which sums are made in. f16 has no numbers between 0 and 2^-24.
UNITS = {"f64": 2.0**-48, "f32": 2.0**-21, "f16": 2.0**-11, "bf16": 2.0**-8}
LEAST = {"f64": 0.0, "f32": 0.0, "f16": 2.0**-24, "bf16": 0.0}


def assert_close(name, got, wanted, terms, steepness, dtype):
    """The worst element decides; where nothing adds up, the result must be exact."""
    got = np.asarray(got, np.float64)
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, not {wanted.shape}"
    same = (got == wanted) | (np.isneginf(got) & np.isneginf(wanted))
    allowed = np.where(terms == 0, 0.0, UNITS[dtype] * steepness * terms + LEAST[dtype])
    error = np.where(same, 0.0, abs(np.where(same, 0.0, got) - np.where(same, 0.0, wanted)))
    bad = ~(error <= allowed)
    if bad.any():
        at = np.unravel_index(np.argmax(np.where(bad, np.nan_to_num(error / np.maximum(allowed, 1e-300), nan=np.inf), 0)),
                              error.shape)
        raise AssertionError(f"{name}{list(map(int, at))} is {got[at]}, not {wanted[at]}; "
                             f"allowed {allowed[at]:.3g}, {bad.sum()} are off")


def pairs(slices, rows_q, rows_k):
    """How often slices hold each pair."""
    count = np.zeros((rows_q, rows_k), int)
    for q0, q1, k0, k1, lo, hi in np.asarray(slices):
        q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None, :]
        count[q0:q1, k0:k1] += (k - q >= lo) & (k - q <= hi)
    return count
