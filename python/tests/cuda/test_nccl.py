"""Ranks that are processes over torch's process group of NCCL: a GPU each, or all on one by sockets."""

import json
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import disagreement_worker
import processes
import test_failing
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


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_fingerprints_take_no_launch(tmp_path, backend):
    """One kernel of NCCL's for each call of both passes, by Weft's own NCCL and by torch's."""
    print(processes.start("launches_worker.py", tmp_path, backend, seconds=110))


def test_ranks_that_disagree(tmp_path):
    """Each way of disagreement_worker.py: every rank is told in time what differs, and on which rank."""
    processes.start("disagreement_worker.py", tmp_path, "cpu:gloo,cuda:nccl", seconds=450)  # more than its ranks have
    told = [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in range(disagreement_worker.RANKS)]
    wrong = []
    for way in disagreement_worker.WAYS:
        try:
            disagreement_worker.check_told(told, way)
        except AssertionError as e:
            wrong.append(f"{way}: {e}")
        print(f"{way}: {max(rank[way]['seconds'] for rank in told):.1f} s: {told[0][way]['told']}")
    assert not wrong, "\n".join(wrong)


def test_ranks_that_fail(tmp_path):
    """kill -9, SIGSTOP or another packing on one of four ranks, at some moment; WEFT_FAILURES: so many times, from WEFT_SEED on.

    Every other rank raises Weft's error, which names that one.
    """
    count, first = int(os.environ.get("WEFT_FAILURES", "3")), int(os.environ.get("WEFT_SEED", "0"))
    lines = processes.start("failing_worker.py", tmp_path, "random", first, first + count, "cpu:gloo,cuda:nccl",
                            seconds=30 + 40 * count)
    wrong, longest = [], 0.0
    for said in map(json.loads, lines.splitlines()):
        try:
            seconds = test_failing.check_random_on_gpus(said)
            longest = max(longest, seconds)
            print(f"{said['way']} rank {said['lost']}: named by all others, {seconds:.1f} s")
        except AssertionError as e:
            wrong.append(str(e))
    print(f"{count} failures, {len(wrong)} that not all ranks name, the longest after {longest:.1f} s")
    assert not wrong, "\n".join(wrong)
