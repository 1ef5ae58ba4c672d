"""Types that signatures are written with."""

from typing import Any, Sequence, Union

from ._core import Layout

Array = Any  # of numpy, torch, JAX, or anything else that speaks DLPack
Numbers = Union[Sequence[int], Array]  # whole numbers: a list, or a one-dimensional integer array
AnyLayout = Union[str, Layout]  # by name, or as it is
