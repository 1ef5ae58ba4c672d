"""Masks and layouts said once more, in the plainest way: what the command's answers are compared with."""

import dataclasses
import math

INFINITY = math.inf


@dataclasses.dataclass
class Stream:
    lengths: list
    padded: list
    tokens: int = 0

    def __post_init__(self):
        self.offsets = [sum(self.padded[:i]) for i in range(len(self.padded) + 1)]
        self.tokens = max(self.tokens, self.offsets[-1])

    def place(self, token):
        """(sequence, position) of a real token, or None."""
        for i, length in enumerate(self.lengths):
            if self.offsets[i] <= token < self.offsets[i] + length:
                return i, token - self.offsets[i]
        return None


def stream(lengths, multiple=1, tokens=0):
    return Stream(lengths, [-(-n // multiple) * multiple for n in lengths], tokens)


def visible(q, k, i, j, causal=False, bottom_right=False, left=-1, right=-1, chunk=None):
    """Does query token i see key token j?"""
    a, b = q.place(i), k.place(j)
    if a is None or b is None or a[0] != b[0]:
        return False
    diag = k.lengths[a[0]] - q.lengths[a[0]] if bottom_right else 0
    offset = b[1] - a[1] - diag
    if causal and offset > 0:
        return False
    if (left >= 0 and offset < -left) or (right >= 0 and offset > right):
        return False
    return chunk is None or b[1] // chunk == (a[1] + diag) // chunk


def owner(layout, s, ranks, token):
    """The rank that holds a token, or None."""
    total = s.offsets[-1]
    if token >= total:
        return None
    if layout == "contiguous":
        return token // -(-total // ranks)
    if layout == "striped":
        return token % ranks
    if layout == "zigzag":
        piece = token // -(-total // (2 * ranks))
    elif layout == "dual_chunk":
        i = max(n for n in range(len(s.padded)) if s.offsets[n] <= token)
        piece = (token - s.offsets[i]) // (s.padded[i] // (2 * ranks))
    return piece if piece < ranks else 2 * ranks - 1 - piece


class Mt19937_64:
    """The engine of the C++ standard, from its definition."""

    def __init__(self, seed):
        self.state = [seed]
        for i in range(1, 312):
            last = self.state[-1]
            self.state.append((6364136223846793005 * (last ^ last >> 62) + i) % 2**64)
        self.at = 312

    def __call__(self):
        if self.at == 312:
            for i in range(312):
                x = (self.state[i] & ~0x7FFFFFFF) | (self.state[(i + 1) % 312] & 0x7FFFFFFF)
                twist = 0xB5026F5AA96619E9 if x & 1 else 0
                self.state[i] = self.state[(i + 156) % 312] ^ x >> 1 ^ twist
            self.at = 0
        x = self.state[self.at]
        self.at += 1
        x ^= x >> 29 & 0x5555555555555555
        x ^= x << 17 & 0x71D67FFFEDA60000
        x ^= x << 37 & 0xFFF7EEE000000000
        return (x ^ x >> 43) % 2**64


def lognormal(seed, count, median, sigma=1.0, low=1, high=2**31 - 1):
    engine = Mt19937_64(seed)
    lengths = []
    for _ in range(count):
        u, v = (((engine() >> 11) + 0.5) * 2.0**-53 for _ in range(2))
        normal = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
        lengths.append(math.floor(min(max(median * math.exp(sigma * normal), low), high) + 0.5))
    return lengths
