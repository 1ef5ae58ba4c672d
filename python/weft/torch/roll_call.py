"""Who keeps a group waiting: ranks ask each other over the group's store, beside the messages that do not come."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

_PROCESS = "weft: process of rank {}"  # keys of the store
_STATE = "weft: state of rank {}"
_PASS = "weft: pass of rank {}"
_ASKED = "weft: a rank asks for states"
SECONDS = 2.0  # that a rank has to answer
_PAUSE = 0.05
_SHOWN = 8  # ranks of a kind, in an error


class State(NamedTuple):
    """What a rank is at."""

    call: int  # the last one of the flight record, -1 before the first
    line: str  # of the record
    waits: List[int]  # the ranks that it waits for
    failed: bool = False
    fingerprint: str = ""  # of the pass that it is in: Communicator.fingerprint


class Answers(NamedTuple):
    """Of the other ranks."""

    states: Dict[int, State]
    processes: Dict[int, str]  # "pid 4711 on node7", of those that are known
    fates: Dict[int, str]  # of those without a state: what became of the process, if that is seen from here


def state_of(record: str, waits: List[int], failed: bool = False, fingerprint: str = "") -> State:
    """From the lines of a flight record."""
    line = record.splitlines()[-1] if record.strip() else ""
    number = re.match(r"#(\d+) ", line)
    return State(int(number.group(1)) if number else -1, line, waits, failed, fingerprint)


def waiting_call(record: str) -> str:
    """ " in #49 exchange of backward step 1, 64 bytes to 1, 64 bytes from 3", of the call that is waited for, if one is."""
    for line in record.splitlines():
        call, waits, _ = line.partition(", waiting for ")
        if waits:
            return f" in {call}"
    return ""


def passes(store: Any, rank: int, mine: str, peers: List[int]) -> List[Tuple[int, str]]:
    """Tells the others which pass this rank waits in, and returns those of some peers that have told theirs."""
    store.set(_PASS.format(rank), mine)
    told = [peer for peer in peers if store.check([_PASS.format(peer)])]
    return [(peer, store.get(_PASS.format(peer)).decode()) for peer in told]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def sign(store: Any, rank: int) -> None:
    """Says which process a rank is."""
    store.set(_PROCESS.format(rank), f"pid {os.getpid()} on {socket.gethostname()}\n{_namespace()}")


def process_of(store: Any, rank: int) -> Optional[str]:
    """ "pid 4711 on node7", if the rank has signed."""
    return _signed(store, rank)[0] or None


def _signed(store: Any, rank: int) -> Tuple[str, str]:
    key = _PROCESS.format(rank)
    process, _, namespace = store.get(key).decode().partition("\n") if store.check([key]) else ("", "", "")
    return process, namespace


def fate_of(process: str, namespace: str) -> str:
    """What became of a process of this machine: "has ended", "is stopped", or "" if it runs or cannot be seen."""
    known = re.fullmatch(r"pid (\d+) on (.*)", process)
    if not known or known.group(2) != socket.gethostname() or not namespace or namespace != _namespace():
        return ""
    try:
        with open(f"/proc/{known.group(1)}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "has ended"
    except (OSError, IndexError):
        return ""
    return {"Z": "has ended", "X": "has ended", "T": "is stopped", "t": "is stopped"}.get(letter, "")


def is_asked(store: Any) -> bool:
    """Whether a rank of the group waits for states."""
    return bool(store.check([_ASKED]))


def answer(store: Any, rank: int, state: State) -> None:
    store.set(_STATE.format(rank), json.dumps(state))


def ask(store: Any, rank: int, ranks: int, state: State) -> Answers:
    """The states of all other ranks that answer; the others have SECONDS, unless their processes are seen to be gone."""
    answer(store, rank, state)
    store.set(_ASKED, str(rank))
    missing = [peer for peer in range(ranks) if peer != rank]
    signed = {peer: _signed(store, peer) for peer in missing}
    states: Dict[int, State] = {}
    ends = time.monotonic() + SECONDS
    while True:
        for peer in missing:
            key = _STATE.format(peer)
            if store.check([key]):
                states[peer] = State(*json.loads(store.get(key)))
        missing = [peer for peer in missing if peer not in states]
        fates = {peer: fate_of(*signed[peer]) for peer in missing}
        if all(fates.values()) or time.monotonic() >= ends:
            processes = {peer: process for peer, (process, _) in signed.items() if process}
            return Answers(states, processes, {peer: fate for peer, fate in fates.items() if fate})
        time.sleep(_PAUSE)


def _call(state: State) -> str:
    """ "#49 exchange of backward step 1", without sizes and times, which ranks may differ in."""
    return state.line.partition(",")[0]


def _list(ranks: List[int], processes: Dict[int, str]) -> str:
    words = [f"{rank} ({processes[rank]})" if rank in processes else str(rank) for rank in ranks[:_SHOWN]]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}{more}"


def report(rank: int, ranks: int, mine: State, answers: Answers) -> Tuple[str, List[int]]:
    """In words: who does not answer, and whose calls are others; and the ranks that are to blame, the surest first."""
    parts: List[str] = []
    states, processes = answers.states, answers.processes
    missing = [peer for peer in range(ranks) if peer != rank and peer not in states]
    blame: List[int] = []
    for fate in ("has ended", "is stopped", ""):
        some = [peer for peer in missing if answers.fates.get(peer, "") == fate]
        parts += [f"{_list([peer], processes)} {fate or 'did not answer'}" for peer in some[:_SHOWN]]
        if len(some) > _SHOWN:
            parts.append(f"and so for {len(some) - _SHOWN} more")
        blame += some
    behind = [peer for peer, state in sorted(states.items()) if state.call < mine.call and not state.failed]
    other = [peer for peer, state in sorted(states.items()) if state.call == mine.call and _call(state) != _call(mine)]
    for peer in (behind + other)[:_SHOWN]:
        at = states[peer].line or "no call yet"
        parts.append(f"{_list([peer], processes)} answers and is at {at}")
    blame += behind + other
    rest = [peer for peer in sorted(states) if peer not in behind and peer not in other]
    waiting = [peer for peer in rest if states[peer].waits]
    if waiting:
        waited_for = sorted({peer for one in waiting for peer in states[one].waits})
        parts.append(f"{_list(waiting, {})} wait{'' if len(waiting) > 1 else 's'}, too, for {_list(waited_for, {})}")
    others = [peer for peer in rest if peer not in waiting]
    if others:
        parts.append(f"{_list(others, {})} answer{'' if len(others) > 1 else 's'} and made this call or gave up")
    return "; ".join(parts), blame
