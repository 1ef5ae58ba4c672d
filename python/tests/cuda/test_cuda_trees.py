"""Prefix trees on a GPU: attention, log-probabilities and losses against the sequences one by one in f64 on the CPU."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pytorch"))
from gpu import needs_gpu
from random_trees import OneSequence, grpo_tree, sequences, tree_of

pytestmark = needs_gpu
DTYPES = {"f32": (torch.float32, 2e-5), "bf16": (torch.bfloat16, 2e-2)}


def norm(got, want):
    return float((got.double().cpu() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [dict(), dict(window=(40, 0)), dict(chunk_size=64)], ids=["causal", "window", "chunks"])
def test_attention(dtype, layer):
    """Forward and gradients; those of the sequences one by one are added up at rows that they share."""
    kind, bound = DTYPES[dtype]
    tree = tree_of(sequences(1, count=12, longest=300))
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(tree.rows, heads, 128, generator=random).to(kind) for heads in (4, 2, 2)]
    weights = torch.randn(tree.separate_tokens, 4, 128, generator=random).to(kind)
    cp = weft.torch.ContextParallel(tree)
    leaves = [x.cuda().requires_grad_() for x in made]
    out = tree.gather(cp.attention(*leaves, **layer))
    (out.float() * weights.cuda().float()).sum().backward()

    exact = [x.double().requires_grad_() for x in made]
    rows, cu = torch.from_numpy(tree.rows_of_tokens), tree.cu_seqlens.tolist()
    alone = [OneSequence().attention(*(x[rows[a:b]] for x in exact), layer.get("window", (-1, 0)), layer.get("chunk_size"))
             for a, b in zip(cu, cu[1:])]
    alone = torch.cat(alone)
    (alone * weights.double()).sum().backward()
    assert norm(out.detach(), alone.detach()) < bound
    for got, want in zip(leaves, exact):
        assert norm(got.grad, want.grad) < 2 * bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_and_losses(dtype, monkeypatch):
    kind, bound = DTYPES[dtype]
    monkeypatch.setattr(weft.torch.edges, "_CHUNK", 200 * 1000)  # 200 rows at once
    tree = tree_of(sequences(2, count=20, longest=200))
    random = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 256, generator=random).mul(0.2).to(kind) for n in (tree.rows, 1000))
    weights, mask = torch.randn(tree.separate_tokens, generator=random), torch.rand(tree.separate_tokens, generator=random) > 0.3
    on_gpu = [x.cuda().requires_grad_() for x in (hidden, head)]
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    assert norm(tree.log_probs(*on_gpu).detach(), tree.log_probs(*exact).detach()) < bound
    assert norm(tree.log_probs(on_gpu[0] @ on_gpu[1].t()).detach(), tree.log_probs(*exact).detach()) < bound
    got, want = (tree.cross_entropy(*pair, weights=weights, mask=mask) for pair in (on_gpu, exact))
    # Weights of both signs almost cancel: by the size of what is added up.
    size = tree.cross_entropy(*exact, weights=weights.abs(), mask=mask)
    assert abs(float(got.detach()) - float(want.detach())) < bound * float(size.detach())
    got.backward()
    want.backward()
    for a, b in zip(on_gpu, exact):
        assert a.grad.dtype == kind and norm(a.grad, b.grad) < bound
    again = [x.detach().requires_grad_() for x in on_gpu]
    tree.cross_entropy(*again, weights=weights.cuda(), mask=mask.cuda()).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(on_gpu, again))  # the same bits every time


def test_a_decoder():
    made = sequences(3, count=12, longest=120)
    tree = tree_of(made)
    torch.manual_seed(0)
    net = grpo_tree.Decoder(2, 64, 40)
    exact = grpo_tree.Decoder(2, 64, 40).double()
    exact.load_state_dict(net.state_dict())
    net.cuda()
    cp = weft.torch.ContextParallel(tree)
    hidden = net(torch.from_numpy(tree.tokens).cuda(), cp.position_ids(device="cuda"), cp)
    loss = tree.cross_entropy(hidden, net.head, cp=cp)
    loss.backward()
    one = weft.torch.ContextParallel(tree)
    expected = tree.cross_entropy(exact(torch.from_numpy(tree.tokens), one.position_ids(), one), exact.head)
    expected.backward()
    assert abs(float(loss.detach()) - float(expected.detach())) < 1e-5
    for p, q in zip(net.parameters(), exact.parameters()):
        assert norm(p.grad, q.grad) < 1e-4
