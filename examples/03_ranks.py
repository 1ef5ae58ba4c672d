# Two packed documents on four ranks, forward and backward, against one rank. Ranks are threads here; weft.torch runs the
# same over processes.
import numpy as np
import weft

packing = weft.Packing([0, 700, 1000])  # cu_seqlens: documents of 700 and 300 tokens
rng = np.random.default_rng(0)
q, dout = rng.standard_normal((2, 1000, 8, 64), np.float32)  # [tokens, heads, dim]
k, v = rng.standard_normal((2, 1000, 2, 64), np.float32)  # two K/V heads for eight query heads


def rank(comm: weft.Communicator) -> tuple[np.ndarray, np.ndarray]:
    rows = [weft.shard(x, comm, packing=packing, layout="zigzag") for x in (q, k, v, dout)]  # this rank's
    r = weft.attention(rows[0], rows[1], rows[2], packing, causal=True, window=(256, 0), comm=comm, schedule="ring",
                       layout="zigzag")
    return r.out, r.backward(rows[3]).dk


parts = weft.spawn(4, rank)
out, dk = (weft.unshard(p, packing=packing, layout="zigzag") for p in zip(*parts))

one = weft.attention(q, k, v, packing, causal=True, window=(256, 0))
print(f"out differs by {np.abs(out - one.out).max():.1e}, dk by {np.abs(dk - one.backward(dout).dk).max():.1e}")
assert np.allclose(out, one.out, atol=1e-5) and np.allclose(dk, one.backward(dout).dk, atol=1e-4)
