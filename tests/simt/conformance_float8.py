"""The 8-bit formats by their definition, and references and inputs of their conversions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

KINDS = ("e4m3", "e5m2")
LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B}  # finite
NAN = 0x7F


def _values(exponent_bits: int, mantissa_bits: int, has_infinity: bool) -> np.ndarray:
    """The number of each of the 256 elements."""
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for bits in range(128):
        exponent, mantissa = bits >> mantissa_bits, bits % 2**mantissa_bits
        fraction = mantissa / 2**mantissa_bits + (exponent > 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    if has_infinity:
        values[0x7C:] = [np.inf, np.nan, np.nan, np.nan]
    else:
        values[0x7F] = np.nan
    return np.array([*values, *(-value for value in values)], np.float32)


VALUES = {"e4m3": _values(4, 3, False), "e5m2": _values(5, 2, True)}


def decode(elements: np.ndarray, kind: str) -> np.ndarray:
    return VALUES[kind][elements]


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """The nearest elements, ties to even; beyond the largest finite number that one."""
    finite = VALUES[kind][: LARGEST[kind] + 1].astype(np.float64)
    middles = np.append((finite[1:] + finite[:-1]) / 2, np.inf)
    with np.errstate(invalid="ignore"):
        size = np.abs(x.astype(np.float64))
    at = np.searchsorted(middles, np.nan_to_num(size, nan=0.0))
    at += (at < LARGEST[kind]) & (middles[at] == size) & (at % 2 == 1)
    signed = np.minimum(at, LARGEST[kind]) | np.signbit(x) << 7
    return np.where(np.isnan(x), NAN, signed).astype(np.uint8)


def add_products(total: np.ndarray, a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
    """total (M, N) + a (M, K) @ b (N, K).T as csrc/simt/float8_sum.h adds them."""
    terms = a[:, None, :].astype(np.float64) * b[None, :, :]
    terms = np.concatenate([total[:, :, None].astype(np.float64), terms], -1)

    def cut(x: np.ndarray, largest: np.ndarray) -> np.ndarray:
        unit = np.exp2(np.frexp(largest)[1] - 1.0 - (bits - 1))
        return np.where(largest > 0, np.trunc(x / unit) * unit, 0.0)

    largest = np.abs(terms).max(-1, keepdims=True)
    rounded = cut(terms, largest).sum(-1)
    return cut(rounded, np.abs(rounded)).astype(np.float32)


def elements(x: np.ndarray) -> np.ndarray:
    """Every element as a float, rounded to an element again, and the first of each word alone."""
    out = []
    for kind in KINDS:
        values = decode(x.view(np.uint8), kind)
        out += [values.view(np.uint32), encode(values, kind).view(np.uint32), values[::4].view(np.uint32)]
    return np.concatenate(out)


def rounding(x: np.ndarray) -> np.ndarray:
    e4m3, e5m2 = (encode(x.view(np.float32), kind).astype(np.uint32) for kind in KINDS)
    pairs = e4m3[::2] | e4m3[1::2] << 8 | e5m2[::2] << 16 | e5m2[1::2] << 24
    return np.concatenate([pairs, e5m2 << 8 | e4m3])


def inputs(name: str, words: int, rng: np.random.Generator) -> np.ndarray:
    """All elements; or the numbers, what lies in the middle between two, the floats next to these, and others."""
    if name == "float8_elements":
        return rng.permutation(256).astype(np.uint8).view(np.uint32)
    beside = []
    for kind in KINDS:
        finite = np.append(VALUES[kind][: LARGEST[kind] + 1], np.float32(2) * VALUES[kind][LARGEST[kind]])
        middles = (finite[1:] + finite[:-1]) / np.float32(2)
        nexts = [np.nextafter(middles, np.float32(to)) for to in (0, np.inf)]
        beside += [finite, middles, *nexts]
    special = np.array([464, 465, 480, 61440, 61441, 65536, 1e30, np.inf, np.nan, 0, 1e-40], np.float32)
    known = np.concatenate([*beside, special])
    known = np.concatenate([known, -known]).view(np.uint32)
    return rng.permutation(np.concatenate([known, rng.integers(0, 2**32, words - len(known), dtype=np.uint32)]))


references: dict[str, Callable[[np.ndarray], np.ndarray]] = {"float8_elements": elements, "float8_rounding": rounding}
