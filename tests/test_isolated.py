"""Cases in child processes: order, several children, and what happens if one does not start. test_correct.py and
test_record.py rehearse faults of cases."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import connection

import pytest

from benchmarks.gpu_check import isolated
from benchmarks.gpu_check.isolated import Answer

CASES = [f"case {i}" for i in range(6)]


def texts(results) -> dict[str, str]:
    return {result.case: result.answer.text for result in results}


def test_one_child_answers_all_cases_in_order() -> None:
    results = list(isolated.run({"a": CASES}, lambda group, case: Answer(True, f"{group} {case} {os.getpid()}")))
    assert [result.case for result in results] == CASES
    assert len({result.answer.text.split()[-1] for result in results}) == 1 != os.getpid()


def test_groups_and_lanes_run_side_by_side() -> None:
    def work(group: str, case: str) -> Answer:
        time.sleep(1.0)
        return Answer(True, str(os.getpid()))

    began = time.monotonic()
    results = list(isolated.run({"a": CASES, "b": CASES[:3]}, work, lanes=3))
    assert time.monotonic() - began < 6  # one after the other it would be 9
    assert sorted((result.group, result.case) for result in results) == sorted(
        [*(("a", case) for case in CASES), *(("b", case) for case in CASES[:3])]
    )
    assert len({result.answer.text for result in results}) == 6


def test_a_spoilt_process_is_replaced() -> None:
    found = texts(isolated.run({"a": CASES}, lambda _, case: Answer(False, str(os.getpid()), spoilt=case == "case 2")))
    assert found["case 0"] == found["case 2"] != found["case 3"] == found["case 5"]


def test_patience_for_the_start_is_not_that_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "LAST_WORDS", 60.0)

    def run(seconds: float) -> dict[str, str]:
        work = lambda _, case: Answer(True, "done")  # noqa: E731
        prepare = lambda: time.sleep(seconds)  # noqa: E731
        return texts(isolated.run({"a": ["one"]}, work, prepare=prepare, patience=1.0, start_patience=5))

    assert run(2.0) == {"one": "done"}
    assert run(99.0)["one"].startswith("HUNG: no start of a process within 5 s, in <lambda> (test_isolated.py:")


def test_a_hang_has_a_place_whatever_the_parent_does_with_sigabrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest, it enables faulthandler; a library may then put its handler away."""
    monkeypatch.setattr(isolated, "LAST_WORDS", 60.0)

    def parent(pipe: connection.Connection) -> None:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        pipe.send(texts(isolated.run({"a": ["one"]}, lambda _, case: time.sleep(99), patience=1.0))["one"])

    ours, theirs = isolated.FORK.Pipe()
    isolated.FORK.Process(target=parent, args=(theirs,)).start()
    theirs.close()
    assert ours.recv().startswith("HUNG: no answer within 1 s, in <lambda> (test_isolated.py:")


def test_a_process_that_cannot_start() -> None:
    def prepare() -> None:
        raise RuntimeError("no driver")

    found = texts(isolated.run({"a": CASES[:2]}, lambda _, case: Answer(True, ""), prepare=prepare))
    assert found == dict.fromkeys(CASES[:2], "FAILED: the process cannot start: no driver")


def test_if_several_of_a_kind_hang_the_others_are_not_run() -> None:
    def work(_: str, case: str) -> Answer:
        if case.startswith("bad"):
            time.sleep(99)
        return Answer(True, "done")

    cases = ["bad 1", "good 1", "bad 2", "bad 3", "good 2", "bad 4"]
    found = texts(isolated.run({"a": cases}, work, kind=lambda case: case[:4].strip(), patience=1.0))
    assert found["good 1"] == found["good 2"] == "done"
    assert all(found[name].startswith("HUNG") for name in ("bad 1", "bad 2"))
    assert found["bad 3"] == found["bad 4"] == "NOT RUN: others of its kind have hung"


def test_if_children_do_not_start_no_more_are_tried() -> None:
    results = isolated.run(
        {"a": CASES}, lambda _, case: Answer(True, ""), prepare=lambda: time.sleep(9), start_patience=0.3, patience=0.3
    )
    found = list(texts(results).values())
    assert [text[:4] for text in found] == ["HUNG"] * 2 + ["NOT "] * 4


def test_no_child_is_left_if_the_caller_stops() -> None:
    results = isolated.run({"a": CASES}, lambda _, case: Answer(True, str(os.getpid())))
    child = int(next(results).answer.text)
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
