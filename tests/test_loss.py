"""The loss from hidden states: values and gradients, limits, ignored rows, memory, repetition.

Derivatives, compilers and transforms are in test_loss_autograd.py, refusals in test_loss_errors.py, the test matrices
of other implementations in test_loss_matrices.py.
"""

from __future__ import annotations

import math
import random
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_common import DTYPES, REDUCTIONS, check, laid_out, operands, probabilities, with_ignored
from torch import Tensor

import cuda_ext
from cuda_ext import testing

pytestmark = pytest.mark.every_backend

RunPython = Callable[..., subprocess.CompletedProcess[str]]

# Options that change the formula, each alone.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -1.3},
    "z-loss": {"z_loss": 0.1},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "scale": 1.5, "z_loss": 0.01},
}


def options_of(name: str) -> dict[str, Any]:
    return dict(OPTIONS[name])


# values and gradients


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.sampled(cases="every value")
def test_matches_reference(options: str, dtype: torch.dtype, reduction: str) -> None:
    tensors = operands((19,), 133, 37, dtype, bias=True, spread=2.0)
    tensors["target"] = with_ignored(tensors["target"])
    check(tensors, reduction=reduction, **options_of(options))


@pytest.mark.parametrize("target", ["indices", "probabilities"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weights_and_kinds_of_targets(reduction: str, weighted: bool, target: str) -> None:
    tensors = operands((3, 5), 130, 33, torch.bfloat16, bias=True)
    if target == "probabilities":
        tensors["target"] = probabilities((3, 5), 130)
    else:
        tensors["target"] = with_ignored(tensors["target"])
    if weighted:
        tensors["weight"] = torch.rand(130) + 0.1
    check(tensors, reduction=reduction, label_smoothing=0.1, z_loss=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_log_sum_exp_and_entropy(reduction: str, dtype: torch.dtype) -> None:
    """With gradients through all outputs at once; those of ignored rows are of softmax alone."""
    tensors = operands((21,), 131, 17, dtype, bias=True, spread=2.0)
    tensors["target"] = with_ignored(tensors["target"])
    for wanted in ({"return_lse": True}, {"return_entropy": True}, {"return_lse": True, "return_entropy": True}):
        check(tensors, reduction=reduction, softcap=10.0, **wanted)


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities(dtype: torch.dtype, return_entropy: bool) -> None:
    tensors = operands((2, 9), 140, 31, dtype, bias=True, spread=2.0)
    tensors["target"] = with_ignored(tensors["target"], ignore_index=-1)
    options = {"ignore_index": -1, "softcap": 8.0, "scale": 1.2, "return_entropy": return_entropy}
    check(tensors, "linear_log_prob", **options)


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_leading_dims(lead: tuple[int, ...], target: str) -> None:
    tensors = operands(lead, 9, 5)
    if target == "probabilities":
        tensors["target"] = probabilities(lead, 9)
    for reduction in REDUCTIONS:
        check(tensors, reduction=reduction, return_lse=True, return_entropy=True)
    loss, lse, entropy = cuda_ext.linear_cross_entropy(
        **tensors, reduction="none", return_lse=True, return_entropy=True
    )
    assert loss.shape == lse.shape == entropy.shape == lead
    assert cuda_ext.linear_cross_entropy(**tensors).shape == ()


@pytest.mark.parametrize("classes", [1, 2, 127, 128, 129, 255, 256, 257, 513])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 129])
@pytest.mark.sampled(cases=4)
def test_sizes_at_the_edges_of_blocks(rows: int, classes: int) -> None:
    for features in (1, 31, 64, 65):
        tensors = operands((rows,), classes, features, bias=True)
        tensors["target"] = (torch.arange(rows) * 7 - 1) % classes
        tensors["target"][-1] = classes - 1
        check(tensors, reduction="sum")


@pytest.mark.parametrize("target", [0, 1, 127, 128, 129, 2047, 2048, 2049, 2099])
@pytest.mark.sampled(cases=3)
def test_targets_at_the_edges_of_blocks(target: int) -> None:
    tensors = operands((3,), 2100, 8)
    tensors["target"] = torch.full((3,), target)
    for method in ("recompute", "forward"):
        check(tensors, reduction="sum", method=method)


@pytest.mark.parametrize("method", ["auto", "recompute", "forward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_methods_have_the_same_values(reduction: str, dtype: torch.dtype, method: str) -> None:
    tensors = operands((41,), 150, 20, dtype, bias=True)
    tensors["target"] = with_ignored(tensors["target"])
    tensors["weight"] = torch.rand(150)
    check(tensors, reduction=reduction, method=method, label_smoothing=0.1, z_loss=0.01, softcap=6.0)


@pytest.mark.parametrize(
    "wanted", ["input", "linear_weight", "linear_bias", "input linear_bias", "linear_weight input"]
)
@pytest.mark.parametrize("method", ["recompute", "forward"])
def test_only_wanted_gradients_are_formed(method: str, wanted: str) -> None:
    tensors = operands((12,), 40, 11, bias=True)
    leaves = {n: t for n, t in tensors.items() if t.requires_grad}
    every = torch.autograd.grad(cuda_ext.linear_cross_entropy(**tensors, method=method), list(leaves.values()))
    some = {n: t.detach().requires_grad_(n in wanted.split()) for n, t in leaves.items()}
    cuda_ext.linear_cross_entropy(**{**tensors, **some}, method=method).backward()
    for (name, leaf), full in zip(some.items(), every, strict=True):
        if name in wanted.split():
            torch.testing.assert_close(leaf.grad, full)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("method", ["recompute", "forward"])
@pytest.mark.parametrize(("rows", "classes"), [(600, 64), pytest.param(2100, 8200, marks=pytest.mark.sampled)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chunks_of_rows_are_summed_in_float32(
    dtype: torch.dtype, rows: int, classes: int, method: str, backend: str
) -> None:
    """Terms of one sign, so that a sum in 16 bits, of several chunks, would stop growing."""
    if backend not in ("cpu", "cuda"):
        rows, classes = 300, 48
    tensors = operands((rows,), classes, 4, dtype, bias=True, spread=0.1)
    tensors["input"] = torch.rand(rows, 4).to(dtype).requires_grad_()
    tensors["target"] = torch.zeros(rows, dtype=torch.int64)
    check(tensors, reduction="sum", method=method)


LAYOUTS = ("transposed", "padded", "every other", "shifted")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_of_memory(dtype: torch.dtype, layout: str) -> None:
    tensors = operands((4, 5), 70, 24, dtype, bias=True)
    tensors["weight"] = torch.rand(70)
    for name in ("input", "linear_weight", "linear_bias", "weight"):
        tensors[name] = laid_out(tensors[name], layout)
    tensors["target"] = laid_out(tensors["target"], layout)
    check(tensors, reduction="mean")
    tensors["target"] = laid_out(probabilities((4, 5), 70), layout)
    check(tensors, reduction="none")


def test_expanded_operands() -> None:
    """Strides of zero: one hidden state for all rows, equal classes, one target."""
    tensors = operands((6,), 11, 7)
    tensors["input"] = torch.randn(1, 7).expand(6, 7).requires_grad_()
    tensors["linear_weight"] = torch.randn(1, 7).expand(11, 7).requires_grad_()
    tensors["target"] = torch.tensor(3).expand(6)
    check(tensors)
    check({**tensors, "target": torch.full((1, 1), 1 / 11).expand(6, 11)})


def draw(backend: str, large: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Operands and options of a random case; on the emulator small ones, as it is slow, with a row that counts."""
    pick = random.choice
    emulated = backend not in ("cpu", "cuda")
    dtype = pick(DTYPES[:3] if emulated else DTYPES)
    classes = pick((32_000, 50_257, 128_256, 300_000)) if large else pick((1, 2, 3, 7, 50, 127, 128, 129, 257, 1000))
    if not (large or emulated) and random.random() < 0.3:
        classes = pick((2047, 2048, 2049, 5003))
    sizes = (1, 2, 3) if large else (1, 3, 17, 65) if emulated else (0, 1, 2, 7, 33, 65, 130)
    rows = pick(sizes)
    lead = pick([(rows,), (rows,), (1, rows), (rows, 2), (1, rows, 2), ()])
    features = pick((1, 3, 8, 31)) if large else pick((1, 3, 5, 8, 17, 31, 64, 65, 96))
    huge = random.random() < 0.15
    spread = 3e3 if huge else pick((0.1, 1.0, 4.0))
    tensors = operands(lead, classes, features, dtype, bias=random.random() < 0.5, spread=spread)
    options: dict[str, Any] = {
        "reduction": pick(REDUCTIONS),
        "softcap": pick((0.0, 0.0, 2.0, 30.0)),
        "scale": pick((1.0, 1.0, 0.3, 2.5, -1.0)),
        "z_loss": pick((0.0, 0.0, 1e-4, 0.1)),
        "label_smoothing": pick((0.0, 0.0, 0.1, 1.0)),
        "ignore_index": pick((-100, -1, 0, classes - 1, classes + 5)),
        "return_lse": random.random() < 0.2,
        "return_entropy": random.random() < 0.2,
    }
    if random.random() < 0.3:
        tensors["weight"] = torch.rand(classes, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        tensors["weight"][::3] *= 0.0 if classes > 1 and options["reduction"] != "mean" else 1.0
    if random.random() < 0.2:
        tensors["target"] = probabilities(lead, classes, pick((dtype, torch.float32)))
        options["ignore_index"] = -100
    else:
        tensors["target"] = draw_targets(tuple(lead), classes, options["ignore_index"])
        if emulated and (tensors["target"] == options["ignore_index"]).all():
            options["ignore_index"] = -100
            tensors["target"] = torch.randint(classes, tuple(lead))
        if "linear_bias" in tensors and options["scale"] > 0.0 and options["label_smoothing"] == 0.0:
            hide_classes(tensors)
    if options["reduction"] != "none" and not (options["return_lse"] or options["return_entropy"]):
        # Gradients that are formed in forward are those of a factor of 1, which may be beyond float16.
        overflows = dtype == torch.float16 and huge
        options["method"] = pick(("auto", "recompute") if overflows else ("auto", "recompute", "forward"))
    for name in ("input", "linear_weight"):
        tensors[name] = laid_out(tensors[name], pick(("contiguous", "contiguous", *LAYOUTS)))
    frozen = pick(("none", "none", "input", "linear_weight", "linear_bias"))
    if frozen in tensors:
        tensors[frozen] = tensors[frozen].detach()
    return tensors, options


def draw_targets(lead: tuple[int, ...], classes: int, ignore_index: int) -> Tensor:
    edges = torch.tensor([each for each in (0, 127, 128, 2047, 2048, classes - 1) if each < classes])
    target = torch.where(torch.rand(lead) < 0.5, edges[torch.randint(len(edges), lead)], torch.randint(classes, lead))
    ignored = random.choice(("none", "some", "some", "all")) if classes > 1 else "none"  # else the one class may be
    return torch.full(lead, ignore_index) if ignored == "all" else (
        with_ignored(target, ignore_index) if ignored == "some" else target
    )  # fmt: skip


def hide_classes(tensors: dict[str, Tensor]) -> None:
    """A bias of -inf for half of the classes that are no target."""
    bias, target = tensors["linear_bias"].detach().clone(), tensors["target"].flatten()
    hidden = torch.rand(len(bias)) < 0.5
    hidden[target[(target >= 0) & (target < len(bias))]] = False
    hidden[-1] = hidden[-1] & ~hidden.all()
    bias[hidden] = -math.inf
    tensors["linear_bias"] = bias.requires_grad_()


@pytest.mark.parametrize("case", range(280))
@pytest.mark.sampled(cases=8)
def test_random_cases(case: int, backend: str) -> None:
    tensors, options = draw(backend)
    check(tensors, **options)


@pytest.mark.sampled
@pytest.mark.cpu_only("the emulator is too slow")
@pytest.mark.parametrize("case", range(20))
def test_random_cases_of_large_vocabularies(case: int, backend: str) -> None:
    tensors, options = draw(backend, large=True)
    check(tensors, **options)


@pytest.mark.parametrize("case", range(60))
@pytest.mark.sampled(cases=2)
def test_random_cases_of_log_probabilities(case: int, backend: str) -> None:
    tensors, options = draw(backend)
    tensors.pop("weight", None)
    if tensors["target"].is_floating_point():
        tensors["target"] = tensors["target"].argmax(-1)
    kept = ("ignore_index", "softcap", "scale", "return_entropy")
    check(tensors, "linear_log_prob", **{name: options[name] for name in kept})


# limits


@pytest.mark.parametrize("method", ["recompute", "forward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 2, 129, 257, 2049])
def test_separated_integer_logits_are_exact(classes: int, dtype: torch.dtype, method: str) -> None:
    """All logits of a row differ by 128 or more, so that softmax is zero or one: integers in any order of summation.

    An input row picks two columns of the weight, 16 times one plus the other, whose values are a permutation of
    16 * (v // 16) + v % 16. By an exp that is not exact at large arguments, in float64, the difference is 1024.
    """
    pairs, rows = 3, 30
    scale = 1024.0 if dtype == torch.float64 else 128.0
    order = torch.stack([torch.randperm(classes) for _ in range(pairs)], dim=1)  # (V, 3)
    weight = torch.cat([order // 16, order % 16], dim=1)
    pair = torch.arange(rows) % pairs
    x = 16 * F.one_hot(pair, 2 * pairs) + F.one_hot(pair + pairs, 2 * pairs)
    target = torch.randint(classes, (rows,))
    target[::4], target[1] = -100, classes - 1
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, torch.zeros(classes))]
    loss = cuda_ext.linear_cross_entropy(
        leaves[0], leaves[1], target, linear_bias=leaves[2], reduction="sum", scale=scale, method=method
    )
    gradients = torch.autograd.grad(loss, leaves)

    logits, kept = order.t()[pair], target != -100  # (30, V)
    chosen = target.clamp(min=0)
    expected = scale * ((classes - 1) - logits.gather(1, chosen[:, None])[:, 0])[kept].sum()
    assert loss.item() == expected
    dz = scale * (F.one_hot(logits.argmax(1), classes) - F.one_hot(chosen, classes)) * kept[:, None]  # (30, V)
    for gradient, wanted in zip(gradients, (dz @ weight.to(dz), dz.t() @ x.to(dz), dz.sum(0)), strict=True):
        assert torch.equal(gradient.double(), wanted.double())


@pytest.mark.parametrize("logit", [1.0, -1.0, 2.0**12, -(2.0**12), 2.0**24, -(2.0**24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_common_logit_of_any_size_cancels(dtype: torch.dtype, logit: float) -> None:
    """Equal logits: the loss is log(V). As the logit plus that, in float32, it would be lost from 2^12 on."""
    root = math.sqrt(abs(logit))
    leaves = [torch.full((5, 1), root, dtype=dtype), torch.full((8, 1), math.copysign(root, logit), dtype=dtype)]
    target = torch.tensor([0, 7, 3, 3, 5])
    losses = cuda_ext.linear_cross_entropy(*leaves, target, reduction="none")
    torch.testing.assert_close(losses, torch.full((5,), math.log(8)), rtol=4e-7, atol=0)
    log_probs, entropies = cuda_ext.linear_log_prob(*leaves, target, return_entropy=True)
    torch.testing.assert_close(log_probs, torch.full((5,), -math.log(8)), rtol=4e-7, atol=0)
    torch.testing.assert_close(entropies, torch.full((5,), math.log(8)), rtol=4e-7, atol=0)


@pytest.mark.parametrize("method", ["recompute", "forward"])
@pytest.mark.parametrize("logit", [2.0**12, -(2.0**12), 2.0**24])
def test_gradients_at_a_common_logit_of_any_size(logit: float, method: str) -> None:
    """As exp(logit - lse) with lse in float32 the softmax would have a relative error of 2e-4 at 2^12, and be one
    instead of an eighth at 2^24."""
    bias = torch.full((8,), logit, requires_grad=True)
    target = torch.tensor([0, 7, 3, 3, 5])
    loss = cuda_ext.linear_cross_entropy(
        torch.zeros(5, 1), torch.zeros(8, 1), target, linear_bias=bias, reduction="sum", method=method
    )
    expected = 5 / 8 - torch.bincount(target, minlength=8)
    torch.testing.assert_close(torch.autograd.grad(loss, bias)[0], expected, rtol=1e-6, atol=0)


def test_logits_beyond_the_range_of_exp() -> None:
    """Of both signs in one row; a loss of hundreds, and a softmax that is exactly zero or one."""
    x = torch.tensor([[300.0], [-300.0], [88.0], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    for target in ([0, 1, 2, 0], [1, 0, 1, 2], [2, 2, 0, 1]):
        check({"input": x, "linear_weight": weight, "target": torch.tensor(target)}, reduction="none", return_lse=True)


def test_hidden_classes_have_no_probability_and_no_gradient() -> None:
    tensors = operands((6,), 10, 4, bias=True)
    bias = tensors["linear_bias"].detach().clone()
    bias[[0, 4, 9]] = -math.inf
    tensors |= {"linear_bias": bias.requires_grad_(), "target": torch.tensor([1, 2, 3, 5, 8, 8])}
    for reduction in REDUCTIONS:
        check(tensors, reduction=reduction, return_lse=True, return_entropy=True)
    weight = tensors["linear_weight"]
    cuda_ext.linear_cross_entropy(**tensors).backward()
    assert not weight.grad[[0, 4, 9]].any() and not bias.grad[[0, 4, 9]].any()
    kept = [1, 2, 3, 5, 6, 7, 8]
    few = {"input": tensors["input"], "linear_weight": weight[kept], "linear_bias": bias[kept]}
    alone = cuda_ext.linear_cross_entropy(**few, target=torch.tensor([0, 1, 2, 3, 6, 6]))
    torch.testing.assert_close(cuda_ext.linear_cross_entropy(**tensors), alone)


def test_a_hidden_target_has_an_infinite_loss() -> None:
    bias = torch.zeros(5)
    bias[2] = -math.inf
    tensors = {**operands((3,), 5, 4), "linear_bias": bias, "target": torch.tensor([2, 1, 2])}
    losses = cuda_ext.linear_cross_entropy(**tensors, reduction="none")
    assert losses.isinf().tolist() == [True, False, True] and (losses > 0).all()
    check(tensors, reduction="none")


def test_nan_stays_in_its_row() -> None:
    tensors = operands((70,), 140, 9)
    with torch.no_grad():
        tensors["input"][65, 3] = math.nan
    losses = cuda_ext.linear_cross_entropy(**tensors, reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == [65]
    (gradient,) = torch.autograd.grad(losses.sum(), tensors["input"])
    assert gradient.isnan().all(1).nonzero().flatten().tolist() == [65]
    assert cuda_ext.linear_cross_entropy(**tensors).isnan()


# ignored and absent rows


@pytest.mark.parametrize("method", ["recompute", "forward"])
@pytest.mark.parametrize("ignore_index", [-100, 0, 6, 99])
def test_ignored_rows_have_no_loss_and_no_gradient(ignore_index: int, method: str) -> None:
    """As if they were not there, whatever they hold: the mean is over the others."""
    tensors = operands((20,), 7, 5, bias=True)
    target = with_ignored(tensors["target"], ignore_index)
    kept = target != ignore_index
    with torch.no_grad():
        tensors["input"][~kept] *= 1e4
    rest = {**tensors, "input": tensors["input"].detach()[kept].requires_grad_(), "target": target[kept]}
    options = {"ignore_index": ignore_index, "label_smoothing": 0.1, "z_loss": 0.1, "method": method}
    for reduction in ("mean", "sum"):
        full, few = (
            cuda_ext.linear_cross_entropy(**each, reduction=reduction, **options)
            for each in ({**tensors, "target": target}, rest)
        )
        torch.testing.assert_close(full, few)
        gradients = torch.autograd.grad(full, [tensors[n] for n in ("input", "linear_weight", "linear_bias")])
        expected = torch.autograd.grad(few, [rest[n] for n in ("input", "linear_weight", "linear_bias")])
        assert not gradients[0][~kept].any()
        torch.testing.assert_close((gradients[0][kept], *gradients[1:]), expected)
    losses = cuda_ext.linear_cross_entropy(
        **{**tensors, "target": target}, reduction="none", ignore_index=ignore_index, z_loss=0.1
    )
    assert torch.equal(losses == 0.0, ~kept)


@pytest.mark.cpu_only("kernels may not run")
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("rows", [0, 5])
def test_without_a_target_mean_is_nan_and_sum_is_zero(rows: int, z_loss: float) -> None:
    """No rows, or all ignored; the gradients are zeros, not NaN."""
    tensors = operands((rows,), 9, 4, dtype=torch.float64, bias=True)
    tensors["target"] = torch.full((rows,), -100)
    leaves = [t for t in tensors.values() if t.requires_grad]
    for reduction in REDUCTIONS:
        loss = cuda_ext.linear_cross_entropy(**tensors, reduction=reduction, z_loss=z_loss)
        expected = torch.zeros(rows) if reduction == "none" else torch.tensor(math.nan if reduction == "mean" else 0.0)
        torch.testing.assert_close(loss, expected.double(), equal_nan=True, rtol=0, atol=0)
        for gradient in torch.autograd.grad(loss.sum(), leaves):
            assert not gradient.any()


@pytest.mark.cpu_only("no kernel runs")
def test_no_rows_in_every_dtype_and_place() -> None:
    for dtype in DTYPES:
        for lead in ((0,), (0, 3), (2, 0)):
            tensors = operands(lead, 9, 4, dtype, bias=True)
            for target in (tensors["target"], probabilities(lead, 9)):
                loss, lse = cuda_ext.linear_cross_entropy(
                    **{**tensors, "target": target}, reduction="none", return_lse=True
                )
                result = torch.float64 if dtype == torch.float64 else torch.float32
                assert loss.shape == lse.shape == lead and loss.dtype == lse.dtype == result
                (loss.sum() + lse.sum()).backward()
            assert all(not t.grad.any() for t in tensors.values() if t.requires_grad)


@pytest.mark.cpu_only("there is no product")
def test_no_features_leave_the_bias() -> None:
    check(operands((4,), 6, 0, bias=True), reduction="none", return_lse=True)


def test_one_class_has_no_loss() -> None:
    tensors = operands((5,), 1, 3, bias=True)
    loss, entropy = cuda_ext.linear_cross_entropy(**tensors, return_entropy=True)
    assert loss == 0.0 and not entropy.any()
    for gradient in torch.autograd.grad(loss, [tensors["input"], tensors["linear_weight"], tensors["linear_bias"]]):
        assert not gradient.any()


def test_class_weights_of_zero_remove_rows() -> None:
    tensors = operands((12,), 6, 5)
    tensors["target"] = torch.arange(12) % 6
    weight = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    kept = weight[tensors["target"]] > 0
    loss = cuda_ext.linear_cross_entropy(**tensors, weight=weight)
    few = cuda_ext.linear_cross_entropy(tensors["input"][kept], tensors["linear_weight"], tensors["target"][kept])
    torch.testing.assert_close(loss, few)


def test_z_loss_has_its_own_unweighted_mean() -> None:
    tensors = operands((10,), 6, 5, bias=True)
    tensors["target"] = with_ignored(tensors["target"])
    weight = torch.rand(6) + 0.1
    loss, lse = cuda_ext.linear_cross_entropy(**tensors, weight=weight, z_loss=0.3, return_lse=True)
    without = cuda_ext.linear_cross_entropy(**tensors, weight=weight)
    kept = tensors["target"] != -100
    torch.testing.assert_close(loss - without, 0.3 * lse[kept].square().mean(), rtol=1e-5, atol=1e-6)
    few = {**tensors, "target": probabilities((10,), 6)}
    difference = cuda_ext.linear_cross_entropy(**few, z_loss=0.3) - cuda_ext.linear_cross_entropy(**few)
    torch.testing.assert_close(difference, 0.3 * lse.square().mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_hot_probabilities_are_indices(reduction: str) -> None:
    tensors = operands((15,), 8, 5, bias=True)
    one_hot = F.one_hot(tensors["target"], 8).float()
    for smoothing in (0.0, 0.2):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": 0.1}
        of_indices = cuda_ext.linear_cross_entropy(**tensors, **options)
        of_probabilities = cuda_ext.linear_cross_entropy(**{**tensors, "target": one_hot}, **options)
        torch.testing.assert_close(of_probabilities, of_indices)


def test_log_probabilities_are_losses() -> None:
    tensors = operands((15,), 130, 9, bias=True)
    tensors["target"] = with_ignored(tensors["target"])
    log_probs, entropies = cuda_ext.linear_log_prob(**tensors, return_entropy=True)
    losses, wanted = cuda_ext.linear_cross_entropy(**tensors, reduction="none", return_entropy=True)
    torch.testing.assert_close((-log_probs, entropies), (losses, wanted))
    assert not log_probs[tensors["target"] == -100].any()
    assert torch.equal(log_probs, cuda_ext.linear_log_prob(**tensors))


@pytest.mark.cpu_only("no kernel runs")
def test_the_reference_is_the_formula() -> None:
    """In float64, from the definition: sums over classes and rows, written out."""
    tensors = operands((11,), 6, 4, torch.float64, bias=True)
    x, w, b = (tensors[n].detach() for n in ("input", "linear_weight", "linear_bias"))
    target, weight = with_ignored(tensors["target"]), torch.rand(6, dtype=torch.float64)
    losses, penalties, counts, lses, entropies = [], [], [], [], []
    for row, label in zip(x, target.tolist(), strict=True):
        z = [4.0 * math.tanh(1.5 * float(row @ w[v] + b[v]) / 4.0) for v in range(6)]
        lses.append(math.log(sum(map(math.exp, z))))
        entropies.append(-sum(math.exp(each - lses[-1]) * (each - lses[-1]) for each in z))
        smooth = sum(float(weight[v]) * (lses[-1] - z[v]) for v in range(6)) / 6
        kept = label != -100
        own = float(weight[label]) * (lses[-1] - z[label]) if kept else 0.0
        losses.append((0.9 * own + 0.1 * smooth) * kept)
        penalties.append(0.2 * lses[-1] ** 2 * kept)
        counts.append(float(weight[label]) if kept else 0.0)
    mean = sum(losses) / sum(counts) + sum(penalties) / sum(c > 0 for c in counts)
    each = [a + b for a, b in zip(losses, penalties, strict=True)]
    options = {"label_smoothing": 0.1, "softcap": 4.0, "scale": 1.5, "z_loss": 0.2, "linear_bias": b, "weight": weight}
    for reduction, expected in (("mean", mean), ("sum", sum(each)), ("none", each)):
        actual = testing.reference_linear_cross_entropy(
            x, w, target, reduction=reduction, return_lse=True, return_entropy=True, **options
        )
        for a, e in zip(actual, (expected, lses, entropies), strict=True):
            torch.testing.assert_close(a, torch.tensor(e, dtype=torch.float64))
    log_probs = testing.reference_linear_log_prob(x, w, target, linear_bias=b, softcap=4.0, scale=1.5)
    plain = testing.reference_linear_cross_entropy(
        x, w, target, linear_bias=b, softcap=4.0, scale=1.5, reduction="none"
    )
    torch.testing.assert_close(log_probs, -plain)


# memory


@pytest.mark.sampled
@pytest.mark.cpu_only("the memory of a process")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["auto", "recompute", "forward"])
@pytest.mark.parametrize("rows", [1024, 4096])
def test_memory_does_not_grow_with_rows_times_classes(
    rows: int, method: str, dtype: str, run_python: RunPython
) -> None:
    """The float32 logits alone are 134 MB, and 537 MB; the process may grow by 100 MB beside the gradients."""
    code = f"""
import resource, torch, cuda_ext
def step(rows):
    x, w = (torch.randn(n, 64).to(torch.{dtype}).requires_grad_() for n in (rows, 32768))
    target = torch.randint(32768, (rows,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cuda_ext.linear_cross_entropy(x, w, target, method="{method}").backward()
    gradients = sum(t.grad.numel() * t.grad.element_size() for t in (x, w))
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) - gradients
step(8)  # PyTorch imports modules, and starts threads, at the first
print("grown", step({rows}))
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split("grown")[1]) < 100e6


@pytest.mark.cpu_only("the same on all")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_recompute_saves_a_few_numbers_a_row(reduction: str, dtype: torch.dtype) -> None:
    tensors = operands((64,), 100, 8, dtype, bias=True)
    own = {t.data_ptr() for t in tensors.values()}
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cuda_ext.linear_cross_entropy(**tensors, reduction=reduction, method="recompute")
    assert loss.requires_grad and sum(saved) <= 4 * 64


def test_no_graph_without_need() -> None:
    tensors = operands((3,), 5, 4)
    with torch.no_grad():
        assert cuda_ext.linear_cross_entropy(**tensors).grad_fn is None
    with torch.inference_mode():
        assert cuda_ext.linear_cross_entropy(**tensors).is_inference()
    tensors = {n: t.detach() for n, t in tensors.items()}
    for method in ("recompute", "forward"):
        assert cuda_ext.linear_cross_entropy(**tensors, method=method).grad_fn is None


# repetition


@pytest.mark.parametrize("method", ["recompute", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repetition_gives_the_same_bits(dtype: torch.dtype, method: str, backend: str) -> None:
    rows, classes = (300, 3001) if backend == "cpu" else (70, 260)
    tensors = operands((rows,), classes, 40, dtype, bias=True)
    leaves = [t for t in tensors.values() if t.requires_grad]

    def step() -> list[Tensor]:
        loss = cuda_ext.linear_cross_entropy(**tensors, method=method)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    first = step()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


@pytest.mark.parametrize("method", ["recompute", "forward"])
def test_backward_twice(method: str) -> None:
    """With the graph kept, the same gradient; without it, PyTorch's own error."""
    tensors = operands((6,), 9, 5)
    loss = cuda_ext.linear_cross_entropy(**tensors, method=method)
    leaves = [tensors["input"], tensors["linear_weight"]]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("method", ["recompute", "forward"])
def test_gradients_of_one_graph_accumulate(method: str) -> None:
    """`grad` must not share memory with what the graph keeps for the next pass."""
    tensors = operands((6,), 9, 5)
    loss = cuda_ext.linear_cross_entropy(**tensors, method=method)
    (once,) = torch.autograd.grad(loss, tensors["linear_weight"], retain_graph=True)
    for passes in (1, 2, 3):
        loss.backward(retain_graph=passes < 3)
        torch.testing.assert_close(tensors["linear_weight"].grad, passes * once)


@pytest.mark.parametrize("method", ["recompute", "forward"])
def test_gradients_accumulate_and_scale(method: str) -> None:
    tensors = operands((6,), 9, 5)
    (once,) = torch.autograd.grad(cuda_ext.linear_cross_entropy(**tensors, method=method), tensors["linear_weight"])
    for factor in (2.0, -3.0):
        (factor * cuda_ext.linear_cross_entropy(**tensors, method=method)).backward()
    torch.testing.assert_close(tensors["linear_weight"].grad, -once)


def test_writing_over_an_operand_is_noticed() -> None:
    tensors = operands((6,), 9, 5)
    loss = cuda_ext.linear_cross_entropy(**tensors, method="recompute")
    with torch.no_grad():
        tensors["linear_weight"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.cpu_only("GPUs have no slow numbers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_too_small_to_multiply_are_zero(dtype: torch.dtype) -> None:
    """Subnormal numbers make a CPU a hundred times slower: in float32, gradients below 2^-100 are 0."""
    bias = torch.tensor([0.0, -60.0, -75.0], dtype=dtype, requires_grad=True)
    x, weight = torch.zeros(1, 1, dtype=dtype), torch.zeros(3, 1, dtype=dtype)
    loss = cuda_ext.linear_cross_entropy(x, weight, torch.tensor([0]), linear_bias=bias, method="recompute")
    (gradient,) = torch.autograd.grad(loss, bias)
    expected = bias.detach().exp()
    if dtype == torch.float32:
        expected[2] = 0.0
    torch.testing.assert_close(gradient[1:], expected[1:], rtol=1e-5, atol=0)
