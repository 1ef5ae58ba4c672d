"""The command under test: its path is in the environment variable WEFT."""

import dataclasses
import json
import os
import pathlib
import subprocess

import pytest


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str
    json: dict | None


@pytest.fixture
def weft(tmp_path):
    """Runs the command; with json_file=True also reads what it wrote to --json."""
    command = pathlib.Path(os.environ["WEFT"]).resolve()

    def run(*args, json_file=False):
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        words = [str(command), *map(str, args)] + (["--json", str(path)] if json_file else [])
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        value = json.loads(path.read_text()) if json_file and path.exists() else None
        return Result(done.returncode, done.stdout, done.stderr, value)

    run.command = str(command)
    return run
