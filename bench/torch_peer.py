"""Times torch: the child of `weft bench --peer "python bench/torch_peer.py"`.

A question and its answer are one JSON object a line, on stdin and stdout:

    {"do": "hello"}                                             {"name": "torch", "version": "2.8.0"}
    {"do": "prepare", "what": "sdpa", "pass": "forward", ..}    {"id": 0}, or {"refused": "why"}
    {"do": "time", "id": 0, "threads": 2}                       {"seconds": 0.0123} of one call
    {"do": "forget"}                                            {}, and what was prepared is freed

What can be prepared, as a user of torch would write it:

    sdpa   one dense call, heads first: the layout torch likes best
    loop   packed tokens as they come, [tokens, heads, dim]: cut into documents, heads first, K/V heads repeated, a call
           a document, and the outputs put together again
    slices the same loop with documents cut as q[begin:end]; its backward fills a whole tensor for every document
    mask   one call over all tokens with a boolean mask that keeps documents apart
    gemm   a product of two square matrices: what the machine can do

On a GPU (a question with "device": "cuda") sdpa is cuDNN's, K/V heads are not repeated, and seconds are those between events
around a call that is waited for, the median of a few.

It works only between a question and its answer, so Weft and torch never run at the same moment.
"""
import json
import math
import os
import sys
import time

import torch
import torch.nn.attention

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SAMPLE_SECONDS, MOST_CALLS = 0.01, 1000  # as in Weft: short calls are repeated inside one sample
SETTLE_SECONDS = 0.02  # OpenMP's threads spin for some milliseconds after their work; Weft must not meet them
MOST_MASK_BYTES = 2**30


def attend(q, k, v, **how):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)


class Refused(Exception):
    pass


def tensors(ask, shape_of):
    """Q, K, V of the packed stream; shape_of(heads, dim) is the shape."""
    (heads_q, heads_k), (dim_qk, dim_v) = ask["heads"], ask["dim"]
    shapes = (heads_q, dim_qk), (heads_k, dim_qk), (heads_k, dim_v)
    backward = ask["pass"] == "backward"
    where = {"device": device(ask), "dtype": DTYPES[ask["dtype"]]}
    return [torch.randn(shape_of(*s)).to(**where).requires_grad_(backward) for s in shapes]


def device(ask):
    return ask.get("device", "cpu")


def repeated(x, ask):
    """K/V heads repeated for their query heads; in a loop this is faster than enable_gqa."""
    group = ask["heads"][0] // ask["heads"][1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def make_sdpa(ask):
    if len(ask["lengths"]) != 1:
        raise Refused("sdpa takes one sequence")
    q, k, v = tensors(ask, lambda heads, dim: (ask.get("batch", 1), heads, ask["lengths"][0], dim))
    if device(ask) == "cpu":
        return (q, k, v), lambda: attend(q, repeated(k, ask), repeated(v, ask), is_causal=ask["causal"])

    def call():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return attend(q, k, v, is_causal=ask["causal"], enable_gqa=q.shape[1] != k.shape[1])

    return (q, k, v), call


def sliced(x, lengths):
    begin = 0
    for n in lengths:
        yield x[begin:begin + n]
        begin += n


def make_loop(ask, cut=lambda x, lengths: x.split(lengths)):
    lengths = ask["lengths"]
    q, k, v = tensors(ask, lambda heads, dim: (sum(lengths), heads, dim))

    def call():
        outs = []
        for one_q, one_k, one_v in zip(cut(q, lengths), cut(k, lengths), cut(v, lengths)):
            if one_q.shape[0] == 0:
                continue
            heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (one_q, one_k, one_v)]
            out = attend(heads_first[0], repeated(heads_first[1], ask), repeated(heads_first[2], ask),
                         is_causal=ask["causal"])
            outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    return (q, k, v), call


def make_mask(ask):
    lengths = ask["lengths"]
    tokens = sum(lengths)
    if tokens**2 * 4 > MOST_MASK_BYTES:  # torch widens the mask to floats
        raise Refused(f"a mask of {tokens} x {tokens} does not fit {MOST_MASK_BYTES} bytes")
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = document[:, None] == document[None, :]
    if ask["causal"]:
        mask = mask.tril()
    q, k, v = tensors(ask, lambda heads, dim: (1, heads, tokens, dim))
    return (q, k, v), lambda: attend(q, repeated(k, ask), repeated(v, ask), attn_mask=mask)


def make_gemm(ask):
    size, dtype = ask["size"], DTYPES[ask["dtype"]]
    a, b = (torch.randn(size, size).to(device(ask), dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device(ask))
    return (), lambda: torch.mm(a, b, out=out)


MAKE = {"sdpa": make_sdpa, "loop": make_loop, "slices": lambda ask: make_loop(ask, sliced), "mask": make_mask, "gemm": make_gemm}


def backward_of(inputs, call):
    """The backward alone: the graph is built once and kept."""
    out = call()
    dout = torch.randn(out.shape).to(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def without_grad(call):
    def run():
        with torch.no_grad():
            return call()

    return run


def seconds_of(call, calls=1):
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def gpu_seconds_of(call, calls=1):
    milliseconds = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    return sorted(milliseconds)[calls // 2] / 1000


class Server:
    def __init__(self):
        self.prepared = []  # (how it is timed, call, calls a sample)

    def hello(self, ask):
        return {"name": "torch", "version": torch.__version__}

    def prepare(self, ask):
        torch.set_num_threads(ask["threads"])
        if ask["what"] not in MAKE:
            return {"refused": f"there is no {ask['what']}"}
        try:
            inputs, call = MAKE[ask["what"]](ask)
            call = backward_of(inputs, call) if ask.get("pass") == "backward" else without_grad(call)
            timed = seconds_of if device(ask) == "cpu" else gpu_seconds_of
            once = timed(call)  # warms up
            if once < 1:
                once = timed(call)
        except (Refused, RuntimeError) as error:
            return {"refused": str(error)}
        calls = min(max(math.ceil(SAMPLE_SECONDS / once), 1), MOST_CALLS)
        self.prepared.append((timed, call, calls))
        time.sleep(SETTLE_SECONDS)
        return {"id": len(self.prepared) - 1}

    def time(self, ask):
        torch.set_num_threads(ask["threads"])
        timed, *what = self.prepared[ask["id"]]
        seconds = timed(*what)
        time.sleep(SETTLE_SECONDS)
        return {"seconds": seconds}

    def forget(self, ask):
        self.prepared.clear()
        return {}


def main():
    # What a library prints goes to stderr, so that stdout holds answers alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    server = Server()
    does = {"hello": server.hello, "prepare": server.prepare, "time": server.time, "forget": server.forget}
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            answer = does[ask["do"]](ask)
        except Exception as error:  # Weft ends with these words
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
