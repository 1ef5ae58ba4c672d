"""weft simulate, and machine files by weft bench: what they print and what they refuse."""

import json
import pathlib
import re
import resource

import pytest

SMALL = {"--docs": "3000,500,4692", "--heads": "8:2", "--ranks": "4"}


def command(*flags):
    """A small problem, with what is not as usual."""
    said = {**SMALL, **dict(zip(flags[::2], flags[1::2]))}
    return ["simulate", *(x for pair in said.items() for x in pair)]


def lines(weft, *flags):
    result = weft.ok(*command(*flags), json_file=True)
    return result.json["lines"], result.out


def test_every_schedule_and_auto(weft, tmp_path):
    found, text = lines(weft, "--schedule", "all,auto")
    assert [x["schedule"].split(" ")[0] for x in found[:6]] == ["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"]
    for x in found:
        for t in (x["forward"], x["backward"]):
            assert t["seconds"] >= t["ideal"] > 0 and 0 <= t["overlap"] <= 1 and t["imbalance"] >= 1
            assert t["timelines"][0]["rank"] == 0
    chosen = found[-1]
    total = lambda x: x["forward"]["seconds"] + x["backward"]["seconds"]
    assert chosen["auto"] and total(chosen) <= 1.000001 * min(map(total, found))
    said = [x["schedule"] for x in found[:-1]]
    assert len(set(said)) == len(said) and {"ring ranks_per_step=1", "exact stages=1", "all_to_all head_groups=2"} <= set(said)
    assert "auto, 4 ranks: " in text and "% more" in text


@pytest.mark.parametrize("layout", ["auto", "zigzag", "balanced"])
def test_auto_says_one_number_the_simulated_one(weft, tmp_path, layout):
    """What why() says of the choice is what the table says of it."""
    found, text = lines(weft, "--docs", "published:tokens=1048576", "--ranks", "64", "--heads", "64:8", "--layout", layout,
                        "--schedule", "auto")
    x = found[0]
    said = re.search(re.escape(x["schedule"]) + r": ([\d.]+) ms \(forward ([\d.]+) ms, backward ([\d.]+) ms\)", x["why"])
    table = [x["forward"]["seconds"] + x["backward"]["seconds"], x["forward"]["seconds"], x["backward"]["seconds"]]
    assert [float(n) for n in said.groups()] == [float(f"{1e3 * t:.3g}") for t in table], x["why"]
    if layout == "auto":
        assert x["why"].startswith(f"layout {x['layout']}: {1e3 * table[0]:.3g} ms;"), x["why"]
        assert "all layers" not in x["why"]


def test_no_schedule_of_the_table_is_faster_than_auto(weft):
    """On nodes of 8, where the estimate of `exact` is a tenth too low: the table has the node's size, and auto the best of it."""
    found, _ = lines(weft, "--docs", "published:tokens=1048576", "--ranks", "64", "--heads", "64:8", "--layout", "balanced",
                     "--schedule", "all,auto")
    of = {x["schedule"]: x["forward"]["seconds"] + x["backward"]["seconds"] for x in found}
    assert {"hybrid ulysses=8", "hybrid ulysses=8 ranks_per_step=1", "exact node=8", "exact stages=1"} <= set(of)
    assert of[found[-1]["schedule"]] <= 1.000001 * min(of.values())
    assert found[-1]["auto"] and "near these" not in found[-1]["why"]


def test_sweeps(weft, tmp_path):
    found, _ = lines(weft, "--ranks", "2,8", "--layout", "zigzag,balanced", "--window", "64,0/-1,-1", "--heads", "8:2,4:4",
                     "--schedule", "ring,exact")
    assert len(found) == 2 * 2 * 2 * 2 * 2
    assert {x["ranks"] for x in found} == {2, 8} and {x["heads"] for x in found} == {"8:2", "4:4"}


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["exact", "all_to_all"])
def test_many_ranks_in_little_memory(weft, schedule):
    """Messages of 16,384 ranks with each other are not listed one by one."""
    done = weft.ok("simulate", "--docs", "1000000", "--ranks", "16384", "--schedule", schedule, "--mask", "causal", "--layout", "zigzag",
                   limits={resource.RLIMIT_AS: 2 << 30, resource.RLIMIT_CPU: 60})
    assert schedule in done.out.splitlines()[-1]


def test_bytes_are_those_of_one_rank(weft, tmp_path):
    """Exact: a rank that gets most keys need not be the one that gets most gradients."""
    docs, ranks = "4000,100,100,100", 4
    found, text = lines(weft, "--docs", docs, "--ranks", str(ranks), "--schedule", "exact", "--layout", "contiguous",
                        "--stages", "1")
    said = float(next(x for x in text.splitlines() if " exact " in x).split()[-3])
    # 1,075 rows a rank, 2 K/V heads of 256 numbers; rank r gets keys of those before it and gradients of those after.
    rows, kv, f32 = 1075, 2 * 256 * 2, 2 * 256 * 4
    received = [0] * ranks
    for r in range(ranks):
        for source in range(r):
            received[r] += rows * kv * 2
            received[source] += rows * f32
    assert abs(said - max(received) / 2**20) < 0.06, (said, [x / 2**20 for x in received])


def test_heading_says_what_lines_share(weft, tmp_path):
    _, text = lines(weft, "--ranks", "2,4", "--schedule", "ring", "--window", "64,0/-1,-1", "--heads", "8:2,4:4")
    assert text.splitlines()[1] == "causal, dim 128:128, bf16"


MODEL = ["simulate", "--model", "llama4-scout", "--docs", "64k,0.5m", "--ranks", "8", "--layout", "zigzag"]


def test_totals_of_a_model(weft):
    """Each kind of layer is simulated once, and counts as often as the model has it."""
    result = weft.ok(*MODEL, "--schedule", "all_gather,auto", json_file=True)
    found, totals = result.json["lines"], result.json["totals"]
    assert [(x["layer"], x["layers"], x["heads"]) for x in found] == 2 * [("chunk 8192", 36, "40:8"), ("full", 12, "40:8")]
    assert [x["tokens"] for x in found] == 4 * [65536 + 524288]
    assert result.json["model"] == "llama4-scout" and len(totals) == 2
    for total, chunked, full in zip(totals, found[::2], found[1::2]):
        assert total["schedule"] == " / ".join(dict.fromkeys([chunked["schedule"], full["schedule"]]))
        assert total["layers"] == 48 and total["layout"] == chunked["layout"] == full["layout"] == "zigzag"
        for p in ("forward", "backward"):
            assert total[p]["seconds"] == pytest.approx(36 * chunked[p]["seconds"] + 12 * full[p]["seconds"])
        both = total["both"]
        assert both["seconds"] == pytest.approx(total["forward"]["seconds"] + total["backward"]["seconds"])
        assert both["bytes_in"] == 36 * chunked["both"]["bytes_in"] + 12 * full["both"]["bytes_in"]
        assert total["tokens_per_second_per_gpu"] == pytest.approx(total["tokens"] / both["seconds"] / 8)
    assert totals[0]["schedule"] == "all_gather" and " / " in totals[1]["schedule"], "auto has a schedule for each kind here"
    lines = [x for x in result.out.splitlines() if " zigzag " in x]
    assert [next(w for w in ("1 of 36 chunk 8192", "1 of 12 full", "all 48") if w in x) for x in lines] == 2 * [
        "1 of 36 chunk 8192", "1 of 12 full", "all 48"]
    assert "fwd, bwd: attention of one layer and of all 48 (a step)" in result.out


def test_a_model_that_nobody_knows(weft):
    weft.refused("simulate", "--model", "llama9", "--docs", "64k", says=["there is no model 'llama9'; use one of llama3-70b"])


def test_one_layer_without_a_model(weft):
    result = weft.ok(*command("--schedule", "ring"), json_file=True)
    assert "totals" not in result.json and "all " not in result.out.splitlines()[-1]
    assert result.json["lines"][0]["layers"] == 1 and "fwd, bwd: attention of one layer, start" in result.out


@pytest.mark.parametrize("name", ["llama3-70b", "llama4-scout", "gpt-oss-120b", "deepseek-v3", "qwen3-235b"])
def test_every_model(weft, name):
    result = weft.ok("simulate", "--model", name, "--docs", "64k", "--ranks", "4", "--schedule", "all_gather", "--layout", "zigzag",
                     json_file=True)
    assert len(result.json["totals"]) == (2 if name == "deepseek-v3" else 1)  # K and V, and their latent
    listed = weft.ok("simulate", "--models").out
    assert name in listed and "arXiv" in listed


def test_a_latent_beside_keys_and_values(weft):
    """By bytes it is what the docs say; over slow links it is faster, over fast ones expanding costs more than it saves."""
    for tp, ratio in ((1, 71.1), (8, 8.9)):
        result = weft.ok("simulate", "--model", "deepseek-v3", "--docs", "64k", "--ranks", "8", "--schedule", "ring", "--tp", tp,
                         "--layout", "zigzag", json_file=True)
        keys, latent = result.json["lines"]
        assert (keys["schedule"], latent["schedule"]) == ("ring", "ring, latent")
        for of in ("forward", "backward"):
            assert abs(keys[of]["bytes_in"] / latent[of]["bytes_in"] - ratio) < 0.1
        assert f"{ratio} times fewer bytes, and expanding it on every rank costs" in result.json["latent"][0]
        assert keys["both"]["memory_bytes"] != latent["both"]["memory_bytes"]


def test_tensor_parallel_ranks_are_on_other_nodes(weft):
    """The same heads a GPU on as many ranks: eight GPUs apart they talk over InfiniBand and not over NVLink."""
    near, far = (lines(weft, "--ranks", "8", "--docs", "256k", "--schedule", "ring", *more)[0][0]
                 for more in (["--heads", "8:1"], ["--heads", "64:8", "--tp", "8"]))
    assert far["heads"] == near["heads"] == "8:1"
    assert far["forward"]["bytes_in"] == near["forward"]["bytes_in"]
    exchange = lambda x: sum(e["end"] - e["begin"] for e in x["forward"]["timelines"][0]["events"] if e["kind"] == "exchange")
    assert exchange(far) > 5 * exchange(near)
    weft.refused(*MODEL, "--tp", "20", says=["8 GPUs that NVLink joins"])
    total = weft.ok("simulate", "--model", "qwen3-235b", "--docs", "32k", "--ranks", "2", "--tp", "8", "--schedule", "ring", json_file=True)
    assert total.json["lines"][0]["heads"] == "8:1", "four K/V heads on eight GPUs: each has a copy of one"
    assert total.json["totals"][0]["gpus"] == 16


def test_published_documents(weft, tmp_path):
    for seed in (1, 1, 2):
        docs = weft.ok("explain", "--docs", "published:tokens=100000", "--seed", seed, "--ranks", 2, json_file=True).json["docs"]
        assert sum(docs) == 100000
    docs = weft.ok("explain", "--docs", "published:tokens=4000000", "--ranks", 2, json_file=True).json["docs"]
    for length, share in ((200, 0.186), (500, 0.468), (1024, 0.714), (2048, 0.870), (4096, 0.944), (16384, 0.987)):
        assert abs(sum(d <= length for d in docs) / len(docs) - share) < 0.04
    assert max(docs) <= 196608


@pytest.mark.parametrize("flags, says", [
    (["--ranks", "20000"], "use from 1 to 16384"),
    (["--ranks", "2,,4"], "empty part"),
    (["--machine", "nowhere"], "there is no machine 'nowhere'"),
    (["--machine", "./nowhere.json"], "cannot read './nowhere.json'"),
    (["--schedule", "spiral"], "there is no schedule 'spiral'"),
    (["--docs", "published:max=5"], "published needs tokens"),
    (["--docs", "published:tokens=0"], "published tokens=0"),
    (["--memory", "-1", "--schedule", "auto"], "--memory"),
    (["--model", "llama3-70b"], "--model llama3-70b and --heads 8:2"),
    (["--tp", "3"], "use a divisor or a multiple of 8"),
    (["--tp", "16"], "--tp 16 of heads 8:2"),
    (["--tp", "0"], "use from 1"),
    (["--html", "no/such/folder/x.html"], "--html: cannot write"),
])
def test_refused(weft, flags, says):
    weft.refused(*command(*flags), says=[says])


def test_striped_in_sequence_order_is_a_line_not_an_end(weft, tmp_path):
    found, text = lines(weft, "--layout", "striped", "--schedule", "all_gather,ring", "--key-order", "sequence")
    assert "stride" in found[0]["refused"] and "seconds" in found[1]["forward"]


def test_calibrate_and_use(weft, tmp_path):
    file = tmp_path / "here.json"
    weft.ok("bench", "--calibrate", file, "--dtype", "f32", "--dim", "16", "--repeat", 1)
    machine = json.loads(file.read_text())
    assert {k["pass"] for k in machine["kernels"]} == {"forward", "backward"}
    assert all(k["flops"] > 1e6 for k in machine["kernels"]) and machine["copy_bandwidth"] > 0
    result = weft.ok("simulate", "--machine", file, "--docs", "200,300", "--ranks", "2,4", "--heads", "2:1", "--dim", "16", "--dtype",
                     "f32", "--schedule", "all,auto")
    assert "here: this machine" in result.out, result.err


RECORDED = pathlib.Path(__file__).resolve().parents[2] / "bench" / "h200"
H200 = ["--kernel", "cuda.sm90", "--dim", "64,128"]


def checked(weft, machine):
    result = weft.ok("bench", "--check-kernels", *H200, "--machine", machine, "--measured", RECORDED / "anchors.json")
    return {tuple(re.split(r"  +", line)[:1]) + (line.split()[-4],): float(line.split()[-1].rstrip("%"))
            for line in result.out.splitlines()[1:-1]}


def test_times_of_an_h200_predict_others_of_it(weft, tmp_path):
    """Recorded there, fitted here: no case of the one file is in the other."""
    learned, anchors = (json.loads((RECORDED / f"{name}.json").read_text()) for name in ("learned", "anchors"))
    assert not {x["case"] for x in learned} & {x["case"] for x in anchors}
    file = tmp_path / "h200.json"
    weft.ok("bench", "--calibrate", file, *H200, "--measured", RECORDED / "learned.json")
    errors = checked(weft, file)
    assert len(errors) == len(anchors) == 22
    assert max(map(abs, errors.values())) <= 15, errors


def test_the_h200_preset_is_what_was_fitted(weft):
    assert max(map(abs, checked(weft, "h200-shared").values())) <= 15


@pytest.mark.parametrize("text, says", [
    ("[]", "no time of 'causal 1 x 8192'"),
    ("{}", "not a list"),
    ('[{"case": "x"}]', "seconds"),
    ('[{"case": "x", "dtype": "bf16", "dim": 64, "pass": "sideways", "seconds": 1}]', "sideways"),
    ('[{"case": "x", "dtype": "bf16", "dim": 64, "pass": "forward", "seconds": 0}]', "seconds are 0"),
])
def test_recorded_times_that_are_none(weft, tmp_path, text, says):
    file = tmp_path / "times.json"
    file.write_text(text)
    weft.refused("bench", "--calibrate", tmp_path / "m.json", *H200, "--measured", file, says=[says])


def test_trace_has_the_timelines_of_the_json(weft, tmp_path):
    found, _ = lines(weft, "--schedule", "ring,exact", "--trace", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [f"{n}. {x['schedule']}, {x['layout']}, 4 ranks: rank {r}"
                                      for n, x in enumerate(found, 1) for r in range(4)]
    for n, x in enumerate(found, 1):
        after = 0
        for pass_ in ("forward", "backward"):
            for timeline in x[pass_]["timelines"]:
                process = f"{n}. {x['schedule']}, {x['layout']}, 4 ranks: rank {timeline['rank']}"
                spans = [e for e in events if e["ph"] == "X" and names[e["pid"]] == process]
                for event in timeline["events"]:
                    name = ("wait for " if event["kind"] == "wait" else "") + event["name"]
                    name += f", step {event['step']}" if event["step"] >= 0 else ""
                    begin, end = (1e6 * (after + event[key]) for key in ("begin", "end"))
                    assert any(e["name"] == name and e["args"]["kind"] == event["kind"] and abs(e["ts"] - begin) < 0.01
                               and abs(e["ts"] + e["dur"] - end) < 0.01 for e in spans), (event, process)
            after += x[pass_]["seconds"]


def test_trace_of_a_run(weft, tmp_path):
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    assert weft("bench", "--schedule", "ring,all_gather", "--docs", "256", "--ranks", "2", "--dim", "16", "--repeat", "1",
                "--json", out, "--trace", trace).code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["all_gather: rank 0", "all_gather: rank 1", "ring: rank 0", "ring: rank 1"]
    for line in json.loads(out.read_text()):
        spans = [e for e in events if e["ph"] == "X" and names[e["pid"]].startswith(line["schedule"] + ":")
                 and e["name"].startswith(line["pass"] + " ")]
        steps = {e["args"]["steps"] for e in spans}
        assert steps == {2 if line["schedule"] == "ring" else 1}
        took = max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)
        assert 0 < took <= 1e6 * line["seconds"]  # from the first rank's start to the last one's end
    refused = weft("bench", "--trace", trace)
    assert refused.code != 0 and "--schedule" in refused.err
