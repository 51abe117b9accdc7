"""When a rank dies, hangs or stops: every other one gets an error in time that says which, and applies nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from faulty_training import STEPS, TIMEOUT

RANKS = 3

GONE = r"rank 2 gives no sign of life"
ENDINGS = {
    "dies": GONE,
    "dies in backward": GONE,
    "dies before the norm": GONE,
    "dies before the mean of the loss": GONE,
    "stops": GONE,
    "hangs": rf"rank 2 is not in a backward pass; it has done {STEPS}",
    "hangs in backward": rf"rank 2 computes gradients in backward pass {STEPS + 1}; bucket 1 of 3 lacks 1\.weight",
}


@pytest.mark.parametrize("fault", ENDINGS)
def test_every_survivor_says_who_is_missing(fault: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(ROOT / "tests" / "faulty_training.py"), str(tmp_path), str(RANKS), fault]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for rank in range(RANKS - 1):
        output = (tmp_path / str(rank)).read_text()
        match = re.search(r"^ERROR ([\d.]+) (.*)$", output, re.MULTILINE)
        assert match, output
        seconds, message = float(match[1]), match[2]
        # The timeout of the group, a few intervals of the watch to ask the others, and what a busy machine takes.
        assert seconds < TIMEOUT + 4, message
        what = rf"the sum of bucket \d, \d\.\w+ to \d\.\w+, of backward pass {STEPS + 1}"
        if "norm" in fault:
            what = f"the norm of the gradients of backward pass {STEPS + 1}"
        if "loss" in fault:
            what = "the mean of the loss"
        beginning = "cuda_ext.distributed.BucketedDataParallel: expected 3 ranks to take part in "
        assert re.match(rf"{re.escape(beginning)}{what}, got: .", message), message
        assert re.search(ENDINGS[fault], message), message
        assert f"rank {1 - rank} " in message
        assert "the process group is of no use any more" in message
