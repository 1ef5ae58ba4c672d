"""Sharding, attention, changes of layout and backwards in any order on one to three ranks, beside the same on whole tensors."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")
import weft
import weft.torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]
SCHEDULES = ["all_gather", "ring", "all_to_all", "exact", "mesh", "auto"]
HEADS, DIM = 2, 4


@st.composite
def programs(draw):
    """(lengths of documents, ranks, steps). A step names one of the values that are there, counted from the newest."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
    some = st.integers(0, 3)
    step = st.one_of(
        st.tuples(st.just("shard"), st.sampled_from(LAYOUTS)),
        st.tuples(st.just("attend"), some, st.sampled_from(SCHEDULES), st.booleans()),
        st.tuples(st.just("relayout"), some, st.sampled_from(LAYOUTS)),
        st.tuples(st.just("add"), some, some),
        st.tuples(st.just("backward"), some),
        st.tuples(st.just("whole"), some),
    )
    return lengths, draw(st.integers(1, 3)), draw(st.lists(step, min_size=1, max_size=9))


class Whole:
    """A value of the program as it would be on one rank: every operation from its definition."""

    def __init__(self, lengths):
        self.tokens = sum(lengths)
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self.same = document[:, None] == document[None, :]
        random = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(10, self.tokens, HEADS, DIM, dtype=torch.float64, generator=random)
        self.weights = torch.randn(10, self.tokens, HEADS, DIM, dtype=torch.float64, generator=random)

    def attend(self, x, causal):
        see = self.same & (torch.ones(self.tokens, self.tokens).tril().bool() if causal else True)
        logits = torch.einsum("qhd,khd->hqk", x, x) / DIM**0.5
        return torch.einsum("hqk,khd->qhd", logits.masked_fill(~see, float("-inf")).softmax(-1), x)


def run(comm, lengths, steps):
    """On a rank: values of the program as (rows of this rank, layout, the same whole), and a check after each step."""
    whole = Whole(lengths)
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    packing, group = weft.Packing(cu), comm if comm.ranks > 1 else ""
    leaves, values = [], []

    def rows(x, layout):
        return weft.torch.shard(x, packing, group, layout=layout)

    def start(layout):
        x = whole.inputs[len(leaves)]
        mine, all_of_it = rows(x, layout).requires_grad_(), x.clone().requires_grad_()
        leaves.append((mine, layout, all_of_it))
        values.append((mine * 1, layout, all_of_it * 1))

    start("zigzag")
    for step in steps:
        name, x, layout, want = step[0], *(values[-1 - step[1] % len(values)] if step[0] != "shard" else (None,) * 3)
        if name == "shard":
            start(step[1])
        elif name == "attend":
            weft.torch.use_layout(packing, group, layout=layout)
            out = weft.torch.context_parallel_attention(x, x, x, packing, group=group, layout=layout, schedule=step[2],
                                                        causal=step[3], one_rank=comm.ranks == 1)
            values.append((out, layout, whole.attend(want, step[3])))
        elif name == "relayout":
            weft.torch.use_layout(packing, group, layout=layout)
            values.append((weft.torch.relayout(x, layout, step[2], packing, group), step[2], want))
        elif name == "add":
            y, other, also = values[-1 - step[2] % len(values)]
            if other == layout:
                values.append((x + 0.5 * y, layout, want + 0.5 * also))
        elif name == "backward":
            weights = whole.weights[len(values) % 10]
            (x * rows(weights, layout)).sum().backward(retain_graph=True)
            (want * weights).sum().backward(retain_graph=True)
            for mine, dealt, all_of_it in leaves:
                assert (mine.grad is None) == (all_of_it.grad is None), step
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, rows(all_of_it.grad, dealt), rtol=1e-9, atol=1e-11)
        else:
            got = weft.torch.unshard(x.detach(), packing, group, layout=layout)
            torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-11)
    x, layout, want = values[-1]
    got = weft.torch.unshard(x.detach(), packing, group, layout=layout)
    torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-11)


def check(program):
    lengths, ranks, steps = program
    weft.spawn(ranks, lambda comm: run(comm, lengths, steps), time_limit=20)


how = dict(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=25, **how)
@given(programs())
@example(([5, 4, 7], 3, [("relayout", 0, "contiguous"), ("attend", 0, "ring", True), ("relayout", 0, "striped"),
                         ("backward", 0)]))
def test_any_order(program):
    check(program)


@pytest.mark.long
@settings(max_examples=400, **how)
@given(programs())
def test_any_order_for_long(program):
    check(program)
