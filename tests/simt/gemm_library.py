"""Calls the GEMM's launchers with NumPy arrays: strided inputs, and outputs between canaries."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import CSRC, HERE, Fault, Library

from cuda_ext._activations import ACTIVATIONS as FUNCTIONS

MAX_BATCH_DIMS = 8
ACTIVATIONS = tuple(name or "none" for name in FUNCTIONS)
DTYPES = ("float32", "float16", "bfloat16")  # in the order of Dtype
POISON = 0xFF  # a NaN in every dtype
CANARY_BYTES = 512

_I64s = ctypes.c_int64 * MAX_BATCH_DIMS


class _Operand(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_uint8),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
        ("batch_strides", _I64s),
    ]


class _Output(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_uint8)]


class _Groups(ctypes.Structure):
    _fields_ = [
        ("cut", ctypes.c_uint8),
        ("ends", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("indices", ctypes.c_void_p),
        ("source_rows", ctypes.c_int64),
    ]


class GemmParams(ctypes.Structure):
    _fields_ = [
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("batch_dims", ctypes.c_int),
        ("batch_sizes", _I64s),
        ("reduced_dims", ctypes.c_int),
        ("reduced_sizes", _I64s),
        ("reduced_strides_a", _I64s),
        ("reduced_strides_b", _I64s),
        ("a", _Operand),
        ("b", _Operand),
        ("alpha", ctypes.c_double),
        ("beta", ctypes.c_double),
        ("activation", ctypes.c_uint8),
        ("gated", ctypes.c_bool),
        ("groups", _Groups),
        ("batch_invariant", ctypes.c_bool),
        ("out", _Output),
        ("c", _Operand),
        ("bias", _Operand),
        ("residual", _Operand),
        ("preact_out", _Output),
        ("preact", _Operand),
        ("hidden", _Output),
        ("bias_grad", _Output),
    ]


class ActivationGradParams(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("activation", ctypes.c_uint8),
        ("gated", ctypes.c_bool),
        ("grad_out", _Operand),
        ("preact", _Operand),
        ("grad_preact", _Output),
        ("bias_grad", _Output),
    ]


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """The storage of float32 values (bfloat16 as uint16), rounded to nearest, ties to even."""
    values = np.asarray(values, np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(storage: np.ndarray) -> np.ndarray:
    if storage.dtype == np.uint16:
        return (storage.astype(np.uint32) << 16).view(np.float32)
    return storage.astype(np.float32)


def storage_type(dtype: str) -> np.dtype[Any]:
    return np.dtype({"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype])


def dtype_of(storage: np.ndarray) -> str:
    return {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16"}.get(storage.dtype, "bfloat16")


def place(
    values: np.ndarray, dtype: str, order: Sequence[int] | None = None, offset: int = 0, gap: int = 0
) -> np.ndarray:
    """Stores `values` with dims ordered in memory as in `order` (outermost first), starting `offset` elements after a
    multiple of 256 bytes, with `gap` poisoned elements after each line."""
    order = list(range(values.ndim)) if order is None else list(order)
    shape = [values.shape[i] for i in order]
    padded = [*shape[:-1], shape[-1] + gap]
    item = storage_type(dtype).itemsize
    size = int(np.prod(padded)) * item
    raw = np.full(size + offset * item + 512, POISON, np.uint8)
    begin = -raw.ctypes.data % 256 + offset * item
    stored = raw[begin : begin + size].view(storage_type(dtype)).reshape(padded)[..., : shape[-1]]
    stored = stored.transpose(np.argsort(order))
    stored[...] = encode(values, dtype)
    return stored


class Target:
    """A poisoned output between canaries, `offset` elements after a multiple of 256 bytes."""

    def __init__(self, shape: Sequence[int], dtype: str, offset: int = 0) -> None:
        item = storage_type(dtype).itemsize
        size = int(np.prod(shape)) * item
        raw = np.full(size + offset * item + 2 * CANARY_BYTES + 256, POISON, np.uint8)
        begin = -raw.ctypes.data % 256 + CANARY_BYTES + offset * item
        self._before, self._after = raw[:begin], raw[begin + size :]
        self._before[:] = self._after[:] = 0xA5
        self.storage = raw[begin : begin + size].view(storage_type(dtype)).reshape(shape)

    def values(self) -> np.ndarray:
        assert (self._before == 0xA5).all(), "the kernel wrote before the output"
        assert (self._after == 0xA5).all(), "the kernel wrote after the output"
        return decode(self.storage)


def _operand(array: np.ndarray | None, batch_dims: int = 0) -> _Operand:
    """The last two dims are rows and columns; the batch dims before them come innermost first."""
    if array is None:
        return _Operand()
    strides = [s // array.itemsize for s in array.strides]
    batch = strides[:-2][::-1][:batch_dims]
    return _Operand(array.ctypes.data, DTYPES.index(dtype_of(array)), strides[-2], strides[-1], _I64s(*batch))


def _output(target: Target | None) -> _Output:
    if target is None:
        return _Output()
    return _Output(target.storage.ctypes.data, DTYPES.index(dtype_of(target.storage)))


@dataclass
class Gemm:
    """The arguments of one product. a: (*reduced, *batch, m, k), b: (*reduced, *batch, k, n or 2n), strided."""

    a: np.ndarray
    b: np.ndarray
    out: Target | None
    n: int | None = None  # columns of the output, if not b's
    reduced_dims: int = 0
    alpha: float = 1.0
    beta: float = 1.0
    activation: str = "none"
    gated: bool = False
    batch_invariant: bool = False
    c: np.ndarray | None = None
    bias: np.ndarray | None = None
    residual: np.ndarray | None = None
    preact_out: Target | None = None
    preact: np.ndarray | None = None
    hidden: Target | None = None
    bias_grad: Target | None = None
    tf32: bool = False
    workspace_bytes: int | None = field(default=None)  # None: as many as the launcher asks for

    def params(self) -> GemmParams:
        a, b, reduced = self.a, self.b, self.reduced_dims
        batch = a.shape[reduced:-2]
        item_a, item_b = a.itemsize, b.itemsize
        return GemmParams(
            m=a.shape[-2],
            n=b.shape[-1] if self.n is None else self.n,
            k=a.shape[-1],
            batch_dims=len(batch),
            batch_sizes=_I64s(*batch[::-1]),
            reduced_dims=reduced,
            reduced_sizes=_I64s(*a.shape[:reduced][::-1]),
            reduced_strides_a=_I64s(*(s // item_a for s in a.strides[:reduced][::-1])),
            reduced_strides_b=_I64s(*(s // item_b for s in b.strides[:reduced][::-1])),
            a=_operand(a, len(batch)),
            b=_operand(b, len(batch)),
            alpha=self.alpha,
            beta=self.beta,
            activation=ACTIVATIONS.index(self.activation),
            gated=self.gated,
            batch_invariant=self.batch_invariant,
            out=_output(self.out),
            c=_operand(self.c, len(batch)),
            bias=_operand(None if self.bias is None else self.bias[None]),
            residual=_operand(self.residual, len(batch)),
            preact_out=_output(self.preact_out),
            preact=_operand(self.preact),
            hidden=_output(self.hidden),
            bias_grad=_output(self.bias_grad),
        )


class PlanSm90(NamedTuple):
    """Of sm90::GemmPlan in csrc/gemm/plan_sm90.h."""

    config: int
    cluster: int
    k_blocks: int
    splits: int
    tma_store: bool


class Workspace:
    """The memory of a launcher, full of poison. `allocate` is the C function that provides it."""

    def __init__(self) -> None:
        self.allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(self._allocate)

    def _allocate(self, size: int) -> int:
        self._memory = Target([size], "float16").storage
        return int(self._memory.ctypes.data)


class GemmLibrary(Library):
    def __init__(self, path: Any) -> None:
        super().__init__(path)
        c = self._c
        for name in ("gemm_params_size", "activation_grad_params_size"):
            getattr(c, name).restype = ctypes.c_size_t
        assert c.gemm_params_size() == ctypes.sizeof(GemmParams)
        assert c.activation_grad_params_size() == ctypes.sizeof(ActivationGradParams)

    @classmethod
    def make(cls, hooks: bool = False) -> GemmLibrary:
        sources = sorted((CSRC / "gemm").rglob("*.cu"), key=lambda path: path.name)
        library = cls.build("gemm-hooks" if hooks else "gemm", [HERE / "gemm_kernels.cu", *sources], hooks)
        assert isinstance(library, GemmLibrary)
        return library

    def gemm(self, call: Gemm) -> None:
        params, workspace = call.params(), Workspace()
        error = ctypes.create_string_buffer(8192)
        most = ctypes.c_size_t(call.workspace_bytes if call.workspace_bytes is not None else -1)
        if self._c.gemm_run(ctypes.byref(params), workspace.allocate, most, call.tf32, error, ctypes.c_size_t(8192)):
            raise Fault(error.value.decode())

    @contextmanager
    def restricted(
        self, config: int = -1, cluster: int = 0, k_blocks: int = 0, splits: int = 0, copies: int = -1
    ) -> Iterator[None]:
        """Restricts the choice of a plan for wgmma within the block; see csrc/gemm/problem.h."""
        self._c.gemm_restrict(config, cluster, k_blocks, splits, copies)
        try:
            yield
        finally:
            self._c.gemm_restrict(-1, 0, 0, 0, -1)

    def copies_sm90(self, call: Gemm) -> str:
        """Which operands a plan for wgmma copies: "", "a", "b" or "ab"."""
        out, refusal = (ctypes.c_int * 6)(), ctypes.create_string_buffer(512)
        params = call.params()
        if not self._c.gemm_choice_sm90(ctypes.byref(params), call.tf32, out, refusal, ctypes.c_size_t(512)):
            return ""
        return "a" * (out[5] & 1) + "b" * (out[5] >> 1)

    def plan_sm90(self, call: Gemm) -> PlanSm90 | str:
        """The plan for wgmma, or why it cannot compute the product."""
        out, refusal = (ctypes.c_int * 6)(), ctypes.create_string_buffer(512)
        params = call.params()
        if self._c.gemm_choice_sm90(ctypes.byref(params), call.tf32, out, refusal, ctypes.c_size_t(512)):
            return PlanSm90(*out[:4], bool(out[4]))
        return refusal.value.decode()

    def activation_grad(
        self,
        grad_out: np.ndarray,
        preact: np.ndarray | None,
        grad_preact: Target | None,
        bias_grad: Target | None,
        activation: str = "none",
        gated: bool = False,
    ) -> None:
        params = ActivationGradParams(
            rows=grad_out.shape[0],
            n=grad_out.shape[1],
            activation=ACTIVATIONS.index(activation),
            gated=gated,
            grad_out=_operand(grad_out),
            preact=_operand(preact),
            grad_preact=_output(grad_preact),
            bias_grad=_output(bias_grad),
        )
        workspace, error = Workspace(), ctypes.create_string_buffer(8192)
        if self._c.activation_grad_run(ctypes.byref(params), workspace.allocate, error, ctypes.c_size_t(8192)):
            raise Fault(error.value.decode())

    def choice(self, m: int, n: int, k: int, compute_capability: int, processors: int) -> tuple[int, int, int, int]:
        """The heuristic's choice: block_m, block_n, block_k and number of k splits."""
        params = GemmParams(m=m, n=n, k=k)
        params.a = _Operand(256, DTYPES.index("bfloat16"), k, 1)
        params.b = _Operand(256, DTYPES.index("bfloat16"), n, 1)
        out = (ctypes.c_int * 4)()
        self._c.gemm_choice(ctypes.byref(params), compute_capability, processors, out)
        return out[0], out[1], out[2], out[3]


@dataclass
class Expected:
    out: np.ndarray
    preact: np.ndarray | None = None
    hidden: np.ndarray | None = None
    bias_grad: np.ndarray | None = None


def activate(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative, in float64."""
    z = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    y = FUNCTIONS[None if name == "none" else name].function(z)
    (slope,) = torch.autograd.grad(y.sum(), z)
    return y.detach().numpy(), slope.numpy()


def expected(call: Gemm) -> Expected:
    """The result that GemmParams specifies, in float64 from the stored values."""
    product = (decode(call.a).astype(np.float64) @ decode(call.b)).sum(tuple(range(call.reduced_dims)))
    g = call.alpha * product
    n = call.params().n
    if call.preact is not None:
        z = decode(call.preact)
        if call.gated:
            gate, slope = activate(call.activation, z[:, :n])
            grad = np.concatenate([g * z[:, n:] * slope, g * gate], -1)
            hidden = gate * z[:, n:]
        else:
            hidden, slope = activate(call.activation, z)
            grad = g * slope
        return Expected(grad, hidden=hidden, bias_grad=grad.sum(0))
    z = g
    if call.c is not None:
        z = z + call.beta * decode(call.c)
    if call.bias is not None:
        z = z + decode(call.bias)
    out, _ = activate(call.activation, z[..., :n] if call.gated else z)
    if call.gated:
        out = out * z[..., n:]
    if call.residual is not None:
        out = out + decode(call.residual)
    return Expected(out, preact=z)
