"""The module of docs/torchtitan.md, called by a stand-in of TorchTitan's inner attention: not TorchTitan itself."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

PAGE = Path(__file__).parents[3] / "docs/torchtitan.md"
CU = [0, 5, 6, 21, 32]


class VarlenMetadata(NamedTuple):
    """Of the whole pack, as TorchTitan's variable-length attention is given it."""

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int


def headtail(tokens, ranks):
    """The order of tokens in which rank r has the r-th piece from the front and the r-th from the back: [1, tokens]."""
    pieces = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([torch.cat((pieces[r], pieces[-1 - r])) for r in range(ranks)])[None]


def inner_attention(mesh):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    names = dict(torch=torch, weft=weft, mesh=mesh)
    exec(block, names)
    return names["WeftInnerAttention"]()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
def test_on_ranks(ranks, window):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(32, heads, 8) for heads in (4, 2, 2, 4))
    offsets = torch.tensor(CU, dtype=torch.int32)
    metadata = VarlenMetadata(offsets, offsets, 15, 15)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = weft.torch.ContextParallel(CU, "").attention(*whole, window=window, scale=0.3)
    expected.backward(dout)

    def rank(comm):
        inner = inner_attention({"cp": comm})
        inner.window = window
        order = headtail(32, ranks)
        masks = inner.prepare_cp_metadata(metadata, permutation=order)
        mine = order.reshape(ranks, -1)[comm.rank]
        rows = [x[mine].requires_grad_() for x in (q, k, v)]
        out = inner(*rows, attention_masks=masks, scale=0.3, enable_gqa=True)
        out.backward(dout[mine])
        return mine, [out.detach(), *(x.grad for x in rows)]

    found = weft.spawn(ranks, rank)
    order = torch.cat([mine for mine, _ in found])
    for i, want in enumerate([expected.detach(), *(x.grad for x in whole)]):
        torch.testing.assert_close(torch.cat([got[i] for _, got in found]), want[order], rtol=1e-5, atol=1e-5)


def test_another_order_is_refused():
    def rank(comm):
        offsets = torch.tensor(CU)
        with pytest.raises(ValueError, match="headtail"):
            inner_attention({"cp": comm}).prepare_cp_metadata(VarlenMetadata(offsets, offsets, 15, 15),
                                                              permutation=torch.arange(32)[None])

    weft.spawn(2, rank)
