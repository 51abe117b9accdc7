"""Predictions of attention with block masks: what a listed block costs beside one without a mask."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from benchmarks.model.attention_work import ListedProblem, PackedProblem
from benchmarks.model.gpus import Gpu
from benchmarks.model.prediction import Prediction, predict_attention
from benchmarks.suites.bench_attention import Problem
from benchmarks.suites.bench_masks import Mask

LENGTH, WIDTH = 16384, 2048


@dataclass(frozen=True)
class MaskPrediction:
    """Predictions of a pass with a block mask, with no mask, and of the same sequences in a packed tensor."""

    listed: Prediction
    dense: Prediction
    packed: Prediction | None

    @property
    def of_dense(self) -> float:
        """The rate of the products of listed blocks, relative to that of all blocks without a mask."""
        return self.listed.flops / self.listed.seconds / (self.dense.flops / self.dense.seconds)

    @property
    def of_packed(self) -> float | None:
        return self.packed.seconds / self.listed.seconds if self.packed else None


@functools.lru_cache(maxsize=16)
def lists_of(mask: Mask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    blocks = mask.blocks("cpu")
    return tuple(blocks.kv_counts[0, 0].tolist()), tuple(blocks.q_counts[0, 0].tolist())


def predict_mask(gpu: Gpu, mask: Mask, dim: int, backward: bool) -> MaskPrediction:
    sizes = (1, mask.length, WIDTH // dim, dim)
    packed = None
    if mask.name == "causal documents":
        lengths = tuple(end - begin for begin, end in zip(mask.ends, mask.ends[1:]))
        packed = predict_attention(gpu, PackedProblem(*sizes, lengths=lengths), backward)
    return MaskPrediction(
        predict_attention(gpu, ListedProblem(*sizes, lists=lists_of(mask)), backward),
        predict_attention(gpu, Problem(*sizes), backward),
        packed,
    )
