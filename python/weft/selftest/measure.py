"""Bandwidth and latency of each level of links, and the time of one step beside what the simulator predicts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from .. import _arrays, _core
from .._core import Machine, Mask, Packing
from ..attention import attention
from ..schedule import schedule_of
from ..sharding import shard
from ..simulate import simulate
from ..types import DTypeName, ScheduleName
from .world import World

DIM = 128
MASK = Mask(causal=True)
_FEW, _MOST_PEERS = 64, 16  # bytes of a message whose time is latency; peers of a call of many messages


@dataclasses.dataclass(frozen=True)
class Link:
    """A level of links as it was measured: all ranks send at once, each to one neighbour."""

    name: str
    ranks: int  # that it joins; 0: all
    latency: float
    message_seconds: float
    bandwidth: float  # bytes a second into each rank, while it sends as much


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of one attention by a schedule: measured by the slowest rank, and predicted."""

    schedule: str
    forward: float
    backward: float
    predicted_forward: float
    predicted_backward: float


@dataclasses.dataclass(frozen=True)
class Size:
    """The attention that is timed."""

    tokens: int
    heads: Tuple[int, int]
    dtype: DTypeName


def _seconds(world: World, call: Callable[[], Any], rounds: int, best: bool = False) -> float:
    """The median over rounds, or the best of them, of the slowest rank's time, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        world.comm.barrier()
        begin = time.perf_counter()
        call()
        world.finish()
        times.append(time.perf_counter() - begin)
    slowest = np.max(np.array(world.gathered(times[1:])), axis=0)
    return float(slowest.min() if best else np.median(slowest))


def _exchange(world: World, peers: Sequence[Tuple[int, int]], size: int, times: int) -> Callable[[], None]:
    """A call by which this rank sends `size` bytes to the first of each pair and receives as many from the second."""
    arrays = [world.tensor(np.zeros(size // 4, np.float32), "f32") for _ in range(2 * len(peers))]
    views = [_arrays.array(x, True) for x in arrays]
    sends = [(to, x) for (to, _), x in zip(peers, views)]
    receives = [(source, x) for (_, source), x in zip(peers, views[len(peers):])]
    stream = _arrays.stream_of(arrays[0]) if arrays else 0

    def call() -> None:
        world.comm.exchange(sends, receives, stream, times)
        world.finish()
        assert len(arrays) == len(views)  # they live as long as the call

    return call


def _level(world: World, name: str, ranks: int, neighbours: List[Tuple[int, int]], size: int) -> Link:
    """neighbours: (to, from) of this rank, the nearest first."""
    times = 20
    one = _seconds(world, _exchange(world, neighbours[:1], _FEW, times), 5, best=True) / times
    others = len(neighbours) - 1
    many = _seconds(world, _exchange(world, neighbours, _FEW, times), 5, best=True) / times if others else one
    large = _seconds(world, _exchange(world, neighbours[:1], size, 4), 5, best=True) / 4
    per_message = min(max(0.0, (many - one) / max(1, others)), one / 2)
    # Where the large message takes hardly longer than the small one, all of its time counts: a lower bound.
    moving = large - one if large > 2 * one else large
    return Link(name, ranks, one - per_message, per_message, size / moving)


def links(world: World, quick: bool) -> List[Link]:
    """One level for ranks of a node, one for ranks of different nodes, where there are such."""
    me, n, node = world.rank, world.ranks, world.node
    size = (1 << 26) if world.device != "cpu" else (1 << 21) if quick else (1 << 24)
    made = []
    if min(node, n) > 1:
        first, here = me - me % node, min(node, n)
        near = [(first + (me - first + d) % here, first + (me - first - d) % here) for d in range(1, min(here, _MOST_PEERS))]
        made.append(_level(world, "inside a node" if n > node else "all ranks", node if n > node else 0, near, size))
    if n > node:
        far = [((me + d * node) % n, (me - d * node) % n) for d in range(1, min(n // node, _MOST_PEERS))]
        made.append(_level(world, "between nodes", 0, far, size))
    return made


def _preset(world: World) -> Machine:
    """The preset whose kernels are most like those here; their rates are measured."""
    if world.device == "cpu":
        return Machine("cpu")
    import torch

    name = torch.cuda.get_device_name(world.device)
    for part, preset in (("H200", "h200-400g"), ("GB200", "gb200-nvl72"), ("B200", "gb200-nvl72"), ("A100", "a100-200g")):
        if part in name:
            return Machine(preset)
    return Machine("h100-400g")


def _memory(world: World) -> float:
    """Bytes of a rank."""
    if world.device == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / min(world.node, world.ranks)
    import torch

    return float(torch.cuda.mem_get_info(world.device)[1])


def _draws(world: World, tokens: int, size: Size) -> List[Any]:
    draw = np.random.default_rng(3)
    shapes = [(tokens, h, DIM) for h in (size.heads[0], size.heads[1], size.heads[1], size.heads[0])]
    return [world.tensor(draw.standard_normal(s, np.float32), size.dtype) for s in shapes]


def _alone(world: World, size: Size, rounds: int) -> Tuple[int, float, float]:
    """Tokens of one document with a rank's share of the pairs, and the time of its forward and backward on every rank at once."""
    tokens = max(64, math.ceil(size.tokens / math.sqrt(world.ranks)))
    q, k, v, dout = _draws(world, tokens, size)
    r = attention(q, k, v, [0, tokens], MASK)
    forward = _seconds(world, lambda: r._attend([tokens, size.heads[0], DIM], False, _arrays.stream_of(q)), rounds)
    return tokens, forward, _seconds(world, lambda: r.backward(dout), rounds)


def machine(world: World, measured: Sequence[Link], size: Size, quick: bool) -> Machine:
    """A machine with these links, and with the kernels of the preset made as fast as a rank of this one was."""
    base = _preset(world)
    it: Dict[str, Any] = json.loads(base.to_json())
    threads = world.device == "cpu" and world.comm.name == "threads"
    it.update(name="selftest", about=f"{world.ranks} ranks in nodes of {world.node}, {world.transport}",
              source="measured by weft.selftest", memory_bytes=_memory(world), processor_ranks=1, processor_kernels=1)
    if world.device == "cpu" and not threads:  # gloo moves bytes in threads of its own
        it.update(progress=True, copy_bandwidth=0, copy_seconds=0, exchange_seconds=0)
    if threads and measured:  # what comes is copied by the rank that waits for it
        it.update(copy_bandwidth=measured[0].bandwidth, copy_seconds=measured[0].message_seconds, exchange_seconds=0)
    levels = [dict(name=link.name, ranks=link.ranks, bandwidth=0 if threads else link.bandwidth, limits_sends=not threads,
                   latency=link.latency, message_seconds=0 if threads else link.message_seconds, source=it["source"])
              for link in measured]
    it["levels"] = levels or it["levels"][-1:]
    tokens, *seconds = _alone(world, size, 2 if quick else 5)
    found = Machine.from_json(json.dumps(it))
    for backward, took in enumerate(seconds):
        said = simulate(Packing([0, tokens]), MASK, ranks=1, schedule="all_gather", layout="contiguous", heads=size.heads,
                        dim=DIM, dtype=size.dtype, machine=found, backward=bool(backward))["seconds"]
        for rate in it["kernels"]:
            if rate["pass"] == ("backward" if backward else "forward"):
                rate["flops"] *= said / took
                for cost in ("tile_seconds", "row_seconds", "call_seconds"):
                    rate[cost] *= took / said
                rate["source"] = f"preset {base.name} times {said / took:.3g}: {size.dtype} of width {DIM}, weft.selftest"
    return Machine.from_json(json.dumps(it))


def _documents(tokens: int) -> Packing:
    return Packing([0, tokens // 2, tokens * 3 // 4, tokens])


def step(world: World, name: ScheduleName, on: Machine, size: Size, quick: bool) -> Step:
    """One attention by one schedule, forward and backward."""
    packing, rounds = _documents(size.tokens), 2 if quick else 5
    q, k, v, dout = (shard(x, world.comm, packing=packing, layout="balanced", mask=MASK)
                     for x in _draws(world, size.tokens, size))
    r = attention(q, k, v, packing, MASK, comm=world.comm, schedule=schedule_of(name), layout="balanced", layout_mask=MASK)
    shape = [len(q), size.heads[0], DIM]
    forward = _seconds(world, lambda: r._attend(shape, False, _arrays.stream_of(q)), rounds)
    backward = _seconds(world, lambda: r.backward(dout), rounds)
    said = [simulate(packing, MASK, ranks=world.ranks, schedule=schedule_of(name), layout="balanced", heads=size.heads, dim=DIM,
                     dtype=size.dtype, machine=on, backward=way)["seconds"] for way in (False, True)]
    return Step(name, forward, backward, said[0], said[1])


def kernel_library() -> str:
    """What Weft was built with, in words."""
    return "CUDA" if _core.has_cuda else "CPU kernels alone"
