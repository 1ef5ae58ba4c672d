"""weft.compat.ring_flash_attn on two ranks: a program written for ring-flash-attn, against eager attention of each document."""

import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.functional as F
import weft
import weft.compat.ring_flash_attn
import weft.torch
from weft.compat.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params

import processes
from refusals import refused
from small_models import RANKS, TOLERANCE, alone, config_of, models, tokens, worst

CU = torch.tensor([0, 13, 14, 21, 42, 48], dtype=torch.int32)


def part(x):
    return x.chunk(RANKS)[torch.distributed.get_rank()][None]


def positions():
    return torch.cat([torch.arange(n) for n in CU.diff().tolist()])


def step(model, cu=CU):
    """(logits of all tokens, loss, gradients summed over the ranks) of a program that deals out rows by itself."""
    packing, ids = weft.Packing(cu.tolist()), tokens(int(cu[-1]))
    update_ring_flash_attn_params(cu, None)
    logits = model(part(ids), position_ids=part(positions()), use_cache=False).logits[0]
    following = weft.torch.next_token_labels(ids, packing)
    loss = F.cross_entropy(logits, part(following)[0], ignore_index=-100, reduction="sum") / (following != -100).sum()
    model.zero_grad()
    loss.backward()
    parts = [torch.empty_like(logits) for _ in range(RANKS)]
    torch.distributed.all_gather(parts, logits.detach().contiguous())
    for x in (loss.detach(), *(p.grad for p in model.parameters())):
        torch.distributed.all_reduce(x)
    return torch.cat(parts), float(loss), {name: p.grad for name, p in model.named_parameters()}


def same(name, stride, made_before=False):
    eager, ours = models(config_of(name))
    logits, loss, grads = alone(eager, tokens(int(CU[-1])), weft.Packing(CU.tolist()))
    if made_before:
        ours.config._attn_implementation = "flash_attention_2"
        substitute_hf_flash_attn(None, stride)
    else:
        substitute_hf_flash_attn(None, heads_k_stride=stride)
        again = transformers.AutoModelForCausalLM.from_config(config_of(name), attn_implementation="flash_attention_2")
        again.load_state_dict(ours.state_dict())
        ours = again
    found, mean, gradients = step(ours)
    assert worst(found, logits) < TOLERANCE and abs(mean - loss) < TOLERANCE * loss
    largest = max(float(g.abs().max()) for g in grads.values())
    for parameter, grad in grads.items():
        assert worst(gradients[parameter], grad, 1e-3 * largest) < TOLERANCE, parameter


def refusals():
    substitute_hf_flash_attn(None, 1)
    with refused("47 tokens on 2 ranks", "multiple of 2"):
        update_ring_flash_attn_params(torch.tensor([0, 13, 47]), None)
    group = torch.distributed.new_group(list(range(RANKS)))
    with refused("another group"):
        update_ring_flash_attn_params(CU, group)
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation="flash_attention_2")
    update_ring_flash_attn_params(CU, None)
    ids = part(tokens(int(CU[-1])))
    for given in ({}, dict(position_ids=torch.arange(ids.shape[1])[None])):  # without any the model counts from 0 on every rank
        with refused("position_ids"):
            model(ids, use_cache=False, **given)
    substitute_hf_flash_attn(None, 4)
    with refused("heads_k_stride is 4", "2 K/V heads"):
        model(ids, position_ids=part(positions()), use_cache=False)
    with refused("heads_k_stride is 0"):
        substitute_hf_flash_attn(None, 0)


CASES = {"llama": lambda: same("llama", 1), "llama, two heads at a time": lambda: same("llama", 2),
         "mistral": lambda: same("mistral", 1), "a model that is there already": lambda: same("llama", 1, made_before=True),
         "refusals": refusals}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return processes.results(sys.modules[__name__], tmp_path_factory.mktemp("ranks"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(on_two_ranks, case):
    processes.check(on_two_ranks, case)


if __name__ == "__main__":
    ended = processes.fork(RANKS, lambda rank: processes.run_cases(rank, CASES, sys.argv[1]), sys.argv[1], seconds=120)
    sys.exit(any(status for status, _ in ended))
