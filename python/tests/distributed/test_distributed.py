"""Ranks that are processes over gloo: every case of the workers, on every rank."""

import pytest

pytest.importorskip("torch")
import distributed_worker
import micro_worker
import processes


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    return processes.results(distributed_worker, tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    return processes.results(micro_worker, tmp_path_factory.mktemp("micro"))


@pytest.mark.parametrize("case", distributed_worker.CASES)
def test_distributed(distributed, case):
    processes.check(distributed, case)


@pytest.mark.parametrize("case", micro_worker.CASES)
def test_micro_sequences(micro, case):
    processes.check(micro, case)
