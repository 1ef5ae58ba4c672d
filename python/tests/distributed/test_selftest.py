"""python -m weft.selftest: started in each way, and with faults that it has to find."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
import weft
from weft.selftest import checks, main, world

MPIRUN = Path(__file__).parents[3] / "tools" / "mpirun.sh"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "-m"]


def started(command, seconds=120):
    done = subprocess.run([*command[:-1], *command[-1]], capture_output=True, text=True, timeout=seconds,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def looks_right(said, ranks=4):
    assert re.search(rf"\d+ checks on each of {ranks} ranks, all right", said.splitlines()[-1]), said
    assert "WRONG" not in said and "NOT as" not in said
    for schedule in ("all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"):
        assert re.search(rf"^{schedule} +f32 +[1-9]\d* +0 .* as traffic\(\) says$", said, re.M), said
        assert len(re.findall(rf"^{schedule}( +\d+\.\d\d){{4}}$", said, re.M)) == 1, said  # the step
    return said


@pytest.mark.long
def test_torchrun(tmp_path):
    file = tmp_path / "machine.json"
    said = looks_right(started([*TORCHRUN, "weft.selftest", ["--quick", "--ranks-per-node", "2", "--json", str(file)]]))
    assert "torch, gloo" in said and "autograd   weft.torch: right" in said
    levels = re.findall(r"^(inside a node|between nodes) +([\d.]+) +([\d.]+) +([\d.e+]+)$", said, re.M)
    assert [name for name, *_ in levels] == ["inside a node", "between nodes"], said
    assert all(float(latency) > 0 and float(bandwidth) > 0 for _, latency, _, bandwidth in levels)
    machine = weft.machine(file)
    predicted = weft.simulate(weft.Packing([0, 4096]), weft.Mask(causal=True), ranks=4, schedule="ring", machine=machine)
    assert predicted["seconds"] > 0


@pytest.mark.long
def test_all_of_it():
    said = looks_right(started([*TORCHRUN, "weft.selftest", []], 600))
    assert re.search(r"^exact +f16 +16 ", said, re.M), said  # 4 masks by 4 layouts


@pytest.mark.long
@pytest.mark.skipif(subprocess.run(["which", "mpirun"], capture_output=True).returncode != 0, reason="there is no mpirun")
def test_mpirun():
    looks_right(started([str(MPIRUN), "-np", "4", sys.executable, "-m", "weft.selftest", ["--quick"]]))


def few(*options):
    """The self-test on ranks that are threads, of one schedule."""
    usual = ["--quick", "--device", "cpu", "--dtype", "f32", "--schedule", "ring", "--ranks", "2", "--tokens", "64"]
    return main([*usual, *options])


def test_threads_without_torch(monkeypatch, capsys):
    monkeypatch.setattr(world, "torch", None)
    assert main(["--quick", "--ranks", "3", "--tokens", "96", "--dtype", "f32"]) == 0
    said = capsys.readouterr().out
    assert "threads of one process" in said and "left out: there is no torch" in said and "hybrid" not in said
    assert "3 ranks, all right" in said.splitlines()[-1]


@pytest.mark.parametrize("name", ["out", "dk"])
def test_a_wrong_number_is_found(monkeypatch, capsys, name):
    """One element of rank 1, off by a part in a thousand."""
    real = checks.attention

    def attention(*tensors, **options):
        r = real(*tensors, **options)
        if "comm" not in options or options["comm"].rank != 1:
            return r
        if name == "out":
            r.out[3, 1, 5] += 1e-3 * abs(r.out).max()
            return r

        class Off:
            out = r.out

            def backward(self, dout):
                got = r.backward(dout)
                got.dk[3, 1, 5] += 1e-3 * abs(got.dk).max()
                return got

        return Off()

    monkeypatch.setattr(checks, "attention", attention)
    assert few() == 1
    said = capsys.readouterr().out
    line = rf"^WRONG  Schedule\('ring'\) f32 \w+ \w+: rank 1: {name} of token \d+, head 1, element 5 is "
    assert re.search(line, said, re.M), said
    assert "rank 0: " not in said and re.search(r"[1-9]\d* WRONG", said.splitlines()[-1])


def test_bytes_that_are_not_those_of_traffic_are_found(monkeypatch, capsys):
    real = checks.rank_schedule

    class Off:
        def __init__(self, *arguments):
            self.made = real(*arguments)

        def traffic(self, *arguments):
            t = self.made.traffic(*arguments)
            return {**t, "bytes_sent": t["bytes_sent"] + 1}

    monkeypatch.setattr(checks, "rank_schedule", Off)
    assert few() == 1
    said = capsys.readouterr().out
    assert "NOT as traffic() says" in said and re.search(r"WRONG .* rank 1: backward: bytes sent", said), said


def test_bits_that_change_are_found(monkeypatch, capsys):
    real, calls = checks.attention, []

    def attention(*tensors, **options):
        r = real(*tensors, **options)
        if options.get("deterministic"):
            calls.append(1)
            if len(calls) > 2:
                r.out[0, 0, 0] = float(np.nextafter(r.out[0, 0, 0].numpy(), np.float32(9)))
        return r

    monkeypatch.setattr(checks, "attention", attention)
    assert few() == 1
    assert "of out has other bits in run 2" in capsys.readouterr().out


def test_a_rank_that_fails(monkeypatch, capsys):
    real = checks.run_case

    def run_case(here, *rest):
        if here.rank == 1:
            raise weft.Error("it rains")
        real(here, *rest)

    monkeypatch.setattr(checks, "run_case", run_case)
    assert few() == 1
    assert "it rains" in capsys.readouterr().err


@pytest.mark.parametrize("options, text", [
    (["--schedule", "rings"], "there is no 'rings'"), (["--dtype", "f8"], "there is no 'f8'"),
    (["--heads", "3,2"], "--heads 3,2"),
    (["--ranks", "4", "--node", "3"], "--node 3 with 4 ranks"), (["--tokens", "3"], "--tokens 3"),
    (["--device", "cuda"], "no GPU here"), (["--ranks", "0"], "--ranks 0"),
])
def test_what_is_refused(capsys, options, text):
    if "cuda" in options and world.gpus():
        pytest.skip("there is a GPU")
    assert few(*options) == 1
    assert text in capsys.readouterr().err


def test_launchers():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert world.launch_of(torchrun) == world.Launch("torchrun", 5, 8, 1, 4)
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in torchrun.items() if "WORLD" not in name}
    mpi.update(OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_LOCAL_SIZE="4")
    assert world.launch_of(mpi) == world.Launch("mpirun", 5, 8, 1, 4)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}
    assert world.launch_of(slurm) == world.Launch("srun", 5, 8, 1, 4)
    assert world.launch_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert world.launch_of({"PATH": "/bin"}) is None
