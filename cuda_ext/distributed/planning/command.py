"""Predicts what the gradients of a model cost on their way between ranks, without one of them.

    python -m cuda_ext.distributed plan llama-8b --ranks 64 1024 --bandwidth 400Gbit --latency 5us \\
        --flops 400T --tokens 8192
    python -m cuda_ext.distributed plan shapes.txt --ranks 16 --ranks-per-node 4 --bandwidth 25Gbit --latency 20us \\
        --backward 150ms --plot plan.png
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cuda_ext.distributed.planning import model_shapes, presets, units
from cuda_ext.distributed.planning.choice import (
    ALGORITHMS,
    MIB,
    Gradient,
    Hop,
    Link,
    Timeline,
    byte_size,
    choose,
    duration,
    fill,
    simulate,
    slowest,
    two_level,
)
from cuda_ext.distributed.planning.model_shapes import ITEMSIZE, Parameter, ShapesError
from cuda_ext.distributed.planning.presets import PRESETS

AUTO = "auto"
MOST_RANKS = 4096  # of the plot's curves
FORWARD = 0.5  # seconds for each of backward
_INDENT = 16 * " "
EPILOG = f"""\
MODEL_SHAPES is a file of the parameters in order of registration, or a preset.
  text          one parameter a line: name 4096x4096 bfloat16    (dtype: default float32)
  JSON          {{"name": [4096, 4096]}} or {{"name": {{"shape": [4096, 4096], "dtype": "bfloat16"}}}}
  safetensors   model.safetensors, of which the header is read, or model.safetensors.index.json beside such files
  preset        {textwrap.fill(", ".join(PRESETS), 118, initial_indent=_INDENT, subsequent_indent=_INDENT).lstrip()};
                --{", --".join(presets.SIZES)} change the sizes of one that has them

The shapes of a model of your own, into a file; paste this into a shell:

python - <<'EOF'
import torch
from cuda_ext.distributed.planning.model_shapes import save
with torch.device("meta"):  # takes no memory
    model = torch.nn.Transformer()  # yours
save(model, "shapes.json")
EOF

Gradients come in the reverse order of registration, each after a part of backward in proportion to its products. That
of an embedding that is looked up takes no product; one that is tied to the output is complete when the lookup's part is
there. Presets and the file above know which these are, from other files names tell it; in a text, "lookup" behind the
dtype does, and "uses=0.25" that a token takes part in a quarter of the products, as of 2 experts of 8. For convolutions
give --backward, as their shapes do not tell how often they are used; presets know it, their tokens are images.
Exposed is the time by which the all-reduces lengthen a step; efficiency is the time of forward (half of backward) and
backward, as a part of that of a step. The model is in docs/buckets.md.

Units may be in any case, but b is a bit and B a byte: 100gbit, 100Gb/s, 12.5GB/s, 0us, 25mib.

example:
  python -m cuda_ext.distributed plan llama-8b --ranks 64 1024 --bandwidth 400Gbit --latency 5us \\
      --flops 400T --tokens 8192 --plot plan.png
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; --help tells more", file=sys.stderr)
        raise SystemExit(2)


def bucket_size(text: str) -> float | None:
    return None if text == AUTO else units.some_bytes(text)


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def parser() -> Parser:
    main = Parser(prog="python -m cuda_ext.distributed", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="exposed time for numbers of ranks and sizes of buckets",
        description="Predicts, by a simulation of one backward pass, which time of all-reduces a step sees.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("shapes", metavar="MODEL_SHAPES", help="a file or a preset, see below")
    model = plan.add_argument_group("the model")
    for name in presets.SIZES:
        about = "width of all keys of a token" if name == "kv" else "in place of the preset's"
        model.add_argument(f"--{name}", type=positive, metavar="N", help=about)
    model.add_argument("--wire", choices=list(ITEMSIZE), help="dtype that travels (default: each parameter's own)")
    ranks = plan.add_argument_group("ranks and network")
    ranks.add_argument("--ranks", type=positive, nargs="+", required=True, metavar="N", help="one or several numbers")
    ranks.add_argument("--bandwidth", type=units.bandwidth, required=True, help="each rank's network: 400Gbit, 50GB/s")
    ranks.add_argument("--latency", type=units.latency, required=True, help="of a message across the network: 5us")
    ranks.add_argument("--ranks-per-node", type=positive, default=8, metavar="N", help="default 8")
    ranks.add_argument(
        "--node-bandwidth",
        type=units.bandwidth,
        default=370e9,
        metavar="BANDWIDTH",
        help="of each rank inside its node (default 370GB/s, as rings of NCCL reach on 8 H100)",
    )
    ranks.add_argument(
        "--node-latency",
        type=units.latency,
        default=3.4e-6,
        metavar="LATENCY",
        help="of a message inside a node (default 3.4us, a step of a ring in NCCL's own model)",
    )
    ranks.add_argument(
        "--algorithm", choices=(AUTO, *ALGORITHMS), default=AUTO, help="across nodes (default: what exposes less)"
    )
    ranks.add_argument(
        "--hides",
        type=fraction,
        default=1.0,
        metavar="PART",
        help="speed of backward beside a transfer, as part of its own: 1 (default) by a network, 0 on the same cores",
    )
    ranks.add_argument(
        "--grouped",
        type=units.latency,
        metavar="TIME",
        help="that another bucket adds to a launch, as a group of NCCL's (default: buckets go one by one); for models "
        "of several dtypes",
    )
    computing = plan.add_argument_group("computing: --backward, or both others")
    computing.add_argument("--backward", type=units.seconds, metavar="TIME", help="of one pass: 200ms")
    computing.add_argument("--flops", type=units.flop_rate, metavar="RATE", help="that a rank reaches: 400T")
    computing.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="of a rank's batch; backward takes 4 FLOPs for each and each parameter that multiplies",
    )
    computing.add_argument(
        "--jitter", type=units.percent, default=0.0, metavar="PART", help="standard deviation of ranks' speed: 2%%"
    )
    computing.add_argument("--seed", type=int, default=0, help="of the jitter (default 0)")
    buckets = plan.add_argument_group("buckets")
    buckets.add_argument(
        "--buckets",
        type=bucket_size,
        nargs="+",
        default=[None, 25.0 * MIB, 100.0 * MIB],
        metavar="SIZE",
        help="MiB, or with a unit, or auto (default: auto 25MiB 100MiB)",
    )
    buckets.add_argument("--largest", type=units.some_bytes, metavar="SIZE", help="that auto may take")
    output = plan.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="instead of the table")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"one pass, and exposed time up to {MOST_RANKS} ranks (.png .svg .pdf)",
    )
    return main


@dataclass(frozen=True)
class Prediction:
    """What one backward pass takes on ``ranks`` with buckets of ``bucket`` bytes, None for those chosen."""

    ranks: int
    algorithm: str
    link: Link
    bucket: float | None
    sizes: Sequence[float]  # bytes of each bucket
    timeline: Timeline

    @property
    def bucket_name(self) -> str:
        return AUTO if self.bucket is None else byte_size(self.bucket)

    @property
    def efficiency(self) -> float:
        alone = (1.0 + FORWARD) * self.timeline.alone
        return alone / (alone + self.timeline.exposed)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "algorithm": self.algorithm,
            "latency_seconds": self.link.latency,
            # Of a single rank nothing is sent, and JSON has no infinity.
            "bandwidth_bytes_per_second": self.link.bandwidth if self.link.bandwidth < math.inf else None,
            "bucket": AUTO if self.bucket is None else self.bucket,
            "bucket_bytes": list(self.sizes),
            "launches": len(self.timeline.transfers),
            "exposed_seconds": self.timeline.exposed,
            "efficiency": self.efficiency,
        }


class Planner:
    """Predictions for one model on one kind of machine."""

    def __init__(self, options: argparse.Namespace, parameters: Sequence[Parameter]) -> None:
        self._options = options
        self.backward_seconds = _backward_seconds(options, parameters)
        wire = options.wire
        self.gradients = [
            Gradient(p.name, p.bytes(wire), self.backward_seconds * part, wire or p.dtype)
            for p, part in model_shapes.arrivals(parameters)
        ]

    def links(self, ranks: int) -> dict[str, Link]:
        """Algorithm -> what all-reduces take, of the algorithms in question."""
        options = self._options
        inside, across = Hop(options.node_latency, options.node_bandwidth), Hop(options.latency, options.bandwidth)
        names = list(ALGORITHMS) if options.algorithm == AUTO else [options.algorithm]
        if ranks <= options.ranks_per_node:
            names = ["ring"]
        links = {name: two_level(ranks, options.ranks_per_node, inside, across, name) for name in names}
        own = {"hides": options.hides, "grouped": options.grouped}
        return {name: dataclasses.replace(link, **own) for name, link in links.items()}

    def predict(self, ranks: int, bucket: float | None) -> Prediction:
        options = self._options
        slowdown = slowest(ranks, options.jitter, options.seed) if options.jitter else 1.0
        found = []
        for algorithm, link in self.links(ranks).items():
            if bucket is None:
                choice = choose(self.gradients, link, self.backward_seconds, largest=options.largest, slowdown=slowdown)
                sizes, timeline = choice.sizes, choice.timeline
            else:
                buckets = fill(self.gradients, bucket)
                timeline = simulate(self.gradients, buckets, link, self.backward_seconds, slowdown=slowdown)
                sizes = tuple(transfer.bytes for transfer in timeline.transfers)
            found.append(Prediction(ranks, algorithm, link, bucket, sizes, timeline))
        return min(found, key=lambda prediction: prediction.timeline.exposed)

    def curves(self) -> dict[str, list[Prediction]]:
        """For each size of buckets the predictions for ever more ranks."""
        per_node = self._options.ranks_per_node
        inside = [2**n for n in range(1, 13) if 2**n < per_node]
        counts = [n for n in inside + [per_node * 2**n for n in range(13)] if 2 <= n <= MOST_RANKS]
        curves: dict[str, list[Prediction]] = {}
        for bucket in dict.fromkeys(self._options.buckets):
            for ranks in counts:
                prediction = self.predict(ranks, bucket)
                curves.setdefault(prediction.bucket_name, []).append(prediction)
        return curves


def _backward_seconds(options: argparse.Namespace, parameters: Sequence[Parameter]) -> float:
    if options.backward is not None:
        if options.flops is not None or options.tokens is not None:
            raise ShapesError("expected --backward, or --flops and --tokens, got both")
        return float(options.backward)
    if options.flops is None or options.tokens is None:
        raise ShapesError("expected --backward, or both --flops and --tokens, to know what transfers can hide behind")
    work = model_shapes.work_per_token(parameters)
    if not work:
        raise ShapesError("expected --backward, as no parameter multiplies anything, got --flops and --tokens")
    return 4.0 * work * options.tokens / options.flops


def _parameters(options: argparse.Namespace) -> list[Parameter]:
    given = {name: getattr(options, name) for name in presets.SIZES if getattr(options, name) is not None}
    preset = PRESETS.get(options.shapes.lower())
    if preset is not None:
        for name in given:
            if not hasattr(preset, name):
                raise ShapesError(f"--{name}: expected a preset that has it, got {options.shapes}; leave it out")
        return dataclasses.replace(preset, **given).parameters()
    if given:
        raise ShapesError(f"--{min(given)}: expected a preset to change, such as llama-8b, got {options.shapes}")
    path = Path(options.shapes)
    if not path.exists():
        near = difflib.get_close_matches(options.shapes.lower(), PRESETS, n=3) or PRESETS
        raise ShapesError(f"{path}: expected a file or a preset, such as {', '.join(near)}, got neither")
    return model_shapes.read(path)


def table(predictions: Sequence[Prediction]) -> str:
    head = ("ranks", "algorithm", "all-reduce", "bucket", "buckets", "last", "exposed", "efficiency")
    rows = [
        (
            str(p.ranks),
            p.algorithm,
            "nothing" if p.ranks == 1 else str(p.link),
            p.bucket_name,
            str(len(p.sizes)),
            byte_size(p.sizes[-1]),
            duration(p.timeline.exposed),
            f"{p.efficiency:.1%}",
        )
        for p in predictions
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in (head, *rows))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return plan(options)
    except (OSError, ImportError, ValueError) as error:
        print(f"python -m cuda_ext.distributed plan: {error}", file=sys.stderr)
        return 2


def plan(options: argparse.Namespace) -> int:
    if options.plot is not None:
        from cuda_ext.distributed.planning import plot  # before anything else, as it may be missing

        plot.check(options.plot)
    parameters = _parameters(options)
    planner = Planner(options, parameters)
    cases = itertools.product(dict.fromkeys(options.ranks), dict.fromkeys(options.buckets))
    predictions = [planner.predict(ranks, bucket) for ranks, bucket in cases]
    count, size = sum(p.numel for p in parameters), sum(p.bytes(options.wire) for p in parameters)
    looked_up = sum(p.numel for p in parameters if p.looked_up and not p.uses)
    if options.json:
        report = {
            "parameters": count,
            "looked_up": looked_up,
            "tensors": len(parameters),
            "bytes": size,
            "backward_seconds": planner.backward_seconds,
            "predictions": [prediction.as_dict() for prediction in predictions],
        }
        print(json.dumps(report, indent=2))
    else:
        print(
            f"{options.shapes}: {count:,} parameters in {len(parameters)} tensors"
            f"{f' ({looked_up:,} only looked up)' if looked_up else ''}, {byte_size(size)} of gradients; "
            f"backward takes {duration(planner.backward_seconds)}\n"
        )
        print(table(predictions))
    if options.plot is not None:
        shown = [prediction for prediction in predictions if prediction.ranks == options.ranks[-1]]
        plot.write(options.plot, options.shapes, shown, planner.curves())
        print(f"\n{options.plot} written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
