"""Gradients and transforms of the GEMM ops: gradcheck, masks, what is saved, autocast, vmap, FLOPs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_common import ACTIVATIONS, OPS, REFERENCES, arguments, rand
from torch import Tensor
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cuda_ext import testing
from cuda_ext._gemm import gated_linear, gated_mlp, gemm, linear, mlp
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE
from cuda_ext.attention import flash_attention
from cuda_ext.bucket import pack


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op: str, activation: str | None) -> None:
    tensors = arguments(op, (2,), 3, 4, 5, f=3, dtype=torch.float64)
    names = list(tensors)

    def call(*values: Tensor) -> Tensor:
        return OPS[op](**dict(zip(names, values, strict=True)), activation=activation)

    assert gradcheck(call, tuple(tensors.values()))
    for absent in [n for n in names if n.startswith(("bias", "c", "residual"))]:
        rest = {n: t for n, t in tensors.items() if n != absent}
        assert gradcheck(
            lambda *v, names=tuple(rest): OPS[op](**dict(zip(names, v, strict=True)), activation=activation),
            tuple(rest.values()),
        )


def test_gradcheck_of_gemm_options() -> None:
    a, b, c = (rand(*s, dtype=torch.float64) for s in ((2, 1, 3, 4), (3, 4, 2), (3, 1, 2)))
    assert gradcheck(lambda a, b, c: gemm(a, b, c, alpha=0.3, beta=-1.7, activation="silu"), (a, b, c))
    assert gradcheck(lambda a, b, c: gemm(a, b, c, alpha=0.3, beta=-1.7), (a, b, c))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("op", OPS)
def test_only_wanted_gradients_are_formed(op: str, activation: str | None) -> None:
    tensors = arguments(op, (2,), 3, 4, 5, f=6)
    everything = torch.autograd.grad(OPS[op](**tensors, activation=activation).sum(), list(tensors.values()))
    for name, full in zip(tensors, everything, strict=True):
        alone = {n: t.detach().requires_grad_(n == name) for n, t in tensors.items()}
        (grad,) = torch.autograd.grad(OPS[op](**alone, activation=activation).sum(), [alone[name]])
        torch.testing.assert_close(grad, full)
        assert grad.is_contiguous() or name in ("c", "residual")


def test_backward_op_masks_its_outputs() -> None:
    x, w, grad = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5)
    nothing = ops.linear_backward(grad, x, w, None, output_mask=[False] * 3)
    assert [t.shape for t in nothing] == [(0,)] * 3
    w2, preact = torch.randn(5, 6), torch.randn(3, 6)
    for wanted in range(4):
        mask = [i == wanted for i in range(4)]
        result = ops.mlp_hidden_backward(grad, w2, preact, None, None, activation="gelu", gated=False, output_mask=mask)
        assert [t.numel() > 0 for t in result] == mask


def saved_numel(function: Callable[[], Tensor], arguments: list[Tensor]) -> int:
    own = {t.data_ptr() for t in arguments}
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (sizes.append(t.numel()) if t.data_ptr() not in own else None, t)[1], lambda t: t
    ):
        function()
    return sum(sizes)


def test_little_is_saved() -> None:
    x, w, bias, residual = rand(8, 16), rand(32, 16), rand(32), rand(8, 32)
    given = [x, w, bias, residual]
    assert saved_numel(lambda: linear(x, w, bias), given) == 0
    assert saved_numel(lambda: linear(x, w, bias, residual=residual), given) == 0
    assert saved_numel(lambda: linear(x, w, bias, activation="gelu"), given) == 8 * 32
    assert saved_numel(lambda: linear(x, w, bias, activation="relu", residual=residual), given) == 8 * 32
    assert saved_numel(lambda: gated_linear(x, w), given) == 8 * 32
    w1, w2 = rand(32, 16), rand(4, 32)
    assert saved_numel(lambda: mlp(x, w1, w2), [x, w1, w2]) == 8 * 32
    assert saved_numel(lambda: gated_mlp(x, w1, rand(4, 16)), [x, w1]) == 8 * 32 + 4 * 16
    # relu's own output, which the caller holds anyway
    assert saved_numel(lambda: linear(x, w, activation="relu"), given) == 8 * 32


def test_writing_over_a_saved_output_is_noticed() -> None:
    out = linear(rand(3, 4), rand(5, 4), activation="relu")
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("op", OPS)
def test_no_graph_without_need(op: str) -> None:
    tensors = arguments(op, (), 2, 3, 4)
    with torch.no_grad():
        assert OPS[op](**tensors).grad_fn is None
    with torch.inference_mode():
        assert OPS[op](**tensors).is_inference()
    assert OPS[op](**{n: t.detach() for n, t in tensors.items()}).grad_fn is None


# autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_autocast_runs_in_its_dtype(op: str, dtype: torch.dtype) -> None:
    tensors = arguments(op, (2,), 3, 4, 5)
    low = {n: t.detach().to(dtype).requires_grad_() for n, t in tensors.items()}
    with torch.autocast("cpu", dtype=dtype):
        out = OPS[op](**tensors)
    expected = OPS[op](**low)
    assert out.dtype == dtype and torch.equal(out, expected)
    grads = torch.autograd.grad(out.sum(), list(tensors.values()))
    low_grads = torch.autograd.grad(expected.sum(), list(low.values()))
    for grad, low_grad in zip(grads, low_grads, strict=True):
        assert grad.dtype == torch.float32 and torch.equal(grad, low_grad.float())


def test_autocast_of_mixed_dtypes_and_out_dtype() -> None:
    x, w, bias = torch.randn(3, 4).bfloat16(), torch.randn(5, 4), torch.randn(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, w, bias).dtype == torch.bfloat16
        assert gemm(x, w.t(), out_dtype=torch.float32).dtype == torch.float32
    with torch.autocast("cpu", enabled=False), pytest.raises(RuntimeError, match="expected weight of dtype"):
        linear(x, w, bias)


def test_autocast_kernels_exist_for_both_devices() -> None:
    for op in OPS:
        for key in ("AutocastCPU", "AutocastCUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", key)


# vmap

VMAP_DIMS = {
    "gemm": [(0, None, None, None), (None, 1, None, None), (0, 0, 0, 0), (2, 1, None, 1), (None, None, 0, None),
             (None, None, None, 0), (None, None, 1, 1)],
    "linear": [(0, None, None, None), (1, None, None, 2), (None, None, None, 0), (None, 0, None, None),
               (0, 0, 0, 0), (None, None, 1, None), (2, 1, None, 1)],
    "gated_linear": [(0, None, None), (1, None, None), (None, 0, None), (0, 1, 1), (None, None, 0)],
    "mlp": [(0, None, None, None, None, None), (1, 0, None, None, None, 1), (None, None, 1, None, 0, None),
            (0, None, None, None, None, 2), (None, None, None, None, None, 0), (0, 0, 0, 0, 0, 0)],
    "gated_mlp": [(0, None, None, None, None, 1), (None, 0, None, 1, None, None), (None, None, 1, None, 0, 0),
                  (2, 0, 0, 0, 0, 0)],
}  # fmt: skip


@pytest.mark.parametrize(("op", "in_dims"), [(op, dims) for op, all_dims in VMAP_DIMS.items() for dims in all_dims])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_vmap(op: str, in_dims: tuple[int | None, ...], lead: tuple[int, ...]) -> None:
    tensors = arguments(op, lead, 3, 4, 5, dtype=torch.float64)
    if op == "gemm" and lead:
        tensors["b"] = rand(5, 4, dtype=torch.float64)  # ranks that differ have to line up behind the mapped dim
    mapped = {
        name: tensor if dim is None else torch.stack([torch.randn_like(tensor) for _ in range(6)], dim).requires_grad_()
        for (name, tensor), dim in zip(tensors.items(), in_dims, strict=True)
    }
    names = list(mapped)
    options: dict[str, Any] = {"alpha": 0.5, "beta": 2.0} if op == "gemm" else {}

    def call(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        one = lambda *v: function(**dict(zip(names, v, strict=True)), activation="gelu", **options)  # noqa: E731
        out = torch.vmap(one, in_dims)(*mapped.values())
        return out, *torch.autograd.grad(out.sin().sum(), list(mapped.values()))

    for actual, expected in zip(call(OPS[op]), call(REFERENCES[op]), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "dtypes", [{}, *(dict.fromkeys(names, torch.float32) for names in (["c"], ["bias"], ["c", "bias"]))]
)
@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_vmap_of_gemm_is_a_loop(beta: float, dtypes: dict[str, torch.dtype]) -> None:
    """Whatever is mapped: with beta = 0 a NaN in c is gone, and c and bias have the dtype of a or of the output."""
    shapes = {"a": (4, 5), "b": (5, 3), "c": (4, 3), "bias": (3,)}
    options = {"beta": beta, "alpha": 0.5, "activation": "relu", "out_dtype": torch.float32 if dtypes else None}
    tensors = {
        name: rand(6, *shape, dtype=dtypes.get(name, torch.bfloat16), grad=False) for name, shape in shapes.items()
    }
    if beta == 0.0:
        tensors["c"][..., 0] = torch.nan

    def one(*values: Tensor) -> Tensor:
        return gemm(**dict(zip(shapes, values, strict=True)), **options)

    for mapped in itertools.product([True, False], repeat=4):
        if not any(mapped):
            continue
        values = [
            tensor if is_mapped else tensor[0] for tensor, is_mapped in zip(tensors.values(), mapped, strict=True)
        ]
        loop = [one(*(v[n] if m else v for v, m in zip(values, mapped, strict=True))) for n in range(6)]
        actual = torch.vmap(one, tuple(0 if is_mapped else None for is_mapped in mapped))(*values)
        torch.testing.assert_close(actual, torch.stack(loop), rtol=0, atol=2e-6 if dtypes else 2**-7)


def test_numbers_that_want_a_gradient_are_refused() -> None:
    wanting = torch.ones((), requires_grad=True)
    x = torch.eye(3)
    heads = torch.randn(1, 2, 1, 4)
    calls: dict[str, Callable[[], Any]] = {
        "alpha": lambda: gemm(x, x, alpha=wanting),
        "beta": lambda: gemm(x, x, x, beta=wanting),
        "scale": lambda: flash_attention(heads, heads, heads, scale=wanting),
        "softcap": lambda: flash_attention(heads, heads, heads, softcap=wanting * 0),
        "dropout_p": lambda: flash_attention(heads, heads, heads, dropout_p=wanting * 0),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"expected {name} to be a number, which has no gradient, got a tensor"):
            call()
    with pytest.raises(RuntimeError, match="cuda_ext::bucket_pack: expected scale to be a number, which has no"):
        pack([torch.ones(2)], torch.zeros(2), [0], scale=wanting)
    assert torch.equal(gemm(x, x, alpha=wanting.detach()), x)


def test_vmap_of_missing_optional_tensors() -> None:
    x, w = torch.randn(3, 4, 5), torch.randn(3, 6, 5)
    torch.testing.assert_close(torch.vmap(linear)(x, w), x @ w.mT)
    torch.testing.assert_close(torch.vmap(gemm)(x, w.mT), x @ w.mT)
    torch.testing.assert_close(torch.vmap(torch.vmap(gemm, (0, None)), (None, 0))(x, w.mT), (x @ w.mT[:, None]))
    w2 = torch.randn(3, 2, 3)
    for op, weight2 in ((mlp, torch.randn(3, 2, 6)), (gated_mlp, w2)):
        expected = torch.stack([op(x[i], w[i], weight2[i]) for i in range(3)])
        torch.testing.assert_close(torch.vmap(op)(x, w, weight2), expected)
    expected = torch.stack([gated_linear(x[i], w[i]) for i in range(3)])
    torch.testing.assert_close(torch.vmap(gated_linear)(x, w), expected)


# FLOPs


def counted(function: Callable[[], Tensor]) -> tuple[int, int]:
    with FlopCounterMode(display=False) as forward:
        out = function()
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("op", OPS)
def test_flops_are_those_of_plain_pytorch(op: str) -> None:
    tensors = arguments(op, (2,), 3, 4, 5, f=6)
    assert counted(lambda: OPS[op](**tensors)) == counted(lambda: REFERENCES[op](**tensors))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        OPS[op](**tensors)
    assert counter.get_total_flops() == counted(lambda: OPS[op](**tensors))[0]


def test_flops_of_masked_gradients() -> None:
    x, w1, w2 = rand(7, 5, grad=False), rand(6, 5), rand(4, 6)
    assert counted(lambda: linear(x, w1)) == (2 * 7 * 5 * 6,) * 2
    assert counted(lambda: mlp(x, w1, w2))[1] == 2 * 7 * (5 * 6 + 2 * 6 * 4)
    assert counted(lambda: testing.reference_mlp(x, w1, w2))[1] == 2 * 7 * (5 * 6 + 2 * 6 * 4)
    a, b = rand(3, 7, 5, grad=False), rand(5, 6)
    assert counted(lambda: gemm(a, b)) == (3 * 2 * 7 * 5 * 6,) * 2


def test_gradients_flow_where_bias_is_frozen_and_residual_is_not() -> None:
    """Absent tensors have no edge in the graph, and frozen ones an empty one: the others must still get their own."""
    x, w, residual = rand(3, 4, grad=False), rand(5, 4), rand(5)
    linear(x, w, torch.ones(5), residual=residual, activation="relu").sum().backward()
    assert torch.equal(residual.grad, torch.full((5,), 3.0))
    torch.testing.assert_close(w.grad, (F.linear(x, w, torch.ones(5)) > 0).float().t() @ x)
    c, bias = rand(3, 5), rand(5)
    gemm(x, w.detach().t(), c, bias=bias, beta=2.0).sum().backward()
    assert torch.equal(c.grad, torch.full((3, 5), 2.0))
    assert torch.equal(bias.grad, torch.full((5,), 3.0))


def peak_bytes(step: Callable[[], None]) -> int:
    """The most that tensors and scratch take while `step` runs, beyond what was there and what it keeps."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Each thread keeps scratch of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.cpu_only("its allocator tells a profiler of every byte")
@pytest.mark.parametrize("gated", [False, True])
def test_backward_of_an_mlp_drops_what_it_has_read(gated: bool, one_thread: None) -> None:
    """Before the gradients of the first layer take memory, the pre-activation and the hidden tensor are gone."""
    rows, n, f, k = 320, 256, 384, 288
    width = 2 * f if gated else f
    leaves = [rand(rows, k), rand(width, k), rand(n, f)]
    grad = torch.ones(rows, n)

    def step() -> None:
        torch.autograd.grad((gated_mlp if gated else mlp)(*leaves, activation="relu"), leaves, grad)

    peak = peak_bytes(step)
    out, preact, hidden, of_weight2, of_first_layer = rows * n, rows * width, rows * f, n * f, rows * k + width * k
    needed = out + preact + of_weight2 + max(preact + hidden, of_first_layer)
    assert 4 * needed <= peak <= 4 * needed + 4096, (peak / 4, needed)


@pytest.mark.cpu_only("its allocator tells a profiler of every byte")
@pytest.mark.parametrize("wanted", ["all", "no input"])
@pytest.mark.parametrize(("rows", "width"), [(64, 512), (512, 256), (2048, 128)])
@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp", "gated_mlp"])
def test_training_takes_no_more_memory_than_plain_pytorch(
    op: str, rows: int, width: int, wanted: str, one_thread: None
) -> None:
    """Two layers with something before and between, so that the gradients that come in belong to backward alone."""
    tensors = arguments(op, (), rows, width, width, f=4 * width)
    tensors.pop("residual", None)
    names = list(tensors)
    leaves = [tensors["input"].requires_grad_(wanted == "all"), *(tensors[name] for name in names[1:])]

    def peak(ops: dict[str, Callable[..., Tensor]]) -> int:
        def step() -> None:
            out = leaves[0] * 1.0
            for _ in range(2):
                out = ops[op](**dict(zip(names, [out, *leaves[1:]], strict=True)), activation="gelu") * 0.5
            out.sum().backward()
            for leaf in leaves:
                leaf.grad = None

        return peak_bytes(step)

    ours, theirs = peak(OPS), peak(REFERENCES)
    assert ours <= theirs + 4096, f"{ours / theirs:.3f} of plain PyTorch's peak"


@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp", "gated_mlp", "gemm"])
def test_backward_twice(op: str) -> None:
    """With the graph kept, twice the gradient; without it, PyTorch's own error, whichever pass is the first to fail."""
    tensors = arguments(op, (), 3, 4, 5)
    out = OPS[op](**tensors, activation="gelu").sum()
    first = torch.autograd.grad(out, list(tensors.values()), retain_graph=True)
    second = torch.autograd.grad(out, list(tensors.values()))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out, list(tensors.values()))


@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp", "gated_mlp"])
def test_backward_after_one_that_failed_halfway(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first half has let go of is missed with PyTorch's error, not read."""
    tensors = arguments(op, (), 3, 4, 5)
    out = OPS[op](**tensors, activation="gelu").sum()

    class FailsAtLinear(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "linear_backward" in func.name():
                raise MemoryError("none left")
            return func(*args, **(kwargs or {}))

    with FailsAtLinear(), pytest.raises(MemoryError, match="none left"):
        torch.autograd.grad(out, list(tensors.values()))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, list(tensors.values()))
