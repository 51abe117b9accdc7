"""cuda_ext.integrations.sdpa: SDPA on flash_attention gives what PyTorch's gives, wherever it is called from."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention as torch_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from cuda_ext.integrations import sdpa

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@contextmanager
def all_served(at_least: int = 1) -> Iterator[None]:
    sdpa.calls(reset=True)
    with sdpa.enable():
        yield
    counted = sdpa.calls(reset=True)
    assert set(counted) == {"served"}, counted
    assert counted["served"] >= at_least


def doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def gradients(inputs: dict[str, Any], function: Callable[..., Tensor], grad: Tensor | None) -> list[Tensor]:
    """The output, and with `grad` the gradients of all floating inputs."""
    inputs = {name: value.detach() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    if grad is None:
        return [function(**inputs)]
    floating = [each for each in inputs.values() if isinstance(each, Tensor) and each.is_floating_point()]
    for each in floating:
        each.requires_grad_()
    out = function(**inputs)
    return [out, *torch.autograd.grad(out, floating, grad.to(out.dtype))]


def assert_as_exact_as_torch(inputs: dict[str, Any], *, grad: bool = True) -> Tensor:
    """Compares with SDPA in float64: the error may be twice that of PyTorch's own SDPA in the same dtype, plus a few
    roundings of the largest element: PyTorch's error may happen to be 0."""
    weight = torch.randn(*inputs["query"].shape[:-1], inputs["value"].shape[-1]) if grad else None
    in_double = {name: doubled(value) for name, value in inputs.items()}
    with sdpa_kernel(SDPBackend.MATH):  # on the CPU, PyTorch's other backend raises SIGFPE for some empty tensors
        exact = gradients(in_double, scaled_dot_product_attention, weight)
        theirs = gradients(inputs, scaled_dot_product_attention, weight)
    with all_served():
        ours = gradients(inputs, scaled_dot_product_attention, weight)
    largest = [true.abs().max().item() if true.numel() else 0.0 for true in exact]
    for number, (mine, other, true) in enumerate(zip(ours, theirs, exact)):
        assert mine.dtype == other.dtype and mine.shape == other.shape == true.shape
        # Gradients are sums that may cancel, down to 0: of a query that sees one key, or of a mask over all keys. The
        # gradient of a float32 mask is computed from an output in the dtype of query. Of PyTorch in float64 no error is
        # known.
        size = largest[0]
        if number > 0:
            added, rows = 1.0, 1.0  # numbers and rows of scores that are added to one number of the mask's gradient
            if number == 4:
                keys = inputs["key"].shape[-2]
                added = inputs["query"][..., 0].numel() * keys / mine.numel()
                rows = added / (keys if mine.shape[-1] == 1 else 1)
            # From each row of scores the product of output and its gradient is subtracted: its error does not cancel.
            assert weight is not None
            products = weight.norm(dim=-1) * exact[0].norm(dim=-1)
            product = products.max().item() if products.numel() else 0.0
            size = (2 + added**0.5 / 16) * max(largest) + rows**0.5 / 4 * product
        roundings = 64 if mine.dtype == torch.float64 else 4
        rounding = roundings * torch.finfo(ours[0].dtype).eps * size
        if true.numel():
            assert (mine - true).abs().max() <= 2 * (other - true).abs().max() + rounding
    return ours[0]


LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "heads first": lambda b, h, s, d: torch.randn(b, h, s, d),
    "rows first": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "part of packed qkv": lambda b, h, s, d: torch.randn(b, s, 3, h, d)[:, :, 1].transpose(1, 2),
    "sequence first": lambda b, h, s, d: torch.randn(s, b, h, d).permute(1, 2, 0, 3),
    "last dim not dense": lambda b, h, s, d: torch.randn(b, h, d, s).transpose(2, 3),
    "every other element": lambda b, h, s, d: torch.randn(b, h, s, 2 * d)[..., ::2],
    "one batch, expanded": lambda b, h, s, d: torch.randn(1, h, s, d).expand(b, h, s, d),
}
MASKS: dict[str, tuple[str, ...]] = {  # sizes, of B, H, Q and K
    **{" ".join(sizes): sizes for sizes in itertools.product("B1", "H1", "Q1", "K1")},
    **{" ".join(sizes): sizes for sizes in itertools.product("H1", "Q1", "K1")},
    **{" ".join(sizes): sizes for sizes in itertools.product("Q1", "K1")},
}


@pytest.mark.sampled(cases=60)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(33, 33), (7, 70), (70, 7), (1, 19), (130, 64)])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "float32", "hidden rows"])
@pytest.mark.parametrize("gqa", [False, True])
def test_matrix(dtype: torch.dtype, layout: str, lengths: tuple[int, int], mask: str, gqa: bool) -> None:
    batch, heads, dim = random.choice([(2, 4, 16), (1, 4, 40), (3, 2, 9)])
    dim_v = random.choice([dim, dim + 3])
    make, other = LAYOUTS[layout], random.choice(list(LAYOUTS.values()))
    sizes = {"B": batch, "H": heads, "Q": lengths[0], "K": lengths[1], "1": 1}
    shape = [sizes[each] for each in random.choice(list(MASKS.values()))]
    inputs: dict[str, Any] = {
        "query": make(batch, heads, lengths[0], dim).to(dtype),
        "key": make(batch, heads // 2 if gqa else heads, lengths[1], dim).to(dtype),
        "value": other(batch, heads // 2 if gqa else heads, lengths[1], dim_v).to(dtype),
        "enable_gqa": gqa,
        "scale": random.choice([None, 0.3, -0.2]),
        "is_causal": mask == "causal",
    }
    if mask == "bool":
        inputs["attn_mask"] = torch.rand(shape) > 0.4
    elif mask in ("float", "float32"):
        inputs["attn_mask"] = torch.randn(shape).to(
            torch.float32 if mask == "float32" and dtype != torch.float64 else dtype
        )
    elif mask == "hidden rows":
        hidden = torch.rand(shape) > 0.5
        hidden[..., 0, :] = True
        inputs["attn_mask"] = random.choice([~hidden, torch.zeros(shape, dtype=dtype).masked_fill(hidden, -torch.inf)])
    assert_as_exact_as_torch(inputs)


@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (4, 5, 8), (2, 3, 4, 5, 8), (2, 1, 3, 4, 5, 8)])
@pytest.mark.parametrize("mask_rank", [0, 2, 3, 4, 5])
def test_ranks(shape: tuple[int, ...], mask_rank: int) -> None:
    query = torch.randn(shape)
    key, value = torch.randn(2, *shape[:-2], 7, 8)
    inputs = {"query": query, "key": key, "value": value}
    if mask_rank:
        full = (*shape[:-1], 7)[-mask_rank:]
        inputs["attn_mask"] = torch.randn([size if random.random() < 0.7 else 1 for size in full])
        assert inputs["attn_mask"].dim() <= len(shape)
    assert_as_exact_as_torch(inputs)


@pytest.mark.parametrize("sizes", [(0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0), (2, 4, 0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty(sizes: tuple[int, ...], causal: bool) -> None:
    batch, heads, queries, keys = sizes
    query, (key, value) = torch.randn(batch, heads, queries, 8), torch.randn(2, batch, heads, keys, 8)
    assert_as_exact_as_torch({"query": query, "key": key, "value": value, "is_causal": causal})


@pytest.mark.parametrize("layout", ["heads first", "rows first", "part of packed qkv"])
@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_output_has_the_strides_of_torch(layout: str, gqa: bool, masked: bool) -> None:
    query = LAYOUTS[layout](2, 4, 33, 16)
    key, value = (LAYOUTS[layout](2, 2 if gqa else 4, 50, 16) for _ in range(2))
    mask = torch.rand(2, 1, 33, 50) > 0.2 if masked else None
    theirs = scaled_dot_product_attention(query, key, value, mask, enable_gqa=gqa)
    with all_served():
        assert scaled_dot_product_attention(query, key, value, mask, enable_gqa=gqa).stride() == theirs.stride()


def test_rows_whose_mask_is_the_smallest_number() -> None:
    """As in masks of padded batches: every key of such a row has the same weight."""
    query, key, value = torch.randn(3, 2, 3, 40, 16)
    mask = torch.zeros(2, 1, 40, 40)
    mask[1, :, :9] = torch.finfo(torch.float32).min
    out = assert_as_exact_as_torch({"query": query, "key": key, "value": value, "attn_mask": mask}, grad=False)
    assert torch.allclose(out[1, :, :9], value[1].mean(1, keepdim=True).expand(3, 9, 16), atol=1e-5)


# What PyTorch serves


def dense(*shape: int) -> Tensor:
    return torch.randn(shape)


FALLS_THROUGH: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "2-D": (lambda: dict(zip("qkv", torch.randn(3, 5, 8))), "dimensions"),
    "different ranks": (lambda: {"q": dense(2, 4, 5, 8), "k": dense(4, 5, 8), "v": dense(4, 5, 8)}, "dimensions"),
    "integers": (lambda: dict(zip("qkv", torch.ones(3, 1, 2, 5, 8, dtype=torch.int64))), "dtype"),
    "different dtypes": (
        lambda: {"q": dense(1, 2, 5, 8), "k": dense(1, 2, 5, 8).half(), "v": dense(1, 2, 5, 8)},
        "dtype",
    ),
    "strided nested": (lambda: dict.fromkeys("qkv", torch.nested.nested_tensor([dense(2, 5, 8), dense(2, 3, 8)])), ""),
    "broadcast batch": (lambda: {"q": dense(3, 2, 5, 8), "k": dense(1, 2, 5, 8), "v": dense(1, 2, 5, 8)}, "sizes"),
    "broadcast heads": (lambda: {"q": dense(1, 2, 5, 8), "k": dense(1, 1, 5, 8), "v": dense(1, 1, 5, 8)}, "sizes"),
    "gqa, no multiple": (
        lambda: {"q": dense(1, 3, 5, 8), "k": dense(1, 2, 5, 8), "v": dense(1, 2, 5, 8), "enable_gqa": True},
        "sizes",
    ),
    "other head dim": (lambda: {"q": dense(1, 2, 5, 8), "k": dense(1, 2, 5, 9), "v": dense(1, 2, 5, 8)}, "sizes"),
    "other length": (lambda: {"q": dense(1, 2, 5, 8), "k": dense(1, 2, 5, 8), "v": dense(1, 2, 6, 8)}, "sizes"),
    "head dim 0": (lambda: {"q": dense(1, 2, 5, 0), "k": dense(1, 2, 5, 0), "v": dense(1, 2, 5, 8)}, "head dim"),
    "mask shape": (lambda: {**dict(zip("qkv", torch.randn(3, 1, 2, 5, 8))), "attn_mask": dense(5, 6)}, "attn_mask"),
    "mask rank 1": (lambda: {**dict(zip("qkv", torch.randn(3, 1, 2, 5, 8))), "attn_mask": dense(5)}, "attn_mask"),
    "mask rank above query's": (
        lambda: {**dict(zip("qkv", torch.randn(3, 2, 5, 8))), "attn_mask": dense(3, 2, 5, 5)},
        "attn_mask",
    ),
    "mask dtype": (
        lambda: {**dict(zip("qkv", torch.randn(3, 1, 2, 5, 8))), "attn_mask": dense(5, 5).half()},
        "attn_mask",
    ),
    "mask and is_causal": (
        lambda: {**dict(zip("qkv", torch.randn(3, 1, 2, 5, 8))), "attn_mask": dense(5, 5), "is_causal": True},
        "together",
    ),
    "dropout 1": (lambda: {**dict(zip("qkv", torch.randn(3, 1, 2, 5, 8))), "dropout_p": 1.0}, "dropout_p"),
    "dropout above 1": (lambda: {**dict(zip("qkv", torch.randn(3, 1, 2, 5, 8))), "dropout_p": 1.5}, "dropout_p"),
    "scale inf": (lambda: {**dict(zip("qkv", torch.randn(3, 1, 2, 5, 8))), "scale": float("inf")}, "scale"),
    "subclass": (lambda: {n: TwoTensor(t, t) for n, t in zip("qkv", torch.randn(3, 1, 2, 5, 8))}, "subclass"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", FALLS_THROUGH)
def test_the_rest_falls_through(case: str) -> None:
    """Result or error are PyTorch's, and the reason is counted."""
    make, reason = FALLS_THROUGH[case]
    inputs = {{"q": "query", "k": "key", "v": "value"}.get(name, name): value for name, value in make().items()}

    def attempt() -> Any:
        try:
            return scaled_dot_product_attention(**inputs)
        except (RuntimeError, IndexError) as error:
            return type(error), str(error)

    theirs = attempt()
    sdpa.calls(reset=True)
    with sdpa.enable():
        ours = attempt()
    counted = [text for text, number in sdpa.calls(reset=True).items() if number]
    if reason:
        assert len(counted) == 1 and reason in counted[0]
    else:  # the tensors have dispatch keys of their own
        assert not counted
    if isinstance(theirs, TwoTensor):
        ours, theirs = ours.a, theirs.a
    # PyTorch does not check that key and value are equally long: what it makes of them differs from run to run.
    if isinstance(theirs, Tensor) and not theirs.is_nested and case != "other length":
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    elif isinstance(theirs, tuple):
        assert ours == theirs


@pytest.mark.parametrize(
    ("backends", "is_ordered", "is_served"),
    [
        ([SDPBackend.MATH], False, False),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], False, False),
        ([SDPBackend.FLASH_ATTENTION], False, True),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], False, True),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], True, False),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], True, False),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], True, True),
    ],
)
def test_the_choice_of_backends_is_respected(backends: list[SDPBackend], is_ordered: bool, is_served: bool) -> None:
    query = torch.randn(1, 2, 5, 8)
    sdpa.calls(reset=True)
    with sdpa.enable(), sdpa_kernel(backends, set_priority=is_ordered):
        scaled_dot_product_attention(query, query, query)
    assert sdpa.calls(reset=True)["served"] == is_served


# The switch


def runs_here() -> bool:
    query = torch.randn(1, 2, 5, 8)
    before = sdpa.calls()["served"]
    scaled_dot_product_attention(query, query, query)
    assert sdpa.is_enabled() == (sdpa.calls()["served"] == before + 1)
    return sdpa.is_enabled()


def test_switch() -> None:
    assert not runs_here()
    sdpa.disable()
    sdpa.enable()
    sdpa.enable()
    assert runs_here()
    with sdpa.enable(), sdpa.enable():
        assert runs_here()
    assert runs_here()
    sdpa.disable()
    assert not runs_here()
    with pytest.raises(KeyError), sdpa.enable():
        with sdpa.enable():
            assert runs_here()
        assert runs_here()
        sdpa.disable()
        assert runs_here()
        raise KeyError
    assert not runs_here()
    sdpa.enable().remove()
    assert not runs_here()
    with pytest.raises(ValueError, match=r'expected mha_fastpath to be "off" or "keep", got True'):
        sdpa.enable(mha_fastpath=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_flops_are_counted(context: Callable[[], Any], requires_grad: bool) -> None:
    """2 for each pair of a query and a key that it sees, and element of the head dims."""
    query = torch.randn(2, 3, 7, 8, requires_grad=requires_grad)
    key, value = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
    for arguments, pairs in (({}, 63), ({"is_causal": True}, 28), ({"attn_mask": torch.ones(7, 9) > 0}, 63)):
        with all_served(), context(), FlopCounterMode(display=False) as counter:
            scaled_dot_product_attention(query, key, value, **arguments)
        assert counter.get_total_flops() == 2 * 6 * pairs * (8 + 5)


@pytest.mark.parametrize("has_formula", [False, True])
def test_all_state_is_restored(has_formula: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_formula:  # as a later PyTorch may have
        monkeypatch.setitem(flop_registry, torch.ops.aten.scaled_dot_product_attention, lambda *args, **kwargs: 1)

    def state() -> tuple[object, ...]:
        dispatch = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
        fast, tag = torch.backends.mha.get_fastpath_enabled(), torch.compiler.config.cache_key_tag
        return dispatch, fast, tag, dict(flop_registry)

    for setting in (True, False):
        torch.backends.mha.set_fastpath_enabled(setting)
        before = state()
        with sdpa.enable():
            assert not torch.backends.mha.get_fastpath_enabled()
            assert state() != before
        with sdpa.enable(mha_fastpath="keep"):
            assert torch.backends.mha.get_fastpath_enabled() == setting
        assert state() == before
    torch.backends.mha.set_fastpath_enabled(True)


def test_without_the_cache_of_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private name, which a release of PyTorch may lack."""
    monkeypatch.delattr(torch.ops.aten.scaled_dot_product_attention.default, "_dispatch_cache")
    with sdpa.enable():
        assert sdpa.is_enabled()
    assert not sdpa.is_enabled()


def test_registered_with_torch() -> None:
    assert "cuda_ext" in torch_attention.list_flash_attention_impls()
    assert torch_attention.current_flash_attention_impl() is None and not runs_here()
    torch_attention.activate_flash_attention_impl("cuda_ext")
    assert runs_here()
    torch_attention.restore_flash_attention_impl()
    assert not runs_here()


def test_threads() -> None:
    """Blocks overlap in several threads, while others call SDPA: all results are right, and at the end it is off."""
    query, key, value = torch.randn(3, 1, 2, 9, 8)
    expected = scaled_dot_product_attention(query, key, value)
    failures: list[object] = []

    def work(switches: bool) -> None:
        for _ in range(200):
            if switches:
                with sdpa.enable():
                    failures.append(not sdpa.is_enabled())
            error = (scaled_dot_product_attention(query, key, value) - expected).abs().max()
            failures.append(bool(error > 1e-5))

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 4 * 200 + 2 * 200 and not any(failures)
    assert not runs_here()


# Derivatives, transforms, dropout


def qkv(*shape: int, count: int = 3, **options: Any) -> list[Tensor]:
    batch, heads, length, dim = shape
    return [torch.randn(batch, length, heads, dim, **options).transpose(1, 2) for _ in range(count)]


@pytest.mark.parametrize("layout", ["heads first", "rows first"])
@pytest.mark.parametrize("mask", ["none", "causal", "float"])
def test_derivatives_of_all_orders(layout: str, mask: str) -> None:
    inputs = [LAYOUTS[layout](1, 2, 3, 4).double().requires_grad_() for _ in range(3)]
    if mask == "float":
        inputs.append(torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True))

    def function(*tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=mask == "causal")

    with all_served():
        torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
        torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("is_causal", [False, True])
def test_transforms(is_causal: bool) -> None:
    tensors = qkv(3, 2, 5, 8, dtype=torch.float64)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    def loss(*each: Tensor) -> Tensor:
        return attend(*each).square().sum()

    functions: list[Callable[[], Any]] = [
        lambda: torch.func.grad(loss, argnums=(0, 1, 2))(*tensors),
        lambda: torch.func.vmap(attend)(*tensors),
        lambda: torch.func.vmap(attend, in_dims=(1, 1, 1), out_dims=1)(*tensors),
        lambda: torch.func.vmap(torch.func.grad(loss))(*tensors),
        lambda: torch.func.jvp(attend, tuple(tensors), tuple(each + 1 for each in tensors)),
        lambda: torch.func.jacrev(attend)(*tensors),
        lambda: torch.func.hessian(loss)(*(each[:1, :1, :3] for each in tensors)),
    ]
    with sdpa_kernel(SDPBackend.MATH):  # the other backend has no forward mode
        expected = [function() for function in functions]
    with all_served(len(functions) - 2):  # torch.vmap itself calls PyTorch's implementation
        found = [function() for function in functions]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout(is_causal: bool) -> None:
    query, key, _ = qkv(2, 2, 64, 16)
    value = torch.eye(64).expand(2, 2, 64, 64).clone().requires_grad_()  # the output is the matrix of weights
    exact = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    with all_served(2):
        torch.manual_seed(5)
        weights = scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=is_causal)
        torch.manual_seed(5)
        again = scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=is_causal)
    assert torch.equal(weights, again)
    kept = (weights != 0) & (exact != 0)
    assert torch.allclose(weights[kept], exact[kept] / 0.7, rtol=1e-4)
    share = kept.sum() / (exact != 0).sum()
    assert abs(share - 0.7) < 6 * (0.3 * 0.7 / (exact != 0).sum()) ** 0.5
    grad = torch.randn_like(weights)
    (grad_value,) = torch.autograd.grad(weights, value, grad)
    assert torch.allclose((grad_value * value).sum(), (grad * weights).sum(), rtol=1e-3, atol=1e-3)  # the same mask


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "autocast", "requires_grad"])
def test_modes(mode: str) -> None:
    query, key, value = qkv(2, 4, 40, 16, requires_grad=mode == "requires_grad")
    contexts: dict[str, Any] = {
        "inference_mode": torch.inference_mode(),
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "requires_grad": torch.enable_grad(),
    }
    with contexts[mode]:
        theirs = scaled_dot_product_attention(query, key, value)
        with all_served():
            ours = scaled_dot_product_attention(query, key, value)
    assert ours.dtype == theirs.dtype and ours.requires_grad == theirs.requires_grad
    assert ours.is_inference() == theirs.is_inference()
    assert torch.allclose(ours, theirs, atol=1e-2 if mode == "autocast" else 1e-5)


@pytest.mark.parametrize("heads_first", [False, True])
def test_dropout_is_the_same_with_and_without_gradients(heads_first: bool) -> None:
    """A reentrant checkpoint computes forward without them, and again with them."""
    shape = (2, 3, 9, 8) if heads_first else (2, 9, 3, 8)
    q, k, v = (torch.randn(shape) if heads_first else torch.randn(shape).transpose(1, 2) for _ in range(3))
    outs = []
    with sdpa.enable():
        for requires_grad in (False, True):
            torch.manual_seed(7)
            outs.append(scaled_dot_product_attention(q.requires_grad_(requires_grad), k, v, dropout_p=0.5))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("enabled_first", [True, False])
def test_compiled_gradients_after_an_export_in_the_other_state(enabled_first: bool) -> None:
    """Export asks Python's dispatch of SDPA, which remembers the kernels that there were."""

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, q, q, is_causal=True)

    def export() -> None:
        torch.export.export(Attention(), (torch.randn(1, 2, 9, 16),)).run_decompositions({})

    def compiled_gradient() -> tuple[Tensor, Tensor]:
        torch._dynamo.reset()
        q = torch.randn(1, 2, 9, 16, requires_grad=True)
        compiled = torch.compile(Attention(), fullgraph=True, backend="aot_eager")
        return tuple(torch.autograd.grad(each(q).square().sum(), q)[0] for each in (compiled, Attention()))  # type: ignore[return-value]

    for is_enabled in (enabled_first, not enabled_first, enabled_first):
        with sdpa.enable() if is_enabled else contextlib.nullcontext():
            for act in (lambda: None, export):
                act()
                torch.testing.assert_close(*compiled_gradient())
