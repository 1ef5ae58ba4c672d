"""weft explain --micro: windows of micro-sequences against a definition per token. weft verify --micro."""

import random

FIELDS = {"rank", "micro", "begin", "end", "lengths", "first_document_begin", "cu_seqlens_q", "cu_seqlens_k",
          "document_index_q", "document_index_k", "position_index"}


def windows(docs, micros, ranks):
    """Each window from its tokens; padding at the end is one more document."""
    total = -(-sum(docs) // (micros * ranks)) * micros * ranks
    tokens = [(d, p) for d, n in enumerate(docs) for p in range(n)]
    tokens += [(len(docs), p) for p in range(total - sum(docs))]
    local = total // (micros * ranks)
    for m in range(micros):
        for r in range(ranks):
            begin = r * local + m * total // micros
            mine = tokens[begin:begin + local]
            first = begin - mine[0][1]
            order = sorted({d for d, _ in mine})
            lengths = [sum(d == e for e, _ in mine) for d in order]
            keys = [order.index(d) + 1 for d, _ in tokens[first:begin + local]]
            cu_q = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            yield {"rank": r, "micro": m, "begin": begin, "end": begin + local, "lengths": lengths,
                   "first_document_begin": first, "cu_seqlens_q": cu_q,
                   "cu_seqlens_k": [0] + [x + begin - first for x in cu_q[1:]],
                   "document_index_q": [order.index(d) + 1 for d, _ in mine], "document_index_k": keys,
                   "position_index": [p for _, p in mine]}


def test_the_table(weft):
    result = weft.ok("explain", "--docs", "5,9,6,4", "--micro", 2, "--ranks", 2, json_file=True)
    got = result.json["windows"]
    assert [(w["rank"], w["micro"]) for w in got] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [w["lengths"] for w in got] == [[5, 1], [6], [2, 4], [2, 4]]
    assert [w["first_document_begin"] for w in got] == [0, 5, 5, 14]
    assert [w["cu_seqlens_k"] for w in got] == [[0, 5, 6], [0, 7], [0, 9, 13], [0, 6, 10]]
    assert all(set(w) >= FIELDS for w in got)
    for line in ("A rank 0, 1            │a a a a a a a A A│A A A A    │", "7,8,0–3", "14:24"):
        assert line in result.out


def test_random_documents(weft):
    draw = random.Random(4)
    for _ in range(40):
        docs = [draw.randint(0, 30) for _ in range(draw.randint(1, 7))] + [1]
        micros, ranks = draw.randint(1, 5), draw.randint(1, 5)
        result = weft.ok("explain", "--docs", ",".join(map(str, docs)), "--micro", micros, "--ranks", ranks,
                         json_file=True)
        got = [{k: w[k] for k in FIELDS} for w in result.json["windows"]]
        assert got == list(windows(docs, micros, ranks))
        assert result.json["padding"] == -sum(docs) % (micros * ranks)


def test_padding_and_rows_of_the_buffer(weft):
    result = weft("explain", "--docs", "5,9,6,3", "--micro", 2, "--ranks", 2, "--window", "3,0", json_file=True)
    assert result.json["padding"] == 1 and result.json["windows"][3]["lengths"] == [2, 3, 1]
    assert result.json["key_rows"] == 24 and result.json["key_rows_dropped"] == 15
    assert "│B B B│·" in result.out


def test_a_full_mask_where_the_keys_are_there(weft):
    assert weft("explain", "--docs", "4,8,12", "--micro", 2, "--ranks", 2, "--mask", "full").code == 0


def test_even_work(weft):
    flags = ["explain", "--docs", 4096, "--micro", 8, "--ranks", 2]
    for even, most in (("tokens", 1.88), ("work", 1.01)):
        result = weft.ok(*flags, "--even", even, json_file=True)
        pairs = [0] * 8
        for w in result.json["windows"]:
            pairs[w["micro"]] += w["pairs"]
        assert sum(pairs) == 4096 * 4097 // 2
        assert max(pairs) * 8 / sum(pairs) <= most and f"has {max(pairs) * 8 / sum(pairs):.2f} times" in result.out


def test_verify_one_problem(weft):
    result = weft.ok("verify", "--docs", "9,5,10", "--ranks", 2, "--micro", 3, "--sink", "learnable", "--window", "4,0", json_file=True)
    for way in ("3 micro-sequences ", "keys ahead", "dropped, recomputed", "even work"):
        lines = [line for line in result.out.split("\n") if way in line]
        assert len(lines) >= 7 and all(" ok " in line for line in lines), way
    assert result.json["ran"] == 4 and result.json["failed"] == 0
    assert "--micro 3" in result.json["worst"]["command"]
    weft.again(result.json)


def test_verify_random_problems(weft):
    for micros, seed in ((1, 0), (2, 100), (3, 200), (5, 300)):
        result = weft.ok("verify", "--random", 50, "--micro", micros, "--seed", seed, json_file=True)
        assert result.json["cases"] == 50 and result.json["ran"] >= 150 and not result.json["skipped"]


def test_verify_says_what_it_cannot(weft):
    result = weft("verify", "--docs", "9,5", "--mask", "full", "--micro", 3)
    assert result.code == 2 and "--micro 3 computed nothing" in result.err and "which come later" in result.err


def test_an_empty_stream_behind_other_rows(weft):
    """Was refused with dropped rows: the buffer held rows before the stream, which nobody sees."""
    weft.ok("verify", "--cu-seqlens", "0,0", "--cu-seqlens-padded", "3,3", "--ranks", 2, "--micro", 2)
