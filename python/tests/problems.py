"""Random questions, as hypothesis draws them."""

import dataclasses
import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import dense
from kinds import KINDS


def examples(count):
    return settings(max_examples=count * int(os.environ.get("WEFT_RANDOM", 1)))


@dataclasses.dataclass
class Side:
    offsets: list
    lengths: list
    tokens: int

    @property
    def parts(self):
        return self.offsets, self.lengths, self.tokens


@dataclasses.dataclass
class Question:
    q: Side
    k: Side
    arrays: dict    # what attention is given to say so
    mask: dict
    heads: tuple
    dims: tuple
    model: dict     # scale, softcap, head_map
    sink: object    # None, "off_by_one" or "learnable"
    format: str
    kind: object
    seed: int

    def see(self):
        return dense.visible(self.q.parts, self.k.parts, **self.mask)

    def shape(self, side, heads, dim):
        if self.format == "thd":
            return side.tokens, heads, dim
        batch = len(side.lengths)
        length = side.tokens // batch
        return (batch, length, heads, dim) if self.format == "bshd" else (length, batch, heads, dim)

    def rows(self, x):
        """[tokens, ...] of an array in the question's format."""
        if self.format == "thd":
            return x
        x = x if self.format == "bshd" else np.swapaxes(x, 0, 1)
        return x.reshape(-1, *x.shape[2:])

    def tensors(self, padding=np.nan):
        """q, k, v, dout of this kind, and sink logits or None; padding is filled."""
        rng = np.random.default_rng(self.seed)
        made = []
        for side, heads, dim in ((self.q, self.heads[0], self.dims[0]), (self.k, self.heads[1], self.dims[0]),
                                 (self.k, self.heads[1], self.dims[1]), (self.q, self.heads[0], self.dims[1])):
            x = rng.standard_normal((side.tokens, heads, dim))
            x[dense.places(*side.parts)[0] < 0] = padding
            if self.format != "thd":
                batch = len(side.lengths)
                x = x.reshape(batch, -1, heads, dim)
                x = x if self.format == "bshd" else np.ascontiguousarray(np.swapaxes(x, 0, 1))
            made.append(self.kind.make(x))
        sink = rng.standard_normal(self.heads[0]) if self.sink == "learnable" else None
        return made, sink


def _side(draw, lengths, tokens_after):
    pads = [draw(st.integers(0, 3)) if draw(st.booleans()) else 0 for _ in lengths]
    offsets = [0]
    for length, pad in zip(lengths, pads):
        offsets.append(offsets[-1] + length + pad)
    return Side(offsets, lengths, offsets[-1] + tokens_after)


def _said(draw, side, letter):
    """A side in one of the ways that the interface has."""
    cu = [0, *np.cumsum(side.lengths).tolist()]
    as_array = draw(st.sampled_from([list, lambda x: np.array(x, np.int32), lambda x: np.array(x, np.int64)]))
    if side.offsets == cu and draw(st.booleans()):
        return {f"cu_seqlens_{letter}": as_array(cu)}
    if draw(st.booleans()):
        return {f"cu_seqlens_{letter}": as_array(cu), f"cu_seqlens_{letter}_padded": as_array(side.offsets)}
    name = f"cu_seqlens_{letter}" if draw(st.booleans()) else f"cu_seqlens_{letter}_padded"
    return {name: as_array(side.offsets), f"seqused_{letter}": as_array(side.lengths)}


lengths = st.one_of(st.sampled_from([0, 1, 1, 2, 3]), st.integers(4, 40))

masks = st.fixed_dictionaries({}, optional=dict(
    causal=st.booleans(), bottom_right=st.booleans(), chunk_size=st.integers(1, 9),
    window=st.tuples(st.sampled_from([-1, 0, 1, 3, 20]), st.sampled_from([-1, 0, 1, 3, 20]))))


@st.composite
def questions(draw, kinds=KINDS, formats=("thd", "thd", "thd", "bshd", "sbhd")):
    format = draw(st.sampled_from(formats))
    if format == "thd":
        n = draw(st.integers(0, 4))
        own = [draw(lengths) for _ in range(n)]
        q = _side(draw, own, draw(st.sampled_from([0, 0, 2])))
        arrays = _said(draw, q, "q")
        if draw(st.booleans()):
            k = q
        else:
            k = _side(draw, [draw(lengths) for _ in range(n)], draw(st.sampled_from([0, 0, 2])))
            arrays.update(_said(draw, k, "k"))
    else:
        batch, arrays, sides = draw(st.integers(1, 3)), {}, []
        for letter in "qk":
            length = draw(st.integers(1, 12))
            used = [length] * batch
            if draw(st.booleans()):
                used = [draw(st.integers(0, length)) for _ in range(batch)]
                arrays[f"seqused_{letter}"] = used
            sides.append(Side([length * i for i in range(batch + 1)], used, length * batch))
        q, k = sides
    heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2), (3, 3)]))
    head_map = draw(st.one_of(st.none(), st.just([draw(st.integers(0, heads[1] - 1)) for _ in range(heads[0])])))
    model = dict(scale=draw(st.sampled_from([None, None, 0.3])), softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
                 head_map=head_map)
    dims = draw(st.sampled_from([(8, 8), (16, 16), (1, 1), (5, 3), (64, 64), (24, 40), (128, 64)]))
    return Question(q, k, arrays, draw(masks), heads, dims, model, draw(st.sampled_from([None, None, "off_by_one", "learnable"])),
                    format, draw(st.sampled_from(kinds)), draw(st.integers(0, 2**31)))
