"""`python -m cuda_ext.distributed context`: what attention costs if ranks share a sequence, without them; and the
option `--context-ranks` of `plan`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from cuda_ext.distributed.context_parallel.layout import NAMES
from cuda_ext.distributed.context_parallel.plan import ContextPlan, plan_context
from cuda_ext.distributed.prediction import quantities
from cuda_ext.distributed.prediction.command import SharedAttention, add_network, positive, preset_of
from cuda_ext.distributed.prediction.presets import PRESETS, Preset, Transformer

_EPILOG = """\
For each number of ranks: the seconds of attention of one layer by each method, the bytes that the busiest rank sends,
its memory, the most work of a rank relative to the mean, and how much of the ranks' time would do on one rank. Then the
fastest method, and the reasons against the others. docs/context_plan.md describes the model.

Units are case-insensitive, except that b is a bit and B a byte: 100gbit, 100Gb/s, 12.5GB/s, 680T, 25mib.

example:
  python -m cuda_ext.distributed context llama-70b --length 524288 --ranks 8 64 --bandwidth 400Gbit --latency 5us \\
      --rate 680T --map
"""


def add(commands: Any) -> None:
    """Adds the command to those of `prediction.command`, and options to its `plan`."""
    _add_to_plan(commands.choices["plan"])
    context = commands.add_parser(
        "context",
        help="attention of a sequence that ranks share, by each method",
        description="Predicts attention over a sequence that ranks share, and names the fastest method.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    context.set_defaults(run=_run)
    heads = context.add_argument_group("attention")
    transformers = ", ".join(name for name, preset in PRESETS.items() if isinstance(preset, Transformer))
    heads.add_argument("model", nargs="?", metavar="MODEL", help=f"a preset that has heads: {transformers}")
    heads.add_argument("--heads", type=positive, metavar="N", help="of queries, instead of a preset")
    heads.add_argument("--key-heads", type=positive, metavar="N", help="default: as many")
    heads.add_argument("--head-dim", type=positive, default=128, metavar="N", help="default 128")
    heads.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences of a rank (default 1)")
    dtypes = ("bfloat16", "float16", "float32")
    heads.add_argument("--dtype", choices=dtypes, default="bfloat16", help="default bfloat16")
    sequence = context.add_argument_group("the sequence")
    sequence.add_argument("--length", type=positive, metavar="N", help="rows of the whole sequence")
    sequence.add_argument(
        "--documents", type=positive, nargs="+", metavar="N", help="lengths of packed documents, instead of --length"
    )
    sequence.add_argument("--full", action="store_true", help="rows see keys after them, too")
    sequence.add_argument("--window", type=positive, metavar="N", help="rows see so many keys before them")
    sequence.add_argument("--layout", choices=NAMES, help="default: balanced")
    add_network(context.add_argument_group("ranks and network"))
    device = context.add_argument_group("a rank")
    device.add_argument(
        "--rate", type=quantities.flop_rate, required=True, help="FLOP/s of attention forward: 680T on an H100"
    )
    device.add_argument("--backward-rate", type=quantities.flop_rate, metavar="RATE", help="default 0.91 of --rate")
    device.add_argument("--memory", type=quantities.some_bytes, metavar="SIZE", help="for attention of a layer")
    output = context.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="instead of the table")
    output.add_argument("--map", action="store_true", help="which rank computes which rows and keys, as text")
    output.add_argument("--plot", type=Path, metavar="FILE", help="the same for the last number of ranks, as .svg")


def _add_to_plan(plan: argparse.ArgumentParser) -> None:
    shared = plan.add_argument_group("sequences that ranks share, of presets that have heads: docs/context_plan.md")
    shared.add_argument(
        "--context-ranks",
        type=positive,
        metavar="N",
        help="ranks that share a sequence, of which each has --tokens rows",
    )
    shared.add_argument("--head-dim", type=positive, default=128, metavar="N", help="default 128")
    shared.add_argument(
        "--attention-flops", type=quantities.flop_rate, metavar="RATE", help="of attention (default: --flops)"
    )
    plan.set_defaults(attention=_of_plan)


def _of_plan(options: argparse.Namespace) -> SharedAttention | None:
    """Of one sequence for each group of `--context-ranks`."""
    ranks = options.context_ranks
    if ranks is None:
        return None
    if options.flops is None or options.tokens is None:
        raise ValueError("--context-ranks: expected --flops and --tokens, the rows of a rank, got neither or one")
    layers, heads, key_heads = _sizes(preset_of(options), options.shapes, options.head_dim)
    length = ranks * options.tokens
    plan = plan_context(
        length,
        ranks,
        heads=heads,
        key_heads=key_heads,
        head_dim=options.head_dim,
        rate=options.attention_flops or options.flops,
        **_network(options),
    )
    if ranks > 1 and plan.best is None:
        raise ValueError(f"--context-ranks: {'; '.join(plan.reasons)}")
    best = plan.alone if plan.best is None else plan.method(plan.best)
    shared = "one rank has" if ranks == 1 else f"{ranks} ranks share"
    text = f"attention of each of {layers} layers, causal, {shared} {length:,} rows: {best.method}\n{plan}"
    report = {"layers": layers, "length": length, **_report(plan)}
    return SharedAttention(ranks, layers * best.backward, text, report)


def _network(options: argparse.Namespace) -> dict[str, Any]:
    names = ("bandwidth", "latency", "ranks_per_node", "node_bandwidth", "node_latency")
    return {name: getattr(options, name) for name in names}


def _report(plan: ContextPlan) -> dict[str, Any]:
    """For JSON."""
    methods = [dataclasses.asdict(method) for method in (plan.alone, *plan.methods)]
    return {"ranks": plan.ranks, "best": plan.best, "reasons": plan.reasons, "methods": methods}


def _sizes(preset: Preset | None, name: str, head_dim: int) -> tuple[int, int, int]:
    """Layers, query and key heads."""
    if not isinstance(preset, Transformer):
        command = "python -m cuda_ext.distributed context --heads N"
        raise ValueError(f"expected a preset that has heads, see context --help, got {name}; for others: {command}")
    heads, key_heads = (preset.queries or preset.hidden) // head_dim, (preset.kv or preset.hidden) // head_dim
    if heads == 0 or key_heads == 0 or heads % key_heads:
        raise ValueError(f"--head-dim: expected that of {name}, got {head_dim}")
    return preset.layers, heads, key_heads


def _heads(options: argparse.Namespace) -> tuple[int, int]:
    """Query and key heads."""
    if options.model is None:
        if options.heads is None:
            raise ValueError("expected a preset or --heads, got neither")
        return options.heads, options.key_heads or options.heads
    if options.heads or options.key_heads:
        raise ValueError(f"--heads: expected no preset, got {options.model}; give one of both")
    return _sizes(PRESETS.get(options.model.lower()), options.model, options.head_dim)[1:]


def _plans(options: argparse.Namespace) -> list[ContextPlan]:
    if (options.length is None) == (options.documents is None):
        raise ValueError("expected one of --length and --documents, got both or neither")
    ends = None if options.documents is None else [0, *itertools.accumulate(options.documents)]
    heads, key_heads = _heads(options)
    return [
        plan_context(
            options.length if ends is None else ends[-1],
            ranks,
            heads=heads,
            key_heads=key_heads,
            head_dim=options.head_dim,
            batch=options.batch,
            dtype=getattr(torch, options.dtype),
            causal=not options.full,
            window=None if options.window is None else (options.window, None),
            cu_seqlens=ends,
            layout=options.layout,
            rate=options.rate,
            backward_rate=options.backward_rate,
            memory=options.memory,
            **_network(options),
        )
        for ranks in dict.fromkeys(options.ranks)
    ]


def _run(options: argparse.Namespace) -> int:
    if options.plot is not None and options.plot.suffix != ".svg":
        raise ValueError(f"--plot: expected a file name that ends in .svg, got {options.plot}")
    plans = _plans(options)
    if options.json:
        print(json.dumps([_report(plan) for plan in plans], indent=2))
    else:
        shown = [f"{plan.ranks} ranks\n{plan}" + (f"\n\n{plan.map()}" if options.map else "") for plan in plans]
        print("\n\n".join(shown))
    if options.plot is not None:
        plans[-1].draw(options.plot)
    return 0
