from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from cuda_ext import bucket as bucket_ops
from cuda_ext._load import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# 16384 elements are a block of work; 0 and 1 and primes are what goes wrong.
COUNTS = (0, 1, 3, 17, 0, 64, 16384, 7, 33333, 0)
LARGE_COUNTS = (300007, 5, 800011, 1)  # more than 2 MiB in every dtype, which is written past the caches


def common(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in (a, b) else torch.float32


def convert(source: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    return (source.to(common(source.dtype, dtype)) * scale).to(dtype)


def expected_bucket(tensors: Sequence[Tensor], bucket: Tensor, offsets: Sequence[int], scale: float) -> Tensor:
    expected = torch.zeros_like(bucket)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.numel()] = convert(tensor.reshape(-1), bucket.dtype, scale)
    return expected


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_stats(stats: Tensor, stored: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Against float64: a float32 is off by one rounding, a subnormal at worst; a float64 by the order of additions."""
    assert stats.shape == (2,)
    assert stats.dtype == dtype
    values = torch.cat([tensor.reshape(-1).double() for tensor in stored])
    rtol, atol = (2**-23, 2**-149) if dtype == torch.float32 else (1e-13, 0.0)
    torch.testing.assert_close(stats[0], values.square().sum().to(dtype), rtol=rtol, atol=atol, equal_nan=True)
    assert stats[1].item() == float(not values.isfinite().all())


def dtypes_on(backend: str) -> tuple[torch.dtype, ...]:
    """Those of the kernels; CUDA has none for float64, which test_everywhere.py checks."""
    return DTYPES if backend == "cpu" else DTYPES[:3]


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def random_offsets(counts: Sequence[int]) -> tuple[list[int], int]:
    """Anywhere in order: gaps of odd sizes, so that nothing is aligned."""
    offsets, end = [], 0
    for count in counts:
        offsets.append(end + random.choice((0, 0, 1, 5, 23)))
        end = offsets[-1] + count
    return offsets, end + random.choice((0, 1, 29))


def integers(*shape: int, dtype: torch.dtype, bound: int = 9) -> Tensor:
    return torch.randint(-bound, bound, shape).to(dtype)


# values


@pytest.mark.every_backend
@pytest.mark.parametrize("counts", [COUNTS, LARGE_COUNTS], ids=["small", "large"])
@pytest.mark.parametrize("bucket_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_and_unpack_between_all_dtypes(
    dtype: torch.dtype, bucket_dtype: torch.dtype, counts: Sequence[int]
) -> None:
    tensors = [torch.randn(count, dtype=torch.float64).to(dtype) for count in counts]
    offsets, size = random_offsets(counts)
    bucket = torch.full((size,), math.nan, dtype=bucket_dtype)
    before = [tensor.clone() for tensor in tensors]

    stats = bucket_ops.pack(tensors, bucket, offsets, scale=0.37)
    assert_same(bucket, expected_bucket(tensors, bucket, offsets, 0.37))
    assert_stats(stats, [bucket], stats_dtype(bucket_dtype))
    for tensor, original in zip(tensors, before, strict=True):
        assert_same(tensor, original)

    outputs = [torch.full_like(tensor, math.nan) for tensor in tensors]
    packed = bucket.clone()
    stats = bucket_ops.unpack(bucket, outputs, offsets, scale=-2.5)
    for output, offset in zip(outputs, offsets, strict=True):
        assert_same(output, convert(packed[offset : offset + output.numel()], dtype, -2.5))
    assert_stats(stats, outputs, stats_dtype(bucket_dtype))
    assert_same(bucket, packed)


@pytest.mark.every_backend
def test_mixed_dtypes_of_integers_come_back_exactly(backend: str) -> None:
    shapes = [(5, 7), (), (0, 3), (2, 3, 11), (4096,), (1, 1)]
    tensors = [integers(*shape, dtype=dtype) for shape, dtype in zip(shapes, itertools.cycle(dtypes_on(backend)))]
    for bucket_dtype in dtypes_on(backend):
        offsets, size = bucket_ops.aligned_offsets([tensor.numel() for tensor in tensors], bucket_dtype)
        bucket = torch.full((size,), math.nan, dtype=bucket_dtype)
        squares = sum(int(tensor.double().square().sum()) for tensor in tensors)
        assert bucket_ops.pack(tensors, bucket, offsets, scale=4.0).tolist() == [16 * squares, 0]
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        assert bucket_ops.unpack(bucket, outputs, offsets, scale=0.25).tolist() == [squares, 0]
        for output, tensor in zip(outputs, tensors, strict=True):
            assert_same(output, tensor)
        assert bucket_ops.stats(tensors).tolist() == [squares, 0]


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_kept_tensor_is_left_alone(dtype: torch.dtype, scale: float) -> None:
    """Whatever it holds: neither written nor scaled, and its NaN does not reach the statistics."""
    counts = (3, 100, 0, 20001, 1, 50000, 7)
    kept = [1, 2, 3, 6]
    offsets, size = random_offsets(counts)
    bucket = torch.randn(size, dtype=torch.float64).to(dtype)
    places = [bucket[offset : offset + count] for offset, count in zip(offsets, counts, strict=True)]
    tensors = [place if n in kept else torch.randn(len(place)) for n, place in enumerate(places)]
    tensors[1][5], tensors[3][20000] = math.nan, math.inf
    expected = expected_bucket(tensors, bucket, offsets, scale)
    for n in kept:
        expected[offsets[n] : offsets[n] + counts[n]] = tensors[n]
    stats = bucket_ops.pack(tensors, bucket, offsets, scale=scale, kept=kept)
    assert_same(bucket, expected)
    assert_stats(stats, [place for n, place in enumerate(places) if n not in kept], stats_dtype(dtype))
    assert bucket_ops.pack(places, bucket, offsets, kept=range(len(places))).tolist() == [0.0, 0.0]


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_tensor_in_its_place_is_scaled_there(dtype: torch.dtype, scale: float) -> None:
    offsets, size = bucket_ops.aligned_offsets([100, 20001, 3], dtype)
    bucket = torch.full((size,), math.nan, dtype=dtype)
    outside = torch.randn(20001).to(dtype)
    tensors = [bucket[offsets[0] :][:100].view(4, 25), outside, bucket[offsets[2] :][:3]]
    tensors[0].copy_(torch.randn(4, 25))
    tensors[2].copy_(torch.randn(3))
    expected = expected_bucket([tensor.clone() for tensor in tensors], bucket, offsets, scale)
    stats = bucket_ops.pack(tensors, bucket, offsets, scale=scale)
    assert_same(bucket, expected)
    assert_stats(stats, [bucket], stats_dtype(dtype))

    stats = bucket_ops.unpack(bucket, [tensors[0]], offsets[:1], scale=scale)
    assert_same(tensors[0].reshape(-1), convert(expected[:100], dtype, scale))
    assert_same(bucket[100:], expected[100:])
    assert_stats(stats, [tensors[0]], stats_dtype(dtype))


@pytest.mark.every_backend
def test_nothing_to_pack_is_zeros_on_the_wire() -> None:
    bucket = torch.full((40000,), math.nan)
    assert bucket_ops.pack([], bucket, []).tolist() == [0, 0]
    assert_same(bucket, torch.zeros(40000))
    assert bucket_ops.pack([torch.zeros(0)], torch.zeros(0), [0]).tolist() == [0, 0]
    assert bucket_ops.unpack(torch.full((7,), math.nan), [], []).tolist() == [0, 0]
    assert bucket_ops.stats([torch.zeros(0)]).tolist() == [0, 0]


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 16383, 16384, 40000, 50002])
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype, value: float, position: int) -> None:
    tensor = integers(50003, dtype=dtype)
    bucket = torch.empty(50003, dtype=dtype)
    assert bucket_ops.pack([tensor], bucket, [0])[1] == 0
    tensor[position] = value
    for stats in (
        bucket_ops.pack([tensor], bucket, [0]),
        bucket_ops.unpack(bucket, [torch.empty_like(tensor)], [0]),
        bucket_ops.stats([tensor]),
    ):
        assert stats[1] == 1
        assert not stats[0].isfinite()
    assert_same(bucket, tensor)


@pytest.mark.every_backend
def test_overflow_of_the_cast_is_found_and_large_squares_are_not_mistaken_for_it() -> None:
    large = torch.tensor([70000.0, 1.0])
    assert bucket_ops.pack([large], torch.empty(2, dtype=torch.bfloat16), [0])[1] == 0
    assert bucket_ops.pack([large], torch.empty(2, dtype=torch.float16), [0]).tolist() == [math.inf, 1]
    assert bucket_ops.pack([large], torch.empty(2, dtype=torch.float16), [0], scale=0.5)[1] == 0
    assert bucket_ops.unpack(large, [torch.empty(2, dtype=torch.float16)], [0]).tolist() == [math.inf, 1]
    # The squares exceed float32, the values do not.
    assert bucket_ops.stats([torch.tensor([1e30, 3.0])]).tolist() == [math.inf, 0]
    assert bucket_ops.stats([torch.tensor([1e18, -1e18])])[0].item() == pytest.approx(2e36, rel=2**-23)


def test_large_squares_of_float64_are_not_mistaken_for_an_overflow() -> None:
    assert bucket_ops.stats([torch.tensor([1e200], dtype=torch.float64)]).tolist() == [math.inf, 0]
    assert bucket_ops.stats([torch.tensor([1e200, math.nan], dtype=torch.float64)])[1] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_the_same_with_any_number_of_threads(dtype: torch.dtype) -> None:
    counts = [1 << 17, 5, 300001, 1, 16384 * 3]
    tensors = [torch.randn(count).to(dtype) for count in counts]
    offsets, size = random_offsets(counts)
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            bucket = torch.empty(size, dtype=dtype)
            outputs = [torch.empty(count) for count in counts]
            stats = [
                bucket_ops.pack(tensors, bucket, offsets, scale=1 / 3),
                bucket_ops.unpack(bucket, outputs, offsets, scale=3.0),
                bucket_ops.stats(tensors),
            ]
            results.append([bucket, *outputs, *stats])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_every_instruction_set(isa: str, run_python: Callable) -> None:
    """Each but the widest, which every other test runs; on a processor that lacks one, the widest it has runs again."""
    program = """
import itertools, random, sys
sys.path.insert(0, sys.argv[1])
import torch
import test_bucket as t
random.seed(1)
for dtype, bucket_dtype in itertools.product(t.DTYPES, t.DTYPES):
    t.test_pack_and_unpack_between_all_dtypes(dtype, bucket_dtype, t.COUNTS)
    t.test_pack_and_unpack_between_all_dtypes(dtype, bucket_dtype, t.LARGE_COUNTS)
for dtype in t.DTYPES:
    t.test_a_tensor_in_its_place_is_scaled_there(dtype, 0.5)
    t.test_one_bad_value_is_found_wherever_it_is(dtype, float("nan"), 50002)
    t.test_special_values_survive_a_cast(dtype, "cpu")
t.test_large_squares_of_float64_are_not_mistaken_for_an_overflow()
t.test_overflow_of_the_cast_is_found_and_large_squares_are_not_mistaken_for_it()
print("passed")
"""
    result = run_python("-c", program, __file__.rsplit("/", 1)[0], CUDA_EXT_CPU_ISA=isa)
    assert result.stdout.rstrip().endswith("passed"), result.stdout


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_survive_a_cast(dtype: torch.dtype, backend: str) -> None:
    """Zeros, subnormals, ties and the largest numbers of each format, rounded as torch rounds them."""
    values = [0.0, -0.0, math.inf, math.nan, 65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0001, 6.1e-5]
    values += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 3.3895e38, 3.4e38, 1e-40, 2.0**-133, 2.0**-134]
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype).repeat(3)
    for bucket_dtype in dtypes_on(backend):
        bucket = torch.empty(len(tensor), dtype=bucket_dtype)
        bucket_ops.pack([tensor], bucket, [0])
        assert_same(bucket, convert(tensor, bucket_dtype, 1.0))
        assert_same(bucket.signbit()[bucket == 0], tensor.signbit()[bucket == 0])


@pytest.mark.every_backend
def test_tensors_that_are_not_contiguous() -> None:
    base = torch.randn(6, 8, 4)
    tensors = [base.transpose(0, 2), base[:, ::3], torch.randn(5, 1).expand(5, 3), base.to(torch.bfloat16)[..., 1]]
    offsets, size = random_offsets([tensor.numel() for tensor in tensors])
    bucket = torch.empty(size)
    bucket_ops.pack(tensors, bucket, offsets, scale=2.0)
    assert_same(bucket, expected_bucket(tensors, bucket, offsets, 2.0))

    outputs = [torch.zeros(4, 8, 6).transpose(0, 2), torch.zeros(6, 24, 4)[:, ::8], torch.zeros(3, 5).t()]
    outputs.append(torch.zeros(6, 8, 4, dtype=torch.bfloat16)[..., 3])
    offsets, size = random_offsets([output.numel() for output in outputs])
    bucket = torch.randn(size)
    stats = bucket_ops.unpack(bucket, outputs, offsets)
    for output, offset in zip(outputs, offsets, strict=True):
        assert_same(output.reshape(-1), bucket[offset : offset + output.numel()].to(output.dtype))
    assert_stats(stats, outputs, torch.float32)


@pytest.mark.every_backend
def test_stats_read_any_layout(backend: str) -> None:
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(9, 9)[:, ::2],
        torch.randn(()),
    ]
    assert_stats(bucket_ops.stats(tensors), tensors, torch.float32)
    dtypes = dtypes_on(backend)[-3:]
    tensors = [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    assert_stats(bucket_ops.stats(tensors), tensors, stats_dtype(dtypes[-1]))


@pytest.mark.parametrize("counts", [[3, -1], [3.5]])
def test_counts_that_are_none(counts: list[int]) -> None:
    with pytest.raises(
        ValueError, match=rf"^aligned_offsets: expected counts of .*, got {re.escape(str(counts[-1]))}$"
    ):
        bucket_ops.aligned_offsets(counts, torch.float32)


def test_memory_whose_strides_interleave_is_written() -> None:
    memory = torch.zeros(8)
    bucket_ops.unpack(torch.arange(1.0, 7.0), [memory.as_strided((3, 2), (2, 3))], [0])
    assert memory.tolist() == [1, 0, 3, 2, 5, 4, 0, 6]


def test_forward_mode_is_refused() -> None:
    x, bucket = torch.randn(4), torch.zeros(4)
    for call in (
        lambda d: bucket_ops.stats([d]),
        lambda d: bucket_ops.pack([d], bucket, [0]),
        lambda d: bucket_ops.pack([x], d, [0]),
        lambda d: bucket_ops.unpack(bucket, [d], [0]),
        lambda d: bucket_ops.unpack(d, [bucket], [0]),
    ):
        with pytest.raises(RuntimeError, match=r"expected (bucket|tensors\[0\]) without a forward-mode tangent"):
            torch.func.jvp(call, (x.clone(),), (torch.ones(4),))


def test_aligned_offsets() -> None:
    assert bucket_ops.aligned_offsets([1, 16, 17, 0, 3], torch.float32) == ([0, 16, 32, 64, 64], 80)
    assert bucket_ops.aligned_offsets([1, 33], torch.bfloat16) == ([0, 32], 96)
    assert bucket_ops.aligned_offsets([3, 3], torch.float64, alignment=1) == ([0, 3], 6)
    assert bucket_ops.aligned_offsets([], torch.float32) == ([], 0)


@pytest.mark.sampled
@pytest.mark.every_backend
@hypothesis_settings(max_examples=60)
@given(
    pieces=st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=3),
            st.sampled_from(DTYPES),
            st.sampled_from(["plain", "transposed", "strided", "inside"]),
            st.integers(0, 70),
        ),
        max_size=12,
    ),
    bucket_dtype=st.sampled_from(DTYPES),
    scale=st.floats(-8, 8, width=32),
    seed=st.integers(0, 2**31),
)
def test_any_tensors(backend: str, pieces: list, bucket_dtype: torch.dtype, scale: float, seed: int) -> None:
    assume({bucket_dtype, *(dtype for _, dtype, _, _ in pieces)} <= set(dtypes_on(backend)))
    torch.manual_seed(seed)
    end, placed = 0, []
    for shape, dtype, kind, gap in pieces:
        placed.append((end + gap, tuple(shape), dtype, kind))
        end += gap + math.prod(shape)
    bucket = torch.randn(end + 3).to(bucket_dtype)
    tensors = []
    for offset, shape, dtype, kind in placed:
        if kind == "inside":
            tensors.append(bucket[offset : offset + math.prod(shape)].view(shape))
        elif kind == "transposed":
            tensors.append(torch.randn(shape[::-1]).to(dtype).permute(list(reversed(range(len(shape))))))
        elif kind == "strided" and shape:
            tensors.append(torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2])
        else:
            tensors.append(torch.randn(shape).to(dtype))
    offsets = [offset for offset, *_ in placed]
    expected = expected_bucket(tensors, bucket, offsets, scale)
    stats = bucket_ops.pack(tensors, bucket, offsets, scale=scale)
    assert_same(bucket, expected)
    assert_stats(stats, [bucket], stats_dtype(bucket_dtype))

    stats = bucket_ops.unpack(bucket, tensors, offsets, scale=scale)
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert_same(tensor.reshape(-1), convert(expected[offset : offset + tensor.numel()], tensor.dtype, scale))
    assert_stats(stats, [torch.zeros(0), *tensors], stats_dtype(bucket_dtype))


# bad input


def _bad_inputs() -> dict[str, tuple[Callable[[], object], str]]:
    a, b = torch.zeros(4), torch.zeros(2, 3)
    bucket = torch.zeros(10)
    pack, unpack, stats = bucket_ops.pack, bucket_ops.unpack, bucket_ops.stats
    floating = "float32, float16, bfloat16 or float64"
    not_kept = (
        "cuda_ext::bucket_pack: expected tensors[{}], which is in kept, to be a contiguous view of bucket at element "
        "{} of it, got a tensor elsewhere; leave it out of kept, and it will be copied there"
    )
    return {
        "bucket rank": (
            lambda: pack([a], torch.zeros(2, 5), [0]),
            "cuda_ext::bucket_pack: expected bucket of shape (N,) and contiguous, got shape (2, 5) with strides (5, 1)",
        ),
        "bucket stride": (
            lambda: unpack(torch.zeros(20)[::2], [a], [0]),
            "cuda_ext::bucket_unpack: expected bucket of shape (N,) and contiguous, got shape (10,) with strides (2,)",
        ),
        "bucket dtype": (
            lambda: pack([a], torch.zeros(10, dtype=torch.int32), [0]),
            f"cuda_ext::bucket_pack: expected bucket of dtype {floating}, got int32; convert it with .to()",
        ),
        "tensor dtype": (
            lambda: pack([a, b.long()], bucket, [0, 4]),
            f"cuda_ext::bucket_pack: expected tensors[1] of dtype {floating}, got int64; convert it with .to()",
        ),
        "complex": (
            lambda: stats([torch.zeros(2, dtype=torch.complex64)]),
            f"cuda_ext::bucket_stats: expected tensors[0] of dtype {floating}, got complex64; convert it with .to()",
        ),
        "sparse": (
            lambda: pack([b.to_sparse()], bucket, [0]),
            "cuda_ext::bucket_pack: expected tensors[0] with a dense layout, got Sparse; convert it with .to_dense()",
        ),
        "number of offsets": (
            lambda: pack([a, b], bucket, [0]),
            "cuda_ext::bucket_pack: expected one offset for each of 2 tensors, got 1",
        ),
        "negative offset": (
            lambda: unpack(bucket, [a], [-1]),
            "cuda_ext::bucket_unpack: expected offsets[0] >= 0, where the tensor before it ends, got -1; "
            "sort the tensors by offset",
        ),
        "overlapping offsets": (
            lambda: pack([a, b], bucket, [0, 3]),
            "cuda_ext::bucket_pack: expected offsets[1] >= 4, where the tensor before it ends, got 3; "
            "sort the tensors by offset",
        ),
        "beyond the end": (
            lambda: unpack(bucket, [a, b], [0, 5]),
            "cuda_ext::bucket_unpack: expected bucket to hold tensors[1] at elements 5 to 11, got shape (10,)",
        ),
        "scale nan": (
            lambda: pack([a], bucket, [0], scale=math.nan),
            "cuda_ext::bucket_pack: expected a finite scale, got nan",
        ),
        "scale inf": (
            lambda: unpack(bucket, [a], [0], scale=-math.inf),
            "cuda_ext::bucket_unpack: expected a finite scale, got -inf",
        ),
        "inside, elsewhere": (
            lambda: pack([a, bucket[4:8]], bucket, [0, 6]),
            "cuda_ext::bucket_pack: expected tensors[1] either outside the memory of bucket or at element 6 of it, "
            "where its values go, got a tensor that overlaps it elsewhere; clone it",
        ),
        "inside, of another dtype": (
            lambda: pack([bucket.view(torch.bfloat16)[:4]], bucket, [0]),
            "cuda_ext::bucket_pack: expected tensors[0] either outside the memory of bucket or at element 0 of it, "
            "where its values go, got a tensor that overlaps it elsewhere; clone it",
        ),
        "kept beyond the tensors": (
            lambda: pack([a, b], bucket, [0, 4], kept=[2]),
            "cuda_ext::bucket_pack: expected kept to hold indices of the 2 tensors, got 2",
        ),
        "kept before the tensors": (
            lambda: pack([a, b], bucket, [0, 4], kept=[-1]),
            "cuda_ext::bucket_pack: expected kept to hold indices of the 2 tensors, got -1",
        ),
        "kept outside": (lambda: pack([a, b], bucket, [0, 4], kept=[1]), not_kept.format(1, 4)),
        "kept transposed": (lambda: pack([bucket[:6].view(2, 3).t()], bucket, [0], kept=[0]), not_kept.format(0, 0)),
        "kept of another dtype": (
            lambda: pack([bucket.view(torch.bfloat16)[:4]], bucket, [0], kept=[0]),
            not_kept.format(0, 0),
        ),
        "expanded": (
            lambda: unpack(bucket, [torch.zeros(2, 1).expand(2, 3)], [0]),
            "cuda_ext::bucket_unpack: expected tensors[0] whose elements do not share memory, got shape (2, 3) "
            "with strides (1, 0); clone it",
        ),
        "device": (
            lambda: pack([torch.zeros(4, device="meta")], bucket, [0]),
            "cuda_ext::bucket_pack: expected tensors[0] on device cpu, got meta; move it with .to()",
        ),
        "tensor requires grad": (
            lambda: pack([b, a.clone().requires_grad_()], bucket, [0, 6]),
            "cuda_ext::bucket_pack: expected tensors[1] to need no gradient, because the op has none, got "
            "requires_grad=True; call it under torch.no_grad()",
        ),
        "bucket requires grad": (
            lambda: unpack(bucket.clone().requires_grad_(), [a], [0]),
            "cuda_ext::bucket_unpack: expected bucket to need no gradient, because the op has none, got "
            "requires_grad=True; call it under torch.no_grad()",
        ),
        "offset near the largest number": (
            lambda: pack([a], bucket, [2**63 - 2]),
            f"cuda_ext::bucket_pack: expected bucket to hold tensors[0] at elements {2**63 - 2} to {2**63 - 1}, got "
            "shape (10,)",
        ),
        "memory that overlaps itself": (
            lambda: unpack(bucket, [torch.zeros(4).as_strided((2, 2), (1, 1))], [0]),
            "cuda_ext::bucket_unpack: expected tensors[0] whose elements do not share memory, got shape (2, 2) "
            "with strides (1, 1); clone it",
        ),
        "pack no list": (
            lambda: pack(None, bucket, [0]),
            "cuda_ext::bucket_pack: expected tensors to be a list of tensors, got None",
        ),
        "pack None": (
            lambda: pack([a, None], bucket, [0, 6]),
            "cuda_ext::bucket_pack: expected tensors[1] to be a tensor, got None",
        ),
        "pack no bucket": (
            lambda: pack([a], None, [0]),
            "cuda_ext::bucket_pack: expected bucket to be a tensor, got None",
        ),
        "unpack None": (
            lambda: unpack(bucket, [None], [0]),
            "cuda_ext::bucket_unpack: expected tensors[0] to be a tensor, got None",
        ),
        "stats None": (lambda: stats([None]), "cuda_ext::bucket_stats: expected tensors[0] to be a tensor, got None"),
        "no tensors": (lambda: stats([]), "cuda_ext::bucket_stats: expected at least one tensor, got none"),
    }


@pytest.mark.parametrize("case", _bad_inputs())
def test_bad_input(case: str) -> None:
    call, message = _bad_inputs()[case]
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}($|\n)"):
        call()


def test_one_argument_on_meta_is_refused_in_inference_mode_too() -> None:
    real, meta = torch.zeros(4), torch.zeros(4, device="meta")
    with torch.inference_mode():
        for call in (
            lambda: bucket_ops.pack([meta], real, [0]),
            lambda: bucket_ops.pack([real], meta, [0]),
            lambda: bucket_ops.unpack(real, [meta], [0]),
            lambda: bucket_ops.stats([real, meta]),
        ):
            with pytest.raises(RuntimeError, match=r"expected tensors\[[01]\] on device (cpu|meta), got (meta|cpu)"):
                call()


def test_refused_calls_write_nothing() -> None:
    bucket = torch.arange(10.0)
    with pytest.raises(RuntimeError):
        bucket_ops.pack([torch.ones(4), torch.ones(4)], bucket, [0, 7])
    assert_same(bucket, torch.arange(10.0))


# torch around the ops


def test_needs_no_grad_mode_only_where_a_gradient_would_be_needed() -> None:
    leaf = torch.randn(5, requires_grad=True)
    bucket = torch.empty(5)
    with torch.no_grad():
        assert not bucket_ops.pack([leaf], bucket, [0]).requires_grad
        bucket_ops.unpack(torch.ones(5), [leaf], [0])
    assert_same(leaf.detach(), torch.ones(5))


@pytest.mark.every_backend
def test_writes_are_seen_by_autograd() -> None:
    """A tensor saved for backward and then written to must not be used silently."""
    for write in (
        lambda saved: bucket_ops.pack([torch.ones(5)], saved, [0]),
        lambda saved: bucket_ops.unpack(torch.ones(5), [torch.zeros(0), saved], [0, 0]),
    ):
        leaf, saved = torch.randn(5, requires_grad=True), torch.randn(5)
        out = (leaf * saved).sum()
        write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
    read = torch.randn(5)
    bucket_ops.pack([read], torch.empty(5), [0])
    bucket_ops.stats([read])
    assert read._version == 0


@pytest.mark.every_backend
def test_inference_tensors() -> None:
    with torch.inference_mode():
        bucket, tensor = torch.empty(5), torch.randn(5)
        bucket_ops.pack([tensor], bucket, [0])
        assert_same(bucket, tensor)
        bucket_ops.unpack(bucket, [tensor], [0], scale=2.0)
        assert_same(tensor, 2 * bucket)
    bucket_ops.pack([tensor], bucket, [0])
    assert_same(bucket, tensor)


def test_autocast_changes_nothing() -> None:
    tensor, bucket = torch.randn(100), torch.empty(100)
    with torch.autocast("cpu", torch.bfloat16):
        bucket_ops.pack([tensor], bucket, [0])
    assert_same(bucket, tensor)


def test_vmap_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"cuda_ext: the bucket ops have no rule for torch\.func\.vmap"):
        torch.func.vmap(lambda x: bucket_ops.stats([x]))(torch.randn(3, 4))


def _samples() -> list[tuple[list[Tensor], Tensor, list[int]]]:
    mixed = [torch.randn(5), torch.randn(3, 7).bfloat16(), torch.randn(4, 4).t(), torch.zeros(0, 2).double()]
    samples = []
    for tensors in (mixed, [torch.randn(2, 2).double()], [torch.zeros(0)]):
        offsets, size = bucket_ops.aligned_offsets([tensor.numel() for tensor in tensors], torch.float32)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            samples.append((tensors, torch.randn(size + 1).to(dtype), offsets))
    return samples


@pytest.mark.parametrize("sample", range(9))
def test_opcheck(sample: int) -> None:
    tensors, bucket, offsets = _samples()[sample]
    for op, arguments, options in (
        (ops.bucket_pack.default, (tensors, bucket, offsets), {"scale": 0.5}),
        (ops.bucket_unpack.default, (bucket, tensors, offsets), {"scale": 0.5}),
        (ops.bucket_stats.default, (tensors,), {}),
    ):
        results = opcheck(op, arguments, options)
        assert set(results.values()) == {"SUCCESS"}
        assert len(results) == 4


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic: bool) -> None:
    def exchange(tensors: list[Tensor], bucket: Tensor, offsets: list[int]) -> tuple[Tensor, ...]:
        packed = bucket_ops.pack(tensors, bucket, offsets, scale=0.5)
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        unpacked = bucket_ops.unpack(bucket, outputs, offsets, scale=4.0)
        return packed, unpacked, bucket_ops.stats(outputs), *(output * 2 for output in outputs)

    compiled = torch.compile(exchange, fullgraph=True, dynamic=dynamic)
    for count in (5, 300):
        tensors = [torch.randn(count), torch.randn(3, count).bfloat16()]
        offsets, size = bucket_ops.aligned_offsets([tensor.numel() for tensor in tensors], torch.float32)
        buckets = torch.full((size,), math.nan), torch.full((size,), math.nan)
        for actual, expected in zip(
            compiled(tensors, buckets[0], offsets), exchange(tensors, buckets[1], offsets), strict=True
        ):
            assert_same(actual, expected)
        assert_same(*buckets)
