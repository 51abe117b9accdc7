"""The Work of packing and unpacking a bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.model.evidence import SECTOR, Evidence, fit, line_through, sectors
from benchmarks.model.gpus import Gpu
from benchmarks.model.work import Amounts, Work


@dataclass(frozen=True)
class Pack:
    """A bucket of long, contiguous tensors."""

    op: str
    tensors: str  # dtype
    bucket: str
    elements: int
    entries: int

    @property
    def dtypes(self) -> str:
        source, target = (self.bucket, self.tensors) if self.op == "unpack" else (self.tensors, self.bucket)
        return f"{source} to {target}"

    def __str__(self) -> str:
        return f"{self.elements} in {self.entries}"


def bucket_work(evidence: Evidence, gpu: Gpu, pack: Pack) -> Work:
    points = [
        (float(case.split()[-1]), cost)
        for case, cost in evidence.bucket.items()
        if case.startswith(f"{pack.op} {pack.tensors} {pack.bucket} of ")
    ]
    of_element, _ = line_through(sorted(points, key=lambda point: point[0]))
    config = evidence.simt.bucket_config()
    element = {"float32": "float", "float16": "half_t", "bfloat16": "bfloat16_t"}[pack.bucket]
    if pack.op == "stats":  # one kernel, because there is no bucket
        element = "float"
    kernel = evidence.kernel(gpu, f"bucket_kernel<{('pack', 'unpack', 'stats').index(pack.op)}, {element}>")
    moved = sectors(of_element) * SECTOR
    # An iteration of a block covers the bytes that its threads have in flight.
    in_iteration = config["threads"] * config["bytes_in_flight"]
    iterations = math.ceil(config["block_elements"] * of_element["global_load_bytes"] / in_iteration)
    return Work(
        blocks=math.ceil(pack.elements / config["block_elements"]),
        blocks_per_sm=fit(kernel, gpu),
        iterations=iterations,
        iteration=Amounts(l2=moved * config["block_elements"] / iterations),
        outside=Amounts(),
        in_flight=1,
        memory_bytes=moved * pack.elements,
        launches=1 + math.ceil(pack.entries / config["table_entries"]),
        tail_waits=3,  # the block's sum, the block count, the sums of all blocks
    )
