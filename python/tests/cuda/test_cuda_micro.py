"""Micro-sequences one at a time on a GPU: a decoder in bf16 through the K/V buffer, by the kernel that is named."""

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

import small_decoder
from gpu import needs_gpu

pytestmark = needs_gpu

PACKING = weft.Packing([0, 700, 701, 1900, 2048])


def kernels():
    """Those of this GPU that know bf16 and heads of 128."""
    return ["cuda.portable", *(["cuda.sm90"] if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else [])]


def gradients(run, **how):
    torch.manual_seed(5)
    model = small_decoder.Decoder(head=128, **how).cuda()
    ids, labels = (x.cuda() for x in small_decoder.text(PACKING))
    loss = run(model, ids, labels)
    return float(loss), {name: p.grad for name, p in model.named_parameters()}


def whole(model, ids, labels):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model.whole_loss(PACKING, ids, labels)
    loss.backward()
    return loss.detach()


def by_micro(micros, recompute, **cut):
    def run(model, ids, labels):
        def loss(step):
            with torch.autocast("cuda", torch.bfloat16):
                return model.loss(step, ids, labels)

        return weft.torch.MicroSequences(PACKING, micros, **cut).forward_backward(loss, recompute=recompute)

    return run


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("drop, recompute", [(False, False), (False, True), (True, True)])
def test_a_decoder_in_bf16(kernel, drop, recompute):
    loss, want = gradients(whole, kernel=kernel)
    for cut in ({}, dict(even_work=weft.Mask(causal=True))):
        got_loss, got = gradients(by_micro(4, recompute, **cut), kernel=kernel, drop=drop)
        assert abs(got_loss - loss) <= 1e-3 * abs(loss)
        for name, expected in want.items():
            off = float((got[name] - expected).norm() / expected.norm())
            assert off <= 1e-2, (name, off)


def test_deterministic():
    x = torch.randn(3, 2048, 4, 128, device="cuda", dtype=torch.bfloat16)
    layer, found = weft.torch.MicroSequenceAttention(deterministic=True), []
    for _ in range(3):
        leaves = [y.clone().requires_grad_() for y in x]
        weft.torch.MicroSequences(PACKING, 4).forward_backward(
            lambda step: layer(*(step.take(y) for y in leaves), step).float().square().sum())
        found.append([y.grad for y in leaves])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_a_thousand_passes_leak_nothing():
    layer = weft.torch.MicroSequenceAttention(drop=True, mask=weft.Mask(causal=True, window=(300, 0)))
    x = torch.randn(2048, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    free = []
    for n in range(1000):
        weft.torch.MicroSequences(PACKING, 4).forward_backward(lambda step: layer(*3 * [step.take(x)], step).float().sum())
        x.grad = None
        if n in (20, 999):
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
    assert len(layer._free) == 1 and abs(free[1] - free[0]) < 64 << 20
