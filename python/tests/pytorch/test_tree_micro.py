"""A tree in micro-sequences: losses and gradients are those of its sequences one by one, and about one path of keys is held."""

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

from random_trees import gradients, log_probs_alone, model, sequences, tree_of, worst
from refusals import refused

TOLERANCE = 1e-10


class Stepwise:
    """In the place of a ContextParallel: a layer with a K/V buffer for each call of a forward, in their order."""

    def __init__(self, drop, group=None):
        self.drop, self.group, self.layers = drop, group, {}

    def of(self, step):
        self.step, self.calls = step, 0
        return self

    def attention(self, q, k, v, window, chunk_size=None):
        if self.calls not in self.layers:
            mask = weft.Mask(causal=True, window=window)
            self.layers[self.calls] = weft.torch.MicroSequenceAttention(mask=mask, drop=self.drop, group=self.group)
        self.calls += 1
        return self.layers[self.calls - 1](q, k, v, self.step)


def hidden_of(net, tree, step, layers):
    return net(step.take(torch.as_tensor(tree.tokens)), step.position_ids(), layers.of(step))


@pytest.mark.parametrize("drop", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("micros", [1, 3, 7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cross_entropy(seed, micros, drop):
    made, net, layers = sequences(seed), model(), Stepwise(drop)
    tree, weights = tree_of(made), torch.linspace(-1, 2, len(made), dtype=torch.float64)
    of_tokens = torch.repeat_interleave(weights, torch.tensor([len(s) for s in made]))
    alone = -(log_probs_alone(net, made) * of_tokens).sum() / 50
    want = gradients(net, alone)
    net.zero_grad()
    loss = weft.torch.MicroSequences(tree, micros).forward_backward(
        lambda step: tree.cross_entropy(hidden_of(net, tree, step, layers), net.head, weights=weights, targets=50, step=step))
    assert abs(float(loss) - alone.item()) <= TOLERANCE * abs(alone.item())
    assert worst({name: p.grad for name, p in net.named_parameters()}, want) <= TOLERANCE


@pytest.mark.parametrize("micros", [1, 4])
def test_clipped_ratios_of_tokens(micros):
    """Each step has its tokens' losses; the steps together have all tokens once."""
    made, net, layers = sequences(3), model(), Stepwise(True)
    tree, old = tree_of(made), torch.full((tree_of(made).separate_tokens,), -3.5, dtype=torch.float64)
    learned = torch.as_tensor(tree.edge_of_token) >= 0

    def losses(found):
        ratio = (found - old).exp()
        return -torch.min(ratio * 1.3, ratio.clamp(0.8, 1.2) * 1.3)

    alone = torch.where(learned, losses(log_probs_alone(net, made, 0.8)), 0).sum()
    want = gradients(net, alone)
    net.zero_grad()
    times = torch.zeros(tree.separate_tokens, dtype=torch.int64)

    def loss_of(step):
        found = tree.log_probs(hidden_of(net, tree, step, layers), net.head, temperature=0.8, step=step)
        assert torch.equal(found != 0, step.predicts())
        if not step.again:
            times.add_(step.predicts())
        return torch.where(step.predicts(), losses(found), 0).sum()

    loss = weft.torch.MicroSequences(tree, micros).forward_backward(loss_of)
    assert torch.equal(times, learned.to(torch.int64))
    assert abs(float(loss) - alone.item()) <= TOLERANCE * abs(alone.item())
    assert worst({name: p.grad for name, p in net.named_parameters()}, want) <= TOLERANCE


def test_one_path_is_held():
    tree = weft.prepare.Tree.from_nodes([-1, *[0] * 16], [512, *[64] * 16])
    layer = weft.torch.MicroSequenceAttention(drop=True)
    x = torch.randn(tree.rows, 2, 8)
    micros = weft.torch.MicroSequences(tree, 24)
    with torch.no_grad():
        out = torch.cat([layer(x[step.rows], x[step.rows], x[step.rows], step) for step in micros.forward_steps()])
    assert [size for _, size, _ in layer._free] == [512 + 64]
    torch.testing.assert_close(out, weft.torch.context_parallel_attention(x, x, x, tree.packing, tree.mask()))


def test_values_of_a_critic():
    made = sequences(4)
    tree = tree_of(made)
    x, total = torch.randn(tree.rows, 3, dtype=torch.float64), 0
    layer, some = weft.torch.MicroSequenceAttention(), torch.zeros(-(-tree.rows // 5), 1, 8)
    for step in weft.torch.MicroSequences(tree, 5).forward_steps():
        layer(some, some, some, step)
        total = total + tree.gather(step.take(x), step=step)
    assert torch.equal(total, tree.gather(x))


def test_refusals():
    made = sequences(5)
    tree, other = tree_of(made), tree_of(sequences(6))
    packs = weft.torch.MicroSequences(tree.packing, 2)
    layer = weft.torch.MicroSequenceAttention()
    x = torch.randn(-(-tree.rows // 2), 2, 8)
    for step in packs.forward_steps():
        layer(x, x, x, step)
        with refused("not a tree's"):
            step.predicts()
        with refused("the step is not of this tree"):
            tree.log_probs(torch.randn(len(x), 6), step=step)
    for step in weft.torch.MicroSequences(tree, 2).forward_steps():
        with refused("the step is not of this tree"):
            other.log_probs(torch.randn(len(x), 6), step=step)
        with refused(f"this rank has of the step {len(x)} rows"):
            tree.log_probs(torch.randn(tree.rows + 3, 6), step=step)
        layer(x, x, x, step)


@pytest.mark.parametrize("seed, drop", [(0, True), (1, False), (2, True)])
def test_two_ranks(seed, drop):
    made, net = sequences(seed), model()
    tree = tree_of(made)
    alone = -log_probs_alone(net, made).sum() / 40
    want = gradients(net, alone)
    nets = [model(), model()]  # not by the ranks: torch has one random state for all threads

    def rank(comm):
        own, layers = nets[comm.rank], Stepwise(drop, comm)
        loss = weft.torch.MicroSequences(tree, 3, comm).forward_backward(
            lambda step: tree.cross_entropy(hidden_of(own, tree, step, layers), own.head, targets=40, step=step))
        return loss, {name: p.grad for name, p in own.named_parameters()}

    (loss, got), (more, other) = weft.spawn(2, rank)
    assert abs((loss + more).item() - alone.item()) <= TOLERANCE * abs(alone.item())
    assert worst({name: got[name] + other[name] for name in got}, want) <= TOLERANCE
