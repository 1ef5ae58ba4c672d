"""A small decoder with FSDP2 and context parallelism: parameters and tokens are spread over the same ranks.

    python examples/fsdp2.py                                            # one process: the whole model and every pack
    torchrun --nproc-per-node 2 examples/fsdp2.py                       # parameters and each pack in two parts
    torchrun --nproc-per-node 4 examples/fsdp2.py --dp 2                # two packs a step, each on two ranks

The lines that know of context parallelism are those with `cp`.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import weft
import weft.torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, DIM, HEADS = 32, 32, 2


class Block(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window  # tokens before this one that a layer sees; -1: its whole document
        self.norm, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, cp: weft.torch.ContextParallel) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).chunk(3, dim=1)  # [rows, heads, dim / heads]
        x = x + self.out(cp.attention(q, k, v, window=(self.window, 0)).flatten(1))
        result: Tensor = x + self.down(F.silu(self.up(self.norm_mlp(x))))
        return result


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Block(window) for window in (24, -1))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, cp: weft.torch.ContextParallel) -> Tensor:
        x = self.embed(ids) + self.place(positions)
        for block in self.blocks:
            x = block(x, cp)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch(step: int, index: int) -> tuple[Tensor, list[int]]:
    """Pack `index` of a step: (tokens, cu_seqlens). In a document each token is the one before plus the document's number."""
    random = torch.Generator().manual_seed(1000 * step + index)
    lengths = torch.randint(5, 100, (5,), generator=random).tolist()
    documents = [(torch.arange(n) * int(torch.randint(1, 4, (), generator=random))) % VOCAB for n in lengths]
    return torch.cat(documents), [0, *torch.tensor(lengths).cumsum(0).tolist()]


def loss_and_gradients(model: nn.Module, input_ids: Tensor, cp: weft.torch.ContextParallel, packs: int = 1) -> Tensor:
    """The mean loss of the pack. Gradients are in the parameters, one of `packs` parts of them if several are accumulated."""
    ids, labels, positions = cp.shard(input_ids), cp.labels(input_ids), cp.position_ids(device=input_ids.device)
    loss = cp.loss(F.cross_entropy(model(ids, positions, cp), labels, reduction="none"))
    (loss / packs).backward()
    return cp.reduce(loss)


def sharded(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """The model with its parameters spread over the last dimension of the mesh, a copy for each index of the first."""
    for part in (*model.blocks, model):
        wrapped: Any = fully_shard(part, mesh=mesh)
        if mesh.device_type == "cpu":
            # Gloo takes the average that FSDP asks it for as a sum; so FSDP is to ask for the sum, and divide by itself.
            wrapped.set_force_sum_reduction_for_comms(True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dp", type=int, default=1, help="packs a step, each on ranks / dp of the ranks")
    args = parser.parse_args()
    torch.manual_seed(0)  # equal weights on every rank
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, group, packs, first = Decoder().to(device), None, list(range(args.dp)), True
    if "RANK" in os.environ:  # of torchrun
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        mesh = init_device_mesh(device, (args.dp, dist.get_world_size() // args.dp), mesh_dim_names=("dp", "cp"))
        sharded(model, mesh)
        group, packs, first = mesh["cp"], [mesh.get_local_rank("dp")], dist.get_rank() == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        optimizer.zero_grad()
        losses = []
        for pack in packs:
            input_ids, cu_seqlens = batch(step, pack)
            cp = weft.torch.ContextParallel(cu_seqlens, group, reduction="mean")  # FSDP averages
            losses.append(loss_and_gradients(model, input_ids.to(device), cp, len(packs)))
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        if first and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:3}  loss of a pack {losses[-1].item():.5f}  norm of gradients {norm.item():.5f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
