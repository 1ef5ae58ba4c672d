"""Ranks over torch's process group of NCCL, each with a GPU or all on one: `nccl_worker.py FOLDER RANKS [BACKEND [WORDS..]]`.

The cases are the same over gloo with tensors of CPUs, which is how they are tried where there is no GPU. A job runs all of
them: to start CUDA and NCCL takes longer than most. Words select cases by name.
"""

import contextlib
import itertools
import sys

import torch
import torch.distributed as dist
import weft
import weft.torch

import group_cases
import processes
from group_cases import DEVICE, LAYOUTS, MASKS, SCHEDULES, SLICES, close, compare, run, tensors
from refusals import refused

DTYPES = {"f32": (torch.float32, 3e-5), "bf16": (torch.bfloat16, 3e-2), "f16": (torch.float16, 4e-3)}
LENGTHS = [37, 3, 100, 0, 64]
SHAPE = dict(heads=(4, 2), dim=64, dim_v=64)
CAUSAL, WINDOW = weft.Mask(causal=True), weft.Mask(causal=True, window=(29, 0))
SHOWN = {**{name: mask for name, mask in MASKS.items() if name not in ("cross", "slices")}, "full": weft.Mask()}


def packing_of(layout, ranks):
    """A pack without padding, or one whose documents dual_chunk can cut for so many ranks."""
    return weft.Packing.from_lengths(LENGTHS, multiple=2 * ranks if layout == "dual_chunk" else 1)


def schedules(ranks):
    """Those that so many ranks can run."""
    return {name: how for name, how in SCHEDULES.items() if ranks > 2 or "hybrid" not in name}


def matrix(name, how, dtype, ranks):
    """Every layout and mask in four ranks, in other numbers every layout and every mask."""
    def check():
        kind, tolerance = DTYPES[dtype]
        every = list(itertools.product(LAYOUTS, SHOWN))
        some = [(layout, list(SHOWN)[i % len(SHOWN)]) for i, layout in enumerate(LAYOUTS)]
        for layout, mask in every if ranks == 4 else some:
            compare(packing_of(layout, ranks), SHOWN[mask], how, layout=layout, dtype=kind, tolerance=tolerance, **SHAPE)
    return check


def cross_and_slices():
    cross = weft.Packing.from_lengths([70, 3, 20], [120, 3, 31])
    for how in (SCHEDULES["all_gather"], SCHEDULES["ring"], SCHEDULES["exact"]):
        compare(cross, MASKS["cross"], how, layout="contiguous", **SHAPE)
        compare(weft.Packing([0, 7, 10, 33, 61]), weft.Mask(slices=SLICES), how, **SHAPE)


def bits_of_one_rank():
    """all_gather in sequence order, for every dtype."""
    packing = packing_of("zigzag", 0)
    for (dtype, _), layout in itertools.product(DTYPES.values(), ("zigzag", "contiguous", "balanced", "placed")):
        for order in (SCHEDULES["all_gather"], SCHEDULES["all_gather_groups"]):
            whole = tensors(packing, dtype=dtype, **SHAPE)
            out = run(*whole, packing, CAUSAL, one_rank=True)[0]
            rows = [weft.torch.shard(x, packing, layout=layout, mask=CAUSAL) for x in whole]
            got = run(*rows, packing, CAUSAL, layout=layout, layout_mask=CAUSAL, **order)[0]
            assert torch.equal(got, weft.torch.shard(out, packing, layout=layout, mask=CAUSAL)), (dtype, layout, order)


def same_gradients_five_times(ranks):
    packing = packing_of("zigzag", 0)
    for dtype in (torch.float32, torch.bfloat16):
        rows = [weft.torch.shard(x, packing) for x in tensors(packing, dtype=dtype, **SHAPE)]
        for name, how in schedules(ranks).items():
            first = run(*rows, packing, CAUSAL, deterministic=True, **how)
            for _ in range(4):
                again = run(*rows, packing, CAUSAL, deterministic=True, **how)
                assert all(torch.equal(a, b) for a, b in zip(first, again)), (dtype, name)


def micro_sequences(ranks):
    """The K/V buffer: against the whole pack on one rank."""
    packing = weft.Packing([0, 100, 101, 512])
    micros = weft.prepare.MicroSequences(packing, ranks=ranks, micros=4)
    whole = tensors(packing, **SHAPE)
    sink = torch.linspace(-1, 1, 4, device=DEVICE[0])
    expected = run(*whole, packing, WINDOW, one_rank=True, sink=sink)
    here = torch.cat([torch.arange(*micros.rows(dist.get_rank(), m)) for m in range(4)]).to(DEVICE[0])
    for drop in (False, True):
        layer = weft.torch.MicroSequenceAttention(mask=WINDOW, drop=drop)
        for _ in range(2):  # buffers are used again
            leaves = [x[here].requires_grad_() for x in whole[:3]] + [sink.clone().requires_grad_()]
            out = layer(*leaves[:3], micros, sink=leaves[3])
            out.backward(whole[3][here])
        got = [out.detach(), *(x.grad for x in leaves[:3])]
        for g, e, name in zip(got, expected, ("out", "dq", "dk", "dv")):
            close(g, e[here], f"{name} of micro-sequences", 3e-5)
        total = leaves[3].grad.clone()
        dist.all_reduce(total)
        close(total, expected[4], "dsink of micro-sequences", 3e-5)


def micro_steps(ranks):
    """The same one micro-sequence at a time, with recomputation and two micro-batches under way."""
    packing = weft.Packing([0, 100, 101, 512])
    whole = tensors(packing, **SHAPE)
    expected = run(*whole, packing, WINDOW, one_rank=True)
    for drop, even_work in ((False, None), (True, None), (False, CAUSAL)):
        layer = weft.torch.MicroSequenceAttention(mask=WINDOW, drop=drop)
        flights = [weft.torch.MicroSequences(packing, 4, even_work=even_work, batch=n) for n in range(2)]
        leaves = [[x.clone().requires_grad_() for x in whole[:3]] for _ in flights]

        def loss(step, batch):
            return (layer(*(step.take(x) for x in leaves[batch]), step) * step.take(whole[3])).sum()

        with torch.no_grad():
            parts = [loss(step, 0) for step in flights[0].forward_steps()]
        assert len(parts) == 4
        kept = [[loss(step, n) for step in flight.forward_steps()] for n, flight in enumerate(flights)]
        for flight, losses in zip(flights, kept):
            for step in flight.backward_steps():
                step.backward(losses[step.micro])
        again = [x.clone().requires_grad_() for x in whole[:3]]
        leaves.append(again)
        weft.torch.MicroSequences(packing, 4, even_work=even_work).forward_backward(lambda step: loss(step, 2))
        cut = flights[0].cut
        here = torch.cat([torch.arange(*cut.rows(dist.get_rank(), m)) for m in range(4)])
        here = here[here < 512].to(DEVICE[0])
        for got in leaves:
            for x, e, name in zip(got, expected[1:4], ("dq", "dk", "dv")):
                close(x.grad[here], e[here], f"{name} of micro-sequences one at a time", 3e-5)


def meshes(ranks):
    """Groups that are parts of the world, along both sides of a mesh, one after another and in turn."""
    from torch.distributed.device_mesh import init_device_mesh

    if ranks < 4:
        return
    mesh = init_device_mesh(torch.device(DEVICE[0]).type, (2, ranks // 2), mesh_dim_names=("dp", "cp"))
    packing, place = packing_of("zigzag", 0), mesh.get_coordinate()
    for how in (SCHEDULES["ring"], SCHEDULES["all_gather"], SCHEDULES["all_to_all"], SCHEDULES["exact"]):
        compare(packing, CAUSAL, how, group=mesh["cp"], seed=place[0], **SHAPE)
        compare(packing, WINDOW, how, group=mesh["dp"], seed=place[1], **SHAPE)
        compare(packing, CAUSAL, how, **SHAPE)  # the world in between


def two_groups_at_once(ranks):
    """Calls over two groups of the same ranks, forwards and backwards interleaved; and some ranks of the world."""
    groups, packing = [dist.new_group(list(range(ranks))) for _ in range(2)], packing_of("zigzag", 0)
    whole = [tensors(packing, seed=n, **SHAPE) for n in range(2)]
    expected = [run(*x, packing, CAUSAL, one_rank=True) for x in whole]
    rows = [[weft.torch.shard(x, packing, group) for x in some] for some, group in zip(whole, groups)]
    leaves = [[x.clone().requires_grad_() for x in some[:3]] for some in rows]
    out = [weft.torch.context_parallel_attention(*x, packing, CAUSAL, group=group, schedule="ring")
           for x, group in zip(leaves, groups)]
    for n in (1, 0):
        out[n].backward(rows[n][3])
    for n, group in enumerate(groups):
        for g, e in zip([out[n].detach(), *(x.grad for x in leaves[n])], expected[n]):
            close(g, weft.torch.shard(e, packing, group), f"group {n}")
    odd = dist.new_group(list(range(1, ranks, 2)))
    if dist.get_rank() % 2:
        compare(packing, WINDOW, SCHEDULES["ring"], group=odd, **SHAPE)


def streams():
    """Work in a stream of its own, behind work that takes long."""
    packing = packing_of("zigzag", 0)
    gpu = DEVICE[0] != "cpu"
    for how in (SCHEDULES["ring"], SCHEDULES["all_gather"], SCHEDULES["exact"]):
        side = torch.cuda.Stream() if gpu else None
        if gpu:
            torch.cuda._sleep(20_000_000)
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if gpu else contextlib.nullcontext():
            compare(packing, CAUSAL, how, **SHAPE)
        if gpu:
            torch.cuda.current_stream().wait_stream(side)
        compare(packing, CAUSAL, how, **SHAPE)


def bytes_are_those_of_traffic(ranks):
    from weft.attention import rank_schedule
    from weft.schedule import schedule_of

    packing, comm = packing_of("zigzag", 0), weft.torch.communicator()
    placed = weft.Layout("zigzag", packing, ranks)
    rows = [weft.torch.shard(x, packing, layout="zigzag") for x in tensors(packing, **SHAPE)]
    for name, how in schedules(ranks).items():
        shape = (weft._core.DType.f32, 64, 64)
        made = rank_schedule(schedule_of(how["schedule"]), weft.Problem(packing, CAUSAL), placed, comm.rank, (4, 2), None, shape)
        want = [made.traffic(*shape, backward) for backward in (False, True)]
        comm.reset_traffic()
        run(*rows, packing, CAUSAL, layout="zigzag", **how)
        assert (comm.bytes_sent, comm.bytes_received) == tuple(
            sum(t[way] for t in want) for way in ("bytes_sent", "bytes_received")), name


def checked_ranks(ranks):
    """Checked ranks are right, are told what differs, and can go on."""
    packing, odd = packing_of("zigzag", 0), dist.get_rank() == 1
    for how in schedules(ranks).values():
        compare(packing, WINDOW, dict(how, checked=True), **SHAPE)
        rows = [weft.torch.shard(x, packing) for x in tensors(packing, **SHAPE)]
        with refused("attention (scale, softcap, sink, head_map): rank"):
            run(*rows, packing, CAUSAL, checked=True, softcap=20.0 if odd else 0.0, **how)
    compare(packing, CAUSAL, dict(schedule="ring", checked=True), **SHAPE)


def gathered(ranks):
    """weft.torch.all_gather, of every dtype and of no rows."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rows in (0, 1, 5):
            mine = torch.full((rows, 3), dist.get_rank(), device=DEVICE[0]).to(dtype)
            every = weft.torch.all_gather(mine)
            assert [x.tolist() for x in every] == [[[r] * 3] * rows for r in range(ranks)]


def cases(ranks):
    made = {f"{name} {dtype}": matrix(name, how, dtype, ranks)
            for (name, how), dtype in itertools.product(schedules(ranks).items(), DTYPES)}
    return {
        **made, "cross and slices": cross_and_slices, "bits of one rank": bits_of_one_rank,
        "same gradients": lambda: same_gradients_five_times(ranks), "micro-sequences": lambda: micro_sequences(ranks),
        "micro-sequences one at a time": lambda: micro_steps(ranks),
        "meshes": lambda: meshes(ranks), "two groups": lambda: two_groups_at_once(ranks), "streams": streams,
        "bytes": lambda: bytes_are_those_of_traffic(ranks), "gathered": lambda: gathered(ranks),
        "checked": lambda: checked_ranks(ranks),
    }


def rank(number, ranks, folder, gpu, words):
    if gpu:
        group_cases.DEVICE[0] = f"cuda:{torch.cuda.current_device()}"
    chosen = {name: check for name, check in cases(ranks).items() if not words or any(word in name for word in words)}
    processes.run_cases(number, chosen, folder)
    if gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    folder, ranks, *more = sys.argv[1:]
    backend, words = more[0] if more else "gloo", more[1:]
    ended = processes.fork(int(ranks), lambda number: rank(number, int(ranks), folder, "nccl" in backend, words), folder,
                           seconds=200, backend=backend)
    sys.exit(any(status for status, _ in ended))
