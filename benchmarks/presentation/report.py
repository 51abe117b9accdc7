"""Writes a self-contained HTML page from any set of measurements."""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.presentation import formatting, grouping
from benchmarks.presentation.formatting import counted
from benchmarks.presentation.grouping import Run
from benchmarks.presentation.markup import Html, join, tag
from benchmarks.results import OURS, Measurement, ResultsError, geometric_means

ASSETS = Path(__file__).resolve().parent
PLOTS = {
    "summary": "Each dot is a case, each diamond the geometric mean of its row.",
    "speed": "Speed against size. If a size has several cases, dots are the cases and lines join their medians.",
    "roofline": "Speed against arithmetic intensity, and the two ceilings measured in the same run.",
    "ratios": "Baseline time / our time of each case. Grey: not run, with the reason.",
}
# name -> explanation, and whether it is a number
COLUMNS = {
    "run": ("number of the card above", True),
    "suite": ("", False),
    "op": ("", False),
    "phase": ("", False),
    "case": ("", False),
    "dtype": ("", False),
    "side": ("", False),
    "time": ("per call, median over the rounds", True),
    "spread": ("half the interquartile range of the time, relative to its median", True),
    "speed": ("FLOP/s if operations are counted, else bytes/s", True),
    "of ceiling": ("shortest time that the roofline allows / measured time", True),
    "ratio": ("time of this side / our time: above 1 ours is faster", True),
    "ratio spread": ("half the interquartile range of the ratio, relative to its median", True),
    "error": ("relative, in the 2-norm, against a reference in higher precision", True),
    "notes": ("", False),
}


def page(measurements: Sequence[Measurement], plots: bool = True) -> str:
    """The page; `plots=False` if matplotlib is not installed."""
    script = Html((ASSETS / "report.js").read_text())
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    runs = grouping.split_into_runs(measurements)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "cuda_ext, measured"),
        tag("style", Html((ASSETS / "report.css").read_text())),
    )
    body = tag(
        "body",
        tag("header", tag("h1", "cuda_ext, measured"), tag("p", _lead(runs))),
        tag(
            "main",
            tag("section", tag("div", *_cards(runs), class_="cards"), aria_label="Runs"),
            _means(runs),
            _plots(runs) if plots else _section("Plots", "None: matplotlib was not installed."),
            _failures(runs),
            _everything(runs),
        ),
        tag("footer", "Written by ", tag("code", "python -m benchmarks report"), "."),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _lead(runs: list[Run]) -> str:
    measurements = [m for run in runs for m in run.measurements]
    cases = counted(sum(len({m.problem for m in run.measurements}) for run in runs), "case")
    devices = " and ".join(dict.fromkeys(run.device for run in runs))
    failed = sum(m.seconds is None for m in measurements)
    more = f"; {failed} without a time, with reasons" if failed else ""
    return f"{counted(len(measurements), 'measurement')} of {cases} on {devices}{more}."


def _section(title: str, *content: Html | str) -> Html:
    return tag("section", tag("h2", title), *(part if isinstance(part, Html) else tag("p", part) for part in content))


def _table(caption: str, columns: Iterable[Html], rows: Iterable[Html], look: str = "", id: str | None = None) -> Html:
    table = tag("table", tag("caption", caption), tag("thead", tag("tr", columns)), tag("tbody", rows), id=id)
    return tag("div", table, class_=f"scroll {look}".strip(), tabindex=0, role="region", aria_label=caption)


def _column(name: Html | str, number: bool = False, about: str = "") -> Html:
    return tag("th", name, scope="col", class_="number" if number else None, title=about or None)


def _name(run: Run, runs: list[Run]) -> Html:
    """A name that distinguishes the run from the others."""
    if len(runs) == 1:
        return join(run.device)
    more = " · ".join(filter(None, (run.date, run.commit)))
    return join(_badge(runs.index(run) + 1), " ", run.device, tag("small", " " + more))


def _badge(number: int) -> Html:
    return tag("span", number, class_="badge")


def _cards(runs: list[Run]) -> Iterable[Html]:
    for number, run in enumerate(runs, 1):
        environment = run.measurements[0].environment
        versions = (f"{name} {environment[name]}" for name in ("cuda_ext", "torch", "cuda") if environment.get(name))
        facts = {
            "date": run.date,
            "commit": run.commit,
            "versions": ", ".join(versions),
            "cases": f"{len({m.problem for m in run.measurements})}: {', '.join(run.suites)}",
            "largest copy": formatting.byte_rate(run.bandwidth) if run.bandwidth else "",
            **{
                " ".join(f"largest {dtype} matmul".split()): formatting.flop_rate(flops)
                for dtype, flops in run.flops.items()
            },
        }
        details = (
            tag("tr", tag("th", name, scope="row"), tag("td", str(value)))
            for name, value in sorted(environment.items())
        )
        yield tag(
            "article",
            tag("h2", _badge(number) if len(runs) > 1 else "", " ", run.device),
            tag("dl", (join(tag("dt", name), tag("dd", value)) for name, value in facts.items() if value)),
            tag("details", tag("summary", "Environment"), tag("table", tag("tbody", details))),
            class_="card",
        )


def _means(runs: list[Run]) -> Html:
    means = [geometric_means(run.measurements) for run in runs]
    keys = sorted(
        {key for of_run in means for key in of_run},
        key=lambda key: (grouping.suite_order(key[0]), grouping.dtype_order(key[1]), key[2]),
    )
    if not keys:
        return _section("Ratios", "None: only ours has a time.")
    columns = [_column(name) for name in ("suite", "dtype", "baseline")] + [
        _column(_name(run, runs), True) for run in runs
    ]
    rows = (
        tag("tr", tag("td", suite), tag("td", dtype), tag("th", side, scope="row"),
            (_mean(of_run.get((suite, dtype, side))) for of_run in means))
        for suite, dtype, side in keys
    )  # fmt: skip
    about = f"Geometric means over all cases. {formatting.RATIO_MEANS}."
    return _section("Geometric means", about, _table("Geometric means of the ratios", columns, rows, "narrow"))


def _mean(mean: tuple[float, int] | None) -> Html:
    if mean is None:
        return tag("td", "not measured", class_="number faint")
    value, count = mean
    kind = "faster" if value >= 1 else "slower"
    return tag(
        "td", tag("strong", formatting.ratio(value)), " ", tag("small", counted(count, "case")), class_=f"number {kind}"
    )


def _plots(runs: list[Run]) -> Html:
    from benchmarks.presentation import drawing, plots  # not above: matplotlib may be missing

    drawings = [
        {
            name: inline(drawing.render(figure, "svg"), drawing.INK)
            for name, figure in plots.figures(run.measurements).items()
        }
        for run in runs
    ]
    sections = []
    for name, about in PLOTS.items():
        shown = [
            tag(
                "figure",
                tag("div", drawn[name], class_="drawing", tabindex=0, role="img", aria_label=f"{name}: {about}"),
                tag("figcaption", _name(run, runs)),
            )
            for run, drawn in zip(runs, drawings)
            if name in drawn
        ]
        if shown:
            sections.append(_section(name.capitalize(), about, tag("div", shown, class_=f"figures {name}")))
    return join(sections)


def inline(svg: bytes, ink: str) -> Html:
    """An SVG file as an element of the page, its text in the page's colour."""
    text = svg.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' id="\w+_\d+"', "", text)  # not referenced, and not unique on the page
    return Html(text.replace(ink, "currentColor"))


def _failures(runs: list[Run]) -> Html:
    title = "Without a time"
    rows = [
        tag(
            "tr",
            tag("td", _name(run, runs)),
            tag("td", suite),
            tag("th", side, scope="row", class_="ours" if side == OURS else None),
            tag("td", reason, class_="long"),
            tag(
                "td",
                tag(
                    "details",
                    tag("summary", counted(len(failed), "case")),
                    tag("ul", (tag("li", formatting.heading(m, m.case)) for m in failed)),
                ),
            ),
        )
        for run in runs
        for (suite, side, reason), failed in grouping.failures(run.measurements).items()
    ]
    if not rows:
        return _section(title, "None: every side of every case ran.")
    columns = (_column(name) for name in ("run", "suite", "side", "reason", "cases"))
    return _section(title, "Sides that did not run, and why.", _table(title, columns, rows))


def _everything(runs: list[Run]) -> Html:
    measurements = [m for run in runs for m in run.measurements]
    suites = sorted({m.suite for m in measurements}, key=grouping.suite_order)
    dtypes = sorted({m.dtype for m in measurements} - {""}, key=grouping.dtype_order)
    controls = tag(
        "form",
        tag("label", "Filter ", tag("input", type="search", name="q", placeholder="words", autocomplete="off")),
        _select("suite", suites),
        _select("dtype", dtypes),
        tag("output", id="count", aria_live="polite"),
        id="controls",
        hidden=True,
    )
    columns = (_column(name, number, about) for name, (about, number) in COLUMNS.items())
    rows = (_row(m, number) for number, run in enumerate(runs, 1) for m in run.measurements)
    title, about = "All measurements", "Each side of each case; ours is highlighted."
    return _section(title, about, controls, _table(title, columns, rows, "tall", id="measurements"))


def _select(name: str, values: Iterable[str]) -> Html:
    options = [tag("option", "all", value=""), *(tag("option", value) for value in values)]
    return tag("label", name.capitalize(), " ", tag("select", options, name=name))


def _row(m: Measurement, run: int) -> Html:
    speed = m.bandwidth if m.tflops is None else m.tflops * 1e12
    spread = m.ratio_spread / m.ratio if m.ratio and m.ratio_spread is not None else None
    cells: list[tuple[str, float | None]] = [  # what is shown, and the number it is sorted by
        (str(run), run),
        (m.suite, None),
        (m.op, None),
        (m.phase, None),
        (m.case, m.size or None),
        (m.dtype, None),
        (m.side, None),
        (formatting.duration(m.seconds), m.seconds),
        (formatting.percent(m.spread), m.spread),
        (formatting.rate(m), speed),
        (formatting.percent(m.of_ceiling), m.of_ceiling),
        (formatting.ratio(m.ratio), m.ratio),
        (formatting.percent(spread), spread),
        ("" if m.error is None else f"{m.error:.1e}", m.error),
        (_notes(m), None),
    ]
    kinds = ["number" if number else None for _, number in COLUMNS.values()]
    kinds[-1] = "long" if m.seconds is None else None
    return tag(
        "tr",
        (
            tag("td", text, class_=kind, data_v=None if value is None else repr(value))
            for (text, value), kind in zip(cells, kinds)
        ),
        class_="ours" if m.side == OURS else "failed" if m.seconds is None else None,
        data_suite=m.suite,
        data_dtype=m.dtype,
    )


def _notes(m: Measurement) -> str:
    if m.seconds is None:
        return m.failure or grouping.NO_REASON
    method = (
        counted(m.rounds, "round") if m.rounds else "",
        m.timer,
        f"{m.rotation} sets of inputs" * (m.rotation > 1),
    )
    return ", ".join([*filter(None, method), *(f"{name} {value}" for name, value in (m.extra | m.state).items())])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("results", type=Path, help="a .jsonl file, or a folder that contains some")
    parser.add_argument("--out", type=Path, help="the page (default: report.html next to the results)")
    args = parser.parse_args(arguments)
    out = args.out or (args.results if args.results.is_dir() else args.results.parent) / "report.html"
    try:
        import matplotlib  # noqa: F401

        plots = True
    except ImportError:
        plots = False
        print("no plots: expected matplotlib, which is not installed; pip install matplotlib", file=sys.stderr)
    try:
        measurements = grouping.read_some(args.results)
        text = page(measurements, plots)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        out.write_text(text)
    except OSError as error:
        print(f"{out}: cannot be written: {error.strerror}; choose another file with --out FILE", file=sys.stderr)
        return 2
    runs = grouping.split_into_runs(measurements)
    print(f"{out}: {counted(len(measurements), 'measurement')}, {counted(len(runs), 'run')}")
    return 0
