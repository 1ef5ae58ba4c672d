"""Ctrl-C arrives while ranks work or wait, and a process may end while others of its threads are inside Weft."""

import os
import subprocess
import sys
import textwrap

import pytest

import processes

pytestmark = pytest.mark.long

SECONDS = 18  # that ranks would go on if nobody interrupted them

# Interrupted after a second, spawn must end long before its ranks would; it says when it did.
INTERRUPTED = f"""
import os, signal, sys, threading, time
import weft

def spin(seconds={SECONDS}):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

def rank(comm):
    RANK

def interrupt():
    time.sleep(1)
    began.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

began = []
threading.Thread(target=interrupt).start()
try:
    weft.spawn(3, rank, time_limit={SECONDS})
    print("not interrupted")
except KeyboardInterrupt:
    print(time.monotonic() - began[0])
sys.stdout.flush()
"""

RANKS = {
    "all run Python": "spin()",
    "one runs Python": "comm.barrier() if comm.rank else spin()",
    "all sleep": f"time.sleep({SECONDS})",
    "one sleeps": f"comm.barrier() if comm.rank else time.sleep({SECONDS})",
    "one waits for a lock": f"comm.barrier() if comm.rank else threading.Event().wait({SECONDS})",
    "in ranks of a rank": "weft.spawn(2, lambda inner: spin())",
}


def run(code, seconds=60, **environment):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=seconds,
                          env={**os.environ, **environment})


@pytest.mark.parametrize("ranks", RANKS)
def test_ctrl_c_in_spawn(ranks):
    done = run(INTERRUPTED.replace("RANK", RANKS[ranks]))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < SECONDS / 2


def test_ctrl_c_and_then_again():
    """What was interrupted leaves nothing that would disturb the next one."""
    done = run(INTERRUPTED.replace("RANK", "spin()") + "print(weft.spawn(3, lambda comm: (comm.barrier(), comm.rank)[1]))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "[0, 1, 2]"


def test_an_exception_of_another_handler():
    code = """
    import signal, time, weft
    def handle(*_):
        raise TimeoutError("that is enough")
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        weft.spawn(2, lambda comm: [None for _ in iter(int, 1)])
    except TimeoutError as e:
        print(e)
    """
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "that is enough\n"), done.stderr


ENDS = {
    "a daemon thread computes": """
        def go():
            while True:
                weft.attention(x, x, x, cu_seqlens_q=[0, 300], causal=True).backward(x)
        threading.Thread(target=go, daemon=True).start()
        time.sleep(0.5)
        """,
    "a daemon thread computes for long": """
        long = np.ones((6000, 4, 64), np.float32)
        threading.Thread(target=lambda: weft.attention(long, long, long, cu_seqlens_q=[0, 6000]), daemon=True).start()
        time.sleep(0.2)
        """,
    "ranks of a daemon thread": """
        threading.Thread(target=lambda: weft.spawn(3, lambda comm: [comm.barrier() for _ in iter(int, 1)]), daemon=True).start()
        time.sleep(0.5)
        """,
    "ranks that sleep": """
        threading.Thread(target=lambda: weft.spawn(3, lambda comm: time.sleep(0.7)), daemon=True).start()
        time.sleep(0.5)
        """,
    "spawn at the end": """
        class Late:
            def __del__(self):
                weft.spawn(2, lambda comm: comm.rank)
        late = Late()
        """,
    "attention at the end": """
        class Late:
            def __del__(self):
                weft.attention(x, x, x, cu_seqlens_q=[0, 300])
        late = Late()
        """,
}


@pytest.mark.parametrize("how", ENDS)
def test_the_process_ends_while(how):
    begin = "import threading, time\nimport numpy as np\nimport weft\nx = np.ones((300, 2, 32), np.float32)\n"
    done = run(begin + textwrap.dedent(ENDS[how]))
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    if how == "spawn at the end":
        assert "weft.spawn while Python ends" in done.stderr


@pytest.mark.parametrize("schedule", ["all_gather", "ring"])
def test_ctrl_c_while_gloo_waits(schedule, tmp_path):
    pytest.importorskip("torch")
    processes.start("signals_worker.py", tmp_path, schedule, seconds=120)
    said = (tmp_path / "rank0.txt").read_text()
    lines = [line for line in said.splitlines() if line.startswith(("interrupted", "rank 0"))]
    assert len(lines) == 2, said
    assert float(lines[0].split()[1]) < 12, said
    assert "KeyboardInterrupt" in lines[1] and lines[1].startswith("rank 0"), said
