"""Training on four ranks is training on one: the loss, every gradient and, in the long part, where fifty steps lead."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import processes
import train_worker


def trained(folder, *arguments):
    processes.start("train_worker.py", folder, *arguments)
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("train"), *train_worker.QUICK)


@pytest.fixture(scope="module")
def one_rank():
    return train_worker.train(1)


def assert_equal(found, one_rank):
    """Of a schedule's (losses, gradients): the first loss and every gradient."""
    losses, gradients = found
    assert losses[0] == pytest.approx(one_rank[0][0], rel=1e-5)
    assert gradients.keys() == one_rank[1].keys()
    for name, expected in one_rank[1].items():
        difference = gradients[name] - expected
        assert difference.norm() <= 1e-5 * expected.norm(), name
        assert difference.abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("recomputed", ["", ", recomputed"])
@pytest.mark.parametrize("schedule", train_worker.QUICK)
def test_loss_and_gradients(four_ranks, one_rank, schedule, recomputed):
    assert_equal(four_ranks[schedule + recomputed], one_rank)


@pytest.mark.long
def test_fifty_steps_of_every_schedule(tmp_path):
    one_rank = train_worker.train(train_worker.STEPS)
    found = trained(tmp_path, "steps", *train_worker.SCHEDULES)
    assert len(found) == 2 * len(train_worker.SCHEDULES)
    for losses_and_gradients in found.values():
        assert_equal(losses_and_gradients, one_rank)
    for losses, _ in map(found.get, train_worker.SCHEDULES):
        assert abs(losses[-1] - one_rank[0][-1]) < 1e-3
        assert losses[-1] < losses[0] - 0.5  # and something was learned


# By address: there are machines that do not know the name localhost.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]


@pytest.mark.long
@pytest.mark.parametrize("start", [[sys.executable], TORCHRUN], ids=["python", "torchrun"])
def test_the_program(tmp_path, start):
    pytest.importorskip("matplotlib")
    program = train_worker.train_packed.__file__
    done = subprocess.run([*start, program, "--steps", "3", "--tokens", "256", "--schedule", "exact", "--checkpoint",
                           "--picture", tmp_path / "loss.png"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step    0  loss 2." in done.stdout and "tokens a second" in done.stdout
    assert (tmp_path / "loss.png").read_bytes()[1:4] == b"PNG"
