"""Threads that call Weft at the same time get what a single thread gets, bit for bit, or an error that says why not."""

import itertools
import random
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
import weft
import weft.torch

import processes

THREADS, CALLS = 8, 1000
SCHEDULES = ["all_gather", "ring", "all_to_all", "exact", "mesh"]
LENGTHS = [[0, 96], [0, 7, 10, 64], [0, 33, 80]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def group(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    weft.torch.clear_cache()
    dist.destroy_process_group()


def run_all(threads):
    """Runs functions at once; raises what the first of them raised."""
    failures = []

    def run(function):
        try:
            function()
        except BaseException as e:
            failures.append(e)

    running = [threading.Thread(target=run, args=(function,)) for function in threads]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]


class Mixed:
    """A call of one of many kinds, with its answer by one thread."""

    def __init__(self, number, group):
        choose = random.Random(number)
        self.cu, self.dtype = choose.choice(LENGTHS), choose.choice(DTYPES)
        self.kind = choose.choice(["group", "group", "group", "no group", "layer", "micro", "numpy", "executor"])
        self.schedule, self.causal, self.softcap = choose.choice(SCHEDULES), choose.random() < 0.7, choose.choice([0.0, 20.0])
        self.backward, self.group = choose.random() < 0.6, group
        generator = torch.Generator().manual_seed(number)
        heads, kv_heads, dim = choose.choice([(4, 2, 16), (2, 2, 32), (4, 1, 8)])
        self.tensors = [torch.randn(self.cu[-1], h, dim, generator=generator).to(self.dtype)
                        for h in (heads, kv_heads, kv_heads, heads)]
        self.packing = weft.Packing(self.cu)
        self.layer = weft.torch.ContextParallelAttention(
            causal=self.causal, schedule=self.schedule, softcap=self.softcap, group=group
        )
        self.wanted = self()

    def __call__(self):
        *inputs, dout = self.tensors
        inputs = [x.detach().requires_grad_(self.backward) for x in inputs]
        if self.kind in ("numpy", "executor"):
            return self._plain(inputs, dout)
        if self.kind == "layer":
            out = self.layer(*inputs, self.packing)
        elif self.kind == "micro":
            micros = weft.prepare.MicroSequences(self.packing, ranks=1, micros=2, pad=True)
            if micros.padding:
                micros = weft.prepare.MicroSequences(self.packing, ranks=1, micros=1)
            out = MICRO(*inputs, micros)
        else:
            out = weft.torch.context_parallel_attention(
                *inputs, self.packing, causal=self.causal, softcap=self.softcap, schedule=self.schedule,
                group=self.group, one_rank=self.kind == "no group")
        if not self.backward:
            return [out]
        out.backward(dout)
        return [out.detach(), *(x.grad for x in inputs)]

    def _plain(self, inputs, dout):
        comm = weft.torch.communicator(self.group) if self.kind == "executor" else None
        with torch.no_grad():
            r = weft.attention(*inputs, cu_seqlens_q=self.cu, causal=self.causal, softcap=self.softcap, comm=comm,
                               schedule=self.schedule)
            return [r.out, r.lse, *(r.backward(dout)[:3] if self.backward else ())]

    def check(self):
        for got, wanted in zip(self(), self.wanted):
            assert torch.equal(got, wanted), f"{self.kind} {self.schedule} {self.dtype} {self.cu} backward={self.backward}"


MICRO = weft.torch.MicroSequenceAttention()


@pytest.mark.long
def test_mixed_calls_have_the_bits_of_one_thread(group):
    kinds = [Mixed(number, group) for number in range(150)]

    def calls(seed):
        choose = random.Random(seed)
        for _ in range(CALLS):
            choose.choice(kinds).check()

    run_all([lambda seed=seed: calls(seed) for seed in range(THREADS)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_question_with_other_numbers(schedule, group):
    """What threads share most: one executor, asked by all of them."""
    packing = weft.Packing([0, 200, 640])
    inputs = [[torch.randn(640, h, 64, generator=torch.Generator().manual_seed(10 * t + i)).bfloat16()
               for i, h in enumerate((4, 2, 2))] for t in range(4)]
    answers = [weft.torch.context_parallel_attention(*x, packing, causal=True, schedule=schedule) for x in inputs]

    def calls(t):
        for _ in range(40):
            got = weft.torch.context_parallel_attention(*inputs[t], packing, causal=True, schedule=schedule)
            assert torch.equal(got, answers[t])

    run_all([lambda t=t: calls(t) for t in range(4)])


def test_forgetting_meanwhile(group):
    kinds = [Mixed(number, group) for number in range(40)]
    over = threading.Event()

    def forget():
        while not over.is_set():
            weft.torch.clear_cache()
            time.sleep(1e-3)

    def calls(seed):
        for kind in itertools.islice(itertools.cycle(kinds), seed, 100 + seed):
            kind.check()

    forgets = threading.Thread(target=forget)
    forgets.start()
    try:
        run_all([lambda seed=seed: calls(seed) for seed in range(4)])
    finally:
        over.set()
        forgets.join()


def test_an_error_of_one_thread_leaves_the_others(group):
    """A call that is refused in the midst of others' calls must not end the group."""
    kind, over = Mixed(1, group), threading.Event()
    x = torch.ones(96, 3, 8)

    def wrong():
        while not over.is_set():
            with pytest.raises(weft.Error):
                weft.torch.context_parallel_attention(x, x[:, :2], x[:, :2], weft.Packing([0, 96]), group=group)

    def right():
        try:
            for _ in range(60):
                kind.check()
        finally:
            over.set()

    run_all([wrong, right])
    kind.check()


def test_a_result_of_all_threads(group):
    """One executor whose backward all threads call."""
    x, dout = (torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    r = weft.attention(x, x, x, cu_seqlens_q=[0, 64], causal=True, comm=weft.torch.communicator(group), schedule="ring")
    douts = [dout * t for t in range(4)]
    wanted = [r.backward(d) for d in douts]

    def calls(t):
        for _ in range(100):
            assert all(torch.equal(a, b) for a, b in zip(r.backward(douts[t])[:3], wanted[t][:3]))

    run_all([lambda t=t: calls(t) for t in range(4)])


def test_one_cache_of_keys_for_all_threads():
    x = np.random.default_rng(0).standard_normal((64, 2, 16), np.float32)
    cache = weft.prepare.KvCache(np.zeros_like(x), np.zeros_like(x), offsets=[0, 32, 64])
    cache.append([8, 8], x[:16], x[:16])
    wanted = cache.attend([2, 2], x[:4])

    def reads():
        for _ in range(300):
            np.testing.assert_array_equal(cache.attend([2, 2], x[:4]), wanted)

    def writes():
        for _ in range(300):
            cache.append([0, 0], x[:0], x[:0])
            cache.keep(0, cache.used(0))

    run_all([reads, reads, writes])


# --- Several ranks: the order of calls must be the same on all of them ---


def test_two_threads_of_a_rank_are_refused():
    inside, tried = threading.Event(), threading.Event()
    said = []

    def rank(comm):
        if comm.rank == 1:
            tried.wait(60)
            comm.barrier()
            return

        def second():
            inside.wait(60)
            while not said:  # until the first one is in its call
                try:
                    x = torch.ones(8, 2, 4)
                    weft.torch.context_parallel_attention(x, x, x, weft.Packing([0, 16]), group=comm, layout="contiguous")
                except weft.Error as e:
                    said.append(e)
            tried.set()

        thread = threading.Thread(target=second)
        thread.start()
        with comm.turn():
            inside.set()
            comm.barrier()
        thread.join()

    weft.spawn(2, rank)
    assert "two threads are in calls over one communicator of 2 ranks" in said[0].problem
    assert "a group of its own" in said[0].remedy


@pytest.mark.long
def test_two_threads_of_a_process_are_refused(tmp_path):
    processes.start("signals_worker.py", tmp_path, "ring", "threads", seconds=120)
    said = (tmp_path / "rank0.txt").read_text()
    assert "two threads are in calls over one communicator of 2 ranks" in said and said.splitlines()[-1] == "right", said


def test_threads_that_follow_each_other():
    """As those of autograd do."""
    x = torch.randn(64, 2, 8, generator=torch.Generator().manual_seed(1))
    packing = weft.Packing([0, 20, 64])
    wanted = weft.torch.context_parallel_attention(x, x, x, packing, causal=True, one_rank=True)

    def rank(comm):
        mine, out = weft.torch.shard(x, packing, comm), []
        for _ in range(5):
            thread = threading.Thread(target=lambda: out.append(
                weft.torch.context_parallel_attention(mine, mine, mine, packing, causal=True, group=comm)))
            thread.start()
            thread.join()
        return [weft.torch.unshard(o, packing, comm) for o in out]

    for got in weft.spawn(2, rank)[0]:
        torch.testing.assert_close(got, wanted)


def test_a_thread_that_a_rank_leaves_behind():
    """The communicator lasts until its call is over."""
    threads = []

    def rank(comm):
        left = threading.Event()

        def late():
            try:
                with comm.turn():
                    left.set()
                    comm.barrier()
            except weft.Error:
                pass  # others may have left, or this rank

        threads.append(threading.Thread(target=late))
        threads[-1].start()
        left.wait(60)

    weft.spawn(4, rank)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
