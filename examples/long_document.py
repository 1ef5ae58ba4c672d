"""A long document through a small decoder, micro-sequence by micro-sequence, beside the run of the whole sequence.

    python examples/long_document.py --tokens 16384
    python examples/long_document.py --device cuda --dtype bf16
    torchrun --nproc-per-node 2 examples/long_document.py --tokens 16384

Each micro-sequence goes forward through all layers, later in reverse order backward, where its forward is run again: the
activations of one are there at a time, and a K/V buffer in each layer for all of them. Three layers of four see a window, the
fourth sees the whole document. The table has the peak of activations without parameters and buffers, which are listed apart.
"""

import argparse
import contextlib
import os
import time
import weakref
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import weft
import weft.torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

VOCAB = 256
Attend = Callable[["Block", Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, index: int, asked: argparse.Namespace) -> None:
        super().__init__()
        heads, self.dim = (int(n) for n in asked.heads.split(":")), asked.head_dim
        self.heads, self.kv_heads = heads
        width = self.heads * self.dim
        self.mask = weft.Mask(causal=True, window=(-1 if index % 4 == 3 else asked.window, 0))
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.o, self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        # Keys that no later query of the window sees leave the buffer.
        self.attention = weft.torch.MicroSequenceAttention(mask=self.mask, drop=asked.drop)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, self.dim)).split((self.heads, self.kv_heads, self.kv_heads), 1)
        x = x + self.o(attend(self, rotated(q, angles), rotated(k, angles), v).flatten(1))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return out


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, asked) for i in range(asked.layers))
        self.bf16 = asked.dtype == "bf16"  # of activations; parameters and their gradients are f32
        width, self.planes = int(asked.heads.split(":")[0]) * asked.head_dim, asked.head_dim // 2
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor, targets: int, attend: Attend) -> Tensor:
        """The rows' part of the mean loss over all targets."""
        angles = positions[:, None, None] * 1e4 ** (-torch.arange(self.planes, device=positions.device) / self.planes)
        x = self.embed(ids)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            for block in self.blocks:
                x = block(x, angles, attend)
            logits = self.head(x)
        loss: Tensor = F.cross_entropy(logits.float(), labels, reduction="sum") / targets
        return loss


class Activations(TorchDispatchMode):
    """The most bytes of tensors that were there at once, of those that were made meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self.seen: Dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, out)
        return out

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.seen or storage.nbytes() == 0:
            return
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        self.seen[key] = weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.pop(key, None)


@contextlib.contextmanager
def measured(device: torch.device) -> Iterator[Dict[str, float]]:
    """Seconds, and the peak bytes of what torch allocated meanwhile."""
    found: Dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        yield found
        torch.cuda.synchronize()
        found["peak"] = torch.cuda.max_memory_allocated() - before
    else:
        begin = time.perf_counter()
        with Activations() as meter:
            yield found
        found["peak"] = meter.peak
    found["seconds"] = time.perf_counter() - begin


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", default="2:1", help="of queries and of keys")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--drop", action="store_true",
                        help="buffers of layers with a window hold what it reaches; own keys count as activations")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--alone", action="store_true", help="without the run of the whole sequence")
    return parser.parse_args()


class Run:
    """One document, and the model that sees it."""

    def __init__(self, asked: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(1)
        self.asked, self.device = asked, device
        self.model = Decoder(asked).to(device)
        self.packing = weft.Packing([0, asked.tokens])
        self.ids = torch.randint(VOCAB, (asked.tokens,), generator=torch.Generator().manual_seed(2)).to(device)
        self.labels = weft.torch.next_token_labels(self.ids, self.packing)
        self.targets = asked.tokens - 1

    def micro(self) -> Tuple[Tensor, int]:
        """(this rank's part of the loss, bytes of the buffers)."""
        micros = weft.torch.MicroSequences(self.packing, self.asked.micro)

        def loss(step: weft.torch.MicroStep) -> Tensor:
            rows = step.take(self.ids), step.position_ids(self.device), step.take(self.labels, fill=-100)
            part: Tensor = self.model(*rows, self.targets, lambda block, q, k, v: block.attention(q, k, v, step))
            return part

        return micros.forward_backward(loss), micros.buffer_bytes

    def whole(self) -> Tuple[Tensor, int]:
        shard: Dict[str, Any] = dict(packing=self.packing, layout="contiguous")
        rows = [weft.torch.shard(x, fill=fill, **shard) for x, fill in ((self.ids, 0), (self.labels, -100))]
        loss = self.model(rows[0], weft.torch.position_ids(device=self.device, **shard), rows[1], self.targets,
                          lambda block, q, k, v: weft.torch.context_parallel_attention(
                              q, k, v, self.packing, block.mask, layout="contiguous", schedule="all_gather"))
        loss.backward()
        return loss.detach(), 0

    def measure(self, run: Callable[[], Tuple[Tensor, int]]) -> Dict[str, Any]:
        """Loss and gradients over all ranks, peak bytes of activations, bytes of buffers, seconds."""
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        with measured(self.device) as found:
            loss, found["buffers"] = run()
        gradient = torch.cat([p.grad.float().flatten() for p in self.model.parameters() if p.grad is not None])
        if dist.is_initialized():
            dist.all_reduce(loss)
            dist.all_reduce(gradient)
        return {**found, "loss": float(loss), "gradient": gradient}


def main() -> None:
    asked = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    run = Run(asked, torch.device(asked.device))
    ways = {"whole sequence": run.whole, f"{asked.micro} micro-sequences": run.micro}
    if asked.alone:
        del ways["whole sequence"]
    found = {name: run.measure(way) for name, way in ways.items()}
    if rank == 0:
        print(f"{asked.tokens:,} tokens, {asked.layers} layers, heads {asked.heads} of {asked.head_dim}, {asked.dtype}, "
              f"{ranks} rank{'s' * (ranks > 1)}, {asked.device}")
        print(f"{'of one rank':<24}{'activations':>14}{'K/V buffers':>14}{'loss':>12}{'seconds':>10}")
        for name, one in found.items():
            print(f"{name:<24}{one['peak'] / 2**20:>10.1f} MiB{one['buffers'] / 2**20:>10.1f} MiB{one['loss']:>12.6f}"
                  f"{one['seconds']:>10.1f}")
    if len(found) == 2:
        whole, micro = found.values()
        off = float((micro["gradient"] - whole["gradient"]).norm() / whole["gradient"].norm())
        if rank == 0:
            print(f"activations: 1/{whole['peak'] / micro['peak']:.1f} of the whole run's; "
                  f"gradients differ by {off:.1e} of their norm")
        loss, gradients = (1e-6, 1e-5) if asked.dtype == "f32" else (1e-3, 1e-2)
        if not (abs(micro["loss"] - whole["loss"]) <= loss * abs(whole["loss"]) and off <= gradients):
            raise SystemExit(f"not the loss {whole['loss']} of the whole sequence but {micro['loss']}, gradients off by {off}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
