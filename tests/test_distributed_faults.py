"""When a rank dies, hangs or stops, every other rank gets an error in time that names it, and applies nothing."""

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
GONE = r"does not respond"
ENDINGS = {
    "dies": GONE,
    "dies in backward": GONE,
    "dies before the norm": GONE,
    "dies before the mean of the loss": GONE,
    "stops": GONE,
    "hangs": rf"is not in a backward pass; it has completed {STEPS}$",
    "hangs after forward": rf"is not in a backward pass; it has completed {STEPS}, and no backward pass has reached "
    "its last forward pass$",
    "hangs in backward": rf"computes gradients in backward pass {STEPS + 1}; bucket 1 of 3 lacks 1\.weight",
}
NO_STORE = "the store of the process group, on the host of rank 0 of the job, does not answer"


def errors_of_survivors(folder: Path, fault: str, faulty: tuple[int, ...]) -> dict[int, str]:
    """The error of each rank except the ``faulty`` ones, after common checks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    # In shared memory the norm needs no separate collective.
    algorithm = "all_reduce" if fault == "dies before the norm" else "auto"
    command = [sys.executable, str(ROOT / "tests" / "faulty_training.py")]
    arguments = [str(folder), str(RANKS), fault, algorithm, *map(str, faulty)]
    process = subprocess.Popen([*command, *arguments], env=environment, start_new_session=True)
    try:
        process.wait(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    messages = {}
    for rank in set(range(RANKS)).difference(faulty):
        output = (folder / str(rank)).read_text()
        match = re.search(r"^ERROR ([\d.]+) (.*)$", output, re.MULTILINE)
        assert match, output
        seconds, message = float(match[1]), match[2]
        # The timeout of the group, and a few intervals of the watch to read statuses; not twice the timeout.
        assert seconds < TIMEOUT + 4, message
        what = rf"the sum of bucket \d, \d\.\w+ to \d\.\w+, of backward pass {STEPS + 1}"
        if "norm" in fault:
            what = f"the norm of the gradients of backward pass {STEPS + 1}"
        if "loss" in fault:
            what = "the mean of the loss"
        beginning = "cuda_ext.distributed.BucketedDataParallel: expected 3 ranks to take part in "
        assert re.match(rf"{re.escape(beginning)}{what}, got: .", message), message
        assert "the process group can no longer be used; exit the process" in message
        messages[rank] = message
    return messages


def what_others_do(message: str) -> dict[int, str]:
    match = re.search(r"Status of the other ranks: (.*)\. The gradients of this step", message)
    assert match, message
    _, *parts = re.split(r"(?:^|; )(?:each of ranks|rank) ((?:\d+(?:, | and )?)+) ", match[1])
    return {int(rank): doing for ranks, doing in zip(parts[::2], parts[1::2]) for rank in re.findall(r"\d+", ranks)}


@pytest.mark.sampled(cases=3, slow=True)
@pytest.mark.parametrize("fault", ENDINGS)
def test_every_survivor_says_who_is_missing(fault: str, tmp_path: Path) -> None:
    for rank, message in errors_of_survivors(tmp_path, fault, (2,)).items():
        others = what_others_do(message)
        assert others.keys() == {2, 1 - rank}, message
        assert re.match(ENDINGS[fault], others[2]), message
        assert NO_STORE not in message


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("fault", ["dies", "stops"])
def test_the_rank_of_the_store_fails(fault: str, tmp_path: Path) -> None:
    for rank, message in errors_of_survivors(tmp_path, fault, (0,)).items():
        others = what_others_do(message)
        assert others.keys() == {0, 3 - rank}, message
        assert re.match(GONE, others[0]), message
        assert f"; {NO_STORE}. The gradients" in message


@pytest.mark.sampled
def test_both_ranks_with_a_board_die(tmp_path: Path) -> None:
    (message,) = errors_of_survivors(tmp_path, "dies", (0, 2)).values()
    assert f"{NO_STORE}, and neither does the last rank, which has a copy; probably rank 0 has ended" in message
