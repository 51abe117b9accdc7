"""The program that each host runs for `four_hosts.py measure`: it times all-reduces by size, and the part of them that
a backward pass does not hide.

The second time is also predicted: `cuda_ext.distributed.bucketing` simulates it from the measured all-reduces, the
times at which gradients arrive, and the slowdown that sums and packing cause in backward.

The backward pass stands for one on a GPU. All hosts share the cores of this machine, which also carry the network, so a
layer does not compute: it sleeps until its gradient is due, like a process that waits for its GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cuda_ext import bucket as bucket_ops
from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.distributed.algorithms import ALGORITHMS, choose_algorithm
from cuda_ext.distributed.bucketing.assignment import fill, fixed_capacity
from cuda_ext.distributed.bucketing.links import Link, fit
from cuda_ext.distributed.bucketing.simulation import Gradient, simulate
from cuda_ext.distributed.bucketing.units import byte_rate, byte_size, duration

KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB)  # bytes of a bucket
IN_A_ROW = 3
LAYERS, LAYER_BYTES, LAYER_SECONDS = 12, MIB, 0.015  # the model: 12 MiB of gradients in 180 ms
WARM_UP = 3  # rounds not measured, which allocate, connect and plan


class SleepingBackward(torch.autograd.Function):
    """Returns ``x``; in backward, the gradient of ``weight`` arrives after ``seconds`` of sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.shape, ctx.seconds = weight.shape, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = torch.full(ctx.shape, 1.0)
        time.sleep(ctx.seconds)
        return grad, gradient, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LAYER_BYTES // 4))

    def forward(self, x: Tensor) -> Tensor:
        return SleepingBackward.apply(x, self.weight, LAYER_SECONDS)


def model() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def timed(action: Callable[[], None]) -> float:
    """Seconds of ``action``, which all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(actions: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each action in each round, on the slowest rank; actions alternate, so that disturbances affect all."""
    rounds = [[timed(action) for action in actions.values()] for _ in range(WARM_UP + repeats)][WARM_UP:]
    return {name: list(column) for name, column in zip(actions, zip(*slowest(rounds), strict=True), strict=True)}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    quarters = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"seconds": quarters[1], "lower_quartile": quarters[0], "upper_quartile": quarters[2]}


class Sums:
    """Sums ``count`` buckets of ``size`` bytes as a wrapper does: the next one is queued while one is summed."""

    def __init__(self, count: int, size: int, algorithm: str) -> None:
        buffers = [(count * size // 4, torch.float32)]
        device = torch.device("cpu")
        group = dist.group.WORLD
        assert group is not None
        self._algorithm, (buffer,) = choose_algorithm(
            group, None, device, buffers, algorithm, narrowed=False, sharded=False
        )
        self._buckets = buffer.chunk(count)

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        under_way = [self._algorithm.start(bucket, bucket[:0]) for bucket in self._buckets]
        meanwhile()
        for pending in under_way:
            pending.wait()


class Packing:
    """Packs as many gradients as the model has, each into its own bucket; ``seconds`` has the duration of each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._gradients, self._wires = ([torch.zeros(LAYER_BYTES // 4) for _ in range(LAYERS)] for _ in range(2))

    def run(self) -> None:
        begin = time.perf_counter()
        for gradient, wire in zip(self._gradients, self._wires, strict=True):
            bucket_ops.pack([gradient], wire, [0], scale=1.0 / dist.get_world_size(), stats=False)
        self.seconds.append(time.perf_counter() - begin)


def training_step(module: nn.Module) -> None:
    module.zero_grad()
    module(torch.zeros(1, requires_grad=True)).sum().backward()


class Local:
    """A step without averaging; ``arrivals`` are the times of its gradients in each step, in seconds."""

    def __init__(self) -> None:
        self.arrivals: list[list[float]] = []
        self._module = model()
        for parameter in reversed(list(self._module.parameters())):
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _: Tensor) -> None:
        self.arrivals[-1].append(time.perf_counter() - self._begin)

    def step(self) -> None:
        self.arrivals.append([])
        self._begin = time.perf_counter()
        training_step(self._module)

    def median_arrivals(self) -> list[float]:
        """When the last rank has each gradient: the earliest start of its sum."""
        return [statistics.median(column) for column in zip(*slowest(self.arrivals[WARM_UP:]), strict=True)]


def slowest(times: Sequence[Sequence[float]]) -> list[list[float]]:
    """The maximum of each time over the ranks."""
    tensor = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def predict_exposed(bucket_cap_mb: float, link: Link, arrivals: Sequence[float], pack_bandwidth: float) -> float:
    gradients = [Gradient(str(n), LAYER_BYTES, ready) for n, ready in enumerate(arrivals)]
    buckets = fill(gradients, fixed_capacity(bucket_cap_mb * MIB))
    return simulate(gradients, buckets, link, arrivals[-1], pack_bandwidth=pack_bandwidth).exposed


def measure(bucket_caps: Sequence[float], algorithm: str, repeats: int) -> dict[str, Any]:
    wrappers = {f"{mb:g}": BucketedDataParallel(model(), bucket_cap_mb=mb, algorithm=algorithm) for mb in bucket_caps}
    alone, during, packing = Local(), Local(), Packing()

    def step_during_sums() -> None:
        during.step()
        packing.run()

    actions: dict[str, Callable[[], None]] = {"alone": alone.step}
    actions["during"] = partial(Sums(2 * LAYERS, LAYER_BYTES, algorithm).run, step_during_sums)
    actions |= {f"sum {size}": Sums(IN_A_ROW, size, algorithm).run for size in SIZES}
    actions |= {f"step {mb}": partial(training_step, wrapper) for mb, wrapper in wrappers.items()}
    seconds = in_turns(actions, repeats)
    points = [{"bytes": size, **summary([each / IN_A_ROW for each in seconds[f"sum {size}"]])} for size in SIZES]
    arrivals = alone.median_arrivals()
    hides = min(1.0, arrivals[-1] / during.median_arrivals()[-1])
    fitted = fit(SIZES, [point["seconds"] for point in points], hides)
    pack_seconds = statistics.median(column[0] for column in slowest([[each] for each in packing.seconds[WARM_UP:]]))
    pack_bandwidth = LAYERS * LAYER_BYTES / pack_seconds
    steps = []
    for mb, wrapper in wrappers.items():
        exposed = [step - without for step, without in zip(seconds[f"step {mb}"], seconds["alone"], strict=True)]
        steps.append(
            {
                "bucket_cap_mb": float(mb),
                "plan": wrapper.describe(),
                "step": summary(seconds[f"step {mb}"]),
                "exposed": summary(exposed),
                "predicted_exposed_seconds": predict_exposed(float(mb), fitted.link, arrivals, pack_bandwidth),
            }
        )
    return {
        "sums": points,
        "fit": {
            "latency_seconds": fitted.link.latency,
            "bytes_per_second": fitted.link.bandwidth,
            "hides": hides,
            "median_error": fitted.error,
        },
        "pack_bytes_per_second": pack_bandwidth,
        "gradient_seconds": arrivals,
        "alone": summary(seconds["alone"]),
        "steps": steps,
    }


def report(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"sums of float32 buckets over gloo, algorithm={found['algorithm']!r}:"
    for point in found["sums"]:
        yield f"  {byte_size(point['bytes']):>8} {duration(point['seconds'])}"
    line = found["fit"]
    link = Link(line["latency_seconds"], line["bytes_per_second"])
    yield f"  fit: {link}, median error {line['median_error']:.0%}"
    pack = byte_rate(found["pack_bytes_per_second"])
    yield f"  during sums backward runs at {line['hides']:.0%} of its speed alone, and gradients are packed at {pack}"
    yield (
        f"a step of {duration(found['alone']['seconds'])} alone, with {LAYERS} gradients of {byte_size(LAYER_BYTES)}; "
        "exposed communication with quartiles, and its prediction:"
    )
    for step in found["steps"]:
        exposed, predicted = step["exposed"], step["predicted_exposed_seconds"]
        yield (
            f"  bucket_cap_mb={step['bucket_cap_mb']:g}: {duration(exposed['seconds'])} "
            f"({duration(exposed['lower_quartile'])} to {duration(exposed['upper_quartile'])}), "
            f"predicted {duration(predicted)}, {predicted / exposed['seconds'] - 1:+.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--bucket-cap-mb", type=float, nargs="+", required=True)
    parser.add_argument("--algorithm", choices=ALGORITHMS, required=True)
    parser.add_argument("--rate", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {
        "hosts": dist.get_world_size(),
        "rate": arguments.rate,
        "algorithm": arguments.algorithm,
        "processors": os.cpu_count(),
        "repeats": arguments.repeats,
        "layer_bytes": LAYER_BYTES,
        **measure(arguments.bucket_cap_mb, arguments.algorithm, arguments.repeats),
    }
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print(*report(found), f"wrote {arguments.out}", sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
