"""Measures on a CPU what the docs quote and `python -m benchmarks` does not: `python tools/measure.py COMMAND --help`.

BucketedDataParallel beside torch's DistributedDataParallel, each rank a process with one thread:
    wrapping      time and memory for wrapping a module
    memory        peak memory of training
    latency       of sums in shared memory, by size

Models of transformers, random weights, 2 layers, 2 sequences of 512 tokens, hidden size 512 (ViT: 768, 224² pixels):
    models        attn_implementation="cuda_ext" beside "eager" and "sdpa"
    patch         the same, with cuda_ext.patch(model)
    attention     attention alone, of the shapes of these models and of longer ones, beside SDPA
    overhead      what the attention function costs beyond the op
    exactness     distances to the same models in float64

Tables are printed as Markdown. What is compared alternates in the same processes. Run models, patch and attention with
OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive: they show the fastest run in CPU time of all threads, which other programs
disturb less than elapsed time, and waiting threads must not use any.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cuda_ext.nn
from benchmarks.suites.bench_train import Parameters
from cuda_ext.distributed import BucketedDataParallel, SymmetricArena
from cuda_ext.distributed.prediction.presets import PRESETS
from cuda_ext.distributed.symmetric import default_one_shot_bytes

MIB = 1 << 20


def head(*names: str) -> None:
    row(*names)
    row(*["---"] * len(names))


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def seconds_per_call(call: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


# Ranks

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "auto": BucketedDataParallel,
    "float32": partial(BucketedDataParallel, algorithm="float32"),
    "all_reduce": partial(BucketedDataParallel, algorithm="all_reduce"),
    "DDP": DistributedDataParallel,
    "DDP, bucket views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "1000 small": [(16, 16) if n % 2 else (16,) for n in range(1000)],
    "ResNet-50": [parameter.shape for parameter in PRESETS["resnet-50"].parameters()],
}
SIZES_OF_SUMS = (256, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, MIB)  # bytes
SECONDS_OF_SUMS = 0.02  # duration of consecutive sums, approximately


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: object) -> Any:
    """What `function` returns on rank 0 of a new group of processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (ranks, folder, function, arguments), ranks)
        return json.loads(Path(folder, "result").read_text())


def run_rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    dist.all_reduce(torch.zeros(1 << 20))  # creates connections and the backend's own memory
    result = function(*arguments)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    settle()
    dist.destroy_process_group()


def settle() -> None:
    gc.collect()
    dist.barrier()


def over_ranks(values: object, how: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> Tensor:
    reduced = torch.tensor(values)
    dist.all_reduce(reduced, how)
    return reduced


def proportional_set_size() -> int:
    """Bytes of this process, in which shared memory counts divided by the number of processes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("expected Pss in /proc/self/smaps_rollup, got none; Linux 4.14 or later is needed")


class Peak:
    """A context manager that records the peak memory of this process."""

    def __enter__(self) -> Peak:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, proportional_set_size())
            time.sleep(0.002)

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def print_wrapping(options: argparse.Namespace) -> None:
    """Time: medians of wall time on the slowest rank and CPU time on the rank with most. Memory: the proportional set
    size on the rank with most, minus that before wrapping: the peak while wrapping, the value afterwards, and after 4
    steps (including the pages of gradients). The modules have parameters and hardly any arithmetic."""
    head("parameters", "wrapper", "wall, ms", "CPU, ms")
    for shapes in SHAPES:
        times = on_ranks(options.ranks, time_wrappers, shapes, options.repeats)
        for name, (wall, busy) in zip(WRAPPERS, times, strict=True):
            row(shapes, name, f"{1e3 * wall:.0f}", f"{1e3 * busy:.0f}")
    print()
    head("ResNet-50's parameters", "while wrapping, MiB", "afterwards", "after 4 steps")
    for name in WRAPPERS:
        row(name, *(f"{size / MIB:.0f}" for size in on_ranks(options.ranks, weigh_wrapper, "ResNet-50", name)))


def time_wrappers(shapes: str, repeats: int) -> list[list[float]]:
    rounds: list[list[tuple[float, float]]] = []
    for _ in range(repeats + 1):
        rounds.append([])
        for wrap in WRAPPERS.values():
            module = Parameters(SHAPES[shapes])
            dist.barrier()
            begin, begin_busy = time.perf_counter(), time.process_time()
            wrapped = wrap(module)
            rounds[-1].append((time.perf_counter() - begin, time.process_time() - begin_busy))
            del wrapped, module
            gc.collect()
    medians: list[list[float]] = over_ranks(rounds)[1:].median(dim=0).values.tolist()
    return medians


def weigh_wrapper(shapes: str, name: str) -> list[float]:
    small = WRAPPERS[name](Parameters(SHAPES["1000 small"][:10]))  # loads the code itself
    for _ in range(2):
        small().backward()
    module = Parameters(SHAPES[shapes])
    settle()
    before = proportional_set_size()
    with Peak() as peak:
        wrapped = WRAPPERS[name](module)
    settle()
    after = proportional_set_size()
    dist.barrier()
    for _ in range(4):
        wrapped.zero_grad()
        wrapped().backward()
    settle()
    more: list[float] = over_ranks([float(n - before) for n in (peak.bytes, after, proportional_set_size())]).tolist()
    return more


def print_memory(options: argparse.Namespace) -> None:
    """The maximum of the proportional set size over all steps, minus its value before the model was built, summed over
    the ranks, in units of the gradients' bytes. Each process trains a small model first, so that the memory of the code
    itself is not counted. The C library returns freed memory at once; otherwise it keeps up to a third of the gradients
    with either wrapper."""
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc, in the ranks
    gradients = 4 * options.layers * options.width * (options.width + 1) * options.ranks
    head("layers", "wrapper", f"peak / {gradients // options.ranks // MIB} MiB of gradients")
    for kind in ("nn.Linear", "cuda_ext.nn.Linear"):
        for name in WRAPPERS:
            sizes = (options.layers, options.width, options.rows, options.steps)
            row(kind, name, f"{on_ranks(options.ranks, peak_of_training, name, kind, *sizes) / gradients:.2f}")


def peak_of_training(wrapper: str, kind: str, layers: int, width: int, rows: int, steps: int) -> float:
    train(wrapper, kind, 2, 512, rows, steps)
    settle()
    before = proportional_set_size()
    with Peak() as peak:
        train(wrapper, kind, layers, width, rows, steps)
    return float(over_ranks(float(peak.bytes - before), dist.ReduceOp.SUM))


def train(wrapper: str, kind: str, layers: int, width: int, rows: int, steps: int) -> None:
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for _ in range(layers):
        ours = kind == "cuda_ext.nn.Linear"
        made += [cuda_ext.nn.Linear(width, width, activation="gelu")] if ours else [nn.Linear(width, width), nn.GELU()]
    model = WRAPPERS[wrapper](nn.Sequential(*made))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(rows, width)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def print_latency(options: argparse.Namespace) -> None:
    """Microseconds per sum, medians of repetitions, in each of which all three sum the same bytes many times.
    `cuda_ext.distributed.symmetric.default_one_shot_bytes` is chosen where one-shot becomes slower than two-shot."""
    print(f"{options.ranks} ranks; one_shot_bytes {default_one_shot_bytes(options.ranks, torch.device('cpu'))}\n")
    head("bytes", "one-shot", "two-shot", "gloo")
    for size, medians in zip(SIZES_OF_SUMS, on_ranks(options.ranks, time_sums, options.repeats), strict=True):
        row(size, *(f"{1e6 * seconds:.1f}" for seconds in medians))


def time_sums(repeats: int) -> list[list[float]]:
    group, most = dist.group.WORLD, SIZES_OF_SUMS[-1]
    assert group is not None
    arenas = [SymmetricArena(most, group, torch.device("cpu"), one_shot_bytes=limit) for limit in (most, 0)]
    found = []
    for size in SIZES_OF_SUMS:
        sums: list[Callable[[], object]] = []
        for arena in arenas:
            sums.append(partial(arena.all_reduce, arena.bytes[:size].view(torch.float32).zero_()))
        sums.append(partial(dist.all_reduce, torch.zeros(size // 4)))
        times = [[seconds_of(sum_up) for sum_up in sums] for _ in range(repeats)]
        found.append([median(of_sum) for of_sum in zip(*times)])
    return found


def seconds_of(sum_up: Callable[[], object]) -> float:
    """Seconds per sum; all ranks do the same number of sums."""
    dist.barrier()
    slowest = float(over_ranks(seconds_per_call(sum_up, 5)))
    return seconds_per_call(sum_up, min(max(int(SECONDS_OF_SUMS / slowest), 5), 500))


# Models of transformers

BATCH, LENGTH, LAYERS = 2, 512, 2
OURS = "cuda_ext"
Inputs = dict[str, Tensor]
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
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 128}
GPT2 = {"vocab_size": 1000, "n_embd": 512, "n_layer": LAYERS, "n_head": 8, "n_positions": LENGTH}
T5 = {"vocab_size": 1000, "d_model": 512, "d_kv": 64, "d_ff": 1408, "num_layers": LAYERS, "num_heads": 8}
WHISPER: dict[str, Any] = {"vocab_size": 1000, "d_model": 512, "pad_token_id": 0, "max_source_positions": LENGTH}
for part in ("encoder", "decoder"):
    WHISPER |= {f"{part}_layers": LAYERS, f"{part}_attention_heads": 8, f"{part}_ffn_dim": 1408}


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(1, 1000, (BATCH, length))


def sentences() -> Inputs:
    return {"input_ids": tokens()}


def padded(left: bool = False) -> Inputs:
    """Lengths of 512 and 230 tokens."""
    mask = torch.arange(LENGTH) < torch.tensor([[512], [230]])
    return {"input_ids": tokens(), "attention_mask": (mask.flip(1) if left else mask).long()}


def translations() -> Inputs:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(LENGTH // 4)}


def recordings() -> Inputs:
    return {"input_features": torch.randn(BATCH, 80, 2 * LENGTH), "decoder_input_ids": tokens(LENGTH // 4)}


def pictures() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 224, 224)}


class Family(NamedTuple):
    name: str  # of the config, without "Config"
    task: str  # name + task is the model
    settings: dict[str, Any]
    inputs: Callable[[], Inputs] = sentences
    others: tuple[str, ...] = ("eager", "sdpa")

    def config(self) -> Any:
        import transformers

        return getattr(transformers, f"{self.name}Config")(**self.settings)

    def model(self, config: Any, dtype: torch.dtype) -> Any:
        import transformers

        return getattr(transformers, self.name + self.task)(config).to(dtype).eval()


GEMMA2 = {**SIZES, **WINDOW, "query_pre_attn_scalar": 64}
GPT_OSS = {**SIZES, **MIXTURE, **WINDOW}
FAMILIES = {
    "llama": Family("Llama", "ForCausalLM", SIZES),
    "llama, padding left": Family("Llama", "ForCausalLM", SIZES, partial(padded, left=True)),
    "mistral, window 128": Family("Mistral", "ForCausalLM", {**SIZES, **WINDOW}),
    "qwen3": Family("Qwen3", "ForCausalLM", SIZES),
    "gemma2": Family("Gemma2", "ForCausalLM", GEMMA2, others=("eager",)),
    "gpt-oss": Family("GptOss", "ForCausalLM", GPT_OSS, others=("eager",)),
    "mixtral": Family("Mixtral", "ForCausalLM", {**SIZES, **MIXTURE, "sliding_window": None}),
    "gpt2": Family("GPT2", "LMHeadModel", GPT2),
    "bert": Family("Bert", "ForMaskedLM", SIZES),
    "bert, padding right": Family("Bert", "ForMaskedLM", SIZES, padded),
    "t5": Family("T5", "ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, translations),
    "whisper": Family("Whisper", "ForConditionalGeneration", WHISPER, recordings),
    "vit, 224/16": Family("ViT", "ForImageClassification", {"num_hidden_layers": LAYERS}, pictures),
}


def fastest(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The shortest CPU time of each call in seconds, of at least 3 runs each, which alternate."""
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


def print_models(options: argparse.Namespace) -> None:
    """Milliseconds, and how many times as fast ours is as the fastest of the others."""
    ours = "patched" if options.command == "patch" else OURS
    head("model", "dtype", "work", "eager, ms", "sdpa, ms", f"{ours}, ms", "times as fast")
    for dtype in options.dtypes:
        for family in options.families:
            for work, best in times_of_models(FAMILIES[family], dtype, options).items():
                mine = best.pop(OURS)
                others = [f"{best[key] * 1e3:.0f}" if key in best else "–" for key in ("eager", "sdpa")]
                row(family, dtype, work, *others, f"{mine * 1e3:.0f}", f"{min(best.values()) / mine:.2f}")


def times_of_models(family: Family, dtype: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    of_dtype = getattr(torch, dtype)
    inputs = {key: x.to(of_dtype) if x.is_floating_point() else x for key, x in family.inputs().items()}
    models = {}
    for implementation in (*family.others, OURS):
        config = family.config()
        config._attn_implementation = implementation
        models[implementation] = family.model(config, of_dtype)
    if options.command == "patch":
        cuda_ext.patch(models[OURS])

    @torch.no_grad()
    def forward(model: Any) -> None:
        model(**inputs)

    def step(model: Any) -> None:
        model.zero_grad()
        model(**inputs).logits.float().logsumexp(-1).mean().backward()

    return {
        name: fastest({key: partial(work, model) for key, model in models.items()}, options.seconds)
        for name, work in (("forward", forward), ("training step", step))
    }


class Attention(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    bias: bool = False  # with its gradient, as in T5

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
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


def print_attention(options: argparse.Namespace) -> None:
    """Milliseconds, and how many times as fast ours is as SDPA."""
    sizes = ("batch, queries, keys", "heads, dim")
    head("attention of", *sizes, "dtype", "work", "sdpa, ms", "cuda_ext, ms", "times as fast")
    for dtype in options.dtypes:
        for name, shape in ATTENTION.items():
            heads = str(shape.heads) if shape.heads == shape.kv_heads else f"{shape.heads} on {shape.kv_heads}"
            cells = (f"{shape.batch}, {shape.queries}, {shape.keys}", f"{heads}, {shape.head_dim}", dtype)
            for work, best in times_of_attention(shape, getattr(torch, dtype), options.seconds).items():
                theirs, ours = best["sdpa"], best[OURS]
                row(name, *cells, work, f"{theirs * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{theirs / ours:.2f}")


def times_of_attention(shape: Attention, dtype: torch.dtype, seconds: float) -> dict[str, dict[str, float]]:
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
        forward[key] = partial(outputs[key], *(x.detach() for x in inputs))
        out = outputs[key](*inputs)
        backward[key] = partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)
    return {"forward": fastest(forward, seconds), "backward": fastest(backward, seconds)}


def print_overhead(options: argparse.Namespace) -> None:
    """Microseconds of the public op, the attention function, and transformers' own function for SDPA, causal, with one
    thread, of the fastest of 15 rounds."""
    torch.set_num_threads(1)
    head("tokens, heads, head dim", "work", "op, us", "cuda_ext, us", "ratio", "sdpa, us")
    for sizes in ((8, 4, 32), (1, 8, 8), (LENGTH, 8, 64)):
        for work in ("inference mode", "forward", "forward and backward"):
            with torch.inference_mode(work == "inference mode"):
                op, ours, theirs = map(microseconds, attention_calls(*sizes, work))
            row(", ".join(map(str, sizes)), work, f"{op:.1f}", f"{ours:.1f}", f"{ours / op:.2f}", f"{theirs:.1f}")


def microseconds(call: Callable[[], object]) -> float:
    """Of the fastest of 15 rounds of some milliseconds."""
    seconds_per_call(call, 100 if seconds_per_call(call, 2) < 1e-3 else 1)
    calls = max(3, int(5e-3 / seconds_per_call(call, 3)))
    return 1e6 * min(seconds_per_call(call, calls) for _ in range(15))


def attention_calls(length: int, heads: int, dim: int, work: str) -> list[Callable[[], object]]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from cuda_ext.integrations.transformers.attention import attention_forward

    module: Any = nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    heads_first = [torch.randn(1, heads, length, dim) for _ in range(3)]
    rows_first = [tensor.transpose(1, 2).contiguous() for tensor in heads_first]
    for tensor in (*heads_first, *rows_first):
        tensor.requires_grad_(work != "inference mode")
    grad = torch.randn(1, length, heads, dim)

    def timed(function: Any, tensors: list[Tensor]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(function(), tensors, grad)) if "backward" in work else function

    def of_models(function: Any) -> Callable[[], object]:
        return lambda: function(module, *heads_first, attention_mask=None, scaling=dim**-0.5)[0]

    return [
        timed(lambda: cuda_ext.flash_attention(*rows_first, causal=True), rows_first),
        timed(of_models(attention_forward), heads_first),
        timed(of_models(sdpa_attention_forward), heads_first),
    ]


def print_exactness(options: argparse.Namespace) -> None:
    """Relative distances to the same weights in float64: medians over 5 models of 4 layers and 2 sequences."""
    head("model", "dtype", "outputs: others", "cuda_ext", "gradients: others", "cuda_ext")
    for name, other in {"llama": "sdpa", "gemma2": "eager", "gpt-oss": "eager"}.items():
        for dtype in options.dtypes:
            models = [distances(name, getattr(torch, dtype), other, seed) for seed in range(5)]
            row(f"{name}, beside {other}", dtype, *(f"{median(column):.1e}" for column in zip(*models)))


def distances(name: str, dtype: torch.dtype, other: str, seed: int) -> list[float]:
    """Of the outputs of `other` and ours, then of their gradients."""
    torch.manual_seed(seed)
    config = FAMILIES[name].config()
    config.num_hidden_layers, config._attn_implementation = 4, "eager"
    config.layer_types = None if name == "llama" else (config.layer_types * 2)[:4]
    config._experts_implementation = "eager"  # grouped products have no float64
    model = FAMILIES[name].model(config, dtype)
    mask = torch.arange(200) < torch.tensor([[200], [200 if name == "gemma2" else 150]])
    inputs = {"input_ids": torch.randint(1, 1000, (2, 200)), "attention_mask": mask.long()}
    exact = outputs_and_gradients(copy.deepcopy(model).double(), inputs)
    found = []
    for implementation in (other, OURS):
        model.set_attn_implementation(implementation)
        pairs = zip(outputs_and_gradients(model, inputs), exact, strict=True)
        found.append([float((got - want).norm() / want.norm()) for got, want in pairs])
    return [implementation[n] for n in range(2) for implementation in found]


def outputs_and_gradients(model: Any, inputs: Inputs) -> list[Tensor]:
    """The logits of the tokens that are not padding, and the gradients of all parameters, in float64."""
    logits = model(**inputs).logits[inputs["attention_mask"].bool()].double()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((logits * weights).sum(), list(model.parameters()), allow_unused=True)
    return [logits.detach(), torch.cat([g.double().flatten() for g in gradients if g is not None])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, show: Callable[[argparse.Namespace], None], **defaults: int) -> argparse.ArgumentParser:
        added = commands.add_parser(name, description=show.__doc__)
        added.set_defaults(show=show)
        for option, value in defaults.items():
            added.add_argument(f"--{option}", type=int, default=value, metavar="N", help="default: %(default)s")
        return added

    command("wrapping", print_wrapping, ranks=2, repeats=7)
    command("memory", print_memory, ranks=2, layers=24, width=1024, rows=64, steps=6)
    command("latency", print_latency, ranks=2, repeats=9)
    of_models = [command("models", print_models), command("patch", print_models)]
    timed = [*of_models, command("attention", print_attention)]
    of_dtypes = [*timed, command("exactness", print_exactness)]
    command("overhead", print_overhead)
    for each in of_models:
        each.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all")
    for each in timed:
        each.add_argument("--seconds", type=float, default=10.0, help="for each row, beyond 3 rounds; default: 10")
    for each in of_dtypes:
        each.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: both")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.show not in (print_wrapping, print_memory, print_latency):
        cuda_ext.integrations.transformers.enable()
    options.show(options)


if __name__ == "__main__":
    main()
