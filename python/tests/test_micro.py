"""Micro-sequences through weft.torch: outputs, and gradients of the projections around attention."""

import pytest

pytest.importorskip("torch")
import micro_worker  # noqa: E402
import processes  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return processes.results(micro_worker, tmp_path_factory.mktemp("micro"))


@pytest.mark.parametrize("case", micro_worker.CASES)
def test_ranks(results, case):
    processes.check(results, case)
