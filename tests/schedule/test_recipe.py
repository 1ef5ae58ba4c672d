"""The schedule of docs/schedules.md (add a schedule), compiled as it stands there into the command and the Python module.

RECIPE_COMMAND is that command, and PYTHONPATH leads to that module."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

COMMAND = os.environ["RECIPE_COMMAND"]


def run(*arguments):
    result = subprocess.run([COMMAND, *map(str, arguments)], text=True, encoding="utf-8", capture_output=True, timeout=600)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def test_the_recipe_is_short():
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
    code = page.read_text(encoding="utf-8").split("## Add a schedule")[1].split("```cpp\n")[1].split("```")[0]
    assert "pairwise" in code and len(code.splitlines()) < 100


@pytest.mark.parametrize("more", [["--layout", "zigzag", "--window", "9,0"], ["--layout", "striped", "--heads", "4:2", "--sink", "learnable"]])
def test_forward_and_backward_with_checksums(more):
    assert "pairwise" in run("verify", "--docs", "20,3,18", "--mask", "causal", "--ranks", 3, "--schedule", "pairwise", "--checked", *more)


def test_matrix():
    """Every layout, mask, packing, dtype and feature, with bytes and messages as traffic() says."""
    assert "pairwise" in run("verify", "--matrix", "quick", "--ranks", "2,3", "--schedule", "pairwise,exact", "--pairwise")


def test_simulate_and_auto(tmp_path):
    file = tmp_path / "lines.json"
    run("simulate", "--ranks", "8,64", "--docs", "65536", "--schedule", "pairwise,ring,all_gather,auto", "--json", file)
    lines = json.loads(file.read_text(encoding="utf-8"))["lines"]
    for ranks in (8, 64):
        of = {line["schedule"]: line for line in lines if line["ranks"] == ranks and not line["auto"]}
        assert set(of) == {"pairwise", "ring", "all_gather"}
        received = {name: line["forward"]["bytes_in"] for name, line in of.items()}
        assert received["pairwise"] == received["ring"] == received["all_gather"] > 0
        assert 0.5 < of["pairwise"]["forward"]["seconds"] / of["ring"]["forward"]["seconds"] < 2


def test_a_page_is_drawn(tmp_path):
    page = tmp_path / "page.html"
    run("explain", "--docs", "80,50", "--mask", "causal", "--ranks", 4, "--schedule", "pairwise", "--html", page)
    assert "pairwise" in page.read_text(encoding="utf-8")


def test_help_and_table_of_support():
    assert "pairwise" in run("verify", "--help") and "pairwise" in run("explain", "--support")


def test_python():
    program = """if True:
        import numpy as np, weft
        assert "pairwise" in weft._core.schedules()
        packing = weft.Packing([0, 20, 23, 41])
        q, k, v = np.random.default_rng(1).standard_normal((3, 41, 2, 8), np.float32)
        want = weft.attention(q, k, v, packing=packing, causal=True).out

        def rank(comm):
            rows = [weft.shard(x, comm, packing=packing, layout="zigzag") for x in (q, k, v)]
            return weft.attention(*rows, packing=packing, causal=True, comm=comm, layout="zigzag", schedule="pairwise").out

        got = weft.unshard(weft.spawn(3, rank), packing=packing, layout="zigzag")
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        choice = weft.choose(packing, [weft.Mask(causal=True)], ranks=4, machine="h100-400g")
        assert "pairwise" in [c["schedule"] for c in choice.layers[0].candidates]
        """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
