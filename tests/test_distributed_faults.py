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


def outputs_of_survivors(
    folder: Path, fault: str, algorithm: str, ranks: int, faulty: tuple[int, ...]
) -> dict[int, str]:
    """What each rank except the ``faulty`` ones has written."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(ROOT / "tests" / "faulty_training.py")]
    arguments = [str(folder), str(ranks), fault, algorithm, *map(str, faulty)]
    process = subprocess.Popen([*command, *arguments], env=environment, start_new_session=True)
    try:
        process.wait(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return {rank: (folder / str(rank)).read_text() for rank in set(range(ranks)).difference(faulty)}


def error_in(output: str) -> str:
    """The error that a rank has written, in time."""
    match = re.search(r"^ERROR ([\d.]+) (.*)$", output, re.MULTILINE)
    assert match, output
    seconds, message = float(match[1]), match[2]
    # The timeout of the group, and a few intervals of the watch to read statuses; not twice the timeout.
    assert seconds < TIMEOUT + 4, message
    assert "the process group can no longer be used; exit the process" in message.replace("The", "the")
    return message


def errors_of_survivors(folder: Path, fault: str, faulty: tuple[int, ...]) -> dict[int, str]:
    """The error of each rank except the ``faulty`` ones, after common checks."""
    # In shared memory the norm needs no separate collective.
    algorithm = "all_reduce" if fault == "dies before the norm" else "auto"
    messages = {}
    for rank, output in outputs_of_survivors(folder, fault, algorithm, RANKS, faulty).items():
        message = error_in(output)
        what = rf"the sum of bucket \d, \d\.\w+ to \d\.\w+, of backward pass {STEPS + 1}"
        if "norm" in fault:
            what = f"the norm of the gradients of backward pass {STEPS + 1}"
        if "loss" in fault:
            what = "the mean of the loss"
        beginning = "cuda_ext.distributed.BucketedDataParallel: expected 3 ranks to take part in "
        assert re.match(rf"{re.escape(beginning)}{what}, got: .", message), message
        messages[rank] = message
    return messages


def what_others_do(message: str) -> dict[int, str]:
    match = re.search(r"Status of the other ranks: (.*)\. The (?:gradients of this step|process group)", message)
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


NUMBERS, ROWS, RESULTS = "the numbers of rows", "the rows for experts", "the results of experts"
KEYS, PARTS = "keys and values", "the parts of the input"
IN_CHUNKS = rf"{PARTS}, to rank \d and from rank \d"
LAST_CALL = "exchanges nothing; the last call of {} that it has begun is call"
OPS = {
    "experts": "mixture_of_experts",
    "gathered rows": "all_gather_linear",
    "rows in chunks": "all_gather_linear",
    "ring": "ring_attention",
}
# What the others wait for, in which call, and the last call that the rank at fault has begun.
FAULTS_OF_LAYERS = {
    ("experts", "dies before the first call"): (NUMBERS, 1, None),
    ("experts", "dies before forward"): (NUMBERS, STEPS + 1, None),
    ("experts", "dies between two exchanges"): (ROWS, STEPS + 1, None),
    ("experts", "dies in backward"): (f"the gradients of {RESULTS}", STEPS + 1, None),
    ("experts", "hangs before forward"): (NUMBERS, STEPS + 1, STEPS),
    ("experts", "hangs between two exchanges"): (ROWS, STEPS + 1, STEPS + 1),
    ("experts", "hangs in backward"): (f"the gradients of {RESULTS}", STEPS + 1, STEPS + 1),
    ("gathered rows", "dies before forward"): (PARTS, STEPS + 1, None),
    ("gathered rows", "hangs before forward"): (PARTS, STEPS + 1, STEPS),
    ("rows in chunks", "dies before forward"): (IN_CHUNKS, STEPS + 1, None),
    ("rows in chunks", "hangs before forward"): (IN_CHUNKS, STEPS + 1, STEPS),
    ("rows in chunks", "dies in backward"): (PARTS, STEPS + 1, None),
    ("ring", "dies before forward"): (KEYS, STEPS + 1, None),
    ("ring", "dies between two exchanges"): (KEYS, STEPS + 1, None),
    ("ring", "dies in backward"): (f"{KEYS} for backward", STEPS + 1, None),
    ("ring", "hangs before forward"): (KEYS, STEPS + 1, STEPS),
    ("ring", "hangs between two exchanges"): (KEYS, STEPS + 1, STEPS + 1),
    ("ring", "hangs in backward"): (f"{KEYS} for backward", STEPS + 1, STEPS + 1),
}


@pytest.mark.sampled(cases=4, slow=True)
@pytest.mark.parametrize(("layer", "fault"), FAULTS_OF_LAYERS)
def test_layers_of_ranks_say_who_is_missing(layer: str, fault: str, tmp_path: Path) -> None:
    what, call, last_call = FAULTS_OF_LAYERS[layer, fault]
    op = OPS[layer]
    doing = GONE if last_call is None else f"{LAST_CALL.format(op)} {last_call}$"
    outputs = outputs_of_survivors(tmp_path, fault, layer, 4, (2,))
    for rank, output in outputs.items():
        message = error_in(output)
        beginning = f"cuda_ext::{op}: expected 4 ranks to take part in the exchange of {what}"
        assert re.match(rf"{beginning}, of call {call}, got: ", message), message
        others = what_others_do(message)
        assert others.keys() == {0, 1, 2, 3} - {rank}, message
        assert re.match(doing, others[2]), message
        assert all(re.search(what, others[other]) for other in others.keys() - {2}), message
    assert len(outputs) == 3


@pytest.mark.sampled
def test_experts_of_ranks_wait_for_a_late_one_and_log_it(tmp_path: Path) -> None:
    """For less than the timeout, and longer than half of it."""
    outputs = outputs_of_survivors(tmp_path, "is late", "experts", 4, (2,))
    for output in outputs.values():
        assert "DONE" in output
        assert f"rank 2 {LAST_CALL.format('mixture_of_experts')} {STEPS}" in output
    assert len(outputs) == 3
