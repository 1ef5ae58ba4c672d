"""weft.torch on four ranks over gloo is weft.torch on one."""

import pytest

pytest.importorskip("torch")
import distributed_worker  # noqa: E402
import processes  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return processes.results(distributed_worker, tmp_path_factory.mktemp("distributed"))


@pytest.mark.parametrize("case", distributed_worker.CASES)
def test_four_ranks(results, case):
    processes.check(results, case)
