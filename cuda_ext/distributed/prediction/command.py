"""Predicts the time of gradient communication for a model and a cluster, without either.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cuda_ext.distributed.bucketing.assignment import AUTO
from cuda_ext.distributed.bucketing.links import ALGORITHMS
from cuda_ext.distributed.bucketing.units import MIB, byte_size, duration
from cuda_ext.distributed.prediction import model_shapes, presets, quantities
from cuda_ext.distributed.prediction.model_shapes import ITEMSIZE, Parameter, ShapesError
from cuda_ext.distributed.prediction.predictor import MOST_RANKS, Prediction, Predictor
from cuda_ext.distributed.prediction.presets import PRESETS, Preset

_INDENT = 16 * " "
EPILOG = f"""\
MODEL_SHAPES is a file that lists the parameters in order of registration, or a preset.
  text          one parameter per line: name 4096x4096 bfloat16    (dtype: default float32)
  JSON          {{"name": [4096, 4096]}} or {{"name": {{"shape": [4096, 4096], "dtype": "bfloat16"}}}}
  safetensors   model.safetensors, of which only the header is read, or model.safetensors.index.json next to such files
  preset        {textwrap.fill(", ".join(PRESETS), 118, initial_indent=_INDENT, subsequent_indent=_INDENT).lstrip()};
                --{", --".join(presets.SIZES)} change the sizes of presets that have them

To write the shapes of your own model to a file, paste this into a shell:

python - <<'EOF'
import torch
from cuda_ext.distributed.prediction.model_shapes import save
with torch.device("meta"):  # takes no memory
    model = torch.nn.Transformer()  # yours
save(model, "shapes.json")
EOF

Gradients become ready in the reverse order of registration; each takes a part of backward in proportion to its
multiplications. An embedding that is only looked up takes none; the gradient of one that is tied to the output is ready
when the lookup's part is. Presets and files written as above say which parameters are embeddings; in other files their
names tell. In a text file, "lookup" after the dtype marks an embedding, and "uses=0.25" a parameter by which a token
multiplies in a quarter of the cases, as with 2 experts of 8. For convolutions give --backward, as shapes do not say how
often they are applied; presets do, and count an image as a token.
The exposed time is how much longer the all-reduces make a step; efficiency is the time of forward (half of backward)
and backward, divided by that of a step. docs/buckets.md describes the model.
With --context-ranks, so many ranks share each sequence, and attention, which is not counted otherwise, is part of
backward. For its methods alone, see python -m cuda_ext.distributed context --help.

Units are case-insensitive, except that b is a bit and B a byte: 100gbit, 100Gb/s, 12.5GB/s, 0us, 25mib.

example:
  python -m cuda_ext.distributed plan llama-8b --ranks 64 1024 --bandwidth 400Gbit --latency 5us \\
      --flops 400T --tokens 8192 --plot plan.png
"""


class SharedAttention(NamedTuple):
    """Attention of all layers over sequences that ranks share."""

    ranks: int
    backward: float  # seconds
    text: str
    report: dict[str, Any]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see --help", file=sys.stderr)
        raise SystemExit(2)


def bucket_size(text: str) -> float | None:
    return None if text == AUTO else quantities.some_bytes(text)


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


def parser(others: Sequence[Callable[[Any], None]] = ()) -> Parser:
    """others: add commands to what `add_subparsers` returns, with the function of each as `run`, and options to `plan`,
    whose `attention` is called with the options and returns a `SharedAttention` or None."""
    main = Parser(prog="python -m cuda_ext.distributed", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="exposed time for numbers of ranks and bucket sizes",
        description="Simulates one backward pass, and predicts how much longer the all-reduces make a step.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.set_defaults(run=run_plan, attention=lambda options: None)
    plan.add_argument("shapes", metavar="MODEL_SHAPES", help="a file or a preset, see below")
    model = plan.add_argument_group("the model")
    for name in presets.SIZES:
        about = "width of the keys of a token, all heads" if name == "kv" else "instead of the preset's value"
        model.add_argument(f"--{name}", type=positive, metavar="N", help=about)
    model.add_argument("--wire", choices=list(ITEMSIZE), help="dtype of transfers (default: each parameter's own)")
    network = plan.add_argument_group("ranks and network")
    add_network(network)
    _add_all_reduces(network)
    _add_computing(plan.add_argument_group("computing: --backward, or both --flops and --tokens"))
    buckets = plan.add_argument_group("buckets")
    buckets.add_argument(
        "--buckets",
        type=bucket_size,
        nargs="+",
        default=[None, 25.0 * MIB, 100.0 * MIB],
        metavar="SIZE",
        help="MiB, or with a unit, or auto (default: auto 25MiB 100MiB)",
    )
    buckets.add_argument("--largest", type=quantities.some_bytes, metavar="SIZE", help="maximum bucket size for auto")
    output = plan.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="instead of the table")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"one pass, and exposed time up to {MOST_RANKS} ranks (.png .svg .pdf)",
    )
    for add in others:
        add(commands)
    return main


def add_network(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ranks", type=positive, nargs="+", required=True, metavar="N", help="one or several numbers")
    group.add_argument(
        "--bandwidth", type=quantities.bandwidth, required=True, help="network of each rank: 400Gbit, 50GB/s"
    )
    group.add_argument("--latency", type=quantities.latency, required=True, help="of a message across the network: 5us")
    group.add_argument("--ranks-per-node", type=positive, default=8, metavar="N", help="default 8")
    group.add_argument(
        "--node-bandwidth",
        type=quantities.bandwidth,
        default=370e9,
        metavar="BANDWIDTH",
        help="of each rank inside its node (default 370GB/s, which NCCL's rings reach on 8 H100)",
    )
    group.add_argument(
        "--node-latency",
        type=quantities.latency,
        default=3.4e-6,
        metavar="LATENCY",
        help="of a message inside a node (default 3.4us, a step of a ring in NCCL's own model)",
    )


def _add_all_reduces(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--algorithm", choices=(AUTO, *ALGORITHMS), default=AUTO, help="across nodes (default: the faster one)"
    )
    group.add_argument(
        "--hides",
        type=fraction,
        default=1.0,
        metavar="PART",
        help="relative speed of backward during a transfer: 1 (default) over a network, 0 on the same cores",
    )
    group.add_argument(
        "--grouped",
        type=quantities.latency,
        metavar="TIME",
        help="time that another bucket adds to a transfer, with NCCL's groups (default: one bucket per transfer); for "
        "models with several dtypes",
    )


def _add_computing(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backward", type=quantities.seconds, metavar="TIME", help="of one pass: 200ms")
    group.add_argument("--flops", type=quantities.flop_rate, metavar="RATE", help="that a rank reaches: 400T")
    group.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="in the batch of a rank; backward takes 4 FLOPs per token and parameter that multiplies",
    )
    group.add_argument(
        "--jitter",
        type=quantities.percent,
        default=0.0,
        metavar="PART",
        help="standard deviation of the ranks' speed: 2%%",
    )
    group.add_argument("--seed", type=int, default=0, help="of the jitter (default 0)")


def preset_of(options: argparse.Namespace) -> Preset | None:
    """The preset that is named, with the sizes that are given instead of its own."""
    preset = PRESETS.get(options.shapes.lower())
    if preset is None:
        return None
    given = _given_sizes(options)
    for name in given:
        if not hasattr(preset, name):
            raise ShapesError(f"--{name}: expected a preset that has it, got {options.shapes}; leave it out")
    return dataclasses.replace(preset, **given)


def _given_sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in presets.SIZES if getattr(options, name) is not None}


def _parameters(options: argparse.Namespace) -> list[Parameter]:
    preset = preset_of(options)
    if preset is not None:
        return preset.parameters()
    given = _given_sizes(options)
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


def main(arguments: Sequence[str] | None = None, others: Sequence[Callable[[Any], None]] = ()) -> int:
    options = parser(others).parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except (OSError, ImportError, ValueError) as error:
        print(f"python -m cuda_ext.distributed {options.command}: {error}", file=sys.stderr)
        return 2


def run_plan(options: argparse.Namespace) -> int:
    if options.plot is not None:
        from cuda_ext.distributed.prediction import plot  # fails before any work if matplotlib is missing

        plot.check(options.plot)
    parameters = _parameters(options)
    attention: SharedAttention | None = options.attention(options)
    if attention is not None and any(ranks % attention.ranks for ranks in options.ranks):
        raise ValueError(f"--ranks: expected multiples of --context-ranks {attention.ranks}, got {options.ranks}")
    predictor = Predictor(options, parameters, attention.backward if attention else 0.0)
    cases = itertools.product(dict.fromkeys(options.ranks), dict.fromkeys(options.buckets))
    predictions = [predictor.predict(ranks, bucket) for ranks, bucket in cases]
    count, size = sum(p.numel for p in parameters), sum(p.bytes(options.wire) for p in parameters)
    looked_up = sum(p.numel for p in parameters if p.looked_up and not p.uses)
    if options.json:
        report = {
            "parameters": count,
            "looked_up": looked_up,
            "tensors": len(parameters),
            "bytes": size,
            "backward_seconds": predictor.backward_seconds,
            "attention": attention.report if attention else None,
            "predictions": [prediction.as_dict() for prediction in predictions],
        }
        print(json.dumps(report, indent=2))
    else:
        print(
            f"{options.shapes}: {count:,} parameters in {len(parameters)} tensors"
            f"{f' ({looked_up:,} only looked up)' if looked_up else ''}, {byte_size(size)} of gradients; "
            f"backward takes {duration(predictor.backward_seconds)}"
            f"{f', of which attention {duration(attention.backward)}' if attention else ''}\n"
        )
        if attention is not None:
            print(f"{attention.text}\n")
        print(table(predictions))
    if options.plot is not None:
        shown = [prediction for prediction in predictions if prediction.ranks == options.ranks[-1]]
        plot.write(options.plot, options.shapes, shown, predictor.curves())
        print(f"\n{options.plot} written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
