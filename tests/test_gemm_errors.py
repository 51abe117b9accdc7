"""Bad input to the GEMM ops: each refusal, word for word."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_common import EXPECTED_ACTIVATION
from torch._subclasses import FakeTensorMode

from cuda_ext._gemm import gated_linear, gated_mlp, gemm, linear, mlp
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE


def t(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


HALF, DOUBLE, INT = {"dtype": torch.float16}, {"dtype": torch.float64}, {"dtype": torch.int64}
OUT_DTYPES = "gemm: expected out_dtype float32, float16 or bfloat16 (float64 for float64 inputs)"
DTYPES = "float32, float16, bfloat16 or float64"
BAD: list[tuple[Callable[[], Any], str]] = [
    # gemm
    (lambda: gemm(t(8, 64), t(32, 16)), "gemm: expected b of shape (..., 64, N) to match a (8, 64), got (32, 16)"),
    (lambda: gemm(t(8, 64), t(64)), "gemm: expected b of shape (..., 64, N) to match a (8, 64), got (64,)"),
    (lambda: gemm(t(64), t(64, 2)), "gemm: expected a of shape (..., M, K), got (64,)"),
    (lambda: gemm(t(), t(64, 2)), "gemm: expected a of shape (..., M, K), got ()"),
    (
        lambda: gemm(t(2, 3, 4), t(3, 4, 5)),
        "gemm: expected the batch dims of a and b to broadcast, got a (2, 3, 4) and b (3, 4, 5)",
    ),
    (lambda: gemm(t(2, 3), t(3, 4), t(2, 5)), "gemm: expected c to broadcast to the output (2, 4), got (2, 5)"),
    (lambda: gemm(t(2, 3), t(3, 4), t(1, 2, 4)), "gemm: expected c to broadcast to the output (2, 4), got (1, 2, 4)"),
    (lambda: gemm(t(2, 3), t(3, 4), bias=t(1)), "gemm: expected bias of shape (4,), got (1,)"),
    (lambda: gemm(t(2, 3), t(3, 4), bias=t(1, 4)), "gemm: expected bias of shape (4,), got (1, 4)"),
    (
        lambda: gemm(t(2, 3), t(3, 4, **HALF)),
        "gemm: expected b of dtype float32 to match a, got float16; convert one of them with .to()",
    ),
    (
        lambda: gemm(t(2, 3, **INT), t(3, 4, **INT)),
        f"gemm: expected a of dtype {DTYPES}, got int64; convert it with .to()",
    ),
    (
        lambda: gemm(t(2, 3), t(3, 4), t(2, 4, **HALF)),
        "gemm: expected c of dtype float32 (the inputs') or float32 (the output's), got float16; convert it with .to()",
    ),
    (
        lambda: gemm(t(2, 3, **HALF), t(3, 4, **HALF), bias=t(4), out_dtype=torch.bfloat16),
        "gemm: expected bias of dtype float16 (the inputs') or bfloat16 (the output's), got float32; "
        "convert it with .to()",
    ),
    (
        lambda: gemm(t(2, 3), t(3, 4), out_dtype=torch.float64),
        OUT_DTYPES + ", got float64 for inputs of float32",
    ),
    (
        lambda: gemm(t(2, 3, **DOUBLE), t(3, 4, **DOUBLE), out_dtype=torch.float32),
        OUT_DTYPES + ", got float32 for inputs of float64",
    ),
    (
        lambda: gemm(t(2, 3), t(3, 4), out_dtype=torch.int32),
        OUT_DTYPES + ", got int32 for inputs of float32",
    ),
    (lambda: gemm(t(2, 3), t(3, 4), alpha=math.nan), "gemm: expected alpha to be a number, got nan"),
    (lambda: gemm(t(2, 3), t(3, 4), t(4), beta=math.nan), "gemm: expected beta to be a number, got nan"),
    (
        lambda: gemm(t(2, 3), t(3, 4), activation="swish"),
        f"gemm: {EXPECTED_ACTIVATION}, got 'swish'",
    ),
    # linear
    (
        lambda: linear(t(8, 64), t(16, 32)),
        "linear: expected weight of shape (N, 64) to match input (8, 64), got (16, 32)",
    ),
    (lambda: linear(t(8, 64), t(64)), "linear: expected weight of shape (N, 64) to match input (8, 64), got (64,)"),
    (lambda: linear(t(), t(16, 32)), "linear: expected input of shape (..., K), got a 0-dim tensor"),
    (lambda: linear(t(8, 3), t(4, 3), t(8)), "linear: expected bias of shape (4,), got (8,)"),
    (
        lambda: linear(t(8, 3), t(4, 3), residual=t(3, 4)),
        "linear: expected residual to broadcast to the output (8, 4), got (3, 4)",
    ),
    (
        lambda: linear(t(8, 3, **HALF), t(4, 3)),
        "linear: expected weight of dtype float16 to match input, got float32; convert one of them with .to()",
    ),
    (
        lambda: linear(t(8, 3, **INT), t(4, 3)),
        f"linear: expected input of dtype {DTYPES}, got int64; convert it with .to()",
    ),
    (
        lambda: linear(t(8, 3), t(4, 3), activation="GELU"),
        f"linear: {EXPECTED_ACTIVATION}, got 'GELU'",
    ),
    # gated_linear
    (
        lambda: gated_linear(t(8, 3), t(6, 4)),
        "gated_linear: expected weight of shape (2N, 3) to match input (8, 3), got (6, 4)",
    ),
    (
        lambda: gated_linear(t(8, 3), t(5, 3)),
        "gated_linear: expected weight to have an even number of rows, [gate; up], got (5, 3)",
    ),
    (lambda: gated_linear(t(8, 3), t(6, 3), t(3)), "gated_linear: expected bias of shape (6,), got (3,)"),
    # mlp, gated_mlp
    (lambda: mlp(t(8, 3), t(6, 4), t(2, 6)), "mlp: expected weight1 of shape (N, 3) to match input (8, 3), got (6, 4)"),
    (
        lambda: mlp(t(8, 3), t(6, 3), t(2, 5)),
        "mlp: expected weight2 of shape (N, 6) to match weight1 (6, 3), got (2, 5)",
    ),
    (lambda: mlp(t(8, 3), t(6, 3), t(2, 6), t(5)), "mlp: expected bias1 of shape (6,), got (5,)"),
    (lambda: mlp(t(8, 3), t(6, 3), t(2, 6), None, t(5)), "mlp: expected bias2 of shape (2,), got (5,)"),
    (
        lambda: mlp(t(8, 3), t(6, 3), t(2, 6, **HALF)),
        "mlp: expected weight2 of dtype float32 to match input, got float16; convert one of them with .to()",
    ),
    (
        lambda: gated_mlp(t(8, 3), t(6, 3), t(2, 6)),
        "gated_mlp: expected weight2 of shape (N, 3) to match weight1 (6, 3), got (2, 6)",
    ),
    (
        lambda: gated_mlp(t(8, 3), t(5, 3), t(2, 2)),
        "gated_mlp: expected weight1 to have an even number of rows, [gate; up], got (5, 3)",
    ),
    (
        lambda: gated_mlp(t(8, 3), t(6, 3), t(2, 3), activation="tanh"),
        f"gated_mlp: {EXPECTED_ACTIVATION}, got 'tanh'",
    ),
    (
        lambda: gated_mlp(t(8, 3), t(6, 3), t(2, 3), residual=t(3, 2)),
        "gated_mlp: expected residual to broadcast to the output (8, 2), got (3, 2)",
    ),
    (
        lambda: mlp(t(8, 3), t(6, 3), t(2, 6), residual=t(2, dtype=torch.float16)),
        "mlp: expected residual of dtype float32 (the inputs') or float32 (the output's), got float16; "
        "convert it with .to()",
    ),
    # backward ops
    (
        lambda: ops.linear_backward(t(2, 5), t(2, 3), t(4, 3), None, output_mask=[True] * 3),
        "linear_backward: expected grad_out of shape (2, 4), got (2, 5)",
    ),
    (
        lambda: ops.activation_backward(t(2, 4), t(0), activation="gelu", gated=False, bias_dtype=None),
        "activation_backward: expected preact of shape (2, 4), got (0,)",
    ),
    (
        lambda: ops.activation_backward(t(2, 4), t(2, 4), activation="silu", gated=True, bias_dtype=None),
        "activation_backward: expected preact of shape (2, 8), got (2, 4)",
    ),
    (
        lambda: ops.activation_backward(t(2, 4), t(2, 4), activation="tanh", gated=False, bias_dtype=None),
        f"activation_backward: {EXPECTED_ACTIVATION}, got 'tanh'",
    ),
    (
        lambda: ops.mlp_hidden_backward(
            t(2, 4), t(4, 8), t(2, 4), None, None, activation="silu", gated=False, output_mask=[True] * 4
        ),
        "mlp_hidden_backward: expected preact of shape (2, 8), got (2, 4)",
    ),
    (
        lambda: ops.mlp_hidden_backward(
            t(2, 5), t(4, 8), t(2, 8), None, None, activation="silu", gated=False, output_mask=[True] * 4
        ),
        "mlp_hidden_backward: expected grad_out of shape (..., N) and weight2 of shape (N, K), got (2, 5) and (4, 8)",
    ),
    (
        lambda: ops.gemm_backward(t(2, 5), t(2, 3), t(3, 4), None, alpha=1.0, beta=1.0, output_mask=[True] * 4),
        "gemm_backward: expected grad_out of shape (2, 4), got (2, 5)",
    ),
]


@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_refusal(call: Callable[[], Any], message: str, device: str) -> None:
    with (
        FakeTensorMode() if device == "fake" else torch.device(device),
        pytest.raises(RuntimeError, match="^" + re.escape(f"{NAMESPACE}::{message}") + r"(\n|$)"),
    ):
        call()


def test_refusal_comes_with_gradients_and_autocast_too() -> None:
    message = re.escape(f"{NAMESPACE}::linear: expected weight of shape (N, 3) to match input (2, 3), got (4, 5)")
    with pytest.raises(RuntimeError, match=message):
        linear(t(2, 3, requires_grad=True), t(4, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match=message):
        linear(t(2, 3), t(4, 5))


@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "mkldnn"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_layouts_other_than_strided_are_refused(layout: str, requires_grad: bool) -> None:
    x = torch.eye(3)
    x = {"sparse": x.to_sparse, "sparse_csr": x.to_sparse_csr, "mkldnn": x.to_mkldnn}[layout]()
    weight = torch.eye(3, requires_grad=requires_grad)
    message = re.escape(f"{NAMESPACE}::linear: expected dense tensors of layout torch.strided")
    with pytest.raises(RuntimeError, match=message):
        linear(x, weight)


def test_python_signature_is_checked() -> None:
    with pytest.raises(TypeError):
        linear(t(2, 3), t(4, 3), t(4), "relu")
    with pytest.raises(RuntimeError, match=r"expected Tensor|Expected a value of type 'Tensor"):
        gemm([[1.0]], t(1, 1))


def test_none_for_a_tensor() -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: gemm(None, t(3, 4)), "gemm: expected a"),
        (lambda: gemm(t(2, 3), None), "gemm: expected b"),
        (lambda: linear(None, t(4, 3)), "linear: expected input"),
        (lambda: linear(t(2, 3).requires_grad_(), None), "linear: expected weight"),
        (lambda: mlp(t(2, 3), t(5, 3), None), "mlp: expected weight2"),
    ]
    for call, message in calls:
        with pytest.raises(RuntimeError, match=f"^{NAMESPACE}::{message} to be a tensor, got None"):
            call()
