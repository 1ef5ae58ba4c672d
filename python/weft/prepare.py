"""Between a data loader and attention: packs, trees, micro-sequences, the K/V buffer, decoding on a cache (docs/prepare.md)."""

from typing import Any, Dict, Optional, Tuple

from . import _arrays, _core
from ._core import Communicator, DType, Mask, MicroSequences, Packs, Window, pack_documents
from .trees import Tree, TreePacks, pack_trees
from .types import Array, Numbers

__all__ = ["KvBuffer", "KvCache", "MicroSequences", "Packs", "Tree", "TreePacks", "Window", "pack_documents", "pack_trees"]


def _maybe(x: Any, name: str, stream: int) -> Optional[_core.Array]:
    return None if x is None else _arrays.array(x, name=name, stream=stream)


class KvBuffer:
    """Keys and values of one attention layer while a pack goes through it in micro-sequences.

    begin(micros, mask); forward(m, ...) for m = 0, 1, ...; backward(m, ...) in reverse. k, v and their gradients are
    those of this rank's window; the buffer gathers them from all ranks into their rows and returns gradients summed over
    all ranks and micro-sequences. device: "cuda", "cuda:1" or the like if the arrays lie on a GPU; stream: as for
    weft.attention. checked: ranks compare what they do and messages carry checksums; layer: the number of the layer, one
    of the things that they compare (docs/schedules.md).

        >>> import numpy as np, weft
        >>> packing = weft.Packing([0, 5, 12])
        >>> micros = weft.prepare.MicroSequences(packing, ranks=1, micros=3)
        >>> x = np.ones((12, 2, 4), np.float32)
        >>> def rank(comm):
        ...     buffer = weft.prepare.KvBuffer(comm, rows=12, heads=2, dim=4)
        ...     buffer.begin(micros, weft.Mask(causal=True))
        ...     parts = [micros.rows(comm.rank, m) for m in range(3)]
        ...     return [buffer.forward(m, x[b:e], x[b:e], x[b:e])[0].shape for m, (b, e) in enumerate(parts)]
        >>> weft.spawn(1, rank)[0]
        [(4, 2, 4), (4, 2, 4), (4, 2, 4)]
    """

    def __init__(self, comm: Communicator, *, rows: int, heads: int, dim: int, dim_v: Optional[int] = None,
                 dtype: str = "f32", drop: bool = False, kernel: Optional[str] = None, device: Any = None,
                 stream: Any = None, checked: bool = False, layer: Optional[int] = None) -> None:
        self._heads, self._dims = heads, (dim, dim if dim_v is None else dim_v)
        self._device, self._stream = _arrays.gpu_number(device), stream
        self._core = _core.KvBuffer(comm, rows, heads, *self._dims, _arrays.dtype_of(dtype), drop, kernel or "", self._device,
                                    _arrays.stream_of(None, stream), checked, _arrays.layer_number(layer))
        self._coming: Dict[int, Tuple[Array, Array]] = {}  # keys in flight, whose memory must stay alive

    def begin(self, micros: MicroSequences, mask: Optional[Mask] = None) -> None:
        """Begins a new sequence; the buffer's contents are discarded."""
        self._core.begin(micros, mask or Mask(causal=True))

    def start_gather(self, micro: int, k: Array, v: Array) -> None:
        """Starts to bring the next micro-sequence's keys; k and v must not change until forward(micro) returns."""
        stream = _arrays.stream_of(k, self._stream)
        self._core.start_gather(micro, _maybe(k, "k", stream), _maybe(v, "v", stream), stream)
        self._coming[micro] = k, v

    def forward(self, micro: int, q: Array, k: Optional[Array] = None, v: Optional[Array] = None, *,
                scale: Optional[float] = None, softcap: float = 0.0, sink: Optional[Array] = None) -> Tuple[Array, Array]:
        """(out, lse) of the window's queries; k and v are left out after start_gather."""
        stream = _arrays.stream_of(q, self._stream)
        view = _arrays.array(q, name="q", stream=stream)
        rows = view.shape[:-1]
        out, out_view = _arrays.empty(q, [*rows, self._dims[1]], view.dtype, view.device, stream)
        lse, lse_view = _arrays.empty(q, rows, DType.f32, view.device, stream)
        self._core.forward(micro, view, _maybe(k, "k", stream), _maybe(v, "v", stream),
                           _core.Settings(scale, softcap, _maybe(sink, "sink", stream)), out_view, lse_view, stream)
        _arrays.finish(q, view.device, stream)
        self._coming.pop(micro, None)
        return _arrays.give(q, out), _arrays.give(q, lse)

    def backward(self, micro: int, q: Array, out: Array, lse: Array, dout: Array, *, scale: Optional[float] = None,
                 softcap: float = 0.0, sink: Optional[Array] = None) -> Tuple[Array, Array, Array, Optional[Array]]:
        """(dq, dk, dv, dsink) of the window's rows: dk and dv from all ranks and all micro-sequences."""
        stream = _arrays.stream_of(q, self._stream)
        view, logits = _arrays.array(q, name="q", stream=stream), _maybe(sink, "sink", stream)
        place = view.device, stream
        dq = _arrays.empty(q, view.shape, view.dtype, *place)
        dk, dv = (_arrays.empty(q, [view.shape[0], self._heads, dim], view.dtype, *place) for dim in self._dims)
        dsink = (None, None) if logits is None else _arrays.empty(q, logits.shape, DType.f32, *place)
        self._core.backward(micro, view, *(_maybe(x, name, stream) for x, name in ((out, "out"), (lse, "lse"), (dout, "dout"))),
                            _core.Settings(scale, softcap, logits), dq[1], dk[1], dv[1], dsink[1], stream)
        _arrays.finish(q, *place)
        given = [_arrays.give(q, x[0]) for x in (dq, dk, dv)]
        return given[0], given[1], given[2], None if sink is None else _arrays.give(q, dsink[0])

    def missing(self, micro: int) -> Optional[int]:
        """With drop: a micro-sequence whose keys backward(micro) needs once more; None: go on."""
        return self._core.missing(micro)

    def gather_again(self, micro: int, k: Array, v: Array) -> None:
        """Brings the missing rows of that micro-sequence."""
        stream = _arrays.stream_of(k, self._stream)
        self._core.gather_again(micro, _maybe(k, "k", stream), _maybe(v, "v", stream), stream)

    @property
    def bytes_held(self) -> int:
        """All memory of the buffer."""
        return self._core.bytes_held


class KvCache:
    """K and V of earlier tokens, in rows of your own arrays set aside for each sequence: decoding.

        >>> import numpy as np, weft
        >>> k, v = np.zeros((2, 32, 1, 8), np.float32)
        >>> cache = weft.prepare.KvCache(k, v, offsets=[0, 16, 32])
        >>> new = np.ones((5, 1, 8), np.float32)
        >>> cache.append([3, 2], new, new)
        >>> cache.attend([3, 2], np.ones((5, 1, 8), np.float32)).shape, cache.used(0), cache.room(1)
        ((5, 1, 8), 3, 14)
    """

    def __init__(self, k: Array, v: Array, offsets: Numbers, used: Optional[Numbers] = None) -> None:
        values = _arrays.array(v, True, "v")
        self._width = values.shape[-1]
        self._core = _core.KvCache(_arrays.array(k, True, "k"), values, offsets, used)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self._core.sequences

    def used(self, sequence: int) -> int:
        """Rows that are filled."""
        return self._core.used(sequence)

    def room(self, sequence: int) -> int:
        """Rows that are left."""
        return self._core.room(sequence)

    def keep(self, sequence: int, used: int) -> None:
        """Forgets all rows but the first `used`."""
        self._core.keep(sequence, used)

    def append(self, counts: Numbers, k: Array, v: Array) -> None:
        """Appends counts[i] new rows of sequence i, packed one after another."""
        stream = _arrays.stream_of(k)
        self._core.append(counts, _maybe(k, "k", stream), _maybe(v, "v", stream), stream)

    def attend(self, counts: Numbers, q: Array, *, mask: Optional[Mask] = None, scale: Optional[float] = None,
               softcap: float = 0.0, sink: Optional[Array] = None, kernel: Optional[str] = None) -> Array:
        """Output of counts[i] queries of sequence i: the last so many positions of what it holds."""
        stream = _arrays.stream_of(q)
        view = _arrays.array(q, name="q", stream=stream)
        out, out_view = _arrays.empty(q, [*view.shape[:-1], self._width], view.dtype, view.device, stream)
        settings = _core.Settings(scale, softcap, _maybe(sink, "sink", stream))
        self._core.attend(counts, view, mask or Mask(causal=True), settings, out_view, None, kernel or "", stream)
        _arrays.finish(q, view.device, stream)
        return _arrays.give(q, out)
