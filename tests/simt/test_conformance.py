"""Every primitive of csrc/arch on the emulator, compared with the PTX manual and with recorded outputs of GPUs.

`python tests/simt/record.py` stores a GPU's outputs in golden/; if there are any, the emulator must give the same bits.
"""

from __future__ import annotations

import functools
import random
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import conformance_float8
import conformance_sm90
import conformance_wgmma
import numpy as np
import pytest
import torch
from harness import BUILDS, HERE, Fault, Library

SOURCES = [
    "conformance_warp.cu",
    "conformance_memory.cu",
    "conformance_mma.cu",
    "conformance_grid.cu",
    "conformance_sm89.cu",
    "conformance_sm90.cu",
    "conformance_cluster.cu",
    "conformance_wgmma.cu",
]
WITHOUT_SM90 = ("ptx_sm_75", "ptx_sm_80")  # kinds of BUILDS
NEWER = ("sm89", "sm90", "cluster", "wgmma")
SOURCES_SM80 = [name for name in SOURCES if name.removesuffix(".cu").split("_")[1] not in NEWER]
FLOAT8_MMA = [f"mma_{a}_{b}" for a in conformance_float8.KINDS for b in conformance_float8.KINDS]
MODES = [
    {"mode": "eager", "schedule": "fifo"},
    {"mode": "lazy", "schedule": "fifo"},
    *({"mode": "lazy", "schedule": "pct", "seed": seed} for seed in range(3)),
    {"mode": "lazy", "schedule": "pct", "seed": 3, "check_races": True},
]
# Tolerances of operations that the hardware approximates, or whose sums it may round differently.
TOLERANCE = {"special_functions": 2.0**-10, "mma_f16": 1e-5, "mma_bf16": 1e-5, "mma_tf32": 1e-5}
# Types of the words of an output, in equal parts, for cases where the payload of a NaN is unspecified: an addition may
# drop a payload that a move keeps, and the compiler chooses the instructions of a conversion.
FLOATS = {
    "conversions": ("f16", "bf16", "", "f16", "bf16", "f32", "", "f32"),
    "unpack": ("f32", "f32", "", ""),
    "float8_elements": (*("f32",) * 4, "", "f32") * 2,
}

Reference = Callable[[np.ndarray], np.ndarray]
references: dict[str, Reference] = {
    **conformance_float8.references,
    **conformance_sm90.references,
    **conformance_wgmma.references,
}


def reference(function: Reference) -> Reference:
    references[function.__name__] = function
    return function


LANES = np.arange(32)


@reference
def shuffle(x: np.ndarray) -> np.ndarray:
    return x[x[32:] % 32]


@reference
def shuffle_xor(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[LANES ^ 1 << i] for i in range(5)])


@reference
def shuffle_up_down(x: np.ndarray) -> np.ndarray:
    def moved(by: int) -> np.ndarray:
        lanes = LANES + by
        return x[np.where((lanes >= 0) & (lanes < 32), lanes, LANES)]

    return np.concatenate([moved(-1), moved(-13), moved(1), moved(13)])


@reference
def shuffle_diverged(x: np.ndarray) -> np.ndarray:
    return x[np.where(LANES % 2 == 0, (LANES + 2) % 32, (LANES + 30) % 32)]


@reference
def ballot(x: np.ndarray) -> np.ndarray:
    votes = sum(int(bit) << lane for lane, bit in enumerate(x % 2))
    return np.repeat(np.array([votes, (x == 0).any(), (x != 0).all()], np.uint32), 32)


@reference
def elect_one(x: np.ndarray) -> np.ndarray:
    return (np.arange(64) % 32 == 0).astype(np.uint32)


@reference
def grid_indices(x: np.ndarray) -> np.ndarray:
    z, y, x = (axis.ravel().repeat(32) for axis in np.indices((2, 3, 2)))
    return ((2 * 8 + 3) * 8 + 2 << 16 | z << 12 | y << 8 | x << 4 | 1).astype(np.uint32)


@reference
def blocks_in_turn(x: np.ndarray) -> np.ndarray:
    sums = np.zeros(32, np.uint32)
    for row in x.reshape(8, 32)[::-1]:
        sums = 3 * sums + row
    return np.concatenate([[np.uint32(8)], np.full(31, 0xFFFFFFFF, np.uint32), sums])


references["blocks_in_turn_system"] = blocks_in_turn


@reference
def fences(x: np.ndarray, key: int = 0x55) -> np.ndarray:
    rows = x ^ np.uint32(key)
    head = np.full(64, 0xFFFFFFFF, np.uint32)
    head[:2] = 4, rows.sum(dtype=np.uint32)
    return np.concatenate([head, rows])


references["last_block"] = lambda x: fences(x, 0xAA)


@reference
def unpack(x: np.ndarray) -> np.ndarray:
    halves = [x & 0xFFFF, x >> 16]
    wide = [half.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32) for half in halves]
    return np.concatenate([*wide, halves[0] << 16, halves[1] << 16])


@reference
def lane_sums(x: np.ndarray) -> np.ndarray:
    small = x % 1024
    fours = small.reshape(8, 4).sum(1).repeat(4)
    return np.concatenate([np.full(32, small.sum()), fours, small.reshape(4, 8).max(1).repeat(8)])


@reference
def sync_threads(x: np.ndarray) -> np.ndarray:
    return x[(np.arange(128) + 37) % 128]


@reference
def sync_warp(x: np.ndarray) -> np.ndarray:
    return x[::-1]


@reference
def sync_part_of_a_warp(x: np.ndarray) -> np.ndarray:
    return x[LANES ^ 2]


@reference
def shuffle_words_of_64_bits(x: np.ndarray) -> np.ndarray:
    pairs = x.view(np.uint64)
    return np.concatenate([pairs[::-1], pairs[LANES ^ 4]]).view(np.uint32)


@reference
def named_barriers(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[64:], x[:64]])


@reference
def global_vectors(x: np.ndarray) -> np.ndarray:
    out = np.full(512, 0xFFFFFFFF, np.uint32)
    out[:128], out[128:192], out[256:288], out[384:400] = x[:128], x[128:192], x[256:288], x[384:400]
    return out


@reference
def global_widths(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, x, x[:32], x[:16], x.view(np.uint8)[:32].astype(np.uint32)])


@reference
def shared_vectors(x: np.ndarray) -> np.ndarray:
    out = np.full(384, 0xFFFFFFFF, np.uint32)
    out[:128] = x.reshape(32, 4)[::-1].ravel()
    out[128:192] = x[:64].reshape(32, 2)[::-1].ravel()
    out[256:288] = x[:32][::-1]
    return out


@reference
def atomics(x: np.ndarray) -> np.ndarray:
    bits = np.bitwise_or.reduce(np.uint32(1) << x % 32)
    total, floats = x.sum(dtype=np.uint32), np.float32((x % 256).sum()).view(np.uint32)
    wide = (x.astype(np.uint64) * np.uint64(2**32 + 1)).sum().view((np.uint32, 2))
    return np.array([total, floats, bits, 64, total, floats, *wide], np.uint32)


@reference
def vector_reductions(x: np.ndarray) -> np.ndarray:
    return (x % 256).reshape(4, 32).sum(0).astype(np.float32).view(np.uint32)


@reference
def cp_async(x: np.ndarray) -> np.ndarray:
    out = np.full(512, 0xFFFFFFFF, np.uint32)
    whole = np.where(LANES % 2 == 0, 16, LANES % 16)
    for begin, words, valid in ((0, 4, whole), (128, 2, LANES % 9), (256, 1, LANES % 5)):
        rows = x[begin : begin + 32 * words].copy().view(np.uint8).reshape(32, 4 * words)
        rows[np.arange(4 * words) >= valid[:, None]] = 0
        out[begin : begin + 32 * words] = rows[::-1].copy().view(np.uint32).ravel()
    return out


@reference
def conversions(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        f = x.view(np.float32)
        half, bfloat = f.astype(np.float16), to_bfloat16(x)
        half = np.where(np.isnan(f), np.uint16(0x7FFF), half.view(np.uint16)).astype(np.uint32)
        negative = np.where(np.isnan(f), half, half ^ 0x8000)
        negative_bfloat = np.where(np.isnan(f), bfloat, bfloat ^ 0x8000)
        # Infinities and NaNs only lose their low bits, which turns some NaNs into infinities; ptxas does the same.
        tf32 = (np.where(np.isfinite(f), x + np.uint32(0x1000), x) & np.uint32(0xFFFFE000)).astype(np.uint32)
        widened = (x & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        fma = square_plus_one(f)
    return np.concatenate(
        [
            half,
            bfloat,
            tf32,
            negative << 16 | half,
            negative_bfloat << 16 | bfloat,
            widened,
            x << 16,
            fma.view(np.uint32),
        ]
    )


def square_plus_one(f: np.ndarray) -> np.ndarray:
    """f * f + 1, rounded once. The square is exact in float64. Where the sum is not, its last bit is set, so that the
    second rounding does not mistake it for a tie."""
    square = f.astype(np.float64) ** 2
    total = square + 1.0
    one = total - square
    lost = (square - (total - one)) + (1.0 - one)
    even = total.view(np.uint64) % 2 == 0
    odd = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where(np.isfinite(total) & (lost != 0) & even, odd, total).astype(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    rounded = ((x.astype(np.uint64) + 0x7FFF + (x >> 16 & 1)) >> 16).astype(np.uint32)
    return np.where(np.isnan(x.view(np.float32)), np.uint32(0x7FFF), rounded)


@reference
def special_functions(x: np.ndarray) -> np.ndarray:
    from math import erf

    f = ((x >> 8).astype(np.float32) / np.float32(8388608) - np.float32(1)) * np.float32(6)
    d = f.astype(np.float64)
    values = [2**d, np.log2(d * d + 0.5), 1 / d, np.tanh(d), np.exp(d), np.array([erf(v) for v in d]), np.tanh(d)]
    return np.concatenate(values).astype(np.float32).view(np.uint32)


def matrices(x: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    element = x.view(np.uint16).reshape(4, 8, 8).astype(np.uint32)
    if transposed:
        element = element.transpose(0, 2, 1)
    g, t = LANES // 4, LANES % 4
    return np.concatenate([element[i, g, 2 * t + 1] << 16 | element[i, g, 2 * t] for i in range(count)])


for _count in (1, 2, 4):
    references[f"ldmatrix_x{_count}"] = lambda x, count=_count: matrices(x, count, False)
    references[f"ldmatrix_x{_count}_trans"] = lambda x, count=_count: matrices(x, count, True)


Decode = Callable[[np.uint32, int], Any]  # element i of a register


def operands_of(
    x: np.ndarray, decode_a: Decode, decode_b: Decode, pack: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and C from the registers of all lanes, with `pack` elements per register."""
    words = x.reshape(10, 32)
    a, b, c = np.zeros((16, 8 * pack)), np.zeros((8 * pack, 8)), np.zeros((16, 8))
    for lane in range(32):
        g, t = divmod(lane, 4)
        for half in range(pack):
            for i in range(4):
                a[g + i % 2 * 8, pack * t + half + i // 2 * 4 * pack] = decode_a(words[i, lane], half)
            for i in range(2):
                b[pack * t + half + i * 4 * pack, g] = decode_b(words[4 + i, lane], half)
        for i in range(4):
            c[g + i // 2 * 8, 2 * t + i % 2] = words[6 + i, lane : lane + 1].view(np.float32)[0]
    return a, b, c


def registers_of(d: np.ndarray) -> np.ndarray:
    g, t = LANES // 4, LANES % 4
    return np.concatenate([d[g + i // 2 * 8, 2 * t + i % 2] for i in range(4)]).astype(np.float32).view(np.uint32)


def fragments(x: np.ndarray, decode: Decode, pack: int, decode_b: Decode | None = None) -> np.ndarray:
    """D = C + A @ B."""
    a, b, c = operands_of(x, decode, decode_b or decode, pack)
    return registers_of(c + a @ b)


def float8_decoders(name: str) -> tuple[Decode, Decode]:
    def decoder(kind: str) -> Decode:
        return lambda word, i: conformance_float8.VALUES[kind][int(word) >> 8 * i & 0xFF]

    _, of_a, of_b = name.split("_")
    return decoder(of_a), decoder(of_b)


def word16(word: np.uint32, half: int) -> np.ndarray:
    return np.array([int(word) >> 16 * half & 0xFFFF], np.uint16)


references["mma_f16"] = lambda x: fragments(x, lambda w, h: float(word16(w, h).view(np.float16)[0]), 2)
references["mma_bf16"] = lambda x: fragments(
    x, lambda w, h: float((word16(w, h).astype(np.uint32) << 16).view(np.float32)[0]), 2
)
for _name in FLOAT8_MMA:
    _decode_a, _decode_b = float8_decoders(_name)
    references[_name] = lambda x, a=_decode_a, b=_decode_b: fragments(x, a, 4, b)
references["mma_tf32"] = lambda x: fragments(
    x, lambda w, h: float(np.array([int(w) & 0xFFFFE000], np.uint32).view(np.float32)[0]), 1
)


def inputs_of(name: str, words: int, rng: np.random.Generator) -> np.ndarray:
    """Random words; for products, numbers whose float32 sums are exact or almost exact."""
    if name.startswith("tma"):
        return conformance_sm90.tma_inputs(name, words, rng)
    if name.startswith("wgmma"):
        return conformance_wgmma.inputs(name, words, rng)
    if name.startswith("float8"):
        return conformance_float8.inputs(name, words, rng)
    if name in FLOAT8_MMA:
        return float8_fragments(name, rng)
    if not name.startswith("mma"):
        return rng.integers(0, 2**32, words, dtype=np.uint32)
    values = rng.integers(-8, 9, (words, 2)).astype(np.float32)
    values[words * 6 // 10 :] = rng.integers(-1000, 1001, (words - words * 6 // 10, 2))
    if name == "mma_f16":
        operands = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        operands = values.view(np.uint32) >> 16
    packed = operands[:, 0] | operands[:, 1] << 16
    single = values[:, 0].copy().view(np.uint32)
    return np.where((np.arange(words) >= 192) | (name == "mma_tf32"), single, packed).astype(np.uint32)


def float8_fragments(name: str, rng: np.random.Generator) -> np.ndarray:
    _, of_a, of_b = name.split("_")
    a, b = rng.integers(-8, 9, 4 * 128), rng.integers(-8, 9, 4 * 64)
    packed = [conformance_float8.encode(a, of_a), conformance_float8.encode(b, of_b)]
    return np.concatenate([*(each.view(np.uint32) for each in packed),
                           rng.integers(-1000, 1001, 128).astype(np.float32).view(np.uint32)])  # fmt: skip


def with_one_nan(name: str, words: np.ndarray) -> np.ndarray:
    """The output of a case with every NaN replaced by the same one."""
    words = words.astype(np.uint32)
    kinds = FLOATS.get(name)
    if kinds is None or words.size % len(kinds) != 0:
        return words
    parts = []
    for kind, part in zip(kinds, np.split(words, len(kinds)), strict=True):
        if kind == "f32":
            part = np.where(np.isnan(part.view(np.float32)), np.uint32(0x7FFFFFFF), part)
        elif kind != "":
            halves = part.view(np.uint16)
            largest = np.uint16(0x7C00 if kind == "f16" else 0x7F80)  # infinity
            part = np.where(halves & 0x7FFF > largest, np.uint16(0x7FFF), halves).view(np.uint32)
        parts.append(part)
    return np.concatenate(parts)


def assert_same(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    got, expected = with_one_nan(name, got), with_one_nan(name, expected)
    if name == "special_functions":
        np.testing.assert_allclose(got.view(np.float32), expected.view(np.float32), rtol=TOLERANCE[name], atol=1e-6)
    else:
        np.testing.assert_array_equal(got, expected)


def cases_of(kind: str) -> set[str]:
    """The cases of a library of this kind of BUILDS."""
    newer = {*conformance_sm90.references, *conformance_wgmma.references, *FLOAT8_MMA}
    return references.keys() - (newer if kind in WITHOUT_SM90 else set())


def every_build(*names: str, cases: Callable[[str], Iterable[Any]] | None = None) -> pytest.MarkDecorator:
    """Parametrizes a test with a library of each kind in BUILDS, and with its cases."""
    rows = [
        pytest.param(kind, *each, marks=getattr(pytest.mark, kind.partition("_")[0]), id="-".join([kind, *each]))
        for kind in BUILDS
        for each in ([(case,) for case in sorted(cases(kind))] if cases else [()])
    ]
    return pytest.mark.parametrize(("library", *names), rows, indirect=["library"], scope="session")


@functools.cache  # the fixture is set up again whenever pytest changes to another kind
def load(kind: str) -> Library:
    return Library.build_for(kind, "conformance", SOURCES_SM80 if kind in WITHOUT_SM90 else SOURCES)


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Library:
    return load(getattr(request, "param", "simt"))


# Through other instructions: copies through registers, float16 products 8 deep, others in float32 arithmetic.
@pytest.mark.parametrize("case", ["cp_async", "mma_f16", "mma_bf16", "mma_tf32"])
def test_fallbacks_of_sm_75(case: str) -> None:
    library, rng = load("simt"), np.random.default_rng(random.getrandbits(64))
    for mode in ("eager", "lazy"):
        data = inputs_of(case, library.in_bytes(case) // 4, rng)
        with library.options(mode, "pct", compute_capability=75):
            assert_same(case, library.run(case, data), references[case](data))


@every_build()
def test_every_case_has_a_reference(library: Library, request: pytest.FixtureRequest) -> None:
    assert set(library.index) == cases_of(request.node.callspec.params["library"])


@every_build()
def test_a_process_can_load_many_libraries(library: Library) -> None:
    """glibc reserves only a few hundred bytes of static TLS for libraries loaded at run time."""
    table = subprocess.run(["readelf", "-lW", library.path], capture_output=True, text=True, check=True).stdout
    (size,) = re.findall(r"^ +TLS +(?:0x[0-9a-f]+ +){4}(0x[0-9a-f]+)", table, re.MULTILINE)
    assert int(size, 16) <= 32


@pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(map(str, o.values())))
@every_build("name", cases=cases_of)
def test_primitive(library: Library, name: str, options: dict[str, object]) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    for _ in range(3):
        data = inputs_of(name, library.in_bytes(name) // 4, rng)
        with library.options(**options):  # type: ignore[arg-type]
            got = library.run(name, data)
        assert_same(name, got, references[name](data))


def those_of(*names: str) -> Callable[[str], Iterable[Any]]:
    return lambda kind: cases_of(kind) & set(names)


@every_build("name", cases=those_of("tma_load_2d_64_swizzle64_float16", "tma_store_2d_128_swizzle128_bfloat16"))
def test_tma_begins_at_multiples_of_16_bytes(library: Library, name: str) -> None:
    """The hardware stops the kernel with an illegal instruction for other first coordinates."""
    data = inputs_of(name, library.in_bytes(name) // 4, np.random.default_rng(0))
    data[0] = 4
    with pytest.raises(Fault, match="expected the first coordinate to be a multiple of 16 bytes, got 4 x 2 bytes"):
        library.run(name, data)


@every_build("name", cases=those_of("tma_store_3d_64_swizzle64_float16", "tma_add_5d_32_none_float32"))
def test_tma_stores_have_no_negative_coordinates(library: Library, name: str) -> None:
    """The hardware stops the kernel with an illegal instruction, also if the box is completely outside the tensor."""
    data = inputs_of(name, library.in_bytes(name) // 4, np.random.default_rng(0))
    rank = conformance_sm90.Tile.named(name).rank
    for dimension in range(rank):
        data[:rank] = 0
        data[dimension] = np.int32(-16).view(np.uint32)
        expected = f"expected no negative coordinate in a store, got -16 in dimension {dimension}"
        with pytest.raises(Fault, match=expected):
            library.run(name, data)


SUM_BITS = 14  # of sm_90, csrc/simt/float8_sum.h


@every_build("name", cases=those_of(*conformance_wgmma.LONG))
def test_long_sums_of_float8_products_need_float32(library: Library, name: str) -> None:
    """8192 positive terms: with the bits of sm_90, the accumulators lose the small ones, sums over 128 do not."""
    data = inputs_of(name, library.in_bytes(name) // 4, np.random.default_rng(random.getrandbits(64)))
    with library.float8_sums(SUM_BITS):
        got = library.run(name, data)
    np.testing.assert_array_equal(got, conformance_wgmma.long_sums(name, data, SUM_BITS))
    inside, outside = got.view(np.float32).reshape(2, -1)
    exact = references[name](data).view(np.float32).reshape(2, -1)[0]
    assert (inside < exact * (1 - 1e-3)).all() and (outside == exact).all()


def any_float8(name: str, library: Library, rng: np.random.Generator) -> np.ndarray:
    """Inputs of a case whose operands are any elements but infinities and NaNs."""
    data = inputs_of(name, library.in_bytes(name) // 4, rng)
    words = 192 if name in FLOAT8_MMA else (64 + int(name.split("_")[2])) * conformance_wgmma.ROW_WORDS
    elements = rng.integers(0, 256, 4 * words, dtype=np.uint8)
    data[:words] = np.where(elements & 0x7C == 0x7C, elements ^ 0x40, elements).view(np.uint32)
    return data


@every_build("name", cases=those_of(*FLOAT8_MMA))
def test_float8_products_in_registers_of_few_bits(library: Library, name: str) -> None:
    data = any_float8(name, library, np.random.default_rng(random.getrandbits(64)))
    a, b, c = operands_of(data, *float8_decoders(name), 4)
    for bits in (6, SUM_BITS):
        with library.float8_sums(bits):
            got = library.run(name, data)
        np.testing.assert_array_equal(got, registers_of(conformance_float8.add_products(c, a, b.T, bits)))


@every_build("name", cases=those_of(*conformance_wgmma.FLOAT8))
def test_float8_products_of_few_bits(library: Library, name: str) -> None:
    data = any_float8(name, library, np.random.default_rng(random.getrandbits(64)))
    _, kind, n, *_ = name.split("_")
    a, b = conformance_wgmma.operands(data, kind, int(n))
    d = data[-64 * int(n) :].view(np.float32).reshape(64, -1)
    for _ in range(2):
        d = conformance_float8.add_products(d, a, b, SUM_BITS)
    with library.float8_sums(SUM_BITS):
        got = library.run(name, data)
    np.testing.assert_array_equal(got, d.ravel().view(np.uint32))


def test_the_8_bit_formats_are_those_of_torch() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    for kind, dtype in zip(conformance_float8.KINDS, (torch.float8_e4m3fn, torch.float8_e5m2), strict=True):
        np.testing.assert_array_equal(conformance_float8.VALUES[kind], bits.view(dtype).float().numpy())
        numbers = torch.randn(1000) * 2.0 ** torch.randint(-20, 8, (1000,))
        encoded = torch.from_numpy(conformance_float8.encode(numbers.numpy(), kind))
        assert torch.equal(encoded, numbers.to(dtype).view(torch.uint8))


def test_payloads_of_nans_are_ignored() -> None:
    words = {  # two NaNs and infinity
        "f16": (0x7E00, 0xFC01, 0x7C00),
        "bf16": (0x7FC0, 0xFF81, 0x7F80),
        "f32": (0x7FC00000, 0xFF800001, 0x7F800000),
        "": (0x7FC00000, 0xFF800001, 0x7F800000),
    }
    for name, kinds in FLOATS.items():
        for part, kind in enumerate(kinds):
            nan, other, infinity = (np.zeros(32 * len(kinds), np.uint32) for _ in range(3))
            nan[32 * part], other[32 * part], infinity[32 * part] = words[kind]
            if kind != "":
                assert_same(name, nan, other)
            else:
                with pytest.raises(AssertionError):
                    assert_same(name, nan, other)
            with pytest.raises(AssertionError):
                assert_same(name, nan, infinity)
    with pytest.raises(AssertionError):
        assert_same("shuffle", nan, other)


GOLDEN = sorted((HERE / "golden").glob("*/*.npz"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_same_output_as_a_gpu(library: Library, path: Path) -> None:
    golden = np.load(path)
    got = library.run(path.stem, golden["input"])
    tolerance = TOLERANCE.get(path.stem)
    if tolerance is None:
        assert_same(path.stem, got, golden["output"])
    else:
        np.testing.assert_allclose(got.view(np.float32), golden["output"].view(np.float32), rtol=tolerance, atol=1e-6)
