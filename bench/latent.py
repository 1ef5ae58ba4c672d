"""One rank of several with latent attention: expand and attend (expand=), K and V made again in the backward or kept, against
torch's own projections of the same rows and attention on K and V that are ready; forward and backward, in turns.

    python bench/latent.py                the packed documents, DeepSeek-V3: 128 heads, 192 and 128, a latent of 512 + 64
    python bench/latent.py --heads 16     16 heads, as of 8 tensor-parallel ranks
    python bench/latent.py --case one     one document of as many tokens
    python bench/latent.py --device cpu --dtype float32 --tokens 2048 --heads 4 --rounds 3     to see that it works

The rank has its chunks of every document under layout dual_chunk, and all keys are there in sequence order, as all_gather leaves
them. Nothing moves: what is timed is what comes before and after the exchange. The projections get the rows that the rank sees
one after another, which costs them nothing here.
"""
import argparse
import statistics
import time

import torch
import weft
import weft.torch

PACKED = [1456, 1952, 704, 4320, 2624, 1280, 4560, 1008, 16384, 4176, 2432, 2288, 2704, 12384, 2464, 3248, 1040, 512]


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["packed", "one"], default="packed")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--rope", type=int, default=64)
    parser.add_argument("--nope", type=int, default=128)
    parser.add_argument("--dim-v", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


def documents(f):
    """Lengths that divide by twice the ranks; the packed ones in proportion to the tokens."""
    whole = PACKED if f.case == "packed" else [f.tokens]
    step = 2 * f.ranks
    return [max(step, round(n * f.tokens / sum(whole) / step) * step) for n in whole]


def share(lengths, f):
    """(query rows of the rank, slices on the keys of the whole pack, the same on those that the rank sees, these)"""
    q, begin, compact = 0, 0, 0
    whole, own, seen = [], [], []
    for n in lengths:
        chunk = n // (2 * f.ranks)
        last = 2 * f.ranks - 1 - f.rank
        for c in (f.rank, last):
            for first, slices in ((begin, whole), (compact, own)):
                slices.append((q, q + chunk, first, first + (c + 1) * chunk, None, first + c * chunk - q))
            q += chunk
        seen.append(torch.arange(begin, begin + (last + 1) * chunk))
        begin, compact = begin + n, compact + (last + 1) * chunk
    return q, whole, own, torch.cat(seen)


class Clock:
    """Milliseconds between calls of mark, of the GPU or of the host."""

    def __init__(self, device):
        self.cuda, self.marks = torch.device(device).type == "cuda", []

    def mark(self):
        if not self.cuda:
            return self.marks.append(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def spans(self):
        if not self.cuda:
            return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]


def timed(ways, rounds, device):
    """[forward, backward] milliseconds of each round, in which the ways take turns, and the most memory of each in GiB."""
    times, peaks = {name: [] for name in ways}, {}
    for number in range(rounds + 2):
        for name, (forward, inputs, dout) in ways.items():
            clock = Clock(device)
            if clock.cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            clock.mark()
            out = forward()
            clock.mark()
            torch.autograd.grad(out, inputs, dout)
            clock.mark()
            del out
            spans = clock.spans()
            if number >= 2:  # the first ones compile and allocate
                times[name].append(spans)
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30 if clock.cuda else 0.0
    return times, peaks


def main():
    f = flags()
    dtype, lengths = getattr(torch, f.dtype), documents(f)
    rows, slices, own, seen = share(lengths, f)
    torch.manual_seed(0)
    make = dict(device=f.device, dtype=dtype)
    weight = (torch.randn(f.heads, f.nope + f.dim_v, f.latent, **make) / f.latent**0.5).requires_grad_()
    q = torch.randn(rows, f.heads, f.nope + f.rope, **make).requires_grad_()
    source = torch.randn(sum(lengths), f.latent + f.rope, **make).requires_grad_()
    theirs = source.detach()[seen.to(f.device)].requires_grad_()
    dout = torch.randn(rows, f.heads, f.dim_v, **make)
    packings = [weft.torch.pack(weft.Packing([0, rows], [0, keys]), weft.Mask(slices=of).slices)
                for keys, of in ((len(source), slices), (len(seen), own))]

    def expand(x, heads=slice(None)):
        c, rope = x.split([f.latent, f.rope], -1)
        of_heads = weight[heads]
        made = (c @ of_heads.reshape(-1, f.latent).t()).view(len(x), -1, f.nope + f.dim_v)
        k, v = made.split([f.nope, f.dim_v], -1)
        return torch.cat((k, rope[:, None].expand(-1, k.shape[1], -1)), -1), v

    def ours(recompute):
        return weft.torch.context_parallel_attention(q, source, packing=packings[0], expand=expand, recompute=recompute,
                                                     one_rank=True)

    def attention(k, v):
        return weft.torch.context_parallel_attention(q, k, v, packings[1], one_rank=True)

    k, v = (x.detach().requires_grad_() for x in expand(theirs))
    ways = {"expand=": (lambda: ours(True), [q, source, weight], dout),
            "expand=, kept": (lambda: ours(False), [q, source, weight], dout),
            "projections, attention": (lambda: attention(*expand(theirs)), [q, theirs, weight], dout),
            "attention alone": (lambda: attention(k, v), [q, k, v], dout)}
    results = []
    for forward, inputs, _ in list(ways.values())[:3]:
        out = forward()
        results.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
    # Of a chunk's n queries, the last sees all keys up to the chunk's end, the one before it one less.
    pairs = sum(n * (end - begin) - n * (n - 1) // 2 for n, begin, end in ((b - a, k0, k1) for a, b, k0, k1, _, _ in slices))
    print(f"{f.case}: {len(lengths)} documents, {sum(lengths)} tokens, rank {f.rank} of {f.ranks}: {rows} queries, {len(seen)} "
          f"keys seen, {pairs} pairs, {f.heads} heads, {f.dtype} on {f.device}, torch {torch.__version__}")
    for name, got in zip(ways, results[:2]):
        got[2] = got[2][seen.to(f.device)]
        errors = [float((a - b).double().norm() / b.double().norm()) for a, b in zip(got, results[2])]
        print(f"{name:24} differs from projections, attention by", ", ".join(
            f"{what} {error:.1e}" for what, error in zip(("out", "dq", "dsource", "dweight"), errors)), "in norm")
    del results, got
    times, peaks = timed(ways, f.rounds, f.device)
    medians = {name: [statistics.median(x) for x in zip(*((a, b, a + b) for a, b in spans))] for name, spans in times.items()}
    base = medians["projections, attention"]
    for name, values in medians.items():
        print(f"{name:24} forward {values[0]:9.3f}  backward {values[1]:9.3f}  both {values[2]:9.3f} ms (medians of {f.rounds}), "
              f"peak {peaks[name]:6.2f} GiB, {values[2] / base[2]:.3f} of projections, attention")


if __name__ == "__main__":
    main()
