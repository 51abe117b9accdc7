"""`cuda_ext.nn` against compositions of `torch.nn` and plain PyTorch, and the weights it loads."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_common import EXPECTED_ACTIVATION
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ext import BlockMask
from cuda_ext._activations import ACTIVATIONS
from cuda_ext.nn import MLP, GatedMLP, Linear, MixtureOfExperts, RotaryEmbedding, SelfAttention, separated
from cuda_ext.testing import assert_close_to_reference, reference_attention


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding of x (B, S, H, D) as Llama code writes it, with angles in float32 and products in float32 or
    float64."""
    frequencies = base ** -(torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    angles = (torch.arange(x.shape[1]).float()[:, None] * frequencies).repeat(1, 2)[:, None]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    return (wide * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()).to(x.dtype)


def assert_module_matches(
    module: nn.Module, composition: Callable[[dict[str, Tensor], Tensor], Tensor], *inputs: Tensor
) -> None:
    """Output and all gradients of a module against a function of its separated weights, in its dtype and in float64."""

    def evaluate(
        function: Callable[..., Tensor], parameters: dict[str, Tensor], dtype: torch.dtype | None
    ) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
        out = function(*leaves)
        gradients = torch.autograd.grad(out, [*leaves, *parameters.values()], grad.to(out.dtype))
        return [out, *gradients]

    with torch.no_grad():
        grad = torch.randn(module(*inputs).shape)
    own = dict(module.named_parameters())
    out, *gradients = evaluate(module, own, None)
    by_name = separated(module, dict(zip(own, gradients[len(inputs) :], strict=True)))
    names = sorted(by_name)
    actual = [out, *gradients[: len(inputs)], *(by_name[name] for name in names)]
    plain, exact = (
        evaluate(lambda *x, w=weights: composition(w, *x), weights, dtype)  # type: ignore[misc]
        for dtype in (None, torch.float64)
        for weights in [
            {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in sorted(separated(module).items())}
        ]
    )
    titles = [
        "output",
        *(f"gradient of input {n}" for n in range(len(inputs))),
        *(f"gradient of {name}" for name in names),
    ]
    # A gradient whose terms cancel, as that of the keys' bias does under softmax, is as exact as its terms. They are of
    # the size of the other gradients: four roundings of the largest, and one in 16 bits, where it is for biases alone.
    rounding = torch.finfo(out.dtype).eps * max(float(e.detach().abs().max()) for e in exact)
    for title, a, p, e in zip(titles, actual, plain, exact, strict=True):
        atol = {torch.float32: 4 * rounding, torch.bfloat16: rounding if "bias" in title else None}.get(out.dtype)
        # 3 times: rotary embedding and attention are several roundings in plain PyTorch too, but not the same ones
        assert_close_to_reference(a, p, e, factor=3.0, atol=atol, name=title)


def randomised(module: nn.Module) -> nn.Module:
    """Biases and sinks that are not zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return module


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(activation: str | None, bias: bool, dtype: torch.dtype) -> None:
    module = Linear(13, 7, bias, dtype=dtype, activation=activation)

    def composition(weights: dict[str, Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = ACTIVATIONS[activation].function(F.linear(x, weights["weight"], weights.get("bias")))
        return out if residual is None else out + residual

    x, residual = torch.randn(3, 5, 13).to(dtype), torch.randn(3, 5, 7).to(dtype)
    assert_module_matches(module, composition, x)
    assert_module_matches(module, composition, x, residual)


def test_linear_is_a_torch_linear() -> None:
    theirs, ours = nn.Linear(5, 3), Linear(5, 3, activation="relu")
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 5)
    torch.testing.assert_close(ours(x), theirs(x).relu())
    assert isinstance(ours, nn.Linear)
    assert repr(ours) == "Linear(in_features=5, out_features=3, bias=True, activation=relu)"
    assert repr(Linear(5, 3)) == "Linear(in_features=5, out_features=3, bias=True)"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(activation: str | None, bias: bool, dtype: torch.dtype) -> None:
    module = randomised(GatedMLP(12, 20, bias=bias, activation=activation, dtype=dtype))

    def composition(w: dict[str, Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
        gate = ACTIVATIONS[activation].function(F.linear(x, w["gate_proj.weight"], w.get("gate_proj.bias")))
        up = F.linear(x, w["up_proj.weight"], w.get("up_proj.bias"))
        out = F.linear(gate * up, w["down_proj.weight"], w.get("down_proj.bias"))
        return out if residual is None else out + residual

    x, residual = torch.randn(2, 7, 12).to(dtype), torch.randn(2, 7, 12).to(dtype)
    assert_module_matches(module, composition, x)
    assert_module_matches(module, composition, x, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "bias"), [("gelu", True), ("relu", False), (None, True)])
def test_mlp(activation: str | None, bias: bool, dtype: torch.dtype) -> None:
    module = randomised(MLP(12, 20, bias=bias, activation=activation, dtype=dtype))

    def composition(w: dict[str, Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
        hidden = ACTIVATIONS[activation].function(F.linear(x, w["fc1.weight"], w.get("fc1.bias")))
        out = F.linear(hidden, w["fc2.weight"], w.get("fc2.bias"))
        return out if residual is None else out + residual

    x, residual = torch.randn(2, 7, 12).to(dtype), torch.randn(2, 7, 12).to(dtype)
    assert_module_matches(module, composition, x)
    assert_module_matches(module, composition, x, residual)


def test_mlp_has_the_state_dict_of_two_torch_linears() -> None:
    theirs = nn.Sequential(OrderedDict(fc1=nn.Linear(5, 9), act=nn.GELU(), fc2=nn.Linear(9, 5)))
    ours = MLP(5, 9)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    assert "activation=gelu" in repr(ours)


ATTENTIONS = {
    "llama": {"num_kv_heads": 2},
    "multi-query with biases": {"num_kv_heads": 1, "bias": True},
    "qwen": {"bias": True, "out_bias": False},
    "window, softcap, scale": {"window": (3, None), "softcap": 5.0, "scale": 0.5, "num_kv_heads": 2},
    "sinks": {"sinks": True, "num_kv_heads": 2, "window": (4, 0)},
    "encoder": {"causal": False, "rotary_base": None},
    "wide heads": {"head_dim": 12, "rotary_base": 500.0},
}


def attention_composition(module: SelfAttention, **hidden: Tensor) -> Callable[..., Tensor]:
    def composition(w: dict[str, Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
        q, k, v = (
            F.linear(x, w[f"{n}_proj.weight"], w.get(f"{n}_proj.bias")).unflatten(-1, (-1, module.head_dim))
            for n in "qkv"
        )
        if module.rotary is not None:
            q, k = rotate(q, module.rotary.base), rotate(k, module.rotary.base)
        out = reference_attention(
            q,
            k,
            v,
            causal=module.causal,
            sinks=w.get("sinks"),
            **module.options,
            **hidden,
        )
        out = F.linear(out.flatten(2), w["o_proj.weight"], w.get("o_proj.bias"))
        return out if residual is None else out + residual

    return composition


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_self_attention(options: dict, dtype: torch.dtype) -> None:
    module = randomised(SelfAttention(32, 4, dtype=dtype, **options))
    x, residual = torch.randn(2, 11, 32).to(dtype), torch.randn(2, 11, 32).to(dtype)
    assert_module_matches(module, attention_composition(module), x)
    assert_module_matches(module, attention_composition(module), x, residual)


def test_self_attention_takes_a_bias_and_a_mask() -> None:
    module = randomised(SelfAttention(32, 4, num_kv_heads=2))
    x = torch.randn(2, 11, 32)
    hidden = {"attn_bias": torch.randn(4, 11, 11), "attn_mask": torch.rand(2, 1, 1, 11) < 0.7}
    torch.testing.assert_close(module(x, **hidden), attention_composition(module, **hidden)(separated(module), x))


def test_self_attention_takes_a_relative_bias() -> None:
    module = randomised(SelfAttention(32, 4, num_kv_heads=2))
    x, table = torch.randn(2, 11, 32), torch.randn(4, 9, requires_grad=True)
    distance = torch.arange(11) - torch.arange(11)[:, None]
    actual = module(x, relative_bias=table)
    expected = module(x, attn_bias=table[:, 4 + distance.clamp(-4, 4)])
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(out.square().sum(), table)[0] for out in (actual, expected)]
    torch.testing.assert_close(*grads)


def test_packed_documents_are_as_if_alone() -> None:
    """Rotary embeddings see differences of positions alone, so that documents need not begin at 0."""
    module = randomised(SelfAttention(32, 4, num_kv_heads=2))
    documents = [torch.randn(1, length, 32) for length in (5, 130, 1, 64)]
    mask = BlockMask.documents([0, 5, 135, 136, 200], causal=True)
    packed = module(torch.cat(documents, dim=1), block_mask=mask)
    torch.testing.assert_close(packed, torch.cat([module(each) for each in documents], dim=1))


def test_dropout_only_in_training() -> None:
    module = SelfAttention(32, 4, dropout_p=0.5)
    x = torch.randn(2, 9, 32)
    torch.manual_seed(0)
    first = module(x)
    assert not torch.equal(first, module(x))
    torch.manual_seed(0)
    assert torch.equal(first, module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    torch.testing.assert_close(module(x), attention_composition(module)(separated(module), x))


def test_self_attention_loads_torch_multihead_attention() -> None:
    theirs = randomised(nn.MultiheadAttention(32, 4, batch_first=True))
    ours = SelfAttention(32, 4, bias=True, causal=False, rotary_base=None)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32)
    expected, _ = theirs(x, x, x, need_weights=False)
    torch.testing.assert_close(ours(x), expected)


# rotary embedding


def test_rotary_turns_complex_numbers() -> None:
    """Equation 14 of RoFormer in float64, for the pairs (d, d + D/2)."""
    x = torch.randn(2, 50, 3, 8)
    numbers = torch.complex(*x.double().chunk(2, dim=-1))
    angles = torch.arange(50)[:, None, None] * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(RotaryEmbedding(8, base=100.0)(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_rotary_tables_are_float32_whatever_the_dtype() -> None:
    rotary = RotaryEmbedding(8)
    half = RotaryEmbedding(8).half().to(torch.bfloat16)
    x = torch.randn(2, 50, 3, 8).bfloat16()
    assert torch.equal(half(x), rotary(x.float()).bfloat16())


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = RotaryEmbedding(16)
    q, k = torch.randn(16), torch.randn(16)
    scores = rotary(q.expand(1, 20, 1, 16))[0, :, 0] @ rotary(k.expand(1, 20, 1, 16))[0, :, 0].T
    for distance in range(-19, 20):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_rotary_has_no_state_and_takes_any_length() -> None:
    rotary = RotaryEmbedding(4)
    x = torch.randn(1, 17, 2, 4)
    for length in (3, 4, 17, 5):
        assert torch.equal(rotary(x[:, :length]), RotaryEmbedding(4)(x)[:, :length])
    assert not rotary.state_dict() and not list(rotary.parameters()) and not list(rotary.buffers())


def test_rotary_comes_back_from_the_meta_device() -> None:
    with torch.device("meta"):
        module = SelfAttention(16, 2)
    expected = SelfAttention(16, 2)
    module.to_empty(device="cpu").load_state_dict(expected.state_dict())
    x = torch.randn(1, 5, 16)
    assert torch.equal(module(x), expected(x))


# state dicts


def llama_layer(features: int = 32, hidden: int = 24, kv_features: int = 16) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (features, features),
        "self_attn.k_proj": (kv_features, features),
        "self_attn.v_proj": (kv_features, features),
        "self_attn.o_proj": (features, features),
        "mlp.gate_proj": (hidden, features),
        "mlp.up_proj": (hidden, features),
        "mlp.down_proj": (features, hidden),
    }
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def own_layer() -> nn.ModuleDict:
    return nn.ModuleDict({"self_attn": SelfAttention(32, 4, num_kv_heads=2), "mlp": GatedMLP(32, 24)})


def test_llama_weights_load_and_come_back() -> None:
    weights, layer = llama_layer(), own_layer()
    kept = dict(weights)
    layer.load_state_dict(weights)
    assert [(name, id(t)) for name, t in weights.items()] == [(name, id(t)) for name, t in kept.items()]
    assert torch.equal(
        layer["mlp"].gate_up_proj.weight, torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]])
    )
    assert torch.equal(
        layer["self_attn"].qkv_proj.weight, torch.cat([weights[f"self_attn.{name}_proj.weight"] for name in "qkv"])
    )
    back = separated(layer)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in back)
    back["mlp.up_proj.weight"].zero_()
    assert (layer["mlp"].gate_up_proj.weight[24:] == 0).all(), "separated gives views"


def test_own_format_round_trip_and_copies() -> None:
    layer = own_layer()
    assert set(layer.state_dict()) == {
        "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
    }
    for other in (own_layer(), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other.load_state_dict(layer.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))
        other.load_state_dict(llama_layer())
        assert not torch.equal(other["mlp"].gate_up_proj.weight, layer["mlp"].gate_up_proj.weight), (
            "a copy loads into itself"
        )


def test_assign_and_dtype_of_loaded_weights() -> None:
    with torch.device("meta"):
        layer = own_layer()
    weights = llama_layer()
    layer.load_state_dict({name: t.bfloat16() for name, t in weights.items()}, assign=True)
    assert all(p.dtype == torch.bfloat16 and p.requires_grad and not p.is_meta for p in layer.parameters())


def without(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: t for name, t in weights.items() if name not in names}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: without(w, "mlp.up_proj.weight"),
            "GatedMLP: expected mlp.gate_proj.weight, mlp.up_proj.weight together, got no mlp.up_proj.weight",
        ),
        (
            lambda w: without(w, "self_attn.q_proj.weight", "self_attn.v_proj.weight"),
            "SelfAttention: expected self_attn.q_proj.weight, self_attn.k_proj.weight, self_attn.v_proj.weight "
            "together, got no self_attn.q_proj.weight, self_attn.v_proj.weight",
        ),
        (
            lambda w: w | {"self_attn.k_proj.weight": torch.zeros(32, 32)},
            "SelfAttention: expected self_attn.k_proj.weight of shape (16, 32), got (32, 32)",
        ),
        (
            lambda w: w | {"mlp.gate_up_proj.weight": torch.zeros(48, 32)},
            "GatedMLP: expected either mlp.gate_up_proj.weight or mlp.gate_proj.weight, mlp.up_proj.weight, got both",
        ),
    ],
)
def test_weights_that_do_not_fit(change: Callable[[dict], dict], message: str, strict: bool) -> None:
    layer = own_layer()
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(change(llama_layer()), strict=strict)
    first, *problems = str(caught.value).split("\n\t")
    assert first == "Error(s) in loading state_dict for ModuleDict:"
    assert problems == [message]


def test_weights_that_are_absent() -> None:
    layer = own_layer()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "mlp.gate_up_proj.weight"'):
        layer.load_state_dict(without(llama_layer(), "mlp.gate_proj.weight", "mlp.up_proj.weight"))
    before = layer["mlp"].gate_up_proj.weight.clone()
    weights = without(llama_layer(), "mlp.gate_proj.weight", "mlp.up_proj.weight")
    result = layer.load_state_dict(weights, strict=False)
    assert result.missing_keys == ["mlp.gate_up_proj.weight"]
    assert not result.unexpected_keys
    assert torch.equal(before, layer["mlp"].gate_up_proj.weight)
    with pytest.raises(
        RuntimeError, match=r'Unexpected key\(s\) in state_dict: "mlp.gate_proj.bias", "mlp.up_proj.bias"'
    ):
        layer.load_state_dict(
            llama_layer() | {"mlp.gate_proj.bias": torch.zeros(24), "mlp.up_proj.bias": torch.zeros(24)}
        )


def test_biases_pack_too() -> None:
    module = SelfAttention(16, 4, num_kv_heads=2, bias=True, sinks=True)
    weights = {name: torch.randn_like(t) for name, t in separated(module).items()}
    assert {"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "sinks"} < weights.keys()
    module.load_state_dict(weights)
    assert torch.equal(module.qkv_proj.bias, torch.cat([weights[f"{name}_proj.bias"] for name in "qkv"]))
    assert module.sinks is not None
    assert torch.equal(module.sinks, weights["sinks"])


# the rest


def test_construction_errors() -> None:
    with pytest.raises(ValueError, match="expected features to be a multiple of num_heads 5, got 32"):
        SelfAttention(32, 5)
    with pytest.raises(ValueError, match="expected num_heads to be a multiple of num_kv_heads 3, got 4"):
        SelfAttention(32, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="expected num_heads to be a multiple of num_kv_heads 0, got 4"):
        SelfAttention(32, 4, num_kv_heads=0)
    with pytest.raises(ValueError, match="expected num_heads above 0, got 0"):
        SelfAttention(32, 0)
    with pytest.raises(ValueError, match="expected head_dim above 0, got 0"):
        SelfAttention(32, 4, head_dim=0)
    with pytest.raises(ValueError, match="expected an even head_dim above 0, got 3"):
        RotaryEmbedding(3)
    with pytest.raises(ValueError, match=r"expected a finite base above 0, got -1\.0"):
        SelfAttention(32, 4, rotary_base=-1.0)


@pytest.mark.parametrize(
    ("make", "option", "value", "expected"),
    [
        (Linear, "activation", "gelo", f"{EXPECTED_ACTIVATION}, got 'gelo'"),
        (MLP, "activation", "swish", f"{EXPECTED_ACTIVATION}, got 'swish'"),
        (GatedMLP, "activation", "", f"{EXPECTED_ACTIVATION}, got ''"),
        (Linear, "fp8", "rowise", "got 'rowise'"),
        (
            partial(MixtureOfExperts, experts=4, top_k=2),
            "fp8",
            "rowwise",
            "'rowwise_with_gw_hp' or 'blockwise', recipes of",
        ),
        (SelfAttention, "window", 3, "None or (left, right), each a number of keys or None, got 3"),
        (SelfAttention, "window", (-3, 0), "window left to be >= 0 or None (unbounded), got -3"),
        (SelfAttention, "scale", math.nan, "a finite scale, got nan"),
        (SelfAttention, "softcap", -1.0, "a finite softcap >= 0"),
        (SelfAttention, "dropout_p", 1.0, "dropout_p in [0, 1), got 1"),
    ],
)
def test_options_are_checked_by_the_constructor(
    make: Callable[..., nn.Module], option: str, value: Any, expected: str
) -> None:
    for device in ("cpu", "meta"):
        with torch.device(device), pytest.raises(RuntimeError, match=re.escape(expected)):
            make(8, 4, **{option: value})
    with FakeTensorMode():
        make(8, 4)


def test_construction_takes_the_random_numbers_of_the_parameters_only() -> None:
    state = torch.get_rng_state()
    SelfAttention(8, 4, dropout_p=0.5, device="meta")
    assert torch.equal(torch.get_rng_state(), state)


def test_repr() -> None:
    assert "activation=gelu" in repr(GatedMLP(4, 8, activation="gelu"))
    text = repr(SelfAttention(32, 4, num_kv_heads=2, window=(5, 0), softcap=30.0, dropout_p=0.1))
    assert "num_heads=4, num_kv_heads=2, head_dim=8, causal=True, window=(5, 0), softcap=30.0, dropout_p=0.1" in text
    assert "head_dim=8, base=10000" in text


def small_model() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SelfAttention(32, 4, num_kv_heads=2, sinks=True, window=(6, None))
            self.mlp = GatedMLP(32, 24)
            self.head = Linear(32, 8, activation="gelu")

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, residual=x)
            return self.head(x + self.mlp(x))

    return Model()


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model_is_the_eager_model(backend: str) -> None:
    torch._dynamo.reset()
    model = small_model()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    lengths = [9] if backend == "inductor" else [9, 14, 3]
    for length in lengths:
        x = torch.randn(2, length, 32, requires_grad=True)
        expected, actual = model(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        inputs = [x, *model.parameters()]
        grad = torch.randn_like(expected)
        for a, e in zip(
            torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
        ):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
def test_rotary_takes_any_length_in_a_compiled_model() -> None:
    torch._dynamo.reset()
    rotary = RotaryEmbedding(8)
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    for length in (3, 10, 6, 40):
        x = torch.randn(1, length, 2, 8)
        torch.testing.assert_close(compiled(x), RotaryEmbedding(8)(x))


@pytest.mark.parametrize("fp8", [None, "blockwise"])
@pytest.mark.parametrize("shape", [(32,), (6, 32), (2, 3, 32), (2, 0, 32)])
def test_outputs_are_no_views(shape: tuple[int, ...], fp8: str | None) -> None:
    """A hook on a view is lost when that is changed in place."""
    layers = [
        Linear(32, 32, fp8=fp8),
        MLP(32, 64, fp8=fp8),
        GatedMLP(32, 64, fp8=fp8),
        MixtureOfExperts(32, 32, 4, 2, fp8=fp8),
        MixtureOfExperts(32, 32, 4, 2, shared_hidden_features=32, fp8=fp8),
    ]
    if len(shape) == 3:
        layers.append(SelfAttention(32, 2))
    for layer in layers:
        x = torch.randn(shape, requires_grad=True)
        out = layer(x)
        assert out.shape == x.shape and not out._is_view()
        (grad,) = torch.autograd.grad(out.sum(), x)
        out = layer(x)
        out.mul_(2.0)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], 2.0 * grad)


def test_under_autocast() -> None:
    model, x = small_model(), torch.randn(2, 9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits: half a percent in each of five layers
    torch.testing.assert_close(out.float(), model(x), rtol=0.05, atol=0.05)
    out.float().sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )
