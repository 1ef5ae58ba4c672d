"""weft.audit of attentions that others wrote: torch's own two, and the eager one of transformers."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import weft


def batch(x):
    return torch.from_numpy(x).transpose(0, 1)[None].requires_grad_()  # [1, heads, tokens, dim]


def answer(fn, q, k, v, case):
    """A function of tensors [1, heads, tokens, dim] and a mask, which has no padding: real tokens alone are given to it."""
    if case.sink is not None:
        raise NotImplementedError("sinks")
    real = case.real()
    inputs = [batch(x[real]) for x in (q, k, v)]
    out = fn(*inputs, torch.from_numpy(case.visible()[real][:, real]))

    def spread(x):
        result = np.zeros((len(real), *x.shape[1:]), np.float32)
        result[real] = x
        return result

    def backward(dout):
        gradients = torch.autograd.grad(out, inputs, batch(dout[real]).detach())
        return [spread(g[0].transpose(0, 1).numpy()) for g in gradients]

    return spread(out[0].transpose(0, 1).detach().numpy()), backward


def sdpa(q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def flex(q, k, v, mask):
    from torch.nn.attention import flex_attention as f

    blocks = f.create_block_mask(lambda b, h, i, j: mask[i, j], None, None, len(mask), len(mask), device="cpu")
    return f.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)


def eager(q, k, v, mask):
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import eager_attention_forward

    layer = torch.nn.Module()
    layer.num_key_value_groups = q.shape[1] // k.shape[1]
    bias = torch.where(mask, 0.0, float("-inf"))[None, None]
    return eager_attention_forward(layer, q, k, v, bias, scaling=q.shape[-1] ** -0.5)[0].transpose(1, 2)


def check(fn):
    report = weft.audit(lambda q, k, v, case: answer(fn, q, k, v, case))
    assert report.right, str(report)
    assert [v.property for v in report if v.result != "right"] == ["sink"]


def test_sdpa():
    check(sdpa)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex():
    check(flex)


@pytest.mark.long
def test_eager_of_transformers():
    check(eager)
