"""What the gradients of a model cost on a cluster that is described by numbers: the cases of the command `plan`."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuda_ext.distributed.bucketing.assignment import AUTO, fill, fixed_capacity
from cuda_ext.distributed.bucketing.choice import choose
from cuda_ext.distributed.bucketing.links import ALGORITHMS, Hop, Link, two_level
from cuda_ext.distributed.bucketing.simulation import Gradient, Timeline, simulate, slowest
from cuda_ext.distributed.bucketing.units import byte_size
from cuda_ext.distributed.prediction import model_shapes
from cuda_ext.distributed.prediction.model_shapes import Parameter, ShapesError

MOST_RANKS = 4096  # in the curves of the plot
FORWARD = 0.5  # the time of forward, relative to backward


@dataclass(frozen=True)
class Prediction:
    """One backward pass on ``ranks`` with buckets of ``bucket`` bytes; None: with the buckets that `choose` returns."""

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
            # Infinite for a single rank, which sends nothing; JSON has no infinity.
            "bandwidth_bytes_per_second": self.link.bandwidth if self.link.bandwidth < math.inf else None,
            "bucket": AUTO if self.bucket is None else self.bucket,
            "bucket_bytes": list(self.sizes),
            "transfers": len(self.timeline.transfers),
            "exposed_seconds": self.timeline.exposed,
            "efficiency": self.efficiency,
        }


class Predictor:
    """Predictions for one model on one kind of cluster. ``options``: the arguments of the command. ``attention``: its
    seconds in backward, which are spread over it."""

    def __init__(self, options: argparse.Namespace, parameters: Sequence[Parameter], attention: float = 0.0) -> None:
        self._options = options
        self.backward_seconds = _backward_seconds(options, parameters) + attention
        wire = options.wire
        self.gradients = [
            Gradient(p.name, p.bytes(wire), self.backward_seconds * part, wire or p.dtype)
            for p, part in model_shapes.arrivals(parameters)
        ]

    def links(self, ranks: int) -> dict[str, Link]:
        """The cost of an all-reduce by each algorithm to be compared."""
        options = self._options
        inside, across = Hop(options.node_latency, options.node_bandwidth), Hop(options.latency, options.bandwidth)
        names = list(ALGORITHMS) if options.algorithm == AUTO else [options.algorithm]
        if ranks <= options.ranks_per_node:
            names = ["ring"]
        links = {name: two_level(ranks, options.ranks_per_node, inside, across, name) for name in names}
        both = {"hides": options.hides, "grouped": options.grouped}
        return {name: dataclasses.replace(link, **both) for name, link in links.items()}

    def predict(self, ranks: int, bucket: float | None) -> Prediction:
        """The prediction by the algorithm that exposes least."""
        options = self._options
        slowdown = slowest(ranks, options.jitter, options.seed) if options.jitter else 1.0
        found = []
        for algorithm, link in self.links(ranks).items():
            if bucket is None:
                choice = choose(self.gradients, link, self.backward_seconds, largest=options.largest, slowdown=slowdown)
                sizes, timeline = choice.sizes, choice.timeline
            else:
                buckets = fill(self.gradients, fixed_capacity(bucket))
                timeline = simulate(self.gradients, buckets, link, self.backward_seconds, slowdown=slowdown)
                sizes = tuple(transfer.bytes for transfer in timeline.transfers)
            found.append(Prediction(ranks, algorithm, link, bucket, sizes, timeline))
        return min(found, key=lambda prediction: prediction.timeline.exposed)

    def curves(self) -> dict[str, list[Prediction]]:
        """For each bucket size, the predictions for increasing numbers of ranks."""
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
