"""Tiny models of transformers with random weights, and an attention in the precision of its inputs to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from cuda_ext.integrations import transformers as integration

REFERENCE = "reference"

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW: dict[str, Any] = {"sliding_window": 7}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA3 = {**WINDOW, **TWO_KINDS, "query_pre_attn_scalar": 16}
# name -> (class, class of the configuration, its changes to SIZES)
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    # Its attention is not told its window: only the mask knows.
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **WINDOW,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**WINDOW, **MIXTURE, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**WINDOW, **MIXTURE}),
    # Chunks, and no support for FlashAttention: masks of every pair.
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 96},
    ),
}


def decoder(name: str, implementation: str, dtype: torch.dtype = torch.float64, **changed: Any) -> Any:
    model, config, changes = DECODERS[name]
    sizes = {**SIZES, **changes, **changed}
    if name == "gpt2":
        sizes = {key: value for key, value in sizes.items() if key not in SIZES or key.endswith(("_id", "vocab_size"))}
    settings = getattr(hf, config)(**sizes)
    settings._attn_implementation = implementation
    if dtype == torch.float64:
        settings._experts_implementation = "eager"  # grouped products have no float64
    torch.manual_seed(0)
    return getattr(hf, model)(settings).to(dtype).eval()


def ids(batch: int = 3, length: int = 19) -> Tensor:
    return torch.randint(3, 99, (batch, length))


def padding(kind: str, batch: int = 3, length: int = 19) -> Tensor:
    """1 for tokens; `kind`: left, right, or holes, that is also between tokens."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, : length // 3] = 0
    mask[2, :1] = 0
    if kind == "right":
        return mask.flip(1)
    if kind == "holes":
        mask[1, length // 2 : length // 2 + 2] = 0
        mask[0, -1] = 0
    return mask


Run = Callable[[], Tensor]
BERT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "dropout": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def bert() -> tuple[Any, Run]:
    model = hf.BertForMaskedLM(hf.BertConfig(**{**SIZES, **BERT}))
    inputs = {"input_ids": ids(), "attention_mask": padding("right")}
    return model, lambda: model(**inputs).logits


def bert_cross() -> tuple[Any, Run]:
    """A decoder with cross-attention to as many keys as it has queries, so that only the mask can tell them apart."""
    model = hf.BertLMHeadModel(hf.BertConfig(**{**SIZES, **BERT}, is_decoder=True, add_cross_attention=True))
    mask = padding("right")
    inputs = {
        "input_ids": ids(),
        "attention_mask": mask,
        "encoder_hidden_states": torch.randn(3, 19, 64, dtype=torch.float64),
        "encoder_attention_mask": padding("left"),
    }

    def run() -> Tensor:
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].to(model.dtype)
        return model(**inputs).logits[mask.bool()]

    return model, run


def modernbert() -> tuple[Any, Run]:
    special = {f"{name}_token_id": 1 for name in ("eos", "cls", "sep")}
    model = hf.ModernBertForMaskedLM(hf.ModernBertConfig(**{**SIZES, **special}, local_attention=8))
    mask = padding("right")
    inputs = {"input_ids": ids(), "attention_mask": mask}
    return model, lambda: model(**inputs).logits[mask.bool()]


def t5(*, with_padding: bool = True) -> tuple[Any, Run]:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0}
    model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=99, **sizes, decoder_start_token_id=0))
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(length=11)}
    if with_padding:
        inputs["attention_mask"] = padding("right")
    return model, lambda: model(**inputs).logits


def t5_without_padding() -> tuple[Any, Run]:
    return t5(with_padding=False)


def bart() -> tuple[Any, Run]:
    model = hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ, max_position_embeddings=40))
    mask = padding("left")
    inputs = {"input_ids": ids(), "attention_mask": padding("right"), "decoder_input_ids": ids()}
    return model, lambda: model(**inputs, decoder_attention_mask=mask).logits[mask.bool()]


def whisper() -> tuple[Any, Run]:
    config = hf.WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=30, max_target_positions=40)
    model = hf.WhisperForConditionalGeneration(config)
    features = torch.randn(3, 8, 60, dtype=torch.float64)
    tokens = ids(length=11)
    return model, lambda: model(input_features=features.to(model.dtype), decoder_input_ids=tokens).logits


def vit() -> tuple[Any, Run]:
    model = hf.ViTForImageClassification(hf.ViTConfig(**{**SIZES, **BERT}, image_size=32, patch_size=8))
    pixels = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    return model, lambda: model(pixels.to(model.dtype)).logits


def gemma3_images() -> tuple[Any, Run]:
    """Tokens of one image see each other in both directions."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = 110
    config = hf.Gemma3Config(
        text_config={**SIZES, **GEMMA3},
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=image,
        image_token_id=image,
        boi_token_index=111,
        eoi_token_index=112,
    )
    model = hf.Gemma3ForConditionalGeneration(config)
    tokens = ids(batch=2)
    tokens[:, 3:7] = image
    tokens[0, 8:12] = image
    tokens[1, :3] = 0
    mask = (tokens != 0).long()
    inputs = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": (tokens == image).long()}
    pixels = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    return model, lambda: model(**inputs, pixel_values=pixels.to(model.dtype)).logits[mask.bool()]


OTHERS: dict[str, Callable[[], tuple[Any, Run]]] = {
    function.__name__: function
    for function in (bert, bert_cross, modernbert, t5, t5_without_padding, bart, whisper, vit, gemma3_images)
}


@pytest.fixture
def enabled() -> Iterator[None]:
    """For tests with pytestmark = usefixtures("enabled")."""
    AttentionInterface.register(REFERENCE, _reference)
    AttentionMaskInterface.register(REFERENCE, eager_mask)
    torch._dynamo.reset()
    integration.enable()
    integration.calls(reset=True)
    yield
    integration.disable()


def _reference(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' own eager attention takes the softmax in float32 whatever the dtype, and so has no exact result."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    for added in (position_bias, attention_mask):
        if added is not None:
            logits = logits + added
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None
