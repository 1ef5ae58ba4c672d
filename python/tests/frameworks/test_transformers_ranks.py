"""weft.transformers on two ranks against the models' own eager attention, run on each document alone."""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weft
import weft.torch
import weft.transformers

from small_models import RANKS, TOLERANCE, config_of, difference, models, packing_of

# On two ranks: model, layout, schedule, and other options.

CASES = [
    ("llama", "zigzag", "all_gather", {}), ("llama", "zigzag", "ring", {"checked": True}),
    ("llama", "contiguous", "all_to_all", {}), ("llama", "striped", "ring", {}), ("llama", "balanced", "exact", {}),
    ("gemma2", "balanced", "ring", {}), ("llama", "dual_chunk", weft.Schedule("all_gather", head_groups=2), {}),
    ("llama", "zigzag", "hybrid", {}), ("llama4", "zigzag", "all_gather", {}), ("llama4", "striped", "ring", {}),
    ("llama4", "dual_chunk", "exact", {}), ("llama4", "zigzag", "ring", {"checkpointing": False}),
    ("llama4", "zigzag", "exact", {"checkpointing": True}), ("mistral", "contiguous", "exact", {}),
    ("mistral", "zigzag", "ring", {}), ("gemma2", "zigzag", "all_gather", {}), ("gemma2", "zigzag", "ring", {}),
    ("gemma2", "striped", "exact", {}), ("gpt_oss", "zigzag", "all_gather", {}), ("gpt_oss", "striped", "ring", {}),
    ("gpt_oss", "contiguous", "all_to_all", {}), ("gpt_oss", "zigzag", "exact", {"checkpointing": False}),
]


def case_name(case):
    return "-".join([*map(str, case[:3]), *(f"{k}={v}" for k, v in case[3].items())])


def one_rank_of_two(rank, folder):
    torch.set_num_threads(1)
    weft.set_cpu_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    results, made = {}, {}
    for case in CASES:
        name, layout, schedule, options = case
        if name not in made:
            made[name] = models(config_of(name))
        results[case_name(case)] = difference(*made[name], packing_of(layout), None, layout, schedule, **options)
    with open(f"{folder}/results{rank}", "w") as f:
        json.dump(results, f)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = []
    try:
        for rank in ranks:
            said.append(rank.communicate(timeout=300)[0])
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
    return [json.loads((folder / f"results{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_two_ranks(on_two_ranks, case):
    for rank, results in enumerate(on_two_ranks):
        for what, value in results[case_name(case)].items():
            assert value < TOLERANCE, f"rank {rank}: {what}"


if __name__ == "__main__":
    one_rank_of_two(int(sys.argv[1]), sys.argv[2])
