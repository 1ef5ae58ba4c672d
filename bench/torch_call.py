#!/usr/bin/env python3
"""Host time of a call from torch: context_parallel_attention and scaled_dot_product_attention, by turns in one run.

    PYTHONPATH=build/release/python python bench/torch_call.py

On a CPU: 16 tokens, 2 heads of 64, f32. On a GPU (--cuda): 8 sequences of 128 tokens, 8 query and 2 K/V heads of 128, bf16,
against SDPA and FlashAttention's function if it is installed; the time is until the call returns, with the work in the stream.
Tables are in microseconds, medians; the ratio is to SDPA. Each is called ten times in its turn, as layers follow layers.
"""

import argparse
import statistics
import sys
import time

import torch
import weft
import weft.torch
from torch.nn import functional

IN_TURN = 10
LIMITS = {"forward": 25.0, "with gradients": 45.0}  # microseconds, on a CPU; forward + backward: no more than SDPA


def problem(cuda):
    """(documents, length, query heads, K/V heads, dim, dtype, device)"""
    return (8, 128, 8, 2, 128, torch.bfloat16, "cuda") if cuda else (1, 16, 2, 2, 64, torch.float32, "cpu")


def passes(call, inputs, leaves, dout):
    """The three things that are timed of a call, as functions of no argument."""
    plain = [x.detach() for x in inputs]

    def forward():
        call(*plain)

    def with_gradients():
        call(*inputs)

    def both():
        torch.autograd.grad(call(*inputs), leaves, dout)

    return {"forward": forward, "with gradients": with_gradients, "forward + backward": both}


def weft_calls(cuda):
    documents, length, heads_q, heads_k, dim, dtype, device = problem(cuda)
    cu = torch.arange(0, documents * length + 1, length, dtype=torch.int32)
    q, k, v = (torch.randn(documents * length, h, dim, dtype=dtype, device=device, requires_grad=True)
               for h in (heads_q, heads_k, heads_k))
    packing, mask = weft.Packing(cu), weft.Mask(causal=True)
    attend = weft.torch.context_parallel_attention
    dout = torch.randn(documents * length, heads_q, dim, dtype=dtype, device=device)
    layer = weft.torch.ContextParallelAttention()
    return {"weft, Packing and Mask": passes(lambda *x: attend(*x, packing, mask), (q, k, v), (q, k, v), dout),
            "weft, cu_seqlens": passes(lambda *x: attend(*x, cu, causal=True), (q, k, v), (q, k, v), dout),
            "weft, layer": passes(lambda *x: layer(*x, packing), (q, k, v), (q, k, v), dout)}


def sdpa_calls(cuda):
    documents, length, heads_q, heads_k, dim, dtype, device = problem(cuda)
    q, k, v = (torch.randn(documents, h, length, dim, dtype=dtype, device=device, requires_grad=True)
               for h in (heads_q, heads_k, heads_k))
    grouped = {"enable_gqa": True} if heads_q != heads_k else {}
    call = lambda *x: functional.scaled_dot_product_attention(*x, is_causal=True, **grouped)
    return {"sdpa": passes(call, (q, k, v), (q, k, v), torch.randn_like(q))}


def flash_calls(cuda):
    documents, length, heads_q, heads_k, dim, dtype, device = problem(cuda)
    if not cuda:
        return {}
    for module in ("flash_attn_interface", "flash_attn"):
        try:
            function = __import__(module).flash_attn_varlen_func
        except ImportError:
            continue
        q, k, v = (torch.randn(documents * length, h, dim, dtype=dtype, device=device, requires_grad=True)
                   for h in (heads_q, heads_k, heads_k))
        cu = torch.arange(0, documents * length + 1, length, dtype=torch.int32, device=device)

        def call(*x):
            out = function(*x, cu, cu, length, length, causal=True)
            return out[0] if isinstance(out, tuple) else out

        return {module: passes(call, (q, k, v), (q, k, v), torch.randn_like(q))}
    print("FlashAttention is not installed")
    return {}


def medians(functions, count, cuda):
    """Microseconds of each, by turns; on a GPU until the call returns, with an empty stream before it."""
    taken = [[] for _ in functions]
    for turn in range(count + count // 5):
        for function, times in zip(functions, taken):
            for _ in range(IN_TURN):
                if cuda:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                function()
                if turn >= count // 5:  # the first ones warm up
                    times.append(time.perf_counter() - begin)
    return [1e6 * statistics.median(times) for times in taken]


def first_calls(cuda, count=50):
    """Microseconds that a first call with other documents takes more than the next one."""
    documents, length, heads_q, heads_k, dim, dtype, device = problem(cuda)
    q, k, v = (torch.randn(documents * length, h, dim, dtype=dtype, device=device) for h in (heads_q, heads_k, heads_k))
    more = []
    for i in range(count):
        packing, times = weft.Packing([0, 1 + i % (documents * length - 1), documents * length]), []
        weft.torch.clear_cache()
        for _ in range(2):
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            weft.torch.context_parallel_attention(q, k, v, packing, causal=True)
            times.append(time.perf_counter() - begin)
        more.append(times[0] - times[1])
    return 1e6 * statistics.median(more)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--count", type=int, default=500, help="turns")
    parser.add_argument("--check", action="store_true", help="fail if a call takes longer than it should")
    options = parser.parse_args()
    torch.set_num_threads(1)
    weft.set_cpu_threads(1)
    calls = {**weft_calls(options.cuda), **sdpa_calls(options.cuda), **flash_calls(options.cuda)}
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if options.cuda else 'CPU'}")
    print(f"{'':26}{'forward':>18}{'with gradients':>18}{'forward + backward':>22}")
    columns = {name: medians([of[name] for of in calls.values()], options.count, options.cuda)
               for name in next(iter(calls.values()))}
    at = list(calls).index("sdpa")
    failed = []
    for row, kind in enumerate(calls):
        cells = []
        for name, times in columns.items():
            ratio = times[row] / times[at]
            cells.append(f"{times[row]:.1f} ({ratio:.2f})")
            limit = 1.3 * times[at] if options.cuda else LIMITS.get(name, times[at])
            if kind.startswith("weft") and times[row] > limit:
                failed.append(f"{kind}, {name}: {times[row]:.1f} us, and at most {limit:.1f} are wanted")
        print(f"{kind:26}{cells[0]:>18}{cells[1]:>18}{cells[2]:>22}")
    print(f"first call with other documents: {first_calls(options.cuda):.0f} us more than the next")
    for line in failed:
        print(line)
    return 1 if options.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
