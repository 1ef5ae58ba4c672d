"""Attention below autograd: a plan or an executor is made once for a packing, and used by the backward and the next layers.

Calls go to kernels of the module weft._core, which torch finds by its dispatcher (weft::run, weft::run_backward), and which keep
the cache of plans. What they leave to Python, and all where torch has no C interface that they could use, is done here.
"""

import contextlib
import functools
import os
import threading
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import _arrays, _core, _options, _placed
from .._arrays import error
from ..attention import rank_schedule
from ..cost import chosen_schedule, machine_numbered
from ..schedule import Schedule
from ..sharding import batch_shape, layout_of
from . import how as settings_text
from . import step_log
from .group import all_or_nobody, communicator, ended
from .packed import OWN, unpack
from .sharding import USE

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor sink"


def _kernels() -> Optional[Tuple[Callable[..., Any], Callable[..., Any]]]:
    """weft::run and weft::run_backward; None, and a line in the log, if this torch has no C interface for them.

    They are called below autograd and with numbers of this process, so they are in no graph: weft::attention is.
    """
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    missing = _core.torch_load([os.path.join(folder, f"lib{name}.so") for name in ("torch_cpu", "torch_cuda", "torch")])
    if missing:
        step_log.logger.warning("torch %s has no %s: weft.torch works, and calls take longer", torch.__version__, missing)
        return None
    _LIBRARY.define(f"run({_TENSORS}, Tensor packing, int settings) -> (Tensor, Tensor, Tensor)")
    _LIBRARY.define(f"run_backward(Tensor dout, {_TENSORS}, Tensor out, Tensor lse, Tensor packing, int settings) -> "
                    "(Tensor, Tensor, Tensor, Tensor)")
    for name in ("run", "run_backward"):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _core.torch_register("CPU")
    if _core.has_cuda and torch.version.cuda is not None:
        _core.torch_register("CUDA")
    # Without the Python method around it, where there is one.
    run, run_backward = torch.ops.weft.run.default, torch.ops.weft.run_backward.default
    return getattr(run, "_op", run), getattr(run_backward, "_op", run_backward)


_native = _kernels()
_on_gpus = _native is not None and _core.has_cuda and torch.version.cuda is not None  # they take tensors on GPUs too


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state


def plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these are tensors that no mode, transform, tracer or subclass watches: then no operator is needed."""
    return (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN and _modes() == 0 and not _transforms()
            and _tracing() is None and not q.is_meta)


class Call(NamedTuple):
    """Settings, read once."""

    how: str
    said: Dict[str, Any]
    group: str  # "": one rank
    settings: _core.TorchSettings
    number: int  # of the settings as kernels are given it; one more if there is a sink
    max_logit: bool


_CACHED, _CACHED_ON_GPUS = 16, 4  # fewer executors on GPUs, where workspaces take memory from the model
# By name of the group. One cache a group, because its ranks must evict the same executors.
_runs: Dict[str, _core.TorchRuns] = {}
_calls: Dict[str, Call] = {}
_lock = threading.Lock()


def _end(name: str) -> None:
    """Forgets all of a communicator that has ended: another one may have its name."""
    with _lock:
        runs = _runs.pop(name, None)
        for how in [how for how, call in _calls.items() if call.group == name]:
            del _calls[how]
    if runs is not None:
        runs.clear()


ended.append(_end)


def cache_of(group: str) -> _core.TorchRuns:
    """The runs of a group, by its name."""
    with _lock:
        return _runs.setdefault(group, _core.TorchRuns())


def most_cached(device: Optional[int]) -> int:
    """How many executors of a group are kept, on a GPU or, with None, on the CPU."""
    return _CACHED if device is None else _CACHED_ON_GPUS


def clear_cache() -> None:
    """Forgets all plans and executors, and gives back their workspaces (on GPUs to Weft's pool, which keeps them)."""
    with _lock:
        for runs in _runs.values():
            runs.clear()


def log(level: int = 1) -> None:
    """Writes a line for every call of attention to the log `weft.torch` (Python's logging; to standard error unless that has
    another place): shapes, schedule, bytes, and which kernel was chosen and why. Level 2: each step of an executor as well,
    with the time it took on the host. Level 0: none, the default.

        >>> import weft.torch
        >>> weft.torch.log(0)
    """
    watched = step_log.level() > 1
    step_log.set_level(level)
    if watched != (step_log.level() > 1):
        clear_cache()  # executors are watched or not from their beginning


def call_of(how: str) -> Call:
    """The settings that a text says."""
    return _calls.get(how) or _new_call(how)


def _new_call(how: str) -> Call:
    said = settings_text.read(how)
    # What is made of the settings is for all layers.
    for_all = settings_text.for_all_layers(how)
    problem = None if for_all == how else call_of(for_all).settings.problem
    runs = cache_of(said["group"])
    settings = _core.TorchSettings(
        runs, problem, _arrays.format_of(said["format"]), said["scale"], said["softcap"], said["off_by_one"], said["head_map"],
        said["max_logit"], _arrays.layer_number(said["layer"]))
    call = Call(how, said, said["group"], settings, 2 * settings.number, said["max_logit"])
    with _lock:
        if len(_calls) >= 1024:
            _calls.clear()
        return _calls.setdefault(how, call)


def _dealt_by(said: Dict[str, Any], mask: _core.Mask, slices: Any) -> Optional[_core.Mask]:
    """The mask that layouts balanced, placed and auto go by: shard's, which is not always the layer's. None: the usual one.

    slices: those that came with the packing for it.
    """
    if said["layout_mask"] is None:
        return None
    if said["layout_mask"] == OWN:
        return mask if slices is None else _core.Mask(slices=slices)
    causal, bottom_right, window, chunk_size = said["layout_mask"]
    return _core.Mask(causal, bottom_right, tuple(window), chunk_size)


def _problem_of(packing: Tensor, said: Dict[str, Any]) -> Tuple[_core.Packing, _core.Problem, Any]:
    whole, slices, layout_slices = unpack(packing)
    mask = _core.Mask(said["causal"], said["bottom_right"], tuple(said["window"]), said["chunk_size"], slices)
    return whole, _core.Problem(whole, mask), layout_slices


def _layout_of(whole: _core.Packing, problem: _core.Problem, layout_slices: Any, said: Dict[str, Any], ranks: int,
               where: Any) -> _core.Layout:
    return layout_of(said["layout"], whole, ranks, _dealt_by(said, problem.mask, layout_slices), where, said["format"])


def chosen_for_source(packing: Tensor, said: Dict[str, Any], ranks: int, heads: Tuple[int, int],
                      shape: Tuple[_core.DType, int, int], width: int, keeps: bool) -> Schedule:
    """What auto stands for where rows of a source move: their bytes count, and what it takes to expand them.

    keeps: K and V are kept for the backward.
    """
    if said["head_map"] is not None:  # what a map takes is not predicted
        return Schedule("all_gather")
    whole, problem, layout_slices = _problem_of(packing, said)
    where = machine_numbered(said["machine"])
    layout = _layout_of(whole, problem, layout_slices, said, ranks, where)
    return chosen_schedule(problem, layout, *heads, *shape, where, width, keeps)


class Run:
    """A problem with its plan or executor."""

    def __init__(self, packing: Tensor, said: Dict[str, Any], heads: Tuple[int, int], dtype: _core.DType, dims: Tuple[int, int],
                 device: Optional[int], stream: int) -> None:
        self.ranks = 1
        self.comm: Optional[_core.Communicator] = None
        self.core: Any = None  # OneRank or Executor; None: a new executor for each call
        self.schedule: Optional[_core.RankSchedule] = None
        self.placed = None  # the layout that rows have still to be checked against
        self.source_rows: Dict[int, Any] = {}  # by step: which rows of a source are seen, and their positions (expand.py)
        whole, problem, layout_slices = _problem_of(packing, said)
        if not said["group"]:
            self.core = _core.OneRank(problem, said["kernel"], said["deterministic"])
            return
        self.comm = comm = communicator(said["group"])
        self.ranks = comm.ranks
        where = machine_numbered(said["machine"])
        self.placed = placed = _layout_of(whole, problem, layout_slices, said, comm.ranks, where)
        if said["format"] != "thd" and comm.ranks > 1:
            batch_shape(placed, said["format"], [comm.ranks, comm.ranks], comm.ranks)
        name, options = said["schedule"]
        self.schedule = rank_schedule(Schedule(name, **options), problem, placed, comm.rank, heads, said["head_map"],
                                      (dtype, *dims), where)
        self.executor = functools.partial(_core.Executor, comm, self.schedule, said["kernel"], said["deterministic"],
                                          said["checked"], device, stream, step_log.level() > 1)
        if not said["checked"]:
            self.core = self.executor()

    def run(self) -> Any:
        """What computes: of checked ranks anew each time, because making it compares the problems of all ranks."""
        return self.core or self.executor()

    def check_rows(self) -> None:
        """That this rank's rows were dealt out under the layout that is asked for; once is enough, unless ranks are checked."""
        if self.placed is not None and self.comm is not None:
            _placed.check(self.placed, self.comm.rank, _placed.scope_of(self.comm), call=USE, checked=self.core is None)
            if self.core is not None:
                self.placed = None


def run_of(q: Tensor, k: Tensor, v: Tensor, packing: Tensor, call: Call) -> Run:
    """The plan or executor for such tensors, from the cache or new."""
    view = _arrays.array(q, name="q")
    if packing.device.type != "cpu":
        raise error(f"the packing lies on {packing.device}", "keep it on the CPU: plans are made there")
    wanted = 3 if call.said["format"] == "thd" else 4
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if x.dim() != wanted:  # in the library's words
            raise error(f"{name} has shape {list(x.shape)}, but format {call.said['format']} has {wanted} dimensions",
                        "reshape it, or name its format: thd [t, h, d], bshd [b, s, h, d], sbhd [s, b, h, d]")
    heads, dims = (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1])
    key = (call.settings.problem, heads, view.dtype, dims, view.device, packing.numpy().tobytes())
    runs = call.settings.runs
    run = runs.get(*key)
    # A group may have ended, and another one have its name.
    if run is None or run.comm is not (communicator(call.group) if call.group else None):
        _options.heads(*heads, call.said["head_map"])
        run = Run(packing, call.said, heads, view.dtype, dims, view.device, _arrays.stream_of(q))
        runs.put(*key, run, run.core, _CACHED if view.device is None or run.comm is None else _CACHED_ON_GPUS)
    return run


@contextlib.contextmanager
def _using(run: Run, call: Call) -> Iterator[Any]:
    try:
        # Checked ranks fail together, so their group can be used again.
        with all_or_nobody("" if call.said["checked"] else call.group):
            yield run.run()
    except BaseException:
        call.settings.runs.drop(run)  # its state is undefined after a failure
        raise


def usable(x: Tensor) -> Tensor:
    """Gradients come as they like, expanded from one number for instance."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def statistics(dtype: torch.dtype) -> torch.dtype:
    """Of LSE and the largest logits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _settings(sink: Optional[Tensor], call: Call) -> _core.Settings:
    said = call.said
    return _core.Settings(said["scale"], said["softcap"], None if sink is None else _arrays.array(sink, name="sink"),
                          said["off_by_one"], said["head_map"])


def _tried(kernel: Callable[..., Any], *args: Any) -> Any:
    """Results of a kernel; None if Python has to do something first (_core.torch_raise). The library's errors are raised as
    they are, though torch makes a RuntimeError of everything."""
    try:
        results = kernel(*args)
    except RuntimeError:
        results = None
    if results is None:
        _core.torch_raise()
    elif _core.torch_asked():
        return None
    return results


def _forward_of(run: Run, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], call: Call) -> Tuple[Tensor, ...]:
    views = [_arrays.array(x, name=name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    if sink is not None:
        _options.sink(sink.shape, q.shape[-2])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=statistics(q.dtype))
    largest = q.new_empty(q.shape[-2:-1], dtype=statistics(q.dtype)) if call.max_logit else lse
    with _using(run, call) as it:
        run.check_rows()  # after checked ranks have compared their problems, whose error says more
        it.forward(*views, _arrays.format_of(call.said["format"]), _settings(sink, call), _arrays.array(out, True),
                   _arrays.array(lse, True), _arrays.array(largest, True) if call.max_logit else None,
                   stream=_arrays.stream_of(q), layer=_arrays.layer_number(call.said["layer"]))
    return out, lse, largest


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], packing: Tensor, call: Call) -> Tuple[Tensor, ...]:
    if _native is None or not (q.is_cpu or _on_gpus):
        return _forward_of(run_of(q, k, v, packing, call), q, k, v, sink, call)
    args = (q, k, v, q, packing, call.number) if sink is None else (q, k, v, sink, packing, call.number + 1)
    if not call.group:
        results = _tried(_native[0], *args)
        if results is not None:
            return results
        missing = _core.torch_raise() == "missing"
        run = run_of(q, k, v, packing, call)
        results = _tried(_native[0], *args) if missing else None
        return _forward_of(run, q, k, v, sink, call) if results is None else results
    run = run_of(q, k, v, packing, call)
    if run.core is None:
        return _forward_of(run, q, k, v, sink, call)
    with _using(run, call):
        run.check_rows()
        results = _tried(_native[0], *args)
        return _forward_of(run, q, k, v, sink, call) if results is None else results


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], packing: Tensor, call: Call) -> Tuple[Tensor, ...]:
    """out, lse, max_logit; the last is something else unless it is asked for."""
    results = _forward(q, k, v, sink, packing, call)
    if step_log._level:
        step_log.say(False, run_of(q, k, v, packing, call), q, k, v, call.said, _arrays.array(q))
    return results


def _backward_of(run: Run, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor,
                 call: Call) -> Tuple[Tensor, ...]:
    views = [_arrays.array(x, name=name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsink = dq if sink is None else q.new_empty(sink.shape, dtype=statistics(q.dtype))
    results = [_arrays.array(x, True) for x in (dq, dk, dv)]
    with _using(run, call) as it:
        it.backward(*views, _arrays.format_of(call.said["format"]), _settings(sink, call), _arrays.array(out), _arrays.array(lse),
                    _arrays.array(dout, name="dout"), *results, None if sink is None else _arrays.array(dsink, True),
                    stream=_arrays.stream_of(q), layer=_arrays.layer_number(call.said["layer"]))
    return dq, dk, dv, dsink


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor, packing: Tensor,
             call: Call) -> Tuple[Tensor, ...]:
    """dq, dk, dv, dsink; the last is something else without a sink."""
    dout = usable(dout)
    run: Optional[Run] = None
    results = None
    args = (dout, q, k, v, q if sink is None else sink, out, lse, packing, call.number if sink is None else call.number + 1)
    if _native is None or not (q.is_cpu or _on_gpus):
        pass
    elif not call.group:
        results = _tried(_native[1], *args)
        if results is None and _core.torch_raise() == "missing":
            run_of(q, k, v, packing, call)
            results = _tried(_native[1], *args)
    else:
        run = run_of(q, k, v, packing, call)
        if run.core is not None:
            with _using(run, call):
                results = _tried(_native[1], *args)
    if results is None:
        run = run or run_of(q, k, v, packing, call)
        results = _backward_of(run, dout, q, k, v, sink, out, lse, call)
    if step_log._level:
        step_log.say(True, run or run_of(q, k, v, packing, call), q, k, v, call.said, _arrays.array(q))
    # dsink is summed over the ranks already; divided by them, the sum over the group is right.
    return results if sink is None or run is None or run.ranks == 1 else (*results[:3], results[3] / run.ranks)
