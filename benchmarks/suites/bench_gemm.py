"""GEMM and its fused epilogues, against the library matmul and sequences of PyTorch ops, also compiled."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_ext
from benchmarks.results import OURS
from benchmarks.suites import baselines
from benchmarks.suites.measure import Call, Case, relative_error
from cuda_ext._activations import ACTIVATIONS

Shape = tuple[int, int, int]  # M, N, K

CHECKED_ROWS = 256  # of the output; a float64 reference for all rows would take longer than the measurement


def cases(device: str) -> Iterator[Case]:
    """Most important first: a short run omits the last ones."""
    if device == "cpu":
        yield from _cpu_cases()
    else:
        yield from _cuda_cases()


def _cpu_cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        for size in (512, 1024, 2048):
            yield product(device="cpu", dtype=dtype, shape=(size, size, size), group="squares")
    # PyTorch takes a hundred times as long in float16, so larger products would take too long.
    yield product(device="cpu", dtype="float16", shape=(512, 512, 512), group="squares")
    for shape in ((64, 4096, 1024), (1024, 1024, 1024), (2048, 2048, 2048)):
        yield linear(device="cpu", dtype="float32", shape=shape, activation="gelu")
    yield linear(device="cpu", dtype="bfloat16", shape=(1024, 1024, 1024), activation="gelu")
    yield gated(device="cpu", dtype="float32", tokens=256, hidden=1024)
    yield feed_forward(device="cpu", dtype="float32", tokens=256, hidden=1024)
    for name, layout, shape in training_step(256, 2048, 2048):
        yield product(device="cpu", dtype="float32", shape=shape, layout=layout, group="training step", note=name)
    for m in (1, 16, 64, 256):
        for dtype in ("float32", "bfloat16"):
            yield product(device="cpu", dtype=dtype, shape=(m, 4096, 1024), layout="nt", group="skinny")
    for shape in ((333, 777, 555), (1023, 1025, 1021)):
        yield product(device="cpu", dtype="float32", shape=shape, group="odd")
    for shape in ((1, 4096, 1024), (1, 1000, 512), (4096, 1, 1024), (4, 512, 512), (33, 512, 512)):
        for layout in ("nn", "nt"):
            yield product(
                device="cpu", dtype="float32", shape=shape, layout=layout, group="few rows", note=layout.upper()
            )
    for size in (8, 16, 32, 64):
        yield batched(device="cpu", dtype="float32", batch=65536 // size**2, size=size)
    for rows, columns in ((4096, 64), (256, 1024), (4096, 1024), (2048, 10), (8, 4096)):
        yield bias_gradient(device="cpu", dtype="float32", rows=rows, columns=columns)


def _cuda_cases() -> Iterator[Case]:
    make = functools.partial(product, device="cuda")
    for size in (4096, 8192, 1024, 2048, 512, 16384):
        yield make(dtype="bfloat16", shape=(size, size, size), group="squares")
    for hidden in (4096, 8192, 2048, 5120):
        for name, n, k in (
            ("QKV", 3 * hidden, hidden),
            ("O", hidden, hidden),
            ("up", 4 * hidden, hidden),
            ("down", hidden, 4 * hidden),
        ):
            shape = (4096, n, k)
            yield make(dtype="bfloat16", shape=shape, layout="nt", group=f"transformer {hidden}", note=name)
        if hidden == 4096:
            for name, layout, shape in training_step(8192, hidden, hidden):
                yield make(dtype="bfloat16", shape=shape, layout=layout, group="training step", note=name)
    for tokens, hidden in ((8192, 4096), (2048, 2048)):
        yield linear(device="cuda", dtype="bfloat16", shape=(tokens, 4 * hidden, hidden), activation="gelu")
        yield linear(device="cuda", dtype="bfloat16", shape=(tokens, 4 * hidden, hidden), activation="gelu_tanh")
        yield gated(device="cuda", dtype="bfloat16", tokens=tokens, hidden=hidden)
        yield feed_forward(device="cuda", dtype="bfloat16", tokens=tokens, hidden=hidden)
    for m in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        yield make(dtype="bfloat16", shape=(m, 12288, 4096), layout="nt", group="skinny")
    for shape in ((1023, 1025, 1021), (4095, 4097, 4093), (4096, 4096, 4095), (333, 777, 555), (4100, 4100, 4100)):
        yield make(dtype="bfloat16", shape=shape, group="odd")
    for dtype in ("float16", "float32"):
        for size in (4096, 1024, 8192, 2048):
            yield make(dtype=dtype, shape=(size, size, size), group="squares")
    with_tf32 = {"dtype": "float32", "group": "squares tf32", "precision": "high"}
    for size in (4096, 8192, 2048):
        yield make(shape=(size, size, size), **with_tf32)
    for hidden in (4096, 8192):
        yield make(dtype="bfloat16", shape=(4096, 128256, hidden), layout="nt", group="logits")
    for layout in ("nt", "tn", "tt"):
        yield make(dtype="bfloat16", shape=(4096, 4096, 4096), layout=layout, group="layouts", note=layout.upper())


def training_step(tokens: int, features: int, inputs: int) -> list[tuple[str, str, Shape]]:
    """The three products of a training step of a linear layer, with their layouts."""
    return [
        ("Y = X Wᵀ", "nt", (tokens, features, inputs)),
        ("dX = dY W", "nn", (tokens, inputs, features)),
        ("dW = dYᵀ X", "tn", (features, inputs, tokens)),
    ]


def _shape_name(shape: Shape) -> str:
    return " × ".join(map(str, shape))


def _operands(shape: Shape, layout: str, dtype: str, device: str) -> tuple[Tensor, Tensor]:
    """a (M, K) and b (K, N), uniform in [-1, 1): zeros would run faster. "t" is stored transposed."""
    m, n, k = shape

    def matrix(rows: int, columns: int, transposed: bool) -> Tensor:
        stored = (columns, rows) if transposed else (rows, columns)
        values = torch.empty(stored, device=device).uniform_(-1, 1).to(getattr(torch, dtype))
        return values.t() if transposed else values

    return matrix(m, k, layout[0] == "t"), matrix(k, n, layout[1] == "t")


def _rows_to_check(m: int) -> Tensor:
    return torch.randperm(m)[:CHECKED_ROWS].sort().values


def product(
    *,
    device: str,
    dtype: str,
    shape: Shape,
    group: str,
    layout: str = "nn",
    note: str = "",
    precision: str = "",
) -> Case:
    """a @ b. `precision` is passed to torch.set_float32_matmul_precision."""
    m, n, k = shape
    size = getattr(torch, dtype).itemsize

    def inputs() -> tuple[Tensor, Tensor]:
        if device == "cuda":
            torch.set_float32_matmul_precision(precision or "highest")
        return _operands(shape, layout, dtype, device)

    def check(operands: tuple[Tensor, Tensor], out: Tensor) -> float:
        a, b = operands
        rows = _rows_to_check(m).to(a.device)
        return relative_error(out[rows], a[rows].double() @ b.double())

    sides: dict[str, Any] = {
        OURS: lambda ab: functools.partial(cuda_ext.gemm, *ab),
        "torch.matmul": lambda ab: functools.partial(torch.matmul, *ab),
    }
    if device == "cuda" and dtype != "float32":
        sides |= {
            "DeepGEMM": lambda ab: baselines.deep_gemm(*ab),
            "QuACK": lambda ab: baselines.quack(*ab),
        }
    return Case(
        op="gemm tf32" if precision else "gemm",
        phase="forward",
        group=group,
        name=f"{_shape_name(shape)}{f'  {note}' if note else ''}",
        dtype=dtype,
        sides=sides,
        inputs=inputs,
        check=check,
        size=float(m),
        size_name="M = N = K" if m == n == k else "M",
        flops=2.0 * m * n * k,
        bytes=float(size * (m * k + k * n + m * n)),
        input_bytes=float(size * (m * k + k * n + m * n)),
        extra={"layout": layout, "M": m, "N": n, "K": k},
    )


def batched(*, device: str, dtype: str, batch: int, size: int) -> Case:
    """Batched products of small squares."""
    moved = float(3 * batch * size**2 * getattr(torch, dtype).itemsize)
    return Case(
        op="gemm",
        phase="forward",
        group="batches",
        name=f"{batch} x {size}^3",
        dtype=dtype,
        sides={
            OURS: lambda ab: functools.partial(cuda_ext.gemm, *ab),
            "torch.bmm": lambda ab: functools.partial(torch.bmm, *ab),
        },
        inputs=lambda: tuple(torch.randn(2, batch, size, size, device=device).to(getattr(torch, dtype))),
        check=lambda operands, out: relative_error(out, operands[0].double() @ operands[1].double()),
        size=float(size),
        size_name="M = N = K",
        flops=2.0 * batch * size**3,
        bytes=moved,
        input_bytes=moved,
    )


def bias_gradient(*, device: str, dtype: str, rows: int, columns: int) -> Case:
    """Backward of a layer whose bias alone is trained: a sum of rows."""

    def step(layer: Any, operands: tuple[Tensor, ...]) -> Call:
        grad, inputs, weight = operands
        bias = torch.zeros(columns, device=device, dtype=grad.dtype, requires_grad=True)
        out = layer(inputs, weight, bias)
        return lambda: torch.autograd.grad(out, bias, grad, retain_graph=True)[0]

    moved = float(rows * columns * getattr(torch, dtype).itemsize)
    return Case(
        op="linear's bias",
        phase="backward",
        group="bias gradients",
        name=_shape_name((rows, columns, 1)),
        dtype=dtype,
        sides={OURS: functools.partial(step, cuda_ext.linear), "PyTorch": functools.partial(step, F.linear)},
        inputs=lambda: tuple(
            torch.randn(shape, device=device).to(getattr(torch, dtype))
            for shape in ((rows, columns), (rows, 1), (columns, 1))
        ),
        check=lambda operands, out: relative_error(out, operands[0].double().sum(0)),
        size=float(rows),
        size_name="rows",
        flops=float(rows * columns),
        bytes=moved,
        input_bytes=moved,
    )


def _and_compiled(device: str, sides: dict[str, Any], function: Any) -> dict[str, Any]:
    """Adds, on a GPU, the same sequence of ops compiled into one graph."""
    if device == "cuda":
        sides["torch.compile"] = lambda inputs: functools.partial(baselines.compiled(function), *inputs)
    return sides


def linear(*, device: str, dtype: str, shape: Shape, activation: str) -> Case:
    """activation(x @ w.T + bias)."""
    m, n, k = shape
    size = getattr(torch, dtype).itemsize
    function = ACTIVATIONS[activation].function

    def unfused(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return function(F.linear(x, w, bias))

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        x, w = _operands(shape, "nt", dtype, device)
        return x, w.t(), torch.randn(n, device=device).to(x.dtype)

    def check(operands: tuple[Tensor, ...], out: Tensor) -> float:
        x, w, bias = operands
        rows = _rows_to_check(m).to(x.device)
        return relative_error(out[rows], unfused(x[rows].double(), w.double(), bias.double()))

    sides: dict[str, Any] = {
        OURS: lambda xwb: functools.partial(cuda_ext.linear, *xwb, activation=activation),
        "unfused": lambda xwb: functools.partial(unfused, *xwb),
    }
    if device == "cuda" and activation == "gelu_tanh":
        fused = torch._addmm_activation
        sides["addmm_activation"] = lambda xwb: functools.partial(fused, xwb[2], xwb[0], xwb[1].t(), use_gelu=True)
    moved = float(size * (m * k + k * n + m * n))
    return Case(
        op=f"linear + bias + {activation}",
        phase="forward",
        group="fused epilogues",
        name=_shape_name(shape),
        dtype=dtype,
        sides=_and_compiled(device, sides, unfused),
        inputs=inputs,
        check=check,
        size=float(m),
        size_name="M",
        flops=2.0 * m * n * k,
        bytes=moved,
        input_bytes=moved,
    )


def gated(*, device: str, dtype: str, tokens: int, hidden: int) -> Case:
    """silu(x @ gate.T) * (x @ up.T), the first half of a SwiGLU layer, with 8/3 of the features rounded to 256."""
    features = _gated_features(hidden)
    size = getattr(torch, dtype).itemsize

    def unfused(x: Tensor, w: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up

    def inputs() -> tuple[Tensor, Tensor]:
        x, w = _operands((tokens, 2 * features, hidden), "nt", dtype, device)
        return x, w.t() * hidden**-0.5

    def check(operands: tuple[Tensor, Tensor], out: Tensor) -> float:
        x, w = operands
        rows = _rows_to_check(tokens).to(x.device)
        return relative_error(out[rows], unfused(x[rows].double(), w.double()))

    sides = {
        OURS: lambda xw: functools.partial(cuda_ext.gated_linear, *xw),
        "unfused": lambda xw: functools.partial(unfused, *xw),
    }
    moved = float(size * (tokens * hidden + 2 * features * hidden + tokens * features))
    return Case(
        op="gated_linear silu",
        phase="forward",
        group="fused epilogues",
        name=_shape_name((tokens, features, hidden)),
        dtype=dtype,
        sides=_and_compiled(device, sides, unfused),
        inputs=inputs,
        check=check,
        size=float(tokens),
        size_name="tokens",
        flops=4.0 * tokens * features * hidden,
        bytes=moved,
        input_bytes=moved,
    )


def feed_forward(*, device: str, dtype: str, tokens: int, hidden: int) -> Case:
    """Forward and backward of a whole SwiGLU layer, with gradients of the input and both weights."""
    features = _gated_features(hidden)
    size = getattr(torch, dtype).itemsize

    def unfused(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        gate, up = F.linear(x, w1).chunk(2, -1)
        return F.linear(F.silu(gate) * up, w2)

    def inputs() -> tuple[Tensor, ...]:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(getattr(torch, dtype))

        return (
            normal(tokens, hidden).requires_grad_(),
            normal(2 * features, hidden, scale=hidden**-0.5).requires_grad_(),
            normal(hidden, features, scale=features**-0.5).requires_grad_(),
            normal(tokens, hidden),
        )

    def step(layer: Any, operands: tuple[Tensor, ...]) -> Call:
        *leaves, grad = operands
        return lambda: torch.autograd.grad(layer(*leaves), leaves, grad)

    def check(operands: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> float:
        precise = torch.float64 if device == "cpu" else torch.float32
        exact = tuple(t.detach().to(precise).requires_grad_(t.requires_grad) for t in operands)
        return relative_error(gradients, step(unfused, exact)())

    sides: dict[str, Any] = {
        OURS: functools.partial(step, cuda_ext.gated_mlp),
        "unfused": functools.partial(step, unfused),
    }
    if device == "cuda":
        sides["torch.compile"] = lambda operands: step(baselines.compiled(unfused), operands)
    weights = 3 * features * hidden
    return Case(
        op="gated_mlp silu",
        phase="forward + backward",
        group="fused epilogues",
        name=_shape_name((tokens, features, hidden)),
        dtype=dtype,
        sides=sides,
        inputs=inputs,
        check=check,
        size=float(tokens),
        size_name="tokens",
        flops=3 * 2.0 * tokens * weights,
        bytes=float(size * (4 * tokens * hidden + 3 * weights)),
        input_bytes=float(size * (2 * tokens * hidden + weights)),
    )


def _gated_features(hidden: int) -> int:
    return -(-8 * hidden // 3 // 256) * 256
