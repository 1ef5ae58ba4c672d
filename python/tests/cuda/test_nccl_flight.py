"""Ranks over NCCL, one of which does not come: each writes its last calls, and they are drawn as one timeline."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
import processes
from gpu import needs_gpu

pytestmark = needs_gpu
RANKS, LATE = 4, 2  # of flight_worker.py


def test_a_hang_is_drawn(tmp_path):
    processes.start("flight_worker.py", tmp_path, "cpu:gloo,cuda:nccl", seconds=100)
    files = [tmp_path / f"flight.{rank}" for rank in range(RANKS) if rank != LATE]
    for file in files:
        (record,) = [r for r in map(json.loads, file.read_text().splitlines()) if r["ranks"] > 1]
        assert record["comm"] == "torch" and record["calls"], file
    said = subprocess.run([sys.executable, "-m", "weft", "explain", "--flight", *files], capture_output=True, text=True,
                          check=True).stdout
    assert f"There is no record of rank {LATE}" in said, said
