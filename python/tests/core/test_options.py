"""What callers say in other words than the documentation: taken where it is clear, else refused in one sentence of Python's."""

import copy
import importlib.util
import pickle

import numpy as np
import pytest
import weft

CU = [0, 3, 10]
X = np.random.default_rng(0).standard_normal((10, 4, 8), np.float32)

WRONG = {  # option: values of the wrong kind
    "causal": ["yes", 1, None],
    "bottom_right": ["no"],
    "window": ["a", 5, (1,), ("a", 0), (1.5, 0), None],
    "chunk_size": [1.5, "x", True],
    "scale": ["x", [1.0], True],
    "softcap": [None, "x"],
    "deterministic": ["yes", 0],
    "kernel": ["gpu", 3],
    "schedule": ["rnig", 3, None],
    "layout": ["spiral"],
    "checked": ["yes"],
    "head_map": ["abcd", 3],
}
OPTIONS = {  # of schedules: (who has it, who has it not, values of the wrong kind)
    "key_order": ("all_gather", "ring", ["mine", None]), "head_groups": ("all_gather", "ring", ["two", 1.5, True]),
    "ulysses": ("hybrid", "all_to_all", [None]), "outer": ("hybrid", "ring", ["around", 3]), "stages": ("exact", "ring", [2.0]),
    "ranks_per_step": ("ring", "exact", ["x"]), "node": ("exact", "all_to_all", ["x"]),
    "query_ranks": ("mesh", "ring", ["x", None]),
}
NAMES = {"schedule": weft._core.schedules(), "layout": ["contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed"],
         "kernel": ["cpu", "reference"]}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


def check(name, value, said):
    """The error names the option, lists the names that it has, and is not in words of C++."""
    assert name in said and all(known in said for known in NAMES.get(name, ())), said
    assert name == "head_map" or not isinstance(value, str) or value in said, said
    assert not any(word in said for word in ("::", "overload", "nanobind"))


@pytest.mark.parametrize("name, value", CASES, ids=str)
def test_wrong_kinds(name, value, refused):
    with refused() as caught:
        weft.attention(X, X, X, cu_seqlens=CU, **{name: value})
    check(name, value, str(caught.value))
    with refused("rank ") as caught:
        weft.spawn(2, lambda comm: weft.attention(X[:5], X[:5], X[:5], cu_seqlens=CU, comm=comm, **{name: value}))
    check(name, value, str(caught.value))


@pytest.mark.parametrize("name, value", CASES, ids=str)
def test_wrong_kinds_in_torch(name, value, refused):
    torch = pytest.importorskip("torch")
    import weft.torch

    x = torch.from_numpy(X)
    for call in (lambda: weft.torch.context_parallel_attention(x, x, x, weft.Packing(CU), one_rank=True, **{name: value}),
                 lambda: weft.torch.ContextParallelAttention(one_rank=True, **{name: value})(x, x, x, weft.Packing(CU))):
        with refused() as caught:
            call()
        check(name, value, str(caught.value))


def test_options_of_schedules(refused):
    assert {name for name, *_ in weft._core.schedule_options()} == set(OPTIONS)
    for name, (owner, other, values) in OPTIONS.items():
        for value in values:
            with refused(name):
                weft.Schedule(owner, **{name: value})
        with refused(f"{name} = 2 with schedule {other}", "leave it out", owner):
            weft.Schedule(other, **{name: 2})
        with refused(f"{name} = 2 with schedule auto", "chosen too"):
            weft.Schedule("auto", **{name: 2})
    with refused("schedule ring has no option 'rings'", "ranks_per_step (ring, hybrid, mesh)"):
        weft.Schedule("ring", rings=2)


def test_a_schedule_is_a_value():
    ring = weft.Schedule("p2p", ranks_per_step=np.int64(1))
    assert repr(ring) == "Schedule('ring', ranks_per_step=1)" and eval(repr(ring), {"Schedule": weft.Schedule}) == ring
    assert ring == pickle.loads(pickle.dumps(ring)) == copy.deepcopy(ring) and ring != weft.Schedule("ring")
    assert len({ring, weft.Schedule("ring", ranks_per_step=1)}) == 1 and ring.options == {"ranks_per_step": 1}
    with pytest.raises(AttributeError):
        ring.name = "exact"


@pytest.mark.parametrize("name", ["abreast", "inside", "across", "rings", *OPTIONS])
def test_options_of_schedules_are_no_keywords(name):
    calls = [lambda: weft.attention(X, X, X, CU, **{name: 2}), lambda: weft.explain(CU, **{name: 2}),
             lambda: weft.simulate(weft.Packing(CU), weft.Mask(), ranks=2, **{name: 2})]
    if importlib.util.find_spec("torch"):
        import torch
        import weft.torch

        x = torch.from_numpy(X)
        calls += [lambda: weft.torch.context_parallel_attention(x, x, x, CU, one_rank=True, **{name: 2}),
                  lambda: weft.torch.ContextParallelAttention(**{name: 2})]
    for call in calls:
        with pytest.raises(TypeError, match=f"'{name}'.*weft.Schedule"):
            call()


@pytest.mark.parametrize(
    "given",
    [
        dict(causal="yes"), dict(causal=None), dict(window="a"), dict(window=("a", 1)), dict(chunk_size=1.5),
        dict(bottom_right=2), dict(window=(True, 0)), dict(chunk_size=True), dict(causal=np.array([True, False])),
    ],
    ids=str,
)
def test_masks_of_wrong_kinds(given, refused):
    with refused() as caught:
        weft.Mask(**given)
    check(*next(iter(given.items())), str(caught.value))


def test_numbers_of_numpy_are_numbers():
    want = weft.attention(X, X, X, cu_seqlens=CU, causal=True, window=(2, 0), chunk_size=4, scale=0.5)
    got = weft.attention(X, X, X, cu_seqlens=CU, causal=np.bool_(True), window=[np.int64(2), np.int32(0)], chunk_size=np.int64(4),
                         scale=np.float32(0.5))
    np.testing.assert_array_equal(got.out, want.out)


def test_cu_seqlens_of_both_sides(refused):
    want = weft.attention(X, X, X, cu_seqlens_q=CU, causal=True).out
    for given in (CU, np.array(CU), np.array(CU, np.int32)):
        np.testing.assert_array_equal(weft.attention(X, X, X, cu_seqlens=given, causal=True).out, want)
        np.testing.assert_array_equal(weft.attention(X, X, X, packing=given, causal=True).out, want)
    padded = weft.attention(X, X, X, cu_seqlens_q_padded=CU, seqused_q=[2, 5]).out
    np.testing.assert_array_equal(weft.attention(X, X, X, cu_seqlens_padded=CU, seqused=[2, 5]).out, padded)
    with refused("cu_seqlens is given together with cu_seqlens_q"):
        weft.attention(X, X, X, cu_seqlens=CU, cu_seqlens_q=CU)
    with refused("cu_seqlens is given together with cu_seqlens_k", "cu_seqlens_q and cu_seqlens_k"):
        weft.attention(X, X, X, cu_seqlens=CU, cu_seqlens_k=CU)
    with refused("packing is given together with cu_seqlens"):
        weft.attention(X, X, X, cu_seqlens=CU, packing=weft.Packing(CU))


def test_heads_and_sinks_by_names_of_python(refused):
    for call in (lambda *x, **y: weft.attention(*x, cu_seqlens=CU, **y), _torch_attention):
        with refused("q has 4 heads and k has 3", "head_map"):
            call(X, X[:, :3], X[:, :3])
        with refused("sink has shape [2]", "4 heads", "one logit a query head"):
            call(X, X, X, sink=np.zeros(2, np.float32))
        with refused("sink has shape [1, 4]"):
            call(X, X, X, sink=np.zeros((1, 4), np.float32))


def _torch_attention(*arrays, sink=None):
    torch = pytest.importorskip("torch")
    import weft.torch

    given = [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]
    return weft.torch.context_parallel_attention(*given, CU, one_rank=True, sink=None if sink is None else torch.from_numpy(sink))


def test_no_error_of_the_core_speaks_cpp(refused):
    with refused("is not a multiple of 2*ranks", "Packing.padded_to"):
        weft.Layout("dual_chunk", weft.Packing(CU), 2)
    with refused("call weft.Layout.explicit"):
        weft.Layout("explicit", weft.Packing(CU), 2)
    with refused("split=True"):
        weft.prepare.pack_documents([10], 5)
    with refused("pad=True"):
        weft.prepare.MicroSequences(weft.Packing(CU), ranks=2, micros=3)


@pytest.mark.parametrize("name, is_named", [("p2p", "ring"), ("a2a", "all_to_all"), ("ulysses", "all_to_all"),
                                            ("a2a+p2p", "hybrid"), ("usp", "hybrid")])
def test_schedules_by_names_of_frameworks(name, is_named):
    def rank(comm, schedule):
        mine = weft.shard(X, comm, cu_seqlens=CU)
        return weft.attention(mine, mine, mine, cu_seqlens=CU, comm=comm, schedule=schedule).out

    for got, want in zip(*(weft.spawn(2, lambda comm: rank(comm, one)) for one in (name, is_named))):
        np.testing.assert_array_equal(got, want)
    packing, mask = weft.Packing(CU), weft.Mask(causal=True)
    assert (
        weft.simulate(packing, mask, ranks=2, schedule=name)["seconds"]
        == weft.simulate(packing, mask, ranks=2, schedule=is_named)["seconds"]
    )
    assert weft.explain(packing, mask, ranks=2, schedule=[name]).schedules == [weft.Schedule(is_named)]


def test_torch_takes_cu_seqlens():
    torch = pytest.importorskip("torch")
    import weft.torch

    x, packing = torch.from_numpy(X), weft.Packing(CU)
    want = weft.torch.context_parallel_attention(x, x, x, packing, causal=True)
    for cu in (CU, tuple(CU), np.array(CU), torch.tensor(CU), torch.tensor(CU, dtype=torch.int32), weft.torch.pack(packing),
               weft.torch.pack(CU)):
        assert torch.equal(weft.torch.context_parallel_attention(x, x, x, cu, causal=True), want)
        assert torch.equal(weft.torch.ContextParallelAttention()(x, x, x, cu), want)
        assert torch.equal(weft.torch.position_ids(cu), weft.torch.position_ids(packing))
        assert torch.equal(weft.torch.shard(x, cu), x)
        assert weft.torch.next_token_labels(torch.arange(10), cu)[2] == -100
        sliced = weft.Mask(slices=[(0, 3, 0, 3, None, 0)])
        if not isinstance(cu, torch.Tensor) or len(cu) == 3:
            assert torch.equal(weft.torch.context_parallel_attention(x, x, x, cu, sliced)[:3], want[:3])
    # Inside a graph nobody can look: the operator itself tells them apart.
    for cu in (torch.tensor(CU), torch.tensor(CU, dtype=torch.int32)):
        out = torch.compile(
            lambda y, c: weft.torch.context_parallel_attention(y, y, y, c, causal=True), backend="eager", fullgraph=True
        )(x, cu)
        assert torch.equal(out, want)


def test_what_looked_like_a_packing_of_an_older_version(refused):
    """cu_seqlens that begin with 1: no number of theirs can be taken for the head of a packing's tensor."""
    torch = pytest.importorskip("torch")
    import weft.torch

    cu = torch.tensor([1, 2, 4, 6, 8, 10])
    assert weft.torch.packed.unpack(cu)[0] == weft.Packing(cu.tolist())
    with refused("a packing as a tensor of"):
        weft.torch.packed.unpack(weft.torch.pack(weft.Packing(CU)).repeat(2))
