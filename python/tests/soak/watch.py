"""What a process holds: memory, threads, open files, children; and whether it grows."""

import contextlib
import ctypes
import gc
import os
import re
from pathlib import Path

from test_leaks import _heap

NAMES = ("resident", "heap", "threads", "files", "children", "device", "anonymous")
# What may come together over a soak beyond what its first rounds have filled, in bytes: caches of plans and layouts are bounded
# by number, not by size, and pools of a GPU keep what the largest problem took. Threads, files and children may not grow at all.
BOUNDS = {"resident": 64 << 20, "anonymous": 32 << 20, "heap": 32 << 20, "device": 512 << 20}
LEAST_ROUNDS = 10  # that growth is judged by
M_ARENA_MAX = -8  # of malloc.h


def use_one_arena():
    """Malloc has an arena for each thread, up to eight a core, and each keeps pages that few bytes of are in use: over many short
    threads resident memory grows by 150 MiB although nothing more is held. Before the first thread."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


def _children():
    """Processes whose parent is this one, zombies too."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            count += len((task / "children").read_text().split())
    return count


def now(device):
    """The numbers of NAMES. Free memory is given back before it is counted."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    resident, anonymous = (int(re.search(rf"^{name}:\s+(\d+) kB", status, re.M)[1]) << 10 for name in ("VmRSS", "RssAnon"))
    used = 0
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used = total - free
    threads, files = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("task", "fd"))
    return [resident, _heap() or 0, threads, files, _children(), used, anonymous]


def growth(rounds):
    """{name: (before, after)} of what has grown: the least of the last fifth is more than the most of the first two were."""
    if len(rounds) < LEAST_ROUNDS:
        return {}
    n, found = len(rounds), {}
    for i, name in enumerate(NAMES):
        before, after = max(r[i] for r in rounds[:2 * n // 5]), min(r[i] for r in rounds[-(n // 5):])
        if after > before + BOUNDS.get(name, 0):
            found[name] = before, after
    return found
