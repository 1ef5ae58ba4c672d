"""Ranks that run the cases of small_megatron.py; what came out goes to test_megatron.py.

python megatron_worker.py FOLDER RANKS TENSOR_PARALLEL_RANKS
"""

import sys
from pathlib import Path

import torch

import processes


def rank(folder, rank, ranks, tensor):
    from megatron.core import parallel_state

    import small_megatron

    sizes = [2, ranks // 2] if ranks > 1 and tensor == 1 else None
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, context_parallel_size=ranks // tensor,
                                             hierarchical_context_parallel_sizes=sizes)
    found, cases = {}, small_megatron.TENSOR_PARALLEL if tensor > 1 else small_megatron.CASES
    for name, case in {**cases, **(small_megatron.TENSOR_PARALLEL if ranks == 1 else {})}.items():
        if ranks == 1:
            found[name, "dense"] = small_megatron.step(case, dense=True)
        found[name] = small_megatron.step(case)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    folder, ranks = sys.argv[1], int(sys.argv[2])
    import megatron.core.models.gpt.gpt_model  # noqa: F401  once, before the ranks are forked

    ended = processes.fork(ranks, lambda r: rank(folder, r, ranks, int(sys.argv[3])), folder, seconds=240)
    sys.exit(any(status for status, _ in ended))
