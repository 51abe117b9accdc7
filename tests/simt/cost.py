"""Golden counters: the emulator's counts for each kernel, the same on every machine, so that reviews show changes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection

from harness import HERE

RECORD = "CUDA_EXT_RECORD_COUNTERS"


def is_recording() -> bool:
    return os.environ.get(RECORD) == "1"


def assert_same_cost(name: str, measured: dict[str, dict[str, int]], left_out: Collection[str] = ()) -> None:
    """Compares counters, by case, with golden_counters/<name>.json; CUDA_EXT_RECORD_COUNTERS=1 updates the file. The
    cases `left_out` are recorded, but were not measured."""
    path = HERE / "golden_counters" / f"{name}.json"
    if is_recording():
        assert not left_out
        path.parent.mkdir(exist_ok=True)
        lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(cost)}" for case, cost in measured.items())
        path.write_text(f"{{\n{lines}\n}}\n")
    assert path.exists(), f"{path.name} is missing; run this test with {RECORD}=1"
    recorded = json.loads(path.read_text())
    changed = [case for case in {**recorded, **measured} if recorded.get(case) != measured.get(case)]
    changed = [case for case in changed if case not in left_out]
    assert not changed, f"the counters have changed; if that is intended, run this test with {RECORD}=1:\n" + "\n".join(
        f"{case}: {recorded.get(case)} -> {measured.get(case)}" for case in changed
    )
