"""K and V that each rank makes of rows that move (expand=): against K and V that are given, and what is refused."""

import itertools
import random
import threading
import weakref
from functools import partial

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch
from torch.nn import functional as F
from weft.sharding import layout_of

attend, LONG = weft.torch.context_parallel_attention, pytest.mark.long
WIDTH, ROPE, DIM, DIM_V = 6, 2, 4, 3
SCHEDULES = [("all_gather", {}), ("all_gather", {"key_order": "rank"}), ("all_gather", {"head_groups": 2}), ("ring", {}),
             ("ring", {"ranks_per_step": 1}), ("all_to_all", {}), ("all_to_all", {"head_groups": 2}), ("exact", {}),
             ("exact", {"stages": 1}), ("exact", {"head_groups": 2})]


def schedules(ranks):
    hybrid = [("hybrid", {"ulysses": 2}), ("hybrid", {"ulysses": 2, "outer": "all_gather", "head_groups": 2})]
    return SCHEDULES + (hybrid if ranks % 2 == 0 else [])


class Up(torch.nn.Module):
    """A latent to K and V as multi-head latent attention does: a norm, a projection, and rotated numbers that heads share."""

    def __init__(self, heads, dtype=torch.float64, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.heads = heads
        self.scale = torch.nn.Parameter((1 + torch.rand(WIDTH - ROPE, generator=generator)).to(dtype))
        self.up = torch.nn.Parameter(torch.randn(heads, DIM - ROPE + DIM_V, WIDTH - ROPE, generator=generator).to(dtype) / 2)
        self.most_heads = self.calls = 0

    def forward(self, rows, positions, heads=slice(None)):
        latent = F.rms_norm(rows[:, :-ROPE], (WIDTH - ROPE,), self.scale, 1e-6)
        k, v = torch.einsum("tw,hdw->thd", latent, self.up[heads]).split([DIM - ROPE, DIM_V], -1)
        turn = torch.polar(torch.ones(len(rows), dtype=torch.float64), 0.1 * positions.double())
        pair = rows[:, -ROPE:].double()
        turned = torch.view_as_real(torch.view_as_complex(pair.contiguous()) * turn).to(rows.dtype)
        self.most_heads, self.calls = max(self.most_heads, k.shape[1]), self.calls + 1
        return torch.cat((k, turned[:, None].expand(-1, k.shape[1], -1)), -1), v


class Problem:
    """Tensors of a whole pack, NaN where it is padding, and what one rank makes of given K and V."""

    def __init__(self, lengths, heads=(4, 2), dtype=torch.float64, seed=0, sink=False, **mask):
        padded = [-(-n // 16) * 16 for n in lengths]
        self.packing = weft.Packing([0, *torch.tensor(lengths).cumsum(0).tolist()],
                                    cu_seqlens_q_padded=[0, *torch.tensor(padded).cumsum(0).tolist()])
        self.mask, self.heads, self.dtype, self.seed = weft.Mask(**mask), heads, dtype, seed
        generator = torch.Generator().manual_seed(seed)
        tokens = self.packing.tokens_q
        self.real = torch.cat([torch.arange(b) < n for n, b in zip(lengths, padded)])
        self.positions = torch.cat([torch.arange(b) for b in padded])
        self.tensors = [torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in
                        ((heads[0], DIM), (WIDTH,), (heads[0], DIM_V))]
        for x in self.tensors:
            x[~self.real] = torch.nan
        self.sink = torch.randn(heads[0], generator=generator, dtype=torch.float64) if sink else None

    def wanted(self, dtype=torch.float64):
        q, source, dout = (x.to(dtype, copy=True) for x in self.tensors)
        up = Up(self.heads[1], self.dtype, self.seed).to(dtype)
        q, source = q.requires_grad_(), source.requires_grad_()
        sink = None if self.sink is None else self.sink.clone().requires_grad_()
        k, v = up(source[self.real], self.positions[self.real])
        where = self.real.nonzero()[:, 0]
        k, v = (x.new_zeros(len(q), *x.shape[1:]).index_copy(0, where, x) for x in (k, v))
        out = attend(q, k, v, self.packing, self.mask, sink=sink, one_rank=True)
        inputs = [q, source, *up.parameters(), *([] if sink is None else [sink])]
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.nan_to_num())]

    def of_ranks(self, comm, schedule, layout, **options):
        """This rank's part of the same, put together: sums of parameters, rows of tensors."""
        name, given = schedule
        shard = {"mask": self.mask, "layout": layout}
        q, source, dout = (weft.torch.shard(x, self.packing, comm, fill=torch.nan, **shard) for x in self.tensors)
        q, source = q.requires_grad_(), source.requires_grad_()
        up = Up(self.heads[1], self.dtype, self.seed)
        sink = None if self.sink is None else self.sink.clone().requires_grad_()
        out = attend(q, source, self.packing, self.mask, group=comm, schedule=weft.Schedule(name, **given), layout=layout,
                     layout_mask=self.mask, sink=sink, expand=up, **options)
        inputs = [*up.parameters(), *([] if sink is None else [sink])]
        dq, dsource, *shares = torch.autograd.grad(out, [q, source, *inputs], dout.nan_to_num())
        whole = [weft.torch.unshard(x.detach(), self.packing, comm, layout=layout, mask=self.mask) for x in (out, dq, dsource)]
        return [*whole, *(torch.stack(weft.torch.group.all_gather(x, comm)).sum(0) for x in shares)], up


def error(got, want):
    return max(float(((a.double() - b.double())).norm() / (b.double().norm() + 1e-30)) for a, b in zip(got, want))


def check(problem, ranks, schedule, layout="zigzag", most=1e-10, **options):
    wanted = problem.wanted()
    found = weft.spawn(ranks, lambda comm: problem.of_ranks(comm, schedule, layout, **options)[0])
    for got in found:
        assert not any(x.isnan().any() for x in got)
        assert error(got, wanted) < most, (ranks, schedule, layout)


MASKS = [{"causal": True}, {"window": (5, 2)}, {"causal": True, "chunk_size": 11}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule(ranks, mask):
    problem = Problem([37, 0, 5, 20], sink=True, **mask)
    for schedule in schedules(ranks):
        check(problem, ranks, schedule)


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk", "striped", "balanced", "placed"])
def test_layouts(layout):
    for schedule in schedules(4):
        if layout != "striped" or schedule[0] != "all_gather" or schedule[1].get("key_order") == "rank":
            check(Problem([37, 0, 5, 20], causal=True), 4, schedule, layout)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [5, 6, 7, 8])
def test_more_ranks(ranks):
    for mask in MASKS:
        for schedule in schedules(ranks):
            check(Problem([37, 0, 5, 70], heads=(8, 8), sink=True, **mask), ranks, schedule)


@pytest.mark.long
def test_random_problems():
    choose = random.Random(41)
    for number in range(500):
        ranks = choose.choice([1, 2, 3, 4, 8])
        mask = choose.choice([*MASKS, {}, {"causal": True, "window": (choose.randrange(40), 0)}])
        heads_k = choose.choice([2, 3, 4])
        lengths = [choose.randrange(40) for _ in range(choose.randrange(1, 5))] + [1]
        problem = Problem(lengths, (heads_k * choose.choice([1, 2]), heads_k), seed=number, sink=choose.random() < 0.3, **mask)
        check(problem, ranks, choose.choice(schedules(ranks)), choose.choice(["contiguous", "zigzag", "balanced", "placed"]),
              deterministic=choose.random() < 0.5)


@pytest.mark.parametrize("dtype, most", [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
def test_lower_precision(dtype, most):
    for schedule in schedules(4):
        check(Problem([37, 0, 5, 20], dtype=dtype, causal=True), 4, schedule, most=most)


def test_gradcheck():
    packing = weft.Packing([0, 3, 7])
    q, source = (torch.randn(7, *shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (4,)))
    weight = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)

    def out(q, source, weight):
        return attend(q, source, packing, causal=True, expand=lambda rows: torch.einsum("tw,hdw->thd", rows.sin(), weight)
                      .split([3, 2], -1))

    assert torch.autograd.gradcheck(out, (q, source, weight))

    def of_ranks(comm):
        whole = [x.detach() for x in (q, source)]
        mine = [weft.torch.shard(x, packing, comm, layout="contiguous").requires_grad_() for x in whole]
        own = weight.detach().requires_grad_()
        result = attend(*mine, packing, causal=True, group=comm, layout="contiguous", schedule="ring",
                        expand=lambda rows: torch.einsum("tw,hdw->thd", rows.sin(), own).split([3, 2], -1))
        share, = torch.autograd.grad(result.sum(), own)
        return share

    total = sum(weft.spawn(2, of_ranks))
    direction, step = torch.randn_like(weight), 1e-6
    moved = [out(q, source, weight.detach() + sign * step * direction).sum() for sign in (1, -1)]
    assert abs((moved[0] - moved[1]) / (2 * step) - (total * direction).sum()) < 1e-8


def test_one_group_of_heads_at_a_time():
    """What lives at once is K and V of one group; and the source is gathered once."""
    problem = Problem([64], heads=(8, 8), causal=True)

    def run(groups):
        def of_rank(comm):
            comm.reset_traffic()
            up = problem.of_ranks(comm, ("all_gather", {"head_groups": groups}), "zigzag")[1]
            return up.most_heads, up.calls

        return weft.spawn(2, of_rank)

    for groups in (2, 8):
        # The first call has one row of zeros, and all heads.
        assert all(calls == 1 + 2 * groups for _, calls in run(groups))
    seen = []
    up = Up(8)

    def watched(rows, positions, heads=slice(None)):
        if len(rows) > 1:
            seen.append(heads.stop - heads.start)
        return up(rows, positions, heads)

    def of_rank(comm):
        q, source = (weft.torch.shard(x, problem.packing, comm, layout="zigzag") for x in problem.tensors[:2])
        attend(q, source, problem.packing, causal=True, group=comm, layout="zigzag",
               schedule=weft.Schedule("all_gather", head_groups=4), expand=watched)

    weft.spawn(2, of_rank)
    assert set(seen) == {2}


def test_bytes_of_a_latent():
    """DeepSeek-V3, a layer of 65,536 tokens on 8 ranks: the formula, and fewer than a sixtieth of those of K and V."""
    packing = weft.Packing([0, 65536])
    problem, placed = weft.Problem(packing, weft.Mask(causal=True)), layout_of("zigzag", packing, 8)
    for parallel, most in ((1, 60), (4, 17), (8, 8.8)):
        heads = 128 // parallel
        schedule = weft._core.RankSchedule(problem, placed, 0, heads, heads, None, "all_gather", {})
        dtype = weft._core.DType.bf16
        for backward in (False, True):
            of_heads = schedule.traffic(dtype, 192, 128, backward)["bytes_received"]
            of_latent = schedule.traffic(dtype, 192, 128, backward, source=576)["bytes_received"]
            assert of_latent == 7 * 8192 * 576 * (2 + 4 * backward)
            assert of_heads > most * of_latent


def test_counters_are_the_traffic():
    problem = Problem([64], heads=(4, 4), causal=True, dtype=torch.float32)

    def of_rank(comm):
        placed = layout_of("zigzag", problem.packing, comm.ranks)
        schedule = weft._core.RankSchedule(weft.Problem(problem.packing, problem.mask), placed, comm.rank, 4, 4, None, "ring", {})
        q, source = (weft.torch.shard(x, problem.packing, comm, layout="zigzag").requires_grad_() for x in problem.tensors[:2])
        counts = []
        comm.reset_traffic()
        out = attend(q, source, problem.packing, causal=True, group=comm, layout="zigzag", schedule="ring",
                     expand=Up(4, torch.float32))
        counts.append(comm.bytes_received)
        comm.reset_traffic()
        out.sum().backward()
        counts.append(comm.bytes_received)
        return counts == [schedule.traffic(weft._core.DType.f32, DIM, DIM_V, backward, source=WIDTH)["bytes_received"]
                          for backward in (False, True)]

    assert all(weft.spawn(4, of_rank))


@pytest.mark.parametrize("heads, least", [pytest.param(128, 60, marks=LONG), pytest.param(32, 17, marks=LONG), (16, 8.8)],
                         ids=["tp1", "tp4", "tp8"])
def test_counted_bytes_of_deepseek(heads, least):
    """Its heads on 8 ranks, on so few tokens that it is quick: communicators count what traffic() says, of the latent and of K
    and V of all heads."""
    packing, latent, rope, nope, dim_v = weft.Packing([0, 16]), 512, 64, 128, 128
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(heads, nope + dim_v, latent, generator=generator).bfloat16().div_(latent**0.5).requires_grad_()

    def expand(rows, of=slice(None)):
        k, v = torch.einsum("tc,hdc->thd", rows[:, :latent], weight[of]).split([nope, dim_v], -1)
        return torch.cat((k, rows[:, None, latent:].expand(-1, k.shape[1], -1)), -1), v

    def of_rank(comm):
        q = torch.randn(2, heads, nope + rope).bfloat16().requires_grad_()
        rows = torch.randn(2, latent + rope).bfloat16().requires_grad_()
        k, v = (torch.zeros(2, heads, dim).bfloat16().requires_grad_() for dim in (nope + rope, dim_v))
        weft.torch.use_layout(packing, comm, layout="zigzag")
        problem = weft.Problem(packing, weft.Mask(causal=True))
        found = []
        for name in ("all_gather", "ring"):
            schedule = weft._core.RankSchedule(problem, layout_of("zigzag", packing, 8), comm.rank, heads, heads, None, name, {})
            for width, given, more in ((0, (k, v), {}), (latent + rope, (rows,), {"expand": expand})):
                comm.reset_traffic()
                out = attend(q, *given, packing=packing, causal=True, group=comm, layout="zigzag", schedule=name, **more)
                counted = [comm.bytes_received]
                comm.reset_traffic()
                out.sum().backward()
                counted.append(comm.bytes_received)
                assert counted == [
                    schedule.traffic(weft._core.DType.bf16, nope + rope, dim_v, backward, source=width)["bytes_received"]
                    for backward in (False, True)]
                found.append(counted)
        return found

    for counted in weft.spawn(8, of_rank):
        for (of_heads, heads_backward), (of_latent, latent_backward) in (counted[:2], counted[2:]):
            assert of_latent == 7 * 2 * (latent + rope) * 2 and latent_backward == 3 * of_latent
            assert of_heads >= least * of_latent and heads_backward >= least * latent_backward


class Watched(Up):
    """Knows how many bytes of the K and V that it has made exist at once, by thread."""

    def __init__(self, heads):
        super().__init__(heads)
        self.here = threading.local()

    def forward(self, rows, positions, heads=slice(None)):
        made = super().forward(rows, positions, heads)
        if len(rows) == 1:
            return made
        here = self.here.__dict__
        here.setdefault("now", [0, 0])
        return tuple(self.held(x, here["now"]) for x in made)

    @staticmethod
    def held(x, now):
        """The same in memory of numpy's, which tells when it is given back."""
        memory = torch.empty_like(x, requires_grad=False).contiguous().numpy()
        now[0] += memory.nbytes
        now[1] = max(now)
        weakref.finalize(memory, lambda n: now.__setitem__(0, now[0] - n), memory.nbytes)
        return torch.from_numpy(memory).copy_(x)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_memory_of_one_group_of_heads(groups):
    """The most bytes of K and V at once, in both passes, are those of one group; kept for the backward, those of all."""
    problem = Problem([64], heads=(8, 8), causal=True)

    def of_rank(comm):
        found = []
        for recompute in (True, False):
            up = Watched(8)
            q, source = (weft.torch.shard(x, problem.packing, comm, layout="zigzag") for x in problem.tensors[:2])
            out = attend(q.requires_grad_(), source, problem.packing, causal=True, group=comm, layout="zigzag", expand=up,
                         recompute=recompute, schedule=weft.Schedule("all_gather", head_groups=groups))
            now = up.here.__dict__["now"]
            found.append((now[1], now[0]))
            out.sum().backward()
            found.append((now[1], now[0]))
        return found

    everything = 64 * 8 * (DIM + DIM_V) * 8  # rank 0 sees all rows
    again, again_backward, kept, kept_backward = weft.spawn(2, of_rank)[0]
    assert again == again_backward == (everything // groups, 0)
    assert kept == (everything, everything) and kept_backward == (everything, 0)


def test_kept_for_the_backward():
    """recompute=False: the same bits, and nothing is made twice; a second backward makes it again."""
    problem = Problem([37, 0, 5, 20], sink=True, causal=True)
    for ranks, schedule in itertools.product((1, 2, 4), SCHEDULES):
        def of_rank(comm):
            (made, one), (kept, other) = (problem.of_ranks(comm, schedule, "zigzag", recompute=again) for again in (True, False))
            return all(torch.equal(a, b) for a, b in zip(made, kept)), one.calls - 1, other.calls - 1

        for same, made, kept in weft.spawn(ranks, of_rank):
            assert same and made == 2 * kept, (ranks, schedule)
    up, packing = Up(2), weft.Packing([0, 7, 16])
    q, source = (torch.randn(16, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4, DIM), (WIDTH,)))
    out = attend(q, source, packing, causal=True, expand=up, recompute=False)
    inputs = [q, source, *up.parameters()]
    once, twice = (torch.autograd.grad(out.sum(), inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice)) and up.calls == 3
    with torch.no_grad():
        attend(q, source, packing, causal=True, expand=up, recompute=False)
    before = up.calls
    out = torch.utils.checkpoint.checkpoint(lambda *x: attend(*x, packing, causal=True, expand=up, recompute=False), q, source,
                                            use_reentrant=False)
    out.sum().backward()
    assert up.calls - before == 5  # hooks decide what is kept: forward, once more, and backward; with a row of zeros before each


def test_context_parallel():
    """ContextParallel.attention takes a source as context_parallel_attention does."""
    problem = Problem([37, 0, 5, 20], causal=True)

    def of_rank(comm):
        cp = weft.torch.ContextParallel(problem.packing, comm, layout="zigzag", schedule="ring")
        q, source = (cp.shard(x, fill=torch.nan).requires_grad_() for x in problem.tensors[:2])
        results = []
        for window in ({}, {"window": (5, 0)}):
            up = Up(2)
            for out in (cp.attention(q, source, expand=up, **window),
                        attend(q, source, problem.packing, causal=True, group=comm, layout="zigzag", schedule="ring", expand=up,
                               recompute=False, **window)):
                results.append([out.detach(), *torch.autograd.grad(out.nansum(), [q, source, *up.parameters()])])
        return all(torch.equal(a, b) for x, y in (results[:2], results[2:]) for a, b in zip(x, y))

    assert all(weft.spawn(2, of_rank))


def test_context_parallel_keeps():
    """What is kept is not made again, also where the function makes all heads at once."""
    up, packing = Up(2), weft.Packing([0, 7, 16])
    cp = weft.torch.ContextParallel(packing)
    q, source = (torch.randn(16, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4, DIM), (WIDTH,)))
    for recompute in (True, False):
        out = cp.attention(q, source, expand=up, recompute=recompute)
        before = up.calls
        out.sum().backward()
        assert before > 0 and (up.calls > before) is recompute


def test_gradients_of_leaves_that_share():
    """autograd gives one tensor for both leaves of a sum, and one number for all of a leaf that is only added up."""
    packing, halves = weft.Packing([0, 16]), torch.randn(2, 2, DIM + DIM_V, WIDTH, dtype=torch.float64)
    tensors = [torch.randn(16, *shape, dtype=torch.float64) for shape in ((4, DIM), (WIDTH,))]

    def of_rank(comm, apart):
        q, source = (weft.torch.shard(x, packing, comm, layout="zigzag") for x in tensors)
        leaves = [x.clone().requires_grad_() for x in halves] if apart else [halves.sum(0).requires_grad_()]
        gate = torch.ones(5, dtype=torch.float64, requires_grad=True)

        def expand(rows):
            kv = torch.einsum("tw,hdw->thd", rows, sum(leaves)) * gate.sum()
            return kv.split([DIM, DIM_V], -1)

        out = attend(q, source, packing, causal=True, group=comm, layout="zigzag", expand=expand,
                     schedule=weft.Schedule("ring", ranks_per_step=1))
        return torch.autograd.grad(out.sum(), [*leaves, gate])

    for (one, of_gate), (left, right, gate) in zip(*(weft.spawn(4, partial(of_rank, apart=apart)) for apart in (False, True))):
        assert left.equal(right) and (left - one).norm() <= 1e-12 * one.norm()
        assert gate.equal(of_gate) and gate.abs().min() > 0


def test_context_parallel_refusals(refused):
    cp, up = weft.torch.ContextParallel([0, 7, 16]), Up(2)
    q, source = (torch.randn(16, *shape, dtype=torch.float64) for shape in ((4, DIM), (WIDTH,)))
    assert torch.equal(cp.attention(q, source, expand=up), attend(q, source, weft.Packing([0, 7, 16]), causal=True, expand=up))
    refused(lambda: cp.attention(q, source), "v is left out", "expand=")
    refused(lambda: cp.attention(q, source, source, expand=up), "v is given together with expand=")
    refused(lambda: cp.attention(q, q, expand=up), "the source has shape [16, 4, 4]", "[rows, width]")
    refused(lambda: cp.attention(q, q, q, recompute=False), "recompute is given without expand=")
    tree = weft.prepare.Tree.from_sequences([[1, 2, 3], [1, 2, 4]])
    of_tree = weft.torch.ContextParallel(tree)
    n = of_tree.rows
    refused(lambda: of_tree.attention(q[:n], source[:n], expand=up), "expand takes positions", "position_ids")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    up, packing = Up(2), weft.Packing([0, 7, 16])
    q, source = (torch.randn(16, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4, DIM), (WIDTH,)))

    def block(q, source):
        return attend(q, source, packing, causal=True, expand=up).sin()

    results = []
    for out in (block(q, source), checkpoint(block, q, source, use_reentrant=reentrant)):
        results.append(torch.autograd.grad(out.sum(), [q, source, *up.parameters()]) if not reentrant else None)
        if reentrant:
            for x in (q, source, *up.parameters()):
                x.grad = None
            out.sum().backward()
            results[-1] = [x.grad.clone() for x in (q, source, *up.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_compiled_with_a_break_of_the_graph():
    up, packing = Up(2), weft.torch.pack(weft.Packing([0, 7, 16]))
    q, source = (torch.randn(16, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4, DIM), (WIDTH,)))

    def block(q, source):
        return attend(q * 2, source.sin(), packing, causal=True, expand=up).cos()

    compiled = torch.compile(block, backend="eager")
    wanted, got = (torch.autograd.grad(f(q, source).sum(), [q, source, *up.parameters()]) for f in (block, compiled))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(wanted, got))


def test_statistics_and_no_gradient():
    up, packing = Up(2), weft.Packing([0, 7, 16])
    q, source = (torch.randn(16, *shape, dtype=torch.float64) for shape in ((4, DIM), (WIDTH,)))
    out, lse, largest = attend(q, source, packing, causal=True, expand=up, return_lse=True, return_max_logit=True)
    k, v = up(source, torch.cat((torch.arange(7), torch.arange(9))))
    want = attend(q, k, v, packing, causal=True, return_lse=True, return_max_logit=True)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip((out, lse, largest), want))
    with torch.no_grad():
        assert torch.equal(attend(q, source=source, packing=packing, causal=True, expand=up), out)


def test_refusals(refused):
    packing, up = weft.Packing([0, 16]), Up(2)
    q, source = (torch.randn(16, *shape, dtype=torch.float64) for shape in ((4, DIM), (WIDTH,)))
    weight = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    before = weight * 2

    def linear(rows, with_=None):
        return torch.einsum("tw,hdw->thd", rows, weight if with_ is None else with_).split([4, 3], -1)

    refused(lambda: attend(q, source, packing, expand=lambda rows: linear(rows, before)), "computed before")
    refused(lambda: attend(q, source, packing, expand=lambda rows: rows), "returns a Tensor")
    refused(lambda: attend(q, source, packing, expand=lambda rows: (rows, rows)), "k of expand has shape", "[rows, heads, dim]")
    refused(lambda: attend(q, source, packing, expand=lambda rows: [x.float() for x in linear(rows)]), "torch.float32")
    refused(lambda: attend(q, source.float(), packing, expand=linear), "one dtype")
    refused(lambda: attend(q, source[:, None], packing, expand=linear), "[rows, width]")
    refused(lambda: attend(q, source, packing, expand=3), "expand is a int")
    refused(lambda: attend(q, source), "left out")
    refused(lambda: attend(q, source, packing, format="bshd", expand=linear), "format bshd")

    def fails(rows, positions):
        if len(rows) > 1:
            raise ValueError("mine")
        return up(rows, positions)

    with pytest.raises(ValueError, match="mine"):
        attend(q, source, packing, expand=fails)
