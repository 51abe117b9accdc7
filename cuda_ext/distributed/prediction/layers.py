"""The time of a layer whose rows are gathered before its product or summed and scattered after it, whole or in chunks.

A message of B bytes takes ``latency + B / bandwidth``. A product of M rows takes ``launch`` and what is longer: its
FLOPs, or to move its operands and result. So a chunk of few rows costs more than its share: it reads all weights again.
Whole, the collective takes a message from each other rank, and the product begins after it, or ends before it. In
chunks, messages follow each other beside products; each product waits for its rows, or each message for its product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cuda_ext.distributed.bucketing.units import duration

if TYPE_CHECKING:
    import torch

OPS = ("all_gather_linear", "linear_reduce_scatter")
LEAST_GAIN = 0.05  # of the time: less is within the error of the prediction
CHUNKS_OF_PARTS = (1, 2, 4)


@dataclass(frozen=True)
class Rates:
    """Of one rank. The default is an H100 in its node: what NCCL's rings reach, and the FLOPs of 16-bit products."""

    flops: float = 600e12
    memory: float = 3e12  # bytes per second
    bandwidth: float = 370e9  # of messages, in each direction
    latency: float = 3.4e-6
    launch: float = 4e-6


@dataclass(frozen=True)
class SequenceParallelPlan:
    """Whether the exchange of a layer is hidden behind chunks of its product, and why. Times in seconds."""

    op: str
    #: The argument `chunks` of the layer: 1, or a multiple of the number of ranks.
    chunks: int
    product: float  #: of all rows, alone
    exchange: float  #: alone
    whole: float  #: the exchange and one product
    chunked: float  #: the best with chunks
    reason: str

    def __str__(self) -> str:
        times = f"whole {duration(self.whole)}, in chunks {duration(self.chunked)}"
        alone = f"product {duration(self.product)}, exchange {duration(self.exchange)}"
        return f"{self.op}: chunks={self.chunks}, {self.reason}\n  {times} ({alone})"


@lru_cache(maxsize=1024)
def plan_sequence_parallel(
    rows: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    ranks: int,
    *,
    op: str = OPS[0],
    rates: Rates = Rates(),
) -> SequenceParallelPlan:
    """Predicts `all_gather_linear` or `linear_reduce_scatter` with and without chunks, and selects.

    Args:
        rows: of all ranks: batch times sequence.
        in_features, out_features: of the product on a rank, whose weight is ``(out_features, in_features)``.
        dtype: of the tensors.
        ranks: in the group.
        op: "all_gather_linear", the default, or "linear_reduce_scatter".
        rates: of the device and its links; default: of an H100 in its node.

    Returns:
        A `SequenceParallelPlan`; ``print`` shows it. Chunks are selected if they are predicted to save 5 % or more.

    Raises:
        ValueError: for another `op`, or sizes below 0.
    """
    if op not in OPS or min(rows, in_features, out_features, ranks - 1) < 0:
        raise ValueError(
            f"plan_sequence_parallel: expected op one of {OPS}, sizes of at least 0 and ranks of at least 1, got "
            f"{op!r}, {rows} rows, {in_features} and {out_features} features, {ranks} ranks"
        )
    part, itemsize = rows / ranks, dtype.itemsize
    sent = part * itemsize * (in_features if op == OPS[0] else out_features)

    def multiply(count: float) -> float:
        moved = itemsize * (count * (in_features + out_features) + in_features * out_features)
        return rates.launch + max(2 * count * in_features * out_features / rates.flops, moved / rates.memory)

    def message(size: float) -> float:
        return rates.latency + size / rates.bandwidth

    product, exchange = multiply(rows), (ranks - 1) * message(sent)
    whole = product + exchange
    if ranks == 1:
        return SequenceParallelPlan(op, 1, product, 0.0, product, product, "one rank exchanges nothing")
    times = {}
    for count in CHUNKS_OF_PARTS:
        one, step = multiply(part / count), message(sent / count)
        chunks, own = (ranks - 1) * count, multiply(part)
        copied = 2 * rows * out_features * itemsize / rates.memory  # from the chunks to their places
        if op == OPS[0]:  # the last product ends after all others, or after the last message
            times[count] = max(own + chunks * one, max(own, step) + one + (chunks - 1) * max(one, step)) + copied
        else:
            times[count] = max(chunks * one + own, one + (chunks - 1) * max(one, step) + step)
    best = min(times, key=times.__getitem__)
    figures = op, best * ranks, product, exchange, whole, times[best]
    gain = 1 - times[best] / whole
    if gain >= LEAST_GAIN:
        return SequenceParallelPlan(*figures, f"{ranks * best} chunks save {gain:.0%}")
    small = multiply(part) * ranks > 1.5 * product
    why = f"products of {part:g} rows read the weights {ranks} times" if small else f"chunks save {max(gain, 0.0):.0%}"
    return SequenceParallelPlan(op, 1, *figures[2:], f"not worth it: {why}")
