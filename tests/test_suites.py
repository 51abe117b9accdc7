"""tools/suites.py: how the outcomes of PyTorch's own tests are judged, on tests that are written here."""

from __future__ import annotations

import functools
import io
import re
import sys
import unittest

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from suites import GPUsAreTheCPU, by_name, is_chosen, judge, last_error, reason_of, report, run_test


class Planted(unittest.TestCase):
    __test__ = False  # not by pytest

    def test_passes(self) -> None:
        pass

    def test_fails(self) -> None:
        self.fail("on purpose")

    def test_raises(self) -> None:
        raise ValueError("on purpose")

    @unittest.skip("no reason")
    def test_skipped(self) -> None:
        pass

    @unittest.expectedFailure
    def test_expected_to_fail(self) -> None:
        self.fail("on purpose")


TABLE = by_name({"a bug of theirs": "fails skipped", "a pattern": "rais*"})


@pytest.mark.parametrize(
    "name, outcome",
    [
        ("passes", ("passed", "")),
        ("fails", ("failed", "AssertionError: on purpose")),
        ("raises", ("failed", "ValueError: on purpose")),
        ("skipped", ("skipped", "no reason")),
        ("expected_to_fail", ("skipped", "expected to fail")),
    ],
)
def test_outcome(name: str, outcome: tuple[str, str]) -> None:
    assert run_test(Planted(f"test_{name}")) == outcome


def test_table_of_reasons() -> None:
    assert reason_of("test_fails", TABLE) == "a bug of theirs"
    assert reason_of("test_raises", TABLE) == "a pattern"
    assert reason_of("test_fail", TABLE) == reason_of("test_passes", TABLE) == ""
    assert all(is_chosen("test_fails", parts) for parts in (None, [], ["fail"], ["x", "fail"]))
    assert not is_chosen("test_fails", ["x"])


def test_verdicts() -> None:
    assert judge("failed", "E: why", "") == ("FAILED", "E: why")
    assert judge("failed", "E: why", "listed") == ("by design", "listed: E: why")
    assert judge("failed", "E: why", "listed", "needs GPU") == ("needs GPU", "listed: E: why")
    assert judge("skipped", "why", "listed") == judge("skipped", "why", "") == ("skipped", "why")
    for outcome in ("passed", "refused"):
        assert judge(outcome, "why", "") == (outcome, "why")
        assert judge(outcome, "why", "listed") == ("FAILED", "passed, but is listed: listed")


def test_last_error() -> None:
    text = "Traceback\nKeyError: 'a'\n  at\ntorch._dynamo.exc.Unsupported: x\nmy.OtherError: b\nframe #0: f + 0x1\n"
    assert last_error(text) == "my.OtherError: b"
    assert last_error("one\ntwo\n") == "two"


def printed(*names: str) -> tuple[int, list[str]]:
    """The exit status and the lines of a report."""

    def verdict(name: str) -> tuple[str, str]:
        return judge(*run_test(Planted(name)), reason_of(name, TABLE))

    output = io.StringIO()
    tests = [(name, functools.partial(verdict, name)) for name in (f"test_{each}" for each in names)]
    status = report(tests, "here", output)
    return status, re.sub(r" \d+(\.\d)? s\b", " 0 s", output.getvalue()).splitlines()


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed("passes", "fails", "skipped") == (
        0,
        [
            "[1/3] passed    test_passes 0 s",
            "[2/3] by design test_fails 0 s  a bug of theirs: AssertionError: on purpose",
            "[3/3] skipped   test_skipped 0 s  no reason",
            f"1 by design, 1 passed, 1 skipped in 0 s, torch {torch.__version__}, here",
        ],
    )
    monkeypatch.setitem(TABLE, "test_passes", "wrong")
    status, lines = printed("passes")
    assert (status, lines[0]) == (1, "[1/1] FAILED    test_passes 0 s  passed, but is listed: wrong")


def test_gpus_are_the_cpu() -> None:
    with GPUsAreTheCPU():
        tensors = [torch.ones(2, device="cuda"), torch.ones(2).cuda(), torch.ones(2).to("cuda:1"), torch.ones(2).to(0)]
        assert all(each.is_cpu for each in tensors)
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
