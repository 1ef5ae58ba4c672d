"""A step of GRPO on several answers to each prompt: the prompts are computed once (a tree), beside each sequence by itself.

    python examples/grpo_tree.py
    torchrun --nproc-per-node 2 examples/grpo_tree.py
    python examples/grpo_tree.py --device cuda --prompt 8192 --answer 1024 --dtype bf16

Both give the same loss and gradients, which the program checks. The lines that know of trees are those with `tree`.
"""

import argparse
import os
import time
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import weft
import weft.torch
from torch import Tensor, nn

VOCAB = 256
CLIP = 0.2


class Block(nn.Module):
    def __init__(self, heads: int, dim: int, window: int) -> None:
        super().__init__()
        width, self.dim, self.window = heads * dim, dim, window
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, cp: weft.torch.ContextParallel) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, self.dim)).chunk(3, 1)  # [rows, heads, dim]
        x = x + self.out(cp.attention(rotated(q, angles), rotated(k, angles), v, window=(self.window, 0)).flatten(1))
        result: Tensor = x + self.down(F.silu(self.up(self.norm_mlp(x))))
        return result


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).to(x.dtype)


class Decoder(nn.Module):
    """One layer with a window, one that sees all; gives hidden states, of which `head` makes logits."""

    def __init__(self, heads: int, dim: int, window: int) -> None:
        super().__init__()
        self.planes = dim // 2
        self.embed, self.head = nn.Embedding(VOCAB, heads * dim), nn.Linear(heads * dim, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(heads, dim, each) for each in (window, -1))
        self.norm = nn.RMSNorm(heads * dim)

    def forward(self, ids: Tensor, positions: Tensor, cp: weft.torch.ContextParallel) -> Tensor:
        steps = torch.arange(self.planes, device=ids.device, dtype=torch.float64)
        exact = torch.promote_types(self.embed.weight.dtype, torch.float32)
        angles = (positions[:, None, None] * 1e4 ** (-steps / self.planes)).to(exact)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, angles, cp)
        hidden: Tensor = self.norm(x)
        return hidden


class Rollouts(NamedTuple):
    """Answers to prompts, sequence after sequence. The tensors are of all their tokens."""

    sequences: list[Tensor]
    written: Tensor  # which tokens the policy wrote: those of answers
    advantages: Tensor  # the sequence's reward among those of the same prompt
    old: Tensor  # the log-probability when it was written


def rollouts(asked: argparse.Namespace) -> Rollouts:
    random = torch.Generator().manual_seed(1)
    sequences, written, advantages = [], [], []
    for _ in range(asked.prompts):
        prompt = torch.randint(VOCAB, (asked.prompt,), generator=random)
        rewards = torch.rand(asked.answers, generator=random)
        for gain in (rewards - rewards.mean()) / (rewards.std() + 1e-6):
            length = int(torch.randint(max(asked.answer // 2, 1), asked.answer + 1, (), generator=random))
            sequences.append(torch.cat((prompt, torch.randint(VOCAB, (length,), generator=random))).to(asked.device))
            written.append(torch.arange(len(sequences[-1])) >= asked.prompt)
            advantages.append(gain.expand(len(sequences[-1])))
    old = -5.5 + 0.3 * torch.randn(sum(map(len, sequences)), generator=random)
    return Rollouts(sequences, *(x.to(asked.device) for x in (torch.cat(written), torch.cat(advantages), old)))


def clipped(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Of each token: its advantage times the ratio of the policy to the one that wrote it, which counts up to a bound."""
    ratio = (log_probs - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


Step = Callable[[], tuple[Tensor, int]]  # (the loss, rows); gradients of this rank's rows are in the parameters


def on_tree(model: Decoder, data: Rollouts, group: Any) -> Step:
    tree = weft.prepare.Tree.from_sequences([s.cpu().numpy() for s in data.sequences])
    ids = torch.as_tensor(tree.tokens).to(data.old.device)

    def step() -> tuple[Tensor, int]:
        cp = weft.torch.ContextParallel(tree, group, reduction="sum")
        hidden = model(cp.shard(ids), cp.position_ids(device=ids.device), cp)
        # [tokens of all sequences], in their order. Prompts' rows make no logits, because nothing of them is asked.
        log_probs = tree.log_probs(hidden, model.head.weight, cp=cp, mask=data.written)
        loss = torch.where(data.written, clipped(log_probs, data.old, data.advantages), 0).sum() / data.written.sum()
        loss.backward()
        return loss.detach(), tree.rows

    return step


def one_by_one(model: Decoder, data: Rollouts, group: Any) -> Step:
    """The same with each sequence as a document of its own, its prompt included."""
    ids = torch.cat(data.sequences)
    cu_seqlens = [0, *torch.tensor([len(s) for s in data.sequences]).cumsum(0).tolist()]
    labels = torch.where(data.written, ids, -100)

    def step() -> tuple[Tensor, int]:
        cp = weft.torch.ContextParallel(cu_seqlens, group, reduction="sum")
        logits = model.head(model(cp.shard(ids), cp.position_ids(device=ids.device), cp))
        # A row has what is said of the token after it.
        written, old, advantages = (cp.shard(x.roll(-1)) for x in (data.written, data.old, data.advantages))
        losses = torch.where(written, clipped(cp.log_probs(logits, labels), old, advantages), 0)
        loss = cp.loss(losses, targets=data.written.sum())
        loss.backward()
        return cp.reduce(loss.detach()), len(ids)

    return step


class Measured(NamedTuple):
    rows: int
    loss: float
    gradient: Tensor
    seconds: float


def measured(step: Step, model: Decoder) -> Measured:
    """The second of two calls."""
    on_gpu = model.head.weight.is_cuda
    step()  # which allocates and compiles
    model.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    loss, rows = step()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    gradient = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    if dist.is_initialized():
        dist.all_reduce(gradient)
    return Measured(rows, loss.item(), gradient, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of each")
    parser.add_argument("--answer", type=int, default=128, help="tokens of the longest; others have at least half as many")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--window", type=int, default=512, help="tokens that the first layer sees; the second sees all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    asked = parser.parse_args()
    if "RANK" in os.environ:  # of torchrun
        if asked.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if asked.device == "cuda" else "gloo")
    group, ranks = (dist.group.WORLD, dist.get_world_size()) if dist.is_initialized() else ("", 1)
    torch.manual_seed(0)  # equal weights on every rank
    model = Decoder(asked.heads, asked.head_dim, asked.window).to(asked.device, torch.bfloat16 if asked.dtype == "bf16" else None)
    data = rollouts(asked)
    alone, tree = (measured(way(model, data, group), model) for way in (one_by_one, on_tree))
    apart = float((tree.gradient - alone.gradient).norm() / alone.gradient.norm())
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{asked.answers} answers to each of {asked.prompts} prompts of {asked.prompt:,} tokens, {asked.dtype}, {ranks} "
              f"rank{'s' * (ranks > 1)}, {asked.device}")
        print(f"{'':<22}{'tokens':>10}{'loss':>12}{'seconds':>10}")
        for name, one in (("sequences one by one", alone), ("a tree", tree)):
            print(f"{name:<22}{one.rows:>10,}{one.loss:>12.6f}{one.seconds:>10.3f}")
        print(f"tokens saved: {100 * (1 - tree.rows / alone.rows):.1f} %; time: 1/{alone.seconds / tree.seconds:.1f}; gradients "
              f"differ by {apart:.1e} of their norm")
    loss, gradients = (1e-5, 1e-5) if asked.dtype == "f32" else (1e-2, 2e-2)
    if not (abs(tree.loss - alone.loss) <= loss * max(abs(alone.loss), 0.1) and apart <= gradients):
        raise SystemExit(f"not the loss {alone.loss} of the sequences one by one but {tree.loss}, gradients off by {apart}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
