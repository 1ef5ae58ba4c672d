"""Ranks over NCCL, one of which does not come: each writes its last calls, and they are drawn as one timeline."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import flight_worker
import processes
import weft

pytestmark = pytest.mark.skipif(not (weft._core.has_cuda and torch.cuda.is_available()), reason="needs a GPU")


def test_a_hang_is_drawn(tmp_path):
    processes.start("flight_worker.py", tmp_path, "cpu:gloo,cuda:nccl", seconds=100)
    files = [tmp_path / f"flight.{rank}" for rank in range(flight_worker.RANKS) if rank != flight_worker.LATE]
    for file in files:
        (record,) = [r for r in map(json.loads, file.read_text().splitlines()) if r["ranks"] > 1]
        assert record["comm"] == "torch" and record["calls"], file
    said = subprocess.run([sys.executable, "-m", "weft", "explain", "--flight", *files], capture_output=True, text=True, check=True).stdout
    assert f"There is no record of rank {flight_worker.LATE}" in said, said
