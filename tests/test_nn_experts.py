"""cuda_ext.nn.MixtureOfExperts against transformers' blocks, whose state dicts it loads, and its router's losses."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemm_common import rand
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.nn import MixtureOfExperts

SIZES = {"hidden_size": 24, "num_experts_per_tok": 3, "hidden_act": "silu"}


def mixtral() -> tuple[nn.Module, MixtureOfExperts]:
    theirs = MixtralSparseMoeBlock(MixtralConfig(**SIZES, intermediate_size=20, num_local_experts=8))
    return theirs, MixtureOfExperts(24, 20, 8, 3)


def qwen3() -> tuple[nn.Module, MixtureOfExperts]:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=20, num_experts=8, norm_topk_prob=False)
    return Qwen3MoeSparseMoeBlock(config), MixtureOfExperts(24, 20, 8, 3, normalize=False)


def deepseek() -> tuple[nn.Module, MixtureOfExperts]:
    config = DeepseekV3Config(
        **SIZES,
        moe_intermediate_size=20,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    )
    groups: dict[str, Any] = {"expert_groups": 4, "top_expert_groups": 2, "correction": True}
    ours = MixtureOfExperts(24, 20, 8, 3, scoring="sigmoid", scale=2.5, shared_hidden_features=40, **groups)
    return DeepseekV3MoE(config), ours


def assert_few_float32_roundings(actual: Any, expected: Any, name: str = "output") -> None:
    """At most 32, of the largest element: sums of up to 100 terms in another order lose sqrt(100), each a few."""
    atol = 32 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("make", [mixtral, qwen3, deepseek])
def test_as_the_block_of_transformers(make: Any) -> None:
    """Outputs and gradients of all parameters, from their state dict."""
    theirs, ours = (each.double() for each in make())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
        if hasattr(theirs.gate, "e_score_correction_bias"):
            theirs.gate.e_score_correction_bias.normal_()
    theirs.experts.config._experts_implementation = "eager"
    ours.load_state_dict(theirs.state_dict())
    x = rand(2, 9, 24, dtype=torch.float64)
    grad = torch.randn_like(x)
    expected, actual = theirs(x), ours(x)
    assert_few_float32_roundings(actual, expected)  # not float64, as their routers and weights of experts
    wanted = dict(theirs.named_parameters())
    gradients = dict(zip(wanted, torch.autograd.grad(expected, list(wanted.values()), grad), strict=True))
    own = dict(ours.named_parameters())
    found = dict(zip(own, torch.autograd.grad(actual, list(own.values()), grad), strict=True))
    for name, gradient in found.items():
        if "shared" in name and "gate_up" in name:
            parts = [gradients[name.replace("gate_up_proj", part)] for part in ("gate_proj", "up_proj")]
            gradients[name] = torch.cat(parts)
        assert_few_float32_roundings(gradient, gradients[name], name)


def test_balance_loss_is_that_of_transformers() -> None:
    layer = MixtureOfExperts(24, 20, 8, 3)
    x = torch.randn(50, 24)
    out, losses = layer(x, return_losses=True)
    logits, _, ids = layer.gate(x)
    theirs = load_balancing_loss_func((logits,), 8, 3)
    torch.testing.assert_close(3 * losses.balance, theirs)
    torch.testing.assert_close(losses.z, logits.logsumexp(-1).square().mean())
    assert torch.equal(losses.load, torch.bincount(ids.flatten(), minlength=8))
    (out.sum() + losses.balance + losses.z).backward()
    assert layer.gate.weight.grad is not None


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_losses_of_a_balanced_router(scoring: str) -> None:
    layer = MixtureOfExperts(8, 4, 4, 2, scoring=scoring)
    logits = torch.zeros(6, 4)
    ids = torch.tensor([[0, 1], [2, 3]] * 3)
    losses = layer.gate.losses(logits, ids)
    torch.testing.assert_close(losses.balance, torch.tensor(1.0))
    assert losses.load.tolist() == [3, 3, 3, 3]
    empty = layer.gate.losses(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64))
    assert empty.balance == 0 and empty.z == 0


def test_correction_balances() -> None:
    """Experts that nobody chooses are chosen after some steps, without a loss."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 4, 8, 2, scoring="sigmoid", correction=True)
    x = torch.randn(512, 8) + 1.0
    with torch.no_grad():
        layer.gate.weight.mul_(3.0)

    def spread() -> float:
        load = layer(x, return_losses=True)[1].load.float()
        return float(load.max() / load.mean())

    before = spread()
    for _ in range(200):
        layer.gate.adjust_correction(layer(x, return_losses=True)[1].load, rate=0.01)
    assert before > 1.5 > 1.15 > spread()
    weights = layer.gate(x)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(512))  # not of the corrected scores
    with pytest.raises(RuntimeError, match="correction=True"):
        MixtureOfExperts(8, 4, 4, 2).gate.adjust_correction(torch.zeros(4))


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda layer: layer.to(torch.bfloat16),
    "to device and dtype": lambda layer: layer.to("cpu", torch.float16),
    "half": lambda layer: layer.half(),
    "bfloat16": lambda layer: layer.bfloat16(),
    "type": lambda layer: layer.type(torch.bfloat16),
    "copy": lambda layer: copy.deepcopy(layer).bfloat16(),
    "inside a model": lambda layer: nn.Sequential(layer).bfloat16()[0],
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_the_correction_stays_float32(convert: Callable[[nn.Module], nn.Module]) -> None:
    """In 16 bits a correction of 1 and more would not change by a step of 1e-3."""
    layer: Any = MixtureOfExperts(8, 4, 4, 2, scoring="sigmoid", correction=True)
    values = 1 + torch.rand(4)
    layer.gate.e_score_correction_bias.copy_(values)
    layer = convert(layer)
    assert layer.gate.weight.dtype in (torch.float16, torch.bfloat16)
    assert layer.gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(layer.state_dict()["gate.e_score_correction_bias"], values)
    layer.gate.adjust_correction(torch.tensor([0, 0, 5, 5]))
    assert torch.equal(layer.gate.e_score_correction_bias, values + 1e-3 * torch.tensor([1.0, 1.0, -1.0, -1.0]))
    layer(torch.randn(3, 8, dtype=layer.gate.weight.dtype))


def test_the_correction_moves_to_other_devices() -> None:
    layer = MixtureOfExperts(8, 4, 4, 2, correction=True)
    assert layer.to("meta", torch.bfloat16).gate.e_score_correction_bias.device.type == "meta"  # type: ignore[union-attr]
    assert layer.to_empty(device="cpu").gate.e_score_correction_bias.device.type == "cpu"  # type: ignore[union-attr]


@on_ranks(2)
def test_corrections_of_ranks_stay_equal() -> None:
    """Each rank has loads of its own; alone, they would move the corrections apart."""
    layer = MixtureOfExperts(8, 4, 4, 2, correction=True)
    alone = copy.deepcopy(layer)
    loads = torch.tensor([[7, 0, 1, 0], [0, 0, 0, 8]])
    own = loads[dist.get_rank()]
    layer.gate.adjust_correction(own, group=dist.group.WORLD)
    alone.gate.adjust_correction(loads.sum(0))
    expected = torch.tensor([-1e-3, 1e-3, 1e-3, -1e-3])
    assert torch.equal(layer.gate.e_score_correction_bias, expected)  # type: ignore[arg-type]
    assert torch.equal(alone.gate.e_score_correction_bias, expected)  # type: ignore[arg-type]
    assert torch.equal(own, loads[dist.get_rank()])  # not changed in place
    floats = own.float()
    layer.gate.adjust_correction(floats, group=dist.group.WORLD)
    assert torch.equal(layer.gate.e_score_correction_bias, 2 * expected)  # type: ignore[arg-type]
    assert torch.equal(floats, own.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"gated": False, "bias": True, "activation": "relu2", "shared_hidden_features": 8}]
)
def test_training_lowers_the_loss(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = MixtureOfExperts(16, 32, 4, 2, dtype=dtype, **options)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = torch.randn(64, 16, dtype=dtype)
    target = torch.randn(64, 16, dtype=dtype)
    losses = []
    for _ in range(60):
        out, router = layer(x, residual=x, return_losses=True)
        loss = (out - target).float().square().mean() + 0.01 * router.balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_logits_are_not_rounded() -> None:
    layer = MixtureOfExperts(256, 8, 4, 2, dtype=torch.bfloat16)
    x = torch.randn(10, 256, dtype=torch.bfloat16)
    logits, weights, _ = layer.gate(x)
    assert logits.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ layer.gate.weight.float().t())


def test_copies_and_compiles() -> None:
    layer = MixtureOfExperts(16, 8, 4, 2, shared_hidden_features=8)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out, losses = compiled(x, return_losses=True)
    torch.testing.assert_close(out, expected)
    parameters = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(out.sum() + losses.balance, parameters),
        torch.autograd.grad(expected.sum() + layer(x, return_losses=True)[1].balance, parameters),
    )


@pytest.mark.parametrize("fp8", [None, "rowwise_with_gw_hp"])
@pytest.mark.parametrize("return_losses", [False, True])
def test_exports_for_any_number_of_tokens(return_losses: bool, fp8: str | None) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = MixtureOfExperts(16, 8, 4, 2, shared_hidden_features=8, bias=True, fp8=fp8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.experts(x, return_losses=return_losses)

    block = Block()
    batch = {0: torch.export.Dim("batch", min=1, max=1000)}
    program = torch.export.export(block, (torch.randn(3, 5, 16),), dynamic_shapes=(batch,)).module()
    for size in (1, 3, 8):
        x = torch.randn(size, 5, 16)
        with torch.no_grad():
            torch.testing.assert_close(program(x), block(x))


def test_pickles_without_a_group() -> None:
    layer, x = MixtureOfExperts(16, 8, 4, 2, correction=True), torch.randn(5, 16)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), layer(x))


@on_ranks(2)
def test_copies_share_the_group_and_do_not_pickle() -> None:
    """A file would have the experts of one rank, and nothing that says of which."""
    layer, x = MixtureOfExperts(16, 8, 4, 2, group=dist.group.WORLD), torch.randn(5, 16)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    with pytest.raises(RuntimeError, match=r"expected no group to pickle .*torch.save\(layer.state_dict\(\), path\)"):
        torch.save(layer, io.BytesIO())


def test_says_what_it_is() -> None:
    text = repr(MixtureOfExperts(16, 8, 4, 2, scoring="sigmoid", expert_groups=2, correction=True))
    assert "experts=4, top_k=2, scoring=sigmoid" in text
    assert "expert_groups=2, top_expert_groups=1, correction=True" in text
    assert "features=16, hidden_features=8, experts=4, activation=silu, gated=True, bias=False" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "expected top_k from 1 to 4"),
        ({"top_k": 0}, "expected top_k from 1 to 4"),
        ({"scoring": "tanh"}, "expected scoring 'softmax' or 'sigmoid', got 'tanh'"),
        ({"expert_groups": 3}, "expected expert_groups that divide 4 experts"),
        ({"expert_groups": 2, "top_k": 3}, "expected top_k from 1 to 2, the experts in 1 of 2 groups, got 3"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(8, 4, 4, **{"top_k": 2, **options})
    with pytest.raises(RuntimeError, match="expected activation"):
        MixtureOfExperts(8, 4, 4, 2, activation="swish")


@pytest.mark.parametrize("wrapper", ["BucketedDataParallel", "fully_shard"])
@on_ranks(2)
def test_data_parallel_training(wrapper: str) -> None:
    """Ranks send tokens to different experts, some of which get none."""
    model = nn.Sequential(MixtureOfExperts(32, 16, 8, 2, correction=True), nn.Linear(32, 32))
    alone = copy.deepcopy(model)
    batches = torch.randn(2, 3, 32)
    sum(alone(batch).square().mean() / 2 for batch in batches).backward()  # type: ignore[union-attr]
    if wrapper == "fully_shard":
        fully_shard(model[0])
        fully_shard(model)
        model(batches[dist.get_rank()]).square().mean().backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    else:
        wrapped = BucketedDataParallel(model)
        wrapped(batches[dist.get_rank()]).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
    for gradient, (name, parameter) in zip(gradients, alone.named_parameters(), strict=True):
        assert_few_float32_roundings(gradient, parameter.grad, name)


@pytest.mark.parametrize("experts", [8, 5])
@on_ranks(2)
def test_expert_parallel_training(experts: int) -> None:
    """With data parallelism over the same ranks: as the recipe of docs/experts.md."""
    rank, batches = dist.get_rank(), torch.randn(2, 7, 32)  # before ranks make weights of different sizes
    alone = nn.Sequential(MixtureOfExperts(32, 16, experts, 2, shared_hidden_features=8), nn.Linear(32, 32))
    layer = MixtureOfExperts(32, 16, experts, 2, group=dist.group.WORLD, shared_hidden_features=8)
    model = copy.deepcopy(nn.Sequential(layer, nn.Linear(32, 32)))
    assert f"of {experts}" in repr(model)
    state = alone.state_dict()
    is_own = {name for name in state if ".experts." in name}
    model.load_state_dict({n: t.tensor_split(2)[rank] if n in is_own else t for n, t in state.items()})
    sum(alone(batch).square().mean() / 2 for batch in batches).backward()  # type: ignore[union-attr]

    BucketedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(is_own))
    wrapped = BucketedDataParallel(model)
    wrapped(batches[rank]).square().mean().backward()
    for parameter in model[0].experts.parameters():  # type: ignore[union-attr]
        parameter.grad /= 2  # type: ignore[operator]
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = wanted[name].tensor_split(2)[rank] if name in is_own else wanted[name]  # type: ignore[union-attr]
        assert_few_float32_roundings(parameter.grad, expected, name)
