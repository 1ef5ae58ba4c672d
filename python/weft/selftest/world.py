"""Where the ranks of a self-test come from: torchrun, mpirun, srun, or threads of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import tempfile
from typing import Any, Callable, List, Mapping, Optional, TypeVar

import numpy as np

from .. import _arrays, _core, ranks
from .._arrays import error
from .._core import Communicator

T = TypeVar("T")

try:
    import torch
except ModuleNotFoundError:
    torch = None

_RANK, _SIZE, _LOCAL, _LOCAL_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
# The same four by other launchers: Open MPI, MPICH and Intel MPI, Slurm.
_LAUNCHERS = {
    "torchrun": (_RANK, _SIZE, _LOCAL, _LOCAL_SIZE),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher says to a process in its environment."""

    by: str
    rank: int
    ranks: int
    local_rank: int
    local_ranks: int  # of a node; all of them if the launcher does not say


def launch_of(environment: Mapping[str, str]) -> Optional[Launch]:
    """Who started this process as one of several ranks; None if nobody did."""
    for by, names in _LAUNCHERS.items():
        said = [environment.get(name, "").partition("(")[0] for name in names]  # Slurm: 4(x2)
        if said[0].isdigit() and said[1].isdigit() and int(said[1]) > (0 if by == "torchrun" else 1):
            rank, size = int(said[0]), int(said[1])
            local = int(said[2]) if said[2].isdigit() else rank
            return Launch(by, rank, size, local, int(said[3]) if said[3].isdigit() else size)
    return None


class World:
    """One rank of the self-test."""

    def __init__(self, comm: Communicator, node: int, device: str, transport: str) -> None:
        self.comm, self.node, self.device, self.transport = comm, node, device, transport
        self.rank, self.ranks = comm.rank, comm.ranks

    def gathered(self, value: T) -> List[T]:
        """Every rank's value, on every rank."""
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = [np.zeros(1, np.int64) for _ in range(self.ranks)]
        self._all_gather(np.array([mine.size]), sizes)
        longest = max(int(size[0]) for size in sizes)
        padded = np.zeros(longest, np.uint8)
        padded[:mine.size] = mine
        all_ranks = [np.zeros(longest, np.uint8) for _ in range(self.ranks)]
        self._all_gather(padded, all_ranks)
        return [pickle.loads(part[:int(size[0])].tobytes()) for part, size in zip(all_ranks, sizes)]

    def _all_gather(self, mine: Any, every: List[Any]) -> None:
        self.comm.all_gather(_arrays.array(mine), [_arrays.array(x, True) for x in every])

    def finish(self) -> None:
        """Waits until the GPU has done what it was given."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def tensor(self, values: Any, dtype: str) -> Any:
        """An array of the dtype where attention runs: of torch if there is torch."""
        if torch is None:
            return np.ascontiguousarray(values, {"f32": np.float32, "f16": np.float16}[dtype])
        kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        return torch.as_tensor(values).to(kinds[dtype]).contiguous().to(self.device)

    def numbers(self, x: Any) -> Any:
        """An array as f64 of numpy."""
        return x.astype(np.float64) if torch is None else x.double().cpu().numpy()


def has_torch() -> bool:
    """Whether torch can be imported."""
    return torch is not None


def dtypes() -> List[str]:
    """Dtypes that arrays can have here: numpy alone has no bf16."""
    return ["f32", "f16"] if torch is None else ["f32", "bf16", "f16"]


def gpus() -> int:
    """GPUs that this process sees and this build of Weft can use."""
    return 0 if torch is None or not _core.has_cuda or not torch.cuda.is_available() else torch.cuda.device_count()


def device_of(wanted: str, local_rank: int) -> str:
    """"cpu", or the GPU of this rank; auto: a GPU if there is one."""
    if wanted == "cpu" or (wanted == "auto" and gpus() == 0):
        return "cpu"
    if gpus() == 0:
        why = ("there is no torch" if torch is None else
               "this build of Weft has no CUDA" if not _core.has_cuda else "torch sees none")
        raise error(f"--device {wanted}: no GPU here, {why}", "use --device cpu, or see docs/deployment.md")
    return f"cuda:{local_rank % gpus()}"


def _meeting(launch: Launch) -> str:
    """Where the processes meet, as torch's init_method."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return "env://"
    if launch.local_ranks < launch.ranks:
        raise error(f"{launch.by} started {launch.ranks} ranks on several machines, and none knows where to meet the others",
                    "give them MASTER_ADDR and MASTER_PORT (Open MPI: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500), or use "
                    "torchrun")
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_STEP_ID", "SLURM_JOB_ID")
    job = "-".join(os.environ[name] for name in names if name in os.environ)
    if not job:
        raise error(f"{launch.by} gave no name to its job by which ranks could find each other",
                    "set MASTER_ADDR and MASTER_PORT")
    safe = "".join(c if c.isalnum() else "-" for c in job)
    return f"file://{tempfile.gettempdir()}/weft-selftest-{os.getuid()}-{os.getppid()}-{safe}"


def _join(launch: Launch, device: str, backend: str) -> str:
    """Makes the default process group of torch; says what moves the bytes."""
    import torch.distributed as dist

    shared = device != "cpu" and launch.local_ranks > gpus()
    if backend == "auto":
        backend = "gloo" if device == "cpu" or shared or not dist.is_nccl_available() else "nccl"
    if backend == "nccl" and device == "cpu":
        raise error("--backend nccl with tensors of CPUs", "use --backend gloo, or --device cuda")
    if backend == "nccl" and shared:
        # NCCL refuses two ranks on one GPU of one host: each says that it is on another, and they talk by sockets.
        os.environ["NCCL_HOSTID"] = f"weft-{launch.rank}"
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    init = _meeting(launch)
    where = {} if init == "env://" and launch.by == "torchrun" else dict(rank=launch.rank, world_size=launch.ranks)
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", init_method=init, **where)
    if init.startswith("file://"):
        dist.barrier()
        with contextlib.suppress(OSError):
            os.unlink(init[len("file://"):])
    how = "NCCL" if backend == "nccl" else "gloo" if device == "cpu" else "gloo by way of the CPU"
    return how + (", ranks share GPUs" if shared else "")


def run(launch: Optional[Launch], threads: int, node: int, wanted: str, backend: str, time_limit: float,
        body: Callable[[World], int]) -> int:
    """Runs body(world) on every rank; the largest status."""
    if launch is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        device = device_of(wanted, 0)
        _core.set_cpu_threads(max(1, cores // threads))
        return max(ranks.spawn(threads, lambda comm: body(World(comm, node or threads, device, "threads of one process")),
                               time_limit=time_limit))
    if torch is None:
        raise error(f"{launch.by} started {launch.ranks} ranks, and there is no torch to bring them together",
                    "pip install torch")
    import torch.distributed as dist
    import weft.torch

    device = device_of(wanted, launch.local_rank)
    if device != "cpu":
        torch.cuda.set_device(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    _core.set_cpu_threads(max(1, cores // launch.local_ranks))
    torch.set_num_threads(1)
    how = _join(launch, device, backend)
    status = body(World(weft.torch.communicator(time_limit=time_limit), node or launch.local_ranks, device, f"torch, {how}"))
    dist.destroy_process_group()
    return status


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()
