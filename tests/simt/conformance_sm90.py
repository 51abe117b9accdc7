"""References and inputs of the cases in conformance_sm90.cu and conformance_cluster.cu."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LANES = np.arange(32)
HEAD_WORDS = 8
OUTER, OUTER_BOX = (5, 3, 4, 3), (4, 2, 3, 2)  # sizes of dimensions 1 and up
BLOCKS = 4  # per cluster; the grid has two clusters

references: dict[str, Callable[[np.ndarray], np.ndarray]] = {}


def stored_matrices(x: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    g, t = LANES // 4, LANES % 4
    out = np.zeros((32, 8), np.uint16)  # rows of 16 bytes
    for i in range(count):
        matrix = np.zeros((8, 8), np.uint16)
        matrix[g, 2 * t], matrix[g, 2 * t + 1] = x[i * 32 + LANES] & 0xFFFF, x[i * 32 + LANES] >> 16
        out[(8 * i + np.arange(8)) * 5 % 32] = matrix.T if transposed else matrix
    return out.view(np.uint32).ravel()


for _count in (1, 2, 4):
    references[f"stmatrix_x{_count}"] = lambda x, count=_count: stored_matrices(x, count, False)
    references[f"stmatrix_x{_count}_trans"] = lambda x, count=_count: stored_matrices(x, count, True)

references["barrier_ring"] = lambda x: x.reshape(8, 32)[:, ::-1].ravel()
references["barrier_order"] = lambda x: np.concatenate([x[:1], x])
references["bulk_copies"] = lambda x: np.concatenate([x[31::-1], x[32:], x[31:32] ^ x[255:]])


@dataclass(frozen=True)
class Tile:
    """A TMA case, fully described by its name."""

    action: str
    rank: int
    row_bytes: int
    swizzle: int
    dtype: str

    @classmethod
    def named(cls, name: str) -> Tile:
        _, action, rank, row_bytes, swizzle, dtype = name.split("_")
        return cls(action, int(rank[0]), int(row_bytes), int(swizzle.replace("none", "swizzle0")[7:]), dtype)

    @property
    def element(self) -> int:
        return {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}[self.dtype]

    @property
    def bits(self) -> np.dtype:
        return np.dtype(f"u{self.element}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, outermost first."""
        more = 3 if self.action == "load" else 16 // self.element
        return (*reversed(OUTER[: self.rank - 1]), 2 * self.row_bytes // self.element + more)

    @property
    def pitch(self) -> int:
        return -(-self.shape[-1] * self.element // 16) * 16

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.pitch // self.element)

    @property
    def box(self) -> tuple[int, ...]:
        return (*reversed(OUTER_BOX[: self.rank - 1]), self.row_bytes // self.element)

    def tensor(self, x: np.ndarray) -> np.ndarray:
        """The tensor in the input as bits, padding included."""
        count = int(np.prod(self.padded_shape))
        return x[HEAD_WORDS:].view(self.bits)[:count].reshape(self.padded_shape).copy()

    def corner(self, x: np.ndarray) -> tuple[int, ...]:
        return tuple(int(c) for c in x[: self.rank][::-1].astype(np.int16))

    def swizzled(self, flat: np.ndarray) -> np.ndarray:
        """Reorders a box to its layout in shared memory; swizzling is its own inverse."""
        units = flat.view(np.uint8).reshape(-1, 16)
        at = np.arange(len(units))
        return units[at ^ at // 8 % max(self.swizzle // 16, 1)].ravel().view(flat.dtype)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if self.dtype == "bfloat16":
            total = (a.astype(np.uint32) << 16).view(np.float32) + (b.astype(np.uint32) << 16).view(np.float32)
            return (total.view(np.uint32) >> 16).astype(np.uint16)  # small integers: no rounding
        values = np.dtype(self.dtype)
        return (a.view(values) + b.view(values)).view(self.bits)

    def whole_numbers(self, rng: np.random.Generator, size: int) -> np.ndarray:
        values = rng.integers(-60, 61, size).astype(np.float32)
        if self.dtype == "bfloat16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(self.dtype).view(self.bits)

    def inside(self, x: np.ndarray) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(index in the box, index in the tensor) of all elements of the box that are inside the tensor."""
        corner = self.corner(x)
        pairs = ((i, tuple(c + j for c, j in zip(corner, i))) for i in itertools.product(*map(range, self.box)))
        return [(i, at) for i, at in pairs if all(0 <= c < size for c, size in zip(at, self.shape))]


def tma(name: str, x: np.ndarray) -> np.ndarray:
    tile = Tile.named(name)
    tensor = tile.tensor(x)
    if tile.action == "load":
        box = np.zeros(tile.box, tile.bits)
        for place, at in tile.inside(x):
            box[place] = tensor[at]
        return tile.swizzled(box.ravel()).view(np.uint32)
    start = HEAD_WORDS + tensor.nbytes // 4
    box = tile.swizzled(x[start:].view(tile.bits)).reshape(tile.box)
    pairs = tile.inside(x)
    if pairs:
        places, targets = (tuple(np.array(side).T) for side in zip(*pairs))
        tensor[targets] = box[places] if tile.action == "store" else tile.add(tensor[targets], box[places])
    return tensor.ravel().view(np.uint32)


def tma_inputs(name: str, words: int, rng: np.random.Generator) -> np.ndarray:
    """Inputs with a random corner: the box is often partly outside the tensor, in about a tenth of the runs completely.

    The hardware stops the kernel if the first coordinate is no multiple of 16 bytes, and if a coordinate of a store is
    negative."""
    tile = Tile.named(name)
    x = rng.integers(0, 2**32, words, dtype=np.uint32)
    if tile.action == "add":
        x[HEAD_WORDS:] = tile.whole_numbers(rng, (words - HEAD_WORDS) * 4 // tile.element).view(np.uint32)
    may_be_outside = int(rng.integers(4) == 0)
    for d, (size, box) in enumerate(zip(tile.shape[::-1], tile.box[::-1])):
        step = 16 // tile.element if d == 0 else 1
        lowest = 1 - box // step - may_be_outside if tile.action == "load" else 0
        highest = (size - 1) // step + may_be_outside
        x[d] = np.int32(step * rng.integers(lowest, highest + 1)).view(np.uint32)
    return x


def cluster_loads(x: np.ndarray) -> np.ndarray:
    ids = np.stack([np.arange(2 * BLOCKS) % BLOCKS, np.full(2 * BLOCKS, BLOCKS)], 1).ravel()
    rows = x.reshape(2, BLOCKS, 8, 4)
    return np.concatenate([ids.astype(np.uint32), np.roll(rows, -1, axis=1)[:, :, ::-1].ravel()])


def cluster_vectors(x: np.ndarray) -> np.ndarray:
    rows = x.reshape(2, BLOCKS, 32)
    before, after = np.roll(rows, 1, axis=1), np.roll(rows, -1, axis=1)
    pairs = after.reshape(2, BLOCKS, 16, 2)[:, :, ::-1].reshape(rows.shape)
    return np.stack([before, before, before, pairs, after[:, :, ::-1]], axis=2).ravel()


def cluster_stores(x: np.ndarray) -> np.ndarray:
    return np.roll(x.reshape(2, BLOCKS, 32), -1, axis=1)[:, :, ::-1].ravel()


def multicast(x: np.ndarray) -> np.ndarray:
    """Block b of a cluster receives all rows of the cluster except row b ^ 2."""
    out = np.repeat(x.reshape(2, 1, BLOCKS, 32), BLOCKS, axis=1)
    for block in range(BLOCKS):
        out[:, block, block ^ 2] = 0
    return out.ravel()


def programmatic_launch(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[:32], x[32:] + x[31::-1]])


references |= {
    "cluster_loads": cluster_loads,
    "cluster_stores": cluster_stores,
    "cluster_vectors": cluster_vectors,
    "multicast": multicast,
    "programmatic_launch": programmatic_launch,
}
for _name in (
    "tma_load_1d_64_none_float32",
    "tma_load_2d_16_none_uint8",
    "tma_load_2d_32_swizzle32_bfloat16",
    "tma_load_2d_64_swizzle64_float16",
    "tma_load_2d_128_swizzle128_float16",
    "tma_load_2d_128_swizzle128_uint8",
    "tma_load_3d_128_swizzle128_float32",
    "tma_load_3d_48_none_float16",
    "tma_load_4d_64_swizzle64_bfloat16",
    "tma_load_5d_32_swizzle32_float16",
    "tma_load_5d_128_swizzle128_float32",
    "tma_store_1d_64_none_float32",
    "tma_store_2d_128_swizzle128_bfloat16",
    "tma_store_2d_128_swizzle128_uint8",
    "tma_store_3d_64_swizzle64_float16",
    "tma_store_4d_32_swizzle32_uint8",
    "tma_store_5d_16_none_float16",
    "tma_add_1d_128_swizzle128_float32",
    "tma_add_2d_64_swizzle64_float16",
    "tma_add_3d_32_swizzle32_bfloat16",
    "tma_add_5d_32_none_float32",
):
    references[_name] = lambda x, name=_name: tma(name, x)
