"""A GPT of Megatron-Core with Weft's attention on 1, 2 and 4 ranks, against dense attention in f64 on one rank."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed (tools/setup.sh run)", allow_module_level=True)

import megatron_edges
import processes

pytestmark = pytest.mark.long
TOLERANCE = 1e-5  # of the largest element of each gradient
RUNS = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "tensor parallel": (4, 2)}  # ranks, of them tensor-parallel


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    runs = {}
    for name, given in RUNS.items():
        folder = tmp_path_factory.mktemp("megatron")
        processes.start("megatron_worker.py", folder, *given)
        runs[name] = torch.load(folder / "found.pt")
    return runs


@pytest.mark.parametrize("run", RUNS)
def test_loss_and_gradients(found, run):
    cases = [name for name in found[run] if isinstance(name, str)]
    assert len(cases) >= (9 if run == "tensor parallel" else 42)
    wrong = []
    for name in cases:
        expected, got = found["1"][name, "dense"], found[run][name]
        assert expected.keys() == got.keys()
        for what, x in expected.items():
            error = ((got[what] - x).abs().max() / x.abs().max()).item()
            if not error <= TOLERANCE:
                wrong.append(f"{name}: {what} is off by {error:.1e}")
    assert not wrong, "\n".join(wrong)


def test_cases_differ(found):
    """Each option does something: a case that came out like the plain one would test nothing."""
    plain = found["1"]["packed"]["loss"]
    for name in ("window", "every other window", "off-by-one", "learnable", "scale", "mla", "chunks", "batch"):
        assert abs(found["1"][name]["loss"] - plain) > 1e-4, name


@pytest.fixture(scope="module")
def edges(tmp_path_factory):
    return processes.results(megatron_edges, tmp_path_factory.mktemp("edges"))


@pytest.mark.parametrize("case", megatron_edges.CASES)
def test_edges(edges, case):
    processes.check(edges, case)


SOURCE = Path(__file__).parents[3]


def test_three_lines():
    """What the page says that changes in a program is what the example has, and no more than three lines."""
    (block,) = re.findall(r"^```diff\n(.*?)^```$", (SOURCE / "docs/megatron.md").read_text(), re.M | re.S)
    added = [line[1:] for line in block.splitlines() if line.startswith("+")]
    program = (SOURCE / "examples/megatron_gpt.py").read_text().splitlines()
    own = [line.strip() for line in program if "weft" in line and not line.startswith("#")]
    assert own == added and len(added) == 3


def test_the_example(tmp_path):
    losses = {}
    for ranks in (1, 2):  # by address: there are machines that do not know the name localhost
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
             "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", SOURCE / "examples/megatron_gpt.py"],
            capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        losses[ranks] = [float(x) for x in re.findall(rf"loss (\S+) on {ranks} ranks", done.stdout)]
    assert len(losses[1]) == 8 and losses[1][-1] < 0.5 * losses[1][0]
    assert losses[2] == pytest.approx(losses[1], abs=2e-4)
