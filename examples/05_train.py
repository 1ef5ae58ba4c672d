# Training with torch on two ranks, as threads of this process: a layer of attention learns to repeat the token before.
# A loss and gradients as on one rank, step by step. examples/train_packed.py is a whole model.
from typing import Optional

import torch
import torch.nn.functional as F
import weft
import weft.torch

packing = weft.Packing([0, 40, 47, 64])  # three documents in a pack
generator = torch.Generator().manual_seed(0)
input_ids = torch.randint(0, 16, (64,), generator=generator)
before = torch.where(torch.isin(torch.arange(64), torch.tensor([0, 40, 47])), -100, input_ids.roll(1))  # -100: no target
weights = [torch.randn(*shape, generator=generator) for shape in ((16, 32), (64, 32), (32, 96), (32, 16))]


def train(group: Optional[weft.Communicator] = None) -> list[float]:
    embed, place, project, head = parameters = [(w / w.shape[1] ** 0.5).requires_grad_() for w in weights]
    attention = weft.torch.ContextParallelAttention(causal=True, group=group, schedule="ring", one_rank=group is None)
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    ids, labels, positions = input_ids, before, torch.cat([torch.arange(n) for n in (40, 7, 17)])
    if group is not None:  # this rank's rows; everything below is the same
        ids, labels = weft.torch.shard(input_ids, packing, group), weft.torch.shard(before, packing, group, fill=-100)
        positions = weft.torch.position_ids(packing, group)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        q, k, v = ((embed[ids] + place[positions]) @ project).unflatten(-1, (6, 16)).chunk(3, dim=1)  # [rows, 2 heads, 16]
        logits = attention(q, k, v, packing).flatten(1) @ head
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / (before >= 0).sum()
        loss.backward()  # of this rank's rows: gradients, and the loss, add up over the ranks
        if group is not None:
            loss = torch.stack(weft.torch.all_gather(loss.detach(), group)).sum()
            for p in parameters:
                assert p.grad is not None
                p.grad = torch.stack(weft.torch.all_gather(p.grad, group)).sum(0)
        optimizer.step()
        losses.append(loss.item())
    return losses


one, (two, _) = train(), weft.spawn(2, train)
for step in range(0, 60, 10):
    print(f"step {step:2}: loss {one[step]:.2f} on one rank, {two[step]:.2f} on two")
assert one[-1] < 0.2 * one[0] and abs(one[0] - two[0]) < 1e-5 and abs(one[-1] - two[-1]) < 1e-2
