"""Presentation of measurements: plots, page, comparison, the README's section and the terminal table."""

from __future__ import annotations

import contextlib
import dataclasses
import html.parser
import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import matplotlib.text
import pytest
from benchmark_samples import ABSENT, CPU, GPU, sample, write

from benchmarks.presentation import (
    compare,
    drawing,
    formatting,
    grouping,
    plots,
    ratio_plots,
    readme,
    report,
    size_plots,
    table,
)
from benchmarks.presentation.sides import REFERENCES
from benchmarks.results import OURS, Measurement, ResultsError, geometric_means, read

EVIL = '<script>document.title="owned"</script><img src=x onerror="document.title=\'owned\'">&"\''
SIDES = {"gemm": {"torch.matmul", "torch", "torch.compile"}, "attention": {"SDPA FLASH", "SDPA MATH"}}


def changed(m: Measurement, **values: object) -> Measurement:
    return dataclasses.replace(m, **values)


@pytest.fixture(scope="module")
def cpu() -> list[Measurement]:
    return sample("cpu")


@pytest.fixture(scope="module")
def drawn(cpu: list[Measurement]) -> dict[str, plots.Figure]:
    return plots.figures(cpu)


# Plots


def texts(figure: plots.Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def legends(figure: plots.Figure) -> list[set[str]]:
    return [{text.get_text() for text in legend.get_texts()} for legend in figure.legends]


@pytest.mark.parametrize("name", ["speed", "roofline"])
def test_legends_name_the_sides_of_each_suite(drawn: dict[str, plots.Figure], name: str) -> None:
    shown = legends(drawn[name])
    assert shown[:2] == [{OURS, size_plots.CEILING} | SIDES["gemm"], {OURS, size_plots.CEILING} | SIDES["attention"]]
    assert not any(ABSENT.keys() & sides for sides in shown), "a side without any time has no line"


def test_speed_shows_what_was_measured(cpu: list[Measurement], drawn: dict[str, plots.Figure]) -> None:
    (panel,) = [
        axes for axes in drawn["speed"].axes if axes.get_title(loc="left") == "gemm\nforward · float32 · squares"
    ]
    lines = {line.get_label(): line for line in panel.lines}
    assert lines.keys() == {OURS, "torch.matmul", size_plots.CEILING}
    for side in (OURS, "torch.matmul"):
        wanted = [
            m for m in cpu if (m.op, m.dtype, m.group, m.side) == ("gemm", "float32", "squares", side)
        ]  # fmt: skip
        assert list(lines[side].get_xdata()) == [m.size for m in wanted]
        assert list(lines[side].get_ydata()) == pytest.approx([m.flops / m.seconds / 1e9 for m in wanted])
    assert panel.get_ylabel() == "GFLOP/s"
    assert lines[size_plots.CEILING].get_linestyle() == "--"
    assert max(lines[size_plots.CEILING].get_ydata()) == pytest.approx(140.0)


def test_a_case_without_operations_is_plotted_by_its_time() -> None:
    base = Measurement("overhead", "linear", "forward", "calls", "", "float32", OURS, "cpu", size_name="M")
    figure = plots.figures([changed(base, case=str(n), size=float(n), seconds=n * 1e-6) for n in (1, 10)])["speed"]
    assert figure.axes[0].get_ylabel() == "seconds"
    assert figure.axes[0].get_yscale() == "log"


def test_ratio_map_has_every_ratio_and_every_reason(cpu: list[Measurement], drawn: dict[str, plots.Figure]) -> None:
    shown = texts(drawn["ratios"])
    wanted = [formatting.ratio(m.ratio) for m in cpu if m.ratio is not None]
    assert len(wanted) > 50 and not [value for value in wanted if wanted.count(value) > shown.count(value)]
    failed = [m for m in cpu if m.failure and m.side not in ABSENT]
    assert sum(text.startswith("expected 64") for text in shown) == len(failed) > 0
    assert "flash_attn, xformers: not installed" in shown


def test_ratio_colours_are_centred_at_one() -> None:
    red, green, blue = ratio_plots.ratio_colour(1.0)
    assert max(red, green, blue) - min(red, green, blue) < 0.05, "grey where both are as fast"
    ours, theirs = ratio_plots.ratio_colour(2.0), ratio_plots.ratio_colour(0.5)
    assert ours[0] > ours[2] + 0.2 and theirs[2] > theirs[0] + 0.2
    assert ratio_plots.ratio_colour(1e6) == ratio_plots.ratio_colour(ratio_plots.LIMIT)


@pytest.mark.sampled
def test_ours_failing_is_grey(cpu: list[Measurement]) -> None:
    broken = [changed(m, seconds=None, failure="crashed") if m.side == OURS else changed(m, ratio=None) for m in cpu]
    assert "ours failed" in texts(plots.figures(broken)["ratios"])
    assert "summary" not in plots.figures(broken)


def test_sides_of_a_suite_look_different_and_ours_always_the_same(cpu: list[Measurement]) -> None:
    for measurements in (cpu, sample("cuda")):
        styles = drawing.Look(measurements).styles
        assert styles[OURS] == (drawing.OUR_COLOUR, "o")
        for suite in grouping.SUITES:
            sides = {m.side for m in measurements if m.suite == suite}
            assert len({styles[side] for side in sides}) == len(sides)
            assert len(sides) > 8 or len({styles[side][0] for side in sides}) == len(sides)


@pytest.mark.sampled
def test_plots_are_written_and_repeatable(cpu: list[Measurement], tmp_path: Path) -> None:
    some = [m for m in cpu if m.suite == "bucket"]
    paths = plots.write_plots(some, tmp_path / "new" / "folder")
    assert {path.name for path in paths} == {
        f"{name}.{suffix}" for name in ("summary", "speed", "ratios") for suffix in ("png", "svg")
    }
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".png":
            assert content.startswith(b"\x89PNG") and len(content) > 5000
        else:
            xml.etree.ElementTree.fromstring(content)
            assert b"<dc:date>" not in content
            fonts = set(re.findall(rb"font-family: ([^;]*);", content))
            assert fonts == {b"'DejaVu Sans', Verdana, sans-serif"}, "text stays text, in a font that is everywhere"
    again = plots.write_plots([changed(m, date="2027-01-01") for m in some], tmp_path / "again", ("svg",))
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths if path.suffix == ".svg"]


def test_pictures_of_everything_are_at_most_four(drawn: dict[str, plots.Figure]) -> None:
    assert list(drawn) == ["summary", "speed", "roofline", "ratios"]


def test_plots_are_of_one_device(cpu: list[Measurement]) -> None:
    with pytest.raises(ResultsError, match=r"expected measurements of one device, got 2: .*made up"):
        plots.figures([*cpu, *sample("cuda")])


def test_gaps_anywhere_break_nothing(cpu: list[Measurement]) -> None:
    for _ in range(3):
        kept = random.sample(cpu, random.randint(1, 60))
        gone = {"seconds": None, "spread": None, "ratio": None, "ratio_spread": None, "failure": "lost"}
        holey = [changed(m, **gone) if random.random() < 0.4 else m for m in kept]
        holey = [changed(m, peak_flops=0.0, size=0.0, extra={"wire": 1}) if random.random() < 0.4 else m for m in holey]
        for figure in plots.figures(holey).values():
            assert drawing.render(figure, "svg")
        assert report.page(holey, plots=False)
        assert table.lines(holey, 80)
        with contextlib.suppress(ResultsError):  # no case in both
            compare.compare(cpu, holey)


# The page


class Elements(html.parser.HTMLParser):
    """The elements of a page; fails if they are not nested properly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory, cpu: list[Measurement]) -> Path:
    """A page with two devices, one of them with two runs, and text that tries to inject code."""
    folder = tmp_path_factory.mktemp("page")
    few = [m for m in cpu if m.suite in ("bucket", "train")]
    evil = changed(
        few[0], side=EVIL, op=EVIL, case=EVIL, seconds=None, failure=EVIL, environment={"device": CPU, EVIL: EVIL}
    )
    later = [changed(m, date="2026-11-21T10:00:00") for m in few]
    write(folder / "cpu" / "a.jsonl", few, [evil])
    write(folder / "cpu" / "b.jsonl", later)
    write(folder / "cuda.jsonl", [m for m in sample("cuda") if m.suite == "attention"])
    assert report.main([str(folder)]) == 0
    return folder / "report.html"


def test_page_is_self_contained(page_path: Path) -> None:
    text = page_path.read_text()
    elements = Elements(text)
    for name, attributes in elements.found:
        assert name not in ("link", "img", "iframe", "image", "object", "base", "a")
        assert not attributes.keys() & {"src", "srcset", "onerror", "onclick"}
        assert all(str(value).startswith("#") for key, value in attributes.items() if key.endswith("href"))
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\([\"']?([^)\"']*)", text))


def test_page_reads_well_without_sight_or_script(page_path: Path) -> None:
    text = page_path.read_text()
    elements = Elements(text).found
    assert all(attributes.get("scope") in ("col", "row") for name, attributes in elements if name == "th")
    assert [attributes for name, attributes in elements if name == "form"] == [{"id": "controls", "hidden": None}]
    assert not [attributes for name, attributes in elements if name == "tr" and "hidden" in attributes]
    assert all(attributes.get("aria-label") for name, attributes in elements if attributes.get("role") == "img")
    assert text.count("<caption>") >= 3
    assert len({name for name, _ in elements} & {"main", "header", "footer", "h1"}) == 4


def test_page_says_what_was_measured(page_path: Path) -> None:
    text = page_path.read_text()
    measurements = read(page_path.parent)
    for part in (CPU, GPU, "0123456789ab", "torch 2.11.0", "12.0 GB/s", "650 TFLOP/s", "not installed", "got 12 GiB"):
        assert part in text
    assert formatting.RATIO_MEANS in text
    assert text.count(' data-suite="') == len(measurements)
    of_gpu = geometric_means(m for m in measurements if m.device == "cuda")
    for (_, _, side), (mean, count) in of_gpu.items():
        assert side in text
        assert f"<strong>{formatting.ratio(mean)}</strong> <small>{formatting.counted(count, 'case')}</small>" in text
    assert text.count('<span class="badge">1</span>') > 1, "one device at two dates is two runs"
    assert 'class="badge">4</span>' in text and 'class="badge">5</span>' not in text


def test_injected_text_is_escaped(page_path: Path) -> None:
    text = page_path.read_text()
    assert "<script>document" not in text and "<img" not in text
    assert text.count("<script>") == 1
    assert "&lt;script&gt;document.title=" in text


def test_runs_have_distinct_names(cpu: list[Measurement]) -> None:
    later = [changed(m, date="2026-11-21T10:00:00") for m in cpu]
    other = [changed(m, environment=m.environment | {"torch": "2.12.0"}) for m in cpu]
    assert [len(run.measurements) for run in grouping.split_into_runs([*later, *cpu])] == [len(cpu)] * 2
    assert [run.date for run in grouping.split_into_runs([*later, *cpu])] == ["2026-11-20", "2026-11-21"]
    assert len(grouping.split_into_runs([*other, *cpu])) == 2
    halves = [m for m in cpu if m.suite == "gemm"], [changed(m, date="2026-11-20T12") for m in cpu if m.suite != "gemm"]
    assert len(grouping.split_into_runs([*halves[0], *halves[1]])) == 1, "suites measured one after the other"


def test_page_without_matplotlib(
    cpu: list[Measurement], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = write(tmp_path / "results.jsonl", cpu)
    assert report.main([str(path), "--out", str(tmp_path / "page.html")]) == 0
    assert "pip install matplotlib" in capsys.readouterr().err
    assert "matplotlib was not installed" in (tmp_path / "page.html").read_text()


def test_page_in_a_folder_that_cannot_be_written(
    cpu: list[Measurement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "results.jsonl", cpu[-8:])
    assert report.main([str(path), "--out", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "cannot be written: No such file or directory; choose another file with --out" in capsys.readouterr().err


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., tuple[str, list[str]]]:
    """Opens a file with choices after its #; returns the resulting document and the console output."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        reason = f"there is no browser: none of {', '.join(BROWSERS)} is on PATH"
        if os.environ.get("CUDA_EXT_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)

    def open_file(path: Path, **chosen: str) -> tuple[str, list[str]]:
        options = "headless no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync"
        options += " no-first-run disable-dev-shm-usage disable-extensions enable-logging=stderr dump-dom"
        command = [browser, *(f"--{option}" for option in options.split()), f"--user-data-dir={tmp_path / 'profile'}"]
        done = subprocess.run(
            [*command, f"{path.as_uri()}#{urlencode(chosen)}"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]

    return open_file


def shown_rows(document: str) -> list[list[str]]:
    """The cells of the rows that are not hidden."""
    body = document[document.index('id="measurements"') :]
    body = body[body.index("<tbody>") : body.index("</tbody>")]
    rows = re.findall(r"<tr([^>]*)>(.*?)</tr>", body, re.DOTALL)
    return [
        re.findall(r"<td[^>]*>(.*?)</td>", cells, re.DOTALL) for attributes, cells in rows if "hidden" not in attributes
    ]


@pytest.mark.sampled
def test_browser_sorts_and_filters(browse: Callable[..., tuple[str, list[str]]], page_path: Path) -> None:
    measurements = read(page_path.parent)
    document, console = browse(page_path, q="Flash CAUSAL", suite="attention", sort="time", down="1")
    assert console == []
    rows = shown_rows(document)
    wanted = [m for m in measurements if m.op == "flash_attention causal"]
    assert len(rows) == len(wanted) > 0
    times = sorted((m.seconds for m in wanted if m.seconds), reverse=True)
    column = list(report.COLUMNS).index("time")
    assert [row[column] for row in rows if row[column]] == [formatting.duration(t) for t in times]
    assert [row[column] for row in rows][len(times) :] == [""] * (len(wanted) - len(times)), "those without come last"
    assert f"{len(wanted)} of {len(measurements)}" in document
    assert 'aria-sort="descending"' in document
    rows = shown_rows(browse(page_path, dtype="float32", sort="case")[0])
    assert len(rows) == sum(m.dtype == "float32" for m in measurements) > 0


def test_browser_shows_everything_at_first_and_runs_no_injected_text(
    browse: Callable[..., tuple[str, list[str]]], page_path: Path
) -> None:
    document, console = browse(page_path)
    assert console == []
    assert len(shown_rows(document)) == len(read(page_path.parent))
    assert "<title>cuda_ext, measured</title>" in document


def test_the_check_for_console_errors_sees_one(browse: Callable[..., tuple[str, list[str]]], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<!doctype html><title>a</title><script>nothing.here = 1</script>")
    _, console = browse(tmp_path / "page.html")
    assert len(console) == 1 and "nothing is not defined" in console[0]


# Files that cannot be read

BAD_FILES = {
    "garbage": ("nonsense\n", "expected one JSON object per line, got 'nonsense'"),
    "older": (json.dumps(dataclasses.asdict(sample()[0]) | {"format": 0}), "expected format 1, got 0; measure again"),
    "strange": (json.dumps({"hello": 1}), "expected a measurement of `python -m benchmarks`"),
    "fields": (json.dumps({"format": 1, "suite": "gemm"}), "expected the fields"),
    "words": (json.dumps(dataclasses.asdict(sample()[0]) | {"seconds": "1 s"}), "expected seconds to be a number"),
    "zero": (json.dumps(dataclasses.asdict(sample()[0]) | {"ratio": 0}), "expected ratio above 0"),
    "empty": ("\n", "expected measurements, got empty files"),
}  # fmt: skip


@pytest.mark.parametrize("command", [report.main, compare.main])
@pytest.mark.parametrize("kind", [*BAD_FILES, "no file", "no folder"])
def test_bad_results_are_refused(
    command: Callable[[list[str]], int], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, message = tmp_path / "results", "expected .jsonl files, found none; write some with `python -m benchmarks"
    path.mkdir()
    if kind == "no folder":
        path, message = tmp_path / "nowhere", "cannot be read"
    elif kind != "no file":
        content, message = BAD_FILES[kind]
        (path / "a.jsonl").write_text(content)
    assert command([str(path)] * (2 if command is compare.main else 1)) == 2
    printed = capsys.readouterr()
    assert message in printed.err and str(path) in printed.err
    assert "Traceback" not in printed.err and printed.out == ""


# Comparison


def with_baselines(measurements: list[Measurement]) -> list[Measurement]:
    """Without the build suite, which has no baseline to reveal a different machine."""
    return [m for m in measurements if m.suite != "build"]


@pytest.mark.sampled
@pytest.mark.parametrize(("rounds", "noise", "rate"), [(3, 0.05, 0.004), (5, 0.05, 0.0005), (11, 0.01, 0.0005)])
def test_false_alarms_are_rare(rounds: int, noise: float, rate: float) -> None:
    """The same code on a machine whose speed differs by up to a half. `rate` is a fraction of the cases compared."""
    alarms = compared = 0
    seed = random.randrange(2**30)
    for i in range(40):
        machine = random.uniform(0.7, 1.5)
        old = with_baselines(sample(seed=seed + 2 * i, noise=noise, rounds=rounds))
        new = with_baselines(sample(seed=seed + 2 * i + 1, noise=noise, rounds=rounds, machine=machine))
        result = compare.compare(old, new)
        alarms += len(result.slower)
        compared += result.compared
    # The count varies; six standard deviations are allowed, so that this test itself raises no false alarm.
    assert compared > 3500 and alarms <= compared * rate + 6 * math.sqrt(compared * rate)


@pytest.mark.sampled
def test_drift_that_a_run_cannot_see_stays_below_one_percent() -> None:
    """The worst case: all rounds of a run are off by the same error, as large as that between two rounds."""
    noise, alarms, compared = 0.02, 0, 0
    generator = random.Random(random.randrange(2**30))
    for _ in range(40):
        old, new = (
            sample(seed=generator.randrange(2**30), noise=noise, slower=lambda m: generator.lognormvariate(0, noise))
            for _ in range(2)
        )
        old, new = ([changed(m, ratio=None) if m.side != OURS else m for m in run] for run in (old, new))
        result = compare.compare(old, new)
        alarms += len(result.slower)
        compared += result.compared
    assert compared > 3500 and alarms <= 0.01 * compared + 4 * math.sqrt(0.01 * compared)


def slow_squares(m: Measurement) -> float:
    return 1.25 if m.suite == "gemm" and m.group == "squares" else 1.0


@pytest.mark.parametrize("machine", [1.0, 1.4, 0.7])
def test_slower_code_is_found_on_any_machine(machine: float) -> None:
    old, new = sample(seed=1), sample(seed=2, machine=machine, slower=slow_squares)
    old, new = with_baselines(old), with_baselines(new)
    result = compare.compare(old, new)
    wanted = {formatting.heading(m, m.case) for m in old if slow_squares(m) > 1 and m.side == OURS}
    assert {change.case.removeprefix("gemm: ") for change in result.slower} == wanted
    assert all(1.15 < change.slowdown < 1.35 for change in result.slower)
    assert not result.faster and not result.passed
    back = compare.compare(new, old)
    assert len(back.faster) == len(wanted) and back.passed


def test_a_faster_baseline_does_not_make_ours_slower() -> None:
    old, new = sample(seed=1), sample(seed=2, torch="2.12.0")
    new = [changed(m, seconds=m.seconds / 2, ratio=m.ratio / 2) if m.ratio else m for m in new]
    assert compare.compare(old, new).passed
    same_software = [changed(m, environment=old[0].environment) for m in new]
    assert not compare.compare(old, same_software).passed, "the baseline cannot have changed, so the machine has"


def test_failing_and_vanished_cases() -> None:
    old, new = sample(seed=1), sample(seed=2)
    broken = [
        changed(m, seconds=None, failure="wrong: 0.3") if m.suite == "train" and m.side == OURS else m for m in new
    ]
    result = compare.compare(old, broken)
    assert result.failing == {"train: GPT, 2 processes · step · float32 · 4 layers of 256": "wrong: 0.3"}
    assert not result.passed
    result = compare.compare(old, [m for m in new if m.suite != "train"])
    assert result.vanished == ["train: GPT, 2 processes · step · float32 · 4 layers of 256"] and result.passed
    result = compare.compare(broken, new)
    assert result.appeared == ["train: GPT, 2 processes · step · float32 · 4 layers of 256"] and result.passed
    with pytest.raises(ResultsError, match="expected cases that ours ran in both, got none"):
        compare.compare([m for m in old if m.suite == "train"], [m for m in new if m.suite == "gemm"])


def test_comparison_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.jsonl", sample(seed=1))
    same, slow = (
        write(tmp_path / "same.jsonl", sample(seed=2)),
        write(tmp_path / "slow.jsonl", sample(seed=2, slower=slow_squares)),
    )
    gpu = write(tmp_path / "gpu.jsonl", [changed(m, device="cpu") for m in sample("cuda")])
    assert compare.main([str(old), str(same)]) == 0
    assert re.fullmatch(
        r"98 cases compared: 0 slower, 0 faster, 98 within the noise; .*\na slowdown from 1\.\d\d× on would be .*\n",
        capsys.readouterr().out,
    )
    assert compare.main([str(old), str(slow)]) == 1
    out = capsys.readouterr().out
    assert re.match(r"slower:\n  1\.\d\d× as long \(noise up to 1\.\d\d×\)  gemm: ", out) and "20 slower" in out
    assert compare.main([str(slow), str(old), "--all"]) == 0
    assert capsys.readouterr().out.startswith("faster:\n  0.")
    assert compare.main([str(old), str(slow), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["slower"]) == 20
    assert compare.main([str(old), str(gpu)]) == 2
    message = capsys.readouterr().err
    assert CPU in message and GPU in message and "--force" in message
    assert compare.main([str(old), str(gpu), "--force"]) in (0, 1)


def late(measurements: list[Measurement], suite: str) -> list[Measurement]:
    """The measurements of a suite for which a run had no time."""
    ours = [m for m in measurements if m.side == OURS or m.suite != suite]
    gone = {"seconds": None, "spread": None, "ratio": None, "ratio_spread": None, "failure": "out of time"}
    return [changed(m, **gone) if m.suite == suite else m for m in ours]


@pytest.mark.sampled
def test_cases_out_of_time_have_not_failed(tmp_path: Path) -> None:
    measurements = late(sample(), "bucket")
    result = compare.compare(sample(seed=1), measurements)
    assert result.passed and not result.failing and len(result.vanished) == 6
    write(tmp_path / "cpu" / "2026-11-20.jsonl", measurements)
    text = readme.page(tmp_path)
    assert "| bucket |" not in text and "Not measured yet on this device: masks, loss, experts, fp8, bucket." in text
    assert not [text for text in texts(plots.figures(measurements)["ratios"]) if "bucket" in text]
    lines = ["".join(cell.text for cell in line) for line in table.lines(measurements, 100)]
    assert lines[lines.index("bucket") + 1 :][:2] == ["  cuda_ext, 6 cases: out of time", ""]


# README


def test_readme_is_current() -> None:
    assert readme.main(["--check"]) == 0


@pytest.fixture
def results_folder(tmp_path: Path, cpu: list[Measurement], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of two devices, and a README."""
    root = tmp_path / "results"
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(readme, "ROOT", root)
    readme.README.write_text(f"before\n{readme.BEGIN}\nold\n{formatting.END}\nafter\n")
    write(root / "cpu" / "2026-11-20.jsonl", cpu)
    write(root / "nvidia-h100" / "2026-11-20.jsonl", [m for m in sample("cuda") if m.suite == "gemm"])
    return root


def table_of(text: str, suite: str) -> dict[str, dict[str, str]]:
    """dtype -> baseline -> cell, of the first device."""
    lines = iter(text.splitlines())
    head = next(line for line in lines if line.startswith(f"| {suite} | "))
    next(lines)
    rows = [line.split(" | ") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]
    return {row[0].strip("| "): dict(zip(head.split(" | ")[1:-1], row[1:-1])) for row in rows}


def test_results_page_says_what_was_measured(results_folder: Path, cpu: list[Measurement]) -> None:
    text = readme.page(results_folder)
    assert (
        "Not measured yet on this device: attention, masks, loss, experts, fp8, bucket, train, overhead, build." in text
    )
    for (suite, dtype, side), (mean, count) in geometric_means(cpu).items():
        if side in REFERENCES:
            continue
        row = table_of(text, suite)[dtype]
        ratios = sorted(m.ratio for m in cpu if (m.suite, m.dtype, m.side) == (suite, dtype, side) and m.ratio)
        span = f"{formatting.ratio(ratios[0])[:-1]}–{formatting.ratio(ratios[-1])[:-1]}, " if count > 1 else ""
        assert row[side] == f"**{formatting.ratio(mean)}** ({span}{count})"
    assert "12.0 GB/s (copy), 140 GFLOP/s (float32 matmul), 300 GFLOP/s (bfloat16 matmul)" in text
    assert "2026-11-20, commit 0123456789ab, torch 2.11.0." in text
    assert "](cpu/summary.svg)" in text


def test_results_page_uses_the_newest_results_of_each_suite(results_folder: Path) -> None:
    newer = [m for m in sample(seed=5, date="2026-11-22T08:00:00", commit="fedcba") if m.suite == "gemm"]
    write(results_folder / "cpu" / "2026-11-22.jsonl", newer)
    text = readme.page(results_folder)
    assert (
        "gemm: 2026-11-22, commit fedcba, torch 2.11.0; attention, bucket, train, overhead, build: 2026-11-20" in text
    )
    mean, _ = geometric_means(newer)["gemm", "float32", "torch"]
    assert table_of(text, "gemm")["float32"]["torch"].startswith(f"**{formatting.ratio(mean)}** (")


@pytest.mark.sampled
def test_references_are_no_baselines(results_folder: Path, cpu: list[Measurement]) -> None:
    side = next(iter(REFERENCES))
    (theirs,) = [m for m in cpu if m.suite == "gemm" and m.side == "torch"][:1]
    write(results_folder / "cpu" / "2026-11-20.jsonl", [*cpu, changed(theirs, side=side, ratio=0.25)])
    text = readme.page(results_folder)
    assert side not in table_of(text, "gemm")["float32"]
    assert f"| gemm, {theirs.dtype} | {REFERENCES[side]} | 0.25× (1) |" in text
    assert side not in texts(plots.figures([*cpu, changed(theirs, side=side, ratio=0.25)])["summary"])


@pytest.mark.sampled
def test_results_page_has_notes_until_a_suite_is_measured_again(results_folder: Path, capsys) -> None:
    slow = [changed(m, ratio=0.5) if m.ratio else m for m in sample() if m.suite in ("gemm", "attention")]
    write(results_folder / "cpu" / "2026-11-21.jsonl", slow)
    assert readme.main([]) == 0
    assert "gemm, float32: torch is faster than ours (0.50×); write the reason to a DATE.notes.json" in (
        capsys.readouterr().err
    )
    notes = {"gemm": "GEMM is slow because.", "attention": "Attention is slow because."}
    (results_folder / "cpu" / "2026-11-21.notes.json").write_text(json.dumps(notes))
    assert readme.main([]) == 0 and "faster than ours" not in capsys.readouterr().err
    assert all(note in readme.page(results_folder) for note in notes.values())
    write(results_folder / "cpu" / "2026-11-22.jsonl", [m for m in sample() if m.suite == "gemm"])
    assert notes["gemm"] not in readme.page(results_folder) and notes["attention"] in readme.page(results_folder)


def test_readme_compares_with_the_fastest_baseline(results_folder: Path, cpu: list[Measurement]) -> None:
    text = readme.section(results_folder)
    assert "Not measured yet: NVIDIA A100, NVIDIA H200, NVIDIA RTX 4090." in text
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", text, re.MULTILINE))
    assert list(rows) == ["gemm", "attention", "bucket", "train"], "the others have no baselines"
    assert rows["attention"].endswith(" | "), "the other device has only products"
    fastest: dict[tuple[object, ...], float] = {}
    for m in cpu:
        if m.suite == "gemm" and m.side not in (OURS, *REFERENCES) and m.ratio:
            fastest[m.problem] = min(m.ratio, fastest.get(m.problem, m.ratio))
    low, high, mean = min(fastest.values()), max(fastest.values()), statistics.geometric_mean(fastest.values())
    span = f"{formatting.ratio(low)[:-1]}–{formatting.ratio(high)[:-1]}"
    assert rows["gemm"].startswith(f"**{formatting.ratio(mean)}** ({span}, {len(fastest)}) | ")


def test_readme_is_written_and_checked(results_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert readme.main(["--check"]) == 1
    assert f"not current: {readme.README}, {results_folder / 'README.md'}, " in capsys.readouterr().err
    assert readme.main([]) == 0
    text = readme.README.read_text()
    assert text.startswith(f"before\n{readme.BEGIN}\n") and text.endswith(f"{formatting.END}\nafter\n")
    assert "old" not in text
    page = results_folder / "README.md"
    pictures = [results_folder / name for name in re.findall(r"\]\((.*?)\)", page.read_text())]
    assert len(pictures) == 2 and all(picture.stat().st_size > 5000 for picture in pictures)
    assert readme.main(["--check"]) == 0
    assert readme.main([]) == 0 and readme.README.read_text() == text
    capsys.readouterr()
    for path in (pictures[0], page):
        path.unlink()
        assert readme.main(["--check"]) == 1
        assert capsys.readouterr().err.startswith(f"not current: {path}; run")
        assert readme.main([]) == 0
    readme.README.write_text("no place for it")
    assert readme.main([]) == 2
    assert "once, in this order; add them" in capsys.readouterr().err


def test_readme_without_results(tmp_path: Path) -> None:
    text = readme.section(tmp_path)
    assert text == f"Not measured yet: {', '.join(readme.DEVICES)}."


# Terminal


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("width", [40, 55, 80, 100, 160])
def test_table_fits(device: str, width: int) -> None:
    measurements = sample(device)
    lines = ["".join(cell.text for cell in line) for line in table.lines(measurements, width)]
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for m in measurements:
        assert m.case in text
        if m.side == OURS:
            assert formatting.duration(m.seconds) in text
        assert formatting.ratio(m.ratio) in text
    assert "flash_attn, xformers: not installed" in text
    assert "SDPA MATH, 8 cases: RuntimeError: expected 64 GiB of free memory, got 12 GiB" in text
    assert formatting.RATIO_MEANS in text


def test_table_is_the_same_without_rich(
    cpu: list[Measurement], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    monkeypatch.setenv("COLUMNS", "100")
    table.show(cpu, Console(width=100, color_system=None))
    with_rich = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    table.show(cpu)
    assert capsys.readouterr().out.splitlines() == with_rich


def test_table_marks_ours_failing_and_colours_ratios(cpu: list[Measurement]) -> None:
    m = next(m for m in cpu if m.side == "torch.compile")
    ours = next(o for o in cpu if o.problem == m.problem and o.side == OURS)
    styles = [
        {cell.text.strip(): cell.style for line in table.lines([ours, changed(m, ratio=r)], 100) for cell in line}
        for r in (1.5, 1.01, 0.5)
    ]
    assert [s.get("1.50×", s.get("1.01×", s.get("0.50×"))) for s in styles] == ["green", "", "red"]
    failed = changed(ours, seconds=None, failure="wrong: off by 0.3")
    lines = table.lines([failed, changed(m, ratio=None)], 100)
    cells = {cell.text.strip(): cell.style for line in lines for cell in line}
    assert cells["failed"] == "bold red"
    assert f"{OURS}, {formatting.heading(ours, ours.case)}: wrong: off by 0.3" in " ".join(
        "".join(c.text for c in line) for line in lines
    )


# Numbers


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [formatting.digits(x) for x in (0, 0.01234, 0.9999, 1.234, 9.999, 123.4, 999.9, 123456)] == [
        "0", "0.0123", "1.00", "1.23", "10.0", "123", "1000", "123456",
    ]  # fmt: skip
    assert [formatting.duration(s) for s in (None, 2e-9, 1.5e-6, 0.0123, 0.99999, 120)] == [
        "", "2.00 ns", "1.50 µs", "12.3 ms", "1.00 s", "120 s",
    ]  # fmt: skip
    assert [formatting.flop_rate(1.72e11), formatting.flop_rate(6.5e14), formatting.byte_rate(3.35e12)] == [
        "172 GFLOP/s", "650 TFLOP/s", "3.35 TB/s",
    ]  # fmt: skip
    assert [formatting.ratio(r) for r in (None, 0.05, 0.5, 0.9999, 1.266, 370)] == [
        "",
        "0.05×",
        "0.50×",
        "1.00×",
        "1.27×",
        "370×",
    ]
