"""weft explain: the picture and the numbers against masks and layouts said in plain Python."""

import re
import subprocess

import pytest

import model

MARGIN = 12

# Flags of the mask, and the same for model.visible.
MASKS = {
    "full": ("", {}),
    "causal": ("--mask causal", {"causal": True}),
    "window": ("--window 3,1", {"left": 3, "right": 1}),
    "causal_window": ("--mask causal --window 4,4", {"causal": True, "left": 4, "right": 4}),
    "chunked": ("--mask causal --chunk 4", {"causal": True, "chunk": 4}),
}


def cells(line, tokens, edges):
    """The columns of one line over the keys: one or two characters a token, an edge before some."""
    text = line[MARGIN:]
    if tokens <= 40:
        return [text[2 * t] if 2 * t < len(text) else " " for t in range(tokens)]
    at = [t + sum(1 for e in edges if 0 < e <= t) for t in range(tokens)]
    return [text[i] if i < len(text) else " " for i in at]


def matrix(out, k):
    """{query: (owner, cells)} of the drawn matrix, and the keys' owners."""
    lines = out.split("\n")
    head = next(i for i, line in enumerate(lines) if line.startswith(" query"))
    rows = {}
    for line in lines[head + 1 :]:
        if line.startswith("Slices"):
            break
        label = re.match(r" *(\d+)  (\S)   ", line[:MARGIN].ljust(MARGIN))
        if label:
            rows[int(label[1])] = (label[2], cells(line, k.tokens, k.offsets))
    return rows, cells(lines[head], k.tokens, k.offsets)


def symbol(s, layout, ranks, token):
    return chr(ord("A") + model.owner(layout, s, ranks, token)) if s.place(token) else "·"


def check_matrix(out, q, k, layout, ranks, mask):
    rows, owners = matrix(out, k)
    assert owners == [symbol(k, layout, ranks, t) for t in range(k.tokens)]
    assert sorted(rows) == list(range(q.tokens))
    seen = 0
    for i, (owner, drawn) in rows.items():
        assert owner == symbol(q, layout, ranks, i)
        for j, cell in enumerate(drawn):
            if model.visible(q, k, i, j, **mask):
                local = model.owner(layout, q, ranks, i) == model.owner(layout, k, ranks, j)
                assert cell == (owner if local else owner.lower()), (i, j)
                seen += 1
            else:
                assert cell == " ", (i, j)
    assert f"{seen} visible pairs" in out
    return seen


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout, multiple, ranks", [
    ("zigzag", 1, 4), ("contiguous", 1, 3), ("striped", 1, 4), ("dual_chunk", 4, 2), ("zigzag", 3, 2)])
def test_picture(weft, layout, multiple, ranks, mask):
    flags, meaning = MASKS[mask]
    result = weft.ok("explain", "--docs", "8,5,0,11", "--padded-to", multiple, "--layout", layout, "--ranks", ranks,
                     *flags.split())
    s = model.stream([8, 5, 0, 11], multiple)
    assert check_matrix(result.out, s, s, layout, ranks, meaning) > 0


def test_picture_of_many_tokens_has_narrow_columns(weft):
    result = weft("explain", "--docs", "20,28,16", "--mask", "causal", "--layout", "zigzag", "--ranks", 4)
    s = model.stream([20, 28, 16])
    check_matrix(result.out, s, s, "zigzag", 4, {"causal": True})


def test_picture_of_cross_attention(weft):
    result = weft("explain", "--docs", "5,3", "--docs-k", "4,9", "--tokens", 10, "--mask", "causal", "--align",
                  "bottom_right", "--layout", "contiguous", "--ranks", 3)
    q, k = model.stream([5, 3], tokens=10), model.stream([4, 9])
    check_matrix(result.out, q, k, "contiguous", 3, {"causal": True, "bottom_right": True})


def test_picture_of_own_slices(weft):
    """A prefix that two branches share."""
    text = '[{"q":[0,4],"k":[0,4],"hi":0},{"q":[4,9],"k":[0,4]},{"q":[4,6],"k":[4,6],"hi":0},' \
           '{"q":[6,9],"k":[6,9],"lo":-1,"hi":0}]'
    result = weft("explain", "--docs", 9, "--ranks", 1, "--slices", text)
    rows, _ = matrix(result.out, model.stream([9]))
    for i in range(9):
        sees = {j for j in range(9) if j < 4 and (i >= 4 or j <= i)}
        if i >= 4:
            sees |= set(range(4 if i < 6 else max(6, i - 1), i + 1))
        assert {j for j, cell in enumerate(rows[i][1]) if cell != " "} == sees


@pytest.mark.parametrize("layout, multiple", [("zigzag", 1), ("dual_chunk", 8), ("striped", 1), ("contiguous", 1)])
def test_a_line_a_rank_shows_its_tokens(weft, layout, multiple):
    result = weft("explain", "--docs", "8,5,11", "--padded-to", multiple, "--layout", layout, "--mask", "causal")
    s = model.stream([8, 5, 11], multiple)
    for rank in range(4):
        line = next(x for x in result.out.split("\n") if x.startswith(f"{'ABCD'[rank]} rank {rank} "))
        pairs = sum(model.visible(s, s, i, j, causal=True) for i in range(s.tokens) for j in range(s.tokens)
                    if model.owner(layout, s, 4, i) == rank)
        assert line.endswith(f" {pairs} pairs")
        for t, cell in enumerate(cells(line, s.tokens, s.offsets)):
            mine = model.owner(layout, s, 4, t) == rank
            assert cell == (symbol(s, layout, 4, t) if mine else " ")


def listed_slices(out):
    """[(row -> token, [(q0, q1, k0, k1, lo, hi)])] of each rank, as listed under the matrix."""
    ranks = []
    for line in out[out.index("Slices:"):].split("\n"):
        if re.match(r"[A-Z] rank \d+", line):
            rows = {}
            for row, begin, end, step in re.findall(r"row (\d+): tokens \[(\d+), (\d+)\)(?: step (\d+))?", line):
                for n, token in enumerate(range(int(begin), int(end), int(step or 1))):
                    rows[int(row) + n] = token
            ranks.append((rows, []))
        found = re.match(r" +q \[(\d+), (\d+)\) +k \[(\d+), (\d+)\) +(.*)", line)
        if found:
            numbers = [int(x) for x in found.groups()[:4]]
            band = found[5]
            lo, hi = -model.INFINITY, model.INFINITY
            if band != "every pair":
                lo_text, hi_text = re.fullmatch(r"(?:(-?\d+) <= )?k - q(?: <= (-?\d+))?", band).groups()
                lo = lo if lo_text is None else int(lo_text)
                hi = hi if hi_text is None else int(hi_text)
            ranks[-1][1].append((*numbers, lo, hi))
    return ranks


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout, keys", [
    ("zigzag", "sequence"), ("zigzag", "rank"), ("contiguous", "rank"), ("balanced", "sequence"), ("striped", "rank")])
def test_listed_slices_cover_every_visible_pair_once(weft, layout, keys, mask):
    s = model.stream([6, 3])
    flags, meaning = MASKS[mask]
    result = weft("explain", "--docs", "6,3", "--layout", layout, "--keys", keys, "--ranks", 2, *flags.split())
    ranks = listed_slices(result.out)
    assert len(ranks) == 2 and "more" not in result.out[result.out.index("Slices:"):]
    rows_each = 6 if layout == "zigzag" else 5  # of a rank's buffer: four pieces of 3 tokens, or half of 9
    key_token = {r * rows_each + row: t for r, (rows, _) in enumerate(ranks) for row, t in rows.items()}
    covered = {}
    for rows, slices in ranks:
        for q0, q1, k0, k1, lo, hi in slices:
            for a in range(q0, q1):
                for b in range(k0, k1):
                    if lo <= b - a <= hi:
                        pair = rows[a], key_token[b] if keys == "rank" else b
                        covered[pair] = covered.get(pair, 0) + 1
    expected = {(i, j): 1 for i in range(9) for j in range(9) if model.visible(s, s, i, j, **meaning)}
    assert covered == expected


def expected_ranks(q, layout, ranks, mask):
    """Pairs, real tokens, keys touched and keys touched on other ranks, of each rank."""
    out = [{"tokens": 0, "pairs": 0, "touched": set()} for _ in range(ranks)]
    owners = [model.owner(layout, q, ranks, t) for t in range(q.tokens)]
    for i in range(q.tokens):
        if q.place(i):
            out[owners[i]]["tokens"] += 1
            keys = {j for j in range(q.tokens) if model.visible(q, q, i, j, **mask)}
            out[owners[i]]["pairs"] += len(keys)
            out[owners[i]]["touched"] |= keys
    for r, rank in enumerate(out):
        rank["remote"] = sum(owners[j] != r for j in rank["touched"])
    return out


@pytest.mark.parametrize("layout, multiple, keys", [
    ("zigzag", 1, "sequence"), ("zigzag", 1, "rank"), ("dual_chunk", 8, "sequence"), ("dual_chunk", 8, "rank"),
    ("contiguous", 5, "sequence"), ("contiguous", 32, "rank"), ("striped", 1, "rank")])
def test_numbers(weft, layout, multiple, keys):
    lengths = [40, 7, 61, 0, 23]
    result = weft("explain", "--docs", ",".join(map(str, lengths)), "--padded-to", multiple, "--layout", layout,
                  "--mask", "causal", "--window", "20,0", "--keys", keys, "--heads", "8:2", "--dim", "24:16",
                  "--dtype", "f16", json_file=True)
    s = model.stream(lengths, multiple)
    expected = expected_ranks(s, layout, 4, {"causal": True, "left": 20})
    got = result.json
    assert got["docs"] == lengths and got["tokens"] == s.tokens and got["keys"] == keys
    assert [r["pairs"] for r in got["ranks"]] == [r["pairs"] for r in expected]
    assert [r["tokens"] for r in got["ranks"]] == [r["tokens"] for r in expected]
    assert [r["keys_touched"] for r in got["ranks"]] == [len(r["touched"]) for r in expected]
    assert [r["keys_remote"] for r in got["ranks"]] == [r["remote"] for r in expected]
    total = sum(r["pairs"] for r in expected)
    assert got["pairs"] == total
    assert got["imbalance"] == pytest.approx(4 * max(r["pairs"] for r in expected) / total)
    per_key = 2 * (24 + 16) * 2
    rows = 2 * -(-s.tokens // 8) if layout in ("zigzag", "dual_chunk") else -(-s.tokens // 4)
    assert [r["rows"] for r in got["ranks"]] == [rows] * 4
    assert got["bytes_all_gather"] == 3 * rows * per_key
    assert [r["bytes_touched"] for r in got["ranks"]] == [r["remote"] * per_key for r in expected]


def test_table_says_what_the_json_says(weft):
    result = weft("explain", "--docs", "400,70,1610,230", "--mask", "causal", "--layout", "zigzag", json_file=True)
    lines = [line.split() for line in result.out.split("\n") if re.match(r" +\d ", line)]
    assert len(lines) == 4
    for r, words in enumerate(lines):
        rank = result.json["ranks"][r]
        plain = [w.replace(",", "") for w in words]
        assert [int(x) for x in plain[:4]] == [r, rank["rows"], rank["tokens"], rank["pairs"]]
        assert plain[4] == f"{rank['load']:.3f}"
        assert [int(x) for x in plain[6:8]] == [rank["slices"], rank["keys_remote"]]
        assert float(plain[10]) == pytest.approx(rank["bytes_touched"] / 2**20, rel=0.006) and plain[11] == "MiB"
    # Documents in closed form: n (n + 1) / 2 pairs each.
    pairs = sum(n * (n + 1) // 2 for n in (400, 70, 1610, 230))
    assert result.json["pairs"] == pairs and f"{pairs:,} visible pairs" in result.out
    assert f"imbalance {result.json['imbalance']:.3f}" in result.out


def test_many_ranks_are_summed_up(weft):
    result = weft("explain", "--docs", "lognormal:count=10000,median=2400,sigma=1,min=16,max=16384", "--mask",
                  "causal", "--ranks", 1024, "--layout", "balanced", json_file=True)
    pairs = [r["pairs"] for r in result.json["ranks"]]
    assert len(pairs) == 1024 and sum(pairs) == sum(n * (n + 1) // 2 for n in result.json["docs"])
    table = {line.split()[0]: line.split() for line in result.out.split("\n") if re.match(r" +(least|mean|most) ", line)}
    assert table["least"][3] == f"{min(pairs):,}" and table["most"][3] == f"{max(pairs):,}"
    assert table["mean"][3] == f"{(2 * sum(pairs) + 1024) // 2048:,}"
    slices = [r["slices"] for r in result.json["ranks"]]
    assert table["least"][6] == f"{min(slices):,}" and table["most"][6] == f"{max(slices):,}"
    assert len(result.out.split("\n")) < 15


@pytest.mark.long
def test_slices_of_too_many_ranks_are_counted_on_some(weft):
    result = weft("explain", "--docs", "lognormal:count=3000,median=2400", "--mask", "causal", "--layout", "striped",
                  "--ranks", 1024, json_file=True)
    counted = [r for r in result.json["ranks"] if "slices" in r]
    assert 0 < len(counted) < 1024
    assert f"of {len(counted)} ranks spread over the 1,024" in result.out
    assert all("pairs" in r for r in result.json["ranks"])


def test_explicit_runs(weft):
    runs = '[[{"row":1,"token":4,"count":3}],[{"row":0,"token":0,"count":4},{"row":4,"token":7,"count":1}]]'
    result = weft("explain", "--docs", 8, "--layout", "explicit", "--runs", runs, "--mask", "causal")
    rows, owners = matrix(result.out, model.stream([8]))
    assert "".join(owners) == "BBBBAAAB"
    assert "".join(rows[5][1]) == "aaaaAA  "
    assert "A rank 0   row 1: tokens [4, 7)" in result.out


def test_no_tokens(weft):
    for args in (["--docs", "0,0"], ["--cu-seqlens", "0"]):
        result = weft.ok("explain", *args)
        assert "0 visible pairs, imbalance 1.000" in result.out


def test_colours_only_on_a_terminal(weft):
    args = ["explain", "--docs", "8,5,11", "--mask", "causal"]
    plain = weft(*args).out
    assert "\x1b" not in plain
    coloured = weft.on_terminal(*args, NO_COLOR="")
    assert "\x1b[48;5;" in coloured
    # Without its colours it says the same; a cell's ground may end in a space.
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in bare.split("\n")] == plain.split("\n")
    assert weft.on_terminal(*args, NO_COLOR="1") == plain


def test_the_same_flags_print_the_same(weft):
    args = ["explain", "--docs", "lognormal:count=30,median=300", "--seed", 5, "--layout", "balanced"]
    assert weft(*args).out == weft(*args).out


def test_full_disk(weft):
    with open("/dev/full", "w") as full:
        done = subprocess.run([weft.command, "explain", "--docs", "4"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "cannot write" in done.stderr


def test_support(weft):
    result = weft.ok("explain", "--support", json_file=True)
    got = result.json
    assert got["columns"][0] == "one rank" and "ring" in got["columns"]
    rows = {(row["group"], row["name"]): row["refused"] for row in got["rows"]}
    assert all(set(refused) == set(got["columns"]) for refused in rows.values())
    assert not any(rows[("mask", "causal")].values()) and not any(rows[("dtype", "bf16")].values())
    assert all(rows[("feature", "bias")].values()) and rows[("dtype", "f64")]["one rank"] is None
    for (_, name), refused in rows.items():
        line = next(line for line in result.out.split("\n") if line[9:].startswith(name + " "))
        assert line.count("yes") == sum(r is None for r in refused.values())
        for r in filter(None, refused.values()):
            assert r["remedy"] in result.out
    names = [kernel["name"] for kernel in got["kernels"]]
    assert names[-1] == "reference" and "cpu.scalar" in names
    for kernel in got["kernels"]:
        assert kernel["name"] in result.out and (kernel["dtypes"] or kernel["reasons"])
