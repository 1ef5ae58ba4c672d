"""Ranks that fail, leave or never come, and transports written in Python."""

import gc
import sys
import threading
import time

import numpy as np
import pytest
import weft

X = np.random.default_rng(0).standard_normal((8, 2, 4), np.float32)
CU = [0, 3, 8]


def _uses(comm, buffer, r, micros):
    return (lambda: comm.rank, lambda: comm.ranks, lambda: comm.name, comm.barrier, lambda: comm.split(0, 0),
            lambda: comm.bytes_sent, lambda: weft.attention(X, X, X, CU, comm=comm), lambda: r.backward(r.out),
            lambda: buffer.begin(micros), lambda: buffer.missing(0), lambda: buffer.forward(0, X, X, X),
            lambda: weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4))


def test_a_communicator_ends_with_spawn(refused):
    kept = []

    def rank(comm):
        mine = weft.shard(X, comm, cu_seqlens=CU)
        buffer = weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4)
        kept.append((comm, comm.split(0, comm.rank), buffer, weft.attention(mine, mine, mine, cu_seqlens_q=CU, comm=comm)))

    weft.spawn(2, rank)
    micros = weft.prepare.MicroSequences(weft.Packing(CU), ranks=2, micros=1)
    for comm, split, buffer, r in kept:
        for use in _uses(comm, buffer, r, micros):
            with refused("the ranks of this communicator have ended", "inside"):
                use()
        with refused("of a split"):
            split.barrier()
        assert buffer.bytes_held > 0
    del comm, split, buffer, r
    kept.clear()
    gc.collect()


def test_an_exception_of_one_rank_is_raised_while_others_wait():
    class Mine(Exception):
        pass

    def rank(comm):
        if comm.rank == 1:
            raise Mine("it was me")
        comm.barrier()

    begin = time.perf_counter()
    with pytest.raises(Mine, match="it was me") as caught:
        weft.spawn(3, rank)
    assert time.perf_counter() - begin < 20
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["on rank 1 of weft.spawn"]


def test_an_exception_while_others_attend():
    def rank(comm):
        mine = weft.shard(X, comm, cu_seqlens=CU)
        if comm.rank == 2:
            raise KeyError("lost")
        return weft.attention(mine, mine, mine, cu_seqlens_q=CU, comm=comm, schedule="ring")

    with pytest.raises(KeyError, match="lost"):
        weft.spawn(4, rank)


def test_an_error_of_weft_names_the_rank(refused):
    def rank(comm):
        if comm.rank == 1:
            raise weft._arrays.error("a problem of mine", "a remedy")
        comm.barrier()

    with refused("rank 1: a problem of mine; a remedy"):
        weft.spawn(2, rank)
    try:
        weft.spawn(2, rank)
    except weft.Error as e:
        assert str(e.__cause__) == "a problem of mine; a remedy"
        assert e.__cause__.__traceback__.tb_frame.f_code.co_name == "rank"


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()])
def test_ends_that_are_no_exceptions(end):
    def rank(comm):
        if comm.rank == 0:
            raise end
        comm.barrier()

    with pytest.raises(type(end)):
        weft.spawn(2, rank)


def test_a_rank_that_returns_too_early(refused):
    with refused("has left"):
        weft.spawn(2, lambda comm: comm.barrier() if comm.rank else None)


def test_a_rank_that_never_comes(refused):
    come = threading.Event()

    def rank(comm):
        if comm.rank == 0:
            come.wait(20)
        else:
            try:
                comm.barrier()
            finally:
                come.set()

    with refused("rank 1 waited 0.2 seconds", "for rank 0"):
        weft.spawn(2, rank, time_limit=0.2)


def test_spawn_inside_spawn():
    def outer(comm):
        return weft.spawn(2, lambda inner: (comm.rank, inner.rank))

    assert weft.spawn(2, outer) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


# --- A transport written in Python ---


class Transport:
    """Of one rank, which moves nothing, or of the first of two, whose messages fail where it is told to."""

    def __init__(self, fails):
        self.fails, self.abandoned = fails, 0

    def exchange(self, sends, receives):
        if self.fails == "exchange":
            raise OSError("no exchange")
        return self

    def wait(self):
        if self.fails in ("wait", "wait and abandon"):
            raise OSError("no wait")

    def abandon(self):
        self.abandoned += 1
        if self.fails == "wait and abandon":
            raise OSError("no abandon")


def _attend_by(transport, ranks):
    comm = weft._core.python_communicator(0, ranks, "test", transport)
    mine = weft.shard(X, comm, cu_seqlens=CU)
    return weft.attention(mine, mine, mine, cu_seqlens_q=CU, comm=comm, schedule="all_gather")


def test_a_transport_that_works():
    np.testing.assert_array_equal(_attend_by(Transport(None), 1).out, weft.attention(X, X, X, CU).out)


@pytest.mark.parametrize("fails", ["exchange", "wait", "wait and abandon"])
def test_an_exception_of_a_transport_comes_through(fails, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda e: unraisable.append(str(e.exc_value)))
    transport = Transport(fails)
    with pytest.raises(OSError, match=f"no {fails.split()[0]}"):
        _attend_by(transport, 2)
    assert transport.abandoned == (fails != "exchange")
    assert unraisable == (["no abandon"] if "abandon" in fails else [])


def test_no_rank_of_a_transport(refused):
    with refused("there is no rank 2 of 2"):
        weft._core.python_communicator(2, 2, "test", Transport(None))
