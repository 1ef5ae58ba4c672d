"""weft verify --schedule, --matrix and --set: ranks as threads, by every schedule, against the dense softmax."""

import shlex

import pytest

SCHEDULES = ["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"]
TENSORS = ["out", "lse", "max_logit", "dq", "dk", "dv", "dsink"]
# Columns of a grid: every variant of every schedule.
COLUMNS = ["all_gather key_order=sequence", "all_gather key_order=rank", "ring", "all_to_all", "hybrid",
           "hybrid outer=all_gather key_order=sequence", "hybrid outer=all_gather key_order=rank", "exact", "mesh"]


def lines_of(out, word):
    return [line for line in out.split("\n") if line.split()[:1] == [word]]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_one_problem_by_all(weft, dtype):
    args = ["verify", "--docs", "80,5,0,11", "--mask", "causal", "--ranks", 4, "--sink", "learnable", "--heads", "4:2",
            "--dtype", dtype, "--schedule", "all"]
    result = weft.ok(*args, json_file=True)
    for tensor in TENSORS:
        lines = lines_of(result.out, tensor)
        assert [line.split()[1] for line in lines] == SCHEDULES and all(" ok " in line for line in lines)
    assert result.json["kernel"] == "auto" and result.json["failed"] == 0 and result.json["skipped"] == []
    assert 0 < result.json["worst"]["ratio"] < 1


@pytest.mark.parametrize("flags", [
    "--schedule all_gather --key-order sequence,rank --head-groups 2",
    "--schedule hybrid --outer ring,all_gather --ulysses 4",
    "--schedule exact --stages 1 --checked",
    "--schedule ring,hybrid --ranks-per-step 1 --checked",
    "--schedule ring --ranks-per-step 3",
    "--schedule mesh --query-ranks 2 --ranks-per-step 1 --checked",
    "--schedule mesh",
    "--schedule ring --kernel cpu.scalar --comm threads",
    "--schedule all --layout dual_chunk --cu-seqlens-padded 0,16,32 --format sbhd",
    "--schedule all --layout dual_chunk --cu-seqlens-padded 0,16,32 --format bshd --softcap 3",
    "--schedule all --layout striped --heads 5:3 --head-map 2,0,2,1,2",
])
def test_options_and_the_command_of_the_worst(weft, flags):
    heads = "" if "--heads" in flags else "--heads 4:2"
    args = shlex.split(f"verify --cu-seqlens 0,13,29 --mask causal --ranks 4 {heads} {flags}")
    first = weft.ok(*args, json_file=True)
    assert weft.again(first.json).json["worst"] == first.json["worst"]


def test_what_the_table_refuses_is_skipped_with_its_reason(weft):
    args = ["verify", "--docs", "9,16", "--layout", "striped", "--schedule", "all_gather", "--key-order"]
    both = weft.ok(*args, "sequence,rank", json_file=True)
    assert len(both.json["skipped"]) == 1
    assert "stride 4" in both.json["skipped"][0]["reason"] and "Skipped" in both.out
    alone = weft(*args, "sequence", json_file=True)
    assert alone.json["worst"] is None
    assert alone.code == 2 and "--schedule all_gather computed nothing" in alone.err and "stride 4" in alone.err


def test_nothing_that_was_asked_for_could_run(weft):
    """The law alone is no answer to somebody who asked for schedules."""
    for flags in (["--dtype", "f64"], ["--dtype", "f64", "--kernel", "cpu.scalar"]):
        result = weft("verify", "--docs", "40,5", "--schedule", "all", *flags, json_file=True)
        assert (result.code == 0) == (result.json["worst"] is not None), result.out
        if result.code != 0:
            assert result.code == 2 and "computed nothing" in result.err and "f64" in result.err
            assert "Skipped attention: " in result.out and f"{len(SCHEDULES)} checks skipped" in result.out
    assert result.code == 2  # no kernel of a CPU computes in f64


@pytest.mark.parametrize("ranks", [1, 3, 5, 7])
def test_all_schedules_are_those_that_can_be(weft, ranks):
    result = weft.ok("verify", "--docs", "40,5", "--schedule", "all", "--ranks", ranks, json_file=True)
    skipped = [s["reason"] for s in result.json["skipped"]]
    assert skipped == [f"attention: hybrid: groups of ulysses = 2 ranks do not divide {ranks} ranks"]
    assert f"Skipped {skipped[0]}\n1 check skipped\n" in result.out
    assert {line.split()[1] for line in lines_of(result.out, "out")} == set(SCHEDULES) - {"hybrid"}
    for named in (["--schedule", "hybrid"], ["--schedule", "ring,hybrid"], ["--schedule", "all", "--ulysses", 2]):
        assert weft.refused("verify", "--docs", "40,5", *named, "--ranks", ranks, json_file=True, says=["do not divide"]).json is None


def test_a_named_schedule_has_to_run(weft):
    args = ["verify", "--docs", "9,16", "--layout", "striped", "--key-order", "sequence", "--schedule"]
    named = weft(*args, "ring,all_gather")
    assert named.code == 2 and "all_gather cannot run" in named.err and "stride 4" in named.out
    everything = weft.ok(*args, "all")
    assert "Skipped attention: all_gather" in everything.out


def test_bench_leaves_out_what_cannot_be(weft):
    args = ["bench", "--docs", "64", "--ranks", 3, "--repeat", 1, "--schedule"]
    result = weft.ok(*args, "all", json_file=True)
    assert "Skipped hybrid: groups of ulysses = 2 ranks do not divide 3 ranks" in result.out
    assert {line["schedule"] for line in result.json} == set(SCHEDULES) - {"hybrid"}
    weft.refused(*args, "hybrid", says=[])


def test_too_large_a_problem_is_compared_in_some_rows_and_keys(weft):
    result = weft.ok("verify", "--docs", "4500", "--mask", "causal", "--window", "300,0", "--ranks", 2, "--heads", "1",
                     "--schedule", "exact", json_file=True)
    assert "64 rows and 64 keys of 4,500 looked at, lse whole" in result.out
    assert result.json["sampled"] == 1 and result.json["worst"]["ratio"] < 1
    assert lines_of(result.out, "dk") and lines_of(result.out, "max_logit")


@pytest.mark.parametrize("flags", [
    [4000],  # a row's sum of exponentials is off by more than sums of some hundred
    pytest.param([9000], marks=pytest.mark.long),
    # Terms are all but equal, and errors too.
    pytest.param([5000, "--heads", "1:1", "--dim", "4:4", "--softcap", 0.5, "--scale", 2], marks=pytest.mark.long),
])
def test_long_sums_are_right(weft, flags):
    result = weft.ok("verify", "--docs", *flags, "--mask", "causal", "--ranks", 4, "--schedule", "all_gather",
                     json_file=True)
    assert result.json["failed"] == 0 and result.json["worst"]["ratio"] < 0.9


@pytest.mark.long
def test_large_random_problems(weft):
    result = weft.ok("verify", "--random", 6, "--large", 1, "--tokens-up-to", 5000, "--schedule", "ring,exact", "--seed", 2,
                     json_file=True)
    got = result.json
    assert got["cases"] == 6 and got["failed"] == 0 and 0 < got["sampled"] <= 6
    assert got["ran"] + got["refused"] == 12  # nothing is left out without being counted
    assert f"12 runs by schedules: {got['ran']} compared, {got['refused']} refused" in result.out
    f64 = weft("verify", "--random", 1, "--large", 1, "--schedule", "ring", "--seed", 8, json_file=True).json
    assert f64["cases"] + f64["unchecked"] == 1 and f64["ran"] + f64["refused"] == 1
    none = weft("verify", "--random", 200, "--large", 0, "--schedule", "ring", json_file=True).json
    some = weft("verify", "--random", 200, "--large", 20, "--tokens-up-to", 300, "--schedule", "ring", json_file=True).json
    assert none["cases"] == some["cases"] == 200 and none["by_layout"] != some["by_layout"]


def test_random(weft):
    result = weft.ok("verify", "--random", 300, "--schedule", "all", "--head-groups", 2, json_file=True)
    assert result.json["cases"] == 300 and result.json["failed"] == 0
    assert result.json["skipped"] == []  # f64 too


def tables(got):
    """{axis or axes: {values: {schedule: counts}}}"""
    return {tuple(t["axes"]): {tuple(r["values"]): r["schedules"] for r in t["rows"]} for t in got["tables"]}


@pytest.mark.long
def test_matrix_meets_every_pair_of_a_schedule_and_anything(weft):
    result = weft.ok("verify", "--matrix", "quick", json_file=True)
    assert result.json["failed"] == 0 and result.json["failures"] == []
    of = tables(result.json)
    layouts = {values[0] for values in of[("layout", "mask")]}
    assert layouts == {"contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed", "explicit"}
    assert len(of[("layout", "mask")]) == 7 * 8
    for axis, count in [("packing", 5), ("dtype", 3), ("ranks", 4), ("format", 3), ("heads", 6), ("widths", 4),
                        ("sink", 3), ("softcap", 2), ("scale", 2)]:
        assert len(of[(axis,)]) == count, axis
    for axes, rows in of.items():
        for values, by in rows.items():
            if axes[0] in ("head_groups", "ulysses", "stages", "ranks_per_step", "node", "query_ranks"):
                assert sum(c["ok"] for c in by.values()) > 0, (axes, values)
                continue
            assert set(by) == set(COLUMNS), (axes, values)
            for schedule, c in by.items():
                refused = values[0] == "striped" and schedule.endswith("sequence")
                assert (c["ok"] == 0 and c["refused"] > 0) if refused else c["ok"] > 0, (axes, values, schedule)
    assert result.json["refused"] > 0
    assert all(r["problem"] in result.out and r["remedy"] in result.out for r in result.json["refusals"])
    for column in COLUMNS:
        assert column.split()[0] in result.out


def test_matrix_of_chosen_things(weft):
    args = "verify --matrix quick --ranks 2,5 --schedule ring,exact --layout zigzag,striped --dtype bf16,f64"
    result = weft.ok(*args.split(), json_file=True)
    of = tables(result.json)
    assert {v[0] for v in of[("layout", "mask")]} == {"zigzag", "striped"}
    assert set(of[("ranks",)]) == {("2",), ("5",)}
    assert all(set(by) == {"ring", "exact"} for by in of[("packing",)].values())
    assert all(c["ok"] > 0 and c["refused"] == 0 for c in of[("dtype",)][("f64",)].values())


def test_matrix_does_not_depend_on_threads(weft):
    args = ["verify", "--matrix", "quick", "--ranks", "2", "--layout", "zigzag", "--kernel", "cpu.scalar"]
    one, three = (weft(*args, "--threads", n, json_file=True) for n in (1, 3))
    assert one.out == three.out and one.json == three.json


def values_of(got, axis):
    return {line["values"][0] for t in got["tables"] if t["axes"] == [axis] for line in t["rows"]}


def test_pairs_of_a_matrix(weft):
    args = ["verify", "--matrix", "full", "--ranks", "2,3", "--kernel", "cpu.scalar"]
    few = weft.ok(*args, "--pairwise", json_file=True)
    done = few.json["ok"] + few.json["refused"]
    assert few.json["failed"] == 0 and few.json["left_out"] == 0 and done < 1000
    line = few.out.split("\n")[1]
    assert f"those {done} in which" in line and "left out: --pairwise" in line
    of = tables(few.json)
    assert len(of[("layout", "mask")]) == 7 * 8  # any two values of these two meet, and not only where they are refused
    assert all(sum(c["ok"] for c in by.values()) > 0 for by in of[("layout", "mask")].values())
    for axis, count in [("packing", 5), ("dtype", 3), ("ranks", 2), ("format", 3), ("heads", 6), ("widths", 4)]:
        assert len(values_of(few.json, axis)) == count, axis
        for by in of[(axis,)].values():  # .. with every schedule
            assert set(by) == set(COLUMNS) and all(c["ok"] > 0 for c in by.values()), axis


def test_a_matrix_that_time_cuts_short(weft):
    result = weft.ok("verify", "--matrix", "full", "--ranks", "2,4", "--time-limit", "2s", json_file=True)
    got = result.json
    assert got["failed"] == 0 and got["ok"] > 0 and got["left_out"] > 0
    everything = got["left_out"] + got["ok"] + got["refused"]
    assert f"{got['left_out']:,} of {everything:,} runs were left out: --time-limit 2" in result.out
    assert len(values_of(got, "dtype")) > 1  # from all over the matrix
    nothing = weft("verify", "--matrix", "full", "--ranks", "2", "--time-limit", "0.000001")
    assert nothing.code == 1 and "the time was over before the first run" in nothing.err


def test_random_problems_that_time_cuts_short(weft):
    result = weft.ok("verify", "--random", 1000000, "--time-limit", 0.5, json_file=True)
    assert result.json["cases"] > 0
    assert result.json["cases"] + result.json["left_out"] == 1000000
    assert "cases were left out: --time-limit 0.5" in result.out


def test_matrix_that_is_all_refused_is_a_failure(weft):
    result = weft("verify", "--matrix", "quick", "--ranks", "2", "--dtype", "f64", "--kernel", "cpu")
    assert result.code == 2 and "nothing was checked" in result.err


@pytest.mark.long
def test_the_command_of_a_grid_gives_its_worst_again(weft):
    first = weft("verify", "--matrix", "quick", "--ranks", "3", json_file=True).json["worst"]
    again = weft.again({"worst": first}).json["worst"]
    assert (again["ratio"], again["where"]) == (first["ratio"], first["where"])


@pytest.mark.long
def test_set(weft):
    args = "verify --set te-grid --ranks 2 --dtype bf16 --schedule ring,all_to_all"
    result = weft.ok(*args.split(), json_file=True)
    of = tables(result.json)
    assert len(of[("mask", "heads")]) == 6 * 4 + 2 * 3
    assert set(of[("widths",)]) == {("128:128",), ("64:64",), ("128:64",), ("192:128",)}
    assert set(of[("format",)]) == {("thd",), ("bshd",), ("sbhd",)}
    assert set(of[("sink",)]) == {("none",), ("off_by_one",), ("learnable",)}
    assert set(of[("padding",)]) == {("between documents",), ("none",)}


def test_progress_on_a_terminal_alone(weft):
    args = ["verify", "--matrix", "quick", "--ranks", "2", "--layout", "zigzag"]
    assert weft.ok(*args).err == ""
    text = weft.on_terminal(*args, stream="stderr")
    assert " runs, 0 failed" in text and text.rstrip().endswith("\x1b[K")


def test_auto(weft):
    result = weft.ok("verify", "--docs", "90,50,100", "--mask", "causal", "--schedule", "auto", "--layout", "auto")
    line = next(x for x in result.out.splitlines() if x.startswith("auto, on cpu: layout "))
    layout = line.removeprefix("auto, on cpu: layout ").split(":")[0]
    assert f"on 4 ranks: layout {layout}, mask causal" in result.out
    chosen = next(x for x in result.out.splitlines() if x.startswith("layer 0: ")).removeprefix("layer 0: ").split(":")[0]
    assert chosen.split(" ")[0] in result.out.split("worst element\n")[1]


def test_auto_beside_others_and_on_another_machine(weft):
    flags = ["verify", "--docs", "64,64", "--schedule", "ring,auto", "--layout", "balanced", "--machine", "h100-400g"]
    result = weft.ok(*flags)
    assert "auto, on h100-400g: " in result.out and "  ring " in result.out


def test_auto_of_a_batch_is_a_layout_of_batches(weft):
    result = weft.ok("verify", "--docs", "64,64,64,64", "--schedule", "auto", "--layout", "auto", "--format", "bshd")
    assert "layout dual_chunk" in result.out, result.err


@pytest.mark.parametrize("flags, says", [
    ("--random 5 --schedule auto", ["--schedule auto with --random", "all of them"]),
    ("--matrix quick --layout auto", ["--layout auto with --matrix"]),
    ("--set te-grid --schedule ring,auto", ["--schedule ring,auto with --set"]),
    ("--docs 4 --machine cpu", ["--machine cpu and nothing to choose", "--schedule auto"]),
    ("--docs 4 --schedule auto --stages 2", ["--stages 2 with --schedule auto", "chosen too"]),
    ("--docs 4,5 --schedule auto --head-map 0,0", ["auto with --head-map", "name a schedule"]),
    ("--docs 4,5 --schedule auto --dtype f64", ["no rate for a forward in f64"]),
    ("--docs 64,60 --schedule auto --layout auto --format bshd", ["padded length 60", "pad to 64"]),
])
def test_auto_refused(weft, flags, says):
    weft.refused("verify", *flags.split(), says=says)
