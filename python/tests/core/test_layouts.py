"""A layout is said twice, where rows are dealt out and where they are attended: another one is refused, and defaults agree."""

import itertools
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import weft

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
CAUSAL, WINDOW = weft.Mask(causal=True), weft.Mask(causal=True, window=(5, 0))


_numbers = itertools.count(1)


def packing_of_its_own():
    """One that no other test has dealt out."""
    n = next(_numbers)
    return weft.Packing([0, 13, 30, 100 + n, 200 + 2 * n])


def tensors(packing, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((packing.tokens_q, 2, 8), np.float32) for _ in range(3)]


def attend(packing, dealt, said, ranks=4, checked=False, position_ids=None, **more):
    """Rows dealt out under one layout and attended under another, on ranks that are threads."""
    whole = tensors(packing)

    def rank(comm):
        mine = [weft.shard(x, comm, packing=packing, **dealt) for x in whole]
        return weft.attention(*mine, packing=packing, causal=True, comm=comm, checked=checked, **said, **more).out

    return weft.spawn(ranks, rank), weft.attention(*whole, packing=packing, causal=True, **more).out


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("dealt, said, words", [
    (dict(layout="contiguous"), {}, ["under layout balanced", "under contiguous"]),
    (dict(layout="zigzag"), dict(layout="contiguous"), ["under layout contiguous", "under zigzag"]),
    ({}, dict(layout="zigzag"), ["under layout zigzag", "under balanced by Mask(causal=True)"]),
    (dict(layout="balanced", mask=WINDOW), dict(layout="balanced"), ["balanced by Mask(causal=True)", "window=(5, 0)"]),
])
def test_attention_under_another_layout(refused, dealt, said, words, checked):
    with refused(*words, "weft.use_layout", "rank "):
        attend(packing_of_its_own(), dealt, said, checked=checked)


@pytest.mark.parametrize(
    "dealt, said",
    [
        ({}, {}), (dict(layout="contiguous"), dict(layout="contiguous")),
        (dict(layout="balanced", mask=WINDOW), dict(layout_mask=WINDOW)), (dict(mask=CAUSAL), dict(layout="balanced")),
        (dict(layout="auto"), dict(layout="auto")),
    ],
)
def test_the_same_layout_by_another_name(dealt, said):
    packing = packing_of_its_own()
    parts, one = attend(packing, dealt, said, max_logit=True)
    np.testing.assert_allclose(weft.unshard(parts, packing=packing, **dealt), one, rtol=2e-5, atol=2e-5)


def test_two_names_for_the_same_rows():
    packing = weft.Packing([0, 64])  # one document that divides: the cut of the pack is the cut of the document
    parts, one = attend(packing, dict(layout="zigzag"), dict(layout="dual_chunk"))
    np.testing.assert_allclose(weft.unshard(parts, packing=packing, layout="dual_chunk"), one, rtol=2e-5, atol=2e-5)
    explicit = weft.Layout.explicit(packing, [[(0, 16 * r, 16)] for r in range(4)])
    parts, one = attend(packing, dict(layout=explicit), dict(layout="contiguous"))
    np.testing.assert_allclose(weft.unshard(parts, packing=packing, layout=explicit), one, rtol=2e-5, atol=2e-5)


def test_unshard_under_another_layout(refused):
    packing = packing_of_its_own()
    parts = [weft.shard(np.arange(packing.tokens_q), r, ranks=3, packing=packing, layout="contiguous") for r in range(3)]
    with refused("unshard under layout balanced", "under contiguous"):
        weft.unshard(parts, packing=packing)
    assert weft.unshard(parts, packing=packing, layout="contiguous").tolist() == list(range(packing.tokens_q))


def test_rows_from_elsewhere(refused):
    packing = packing_of_its_own()
    whole, rows = tensors(packing), -(-packing.tokens_q // 2)
    padded = [np.pad(x, ((0, 2 * rows - len(x)), (0, 0), (0, 0))) for x in whole]

    def rank(comm, said):
        if said:
            weft.use_layout(packing, comm, layout="contiguous")
        mine = [x[comm.rank * rows:(comm.rank + 1) * rows] for x in padded]
        return weft.attention(*mine, packing=packing, comm=comm, layout="contiguous").out

    with refused("were never dealt out in this process", "use_layout"):
        weft.spawn(2, lambda comm: rank(comm, False))
    with refused("never dealt out", "unshard"):
        weft.unshard([x[:rows] for x in padded[:2]], packing=packing, layout="contiguous")
    parts = weft.spawn(2, lambda comm: rank(comm, True))
    one = weft.attention(*whole, packing=packing).out
    np.testing.assert_allclose(weft.unshard(parts, packing=packing, layout="contiguous"), one, rtol=2e-5, atol=2e-5)


def test_positions_are_rows_too(refused):
    packing = packing_of_its_own()

    def rank(comm, **layout):
        positions = weft.position_ids(comm, packing=packing, **layout)
        x = np.ones((len(positions), 2, 8), np.float32)
        return weft.attention(x, x, x, packing=packing, comm=comm).out

    assert weft.spawn(2, rank)
    with refused("under layout balanced", "under striped"):
        weft.spawn(2, lambda comm: rank(comm, layout="striped"))


def test_one_rank_needs_no_dealing():
    packing = packing_of_its_own()
    x = tensors(packing)
    for layout in (None, "contiguous", "zigzag", "striped"):
        out = weft.spawn(1, lambda comm: weft.attention(*x, packing=packing, comm=comm, layout=layout).out)[0][:packing.tokens_q]
        np.testing.assert_array_equal(out, weft.attention(*x, packing=packing).out)


def test_cross_attention_goes_by_the_full_mask(refused):
    packing = weft.Packing(cu_seqlens_q=[0, 40, 90], cu_seqlens_k=[0, 70, 76])
    assert (
        weft.Layout("balanced", packing, 3).mask == weft.Mask()
        and weft.Layout("balanced", weft.Packing([0, 9]), 3).mask == CAUSAL
    )
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((90, 2, 8), np.float32), rng.standard_normal((76, 2, 8), np.float32)

    def rank(comm, how):
        keys = weft.shard(k, comm, **how)
        return weft.attention(weft.shard(q, comm, packing=packing), keys, keys, packing=packing, comm=comm).out

    parts = weft.spawn(3, lambda comm: rank(comm, dict(packing=packing, side="k")))
    np.testing.assert_allclose(
        weft.unshard(parts, packing=packing), weft.attention(q, k, k, packing=packing).out, rtol=2e-5, atol=2e-5
    )


def test_the_registry_is_bounded_and_ends():
    from weft import _placed

    packing = packing_of_its_own()
    before = len(_placed._known)
    kept = []

    def rank(comm):
        kept.append(_placed.scope_of(comm))
        weft.position_ids(comm, packing=packing)

    weft.spawn(2, rank)
    assert kept[0] is kept[1] is not None and not any(key[0] is kept[0] for key in _placed._known)
    assert not _placed._scopes and len(_placed._known) == before + 2  # for as many ranks: unshard may come later
    for n in range(_placed._MOST + 100):
        weft.use_layout([0, 1000 + n], 0, ranks=2)
    assert len(_placed._known) <= _placed._MOST
    for n in range(100):
        runs = [[(n, 0, packing.tokens_q) if r == 0 else (0, 0, 0)] for r in range(1 + n % 3)]
        weft.use_layout(packing, 0, ranks=1 + n % 3, layout=weft.Layout.explicit(packing, runs))
    assert max(len(x) for x in _placed._known.values()) <= _placed._MOST_LAYOUTS


def test_the_registry_from_many_threads():
    from weft import _placed

    wrong = []

    def one(seed):
        try:
            for n in range(80):
                cu = [0, 50 + (seed * 80 + n) % 300]
                weft.use_layout(cu, seed % 4, ranks=4)
                _placed.check(weft.Layout("balanced", weft.Packing(cu), 4), seed % 4, None)
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# Defaults.

@pytest.mark.parametrize("seed", range(5))
def test_the_default_balances_published_lengths(seed):
    import published

    packing = published.documents(131072, seed)
    work = [int((weft.position_ids(r, ranks=8, packing=packing) + 1).sum()) for r in range(8)]
    assert max(work) <= 1.02 * sum(work) / 8
    pairs = weft._core.pairs_by_rank(weft.Problem(packing, CAUSAL), weft.Layout("balanced", packing, 8))
    assert pairs.max() <= 1.02 * pairs.mean()


@pytest.mark.parametrize("mask", [dict(causal=True), dict(causal=True, window=(5, 0)), dict(), dict(causal=True, chunk_size=16)])
def test_layers_of_all_masks_share_the_default(mask):
    packing = packing_of_its_own()
    whole = tensors(packing)

    def rank(comm):
        mine = [weft.shard(x, comm, cu_seqlens=packing.cu_seqlens_q) for x in whole]
        return weft.attention(*mine, cu_seqlens=packing.cu_seqlens_q, comm=comm, schedule="ring", **mask).out

    one = weft.attention(*whole, packing=packing, **mask).out
    np.testing.assert_allclose(weft.unshard(weft.spawn(3, rank), packing=packing), one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
def test_batches_have_dual_chunks_by_default(format, refused):
    shape = (2, 24, 2, 8) if format == "bshd" else (24, 2, 2, 8)
    q, k, v = np.random.default_rng(0).standard_normal((3, *shape), np.float32)

    def rank(comm):
        mine = [weft.shard(x, comm, format=format) for x in (q, k, v)]
        return weft.attention(*mine, causal=True, format=format, comm=comm, schedule="ring").out

    one = weft.attention(q, k, v, causal=True, format=format).out
    np.testing.assert_allclose(weft.unshard(weft.spawn(3, rank), format=format), one, rtol=2e-5, atol=2e-5)
    with refused("24 tokens on 5 ranks", "multiple of 2*ranks = 10", "thd"):
        weft.spawn(5, rank)


# torch.

torch = pytest.importorskip("torch")
import weft.torch


@pytest.mark.parametrize("checked", [False, True])
def test_torch_under_another_layout(refused, checked):
    packing = packing_of_its_own()
    x = torch.from_numpy(tensors(packing)[0])

    def rank(comm, dealt, **said):
        mine = weft.torch.shard(x, packing, comm, **dealt)
        return weft.torch.context_parallel_attention(mine, mine, mine, packing, causal=True, group=comm, checked=checked, **said)

    one = weft.torch.context_parallel_attention(x, x, x, packing, causal=True, one_rank=True)
    with refused("attention under layout balanced", "under contiguous", "weft.torch.use_layout(packing, group"):
        weft.spawn(2, lambda comm: rank(comm, dict(layout="contiguous")))
    with refused("under layout contiguous", "under balanced"):
        weft.spawn(2, lambda comm: rank(comm, {}, layout="contiguous"))
    for how in ({}, dict(window=(5, 0))):
        weft.spawn(2, lambda comm: rank(comm, {}, **how))
    for layout in ("contiguous", "zigzag", None):
        def there_and_back(comm):
            return weft.torch.unshard(rank(comm, dict(layout=layout), layout=layout), packing, comm, layout=layout)

        for got in weft.spawn(2, there_and_back):
            torch.testing.assert_close(got, one, rtol=2e-5, atol=2e-5)
    with refused("unshard under layout striped"):
        weft.spawn(2, lambda comm: weft.torch.unshard(weft.torch.shard(x, packing, comm), packing, comm, layout="striped"))


def test_torch_rows_from_elsewhere(refused):
    packing = packing_of_its_own()
    x = torch.ones(-(-packing.tokens_q // 2), 2, 8)

    def rank(comm, said):
        for know in said:
            know(packing, comm, layout="contiguous")
        return weft.torch.context_parallel_attention(x, x, x, packing, group=comm, layout="contiguous")

    with refused("never dealt out"):
        weft.spawn(2, lambda comm: rank(comm, []))
    for know in (weft.torch.use_layout, weft.torch.position_ids, weft.torch.valid_rows):
        assert len(weft.spawn(2, lambda comm: rank(comm, [know]))) == 2


def test_compiled_under_another_layout(refused):
    packing = packing_of_its_own()
    flat, x = weft.torch.pack(packing), torch.from_numpy(tensors(packing)[0])
    at_once = threading.Lock()

    def rank(comm, layout):
        mine = weft.torch.shard(x, packing, comm, layout=layout)
        layer = weft.torch.ContextParallelAttention(group=comm)
        with at_once:
            torch._dynamo.reset()
            run = torch.compile(lambda y: layer(y, y, y, flat), backend="eager", fullgraph=True)
        return run(mine)

    assert weft.spawn(1, lambda comm: rank(comm, "contiguous"))
    weft.torch.context_parallel_attention(x, x, x, flat, one_rank=True)

    def eager(comm):
        return torch.ops.weft.attention(*[weft.torch.shard(x, packing, comm, layout="contiguous")] * 3, None, flat,
                                        weft.torch.op.how_of(group=weft.torch.group.name_of(comm)))

    with refused("under layout balanced", "under contiguous"):  # the operator itself, which is what a graph calls
        weft.spawn(2, eager)


def test_a_question_that_is_kept_is_asked_once(monkeypatch):
    from weft import _placed

    packing, asked = packing_of_its_own(), []
    x = torch.from_numpy(tensors(packing)[0])
    real = _placed.check
    monkeypatch.setattr(_placed, "check", lambda *a, **b: (asked.append(1), real(*a, **b)))

    def rank(comm):
        mine = weft.torch.shard(x, packing, comm)
        for _ in range(5):
            weft.torch.context_parallel_attention(mine, mine, mine, packing, group=comm)

    weft.spawn(2, rank)
    assert len(asked) == 2


def test_many_processes_without_a_group(monkeypatch, refused):
    """torchrun, and nobody has called init_process_group: whatever takes a group says so, unless it is told that it is meant."""
    x, packing = torch.ones(8, 1, 4), weft.Packing([0, 8])
    micros = weft.prepare.MicroSequences(packing, ranks=1, micros=2)
    uses = {
        "attention": lambda **g: weft.torch.context_parallel_attention(x, x, x, packing, **g),
        "layer": lambda **g: weft.torch.ContextParallelAttention(**g)(x, x, x, packing),
        "ContextParallel": lambda group=None: weft.torch.ContextParallel(packing, group),
        "context_parallel": lambda group=None: weft.torch.context_parallel(packing, group, buffers=[]).__enter__(),
        "shard": lambda **g: weft.torch.shard(x, packing, **g), "unshard": lambda **g: weft.torch.unshard(x, packing, **g),
        "position_ids": lambda **g: weft.torch.position_ids(packing, **g),
        "valid_rows": lambda **g: weft.torch.valid_rows(packing, **g),
        "use_layout": lambda **g: weft.torch.use_layout(packing, **g),
        "relayout": lambda **g: weft.torch.relayout(x, "zigzag", "contiguous", packing, **g),
        "all_gather": lambda **g: weft.torch.all_gather(x, **g),
        "micro layer": lambda **g: weft.torch.MicroSequenceAttention(**g)(x, x, x, micros),
        "micro": lambda **g: weft.torch.micro_sequence_attention(x, x, x, micros, **g),
    }
    for size, wrong in (("1", False), ("", False), ("2", True)):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setattr(weft.torch.functional, "_hows", {})  # settings are read once: nobody changes WORLD_SIZE
        for use in uses.values():
            use(group="")
            if wrong:
                with refused("WORLD_SIZE is 2", "the whole pack", "init_process_group", "one_rank=True", 'group=""'):
                    use()
            else:
                use()
        weft.torch.context_parallel_attention(x, x, x, packing, one_rank=True)


def _mixed(packing, comm, *layouts):
    """Inputs under one layout and positions under another: then rows of both are at hand, and nobody can tell which these are."""
    x = torch.from_numpy(tensors(packing)[0])
    mine = weft.torch.shard(x, packing, comm, layout=layouts[0])
    for layout in layouts[1:]:
        weft.torch.position_ids(packing, comm, layout=layout)
    return mine


@pytest.mark.parametrize("front", ["numpy", "torch"])
def test_rows_dealt_out_under_two_layouts(refused, front):
    def attend(packing, comm, mine, checked, layout=None):
        if front == "numpy":
            return weft.attention(*[mine.numpy()] * 3, packing=packing, comm=comm, checked=checked, layout=layout).out
        return weft.torch.context_parallel_attention(mine, mine, mine, packing, group=comm, checked=checked, layout=layout)

    def rank(comm, packing, checked=True, said=False, after=False):
        mine = _mixed(packing, comm, "contiguous", None)
        if said:
            weft.torch.use_layout(packing, comm, layout="contiguous")
        if after:  # each has been used: both are meant
            attend(packing, comm, mine, False, "contiguous")
        return attend(packing, comm, mine, checked)

    packing = packing_of_its_own()
    with refused("under layout balanced", "dealt out under contiguous too", "use_layout", "position_ids"):
        weft.spawn(2, lambda comm: rank(comm, packing))
    for how in (dict(checked=False), dict(said=True), dict(after=True)):
        packing = packing_of_its_own()
        weft.spawn(2, lambda comm, how=how: rank(comm, packing, **how))


def test_a_cached_problem_is_asked_again_when_checked(refused):
    packing = packing_of_its_own()

    def rank(comm):
        mine = weft.torch.shard(torch.from_numpy(tensors(packing)[0]), packing, comm)
        for _ in range(2):
            weft.torch.context_parallel_attention(mine, mine, mine, packing, group=comm, checked=True)
        weft.torch.position_ids(packing, comm, layout="striped")
        weft.torch.context_parallel_attention(mine, mine, mine, packing, group=comm, checked=True)

    with refused("dealt out under striped too"):
        weft.spawn(2, rank)


def test_rows_moved_by_relayout_are_of_both():
    packing = packing_of_its_own()

    def rank(comm):
        mine = weft.torch.shard(torch.from_numpy(tensors(packing)[0]), packing, comm)
        other = weft.torch.relayout(mine, None, "contiguous", packing, comm)
        for x, layout in ((mine, None), (other, "contiguous")):
            weft.torch.context_parallel_attention(x, x, x, packing, group=comm, layout=layout, checked=True)

    weft.spawn(2, rank)
