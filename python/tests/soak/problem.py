"""A random problem of attention on ranks that are threads, by numpy or torch, beside one rank of the f64 reference."""

import dataclasses

import numpy as np
import torch
import weft
import weft.torch

from kinds import NAMES

LAYOUTS = ["contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed", "explicit"]
BATCH_LAYOUTS = ["dual_chunk", "dual_chunk", "striped"]
HEADS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (5, 5), (6, 2), (7, 1), (8, 2), (8, 8), (12, 3)]
DIMS = [(8, 8), (8, 8), (16, 16), (5, 3), (24, 40), (64, 64), (128, 128), (192, 128)]
GPU_DIMS = [(64, 64), (64, 64), (128, 128), (192, 128)]
KINDS = ["numpy-f32", "numpy-f32", "torch-f32", "torch-bf16", "torch-bf16", "numpy-f16", "torch-f16", "numpy-f64", "torch-f64"]
GPU_KINDS = ["torch-bf16", "torch-bf16", "torch-f16", "torch-f32"]

# What the worst element may be off by, in parts of itself, of its row's and of its tensor's root mean square. A key too many
# for one query among a thousand is ten times what f32 is allowed; `weft verify`, which runs beside, has a bound for each element.
ALLOWED = {"f64": 1e-11, "f32": 1e-4, "f16": 2e-2, "bf16": 8e-2}


@dataclasses.dataclass
class Problem:
    ranks: int
    packing: weft.Packing
    layout: object      # a name or a weft.Layout
    mask: weft.Mask
    format: str
    batch: int
    heads: tuple
    dims: tuple
    kind: object
    front: str          # weft or torch
    schedule: weft.Schedule
    model: dict         # scale, softcap, head_map
    sink: object        # None, "off_by_one" or "learnable"
    options: dict       # checked, deterministic, max_logit
    device: str
    seed: int

    def __str__(self):
        said = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        said["packing"] = [x.tolist() for x in (self.packing.cu_seqlens_q, self.packing.cu_seqlens_k)]
        return ", ".join(f"{name} {value}" for name, value in said.items())


def _lengths(draw, tokens):
    """Lengths of documents that have so many tokens together; some are empty, some of one token."""
    count = min(draw.choice([1, 1, 2, 3, 5, 9, 30]), tokens)
    cuts = sorted(draw.randrange(tokens + 1) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens])] + [0] * draw.choice([0, 0, 0, 1])


def _tokens(draw, work):
    """Mostly some hundreds, at times thousands: log-uniform up to what the reference does in f64 in a few seconds."""
    most = int(min(6000, (1e9 / work) ** 0.5))
    return max(1, int(most ** draw.uniform(0.15, 1.0)))


def _divisor(draw, n):
    return draw.choice([d for d in range(1, n + 1) if n % d == 0])


def _schedule(draw, ranks, heads, strided):
    """A schedule with options. strided: gathered keys have no sequence order."""
    name = draw.choice(["all_gather", "ring", "all_to_all", "hybrid", "exact", "auto"])
    groups = draw.choice([1, 1, min(2, heads[1]), heads[1]])
    orders = ["auto", "rank"] if strided else ["auto", "sequence", "rank"]
    options = {
        "all_gather": dict(head_groups=groups, key_order=draw.choice(orders), node=_divisor(draw, ranks)),
        "ring": dict(ranks_per_step=draw.choice([1, 2, 2, 3]), node=draw.choice([1, _divisor(draw, ranks)])),
        "all_to_all": dict(head_groups=groups),
        "hybrid": dict(ulysses=_divisor(draw, ranks), outer=draw.choice(["ring", "all_gather"]), head_groups=groups),
        "exact": dict(stages=draw.choice([1, 2, 4, 7]), node=_divisor(draw, ranks), head_groups=groups), "auto": {},
    }[name]
    return weft.Schedule(name, **options)


def _head_map(draw, heads, schedule):
    """Any; one that never falls for groups of heads."""
    heads_k = sorted(draw.randrange(heads[1]) for _ in range(heads[0]))
    if schedule.options.get("head_groups", 1) == 1:
        draw.shuffle(heads_k)
    return heads_k


def _mask(draw, tokens, alone):
    """alone: keys are the queries' tokens."""
    width = draw.choice([0, 1, 3, 20, max(1, tokens // 3)])
    return weft.Mask(**draw.choice([
        dict(causal=True), dict(causal=True), dict(), dict(causal=True, window=(width, 0)), dict(window=(width, width // 2)),
        dict(causal=True, chunk_size=width + 1), dict(chunk_size=width + 1),
        dict(causal=True, bottom_right=not alone)]))


def _explicit(draw, packing, ranks):
    """Runs of random lengths, each to any rank."""
    def dealt(tokens):
        runs, at, row = [[] for _ in range(ranks)], 0, [0] * ranks
        while at < tokens:
            rank, count = draw.randrange(ranks), min(tokens - at, draw.randint(1, tokens // ranks + 2))
            runs[rank].append((row[rank], at, count))
            at, row[rank] = at + count, row[rank] + count
        return [run or [(0, 0, 0)] for run in runs]

    alone = np.array_equal(packing.cu_seqlens_q_padded, packing.cu_seqlens_k_padded) and packing.tokens_q == packing.tokens_k
    q = dealt(packing.tokens_q)
    return weft.Layout.explicit(packing, q) if alone else weft.Layout.explicit(packing, q, dealt(packing.tokens_k))


def _thd(draw, tokens, ranks, layout):
    """A packing, and whether its keys are its queries' tokens."""
    multiple = 2 * ranks if layout == "dual_chunk" else draw.choice([1, 1, 1, 4])
    lengths = _lengths(draw, tokens)
    if draw.random() < 0.15:
        keys = [draw.randrange(n + 9) for n in lengths]
        return weft.Packing([0, *np.cumsum(lengths)], [0, *np.cumsum(keys)]).padded_to(multiple), False
    return weft.Packing([0, *np.cumsum(lengths)]).padded_to(multiple), True


def drawn(draw, front, device="cpu"):
    """A problem that is supported. front: weft, or torch with its autograd."""
    ranks, gpu = draw.choice([1, 2, 2, 3, 4, 4, 5, 6, 7, 8]), device != "cpu"
    heads, dims = draw.choice(HEADS), draw.choice(GPU_DIMS if gpu else DIMS)
    kind = NAMES[draw.choice([k for k in (GPU_KINDS if gpu else KINDS) if k.startswith("torch") or front == "weft"])]
    tokens = _tokens(draw, heads[0] * max(dims))
    format = draw.choice(["thd"] * 6 + ["bshd", "sbhd"]) if front == "weft" else "thd"
    # The operator of torch takes layouts by name alone.
    layout, batch = draw.choice(LAYOUTS if front == "weft" else LAYOUTS[:-1]), 1
    if format == "thd":
        packing, alone = _thd(draw, tokens, ranks, layout)
        layout = "zigzag" if layout == "striped" and not alone else layout
    else:
        layout, batch, alone = draw.choice(BATCH_LAYOUTS), draw.randint(1, 4), True
        length = -(-tokens // batch // (2 * ranks)) * 2 * ranks or 2 * ranks
        used = [draw.randint(0, length) for _ in range(batch)] if draw.random() < 0.3 else None
        packing = weft.Packing.from_batch(batch, length, length, *([used, used] if used else []))
    schedule = _schedule(draw, ranks, heads, layout == "striped")
    head_map = _head_map(draw, heads, schedule) if draw.random() < 0.15 else None
    model = dict(scale=draw.choice([None, None, 0.2]), softcap=draw.choice([0.0, 0.0, 3.0]), head_map=head_map)
    options = dict(checked=draw.random() < 0.5, deterministic=draw.random() < 0.3)
    problem = Problem(ranks, packing, layout, _mask(draw, tokens, alone), format, batch, heads, dims, kind, front, schedule,
                      model, draw.choice([None, None, "off_by_one", "learnable"]), options, device, draw.randrange(2**31))
    if layout == "explicit":
        problem.layout = _explicit(draw, packing, ranks)
    elif front == "weft" and format == "thd" and draw.random() < 0.3:
        problem.layout = weft.Layout(layout, packing, ranks)
    return problem


def of_tree(draw, front, device="cpu"):
    """Sequences that share prefixes: a mask of slices, and a layout that is dealt out by it."""
    problem = drawn(draw, front, device)
    begin, ids = draw.randrange(200), np.random.default_rng(draw.randrange(2**31)).integers(0, 5, 400)
    made = [np.append(ids[:draw.randrange(begin + 1)], ids[200:200 + draw.randrange(60)]) for _ in range(draw.randint(1, 9))]
    tree = weft.prepare.Tree.from_sequences([*made, ids[:3]]).padded_to(2 * problem.ranks)
    mask = tree.mask(draw.choice([(-1, -1), (7, 0)]), draw.choice([None, 16]))
    name = draw.choice(["balanced", "contiguous", "zigzag", "dual_chunk"])
    layout = weft.Layout(name, tree.packing, problem.ranks, mask if name == "balanced" else None) if front == "weft" else name
    schedule = _schedule(draw, problem.ranks, problem.heads, False)
    if problem.model["head_map"]:
        problem.model["head_map"] = _head_map(draw, problem.heads, schedule)
    return dataclasses.replace(problem, packing=tree.packing, mask=mask, layout=layout, format="thd", batch=1, schedule=schedule)


def _tensors(problem):
    """q, k, v, dout in f64 as a rank's kind rounds them, padding full of NaN, and a sink or None."""
    rng, p = np.random.default_rng(problem.seed), problem.packing
    made = []
    for letter, heads, dim in (("q", 0, 0), ("k", 1, 0), ("k", 1, 1), ("q", 0, 1)):
        tokens = getattr(p, f"tokens_{letter}")
        x = rng.standard_normal((tokens, problem.heads[heads], problem.dims[dim]))
        x[~_real(p, letter)] = np.nan
        made.append(problem.kind.read(problem.kind.make(x)))
    return made, rng.standard_normal(problem.heads[0]) if problem.sink == "learnable" else problem.sink


def _real(packing, letter):
    """Which tokens are no padding."""
    begins, cu = getattr(packing, f"cu_seqlens_{letter}_padded"), getattr(packing, f"cu_seqlens_{letter}")
    real = np.zeros(getattr(packing, f"tokens_{letter}"), bool)
    for begin, length in zip(begins, np.diff(cu)):
        real[begin:begin + length] = True
    return real


def _batched(problem, x):
    """[tokens, heads, dim] in the problem's format."""
    if problem.format == "thd":
        return x
    x = x.reshape(problem.batch, -1, *x.shape[1:])
    return x if problem.format == "bshd" else np.ascontiguousarray(np.swapaxes(x, 0, 1))


def _flat(problem, x):
    if problem.format == "thd":
        return x
    x = x if problem.format == "bshd" else np.swapaxes(x, 0, 1)
    return x.reshape(-1, *x.shape[2:])


def _by_weft(problem, comm, rows, sink, said):
    """out, lse, dq, dk, dv, dsink of a rank, by weft.attention."""
    done = weft.attention(*rows[:3], mask=problem.mask, comm=comm, sink=sink, schedule=problem.schedule, **problem.model,
                          **problem.options, **said)
    return done.out, done.lse, *done.backward(rows[3])


def _by_torch(problem, comm, rows, sink, said):
    """The same by the operator and autograd."""
    *inputs, dout = rows
    inputs = [x.requires_grad_() for x in inputs]
    if isinstance(sink, torch.Tensor):
        sink = sink.detach().requires_grad_()
    out, lse = weft.torch.context_parallel_attention(
        *inputs, said["packing"], problem.mask, sink=sink, group=comm, schedule=problem.schedule, return_lse=True,
        layout=said["layout"], **problem.model, **problem.options)
    out.backward(dout)
    dsink = sum(weft.torch.all_gather(sink.grad, comm)) if isinstance(sink, torch.Tensor) else None
    return out.detach(), lse, *(x.grad for x in inputs), dsink


def _said(problem):
    """What shard and unshard are told."""
    told = dict(packing=problem.packing) if problem.format == "thd" else dict(format=problem.format)
    return dict(layout=problem.layout, **told)


def _rank(problem, comm, whole, sink):
    said, used = _said(problem), _used(problem.packing)
    of_batch = dict(seqused_q=used, seqused_k=used) if problem.format != "thd" and used else {}
    rows = [weft.shard(x, comm, side=side, **said) for x, side in zip(whole, "qkkq")]
    rows = [x.to(problem.device) if isinstance(x, torch.Tensor) else x for x in rows]
    attend = _by_torch if problem.front == "torch" else _by_weft
    return attend(problem, comm, rows, sink, {**said, **of_batch})


def _used(packing):
    """seqused of a batch whose sequences are not all full, else None."""
    lengths, room = np.diff(packing.cu_seqlens_q), np.diff(packing.cu_seqlens_q_padded)
    return None if np.array_equal(lengths, room) else lengths.tolist()


def _statistics(problem, x):
    """Logits of the sink: f32 beside all dtypes but f64."""
    if not isinstance(x, np.ndarray):
        return x
    x = x.astype(np.float64 if problem.kind.dtype == "f64" else np.float32)
    return torch.from_numpy(x).to(problem.device) if problem.kind.name.startswith("torch") else x


def _rows(x):
    """[rows, numbers of a row]; of none too."""
    return x.reshape(len(x), int(np.prod(x.shape[1:])))


def _cancelled(problem, name, want):
    """How large the terms of dq and dk are, a number a row: where a row sees one key in effect, equal ones are subtracted."""
    if name not in ("dq", "dk"):
        return 0.0
    scale = problem.model["scale"] or problem.dims[0] ** -0.5
    of_row = _rows(want[0] if name == "dq" else want[4])
    return scale * problem.dims[1] ** 0.5 * np.sqrt((np.nan_to_num(of_row)**2).mean(1, keepdims=True))


def assert_near(name, got, want, dtype, terms=0.0):
    """The worst element decides."""
    assert got.shape == want.shape, f"{name}: shape {got.shape}, not {want.shape}"
    rows = _rows(want)
    if not rows.size:
        return
    finite = np.where(np.isfinite(rows), rows, 0.0)
    of_row = np.sqrt((finite**2).mean(1, keepdims=True))
    allowed = ALLOWED[dtype] * (abs(finite) + of_row + terms + np.sqrt((finite**2).mean())) + (2.0**-24 if dtype == "f16" else 0)
    got = got.reshape(rows.shape)
    with np.errstate(invalid="ignore"):
        bad = ~((got == rows) | (abs(got - rows) <= allowed))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(f"{name}{list(at)} is {got[at]}, not {rows[at]} (allowed {allowed[at]:.3g}); "
                             f"{bad.sum()} of {bad.size} are off")


def check(problem):
    """Raises if the ranks' results are not those of one rank of the reference."""
    whole, sink = _tensors(problem)
    p, q_side, k_side = problem.packing, _real(problem.packing, "q"), _real(problem.packing, "k")
    one = weft.attention(*whole[:3], p, problem.mask, sink=sink, kernel="reference", **problem.model)
    want = [one.out, one.lse, *one.backward(whole[3])]
    given = [problem.kind.make(_batched(problem, x)) for x in whole]
    rows = weft.spawn(problem.ranks, lambda comm: _rank(problem, comm, given, _statistics(problem, sink)), time_limit=120)
    said = _said(problem)
    for i, (name, side) in enumerate((("out", "q"), ("lse", "q"), ("dq", "q"), ("dk", "k"), ("dv", "k"))):
        parts = [x[i].cpu() if isinstance(x[i], torch.Tensor) else x[i] for x in rows]
        got = np.asarray(weft.unshard(parts, side=side, **said).double() if isinstance(parts[0], torch.Tensor)
                         else weft.unshard(parts, side=side, **said)).astype(np.float64)
        real, terms = q_side if side == "q" else k_side, _cancelled(problem, name, want)
        assert_near(name, _flat(problem, got)[real], want[i][real], problem.kind.dtype, terms[real] if i in (2, 3) else 0.0)
    if problem.sink == "learnable":
        for x in rows:
            got = np.asarray(x[5].cpu() if isinstance(x[5], torch.Tensor) else x[5], np.float64)
            assert_near("dsink", got[None], want[5][None], problem.kind.dtype)
