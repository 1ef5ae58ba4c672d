"""A decoder of four layers that goes through micro-sequences, or through the whole pack at once."""

import torch
import torch.nn.functional as F
import weft
import weft.torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, HEADS, KV_HEADS = 23, 32, 4, 2
MASKS = [weft.Mask(causal=True), weft.Mask(causal=True, window=(6, 0)), weft.Mask(causal=True, chunk_size=7),
         weft.Mask(causal=True)]


def text(packing):
    """Ids and labels of all tokens."""
    ids = torch.randint(VOCAB, (packing.tokens_q,), generator=torch.Generator().manual_seed(1))
    return ids, weft.torch.next_token_labels(ids, packing)


class Block(nn.Module):
    def __init__(self, index, *, head=8, drop=False, sink=True, group=None, dropout=0.0, kernel=None):
        super().__init__()
        self.mask, self.dropout, self.head_dim = MASKS[index % len(MASKS)], dropout, head
        self.qkv, self.o = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * head, bias=False), nn.Linear(HEADS * head, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.norm, self.norm_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.sink = nn.Parameter(torch.linspace(-1, 1, HEADS)) if sink and index % 2 else None
        self.attention = weft.torch.MicroSequenceAttention(mask=self.mask, drop=drop, group=group, kernel=kernel)

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        sink = self.sink
        x = x + self.o(attend(self, q, k, v, sink).flatten(1))
        return x + self.down(F.dropout(F.gelu(self.up(self.norm_mlp(x))), self.dropout))


class Decoder(nn.Module):
    """saved: "", "layer" or "reentrant": a checkpoint around each layer."""

    def __init__(self, *, layers=4, saved="", **block):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCAB, DIM)
            self.blocks = nn.ModuleList(Block(i, **block) for i in range(layers))
            self.head = nn.Linear(DIM, VOCAB)
        self.saved = saved

    def _loss(self, ids, labels, attend, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, attend, use_reentrant=self.saved == "reentrant") if self.saved else block(x, attend)
        logits = self.head(x)
        return F.cross_entropy(logits if x.dtype == torch.float64 else logits.float(), labels, reduction="sum") / targets

    def loss(self, step, ids, labels):
        """Of one micro-sequence: its part of the mean over all tokens of the pack."""
        return self._loss(step.take(ids), step.take(labels, fill=-100),
                          lambda block, q, k, v, sink: block.attention(q, k, v, step, sink=sink), (labels >= 0).sum())

    def whole_loss(self, packing, ids, labels):
        return self._loss(ids, labels, lambda block, q, k, v, sink: weft.torch.context_parallel_attention(
            q, k, v, packing, block.mask, sink=sink, one_rank=True, kernel=block.attention.kernel or None), (labels >= 0).sum())
