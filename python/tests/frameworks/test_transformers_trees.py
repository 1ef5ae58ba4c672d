"""weft.transformers on trees: log-probabilities, losses and gradients are those of eager attention on each sequence alone."""

import functools
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weft
import weft.torch
import weft.transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "pytorch"))
import processes
from random_trees import policy_loss, sequences, tree_of
from refusals import refused
from small_models import RANKS, config_of, models, worst

TOLERANCE = 1e-6  # transformers computes norms and angles in f32, in f64 models too
ELEMENT = 5e-6  # of a gradient, of the largest of its parameter
pair_of = functools.lru_cache(None)(lambda name: [x.double() for x in models(config_of(name))])


def rollouts(seed=1):
    return [3 + s % 58 for s in sequences(seed, count=9, longest=20)]


def alone(model, made):
    """(log-probabilities of all tokens, the loss, gradients) of each sequence by itself."""
    found = []
    for ids in made:
        found.append(torch.zeros(min(len(ids), 1), dtype=torch.float64))
        if len(ids) > 1:
            words = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
            found.append(words[:-1].gather(1, ids[1:, None])[:, 0])
    log_probs = torch.cat(found)
    loss = policy_loss(log_probs, made)
    model.zero_grad()
    loss.backward()
    return log_probs.detach(), float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def check(name, layout=None, schedule="auto", checkpointing=None):
    eager, ours = pair_of(name)
    made = rollouts()
    tree = tree_of(made)
    log_probs, loss, grads = alone(eager, made)
    cp = weft.torch.ContextParallel(tree, layout=layout or "balanced", reduction="sum")
    batch = weft.transformers.inputs(tree.tokens, tree, layout=layout)
    assert sorted(batch) == ["input_ids", "position_ids"]
    if checkpointing is not None:
        ours.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    with weft.transformers.packed(tree, layout=layout, schedule=schedule):
        found = tree.log_probs(ours(**batch, use_cache=False).logits, cp=cp)
    ours.zero_grad()
    total = policy_loss(found, made)
    total.backward()
    ours.gradient_checkpointing_disable()
    assert worst(found, log_probs) < TOLERANCE
    assert abs(float(total.detach()) - loss) < TOLERANCE * abs(loss)
    apart, size = 0.0, 0.0
    largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
    for parameter, p in ours.named_parameters():
        got = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if cp.ranks > 1:
            torch.distributed.all_reduce(got)
        want = torch.zeros_like(p) if grads[parameter] is None else grads[parameter]
        assert worst(got, want, 1e-3 * largest) < ELEMENT, parameter
        apart, size = apart + float((got - want).square().sum()), size + float(want.square().sum())
    assert (apart / size) ** 0.5 < TOLERANCE


@pytest.mark.parametrize("name", ["llama", *(pytest.param(x, marks=pytest.mark.long) for x in ("mistral", "llama4", "gpt_oss"))])
def test_one_rank(name):
    check(name)


CASES = {
    "llama": functools.partial(check, "llama"),
    "llama, ring, checkpoints": functools.partial(check, "llama", "zigzag", "ring", False),
    "mistral": functools.partial(check, "mistral"),
    "mistral, exact": functools.partial(check, "mistral", "contiguous", "exact"),
    "llama4": functools.partial(check, "llama4"),
    "gemma2": functools.partial(check, "gemma2", "striped", "exact"),
    "gpt_oss": functools.partial(check, "gpt_oss", None, "ring"),
}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return processes.results(sys.modules[__name__], tmp_path_factory.mktemp("ranks"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(on_two_ranks, case):
    processes.check(on_two_ranks, case)


def test_the_tree_matters():
    """Branches of a tree do not see each other, and rows of one sequence after another are no tree."""
    _, ours = pair_of("llama")
    tree = tree_of(rollouts())
    batch = weft.transformers.inputs(tree.tokens, tree)
    with torch.no_grad():
        with weft.transformers.packed(tree):
            right = ours(**batch, use_cache=False).logits
        with weft.transformers.packed([0, tree.rows], check_positions=False):
            wrong = ours(**batch, use_cache=False).logits
    assert worst(wrong, right) > 1e-2


def test_refused():
    _, ours = pair_of("llama")
    tree = tree_of(rollouts())
    with refused("labels of rows of a tree", "tree.cross_entropy"):
        weft.transformers.inputs(tree.tokens, tree, labels=torch.from_numpy(tree.tokens))
    with refused(f"the packing {tree.rows} tokens"):
        weft.transformers.inputs(tree.tokens[1:], tree)
    batch = weft.transformers.inputs(tree.tokens, tree)
    for positions in (batch["position_ids"], batch["position_ids"].clone()):
        with refused("outside packed()"):
            ours(input_ids=batch["input_ids"], position_ids=positions, use_cache=False)
    batch["position_ids"] = torch.arange(tree.rows)[None]
    with refused("position_ids"), weft.transformers.packed(tree):
        ours(**batch, use_cache=False)


@pytest.mark.long
@pytest.mark.parametrize("name, words, options", [("lfm2", "a recurrent layer on rows of a tree", {}),
                                                  ("qwen3_moe", "routers on rows of a tree", {"output_router_logits": True})])
def test_models_that_are_refused(name, words, options):
    _, ours = models(config_of(name))
    tree = tree_of(rollouts())
    batch = weft.transformers.inputs(tree.tokens, tree)
    with refused(words), weft.transformers.packed(tree):
        ours(**batch, use_cache=False, **options)


if __name__ == "__main__":
    ended = processes.fork(RANKS, lambda rank: processes.run_cases(rank, CASES, sys.argv[1]), sys.argv[1], seconds=120)
    sys.exit(any(status for status, _ in ended))
