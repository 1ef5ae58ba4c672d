"""Calls of torch's NCCL for bytes on GPUs, in the order of a stream."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

Mail = Sequence[Tuple[int, Tensor]]  # (peer, bytes)


class Handle:
    """Operations of NCCL, which are ordered in a stream: to wait for them is that the stream does."""

    def __init__(self, transport: Any, works: List[Any], tensors: Any, place: Tuple[int, int], peers: List[int]) -> None:
        self.transport, self.works, self.tensors, self.place, self.peers = transport, works, tensors, place, peers

    def wait(self) -> None:
        works, self.works = self.works, []
        try:
            with in_stream(*self.place):
                for work in works:
                    work.wait()
                if works:
                    self.transport.watch.see(self.place[0], self.peers)
        except RuntimeError as e:  # what torch's watchdog has found
            raise self.transport.lost_on_gpu(self.peers, self.place[0], e) from None
        finally:
            self.tensors = []

    abandon = wait


def in_stream(device: int, stream: int) -> ContextManager[Any]:
    if torch.cuda.current_stream(device).cuda_stream == stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device))


def exchange(group: Any, sends: Mail, receives: Mail) -> List[Any]:
    """All messages as one batch, which is one kernel."""
    operations = [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in receives]
    operations += [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in sends]
    return dist.batch_isend_irecv(operations)


def collective(group: Any, kind: str, tensors: Sequence[Tensor], sent_bytes: List[int], received_bytes: List[int]) -> Any:
    """all_gather, reduce_scatter of f32, or all_to_all, of (what is sent, what is received): bytes in the order of ranks.

    An all_gather may bring more along: (.., what a rank has for all, what all have), in the same kernel.
    """
    mine, into, *signs = tensors
    if signs:
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = True
        return group.allgather_into_tensor_coalesced([into, signs[1]], [mine, signs[0]], options)
    if kind == "all_gather":
        return dist.all_gather_into_tensor(into, mine, group=group, async_op=True)
    if kind == "reduce_scatter":
        return dist.reduce_scatter_tensor(into.view(torch.float32), mine.view(torch.float32), group=group, async_op=True)
    return dist.all_to_all_single(into, mine, received_bytes, sent_bytes, group=group, async_op=True)
