"""One rank of several with latent attention on a GPU: expand and attend (expand=) against attention on K and V that are ready,
plus torch's own projections of the same rows, forward and backward.

    python bench/latent.py                DeepSeek-V3: 128 heads, 192 and 128, a latent of 576, 65,536 tokens, one of 8 ranks
    python bench/latent.py --heads 16     16 heads, as of 8 tensor-parallel ranks

The rank has the last eighth of the queries, which see nearly all keys. Nothing moves: what is timed is what comes before and
after the exchange.
"""
import argparse
import statistics

import torch
import weft
import weft.torch


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--rope", type=int, default=64)
    parser.add_argument("--nope", type=int, default=128)
    parser.add_argument("--dim-v", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


def timed(step, rounds, device):
    """Milliseconds of each round, in which the ways take turns, and the most memory of each."""
    times, peaks = {name: [] for name in step}, {}
    for round in range(rounds + 2):
        for name, run in step.items():
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize(device)
            if round >= 2:  # the first ones compile and allocate
                times[name].append(begin.elapsed_time(end))
                peaks[name] = torch.cuda.max_memory_allocated(device) / 2**30
    return times, peaks


def main():
    f = flags()
    dtype, rows = getattr(torch, f.dtype), f.tokens // f.ranks
    torch.manual_seed(0)
    make = dict(device=f.device, dtype=dtype)
    weight = (torch.randn(f.heads, f.nope + f.dim_v, f.latent, **make) / f.latent**0.5).requires_grad_()
    q = torch.randn(rows, f.heads, f.nope + f.rope, **make).requires_grad_()
    source = torch.randn(f.tokens, f.latent + f.rope, **make).requires_grad_()
    dout = torch.randn(rows, f.heads, f.dim_v, **make)
    packing = weft.Packing([0, rows], [0, f.tokens])
    mask = weft.Mask(causal=True, bottom_right=True)

    def expand(x, heads=slice(None)):
        c, rope = x.split([f.latent, f.rope], -1)
        of_heads = weight[heads]
        made = (c @ of_heads.reshape(-1, f.latent).t()).view(len(x), -1, f.nope + f.dim_v)
        k, v = made.split([f.nope, f.dim_v], -1)
        return torch.cat((k, rope[:, None].expand(-1, k.shape[1], -1)), -1), v

    def by_expand():
        out = weft.torch.context_parallel_attention(q, source, packing, mask, expand=expand, one_rank=True)
        return out, torch.autograd.grad(out, [q, source, weight], dout)

    def ready():
        k, v = expand(source)
        out = weft.torch.context_parallel_attention(q, k, v, packing, mask, one_rank=True)
        return out, torch.autograd.grad(out, [q, source, weight], dout)

    for name, (a, b) in {"out": (by_expand()[0], ready()[0]), **dict(zip(("dq", "dsource", "dweight"),
                                                                       zip(by_expand()[1], ready()[1])))}.items():
        print(f"{name:8} relative norm of the difference {float((a - b).double().norm() / b.double().norm()):.1e}")
    if f.device == "cpu":
        return
    times, peaks = timed({"expand=": by_expand, "projections, then attention": ready}, f.rounds, f.device)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:28} {value:9.2f} ms forward and backward (median of {f.rounds}), peak {peaks[name]:.2f} GiB")
    first, second = medians.values()
    print(f"expand= takes {first / second:.3f} times as long; it expands twice, once in each pass")


if __name__ == "__main__":
    main()
