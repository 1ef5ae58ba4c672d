"""What a soak does, one small job at a time: a function of a generator of random numbers, which raises if something is wrong.

Each is a kind of JOBS, with a weight; what a job draws depends on its seed alone. What a job that never runs on a GPU needs is
imported there: a machine with one may have no hypothesis.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import weft
import weft.torch

import checked
import disagreement_worker
import failing_worker
import problem
import processes
import test_checked
import test_errors
import test_failing
import test_options
import test_rows
from refusals import refused

SOURCE = Path(__file__).parents[3]


class Setting:
    """What the jobs of a soak share: the folder of the build, and the device of tensors."""

    def __init__(self, build, device):
        self.build, self.device = Path(build), device
        self.compared = 0  # problems that programs compared, for the table


def attention(draw, setting):
    problem.check(problem.drawn(draw, "weft", setting.device))


def torch_operator(draw, setting):
    problem.check(problem.drawn(draw, "torch", setting.device))


def trees(draw, setting):
    problem.check(problem.of_tree(draw, draw.choice(["weft", "torch"]), setting.device))


def trees_in_steps(draw, setting):
    import test_tree_micro

    test_tree_micro.test_cross_entropy(draw.randrange(10**6), draw.choice([1, 2, 5, 9]), draw.random() < 0.5)


def any_order(draw, setting):
    """Shard, attend, relayout and backward of torch's operators in any order."""
    import test_any_order

    some, layouts = (lambda: draw.randrange(4)), test_any_order.LAYOUTS
    steps = [draw.choice([
        lambda: ("shard", draw.choice(layouts)),
        lambda: ("attend", some(), draw.choice(test_any_order.SCHEDULES), draw.random() < 0.5),
        lambda: ("relayout", some(), draw.choice(layouts)), lambda: ("add", some(), some()), lambda: ("backward", some()),
        lambda: ("whole", some())])() for _ in range(draw.randint(1, 12))]
    lengths = [draw.randrange(draw.choice([10, 60])) for _ in range(draw.randint(1, 5))]
    test_any_order.check((lengths or [1], draw.randint(1, 4), steps) if any(lengths) else ([3], 2, steps))


def rows(draw, setting):
    for cu, padded, tokens, ranks, layout in test_rows.packings(draw.randrange(2**31), 8):
        offsets, begins = test_rows.offsets_on(setting.device, cu, padded, draw.randrange(6))
        x, what = torch.randn(tokens, 3, device=setting.device), (cu, padded, tokens, ranks, layout)
        options = dict(cu_seqlens_padded=begins, layout=layout)
        for rank in range(ranks):
            held = test_rows.tokens_of(padded, tokens, ranks, rank, layout)
            local = test_rows.rows.shard(x, offsets, ranks, rank, **options)
            test_rows.same(local, test_rows.take(x, held), what)
            at = {t: row for row, t in enumerate(held) if t >= 0}
            test_rows.same(test_rows.rows.unshard(local, offsets, ranks, rank, tokens=tokens, **options),
                           test_rows.take(local, [at.get(t, -1) for t in range(tokens)]), what)


def kv_buffer(draw, setting):
    import test_prepare

    ranks, micros = draw.randint(1, 4), draw.randint(1, 4)
    total = ranks * micros * draw.randint(1, 40)
    offsets = sorted({0, total, *(draw.randrange(total + 1) for _ in range(draw.randrange(6)))})
    mask = draw.choice([{}, dict(window=(draw.randrange(30), 0)), dict(chunk_size=draw.randint(1, 30))])
    test_prepare.check_kv_buffer(offsets, ranks, micros, dict(causal=True, **mask), draw.random() < 0.5, draw.randrange(2**31))


def misuse(draw, setting):
    """weft.Error with a remedy, and nothing else."""
    for _ in range(10):
        call, *parts = test_errors.BAD[draw.choice(list(test_errors.BAD))]
        with refused(*parts):
            call()
    name, value = draw.choice(test_options.CASES)
    draw.choice([test_options.test_wrong_kinds, test_options.test_wrong_kinds_in_torch])(name, value, refused)


def checked_ranks_disagree(draw, setting):
    test_checked.test_case(draw.choice(list(checked.CASES)))


def ranks_disagree(draw, setting):
    """Without checks: every rank raises, and is told what differs and on which rank."""
    ranks, odd = disagreement_worker.RANKS, draw.randrange(disagreement_worker.RANKS)
    way, (given, named, everybody) = draw.choice(list(disagreement_worker.WAYS.items()))
    schedule = draw.choice(disagreement_worker.SCHEDULES)

    def rank(comm):
        try:
            options = {"schedule": schedule, **everybody, **(given if comm.rank == odd else {})}
            disagreement_worker.attend(comm, **options)
        except weft.Error as e:
            return str(e)

    for rank_, told in enumerate(weft.spawn(ranks, rank, time_limit=disagreement_worker.LIMIT)):
        assert told, f"{way}, {schedule}, rank {odd} is odd: rank {rank_} was not told"
        assert named in told and re.search(rf"ranks? ([\d, ]*|\d and ){odd}\b", told), f"{way}, {schedule}: {told}"


class Unwell(Exception):
    pass


def ranks_fail(draw, setting):
    """One raises, leaves or is late after some calls: the others raise an Error, soon."""
    ranks, calls, way = draw.randint(2, 6), draw.randrange(5), draw.choice(["raises", "leaves", "late"])
    lost, schedules = draw.randrange(ranks), [draw.choice(["all_gather", "ring", "all_to_all", "exact"]) for _ in range(6)]
    whole = np.random.default_rng(draw.randrange(2**31)).standard_normal((draw.randint(40, 400), 4, 8), np.float32)
    cu, checks, told = [0, 17, len(whole)], draw.random() < 0.5, {}

    def rank(comm):
        mine = weft.shard(whole, comm, cu_seqlens=cu)
        for number, schedule in enumerate(schedules):
            if comm.rank == lost and number == calls:
                if way == "raises":
                    raise Unwell
                if way == "leaves":
                    return
                time.sleep(1.5)
            try:
                done = weft.attention(mine, mine, mine, cu_seqlens=cu, causal=True, comm=comm, schedule=schedule, checked=checks)
                done.backward(mine)
            except weft.Error as e:
                told[comm.rank] = str(e)
                raise

    begin = time.monotonic()
    with contextlib.suppress(weft.Error, Unwell):
        weft.spawn(ranks, rank, time_limit=0.5 if way == "late" else 30.0)
    silent = [r for r in range(ranks) if r != lost and r not in told]
    assert not silent, f"rank {lost} {way} at call {calls} of {schedules}: ranks {silent} of {ranks} have no error"
    assert time.monotonic() - begin < 20, f"rank {lost} {way} at call {calls} of {schedules}: {time.monotonic() - begin:.1f} s"


def _program(words, seconds=280, **environment):
    """stdout of a program that must end well, without threads of its own."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=seconds,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    said = (done.stdout + done.stderr)[-3000:]
    assert done.returncode == 0, f"{' '.join(map(str, words))} ended with {done.returncode}\n{said}"
    return done.stdout


VERIFY = [
    ["--random", 400], ["--random", 60, "--schedule", "all"], ["--random", 40, "--schedule", "all", "--checked"],
    ["--random", 60, "--schedule", "all", "--trees"], ["--random", 20, "--micro", 3], ["--random", 30, "--micro", 2, "--checked"],
    ["--random", 1, "--large", 1, "--tokens-from", 1000, "--tokens-up-to", 6000, "--schedule", "ring,exact"],
    ["--random", 40, "--trees", "--schedule", "all", "--head-groups", 2, "--key-order", "rank"],
    ["--random", 30, "--schedule", "hybrid", "--outer", "ring,all_gather"],
    ["--random", 15, "--ranks", 3, "--schedule", "all", "--comm", "processes"],
]


def verify(draw, setting):
    """The command on random problems, in a process of its own."""
    words = draw.choice(VERIFY)
    if setting.device != "cpu":  # whose kernels refuse some dtypes, so one large problem may be none
        words = [*draw.choice([w for w in VERIFY if "--large" not in w and "processes" not in w]), "--kernel",
                 draw.choice(["cuda.portable", "cuda.sm90"])]
    threads = [] if "processes" in words else ["--threads", 1]
    said = _program([setting.build / "weft", "verify", *words, *threads, "--seed", draw.randrange(10**9)])
    setting.compared += int(re.search(r"^([\d,]+) cases, ", said, re.M)[1].replace(",", ""))


def mpi(draw, setting):
    ranks = draw.choice([2, 3])
    words = ["verify", "--comm", "mpi", "--random", 20, "--ranks", ranks, "--schedule", "all", "--seed", draw.randrange(10**9)]
    _program([SOURCE / "tools/mpirun.sh", "-np", ranks, setting.build / "weft", *words])


def fault_plans(draw, setting):
    """C++ ranks over a transport that does wrong on purpose."""
    _program([setting.build / "tests/unit_run", "--gtest_filter=Faults.Checked*"], WEFT_FAULT_PLANS="40",
             WEFT_FAULT_SEED=str(draw.randrange(10**9)))


def processes_fail(draw, setting):
    """Four processes over gloo (NCCL on a GPU), of which one is killed, stopped or given another packing at some moment."""
    seed, folder = draw.randrange(10**6), tempfile.mkdtemp(prefix="soak")
    try:
        backend = "gloo" if setting.device == "cpu" else "cpu:gloo,cuda:nccl"
        (line,) = processes.start("failing_worker.py", folder, "random", seed, seed + 1, backend, seconds=150).splitlines()
        said = failing_worker.json.loads(line)
        test_failing.check_random(said) if backend == "gloo" else test_failing.check_random_on_gpus(said, seconds=40)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def selftest(draw, setting):
    _program([sys.executable, "-m", "weft.selftest", "--quick", "--device", setting.device, "--ranks", draw.choice([2, 3, 4])])


# kind: (function, jobs of this kind in a round, whether it runs on a GPU)
JOBS = {
    "attention": (attention, 24, True), "torch_operator": (torch_operator, 10, True), "trees": (trees, 5, True),
    "trees_in_steps": (trees_in_steps, 2, False), "any_order": (any_order, 6, False), "rows": (rows, 3, True),
    "kv_buffer": (kv_buffer, 6, False), "misuse": (misuse, 4, False),
    "checked_ranks_disagree": (checked_ranks_disagree, 3, False), "ranks_disagree": (ranks_disagree, 5, True),
    "ranks_fail": (ranks_fail, 5, False), "verify": (verify, 6, True), "fault_plans": (fault_plans, 1, False),
    "mpi": (mpi, 1, False), "processes_fail": (processes_fail, 1, True), "selftest": (selftest, 1, True),
}
