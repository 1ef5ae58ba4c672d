"""TRL's SFTTrainer on two ranks with weft.trainer, packing included, against SFTTrainer itself on one rank."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("trl", reason="tools/setup.sh run full")

import processes
import trl_worker


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    runs = []
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp("trl")
        processes.start("trl_worker.py", folder, ranks)
        runs.append(torch.load(folder / "found.pt"))
    return runs


@pytest.mark.long
@pytest.mark.parametrize("resumed", [0, 1])
@pytest.mark.parametrize("case", trl_worker.CASES)
def test_two_ranks(found, case, resumed):
    """Loss, norm of gradients before clipping, accuracy, entropy, loss of evaluation, parameters; also of a resumed run."""
    (log, parameters), (our_log, our_parameters) = (run[case][resumed] for run in found)
    assert len(log) == len(our_log) == 6
    for line, ours in zip(log, our_log):
        assert line.keys() == ours.keys() and ours == pytest.approx(line, rel=1e-5)
    assert max(line.get("grad_norm", 0) for line in log) > 0.3  # so that clipping does something
    for name, x in parameters.items():
        assert (our_parameters[name] - x).abs().max() <= 1e-5 * x.abs().max(), name
