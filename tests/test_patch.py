"""`cuda_ext.patch` on models of transformers, timm, diffusers and torch, against the same models as they were."""

from __future__ import annotations

import collections
import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_ext
from cuda_ext import integrations
from cuda_ext._activations import ACTIVATIONS, NAMES
from cuda_ext.integrations.patching.report import compressed
from cuda_ext.integrations.patching.swapping import Swapped, gate_up_is_joined

IDS = torch.randint(64, (2, 7))
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Models: a function that makes one and its inputs


def of_transformers(kind: str, name: str, inputs: dict[str, Tensor] | None = None, **config: Any) -> Any:
    import transformers

    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**config))
    return model, inputs or {"input_ids": IDS}


def causal(name: str, **config: Any) -> Any:
    return of_transformers(f"{name}ForCausalLM", name, **{**SIZES, "num_key_value_heads": 2, **config})


def t5(projection: str) -> Any:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    return of_transformers("T5ForConditionalGeneration", "T5", inputs, feed_forward_proj=projection, **sizes)


def whisper() -> Any:
    sizes = {
        f"{part}_{key}": 2 if key == "layers" else 4
        for part in ("encoder", "decoder")
        for key in ("layers", "attention_heads")
    }
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    more = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "num_mel_bins": 8, "d_model": 32}
    ends.update(max_source_positions=16, max_target_positions=16)
    inputs = {"input_features": torch.randn(2, 8, 32).double(), "decoder_input_ids": IDS}
    return of_transformers("WhisperModel", "Whisper", inputs, **sizes, **more, **ends)


def vit() -> Any:
    sizes = {
        key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32).double()}
    return of_transformers("ViTModel", "ViT", inputs, image_size=32, patch_size=8, **sizes)


def opt() -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    return of_transformers("OPTForCausalLM", "OPT", ffn_dim=48, word_embed_proj_dim=32, **sizes)


def gpt2() -> Any:
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return of_transformers(
        "GPT2LMHeadModel", "GPT2", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, **ends
    )


def of_timm(name: str, size: int, **options: Any) -> Any:
    import timm

    return timm.create_model(name, img_size=size, **options), {"x": torch.randn(1, 3, size, size).double()}


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
    )
    sample, states = torch.randn(1, 4, 8, 8).double(), torch.randn(1, 5, 32).double()
    return model, {"sample": sample, "timestep": 3, "encoder_hidden_states": states}


def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "norm_num_groups": 8}
    inputs = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([2])}
    sample = torch.randn(1, 4, 8, 8).double()
    return DiTTransformer2DModel(num_embeds_ada_norm=10, **sizes), {"hidden_states": sample, **inputs}


def transformer() -> Any:
    model = nn.Transformer(32, 4, 2, 2, 48, batch_first=True, activation="gelu")
    return model, {"src": torch.randn(2, 7, 32).double(), "tgt": torch.randn(2, 5, 32).double()}


def sequential() -> Any:
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 4), nn.SiLU()), {"input": torch.randn(3, 8).double()}


def widened(name: str) -> Any:
    return of_timm(name, 28, depth=2, embed_dim=48, num_heads=4)


# Of each model the modules that are swapped, and how often each op runs in training, where dropout may be in the way.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, int], dict[str, int]]] = {
    "Llama": (lambda: causal("Llama"), {"gated MLP": 2}, {"gated_mlp": 2}),
    "Gemma2": (lambda: causal("Gemma2", head_dim=8), {"gated MLP": 2}, {"gated_mlp": 2}),
    "Qwen2": (lambda: causal("Qwen2"), {"gated MLP": 2}, {"gated_mlp": 2}),
    "Nemotron": (lambda: causal("Nemotron"), {"MLP": 2}, {"mlp": 2}),
    "Phi3": (lambda: causal("Phi3"), {"gated MLP": 2}, {"gated_mlp": 2}),
    "Mixtral": (
        lambda: causal("Mixtral", experts_implementation="eager"),
        {"experts": 1},
        {"grouped_mm": 4, "combine_experts": 2},
    ),
    "GPT2": (gpt2, {"MLP": 2}, {"mlp": 2}),
    "OPT": (opt, {"linear + activation": 2}, {"linear": 2}),
    "Bert": (
        lambda: of_transformers("BertForMaskedLM", "Bert", **SIZES),
        {"linear + activation": 3},
        {"linear": 3},
    ),
    "T5": (lambda: t5("relu"), {"MLP": 4}, {"linear": 4}),
    "T5 gated": (lambda: t5("gated-gelu"), {"gated MLP": 4}, {"gated_linear": 4}),
    "ViT": (vit, {"MLP": 2}, {"mlp": 2}),
    "Whisper": (whisper, {"linear + activation": 4}, {"linear": 4}),
    "CLIP": (lambda: of_transformers("CLIPTextModel", "CLIPText", **SIZES), {}, {}),
    "timm ViT": (lambda: of_timm("vit_tiny_patch16_224", 32, depth=2), {"MLP": 2}, {"mlp": 2}),
    "timm Swin": (
        lambda: of_timm("swin_tiny_patch4_window7_224", 56, depths=(2, 2), num_heads=(2, 4), embed_dim=32),
        {"MLP": 4},
        {"mlp": 4},
    ),
    "timm EVA": (lambda: of_timm("eva02_tiny_patch14_224", 28, depth=2), {"gated MLP": 2}, {"gated_mlp": 2}),
    "timm EVA with norms": (lambda: widened("eva02_base_patch14_224"), {"gated linear": 2}, {"gated_linear": 2}),
    "timm DINOv2": (lambda: widened("vit_giant_patch14_dinov2"), {"gated MLP": 2}, {"gated_mlp": 2}),
    "UNet": (unet, {"MLP": 1}, {"mlp": 1}),
    "DiT": (dit, {"MLP": 4}, {"mlp": 5}),
    "nn.Transformer": (transformer, {"MLP": 4}, {"linear": 4}),
    "nn.Sequential": (sequential, {"linear + activation": 2, "MLP": 1}, {"linear": 2, "mlp": 1}),
}


class Ops(TorchDispatchMode):
    """Counts this package's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cuda_ext":
            self.counts[func._schema.name.removeprefix("cuda_ext::")] += 1
        return func(*args, **(kwargs or {}))


def ops_of(function: Callable[[], Any]) -> dict[str, int]:
    with Ops() as ops, torch.enable_grad():
        function()
    found: Counter[str] = Counter()
    for name, count in ops.counts.items():
        if "backward" not in name:
            found[name.removesuffix("_forward")] += count
    return found


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(3)  # the same dropout
    result = model(**inputs)
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "last_hidden_state", "sample"):
        if getattr(result, name, None) is not None:
            found: Tensor = getattr(result, name)
            return found
    raise AssertionError(type(result))


def assert_same(model: nn.Module, reference: nn.Module, inputs: dict[str, Any], tolerance: float = 1e-12) -> None:
    """Output and gradients of all parameters; in float64 both differ only by the order of sums."""
    actual, expected = output(model, inputs), output(reference, inputs)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    gradient = torch.randn_like(actual)
    model.zero_grad()
    reference.zero_grad()
    actual.backward(gradient)
    expected.backward(gradient)
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        other = theirs[name].grad
        assert (parameter.grad is None) == (other is None), name
        if other is not None:
            scale = float(other.abs().max())
            torch.testing.assert_close(parameter.grad, other, rtol=0, atol=100 * tolerance * (1 + scale), msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, swapped, ops = MODELS[name]
    model, inputs = make()
    model.double()
    reference = copy.deepcopy(model)
    parameters, classes = dict(model.named_parameters()), {n: type(m) for n, m in model.named_modules()}
    report = cuda_ext.patch(model, attention=False, loss=False)
    assert {kind: len(names) for kind, names in report.swapped.items()} == swapped, report
    assert list(model.state_dict()) == list(reference.state_dict())
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert all(gate_up_is_joined(module) for module in model.modules() if isinstance(module, Swapped))
    for training in (False, True):
        model.train(training)
        reference.train(training)
        assert_same(model, reference, inputs)
    assert ops_of(lambda: output(model, inputs)) == ops
    assert cuda_ext.patch(model, attention=False, loss=False).swapped == {}
    cuda_ext.unpatch(model)
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert ops_of(lambda: output(model, inputs)) == {}
    torch.testing.assert_close(output(model, inputs), output(reference, inputs), rtol=0, atol=0)


# Blocks


class Block(nn.Module):
    """A gated MLP; subclasses differ in ways that no swap may overlook."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12, False), nn.Linear(8, 12, False), nn.Linear(12, 8, False)
        self.act = activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.act(self.gate(x)) * self.up(x)).clamp(max=1e9))


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x) * 1.0)


class Residual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) + x


class GateTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.gate(x))


class OtherInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x.flip(-1)))


class InPlaceInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x.mul_(1))) * self.up(x))


class SideEffect(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.up(x)
        return self.down(self.act(self.gate(x)) * self.last)


class Unused(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.down(self.up(x))
        return self.down(self.act(self.gate(x)) * self.up(x))


class OnlyInTraining(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.act(self.gate(x)) * self.up(x))
        return out if not self.training else F.relu(out)


class MutableSettings(Block):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"scale": False}

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.act(self.gate(x)) * self.up(x))
        return out * 2 if self.settings["scale"] else out


class Partial(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.act(self.gate(x))
        return self.down(gate * self.up(x))


class Detached(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x).detach()) * self.up(x))


class Tuple(Block):
    def forward(self, x: Tensor) -> Any:
        return (self.down(self.act(self.gate(x)) * self.up(x)),)


class ByShape(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.act(self.gate(x)) * self.up(x))
        return out if x.shape[1] < 100 else out * 2


class ByValue(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.act(self.gate(x)) * self.up(x))
        return out if not x.isnan().any() else out * 2


class GateInLastRows(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 24)
        self.up = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class SplitRows(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.gate(x).chunk(2, dim=1)
        return self.down(self.act(one) * two)


class WithBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


LEFT = [
    *(Clamped, Scaled, Residual, GateTwice, OtherInput, InPlaceInput, SideEffect, Unused, OnlyInTraining),
    *(MutableSettings, Partial, Detached, Tuple, ByShape, ByValue, GateInLastRows, SplitRows, WithBuffer),
    *(lambda: Block(nn.Sigmoid()), lambda: Block(nn.LeakyReLU()), lambda: Block(nn.PReLU())),
]


@pytest.mark.parametrize("make", LEFT, ids=lambda make: getattr(make, "__name__", ""))
def test_a_block_that_computes_something_else_is_left(make: Callable[[], nn.Module]) -> None:
    model = nn.ModuleDict({"block": make().double()})
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    report = cuda_ext.patch(model)
    assert not {"MLP", "gated MLP", "gated linear"} & set(report.swapped), report
    if type(model["block"]) is not type(make()):  # the expression self.act(self.gate(x)) alone may be served
        assert report.swapped == {"linear + activation": ["block.gate"]}
    else:
        assert report.left["block"]
        assert {name: vars(module) for name, module in model.named_modules()} == before
    reference = make().double()
    reference.load_state_dict(model["block"].state_dict())
    for training in (False, True):
        x = torch.randn(2, 4, 8).double()
        results = []
        for block in (model["block"], reference):
            block.train(training).zero_grad()
            out = block(x.clone())
            out = out[0] if isinstance(out, tuple) else out
            out.sum().backward()
            results.append([out, *(each.grad for each in block.parameters())])
        for actual, expected in zip(*results):
            assert (actual is None) == (expected is None)
            if actual is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_the_plain_block_is_swapped() -> None:
    report = cuda_ext.patch(Block())
    assert report.swapped == {"gated MLP": [""]}


def modules_of(name: str) -> Iterator[nn.Module]:
    """Of every class that the table has for an activation."""
    activation = ACTIVATIONS[name]
    if activation.approximate is not None:
        yield nn.GELU(approximate=activation.approximate)
    for path in activation.modules:
        module, _, kind = path.rpartition(".")
        made = getattr(pytest.importorskip(module), kind)()
        assert f"{type(made).__module__}.{type(made).__qualname__}" == path
        yield made
        if isinstance(made, nn.ReLU | nn.SiLU):
            yield type(made)(inplace=True)


@pytest.mark.parametrize("name", NAMES)
def test_modules_of_each_activation(name: str) -> None:
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    for activation in modules_of(name):
        expected = ACTIVATIONS[name].function(x)
        torch.testing.assert_close(activation(x.clone()), expected, rtol=1e-9, atol=1e-9)
        block = Block(activation)
        cuda_ext.patch(block)
        assert block._cuda_ext_recipe[1].activation == name  # type: ignore[operator, union-attr, index]
        assert ops_of(lambda block=block: block(torch.randn(1, 8))) == {"gated_mlp": 1}  # type: ignore[misc]
    for call in ACTIVATIONS[name].calls:
        torch.testing.assert_close(call(x), ACTIVATIONS[name].function(x), rtol=0, atol=0)


class Functional(nn.Module):
    """Dropout and activation as functions, whose settings are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 8)
        self.activation, self.p = F.relu, 0.0
        self.norm: nn.Module | None = None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = F.dropout(self.activation(self.one(x)), p=self.p, training=self.training)
        x = self.two(x)
        if self.norm is not None:
            x = self.norm(x)
        if hasattr(self, "adapter"):
            x = x + self.adapter(x)
        return x if scale is None else x * scale


@pytest.mark.parametrize(
    ("activation", "known"),
    [
        (lambda x: F.relu(x).square(), True),
        (lambda x: torch.square(torch.relu(x)), True),
        (lambda x: F.relu(x) ** 2, True),
        (lambda x: x.relu().pow(2), True),
        (lambda x: torch.pow(F.relu(x), 2.0), True),
        (lambda x: F.relu(x) ** 3, False),
        (lambda x: F.relu(x) ** torch.tensor(2), False),
        (lambda x: F.silu(x).square(), False),
        (lambda x: F.relu(x).square().square(), False),
        (lambda x: 2 ** F.relu(x), False),
    ],
)
def test_squares_of_relu(activation: Callable[[Tensor], Tensor], known: bool) -> None:
    block = Functional().double()
    block.activation = activation
    reference = copy.deepcopy(block)
    assert bool(cuda_ext.patch(block).swapped) == known
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(block(x), reference(x))


def _add_norm(block: Any) -> None:
    block.norm = nn.LayerNorm(8).double()


def _add_adapter(block: Any) -> None:
    block.adapter = nn.Linear(8, 8).double()


def _prune(block: Any) -> None:
    from torch.nn.utils import prune

    prune.random_unstructured(block.two, "weight", 0.5)


def _hook(block: Any) -> None:
    block.one.register_forward_hook(lambda module, inputs, out: out * 2)


def _activation(block: Any) -> None:
    block.activation = F.silu


def _forward(block: Any) -> None:
    block.two.forward = lambda x: x[..., :8]


def _parametrization(block: Any) -> None:
    nn.utils.parametrizations.spectral_norm(block.one)


def _replaced(block: Any) -> None:
    block.one = nn.Sequential(nn.Linear(8, 12), nn.Tanh()).double()


def _weight_norm(block: Any) -> None:
    nn.utils.parametrizations.weight_norm(block.two)


def _removed(block: Any) -> None:
    block.two = nn.Identity()


CHANGES = [
    *(_add_norm, _add_adapter, _prune, _hook, _activation, _forward, _parametrization, _replaced, _weight_norm),
    _removed,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_patching_takes_effect(change: Callable[[Any], None]) -> None:
    block = Functional().double()
    assert cuda_ext.patch(block).swapped == {"MLP": [""]}
    x = torch.randn(3, 8).double()
    assert ops_of(lambda: block(x)) == ops_of(lambda: block(x, None)) == {"mlp": 1}
    assert ops_of(lambda: block(x, torch.ones(()))) == {}
    block.eval()
    change(block)
    assert "mlp" not in ops_of(lambda: block(x))  # its first layer alone may be served
    actual = block(x)
    cuda_ext.unpatch(block)
    torch.testing.assert_close(actual, block(x), rtol=1e-12, atol=1e-12)


def test_dropout_that_is_turned_on_later() -> None:
    block = Functional().double()
    cuda_ext.patch(block)
    block.p = 0.5
    x = torch.randn(64, 8).double()
    torch.manual_seed(1)
    actual = block(x)
    cuda_ext.unpatch(block)
    torch.manual_seed(1)
    torch.testing.assert_close(actual, block(x), rtol=0, atol=0)


def test_hooks_of_a_block_and_global_hooks_see_what_they_saw() -> None:
    block, seen = Block(), []
    cuda_ext.patch(block)
    block.register_forward_hook(lambda *_: seen.append("block"))
    block.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert ops_of(lambda: block(torch.randn(2, 8, requires_grad=True)).sum().backward()) == {"gated_mlp": 1}
    assert seen == ["block", "backward"]
    names: list[type] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: names.append(type(module)))
    try:
        assert ops_of(lambda: block(torch.randn(2, 8))) == {}
    finally:
        handle.remove()
    assert names == [nn.Linear, nn.SiLU, nn.Linear, nn.Linear, type(block)]


# Copies and files


def small(dtype: torch.dtype = torch.float64) -> Any:
    model, _ = causal("Llama", num_hidden_layers=1)
    return model.to(dtype)


def logits(model: Any) -> Tensor:
    out: Tensor = model(input_ids=IDS).logits
    return out


def is_served(model: Any) -> bool:
    return ops_of(lambda: logits(model)) == {"gated_mlp": 1}


def test_copies_are_swapped_and_packed() -> None:
    model = small()
    cuda_ext.patch(model, attention=False)
    expected = logits(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert is_served(other)
        torch.testing.assert_close(logits(other), expected, rtol=0, atol=0)
        with torch.no_grad():
            next(other.parameters()).zero_()
            for parameter in other.model.layers[0].mlp.parameters():
                parameter.zero_()
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    assert is_served(model.float()) and is_served(model.to(torch.bfloat16)) and is_served(copy.deepcopy(model).double())
    cuda_ext.unpatch(other)
    assert not any(isinstance(module, Swapped) for module in other.modules())


def test_saved_like_any_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    model = small()
    reference = copy.deepcopy(model)
    cuda_ext.patch(model, attention=False)
    model.save_pretrained(tmp_path / "patched")
    reference.save_pretrained(tmp_path / "reference")
    name = "model.safetensors"
    patched, plain = load_file(tmp_path / "patched" / name), load_file(tmp_path / "reference" / name)
    assert list(patched) == list(plain) and all(torch.equal(patched[key], plain[key]) for key in plain)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "patched", dtype=torch.float64)
    torch.testing.assert_close(logits(loaded), logits(reference), rtol=1e-12, atol=1e-12)  # BLAS looks at addresses
    cuda_ext.patch(loaded, attention=False)
    assert is_served(loaded)
    save_file(model.state_dict(), tmp_path / "direct")  # refuses tensors that overlap
    torch.save(model.state_dict(), tmp_path / "torch")
    other = small()
    cuda_ext.patch(other, attention=False)
    other.load_state_dict(torch.load(tmp_path / "torch"))
    assert is_served(other)
    torch.testing.assert_close(logits(other), logits(model), rtol=0, atol=0)


def test_parameters_that_move_apart_are_read_where_they_are() -> None:
    model = small()
    cuda_ext.patch(model, attention=False)
    reference = small()
    model.load_state_dict(reference.state_dict(), assign=True)
    assert not is_served(model)
    torch.testing.assert_close(logits(model), logits(reference), rtol=0, atol=0)
    assert cuda_ext.patch(model, attention=False).swapped == {}
    assert is_served(model)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-12, atol=1e-12)


def test_shared_memory_is_not_moved() -> None:
    model = small()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach(), model.parameters())
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    expected = logits(model)
    report = cuda_ext.patch(model, attention=False)
    # One after the other in the flat vector, gate and up are adjacent already.
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert is_served(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-12, atol=1e-12)
    block = Block().double()
    buffer = torch.randn(300).double()
    block.up.weight.data, block.gate.weight.data = buffer[:96].view(12, 8), buffer[100:196].view(12, 8)
    report = cuda_ext.patch(block)
    assert "share memory" in report.left[""]
    assert block.up.weight.data_ptr() == buffer.data_ptr()
    assert ops_of(lambda: block(torch.randn(1, 8).double())) == {}


# Training


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(5)
    for _ in range(steps):
        model(torch.randn(4, 8).double()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("frozen", ["", "gate", "up"])
def test_an_optimizer_made_before_patching(frozen: str) -> None:
    model = Block().double()
    if frozen:
        getattr(model, frozen).weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    make = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference)]
    cuda_ext.patch(model)
    actual, expected = trained(model, make[0]), trained(reference, make[1])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert gate_up_is_joined(model)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_a_weight_that_changes_before_backward_is_an_error(name: str) -> None:
    block = Block()
    cuda_ext.patch(block)
    loss = block(torch.randn(3, 8, requires_grad=True)).sum()
    with torch.no_grad():
        getattr(block, name).weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_transforms() -> None:
    block = Block().double()
    reference = copy.deepcopy(block)
    cuda_ext.patch(block)
    x, tangent = torch.randn(3, 8).double(), torch.randn(3, 8).double()
    assert torch.autograd.gradcheck(block, x.clone().requires_grad_())
    for function in (
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.jvp(f, (x,), (tangent,))[1],
        lambda f: torch.func.jacrev(f)(x),
        lambda f: torch.func.hessian(lambda x: f(x).sin().sum())(x[:1]),
        lambda f: torch.autograd.functional.hvp(lambda x: f(x).sin().sum(), x, tangent)[1],
        lambda f: torch.func.grad(lambda w: torch.func.functional_call(f, w, x).sum())(dict(f.named_parameters()))[
            "up.weight"
        ],
        lambda f: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False),
        lambda f: make_fx(f)(x)(x),
        lambda f: make_fx(lambda x: torch.autograd.grad(f(x).sum(), list(f.parameters())))(x)(x),
        lambda f: make_fx(lambda *inputs: torch.func.functional_call(f, *inputs), tracing_mode="symbolic")(
            dict(f.named_parameters()), x
        )(dict(f.named_parameters()), x),
    ):
        torch.testing.assert_close(function(block), function(reference), rtol=1e-10, atol=1e-10)
    weights = {key: parameter.detach() for key, parameter in block.named_parameters()}
    tangents = {key: torch.randn_like(weight) for key, weight in weights.items()}
    derivatives = [
        torch.func.jvp(lambda w, f=f: torch.func.functional_call(f, w, x), (weights,), (tangents,))[1]  # type: ignore[misc]
        for f in (block, reference)
    ]
    torch.testing.assert_close(*derivatives, rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(cases=2, slow=True)
@pytest.mark.parametrize("name", ["Llama", "Phi3", "T5 gated", "GPT2", "Whisper", "nn.Sequential"])
def test_compiles_without_graph_breaks(name: str) -> None:
    model, inputs = MODELS[name][0]()
    model.double()
    if "decoder_input_ids" in inputs:
        inputs["use_cache"] = False  # making the cache breaks the graph, patched or not
    reference = copy.deepcopy(model)
    cuda_ext.patch(model, attention=False)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.eval()
    reference.eval()
    torch.testing.assert_close(output(compiled, inputs), output(reference, inputs), rtol=1e-10, atol=1e-10)


def test_autocast() -> None:
    """The same casts as of the layers that are swapped; in T5, whose forward looks at dtypes, its own forward runs."""
    for make, served in ((lambda: causal("Llama"), True), (lambda: t5("gated-gelu"), False)):
        model, inputs = make()
        model.eval()
        reference = copy.deepcopy(model)
        cuda_ext.patch(model, attention=False)
        with torch.autocast("cpu", torch.bfloat16):
            assert bool(ops_of(lambda: output(model, inputs))) == served  # noqa: B023
            actual, plain = output(model, inputs), output(reference, inputs)
        exact = output(reference, inputs)
        error = float((plain - exact).detach().norm())
        assert float((actual - exact).detach().norm()) <= 1.5 * error  # fewer roundings, or the same
        assert error < 0.05 * float(exact.detach().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("projection", ["relu", "gated-gelu", "gated-silu"])
def test_t5_with_its_last_weight_in_float32(projection: str, dtype: torch.dtype) -> None:
    """Its forward casts to the dtype of that weight, which transformers keeps in float32."""
    model, inputs = t5(projection)
    model.to(dtype).eval()
    reference = copy.deepcopy(model)
    assert cuda_ext.patch(model, attention=False).swapped
    for each in (model, reference):
        for name, module in each.named_modules():
            if name.endswith(".wo"):
                module.float()
    assert not ops_of(lambda: output(model, inputs))
    assert_same(model, reference, inputs, tolerance=0.0)
    model.to(dtype)
    assert ops_of(lambda: output(model, inputs))


class Converting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.up.weight.dtype or x.device != self.up.weight.device:
            x = x.to(self.up.weight)
        x = F.relu(self.up(x))
        if x.dtype != self.norm.weight.dtype:
            x = x.to(self.norm.weight.dtype)
        x = self.norm(x)
        if x.dtype != self.down.weight.dtype:
            x = x.to(self.down.weight.dtype)
        return self.down(x)


@pytest.mark.parametrize("changed", ["up", "norm", "down", "input"])
def test_blocks_that_convert_what_differs(changed: str) -> None:
    block = Converting()
    reference = copy.deepcopy(block)
    cuda_ext.patch(block)
    x = torch.randn(3, 8)
    assert ops_of(lambda: block(x)) == {"linear": 1}
    if changed == "input":
        x = x.bfloat16()
    else:
        for each in (block, reference):
            getattr(each, changed).bfloat16()
    assert not ops_of(lambda: block(x))
    assert torch.equal(block(x), reference(x))


def test_generation() -> None:
    model = small().eval()
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    cuda_ext.patch(model, attention=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None), expected)


# Adapters


@pytest.mark.parametrize("targets", [["q_proj"], ["gate_proj"], ["up_proj", "down_proj"]])
@pytest.mark.parametrize("patch_first", [True, False])
def test_lora(targets: list[str], patch_first: bool) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(patch: bool) -> Any:
        model = copy.deepcopy(start)
        if patch and patch_first:
            cuda_ext.patch(model, attention=False)
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False))
        if patch and not patch_first:
            cuda_ext.patch(model, attention=False)
        return model

    start = small()
    model, reference = adapted(True), adapted(False)
    inputs = {"input_ids": IDS}
    assert_same(model, reference, inputs)
    assert ("gated_mlp" in ops_of(lambda: output(model, inputs))) == (targets == ["q_proj"])
    with model.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(output(model, inputs), output(reference, inputs), rtol=1e-12, atol=1e-12)
    merged, expected = model.merge_and_unload(), reference.merge_and_unload()
    torch.testing.assert_close(output(merged, inputs), output(expected, inputs), rtol=1e-12, atol=1e-12)
    cuda_ext.patch(merged, attention=False)
    torch.testing.assert_close(output(merged, inputs), output(expected, inputs), rtol=1e-12, atol=1e-12)
    assert is_served(merged)


# Ranks


@pytest.mark.sampled
@on_ranks(2)
def test_wrapped_for_several_ranks() -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from cuda_ext.distributed import BucketedDataParallel

    start = nn.Sequential(Block(), Functional()).double()

    def sharded(model: nn.Module) -> nn.Module:
        for block in model.children():
            fully_shard(block)
        return fully_shard(model)

    results = []
    for patched in (False, True):
        for wrap in (lambda model: model, DistributedDataParallel, BucketedDataParallel, sharded):
            model = copy.deepcopy(start)
            if patched:
                assert sum(map(len, cuda_ext.patch(model).swapped.values())) == 2
            wrapped = wrap(model)  # type: ignore[operator]
            if patched and isinstance(wrapped, FSDPModule):
                with pytest.raises(RuntimeError, match=r"cuda_ext.unpatch: expected 0 .*FSDPBlock"):
                    cuda_ext.unpatch(wrapped)
            parameters = trained(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01))
            full = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in parameters]
            results.append(full)
    for actual in results[1:]:
        torch.testing.assert_close(actual, results[0], rtol=1e-10, atol=1e-10)


# Attention, arguments, report


@pytest.fixture
def integration() -> Iterator[None]:
    yield
    integrations.transformers.disable()


def test_attention_of_transformers(integration: None) -> None:
    model = small()
    expected, previous = logits(model), model.config._attn_implementation
    report = cuda_ext.patch(model, mlp=False, loss=False)
    assert report.swapped == {"attention": ["(the model, LlamaForCausalLM)"]} and not report.left
    assert model.config._attn_implementation == "cuda_ext"
    assert cuda_ext.patch(model, mlp=False, loss=False).swapped == {}
    integrations.transformers.calls(reset=True)
    torch.testing.assert_close(logits(model), expected)
    assert integrations.transformers.calls()["served"] == {"flash_attention": model.config.num_hidden_layers}
    cuda_ext.unpatch(model)
    assert model.config._attn_implementation == previous
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def test_attention_elsewhere_gets_a_hint() -> None:
    model, _ = of_timm("vit_tiny_patch16_224", 32, depth=1)
    assert cuda_ext.patch(model, mlp=False).left == {
        "blocks.0.attn": "attention goes through SDPA: use cuda_ext.integrations.sdpa"
    }


def test_a_difference_that_only_verification_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda_ext import _activations

    monkeypatch.setitem(_activations._OF_MODULES, "torch.nn.modules.activation.SiLU", "relu")
    model, wrong = Block(), Block()
    report = cuda_ext.patch(model)
    assert "verification: its output differs by" in report.left[""]
    assert type(model) is Block
    assert cuda_ext.patch(wrong, verify=False).swapped == {"gated MLP": [""]}


def test_the_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match=r"cuda_ext.patch: expected model to be a torch.nn.Module, got dict"):
        cuda_ext.patch({})  # type: ignore[arg-type]


def test_a_slice_of_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh()).double()
    x = torch.randn(3, 8).double()
    expected = [model[:n](x) for n in range(1, 5)]
    cuda_ext.patch(model)
    for n in range(1, 5):
        torch.testing.assert_close(model[:n](x), expected[n - 1], rtol=1e-12, atol=1e-12)
    model.append(nn.ReLU())
    torch.testing.assert_close(model(x), expected[-1].relu(), rtol=1e-12, atol=1e-12)


def test_report() -> None:
    names = [f"layers.{n}.mlp" for n in range(4)] + ["head", "layers.7.mlp"]
    assert compressed(names) == ["layers.{0..3,7}.mlp", "head"]
    assert compressed([f"a.{n}.b.{m}" for n in range(2) for m in range(3)]) == ["a.{0,1}.b.{0..2}"]
    model, _ = causal("Llama", num_hidden_layers=3)
    assert str(cuda_ext.patch(model, attention=False)) == (
        "cuda_ext.patch: swapped\n"
        "  gated MLP  3  model.layers.{0..2}.mlp\n"
        "  loss       1  (the model, LlamaForCausalLM)"
    )
    text = str(cuda_ext.patch(nn.ModuleList([Block(nn.Sigmoid()), GateInLastRows()])))
    assert text.splitlines()[0:2] == ["cuda_ext.patch: swapped", "  nothing"]
    assert f"its activation act (Sigmoid) is none of {', '.join(NAMES[:-1])} and {NAMES[-1]}" in text
    assert "LlamaMLP[cuda_ext](" in repr(model)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_patching_where_nothing_is_recorded(mode: Callable[[], AbstractContextManager[object]]) -> None:
    """The block is verified, gradients included, and trains afterwards, also after unpatch."""
    plain = GatedBlock()
    model = nn.Sequential(copy.deepcopy(plain))
    with mode():
        assert cuda_ext.patch(model).swapped == {"gated MLP": ["0"]}
    x = torch.randn(3, 8)
    for after in (lambda: None, lambda: cuda_ext.unpatch(model)):
        with mode():
            after()
        assert not any(parameter.is_inference() for parameter in model.parameters())
        model.zero_grad()
        plain.zero_grad()
        for module in (model, plain):
            module(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down_proj, self.act_fn = nn.Linear(12, 8, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
