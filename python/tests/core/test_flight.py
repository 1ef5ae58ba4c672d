"""Flight records of ranks that hang: written at a failure or a signal, and drawn as one timeline."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import weft
import weft.flight

LATE = 2


@pytest.fixture
def record(tmp_path):
    yield tmp_path / "flight.json"
    weft.flight.keep("")


def hang(comm, seconds=1.5):
    """Three calls of all ranks, then one that one rank does not come to."""
    for _ in range(3):
        comm.barrier()
    if comm.rank == LATE:
        time.sleep(seconds)
        return
    comm.barrier()


def explain(*arguments):
    done = subprocess.run([sys.executable, "-m", "weft", "explain", "--flight", *map(str, arguments)], capture_output=True,
                          text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_ranks_that_hang_are_drawn(record, tmp_path):
    weft.flight.keep(record, signal=None)
    with pytest.raises(weft.Error, match="waited"):
        weft.spawn(4, hang, time_limit=0.5)
    ranks = {r["rank"]: r for r in map(json.loads, record.read_text().splitlines())}
    assert sorted(ranks) == [0, 1, 2, 3] and all(r["ranks"] == 4 and r["comm"] == "threads" for r in ranks.values())
    assert [len(ranks[r]["calls"]) for r in range(4)] == [4, 4, 3, 4]
    assert {c["state"] for c in ranks[LATE]["calls"]} == {"done"}
    code, said = explain(record, "--html", tmp_path / "page.html")
    assert code == 0, said
    assert "They parted at call #3, exchange: ranks 0, 1, 3 have made it" in said
    assert f"rank {LATE} has not: its last is #2 exchange, done" in said
    page = (tmp_path / "page.html").read_text()
    assert "They parted at call #3" in page and page.count("<rect ") == 15 and "<script" not in page


def test_the_first_failure_is_kept(record):
    weft.flight.keep(record, signal=None)
    for _ in range(2):
        with pytest.raises(weft.Error):
            weft.spawn(2, lambda comm: comm.barrier() if comm.rank else time.sleep(0.4), time_limit=0.1)
        first = record.read_text()
        record.write_text("kept")
    assert first == "kept"
    weft.flight.keep("")
    record.unlink()
    with pytest.raises(weft.Error):
        weft.spawn(2, lambda comm: comm.barrier() if comm.rank else time.sleep(0.4), time_limit=0.1)
    assert not record.exists()


def test_a_signal_writes_what_ranks_wait_for(tmp_path):
    """In a process of its own, whose ranks are inside Weft when it comes."""
    code = f"""
import sys, time, weft
weft.flight.keep(sys.argv[1])
def rank(comm):
    comm.barrier()
    sys.stdout.write("there\\n")
    sys.stdout.flush()
    time.sleep(3) if comm.rank == {LATE} else comm.barrier()
try:
    weft.spawn(3, rank, time_limit=60)
except weft.Error:
    pass
"""
    record = tmp_path / "flight.json"
    child = subprocess.Popen([sys.executable, "-c", code, record], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        assert child.stdout.readline() == "there\n"
    time.sleep(0.3)
    os.kill(child.pid, signal.SIGUSR1)
    for _ in range(100):
        if record.exists():
            break
        time.sleep(0.05)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert child.poll() is None  # the signal ends nothing
    assert sorted((r["rank"], r["calls"][-1]["number"], r["calls"][-1]["state"]) for r in lines) == [
        (0, 1, "waiting"), (1, 1, "waiting"), (2, 0, "done")]
    child.kill()
    child.wait()


OF_RANKS = '{"weft_flight":1,"rank":%s,"ranks":%s,"comm":"x","pid":1,"time":0,"calls":[]}'


def assert_refused(file, text):
    file.write_text(text)
    code, said = explain(file)
    assert code == 2 and "Traceback" not in said and len(said) < 600, (text, said)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(weft.Error, match="cannot be written"):
        weft.flight.keep(tmp_path / "nowhere" / "file")
    with pytest.raises(weft.Error, match="signal"):
        weft.flight.keep(tmp_path / "file", signal=signal.SIGKILL)
    assert_refused(tmp_path / "file", OF_RANKS % (9, 4))


@pytest.mark.long
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weft_flight":2}', OF_RANKS % (0, "1e99"), "\x00" * 50])
def test_other_files_are_refused(tmp_path, text):
    assert_refused(tmp_path / "file", text)


def test_nothing_of_a_record_becomes_html(tmp_path):
    evil = "</title><script>alert(1)</script><b a='\"&"
    call = dict(number=0, kind=evil, step=1, to=evil, to_bytes=1, begun=1.0, seconds=1.0, state=evil, from_bytes=1)
    call["pass"], call["from"] = evil, evil
    record = dict(weft_flight=1, rank=0, ranks=2, comm=evil, pid=1, time=3.0, calls=[call])
    (tmp_path / "file").write_text(json.dumps(record) + "\n")
    code, said = explain(tmp_path / "file", "--html", tmp_path / "page.html")
    assert code == 0, said
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "alert(1)" in page and "Content-Security-Policy" in page and "<b " not in page
    assert "There is no record of rank 1" in page
