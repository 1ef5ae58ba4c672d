"""weft bench: its records, the protocol with a peer, and what it refuses. Speed itself is not tested."""

import json
import sys

import pytest

SMALL = ["--docs", "30,0,41", "--heads", "4:2", "--dim", "16:8", "--mask", "causal", "--repeat", 2, "--threads", 1]
PAIRS = 30 * 31 // 2 + 41 * 42 // 2
FIELDS = {"case", "dtype", "pass", "gflops", "peer", "peer_gflops", "ratio", "gemm_gflops", "over_gemm", "peak_bytes", "over_io"}

# Answers as a peer does, in one second a call (a gemm in a quarter), and keeps what it was asked.
FAKE_PEER = """
import json, sys
prepared = []
with open("asked.jsonl", "w") as log:
    for line in sys.stdin:
        ask = json.loads(line)
        log.write(line)
        if ask["do"] == "hello": answer = {"name": "fake", "version": "7"}
        elif ask["do"] == "prepare":
            prepared.append(ask["what"])
            answer = {"id": len(prepared) - 1}
        elif ask["do"] == "time": answer = {"seconds": 0.25 if prepared[ask["id"]] == "gemm" else 1.0}
        else: answer = {}
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake_peer(tmp_path):
    """A function that writes a peer and gives its command."""

    def write(program=FAKE_PEER):
        (tmp_path / "peer.py").write_text(program)
        return f"'{sys.executable}' peer.py"

    return write


def asked(tmp_path):
    return [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]


def test_without_a_peer(weft):
    result = weft.ok("bench", *SMALL, json_file=True)
    assert [r["pass"] for r in result.json] == ["forward", "backward"]
    for record in result.json:
        assert set(record) == FIELDS
        assert record["case"] == "custom" and record["dtype"] == "f32"
        assert record["gflops"] > 0
        for unknown in ("peer", "peer_gflops", "ratio", "gemm_gflops"):
            assert record[unknown] is None
    # Inputs and outputs, lse among them, are part of the peak; nothing near a gigabyte is.
    forward = 71 * 4 * (4 * (16 + 8) + 2 * (16 + 8) + 4)
    assert forward <= result.json[0]["peak_bytes"] < 2**30
    assert "peer: none" in result.out


def test_peak_memory_is_that_of_the_tensors(weft):
    """8 MiB of tensors, so that pages and pools are small beside them."""
    result = weft.ok("bench", "--docs", ",".join(["64"] * 64), "--heads", 4, "--dim", 32, "--repeat", 1, "--threads", 1,
                     json_file=True)
    tensors = 4096 * 4 * 4 * (4 * 32 + 1), 4096 * 4 * 4 * (8 * 32 + 1)
    for record, bytes_ in zip(result.json, tensors):
        assert bytes_ <= record["peak_bytes"] < 2 * bytes_ + 2**22


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_dtypes_and_features(weft, dtype):
    result = weft.ok("bench", *SMALL, "--dtype", dtype, "--sink", "learnable", "--softcap", 20, "--window", "9,0",
                     json_file=True)
    assert [(r["dtype"], r["peer"]) for r in result.json] == [(dtype, None)] * 2


def test_with_a_peer(weft, fake_peer, tmp_path):
    result = weft.ok("bench", *SMALL, "--peer", fake_peer(), json_file=True)
    assert "peer: fake 7" in result.out
    for record, per_pair in zip(result.json, (2 * (16 + 8), 2 * (3 * 16 + 2 * 8))):
        assert record["peer"] == "fake loop f32"
        # Useful work alone: visible pairs x query heads x operations a pair.
        assert record["peer_gflops"] == pytest.approx(PAIRS * 4 * per_pair * 1e-9)
        assert record["ratio"] == pytest.approx(record["gflops"] / record["peer_gflops"], rel=0.01)  # two rounds
        assert record["gemm_gflops"] == pytest.approx(2 * 1536**3 / 0.25 * 1e-9)


def test_what_a_peer_is_asked(weft, fake_peer, tmp_path):
    assert weft("bench", *SMALL, "--pass", "backward", "--peer", fake_peer()).code == 0
    hello, loop, gemm, *rest = asked(tmp_path)
    assert hello == {"do": "hello"}
    assert loop == {"do": "prepare", "what": "loop", "pass": "backward", "dtype": "f32", "threads": 1, "causal": True,
                    "lengths": [30, 0, 41], "heads": [4, 2], "dim": [16, 8]}
    assert gemm["what"] == "gemm" and gemm["dtype"] == "f32" and gemm["threads"] == 1
    times = [(a["do"], a["id"]) for a in rest[:-1]]
    assert times == [("time", 0), ("time", 1)] * 2  # every one once a round
    assert rest[-1] == {"do": "forget"}


def test_a_problem_the_peer_cannot_do_has_none(weft, fake_peer):
    result = weft.ok("bench", *SMALL, "--window", "4,0", "--pass", "forward", "--peer", fake_peer(), json_file=True)
    assert result.json[0]["peer"] is None and result.json[0]["gemm_gflops"] > 0


def test_a_peer_that_refuses_is_left_out(weft, fake_peer):
    program = FAKE_PEER.replace('prepared.append(ask["what"])', "pass").replace(
        '{"id": len(prepared) - 1}', '{"refused": "not today"}')
    result = weft.ok("bench", *SMALL, "--peer", fake_peer(program), json_file=True)
    assert "fake refuses loop" in result.err and "not today" in result.err
    assert [r["peer"] for r in result.json] == [None, None]


def test_list(weft):
    result = weft.ok("bench", "--list")
    assert [line.split()[0] for line in result.out.splitlines()] == ["dense128", "dense64", "packed", "long", "scaling"]
    assert "8,521 tokens" in result.out


def test_list_of_a_gpu(weft):
    """Without a GPU too: names, documents, the rank, heads and widths of each case."""
    result = weft.ok("bench", "--kernel", "cuda.sm90", "--list")
    names = [line.split()[0] for line in result.out.splitlines()]
    assert len(set(names)) == len(names) == 38
    assert {"dense", "packed", "rank-of-8", "exact-rank-of-8", "width-192", "few-heads-of-64"} <= set(names)
    assert "dim 192:128" in result.out and "rank 3 of 8, by the calls of ring" in result.out


def test_a_named_case(weft, fake_peer):
    result = weft.ok("bench", "--cases", "dense64", "--dtype", "bf16", "--pass", "forward", "--repeat", 1, "--peer",
                     fake_peer(), json_file=True)
    assert [r["peer"] for r in result.json] == ["fake sdpa bf16", "weft f32"]
    assert {r["case"] for r in result.json} == {"dense64"}
    assert result.json[0]["peer_gflops"] == pytest.approx(2048 * 2049 / 2 * 8 * 4 * 64 * 1e-9)


def test_scaling(weft, fake_peer):
    result = weft.ok("bench", "--cases", "scaling", "--pass", "forward", "--repeat", 1, "--threads", 2, "--peer",
                     fake_peer(), json_file=True)
    gain, beside_gemm = result.json
    assert gain["peer"] == "weft 1 thread" and gain["peak_bytes"] is None
    assert beside_gemm["ratio"] == pytest.approx(gain["ratio"])  # the fake gemm gains nothing


@pytest.mark.parametrize("answer", ['{"seconds": 0}', '{"seconds": "soon"}', "{}", '{"error": "lost it"}', "[]"])
def test_a_peer_that_answers_nonsense(weft, fake_peer, answer):
    program = FAKE_PEER.replace('{"seconds": 0.25 if prepared[ask["id"]] == "gemm" else 1.0}', answer)
    result = weft("bench", *SMALL, "--peer", fake_peer(program))
    assert result.code == 2 and "--peer" in result.err


def test_schedule_and_layout_auto(weft):
    result = weft.ok("bench", "--schedule", "auto,ring", "--layout", "auto", "--docs", "300,200", "--ranks", 2, "--heads", "2:1",
                     "--dim", 16, "--repeat", 1, json_file=True)
    assert "auto, on cpu: layout " in result.out
    names = [r["schedule"] for r in result.json]
    assert "ring" in names and len(set(names)) in (1, 2)
