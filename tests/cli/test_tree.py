"""--tree: what is drawn and checked against trees said in plain Python."""

import json
import re

import pytest

NODES = {"nodes": [{"parent": -1, "tokens": 8}, {"parent": 0, "tokens": 4}, {"parent": 0, "tokens": 3},
                   {"parent": 2, "tokens": 2}, {"parent": 2, "tokens": 4}, {"parent": -1, "tokens": 5}]}
SEQUENCES = {"sequences": [[5, 6, 7, 8, 9], [5, 6, 7, 1, 2, 3], [5, 6, 4], [8, 8], [5, 6], []]}


def pairs(paths, left=-1, chunk=None):
    """Visible pairs of rows: those that at least one path sees."""
    return len({(path[i], path[j]) for path in paths for i in range(len(path)) for j in range(i + 1)
                if (left < 0 or i - j <= left) and (chunk is None or i // chunk == j // chunk)})


def test_draws_nodes(weft, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(NODES))
    done = weft("explain", "--tree", file, "--ranks", 2, "--layout", "contiguous", json_file=True)
    assert done.code == 0, done.err
    assert "6 nodes: 26 rows for 45 tokens of 4 sequences" in done.out
    lines = re.findall(r"^([│├└─ ]*)(\d+) +\[(\d+), (\d+)\) +\[(\d+), (\d+)\) +(\d+)  (\w*)$", done.out, re.M)
    assert [(n, a, b, p, s) for _, n, a, b, p, _, s, _ in lines] == [
        ("0", "0", "8", "0", "3"), ("1", "8", "12", "8", "1"), ("2", "12", "15", "8", "2"), ("3", "15", "17", "11", "1"),
        ("4", "17", "21", "11", "1"), ("5", "21", "26", "0", "1")]
    assert [branch for branch, *_ in lines] == ["", "├─ ", "└─ ", "   ├─ ", "   └─ ", ""]
    assert "".join(held for *_, held in lines) == "A" * 13 + "B" * 13
    tree = done.json["tree"]
    assert tree["separate_tokens"] == 45 and tree["separate_pairs"] == 78 + 91 + 120 + 15 and len(tree["nodes"]) == 6
    p = [*range(8)]
    paths = [p + [*range(8, 12)], p + [12, 13, 14, 15, 16], p + [12, 13, 14, 17, 18, 19, 20], [*range(21, 26)]]
    assert done.json["pairs"] == pairs(paths)


@pytest.mark.parametrize("flags, mask", [("", {}), ("--window 3,0", {"left": 3}), ("--chunk 4", {"chunk": 4}),
                                         ("--window 2,5 --chunk 3", {"left": 2, "chunk": 3})])
def test_sequences_see_what_they_see_alone(weft, flags, mask):
    done = weft("explain", "--tree", json.dumps(SEQUENCES), *flags.split(), json_file=True)
    rows = {}
    paths = [[rows.setdefault(tuple(s[: n + 1]), len(rows)) for n in range(len(s))] for s in SEQUENCES["sequences"]]
    assert done.json["pairs"] == pairs(paths, **mask)
    assert done.json["tree"]["sequences"] == 6 and done.json["tokens"] == 11
    for layout in ("balanced", "zigzag", "striped", "dual_chunk"):
        padded = ["--padded-to", 6] if layout == "dual_chunk" else []
        checked = weft("verify", "--tree", json.dumps(SEQUENCES), *flags.split(), "--ranks", 3, "--layout", layout, *padded,
                       "--schedule", "all", "--heads", "3:3")
        assert checked.code == 0, checked.out + checked.err
        assert f"{pairs(paths, **mask)} pairs" in checked.out


def test_other_verbs(weft, tmp_path):
    text = json.dumps(NODES)
    assert weft("explain", "--tree", text, "--html", tmp_path / "page.html", "--schedule", "exact").code == 0
    assert weft("simulate", "--tree", text, "--ranks", 2).code == 0
    assert weft("verify", "--tree", text, "--micro", 2, "--ranks", 2).code == 0


def test_random_problems_have_trees(weft):
    done = weft("verify", "--random", 120, "--seed", 5, json_file=True)
    assert done.code == 0 and sum(row.get("tree", 0) for row in done.json["by_layout"].values()) >= 5


@pytest.mark.parametrize("tree, said", [
    ('{"nodes":[{"parent":0,"tokens":3}]}', "circle"),
    ('{"nodes":[{"parent":-1}]}', '"tokens" is missing'),
    ('{"nodes":[{"parent":-1,"tokens":-2}]}', "length -2"),
    ('{"nodes":[{"parent":-1,"tokens":1,"ids":1}]}', "unknown key"),
    ('{"sequences":[[1,"a"]]}', "not a whole number"),
    ('{"sequences":[5]}', "not a list of token ids"),
    ('{"sequences":[],"nodes":[]}', "not one of"),
    ("{}", "not one of"),
    ("[]", "not an object"),
    ("missing.json", "missing.json"),
])
def test_refuses(weft, tree, said):
    done = weft("explain", "--tree", tree)
    assert done.code == 2 and said in done.err, done.err


@pytest.mark.parametrize("flags", ["--docs 5", "--mask full", "--slices []", "--cu-seqlens 0,5", "--window -3,0", "--chunk 0",
                                   "--tokens 3"])
def test_refuses_beside_a_tree(weft, flags):
    done = weft("explain", "--tree", json.dumps(NODES), *flags.split())
    assert done.code == 2 and done.err, done.out
