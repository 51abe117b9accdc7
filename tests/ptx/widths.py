"""Of nvcc's loads and stores of global memory: how wide the source asks for, and how wide they are.

The functions of csrc/arch/memory.cuh that load and store a vector have a line for each width, which names it. nvcc may
take such an access apart, as it does where it knows the elements one by one; then a warp's neighbours are a stride
apart, and memory moves several times the sectors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .parse import SIZES, Instruction, Module

_WIDTH = re.compile(r"if constexpr \(sizeof\(Vector\) == (\d+)\)")
_ACCESS = re.compile(r"(ld|st)\.global\.(?:\w+\.)*?(?:v(\d)\.)?(\w+)$")

# Source line, "ld" or "st", bytes asked for, bytes accessed.
Width = tuple[str, str, int, int]


def widths_asked_for(memory: Path) -> dict[str, int]:
    """By line of the header ("memory.cuh:65"): the width that it is for."""
    lines = enumerate(memory.read_text().splitlines(), 1)
    return {f"{memory.name}:{number}": int(match[1]) for number, line in lines if (match := _WIDTH.search(line))}


def widths(modules: Iterable[Module], asked: dict[str, int]) -> Counter[Width]:
    """How often each width is accessed, over all instructions that came from a line of `asked`."""
    found: Counter[Width] = Counter()
    for module in modules:
        for entry in module.entries:
            for each in entry.body:
                if isinstance(each, Instruction) and each.wrapper in asked and (match := _ACCESS.match(each.opcode)):
                    bytes_accessed = int(match[2] or 1) * SIZES[match[3]]
                    found[each.place, match[1], asked[each.wrapper], bytes_accessed] += 1
    return found


def taken_apart(found: Counter[Width]) -> list[str]:
    """A line for each source line whose accesses are narrower than it asks for."""
    return [
        f"{place}: {count} {'loads' if kind == 'ld' else 'stores'} of {accessed} bytes instead of {asked}"
        for (place, kind, asked, accessed), count in sorted(found.items())
        if accessed < asked
    ]
