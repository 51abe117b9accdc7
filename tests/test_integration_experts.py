"""transformers' mixtures of experts with experts_implementation="cuda_ext"."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import cuda_ext
from cuda_ext.integrations import transformers as door
from cuda_ext.testing import assert_close_to_reference

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3": Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=6),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4),
    "deepseek": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 2, "head_dim": 8},
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}


def tiny(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], experts_implementation="eager").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 or "bias" in name:
                parameter.normal_(std=0.1)
    return model


def run(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model(ids, labels=ids)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(out.loss, list(names.values()), allow_unused=True)
    return out.logits, {name: g for name, g in zip(names, gradients, strict=True) if g is not None}


def exact(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `run` of an eager model gives in float64."""
    return run(copy.deepcopy(model).double(), ids)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_as_eager(name: str) -> None:
    ids = torch.randint(0, 50, (2, 17))
    model = tiny(name)
    expected, gradients = run(model, ids)
    logits, references = exact(model, ids)
    with door.enable():
        model.set_experts_implementation("cuda_ext")
        door.calls(reset=True)
        actual, found = run(model, ids)
        layers = sum(hasattr(module, "_is_expert_parallel") for module in model.modules())
        assert door.calls()["served"]["mixture_of_experts"] == layers > 0
    assert_close_to_reference(actual, expected, logits, name="logits")
    assert found.keys() == gradients.keys()
    for each, gradient in gradients.items():
        # A sum whose few elements, as those of sinks, plain PyTorch may by luck round well: some roundings of it.
        atol = 8 * torch.finfo(gradient.dtype).eps * float(references[each].abs().max())
        assert_close_to_reference(found[each], gradient, references[each], atol=atol, name=each)


def test_compiles_without_a_break() -> None:
    ids = torch.randint(0, 50, (2, 9))
    model = tiny("mixtral")
    with door.enable():
        model.set_experts_implementation("cuda_ext")
        expected, gradients = run(model, ids)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        out = compiled(ids, labels=ids)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        (actual,) = torch.autograd.grad(out.loss, model.get_parameter(name))
    model.set_experts_implementation("eager")
    logits, references = exact(model, ids)
    assert_close_to_reference(out.logits, expected, logits, name="logits")
    assert_close_to_reference(actual, gradients[name], references[name], name=name)


def test_named_gates_keep_little() -> None:
    """The gates of Mixtral are recognised; that of gpt-oss is a function."""
    from cuda_ext.integrations.transformers.experts import _gate_of

    experts = {name: next(m for m in tiny(name).modules() if hasattr(m, "is_concatenated")) for name in CONFIGS}
    assert _gate_of(experts["mixtral"]) == _gate_of(experts["deepseek"]) == "silu"
    assert callable(_gate_of(experts["gpt-oss"]))
    experts["mixtral"].act_fn.register_forward_hook(lambda *_: None)
    assert callable(_gate_of(experts["mixtral"]))


def test_experts_of_other_ranks_add_nothing() -> None:
    experts: Any = next(m for m in tiny("mixtral").modules() if hasattr(m, "is_concatenated"))
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.tensor([[0, 4], [1, 2], [4, 4], [3, 0], [4, 1]])
    experts.config._experts_implementation = "eager"
    expected = experts(x, ids, weights)
    with door.enable():
        experts.config._experts_implementation = "cuda_ext"
        torch.testing.assert_close(experts(x, ids, weights), expected)


def test_without_a_gate() -> None:
    config = NemotronHConfig(**SIZES, n_routed_experts=4, moe_intermediate_size=24)
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    experts: Any = NemotronHExperts(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    x, weights, ids = torch.randn(7, experts.up_proj.shape[2]), torch.rand(7, 2), torch.randint(0, 4, (7, 2))
    experts.config._experts_implementation = "eager"
    expected = experts(x, ids, weights)
    with door.enable():
        experts.config._experts_implementation = "cuda_ext"
        torch.testing.assert_close(experts(x, ids, weights), expected)


def test_norm_after_each_expert_is_left_to_transformers() -> None:
    experts: Any = next(m for m in tiny("mixtral").modules() if hasattr(m, "is_concatenated"))
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.Identity()
    x, weights, ids = torch.randn(8, 32), torch.rand(8, 2), torch.randint(0, 4, (8, 2))
    with door.enable():
        door.calls(reset=True)
        experts.config._experts_implementation = "cuda_ext"
        out = experts(x, ids, weights)
        assert door.calls()["refused"] == {"experts with a norm after each: computed by 'grouped_mm'": 1}
    experts.config._experts_implementation = "eager"
    torch.testing.assert_close(out, experts(x, ids, weights))


def test_autocast() -> None:
    ids = torch.randint(0, 50, (2, 9))
    model = tiny("qwen3")
    with door.enable(), torch.autocast("cpu", torch.bfloat16):
        model.set_experts_implementation("cuda_ext")
        out, gradients = run(model, ids)
    assert out.isfinite().all()
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())


def test_patch_sets_and_unpatch_restores() -> None:
    ids = torch.randint(0, 50, (2, 9))
    model = tiny("deepseek")
    expected, (logits, _) = model(ids).logits, exact(model, ids)
    report = cuda_ext.patch(model)
    assert report.swapped["experts"] == ["(the model, DeepseekV3ForCausalLM)"]
    assert not any("experts" in name for name in report.left)
    assert model.config._experts_implementation == "cuda_ext"
    assert_close_to_reference(model(ids).logits, expected, logits, name="logits")
    assert not cuda_ext.patch(model).swapped
    cuda_ext.unpatch(model)
    assert model.config._experts_implementation == "eager"
    assert "experts" not in cuda_ext.patch(model, mlp=False).swapped
    cuda_ext.unpatch(model)


def test_unknown_after_disable() -> None:
    model, ids = tiny("mixtral"), torch.zeros(1, 3, dtype=torch.int64)
    door.disable()
    with door.enable():
        model.set_experts_implementation("cuda_ext")
        model(ids)
    with pytest.raises(KeyError, match="cuda_ext"):
        model(ids)


def test_experts_of_patched_models_in_fp8() -> None:
    ids = torch.randint(0, 50, (2, 17))
    model, recipe = tiny("mixtral"), cuda_ext.fp8.EXPERTS_RECIPES[0]
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    with door.enable():
        report = cuda_ext.fp8.convert(model, recipe, least_features=1)
        assert report.experts == 0 and "cuda_ext.patch(model) first" in report.kept[names[0]]
        cuda_ext.fp8.revert(model)
    cuda_ext.patch(model, attention=False, loss=False)
    expected, gradients = run(model, ids)
    only_experts = lambda name, layer: not name.endswith("experts")  # noqa: E731
    report = cuda_ext.fp8.convert(model, recipe, only_experts, least_features=1)
    assert report.converted == names and report.experts == 2
    logits, found = run(model, ids)
    assert not logits.equal(expected) and (logits - expected).abs().mean() < 0.1 * expected.abs().mean()
    assert found.keys() == gradients.keys()
    cuda_ext.fp8.revert(model)
    assert run(model, ids)[0].equal(expected)
    cuda_ext.unpatch(model)
    with door.enable():
        other = tiny("gpt-oss")
        other.set_experts_implementation("cuda_ext")
        kept = cuda_ext.fp8.convert(other, recipe, least_features=1).kept
    assert kept["model.layers.0.mlp.experts"] == "experts with a norm or a gate of their own"
