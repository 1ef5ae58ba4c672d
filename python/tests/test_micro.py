"""Micro-sequences through weft.torch: outputs, and gradients of the projections around attention."""

import json

import pytest

pytest.importorskip("torch")
import micro_worker  # noqa: E402
import processes  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("micro")
    processes.start("micro_worker.py", folder)
    return [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(micro_worker.RANKS)]


@pytest.mark.parametrize("case", micro_worker.CASES)
def test_ranks(results, case):
    wrong = [said[case] for said in results if said[case] is not None]
    assert not wrong, "\n".join(wrong)
