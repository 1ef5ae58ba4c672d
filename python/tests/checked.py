"""Ranks that disagree, with checked=True: what each of four does, and what all of them are told. Run by threads
(test_checked.py) and by processes over gloo (cases_groups.py)."""

import importlib.util

import numpy as np
import weft

RANKS, ODD, MICROS = 4, 1, 4
PACKING, OTHER = weft.Packing([0, 150, 167, 192, 256]), weft.Packing([0, 149, 167, 192, 256])


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((256, 4, 8), np.float32) for _ in range(3)]


def attend(comm, seed=0, packing=PACKING, **options):
    rows = [weft.shard(x, comm, packing=packing, layout="contiguous") for x in tensors(seed)]
    return weft.attention(*rows, packing=packing, comm=comm, checked=True, **{"causal": True, "layout": "contiguous", **options})


def forwards(comm, order):
    return [attend(comm, seed=layer, layer=layer) for layer in order]


def backwards(comm, order, numbered):
    done = [attend(comm, seed=n, layer=n if numbered else None) for n in range(3)]
    for n in order:
        done[n].backward(done[n].out)


def cut(packing=PACKING):
    return weft.prepare.MicroSequences(packing, ranks=RANKS, micros=MICROS)


def buffer(comm, **options):
    return weft.prepare.KvBuffer(comm, rows=256, heads=4, dim=8, checked=True, layer=5, **options)


def begun(comm, packing=PACKING, mask=None):
    kept = buffer(comm)
    kept.begin(cut(packing), mask)
    return kept


def forward(comm, kept, m, **settings):
    begin, end = cut().rows(comm.rank, m)
    return kept.forward(m, *(x[begin:end] for x in tensors()), **settings)


def micros_left_out(comm, last):
    kept = begun(comm)
    for _ in range(2):
        for m in range(last):
            forward(comm, kept, m)
        kept.begin(cut())


# Each is called with the rank's communicator and whether it is the odd one; the text is a part of what all ranks are told.
CASES = {
    "packing": (lambda comm, odd: attend(comm, packing=OTHER if odd else PACKING), "packing: rank 1 differs from ranks 0, 2, 3;"),
    "mask": (lambda comm, odd: attend(comm, window=(2 if odd else 3, 0)), "mask: rank 1 differs from ranks 0, 2, 3;"),
    "schedule": (lambda comm, odd: attend(comm, schedule="all_gather" if odd else "ring"), "schedule: rank 1 differs"),
    "scale": (lambda comm, odd: attend(comm, scale=0.1 if odd else 0.2),
              "attention (scale, softcap, sink, head_map): rank 1 differs from"),
    "layout by another mask": (
        lambda comm, odd: attend(comm, layout=weft.Layout("balanced", PACKING, RANKS, weft.Mask(causal=not odd))),
        "layout: rank 1 differs from ranks 0, 2, 3;"),
    "values of a sink": (lambda comm, odd: attend(comm, sink=np.array([1, 2, 3, 5 if odd else 4], np.float32)),
                         "values of the sink: rank 1 differs from ranks 0, 2, 3;"),
    "kernel": (lambda comm, odd: attend(comm, kernel="reference" if odd else "cpu"), "kernel: rank 1 differs"),
    "deterministic": (lambda comm, odd: attend(comm, deterministic=odd), "deterministic: rank 1 differs"),
    "a layer left out": (lambda comm, odd: forwards(comm, (0, 2, 2, 3) if odd else range(4)),
                         "rank 1 is at the forward of layer 2, ranks 0, 2, 3 are at the forward of layer 1;"),
    "a layer twice": (lambda comm, odd: forwards(comm, (0, 0, 1, 2) if odd else range(4)),
                      "rank 1 is at the forward of layer 0, ranks 0, 2, 3 are at the forward of layer 1;"),
    "another backward": (lambda comm, odd: backwards(comm, (2, 0, 1) if odd else (2, 1, 0), True),
                         "rank 1 is at the backward of layer 0, ranks 0, 2, 3 are at the backward of layer 1"),
    "another backward, no numbers": (lambda comm, odd: backwards(comm, (2, 0, 1) if odd else (2, 1, 0), False),
                                     "executor or buffer"),  # each call here has one of its own
    "packing of a buffer": (lambda comm, odd: begun(comm, OTHER if odd else PACKING),
                            "packing: rank 1 differs from ranks 0, 2, 3;"),
    "mask of a buffer": (lambda comm, odd: begun(comm, mask=weft.Mask(causal=True, window=(9 if odd else 8, 0))),
                         "mask: rank 1 differs from ranks 0, 2, 3;"),
    "scale of a buffer": (lambda comm, odd: forward(comm, begun(comm), 0, scale=0.1 if odd else 0.2),
                          "attention (scale, softcap, sink, head_map): rank 1 differs from"),
    "drop of a buffer": (lambda comm, odd: buffer(comm, drop=odd), "drop: rank 1 differs from"),
    "the last micro-sequence left out": (
        lambda comm, odd: micros_left_out(comm, 3 if odd else 4),
        "rank 1 is at the begin of a sequence of layer 5, ranks 0, 2, 3 are at the forward of micro-sequence 3 of layer 5"),
}

if importlib.util.find_spec("torch"):
    import torch
    import weft.torch

    def layers(comm, odd, order, **options):
        if odd:
            weft.torch.ContextParallelAttention(one_rank=True)  # one that a rank has for itself does not count
        made = [weft.torch.ContextParallelAttention(group=comm, layout="contiguous", checked=True, **options) for _ in range(4)]
        x = [weft.torch.shard(torch.from_numpy(t), PACKING, comm, layout="contiguous").requires_grad_() for t in tensors()]
        sum(made[n](*x, PACKING).sum() for n in order).backward()

    def micro_layers(comm, order, mask=None, sink=None):
        made = [weft.torch.MicroSequenceAttention(group=comm, checked=True, layer=n) for n in range(2)]
        rows = torch.cat([torch.arange(*cut().rows(comm.rank, m)) for m in range(MICROS)])
        x = [torch.from_numpy(t)[rows].requires_grad_() for t in tensors()]
        for n in order:
            made[n](*x, cut(), mask=mask, sink=sink).sum().backward()

    CASES.update({
        "layers in order": (lambda comm, odd: layers(comm, odd, range(4)), None),
        # All settings, shapes and tensors are alike: it is the order of calls alone that is not.
        "layers in another order": (
            lambda comm, odd: layers(comm, odd, (0, 2, 1, 3) if odd else range(4)), "ranks 0, 2, 3 are at the forward of layer"),
        "other numbers of layers": (lambda comm, odd: layers(comm, odd, (0, 1), layer=7 if odd else 3),
                                    "rank 1 is at the forward of layer 7, ranks 0, 2, 3 are at the forward of layer 3"),
        "micro-sequences in order": (lambda comm, odd: micro_layers(comm, (0, 1)), None),
        "micro-sequences in another order": (
            lambda comm, odd: micro_layers(comm, (1, 0) if odd else (0, 1)),
            "rank 1 is at a new K/V buffer of layer 1, ranks 0, 2, 3 are at a new K/V buffer of layer 0"),
        "mask of micro-sequences": (
            lambda comm, odd: micro_layers(comm, (0,), weft.Mask(causal=True, window=(2 if odd else 3, 0))),
            "mask: rank 1 differs"),
        "sink of micro-sequences": (
            lambda comm, odd: micro_layers(comm, (0,), sink=torch.tensor([1.0, 2.0, 3.0, 5.0 if odd else 4.0])),
            "values of the sink: rank 1 differs"),
    })
