"""weft.torch on four ranks over gloo is weft.torch on one."""

import json

import pytest

pytest.importorskip("torch")
import distributed_worker  # noqa: E402
import processes  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    processes.start("distributed_worker.py", folder)
    return [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(distributed_worker.RANKS)]


@pytest.mark.parametrize("case", distributed_worker.CASES)
def test_four_ranks(results, case):
    wrong = [said[case] for said in results if said[case] is not None]
    assert not wrong, "\n".join(wrong)
