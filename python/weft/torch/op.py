"""The operators weft::attention and weft::attention_backward.

They take tensors, the packing as a tensor (packed.py), and everything else as one string of JSON, so that torch.compile sees
constants. The plan or executor made of these is cached for the backward and the next layers.
"""

import collections
import contextlib
import functools
import json
import threading
from typing import Any, Callable, Dict, Iterator, Optional, OrderedDict, Tuple

import torch
from torch import Tensor

from .. import _arrays, _core, _options, _placed, ranks
from .._arrays import error
from ..attention import rank_schedule
from ..cost import machine_number, machine_numbered
from ..schedule import Schedule, schedule_of, unexpected
from ..sharding import batch_shape, layout_of
from .group import all_or_nobody, communicator, own_name
from .packed import unpack
from .sharding import USE

Shape = Tuple[_core.DType, int, int]  # dtype, dim of q and k, dim of v

_DEFAULTS: Dict[str, Any] = dict(
    format="thd", causal=False, bottom_right=False, window=(-1, -1), chunk_size=None, scale=None, softcap=0.0, off_by_one=False,
    head_map=None, deterministic=False, kernel="", max_logit=False, group="", schedule="all_gather", layout=None,
    layout_mask=None, checked=False, layer=None, machine=0)
_MASK = ("causal", "bottom_right", "window", "chunk_size")


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own."""
    if not hasattr(value, "tolist"):
        raise error(f"an option is of type {type(value).__name__}", "give numbers, names and lists; a layout by its name")
    return value.tolist()


def how_of(**options: Any) -> str:
    """The settings that differ from their defaults, as JSON."""
    for name in options:
        if name not in _DEFAULTS or name == "machine":
            unexpected("context_parallel_attention", name, (known for known in _DEFAULTS if known != "machine"))
    if not isinstance(options.get("layout", ""), (str, type(None))):
        raise error(f"layout is a {type(options['layout']).__name__}", "give its name: it is made anew for every packing")
    layer = _arrays.layer_number(options.pop("layer", None))
    said: Dict[str, Any] = {"layer": layer} if layer >= 0 and options.get("checked") else {}  # only checked ranks compare it
    schedule = options.pop("schedule", _DEFAULTS["schedule"])
    # From inside torch.compile: [name, options].
    schedule = Schedule(schedule[0], **dict(schedule[1])) if isinstance(schedule, list) else schedule_of(schedule)
    said["schedule"] = [schedule.name, schedule.options]
    # The backward must choose as its forward did, also after another set_machine.
    if "auto" in (options.get("layout"), schedule.name):
        said["machine"] = machine_number()
    mask = _core.Mask(*(options.get(name, _DEFAULTS[name]) for name in _MASK))  # refuses wrong types, and makes plain numbers
    for name, value in options.items():
        if name in _MASK:
            value = getattr(mask, name)
        elif value is not _DEFAULTS[name]:
            value = _options.option(name, _plain(value) if hasattr(value, "tolist") else value)
        if name == "kernel" and value is None:
            value = ""
        if value != _DEFAULTS[name]:
            said[name] = value
    return json.dumps(said, sort_keys=True, default=_plain)


@functools.lru_cache(1024)
def _read(how: str) -> Dict[str, Any]:
    return {**_DEFAULTS, **json.loads(how)}


@functools.lru_cache(1024)
def _for_all_layers(how: str) -> str:
    """The settings without the layer's number: what is made of them is for all layers."""
    return json.dumps({name: value for name, value in json.loads(how).items() if name != "layer"}, sort_keys=True)


def _layer(how: str) -> int:
    return _arrays.layer_number(_read(how)["layer"])


def _dealt_by(said: Dict[str, Any], mask: _core.Mask) -> Optional[_core.Mask]:
    """The mask that layouts balanced and auto go by: that of shard, which is not always the layer's. None: the usual one."""
    if said["layout_mask"] is None:
        return None
    if said["layout_mask"] == "own":
        return mask
    causal, bottom_right, window, chunk_size = said["layout_mask"]
    return _core.Mask(causal, bottom_right, tuple(window), chunk_size)


class _Run:
    """A problem with its plan or executor."""

    def __init__(
        self, packing: Tensor, said: Dict[str, Any], heads_q: int, heads_k: int, shape: Shape, device: Optional[int], stream: int
    ) -> None:
        self.format_name, self.format = said["format"], _arrays.format_of(said["format"])
        self.max_logit, self.ranks, self.said = said["max_logit"], 1, said
        self.comm: Optional[_core.Communicator] = None
        self.run: Callable[[], Any]
        self.placed = None  # the layout that rows have still to be checked against
        whole, slices = unpack(packing)
        mask = _core.Mask(said["causal"], said["bottom_right"], tuple(said["window"]), said["chunk_size"], slices)
        problem = _core.Problem(whole, mask)
        if not said["group"]:
            run = _core.OneRank(problem, said["kernel"], said["deterministic"])
            self.run = lambda: run
            return
        self.comm = comm = communicator(said["group"])
        self.ranks = comm.ranks
        dealt_by = _dealt_by(said, mask)
        where = machine_numbered(said["machine"])
        self.placed = placed = layout_of(said["layout"], whole, comm.ranks, dealt_by, where, self.format_name)
        if self.format_name != "thd" and comm.ranks > 1:
            batch_shape(placed, self.format_name, [comm.ranks, comm.ranks], comm.ranks)
        name, options = said["schedule"]
        made = rank_schedule(
            Schedule(name, **options), problem, placed, comm.rank, (heads_q, heads_k), said["head_map"], shape, where
        )
        executor = functools.partial(_core.Executor, comm, made, said["kernel"], said["deterministic"], said["checked"],
                                     device, stream)
        if said["checked"]:
            # A new executor each time: its constructor compares the problems of all ranks, cached or not.
            self.run = executor
        else:
            run = executor()
            self.run = lambda: run

    def check_rows(self) -> None:
        """That this rank's rows were dealt out under the layout that is asked for; once is enough."""
        if self.placed is not None and self.comm is not None:
            _placed.check(self.placed, self.comm.rank, _placed.scope_of(self.comm), call=USE)
            self.placed = None

    def settings(self, sink: Optional[Tensor]) -> _core.Settings:
        said = self.said
        return _core.Settings(said["scale"], said["softcap"], None if sink is None else _arrays.array(sink, name="sink"),
                              said["off_by_one"], said["head_map"])


_CACHED, _CACHED_ON_GPUS = 16, 4  # fewer executors on GPUs, where workspaces take memory from the model
# By name of the group, least recently used first. One cache a group, because its ranks must evict the same executors.
_runs: Dict[str, OrderedDict[Any, _Run]] = {}
_lock = threading.Lock()
ranks.ends.append(lambda comm: _runs.pop(own_name(comm), None))


def clear_cache() -> None:
    """Forgets all plans and executors, and gives back their workspaces (on GPUs to Weft's pool, which keeps them)."""
    with _lock:
        _runs.clear()


def _run_of(
    packing: Tensor, how: str, heads_q: int, heads_k: int, shape: Shape, device: Optional[int], stream: int
) -> Tuple[Any, _Run]:
    if packing.device.type != "cpu":
        raise error(f"the packing lies on {packing.device}", "keep it on the CPU: plans are made there")
    said = _read(how)
    if packing.dtype == torch.int32:  # cu_seqlens
        packing = packing.long()
    key = (packing.numpy().tobytes(), _for_all_layers(how), heads_q, heads_k, shape, device)
    with _lock:
        runs = _runs.setdefault(said["group"], collections.OrderedDict())
        run = runs.get(key)
    # A group may have ended, and another one have its name.
    if run is None or run.comm is not (communicator(said["group"]) if said["group"] else None):
        run = _Run(packing, said, heads_q, heads_k, shape, device, stream)
    with _lock:
        runs[key] = run
        runs.move_to_end(key)
        while len(runs) > (_CACHED if device is None or run.comm is None else _CACHED_ON_GPUS):
            runs.popitem(last=False)
    return key, run


@contextlib.contextmanager
def _using(key: Any, run: _Run) -> Iterator[Any]:
    try:
        # Checked ranks fail together, so their group can be used again.
        with all_or_nobody("" if run.said["checked"] else run.said["group"]):
            yield run.run()
    except BaseException:
        with _lock:
            _runs.get(run.said["group"], {}).pop(key, None)  # its state is undefined after a failure
        raise


def _statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _usable(x: Tensor) -> Tensor:
    """Gradients come as they like, expanded from one number for instance."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _max_logit_asked(how: str) -> bool:
    return '"max_logit": true' in how


# A call copies its plan to the GPU, so torch.compile must not capture it in a CUDA graph.
_TAGS = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


@torch.library.custom_op("weft::attention", mutates_args=(), **_TAGS)
def attention(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], packing: Tensor,
              how: str) -> Tuple[Tensor, Tensor, Tensor]:
    views = [_arrays.array(x, name=name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    stream = _arrays.stream_of(q)
    _options.heads(q.shape[-2], k.shape[-2], _read(how)["head_map"])
    if sink is not None:
        _options.sink(sink.shape, q.shape[-2])
    key, run = _run_of(packing, how, q.shape[-2], k.shape[-2], (views[0].dtype, q.shape[-1], v.shape[-1]),
                       views[0].device, stream)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=_statistics(q.dtype))
    largest = q.new_empty((q.shape[-2] if run.max_logit else 0,), dtype=_statistics(q.dtype))
    with _using(key, run) as it:
        run.check_rows()  # after checked ranks have compared their problems, whose error says more
        it.forward(*views, run.format, run.settings(sink), _arrays.array(out, True), _arrays.array(lse, True),
                   _arrays.array(largest, True) if run.max_logit else None, stream=stream, layer=_layer(how))
    return out, lse, largest


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], packing: Tensor, how: str) -> Tuple[Tensor, ...]:
    return (q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=_statistics(q.dtype)),
            q.new_empty((q.shape[-2] if _max_logit_asked(how) else 0,), dtype=_statistics(q.dtype)))


@torch.library.custom_op("weft::attention_backward", mutates_args=(), **_TAGS)
def attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor,
                       packing: Tensor, how: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    views = [_arrays.array(x, name=name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    stream = _arrays.stream_of(q)
    key, run = _run_of(packing, how, q.shape[-2], k.shape[-2], (views[0].dtype, q.shape[-1], v.shape[-1]),
                       views[0].device, stream)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsink = q.new_empty((0,) if sink is None else sink.shape, dtype=_statistics(q.dtype))
    results = [_arrays.array(x, True) for x in (dq, dk, dv)]
    with _using(key, run) as it:
        it.backward(*views, run.format, run.settings(sink), _arrays.array(out), _arrays.array(lse),
                    _arrays.array(_usable(dout), name="dout"), *results, None if sink is None else _arrays.array(dsink, True),
                    stream=stream, layer=_layer(how))
    # dsink is summed over the ranks already; divided by them, the sum over the group is right.
    return dq, dk, dv, dsink if run.ranks == 1 else dsink / run.ranks


@attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], out: Tensor, lse: Tensor, packing: Tensor, how: str
) -> Tuple[Tensor, ...]:
    return (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
            q.new_empty((0,) if sink is None else sink.shape, dtype=_statistics(q.dtype)))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sink, packing, how = inputs
    out, lse, _ = output
    ctx.save_for_backward(q, k, v, sink, out, lse, packing)
    ctx.how = how


def _backward(ctx: Any, dout: Tensor, dlse: Any, dmax_logit: Any) -> Tuple[Optional[Tensor], ...]:
    q, k, v, sink, out, lse, packing = ctx.saved_tensors
    dq, dk, dv, dsink = torch.ops.weft.attention_backward(dout, q, k, v, sink, out, lse, packing, ctx.how)
    return dq, dk, dv, None if sink is None else dsink.to(sink.dtype), None, None


attention.register_autograd(_backward, setup_context=_setup_context)
