"""tools/many_problems.py adds up what its commands say, and fails if one of them does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "tools/many_problems.py"


def many(tmp_path, weft, count=30):
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, PROGRAM, str(count), "--first-seed", "7", "--jobs", "2", "--weft", weft, "--log", log],
                          capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, log.read_text()


@pytest.mark.long
def test_all_shares(tmp_path):
    status, said, log = many(tmp_path, Path(os.environ["WEFT"]).resolve())
    assert status == 0 and "failed;" not in said, said
    *_, total = said.splitlines()
    problems, runs, _, failed = (int(x.replace(",", "")) for x in total.split("|")[2:-1])
    assert 30 <= problems <= runs and failed == 0 and "seeds 7 to " in total, said
    for flags in ("--trees", "--micro 3", "--checked", "--tokens-up-to 100000"):
        assert flags in log, log


def test_a_failure(tmp_path):
    weft = tmp_path / "weft"
    weft.write_text('#!/bin/sh\necho "1 cases, 0 of them with keys on other ranks: 1 failed"\ncase "$*" in *--micro*) exit 1;; esac\n')
    weft.chmod(0o755)
    status, said, log = many(tmp_path, weft)
    assert status == 1 and "exit status 1: " in said and "--micro 3" in said and "commands failed" in said, said
