"""A hang of four ranks over gloo: each writes its last calls, and they are drawn as one timeline."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
import flight_worker
import processes

pytestmark = pytest.mark.long


def test_a_hang_is_drawn(tmp_path):
    processes.start("flight_worker.py", tmp_path, "gloo", seconds=100)
    files = [tmp_path / f"flight.{rank}" for rank in range(flight_worker.RANKS)]
    last = {}
    for file in files:
        (record,) = [r for r in map(json.loads, file.read_text().splitlines()) if r["ranks"] > 1]
        last[record["rank"]] = record["calls"][-1]
    assert last[flight_worker.LATE]["state"] == "done" and last[flight_worker.LATE]["pass"] == "backward", last
    others = {last[r]["state"] for r in range(flight_worker.RANKS) if r != flight_worker.LATE}
    assert others <= {"failed", "waiting", "posted"}, last
    said = subprocess.run([sys.executable, "-m", "weft", "explain", "--flight", *files, "--html", tmp_path / "page.html"],
                          capture_output=True, text=True, check=True).stdout
    assert "They parted at call #" in said and "of forward step 1: ranks 0, 1, 3 have made it" in said, said
    assert f"rank {flight_worker.LATE} has not: its last is #" in said, said
    page = (tmp_path / "page.html").read_text()
    assert f"weft explain --flight {' '.join(map(str, files))} --html " in page  # as a shell takes it
