"""Packing, Mask, Layout, plans, shards, preparation, rows, explain and support: each against numpy or brute force."""

import copy
import doctest
import importlib
import inspect
import itertools
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import weft
from hypothesis import given
from hypothesis import strategies as st
from weft import _core

import dense
from dense import pairs
from problems import examples, masks

CU = [0, 7, 10, 16]
UNLIMITED = weft.UNLIMITED


# --- Packing ---


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=5), st.integers(0, 2),
       st.sampled_from([list, np.array, tuple]))
def test_packing(parts, after, kind):
    lengths, pads = [n for n, _ in parts], [p for _, p in parts]
    cu = [0, *np.cumsum(lengths).tolist()]
    padded = [0, *np.cumsum(np.add(lengths, pads)).astype(int).tolist()]
    made = (lambda x: np.array(x, np.int64)) if kind is np.array else kind
    tokens = padded[-1] + after
    same = [weft.Packing(made(cu), cu_seqlens_q_padded=made(padded), tokens_q=tokens),
            weft.Packing(made(padded), seqused_q=made(lengths), tokens_q=tokens),
            weft.Packing(cu_seqlens_q_padded=made(padded), seqused_q=made(lengths), tokens_q=tokens)]
    for packing in same:
        assert packing == same[0] and packing.self_attention
        assert packing.sequences == len(lengths) and packing.tokens_q == packing.tokens_k == tokens
        assert packing.lengths_q.tolist() == packing.lengths_k.tolist() == lengths
        assert packing.cu_seqlens_q.tolist() == packing.cu_seqlens_k.tolist() == cu
        assert packing.cu_seqlens_q_padded.tolist() == packing.cu_seqlens_k_padded.tolist() == padded
        assert str(tokens) in repr(packing)
    even = same[0].padded_to(4)
    assert even.lengths_q.tolist() == lengths and (even.cu_seqlens_q_padded % 4 == 0).all()
    assert weft.Packing.from_lengths(lengths, multiple=4) == even


def test_packing_of_two_sides_and_of_a_batch():
    packing = weft.Packing([0, 3, 5], [0, 4, 10])
    assert not packing.self_attention and packing.lengths_k.tolist() == [4, 6]
    assert packing == weft.Packing.from_lengths([3, 2], [4, 6]) and packing != weft.Packing([0, 3, 5])
    batch = weft.Packing.from_batch(2, 4, seqused_q=[3, 0])
    assert batch.cu_seqlens_q_padded.tolist() == [0, 4, 8] and batch.lengths_q.tolist() == [3, 0]
    crossed = weft.Packing.from_batch(2, 4, 6)
    assert (crossed.tokens_q, crossed.tokens_k) == (8, 12)
    # Keys where the queries are, but fewer of them real.
    fewer = weft.Packing([0, 4, 8], seqused_k=[2, 4])
    assert fewer.lengths_q.tolist() == [4, 4] and fewer.lengths_k.tolist() == [2, 4]
    assert fewer.cu_seqlens_k_padded.tolist() == [0, 4, 8]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_numbers_from_frameworks(dtype):
    want = weft.Packing(CU)
    assert weft.Packing(np.array(CU, dtype)) == want
    assert weft.Packing(np.array(CU * 2, dtype)[:4]) == want
    assert weft.Packing(np.repeat(np.array(CU, dtype), 2)[::2]) == want
    assert weft.Packing([np.array(CU, dtype)[i] for i in range(4)]) == want
    torch = pytest.importorskip("torch")
    assert weft.Packing(torch.tensor(CU, dtype=getattr(torch, dtype))) == want
    assert weft.Packing(list(torch.tensor(CU))) == want
    jnp = pytest.importorskip("jax.numpy")
    assert weft.Packing(jnp.asarray(CU, jnp.int32)) == want


def test_mask():
    mask = weft.Mask(True, bottom_right=True, window=(5, 0), chunk_size=4)
    assert (mask.causal, mask.bottom_right, mask.window, mask.chunk_size, mask.slices) == (True, True, (5, 0), 4, None)
    assert repr(mask) == "Mask(causal=True, bottom_right=True, window=(5, 0), chunk_size=4)"
    own = weft.Mask(slices=[(0, 2, 0, 2, None, 0), (2, 4, 0, 4, -1, None)])
    assert own.slices.tolist() == [[0, 2, 0, 2, -UNLIMITED, 0], [2, 4, 0, 4, -1, UNLIMITED]]
    assert weft.Mask(slices=own.slices).slices.tolist() == own.slices.tolist()
    assert weft.Mask(slices=np.zeros((0, 6), int)).slices.shape == (0, 6)


SAID = [weft.Packing(CU), weft.Packing([0]), weft.Packing([0, 3, 5], [0, 4, 10]),
        weft.Packing(cu_seqlens_q_padded=[2, 6], seqused_q=[3], tokens_q=9),
        weft.Mask(), weft.Mask(True, True, (5, 0), 4), weft.Mask(slices=[(0, 2, 0, 2, None, 0)]), weft.Mask(slices=[])]


@pytest.mark.parametrize("at", range(len(SAID)))
def test_values(at):
    """Packings and masks are equal if they say the same, and go through pickle and copies."""
    value = SAID[at]
    for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert again == value and hash(again) == hash(value) and repr(again) == repr(value)
    for i, other in enumerate(SAID):
        assert (value == other) == (i == at)
    assert all(value != other for other in (None, 5, "x")) and not value == 5  # noqa: SIM201


def test_errors_go_through_pickle():
    with pytest.raises(weft.Error) as caught:
        weft.Packing([1, 0])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problem, again.remedy) == (str(caught.value), caught.value.problem, caught.value.remedy)


# --- Problem, Layout, plan ---

sides = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=0, max_size=4)


def _problem(q, k, mask):
    def side(parts, letter):
        lengths, offsets = [n for n, _ in parts], [0, *np.cumsum([n + p for n, p in parts]).astype(int).tolist()]
        return (offsets, lengths, offsets[-1]), {f"cu_seqlens_{letter}_padded": offsets, f"seqused_{letter}": lengths}

    (one, said), (other, also) = side(q, "q"), side(k, "k")
    packing = weft.Packing(**said) if k is q else weft.Packing(**said, **also)
    return weft.Problem(packing, weft.Mask(**mask)), dense.visible(one, other, **mask)


@examples(150)
@given(sides, sides, masks, st.booleans())
def test_problem_is_its_definition(q, k, mask, crossed):
    k = [k[i] if i < len(k) else (2, 0) for i in range(len(q))] if crossed else q
    problem, see = _problem(q, k, mask)
    np.testing.assert_array_equal(pairs(problem.slices, *see.shape), see)
    assert problem.visible_pairs == see.sum()
    whole = weft.plan(problem.packing, problem.mask)
    np.testing.assert_array_equal(pairs(whole.slices, *see.shape), see)
    assert whole.visible_pairs == see.sum() and (whole.q_rows, whole.k_rows) == see.shape
    touched = np.zeros(see.shape[1], bool)
    for begin, end in whole.touched_keys:
        touched[begin:end] = True
    assert (touched | ~see.any(0)).all()


def _owner(layout, packing, ranks):
    """Rank of each token, from the layout's definition; -1 where nobody holds it."""
    offsets = packing.cu_seqlens_q_padded
    total = offsets[-1]
    owner = np.full(packing.tokens_q, -1)
    for token in range(total):
        if layout == "contiguous":
            owner[token] = token // -(-total // ranks)
        elif layout == "striped":
            owner[token] = token % ranks
        else:
            begin, length = 0, total
            if layout == "dual_chunk":
                i = np.searchsorted(offsets, token, "right") - 1
                begin, length = offsets[i], offsets[i + 1] - offsets[i]
            piece = (token - begin) // -(-length // (2 * ranks))
            owner[token] = piece if piece < ranks else 2 * ranks - 1 - piece
    return owner


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag", "dual_chunk", "balanced", "placed"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_layout(layout, ranks):
    packing = weft.Packing.from_lengths([5, 0, 12, 1, 9], multiple=2 * ranks if layout == "dual_chunk" else 1)
    mask = weft.Mask(causal=True)
    placed = weft.Layout(layout, packing, ranks, mask)
    assert (placed.kind, placed.ranks) == (layout, ranks) and placed.packing == packing and placed.rows == placed.rows_k
    x = np.arange(3 * packing.tokens_q).reshape(-1, 3)
    _, position = dense.places(packing.cu_seqlens_q_padded, packing.lengths_q, packing.tokens_q)
    owner, parts = np.full(packing.tokens_q, -1), []
    for rank in range(ranks):
        tokens = placed.tokens(rank)
        held = tokens >= 0
        assert (owner[tokens[held]] == -1).all()
        owner[tokens[held]] = rank
        np.testing.assert_array_equal(placed.position_ids(rank), np.where(held, np.maximum(position[tokens], 0), 0))
        np.testing.assert_array_equal(weft.position_ids(rank, ranks=ranks, layout=placed), placed.position_ids(rank))
        np.testing.assert_array_equal(placed.valid(rank), held & (position[tokens] >= 0))
        parts.append(weft.shard(x, rank, ranks=ranks, layout=placed))
        np.testing.assert_array_equal(parts[-1], np.where(held[:, None], x[tokens], 0))
    if layout not in ("balanced", "placed"):
        np.testing.assert_array_equal(owner, _owner(layout, packing, ranks))
    assert (owner >= 0).all()
    np.testing.assert_array_equal(weft.unshard(parts, packing=packing, layout=layout, mask=mask), x)
    shares = [weft.plan(packing, mask, layout=placed, ranks=ranks, rank=r, keys="rank").visible_pairs for r in range(ranks)]
    assert sum(shares) == weft.Problem(packing, mask).visible_pairs


def test_explicit_layout(refused):
    packing = weft.Packing([0, 6])
    layout = weft.Layout.explicit(packing, [[(0, 4, 2), (2, 0, 1)], [(0, 1, 3)]])
    assert layout.kind == "explicit" and layout.rows == 3
    assert layout.tokens(0).tolist() == [4, 5, 0] and layout.tokens(1).tolist() == [1, 2, 3]
    strided = weft.Layout.explicit(packing, [[(0, 0, 3, 2)], [(0, 1, 3, 2)]])
    assert strided.tokens(1).tolist() == [1, 3, 5]
    with refused("runs"):
        weft.Layout.explicit(packing, [[(0, 4)]])
    with refused():
        weft.Layout.explicit(packing, [[(0, 0, 3)], [(0, 1, 3)]])
    with refused("runs_k"):
        weft.Layout.explicit(weft.Packing([0, 6], [0, 4]), [[(0, 0, 6)]])


def assert_each_pair_once(see, plans):
    """plans: (what has slices, token of each query row, token of each key row)"""
    met = np.zeros(see.shape, int)
    for plan, q_tokens, k_tokens in plans:
        count = pairs(plan.slices, len(q_tokens), len(k_tokens))
        for i, j in zip(*np.nonzero(count)):
            met[q_tokens[i], k_tokens[j]] += count[i, j]
    np.testing.assert_array_equal(met, see)


@examples(80)
@given(sides, masks, st.sampled_from(["zigzag", "contiguous", "striped", "balanced", "placed"]), st.integers(1, 4))
def test_plans_cover_every_pair_once(parts, mask, layout, ranks):
    problem, see = _problem(parts, parts, mask)
    placed = weft.Layout(layout, problem.packing, ranks, problem.mask)
    tokens = [placed.tokens(r) for r in range(ranks)]
    # In the keys of each rank by turns, and in those of all ranks in both orders.
    ways = [dict(enumerate(tokens)), {"rank": np.concatenate(tokens)}, {"sequence": np.arange(problem.packing.tokens_k)}]
    for way in ways[:2] if layout == "striped" else ways:
        assert_each_pair_once(see, [
            (weft.plan(problem.packing, problem.mask, layout=placed, ranks=ranks, rank=rank, keys=keys), tokens[rank], way[keys])
            for rank, keys in itertools.product(range(ranks), way)])


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
@pytest.mark.parametrize("layout", ["dual_chunk", "striped"])
def test_shards_of_a_batch(format, layout):
    batch = np.arange(3 * 16 * 2).reshape(3, 16, 2)
    x = batch if format == "bshd" else np.ascontiguousarray(np.swapaxes(batch, 0, 1))
    parts = [weft.shard(x, r, ranks=4, layout=layout, format=format) for r in range(4)]
    for rank, part in enumerate(parts):
        part = part if format == "bshd" else np.swapaxes(part, 0, 1)
        at = np.arange(rank, 16, 4) if layout == "striped" else np.r_[2 * rank:2 * rank + 2, 14 - 2 * rank:16 - 2 * rank]
        np.testing.assert_array_equal(part, batch[:, at])
    np.testing.assert_array_equal(weft.unshard(parts, layout=layout, format=format), x)


# --- Rows ---


@pytest.mark.parametrize("layout", ["dual_chunk", "zigzag", "striped", "balanced", "placed"])
def test_orders(layout):
    packing = weft.Packing.from_lengths([5, 8, 1], multiple=6)
    placed = weft.Layout(layout, packing, 3)
    tokens = np.concatenate([placed.tokens(r) for r in range(3)])
    np.testing.assert_array_equal(weft.rows.sequence_rows_of_rank_order(placed), tokens)
    back = weft.rows.rank_rows_of_sequence_order(placed)
    np.testing.assert_array_equal(tokens[back[back >= 0]], np.flatnonzero(back >= 0))
    x = np.arange(2 * packing.tokens_q, dtype=np.float32).reshape(-1, 2)
    ranks = np.full((len(tokens), 2), -7, np.float32)
    weft.rows.sequence_to_rank_order(placed, x, ranks)
    np.testing.assert_array_equal(ranks, np.where((tokens >= 0)[:, None], x[tokens], -7))
    again = np.zeros_like(x)
    weft.rows.rank_to_sequence_order(placed, ranks, again)
    np.testing.assert_array_equal(again, x)


def test_valid_rows_and_chunks():
    packing = weft.Packing(cu_seqlens_q_padded=[0, 6, 14], seqused_q=[5, 8], tokens_q=16)
    np.testing.assert_array_equal(weft.rows.valid_rows(packing), [1] * 5 + [0] + [1] * 8 + [0] * 2)
    cu, padded, sequence = weft.rows.sequences_to_chunks(packing, 3)
    assert np.diff(cu).tolist() == [3, 2, 3, 3, 2] and padded.tolist() == [0, 3, 6, 9, 12, 14]
    assert sequence.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("mask", [dict(causal=True), dict(causal=True, window=(5, 0)), dict(), dict(causal=True, chunk_size=5)],
                         ids=str)
def test_steps_cover_every_pair_once(mask):
    ranks = 2
    packing = weft.Packing.from_lengths([11, 4, 0, 6], multiple=4)
    placed = weft.Layout("dual_chunk", packing, ranks)
    tokens = [placed.tokens(r) for r in range(ranks)]
    side = packing.cu_seqlens_q_padded.tolist(), packing.lengths_q.tolist(), packing.tokens_q
    see = dense.visible(side, side, **mask)
    whole = np.arange(packing.tokens_k)
    steps = [(weft.rows.all_gather_step(packing, weft.Mask(**mask), ranks=ranks, rank=r, step=s), tokens[r], whole)
             for r in range(ranks) for s in range(2)]
    assert_each_pair_once(see, steps)
    for step, q_tokens, _ in steps:
        assert step.cu_seqlens_q.tolist() == [0, *np.cumsum(step.seqused_q).tolist()]
        assert step.max_seqlen_q == step.seqused_q.max() and len(step.rank_rows) == step.cu_seqlens_q[-1]
        assert (q_tokens[step.rank_rows] >= 0).all()
    if mask.get("causal") and "window" not in mask:
        ring = []
        for r, s in itertools.product(range(ranks), repeat=2):
            kind, keys = weft.rows.ring_tile(ranks, r, s)
            assert keys == (r - s) % ranks and kind == ("diagonal" if s == 0 else "below" if keys < r else "above")
            ring.append((weft.rows.ring_step(packing, weft.Mask(**mask), ranks=ranks, rank=r, step=s), tokens[r], tokens[keys]))
        assert_each_pair_once(see, ring)


# --- Explain and support ---


def test_explain():
    packing, mask = weft.Packing(CU), weft.Mask(causal=True)
    e = weft.explain(CU, mask, ranks=4, heads=(4, 2), dims=(8, 8), dtype="f32", layout="zigzag")
    see = dense.visible((CU, [7, 3, 6], 16), (CU, [7, 3, 6], 16), causal=True)
    owner = _owner("zigzag", packing, 4)
    assert e.pairs.tolist() == [int(see[owner == r].sum()) for r in range(4)]
    assert e.imbalance == pytest.approx(e.pairs.max() / e.pairs.mean())
    # Every rank receives K and V of the others: 12 rows x 2 heads x (8 + 8) numbers of 4 bytes.
    assert e.traffic["all_gather"][0] == e.traffic["ring"][0] == 12 * 2 * 16 * 4
    assert 0 < e.traffic["exact"][0] < e.traffic["ring"][0]
    text = str(e)
    assert "imbalance" in text and all(kind in text for kind in _core.schedules())
    from weft.explain import visible
    np.testing.assert_array_equal(visible(weft.Problem(packing, mask)), see)
    picture = [line for line in text.splitlines() if line.strip()[:1].isdigit() and line[7:8] in "ABCD"]
    assert len(picture) == 16
    for i, line in enumerate(picture):
        cells = line[10:].ljust(16)
        assert [c != " " for c in cells] == see[i].tolist()


@pytest.mark.parametrize("ranks", [1, 30])
def test_explain_prints_anything(ranks):
    assert "30" in str(weft.explain(np.arange(31) * 30, ranks=ranks)) and str(weft.explain([0], ranks=ranks))


def test_explanations_are_what_is_moved():
    x = np.zeros((16, 2, 8), np.float32)
    e = weft.explain(CU, weft.Mask(causal=True), ranks=4, heads=(2, 2), dims=(8, 8), dtype="f32")

    for kind in ("all_gather", "ring", "exact"):
        def rank(comm):
            mine = weft.shard(x, comm, cu_seqlens=CU)
            comm.reset_traffic()
            r = weft.attention(mine, mine, mine, cu_seqlens_q=CU, causal=True, comm=comm, schedule=kind, max_logit=False)
            forward = comm.bytes_received
            comm.reset_traffic()
            r.backward(mine)
            return forward, comm.bytes_received

        moved = np.array(weft.spawn(4, rank)).max(0)
        assert tuple(moved) == e.traffic[kind], kind


def test_support():
    table = weft.support()
    text = str(table)
    for kernel in table.kernels:
        assert kernel["name"] in text
    assert table.why_not("zigzag", "ring") is None
    refusals = [(name, column, why) for _, name, cells in table.rows for column, why in cells.items() if why]
    assert refusals and all(why in text for _, _, why in refusals)
    with pytest.raises(KeyError, match="zigzag"):
        table.why_not("tartan", "ring")


def test_communicator():
    def rank(comm):
        halves = comm.split(comm.rank % 2, -comm.rank)
        halves.barrier()
        comm.barrier()
        return comm.rank, comm.ranks, comm.name, halves.rank, halves.ranks, comm.messages_sent

    results = weft.spawn(4, rank)
    assert [r[:3] for r in results] == [(i, 4, "threads") for i in range(4)]
    assert [r[3:5] for r in results] == [(1, 2), (1, 2), (0, 2), (0, 2)]
    assert all(r[5] > 0 for r in results)


# --- What is said of all of it ---

PACKAGE = Path(weft.__file__).parent
MODULES = sorted(".".join(("weft", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
                 for file in PACKAGE.rglob("*.py"))
NEEDS = {"weft.torch": "torch", "weft.transformers": "transformers"}
FRAMEWORKS = ("weft.megatron", "weft.trainer", "weft.transformers", "weft.compat")  # take seconds to import


def _module(name):
    for begin, needed in NEEDS.items():
        if name.startswith(begin):
            pytest.importorskip(needed)
    return importlib.import_module(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name.startswith(FRAMEWORKS) else ())
                                  for name in MODULES])
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_examples_in_the_library():
    """doctest finds only what is written in Python, so docstrings are looked up here."""
    runner, tried = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE), 0
    named = dict(vars(_core))
    for name, value in list(named.items()):
        if inspect.isclass(value):
            named.update({f"{name}.{k}": v for k, v in vars(value).items()})
    for name, value in named.items():
        if ">>>" in (value.__doc__ or ""):
            tried += runner.run(doctest.DocTestParser().get_doctest(inspect.getdoc(value), {}, name, None, None)).attempted
    assert runner.summarize(verbose=False).failed == 0 and tried >= 8


@pytest.mark.parametrize("name", ["weft", "weft.torch", "weft.prepare", "weft.rows"])
def test_every_public_name_has_a_docstring(name):
    module = _module(name)
    assert inspect.getdoc(module)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or callable(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), public
        if inspect.isclass(value) and value.__module__.startswith("weft."):
            for method, function in vars(value).items():
                if not method.startswith("_") and callable(function):
                    assert inspect.getdoc(getattr(value, method)), f"{public}.{method}"


def test_version():
    import re

    assert re.fullmatch(r"\d+\.\d+\.\d+.*", weft.__version__)


def test_importing_weft_imports_no_framework():
    code = "import sys, weft; print([m for m in ('torch', 'jax', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.skipif(not shutil.which("nm"), reason="there is no nm")
def test_the_module_exports_its_entry_alone():
    """What it exported of a static libstdc++ would be shared with the one that torch brings."""
    said = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in said.splitlines() if line.split()[-2] == "T"] == ["PyInit__core"]


@pytest.mark.long
def test_importing_weft_torch_does_not_import_its_compiler():
    pytest.importorskip("torch")
    code = "import sys, weft.torch; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
