"""The test matrices of other implementations of the loss: their shapes, dtypes and options, by our rule of errors.

The rule (`loss_common.check`) is stricter than each of theirs: twice the error of plain PyTorch, for 16-bit operands
also with float32 logits, in the loss and in every gradient. The operands are distributed as theirs are.

| matrix | here |
|---|---|
| Liger Kernel, test_fused_linear_cross_entropy.py: `test_correctness` | `test_liger_correctness`, all cells |
| the same, `test_correctness_functional` | `test_liger_functional`, all cells |
| the same, `test_amp` | `test_liger_autocast`, all cells |
| Cut Cross-Entropy, test_cce_loss_forward.py and test_cce_loss_backward.py | `test_cce`, all cells of both at once |
| the same, `test_loss_partials` | `test_cce_gradients_of_some_operands`, all cells |
| QuACK, test_linear_cross_entropy.py: without and with z-loss | `test_quack_linear`, all cells, narrower (see below) |
| the same, with `ignore_index` | `test_quack_ignored`, all cells, both with and without z-loss |
| QuACK, test_cross_entropy.py and test_cross_entropy_weight.py | `test_quack_logits`, of at most 2^23 logits |
| the same: ignored rows, reductions | `test_quack_weighted_and_ignored`, `test_quack_weighted_reductions` |
| the same: uniform weights | `test_quack_uniform_weights_change_nothing`, all cells |
| the same: extreme values, stability, edge targets | `test_quack_limits` |
| PyTorch, `nn.LinearCrossEntropyLoss` (#175039), module inputs | `test_torch_module_inputs`, all but those below |
| PyTorch, test_nn.py: gradcheck, no_grad, retain_graph, chunk and batch invariance | `test_torch_*` |
| PyTorch, test of its CuTe kernels: strided targets, large common logit, empty batch | `test_torch_*`, test_loss.py |

What does not apply:

- Liger's `return_z_loss`: `return_lse` gives it. That two of its doors agree: there is one.
- Cut Cross-Entropy's `shift` is a slice of both operands, as here. Its implementations are methods here; gradients are
  never filtered.
- QuACK's `chunk_size`, PyTorch's `batch_chunk_size`, `chunking_method` and `acc_policy`: there is nothing to choose but
  the method, of which each runs. QuACK's `inplace_backward` and `return_dx` return gradients of logits, which do not
  exist here.
- QuACK's linear matrix has 768 and 1024 features, whose float64 reference takes gigabytes: here 48 and 64, as features
  only lengthen sums that `test_liger_correctness` has in full. Its logits are products of 8 features here.
- QuACK's largest matrices of logits, 77 rows of over 2^16 classes and 289 rows of over 2^14 (for reductions, over
  2^15): the float64 reference takes seconds and gigabytes for each.
- PyTorch's `out_features` gives every position of a K-dimensional loss its own rows of the weight: a loop over
  positions, not this op. Class probabilities with its `options` fall back there; here they are the same op.
- Vocabulary-parallel tests need several processes.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_common import REDUCTIONS, check, operands, with_ignored
from torch import Tensor
from torch.autograd import gradcheck

import cuda_ext

METHODS = ("recompute", "forward")


def random_tensors(
    lead: tuple[int, ...], classes: int, features: int, dtype: torch.dtype, bias: bool, positive: bool = False
) -> dict[str, Tensor]:
    """Standard normal operands; with ``positive``, weight and bias are uniform in [0, 1)."""
    draw = torch.rand if positive else torch.randn
    tensors = {"input": torch.randn(*lead, features), "linear_weight": draw(classes, features)}
    if bias:
        tensors["linear_bias"] = draw(classes)
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}
    return {**leaves, "target": torch.randint(classes, lead)}


# Liger Kernel

LARGE = pytest.param((1024, 1024, 4096), marks=pytest.mark.sampled)  # rows, features, classes
LIGER_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "every": {"label_smoothing": 0.1, "ignore_index": 42, "z_loss": 1e-4, "softcap": 30.0},
}


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("options", LIGER_OPTIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [LARGE, (4 * 47, 31, 123)], ids=str)
def test_liger_correctness(
    shape: tuple[int, int, int], reduction: str, dtype: torch.dtype, bias: bool, options: str
) -> None:
    rows, features, classes = shape
    tensors = random_tensors((rows,), classes, features, dtype, bias, positive=True)
    chosen = LIGER_OPTIONS[options]
    if chosen:
        tensors["weight"] = torch.rand(classes)
    ignored = torch.randperm(rows)[: int(torch.randint(1, rows // 2, ()))]
    tensors["target"][ignored] = chosen.get("ignore_index", -100)
    check(tensors, reduction=reduction, **chosen)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4, 8, 8), (63, 41, 41)], ids=str)
@pytest.mark.sampled(cases=3)
def test_liger_functional(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, weighted: bool) -> None:
    """Class weights of both signs."""
    rows, features, classes = shape
    tensors = random_tensors((rows,), classes, features, dtype, bias)
    if weighted:
        tensors["weight"] = torch.randn(classes)
    check(tensors, reduction="mean", z_loss=1e-4, label_smoothing=0.1, softcap=30.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [LARGE, (4 * 47, 31, 123)], ids=str)
@pytest.mark.sampled(cases=2)
def test_liger_autocast(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype) -> None:
    """Of operands that autocast does not round: the mean of rounded ones has an error that is one number by chance."""
    rows, features, classes = shape
    rounded = random_tensors((rows,), classes, features, dtype, bias, positive=True)
    tensors = {name: t.detach().float().requires_grad_() if t.requires_grad else t for name, t in rounded.items()}
    with torch.autocast("cpu", dtype=dtype):
        check(tensors, reduction="mean")


# Cut Cross-Entropy

CCE_SHAPES = [(256, 512, 128), (252, 507, 128), (252, 507, 123)]  # rows, classes, features


def cce_tensors(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, ignored: bool) -> dict[str, Tensor]:
    """Four sequences; half of the rows are rows of the weight too, so that some logits stand out."""
    rows, classes, features = shape
    x = (torch.randn(rows, features) / math.sqrt(features)).to(dtype)
    weight = torch.randn(classes, features).to(dtype)
    weight[: rows // 2] = x[: rows // 2]
    target = torch.randint(classes, (rows,))
    if ignored:
        target[torch.randperm(rows)[: rows // 5]] = -100
    tensors = {"input": x.view(4, -1, features).requires_grad_(), "linear_weight": weight.requires_grad_()}
    if bias:
        tensors["linear_bias"] = (0.02 * torch.randn(classes)).to(dtype).requires_grad_()
    return {**tensors, "target": target.view(4, -1)}


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("shape", CCE_SHAPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cce(
    dtype: torch.dtype, softcap: float, bias: bool, shift: int, ignored: bool, reduction: str,
    shape: tuple[int, int, int],
) -> None:  # fmt: skip
    tensors = cce_tensors(shape, dtype, bias, ignored)
    if shift:
        tensors["input"] = tensors["input"].detach()[:, :-shift].requires_grad_()
        tensors["target"] = tensors["target"][:, shift:]
    check(tensors, reduction=reduction, softcap=softcap)


@pytest.mark.parametrize("wanted", ["input linear_bias", "linear_weight", "linear_bias"])
def test_cce_gradients_of_some_operands(wanted: str) -> None:
    tensors = cce_tensors(CCE_SHAPES[0], torch.bfloat16, bias=True, ignored=False)
    tensors = {n: t.detach().requires_grad_(n in wanted.split()) for n, t in tensors.items()}
    check(tensors, reduction="mean")
    cuda_ext.linear_cross_entropy(**tensors).backward()
    assert {n for n, t in tensors.items() if t.grad is not None} == set(wanted.split())


# QuACK


QUACK_LINEAR = [  # rows, features, classes, z_loss
    *itertools.product((8, 16, 24), (48, 64), (32000, 50264, 128256), (0.0,)),
    *itertools.product((8, 24), (48,), (32000, 128256), (1e-4, 1.0)),
]


@pytest.mark.sampled(cases=2)
@pytest.mark.sampled
@pytest.mark.parametrize(("rows", "features", "classes", "z_loss"), QUACK_LINEAR)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_quack_linear(reduction: str, rows: int, features: int, classes: int, z_loss: float) -> None:
    tensors = operands((rows,), classes, features, torch.bfloat16, spread=0.1)
    check(tensors, reduction=reduction, z_loss=z_loss, method=random.choice(METHODS))


@pytest.mark.sampled(cases=2)
@pytest.mark.sampled
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_quack_ignored(reduction: str, z_loss: float, method: str) -> None:
    tensors = operands((1024,), 2048, 512, torch.bfloat16, spread=0.1)
    tensors["target"] = with_ignored(tensors["target"], ignore_index=2047, fraction=0.2)
    check(tensors, reduction=reduction, z_loss=z_loss, ignore_index=2047, method=method)


QUACK_CLASSES = (192, 256, 512, 760, 1024, 1128, 2048, 4096, 8192, 16384, 32768, 65536, 128256, 131072, 256128, 262144)
QUACK_CELLS = [(m, n) for m, n in itertools.product((1, 77, 289), QUACK_CLASSES) if m * n <= 2**23]
SMALL_CELLS = [cell for cell in QUACK_CELLS if math.prod(cell) <= 2**17]


def quack_cells(*, small: bool) -> pytest.MarkDecorator:
    cells = [cell for cell in QUACK_CELLS if (cell in SMALL_CELLS) == small]
    return pytest.mark.parametrize(("rows", "classes"), cells)


def quack_tensors(rows: int, classes: int, dtype: torch.dtype, weighted: bool) -> dict[str, Tensor]:
    tensors = operands((rows,), classes, 8, dtype, spread=0.1)
    return {**tensors, "weight": torch.rand(classes) + 0.1} if weighted else tensors


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@quack_cells(small=True)
@pytest.mark.sampled(cases=3)
def test_quack_logits(rows: int, classes: int, dtype: torch.dtype, weighted: bool) -> None:
    check(quack_tensors(rows, classes, dtype, weighted), reduction="none")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@quack_cells(small=False)
@pytest.mark.sampled(cases=2)
@pytest.mark.sampled
def test_quack_logits_of_large_vocabularies(rows: int, classes: int, dtype: torch.dtype, weighted: bool) -> None:
    check(quack_tensors(rows, classes, dtype, weighted), reduction="none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 77, 289])
@pytest.mark.parametrize("classes", [192, 1024, pytest.param(32768, marks=pytest.mark.sampled)])
@pytest.mark.sampled(cases=2)
def test_quack_weighted_and_ignored(classes: int, rows: int, dtype: torch.dtype) -> None:
    tensors = quack_tensors(rows, classes, dtype, weighted=True)
    tensors["target"] = with_ignored(tensors["target"], ignore_index=classes - 1)
    check(tensors, reduction="none", ignore_index=classes - 1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "classes"),
    [
        *[(77, 1024), (289, 1024)],
        *(pytest.param(*cell, marks=pytest.mark.sampled) for cell in ((77, 32768), (289, 32768), (77, 128256))),
    ],
)
@pytest.mark.sampled(cases=2)
def test_quack_weighted_reductions(rows: int, classes: int, dtype: torch.dtype, reduction: str) -> None:
    check(quack_tensors(rows, classes, dtype, weighted=True), reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [77, 289])
@pytest.mark.parametrize("classes", [1024, pytest.param(32768, marks=pytest.mark.sampled)])
def test_quack_uniform_weights_change_nothing(classes: int, rows: int, dtype: torch.dtype) -> None:
    tensors = operands((rows,), classes, 8, dtype, spread=0.1)
    results = []
    for weight in (None, torch.ones(classes)):
        losses = cuda_ext.linear_cross_entropy(**tensors, weight=weight, reduction="none")
        results.append((losses, *torch.autograd.grad(losses.sum(), [tensors["input"], tensors["linear_weight"]])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_quack_limits(dtype: torch.dtype) -> None:
    """Logits of 10, -10, and 10 at the target with -10 elsewhere; all plus 100; targets first and last."""
    rows, classes = 16, 1024
    target = torch.randint(classes, (rows,))
    one = torch.ones(rows, 1, dtype=dtype)
    for constant in (10.0, -10.0):
        losses = cuda_ext.linear_cross_entropy(
            one, torch.full((classes, 1), constant, dtype=dtype), target, reduction="none"
        )
        torch.testing.assert_close(losses, torch.full((rows,), math.log(classes)))
    weight = 20.0 * F.one_hot(target, classes).t().to(dtype) - 10.0  # (classes, rows)
    losses = cuda_ext.linear_cross_entropy(torch.eye(rows, dtype=dtype), weight, target, reduction="none")
    same = (target[:, None] == target).sum(1)
    assert (same >= 1).all() and (losses < 1e-5).all() and (losses >= 0).all()

    tensors = operands((8,), 512, 9, dtype, bias=True, grad=False)
    shifted = {**tensors, "linear_bias": tensors["linear_bias"].float() + 100.0}
    if dtype == torch.float32:
        losses, of_shifted = (cuda_ext.linear_cross_entropy(**t, reduction="none") for t in (tensors, shifted))
        torch.testing.assert_close(losses, of_shifted, rtol=1e-5, atol=1e-4)  # a logit of 100 is rounded to 8e-6
    for label in (0, classes - 1):
        check({**operands((rows,), classes, 8, dtype, spread=0.1), "target": torch.full((rows,), label)})


# PyTorch

TORCH_SIZES = [(8, 5, 4), (None, 8, 4)]  # rows (None: an input of one dim), features, classes


TORCH_CELLS = [
    (reduction, method, kind, ignore_index)
    for reduction, method, kind, ignore_index in itertools.product(
        REDUCTIONS, METHODS, ("indices", "some ignored", "probabilities"), (None, -100, 1, 9)
    )
    if (kind != "some ignored") or ignore_index is not None
    if (kind != "probabilities") or ignore_index is None  # which no probabilities have
    if (method != "forward") or reduction != "none"  # which forms no gradients of single losses
]


@pytest.mark.parametrize(("reduction", "method", "kind", "ignore_index"), TORCH_CELLS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", TORCH_SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.sampled(cases=8)
def test_torch_module_inputs(
    dtype: torch.dtype, size: tuple[int | None, int, int], label_smoothing: float, weighted: bool, reduction: str,
    method: str, kind: str, ignore_index: int | None,
) -> None:  # fmt: skip
    """Also with "sum" and every `ignore_index`, which PyTorch's own leaves out. Probabilities need not add up to
    one."""
    rows, features, classes = size
    lead = () if rows is None else (rows,)
    tensors = random_tensors(lead, classes, features, dtype, bias=False)
    options: dict[str, Any] = {"reduction": reduction, "method": method, "label_smoothing": label_smoothing}
    if kind == "probabilities":
        tensors["target"] = torch.rand(*lead, classes).to(dtype)
    elif ignore_index is not None:
        options["ignore_index"] = ignore_index
        if kind == "some ignored" and rows is not None:
            tensors["target"][rows // 2] = ignore_index
            tensors["target"][0] = 2
    if weighted:
        tensors["weight"] = torch.randn(classes).exp().to(torch.float64 if dtype == torch.float64 else torch.float32)
    check(tensors, **options)


@pytest.mark.parametrize("method", METHODS)
def test_torch_gradcheck(method: str) -> None:
    tensors = operands((4,), 5, 3, torch.float64)
    assert gradcheck(
        lambda x, w: cuda_ext.linear_cross_entropy(x, w, tensors["target"], method=method),
        (tensors["input"], tensors["linear_weight"]),
    )


@pytest.mark.parametrize("method", METHODS)
def test_torch_no_grad(method: str) -> None:
    tensors = operands((13,), 11, 7)
    expected = cuda_ext.linear_cross_entropy(**tensors)
    with torch.no_grad():
        loss = cuda_ext.linear_cross_entropy(**tensors, method=method)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("method", METHODS)
def test_torch_retain_graph(method: str) -> None:
    """PyTorch's chunked form refuses a second backward unless it was asked for before."""
    tensors = operands((8,), 4, 5)
    loss = cuda_ext.linear_cross_entropy(**tensors, method=method)
    gradients = []
    for _ in range(2):
        loss.backward(retain_graph=True)
        gradients.append([tensors[name].grad.clone() for name in ("input", "linear_weight")])
        for name in ("input", "linear_weight"):
            tensors[name].grad = None
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_torch_method_invariance(reduction: str) -> None:
    """In place of its invariance of the chunk size, at its shape."""
    tensors = operands((13,), 4, 5, torch.float64)
    results = []
    for method in METHODS:
        loss = cuda_ext.linear_cross_entropy(**tensors, reduction=reduction, method=method)
        results.append((loss, *torch.autograd.grad(loss, [tensors["input"], tensors["linear_weight"]])))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("method", METHODS)
def test_torch_batch_invariance(method: str) -> None:
    """A batch has the sum of the losses of its rows, and the sum of their gradients."""
    tensors = operands((8,), 4, 5, torch.float64)
    x, weight, target = (tensors[name] for name in ("input", "linear_weight", "target"))
    options: dict[str, Any] = {"reduction": "sum", "method": method}
    whole = cuda_ext.linear_cross_entropy(x, weight, target, **options)
    parts = sum(cuda_ext.linear_cross_entropy(x[n : n + 1], weight, target[n : n + 1], **options) for n in range(8))
    assert isinstance(parts, Tensor)
    torch.testing.assert_close(whole, parts)
    torch.testing.assert_close(torch.autograd.grad(whole, [x, weight]), torch.autograd.grad(parts, [x, weight]))


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_torch_strided_targets(ignore_index: int) -> None:
    """One column of pairs: the same bits as a copy of it, also where `ignore_index` is a class."""
    tensors = operands((64,), 512, 64, torch.bfloat16)
    strided = torch.randint(512, (64, 2))[:, 0]
    results = []
    for target in (strided, strided.contiguous()):
        loss = cuda_ext.linear_cross_entropy(**{**tensors, "target": target}, ignore_index=ignore_index)
        results.append((loss, *torch.autograd.grad(loss, [tensors["input"], tensors["linear_weight"]])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_torch_empty_batch_zeroes_the_gradient_of_the_bias(method: str) -> None:
    """Where allocations hold NaN until they are written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        tensors = operands((0,), 64, 32, torch.bfloat16, bias=True)
        cuda_ext.linear_cross_entropy(**tensors, method=method).backward()
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
    for name in ("input", "linear_weight", "linear_bias"):
        assert torch.equal(tensors[name].grad, torch.zeros_like(tensors[name]))
