"""Arrays of any framework in, arrays of the same framework out; nothing is copied."""

import itertools
import re
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, TypeVar

import numpy as np

from . import _core
from ._core import DType, Error, Format

Array = Any  # of numpy, torch, JAX, or anything else that speaks DLPack
T = TypeVar("T")

_CPU, _PINNED, _CUDA, _MANAGED = 1, 3, 2, 13  # DLPack's numbers
_NUMPY = {DType.f64: np.float64, DType.f32: np.float32, DType.f16: np.float16}
_torch_dtypes: Dict[Any, Any] = {}  # torch's dtypes to Weft's and back; filled when torch is imported, which Weft does not do


def dtype_of(name: str, known: Sequence[str] = ("f64", "f32", "bf16", "f16")) -> DType:
    """The dtype, or an error that lists those that are known here."""
    if name not in known:
        raise error(f"there is no dtype {name!r} here", f"use {', '.join(known)}")
    return DType[name]


def layer_number(layer: Any) -> int:
    """A number of a layer as the library takes it: -1 if there is none."""
    if layer is None:
        return -1
    if isinstance(layer, bool) or not hasattr(layer, "__index__") or not 0 <= layer.__index__() < 2**62:
        raise error(f"layer is {layer!r}", "give the number of the layer, from 0 on, the same on every rank")
    return layer.__index__()


def format_of(name: str) -> Format:
    """The format, or an error that lists them."""
    if name not in ("thd", "bshd", "sbhd"):
        raise error(f"there is no format {name!r}", "use thd [t, h, d], bshd [b, s, h, d] or sbhd [s, b, h, d]")
    return Format[name]


def error(problem: str, remedy: str) -> Error:
    """An Error as the library makes them."""
    e = Error(f"{problem}; {remedy}")
    e.problem, e.remedy = problem, remedy
    return e


def listed(values: Iterable[T], name: str) -> List[T]:
    """An iterable as a list; one with more than a million entries is refused, since it may have no end."""
    most = 1 << 20
    out = list(itertools.islice(values, most + 1))
    if len(out) > most:
        raise error(f"{name} has more than {most} entries", "give a list")
    return out


def need_cuda(name: str, where: object) -> None:
    """An error if this build knows no GPUs."""
    if not _core.has_cuda:
        raise error(f"{name} lies on {where}, and this build of Weft has kernels for CPUs alone",
                    "install one with CUDA (pip install . -Ccmake.define.WEFT_CUDA=ON, where nvcc is), or move it to the CPU")


def gpu_number(device: Any) -> Optional[int]:
    """Of "cuda", "cuda:1", a torch.device or a number; None for the CPU."""
    if device is None or str(device) == "cpu":
        return None
    said = re.fullmatch(r"(?:cuda:?)?(\d*)", str(device))
    if said is None:
        raise error(f"there is no device {device!r}", "give 'cpu', 'cuda', 'cuda:1' or the like, or the number of a GPU")
    number = int(said[1]) if said[1] else _current_gpu()
    need_cuda("an array", f"GPU {number}")
    return number


def _current_gpu() -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0


def stream_of(x: Any, stream: Any = None) -> int:
    """The stream that work on x is put into: torch's current one; of other arrays the default one, or that of the caller."""
    if is_torch(x):
        if stream is not None:
            raise error("stream is given with a tensor of torch", "its current stream is used: with torch.cuda.stream(...)")
        return _raw_stream(x.device.index) if x.is_cuda else 0
    for attribute in ("cuda_stream", "ptr"):  # of torch and of CuPy
        stream = getattr(stream, attribute, stream)
    if not isinstance(stream, (int, type(None))):
        raise error(f"stream is of type {type(stream).__name__}", "give a cudaStream_t as a number, or a stream of torch or CuPy")
    return stream or 0


def _raw_stream(device: int) -> int:
    torch = sys.modules["torch"]
    try:
        return torch._C._cuda_getCurrentRawStream(device)  # a tenth of the time that a Stream object takes
    except AttributeError:
        return torch.cuda.current_stream(device).cuda_stream


def _is_cupy(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "cupy"


def finish(like: Array, device: Optional[int], stream: int) -> None:
    """Waits for results of frameworks that do not know the stream they are computed in."""
    if device is not None and not is_torch(like) and not _is_cupy(like):
        _core.synchronize(device, stream)


def refuse_autograd(*tensors: Array) -> None:
    """weft.attention is no autograd operation: refuses tensors whose gradient would be lost."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensors[0], torch.Tensor) or not torch.is_grad_enabled():
        return
    if any(getattr(x, "requires_grad", False) for x in tensors):
        raise error("a tensor requires a gradient, and weft.attention is no operation of autograd",
                    "use weft.torch.context_parallel_attention, or detach it and call backward of the result")


def is_torch(x: Any) -> bool:
    """Whether x is a tensor of torch, which Weft itself does not import."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, getattr(torch, "Tensor", ())):
        return False
    if not _torch_dtypes:
        pairs = ((torch.float64, DType.f64), (torch.float32, DType.f32), (torch.bfloat16, DType.bf16), (torch.float16, DType.f16))
        # In one call, so that another thread finds all of them or none.
        _torch_dtypes.update({**dict(pairs), **{ours: theirs for theirs, ours in pairs}})
    return True


def _is_numpy_bf16(x: Any) -> bool:
    # ml_dtypes has bf16 for numpy, without DLPack. The kind is compared first, because dtype.name takes microseconds.
    return x.dtype.kind == "V" and x.dtype.name == "bfloat16"


def refuse_strange(x: Any, name: str) -> None:
    """Refuses arrays whose memory does not hold what they mean: nested, quantized, masked, traced."""
    if is_torch(x):
        if x.is_nested:
            raise error(f"{name} is a nested tensor",
                        "give its sequences packed: x.values() of a jagged one, with cu_seqlens_q=x.offsets()")
        if x.is_quantized:
            raise error(f"{name} is quantized ({x.dtype})", "give x.dequantize()")
    elif isinstance(x, np.ma.MaskedArray):
        raise error(f"{name} is a masked array of numpy, whose mask Weft does not know", "give x.filled(0), and say with "
                    "seqused_q, a packing or slices which elements count")
    elif _is_tracer(x):
        raise error(f"{name} is a {type(x).__name__} of JAX, and Weft has no operator of JAX: inside jit, grad or vmap there are "
                    "no numbers yet", "call it outside, on arrays (gradients: backward of the result), or from inside by "
                    "jax.pure_callback")


def _is_tracer(x: Any) -> bool:
    jax = sys.modules.get("jax")
    core = getattr(jax, "core", None)
    return core is not None and isinstance(x, getattr(core, "Tracer", ()))


def _written_out(x: Any, writable: bool, name: str, what: str, copy: Callable[[], Array]) -> Array:
    if writable:
        raise error(f"{name} has torch's {what}, and is to be written", "give a tensor of its own memory: x.clone()")
    return copy()


def _no_memory(x: Any, name: str) -> Error:
    """The error for a tensor of torch without memory, with the way out for its kind."""
    torch, kind = sys.modules["torch"], type(x).__name__
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return error(f"{name} has no memory of its own: it is inside a transform of torch.func (vmap, grad, jvp)",
                     "call Weft outside of it, or use weft.torch.context_parallel_attention with torch.autograd")
    if kind == "FakeTensor":
        return error(f"{name} has no memory of its own: it is a FakeTensor, a shape without numbers",
                     "inside torch.compile or torch.export use weft.torch.context_parallel_attention, which they know")
    if kind == "DTensor":
        return error(
            f"{name} has no memory of its own: it is a DTensor, spread over ranks", "give this rank's part: x.to_local()"
        )
    return error(f"{name} has no memory of its own ({kind}, {x.layout})", "give a dense tensor: x.to_dense()")


def array(x: Any, writable: bool = False, name: str = "an array", stream: int = 0) -> _core.Array:
    """The memory of an array as the library takes it. Arrays of others than torch are synchronized with the stream by DLPack."""
    if is_torch(x):
        refuse_strange(x, name)
        device = None
        if not x.is_cpu:
            if not x.is_cuda:
                raise error(f"{name} lies on {x.device}", "Weft has kernels for CPUs and for GPUs with CUDA: move it there")
            need_cuda(name, x.device)
            device = x.device.index
        dtype = _torch_dtypes.get(x.dtype)
        if x.is_neg() or (dtype is None and x.is_conj()):
            x = _written_out(x, writable, name, "flag for negated or conjugated elements", lambda: x.resolve_neg().resolve_conj())
        try:
            address = x.data_ptr()
        except RuntimeError as e:
            raise _no_memory(x, name) from e
        if address == x.storage_offset() * x.element_size() and x.numel() > 0:  # the storage has no address
            if not x._is_zerotensor():
                raise _no_memory(x, name)
            x = _written_out(x, writable, name, "flag for zeros instead of elements", x.clone)
            address = x.data_ptr()
        # Reading address, shape and strides takes half the time that torch's DLPack does (1.5 and 2.9 us).
        return _core.array_at(address, dtype, x.element_size(), tuple(x.shape), x.stride(), x, device)
    refuse_strange(x, name)
    if isinstance(x, np.ndarray):
        flags = x.flags
        may_write = writable and flags.writeable
        if _is_numpy_bf16(x):
            return _core.array(x.view(np.uint16), may_write, name, DType.bf16)
        if not flags.aligned:
            raise error(f"{name} is a misaligned numpy array", "copy it: numpy.array(x)")
        return _core.array(x, may_write, name)
    if hasattr(x, "__dlpack_device__"):
        kind, number = x.__dlpack_device__()
        if kind in (_CUDA, _MANAGED):
            need_cuda(name, f"GPU {number}")
            try:
                capsule = x.__dlpack__(stream=stream or 1)  # 1: the default stream
            except Exception as e:
                raise error(f"{name} lies on GPU {number} and cannot be taken over: {e}", "copy it, or move it to the CPU") from e
            return _core.array(capsule, writable, name)
        if kind not in (_CPU, _PINNED):
            raise error(f"{name} lies on device {number} of DLPack type {int(kind)}",
                        "Weft has kernels for CPUs and for GPUs with CUDA: move it there")
    return _core.array(x, writable, name)


def empty(
    like: Array, shape: Sequence[int], dtype: DType, device: Optional[int] = None, stream: int = 0
) -> Tuple[Array, _core.Array]:
    """Memory for a result, to be handed out by give(): (value, how the library sees it). device: the GPU that `like` is on."""
    if is_torch(like):
        theirs = _torch_dtypes[dtype]
        value = like.new_empty(shape) if like.dtype is theirs else like.new_empty(shape, dtype=theirs)
        where = value.device.index if value.is_cuda else None
        return value, _core.array_at(value.data_ptr(), dtype, value.element_size(), shape, None, value, where)
    if isinstance(like, np.ndarray):
        value = np.empty(shape, _NUMPY.get(dtype) or like.dtype)
        return value, array(value, True)
    if _is_cupy(like):
        value = _cupy("empty", like, shape, _NUMPY.get(dtype) or like.dtype)
        return value, array(value, True, stream=stream)
    value = _core.empty(list(shape), dtype, device)
    return value, _core.array(value, True, "a result")


def _cupy(function: str, like: Array, shape: Sequence[int], dtype: Any) -> Array:
    cupy = sys.modules["cupy"]
    with like.device:
        return getattr(cupy, function)(tuple(shape), dtype)


def give(like: Array, value: Any) -> Array:
    """The result as an array of the framework that `like` is of: numpy's where that has none of its own."""
    if isinstance(value, np.ndarray) or is_torch(value) or _is_cupy(value):
        return value
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(value)
    try:
        return np.from_dlpack(value)
    except (RuntimeError, BufferError):  # numpy has no bf16: the caller gets an object that speaks DLPack
        return value


def writable_kind(x: Any) -> Array:
    """x or, if arrays of its framework cannot be written, the same memory as an array of numpy."""
    refuse_strange(x, "an array")
    if isinstance(x, np.ndarray) or is_torch(x) or _is_cupy(x):
        return x
    if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in (_CUDA, _MANAGED):
        raise error(f"rows of a {type(x).__name__} on a GPU", "give arrays of torch or CuPy, which can be written")
    return np.asarray(x) if hasattr(x, "__array_namespace__") else np.from_dlpack(x)


def from_numpy(like: Array, value: Any) -> Array:
    """An array of numpy as one of the framework that `like` is of, if that has a name."""
    return like.__array_namespace__().asarray(value) if hasattr(like, "__array_namespace__") else value


def empty_rows(like: Array, shape: Sequence[int]) -> Array:
    """An array of `like`'s own kind and dtype, zeros, that rows of any elements are copied into."""
    if is_torch(like):
        return like.new_zeros(shape)
    return _cupy("zeros", like, shape, like.dtype) if _is_cupy(like) else np.zeros(shape, like.dtype)
