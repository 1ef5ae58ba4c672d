"""A rank fails while others wait for it: they end within seconds, with an error that names it."""

import json

import pytest

pytest.importorskip("torch")
import failing_worker
import processes

pytestmark = pytest.mark.long

OTHERS = [rank for rank in range(failing_worker.RANKS) if rank != failing_worker.LOST]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    lines = processes.start("failing_worker.py", tmp_path_factory.mktemp("failing")).splitlines()
    return {said["way"]: said for said in map(json.loads, lines)}


@pytest.mark.parametrize("way", failing_worker.WAYS)
def test_others_end(results, way):
    ended, said = results[way]["ended"], results[way]["said"]
    lost = f"rank {failing_worker.LOST}"
    for rank in OTHERS:
        status, seconds = ended[rank]
        assert status == 1, f"rank {rank} ended with {status} after {seconds:.1f} s:\n{said[rank]}"
        assert seconds < 10, said[rank]
        assert "weft.Error: rank " in said[rank] and "make a new process group" not in said[rank], said[rank]
        if not way.startswith(failing_worker.WAITED_FOR):
            assert lost in said[rank].splitlines()[-1], said[rank]
    if way.startswith(failing_worker.WAITED_FOR):  # then one waits for it, and others for the one that waits
        assert any(f"waited 1.5 seconds for {lost}" in said[rank] for rank in OTHERS), said
        assert ended[failing_worker.LOST][0] == 1
