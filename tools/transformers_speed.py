"""Speed and exactness of models of transformers with attn_implementation="cuda_ext", against "eager" and "sdpa".

    OMP_NUM_THREADS=2 python tools/transformers_speed.py --families llama bert --dtypes float32 --seconds 20
    OMP_NUM_THREADS=2 python tools/transformers_speed.py attention
    python tools/transformers_speed.py exactness --dtypes bfloat16

Prints one of the tables of docs/transformers.md or docs/patch.md:

models      whole models: milliseconds, and how many times as fast "cuda_ext" is as the faster of the two others
patch       the same, with cuda_ext.patch(model)
attention   attention alone, of the shapes that the models have and of longer ones, against SDPA
overhead    what the attention function costs beyond the op
exactness   distances to the same models in float64

Random weights, 2 layers, 2 sequences of 512 tokens, hidden size 512; ViT: 768 and 224² pixels. The implementations
alternate in one process, and the fastest run of each counts, in CPU time of all threads, which other programs on the
machine disturb less than elapsed time. Set OMP_WAIT_POLICY=passive, so that waiting threads use none.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

import cuda_ext

hf: Any = transformers

BATCH, LENGTH, LAYERS = 2, 512, 2
OURS = "cuda_ext"
Inputs = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 1000,
    "d_model": 512,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 1408,
    "decoder_ffn_dim": 1408,
    "pad_token_id": 0,
}


def ids() -> torch.Tensor:
    return torch.randint(1, 1000, (BATCH, LENGTH))


def tokens() -> Inputs:
    return {"input_ids": ids()}


def padded(left: bool = False) -> Inputs:
    """Lengths of 512 and 230 tokens."""
    position = torch.arange(LENGTH)
    mask = position < torch.tensor([[512], [230]])
    return {"input_ids": ids(), "attention_mask": (mask.flip(1) if left else mask).long()}


def decoder(name: str, **changed: Any) -> Callable[[], Any]:
    return lambda: getattr(hf, f"{name}Config")(**{**SIZES, **changed})


MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 128}
# name -> model class, config, inputs, implementations to compare with
FAMILIES: dict[str, tuple[str, Callable[[], Any], Callable[[], Inputs], tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", decoder("Llama"), tokens, ("eager", "sdpa")),
    "llama, padding left": ("LlamaForCausalLM", decoder("Llama"), lambda: padded(left=True), ("eager", "sdpa")),
    "mistral, window 128": ("MistralForCausalLM", decoder("Mistral", **WINDOW), tokens, ("eager", "sdpa")),
    "qwen3": ("Qwen3ForCausalLM", decoder("Qwen3"), tokens, ("eager", "sdpa")),
    "gemma2": ("Gemma2ForCausalLM", decoder("Gemma2", query_pre_attn_scalar=64, **WINDOW), tokens, ("eager",)),
    "gpt-oss": ("GptOssForCausalLM", decoder("GptOss", **MIXTURE, **WINDOW), tokens, ("eager",)),
    "mixtral": ("MixtralForCausalLM", decoder("Mixtral", **MIXTURE, sliding_window=None), tokens, ("eager", "sdpa")),
    "gpt2": (
        "GPT2LMHeadModel",
        lambda: hf.GPT2Config(vocab_size=1000, n_embd=512, n_layer=LAYERS, n_head=8, n_positions=LENGTH),
        tokens,
        ("eager", "sdpa"),
    ),
    "bert": ("BertForMaskedLM", decoder("Bert"), tokens, ("eager", "sdpa")),
    "bert, padding right": ("BertForMaskedLM", decoder("Bert"), padded, ("eager", "sdpa")),
    "t5": (
        "T5ForConditionalGeneration",
        lambda: hf.T5Config(
            vocab_size=1000, d_model=512, d_kv=64, d_ff=1408, num_layers=LAYERS, num_heads=8, decoder_start_token_id=0
        ),
        lambda: {**tokens(), "decoder_input_ids": ids()[:, : LENGTH // 4]},
        ("eager", "sdpa"),
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        lambda: hf.WhisperConfig(**ENCODER_DECODER, max_source_positions=LENGTH),
        lambda: {
            "input_features": torch.randn(BATCH, 80, 2 * LENGTH),
            "decoder_input_ids": ids()[:, : LENGTH // 4],
        },
        ("eager", "sdpa"),
    ),
    "vit, 224/16": (
        "ViTForImageClassification",
        lambda: hf.ViTConfig(num_hidden_layers=LAYERS),
        lambda: {"pixel_values": torch.randn(BATCH, 3, 224, 224)},
        ("eager", "sdpa"),
    ),
}


def fastest(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The shortest time of each call in seconds, of at least 3 runs each, which alternate."""
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < 3 or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - start)
        rounds += 1
    return best


def measure(family: str, dtype: torch.dtype, seconds: float, patched: bool) -> list[tuple[str, dict[str, float]]]:
    name, config, make_inputs, others = FAMILIES[family]
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in make_inputs().items()}
    models = {}
    for implementation in (*others, OURS):
        settings = config()
        settings._attn_implementation = implementation
        models[implementation] = getattr(hf, name)(settings).to(dtype).eval()
    if patched:
        cuda_ext.patch(models[OURS])

    def forward(model: Any) -> object:
        with torch.no_grad():
            return model(**inputs).logits

    def step(model: Any) -> object:
        model.zero_grad()
        model(**inputs).logits.float().logsumexp(-1).mean().backward()
        return None

    def run(work: Callable[[Any], object]) -> dict[str, float]:
        return fastest({key: functools.partial(work, model) for key, model in models.items()}, seconds)

    return [("forward", run(forward)), ("training step", run(step))]


def print_models(families: list[str], dtypes: list[str], seconds: float, patched: bool) -> None:
    print(f"| model | dtype | work | eager, ms | sdpa, ms | {'patched' if patched else OURS}, ms | times as fast |")
    print("|---|---|---|---:|---:|---:|---:|", flush=True)
    for dtype in dtypes:
        for family in families:
            for work, best in measure(family, getattr(torch, dtype), seconds, patched):
                ours = best.pop(OURS)
                shown = " | ".join(f"{best[key] * 1e3:.0f}" if key in best else "–" for key in ("eager", "sdpa"))
                ratio = min(best.values()) / ours
                print(f"| {family} | {dtype} | {work} | {shown} | {ours * 1e3:.0f} | {ratio:.2f} |", flush=True)


class Attention(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    bias: bool = False  # with its gradient, as in T5

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Query, key, value, with heads first as in models, and the bias if there is one."""
        sizes = [(self.queries, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads)]
        found = [torch.randn(self.batch, heads, rows, self.head_dim) for rows, heads in sizes]
        if self.bias:
            found.append(torch.randn(1, self.heads, self.queries, self.keys))
        return [tensor.to(dtype).requires_grad_() for tensor in found]


ATTENTION = {
    "llama, qwen3": Attention(BATCH, LENGTH, LENGTH, 8, 2, 64, causal=True),
    "gpt2": Attention(BATCH, LENGTH, LENGTH, 8, 8, 64, causal=True),
    "bert, whisper's encoder": Attention(BATCH, LENGTH, LENGTH, 8, 8, 64),
    "t5's encoder": Attention(BATCH, LENGTH, LENGTH, 8, 8, 64, bias=True),
    "t5's cross-attention": Attention(BATCH, LENGTH // 4, LENGTH, 8, 8, 64),
    "vit": Attention(BATCH, 197, 197, 12, 12, 64),
    "2048 tokens": Attention(1, 2048, 2048, 4, 4, 128, causal=True),
    "1024 tokens": Attention(1, 1024, 1024, 4, 4, 256, causal=True),
    "513 queries, 777 keys": Attention(1, 513, 777, 4, 4, 40),
}


def attention_times(shape: Attention, dtype: torch.dtype, seconds: float) -> dict[str, dict[str, float]]:
    theirs = shape.tensors(dtype)
    # The op's layout has rows first. Each side gets contiguous tensors.
    ours = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in theirs[:3]] + theirs[3:]
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    grouped = shape.heads != shape.kv_heads
    outputs: dict[str, Callable[..., Any]] = {
        "sdpa": lambda q, k, v, bias=None: sdpa(q, k, v, bias, is_causal=shape.causal, enable_gqa=grouped),
        OURS: lambda q, k, v, bias=None: cuda_ext.flash_attention(q, k, v, causal=shape.causal, attn_bias=bias),
    }
    forward: dict[str, Callable[[], object]] = {}
    backward: dict[str, Callable[[], object]] = {}
    for key, inputs in (("sdpa", theirs), (OURS, ours)):
        # Without gradients: SDPA computes in another way if its mask has one.
        forward[key] = functools.partial(outputs[key], *(x.detach() for x in inputs))
        out = outputs[key](*inputs)
        backward[key] = functools.partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)
    return {"forward": fastest(forward, seconds), "backward": fastest(backward, seconds)}


def print_attention(dtypes: list[str], seconds: float) -> None:
    print(
        "| attention of | batch, queries, keys | heads, dim | dtype | work | sdpa, ms | cuda_ext, ms | times as fast |"
    )
    print("|---|---|---|---|---|---:|---:|---:|", flush=True)
    for dtype in dtypes:
        for name, shape in ATTENTION.items():
            heads = str(shape.heads) if shape.heads == shape.kv_heads else f"{shape.heads} on {shape.kv_heads}"
            sizes = f"{shape.batch}, {shape.queries}, {shape.keys} | {heads}, {shape.head_dim}"
            for work, best in attention_times(shape, getattr(torch, dtype), seconds).items():
                times = f"{best['sdpa'] * 1e3:.2f} | {best[OURS] * 1e3:.2f} | {best['sdpa'] / best[OURS]:.2f}"
                print(f"| {name} | {sizes} | {dtype} | {work} | {times} |", flush=True)


def microseconds(call: Callable[[], object]) -> float:
    """Of the fastest of 15 rounds of some milliseconds."""

    def round_of(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls

    round_of(100 if round_of(2) < 1e-3 else 1)
    calls = max(3, int(5e-3 / round_of(3)))
    return 1e6 * min(round_of(calls) for _ in range(15))


def attention_calls(length: int, heads: int, dim: int, work: str) -> list[Callable[[], object]]:
    """The public op, the attention function of the implementation, and transformers' own function for SDPA, causal."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from cuda_ext.integrations.transformers.attention import attention_forward

    module: Any = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    heads_first = [torch.randn(1, heads, length, dim) for _ in range(3)]
    rows_first = [tensor.transpose(1, 2).contiguous() for tensor in heads_first]
    for tensor in (*heads_first, *rows_first):
        tensor.requires_grad_(work != "inference mode")
    grad = torch.randn(1, length, heads, dim)

    def timed(function: Any, tensors: list[torch.Tensor]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(function(), tensors, grad)) if "backward" in work else function

    ours: Any = attention_forward
    theirs: Any = sdpa_attention_forward
    return [
        timed(lambda: cuda_ext.flash_attention(*rows_first, causal=True), rows_first),
        timed(lambda: ours(module, *heads_first, attention_mask=None, scaling=dim**-0.5)[0], heads_first),
        timed(lambda: theirs(module, *heads_first, attention_mask=None, scaling=dim**-0.5)[0], heads_first),
    ]


def print_overhead() -> None:
    torch.set_num_threads(1)
    print("| tokens, heads, head dim | work | op, us | cuda_ext, us | ratio | sdpa, us |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for sizes in ((8, 4, 32), (1, 8, 8), (LENGTH, 8, 64)):
        for work in ("inference mode", "forward", "forward and backward"):
            with torch.inference_mode(work == "inference mode"):
                op, ours, theirs = map(microseconds, attention_calls(*sizes, work))
            shown = f"{op:.1f} | {ours:.1f} | {ours / op:.2f} | {theirs:.1f}"
            print(f"| {', '.join(map(str, sizes))} | {work} | {shown} |", flush=True)


def results(model: Any, inputs: Inputs) -> list[torch.Tensor]:
    """The logits of the tokens that are not padding, and the gradients of all parameters, in float64."""
    real = inputs["attention_mask"].bool()
    logits = model(**inputs).logits[real].double()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((logits * weights).sum(), list(model.parameters()), allow_unused=True)
    return [logits.detach(), torch.cat([g.double().flatten() for g in gradients if g is not None])]


def print_exactness(dtypes: list[str]) -> None:
    """Relative distances to the same weights in float64: medians over 5 models of 4 layers and 2 sequences."""
    compared = {"llama": "sdpa", "gemma2": "eager", "gpt-oss": "eager"}
    print("| model | dtype | outputs: others | cuda_ext | gradients: others | cuda_ext |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for family, other in compared.items():
        name, config, _, _ = FAMILIES[family]
        for dtype in dtypes:
            distances: dict[str, list[list[float]]] = {other: [], OURS: []}
            for seed in range(5):
                torch.manual_seed(seed)
                settings = config()
                settings.num_hidden_layers, settings._attn_implementation = 4, "eager"
                settings.layer_types = None if family == "llama" else (settings.layer_types * 2)[:4]
                settings._experts_implementation = "eager"  # grouped products have no float64
                model = getattr(hf, name)(settings).to(getattr(torch, dtype)).eval()
                mask = torch.arange(200) < torch.tensor([[200], [200 if family == "gemma2" else 150]])
                inputs = {"input_ids": torch.randint(1, 1000, (2, 200)), "attention_mask": mask.long()}
                exact = results(copy.deepcopy(model).double(), inputs)
                for key, found in distances.items():
                    model.set_attn_implementation(key)
                    pairs = zip(results(model, inputs), exact, strict=True)
                    found.append([float((got - want).norm() / want.norm()) for got, want in pairs])
            medians = {key: [statistics.median(column) for column in zip(*rows)] for key, rows in distances.items()}
            shown = " | ".join(f"{medians[other][n]:.1e} | {medians[OURS][n]:.1e}" for n in range(2))
            print(f"| {family}, beside {other} | {dtype} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ("models", "patch", "attention", "overhead", "exactness")
    parser.add_argument("table", nargs="?", choices=tables, default="models")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="of models and patch")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="for each row, beyond 3 rounds; default: %(default)s"
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    cuda_ext.integrations.transformers.enable()
    if given.table == "overhead":
        print_overhead()
    elif given.table == "exactness":
        print_exactness(given.dtypes)
    elif given.table == "attention":
        print_attention(given.dtypes, given.seconds)
    else:
        print_models(given.families, given.dtypes, given.seconds, patched=given.table == "patch")


if __name__ == "__main__":
    main()
