"""Time of attention alone in micro-sequences, one at a time, beside one pass over the whole document.

    PYTHONPATH=build/release/python python bench/micro_sequences.py --device cuda

Forward and backward of one causal document, bf16 on a GPU and f32 on a CPU, without recomputation: medians of interleaved
rounds. One rank, so what is added is the copy of keys into the buffer and the sums of their gradients.
"""

import argparse
import statistics
import time

import torch
import weft
import weft.torch


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--micro", default="1,2,4,8,16")
    parser.add_argument("--heads", default="32:8")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernel")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main():
    asked = arguments()
    on_gpu = asked.device.startswith("cuda")
    heads, kv_heads = (int(n) for n in asked.heads.split(":"))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    packing = weft.Packing([0, asked.tokens])
    q, k, v, dout = (torch.randn(asked.tokens, h, asked.dim, device=asked.device, dtype=dtype)
                     for h in (heads, kv_heads, kv_heads, heads))
    layer = weft.torch.MicroSequenceAttention(kernel=asked.kernel)
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def whole():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        wait()
        begin = time.perf_counter()
        out = weft.torch.context_parallel_attention(*leaves, packing, causal=True, one_rank=True, kernel=asked.kernel)
        wait()
        middle = time.perf_counter()
        out.backward(dout)
        wait()
        return middle - begin, time.perf_counter() - middle

    def by_micro(count):
        micros = weft.torch.MicroSequences(packing, count)
        leaves = [[step.take(x).detach().requires_grad_() for x in (q, k, v)]
                  for step in (weft.torch.MicroStep(micros, m, False) for m in range(count))]
        wait()
        begin = time.perf_counter()
        outs = [layer(*leaves[step.micro], step) for step in micros.forward_steps()]
        wait()
        middle = time.perf_counter()
        for step in micros.backward_steps():
            step.backward(outs[step.micro], step.take(dout))
        wait()
        return middle - begin, time.perf_counter() - middle

    ways = {"one pass": whole, **{f"{m} micro-sequences": (lambda m=m: by_micro(m)) for m in map(int, asked.micro.split(","))}}
    times = {name: [] for name in ways}
    for name in ways:
        ways[name]()  # buffers and kernels are there afterwards
    for _ in range(asked.rounds):
        for name, way in ways.items():
            times[name].append(way())
    print(f"{asked.tokens:,} tokens, heads {asked.heads} of {asked.dim}, {dtype}, kernel {asked.kernel or 'auto'}")
    print(f"{'ms':<22}{'forward':>10}{'backward':>10}{'both':>10}{'over one pass':>15}")
    first = statistics.median(map(sum, times["one pass"]))
    for name, taken in times.items():
        parts = [1e3 * statistics.median(part) for part in zip(*taken)]
        both = statistics.median(map(sum, taken))
        print(f"{name:<22}{parts[0]:>10.1f}{parts[1]:>10.1f}{1e3 * both:>10.1f}{100 * (both / first - 1):>13.1f} %")


if __name__ == "__main__":
    main()
