"""Nothing is left behind: no memory after good and bad calls, no thread or message at the end of the process."""

import ctypes
import gc
import re
import resource
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import weft

from test_errors import BAD

pytestmark = pytest.mark.long

X = np.random.default_rng(0).standard_normal((8, 2, 4), np.float32)
CU = [0, 3, 8]


class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def _heap():
    """Bytes that malloc has handed out in this thread's arena and by mmap; None where it cannot be asked."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def _resident():
    """Bytes of memory in use now."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _grown(call, count):
    """(objects, traced bytes, heap bytes, resident bytes) that `count` calls leave behind."""
    def now():
        gc.collect()
        return np.array([len(gc.get_objects()), tracemalloc.get_traced_memory()[0], _heap() or 0, _resident()])

    tracemalloc.start()
    for i in range(count // 4):
        call(i)
    rounds = [now()]
    for _ in range(2):  # caches of others may fill once; what leaks does so again
        for i in range(count):
            call(i)
        rounds.append(now())
    tracemalloc.stop()
    return np.minimum(rounds[1] - rounds[0], rounds[2] - rounds[1]).tolist()


def _assert_nothing_left(call, count=1000):
    objects, traced, heap, resident = _grown(call, count)
    # One array of a call would be 32 KiB times `count`, one small object of C++ 32 bytes or more; the rest is for others' caches.
    assert objects < count // 10, f"{objects} objects"
    assert traced < 20 * count, f"{traced} bytes of Python"
    assert heap < 24 * count + 20_000, f"{heap} bytes of malloc"
    assert resident < 4000 * count, f"{resident} bytes resident"


def test_bad_calls_leave_nothing_behind():
    big = np.zeros((512, 4, 16), np.float32)
    calls = [call for call, *_ in BAD.values()]
    calls += [lambda: weft.attention(big, big, big, cu_seqlens_q=[0, 600]),
              lambda: weft.attention(big, big, big, cu_seqlens_q=[0, 512], window=(-3, 0)),
              lambda: weft.attention(big, big, big, cu_seqlens_q=[0, 512], kernel="gpu")]

    def call(i):
        with pytest.raises(weft.Error):
            calls[i % len(calls)]()

    _assert_nothing_left(call)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_good_calls_leave_nothing_behind(framework):
    x = np.random.default_rng(0).standard_normal((64, 4, 32), np.float32)
    if framework == "torch":
        x = pytest.importorskip("torch").from_numpy(x)
    elif framework == "jax":
        x = pytest.importorskip("jax.numpy").asarray(x)
    sink = np.zeros(4, np.float32)

    def call(i):
        weft.attention(x, x, x, cu_seqlens_q=[0, 20, 64], causal=True, sink=sink).backward(x)

    _assert_nothing_left(call)


def test_ranks_leave_nothing_behind():
    x = np.zeros((64, 4, 32), np.float32)

    def rank(comm):
        mine = weft.shard(x, comm, cu_seqlens=[0, 64])
        return weft.attention(mine, mine, mine, cu_seqlens_q=[0, 64], comm=comm, schedule="ring").out

    def failing(comm):
        rank(comm)
        raise OSError

    def call(i):
        weft.spawn(2, rank)
        with pytest.raises(OSError):
            weft.spawn(2, failing)

    _assert_nothing_left(
        call, 600
    )  # many: Python caches attributes of tracebacks by the address of their name, and fills up slowly


# --- The end of the process ---

ENDS = {
    "everything held": """
        import weft, numpy as np
        x = np.ones((8, 2, 4), np.float32)
        kept = []
        def rank(comm):
            kept.append((comm, comm.split(0, 0), weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4),
                         weft.attention(x[:4], x[:4], x[:4], cu_seqlens_q=[0, 8], comm=comm)))
        weft.use_layout([0, 8], ranks=2)
        weft.spawn(2, rank)
        r = weft.attention(x, x, x, cu_seqlens_q=[0, 8])
        """,
    "a transport held": """
        import weft, numpy as np
        class Transport:
            def exchange(self, sends, receives): return self
            def wait(self): pass
            abandon = wait
        comm = weft._core.python_communicator(0, 1, "test", Transport())
        x = np.ones((8, 2, 4), np.float32)
        r = weft.attention(x, x, x, cu_seqlens_q=[0, 8], comm=comm)
        Transport.kept = r
        """,
    "a thread in a call": """
        import threading, time, weft, numpy as np
        x = np.ones((3000, 4, 32), np.float32)
        threading.Thread(target=lambda: weft.attention(x, x, x, cu_seqlens_q=[0, 3000], kernel="reference"), daemon=True).start()
        time.sleep(0.1)
        """,
    "torch with everything kept": """
        import warnings
        warnings.simplefilter("ignore")
        import torch, weft, weft.torch
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        q = torch.ones(8, 2, 4, requires_grad=True)
        out = weft.torch.context_parallel_attention(q, q, q, weft.Packing([0, 8]), causal=True, schedule="ring")
        out.sum().backward()
        layer = weft.torch.MicroSequenceAttention()
        held = layer(q, q, q, weft.prepare.MicroSequences(weft.Packing([0, 8]), micros=2))
        """,
    "keys under way": """
        import weft, numpy as np
        kept = []
        def rank(comm):
            micros = weft.prepare.MicroSequences(weft.Packing([0, 8]), ranks=2, micros=2)
            buffer = weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4)
            buffer.begin(micros)
            buffer.start_gather(0, np.ones((2, 2, 4), np.float32), np.ones((2, 2, 4), np.float32))
            kept.append(buffer)
        weft.spawn(2, rank)
        """,
}


@pytest.mark.parametrize("name", ENDS)
def test_the_process_ends_well(name):
    if "import torch" in ENDS[name]:
        pytest.importorskip("torch")
    code = re.sub(r"^ {8}", "", ENDS[name], flags=re.M) + "\nprint('end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["end"]), done.stderr
    # torch has things to say of machines that are set up in odd ways; what ends badly says one of these.
    assert not re.search("Traceback|Exception|terminate|Fatal|nanobind|leak|Segmentation|weft", done.stderr), done.stderr


def test_without_torch():
    code = "import sys; sys.modules['torch'] = None; import weft.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "weft.torch needs PyTorch; pip install '.[torch]'" in done.stderr, done.stderr
