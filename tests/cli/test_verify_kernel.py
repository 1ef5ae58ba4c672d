"""weft verify --kernel: the same chain with a kernel of one's choice."""

import pytest

KERNELS = ["cpu", "cpu.scalar"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_one_problem(weft, kernel, dtype):
    args = ["verify", "--docs", "80,5,11", "--mask", "causal", "--ranks", 3, "--sink", "learnable", "--dtype", dtype]
    result = weft.ok(*args, "--heads", "4:2", "--dim", 24, "--kernel", kernel, json_file=True)
    got = result.json
    assert got["kernel"].startswith("cpu.") and f"kernel {got['kernel']}" in result.out
    if kernel != "cpu":
        assert got["kernel"] == kernel
    assert got["cases"] == 1 and got["failed"] == 0 and got["skipped"] == []
    assert 0 < got["worst"]["ratio"] < 1
    for tensor in ("out", "lse", "max_logit", "dq", "dk", "dv", "dsink"):
        lines = [line for line in result.out.split("\n") if line.split()[:1] == [tensor]]
        assert len(lines) == 3 and all(" ok " in line for line in lines)  # sequence order, rank order, ring


def test_the_reference_is_the_default(weft):
    args = ["verify", "--docs", "8,5", "--mask", "causal"]
    assert weft(*args, json_file=True).json == weft(*args, "--kernel", "reference", json_file=True).json
    assert weft(*args, json_file=True).json["kernel"] == "reference"


@pytest.mark.parametrize("kernel", KERNELS)
def test_random(weft, kernel):
    """Cases that the kernel refuses are counted with its reason; their slices are checked all the same."""
    got = weft.ok("verify", "--random", 400, "--kernel", kernel, json_file=True)
    assert got.json["cases"] == 400 and got.json["failed"] == 0
    refused = [s["count"] for s in got.json["skipped"] if "f64" in s["reason"]]
    assert len(refused) == 1 and 50 < refused[0] < 200


def test_the_command_of_a_case_names_its_kernel(weft):
    drawn = weft("verify", "--random", 20, "--seed", 4, "--kernel", "cpu.scalar", json_file=True).json
    assert drawn["worst"]["command"].endswith(" --kernel cpu.scalar")
    assert weft.again(drawn).json["worst"] == drawn["worst"]


def test_a_kernel_that_computes_nothing_is_a_failure(weft):
    result = weft("verify", "--docs", 9, "--dtype", "f64", "--kernel", "cpu", json_file=True)
    assert result.code == 2 and "--kernel cpu computed nothing" in result.err and "f64" in result.err
    assert "f64" in result.json["skipped"][0]["reason"] and result.json["failed"] == 0


def test_an_unknown_kernel_is_refused_with_the_names(weft):
    result = weft.refused("verify", "--docs", 9, "--kernel", "nope", json_file=True, says=["nope", "reference", "cpu.scalar"])
    assert result.json is None


def test_accuracy(weft):
    """Nine hard inputs, five tensors each, none over its bound; what it does not take is refused."""
    got = weft.ok("verify", "--accuracy", "quick", "--kernel", "cpu", "--dtype", "bf16", json_file=True)
    rows = got.json["accuracy"]
    assert len(rows) == 45 and all(row["ok"] and row["dtype"] == "bf16" for row in rows)
    assert {row["tensor"] for row in rows} == {"out", "lse", "dq", "dk", "dv"} and max(row["of_bound"] for row in rows) > 0.1
    weft.refused("verify", "--accuracy", "quick", "--docs", "5,7", says=["--accuracy", "--docs"])
    nothing = weft("verify", "--accuracy", "quick", "--kernel", "cpu", "--dtype", "f64")
    assert nothing.code == 2 and "nothing was checked" in nothing.err
