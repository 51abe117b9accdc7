"""Which plan the GEMM on wgmma chooses and what it refuses, rows that do not depend on the others, and random problems
compared with PyTorch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gemm_cases import (  # noqa: F401
    LAYOUTS,
    build_plain,
    integers,
    operands,
    place_operands,
    plain_library,
)
from gemm_common import ROUNDINGS
from gemm_library import ACTIVATIONS, Gemm, GemmLibrary, Target, dtype_of, place, storage_type
from harness import Fault
from torch import Tensor

from cuda_ext import testing
from cuda_ext._activations import ACTIVATIONS as FUNCTIONS

COOPERATIVE, PING_PONG_192, PING_PONG, SWAPPED, NARROW = range(5)  # kConfigs in csrc/gemm/plan_sm90.h
H200_SMS = 132


@pytest.fixture(name="device")
def emulated_device() -> int:
    return 90


def empty(rows: int, columns: int, order: tuple[int, int] = (0, 1), offset: int = 0) -> np.ndarray:
    """bfloat16 in memory that is never touched, `offset` elements after a multiple of 16 bytes."""
    memory = np.empty(rows * columns + 32, storage_type("bfloat16"))
    begin = -memory.ctypes.data % 16 // memory.itemsize + offset
    shape = (rows, columns)
    return memory[begin : begin + rows * columns].reshape([shape[i] for i in order]).transpose(np.argsort(order))


def problem(m: int, n: int, k: int, layout: str = "nt") -> Gemm:
    """A product of these sizes, to plan and not to run."""
    out = Target.__new__(Target)
    out.storage = empty(m, n)
    return Gemm(empty(m, k, LAYOUTS[layout][0]), empty(k, n, LAYOUTS[layout][1]), out)


LARGE, FEW_ROWS = (COOPERATIVE, PING_PONG_192), (SWAPPED, NARROW)
# m, n, k: configs, cluster, whether k is split through memory.
CHOICES: dict[tuple[int, int, int], tuple[tuple[int, ...], int | None, bool]] = {
    (4096, 4096, 4096): (LARGE, 2, False),
    (8192, 8192, 8192): (LARGE, 2, False),
    (4096, 14336, 4096): (LARGE, 2, False),
    (4096, 4096, 128): ((PING_PONG_192, PING_PONG), 2, False),
    (512, 512, 512): ((PING_PONG,), 1, False),
    (65, 4096, 4096): ((PING_PONG,), 1, True),
    (256, 256, 65536): ((PING_PONG,), 2, True),
    (4096, 256, 65536): (LARGE, 2, True),
    (1, 2048, 4096): ((NARROW,), None, False),
}
CHOICES |= {
    (m, n, k): ((SWAPPED if m == 64 else NARROW,), None, False)
    for m, n, k in itertools.product((1, 16, 64), (4096, 14336), (4096, 14336))
}


@pytest.mark.parametrize("shape", CHOICES, ids=str)
def test_choice_on_an_h200(built: GemmLibrary, shape: tuple[int, int, int]) -> None:
    configs, cluster, is_split = CHOICES[shape]
    with built.options(compute_capability=90, processors=H200_SMS):
        plan = built.plan_sm90(problem(*shape))
    assert not isinstance(plan, str) and plan.config in configs, plan
    assert cluster in (None, plan.cluster) and (plan.splits > 1) == is_split, plan
    assert plan.tma_store == (plan.config not in FEW_ROWS), "TMA stores what is not transposed"


def test_k_is_divided_in_a_cluster_where_tiles_are_few(built: GemmLibrary) -> None:
    with built.options(compute_capability=90, processors=H200_SMS):
        plans = {n: built.plan_sm90(problem(1, n, 8192)) for n in (512, 1024, 2048, 8192)}
        invariant = built.plan_sm90(replace(problem(1, 512, 8192), batch_invariant=True))
    blocks = {n: plan.k_blocks for n, plan in plans.items() if not isinstance(plan, str)}
    assert blocks[512] >= blocks[1024] >= blocks[2048] > 1 == blocks[8192], plans
    assert not isinstance(invariant, str) and invariant.k_blocks == invariant.splits == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_product_has_a_large_tile_in_every_layout(built: GemmLibrary, layout: str) -> None:
    with built.options(compute_capability=90, processors=H200_SMS):
        plan = built.plan_sm90(problem(8192, 8192, 8192, layout))
    assert not isinstance(plan, str) and plan.config in LARGE and (plan.cluster, plan.splits) == (2, 1)


def batched(sizes: tuple[int, ...], k: int, order: tuple[int, ...] | None = None) -> Gemm:
    a = place(integers((*sizes, 16, k)), "bfloat16", order)
    b = np.broadcast_to(empty(k, 16), (*sizes, k, 16))
    return Gemm(a, b, Target((*sizes, 16, 16), "bfloat16"))


def of_float32(layout: str, tf32: bool) -> Gemm:
    a, b, _ = operands(64, 64, 64, "tf32", layout)
    return Gemm(a, b, Target((64, 64), "float32"), tf32=tf32)


def gated(n: int, layout: str) -> Gemm:
    a, b, _ = operands(64, 2 * n, 64, "bfloat16", layout)
    return Gemm(a, b, Target((64, n), "bfloat16"), n=n, gated=True, activation="silu")


def with_a(a: np.ndarray) -> Gemm:
    call = problem(*a.shape[:1], 64, a.shape[1])
    call.a = a
    return call


REFUSALS = {
    "a has a stride that is no multiple of 16 bytes": lambda: problem(64, 64, 60, "nt"),
    "b has a stride that is no multiple of 16 bytes": lambda: problem(64, 60, 64, "nn"),
    "a does not begin at a multiple of 16 bytes": lambda: with_a(empty(64, 64, offset=4)),
    "a has rows or columns with a stride of 0": lambda: with_a(np.broadcast_to(empty(1, 64), (64, 64))),
    "a has a batch stride that is no multiple of 16 bytes": lambda: batched((4,), 20, (1, 0, 2)),
    "a has more than 3 batch dims": lambda: batched((3, 2, 3, 2), 24),
    "float32 takes three products of tf32": lambda: of_float32("nt", False),
    "b is not contiguous along k, as wgmma needs it for tf32": lambda: of_float32("nn", True),
    "a is not contiguous along k, as wgmma needs it for tf32": lambda: of_float32("tt", True),
    "the second half of b's columns does not begin at a multiple of 16 bytes": lambda: gated(12, "nn"),
    "k is 0": lambda: problem(64, 64, 0),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refusals(library: GemmLibrary, reason: str) -> None:
    assert library.plan_sm90(REFUSALS[reason]()) == reason


def test_halves_of_columns_along_k_may_begin_anywhere(library: GemmLibrary) -> None:
    assert not isinstance(library.plan_sm90(gated(12, "nt")), str)


@pytest.mark.parametrize("compute_capability", [80, 86, 89, 100, 120])
def test_devices_without_wgmma(built: GemmLibrary, compute_capability: int) -> None:
    with built.options(compute_capability=compute_capability):
        assert built.plan_sm90(problem(64, 64, 64)) == f"the device has no wgmma; it is sm_{compute_capability}"


@pytest.mark.parametrize(
    ("restriction", "m"),
    [
        ({"config": SWAPPED}, 65),
        ({"config": NARROW}, 17),
        ({"config": NARROW, "cluster": 2}, 16),
        ({"config": PING_PONG, "k_blocks": 2}, 64),
        ({"config": NARROW, "k_blocks": 3}, 16),
        ({"splits": 3}, 300),
    ],
    ids=str,
)
def test_restrictions_that_do_not_fit(library: GemmLibrary, restriction: dict[str, int], m: int) -> None:
    with library.restricted(**restriction):
        assert library.plan_sm90(problem(m, 64, 128)) == "no tile shape fits the restriction"


def test_small_workspaces_are_refused(library: GemmLibrary) -> None:
    a, b, _ = operands(16, 24, 2300, "bfloat16", "nt")
    call = Gemm(a, b, Target((16, 24), "float32"), workspace_bytes=16)
    library.gemm(Gemm(a, b, Target((16, 24), "float32")))
    launched = library.counters()["blocks"]
    with (
        library.restricted(splits=3),
        pytest.raises(Fault, match=r"gemm_sm90: expected a workspace of \d+ bytes, got 16"),
    ):
        library.gemm(call)
    assert library.counters()["blocks"] == launched, "nothing is launched"


def test_what_the_driver_refuses_is_an_error(library: GemmLibrary) -> None:
    a, b, _ = operands(16, 24, 512, "bfloat16", "nt")
    library.gemm(Gemm(a, b, Target((16, 24), "float32")))
    launched = library.counters()["blocks"]
    far = np.lib.stride_tricks.as_strided(a, (2, 512), (1 << 40, 2))
    message = (
        "gemm_sm90: tensor map: expected a multiple of 16 below 2.40 for the stride in bytes of dimension 1, got 1099"
    )
    for splits in (1, 2):
        with library.restricted(splits=splits), pytest.raises(Fault, match=message):
            library.gemm(Gemm(far, b, Target((2, 24), "float32")))
        assert library.counters()["blocks"] == launched, "nothing is launched"


# Rows that do not depend on the others.


@pytest.mark.parametrize("k", [328, 331], ids=["k_328", "k_331_in_padded_rows"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_bits_of_a_row_do_not_depend_on_other_rows(library: GemmLibrary, has_residual: bool, k: int) -> None:
    n, most = 200, 300
    rng = np.random.default_rng(random.getrandbits(64))
    a, b, _ = operands(most, n, k, "bfloat16", "nt")
    for operand in (a, b):
        operand[...] = place(rng.normal(size=operand.shape), "bfloat16")
    call = Gemm(a, b, Target((most, n), "bfloat16"), activation="gelu", alpha=0.3, batch_invariant=True)
    call.bias = place(rng.normal(size=(n,)), "float32")
    call.residual = place(rng.normal(size=(most, n)), "bfloat16") if has_residual else None
    configs = set()
    with library.options(processors=H200_SMS):
        library.gemm(call)
        whole = call.out.storage.copy()
        rows = {1, 2, 7, 16, 33, 63, 64, 65, 128, 129, 257, 300, *(random.randint(1, most) for _ in range(4))}
        for m in rows:
            first = random.randint(0, most - m)
            part = replace(call, a=a[first : first + m], out=Target((m, n), "bfloat16"))
            part.residual = call.residual[first : first + m] if has_residual else None
            plan = library.plan_sm90(part)
            assert not isinstance(plan, str) and plan.config not in FEW_ROWS and plan.splits == 1, plan
            configs.add(plan.config)
            library.gemm(part)
            np.testing.assert_array_equal(part.out.storage, whole[first : first + m])
        before = call.a[17].copy()
        call.a[:] = place(np.full(a.shape, np.nan), "bfloat16")
        call.a[17] = before
        library.gemm(call)
        np.testing.assert_array_equal(call.out.storage[17], whole[17])
    assert configs


# Random problems.

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_torch(array: np.ndarray) -> Tensor:
    values = torch.from_numpy((array.view(np.int16) if array.dtype == np.uint16 else array).copy())
    return values.view(torch.bfloat16) if array.dtype == np.uint16 else values


def in_pytorch(call: Gemm, dtype: torch.dtype) -> dict[str, Tensor]:
    """The outputs of `call` by plain operations in `dtype`."""

    def read(array: np.ndarray) -> Tensor:
        return to_torch(array).to(dtype)

    def operand(array: np.ndarray) -> Tensor:
        """Of float32 the tensor cores read the upper 19 bits; here only the plain computation does."""
        exact = dtype == torch.float64 or array.dtype != np.float32
        return read(array if exact else (array.view(np.uint32) & 0xFFFFE000).view(np.float32))

    product = call.alpha * (operand(call.a) @ operand(call.b))
    if call.reduced_dims:
        product = product.sum(tuple(range(call.reduced_dims)))
    n, act = call.params().n, FUNCTIONS[None if call.activation == "none" else call.activation].function
    if call.preact is not None:
        z = read(call.preact).requires_grad_()
        hidden = act(z[:, :n]) * z[:, n:] if call.gated else act(z)
        (out,) = torch.autograd.grad(hidden, z, product)
        return {"out": out, "hidden": hidden.detach(), "bias_grad": out.sum(0)}
    z = product
    if call.c is not None:
        z = z + call.beta * read(call.c)
    if call.bias is not None:
        z = z + read(call.bias)
    out = act(z[..., :n]) * z[..., n:] if call.gated else act(z)
    if call.residual is not None:
        out = out + read(call.residual)
    return {"out": out, "preact_out": z}


def random_call() -> Gemm:
    """Odd sizes and even ones, any layout, gaps, alignment, batch and epilogue; about half of what TMA can read."""
    rng, pick = np.random.default_rng(random.getrandbits(64)), random.choice
    arithmetic, layout = pick(("bfloat16", "float16", "tf32")), pick(tuple(LAYOUTS))
    if arithmetic == "tf32":
        layout = "nt"
    m, n, k = (pick((random.randint(1, 64), random.randint(1, 300), 8 * random.randint(1, 40))) for _ in range(3))
    kind = pick(("forward", "forward", "forward", "gated", "backward", "gated backward"))
    batch = pick(((), (), (3,), (2, 2))) if kind == "forward" else ()
    reduced = pick(((), (2,))) if kind != "gated" else ()
    parts = 2 if kind.startswith("gated") else 1
    columns = parts * n if kind == "gated" else n
    own = batch if random.random() < 0.5 else (1,) * len(batch)
    alignment = pick((0, 0, 0, 1, 2))
    a, b, tf32 = place_operands((*reduced, *batch), (*reduced, *own), m, columns, k, arithmetic, layout, alignment)
    for operand in (a, b):
        operand[...] = place(rng.normal(size=operand.shape, scale=k**-0.25), dtype_of(operand))
    b = np.broadcast_to(b, (*reduced, *batch, k, columns))
    dtype = pick((dtype_of(a), dtype_of(a), "float32"))

    def term(*shape: int) -> np.ndarray:
        return place(rng.normal(size=shape), dtype, offset=pick((0, 1)), gap=pick((0, 3)) if len(shape) > 1 else 0)

    width = n if kind in ("forward", "gated", "backward") else 2 * n
    call = Gemm(a, b, Target((*batch, m, width), dtype, pick((0, 0, 1))), n=n, reduced_dims=len(reduced), tf32=tf32)
    call.gated, call.activation, call.alpha = parts == 2, pick(ACTIVATIONS), pick((1.0, 1.0, -0.7))
    if "backward" in kind:
        call.preact, call.hidden = term(m, parts * n), Target((m, n), dtype)
        call.bias_grad = Target((parts * n,), dtype)
        return call
    call.bias = pick((None, term(columns)))
    if kind == "forward":
        call.c, call.beta = pick((None, None, term(*batch, m, n))), pick((1.0, 0.5))
    call.residual = pick((None, None, term(*batch, m, n)))
    call.preact_out = pick((None, None, Target((*batch, m, columns), dtype)))
    return call


def test_the_random_problems_use_wgmma_often(library: GemmLibrary) -> None:
    served = sum(not isinstance(library.plan_sm90(random_call()), str) for _ in range(60))
    assert 20 < served < 60


@pytest.mark.sampled(cases=60)
@pytest.mark.parametrize("number", range(300))
def test_random_problems_are_as_exact_as_pytorch(built: GemmLibrary, number: int) -> None:
    call = random_call()
    plan: dict[str, Any] = {"config": random.choice((-1, -1, *range(5)))}
    plan |= random.choice(({}, {"splits": 2}, {"k_blocks": 2}))
    built.reset()
    processors = random.choice((1, 4, 132))
    with built.device(90), built.options("lazy", "pct", number, processors=processors), built.restricted(**plan):
        served = not isinstance(built.plan_sm90(call), str)
        built.gemm(call)
    counters = built.counters()
    assert (counters["wgmma"] > 0) == (counters["tma_load_bytes"] > 0) == served
    dtype = TORCH[dtype_of(call.out.storage)]
    plain, exact = in_pytorch(call, dtype), in_pytorch(call, torch.float64)
    for name, target in vars(call).items():
        if isinstance(target, Target):
            target.values()  # checks the canaries
            # Of float32, PyTorch sums blocks of k, and tensor cores the products one after the other: as many roundings
            # more as gemm_common.py allows.
            slack = ROUNDINGS * torch.finfo(dtype).eps * float(exact[name].abs().max())
            got, atol = to_torch(target.storage), slack if dtype == torch.float32 else None
            testing.assert_close_to_reference(got, plain[name], exact[name], atol=atol, name=name)
