"""A training step of a small decoder captured once as a CUDA graph, against the same step uncaptured; cu_seqlens lie on the GPU.

    PYTHONPATH=build/gpu/python python3 bench/torch_graph.py [tokens]

Prints a table: milliseconds of a step, and what the graph of one attention holds. The tests of graphs use the same decoder.
"""

from __future__ import annotations

import copy
import ctypes
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
import weft.torch
from torch import Tensor, nn
from torch.nn import functional

NODES = {0: "kernels", 1: "copies", 2: "memsets", 10: "allocations", 11: "frees"}  # by cudaGraphNodeType


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [rows, heads, dim] with rotary positions."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    """Attention from cu_seqlens on the GPU, and an MLP."""

    def __init__(self, hidden: int, heads: Tuple[int, int], dim: int, options: Dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.dim, self.options = heads, dim, options
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads[0] + 2 * heads[1]) * dim, bias=False)
        self.out = nn.Linear(heads[0] * dim, hidden, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden, bias=False), nn.SiLU(), nn.Linear(2 * hidden, hidden, bias=False))

    def forward(self, x: Tensor, positions: Tensor, cu: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).view(x.shape[0], -1, self.dim)
        q, k, v = heads.split((self.heads[0], self.heads[1], self.heads[1]), 1)
        seen = weft.torch.context_parallel_attention(rotated(q, positions), rotated(k, positions), v, cu, causal=True,
                                                     **self.options)
        x = x + self.out(seen.flatten(1))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """All layers see the rows that this rank of the group has of the pack; options are those of attention."""

    def __init__(self, layers: int = 4, hidden: int = 256, heads: Tuple[int, int] = (4, 2), dim: int = 64, words: int = 512,
                 group: Any = "", **options: Any) -> None:
        super().__init__()
        self.group = group
        options = {**options, "group": group} if group != "" else {**options, "one_rank": True}
        self.words = nn.Embedding(words, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, dim, options) for _ in range(layers))
        self.head = nn.Linear(hidden, words, bias=False)

    def loss(self, ids: Tensor, cu: Tensor) -> Tensor:
        """This rank's share of the mean over all tokens that have a next one, in f32; ids [tokens] are the whole pack."""
        tokens = ids.shape[0]
        labels = ids.new_full((tokens + 1,), -100)
        labels[:tokens - 1] = ids[1:]
        # Ends of documents; those of empty ones at the start are the spare.
        labels.index_fill_(0, (cu[1:] - 1).long() % (tokens + 1), -100)
        labels = labels[:tokens].masked_fill(torch.arange(tokens, device=ids.device) >= cu[-1], -100)
        count = (labels >= 0).sum().clamp(min=1)
        x = self.words(weft.torch.shard(ids, cu, self.group))
        positions = weft.torch.position_ids(cu, self.group, tokens=tokens)
        for layer in self.layers:
            x = layer(x, positions, cu)
        mine = weft.torch.shard(labels, cu, self.group, fill=-100)
        return functional.cross_entropy(self.head(x).float(), mine, reduction="sum") / count


def captured(step: Callable[[], Any], warm_up: Optional[Callable[[], Any]] = None) -> Tuple[torch.cuda.CUDAGraph, Any]:
    """The step as a graph, and its results, which a replay overwrites. It is called outside of the capture first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            (warm_up or step)()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


class Training:
    """A decoder, its optimizer, and the tensors that a step reads, at one address for all steps."""

    def __init__(self, tokens: int, documents: int = 64, device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
                 group: Any = "", **options: Any) -> None:
        torch.manual_seed(1)
        self.group = group
        self.model = Decoder(group=group, **options).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=device == "cuda")
        self.ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.cu = torch.zeros(documents + 1, dtype=torch.int32, device=device)
        self.graph: Optional[torch.cuda.CUDAGraph] = None

    def set(self, seed: int, documents: int) -> None:
        """Other tokens in so many documents, some of them empty; the rest of the offsets repeat the last."""
        generator = torch.Generator().manual_seed(seed)
        tokens = self.ids.shape[0]
        cuts = torch.randint(0, tokens + 1, (documents,), generator=generator).sort().values.tolist()
        cu = [0, *cuts, *[cuts[-1]] * (self.cu.shape[0] - 1 - documents)]
        self.cu.copy_(torch.tensor(cu, dtype=torch.int32))
        self.ids.copy_(torch.randint(0, self.model.words.num_embeddings, (tokens,), generator=generator))

    def gradients(self) -> List[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def step(self) -> Tensor:
        """Forward, backward and optimizer; the rank's share of the loss."""
        loss = self.model.loss(self.ids, self.cu)
        loss.backward()
        if self.group != "" and dist.get_world_size(self.group) > 1:
            flat = torch.cat([g.flatten() for g in self.gradients()])
            dist.all_reduce(flat, group=self.group)
            for g, part in zip(self.gradients(), flat.split([g.numel() for g in self.gradients()])):
                g.copy_(part.view_as(g))
        self.optimizer.step()
        return loss.detach()

    def eager(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        return self.step()

    def capture(self) -> None:
        """The step as a graph, whose results are in self.loss and in the gradients."""

        def warm_up() -> None:
            self.eager()
            self.optimizer.zero_grad(set_to_none=True)  # so that the graph has gradients of its own

        self.graph, self.loss = captured(self.step, warm_up)

    def replay(self) -> Tensor:
        assert self.graph is not None
        self.graph.replay()
        return self.loss

    def like(self, other: Training) -> None:
        """Parameters and optimizer as the other's."""
        with torch.no_grad():
            for mine, its in zip(self.model.parameters(), other.model.parameters()):
                mine.copy_(its)
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))


def nodes_of(work: Callable[[], Any]) -> Dict[str, int]:
    """What the graph of the work holds."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        kept = work()
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert runtime.cudaGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert runtime.cudaGraphGetNodes(raw, nodes, ctypes.byref(count)) == 0
    found = dict.fromkeys((*NODES.values(), "others"), 0)
    for node in nodes:
        kind = ctypes.c_int()
        assert runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        found[NODES.get(kind.value, "others")] += 1
    del kept
    return found


def attention_nodes(tokens: int = 1024) -> Dict[str, Dict[str, int]]:
    """Of the attention of one layer, from cu_seqlens to the output, and to the gradients."""
    q, k, v = (torch.randn(tokens, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    cu = torch.tensor([0, tokens // 3, *[tokens] * 63], dtype=torch.int32, device="cuda")
    dout = torch.randn_like(q)

    def forward() -> Tensor:
        return weft.torch.context_parallel_attention(q, k, v, cu, causal=True, one_rank=True)

    def both() -> Tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (q, k, v), dout)

    first, whole = nodes_of(forward), nodes_of(both)
    return {"forward": first, "backward": {name: whole[name] - first[name] for name in whole}}


def median_ms(work: Callable[[], Any], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    print(f"4 layers, hidden 1024, 8:2 heads of 128, {tokens} tokens, bf16, {torch.cuda.get_device_name()}, "
          f"torch {torch.__version__}\n\n| step | uncaptured, ms | captured, ms | times |\n|---|---:|---:|---:|")
    for deterministic in (False, True):
        training = Training(tokens, hidden=1024, heads=(8, 2), dim=128, deterministic=deterministic)
        training.set(1, 8)
        for _ in range(3):
            training.eager()
        uncaptured = median_ms(training.eager)
        training.capture()
        training.replay()
        captured = median_ms(training.replay)
        print(f"| {'deterministic' if deterministic else 'forward, backward, AdamW'} | {uncaptured:.2f} | {captured:.2f} | "
              f"{uncaptured / captured:.2f} |")
    print("\n| attention of a layer | " + " | ".join((*NODES.values(), "others")) + " |\n|---|" + "---:|" * (len(NODES) + 1))
    for name, found in attention_nodes().items():
        print(f"| {name} | " + " | ".join(map(str, found.values())) + " |")


if __name__ == "__main__":
    main()
