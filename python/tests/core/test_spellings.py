"""Other libraries' names of options: taken where they mean the same, refused with Weft's word where they do not."""

import re
from pathlib import Path

import numpy as np
import pytest
import weft
from weft import spellings, types

CU = [0, 3, 10]
X = np.random.default_rng(0).standard_normal((10, 4, 8), np.float32)
TORCH = pytest.importorskip("torch").from_numpy(X)
import weft.torch


def plain(**options):
    return weft.attention(X, X, X, **options).out


def torch_function(**options):
    return weft.torch.context_parallel_attention(TORCH, TORCH, TORCH, one_rank=True, **options).numpy()


def torch_layer(cu_seqlens=None, **options):
    return weft.torch.ContextParallelAttention(one_rank=True, **options)(TORCH, TORCH, TORCH, cu_seqlens).numpy()


FRONTS = [plain, torch_function, torch_layer]
SAME = [  # theirs, Weft's
    (dict(softmax_scale=0.5), dict(scale=0.5)), (dict(sm_scale=0.5), dict(scale=0.5)),
    (dict(window_size=(2, 0)), dict(window=(2, 0))), (dict(is_causal=False), dict(causal=False)),
    (dict(logits_soft_cap=2.0), dict(softcap=2.0)), (dict(qkv_format="thd"), dict(format="thd")),
    (dict(cp_comm_type="p2p"), dict(schedule="ring")), (dict(max_seqlen_q=7, max_seqlen_k=7, enable_gqa=True), {}),
    (dict(dropout_p=0.0, alibi_slopes=None, return_attn_probs=False), {}),
]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("theirs, ours", SAME, ids=lambda x: "+".join(x))
def test_the_same_by_another_name(front, theirs, ours, refused):
    np.testing.assert_array_equal(front(cu_seqlens=CU, **theirs), front(cu_seqlens=CU, **ours))
    own = next(iter(ours), None)
    if own not in (None, "causal", "format", "schedule"):
        with refused(f"{next(iter(theirs))} and {own} are both given", "leave"):
            front(cu_seqlens=CU, **theirs, **ours)


@pytest.mark.parametrize("front", FRONTS[:2])
def test_lengths_of_both_sides(front, refused):
    want = front(cu_seqlens=CU, causal=True)
    np.testing.assert_array_equal(front(cu_seqlens_q=CU, cu_seqlens_k=CU, causal=True), want)
    np.testing.assert_array_equal(front(cu_seqlens_q=CU, cu_seqlens_kv=CU, causal=True), want)
    with refused("cu_seqlens_kv and cu_seqlens_k are both given"):
        front(cu_seqlens_q=CU, cu_seqlens_k=CU, cu_seqlens_kv=CU)
    with refused("together with"):
        front(cu_seqlens=CU, cu_seqlens_q=CU)
    with refused("packing is given together with cu_seqlens"):
        front(packing=CU, cu_seqlens=CU)
    with refused("give"):
        front(cu_seqlens_k=CU)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", spellings.NOT_HERE)
def test_what_weft_does_not_have(front, name, refused):
    if front is not plain and name in ("cp_group", "group"):
        return  # which weft.torch has
    with refused(name, spellings.NOT_HERE[name][1]):
        front(cu_seqlens=CU, **{name: 0.1})


def test_a_layer_and_its_calls(refused):
    layer = weft.torch.ContextParallelAttention(window_size=(1, 0), one_rank=True)
    call = lambda **options: layer(TORCH, TORCH, TORCH, CU, **options).numpy()
    np.testing.assert_array_equal(call(), torch_function(cu_seqlens=CU, causal=True, window=(1, 0)))
    np.testing.assert_array_equal(call(window_size=(2, 0)), torch_function(cu_seqlens=CU, causal=True, window=(2, 0)))
    with refused("window_size and window are both given"):
        call(window_size=(2, 0), window=(2, 0))


def test_every_spelling_has_a_type_and_stands_in_the_docs():
    page = (Path(__file__).parents[3] / "docs/coming-from.md").read_text()
    for name in (*spellings.SAME, *spellings.UNUSED):
        assert f"`{name}`" in page, name
        assert any(name in options.__annotations__ for options in (types.AttentionOptions, types.TorchOptions)), name


def test_snippets_of_the_page():
    page = (Path(__file__).parents[3] / "docs/coming-from.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    x = TORCH.new_ones(16, 2, 8)

    def rank(comm):
        for block in blocks:
            names = dict(weft=weft, q=x, k=x, v=x, packing=weft.Packing([0, 7, 16]), cu_seqlens=[0, 7, 16], group=comm)
            exec(block, names)
            assert names["out"].shape == (4, 2, 8)

    assert len(blocks) >= 4 and weft.spawn(4, rank)
