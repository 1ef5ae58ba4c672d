"""Log-probabilities of the next tokens, and a policy's loss made of them as GRPO has it, on two ranks against one."""

import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.functional as F
import weft
import weft.torch
import weft.transformers

import processes
from refusals import refused
from small_models import RANKS, TOLERANCE, config_of, models, packing_of, tokens, worst

PROMPT = 3  # tokens of each document that the policy did not write
TEMPERATURE = 0.7


def losses(log_probs, old, reference, advantages):
    """Of each token: the clipped ratio of the policy to the one that wrote the document, and a divergence from a third."""
    ratio = (log_probs - old).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return 0.04 * ((reference - log_probs).exp() - (reference - log_probs) - 1) - gain


def problem(packing):
    """(ids, labels with the prompts left out, and of each token old and reference log-probabilities and the advantage)."""
    ids = tokens(packing.tokens_q)
    labels, generator = ids.clone(), torch.Generator().manual_seed(4)
    advantages = torch.zeros(len(ids))
    for begin, length in zip(packing.cu_seqlens_q_padded.tolist(), packing.lengths_q.tolist()):
        labels[begin:begin + PROMPT] = -100
        advantages[begin:begin + length] = torch.randn((), generator=generator)
    learned = (weft.torch.next_token_labels(labels, packing) != -100).float()
    old, reference = ((-4 + 0.3 * torch.randn(len(ids), generator=generator)) * learned for _ in range(2))
    return ids, labels, old, reference, advantages * learned


def alone(model, packing, labels, ids, *others):
    """(log-probabilities of all tokens, the loss, gradients) of each document by itself."""
    following = weft.torch.next_token_labels(labels, packing)
    found = []
    for begin, length in zip(packing.cu_seqlens_q_padded.tolist(), packing.lengths_q.tolist()):
        at = slice(begin, begin + length)
        if length:
            words = (model(ids[None, at], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
            picked = words.gather(1, following[at].clamp(min=0)[:, None])[:, 0]
            found.append(torch.where(following[at] == -100, 0, picked))
    found = torch.cat(found)
    loss = losses(found, *others).sum() / (following != -100).sum()
    model.zero_grad()
    loss.backward()
    return found.detach(), float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def policy(name, layout, schedule):
    eager, ours = models(config_of(name))
    packing = packing_of(layout)
    ids, labels, *others = problem(packing)
    log_probs, loss, grads = alone(eager, packing, labels, ids, *others)

    cp = weft.torch.ContextParallel(packing, mask=weft.Mask(causal=True), layout=layout, schedule=schedule, reduction="sum")
    batch = weft.transformers.inputs(ids, packing, layout=layout, labels=False)
    with weft.transformers.packed(packing, layout=layout, schedule=schedule):
        logits = ours(**batch, use_cache=False).logits
    mine = cp.log_probs(logits, labels[None], temperature=TEMPERATURE)
    assert mine.shape == logits.shape[:2] and torch.equal(mine[0], cp.log_probs(logits[0], labels, temperature=TEMPERATURE))
    assert worst(cp.unshard(mine.detach())[0], log_probs) < TOLERANCE
    total = cp.loss(losses(mine[0], *map(cp.shard, others)))
    total.backward()
    assert abs(float(cp.reduce(total.detach())) - loss) < TOLERANCE * abs(loss)
    largest = max(float(g.abs().max()) for g in grads.values())
    for parameter, p in ours.named_parameters():
        torch.distributed.all_reduce(p.grad)
        assert worst(p.grad, grads[parameter], 1e-3 * largest) < TOLERANCE, parameter


CASES = {"llama, balanced": lambda: policy("llama", "balanced", "all_gather"),
         "llama, contiguous, ring": lambda: policy("llama", "contiguous", "ring"),
         "mistral, striped": lambda: policy("mistral", "striped", "exact")}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return processes.results(sys.modules[__name__], tmp_path_factory.mktemp("ranks"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(on_two_ranks, case):
    processes.check(on_two_ranks, case)


def test_half_precision_and_gradients():
    cp, ids = weft.torch.ContextParallel([0, 7, 10, 16]), torch.arange(16) % 5
    logits = torch.randn(16, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    following = weft.torch.next_token_labels(ids, cp.packing)
    assert (cp.log_probs(logits, ids) == 0).tolist() == (following == -100).tolist()
    assert torch.autograd.gradcheck(lambda x: cp.log_probs(x, ids, temperature=1.5), logits)
    rounded = logits.detach().bfloat16()
    assert torch.equal(cp.log_probs(rounded, ids), -F.cross_entropy(rounded.float(), following, reduction="none"))
    mean = cp.loss(-cp.log_probs(logits.detach(), ids))
    assert float(mean) == pytest.approx(float(F.cross_entropy(logits.detach(), following)))
    assert torch.equal(cp.log_probs(logits, following, shifted=True), cp.log_probs(logits, ids))


def test_refused():
    cp, ids = weft.torch.ContextParallel([0, 7, 16]), torch.arange(16)
    for logits, options, words in ((torch.zeros(15, 4), {}, "[15, 4]"), (torch.zeros(16), {}, "[rows, vocabulary]"),
                                   (torch.zeros(16, 4), {"temperature": 0}, "temperature of 0")):
        with refused(words):
            cp.log_probs(logits, ids, **options)


if __name__ == "__main__":
    ended = processes.fork(RANKS, lambda rank: processes.run_cases(rank, CASES, sys.argv[1]), sys.argv[1], seconds=120)
    sys.exit(any(status for status, _ in ended))
