"""ContextParallel on two ranks over gloo is what one rank does: DDP, FSDP2, and what is refused."""

import pytest

torch = pytest.importorskip("torch")
import context_worker
import processes


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return processes.results(context_worker, tmp_path_factory.mktemp("context"))


@pytest.mark.long
@pytest.mark.parametrize("case", context_worker.CASES)
def test_two_ranks(two_ranks, case):
    processes.check(two_ranks, case)
