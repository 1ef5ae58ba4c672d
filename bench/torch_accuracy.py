"""Weft and torch on inputs that are hard on arithmetic, both against softmax in f64.

    PYTHONPATH=build/release/python python bench/torch_accuracy.py [--device cuda] [--keys 131072]

Inputs are of the kinds of `weft verify --accuracy`, drawn anew. For each tensor, "weft / torch": the largest error in
roundings of the tensor's largest element, in its dtype; (the error itself) where the answer is 0. Nothing fails here: the
bounds are the command's, and so is f64, which would need a judge of more digits.
torch is scaled_dot_product_attention, by the backend that it takes.
"""
import argparse
import math

import torch
import weft

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
HEADS, DIM = 2, 32


def inputs(keys):
    """name -> (scale, q, k, v, dout) in f64."""
    def normal(rows_q, rows_k):
        draw = torch.Generator().manual_seed(rows_q + rows_k)
        return [torch.randn(rows, HEADS, DIM, generator=draw, dtype=torch.float64) for rows in (rows_q, rows_k, rows_k, rows_q)]

    usual = 1 / math.sqrt(DIM)
    cases = {"unit normal": (usual, *normal(48, 80))}
    for size in (1e3, 1e4):
        q, k, v, dout = normal(48, 80)
        cases[f"logits of {size:.0e}"] = (usual, q * math.sqrt(size), k * math.sqrt(size), v, dout)
    cases[f"{keys:,} keys in a row"] = (usual, *normal(1, keys))
    cases[f"{keys:,} keys, all the same"] = (usual, *(x[:1].expand_as(x).contiguous() for x in normal(1, keys)))
    q, k, v, dout = normal(48, 80)
    k[1::2] = k[::2]
    v[1::2] -= 1000 * v[::2]
    v[::2] *= 1000
    cases["cancelling values"] = (usual, q, k, v, dout)
    cases["scale 1e-6"] = (1e-6, *normal(48, 80))
    q, k, v, dout = normal(48, 80)
    k[7] = 3
    cases["one dominant key"] = (usual, 3 + 0.1 * q, k, v, dout)
    cases["constant rows"] = (usual, *(x[:1].expand_as(x).contiguous() for x in normal(48, 80)))
    return cases


def exact(scale, q, k, v, dout):
    """The formula in f64: out, dq, dk, dv."""
    q, k, v = (x.double().clone().requires_grad_() for x in (q, k, v))
    shares = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * scale, -1)
    out = torch.einsum("hqk,khd->qhd", shares, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def by_torch(scale, q, k, v, dout):
    heads_first = [x.transpose(0, 1)[None].clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=scale)
    grads = torch.autograd.grad(out, heads_first, dout.transpose(0, 1)[None].contiguous())
    return [x[0].transpose(0, 1).detach() for x in (out, *grads)]


def by_weft(scale, q, k, v, dout):
    r = weft.attention(q, k, v, cu_seqlens_q=[0, len(q)], cu_seqlens_k=[0, len(k)], scale=scale)
    return [r.out, *r.backward(dout)[:3]]


def roundings(got, want, dtype):
    error, largest = (got.double() - want).abs().max().item(), want.abs().max().item()
    if largest < 1e-12:
        return f"({error:.0e})"
    return f"{error / (ROUNDING[dtype] * largest + (2**-25 if dtype == torch.float16 else 0)):.3g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keys", type=int, default=131072, help="of the long rows")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.device}; weft / torch, roundings of the largest element")
    print(f"{'dtype':<10}{'input':<28}" + "".join(f"{name:>20}" for name in ("out", "dq", "dk", "dv")))
    for dtype in ROUNDING:
        for name, (scale, *tensors) in inputs(args.keys).items():
            tensors = [x.to(args.device, dtype) for x in tensors]
            want, ours, theirs = (f(scale, *tensors) for f in (exact, by_weft, by_torch))
            cells = (f"{roundings(a, w, dtype)} / {roundings(b, w, dtype)}" for a, b, w in zip(ours, theirs, want))
            print(f"{str(dtype)[6:]:<10}{name:<28}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
