"""Random trees, and a model on their sequences one by one, in f64 by torch's own operations."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import weft

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import grpo_tree

WINDOW = 5


def sequences(seed, count=7, longest=14):
    """Sequences of which most share the beginning of an earlier one; among them an empty one, one of a token, and a twin."""
    random = torch.Generator().manual_seed(seed)
    made = [torch.randint(grpo_tree.VOCAB, (longest,), generator=random)]
    while len(made) < count:
        other = made[int(torch.randint(len(made), (), generator=random))]
        shared = other[:int(torch.randint(-2, len(other) + 1, (), generator=random).clamp(min=0))]
        more = int(torch.randint(0, longest - len(shared) + 1, (), generator=random))
        made.append(torch.cat((shared, torch.randint(grpo_tree.VOCAB, (more,), generator=random))))
    made += [made[0][:0], made[1][:1], made[2]]
    return [made[i] for i in torch.randperm(len(made), generator=random)]


def tree_of(made):
    return weft.prepare.Tree.from_sequences([s.numpy() for s in made])


def model(dtype=torch.float64):
    """Two layers, the first with a window."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return grpo_tree.Decoder(2, 8, WINDOW).to(dtype)


class OneSequence:
    """In the place of a ContextParallel: dense attention of one sequence."""

    def attention(self, q, k, v, window, chunk_size=None):
        at = torch.arange(len(q))
        apart = at[:, None] - at
        see = (apart >= 0) & ((apart <= window[0]) | (window[0] < 0))
        if chunk_size is not None:
            see &= at[:, None] // chunk_size == at // chunk_size
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=see).transpose(0, 1)


def log_probs_alone(net, made, temperature=1.0):
    """Of all tokens, sequence after sequence; 0 of the first of each."""
    found = []
    for ids in made:
        logits = net.head(net(ids, torch.arange(len(ids)), OneSequence())) / temperature if len(ids) else None
        found += [net.head.weight.new_zeros(min(len(ids), 1))]
        if len(ids) > 1:
            found += [logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]]
    return torch.cat(found)


def gradients(net, loss):
    """Of all parameters; None is zero."""
    net.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def worst(got, want):
    """The largest difference of a gradient, of the largest of its parameter."""
    return max(float((got[name] - want[name]).abs().max() / want[name].abs().max().clamp(min=1e-30)) for name in want)


def policy_loss(log_probs, made, seed=3):
    """One that is no sum over tokens: ratios of whole sequences are clipped, as GSPO has it."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(s) for s in made])
    old = (0.3 * torch.randn(len(log_probs), generator=random, dtype=torch.float64) - 5.5).to(log_probs)
    gains = torch.randn(len(made), generator=random, dtype=torch.float64).to(log_probs)
    which = torch.repeat_interleave(torch.arange(len(made)), lengths).to(log_probs.device)
    means = torch.zeros_like(gains).index_add(0, which, log_probs - old) / lengths.clamp(min=1).to(log_probs)
    ratio = means.exp()
    return -torch.min(ratio * gains, ratio.clamp(0.9, 1.1) * gains).sum() + (log_probs - old).square().mean()
