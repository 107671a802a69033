"""Which row comes when: a pure function of (seed, position), at any position, without an array.

Epoch order is a keyed permutation: a Feistel network over the next even power of two (a bijection
whatever its round function), walked along its cycle until it lands below n, which is again a
bijection ("Ciphers with Arbitrary Finite Domains", Black and Rogaway, CT-RSA 2002). Every epoch
has a new key.

A mixture interleaves its sources by exact counting. With two sources of weights a and b, the first
n rows hold floor((n*a + offset) / (a+b)) rows of the first: a count that grows by 0 or 1 per row,
so that row n's source and its number within that source are closed forms. More sources form a
binary tree of such splits. A source is never more rows off its share than the tree is deep.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

ROUNDS = 6
MAX_WEIGHT = 1 << 20  # n * weight stays below 2^63 for n up to 8.7e12 rows
_U64 = np.uint64
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A 64-bit hash of a 64-bit integer (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key_of(*parts: int) -> int:
    """One 64-bit key from several integers; their order matters."""
    key = 0
    for part in parts:
        key = mix(key ^ mix(part & _MASK))
    return key


def _mix_array(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> _U64(27))) * _U64(0x94D049BB133111EB)
    return value ^ (value >> _U64(31))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """The image of each index in [0, n) under the permutation of [0, n) that `key` names. int64."""
    index = np.asarray(index)
    if n <= 1:
        return np.zeros(index.shape, np.int64)
    half = ((n - 1).bit_length() + 1) // 2
    keys = [_U64(key_of(key, number)) for number in range(ROUNDS)]
    value = _feistel(index.astype(_U64), half, keys)
    outside = np.flatnonzero(value >= n)
    while outside.size:  # fewer than 4 in 4: the domain is smaller than 4n
        value[outside] = _feistel(value[outside], half, keys)
        outside = outside[value[outside] >= n]
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    mask, shift = _U64((1 << half) - 1), _U64(half)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right + key) & mask)
    return (left << shift) | right


class Order:
    """Rows of one source, epoch after epoch: position i -> row number in [0, rows)."""

    def __init__(self, rows: int, seed: int, stream: int = 0, shuffle: bool = True):
        self.rows, self.seed, self.stream, self.shuffle = rows, seed, stream, shuffle

    def __call__(self, position: np.ndarray) -> np.ndarray:
        """int64 positions from 0 on, of any size, to row numbers."""
        position = np.asarray(position, np.int64)
        epochs, inside = np.divmod(position, self.rows)
        if not self.shuffle:
            return inside
        out = np.empty_like(inside)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = permute(inside[here], self.rows, key_of(self.seed, self.stream, epoch))
        return out


class Mixture:
    """Position i -> (source, number within the source). Shares are exact at every prefix."""

    def __init__(self, weights: list[float], seed: int):
        self.weights = whole_weights(weights)
        self.seed = seed

    def __call__(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        position = np.asarray(position, np.int64)
        source = np.zeros(position.shape, np.int64)
        number = position.copy()
        self._split(np.arange(position.size), 0, len(self.weights), source, number)
        return source, number

    def _split(
        self, at: np.ndarray, first: int, last: int, source: np.ndarray, number: np.ndarray
    ) -> None:
        """Give the rows `at`, numbered among sources [first, last), to one half or the other."""
        if last - first == 1 or not at.size:
            source[at] = first
            return
        middle = (first + last) // 2
        left, whole = sum(self.weights[first:middle]), sum(self.weights[first:last])
        offset = key_of(self.seed, 0x6D6978, first, last) % whole
        n = number[at]
        before = (n * left + offset) // whole
        goes_left = (n + 1) * left + offset >= (before + 1) * whole
        number[at] = np.where(goes_left, before, n - before)
        self._split(at[goes_left], first, middle, source, number)
        self._split(at[~goes_left], middle, last, source, number)


def whole_weights(weights: list[float]) -> list[int]:
    """Weights as whole numbers in the same ratio: exactly where their decimal fractions allow it
    with a sum of at most MAX_WEIGHT, else to within one part in a million, each at least 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) <= MAX_WEIGHT:
        return whole
    total = sum(exact)
    return [max(1, round(weight / total * MAX_WEIGHT)) for weight in exact]
