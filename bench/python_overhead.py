#!/usr/bin/env python3
"""What Python adds to a call: weft.attention on a tiny problem against the same work asked of the library directly.

    PYTHONPATH=build/release/python python bench/python_overhead.py

The library's own part is what a C++ program would do for each call: make the problem and its plan, and attend with all views
prepared. Both are timed by turns, so that what else the machine does meets both alike; the difference of the medians is
what Python adds. It should stay under 50 microseconds.
"""

import argparse
import statistics
import sys
import time

import numpy as np
import weft
from weft import _arrays, _core

LIMIT = 50.0  # microseconds


def calls(make):
    """(weft.attention, the library alone) as functions of no argument."""
    q, k, v = (make((4, 1, 8)) for _ in range(3))
    cu = np.array([0, 4])
    packing, mask = weft.Packing(cu), weft.Mask(causal=True)
    settings, thd = _core.Settings(), _core.Format.thd
    views = [_arrays.array(x) for x in (q, k, v)]
    out, lse, largest = (_arrays.empty(q, shape, views[0].dtype)[1] for shape in ((4, 1, 8), (4, 1), (1,)))

    def python():
        weft.attention(q, k, v, cu_seqlens_q=cu, causal=True)

    def library():
        _core.OneRank(weft.Problem(packing, mask)).forward(*views, thd, settings, out, lse, largest)

    return python, library


def medians(functions, count):
    """Microseconds of each, by turns."""
    taken = [[] for _ in functions]
    for turn in range(count + count // 10):
        for function, times in zip(functions, taken):
            begin = time.perf_counter()
            function()
            if turn >= count // 10:  # the first ones warm up
                times.append(time.perf_counter() - begin)
    return [1e6 * statistics.median(times) for times in taken]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="calls of each kind")
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT:g} microseconds")
    options = parser.parse_args()
    weft.set_cpu_threads(1)
    rng = np.random.default_rng(0)
    makers = {"numpy": lambda shape: rng.standard_normal(shape, np.float32)}
    try:
        import torch
        makers["torch"] = lambda shape: torch.from_numpy(makers["numpy"](shape))
        if weft._core.has_cuda and torch.cuda.is_available():  # calls return when their work is in the stream
            makers["torch on a GPU"] = lambda shape: makers["torch"](shape).cuda()
    except ImportError:
        pass
    worst = 0.0
    for name, make in makers.items():
        python, library = medians(calls(make), options.count)
        added = python - library
        worst = max(worst, added)
        print(f"{name}: weft.attention {python:.1f} us, the library alone {library:.1f} us, Python adds {added:.1f} us")
    return 1 if options.check and worst > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
