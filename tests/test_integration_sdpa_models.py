"""cuda_ext.integrations.sdpa under compilers and in models, whose code is unchanged and whose calls are all served."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cuda_ext.integrations import sdpa


@contextlib.contextmanager
def all_served(at_least: int = 1, **options: Any) -> Iterator[None]:
    sdpa.calls(reset=True)
    with sdpa.enable(**options):
        yield
    counted = sdpa.calls(reset=True)
    assert set(counted) == {"served"}, counted
    assert counted["served"] >= at_least


def assert_near(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Within twice PyTorch's distance to float64, and a few roundings, because many layers follow the attention."""
    allowed = 2 * (theirs - exact).abs().max() + 32 * torch.finfo(ours.dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= allowed


class SelfAttention(nn.Module):
    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.is_causal = nn.Linear(32, 96), nn.Linear(32, 32), is_causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.out(attended.transpose(1, 2).reshape(batch, length, 32))


@pytest.mark.sampled
def test_compiled_with_dynamic_lengths() -> None:
    torch._dynamo.reset()
    model = SelfAttention()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    counters.clear()
    with all_served():
        for length in range(5, 25):
            x = torch.randn(2, length, 32)
            out, expected = compiled(x), model(x)
            assert torch.allclose(out, expected, atol=1e-6)
            grad = torch.autograd.grad(out.sum(), model.qkv.weight)[0]
            assert torch.allclose(grad, torch.autograd.grad(expected.sum(), model.qkv.weight)[0], atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layout", ["heads first", "rows first", "mask"])
def test_compiled_modes(grad_mode: Callable[[], Any], layout: str) -> None:
    """Different lengths of query and key, which stay symbols."""
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    counters.clear()
    with grad_mode(), all_served():
        for length in (9, 14, 21):
            query, (key, value) = torch.randn(2, length, 4, 8), torch.randn(2, 2, length + 3, 4, 8)
            tensors = [t.transpose(1, 2) for t in (query, key, value)]
            if layout == "heads first":
                tensors = [t.contiguous() for t in tensors]
            if layout == "mask":
                tensors.append(torch.randn(1, 1, length, length + 3))
            out = compiled(*tensors)
            assert torch.allclose(out, scaled_dot_product_attention(*tensors), atol=1e-6)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                assert out.stride() == scaled_dot_product_attention(*tensors).stride()
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_causal_with_more_queries_than_keys() -> None:
    """flash_attention needs the difference of the lengths as a number; PyTorch serves calls where it is unknown."""
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    query, key = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 5, 8)
    expected = scaled_dot_product_attention(query, key, key, is_causal=True)
    with sdpa.enable():
        sdpa.calls(reset=True)
        assert torch.allclose(compiled(query, key, key, is_causal=True), expected, atol=1e-6)
    assert sdpa.calls()["served"] == 0


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_exported(tmp_path: Path) -> None:
    """The program keeps SDPA as one op, which is served where this integration is enabled when the program runs."""
    model, x = SelfAttention(), torch.randn(2, 9, 32)
    length = torch.export.Dim("length", min=2, max=64)

    def ops_of(program: Any) -> set[str]:
        return {str(node.target) for node in program.graph.nodes if "attention" in str(node.target)}

    def export() -> Any:
        return torch.export.export(model, (x,), dynamic_shapes={"x": {1: length}})

    decomposed = ops_of(export().run_decompositions())
    with sdpa.enable():
        programs = [export(), export().run_decompositions()]
    assert ops_of(export().run_decompositions()) == decomposed  # as before
    torch.export.save(programs[0], tmp_path / "model.pt2")
    programs.append(torch.export.load(tmp_path / "model.pt2"))
    for program in programs:
        assert ops_of(program) == {"aten.scaled_dot_product_attention.default"}
        other = torch.randn(2, 17, 32)
        expected = model(other)
        assert torch.allclose(program.module()(other), expected, atol=1e-6)
        with all_served(1):
            assert torch.allclose(program.module()(other), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_called_from_torchscript() -> None:
    inputs = tuple(torch.randn(3, 1, 2, 9, 8))
    traced = torch.jit.trace(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs)
    expected = traced(*inputs)
    with all_served(1):
        assert torch.allclose(traced(*inputs), expected, atol=1e-6)


# Nested tensors and DTensor


def jagged(offsets: Tensor, heads: int = 4, dim: int = 8) -> Any:
    values = torch.randn(int(offsets[-1]), heads, dim, requires_grad=True)
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged(is_compiled: bool, is_causal: bool) -> None:
    torch._dynamo.reset()
    offsets = torch.tensor([0, 3, 3, 10, 22])
    query, key, value = (jagged(offsets) for _ in range(3))
    function: Any = scaled_dot_product_attention
    if is_compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with all_served():
        out = function(query, key, value, is_causal=is_causal, scale=0.4)
        assert out.is_nested and out.shape[2] == query.shape[2]
        grads = torch.autograd.grad(out.values().square().sum(), (query, key, value))
    wanted = [t.transpose(1, 2).values() for t in (query, key, value)]
    rows = [t.split(offsets.diff().tolist()) for t in wanted]
    parts = [
        scaled_dot_product_attention(*(t.transpose(0, 1) for t in each), is_causal=is_causal, scale=0.4).transpose(0, 1)
        for each in zip(*rows)
    ]
    expected = torch.cat(parts)
    assert torch.allclose(out.transpose(1, 2).values(), expected, atol=1e-6)
    for grad, exact in zip(grads, torch.autograd.grad(expected.square().sum(), wanted)):
        assert torch.allclose(grad.transpose(1, 2).values(), exact, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_calls_that_fall_through() -> None:
    query = jagged(torch.tensor([0, 3, 10]))
    expected = scaled_dot_product_attention(query, query, query)
    with sdpa.enable(), sdpa_kernel(SDPBackend.MATH):
        sdpa.calls(reset=True)
        out = scaled_dot_product_attention(query, query, query)
    assert torch.equal(out.values(), expected.values()) and sdpa.calls()["served"] == 0


def test_dtensor(group: None) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    local = [t.transpose(1, 2) for t in torch.randn(3, 2, 9, 4, 8)]
    expected = scaled_dot_product_attention(*local, is_causal=True)
    for place in (Replicate(), Shard(0), Shard(1)):
        tensors = [DTensor.from_local(t, mesh, [place]) for t in local]
        with all_served():
            out = scaled_dot_product_attention(*tensors, is_causal=True)
        assert out.placements == (place,) and torch.allclose(out.to_local(), expected, atol=1e-6)
    # Split along the sequence; PyTorch has no rule for its CPU backend.
    split = [DTensor.from_local(t, mesh, [Shard(2)]) for t in local]
    sdpa.calls(reset=True)
    with sdpa.enable(), contextlib.suppress(NotImplementedError):
        scaled_dot_product_attention(*split)
    counted = sdpa.calls(reset=True)
    assert counted.pop("served") == 0 and "sharded along the sequence" in str(counted)


# Models


def outputs(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    out = model(**inputs)
    for name in ("logits", "sample", "last_hidden_state"):
        out = getattr(out, name, out)
    return out[0] if isinstance(out, tuple) else out


def assert_served(model: nn.Module, inputs: dict[str, Any], calls: int, **options: Any) -> None:
    in_double = {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in inputs.items()}
    for is_training in (False, True):
        model.train(is_training)
        with torch.set_grad_enabled(is_training):
            exact = outputs(copy.deepcopy(model).double(), in_double)
            theirs = outputs(model, inputs)
            with all_served(calls, **options):
                ours = outputs(model, inputs)
        assert_near(ours, theirs, exact)
        if is_training:
            parameters = [each for each in model.parameters() if each.requires_grad]
            weight = torch.randn_like(ours)
            with sdpa.enable():
                grads = torch.autograd.grad(ours, parameters, weight, allow_unused=True)
            expected = torch.autograd.grad(theirs, parameters, weight, allow_unused=True)
            for mine, other in zip(grads, expected):
                assert (mine is None) == (other is None)
                if mine is not None:
                    assert torch.allclose(mine, other, atol=1e-4 * float(other.abs().max() + 1))


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention(mask: str, batch_first: bool) -> None:
    x = torch.randn(3, 9, 32) if batch_first else torch.randn(9, 3, 32)
    inputs: dict[str, Any] = {"query": x, "key": x, "value": x, "need_weights": False}
    if mask == "causal":
        inputs |= {"attn_mask": nn.Transformer.generate_square_subsequent_mask(9), "is_causal": True}
    if mask == "padding":
        inputs["key_padding_mask"] = torch.arange(9) >= torch.tensor([[9], [4], [6]])
    assert_served(nn.MultiheadAttention(32, 4, batch_first=batch_first), inputs, 1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    assert_served(model, {"src": torch.randn(2, 9, 32)}, 2)
    model.eval()
    with torch.inference_mode(), sdpa.enable(mha_fastpath="keep"):
        sdpa.calls(reset=True)
        model(torch.randn(2, 9, 32))
    assert sdpa.calls()["served"] == 0


def test_timm_vit() -> None:
    timm = pytest.importorskip("timm")
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10, qk_norm=True
    )
    assert_served(model, {"x": torch.randn(2, 3, 32, 32)}, 2)


def test_pyg_gps_conv() -> None:
    """Three graphs of different sizes, which GPSConv pads, with a mask of keys, for nn.MultiheadAttention."""
    geometric = pytest.importorskip("torch_geometric")
    graph_of_node = torch.tensor([0] * 5 + [1] * 2 + [2] * 7)
    edges = (graph_of_node[:, None] == graph_of_node).nonzero().T
    model = geometric.nn.GPSConv(32, geometric.nn.GCNConv(32, 32), heads=4)
    assert_served(model, {"x": torch.randn(14, 32), "edge_index": edges, "batch": graph_of_node}, 1)


@pytest.mark.sampled
def test_diffusers_unet() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    inputs = {"sample": torch.randn(2, 4, 8, 8), "timestep": 3, "encoder_hidden_states": torch.randn(2, 7, 16)}
    assert_served(model, inputs, 8)


def test_diffusers_dit() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=1
    )
    labels = {"timestep": torch.tensor([3, 4]), "class_labels": torch.tensor([1, 2])}
    model.transformer_blocks[0].norm1.emb.class_embedder.dropout_prob = 0.0
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    assert_served(model, {"hidden_states": torch.randn(2, 4, 8, 8), **labels}, 2)


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def test_transformers_llama() -> None:
    tokens = torch.randint(97, (2, 11))
    padded = torch.ones(2, 11, dtype=torch.long)
    padded[1, :4] = 0
    for mask in (None, padded):
        assert_served(tiny_llama(), {"input_ids": tokens, "attention_mask": mask}, 2)


def test_transformers_generation() -> None:
    model = tiny_llama().eval()
    tokens = torch.randint(97, (2, 5))
    options = {
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(tokens),
    }
    expected = model.generate(tokens, **options)
    with all_served(12 * 2):
        assert torch.equal(model.generate(tokens, **options), expected)
