"""Layers over two ranks (gloo) give the loss and the gradients of one rank: formats, schedules, padding, groups."""

import pytest

torch = pytest.importorskip("torch")
import layers_worker
import processes


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return processes.results(layers_worker, tmp_path_factory.mktemp("layers"))


@pytest.mark.long
@pytest.mark.parametrize("case", layers_worker.CASES)
def test_two_ranks(two_ranks, case):
    processes.check(two_ranks, case)
