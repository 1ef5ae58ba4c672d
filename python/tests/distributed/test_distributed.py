"""Ranks that are processes over gloo: every case of the workers, on every rank."""

import pytest

pytest.importorskip("torch")
import distributed_worker
import micro_worker
import processes

WORKERS = [distributed_worker, micro_worker]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    return processes.results(request.param, tmp_path_factory.mktemp("ranks"))


CASES = [(worker, case) for worker in WORKERS for case in worker.CASES]


@pytest.mark.parametrize("results, case", CASES, indirect=["results"], ids=[case for _, case in CASES])
def test_case(results, case):
    processes.check(results, case)
