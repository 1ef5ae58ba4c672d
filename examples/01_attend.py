# Attention on one rank, against five lines of numpy: one sequence, then three documents packed into it.
import numpy as np
import weft
from numpy.typing import NDArray

Floats = NDArray[np.float32]

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 10, 2, 16), np.float32)  # [tokens, heads, dim]


def by_numpy(q: Floats, k: Floats, v: Floats, visible: NDArray[np.bool_]) -> Floats:
    logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    shares = np.exp(np.where(visible, logits, -np.inf))
    out: Floats = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v)
    return out


i, j = np.arange(10)[:, None], np.arange(10)[None, :]  # query, key
one = weft.attention(q, k, v, cu_seqlens_q=[0, 10], causal=True)
print(f"one sequence differs by {np.abs(one.out - by_numpy(q, k, v, j <= i)).max():.1e}")

# Documents of 4, 1 and 5 tokens in the same buffer. No token sees another document, and a window of (2, 0) lets each see
# itself and two before it. With queries of 0 all visible keys count alike, so exp(lse) is how many there are.
document = np.repeat([0, 1, 2], [4, 1, 5])
packed = weft.attention(q, k, v, cu_seqlens_q=[0, 4, 5, 10], causal=True, window=(2, 0))
visible = (document[:, None] == document[None, :]) & (j <= i) & (i - j <= 2)
print(f"three documents differ by {np.abs(packed.out - by_numpy(q, k, v, visible)).max():.1e}")
count = np.exp(weft.attention(0 * q, k, v, cu_seqlens_q=[0, 4, 5, 10], causal=True, window=(2, 0)).lse[:, 0])
print("keys that each token sees:", count.round().astype(int))

assert np.allclose(one.out, by_numpy(q, k, v, j <= i), atol=1e-5)
assert np.allclose(packed.out, by_numpy(q, k, v, visible), atol=1e-5)
assert (count.round() == visible.sum(1)).all()
