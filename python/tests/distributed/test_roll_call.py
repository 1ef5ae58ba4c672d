"""Who keeps a group waiting, as ranks find out over a store (weft.torch.roll_call)."""

import os
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
from weft.torch import roll_call

RECORD = "#{} exchange of forward step 2, 64 bytes to 1, 64 bytes from 3, waiting for 3.000 s\n"


def at(call, *waits, failed=False, record=RECORD):
    return roll_call.state_of("#0 exchange, done after 0.1 s\n" + record.format(call), list(waits), failed)


def test_states_are_read_from_a_flight_record():
    assert roll_call.state_of("", []) == roll_call.State(-1, "", [])
    state = at(49, 2)
    assert state.call == 49 and state.line.startswith("#49 exchange of forward step 2, ") and state.waits == [2]


def test_the_call_that_is_waited_for_is_named():
    record = "#6 exchange, done after 0.1 s\n" + RECORD.format(7) + "#8 exchange of forward, posted for 0.1 s\n"
    assert roll_call.waiting_call(record) == " in #7 exchange of forward step 2, 64 bytes to 1, 64 bytes from 3"
    assert roll_call.waiting_call("#6 exchange, done after 0.1 s\n") == ""


def test_passes_are_told_to_those_who_wait():
    store = dist.HashStore()
    assert roll_call.passes(store, 1, "1:2", [0, 2]) == []
    assert roll_call.passes(store, 0, "1:3", [1, 2]) == [(1, "1:2")]


def test_ranks_that_do_not_answer_are_named(monkeypatch):
    monkeypatch.setattr(roll_call, "SECONDS", 0.3)
    store = dist.HashStore()
    for rank in range(4):
        roll_call.sign(store, rank)
    assert not roll_call.is_asked(store)
    roll_call.answer(store, 2, at(7, 3))
    begin = time.monotonic()
    answers = roll_call.ask(store, 0, 4, at(7, 1))
    assert 0.25 < time.monotonic() - begin < 5 and roll_call.is_asked(store)
    text, blame = roll_call.report(0, 4, at(7, 1), answers)
    me = roll_call.process_of(store, 1)
    assert f"pid {os.getpid()} on " in me
    assert text == f"rank 1 ({me}) did not answer; rank 3 ({me}) did not answer; rank 2 waits, too, for rank 3"
    assert blame == [1, 3]


def test_ranks_that_have_not_come_as_far_are_named():
    store = dist.HashStore()
    roll_call.answer(store, 1, at(5))
    roll_call.answer(store, 2, at(7, record=RECORD.replace("forward step 2", "backward")))
    roll_call.answer(store, 3, at(8))
    text, blame = roll_call.report(0, 4, at(7, 1), roll_call.ask(store, 0, 4, at(7, 1)))
    assert blame == [1, 2]
    assert text.startswith("rank 1 answers and is at #5 exchange of forward step 2, 64 bytes to 1"), text
    assert "rank 2 answers and is at #7 exchange of backward, " in text and "rank 3 answers and made this call" in text, text


def test_many_ranks_make_no_endless_text():
    answers = roll_call.Answers({}, {}, {})
    text, blame = roll_call.report(0, 512, at(1), answers)
    assert len(text) < 400 and "and so for 503 more" in text and len(blame) == 511


@pytest.mark.parametrize("number, fate", [(signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "has ended"), (None, "")])
def test_processes_of_this_machine_are_looked_at(number, fate):
    """So nobody waits for the answer of one that is gone."""
    store = dist.HashStore()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        signed = [roll_call.sign(store, 1), store.get("weft: process of rank 1").decode()][1]
        process, namespace = signed.replace(f"pid {os.getpid()}", f"pid {child.pid}").split("\n")
        if number is not None:
            child.send_signal(number)
        ends = time.monotonic() + 5
        while roll_call.fate_of(process, namespace) != fate and time.monotonic() < ends:
            time.sleep(0.01)
        assert roll_call.fate_of(process, namespace) == fate
        assert roll_call.fate_of(process, "pid:[1]") == "" == roll_call.fate_of(f"pid {child.pid} on elsewhere", namespace)
        if fate:
            store.set("weft: process of rank 1", f"{process}\n{namespace}")
            begin = time.monotonic()
            text, blame = roll_call.report(0, 2, at(7, 1), roll_call.ask(store, 0, 2, at(7, 1)))
            assert text == f"rank 1 ({process}) {fate}" and blame == [1] and time.monotonic() - begin < roll_call.SECONDS
    finally:
        child.kill()
        child.wait()
