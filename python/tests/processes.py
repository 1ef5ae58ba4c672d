"""Ranks that are processes: gloo, over a rendezvous file.

A test starts `python worker.py FOLDER ...`; the worker imports what it needs once and forks the ranks. What a rank prints
or raises ends in FOLDER/rank<r>.txt. No rank outlives the time limit.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
# What gloo says where it has lost a connection while a group was made, as it does now and then. The other ranks then wait for
# ever, and nothing has been tested. A worker that ends for that reason, and for no other, is started once more.
_LOST, _LOST_STATUS = "connectFullMesh failed", 75


def start(worker, folder, *arguments, seconds=300):
    """Runs a worker of a folder of tests; its stdout. An AssertionError with what the ranks said if it fails."""
    (program,) = HERE.glob(f"*/{worker}")
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    for again in (False, True):
        done = subprocess.run([sys.executable, program, folder, *map(str, arguments)], capture_output=True, text=True,
                              timeout=seconds, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
        if done.returncode == 0:
            break
        if again or done.returncode != _LOST_STATUS:
            said = "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(Path(folder).glob("rank*.txt")))
            raise AssertionError(f"{worker} ended with {done.returncode}\n{done.stdout}{done.stderr}\n{said}")
        print(f"{worker}: gloo has lost a connection, once more")
        for file in Path(folder).rglob("rendezvous"):
            file.unlink()
    return done.stdout


def results(worker, folder, *arguments):
    """What each rank of a worker (a module) said of each of its CASES: None, or what was wrong."""
    import pytest

    try:
        start(f"{worker.__name__}.py", folder, *arguments)
    except AssertionError as error:
        print(error)  # once, and not with each test that would have looked at the results
        pytest.fail(f"{worker.__name__}.py failed; what its ranks said stands with the first of these tests", pytrace=False)
    return [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(worker.RANKS)]


def check(results, case):
    wrong = [said[case] for said in results if said[case] is not None]
    assert not wrong, "\n".join(wrong)


def run_cases(rank, cases, folder):
    """What a rank says of its cases, {name: function}: None, or what was wrong. One that fails does not end the others."""
    results = {}
    for name, check in cases.items():
        begin = time.perf_counter()
        try:
            check()
            results[name] = None
        except Exception as error:
            if _LOST in str(error):
                raise
            results[name] = f"rank {rank}: {traceback.format_exc()}"
        print(f"{time.perf_counter() - begin:.2f} s {name}", flush=True)
    (Path(folder) / f"results{rank}.json").write_text(json.dumps(results))


def fork(ranks, fn, folder, *, seconds, limit=60.0, full_exit=False, backend="gloo", stops=None):
    """Runs fn(rank) in `ranks` processes; a list of (exit status, seconds it took), -9 for those that had to be ended.

    full_exit: processes end as a user's do, with all that Python does then (seconds, with torch loaded).
    stops: a rank that will not end by itself, and is ended when all the others have.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    begin, running, ended, lost = time.monotonic(), {}, {}, False
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            status = _rank(rank, ranks, fn, folder, limit, backend)
            sys.exit(status) if full_exit else os._exit(status)
        running[pid] = rank
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[running.pop(pid)] = (os.waitstatus_to_exitcode(status), time.monotonic() - begin)
            lost = lost or os.waitstatus_to_exitcode(status) == _LOST_STATUS
        elif lost or time.monotonic() - begin > seconds or list(running.values()) == [stops]:
            for late in running:
                os.kill(late, signal.SIGKILL)
        else:
            time.sleep(0.01)
    if lost:
        sys.exit(_LOST_STATUS)
    return [ended[rank] for rank in range(ranks)]


def _rank(rank, ranks, fn, folder, limit, backend):
    """limit: seconds that a rank of Weft waits for another."""
    import torch
    import torch.distributed as dist
    import weft
    import weft.torch

    out = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        faulthandler.enable()
        torch.set_num_threads(1)
        weft.set_cpu_threads(1)
        if "nccl" in backend:
            gpus = torch.cuda.device_count()
            if gpus < ranks:
                # NCCL refuses two ranks on one GPU of one host: each says that it is on another, and they talk by sockets.
                os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
            torch.cuda.set_device(rank % gpus)
            os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"  # as docs/communicators.md advises
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
        weft.torch.communicator(time_limit=limit)
        fn(rank)
        dist.destroy_process_group()
        return 0
    except BaseException as error:
        traceback.print_exc()
        return _LOST_STATUS if _LOST in str(error) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
