"""Weft's transport over gloo by itself: two ranks that are threads, each with its own connections."""

import datetime
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
import weft
from weft.torch.transport import Transport

LIMIT = 20.0  # seconds that a rank waits for another


class Group:
    """What a transport uses of a process group. Remembers the tags of messages."""

    group_name = "none"

    def __init__(self, store, rank):
        self.gloo = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))
        self.tags = {"send": [], "recv": []}

    def rank(self):
        return self.gloo.rank()

    def size(self):
        return self.gloo.size()

    def _get_backend(self, device):
        if device.type != "cpu":
            raise RuntimeError("gloo alone")
        return self.gloo

    def send(self, tensors, peer, tag):
        self.tags["send"].append(tag)
        return self.gloo.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        self.tags["recv"].append(tag)
        return self.gloo.recv(tensors, peer, tag)


def on_two_ranks(body):
    """body(transport, rank) on both; what each returned or raised."""
    store, results = dist.HashStore(), [None, None]

    def run(rank):
        try:
            results[rank] = body(Transport(Group(store, rank), LIMIT), rank)
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_messages_are_told_apart_by_their_number():
    """Three of one size in flight at once, two of them in one exchange: each has a tag of its own, the same on both sides."""
    def body(transport, rank):
        sent = [np.full(4, 10 * rank + i, np.uint8) for i in range(3)]
        got = [np.zeros(4, np.uint8) for _ in range(3)]
        peer = 1 - rank
        first = transport.exchange([(peer, sent[0]), (peer, sent[1])], [(peer, got[0]), (peer, got[1])])
        second = transport.exchange([(peer, sent[2])], [(peer, got[2])])
        for handle in (first, second) if rank == 0 else (second, first):
            handle.wait()
        assert [int(x[0]) for x in got] == [10 * peer + i for i in range(3)]
        return transport.group.tags

    mine, theirs = on_two_ranks(body)
    assert isinstance(mine, dict) and isinstance(theirs, dict), (mine, theirs)
    assert mine["send"] == theirs["recv"] and mine["recv"] == theirs["send"]
    assert len(set(mine["send"])) == 3, mine


def test_an_abandoned_exchange_is_told_at_once():
    """A rank that gives up after an error closes its connections: the other does not wait for the time limit."""
    def body(transport, rank):
        data = [np.zeros(1 << 20, np.uint8) for _ in range(2)]
        transport.exchange([(1 - rank, data[0][:8])], [(1 - rank, data[1][:8])]).wait()  # connections are there
        begin = time.monotonic()
        if rank == 0:
            handle = transport.exchange([], [(1, data[0])])
            handle.abandon()
            with pytest.raises(weft.Error, match="rank 0 gave up an exchange"):
                transport.exchange([], [(1, data[0])])
        else:
            with pytest.raises(weft.Error, match="rank 1 lost rank 0"):
                transport.exchange([], [(0, data[1])]).wait()
        return time.monotonic() - begin

    seconds = on_two_ranks(body)
    assert all(isinstance(s, float) and s < LIMIT / 2 for s in seconds), seconds
