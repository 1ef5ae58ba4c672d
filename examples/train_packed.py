"""A small decoder after Llama 4, trained on packed documents whose tokens are spread over ranks.

    python examples/train_packed.py --picture loss.png
    python examples/train_packed.py --device cuda --dtype bf16 --threads 4         # ranks that share one GPU
    torchrun --nproc-per-node 4 examples/train_packed.py --schedule ring

Every rank has the whole model and some rows of each pack. Only attention and the sum of gradients know of other ranks.
"""

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import weft
import weft.torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from weft.types import LayoutName


@dataclass
class Config:
    vocab: int = 16
    dim: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 128
    chunk_size: int = 32  # layers see no further than their chunk, and know positions by rotation;
    full_every: int = 4  # but every 4th sees its whole document, and knows none


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [rows, heads, dim] by angles [rows, 1, dim / 2]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: Config, index: int, **attention: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.dim // config.heads
        self.full = (index + 1) % config.full_every == 0
        self.chunk_size = None if self.full else config.chunk_size
        self.norm, self.norm_mlp = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.qkv = nn.Linear(config.dim, (config.heads + 2 * config.kv_heads) * self.head_dim, bias=False)
        self.attention = weft.torch.ContextParallelAttention(causal=True, **attention)
        self.o = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, packing: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)  # views: any strides will do
        if not self.full:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = x + self.o(self.attention(q, k, v, packing, chunk_size=self.chunk_size).flatten(1))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class Decoder(nn.Module):
    """Tokens and positions [rows] of this rank to logits [rows, vocab]. attention: what every layer's is to be like."""

    def __init__(self, config: Config, *, recompute: bool = False, bf16: bool = False, **attention: Any) -> None:
        super().__init__()
        self.config, self.recompute, self.bf16 = config, recompute, bf16
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, i, **attention) for i in range(config.layers))
        self.norm, self.head = nn.RMSNorm(config.dim), nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, packing: Tensor) -> Tensor:
        half = self.config.dim // self.config.heads // 2
        angles = positions[:, None, None] * 1e4 ** (-torch.arange(half, device=positions.device) / half)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(input_ids)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            for block in self.blocks:
                # Recomputing attention moves keys again; every rank does it at the same place of its backward.
                given = (x, packing, cos, sin)
                x = checkpoint(block, *given, use_reentrant=False) if self.recompute else block(*given)
            logits: Tensor = self.head(self.norm(x))
        return logits.float()


class Text:
    """Documents in which the last two tokens say the next one, nine times out of ten. Their lengths have a long tail."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.random = vocab, np.random.default_rng(seed)
        self.next = self.random.integers(0, vocab, (vocab, vocab))
        rare = 0.1 / vocab
        self.entropy = -(0.9 + rare) * math.log(0.9 + rare) - (vocab - 1) * rare * math.log(rare)

    def document(self, length: int) -> NDArray[np.int64]:
        tokens = self.random.integers(0, self.vocab, length)
        for i in 2 + np.flatnonzero(self.random.random(length - 2) < 0.9):
            tokens[i] = self.next[tokens[i - 2], tokens[i - 1]]
        return tokens

    def packs(self, budget: int) -> Iterator[tuple[Tensor, weft.Packing]]:
        """(tokens [budget], packing) without end. From one seed they are the same on every rank."""
        while True:
            lengths = np.clip(self.random.lognormal(3.5, 1.0, 64).astype(int), 4, budget)
            documents = [self.document(n) for n in lengths]
            packed = weft.prepare.pack_documents(lengths, budget, keep_order=True)  # or best fit: fewer, but unlike, packs
            for pack in range(len(packed)):
                tokens = np.concatenate([documents[d] for d, _, _ in packed.pieces(pack)])
                yield torch.from_numpy(np.pad(tokens, (0, budget - len(tokens)))), packed.packing(pack)


def sum_over_ranks(tensors: Sequence[Tensor], group: Optional[weft.Communicator]) -> None:
    flat = torch.cat([t.flatten() for t in tensors])  # one message: each costs a round trip
    # Or dist.all_reduce; this goes with ranks that are threads, too.
    flat = torch.stack(weft.torch.all_gather(flat, group)).sum(0)
    for t, summed in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(summed.view_as(t))


def loss_and_gradients(model: nn.Module, input_ids: Tensor, packing: weft.Packing, *,
                       group: Optional[weft.Communicator] = None, layout: LayoutName = "balanced") -> float:
    """The mean loss of all tokens on all ranks, and its gradients in model.parameters(): the same on every rank."""
    labels = weft.torch.next_token_labels(input_ids, packing)  # before sharding: the next token may lie on another rank,
    targets = (labels >= 0).sum()  # and every rank knows how many there are
    rows = weft.torch.shard(input_ids, packing, group, layout=layout)
    positions = weft.torch.position_ids(packing, group, layout=layout, device=rows.device)
    logits = model(rows, positions, weft.torch.pack(packing))  # a packing as a tensor is what torch.compile takes
    labels = weft.torch.shard(labels, packing, group, layout=layout, fill=-100)
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / targets
    loss.backward()
    loss = loss.detach()
    sum_over_ranks([loss, *(p.grad for p in model.parameters() if p.grad is not None)], group)
    return loss.item()


def draw(losses: Sequence[float], entropy: float, file: str) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    _, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(losses, label="loss")
    axes.axhline(entropy, color="gray", linestyle="dashed", label="entropy of the text")
    axes.set(xlabel="step", ylabel="nats a token", ylim=(0, None))
    axes.legend()
    pyplot.savefig(file, dpi=150)


one_at_a_time = threading.Lock()  # random numbers are those of the process


def train(args: argparse.Namespace, comm: Optional[weft.Communicator] = None) -> None:
    """On this rank: of a process group, or of `comm`, a communicator of weft.spawn."""
    first = (comm.rank if comm else dist.get_rank() if dist.is_initialized() else 0) == 0
    config = Config()
    with one_at_a_time:
        torch.manual_seed(args.seed)  # equal weights on every rank
        model: nn.Module = Decoder(config, recompute=args.checkpoint, bf16=args.dtype == "bf16", schedule=args.schedule,
                                   layout=args.layout, group=comm)
    model.to(args.device)
    if args.compile:
        model.compile(dynamic=True)  # packs differ in length
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = Text(config.vocab, args.seed)

    bar = tqdm(total=args.steps, disable=not (first and sys.stderr.isatty()))
    losses: list[float] = []
    tokens, begin = 0, time.perf_counter()
    for step, (input_ids, packing) in zip(range(args.steps), text.packs(args.tokens)):
        optimizer.zero_grad()
        losses.append(loss_and_gradients(model, input_ids.to(args.device), packing, group=comm, layout=args.layout))
        optimizer.step()
        tokens += int(packing.lengths_q.sum())
        bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
        bar.update()
        if first and bar.disable and step % 20 == 0:  # no terminal
            print(f"step {step:4}  loss {losses[-1]:.4f}", flush=True)
    seconds = time.perf_counter() - begin
    bar.close()
    if first:
        print(f"loss {losses[-1]:.4f} ({text.entropy:.4f} is the least possible), {tokens / seconds:.0f} tokens a second")
        if args.picture:
            draw(losses, text.entropy, args.picture)


def join_group(device: str) -> None:
    """Ranks of torchrun share this machine's cores, or have a GPU each; or share GPUs, and messages go by way of the CPU."""
    weft.set_cpu_threads(1)
    backend = "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus:
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1024, help="of a pack, over all ranks")
    parser.add_argument("--schedule", default="all_gather", choices=["all_gather", "ring", "all_to_all", "hybrid", "exact"])
    parser.add_argument("--layout", default="balanced", choices=["balanced", "zigzag", "contiguous", "striped"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"], help="of attention and of products")
    parser.add_argument("--threads", type=int, default=1, help="ranks that are threads of this process, on one GPU or the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", metavar="FILE.png", help="draw the loss")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in the backward")
    args = parser.parse_args()
    if "RANK" in os.environ:  # of torchrun
        join_group(args.device)
    if args.threads > 1:
        weft.spawn(args.threads, lambda comm: train(args, comm))
    else:
        train(args)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
