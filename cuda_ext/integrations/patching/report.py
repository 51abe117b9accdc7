"""What `patch` did, as a table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class PatchReport:
    """What `cuda_ext.patch` swapped and what it left; ``print(report)`` shows it as a table.

    Attributes:
        swapped: from each kind, such as "gated MLP", to the names of the modules. Attention is under "attention",
            losses are under "loss".
        left: from the names of modules that look like a feed-forward layer, or compute attention or logits, to
            the reason why they are as before.
    """

    swapped: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, name: str) -> None:
        self.swapped.setdefault(kind, []).append(name)

    def __str__(self) -> str:
        rows = [
            (kind if not number else "", str(len(names)) if not number else "", line)
            for kind, names in self.swapped.items()
            for number, line in enumerate(compressed(names))
        ]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        lines = ["cuda_ext.patch: swapped"]
        lines += _aligned(rows) or ["  nothing"]
        if reasons:
            lines.append("left as it was")
            for reason, names in reasons.items():
                lines += _aligned(
                    [("", str(len(names) if not n else ""), each) for n, each in enumerate(compressed(names))]
                )
                lines.append(f"      {reason}")
        return "\n".join(lines)


def _aligned(rows: list[tuple[str, str, str]]) -> list[str]:
    kind, count = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    return [f"  {row[0]:<{kind}}  {row[1]:>{count}}  {row[2]}" for row in rows]


def compressed(names: Iterable[str]) -> list[str]:
    """Names that differ in one number as one: "layers.{0..31}.mlp"."""
    current = list(dict.fromkeys(names))
    for position in range(max((name.count(".") for name in current), default=0) + 1):
        groups: dict[tuple[str, ...], list[int]] = {}
        order: list[tuple[tuple[str, ...], str]] = []
        for name in current:
            parts = name.split(".")
            if position < len(parts) and re.fullmatch(r"\d+", parts[position]):
                key = (*parts[:position], "\0", *parts[position + 1 :])
                groups.setdefault(key, []).append(int(parts[position]))
            else:
                key = tuple(parts)
            if not order or key not in [each for each, _ in order]:
                order.append((key, name))
        current = [".".join(key).replace("\0", _numbers(groups[key])) if key in groups else name for key, name in order]
    return current


def _numbers(numbers: list[int]) -> str:
    """3; {0..3}; {0,2,5}"""
    numbers = sorted(set(numbers))
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(f"{a}" if a == b else f"{a},{b}" if b == a + 1 else f"{a}..{b}" for a, b in runs) + "}"
