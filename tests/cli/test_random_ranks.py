"""Random problems on ranks that are processes, where a run goes on, and what ranks were at when somebody asks."""

import json
import os
import signal
import subprocess
import time


def handles(pid, number):
    """Whether the process has a handler: before that, the signal would end it."""
    with open(f"/proc/{pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_on_processes(weft):
    result = weft.ok("verify", "--comm", "processes", "--ranks", 3, "--random", 8, "--schedule", "all", "--seed", 5, json_file=True)
    assert "8 cases" in result.out and result.json["failed"] == 0 and result.json["cases"] == 8
    first, after = result.json["seeds"]
    assert first == 5 and after > 13  # problems of other numbers of ranks were passed over
    again = weft.ok("verify", "--comm", "processes", "--ranks", 3, "--random", 4, "--schedule", "ring", "--seed", after, json_file=True)
    assert again.json["seeds"][0] == after and again.json["cases"] == 4


def test_seeds_say_where_to_go_on(weft):
    assert weft.ok("verify", "--random", 10, "--seed", 100, json_file=True).json["seeds"] == [100, 110]
    result = weft("verify", "--random", 10_000_000, "--seed", 7, "--time-limit", 1, json_file=True)
    first, after = result.json["seeds"]
    assert first == 7 and after <= 7 + result.json["cases"] and f"--seed {after} goes on with them" in result.out


def test_sizes_of_large_ones(weft):
    result = weft.ok("verify", "--random", 4, "--large", 1, "--tokens-from", 150, "--tokens-up-to", 200, "--schedule", "ring", json_file=True)
    assert result.json["cases"] == 4 and result.json["failed"] == 0


def test_what_processes_cannot_do_is_refused(weft):
    for more, says in (([], "--schedule all"), (["--schedule", "all", "--time-limit", 3], "--time-limit 3 with processes"),
                       (["--schedule", "all", "--threads", 2], "--threads 2 with processes")):
        weft.refused("verify", "--comm", "processes", "--ranks", 2, "--random", 3, *more, says=[says])
    weft.refused("verify", "--comm", "processes", "--ranks", 9, "--random", 3, "--schedule", "all", says=["9 processes", "2 to 8"])
    weft.refused("verify", "--docs", "8", "--schedule", "ring", "--comm", "processes", says=["on one problem", "--random"])
    weft.refused("verify", "--random", 3, "--large", 1, "--tokens-from", 300, "--tokens-up-to", 200, says=["--tokens-from 300"])


def test_a_signal_asks_ranks_what_they_are_at(weft, tmp_path):
    run = subprocess.Popen([weft.command, "verify", "--random", "1000000", "--schedule", "ring", "--threads", "1", "--flight", "flight"],
                           cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        time.sleep(0.05)
        if handles(run.pid, signal.SIGUSR1):
            os.kill(run.pid, signal.SIGUSR1)
        if (tmp_path / "flight").exists() and (tmp_path / "flight").read_text():
            break
    assert run.poll() is None
    run.kill()
    run.wait()
    records = [json.loads(line) for line in (tmp_path / "flight").read_text().splitlines()]
    assert records and all(r["comm"] == "threads" and r["rank"] < r["ranks"] for r in records)
    assert any("of forward" in line or "of backward" in line for line in weft.ok("explain", "--flight", "flight").out.splitlines())
    weft.refused("explain", "--flight", "flight", "--docs", "8", says=["--flight", "--docs"])
    weft.refused("verify", "--random", 3, "--flight", "nowhere/file", says=["nowhere/file"])
