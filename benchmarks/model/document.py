"""What is written of the model: the table in docs/model.md, and the predicted times for reports."""

from __future__ import annotations

import json

from benchmarks import comparison, results
from benchmarks.model.cases import LOSSES
from benchmarks.model.evidence import NotModelledError
from benchmarks.model.gpus import GPUS, Gpu
from benchmarks.model.grouped_work import GroupedPrediction, predict_copied_rows, predict_grouped, predict_terms
from benchmarks.model.loss_work import predict_loss
from benchmarks.model.mask_work import LENGTH, predict_mask
from benchmarks.model.predicted import GROUPS, compare, groups, made_up
from benchmarks.model.prediction import predict_attention, predict_gemm
from benchmarks.model.scaled_work import predict_layer, predict_scaled
from benchmarks.model.tables import markdown
from benchmarks.presentation.formatting import with_section
from benchmarks.suites.bench_attention import Problem
from benchmarks.suites.bench_masks import Mask
from cuda_ext.block_mask import BLOCK

DOCUMENT = results.ROOT.parents[1] / "docs" / "model.md"
BEGIN = "<!-- written by python -m benchmarks model --write -->"
BEGIN_SHARES = "<!-- shares of the fastest library, written by python -m benchmarks model --write -->"
BEGIN_LOSSES = "<!-- losses, written by python -m benchmarks model --write -->"
BEGIN_SCALED = "<!-- FP8, written by python -m benchmarks model --write -->"
BEGIN_LAYERS = "<!-- layers in FP8, written by python -m benchmarks model --write -->"
BEGIN_GROUPED = "<!-- groups, written by python -m benchmarks model --write -->"
BEGIN_EXPERTS = "<!-- passes of experts, written by python -m benchmarks model --write -->"
BEGIN_MASKS = "<!-- block masks, written by python -m benchmarks model --write -->"
MASKS = [Mask("causal documents", LENGTH), Mask("causal documents", LENGTH, document=2048)]
MASKS += [Mask("window + global", LENGTH), Mask("prefix-LM", LENGTH)]
MASK_GPUS = (GPUS["a100"], GPUS["h200"])
SCALED_GPU = GPUS["h200"]
SCALED = [(4096,) * 3, (8192,) * 3, (8192, 4096, 14336), (8192, 14336, 4096), (2048, 2048, 2048)]
SCALED += [(64, 8192, 8192), (64, 4096, 4096), (64, 1024, 8192), (128, 4096, 14336), (256, 4096, 14336)]
LAYERS = ((8192, 4096, 14336), (8192, 4096, 4096), (8192, 2048, 2048), (8192, 1024, 1024), (2048, 4096, 14336))
# Rows, groups, n, k.
GROUPED = [(32768, 32, 6144, 2048), (65536, 64, 1024, 4096), (65536, 128, 1536, 2048), (65536, 128, 2048, 768)]
GROUPED += [(65536, 128, 256, 4096), (256, 64, 2048, 2048)]
# Experts of gated layers: rows, experts, hidden features, features.
EXPERTS = [(32768, 32, 3072, 2048), (65536, 64, 1024, 4096), (65536, 128, 768, 2048)]
LOSS_GPU, LOSS_LIMIT = GPUS["h200"], 4 * 2**30
MEASURED = GPUS["h100"]
MEASUREMENTS = results.ROOT / MEASURED.folder


def table() -> str:
    """The speed of each group of kernels measured on an H100, relative to the prediction."""
    return markdown(GROUPS, groups(compare(results.read(MEASUREMENTS), MEASURED)))


SHARED_PRODUCTS = ((4096,) * 3, (8192,) * 3, (8192, 14336, 4096), (16, 4096, 4096))
SHARED_ATTENTION = tuple((dim, backward) for dim in (64, 128) for backward in (False, True))


def shares() -> str:
    """How far from the fastest library each GPU is predicted to be, in float16."""
    head = ["GPU", *("x".join(map(str, shape)) for shape in SHARED_PRODUCTS)]
    head += [f"D={dim} {'backward' if backward else 'forward'}" for dim, backward in SHARED_ATTENTION]
    return markdown(head, [[gpu.name, *map(share, shared_of(gpu))] for gpu in GPUS.values()])


def shared_of(gpu: Gpu) -> list[float | None]:
    """`of_library` of the products and of attention without a mask at S = 4096; None where it is not modelled."""
    found: list[float | None] = [predict_gemm(gpu, *shape, "float16")[0].of_library for shape in SHARED_PRODUCTS]
    for dim, backward in SHARED_ATTENTION:
        try:
            problem = Problem(4, 4096, 2048 // dim, dim)
            found.append(predict_attention(gpu, problem, backward, "float16").of_library)
        except NotModelledError:
            found.append(None)
    return found


def losses() -> str:
    """Losses of bfloat16 operands, with the default limit of memory, and with LOSS_LIMIT for gradients in forward."""
    head = ["M, K, V", "product alone, ms", "forward, ms", "of the product's rate", "forward + backward, ms"]
    head += ["of 4/3 of three products", "gradients in forward, 4 GiB, ms", "TFLOP/s of three products"]
    rows = []
    for problem in LOSSES:
        p, large = predict_loss(LOSS_GPU, problem), predict_loss(LOSS_GPU, problem, LOSS_LIMIT)
        both = p.forward + p.backward
        rows.append(
            [
                f"{problem.rows}, {problem.features}, {problem.classes}",
                *(f"{1e3 * seconds:.2f}" for seconds in (p.product, p.forward)),
                f"{p.product / p.forward:.2f}",
                f"{1e3 * both:.2f}",
                f"{both / (4 / 3 * p.three_products):.2f}",
                f"{1e3 * large.in_forward:.2f}",
                f"{3 * problem.flops / large.in_forward / 1e12:.0f}",
            ]
        )
    return markdown(head, rows)


def scaled() -> str:
    """Products of FP8, beside the same product in bfloat16."""
    head = ["M, N, K", "tile", "time, µs", "TFLOP/s", "limit", "of the time in bfloat16"]
    head += ["tile with use_fast_accum", "TFLOP/s", "limit"]
    rows = []
    for shape in SCALED:
        p, wide = predict_scaled(SCALED_GPU, *shape), predict_gemm(SCALED_GPU, *shape, "bfloat16", "nt")[0]
        fast = predict_scaled(SCALED_GPU, *shape, fast_accum=True)
        seconds = p.time.seconds
        rows.append(
            [
                ", ".join(map(str, shape)),
                p.tile,
                f"{1e6 * seconds:.0f}",
                f"{p.flops / seconds / 1e12:.0f}",
                p.time.binding,
                f"{seconds / wide.seconds:.2f}",
                fast.tile,
                f"{fast.flops / fast.time.seconds / 1e12:.0f}",
                fast.time.binding,
            ]
        )
    return markdown(head, rows)


def layers() -> str:
    """The training step of a linear layer in FP8, beside bfloat16."""
    head = ["tokens, inputs, outputs", "recipe", "bfloat16, µs", "products of FP8, µs", "quantisation, µs"]
    head += ["of it weights", "of the time in bfloat16", "weights quantised once in 8 steps"]
    rows = []
    for shape in LAYERS:
        for recipe in ("rowwise", "blockwise"):
            p = predict_layer(SCALED_GPU, *shape, recipe)
            times = [f"{1e6 * seconds:.0f}" for seconds in (p.wide, p.products, p.quantisation, p.weights)]
            whole = p.products + p.quantisation
            shares = [f"{seconds / p.wide:.2f}" for seconds in (whole, whole - p.weights * 7 / 8)]
            rows.append([", ".join(map(str, shape)), recipe, *times, *shares])
    return markdown(head, rows)


def grouped() -> str:
    """Grouped products of bfloat16 and FP8."""
    head = ["rows, groups, N, K", "bfloat16: tile", "time, µs", "TFLOP/s", "limit"]
    head += ["FP8: tile", "time, µs", "TFLOP/s", "limit"]
    rows = []
    for shape in GROUPED:
        found = (predict_grouped(SCALED_GPU, *shape), predict_grouped(SCALED_GPU, *shape, float8=True))
        rows.append([", ".join(map(str, shape)), *(cell for p in found for cell in cells_of(p))])
    return markdown(head, rows)


def cells_of(p: GroupedPrediction) -> list[str]:
    seconds = p.time.seconds
    return [p.tile, f"{1e6 * seconds:.0f}", f"{p.flops / seconds / 1e12:.0f}", p.time.binding]


def experts() -> str:
    """The first product of experts as it gathers rows, activates them and both, and the gradients of its matrices in
    FP8."""
    head = ["rows, experts, hidden, features", "pass", "tile", "time, µs", "TFLOP/s", "limit", "copy of the rows, µs"]
    rows = []
    for tokens, count, hidden, features in EXPERTS:
        shape = (tokens, count, 2 * hidden, features)
        gate_up = (tokens, count, hidden, features)
        copied = f"{1e6 * predict_copied_rows(SCALED_GPU, tokens, features):.0f}"
        passes = (
            ("gate and up columns", predict_grouped(SCALED_GPU, *shape), ""),
            ("rows gathered", predict_grouped(SCALED_GPU, *shape, gather=True), copied),
            ("silu", predict_grouped(SCALED_GPU, *shape, activation="silu"), ""),
            ("silu(gate) * up", predict_grouped(SCALED_GPU, *gate_up, activation="silu", gated=True), ""),
            (
                "rows gathered, silu(gate) * up",
                predict_grouped(SCALED_GPU, *gate_up, gather=True, activation="silu", gated=True),
                copied,
            ),
            ("gradient of the matrices, FP8", predict_terms(SCALED_GPU, tokens, count, 2 * hidden, features), ""),
        )
        name = f"{tokens}, {count}, {hidden}, {features}"
        rows += [[name, of, *cells_of(p), copy] for of, p, copy in passes]
    return markdown(head, rows)


def masks() -> str:
    """The rate of listed blocks relative to that of all blocks without a mask, forward and backward, and the time of
    packed sequences relative to that of the documents' lists."""
    head = ["mask", "head dim", "blocks"]
    head += [f"{gpu.name} {phase}" for gpu in MASK_GPUS for phase in ("forward", "backward")]
    rows = []
    for mask in MASKS:
        blocks = mask.blocks("cpu")
        name = mask.name + (f" of {mask.document}" if "documents" in mask.name else "")
        for dim in (64, 128, 256):
            found = [predict_mask(gpu, mask, dim, backward) for gpu in MASK_GPUS for backward in (False, True)]
            cells = [f"{p.of_dense:.2f}" + (f" ({p.of_packed:.2f})" if p.of_packed else "") for p in found]
            rows.append([name, str(dim), f"{blocks.visible_blocks()} of {(mask.length // BLOCK) ** 2}", *cells])
    return markdown(head, rows)


def share(of_library: float | None) -> str:
    return "" if of_library is None else f"{of_library:.2f}"


def predicted_times() -> str:
    """The content of comparison.PREDICTED: predictions of the cases that the suites measure on a GPU."""
    times = {
        gpu.folder: {comparison.name_of(m): float(f"{(m.seconds or 0) * 1e6:.4g}") for m in made_up(gpu)}
        for gpu in GPUS.values()
    }
    return json.dumps(times, indent=0, ensure_ascii=False) + "\n"


def write() -> None:
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN, table()))
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN_SHARES, shares()))
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN_LOSSES, losses()))
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN_SCALED, scaled()))
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN_LAYERS, layers()))
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN_GROUPED, grouped()))
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN_EXPERTS, experts()))
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN_MASKS, masks()))
    comparison.PREDICTED.write_text(predicted_times())
