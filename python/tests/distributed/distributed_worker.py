"""Runs the cases of cases_*.py on four ranks over gloo (test_distributed.py), without the long ones.

Words after the folder select cases by name, from all.
"""

import sys

import torch._dynamo  # once, before ranks are forked
import torch.testing._internal.optests  # noqa: F401

import cases_attention  # noqa: F401
import cases_exchange  # noqa: F401
import cases_groups  # noqa: F401  the last: it ends the world
import processes
from group_cases import CASES, LONG, RANKS

if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    wanted = [name for name in CASES if any(word in name for word in words)] if words else CASES.keys() - set(LONG)
    chosen = {name: check for name, check in CASES.items() if name in wanted}
    ended = processes.fork(RANKS, lambda rank: processes.run_cases(rank, chosen, folder), folder, seconds=240)
    sys.exit(any(status for status, _ in ended))
