"""weft.audit finds every planted fault, names the pair, and passes what is right."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import weft


def attend(q, k, v, case, *, visible=lambda case: case.visible(), heads=None, scale=1.0, sink=True,
           twist=lambda *gradients: gradients, rows=None):
    """A right attention in numpy, f32; each keyword plants a fault."""
    seen = visible(case)
    of = heads or (lambda h: h // (case.heads[0] // case.heads[1]))
    real = np.ones(len(q), bool) if rows == "all" else case.real()
    q, k, v = (np.where(real[:, None, None], x, 0) for x in (q, k, v))
    factor = scale * q.shape[-1] ** -0.5
    ps = []
    for h in range(q.shape[1]):
        s = np.where(seen, q[:, h] @ k[:, of(h)].T * factor, -np.inf)
        top = np.maximum(s.max(1, initial=-50), -50)[:, None]
        p = np.exp(s - top)
        more = np.exp(float(case.sink[h]) - top[:, 0]) if sink and case.sink is not None else 0
        total = p.sum(1) + more
        ps.append(p / np.where(total > 0, total, 1)[:, None])
    out = np.stack([p @ v[:, of(h)] for h, p in enumerate(ps)], 1)

    def backward(dout):
        dout = np.where(case.real()[:, None, None], dout, 0)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for h, p in enumerate(ps):
            dp = dout[:, h] @ v[:, of(h)].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True))
            dq[:, h] = ds @ k[:, of(h)] * factor
            dk[:, of(h)] += ds.T @ q[:, h] * factor
            dv[:, of(h)] += p.T @ dout[:, h]
        return twist(dq, dk, dv)
    return out, backward


def case_with(**changes):
    """Who sees whom in a case that has something else."""
    return lambda case: dataclasses.replace(case, **{name: value(case) for name, value in changes.items()}).visible()


def dense(change):
    """A fault in the matrix of who sees whom."""
    return lambda case: change(case.visible(), case)


def one_document(seen, case):
    tokens = np.arange(len(seen))
    return tokens[:, None] >= tokens if case.causal else np.ones_like(seen)


def without(seen, query, key):
    seen = seen.copy()
    seen[query, key] = False
    return seen


def shifted_by_empty(seen, case):
    """Documents after an empty one are taken for the ones before."""
    return seen if 0 not in case.lengths else np.roll(seen, 1, 0)


def wider(left, right):
    return lambda case: tuple(n if n < 0 else n + more for n, more in zip(case.window, (left, right)))


FAULTS = {
    "documents see each other": (dict(visible=dense(one_document)), "documents"),
    "not causal": (dict(visible=case_with(causal=lambda case: False)), "causal"),
    "always causal": (dict(visible=case_with(causal=lambda case: True)), "full"),
    "causal without the token itself": (dict(visible=dense(lambda s, c: s & ~np.eye(len(s), dtype=bool))), "causal"),
    "one token ahead": (dict(visible=dense(lambda s, c: s | (np.eye(len(s), k=1) > 0) & s.any(1)[:, None] & (
        s.T @ s))), "causal"),
    "window a token too wide": (dict(visible=case_with(window=wider(1, 0))), "window to the left"),
    "window a token too narrow": (dict(visible=dense(
        lambda s, c: s & ~(np.eye(len(s), k=-c.window[0]) > 0) if c.window[0] > 0 else s)), "window to the left"),
    "no window": (dict(visible=case_with(window=lambda case: (-1, -1))), "window to the left"),
    "no right side of a window": (dict(visible=case_with(window=lambda case: (case.window[0], -1))), "window to the right"),
    "right side is none": (dict(visible=case_with(window=lambda case: (case.window[0], min(case.window[1], 0)))),
                           "window to the right"),
    "no sink": (dict(sink=False), "sink"),
    "heads in turn": (dict(heads=lambda h: h % 2), "documents"),
    "first K/V head for all": (dict(heads=lambda h: 0), "as many K/V heads"),
    "no scale": (dict(scale=8 ** 0.5), "causal"),
    "padding is read": (dict(rows="all"), "padding"),
    "last token of odd documents is lost": (dict(visible=dense(
        lambda s, c: without(s, slice(None), [b + n - 1 for b, n in zip(c.cu_seqlens, c.lengths) if n % 2]))), "odd lengths"),
    "documents of one token see nothing": (dict(visible=dense(
        lambda s, c: without(s, [b for b, n in zip(c.cu_seqlens, c.lengths) if n == 1], slice(None)))), "odd lengths"),
    "empty documents shift others": (dict(visible=dense(shifted_by_empty)), "documents of no tokens"),
    "first offset is taken for 0": (dict(visible=case_with(cu_seqlens=lambda case: tuple(
        x - case.cu_seqlens[0] for x in case.cu_seqlens[:-1]) + case.cu_seqlens[-1:])), "first offset above 0"),
    "dq without the scale": (dict(twist=lambda dq, dk, dv: (dq * 8 ** 0.5, dk, dv)), "gradients"),
    "dk is half": (dict(twist=lambda dq, dk, dv: (dq, dk / 2, dv)), "gradients"),
    "dk and dv exchanged": (dict(twist=lambda dq, dk, dv: (dq, dv, dk)), "gradients"),
    "dv misses the last row": (dict(twist=lambda dq, dk, dv: (dq, dk, np.concatenate([dv[:-1], dv[-1:] * 0]))), "gradients"),
}


def wrong(report):
    return [v.property for v in report if v.result == "wrong"]


def test_the_right_one():
    report = weft.audit(attend)
    assert report.right and {v.result for v in report} == {"right"}, str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault):
    options, where = FAULTS[fault]
    report = weft.audit(lambda q, k, v, case: attend(q, k, v, case, **options))
    assert not report.right and where in wrong(report), str(report)
    assert all(v.detail for v in report if v.result == "wrong")


def test_the_first_wrong_pair():
    def details(**options):
        return {v.property: v.detail for v in weft.audit(lambda q, k, v, case: attend(q, k, v, case, **options)[0])}

    assert details(visible=dense(one_document))["documents"] == "query token 8 sees key token 0"
    assert details(visible=case_with(window=wider(1, 0)))["window to the left"] == "query token 4 sees key token 0"
    assert details(visible=case_with(causal=lambda case: True))["full"] == "query token 0 does not see key token 1"
    assert details(sink=False)["sink"].startswith("out of token ")
    assert weft.audit(lambda q, k, v, case: attend(q, k, v, case)[0])[-1].result == "not tried"


def by_weft(q, k, v, case):
    ranks = {} if case.comm is None else dict(comm=case.comm, schedule="ring")
    r = weft.attention(q, k, v, case.packing, causal=case.causal, window=case.window, sink=case.sink, **ranks)
    return r.out, r.backward


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weft(ranks):
    report = weft.audit(by_weft, ranks=ranks)
    assert {v.result for v in report} == {"right"}, str(report)


def lost_keys(q, k, v, case):
    """The keys of the last rank have come to nobody."""
    return by_weft(q, k * 0 if case.rank == case.ranks - 1 else k, v, case)


class Swapped:
    """Two ranks' rows put together in the wrong order."""

    def shard(self, x, case):
        return weft.shard(x, case.comm, packing=case.packing)

    def unshard(self, parts, case):
        return weft.unshard(parts[::-1], packing=case.packing)


# Faults that several ranks alone can have.
FAULTS_OF_RANKS = {"parts put together in the wrong order": (by_weft, Swapped()), "keys of a rank are lost": (lost_keys, None)}


@pytest.mark.parametrize("fault", FAULTS_OF_RANKS)
def test_planted_faults_of_ranks(fault):
    report = weft.audit(*FAULTS_OF_RANKS[fault], ranks=2)
    assert not report.right and "causal" in wrong(report)


def test_the_page_counts_the_faults():
    assert len(FAULTS) >= 20  # of one rank
    page = (Path(__file__).parents[3] / "docs/python.md").read_text()
    assert f"the {len(FAULTS) + len(FAULTS_OF_RANKS)} faults of `python/tests/core/test_audit.py`" in page


def test_one_mask_alone(refused):
    names = [v.property for v in weft.audit(attend)]
    causal, full = ([v.property for v in weft.audit(attend, mask=mask)] for mask in ("causal", "full"))
    assert full == ["full", "documents, full", "window to the right", "gradients"]
    assert sorted({*causal, *full}) == sorted(names) and set(causal) & set(full) == {"gradients"}
    with refused("'window'", '"causal"'):
        weft.audit(attend, mask="window")


# The command.

MINE = """
import weft

def right(q, k, v, case):
    r = weft.attention(q, k, v, case.packing, causal=case.causal, window=case.window, sink=case.sink, comm=case.comm)
    return r.out, r.backward

def attention(q, k, v, case):
    if case.sink is not None:
        raise NotImplementedError("no sinks here")
    return weft.attention(q, k, v, case.packing, causal=True, window=case.window, comm=case.comm).out     # forgets case.causal

class Swapped:
    def shard(self, x, case):
        return weft.shard(x, case.comm, packing=case.packing)

    def unshard(self, parts, case):
        return weft.unshard(parts[::-1], packing=case.packing)

def sharder():
    return Swapped()

number = 3
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """(exit code, stdout, stderr) of python -m weft audit, in a folder with mine.py."""
    from weft.audit.command import command as run

    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def call(*arguments):
        try:
            code = run(list(arguments))
        except SystemExit as e:  # of argparse
            code = e.code
        return (code, *capsys.readouterr())

    yield call
    sys.modules.pop("mine", None)


def test_the_command(command, tmp_path):
    code, out, err = command("mine:right")
    assert (code, err) == (0, "") and out.endswith("mine:right: 15 right, 0 wrong\n")
    code, out, _ = command("mine.py:attention", "--json", "verdicts.json")
    assert code == 1 and out.endswith("mine.py:attention: 10 right, 3 wrong, 1 refused, 1 not tried\n")
    assert "wrong      full                        query token 0 does not see key token 1\n" in out
    said = json.loads((tmp_path / "verdicts.json").read_text())
    assert (said["right"], said["ranks"], len(said["verdicts"])) == (False, 1, 15)
    assert {"property": "sink", "result": "refused", "detail": "no sinks here"} in said["verdicts"]
    assert sorted(x.name for x in tmp_path.iterdir() if x.is_file()) == ["mine.py", "verdicts.json"]
    assert command("mine:right", "--ranks", "2", "--dtype", "f64", "--tolerance", "1e-10")[0] == 0
    for sharder in ("mine:Swapped", "mine:sharder"):
        assert command("mine:right", "--ranks", "2", "--mask", "causal", "--sharder", sharder)[0] == 1


def test_the_page_of_the_command(command, tmp_path):
    page = (Path(__file__).parents[3] / "docs/command.md").read_text().split("## `weft audit`")[1]
    program, said = re.findall(r"^```(?:python|console)\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "mine.py").write_text(program)
    first, *lines = said.splitlines(keepends=True)
    code, out, _ = command(*first.removeprefix("$ python -m weft audit ").split(";")[0].split())
    assert (out, f"exit {code}\n") == ("".join(lines[:-1]), lines[-1])


@pytest.mark.parametrize("arguments, words", [
    ((), ["function"]), (("mine",), ["'mine' names no function", "module:function"]), (("none:f",), ["none"]),
    (("none.py:f",), ["none.py"]), (("mine:nope",), ["nope"]), (("mine:number",), ["int", "(q, k, v, case)"]),
    (("mine:right", "--sharder", "mine:right"), ["gives no sharder"]),
    (("mine:right", "--sharder", "mine:number"), ["shard and unshard"]),
    (("mine:right", "--ranks", "0"), ["--ranks 0"]), (("mine:right", "--ranks", "x"), ["ranks"]),
    (("mine:right", "--heads", "4:3"), ["4 query heads and 3"]), (("mine:right", "--heads", "a"), ["--heads a", "4:2"]),
    (("mine:right", "--mask", "window"), ["window", "causal"]), (("mine:right", "--tolerance", "nan"), ["nan"]),
    (("mine:right", "--json", "no/such.json"), ["no/such.json"]), (("mine:right", "--frobnicate"), ["--frobnicate", "--help"]),
])
def test_bad_input_of_the_command(command, arguments, words):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and err.startswith("weft: ") and err.count("\n") == 1 and "; " in err, (code, out, err)
    assert all(word in err for word in words), err


def test_the_command_as_a_program(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    path = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-m", "weft", "audit", "mine:attention", "--mask", "full"], cwd=tmp_path, env=path,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "0 right, 3 wrong" in done.stdout and not done.stderr


def test_what_is_refused_and_what_fails():
    def some(q, k, v, case):
        if case.sink is not None:
            raise NotImplementedError("no sinks here")
        if case.window[1] > 0:
            raise ZeroDivisionError("oh")
        return attend(q, k, v, case)[0]

    report = weft.audit(some)
    assert [v for v in report if v.result == "refused"] == [("sink", "refused", "no sinks here")]
    assert wrong(report) == ["window to the right"] and "ZeroDivisionError: oh" in str(report)
    with pytest.raises(weft.Error, match="divide"):
        weft.audit(some, heads=(4, 3))
