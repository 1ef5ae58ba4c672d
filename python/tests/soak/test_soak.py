"""The soak finds what is planted, a job that fails and what a process may hold on to, and goes on where it was interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("core", "pytorch", "distributed")]
import soak

pytestmark = pytest.mark.long


@pytest.fixture
def run(capsys):
    """A soak in this process: its exit status and what it printed."""
    def soaked(*words):
        status = soak.main(["--kinds", "rows", "--jobs", "2", *map(str, words)])
        return status, capsys.readouterr().out

    return soaked


def test_nothing_is_found(run):
    status, said = run("--rounds", 12)
    assert status == 0 and "GROWS" not in said and "FAILED" not in said, said
    assert all(f"\n  {share:>4} " in said for share in ("10%", "50%", "100%")), said


@pytest.mark.parametrize("name, grown", [("memory", "resident"), ("file", "files"), ("thread", "threads"), ("child", "children")])
def test_a_planted_leak(run, name, grown):
    status, said = run("--rounds", 12, "--plant", name)
    assert status == 1 and f"GROWS: {grown} from" in said and "FAILED" not in said, said


def test_a_planted_failure(run):
    status, said = run("--rounds", 2, "--plant", "failure")
    assert status == 1 and "a planted failure" in said, said
    again = next(line for line in said.splitlines() if line.startswith("again: "))
    status, said = run(*again[again.index("--only"):].split())
    assert status == 1 and "AssertionError: a planted failure" in said, said


def test_an_interrupted_soak_goes_on(run, tmp_path):
    state = tmp_path / "soak.json"
    words = ["--kinds", "rows", "--seconds", "1000", "--seed", "40", "--resume", state]
    with subprocess.Popen([sys.executable, soak.__file__, *words], stdout=subprocess.DEVNULL) as first:
        while first.poll() is None and not state.exists():
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGKILL)
    before = json.loads(state.read_text())
    rounds = len(before["rounds"])
    status, said = run("--seconds", 1000, "--rounds", rounds + 2, "--resume", state)
    after = json.loads(state.read_text())
    assert status == 0 and f"goes on at seed {before['next']}," in said and "process 2, 2 rounds" in said, said
    per_round = (before["next"] - 40) // rounds
    assert per_round > 0 and after["next"] == before["next"] + 2 * per_round and after["seconds"] > before["seconds"]
    # What is over begins anew, with seeds of its own.
    status, said = run("--seconds", 0.01, "--resume", state)
    assert f"from seed {after['next']};" in said, said
