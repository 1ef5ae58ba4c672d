"""Ranks that are processes over torch's process group of NCCL: a GPU each, or all on one by sockets."""

import json
import os

import pytest

torch = pytest.importorskip("torch")
import processes
from gpu import needs_gpu

pytestmark = [needs_gpu, pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="torch has no NCCL")]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl"])
def test_every_case(tmp_path, ranks, backend):
    """All schedules, layouts, masks and dtypes; bits, gradients, K/V buffers, meshes, groups, streams, bytes (nccl_worker.py)."""
    processes.start("nccl_worker.py", tmp_path, ranks, backend, seconds=220)
    said = [json.loads((tmp_path / f"results{rank}.json").read_text()) for rank in range(ranks)]
    wrong = [text for one in said for text in one.values() if text is not None]
    assert not wrong, "\n".join(wrong)
    assert all(len(one) >= 27 for one in said)


def test_nccl_alone(tmp_path):
    """A group that moves tensors of GPUs alone."""
    processes.start("nccl_worker.py", tmp_path, 2, "nccl", "all_gather f32", "ring bf16", "gathered", seconds=100)
    for rank in range(2):
        assert set(json.loads((tmp_path / f"results{rank}.json").read_text()).values()) == {None}


def test_ranks_that_fail(tmp_path):
    """kill -9, SIGSTOP or another packing on one of four ranks, at some moment; WEFT_FAILURES: so many times.

    All others end: by Weft's error, or by torch's watchdog, which ends a process when NCCL tells it that a peer has gone.
    """
    count = int(os.environ.get("WEFT_FAILURES", "3"))
    lines = processes.start("failing_worker.py", tmp_path, "random", 0, count, "cpu:gloo,cuda:nccl", seconds=30 + 40 * count)
    for said in map(json.loads, lines.splitlines()):
        for rank, ((status, seconds), text) in enumerate(zip(said["ended"], said["said"])):
            if rank != said["lost"]:
                assert status not in (0, -9) and seconds < 40, f"{said['way']}: rank {rank}: {status}, {seconds:.1f} s\n{text}"
                assert "weft.Error: " in text or "NCCL" in text, f"{said['way']}: rank {rank}: {status}\n{text}"
            print(said["way"], said["lost"], rank, status, f"{seconds:.1f} s", text.strip().splitlines()[-1:])
