"""Micro-sequences one at a time, on one rank: a decoder against its whole-sequence run, and every wrong order."""

import gc
import pathlib
import re
import subprocess
import sys

import pytest
import weft

torch = pytest.importorskip("torch")
import weft.torch
from torch.utils.checkpoint import checkpoint

import small_decoder

PACKING = weft.Packing([0, 5, 14, 37, 48])


def run(micros, *, drop=False, recompute=True, saved="", batches=1, sink=True, dropout=0.0, dtype=torch.float32, **cut):
    """(losses, gradients by name) of a model driven micro by micro, several micro-batches forward before any backward."""
    model = small_decoder.Decoder(drop=drop, sink=sink, saved=saved, dropout=dropout).to(dtype)
    ids, labels = small_decoder.text(PACKING)
    torch.manual_seed(3)
    if batches == 1:
        losses = [weft.torch.MicroSequences(PACKING, micros, **cut).forward_backward(
            lambda step: model.loss(step, ids, labels), recompute=recompute)]
    else:
        flights = [weft.torch.MicroSequences(PACKING, micros, batch=n, **cut) for n in range(batches)]
        steps = [(flight, [model.loss(step, ids, labels) for step in flight.forward_steps()]) for flight in flights]
        for flight, parts in steps:
            for step in flight.backward_steps():
                step.backward(parts[step.micro])
        losses = [sum(parts).detach() for _, parts in steps]
    return losses, {name: p.grad / batches for name, p in model.named_parameters()}


def whole(dtype=torch.float32, sink=True):
    model = small_decoder.Decoder(sink=sink).to(dtype)
    loss = model.whole_loss(PACKING, *small_decoder.text(PACKING))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def same(got, want, loss=1e-6, gradients=1e-5):
    for one in got[0]:
        assert abs(one - want[0]) <= loss * abs(want[0])
    assert got[1].keys() == want[1].keys()
    for name, expected in want[1].items():
        assert (got[1][name] - expected).norm() <= gradients * expected.norm(), name


@pytest.mark.parametrize("drop", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("micros", [1, 2, pytest.param(4, marks=pytest.mark.long), 5])
def test_a_decoder_is_its_whole_run(micros, recompute, drop):
    same(run(micros, recompute=recompute, drop=drop), whole())


@pytest.mark.parametrize("how", [
    dict(saved="layer"), pytest.param(dict(saved="reentrant"), marks=pytest.mark.long),
    dict(saved="layer", recompute=False, drop=True),
    pytest.param(dict(saved="reentrant", recompute=False), marks=pytest.mark.long),
    pytest.param(dict(batches=3), marks=pytest.mark.long), dict(batches=2, drop=True, saved="layer"),
    dict(even_work=weft.Mask(causal=True))], ids=str)
def test_checkpoints_and_several_micro_batches(how):
    same(run(4, **how), whole())


def test_f64():
    same(run(4, dtype=torch.float64), whole(torch.float64), 1e-12, 1e-11)


def test_dropout_is_the_same_again():
    (loss,), gradients = run(4, dropout=0.5, recompute=False)
    same(run(4, dropout=0.5), (loss, gradients))


def test_a_loss_of_some_micro_sequences_only():
    """Nothing of the others is in the loss: their keys still pass on what the last one gives them."""
    ids, labels = small_decoder.text(PACKING)
    labels[:36] = -100
    want = small_decoder.Decoder()
    want.whole_loss(PACKING, ids, labels).backward()
    for recompute in (False, True):
        model = small_decoder.Decoder()

        def loss(step):
            out = model.loss(step, ids, labels)
            return out if step.micro == 3 else None

        weft.torch.MicroSequences(PACKING, 4).forward_backward(loss, recompute=recompute)
        for (name, a), b in zip(model.named_parameters(), want.parameters()):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_one_backward_of_the_sum():
    model, (ids, labels) = small_decoder.Decoder(), small_decoder.text(PACKING)
    micros = weft.torch.MicroSequences(PACKING, 4)
    sum(step.loss(model.loss(step, ids, labels)) for step in micros.forward_steps()).backward()
    loss, gradients = whole()
    for name, p in model.named_parameters():
        assert (p.grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name


def test_evaluation_gives_the_buffers_back():
    model, (ids, labels) = small_decoder.Decoder(), small_decoder.text(PACKING)
    for _ in range(2):
        with torch.no_grad():
            micros = weft.torch.MicroSequences(PACKING, 4)
            total = sum(model.loss(step, ids, labels) for step in micros.forward_steps())
    assert abs(total - whole()[0]) <= 1e-6 * total
    assert all(len(block.attention._free) == 1 for block in model.blocks)
    assert micros.buffer_bytes >= len(model.blocks) * 48 * 2 * 2 * 8 * 4  # K and V of all layers


def test_work_that_is_even():
    packing, causal = weft.Packing([0, 4096]), weft.Mask(causal=True)
    tokens, work = (weft.prepare.MicroSequences(packing, ranks=2, micros=8, even_work=how) for how in (None, causal))
    uneven, even = (cut.work(causal).sum(1) for cut in (tokens, work))
    assert uneven.sum() == even.sum() == 4096 * 4097 // 2
    assert uneven.max() > 1.8 * uneven.mean() and even.max() < 1.01 * even.mean() and even.min() > 0.99 * even.mean()
    assert [work.rows(1, m)[1] for m in range(8)][-1] == 4096 and work.local == work.rows(0, 0)[1]


# --- What is refused ---


def attended(layer, micros, count=None, again=False):
    """Outputs of the first `count` steps, and the steps."""
    x, given = torch.randn(48, 2, 8, requires_grad=True), []
    for step in micros.forward_steps():
        rows = step.take(x)
        given.append((step, layer(rows, rows, rows, step).sum()))
        if len(given) == count:
            break
    return given


def test_wrong_order_of_the_forward(refused):
    layer, micros = weft.torch.MicroSequenceAttention(layer=7), weft.torch.MicroSequences(PACKING, 4)
    x, steps = torch.randn(12, 2, 8), micros.forward_steps()
    first = next(steps)
    layer(x, x, x, first)
    with refused("layer 7, micro-sequence 0 has been attended already", "twice"):
        layer(x, x, x, first)
    with refused("layer 7, micro-sequence 2 comes before micro-sequence 1"):
        layer(x, x, x, weft.torch.MicroStep(micros, 2, False))
    second = next(steps)
    with refused("layer 8 has not attended micro-sequence 0, and is given 1"):
        weft.torch.MicroSequenceAttention(layer=8)(x, x, x, second)
    with refused("layer 7, micro-sequence 1 was left out"):
        next(steps)


def test_wrong_order_of_the_backward(refused):
    layer, micros = weft.torch.MicroSequenceAttention(layer=7), weft.torch.MicroSequences(PACKING, 4, batch=5)
    given = attended(layer, micros)
    with refused("micro-batch 5, layer 7, micro-sequence 2: its backward comes before that of micro-sequence 3"):
        given[2][0].backward(given[2][1])
    micros.reset()
    given = attended(layer, micros, 2)
    with refused("layer 7, micro-sequence 1: backward, and the forward has come to micro-sequence 2 of 4"):
        given[1][0].backward(given[1][1])


def test_missing_backward(refused):
    layer, micros = weft.torch.MicroSequenceAttention(layer=7), weft.torch.MicroSequences(PACKING, 4)
    given, steps = attended(layer, micros), micros.backward_steps()
    last = next(steps)
    with refused("layer 7, micro-sequence 3: its backward is missing, and the next step is asked for"):
        next(steps)
    last.backward(given[3][1])
    with refused("layer 7, micro-sequence 2: its backward is missing, and a new forward begins"):
        next(micros.forward_steps())
    with refused("layer 7, micro-sequence 3: a second backward"):
        given[3][1].backward()
    micros.reset()
    with refused("backward_steps() without a forward"):
        next(micros.backward_steps())
    attended(layer, micros, 3)
    with refused("layer 7, micro-sequence 3 has not been attended, and the backward begins"):
        next(micros.backward_steps())


def test_two_micro_batches_mixed_up(refused):
    layer = weft.torch.MicroSequenceAttention(layer=7)
    a, b = (weft.torch.MicroSequences(PACKING, 4, batch=n) for n in range(2))
    given_a, given_b = attended(layer, a), attended(layer, b)
    with refused("micro-batch 0, layer 7, micro-sequence 3: its backward is not that of its own step"):
        given_b[3][0].backward(given_a[3][1])
    with refused("its backward is not that of its own step"):
        given_b[2][1].backward()
    mixed = weft.torch.MicroSequences(PACKING, 4, batch=2)
    x, steps = torch.randn(12, 2, 8), mixed.forward_steps()
    layer(x, x, x, next(steps))
    with refused("micro-batch 2, layer 7, micro-sequence 1 was left out"):
        next(steps)
        c = weft.torch.MicroSequences(PACKING, 4, batch=3)
        layer(x, x, x, next(c.forward_steps()))
        next(steps)


def test_what_else_is_refused(refused):
    layer, micros = weft.torch.MicroSequenceAttention(), weft.torch.MicroSequences(PACKING, 4)
    x = torch.randn(11, 2, 8)
    with refused("micro-sequence 0: q has shape [11, 2, 8]", "[12, heads, dim]"):
        layer(x, x, x, next(micros.forward_steps()))
    with refused("no layer has attended micro-sequence 0"):
        list(micros.forward_steps())
    with refused("a mask in the call"):
        layer(x, x, x, next(micros.forward_steps()), mask=weft.Mask(causal=True))
    with refused("micros is int"):
        layer(x, x, x, 4)
    with refused("a tensor of shape [47] in dimension 0", "48 tokens"):
        next(micros.forward_steps()).take(torch.zeros(47))
    with refused("48 tokens do not divide into 5"):
        weft.torch.MicroSequences(PACKING, 5, pad=False)
    with torch.no_grad(), refused("forward_backward without gradients"):
        micros.forward_backward(lambda step: None)
    with refused("nothing here needs a gradient"):
        x = torch.randn(12, 2, 8)
        micros.forward_backward(lambda step: layer(x, x, x, step).sum())
    with refused("49 micro-sequences of even work from 48 tokens"):
        weft.torch.MicroSequences(PACKING, 49, even_work=weft.Mask(causal=True))


def test_a_checkpoint_of_two_layers():
    x = torch.randn(48, 2, 8)
    layers = [weft.torch.MicroSequenceAttention(drop=True, mask=weft.Mask(causal=True, window=(6, 0))) for _ in range(2)]

    def gradient(wrap):
        leaf = x.clone().requires_grad_()

        def both(rows, step):
            return layers[1](*3 * [layers[0](rows, rows, rows, step)], step)

        weft.torch.MicroSequences(PACKING, 4).forward_backward(lambda step: wrap(both, step.take(leaf), step).sin().sum())
        return leaf.grad

    saved = gradient(lambda f, *given: checkpoint(f, *given, use_reentrant=False))
    assert torch.equal(gradient(lambda f, *given: f(*given)), saved)


@pytest.mark.long
def test_a_thousand_steps_leak_nothing():
    layer, x = weft.torch.MicroSequenceAttention(drop=True), torch.randn(8, 1, 4, requires_grad=True)
    packing = weft.Packing([0, 8])

    def objects():
        gc.collect()
        return len(gc.get_objects())

    def step(n):
        micros = weft.torch.MicroSequences(packing, 2)
        if n % 10 == 9:  # given up between forward and backward
            held = [layer(*3 * [step.take(x)], step) for step in micros.forward_steps()]
            micros.reset()
            del held
        else:
            micros.forward_backward(lambda step: layer(*3 * [step.take(x)], step).sum())
        x.grad = None

    for n in range(20):
        step(n)
    before = objects()
    for n in range(1000):
        step(n)
    assert abs(objects() - before) < 50 and len(layer._free) == 1


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_program(ranks):
    program = pathlib.Path(__file__).parents[3] / "examples" / "long_document.py"
    start = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]  # by address, as in test_train.py
    done = subprocess.run([*start, program, "--tokens", "8192", "--micro", "8", "--window", "256"], capture_output=True,
                          text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    of = float(re.search(r"activations: 1/([\d.]+) of", done.stdout).group(1))
    assert of >= 8 / 1.25, done.stdout
