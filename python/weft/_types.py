"""Types that signatures are written with."""

from typing import Sequence, Union

from ._arrays import Array as Array
from ._core import Layout

Numbers = Union[Sequence[int], Array]  # whole numbers: a list, or a one-dimensional integer array
AnyLayout = Union[str, Layout]  # by name, or as it is
