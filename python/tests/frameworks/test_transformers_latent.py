"""DeepSeek-V3 whose latent moves, on two and four ranks, against eager attention in f64: the model in f64 and in f32, and how far
eager attention itself is off in f32.

    python test_transformers_latent.py FOLDER RANKS      # these ranks alone; figures in rank0.txt
"""

import contextlib
import copy
import functools
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import weft
import weft.torch
import weft.transformers

import processes
from small_models import alone, packing_of, tokens, worst
from test_transformers_models import pair_of

_HEAD_GROUPS = weft.Schedule("all_gather", head_groups=2)
CASES = {"-".join(map(str, case)): case for case in (
    ("balanced", "all_gather", {}), ("balanced", _HEAD_GROUPS, {}), ("zigzag", "ring", {}), ("zigzag", "all_to_all", {}),
    ("zigzag", "hybrid", {}), ("balanced", "auto", {}), ("balanced", "exact", {"checkpointing": False}),
    ("zigzag", "ring", {"recompute": False}),
)}


class _InF64:
    """The module torch as transformers sees it, which computes norms, routers and softmax in f32 whatever a model's dtype."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def in_f64():
    module = sys.modules["transformers.models.deepseek_v3.modeling_deepseek_v3"]
    module.torch = _InF64()
    try:
        yield
    finally:
        module.torch = torch


@functools.lru_cache(None)
def models():
    """Eager attention and Weft's in f32, and the same in f64."""
    both = pair_of("deepseek_v3")
    return *both, *(copy.deepcopy(model).double() for model in both)


@functools.lru_cache(None)
def wanted(layout):
    """Eager attention in f64 and in f32."""
    eager, _, exact, _ = models()
    packing = packing_of(layout)
    in_single = alone(eager, tokens(packing.tokens_q), packing)
    with in_f64():
        return alone(exact, tokens(packing.tokens_q), packing), in_single


def of_ranks(model, packing, layout, schedule, checkpointing=None, recompute=True):
    """What `alone` gives, of all ranks together; gradients of 16 bits are added in f32."""
    ids = tokens(packing.tokens_q).to(model.device)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    batch = weft.transformers.inputs(ids, packing, layout=layout)
    with weft.transformers.packed(packing, None, layout, schedule, latent=True, recompute=recompute):
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"][0], ignore_index=-100, reduction="sum")
    loss = loss / batch["num_items_in_batch"]
    model.zero_grad()
    loss.backward()
    model.gradient_checkpointing_disable()
    whole = weft.torch.unshard(logits.detach(), packing, layout=layout, mask=weft.Mask(causal=True))
    total, grads = loss.detach().clone(), {}
    torch.distributed.all_reduce(total)
    for name, p in model.named_parameters():
        grads[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        grads[name] = grads[name].to(torch.promote_types(p.dtype, torch.float32))
        torch.distributed.all_reduce(grads[name])
    return whole, float(total), grads


def apart(got, want):
    """The worst logit, the loss, the worst element of a gradient (of its parameter's largest), all gradients in norm."""
    grads = {name: torch.zeros_like(got[2][name]) if x is None else x for name, x in want[2].items()}
    largest = max(float(x.abs().max()) for x in grads.values())
    found = {name: torch.zeros_like(x) if got[2][name] is None else got[2][name] for name, x in grads.items()}
    total = [torch.cat([x.double().flatten() for x in all_of.values()]) for all_of in (found, grads)]
    return dict(logits=worst(got[0], want[0]), loss=abs(got[1] - want[1]) / want[1],
                gradients=max(worst(found[name], x, 1e-3 * largest) for name, x in grads.items()),
                norm=float((total[0] - total[1]).norm() / total[1].norm()))


def figures(layout, schedule, options):
    """By name: Weft in f64, Weft in f32 and eager in f32 against eager in f64, and Weft against eager, both in f32."""
    exact, eager = wanted(layout)
    _, ours, _, ours_exact = models()
    with in_f64():
        in_double = of_ranks(ours_exact, packing_of(layout), layout, schedule, **options)
    in_single = of_ranks(ours, packing_of(layout), layout, schedule, **options)
    return {"weft f64": apart(in_double, exact), "weft f32": apart(in_single, exact), "eager f32": apart(eager, exact),
            "weft, eager f32": apart(in_single, eager)}


def check(layout, schedule, options):
    found = figures(layout, schedule, options)
    print({name: {what: f"{x:.1e}" for what, x in of.items()} for name, of in found.items()})
    assert max(found["weft f64"].values()) < 1e-10, found
    assert all(found["weft, eager f32"][what] < 2e-6 for what in ("logits", "loss", "norm")), found
    # The worst element of a gradient is a sum of terms that cancel, of which eager attention's own rounding leaves 2.4e-6 in f32:
    # both are measured by f64.
    assert found["weft f32"]["gradients"] < 1.5 * max(2e-6, found["eager f32"]["gradients"]), found


@functools.lru_cache(None)
def results(ranks, folder):
    import json

    processes.start("test_transformers_latent.py", folder, ranks)
    return [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (2, 4)}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks(folders, ranks, case):
    processes.check(results(ranks, folders[ranks]), case)


def run(rank):
    processes.run_cases(rank, {name: functools.partial(check, *case) for name, case in CASES.items()}, sys.argv[1])


if __name__ == "__main__":
    ended = processes.fork(int(sys.argv[2]), run, sys.argv[1], seconds=280)
    sys.exit(any(status for status, _ in ended))
