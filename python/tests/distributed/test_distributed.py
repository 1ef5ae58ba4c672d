"""Ranks that are processes over gloo: every case of the workers, on every rank."""

import json

import pytest

pytest.importorskip("torch")
import distributed_worker
import micro_steps_worker
import micro_worker
import processes


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    return processes.results(distributed_worker, tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    return processes.results(micro_worker, tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def micro_steps(tmp_path_factory):
    return processes.results(micro_steps_worker, tmp_path_factory.mktemp("micro_steps"))


@pytest.mark.parametrize("case", [name for name in distributed_worker.CASES if name not in distributed_worker.LONG])
def test_distributed(distributed, case):
    processes.check(distributed, case)


@pytest.mark.long
@pytest.mark.parametrize("case", distributed_worker.LONG)
def test_distributed_long(tmp_path, case):
    processes.start("distributed_worker.py", tmp_path, case)
    said = [json.loads((tmp_path / f"results{rank}.json").read_text()) for rank in range(distributed_worker.RANKS)]
    processes.check(said, case)


@pytest.mark.parametrize("case", micro_worker.CASES)
def test_micro_sequences(micro, case):
    processes.check(micro, case)


@pytest.mark.long
def test_micro_sequences_long(tmp_path):
    said = processes.results(micro_worker, tmp_path, "long")
    for case in micro_worker.LONG:
        processes.check(said, case)


@pytest.mark.long
@pytest.mark.parametrize("case", micro_steps_worker.CASES)
def test_micro_sequences_one_at_a_time(micro_steps, case):
    processes.check(micro_steps, case)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 8])
def test_cases_of_gpus(tmp_path, ranks):
    """What cuda/test_nccl.py runs over NCCL, over gloo."""
    processes.start("nccl_worker.py", tmp_path, ranks)
    for rank in range(ranks):
        said = json.loads((tmp_path / f"results{rank}.json").read_text())
        assert len(said) >= 27 and set(said.values()) == {None}, said
