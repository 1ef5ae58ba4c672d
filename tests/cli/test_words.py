"""The field's words and sizes with suffixes, and the layout that is taken if none is named."""

import pytest

SEEDS = range(5)


@pytest.mark.parametrize("word, name", [("p2p", "ring"), ("a2a", "all_to_all"), ("ulysses", "all_to_all"), ("a2a+p2p", "hybrid"),
                                        ("usp", "hybrid"), ("all_gather", "all_gather")])
def test_schedules_by_the_names_of_other_frameworks(weft, word, name):
    result = weft.ok("verify", "--docs", "12,5", "--schedule", word)
    assert (f"schedule {word} is {name}" in result.err) == (word != name)
    assert any(line.split()[:2] == ["out", name] for line in result.out.split("\n")), result.out
    simulated = weft.ok("simulate", "--docs", "64", "--ranks", 2, "--schedule", word, json_file=True)
    assert simulated.json["lines"][0]["schedule"].startswith(name)


def test_a_schedule_by_two_names_comes_twice(weft):
    weft.refused("verify", "--docs", "12,5", "--schedule", "ring,p2p", says=["'p2p' is ring, which comes twice"])


@pytest.mark.parametrize("text, tokens", [("64k", 65536), ("128K", 131072), ("1M", 1 << 20), ("1.5m", 3 << 19), ("0.5k", 512),
                                          ("1g", 1 << 30), ("1k,7", 1031), ("published:tokens=64k", 65536)])
def test_sizes_with_suffixes(weft, text, tokens):
    result = weft.ok("explain", "--docs", text, "--ranks", 2, json_file=True)
    assert result.json["tokens"] == tokens


def test_sizes_of_other_flags(weft):
    for short, long in (("--docs 8k --window 1k,0", "--docs 8192 --window 1024,0"), ("--docs 8k --chunk 2k", "--docs 8192 --chunk 2048"),
                        ("--docs 5 --padded-to 1k", "--docs 5 --padded-to 1024"),
                        ("--cu-seqlens 0,1k --tokens 2k", "--cu-seqlens 0,1024 --tokens 2048"),
                        ("--docs lognormal:count=9,median=1k,min=0.5k,max=4k", "--docs lognormal:count=9,median=1024,min=512,max=4096")):
        assert weft("explain", *short.split()).out == weft("explain", *long.split()).out != ""
    assert weft("simulate", "--docs", "64k", "--schedule", "auto", "--memory", "8G").code == 0


@pytest.mark.parametrize("text", ["k", "1kk", "1T", "1.3k", "1e3k", "0x1k", "-k", "1 k", "1,5M,x", "99999999999g", "nank", "infM"])
def test_nonsense_sizes_are_refused(weft, text):
    weft.refused("explain", "--docs", text, says=["--docs: '", "write e.g. --docs"])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_default_layout_is_even_on_published_lengths(weft, seed):
    """One rank of eight had 2.33, 1.22, 1.37, 2.60, 2.18 times the mean work."""
    batch = ["--docs", "published:tokens=131072", "--seed", seed, "--ranks", 8]
    given = weft("explain", *batch, "--mask", "causal", json_file=True).json
    assert given["layout"] == "balanced" and given["imbalance"] <= 1.02
    line = weft("simulate", *batch, "--schedule", "ring", json_file=True).json["lines"][0]
    assert line["layout"] == "balanced"
    assert weft("explain", *batch, "--mask", "causal", "--layout", "zigzag", json_file=True).json["imbalance"] > 1.2


def test_every_verb_has_the_same_default_layout(weft, tmp_path):
    args = ["--docs", "12,5", "--ranks", 2]
    for verb in (["explain"], ["verify"], ["bench", "--schedule", "ring", "--repeat", 1]):
        result = weft.ok(*verb, *args)
        assert "layout balanced" in result.out
    assert weft("explain", *args, "--svg", "x.svg").code == 0 and "balanced" in (tmp_path / "x.svg").read_text()
