"""References and inputs of the cases in conformance_wgmma.cu. Inputs are integers, whose sums are exact."""

from __future__ import annotations

from collections.abc import Callable

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
)
ROW_WORDS = 8  # words per row of an operand: 32 bytes along K


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return values.astype(np.float16).view(np.uint32)
    bits = values.astype(np.float32).view(np.uint32)
    return bits if kind == "tf32" else (bits >> 16).astype(np.uint16).view(np.uint32)


def decode(words: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        values = words.view(np.float16).astype(np.float32)
    elif kind == "bf16":
        values = (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = (words & 0xFFFFE000).view(np.float32)
    return values.reshape(len(words) // ROW_WORDS, -1)


def operands(x: np.ndarray, kind: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    return decode(x[: 64 * ROW_WORDS], kind), decode(x[64 * ROW_WORDS : (64 + n) * ROW_WORDS], kind)


def inputs(name: str, words: int, rng: np.random.Generator) -> np.ndarray:
    kind, n = ("f16", 16) if name == "wgmma_groups" else (name.split("_")[1], int(name.split("_")[2]))
    operand_words = (64 + n) * ROW_WORDS
    values = rng.integers(-16, 17, operand_words * (1 if kind == "tf32" else 2))
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


references: dict[str, Callable[[np.ndarray], np.ndarray]] = {"wgmma_groups": groups}
for _name in NAMES:
    references[_name] = lambda x, name=_name: multiply(name, x)
