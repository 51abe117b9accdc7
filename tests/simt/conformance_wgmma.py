"""References and inputs of the cases in conformance_wgmma.cu. Inputs are integers, whose sums are exact."""

from __future__ import annotations

from collections.abc import Callable

import conformance_float8 as float8
import numpy as np

NAMES = (
    "wgmma_f16_8_k128_k128",
    "wgmma_f16_24_k64_k64",
    "wgmma_bf16_64_k32_k32",
    "wgmma_bf16_256_k16_k16",
    "wgmma_f16_128_m128_m128",
    "wgmma_bf16_32_m64_m64",
    "wgmma_f16_48_m32_m32",
    "wgmma_f16_72_m16_m16",
    "wgmma_bf16_200_k128_m16",
    "wgmma_f16_256_m128_k128",
    "wgmma_bf16_40_reg_k128",
    "wgmma_f16_64_reg_m128",
    "wgmma_bf16_256_reg_m64",
    "wgmma_tf32_8_k128_k128",
    "wgmma_tf32_96_k32_k64",
    "wgmma_tf32_256_k16_k16",
    "wgmma_e4m3xe4m3_8_k128_k128",
    "wgmma_e4m3xe4m3_64_k32_k64",
    "wgmma_e5m2xe5m2_24_k64_k128",
    "wgmma_e4m3xe5m2_128_k128_k128",
    "wgmma_e5m2xe4m3_256_k16_k16",
    "wgmma_e5m2xe4m3_200_k128_k128",
)
FLOAT8 = tuple(name for name in NAMES if "x" in name)
LONG = ("wgmma_e4m3xe4m3_24_long", "wgmma_e4m3xe5m2_24_long", "wgmma_e5m2xe4m3_24_long")
TURNS, LONG_N, LONG_ROW_WORDS = 64, 24, 32  # of wgmma_long
ROW_WORDS = 8  # words per row of an operand: 32 bytes along K


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    if kind in float8.KINDS:
        return float8.encode(values, kind).view(np.uint32)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint32)
    bits = values.astype(np.float32).view(np.uint32)
    return bits if kind == "tf32" else (bits >> 16).astype(np.uint16).view(np.uint32)


def decode(words: np.ndarray, kind: str) -> np.ndarray:
    if kind in float8.KINDS:
        values = float8.decode(words.view(np.uint8), kind)
    elif kind == "f16":
        values = words.view(np.float16).astype(np.float32)
    elif kind == "bf16":
        values = (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = (words & 0xFFFFE000).view(np.float32)
    return values.reshape(len(words) // ROW_WORDS, -1)


def operands(x: np.ndarray, kind: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    of_a, _, of_b = kind.partition("x")
    return decode(x[: 64 * ROW_WORDS], of_a), decode(x[64 * ROW_WORDS : (64 + n) * ROW_WORDS], of_b or of_a)


def float8_inputs(kind: str, words: int, rng: np.random.Generator, numbers: tuple[int, int]) -> np.ndarray:
    """`words` of A and as many of B, whole numbers that both formats have."""
    return np.concatenate([encode(rng.integers(*numbers, 4 * words), each) for each in kind.split("x")])


def long_inputs(kind: str, words: int, rng: np.random.Generator) -> np.ndarray:
    """Positive numbers, at places in shared memory that do not overlap."""
    a_stride, b_stride = rng.integers(1, 4, 2)
    a_end, b_end = 8 * a_stride, LONG_N // 8 * b_stride
    first = int(rng.integers(0, 48 - a_end - b_end))
    starts = [first, int(rng.integers(first + a_end, 49 - b_end))]
    if rng.integers(2):  # B before A
        starts = [first + b_end, first]
    a, b = float8_inputs(kind, 64 * LONG_ROW_WORDS, rng, (1, 9)).reshape(2, -1)
    head = np.array([*starts, a_stride, b_stride, 0, 0, 0, 0], np.uint32)
    return np.concatenate([head, a, b[: LONG_N * LONG_ROW_WORDS]])


def inputs(name: str, words: int, rng: np.random.Generator) -> np.ndarray:
    kind, n = ("f16", 16) if name == "wgmma_groups" else (name.split("_")[1], int(name.split("_")[2]))
    operand_words = (64 + n) * ROW_WORDS
    if name in LONG:
        return long_inputs(kind, words, rng)
    values = rng.integers(-16, 17, operand_words * (1 if kind == "tf32" else 2))
    if "x" in kind:
        a, b = float8_inputs(kind, 256 * ROW_WORDS, rng, (-8, 9)).reshape(2, -1)
        packed = np.concatenate([a[: 64 * ROW_WORDS], b[: n * ROW_WORDS]])
    else:
        packed = encode(values, kind)
    if kind == "tf32":  # bits that the hardware ignores
        packed = packed | rng.integers(0, 1 << 13, operand_words, dtype=np.uint32)
    sums = rng.integers(-1000, 1001, words - operand_words).astype(np.float32).view(np.uint32)
    return np.concatenate([packed, sums])


def multiply(name: str, x: np.ndarray) -> np.ndarray:
    _, kind, size, *_ = name.split("_")
    n = int(size)
    a, b = operands(x, kind, n)
    d = x[(64 + n) * ROW_WORDS :].view(np.float32).reshape(64, n)
    return (2 * a @ b.T + d).ravel().view(np.uint32)


def groups(x: np.ndarray) -> np.ndarray:
    a, b = operands(x, "f16", 16)
    product = a @ b.T
    return np.stack([product, 2 * product, 2 * product]).ravel().view(np.uint32)


def long_operands(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A (64, 128) and B (24, 128)."""
    of_a, of_b = name.split("_")[1].split("x")
    elements = x[8:].view(np.uint8).reshape(-1, 4 * LONG_ROW_WORDS)
    return float8.decode(elements[:64], of_a), float8.decode(elements[64:], of_b)


def long_sums(name: str, x: np.ndarray, bits: int = 0) -> np.ndarray:
    """Summed in the accumulators, and in float32 outside. With `bits`, as Options::float8_sum_bits says."""
    a, b = long_operands(name, x)
    if not bits:
        product = np.float32(TURNS) * (a @ b.T)
        return np.stack([product, product]).ravel().view(np.uint32)

    def turn(total: np.ndarray) -> np.ndarray:
        for step in range(0, 128, 32):
            total = float8.add_products(total, a[:, step : step + 32], b[:, step : step + 32], bits)
        return total

    inside = outside = np.zeros((64, LONG_N), np.float32)
    once = turn(inside)
    for _ in range(TURNS):
        inside, outside = turn(inside), outside + once
    return np.stack([inside, outside]).ravel().view(np.uint32)


references: dict[str, Callable[[np.ndarray], np.ndarray]] = {"wgmma_groups": groups}
for _name in NAMES:
    references[_name] = lambda x, name=_name: multiply(name, x)
for _name in LONG:
    references[_name] = lambda x, name=_name: long_sums(name, x)
