"""Machines, predictions, and schedule and layout auto."""

import importlib
import importlib.util
import json

import numpy as np
import pytest
import weft
from weft import cost

CU = [0, 300, 340, 1000, 1024]
CAUSAL = weft.Mask(causal=True)


def test_machines_by_name_file_and_object(tmp_path):
    assert "h100-400g" in weft._core.machines()
    a100 = weft.machine("a100-200g")
    path = tmp_path / "m.json"
    path.write_text(a100.to_json())
    assert weft.machine(path) == a100 and weft.machine(a100) is a100
    assert json.loads(a100.to_json())["levels"][0]["name"] == "NVLink"
    with pytest.raises(weft.Error, match="there is no machine 'nope'"):
        weft.machine("nope")
    with pytest.raises(weft.Error, match="cannot read"):
        weft.machine(tmp_path / "none.json")


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "is missing"), ('{"name": ', "ends too early"), ("[]", "no object"), ('{"name": 3}', "name is no string"),
        ('{"speed": 1}', "speed is not known"), ("[" * 100, "deeper than"),
        ('{"kernels": [{"flops": -1}], "levels": [{}]}', "flops is -1"), ("{}", "no kernels"),
    ],
)
def test_wrong_machine_files(text, says):
    with pytest.raises(weft.Error, match=says):
        weft.Machine.from_json(text, "m.json")


def test_simulate():
    t = weft.simulate(weft.Packing(CU), CAUSAL, ranks=4, schedule="ring", heads=(4, 2), detail=[1])
    assert t["seconds"] >= t["ideal"] > 0 and len(t["ranks"]) == 4
    assert sum(r["pairs"] for r in t["ranks"]) == 4 * weft.Problem(weft.Packing(CU), CAUSAL).visible_pairs
    (one,) = t["timelines"]
    assert one["rank"] == 1 and sum(e["bytes_in"] for e in one["events"]) == t["ranks"][1]["bytes_in"]
    made = weft._core.RankSchedule(
        weft.Problem(weft.Packing(CU), CAUSAL), weft.Layout("zigzag", weft.Packing(CU), 4), 1, 4, 2, None, "ring"
    )
    assert made.traffic(weft._core.DType.bf16, 128, 128)["bytes_received"] == t["ranks"][1]["bytes_in"]
    slow = weft.simulate(weft.Packing(CU), CAUSAL, ranks=4, schedule="auto", layout="auto", backward=True)
    assert slow["seconds"] > 0


def test_choose_by_layer_and_why():
    packing = weft.Packing(np.arange(0, 65537, 16384))
    c = weft.choose(packing, [CAUSAL, weft.Mask(causal=True, window=(256, 0))], 64, heads=(64, 8), counts=[2, 6])
    full, window = c.layers
    assert window.schedule == "exact" and window.seconds < full.seconds
    assert c.layout in c.why() and "behind" in window.why() and "ms" in c.why()
    assert abs(c.seconds - 2 * full.seconds - 6 * window.seconds) < 1e-9
    assert {x["schedule"] for x in full.candidates} >= {"ring", "exact", "all_gather"}
    with pytest.raises(weft.Error, match="needs"):
        weft.choose(packing, CAUSAL, 64, memory_bytes=1000)


def test_times_of_a_choice_are_those_of_simulate():
    packing = weft.Packing([0, 90000, 91000, 131072])
    for mask in (CAUSAL, weft.Mask(causal=True, window=(700, 0))):
        c = weft.choose(packing, mask, 16, heads=(64, 8), machine="h100-400g")
        layer = c.layers[0]
        both = [weft.simulate(packing, mask, ranks=16, heads=(64, 8), layout=c.layout, machine="h100-400g", backward=b,
                              schedule=weft.Schedule(layer.schedule, **layer.options))["seconds"] for b in (False, True)]
        assert [layer.forward, layer.backward] == both and c.seconds == sum(both)
        assert c.simulated and layer.simulated
        assert sum(x["simulated"] for x in layer.candidates) >= 1
        assert f"{1e3 * sum(both):.3g} ms" in c.why() and "all layers" not in c.why()


def test_memory_budget_changes_the_choice():
    packing = weft.Packing([0, 1 << 17])
    free = weft.choose(packing, CAUSAL, 8).layers[0]
    least = min(c["memory_bytes"] for c in free.candidates if not c["at_least"])
    tight = weft.choose(packing, CAUSAL, 8, memory_bytes=least).layers[0]
    assert tight.memory_bytes <= least < free.memory_bytes and tight.seconds >= free.seconds
    assert "need more than" in tight.why()


FRONTS = ["weft", pytest.param("weft.torch", marks=pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="no torch"))]


def attend_auto(front, shape, packing, ranks, format="thd"):
    """The worst difference of ranks, which choose layout and schedule, from one rank; and what each chose."""
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((*shape, heads, 16), np.float32) for heads in (4, 2, 2)]
    how = dict(layout="auto", mask=CAUSAL, format=format)
    if front == "weft.torch":
        import torch
        from weft.torch import context_parallel_attention as torch_attention

    def rank(comm):
        mine = [weft.shard(x, comm, packing=packing, **how) for x in whole]
        chosen = cost.chosen_layout(packing, CAUSAL, ranks, format=format), weft.position_ids(comm, packing=packing, **how)
        if front == "weft":
            return weft.attention(*mine, packing=packing, comm=comm, schedule="auto", **how).out, *chosen
        out = torch_attention(*map(torch.from_numpy, mine), packing, CAUSAL, group=comm, schedule="auto",
                              layout="auto", layout_mask=CAUSAL, format=format)
        return out.numpy(), *chosen

    outs, layouts, positions = zip(*weft.spawn(ranks, rank))
    one = weft.attention(*whole, packing=packing, causal=True, format=format).out
    return np.abs(weft.unshard(outs, packing=packing, **how) - one).max(), layouts, positions


@pytest.mark.parametrize("front", FRONTS)
def test_attention_auto(front):
    worst, layouts, _ = attend_auto(front, (1024,), weft.Packing(CU), 4)
    assert worst < 1e-5 and len(set(layouts)) == 1


def test_set_machine():
    try:
        weft.set_machine("cpu")
        assert weft.machine().name == "cpu"
    finally:
        weft.set_machine("h100-400g")


def test_another_machine_is_another_question():
    """torch keeps runs: one that was chosen for a machine must not answer for the next, nor a backward change machines."""
    from weft.torch.op import how_of

    before = how_of(layout="auto", causal=True)
    try:
        weft.set_machine("cpu")
        assert how_of(layout="auto", causal=True) != before
        assert how_of(layout=None, causal=True) == how_of(causal=True)
    finally:
        weft.set_machine("h100-400g")


def test_auto_and_a_map_of_heads():
    """What a map takes is not predicted, so auto, the default, is all_gather."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((1024, 4, 8), np.float32), rng.standard_normal((1024, 2, 8), np.float32)

    def rank(comm, **how):
        mine = [weft.shard(x, comm, cu_seqlens=CU) for x in (q, k, k)]
        r = weft.attention(*mine, cu_seqlens=CU, causal=True, comm=comm, head_map=[0, 1, 0, 1], **how)
        assert type(r._run).__name__ == "Executor"
        return r.out

    one = weft.attention(q, k, k, cu_seqlens=CU, causal=True, head_map=[0, 1, 0, 1]).out
    named = weft.spawn(2, lambda comm: rank(comm, schedule="all_gather"))
    for how in ({}, dict(schedule="auto")):
        found = weft.spawn(2, lambda comm, how=how: rank(comm, **how))
        assert all(np.array_equal(a, b) for a, b in zip(found, named))
        np.testing.assert_allclose(weft.unshard(found, cu_seqlens=CU), one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("front", FRONTS)
def test_the_default_schedule_is_the_best_predicted(front, monkeypatch):
    """Documents that lie on one rank move nothing by exact, where all_gather would gather them all."""
    cu, asked = [0, 1024, 2048, 3072, 4096], []
    make = weft._core.RankSchedule
    monkeypatch.setattr(weft._core, "RankSchedule", lambda *given: (asked.append(given[6]), make(*given))[1])
    x = np.random.default_rng(0).standard_normal((4096, 8, 64), np.float32)

    def rank(comm):
        mine = weft.shard(x, comm, cu_seqlens=cu)
        if front == "weft":
            return weft.attention(mine, mine, mine, cu_seqlens=cu, causal=True, comm=comm).out
        mine = importlib.import_module("torch").from_numpy(mine)
        attend = importlib.import_module("weft.torch").context_parallel_attention
        return attend(mine, mine, mine, cu, causal=True, group=comm).numpy()

    found = weft.unshard(weft.spawn(4, rank), cu_seqlens=cu)
    np.testing.assert_allclose(found, weft.attention(x, x, x, cu_seqlens=cu, causal=True).out, rtol=2e-5, atol=2e-5)
    assert asked == ["exact"] * 4


@pytest.mark.parametrize("packing", [CU, tuple(CU), np.array(CU), weft.Packing(CU)], ids=["list", "tuple", "array", "Packing"])
def test_cu_seqlens_wherever_a_packing_is_taken(packing):
    assert weft.plan(packing, CAUSAL).slices.tolist() == weft.plan(weft.Packing(CU), CAUSAL).slices.tolist()
    assert weft.choose(packing, CAUSAL, ranks=2).layout == weft.choose(weft.Packing(CU), CAUSAL, ranks=2).layout
    assert weft.simulate(packing, CAUSAL, ranks=2)["seconds"] == weft.simulate(weft.Packing(CU), CAUSAL, ranks=2)["seconds"]
    assert weft.explain(packing, CAUSAL, ranks=2).pairs.tolist() == weft.explain(weft.Packing(CU), CAUSAL, ranks=2).pairs.tolist()
    for call in (weft.plan, lambda p: weft.choose(p, CAUSAL, 2), lambda p: weft.simulate(p, CAUSAL, ranks=2), weft.explain):
        with pytest.raises(weft.Error, match="packing is of type str"):
            call("0,5")


def test_layout_auto_goes_by_the_causal_mask_unless_one_is_given():
    x, packing = np.arange(1024), weft.Packing(CU)
    for given in ({}, {"mask": CAUSAL}):
        mine = weft.shard(x, 0, ranks=2, cu_seqlens=CU, layout="auto", **given)
        assert mine.tolist() == weft.shard(x, 0, ranks=2, cu_seqlens=CU, layout=cost.chosen_layout(packing, CAUSAL, 2)).tolist()


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
@pytest.mark.parametrize("front", FRONTS)
def test_auto_leaves_a_batch_a_batch(front, format):
    """A sequence for each rank: without the format a layout is chosen whose rows are no batch."""
    packing = weft.Packing.from_batch(4, 512)
    assert cost.chosen_layout(packing, CAUSAL, 4) not in cost.batch_layouts(packing, 4)
    worst, layouts, positions = attend_auto(front, (4, 512) if format == "bshd" else (512, 4), packing, 4, format)
    assert worst < 1e-5 and set(layouts) <= set(cost.batch_layouts(packing, 4))
    assert np.array_equal(np.sort(np.concatenate(positions)), np.repeat(np.arange(512), 4))


def test_auto_where_no_layout_leaves_a_batch():
    with pytest.raises(weft.Error, match="padded length 1023 is not a multiple of 2\\*ranks = 8; pad to 1024"):
        weft.shard(np.zeros((2, 1023, 4), np.float32), 0, ranks=4, layout="auto", mask=CAUSAL, format="bshd")
