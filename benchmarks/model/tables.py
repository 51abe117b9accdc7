"""Tables in a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}" if seconds >= 1e-4 else f"{seconds * 1e6:.1f}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], first_number: int) -> None:
    """Prints a table as wide as needed, without empty columns; numbers are right-aligned."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    first_number = sum(i < first_number for i in kept)
    lines = [[line[i] for i in kept] for line in [columns, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept))]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for line in lines:
            cells = [c.rjust(w) if i >= first_number else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))]
            print("  ".join(cells).rstrip())
        print()
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(lines[0]):
        table.add_column(column, justify="right" if i >= first_number else "left", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    console = Console(width=max(sum(widths) + 2 * len(widths), len(title)))
    console.print(table)
    console.print()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
