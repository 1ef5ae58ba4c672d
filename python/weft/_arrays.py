"""Arrays of any framework in, arrays of the same framework out; nothing is copied."""

import sys

import numpy as np

from . import _core
from ._core import DType, Error, Format

FORMATS = {"thd": Format.thd, "bshd": Format.bshd, "sbhd": Format.sbhd}

_CPU = 1  # DLPack's number
_NUMPY = {DType.f64: np.float64, DType.f32: np.float32, DType.f16: np.float16}
_torch_dtypes = {}  # of torch to Weft's and back; filled when torch is seen, so that Weft does not need it


_DTYPES = {"f64": DType.f64, "f32": DType.f32, "bf16": DType.bf16, "f16": DType.f16}


def dtype_of(name):
    """The dtype, or an error that lists them."""
    if name not in _DTYPES:
        raise error(f"there is no dtype {name!r}", f"use {', '.join(_DTYPES)}")
    return _DTYPES[name]


def format_of(name):
    """The format, or an error that lists them."""
    if name not in FORMATS:
        raise error(f"there is no format {name!r}", "use thd [t, h, d], bshd [b, s, h, d] or sbhd [s, b, h, d]")
    return FORMATS[name]


def error(problem, remedy):
    """An Error as the library makes them."""
    e = Error(f"{problem}; {remedy}")
    e.problem, e.remedy = problem, remedy
    return e


def refuse_autograd(*tensors):
    """Gradients of torch's own do not pass through calls of the core."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensors[0], torch.Tensor) or not torch.is_grad_enabled():
        return
    if any(getattr(x, "requires_grad", False) for x in tensors):
        raise error("a tensor requires a gradient, and weft.attention is no operation of autograd",
                    "use weft.torch.context_parallel_attention, or detach it and call backward of the result")


def is_torch(x):
    """Whether x is a tensor of torch, which Weft itself does not import."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, getattr(torch, "Tensor", ())):
        return False
    if not _torch_dtypes:
        pairs = ((torch.float64, DType.f64), (torch.float32, DType.f32), (torch.bfloat16, DType.bf16), (torch.float16, DType.f16))
        # At once: another thread finds all of them or none.
        _torch_dtypes.update({**dict(pairs), **{ours: theirs for theirs, ours in pairs}})
    return True


def _is_numpy_bf16(x):
    # Of ml_dtypes: numpy has none of its own, and no DLPack for it. (dtype.name alone costs microseconds.)
    return x.dtype.kind == "V" and x.dtype.name == "bfloat16"


def array(x, writable=False, name="an array"):
    """How the library sees an array."""
    if is_torch(x):
        if not x.is_cpu:
            raise error(f"{name} lies on {x.device}", "this build of Weft has kernels for CPUs: use .cpu() tensors")
        try:
            address = x.data_ptr()
        except RuntimeError as e:
            raise error(f"{name} has no memory of its own: {e}", "give a dense tensor") from None
        # Asking for the parts takes half the time that torch's DLPack does (1.5 and 2.9 us).
        return _core.array_at(address, _torch_dtypes.get(x.dtype), x.element_size(), tuple(x.shape), x.stride(), x)
    if isinstance(x, np.ndarray):
        flags = x.flags
        may_write = writable and flags.writeable
        if _is_numpy_bf16(x):
            return _core.array(x.view(np.uint16), may_write, name, DType.bf16)
        if not flags.aligned:
            raise error(f"{name} is a misaligned numpy array", "copy it: numpy.array(x)")
        return _core.array(x, may_write, name)
    if hasattr(x, "__dlpack_device__"):
        device, number = x.__dlpack_device__()
        if device != _CPU:
            raise error(f"{name} lies on device {number} of DLPack type {int(device)}",
                        "this build of Weft has kernels for CPUs: move it there")
    return _core.array(x, writable, name)


def empty(like, shape, dtype):
    """Memory for a result, to be handed out by give(): (value, how the library sees it)."""
    if is_torch(like):
        theirs = _torch_dtypes[dtype]
        value = like.new_empty(shape) if like.dtype is theirs else like.new_empty(shape, dtype=theirs)
        return value, _core.array_at(value.data_ptr(), dtype, value.element_size(), shape, None, value)
    if isinstance(like, np.ndarray):
        value = np.empty(shape, _NUMPY.get(dtype) or like.dtype)
        return value, array(value, True)
    value = _core.empty(list(shape), dtype)
    return value, _core.array(value, True, "a result")


def give(like, value):
    """The result as an array of the framework that `like` is of: numpy's where that has none of its own."""
    if isinstance(value, np.ndarray) or is_torch(value):
        return value
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(value)
    try:
        return np.from_dlpack(value)
    except (RuntimeError, BufferError):  # bf16, which numpy has not: as it is, an object that speaks DLPack
        return value


def writable_kind(x):
    """x or, if arrays of its framework cannot be written, the same memory as an array of numpy."""
    if isinstance(x, np.ndarray) or is_torch(x):
        return x
    return np.asarray(x) if hasattr(x, "__array_namespace__") else np.from_dlpack(x)


def from_numpy(like, value):
    """An array of numpy as one of the framework that `like` is of, if that has a name."""
    return like.__array_namespace__().asarray(value) if hasattr(like, "__array_namespace__") else value


def empty_rows(like, shape):
    """An array of `like`'s own kind and dtype, zeros, that rows of any elements are copied into."""
    if is_torch(like):
        return like.new_zeros(shape)
    return np.zeros(shape, like.dtype)
