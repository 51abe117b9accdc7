"""The cases of `correct` for matrix products: every kernel by its plan, the epilogues, and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from cuda_ext import fp8, testing, tuning
from cuda_ext._activations import ACTIVATIONS
from cuda_ext.testing.references import stochastic_float8

# name -> (actual, expected).
Results = dict[str, tuple[Tensor, Tensor]]
Case = tuple[str, Callable[[], Results]]

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("nn", "nt", "tn", "tt")
# How the two operands of a layout lie in memory, as in the names of the kernels: along m, n or k.
ALONG = {"nn": "kn", "nt": "kk", "tn": "mn", "tt": "mk"}
EMULATED = ("sm_90a", 4)  # architecture and number of SMs of the rehearsal
REPEATS = 4  # of a kernel that promises the same bits in every run
SAME_BITS = "bits of "  # of the names of results that must be equal


class NotHere(Exception):
    """The GPU, or the build, has no such kernel; the message says why."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def settle() -> None:
    """Waits for the GPU, so that a fault is attributed to what was called before."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def again(op: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Results:
    """On a GPU, runs that differ from the first one, which is a race."""
    if not tensors[0].is_cuda:
        return {}
    first, *others = (op(*tensors, **options) for _ in range(REPEATS))
    return {
        f"{SAME_BITS}run {i + 2} and of the first": (other, first)
        for i, other in enumerate(others)
        if not torch.equal(other.nan_to_num(), first.nan_to_num())
    }


def rand(*shape: int, dtype: torch.dtype = BFLOAT16, transposed: bool = False) -> Tensor:
    tensor = torch.randn(shape[::-1] if transposed else shape, dtype=FLOAT32).mul_(shape[0] ** -0.5).to(dtype)
    return tensor.t() if transposed else tensor


def operands(m: int, n: int, k: int, dtype: torch.dtype, layout: str = "nn") -> tuple[Tensor, Tensor]:
    return rand(m, k, dtype=dtype, transposed=layout[0] == "t"), rand(k, n, dtype=dtype, transposed=layout[1] == "t")


def product(op: Callable[..., Tensor], reference: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Results:
    """The output of an op and the gradients of all its tensors."""

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = function(*leaves, **options)
        settle()
        generator = torch.Generator(out.device).manual_seed(1)
        grad_out = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float64)
        return [out, *torch.autograd.grad(out, leaves, grad_out.to(tensors[0].dtype).to(dtype))]

    names = ["output", *(f"gradient {i}" for i in range(len(tensors)))]
    return dict(zip(names, zip(run(op, tensors[0].dtype), run(reference, torch.float64))))


@contextmanager
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def in_tf32(case: Callable[[], Results]) -> Results:
    with tf32():
        return case()


def gemm(m: int, n: int, k: int, dtype: torch.dtype, layout: str = "nn") -> Results:
    return product(cuda_ext.gemm, testing.reference_gemm, *operands(m, n, k, dtype, layout))


# By a given plan

Plan = tuple[int, int, int, int, bool]  # config, cluster, k_blocks, splits, sm80: as in cuda_ext.tuning.Product
# Of the configs for wgmma, and of the shapes for mma.sync: their tiles.
TILES_SM90 = ("128x256", "128x192", "128x128", "64x64", "64x16")
TILES_SM80 = ("128x256", "128x128", "64x64")


def name_of_product(a: Tensor, b: Tensor) -> str:
    """The name of a product in the table of measured plans (csrc/ops/tuning.cpp); `tuning.tune` would run it first."""
    arch, processors = EMULATED
    if a.is_cuda:
        properties = torch.cuda.get_device_properties(a.device)
        arch, processors = f"sm_{properties.major}{properties.minor}", properties.multi_processor_count
    along = [f"a along {'k' if a.stride(1) == 1 else 'm'}", f"b along {'k' if b.stride(0) == 1 else 'n'}"]
    in_tf32 = a.dtype == FLOAT32 and torch.get_float32_matmul_precision() != "highest"
    words = [f"{a.shape[0]} x {b.shape[1]} x {a.shape[1]} {name_of(a.dtype)}", *along, *["tf32"] * in_tf32]
    return f"{arch.removesuffix('a')} x {processors}: {', '.join(words)}"


def planned(a: Tensor, b: Tensor, plan: Plan) -> Results:
    """The product by one plan."""
    config, cluster, k_blocks, splits, sm80 = plan
    torch.ops.cuda_ext._set_measured_gemm(name_of_product(a, b), [config, cluster, k_blocks, splits, sm80], [1.0, 1.0])
    try:
        told = cuda_ext.gemm_plan(a, b)
        if not sm80 and "has no wgmma" in told.refusal:
            raise NotHere(told.refusal)
        tile = (TILES_SM80 if sm80 else TILES_SM90)[config]
        is_planned = (told.cluster, told.k_blocks, told.splits) == (cluster, k_blocks, splits)
        is_planned &= told.kernel == ("sm_80" if sm80 else "sm_90") and tile == f"{told.tile[0]}x{told.tile[1]}"
        if not is_planned:
            raise RuntimeError(f"expected the plan {tile}, {plan[1:]}; what would run: {' '.join(str(told).split())}")
        return {"output": (cuda_ext.gemm(a, b), a.double() @ b.double())} | again(cuda_ext.gemm, a, b)
    finally:
        tuning.clear()


def by_plan(m: int, n: int, k: int, dtype: torch.dtype, layout: str, plan: Plan) -> Results:
    return planned(*operands(m, n, k, dtype, layout), plan)


def unaligned(m: int, n: int, k: int, dtype: torch.dtype, layout: str, plan: Plan, skip: int) -> Results:
    """Of parts of larger matrices, `skip` elements after their beginning: TMA cannot read them."""
    a, b = operands(m + skip, n + skip, k + skip, dtype, layout)
    return planned(a[skip:, skip:], b[skip:, skip:], plan)


def plan_cases(large: bool) -> Iterator[Case]:
    """Every tile with every layout of the operands, then each way to divide the work. Sizes with tails in all dims, and
    few rows for the tiles of the transposed product."""

    def case(dtype: torch.dtype, layout: str, plan: Plan, size: tuple[int, int, int] | None = None) -> Case:
        config, cluster, k_blocks, splits, _ = plan
        m, n, k = size or {3: (56, 328, 584), 4: (16, 328, 1480)}.get(config, (328, 520, 328))
        is_tf32 = dtype == FLOAT32
        words = [f"{TILES_SM90[config]}", "tf32" if is_tf32 else name_of(dtype), ALONG[layout]]
        words += [f"{letter}{value}" for letter, value in zip("cks", (cluster, k_blocks, splits)) if value > 1]
        run = partial(by_plan, m, n, k, dtype, layout, plan)
        return f"wgmma {' '.join(words)}, {m} x {n} x {k}", partial(in_tf32, run) if is_tf32 else run

    configs = range(len(TILES_SM90))
    plain: Plan
    for config in configs if large else (2, 3):
        plain = (config, 1, 1, 1, False)
        for layout in LAYOUTS if large or config == 2 else ("nt",):
            # The last layout of 64 columns along m is not read in lines of 16 columns.
            if config == 4 and layout[0] == "t":
                continue
            yield case(BFLOAT16, layout, plain)
    divided: list[Plan] = [(2, 2, 1, 1, False), (0, 1, 1, 2, False), (3, 1, 4, 1, False)]
    if large:
        divided += [(config, 2, 1, 1, False) for config in configs if config != 2]
        divided += [(config, cluster, 1, 3, False) for config in configs for cluster in (1, 2)]
        divided += [(3, 2, 2, 1, False), (3, 2, 4, 1, False), (4, 1, 8, 1, False), (4, 2, 4, 1, False)]
    for plan in divided:
        yield case(BFLOAT16, "nn", plan)
        if large:
            yield case(BFLOAT16, "nt", plan)
    if large:
        for config in configs:
            plain = (config, 1, 1, 1, False)
            for layout in LAYOUTS:
                if not (config == 4 and layout[0] == "t"):
                    yield case(FLOAT16, layout, plain)
            yield case(FLOAT32, "nt", plain)
        yield case(FLOAT32, "nt", (2, 2, 1, 2, False))
        for config in (0, 1, 2):  # several tiles for each block
            yield case(BFLOAT16, "nt", (config, 2, 1, 1, False), (4104, 4104, 264))
        yield case(BFLOAT16, "nn", (3, 1, 1, 1, False), (64, 16392, 1032))
    else:
        yield case(FLOAT16, "nt", (2, 1, 1, 1, False))
        yield case(FLOAT32, "nt", (2, 1, 1, 1, False))
    for shape in range(len(TILES_SM80)) if large else (2,):
        for dtype, layout, skip in (
            (BFLOAT16, "nn", 1),
            *(((BFLOAT16, layout, 2) for layout in LAYOUTS) if large else ()),
            *(((FLOAT16, layout, 1) for layout in LAYOUTS) if large else ()),
        ):
            plain = (shape, 1, 1, 1, True)
            size = (132, 264, 106)  # even, so that strides have no larger alignment than the beginning
            words = f"{TILES_SM80[shape]} {name_of(dtype)} {ALONG[layout]}, accesses of {2 * skip} bytes"
            yield f"mma.sync {words}", partial(unaligned, *size, dtype, layout, plain, skip)


# Epilogues and gradients, by the plan that is chosen


def slot() -> Results:
    """The gradient of a weight, added to what its slot holds."""
    x, w, grad = rand(136, 72), rand(264, 72).requires_grad_(), rand(136, 264)
    weight_slot = torch.randn(264, 72)
    exact = weight_slot.double() + grad.double().t() @ x.double()
    torch.ops.cuda_ext.linear_backward.slot(
        grad, x, w, None, output_mask=[False, True, False], weight_slot=weight_slot, slot_alpha=1.0, slot_beta=1.0
    )
    return {"slot": (weight_slot, exact)}


def invariant(m: int, n: int, k: int) -> Results:
    a, b = operands(m, n, k, BFLOAT16)
    with cuda_ext.batch_invariant():
        out, few = cuda_ext.gemm(a, b), cuda_ext.gemm(a[:3], b)
    return {"output": (out, a.double() @ b.double()), f"{SAME_BITS}three rows, alone and of more": (few, out[:3])}


def of_shapes(
    op: Callable[..., Tensor], reference: Callable[..., Tensor], *shapes: tuple[int, ...], **options: Any
) -> Results:
    return product(op, reference, *(rand(*shape) for shape in shapes), **options)


def with_residual(function: Callable[..., Tensor], input: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return function(input, weight, activation="silu", residual=residual)


def with_c(function: Callable[..., Tensor], a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Tensor:
    return function(a, b, c, bias=bias, alpha=0.5, beta=2.0)


def to_float32(m: int, n: int, k: int) -> Results:
    a, b = operands(m, n, k, BFLOAT16)
    return {"output": (cuda_ext.gemm(a, b, out_dtype=FLOAT32), a.double() @ b.double())}


def epilogue_cases(large: bool) -> Iterator[Case]:
    linear = cuda_ext.linear, testing.reference_linear
    gated_linear = cuda_ext.gated_linear, testing.reference_gated_linear
    gated_mlp = cuda_ext.gated_mlp, testing.reference_gated_mlp
    product_of = cuda_ext.gemm, testing.reference_gemm
    for m, n, k in [(33, 72, 40)] + ([(520, 776, 264)] if large else []):
        size, x, w = f"{m} x {n} x {k}", (m, k), (n, k)
        for activation in ACTIVATIONS if large else ("gelu", None):
            name = f"linear bias {activation or ''}".strip()
            yield f"{name} {size}", partial(of_shapes, *linear, x, w, (n,), activation=activation)
        residual = partial(with_residual, linear[0]), partial(with_residual, linear[1])
        yield f"linear residual silu {size}", partial(of_shapes, *residual, x, w, (m, n))
        yield f"gated_linear bias {size}", partial(of_shapes, *gated_linear, x, (2 * n, k), (2 * n,))
        yield f"gated_mlp {size}", partial(of_shapes, *gated_mlp, x, (2 * n, k), (k, n))
        accumulated = partial(with_c, product_of[0]), partial(with_c, product_of[1])
        yield f"gemm c beta bias {size}", partial(of_shapes, *accumulated, x, (k, n), (m, n), (n,))
        yield f"gemm to float32 {size}", partial(to_float32, m, n, k)
    yield "gemm batched 3 x 40 x 72 x 104", partial(of_shapes, *product_of, (3, 40, 104), (104, 72))
    yield "gradient added to a slot", slot
    yield "batch-invariant 140 x 72 x 1000", partial(invariant, 140, 72, 1000)


# In FP8


def scaled(
    m: int, n: int, k: int, scalings: tuple[str, str], formats: tuple[torch.dtype, torch.dtype], fast: bool = False
) -> Results:
    (left, right), (of_left, of_right) = scalings, formats
    a, scale_a = fp8.quantize(torch.randn(m, k), left, dtype=of_left)
    b, scale_b = fp8.quantize(torch.randn(n, k), right, dtype=of_right)

    def run(a: Tensor, b: Tensor, dtype: torch.dtype = BFLOAT16) -> Tensor:
        operands = a, b.t(), scale_a, left, scale_b, right
        return cuda_ext.scaled_mm(*operands, output_dtype=dtype, use_fast_accum=fast)

    exact = testing.reference_scaled_mm(a, b.t(), scale_a, left, scale_b, right)
    # Not to float32: the tensor cores keep about 14 bits of a sum.
    results = {name_of(dtype): (run(a, b, dtype), exact) for dtype in (BFLOAT16, FLOAT16)}
    return results | again(run, a, b)


def quantised(rows: int, columns: int, scaling: str, dtype: torch.dtype, of_input: torch.dtype) -> Results:
    """A matrix and its transpose, of which every bit is defined."""
    x = torch.randn(rows, columns, dtype=of_input)
    found = fp8.quantize_both(x, scaling, dtype=dtype)
    expected = fp8.quantize_both(x.cpu(), scaling, dtype=dtype)
    names = (f"{SAME_BITS}{what} and of the CPU's" for what in ("data", "scales", "transpose", "its scales"))
    return {
        name: (mine.float(), theirs.to(mine.device).float())
        for name, mine, theirs in zip(names, found, expected, strict=True)
    }


def next_draw(device: torch.device) -> tuple[int, int]:
    """The seed and offset of the next call that draws random numbers."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return generator.initial_seed(), generator.get_offset() + 2**63
    with torch.random.fork_rng([]):
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)) % 2**64, 0


def stochastically_quantised(rows: int, columns: int, scaling: str, dtype: torch.dtype) -> Results:
    x = torch.randn(rows, columns, dtype=BFLOAT16)
    seed, offset = next_draw(x.device)
    found = fp8.quantize_both(x, scaling, dtype=dtype, stochastic=True)
    of = partial(stochastic_float8, scaling=scaling, dtype=dtype, seed=seed, offset=offset)
    return {
        f"{SAME_BITS}data and of the definition": (found[0].double(), of(x, found[1])),
        f"{SAME_BITS}transpose and of the definition": (found[2].double(), of(x.t(), found[3], transpose=True)),
    }


def quantised_hidden(rows: int, columns: int, scaling: str, of_input: torch.dtype, activation: str) -> Results:
    """Of a gated MLP: as one that a product with the identity has stored, whose float32 sums are exact in 16 bits."""
    x = torch.randn(rows, 2 * columns, dtype=of_input)
    h = cuda_ext.gated_linear(x, torch.eye(2 * columns, dtype=of_input), activation=activation)
    expected = fp8.quantize_both(h, scaling)
    found = fp8.quantize_both(x, scaling, activation=activation, gated=True)
    names = (f"{SAME_BITS}{what}, fused and not" for what in ("data", "scales", "transpose", "its scales"))
    return {name: (mine.float(), theirs.float()) for name, mine, theirs in zip(names, found, expected, strict=True)}


def quantised_cases(large: bool) -> Iterator[Case]:
    scalings = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")
    sizes = ((300, 264), (129, 127), (8192, 4104)) if large else ((300, 264),)
    for scaling, (rows, columns), of_input in itertools.product(scalings, sizes, (BFLOAT16, FLOAT32)):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) if large else (torch.float8_e4m3fn,):
            words = f"{name_of(of_input)} to {name_of(dtype)} {rows} x {columns}"
            yield f"quantize scaled {scaling} {words}", partial(quantised, rows, columns, scaling, dtype, of_input)
    formats = (torch.float8_e4m3fn, torch.float8_e5m2)
    for scaling, (rows, columns), dtype in itertools.product(scalings, sizes, formats if large else formats[:1]):
        words = f"{scaling} to {name_of(dtype)} {rows} x {columns}"
        yield f"quantize stochastic {words}", partial(stochastically_quantised, rows, columns, scaling, dtype)
    names = [name for name in ACTIVATIONS if name is not None]
    for scaling, activation in itertools.product(scalings, names if large else ("silu",)):
        for rows, columns in ((300, 264), (129, 127)) if large else ((129, 127),):
            hidden = partial(quantised_hidden, rows, columns, scaling, BFLOAT16, activation)
            yield f"quantize gated {activation} {scaling} {rows} x {columns}", hidden


def scaled_cases(large: bool) -> Iterator[Case]:
    """Both tile shapes of the kernel on wgmma, tails in all dims, each format, each scaling."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    blocks = ("BlockWise1x128", "BlockWise128x128")
    for scalings, formats, (m, n, k) in (
        (("TensorWise", "TensorWise"), (e4m3, e4m3), (256, 256, 512)),
        (blocks, (e4m3, e4m3), (328, 264, 400)),
        *(
            (
                (("RowWise", "RowWise"), (e4m3, e5m2), (61, 130, 300)),
                (("RowWise", "RowWise"), (e5m2, e4m3), (1000, 2056, 1000)),
                ((blocks[0], blocks[0]), (e5m2, e5m2), (520, 392, 1480)),
                (blocks, (e4m3, e4m3), (4104, 4096, 4096)),  # several tiles for each block, of 128 rows
                (blocks, (e4m3, e4m3), (8192, 8192, 520)),  # of 256
            )
            if large
            else ()
        ),
    ):
        words = f"{' '.join(dict.fromkeys(scalings))} {' '.join(name_of(format) for format in formats)}"
        yield f"scaled_mm {words} {m} x {n} x {k}", partial(scaled, m, n, k, scalings, formats)
    # Sums in the tensor cores, which would not keep the digits of bfloat16 if k were much longer.
    for m, n, k in ((264, 1032, 260), (8136, 8200, 520)) if large else ((264, 1032, 260),):
        case = partial(scaled, m, n, k, ("RowWise", "RowWise"), (e4m3, e4m3), fast=True)
        yield f"scaled_mm use_fast_accum {m} x {n} x {k}", case


# Of groups


def grouped(rows: list[int], n: int, k: int, dtype: torch.dtype, layout: str, rest: int = 0) -> Results:
    """Products of groups of rows, the gradient of the rows, and that of the matrices; a gate, and what it saves."""
    offs = torch.tensor(rows).cumsum(0).to(torch.int32)
    a = torch.randn(sum(rows) + rest, k, dtype=dtype)
    b = torch.randn(len(rows), *((n, k) if layout == "nt" else (k, n)), dtype=dtype).mul_(k**-0.5)
    b, bias = b.mT if layout == "nt" else b, torch.randn(len(rows), n, dtype=dtype)
    grad = torch.randn(len(a), n, dtype=dtype)
    run = partial(cuda_ext.grouped_mm, offs=offs)
    exact = partial(testing.reference_grouped_mm, offs=offs)
    half = b[..., : n // 16 * 16]  # gate and up, of whole units of TMA
    gated, product = torch.ops.cuda_ext.grouped_mm_forward(a, half, offs, activation="silu", gated=True)
    indices = torch.randint(0, len(a), (len(a),))
    copies = a[indices]
    return {
        "out": (run(a, b, bias=bias), exact(a, b, bias=bias)),
        "gated": (gated, exact(a, half, activation="silu", gated=True)),
        "product": (product, exact(a, half)),
        "gradient of the rows": (run(grad, b.mT), exact(grad, b.mT)),
        "gradient of the matrices": (run(a.t(), grad), exact(a.t(), grad)),
        "gathered rows": (run(a, b, bias=bias, indices=indices), exact(copies, b, bias=bias)),
        "gathered terms": (run(grad.t(), a, indices=indices), exact(grad.t(), copies)),
    } | again(run, a, b)


def scaled_groups(rows: list[int], n: int, k: int, scalings: tuple[str, str], of_left: torch.dtype) -> Results:
    """Products of FP8 of groups of rows, beside the product of each group."""
    left, right = scalings
    offs = torch.tensor(rows).cumsum(0).to(torch.int32)
    a, scale_a = fp8.quantize(torch.randn(sum(rows), k), left, dtype=of_left)
    each = [fp8.quantize(torch.randn(n, k), right) for _ in rows]
    b, scale_b = torch.stack([data.contiguous() for data, _ in each]).mT, torch.stack([scales for _, scales in each])
    out = cuda_ext.scaled_grouped_mm(a, b, scale_a, left, scale_b, right, offs=offs)
    parts = zip(a.split(rows), scale_a.split(rows), each, strict=True)
    exact = [
        testing.reference_scaled_mm(part, data.t(), scale, left, scales, right) for part, scale, (data, scales) in parts
    ]
    return {name_of(BFLOAT16): (out, torch.cat(exact))}


def scaled_groups_cases(large: bool) -> Iterator[Case]:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    sizes: list[tuple[list[int], int, int]] = [([1, 17, 0, 130], 264, 300)]
    if large:
        sizes += [([600, 0, 2049, 513], 1000, 1032), ([50] * 100, 768, 512)]
    for (rows, n, k), scalings, of_left in itertools.product(
        sizes, (("RowWise", "RowWise"), ("BlockWise1x128", "BlockWise128x128")), (e4m3, e5m2)
    ):
        name = f"scaled_grouped_mm {scalings[0]} {name_of(of_left)} {len(rows)} groups, {sum(rows)} x {n} x {k}"
        yield name, partial(scaled_groups, rows, n, k, scalings, of_left)


def scaled_terms(blocks: list[int], m: int, n: int) -> Results:
    """Sums of FP8 over groups of terms, beside the sum of each group; and twice into the slot of a gradient."""
    scaling, number = "BlockWise1x128", 4
    terms = [128 * count for count in blocks]
    offs = torch.tensor(terms).cumsum(0).to(torch.int32)
    (a, scale_a), (b, scale_b) = (fp8.quantize(torch.randn(lines, sum(terms) + 128), scaling) for lines in (m, n))
    out = cuda_ext.scaled_grouped_mm(a, b.t(), scale_a, scaling, scale_b, scaling, offs=offs)
    slot = torch.full((len(blocks), m, n), torch.nan)
    write = torch.ops.cuda_ext.scaled_grouped_mm.slot
    operands = a, b.t(), scale_a, number, scale_b, number, offs
    for beta in (0.0, 1.0):
        write(*operands, weight_slot=slot, slot_alpha=0.5, slot_beta=beta)
    exact, end = [], 0
    for count in blocks:
        begin, end = end, end + count
        left, right = a[:, 128 * begin : 128 * end], b[:, 128 * begin : 128 * end]
        of_left, of_right = scale_a[:, begin:end], scale_b[:, begin:end]
        exact.append(testing.reference_scaled_mm(left, right.t(), of_left, scaling, of_right, scaling))
    return {name_of(BFLOAT16): (out, torch.stack(exact)), "slot": (slot, torch.stack(exact))}


def scaled_terms_cases(large: bool) -> Iterator[Case]:
    sizes: list[tuple[list[int], int, int]] = [([1, 0, 2], 72, 136)]
    if large:
        sizes += [([5, 0, 17, 4], 1000, 1032), ([1] * 40, 768, 512)]
    for blocks, m, n in sizes:
        yield (
            f"scaled_grouped_mm terms {len(blocks)} groups, {m} x {n} x {128 * sum(blocks)}",
            partial(scaled_terms, blocks, m, n),
        )


def grouped_cases(large: bool) -> Iterator[Case]:
    """Groups around a slab and a tile, empty ones, clusters; every layout of the kernel on wgmma, and mma.sync."""
    sizes: list[tuple[list[int], int, int, int]] = [([1, 17, 0, 130], 264, 72, 9)]
    if large:
        sizes += [([600, 0, 2049, 513], 1000, 1032, 100), ([50] * 100, 768, 512, 0), ([1000, 3000], 100, 520, 1)]
    for (rows, n, k, rest), layout, dtype in itertools.product(sizes, ("nn", "nt"), (BFLOAT16, FLOAT16)):
        name = f"grouped_mm {name_of(dtype)} {layout} {len(rows)} groups, {sum(rows)} x {n} x {k}"
        yield name, partial(grouped, rows, n, k, dtype, layout, rest)


def gemm_cases(large: bool) -> Iterator[Case]:
    """The simplest first; then the products with gradients, whose plans are chosen by size."""
    yield from plan_cases(large)
    for layout in LAYOUTS:
        yield f"gemm bfloat16 {layout} 136 x 72 x 104", partial(gemm, 136, 72, 104, BFLOAT16, layout)
    yield "gemm bfloat16 nn 24 x 40 x 4096", partial(gemm, 24, 40, 4096, BFLOAT16)  # split k
    yield "gemm float16 nn 61 x 37 x 83", partial(gemm, 61, 37, 83, FLOAT16)
    yield "gemm float32 nn 72 x 40 x 64", partial(gemm, 72, 40, 64, FLOAT32)
    yield "gemm tf32 nn 72 x 40 x 64", partial(in_tf32, partial(gemm, 72, 40, 64, FLOAT32))
    yield from epilogue_cases(large)
    yield from quantised_cases(large)
    yield from scaled_cases(large)
    yield from grouped_cases(large)
    yield from scaled_groups_cases(large)
    yield from scaled_terms_cases(large)
    if large:  # whole tiles, many waves, split k
        for m, n, k in ((1024, 1024, 1024), (4096, 2048, 1024), (64, 1024, 8192), (1000, 1000, 1000)):
            yield f"gemm bfloat16 nn {m} x {n} x {k}", partial(gemm, m, n, k, BFLOAT16)
        for dtype in (FLOAT16, FLOAT32):
            yield f"gemm {name_of(dtype)} nt 1024 x 768 x 512", partial(gemm, 1024, 768, 512, dtype, "nt")
        yield "gemm tf32 tn 1024 x 768 x 512", partial(in_tf32, partial(gemm, 1024, 768, 512, FLOAT32, "tn"))
