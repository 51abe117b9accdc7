"""The quick cases of the GPU check: the emulated kernels pass, and each kind of fault costs one case and is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from conftest import ROOT

import cuda_ext
from benchmarks.gpu_check import correct, isolated, product_cases
from benchmarks.gpu_check.product_cases import Case, Results
from cuda_ext import _emulator, testing

Output = pytest.CaptureFixture[str]


def run_program(program: str) -> list[str]:
    """The output of a program in a process of its own: children of one whose autograd has run cannot use theirs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.sampled
def test_the_kernels_are_right() -> None:
    lines = run_program("from benchmarks.gpu_check import correct; assert correct.main(['all', 'simt']) == 0")
    cases, summaries = lines[: -len(correct.FAMILIES)], lines[-len(correct.FAMILIES) :]
    for family, last in zip(correct.FAMILIES, summaries):
        own = [line for line in cases if line.startswith(f"{family}: ")]
        assert all(re.fullmatch(r".*: right, errors up to \d\.\de[+-]\d\d \(\d+\.\d s\)", line) for line in own)
        assert len(own) >= 8 and last == f"correct: {family}: {len(own)} right, 0 not right"


@pytest.mark.parametrize("family", correct.FAMILIES)
def test_large_cases_are_more(family: str) -> None:
    small, large = ([name for name, _ in correct.FAMILIES[family](large)] for large in (False, True))
    assert set(small) < set(large)
    assert len(set(large)) == len(large)


@pytest.mark.sampled
def test_every_plan_of_products_is_run() -> None:
    """A plan that does not fit, and a name that the table of plans does not know, raise. The largest are left out."""
    with testing.emulated(product_cases.EMULATED[0], processors=product_cases.EMULATED[1]):
        for name, case in product_cases.plan_cases(True):
            if not re.search(r"\b\d{5}\b|\b4104\b", name):
                answer = correct.verdict(name, case)
                assert answer.good, f"{name}: {answer.text}"


def test_the_plans_cover_every_kernel() -> None:
    names = [name for name, _ in product_cases.plan_cases(True)]
    wgmma = [name.partition(",")[0].split()[1:] for name in names if name.startswith("wgmma")]
    assert {words[0] for words in wgmma} == set(product_cases.TILES_SM90)
    of_dtype = {dtype: {words[2] for words in wgmma if words[1] == dtype} for dtype in ("bfloat16", "float16", "tf32")}
    assert of_dtype == {"bfloat16": {"kk", "kn", "mk", "mn"}, "float16": {"kk", "kn", "mk", "mn"}, "tf32": {"kk"}}
    assert {word for words in wgmma for word in words[3:]} == {"c2", "k2", "k4", "k8", "s2", "s3"}
    assert sum(name.startswith("mma.sync") for name in names) == 27


def test_a_plan_that_does_not_fit_is_an_error() -> None:
    with testing.emulated("sm_90a"):
        answer = correct.verdict(
            "", lambda: product_cases.by_plan(328, 72, 64, torch.bfloat16, "nn", (4, 1, 1, 1, False))
        )
    assert answer.text.startswith(
        "FAILED: expected the plan 64x16, (1, 1, 1, False); what would run: 328 x 72 x 64 bfl"
    )


WRONG = """
import torch
import cuda_ext
from benchmarks.gpu_check import correct
from cuda_ext import testing

def wrong(*tensors, **options):
    out = testing.reference_linear(*tensors, **options)
    return out + torch.zeros_like(out).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(9.0).to(out))

cuda_ext.linear = wrong
assert correct.check(["gemm", "bucket"], "simt", "s") == 1
"""


def test_wgmma_is_not_asked_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_cases, "EMULATED", ("sm_80", 4))
    name, case = next(product_cases.plan_cases(False))
    with testing.emulated("sm_80", processors=4):
        answer = correct.verdict(name, case)
    assert answer.good and answer.text == "not here: the device has no wgmma; it is sm_80"


def test_a_wrong_element_is_named() -> None:
    lines = run_program(WRONG)
    found = [line for line in lines if "WRONG" in line]
    assert found[0].startswith(
        "gemm: linear bias gelu 33 x 72 x 40: WRONG: output: 1 of 2376 elements are wrong by more than "
    )
    assert ", the first at (3, 5): expected " in found[0]
    bad = [f"linear {words} 33 x 72 x 40 (WRONG)" for words in ("bias gelu", "bias", "residual silu")]
    assert re.fullmatch(rf"correct: gemm: \d+ right, 3 not right: {re.escape('; '.join(bad))}", lines[-2])
    assert lines[-1] == "correct: bucket: 5 right, 0 not right"


def test_an_error_of_forward_is_not_attributed_to_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*tensors, **options):
        raise AssertionError("the forward was run")

    monkeypatch.setattr(cuda_ext, "flash_attention", broken)
    with testing.emulated("sm_90a"):
        verdicts = [correct.verdict(*next(correct.attention_cases(False, backward))).text for backward in (False, True)]
    assert verdicts[0] == "FAILED: the forward was run" and verdicts[1].startswith("right")


# Rehearsals of faults: a family of planted cases


def right() -> Results:
    return {"output": (torch.ones(3), torch.ones(3).double())}


def planted(monkeypatch: pytest.MonkeyPatch, **cases) -> None:
    def family(large: bool) -> Iterator[Case]:
        yield from cases.items()

    monkeypatch.setitem(correct.FAMILIES, "planted", family)


def answers(capsys: Output) -> tuple[dict[str, str], str]:
    """The texts by case, and the summary."""
    *lines, last = capsys.readouterr().out.splitlines()
    parts = [line.removeprefix("planted: ").partition(": ") for line in lines]
    return {name: re.sub(r" \(\d+\.\d s\)$", "", text) for name, _, text in parts}, last


def test_each_fault_costs_one_case(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def hangs() -> Results:
        time.sleep(99)
        return {}

    def crashes() -> Results:
        os.kill(os.getpid(), signal.SIGSEGV)
        return {}

    def raises() -> Results:
        raise RuntimeError("a reason\nand much more")

    def wrong() -> Results:
        return {"output": (torch.zeros(3), torch.ones(3).double())}

    cases = {"first": right, "hangs": hangs, "second": right, "crashes": crashes, "third": right}
    planted(monkeypatch, **cases, exits=lambda: os._exit(3), raises=raises, wrong=wrong, last=right)
    began = time.monotonic()
    monkeypatch.setattr(isolated, "LAST_WORDS", 60.0)
    assert correct.check(["planted"], "simt", patience=3.0) == 1
    assert time.monotonic() - began < 60
    found, last = answers(capsys)
    assert list(found) == [*cases, "exits", "raises", "wrong", "last"]
    assert all(found[name].startswith("right") for name in ("first", "second", "third", "last"))
    assert re.match(r"HUNG: no answer within 3 s, in hangs \(test_correct\.py:\d+\), called by verdict", found["hangs"])
    assert re.match(r"CRASHED: ended by SIGSEGV, in crashes \(test_correct\.py:\d+\)", found["crashes"])
    assert found["exits"] == "CRASHED: exit status 3"
    assert found["raises"] == "FAILED: a reason"
    bad = "hangs (HUNG); crashes (CRASHED); exits (CRASHED); raises (FAILED); wrong (WRONG)"
    assert last == f"correct: planted: 4 right, 5 not right: {bad}"


def test_a_lost_gpu_costs_one_case(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    is_lost = []

    def loses() -> Results:
        is_lost.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand much more")

    def settle() -> None:
        if is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(correct, "settle", settle)
    planted(monkeypatch, loses=loses, later=lambda: right() if not is_lost else loses())
    assert correct.check(["planted"], "simt") == 1
    found, last = answers(capsys)
    assert found["loses"] == "FAILED: CUDA error: an illegal memory access was encountered"
    assert found["later"].startswith("right")
    assert last == "correct: planted: 1 right, 1 not right: loses (FAILED)"


def test_head_dims_that_are_not_in_the_build_are_no_errors(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def left_out() -> Results:
        raise RuntimeError("flash_attention: expected head dims whose CUDA kernels are in this library, those of 64")

    planted(monkeypatch, a=left_out, b=right)
    assert correct.check(["planted"], "simt") == 0
    found, last = answers(capsys)
    assert found["a"].startswith("not here: flash_attention: expected")
    assert last == "correct: planted: 1 right, 1 not here, 0 not right"
    assert correct.check(["planted"], "simt", "a") == 1  # nothing was right


def test_on_sigterm_it_says_what_it_knows(capsys: Output) -> None:
    program = """
import sys, time
from benchmarks.gpu_check import correct
from test_correct import right
correct.FAMILIES["planted"] = lambda large: iter([("first", right), ("hangs", lambda: time.sleep(99)), ("c", right)])
sys.exit(correct.main(["planted", "simt"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("planted: first: right")
    os.killpg(process.pid, signal.SIGTERM)
    rest = process.stdout.read().splitlines()
    assert process.wait(30) == 1
    assert rest == ["correct: stopped before the end", "correct: planted: 1 right, 2 not run, 0 not right"]


def test_without_a_gpu_every_case_says_so(capsys: Output) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert correct.check(["bucket"], "cuda", "stats") == 1
    *cases, last = capsys.readouterr().out.splitlines()
    assert all(": FAILED: the process cannot start: " in line for line in cases)
    assert last.startswith("correct: bucket: 0 right, 2 not right: stats short float32 (FAILED); ")


@pytest.mark.sampled
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("capability", "processors"), [(90, 132), (80, 108)])
def test_large_cases_cover_split_and_unsplit_kernels(capability: int, processors: int, backward: bool) -> None:
    """On an H100 and an A100: split kernels store their results through other code."""
    choose = _emulator.load().attention_choice
    splits: dict[int, set[bool]] = {}
    for name, _ in correct.attention_cases(True, backward):
        found = re.fullmatch(r"\w+ (\w+) B=(\d+) S=(\d+) H=(\d+)/(\d+) D=(\d+)/(\d+).*", name)
        assert found
        batch, length, heads, heads_kv, dim, dim_v = map(int, found.groups()[1:])
        has_kernel = dim % 8 == 0 == dim_v % 8 and max(dim, dim_v) <= (
            128 if backward and found[1] == "float32" else 256
        )
        if not has_kernel:  # padded or composed
            continue
        window = (-1, 0 if "causal" in name else -1)
        sizes = ((length, length), (heads, heads_kv), (dim, dim_v), batch)
        choice = choose(backward, found[1], *sizes, window, "block_mask" in name, capability, processors)
        splits.setdefault(choice.tile["dim"], set()).add(choice.splits > 1)
    assert splits == {dim: {False, True} for dim in (64, 96, 128, 192, 256)}
