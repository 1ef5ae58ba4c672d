"""Kinds of arrays: how tests make them, read them and find their memory."""

import numpy as np


class Kind:
    def __init__(self, name, dtype, make, read, pointer):
        self.name, self.dtype = name, dtype  # dtype by Weft's name
        self.make = make        # of an array of f64
        self.read = read        # as one
        self.pointer = pointer

    def __repr__(self):
        return self.name


class DlpackOnly:
    """An array of a framework that nobody has heard of."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def _numpy(name, dtype, numpy_dtype):
    return Kind(name, dtype, lambda x: np.asarray(x).astype(numpy_dtype), lambda x: np.asarray(x).astype(np.float64),
                lambda x: x.ctypes.data)


KINDS = [_numpy("numpy-f32", "f32", np.float32), _numpy("numpy-f16", "f16", np.float16), _numpy("numpy-f64", "f64", np.float64)]

try:
    import ml_dtypes

    KINDS.append(_numpy("ml_dtypes-bf16", "bf16", ml_dtypes.bfloat16))
except ImportError:
    pass

try:
    import torch

    for short, theirs in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16), ("f64", torch.float64)):
        KINDS.append(Kind(f"torch-{short}", short, lambda x, t=theirs: torch.from_numpy(np.ascontiguousarray(x)).to(t),
                          lambda x: x.detach().double().numpy(), lambda x: x.data_ptr()))
except ImportError:
    torch = None

try:
    import jax.numpy as jnp

    for short, theirs in (("f32", jnp.float32), ("bf16", jnp.bfloat16), ("f16", jnp.float16)):
        KINDS.append(Kind(f"jax-{short}", short, lambda x, t=theirs: jnp.asarray(np.asarray(x), t),
                          lambda x: np.asarray(x).astype(np.float64), lambda x: x.unsafe_buffer_pointer()))
except ImportError:
    jnp = None

NAMES = {kind.name: kind for kind in KINDS}
