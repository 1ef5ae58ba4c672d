"""weft.transformers on two ranks against the models' own eager attention, run on each document alone."""

import functools
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weft
import weft.torch
import weft.transformers

import processes
from small_models import RANKS, TOLERANCE, config_of, difference, models, packing_of

# On two ranks: model, layout, schedule, and other options.

_CASES = [
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
CASES = {"-".join([*map(str, case[:3]), *(f"{k}={v}" for k, v in case[3].items())]): case for case in _CASES}
pair_of = functools.lru_cache(None)(lambda name: models(config_of(name)))


def check(name, layout, schedule, options):
    for what, value in difference(*pair_of(name), packing_of(layout), None, layout, schedule, **options).items():
        assert value < TOLERANCE, what


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return processes.results(sys.modules[__name__], tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(on_two_ranks, case):
    processes.check(on_two_ranks, case)


if __name__ == "__main__":
    cases = {name: functools.partial(check, *case) for name, case in CASES.items()}
    ended = processes.fork(RANKS, lambda rank: processes.run_cases(rank, cases, sys.argv[1]), sys.argv[1], seconds=240)
    sys.exit(any(status for status, _ in ended))
