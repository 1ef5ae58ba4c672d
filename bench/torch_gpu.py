"""Torch on a GPU, for the cases of bench/cuda/attention that it can do: cuDNN's attention, and an 8192 x 8192 x 8192 product.

Useful TFLOP/s on visible pairs (4 d a pair and query head forward, 10 d backward): the median of 20 calls that are each
waited for, and 20 calls one after another.

    python bench/torch_gpu.py [CASE...]
"""
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES = {  # batch, tokens, query heads, K/V heads, width, causal
    "dense": (1, 16384, 32, 8, 128, True),
    "width-64": (16, 4096, 16, 16, 64, True),
    "mha-causal": (1, 16384, 16, 16, 128, True),
    "mha-full": (1, 16384, 16, 16, 128, False),
}
RUNS = 20


def milliseconds(call):
    def timed(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times

    timed(2)
    return sorted(timed(1) for _ in range(RUNS))[RUNS // 2], timed(RUNS)


def show(name, flop, call):
    single, many = milliseconds(call)
    print(f"{name:28} {single:9.3f} ms {flop / single / 1e9:6.0f} {flop / many / 1e9:6.0f} TFLOP/s", flush=True)


def attention(name):
    batch, tokens, heads_q, heads_k, dim, causal = CASES[name]
    shapes = (heads_q, heads_k, heads_k)
    q, k, v = (torch.randn(batch, h, tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in shapes)
    pairs = batch * heads_q * (tokens * (tokens + 1) // 2 if causal else tokens**2)

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads_q != heads_k)

    with torch.no_grad():
        show(f"cuDNN {name} forward", 4 * dim * pairs, forward)
    out = forward()
    dout = torch.randn_like(out)
    show(f"cuDNN {name} backward", 10 * dim * pairs,
         lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))


def main():
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    show("product of 8192^3", 2 * 8192**3, lambda: a @ b)
    for name in sys.argv[1:] or CASES:
        attention(name)


if __name__ == "__main__":
    main()
