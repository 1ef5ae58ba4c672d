"""Each call about files that the command makes fails once, or writes half of what it should: the old file or the new one is there,
whole, and nothing beside it; exit 0 means the new one, anything else names the file. As out_of_memory_test does it with memory."""

import errno
import os
import subprocess

import pytest

MACHINE = '{"name": "mine", "levels": [{"bandwidth": 1e11}], "kernels": [{"flops": 1e14}]}'
COMMANDS = {
    "explain": ["explain", "--docs", "8,5,11", "--ranks", "2", "--html", "page", "--svg", "picture"],
    "simulate": ["simulate", "--docs", "64,32", "--ranks", "2", "--schedule", "ring", "--machine", "machine.json", "--json", "numbers"],
    "verify": ["verify", "--docs", "8,5", "--json", "numbers"],
    "slices": ["explain", "--docs", "8", "--slices", "slices.json", "--json", "numbers"],
}
WRITTEN, READ = ["page", "numbers", "picture"], {"machine.json": MACHINE, "slices.json": '[{"q":[0,8],"k":[0,8],"hi":0}]'}
MOST = 60  # calls


@pytest.fixture(scope="module")
def library():
    path = os.environ.get("WEFT_FAILING_CALLS", "")
    if not os.path.exists(path):
        pytest.skip("needs the library of failing calls (tests/CMakeLists.txt)")
    return path


def run(weft, folder, words, library, fault):
    for name in WRITTEN:
        (folder / name).write_text("old")
    for name, text in READ.items():
        (folder / name).write_text(text)
    failed = folder.parent / f"{folder.name}.failed"
    failed.unlink(missing_ok=True)
    done = subprocess.run([weft.command, *words], capture_output=True, text=True, cwd=folder, timeout=120,
                          env={**os.environ, "LD_PRELOAD": library, "WEFT_FAIL": fault, "WEFT_FAILED": str(failed)})
    return done, failed.read_text() if failed.exists() else ""


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EINTR, 0], ids=["ENOSPC", "EIO", "EINTR", "half"])
@pytest.mark.parametrize("command", COMMANDS)
def test_each_call_fails_once(weft, tmp_path, library, command, error):
    words = COMMANDS[command]
    outputs = [name for name in WRITTEN if name in words]
    done, failed = run(weft, tmp_path, words, library, f"{MOST}:{error}")
    assert done.returncode == 0 and not failed, done.stderr
    whole = {name: (tmp_path / name).read_text() for name in WRITTEN}
    met = set()
    for before in range(MOST):
        done, failed = run(weft, tmp_path, words, library, f"{before}:{error}")
        if not failed:
            break
        what = f"call {before}, {failed}: exit {done.returncode}, {done.stderr}"
        met.add(failed)
        now = {name: (tmp_path / name).read_text() for name in WRITTEN}
        assert done.returncode in (0, 1, 2), what
        assert all(now[name] in ("old", whole[name]) for name in WRITTEN), what
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*WRITTEN, *READ]), what
        if done.returncode == 0:
            assert now == whole, what
        else:
            assert any(f"'{name}'" in done.stderr for name in [*outputs, *READ]) or "stdout" in done.stderr, what
            assert failed not in ("write",) or error not in (0, errno.EINTR), what
    assert before < MOST - 1 and "write" in met, met
    reads = {"fopen", "fread"} if any(name in words for name in READ) else set()
    assert error == 0 or {"open", "fsync", "close", "rename", "fchmod"} | reads <= met, met
