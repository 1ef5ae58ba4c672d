"""Every model that docs/transformers.md names, against its own eager attention on each document alone: on one rank and on two.

    python test_transformers_models.py FOLDER [NAME]     # two ranks alone, of cases with NAME in their name; figures in rank0.txt
"""

import copy
import functools
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weft
import weft.torch
import weft.transformers

import processes
from small_models import CONFIGS, RANKS, alone, config_of, difference, models, packing_of, tokens, worst

# Of the largest logit, of the loss, and of the norm of all gradients together. An element of a gradient may be off by more, of
# the largest of its parameter: it is a sum of many terms that cancel, most of all for the decay rates of recurrent layers.
BOUNDS = dict(logits=2e-6, loss=2e-6, norm=2e-6, gradients=5e-6)
BOUNDS_OF_HYBRIDS = dict(logits=3e-6, loss=2e-6, norm=3e-6, gradients=1e-4)
HYBRID = list(CONFIGS)[list(CONFIGS).index("qwen3_next"):]
SHY = {"granite_hybrid": {"check_positions": False}}  # does not show positions to its attention or its masks
QUICK = ["deepseek_v3", "qwen3_next"]

_CASES = [
    *((name, layout, schedule, {}) for name in CONFIGS for layout, schedule in (("balanced", "all_gather"), ("zigzag", "ring"))),
    *((name, "balanced", "exact", {"checkpointing": how}) for name in ("qwen3_next", "olmo_hybrid") for how in (False, True)),
    *(("deepseek_v3", layout, schedule, {"latent": True}) for layout, schedule in (
        ("balanced", "all_gather"), ("zigzag", "ring"), ("zigzag", "all_to_all"), ("balanced", "auto"))),
    ("deepseek_v3", "balanced", "exact", {"latent": True, "checkpointing": False}),
    ("qwen3_next", "striped", "ring", {"checked": True}), ("qwen3_next", "dual_chunk", "all_to_all", {}),
]
CASES = {"-".join([*case[:3], *(f"{k}={v}" for k, v in case[3].items())]): case for case in _CASES}
FIGURES = {}  # by model: the worst of its cases


@functools.lru_cache(None)
def pair_of(name):
    """Weights as at the start of a training, so that rounding does not grow from layer to layer."""
    config = config_of(name)
    config.initializer_range = 0.45 / config.hidden_size**0.5
    return models(config)


def bounds_of(name):
    return BOUNDS_OF_HYBRIDS if name in HYBRID else BOUNDS


def check(name, layout, schedule, options, packing=None):
    found = difference(*pair_of(name), packing or packing_of(layout), None, layout, schedule, **SHY.get(name, {}), **options)
    FIGURES[name] = {what: max(value, FIGURES.get(name, {}).get(what, 0.0)) for what, value in found.items()}
    assert all(value <= bounds_of(name)[what] for what, value in found.items()), found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in CONFIGS])
def test_one_rank(name):
    check(name, "balanced", "all_gather", {})


def test_the_latent_moves():
    """Where a layer makes keys and values of a latent, that is what ranks exchange, and what has the right gradients."""
    check("deepseek_v3", "balanced", "all_gather", {"latent": True})
    with pytest.raises(weft.Error, match="makes its keys and values itself"):
        check("llama", "balanced", "all_gather", {"latent": True})


def test_kept_keys_are_not_made_again():
    _, ours = pair_of("deepseek_v3")
    packing, calls = packing_of("balanced"), []
    hooks = [module.register_forward_hook(lambda *_: calls.append(1)) for name, module in ours.named_modules()
             if name.endswith("kv_b_proj")]
    for recompute in (True, False):
        with weft.transformers.packed(packing, latent=True, recompute=recompute):
            logits = ours(**weft.transformers.inputs(tokens(packing.tokens_q), packing), use_cache=False).logits
            forward = len(calls)
            logits.sum().backward()
        assert forward > 0 and (len(calls) > forward) is recompute
        calls.clear()
    for hook in hooks:
        hook.remove()


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_documents_matter(name):
    """The check above can fail: other documents give other logits."""
    _, ours = pair_of(name)
    ids, logits = tokens(47), []
    for packing in (packing_of("zigzag"), weft.Packing([0, 47])):
        with weft.transformers.packed(packing, **SHY.get(name, {})), torch.no_grad():
            logits.append(ours(**weft.transformers.inputs(ids, packing), use_cache=False).logits)
    assert worst(*logits) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in SHY])
def test_positions_of_a_flattening_collator(name):
    """Without packed(): documents by their positions."""
    eager, ours = pair_of(name)
    packing, ids = packing_of("zigzag"), tokens(47)
    with torch.no_grad():
        got = ours(ids[None], position_ids=weft.torch.position_ids(packing)[None], use_cache=False).logits[0]
    assert worst(got, alone(eager, ids, packing)[0]) <= bounds_of(name)["logits"]


def with_router_loss(name, packing, group, layout="balanced"):
    """Loss, aux_loss and gradients of all ranks together, with the loss that balances experts, and the routers' logits."""
    _, ours = pair_of(name)
    ids = tokens(packing.tokens_q)
    with weft.transformers.packed(packing, group, layout):
        result = ours(**weft.transformers.inputs(ids, packing, group, layout=layout), use_cache=False, output_router_logits=True)
    ours.zero_grad()
    result.loss.backward()
    sums = [result.loss.detach().clone(), result.aux_loss.detach().clone()]
    sums += [p.grad for p in ours.parameters() if p.grad is not None]
    if weft.torch.group.resolve(group) is not None:
        for x in sums:
            torch.distributed.all_reduce(x)
    return sums, [x.detach() for x in result.router_logits]


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_router_loss(name, monkeypatch):
    """On one rank it is that of transformers, of all tokens of the pack; padding has no part in it."""
    (loss, aux, *_), logits = with_router_loss(name, packing_of("zigzag"), "")
    config, module = pair_of(name)[1].config, sys.modules[type(pair_of(name)[1]).__module__]
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    original = module.load_balancing_loss_func.__wrapped__
    assert float(aux) == pytest.approx(float(original(tuple(logits), experts, config.num_experts_per_tok)), rel=1e-6)
    (padded_loss, padded_aux, *_), padded = with_router_loss(name, packing_of("dual_chunk"), "")
    assert len(padded[0]) > len(logits[0])
    with_padding = float(original(tuple(padded), experts, config.num_experts_per_tok))
    assert abs(with_padding - float(padded_aux)) > 1e-3  # so it would show
    monkeypatch.setattr(weft.transformers._routers, "_is_known", lambda _: False)
    monkeypatch.setattr(weft.transformers._routers, "_seen", set())
    monkeypatch.setattr(module, "load_balancing_loss_func", original)
    with pytest.raises(weft.Error, match="set output_router_logits=False"):
        with_router_loss(name, packing_of("zigzag"), "")


# --- On two ranks ---

def routers(name):
    """The loss that balances experts over both ranks' rows is that of one rank with the whole pack, and so are gradients."""
    want, _ = with_router_loss(name, packing_of("zigzag"), "")
    want = [x.clone() for x in want]
    for layout in ("balanced", "zigzag"):
        got, _ = with_router_loss(name, packing_of(layout), None, layout)
        assert len(got) == len(want)
        largest = max(float(x.abs().max()) for x in want)
        assert max(worst(g, w, 1e-3 * largest) for g, w in zip(got, want)) < bounds_of(name)["gradients"], (got[:2], want[:2])


def few_documents(name, lengths):
    """Hybrid models where a rank has no document while recurrent layers run, or hardly any."""
    packing = weft.Packing([0, *torch.tensor(lengths).cumsum(0).tolist()])
    check(name, "balanced", "exact", {}, packing)
    if weft.torch.group.rank_and_ranks(None)[1] > 1:
        assert all(p.grad is not None for n, p in pair_of(name)[1].named_parameters() if "linear_attn" in n)


def data_parallel(name, lengths):
    """DistributedDataParallel waits for every parameter's gradient on every rank, also on one without documents; it averages."""
    eager, ours = pair_of(name)
    packing = weft.Packing([0, *torch.tensor(lengths).cumsum(0).tolist()])
    ids = tokens(packing.tokens_q)
    grads = {name: x.clone() for name, x in alone(eager, ids, packing)[2].items() if x is not None}
    ours.zero_grad()
    wrapped = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(ours))
    with weft.transformers.packed(packing):
        loss = wrapped(**weft.transformers.inputs(ids, packing), use_cache=False).loss
    loss.backward()
    largest = max(float(x.abs().max()) for x in grads.values())
    apart = {n: worst(RANKS * p.grad, grads[n], 1e-3 * largest) for n, p in wrapped.module.named_parameters() if n in grads}
    assert max(apart.values()) < bounds_of(name)["gradients"], apart


_ROUTED = ("gpt_oss", "qwen3_moe", "qwen3_next")
_FEW = [("qwen3_next", [31]), ("qwen3_next", [70, 1]), ("qwen3_next", [64, 65, 63, 9]), ("olmo_hybrid", [2])]
OTHERS = {
    **{f"{name}-documents={lengths}": functools.partial(few_documents, name, lengths) for name, lengths in _FEW},
    **{f"{name}-ddp={lengths}": functools.partial(data_parallel, name, lengths) for name, lengths in
       [("qwen3_5", [31]), ("nemotron_h", [5, 30, 2])]},
    **{f"{name}-router loss": functools.partial(routers, name) for name in _ROUTED},
}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return processes.results(sys.modules[__name__], tmp_path_factory.mktemp("ranks"))


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_two_ranks(on_two_ranks, case):
    processes.check(on_two_ranks, case)


def run(rank):
    cases, wanted = {name: functools.partial(check, *case) for name, case in CASES.items()}, "".join(sys.argv[2:])
    processes.run_cases(rank, {name: case for name, case in {**cases, **OTHERS}.items() if wanted in name}, sys.argv[1])
    for name, figures in FIGURES.items():
        print(f"| {name} |", " | ".join(f"{value:.1e}" for value in figures.values()), "|")


if __name__ == "__main__":
    ended = processes.fork(RANKS, run, sys.argv[1], seconds=280)
    sys.exit(any(status for status, _ in ended))
