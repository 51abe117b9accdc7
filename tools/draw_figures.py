"""Draws the figures of docs/architecture.md as SVG, and the table of layers in CONTRIBUTING.md.

    python tools/draw_figures.py      # writes docs/figures/*.svg and CONTRIBUTING.md

`tests/test_docs.py` fails if the committed figures or the table differ from what this script writes, and
`tests/test_structure.py` if LAYERS differs from what the sources include and import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

INK, GREY, BLUE, ORANGE = "#1f2328", "#57606a", "#0b5cad", "#c2410c"
PYTHON, TORCH, KERNEL, HARDWARE, BASE, PLAIN = "#dbe9f9", "#fde4cf", "#d8f0da", "#ece1f7", "#e6e9ec", "#ffffff"
SANS, MONO = "Helvetica, Arial, sans-serif", "ui-monospace, Consolas, monospace"
# Width of a character relative to the font size: a high estimate, because the viewer's fonts are unknown.
SANS_WIDTH, MONO_WIDTH = 0.54, 0.605

Point = tuple[float, float]


@dataclass(frozen=True)
class Part:
    """Files that import from the same places. ``uses``: the keys of the parts that they import from."""

    key: str
    title: str
    note: str
    uses: str
    fill: str


class Layer:
    def __init__(self, name: str, *parts: Part) -> None:
        self.name, self.parts = name, parts


# From top to bottom and from left to right: a part uses only parts that come after it.
LAYERS = (
    Layer(
        "6 integrations",
        Part(
            "integrations",
            "cuda_ext/integrations",
            "transformers, SDPA, patch",
            "public ops, rules, support",
            PYTHON,
        ),
    ),
    Layer(
        "5 what is built\non the ops",
        Part("compat", "cuda_ext/compat", "flash-attn's functions", "public ops, support", PYTHON),
        Part("nn", "cuda_ext/nn", "modules", "public ops, support", PYTHON),
        Part(
            "distributed",
            "cuda_ext/distributed",
            "gradients over ranks",
            "prediction, bucketing, public ops, support",
            PYTHON,
        ),
        Part("prediction", "…/prediction", "the command plan", "bucketing", PYTHON),
        Part("bucketing", "…/bucketing", "division into buckets", "", PYTHON),
        Part("testing", "cuda_ext/testing", "references, emulated()", "support", PYTHON),
    ),
    Layer(
        "4 public ops",
        Part(
            "public ops",
            "cuda_ext/{_gemm,attention,kvcache}.py",
            "and bucket.py, ops.py",
            "rules, support",
            PYTHON,
        ),
        Part("rules", "cuda_ext/_rules", "fake kernels, FLOPs, vmap, DTensor", "support", PYTHON),
        Part("support", "cuda_ext/_*.py, dev.py, info.py", "loads the library, builds it, checks", "", PYTHON),
    ),
    Layer(
        "3 ops in C++",
        Part("emulated", "csrc/emulated", "the module _simt", "launchers, attention, gemm, bucket, simt", KERNEL),
        Part("ops", "csrc/ops", "checks, autograd, dispatch", "launchers, attention, gemm, bucket, cpu, base", TORCH),
        Part("launchers", "csrc/launchers", "the table of launchers", "attention, gemm, bucket", KERNEL),
    ),
    Layer(
        "2 kernels and\nlaunchers",
        Part("attention", "csrc/attention", "kernels for CPU and GPU", "tile, rt, arch, cpu, base", KERNEL),
        Part("gemm", "csrc/gemm", "kernels for CPU and GPU", "tile, rt, arch, cpu, base", KERNEL),
        Part("bucket", "csrc/bucket", "kernels for CPU and GPU", "rt, arch, cpu, base", KERNEL),
        Part("tile", "csrc/tile", "tiles that kernels share", "arch", KERNEL),
    ),
    Layer(
        "1 hardware",
        Part("rt", "csrc/rt", "launch, device, tensor map", "arch, simt, base", HARDWARE),
        Part("arch", "csrc/arch", "one function per instruction", "simt, base", HARDWARE),
        Part("cpu", "csrc/cpu", "vectors, instruction sets", "base", HARDWARE),
    ),
    Layer(
        "0 foundation",
        Part("simt", "csrc/simt", "the emulator", "base", BASE),
        Part("base", "csrc/base", "dtypes, Philox, workspace", "", BASE),
    ),
)


class Drawing:
    """SVG elements, and the checks that keep text inside its box."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._elements: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "start",
        bold: bool = False,
        colour: str = INK,
        mono: bool = False,
        limit: float | None = None,
    ) -> None:
        """`y` is the baseline. Raises ValueError if the text may be wider than `limit`."""
        width = len(text) * size * (MONO_WIDTH if mono else SANS_WIDTH)
        if limit is not None and width > limit:
            raise ValueError(f"{self.title}: {text!r} is about {width:.0f} pixels wide, of {limit:.0f}; shorten it")
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        if left < 0 or left + width > self.width:
            raise ValueError(f"{self.title}: {text!r} exceeds the figure")
        weight = ' font-weight="600"' if bold else ""
        family = MONO if mono else SANS
        self._elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" font-family="{family}" text-anchor="{anchor}"{weight} '
            f'fill="{colour}">{escape(text)}</text>'
        )

    def note(self, x: float, y: float, text: str, *, anchor: str = "start", colour: str = GREY) -> None:
        """Small text, of one line or several."""
        for number, line in enumerate(text.splitlines()):
            self.text(x, y + 15 * number, line, size=11, anchor=anchor, colour=colour)

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, *, radius: int = 4) -> None:
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
            f'stroke="{GREY}"/>'
        )

    def box(
        self, place: tuple[float, float, float, float], fill: str, title: str, notes: str = "", *, mono: bool = True
    ) -> None:
        """A title with lines of notes below it, centred in a rectangle (x, y, width, height)."""
        x, y, width, height = place
        self.rectangle(x, y, width, height, fill)
        lines, pitch = notes.splitlines(), 15
        if (1 + len(lines)) * pitch > height:
            raise ValueError(f"{self.title}: the box of {title!r} is too low for its {len(lines)} notes")
        top = y + (height - len(lines) * pitch) / 2 + 4
        middle = x + width / 2
        self.text(middle, top, title, anchor="middle", bold=True, mono=mono, limit=width - 6)
        for number, line in enumerate(lines, 1):
            self.text(middle, top + number * pitch, line, size=11, anchor="middle", colour=GREY, limit=width - 6)

    def line(self, *points: Point, colour: str = INK, arrow: bool = True, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = f' marker-end="url(#{ {INK: "ink", BLUE: "blue", ORANGE: "orange"}[colour] })"' if arrow else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._elements.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"{dash}{end}/>'
        )

    def step(self, x: float, y: float, number: int, colour: str = BLUE) -> None:
        """A number in a disc."""
        self._elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{colour}"/>')
        self.text(x, y + 4, str(number), size=11, anchor="middle", bold=True, colour="#ffffff")

    def svg(self) -> str:
        markers = "\n".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0.5 L8,4 L0,7.5 z" fill="{colour}"/></marker>'
            for name, colour in (("ink", INK), ("blue", BLUE), ("orange", ORANGE))
        )
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>\n{markers}\n</defs>",
                f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
                *self._elements,
                "</svg>\n",
            ]
        )


def layers() -> Drawing:
    margin, label, gap, height, pitch = 12, 104, 8, 80, 94
    d = Drawing(1080, 2 * margin + len(LAYERS) * pitch - 14, "Which part may include or import which")
    for row, layer in enumerate(LAYERS):
        y = margin + row * pitch
        for number, line in enumerate(layer.name.split("\n")):
            d.text(margin, y + 36 + 16 * number, line, bold=True, limit=label)
        width = (d.width - 2 * margin - label - gap * (len(layer.parts) - 1)) / len(layer.parts)
        for column, part in enumerate(layer.parts):
            x = margin + label + column * (width + gap)
            lines = wrap(f"uses {part.uses or 'no other'}", int((width - 8) / (11 * SANS_WIDTH)))
            d.box((x, y, width, height), part.fill, part.title, "\n".join([part.note, *lines]))
    return d


def linear() -> Drawing:
    d = Drawing(1080, 690, "One call of linear: forward on the left, backward on the right")
    d.text(20, 26, "Forward", size=14, bold=True)
    x, width = 20, 620
    hops = (
        (40, "cuda_ext/_gemm.py", "linear(): calls the op torch.ops.cuda_ext.linear", PYTHON),
        (
            110,
            "csrc/ops/linear.cpp",
            "linear_autocast, linear_autograd, linear_forward, run_linear: casts, node, checks",
            TORCH,
        ),
        (180, "csrc/ops/product.cpp", "project: allocates outputs, tensors become GemmParams; run_gemm", TORCH),
        (
            250,
            "csrc/ops/backend.cpp",
            "cuda_kernels: the table of launchers for this device, or null for the CPU",
            TORCH,
        ),
    )
    for y, file, what, fill in hops:
        d.box((x, y, width, 48), fill, file, what)
    for y, _, _, _ in hops[:-1]:
        d.line((x + width / 2, y + 48), (x + width / 2, y + 70))

    d.line((110, 298), (110, 346))
    d.note(120, 326, "null: CPU")
    d.box((20, 346, 180, 66), KERNEL, "csrc/gemm/gemm.h", "launch_gemm: widest\ninstruction set")
    d.line((110, 412), (110, 434))
    d.box((20, 434, 180, 66), KERNEL, "csrc/gemm/cpu/gemm_cpu.inc", "run_gemm: pack,\nmultiply, epilogue")

    d.line((425, 298), (425, 346))
    d.note(435, 318, "table: CUDA tensors,\nor CPU tensors inside testing.emulated()")
    d.box(
        (220, 346, 420, 48), KERNEL, "csrc/gemm/gemm_cuda.h", "launch_gemm_cuda: on wgmma if it can, else on mma.sync"
    )
    d.line((425, 394), (425, 416))
    d.box(
        (220, 416, 420, 64),
        KERNEL,
        "csrc/gemm/gemm_sm90_launch.cuh, gemm_sm80_launch.cuh",
        "choose_plan (plan_sm90.h, plan_sm80.h): tile and split of k;\nthen one instantiation",
    )
    d.line((425, 480), (425, 502))
    d.box((220, 502, 420, 36), HARDWARE, "csrc/rt/launch.cuh, launch.cu: rt::launch")
    d.line((325, 538), (325, 576))
    d.note(333, 560, "nvcc")
    d.line((535, 538), (535, 576))
    d.note(543, 560, "C++ compiler")
    d.box((220, 576, 205, 36), HARDWARE, "cudaLaunchKernelExC")
    d.box((435, 576, 205, 36), BASE, "simt::launch")
    d.line((325, 612), (325, 632))
    d.line((535, 612), (535, 632))
    d.box(
        (220, 632, 420, 48),
        KERNEL,
        "csrc/gemm/gemm_sm90.cuh, gemm_sm80.cuh",
        "the kernel: products, add_splits, epilogue",
    )

    d.text(700, 26, "Backward", size=14, bold=True)
    x, width = 700, 360
    d.box(
        (x, 110, width, 62),
        TORCH,
        "csrc/ops/linear.cpp",
        "LinearBackward::backward, called by autograd\nwith the gradient of the output",
    )
    d.line((x + 90, 172), (x + 90, 214))
    d.note(x + 98, 198, "with an activation")
    d.box(
        (x, 214, 210, 78),
        TORCH,
        "activation_backward",
        "gradient at the\npre-activation, and the\nsum of its rows for bias",
    )
    d.line((x + 285, 172), (x + 285, 336))
    d.line((x + 90, 292), (x + 90, 336))
    d.box(
        (x, 336, width, 92),
        TORCH,
        "linear_backward, linear_backward.slot",
        "input_gradient = grad @ weight\nweight_gradient = grad.T @ input\n"
        "into a new tensor, or a gradient slot if the\nparameter has one (gradient_slots.cpp)",
    )
    d.line((x + 180, 428), (x + 180, 470))
    d.box(
        (x, 470, width, 62),
        TORCH,
        "csrc/ops/product.cpp: run_gemm",
        "the same launchers and kernels as forward,\nwith other strides: nothing is transposed",
    )
    d.line((640, 134), (700, 134), dashed=True)
    d.note(646, 126, "grad_fn")
    return d


def attention() -> Drawing:
    d = Drawing(1080, 400, "The forward attention kernel: the loop of a block over keys, and one step of it")
    d.text(20, 26, "The loop: a block owns block_m rows of queries", size=14, bold=True)
    cell, left, top = 46, 112, 76
    for tile in range(6):
        d.text(left + (tile + 0.5) * cell, top - 8, f"K{tile}", size=11, anchor="middle", mono=True)
    for row in range(6):
        d.text(left - 8, top + (row + 0.6) * cell, f"Q{row}", size=11, anchor="end", mono=True)
        for tile in range(6):
            fill = PLAIN if tile > row else TORCH if tile == row else KERNEL
            if row == 4 and tile <= 4:
                fill = "#f6c79b" if tile == 4 else "#9fd8a5"
            d.rectangle(left + tile * cell, top + row * cell, cell, cell, fill, radius=0)
    y = top + 4.5 * cell
    d.line((left + 4.75 * cell, y), (left + 0.2 * cell, y))
    d.text(20, y + 4, "a block", size=11, bold=True)
    legend = "causal: orange tiles apply the mask, white ones are skipped;\n"
    d.note(20, 372, legend + "keys are read from the last visible tile to the first")

    d.text(470, 26, "One step: keys of tile j", size=14, bold=True)
    d.text(470, 66, "math", size=12, bold=True)
    d.text(470, 136, "cp.async", size=12, bold=True)
    d.box((560, 46, 170, 44), KERNEL, "S = Q K^T", "mma.sync")
    d.box((750, 46, 140, 44), KERNEL, "softmax", "max, exp2, sums")
    d.box((890, 46, 170, 44), KERNEL, "O += P V", "mma.sync")
    d.box((560, 112, 170, 44), HARDWARE, "values of j", "arrive")
    d.box((750, 112, 310, 44), HARDWARE, "keys of j - 1", "arrive")
    for x, first, second in (
        (550, "keys j have arrived,", "the old values were read"),
        (740, "values j have arrived,", "keys j have been read"),
    ):
        d.line((x, 38), (x, 168), colour=ORANGE, arrow=False)
        d.text(x, 186, "sync_threads", size=11, colour=ORANGE, anchor="middle", mono=True)
        d.note(x, 202, f"{first}\n{second}", anchor="middle")

    d.text(470, 258, "Per row, in registers", size=14, bold=True)
    rows = (
        ("m' = max(m, max of S)", "largest logit so far, in powers of two"),
        ("P = exp2(S - m')", "weights of this tile"),
        ("l = l exp2(m - m') + sum of P", "sum of the weights"),
        ("O = O exp2(m - m') + P V", "output before the division"),
        ("O / l, ln 2 (m + log2 l)", "after the last tile: output and log-sum-exp"),
    )
    for number, (formula, meaning) in enumerate(rows):
        d.text(470, 284 + 21 * number, formula, mono=True)
        d.note(720, 284 + 21 * number, meaning)
    return d


def backward() -> Drawing:
    d = Drawing(1080, 640, "The objects of one backward pass of BucketedDataParallel")
    d.note(20, 26, "Black: ownership; blue: what happens in a pass, in this order.")
    left, middle, right, width = 20, 400, 780, 280
    d.box((middle, 44, width, 62), PYTHON, "BucketedDataParallel", "wrapper.py: forward, no_sync,\nclip_grad_norm_")
    learns = "bucket_set.py: cuts memory into buckets,\nlearns order and times of gradients\n"
    d.box((left, 152, width, 78), PYTHON, "BucketSet", learns + "(bucketing: choice.py, measuring.py)")
    decides = "reducer.py: which gradients have arrived,\nwhich bucket is next, when a pass ends\n"
    d.box((right, 152, width, 78), PYTHON, "Reducer", decides + "(watch.py: what other ranks are doing)")
    d.line((middle, 75), (160, 75), (160, 152))
    d.line((middle + width, 75), (920, 75), (920, 152))

    d.box(
        (left, 300, width, 62), PYTHON, "Arena", "memory.py: flat memory of a dtype,\nallocated once, cut into buckets"
    )
    maps = "bucket.py, csrc/ops/gradient_slots.cpp:\nwhich view of a bucket belongs\nto which parameter"
    d.box((middle, 300, width, 78), TORCH, "GradientSlots", maps)
    holds = "gradient_bucket.py: wire (what travels),\nviews (parameter.grad), arrived, missing,\n"
    d.box((right, 300, width, 78), PYTHON, "GradientBucket, one or more", holds + "Pending (the sum in flight)")
    d.line((90, 230), (90, 300))
    d.line((left + width, 176), (540, 176), (540, 300))
    d.line((left + width, 206), (720, 206), (720, 320), (right, 320))
    d.line((990, 230), (990, 300))
    d.note(996, 252, "in order")

    runs = (
        "node of an op, for example LinearBackward, then AccumulateGrad of the parameter,\n"
        "then its post hook: Reducer.gradient_hook; at the end of the pass the callback Reducer._finish"
    )
    d.box((20, 530, 660, 78), PLAIN, "autograd engine", runs, mono=False)
    sums = "algorithms.py: shared memory, NCCL, float32\nsums, gloo; on a separate thread\nor stream, next to backward"
    d.box((right, 530, width, 78), PYTHON, "Exchange", sums)
    d.line((230, 230), (230, 270), (340, 270), (340, 470), (730, 470), (730, 550), (780, 550))
    d.note(492, 486, "BucketSet owns the Exchange")

    d.line((480, 530), (480, 378), colour=BLUE)
    d.step(480, 434, 1)
    d.note(496, 430, "the product stores weight\ngradients in their bucket", colour=BLUE)
    d.line((640, 530), (640, 500), (760, 500), (760, 250), (850, 250), (850, 230), colour=BLUE)
    d.step(760, 440, 2)
    d.note(776, 418, "a gradient\nhas come", colour=BLUE)
    d.line((920, 230), (920, 300), colour=BLUE)
    d.step(920, 264, 3)
    d.note(905, 282, "pack the rest", colour=BLUE, anchor="end")
    d.line((890, 378), (890, 530), colour=BLUE)
    d.step(890, 450, 4)
    d.note(882, 494, "start the sum", colour=BLUE, anchor="end")
    d.line((990, 530), (990, 378), colour=BLUE)
    d.step(990, 450, 5)
    d.note(1000, 494, "wait,\nunpack", colour=BLUE)
    return d


def overlap() -> Drawing:
    d = Drawing(1080, 300, "How the sums of buckets overlap with backward")
    left, unit = 150, 96
    d.text(20, 82, "backward", bold=True)
    d.note(20, 98, "engine thread, or\nthe current stream")
    d.text(20, 182, "sums over ranks", bold=True)
    d.note(20, 198, "Exchange: a thread,\nor its own stream")
    layers = (
        (5, 0.0, 1.5, KERNEL),
        (4, 1.5, 1.5, KERNEL),
        (3, 3.0, 1.5, PYTHON),
        (2, 4.5, 1.5, PYTHON),
        (1, 6.0, 1.0, TORCH),
    )
    for layer, begin, length, fill in layers:
        d.box((left + begin * unit, 64, length * unit, 52), fill, f"layer {layer}", mono=False)
    for name, begin, length, fill in (
        ("bucket 0", 3.0, 2.0, KERNEL),
        ("bucket 1", 6.0, 1.0, PYTHON),
        ("2", 7.0, 0.6, TORCH),
    ):
        d.box((left + begin * unit, 164, length * unit, 52), fill, name, mono=False)
        d.line((left + begin * unit, 116), (left + begin * unit, 164), colour=BLUE)
    d.note(left + 3 * unit + 8, 136, "last gradient of bucket 0:\nGradientBucket.pack, send", colour=BLUE)
    end, done = left + 7 * unit, left + 7.6 * unit
    for x in (end, done):
        d.line((x, 44), (x, 240), colour=ORANGE, arrow=False)
    d.note(end + 4, 40, "exposed", colour=ORANGE)
    d.note(
        end - 6, 258, "the engine calls Reducer._finish,\nwhich waits for the last sums", colour=ORANGE, anchor="end"
    )
    d.note(done + 8, 258, "backward() returns:\nparameter.grad is a view\nof its bucket", colour=ORANGE)
    return d


def emulator() -> Drawing:
    d = Drawing(1080, 564, "How the emulator runs a kernel")
    d.text(20, 26, "One launch", size=14, bold=True)
    d.box((20, 44, 250, 48), HARDWARE, "rt::launch", "rt/launch.cu, without __CUDACC__")
    d.box(
        (20, 124, 250, 62),
        BASE,
        "simt::launch",
        "launch.cpp: checks limits, distributes\nclusters over host threads",
    )
    d.box((20, 218, 250, 48), BASE, "Machine::run", "machine.cpp: a batch of clusters")
    d.line((145, 92), (145, 124))
    d.line((145, 186), (145, 218))
    d.line((270, 242), (310, 242))

    d.rectangle(310, 44, 480, 320, "#f6f8fa")
    d.text(324, 66, "Machine: the blocks resident on one host thread", bold=True, limit=460)
    poison = "1 KiB reserved, then NaNs until it is written"
    d.box((324, 80, 452, 36), HARDWARE, "shared memory of the block", poison, mono=False)
    fills = {"r": KERNEL, "p": BASE, "m": "#f6c79b", "x": "#4aa564"}
    for row, lanes in enumerate(("m" * 20 + "x" + "r" * 11, "p" * 32, "r" * 32, "p" * 32)):
        y = 136 + 36 * row
        d.note(324, y + 15, f"warp {row}")
        for lane, state in enumerate(lanes):
            d.rectangle(374 + lane * 12.5, y, 10.5, 22, fills[state])
    for x, state, name in (
        (324, "x", "runs"),
        (394, "r", "can run"),
        (484, "m", "waits for its warp"),
        (644, "p", "parked"),
    ):
        d.rectangle(x, 290, 12, 16, fills[state])
        d.note(x + 18, 303, name)
    d.note(
        324,
        336,
        "A bar is a fiber: one CUDA thread and its stack of 96 KiB. One runs;\n"
        "cuda_ext_simt_switch (fiber.cpp) saves its registers and loads the next.",
    )

    d.text(830, 66, "in_flight_: started, not complete", bold=True, limit=240)
    d.box((830, 80, 230, 48), HARDWARE, "bulk engine", "tma.cpp: loads of tiles and bytes", mono=False)
    d.box((830, 140, 230, 48), HARDWARE, "tensor cores", "wgmma.cpp: products of a warpgroup", mono=False)
    d.line((790, 152), (830, 152), colour=BLUE)
    d.line((945, 188), (945, 242), (790, 242), colour=BLUE)
    d.note(800, 144, "start", colour=BLUE)
    lazy = "mode lazy: an action completes when no\nfiber can run, and wakes the fibers\nthat wait; "
    d.note(800, 260, lazy + "eager: completes in start.", colour=BLUE)
    d.note(800, 313, "Nothing in flight, no fiber can run:\ndeadlock, with a table of all waits", colour=ORANGE)

    d.text(20, 404, "What an instruction of csrc/arch does to the fiber that calls it", size=14, bold=True)
    cards = (
        (
            "at once",
            "load_shared, atomic_add",
            "Checks bounds, alignment\nand races (memory.cpp),\nthen moves the bytes.",
        ),
        (
            "park",
            "sync_threads, barrier_wait",
            "Not runnable until the\nthread that completes the\nbarrier calls wake.",
        ),
        (
            "warp_collective",
            "mma.sync, shuffle, ldmatrix",
            "Lanes of the mask park;\nthe last one executes it\nfor all and wakes them.",
        ),
        ("warpgroup_collective", "wgmma, setmaxnreg", "The same for the 128\nthreads of a warpgroup."),
        (
            "park_until",
            "wait_reached, load_acquire",
            "A condition on global\nmemory, evaluated when no\nother fiber can run.",
        ),
        (
            "cp.async",
            "cp_async, cp_async_wait",
            "Groups of the thread. Mode\nlazy: copied by the wait;\nNaNs until then.",
        ),
    )
    for number, (name, instructions, what) in enumerate(cards):
        x, width = 20 + 175 * number, 165
        d.rectangle(x, 420, width, 124, BASE)
        d.text(x + width / 2, 442, name, anchor="middle", bold=True, mono=True)
        d.text(x + width / 2, 464, instructions, size=11, anchor="middle", limit=width)
        d.note(x + width / 2, 489, what, anchor="middle")
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    f"{draw.__name__}.svg": draw for draw in (layers, linear, attention, backward, overlap, emulator)
}


def with_table_of_layers(page: str) -> str:
    """`page` (CONTRIBUTING.md) with LAYERS as a table between its two marks."""
    titles = {part.key: part.title for layer in LAYERS for part in layer.parts}
    rows = [
        f"| {' '.join(layer.name.split())} | `{part.title}` | {part.note} | "
        + (", ".join(f"`{titles[use]}`" for use in part.uses.split(", ")) if part.uses else "none")
        + " |\n"
        for layer in LAYERS
        for part in layer.parts
    ]
    head, mark, rest = page.partition("written by tools/draw_figures.py -->\n")
    tail = rest[rest.index("<!-- end of layers -->") :]
    return head + mark + "| layer | part | contents | uses |\n|---|---|---|---|\n" + "".join(rows) + tail


def main() -> None:
    CONTRIBUTING.write_text(with_table_of_layers(CONTRIBUTING.read_text()))
    FIGURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FIGURES / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
