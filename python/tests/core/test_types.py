"""mypy --strict and pyright on the examples of README, docs and examples/: no errors, and a mistyped option is one."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import weft
from weft import types

SOURCE = Path(__file__).parents[3]

# Names that fragments of the docs use.
PREAMBLE = """
import typing, numpy as np, torch, torch.distributed as dist, torch.nn.functional as F, weft, weft.torch
q = k = v = dout = torch.zeros(16, 2, 8)
cu = cu_seqlens = [0, 7, 16]
input_ids = torch.zeros(16, dtype=torch.int64)
packing, mask, full, window = weft.Packing(cu), weft.Mask(causal=True), weft.Mask(), weft.Mask(causal=True, window=(4, 0))
name, this_rank, model, x = "model", 0, torch.nn.Linear(8, 8), torch.zeros(16, 8)
latent = rotated_rope = source = x
up: typing.Any = x
def one_of_many() -> weft.Communicator: raise NotImplementedError
def train(group: weft.Communicator) -> float: return 0.0
def one_group() -> dist.ProcessGroup: raise NotImplementedError
def one_mesh() -> torch.distributed.device_mesh.DeviceMesh: raise NotImplementedError
comm, group, mesh = one_of_many(), one_group(), one_mesh()
ids, labels, cp = input_ids, input_ids, weft.torch.ContextParallel(cu)
offsets = other_offsets = torch.tensor(cu)
other_ids = input_ids
def train_step(ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor: raise NotImplementedError
block = weft.torch.TransformerLayer(8, 16, 2, qkv_format="thd")
def attention(x: torch.Tensor, packing: weft.Packing, layout: str) -> torch.Tensor: raise NotImplementedError
"""

# Each line has one mistake, of which both must speak.
MISTAKES = """
weft.attention(q, k, v, cu_seqlens=cu, schedle="ring")
weft.attention(q, k, v, cu_seqlens=cu, schedule="rnig")
weft.attention(q, k, v, cu_seqlens=cu, window=4)
weft.attention(q, k, v, cu_seqlens=cu).outt
weft.Schedule("ring", ranks_per_stp=2)
weft.Schedule("ring", ranks_per_step="2")
weft.Mask(causl=True)
weft.Layout("zigzga", packing, 2)
weft.shard(q, 0, ranks=2, packing=packing, layout="zigzga")
weft.simulate(packing, mask, ranks=2, abreast=1)
weft.torch.context_parallel_attention(q, k, v, packing, schedle="ring")
weft.torch.ContextParallelAttention(ranks_per_stp=2)
weft.torch.ContextParallel(cu, shedule="ring")
weft.torch.ContextParallel(cu, reduction="average")
cp.attention(q, k, v, window=4)
weft.torch.TransformerLayer(8, 16, 2, qkv_format="htd")
weft.torch.TransformerLayer(8, 16, 2, rotary_bsae=10000.0)
weft.torch.MultiheadAttention(8, 2, chunk_size="8")
""".strip()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package as it is installed: with a stub of the module."""
    pytest.importorskip("nanobind")
    folder = tmp_path_factory.mktemp("package")
    subprocess.run([sys.executable, "-m", "nanobind.stubgen", "-m", "weft._core", "-r", "-O", folder], check=True, timeout=300)
    (stub,) = folder.rglob("_core.pyi")
    here = folder / "weft"
    here.mkdir(exist_ok=True)
    for path in Path(weft.__file__).parent.iterdir():
        if path.name not in ("_core.pyi", "__pycache__"):
            (here / path.name).symlink_to(path)
    if stub.parent != here:
        stub.rename(here / "_core.pyi")
    return folder


def test_types_come_with_the_package(package):
    assert (package / "weft/py.typed").exists()
    nodes = ast.walk(ast.parse((package / "weft/_core.pyi").read_text()))
    names = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert {"Packing", "Mask", "Layout", "Problem", "Plan", "Communicator", "OneRank", "Ranks"} <= names


def snippets():
    """{file name: text} of all examples."""
    found = {path.name: path.read_text() for path in sorted((SOURCE / "examples").glob("*.py"))}
    for page in (SOURCE / "README.md", *sorted((SOURCE / "docs").glob("*.md"))):
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)):
            found[f"{page.stem.replace('-', '_')}_{number}.py"] = block if page.stem == "README" else PREAMBLE + block
    return found


def mypy(folder, package):
    """{file: {line: what it says}}"""
    config, cache = folder / "mypy.ini", SOURCE / ".cache/mypy"  # reading torch takes a while, once
    # Of the package nothing is said, as where it is installed. Tensor.backward and others of torch have no types.
    config.write_text("[mypy]\nstrict = True\nuntyped_calls_exclude = torch\n[mypy-weft.*]\nfollow_imports = silent\n"
                      "[mypy-transformers.*,trl.*,datasets.*,tokenizers.*,megatron.*,tqdm.*,matplotlib.*]\n"
                      "follow_imports = skip\nignore_missing_imports = True\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", cache, *folder.glob("*.py")],
                          capture_output=True, text=True, timeout=900, env={**os.environ, "MYPYPATH": str(package)})
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return said(re.findall(r"([^/\n]+\.py):(\d+): error: (.*)", done.stdout))


def pyright(folder, package):
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(package)], "reportAttributeAccessIssue": "error"}))
    done = subprocess.run([sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "--project", folder],
                          capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return said((Path(x["file"]).name, x["range"]["start"]["line"] + 1, x["message"])
                for x in json.loads(done.stdout)["generalDiagnostics"] if x["severity"] == "error")


def said(errors):
    out = {}
    for file, line, text in errors:
        out.setdefault(file, {})[int(line)] = text
    return out


@pytest.mark.long
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_examples_and_mistakes(checker, package, tmp_path):
    if not importlib.util.find_spec(checker.__name__):
        pytest.skip(f"no {checker.__name__} (tools/setup.sh test run lint)")
    pytest.importorskip("torch")
    for name, text in {**snippets(), "mistakes.py": PREAMBLE + MISTAKES}.items():
        (tmp_path / name).write_text(text)
    errors = checker(tmp_path, package)
    found = errors.pop("mistakes.py", {})
    assert not errors, json.dumps(errors, indent=1)
    first = PREAMBLE.count("\n") + 1
    missed = [line for number, line in enumerate(MISTAKES.splitlines(), first) if number not in found]
    assert not missed and len(found) == len(MISTAKES.splitlines()), (missed, found)


def test_names_are_those_of_the_library():
    names = lambda literal: set(typing.get_args(literal))
    aliases = {"p2p", "a2a", "ulysses", "a2a+p2p", "usp", "auto"}
    assert names(types.ScheduleName) == set(weft._core.schedules()) | aliases
    assert set(types.ScheduleOptions.__annotations__) == {name for name, *_ in weft._core.schedule_options()}
    assert names(types.FormatName) == set(weft._core.Format.__members__)
    assert names(types.DTypeName) == set(weft._core.DType.__members__)
    assert names(types.LayoutName) == set(weft._options.LAYOUTS)
