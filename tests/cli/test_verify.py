"""weft verify, and what all verbs share: documents, versions, flags that come back as they went."""

import math
import re
import shlex

import pytest

import model


def test_version_and_help(weft):
    version = weft.ok("--version")
    assert re.fullmatch(r"weft \d+\.\d+\.\d+\n", version.out)
    for verb in ("explain", "verify"):
        assert verb in weft("--help").out
        page = weft.ok(verb, "--help")
        for flag in ("docs", "padded-to", "mask", "align", "window", "chunk", "slices", "ranks", "layout", "heads",
                     "dim", "dtype", "seed", "json"):
            assert f"--{flag} " in page.out


def test_one_problem(weft):
    result = weft.ok("verify", "--docs", "8,5,11", "--mask", "causal", "--ranks", 4, "--sink", "learnable",
                     json_file=True)
    assert "117 pairs" in result.out and "FAILED" not in result.out
    for tensor in ("out", "lse", "max_logit", "dq", "dk", "dv", "dsink"):
        lines = [line for line in result.out.split("\n") if line.split()[:1] == [tensor]]
        assert len(lines) == 3 and all(" ok " in line for line in lines)  # sequence order, rank order, ring
    got = result.json
    assert got["cases"] == 1 and got["failed"] == 0 and got["skipped"] == []
    assert 0 < got["worst"]["ratio"] < 1 and 0 <= got["worst"]["norm"] < 1e-6
    assert got["worst"]["tensor"] == "out" and "token" in got["worst"]["where"]


@pytest.mark.long
def test_a_check_that_is_too_large_is_skipped_with_its_reason(weft):
    result = weft.ok("verify", "--docs", 5000, "--heads", 1000, json_file=True)
    assert [s["count"] for s in result.json["skipped"]] == [1]
    assert result.json["skipped"][0]["reason"].startswith("attention: ")
    assert result.json["cases"] == 1 and result.json["worst"] is None
    assert "25,000,000 pairs" in result.out


def test_some_rows_and_keys_of_a_large_problem_are_looked_at(weft):
    result = weft.ok("verify", "--docs", "9000", "--window", "40,0", "--heads", 1, "--dim", 4, "--kernel", "cpu",
                     json_file=True)
    assert "64 rows and 64 keys of 9,000 looked at" in result.out
    assert result.json["sampled"] == 1 and result.json["cases"] == 1 and result.json["worst"]["ratio"] < 1
    for tensor in ("out", "lse", "max_logit", "dq", "dk", "dv"):
        assert any(line.split()[:1] == [tensor] for line in result.out.split("\n")), tensor


@pytest.mark.parametrize("args", [["--docs", 9000, "--heads", 1000], ["--docs", 9, "--ranks", 3000]])
def test_nothing_checked_is_a_failure(weft, args):
    result = weft("verify", *args, json_file=True)
    assert result.code == 2
    assert "nothing was checked" in result.err
    assert result.json["cases"] == 0 and len(result.json["skipped"]) == 2


def test_random(weft):
    result = weft.ok("verify", "--random", 300, json_file=True)
    got = result.json
    assert got["cases"] == 300 and got["failed"] == 0
    assert 0 < got["with_remote_keys"] < 300
    counts = [n for masks in got["by_layout"].values() for n in masks.values()]
    assert sum(counts) == 300
    assert set(got["by_layout"]) == {"contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed", "explicit"}
    assert all(s["count"] < 30 and s["reason"] for s in got["skipped"])
    assert "300 cases" in result.out and "0 failed" in result.out


def test_random_does_not_depend_on_threads(weft):
    results = [weft("verify", "--random", 200, "--seed", 9, "--threads", n, json_file=True) for n in (1, 2, 5)]
    assert results[0].out == results[1].out == results[2].out
    assert results[0].json == results[1].json == results[2].json
    other = weft("verify", "--random", 200, "--seed", 10009, json_file=True)
    assert other.json["by_layout"] != results[0].json["by_layout"]


def test_case_i_is_drawn_from_seed_plus_i(weft):
    both = weft("verify", "--random", 3, "--seed", 20, json_file=True).json
    apart = [weft("verify", "--random", 1, "--seed", 20 + i, json_file=True).json for i in range(3)]
    assert both["worst"] == max((one["worst"] for one in apart), key=lambda worst: worst["ratio"])
    drawn = [(layout, mask) for one in apart for layout, masks in one["by_layout"].items() for mask in masks]
    assert sorted(drawn) == sorted((layout, mask) for layout, masks in both["by_layout"].items()
                                   for mask, n in masks.items() for _ in range(n))


def test_random_of_one_layout(weft):
    result = weft("verify", "--random", 40, "--layout", "dual_chunk", json_file=True)
    assert list(result.json["by_layout"]) == ["dual_chunk"] and result.json["cases"] == 40


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_the_command_of_a_random_case_gives_it_again(weft, seed):
    """Every flag that the command prints must parse back: slices, runs, cross-attention, padding, softcap, sinks."""
    drawn = weft("verify", "--random", 1, "--seed", seed, json_file=True).json
    assert drawn.pop("seeds") == [seed, seed + 1]
    assert weft.again(drawn).json == drawn


FORMS = [
    "--docs 8,5,0,11 --padded-to 8 --layout dual_chunk --ranks 2 --mask causal",
    "--docs 6,4 --docs-k 9,2 --layout striped --ranks 3 --align bottom_right --window 4,1 --softcap 2.5",
    "--docs 6,4 --tokens 13 --layout contiguous --ranks 2 --chunk 3 --scale 0.3 --sink off_by_one --dtype bf16",
    "--cu-seqlens 3,9,13 --layout balanced --ranks 2 --heads 4:2 --dim 5:3 --dtype f64 --sink learnable",
    "--cu-seqlens 0,6,10 --cu-seqlens-padded 2,9,14 --cu-seqlens-k 1,4,8 --tokens-k 12 --layout zigzag --ranks 3",
    """--docs 9 --layout zigzag --ranks 2 --slices '[{"q":[0,4],"k":[0,4],"hi":0},{"q":[4,9],"k":[0,9],"lo":-6}]'""",
    """--docs 6 --layout explicit --runs '[[{"row":0,"token":3,"count":3}],[{"row":2,"token":0,"count":3}]]'""",
    """--docs 4 --docs-k 2 --layout explicit --runs '[[{"row":0,"token":0,"count":4}],[]]'
       --runs-k '[[],[{"row":0,"token":0,"count":2,"stride":1}]]'""",
]


@pytest.mark.parametrize("form", FORMS)
def test_flags_come_back(weft, form):
    first = weft.ok("verify", *shlex.split(form), "--seed", 3, json_file=True)
    again = weft.again(first.json)
    assert again.json == first.json and again.out == first.out


def test_slices_and_runs_from_files(weft, tmp_path):
    slices = '[{"q":[0,6],"k":[0,6],"lo":null,"hi":0}]'
    runs = '[[{"row":0,"token":3,"count":3}],[{"row":2,"token":0,"count":3}]]'
    (tmp_path / "slices.json").write_text(slices)
    (tmp_path / "runs.json").write_text(runs)
    flags = ["explain", "--docs", 6, "--layout", "explicit"]
    files = weft.ok(*flags, "--slices", "slices.json", "--runs", "runs.json")
    assert files.out == weft(*flags, "--slices", slices, "--runs", runs).out
    assert "21 visible pairs" in files.out


@pytest.mark.parametrize("seed, expected", [
    (0, [16253, 300, 6761, 1025, 3907, 1152]),
    (7, [4896, 12013, 15433, 3923, 1725, 1296]),
])
def test_lognormal_lengths_stay_what_they_are(weft, seed, expected):
    text = "lognormal:count=6,median=2400,sigma=1,min=16,max=16384"
    docs = weft("explain", "--docs", text, "--seed", seed, json_file=True).json["docs"]
    assert docs == expected


def test_lognormal_is_what_it_says(weft):
    text = "lognormal:count=2000,median=2400,sigma=0.5,min=1000,max=9000"
    docs = weft("explain", "--docs", text, "--seed", 2**64 - 1, json_file=True).json["docs"]
    assert docs == model.lognormal(2**64 - 1, 2000, 2400, 0.5, 1000, 9000)
    inside = sorted(docs)
    assert inside[0] == 1000 and inside[-1] <= 9000
    assert inside[1000] == pytest.approx(2400, rel=0.05)
    # One sigma above the median lie 15.9 %.
    assert sum(n > 2400 * math.exp(0.5) for n in docs) / 2000 == pytest.approx(0.159, abs=0.03)


def test_keys_are_drawn_apart_from_queries(weft):
    text = "lognormal:count=9,median=40"
    got = weft("explain", "--docs", text, "--docs-k", text, "--seed", 4, json_file=True).json
    assert got["docs"] == model.lognormal(4, 9, 40) and got["docs_k"] == model.lognormal(5, 9, 40)
