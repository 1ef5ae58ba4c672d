"""Losses and gradients on trees are those of the sequences one by one."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
import weft
import weft.torch
from weft.torch import edges

from random_trees import (
    WINDOW,
    OneSequence,
    gradients,
    grpo_tree,
    log_probs_alone,
    model,
    policy_loss,
    sequences,
    tree_of,
    worst,
)
from refusals import refused

TOLERANCE = 1e-10


def test_log_probs_are_those_of_logits():
    made = sequences(0)
    tree = tree_of(made)
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(tree.rows, grpo_tree.VOCAB, generator=random, dtype=torch.float64)
    rows, cu = torch.from_numpy(tree.rows_of_tokens), tree.cu_seqlens.tolist()
    found = tree.log_probs(logits, temperature=0.7)
    for ids, begin, end in zip(made, cu, cu[1:]):
        assert end - begin == len(ids)
        if len(ids) == 0:
            continue
        words = (logits[rows[begin:end]] / 0.7).log_softmax(-1)
        assert float(found[begin]) == 0
        torch.testing.assert_close(found[begin + 1:end], words[:-1].gather(1, ids[1:, None])[:, 0], rtol=1e-12, atol=1e-12)
    assert torch.equal(tree.log_probs(logits[None], temperature=0.7), found)
    assert torch.equal(tree.log_probs(logits, temperature=0.7, tokens=tree.tokens), found)
    assert tree.log_probs(logits.bfloat16()).dtype == torch.float32


@pytest.fixture
def small_chunks(monkeypatch):
    """Three rows at once."""
    monkeypatch.setattr(edges, "_CHUNK", 3 * 6)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients(small_chunks, bias):
    tree = tree_of([torch.tensor(x) for x in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 5, 0], [1, 4, 4], [2], [], [1, 2, 3, 4])])
    random = torch.Generator().manual_seed(2)
    hidden, weight, offset = (torch.randn(*shape, generator=random, dtype=torch.float64, requires_grad=True)
                              for shape in ((tree.rows, 3), (6, 3), (6,)))
    weights = torch.randn(tree.separate_tokens, generator=random, dtype=torch.float64, requires_grad=True)
    given = (hidden, weight, offset) if bias else (hidden, weight)

    def head_of(parameters):
        made = torch.nn.Linear(3, 6, bias=bias, dtype=torch.float64)
        for name, value in zip(("weight", "bias"), parameters):
            delattr(made, name)
            setattr(made, name, value)  # as a tensor, so that a gradient reaches it
        return made

    assert torch.autograd.gradcheck(lambda x, *p: tree.log_probs(x, head_of(p), temperature=1.3), given)
    logits = torch.randn(tree.rows, 6, generator=random, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tree.log_probs(x, temperature=0.6), logits)
    mask = torch.rand(tree.separate_tokens, generator=random) > 0.5
    assert torch.autograd.gradcheck(lambda x, w, s: tree.cross_entropy(x, w, weights=s, mask=mask), (hidden, weight, weights))
    assert torch.autograd.gradcheck(lambda x: tree.gather(x), hidden)
    # Made of logits, and of hidden states by chunks: the same.
    whole = tree.log_probs(hidden @ weight.t())
    torch.testing.assert_close(tree.log_probs(hidden, weight), whole, rtol=1e-12, atol=1e-12)


def test_no_logits_of_all_rows(monkeypatch):
    """Hidden states make logits by chunks, in both passes; rows of which nothing is asked make none."""
    made, sizes = sequences(4), []
    tree, real = tree_of(made), edges._logits
    monkeypatch.setattr(edges, "_CHUNK", 5 * grpo_tree.VOCAB)
    monkeypatch.setattr(edges, "_logits", lambda x, *rest: sizes.append(len(x)) or real(x, *rest))
    hidden = torch.randn(tree.rows, 8, requires_grad=True)
    weight = torch.randn(grpo_tree.VOCAB, 8, requires_grad=True)
    tree.log_probs(hidden, weight).sum().backward()
    asked = len(set(tree.edge_rows.tolist()))
    assert max(sizes) == 5 and sum(sizes) == 2 * asked < 2 * tree.rows
    sizes.clear()
    mask = torch.zeros(tree.separate_tokens, dtype=torch.bool)
    at = int(torch.tensor([len(s) for s in made]).argmax())
    mask[tree.cu_seqlens[at] + 2] = True
    found = tree.log_probs(hidden, weight, mask=mask)
    found.sum().backward()
    assert sizes == [1, 1] and (found != 0).tolist() == mask.tolist()


def test_weights_and_masks():
    made = sequences(5)
    tree = tree_of(made)
    hidden, head = torch.randn(tree.rows, 8, dtype=torch.float64), torch.randn(grpo_tree.VOCAB, 8, dtype=torch.float64)
    each = -tree.log_probs(hidden, head)
    learned = torch.from_numpy(tree.edge_of_token) >= 0
    assert float(tree.cross_entropy(hidden, head)) == pytest.approx(float(each.sum() / learned.sum()), rel=1e-12)
    assert float(tree.cross_entropy(hidden, head, reduction="sum")) == pytest.approx(float(each.sum()), rel=1e-12)
    gains, mask = torch.randn(len(made), dtype=torch.float64), torch.rand(len(each)) > 0.4
    of_tokens = torch.repeat_interleave(gains, torch.tensor([len(s) for s in made]))
    want = float((each * of_tokens * mask).sum())
    for weights in (gains, of_tokens, gains.tolist(), of_tokens.numpy()):
        found = tree.cross_entropy(hidden, head, weights=weights, mask=mask, reduction="sum")
        assert float(found) == pytest.approx(want, rel=1e-12)
    count = int((mask & learned).sum())
    assert float(tree.cross_entropy(hidden, head, weights=gains, mask=mask)) == pytest.approx(want / count, rel=1e-12)
    for targets in (50, torch.tensor(50)):
        assert float(tree.cross_entropy(hidden, head, weights=gains, mask=mask, targets=targets)) == pytest.approx(want / 50)
    sequence = torch.arange(len(made)) % 2 == 0
    assert torch.equal(tree.log_probs(hidden, head, mask=sequence) != 0, torch.repeat_interleave(sequence, torch.tensor(
        [len(s) for s in made])) & learned)
    nothing = torch.zeros(len(each), dtype=torch.bool)
    assert float(tree.cross_entropy(hidden, head, mask=nothing)) == 0 and not tree.log_probs(hidden, head, mask=nothing).any()


def test_half_precision():
    """A row's logits are rounded as those of the sequence by itself are; sums are in f32, and so is the vocabulary's gradient."""
    made = sequences(6, count=12)
    tree = tree_of(made)
    hidden = torch.randn(tree.rows, 32).bfloat16().requires_grad_()
    head = (0.3 * torch.randn(grpo_tree.VOCAB, 32)).bfloat16().requires_grad_()
    rows = torch.from_numpy(tree.rows_of_tokens)
    logits = F.linear(hidden[rows], head).float().log_softmax(-1)
    found, cu = tree.log_probs(hidden, head), tree.cu_seqlens.tolist()
    for ids, begin, end in zip(made, cu, cu[1:]):
        if len(ids) > 1:
            want = logits[begin:end - 1].gather(1, ids[1:, None])[:, 0]
            torch.testing.assert_close(found[begin + 1:end], want, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(tree.cross_entropy(hidden, head), (hidden, head))
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    want = torch.autograd.grad(tree.cross_entropy(*exact), exact)
    for a, b in zip(got, want):
        assert a.dtype == torch.bfloat16 and float((a.double() - b).norm() / b.norm()) < 5e-3
    with torch.autocast("cpu", torch.bfloat16):
        mixed = tree.log_probs(hidden.detach().float().requires_grad_(), head.detach().float())
        mixed.sum().backward()
    torch.testing.assert_close(mixed, found, rtol=1e-5, atol=1e-5)


def on_tree(made, net, group, reduction, settings, loss_of):
    """(the loss, gradients added up or averaged over the ranks), of a model on a rank's rows."""
    tree = tree_of(made)
    cp = weft.torch.ContextParallel(tree, group, reduction=reduction, **settings)
    hidden = net(cp.shard(torch.from_numpy(tree.tokens)), cp.position_ids(), cp)
    loss, shown = loss_of(tree, cp, hidden, net)
    found = gradients(net, loss)
    for name, gradient in found.items():
        found[name] = torch.stack(weft.torch.all_gather(gradient, cp.group)).sum(0) / (cp.ranks if reduction == "mean" else 1)
    return float(shown), found


def by_log_probs(made):
    def loss_of(tree, cp, hidden, net):
        loss = policy_loss(tree.log_probs(hidden, net.head, cp=cp, temperature=0.8), made)
        return loss, loss.detach()
    return loss_of


def by_cross_entropy(weights):
    def loss_of(tree, cp, hidden, net):
        loss = tree.cross_entropy(net.head(hidden), weights=weights, cp=cp)
        return loss, cp.reduce(loss.detach())
    return loss_of


SETTINGS = [dict(), dict(schedule="ring", layout="contiguous"), dict(schedule="exact", layout="striped"),
            dict(schedule="all_gather", layout="zigzag"), dict(schedule="all_to_all", layout="balanced"), dict(layout="auto")]


def check_against_alone(seed, ranks, settings):
    made = sequences(seed)
    net = model()
    weights = torch.randn(sum(map(len, made)), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    alone = log_probs_alone(net, made)
    learned = torch.cat([torch.arange(len(s)) > 0 for s in made])
    plain = -(alone * weights).sum() / learned.sum()
    cases = [(plain, by_cross_entropy(weights)), (policy_loss(log_probs_alone(net, made, 0.8), made), by_log_probs(made))]
    for (expected, loss_of), reduction in zip(cases, ("mean", "sum")):
        want = gradients(net, expected)
        arguments = reduction, settings, loss_of
        nets = [model() for _ in range(ranks)]  # not by the ranks: torch has one random state for all threads
        results = [on_tree(made, net, "", *arguments)] if ranks == 1 else weft.spawn(
            ranks, lambda comm, nets=nets, arguments=arguments: on_tree(made, nets[comm.rank], comm, *arguments))
        for loss, got in results:
            assert abs(loss - expected.item()) <= TOLERANCE * abs(expected.item()), (seed, settings)
            assert worst(got, want) <= TOLERANCE, (seed, settings)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_a_decoder_on_trees(ranks):
    """Loss and gradients of two layers, one with a window, are those of the sequences one by one, to 1e-10."""
    for seed, settings in enumerate(SETTINGS[:1] if ranks == 1 else SETTINGS[:4 if ranks == 2 else 2]):
        check_against_alone(seed, ranks, settings)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_many_trees(ranks):
    for seed in range(10, 22):
        check_against_alone(seed, ranks, SETTINGS[seed % len(SETTINGS)])


@pytest.mark.parametrize("layer", [dict(window=(3, 0)), dict(chunk_size=4), dict(window=(6, 0), chunk_size=9), dict(softcap=2.0),
                                   dict(mask=weft.Mask(causal=True, window=(2, 0)))])
def test_layers_of_a_tree(layer):
    """Each layer's own slices, where rows lie by another mask: one rank, and two, against dense attention of each sequence."""
    made = sequences(7)
    tree = tree_of(made)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tree.rows, heads, 8, generator=random, dtype=torch.float64) for heads in (4, 2, 2))
    seen = dict(window=layer["mask"].window) if "mask" in layer else layer

    def rank(group, **settings):
        cp = weft.torch.ContextParallel(tree, group, **settings)
        return cp.unshard(cp.attention(*map(cp.shard, (q, k, v)), **layer))

    found = rank("")
    if "softcap" not in layer:
        rows, cu = torch.from_numpy(tree.rows_of_tokens), tree.cu_seqlens.tolist()
        for begin, end in zip(cu, cu[1:]):
            at = rows[begin:end]
            want = OneSequence().attention(q[at], k[at], v[at], seen.get("window", (-1, 0)), seen.get("chunk_size"))
            torch.testing.assert_close(found[at], want, rtol=1e-12, atol=1e-12)
    for settings in (dict(), dict(layout="balanced", window=(WINDOW, 0)), dict(layout="zigzag", schedule="ring")):
        for out in weft.spawn(2, lambda comm, settings=settings: rank(comm, **settings)):
            said = "window" not in settings or "window" in layer or "mask" in layer
            torch.testing.assert_close(out, found if said else rank("", **settings))


def test_whole_layers():
    """weft.torch.TransformerLayer finds positions and slices by the ContextParallel of a tree."""
    made = sequences(8)
    tree = tree_of(made)
    torch.manual_seed(0)
    layer = weft.torch.TransformerLayer(16, 32, 4, num_gqa_groups=2, qkv_format="thd", rotary_base=100.0, window_size=(4, 0),
                                        params_dtype=torch.float64)
    x = torch.randn(tree.rows, 16, dtype=torch.float64)
    with torch.no_grad():
        rows, cu = torch.from_numpy(tree.rows_of_tokens), tree.cu_seqlens.tolist()
        alone = torch.cat([layer(x[rows[a:b]], cu_seqlens_q=[0, b - a]) for a, b in zip(cu, cu[1:]) if b > a])
        on_tree = layer(x, cp=weft.torch.ContextParallel(tree, ""))
        torch.testing.assert_close(tree.gather(on_tree), alone, rtol=1e-12, atol=1e-12)

        def rank(comm):
            cp = weft.torch.ContextParallel(tree, comm)
            with torch.no_grad():
                return cp.unshard(layer(cp.shard(x), cp=cp))

        for found in weft.spawn(2, rank):
            torch.testing.assert_close(found, on_tree, rtol=1e-12, atol=1e-12)


def test_values_of_all_tokens():
    """gather: on two ranks as on one, with gradients that add up."""
    made = sequences(8)
    tree = tree_of(made)
    x = torch.randn(tree.rows, 3, dtype=torch.float64)
    weights = torch.randn(tree.separate_tokens, 3, dtype=torch.float64)
    assert torch.equal(tree.gather(x), x[torch.from_numpy(tree.rows_of_tokens)])

    def rank(comm):
        cp = weft.torch.ContextParallel(tree, comm, reduction="mean")
        local = cp.shard(x).requires_grad_()
        found = tree.gather(local, cp=cp)
        (found.square() * weights).sum().backward()
        return found.detach(), cp.unshard(local.grad)

    whole = x.clone().requires_grad_()
    (tree.gather(whole).square() * weights).sum().backward()
    for found, gradient in weft.spawn(2, rank):
        assert torch.equal(found, tree.gather(x))
        torch.testing.assert_close(gradient, 2 * whole.grad)  # twice, because they will be averaged


def test_padding_and_several_trees():
    """Rows without a token are nobody's, whatever is in them."""
    made = sequences(9)
    tree = tree_of(made).padded_to(8)
    plain = tree_of(made)
    assert tree.rows > plain.rows
    hidden, head = torch.randn(plain.rows, 8, dtype=torch.float64), torch.randn(grpo_tree.VOCAB, 8, dtype=torch.float64)
    real = torch.from_numpy(tree.node_of_row) >= 0
    wide = torch.full((tree.rows, 8), float("nan"), dtype=torch.float64)
    wide[real] = hidden
    wide.requires_grad_()
    assert torch.equal(tree.log_probs(wide, head), plain.log_probs(hidden, head))
    tree.cross_entropy(wide, head).backward()
    assert not wide.grad[~real].any() and not wide.grad.isnan().any()


def test_a_tree_of_nodes():
    tree = weft.prepare.Tree.from_nodes([-1, 0, 0], [3, 2, 4])
    logits = torch.randn(tree.rows, 11)
    with refused("no tokens", "tokens="):
        tree.log_probs(logits)
    ids = torch.arange(tree.rows) % 11
    found = tree.log_probs(logits, tokens=ids)
    words = logits.log_softmax(-1)
    assert float(found[3]) == pytest.approx(float(words[2, ids[3]]), rel=1e-5)  # the first token of the first branch
    assert float(found[5 + 3]) == pytest.approx(float(words[2, ids[5]]), rel=1e-5)  # of the second, from the same row


def test_refused():
    tree = tree_of(sequences(1))
    logits, head = torch.zeros(tree.rows, grpo_tree.VOCAB), torch.zeros(grpo_tree.VOCAB, 8)
    hidden = torch.zeros(tree.rows, 8)
    for call, words in (
        (lambda: tree.log_probs(logits[1:]), f"{tree.rows} rows"), (lambda: tree.log_probs(logits[:, 0]), "of shape"),
        (lambda: tree.log_probs(logits, temperature=0), "temperature of 0"),
        (lambda: tree.log_probs(logits[:, :9]), "logits of 9"),
        (lambda: tree.log_probs(hidden, head.double()), "float64"), (lambda: tree.log_probs(hidden, head[:, :7]), "lm_head of"),
        (lambda: tree.log_probs(hidden, torch.nn.Identity()), "Identity"),
        (lambda: tree.log_probs(logits, tokens=[1, 2]), "tokens of shape [2]"),
        (lambda: tree.log_probs(logits, mask=torch.ones(3)), "mask of shape [3]"),
        (lambda: tree.cross_entropy(hidden, head, reduction="average"), "'average'"),
        (lambda: tree.cross_entropy(hidden, head, reduction="sum", targets=3), "leave one of them out"),
        (lambda: tree.cross_entropy(hidden, head, weights=[1.0]), "weights of shape [1]"),
        (lambda: tree.log_probs(logits, cp=weft.torch.ContextParallel(tree_of(sequences(1)))), "not of this tree"),
    ):
        with refused(words):
            call()
    cp = weft.torch.ContextParallel(tree)
    q = torch.zeros(tree.rows, 2, 8)
    for call in (lambda: cp.labels(torch.zeros(tree.rows)), lambda: cp.log_probs(logits, torch.zeros(tree.rows)),
                 lambda: cp.loss(torch.zeros(tree.rows))):
        with refused("rows of a tree", "tree.cross_entropy"):
            call()
    with refused("not causal", "slices of your own"):
        cp.attention(q, q, q, causal=False)
    assert torch.equal(cp.attention(q, q, q, bottom_right=True), cp.attention(q, q, q))

    def rank(comm):
        pair = weft.torch.ContextParallel(tree, comm)
        local = torch.zeros(pair.rows, grpo_tree.VOCAB)
        tree.log_probs(local, cp=pair)  # carries no gradient, so nobody has to say what becomes of it
        with refused('reduction="mean"'):
            tree.log_probs(local.requires_grad_(), cp=pair)
        with refused('reduction="mean"'):
            tree.cross_entropy(local, cp=pair)

    weft.spawn(2, rank)


def test_empty_trees():
    for made in ([], [[]], [[3], [4]]):
        tree = weft.prepare.Tree.from_sequences(made)
        logits = torch.randn(tree.rows, 6, requires_grad=True)
        found = tree.log_probs(logits)
        assert found.shape == (tree.separate_tokens,) and not found.any()
        loss = tree.cross_entropy(logits)
        loss.backward()
        assert loss.item() == 0 and not logits.grad.any()


# By address: there are machines that do not know the name localhost.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]


@pytest.mark.long
@pytest.mark.parametrize("start", [[sys.executable], TORCHRUN], ids=["python", "torchrun"])
def test_the_example(start):
    done = subprocess.run([*start, grpo_tree.__file__, "--prompt", "96", "--answer", "24"], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    assert "8 answers to each of 4 prompts" in done.stdout and "tokens saved: 7" in done.stdout
