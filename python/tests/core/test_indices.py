"""Every whole number that Python gives to the binding: a number out of range is an error, never a crash."""

import subprocess
import sys

import numpy as np
import pytest
import weft
from weft import _arrays

SWEEP = r"""
import re, resource
import numpy as np
import weft
from weft import _arrays, _core

resource.setrlimit(resource.RLIMIT_AS, (2**33, resource.getrlimit(resource.RLIMIT_AS)[1]))
BAD = (-1, 0, 2**31, 10**6, 2**62, -2**63, 2**63 - 1)
packing = weft.Packing([0, 7, 10, 16])
mask = weft.Mask(causal=True)
problem = _core.Problem(packing, mask)
layout = weft.Layout("zigzag", packing, 2)
schedule = _core.RankSchedule(problem, layout, 0, 2, 2, None, "ring")
micros = weft.prepare.MicroSequences(packing, ranks=1, micros=2)
packs = weft.prepare.pack_documents([7, 3, 6], budget=8)
machine = weft.Machine("cpu")
tree = _core.Tree.from_nodes([-1, 0, 0], [3, 2, 4])
tree_packs = _core.pack_trees([tree], 32, 1, False, False)

def array(*shape):
    return _arrays.array(np.zeros(shape, np.float32), True, "x")

def cache():
    return _core.KvCache(array(20, 1, 8), array(20, 1, 8), [0, 8, 20], [6, 0])

def integers(*numbers):
    return _arrays.array(np.array(numbers, np.int32), True, "x")

ROWS = {"cu_seqlens": lambda: integers(0, 8, 16), "cu_seqlens_padded": None, "tokens": 16, "layout": "zigzag", "stream": 0}
STEP = {"q": lambda: (integers(0, 8, 16), None, 16), "k": None, "stream": 0}

comms, buffers = [], []

# What a call takes beside the number that is tried, by the name of the argument.
GOOD = {
    "self": None, "packing": packing, "mask": mask, "problem": problem, "layout": layout, "rank": 0, "ranks": 2,
    "micro": 0, "micros": 2, "step": 0, "pack": 0, "budget": 8, "multiple": 1, "lengths": [7, 3, 6], "batch": 2,
    "length": 4, "length_k": 4, "tokens_q": 16, "tokens_k": 16, "cu_seqlens_q": [0, 7, 10, 16], "window": (-1, -1),
    "chunk_size": 4, "kind": "ring", "schedule": "ring", "heads_q": 2, "heads_k": 2, "head_map": None, "options": {},
    "dtype": _core.DType.f32, "dim_qk": 8,
    "dim_v": 8, "machine": machine, "backward": False, "detail": [0], "problems": [problem], "counts": [1],
    "memory_bytes": 0.0, "layouts": [layout], "schedules": [("ring", {})], "title": "", "colour": "rank", "side": "q",
    "sequence": 0, "used": 0, "offsets": [0, 8, 20], "k": lambda: array(20, 1, 8), "v": lambda: array(20, 1, 8),
    "rows": 8, "heads": 1, "drop": False, "kernel": "", "comm": lambda: comms[0], "threads": 0, "pad": True,
    "first_document_begin": 0, "color": 0, "key": 0, "runs": [[(0, 0, 8)], [(0, 8, 8)]], "slices": [(0, 4, 0, 4, 0, 0)],
    "seqused_q": None, "seqused_k": None, "keys": 0,
}
LISTS = {"lengths", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "seqused_q", "seqused_k", "offsets", "used",
         "counts", "detail", "head_map", "window", "runs", "slices", "lengths_k", "runs_k", "shape",
         "send_counts", "receive_counts"}
# Named otherwise in one place, or meaning something else there.
SPECIAL = {
    "Layout.__init__": {"kind": "zigzag"}, "KvCache.__init__": {"used": [6, 0]}, "choose": {"layouts": []},
    "Layout.explicit": {"runs": [[(0, 0, 8)], [(0, 8, 8)]]},
    "MicroSequences.rows": {"self": micros}, "MicroSequences.window": {"self": micros}, "MicroSequences.slices": {"self": micros},
    "Packs.pieces": {"self": packs}, "Packs.packing": {"self": packs}, "Packing.padded_to": {"self": packing},
    "Layout.tokens": {"self": layout}, "Layout.position_ids": {"self": layout}, "Layout.valid": {"self": layout},
    "Layout.fingerprint": {"self": layout},
    "Layout.shard": {"self": layout, "whole": lambda: array(16, 1, 8), "whole_format": _core.Format.thd,
                     "local": lambda: array(8, 1, 8), "local_format": _core.Format.thd},
    "Layout.unshard": {"self": layout, "whole": lambda: array(16, 1, 8), "whole_format": _core.Format.thd,
                       "local": lambda: array(8, 1, 8), "local_format": _core.Format.thd},
    "RankSchedule.traffic": {"self": schedule}, "KvCache.used": {"self": cache}, "KvCache.room": {"self": cache},
    "KvCache.keep": {"self": cache},
    "KvCache.append": {"self": cache, "counts": [1, 0], "k": lambda: array(1, 1, 8), "v": lambda: array(1, 1, 8)},
    "KvBuffer.missing": {"self": lambda: buffers[0]}, "KvBuffer.start_gather": {"self": lambda: buffers[0]},
    "KvBuffer.gather_again": {"self": lambda: buffers[0]},
    "Communicator.split": {"self": lambda: comms[0]},
    "copy_rows": {**ROWS, "what": _core.RowCopy.to_ranks, "source": lambda: array(16, 2), "to": lambda: array(16, 2)},
    "cu_seqlens_on_rank": {**ROWS, "out": lambda: integers(0, 0, 0), "out_padded": lambda: integers(0, 0, 0)},
    "partition_indices": {**ROWS, "out": lambda: integers(*range(8))},
    "OffsetsExecutor.__init__": {"q_rows": 8, "k_rows": 8, "deterministic": False, "device": None, "stream": 0},
    "OffsetsProblem.__init__": {"q": lambda: (integers(0, 7, 10, 16), None, 16), "k": None, "layout": "zigzag", "q_rows": 8,
                                "k_rows": 8},
    "exchange_rows": {"send": lambda: array(2, 2), "send_counts": [2], "receive": lambda: array(2, 2), "receive_counts": [2],
                      "stream": 0},
    "kernel_choice": {"kernel": "cpu", "device": None, "schedule": None},
    "make_step": {**STEP, "out": lambda: integers(*range(64))}, "step_capacity": STEP,
    "Tree.from_nodes": {"parents": [-1, 0, 0], "lengths": [3, 2, 4], "tokens": None, "sequence_end": None},
    "Tree.padded_to": {"self": tree, "rows": 16},
    "TreePacks.sequences": {"self": tree_packs}, "TreePacks.tree": {"self": tree_packs},
    "pack_trees": {"trees": [tree], "budget": 32, "keep_order": False, "split": False},
    "python_communicator": {"rank": 0, "ranks": 1, "name": "x", "transport": object()},
}
# Streams and devices are handles, not indices; ranks of spawn and all passes of tensors are tested by name elsewhere.
HANDLES = {"stream", "device", "requires_grad"}
LEFT_OUT = {"Ranks.__init__", "OneRank.forward", "OneRank.backward", "Executor.forward", "Executor.backward",
            "Executor.forward_source", "Executor.backward_source", "KvBuffer.forward",
            "KvBuffer.backward", "KvCache.attend", "Communicator.all_gather", "Communicator.exchange", "sequence_to_rank_order",
            "rank_to_sequence_order", "rank_plan", "KvBuffer.begin", "Executor.__init__",
            "array_at",  # an address, which only the caller knows
            "TorchRuns.get", "TorchRuns.put",  # keys of a cache, which are compared and nothing else
            "TorchSettings.__init__",  # test_torch_call.py
            "Communicator.disagreement",  # of ranks and their words
            "keep_flight_file",  # signal is a name's number, which the system checks
            "place"}  # test_place_refuses_numbers, because its heads are a pair
SLOW = {("choose", "ranks", 10**6)}  # a number like others, but a million ranks take long

def signature(function):
    text = (getattr(function, "__doc__", "") or "").split("\n")[0]
    if "(" not in text:
        return []
    inside, depth, parts = text[text.index("(") + 1:text.rindex(") ->") if ") ->" in text else text.rindex(")")], 0, [""]
    for c in inside:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [(p.split(":")[0].strip(), p.split(":", 1)[1].split("=")[0] if ":" in p else "") for p in parts
            if p.strip() not in ("", "*", "/")]

def value(where, name):
    got = SPECIAL.get(where, {}).get(name, GOOD.get(name, KeyError))
    return got() if callable(got) and got is not KeyError and not isinstance(got, type) else got

tried, unknown = 0, []

def sweep(where, function, made):
    global tried
    parameters = signature(function)
    numbers = [n for n, kind in parameters
               if (re.search(r"\bint\b", kind) or n in LISTS) and n not in HANDLES and "Array" not in kind]
    if not numbers or where in LEFT_OUT:
        return
    for number in numbers:
        for bad in BAD:
            if (where, number, bad) in SLOW:
                continue
            arguments = {}
            for name, kind in parameters:
                if name == number:
                    good = value(where, name)
                    if name in LISTS and kind.strip() != "int":
                        if name in ("runs", "runs_k"):
                            arguments[name] = [[(bad, 0, 8)], [(0, bad, 8)]]
                        elif name == "slices":
                            arguments[name] = [(0, 4, 0, bad, 0, 0)]
                        elif name == "window":
                            arguments[name] = (bad, bad)
                        else:
                            arguments[name] = [bad] * (len(good) if isinstance(good, list) else 2)
                    else:
                        arguments[name] = bad
                    continue
                good = value(where, name)
                if good is KeyError:
                    continue  # has a default, or the call says what is missing
                arguments[name] = good
            self = arguments.pop("self", None)
            print(where, number, bad, flush=True)
            tried += 1
            try:
                made(self, arguments)
            except (weft.Error, OverflowError, MemoryError):  # more than there is, of what could be
                pass
            except TypeError as e:
                # 2**63 and more, or an argument that this test does not know: that would test nothing.
                if bad in (-1, 0, 10**6) and "incompatible function arguments" in str(e):
                    unknown.append((where, number, sorted(arguments), str(e)[:600]))

def everything():
    for name, thing in sorted(vars(_core).items()):
        if isinstance(thing, type):
            for method, function in sorted(vars(thing).items()):
                if method.startswith("__") and method != "__init__":
                    continue
                function = getattr(thing, method)
                if not callable(function):
                    continue
                if method == "__init__":
                    sweep(f"{name}.{method}", function, lambda self, a, t=thing: t(**a))
                else:
                    static = not any(n == "self" for n, _ in signature(function))
                    sweep(f"{name}.{method}", function,
                          lambda self, a, f=function, s=static: f(**a) if s else f(self, **a))
        elif callable(thing):
            sweep(name, thing, lambda self, a, f=thing: f(**a))

def on_rank(comm):
    comms.append(comm)
    buffer = _core.KvBuffer(comm, 16, 1, 8, 8, _core.DType.f32)
    buffer.begin(weft.prepare.MicroSequences(packing, ranks=1, micros=2), mask)
    buffers.append(buffer)
    everything()

weft.spawn(1, on_rank)
for bad in BAD:  # of no names
    for arguments in ((problem, layout, bad, "rank"), (problem, layout, 0, bad)):
        try:
            _core.rank_plan(*arguments)
        except (weft.Error, OverflowError):
            pass
for owner, option in (("all_gather", "head_groups"), ("hybrid", "ulysses"), ("exact", "stages"), ("ring", "ranks_per_step"),
                      ("exact", "node")):
    for bad in BAD:
        print(option, bad, flush=True)
        tried += 1
        for call in (lambda o: _core.RankSchedule(problem, layout, 0, 2, 2, None, owner, o),
                     lambda o: _core.simulate(problem, layout, 2, 2, owner, o, _core.DType.f32, 8, 8, machine, False, [0])):
            try:
                call({option: bad})
            except (weft.Error, OverflowError, MemoryError):
                pass
assert not unknown, sorted({(u[0], u[1], u[3][:500]) for u in unknown})
assert tried > 300, tried
print("done", tried)
"""


WRAPS = """
import weft
from weft import _core

def on_rank(comm):
    for rows, heads, dim in ((2**30, 2**30, 4), (2**31 - 1, 2**33, 1), (2, 2**62, 2), (1, 1, 2**62)):
        try:
            _core.KvBuffer(comm, rows, heads, dim, dim, _core.DType.f32)
        except weft.Error as e:
            assert "x" in e.problem, e
        else:
            raise AssertionError((rows, heads, dim))

weft.spawn(1, on_rank)
"""


def test_sizes_that_would_wrap_are_errors():
    run = subprocess.run([sys.executable, "-c", WRAPS], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, f"ended with {run.returncode}: {run.stderr[-2000:]}"


@pytest.mark.parametrize("name, bad", [(name, bad) for name in ("ranks", "capacity", "node", "heads", "dim")
                                       for bad in (-1, 2**62, -2**63, 2**63 - 1)])
def test_place_refuses_numbers(name, bad):
    """An error, or a placement where the number means something (a capacity beyond all rows)."""
    given = {"ranks": 2, name: (bad, bad) if name in ("heads", "dim") else bad}
    if name in ("capacity", "node") and bad > 0:
        assert weft.place(weft.Packing([0, 7, 10, 16]), **given).layout is not None
        return
    with pytest.raises((weft.Error, ValueError)):
        weft.place(weft.Packing([0, 7, 10, 16]), **given)


def test_numbers_out_of_range_are_errors():
    run = subprocess.run([sys.executable, "-c", SWEEP], capture_output=True, text=True, timeout=600)
    last = run.stdout.strip().splitlines()[-1:] or ["nothing"]
    assert run.returncode == 0, f"ended with {run.returncode} at {last[0]}: {run.stderr[-2000:]}"
    assert last[0].startswith("done")


@pytest.mark.parametrize("peer, times, words", [(1, 1, "rank 1"), (-1, 1, "rank -1"), (0, 0, "0 times"), (0, -1, "-1 times")])
def test_exchange_of_ranks_and_times_that_are_not(peer, times, words):
    rows = np.zeros(4, np.float32)

    def on_rank(comm):
        comm.exchange([(peer, _arrays.array(rows))], [], times=times)

    with pytest.raises(weft.Error, match=words):
        weft.spawn(1, on_rank)
