"""ContextParallel in one process: what it is made of, what it gives, and what it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
import weft
import weft.torch

CU = [0, 7, 10, 16]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("packing", [
    CU, tuple(CU), np.array(CU), torch.tensor(CU), torch.tensor(CU, dtype=torch.int32), weft.Packing(CU),
    weft.torch.pack(weft.Packing(CU))], ids=["list", "tuple", "array", "int64", "int32", "Packing", "pack"])
def test_packings(packing):
    assert weft.torch.ContextParallel(packing).packing == weft.Packing(CU)


def test_loss_is_the_mean_over_targets():
    torch.manual_seed(0)
    cp, ids = weft.torch.ContextParallel(CU), torch.randint(0, 9, (16,))
    logits = torch.randn(16, 9, requires_grad=True)
    labels = cp.labels(ids)
    assert (labels == -100).nonzero().flatten().tolist() == [6, 9, 15]
    expected = F.cross_entropy(logits, labels)
    each = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(cp.loss(each), expected)
    torch.testing.assert_close(each.sum() * cp.scale, expected)
    torch.testing.assert_close(cp.loss(each[None]), expected)
    torch.testing.assert_close(cp.loss(each, targets=26), expected / 2)
    torch.testing.assert_close(cp.reduce(cp.loss(each)), expected.detach())


def test_labels_that_leave_tokens_out():
    ids = torch.arange(16)
    learned = torch.where(ids % 2 == 0, ids, -7)
    cp = weft.torch.ContextParallel(CU, ignore_index=-7)
    assert cp.labels(learned).tolist() == [-7, 2, -7, 4, -7, 6, -7, 8, -7, -7, -7, 12, -7, 14, -7, -7]
    assert cp.scale == 1 / 6
    assert cp.labels(learned[None], shifted=True).tolist() == [learned.tolist()]
    assert cp.scale == 1 / 8


def test_a_pack_without_targets_has_no_loss():
    cp = weft.torch.ContextParallel([0, 1, 2])
    assert cp.labels(torch.tensor([3, 4])).tolist() == [-100, -100]
    assert cp.loss(torch.zeros(2)).item() == 0


def test_refusals(refused):
    make = weft.torch.ContextParallel
    cp = make(CU)
    q = torch.zeros(16, 2, 8)
    with refused("how many targets", "labels", "targets="):
        cp.loss(torch.zeros(16))
    with refused("one number", 'reduction="none"'):
        cp.loss(torch.zeros(()))
    with refused("[16, 3]", "[rows]"):
        cp.loss(torch.zeros(16, 3))
    with refused("[15]", "16 rows"):
        cp.loss(torch.zeros(15))
    with refused("[17]", "16 tokens"):
        cp.shard(torch.zeros(17))
    with refused("[3]", "16 tokens"):
        cp.labels(torch.zeros(3))
    with refused("[1, 16, 2, 8]", "[rows, heads, dim]"):
        cp.attention(q[None], q, q)
    with refused("v has shape [8, 2, 8]"):
        cp.attention(q, q, q[:8])
    once = dict(group=None, cp_group=None, cu_seqlens=CU, layout="zigzag", layout_mask=weft.Mask(), format="bshd", one_rank=True)
    for name, value in once.items():
        with refused("belongs to the ContextParallel"):
            cp.attention(q, q, q, **{name: value})
    with refused("belongs to the ContextParallel"):
        make(CU, qkv_format="bshd")
    with pytest.raises(TypeError, match="widnow"):
        cp.attention(q, q, q, widnow=(3, 0))
    with pytest.raises(TypeError, match="shedule"):
        make(CU, shedule="ring")
    with refused("mask is given together with window"):
        cp.attention(q, q, q, mask=weft.Mask(), window=(3, 0))
    with refused("mask is of type str"):
        make(CU, mask="causal")
    with refused("reduction 'avg'", '"sum"', '"mean"'):
        make(CU, reduction="avg")
    with refused("layout is a Layout", "name"):
        make(CU, layout=weft.Layout("zigzag", weft.Packing(CU), 2))
    with refused("a group was expected"):
        make(CU, 3)
    with refused("named 'cp'", 'mesh["cp"]'):
        make(CU, "cp")
    with pytest.raises(weft.Error, match="bogus"):
        make(CU, schedule="bogus")


def test_torchrun_without_a_group(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("WORLD_SIZE is 2", "init_process_group", '""'):
        weft.torch.ContextParallel(CU)
    assert weft.torch.ContextParallel(CU, "").next(CU).ranks == 1


def test_threads_as_ranks():
    ids = torch.arange(16)

    def rank(comm):
        cp = weft.torch.ContextParallel(CU, comm, reduction="sum")
        q = cp.shard(ids)[:, None, None].expand(-1, 2, 8).float().contiguous()
        return cp.unshard(cp.attention(q, q, q))

    q = ids[:, None, None].expand(-1, 2, 8).float().contiguous()
    expected = weft.torch.ContextParallel(CU).attention(q, q, q)
    for out in weft.spawn(3, rank):
        torch.testing.assert_close(out, expected)


@pytest.mark.long
def test_in_a_compiled_graph():
    cp = weft.torch.ContextParallel(CU, mask=weft.Mask(causal=True, window=(5, 0)))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q):
        return cp.attention(q * 2, q, q, chunk_size=4).sum()

    q = torch.randn(16, 2, 8, requires_grad=True)
    layer(q).backward()
    found, q.grad = q.grad, None
    cp.attention(q * 2, q, q, chunk_size=4).sum().backward()
    torch.testing.assert_close(found, q.grad)


def test_buffers(refused):
    ids, labels = torch.arange(16), torch.arange(16)
    labels[3] = -100
    storage = ids.data_ptr()
    with pytest.raises(KeyError), weft.torch.context_parallel(CU, buffers=[ids, labels]) as cp:
        assert cp.scale == 1 / 15
        raise KeyError
    assert ids.data_ptr() == storage and ids.tolist() == list(range(16))
    with refused("twice"), weft.torch.context_parallel(CU, buffers=[ids, ids]):
        pass
    with refused("2 buffers and 1 fills"), weft.torch.context_parallel(CU, buffers=[ids, labels], fills=[0]):
        pass
    with refused("[3]"), weft.torch.context_parallel(CU, buffers=[ids, torch.zeros(3)]):
        pass
    assert ids.tolist() == list(range(16))
    table = torch.nn.Embedding(16, 2)
    with weft.torch.context_parallel(CU, buffers=[ids]):
        loss = table(ids).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # never a wrong gradient
        loss.backward()


@pytest.mark.parametrize("ids", [[0, 1, 2, 0, 1, 0], [[0, 1, 2, 0, 1, 0]], np.array([0, 1, 2, 0, 1, 0], np.int32),
                                 torch.tensor([[0, 1, 2, 0, 1, 0]])], ids=["list", "row", "array", "tensor"])
def test_position_ids(ids):
    assert weft.Packing.from_position_ids(ids) == weft.Packing([0, 3, 5, 6]) == weft.packing_from_position_ids(ids)


@pytest.mark.long
def test_position_ids_of_a_flattening_collator():
    transformers = pytest.importorskip("transformers")
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt")
    batch = collator([{"input_ids": list(range(n))} for n in (4, 1, 6)])
    assert weft.Packing.from_position_ids(batch["position_ids"]) == weft.Packing([0, 4, 5, 11])


def test_position_ids_refused(refused):
    with refused("[2, 3]", "one row", "from_batch"):
        weft.Packing.from_position_ids([[0, 1, 2], [0, 1, 2]])
    with refused("begin with 4", "whole pack"):
        weft.Packing.from_position_ids([4, 5, 0, 1])
    with refused("position_ids[3] is 5 after 0"):
        weft.Packing.from_position_ids([0, 1, 0, 5])
    with refused("float"):
        weft.Packing.from_position_ids([0.0, 1.0])


def test_lines_of_a_users_own_loop():
    """The step of docs/pytorch.md runs, trains what a plain loop trains, and needs at most six lines of Weft's."""
    page = (ROOT / "docs/pytorch.md").read_text()
    step, layer = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[:2]
    lines = [line for line in (step + layer).splitlines() if re.search(r"\bcp\b|weft", line.split("#")[0])]
    assert 4 <= len(lines) <= 6, lines

    torch.manual_seed(0)
    table, head = torch.nn.Embedding(9, 16), torch.nn.Linear(16, 9)
    ids = torch.randint(0, 9, (16,))

    def model(ids, positions, cp):
        x = table(ids).unflatten(-1, (2, 8))
        names = dict(q=x, k=x, v=x, cp=cp)
        exec(layer, names)
        return head(names["out"].flatten(1))

    names = dict(weft=weft, torch=torch, F=F, cu_seqlens=CU, input_ids=ids, model=model, mesh={"cp": ""})
    exec(step, names)
    found = table.weight.grad.clone()
    table.zero_grad()
    out = model(ids, None, weft.torch.ContextParallel(CU))
    F.cross_entropy(out, weft.torch.next_token_labels(ids, weft.Packing(CU))).backward()
    torch.testing.assert_close(found, table.weight.grad)


# By address: there are machines that do not know the name localhost.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
            "--local-addr", "127.0.0.1", "--nproc-per-node"]


@pytest.mark.long
def test_the_fsdp2_example():
    """The same losses and gradients on one process and on two ranks, and with two packs on two ranks each; and it learns."""
    def lines(*start):
        done = subprocess.run([*start], capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        return [[float(x) for x in re.findall(r"\d+\.\d+", line)] for line in done.stdout.splitlines() if "step" in line]

    program = str(ROOT / "examples/fsdp2.py")
    one, two = lines(sys.executable, program), lines(*TORCHRUN, "2", program)
    assert len(one) == len(two) == 7
    assert two[0] == pytest.approx(one[0], abs=2e-5)
    assert two[-1][0] == pytest.approx(one[-1][0], rel=1e-3)
    assert two[-1][0] < 0.7 * two[0][0]
    both = ["--dp", "2", "--steps", "1"]
    (accumulated,), (four,) = lines(sys.executable, program, *both), lines(*TORCHRUN, "4", program, *both)
    assert four[1] == pytest.approx(accumulated[1], abs=2e-5)
    assert four[1] != pytest.approx(one[0][1], abs=1e-3)
