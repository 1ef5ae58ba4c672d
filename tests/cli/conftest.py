"""The command under test: its path is in the environment variable WEFT."""

import dataclasses
import json
import os
import pathlib
import pty
import resource
import shlex
import subprocess

import pytest


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str
    json: dict | None


class Weft:
    def __init__(self, folder):
        self.folder, self.command = folder, str(pathlib.Path(os.environ["WEFT"]).resolve())

    def __call__(self, *args, json_file=False, limits=None):
        """Runs the command; with json_file=True also reads what it wrote to --json. Limits are {resource: most}."""
        path = self.folder / "out.json"
        path.unlink(missing_ok=True)
        words = [self.command, *map(str, args)] + (["--json", str(path)] if json_file else [])

        def set_limits():
            for what, most in (limits or {}).items():
                resource.setrlimit(what, (most, most))

        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=500, cwd=self.folder,
                              preexec_fn=set_limits if limits else None)
        value = json.loads(path.read_text()) if json_file and path.exists() else None
        return Result(done.returncode, done.stdout, done.stderr, value)

    def ok(self, *args, **how):
        result = self(*args, **how)
        assert result.code == 0, result.out + result.err
        return result

    def refused(self, *args, says, **how):
        """Exit 2, nothing on stdout, one line on stderr that names the value and the way out."""
        result = self(*args, **how)
        assert (result.code, result.out) == (2, ""), (result.code, result.out, result.err[:500])
        assert result.err.startswith("weft: ") and result.err.count("\n") == 1, result.err[:500]
        for fragment in says:
            assert fragment in result.err
        assert "; " in result.err  # problem; remedy
        return result

    def again(self, result):
        """The case that was worst, by the command that was printed for it."""
        words = shlex.split(result["worst"]["command"])
        assert words[:2] == ["weft", "verify"]
        return self.ok(*words[1:], json_file=True)

    def on_terminal(self, *args, stream="stdout", **env):
        """What is written to stdout or stderr where that is a terminal."""
        try:
            ours, theirs = pty.openpty()
        except OSError as e:  # a bare root may have none
            pytest.skip(f"no pseudo-terminal here: {e}")
        both = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: theirs}
        process = subprocess.Popen([self.command, *args], env={**os.environ, **env}, **both)
        os.close(theirs)
        out = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed
                part = b""
            if not part:
                break
            out += part
        os.close(ours)
        assert process.wait() == 0
        return out.decode().replace("\r\n", "\n")


@pytest.fixture
def weft(tmp_path):
    return Weft(tmp_path)
