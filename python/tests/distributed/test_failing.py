"""A rank fails while others wait for it: they end within seconds, with an error that names it."""

import json
import os
import re

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
        if way.startswith("another problem"):  # before the time limit
            assert " in shapes (heads, " in said[rank] and "waited" not in said[rank], said[rank]
    if way.startswith("late"):  # then one waits for it, and others for the one that waits
        waited = [said[rank] for rank in OTHERS if f"waited 1.5 seconds for {lost}" in said[rank]]
        assert waited, said
        assert re.search(r"seconds for rank \d \(pid [^)]*\) in #\d+ \w+ of forward[^;]* bytes from ", waited[0]), waited
    if way.startswith(failing_worker.WAITED_FOR):
        assert ended[failing_worker.LOST][0] == 1


def check_random(said, seconds=10):
    """All other ranks ended in time, with an error that names the one that was lost."""
    lost, way = said["lost"], said["way"]
    latest = max(ended for rank, (_, ended) in enumerate(said["ended"]) if rank != lost)
    assert latest < seconds, f"{way}: {latest:.1f} s"
    named = []
    for rank, ((status, _), text) in enumerate(zip(said["ended"], said["said"])):
        if rank == lost:
            assert status == (1 if "packing" in way else -9), (way, status)
            continue
        assert status == 1 and "weft.Error: " in text, f"{way}: rank {rank} ended with {status}:\n{text}"
        last = text[text.rindex("weft.Error: "):]
        assert "packing" in way or "last calls: #" in last, last
        assert re.search(r"lost rank|waited|differs", last), last
        named.append(f"rank {lost} (pid " in last or ("packing" in way and f"rank {lost}" in last))
        if "stopped" in way:  # others may be waited for first, because they wait themselves
            assert re.search(rf"rank {lost} \(pid (\d+) on [^)]*\) is stopped", last), last
    assert all(named), said["said"]
    if "stopped" in way:
        told = rf"rank {lost} \(pid (\d+) on .* has to be ended: kill -9 \1 on .* of its own: kill -CONT \1\)"
        assert any(re.search(told, text) for text in said["said"]), said["said"]


def check_random_on_gpus(said, seconds=20):
    """The same over NCCL, which may find the loss first: every other rank's error names the one that was lost, or differs.

    Returns the seconds of the last one.
    """
    lost, way = said["lost"], said["way"]
    told = rf"rank {lost} \(pid \d+ on [^)]*\) (has ended|is stopped|did not answer)|lost rank {lost} \(pid "
    if "packing" in way:
        told += rf"|ranks? ([\d, ]*|\d and ){lost}\b.* (differ|in the packing)"
    latest = 0.0
    for rank, ((status, ended), text) in enumerate(zip(said["ended"], said["said"])):
        if rank == lost:
            continue
        error = text.rpartition("weft.Error: ")[2].strip()
        assert status == 1 and ended < seconds and re.search(told, error), (
            f"{way}: rank {rank} ended with {status} after {ended:.1f} s, rank {lost} was lost: {error[:600]} .. {text[-3000:]}")
        latest = max(latest, ended)
    return latest


def test_at_random(tmp_path):
    """kill -9, SIGSTOP or another packing on one of four ranks, at some moment; WEFT_FAILURES: so many times."""
    count = int(os.environ.get("WEFT_FAILURES", "5"))
    lines = processes.start("failing_worker.py", tmp_path, "random", 0, count, "gloo", seconds=60 + 15 * count).splitlines()
    assert len(lines) == count
    for line in lines:
        check_random(json.loads(line))
