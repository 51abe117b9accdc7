"""Compares the width of nvcc's loads and stores of global memory with the width requested in the source.

The functions of csrc/arch/memory.cuh that load and store vectors have one line per width. nvcc may split such an
access, for example if it knows the elements individually. Then neighbouring lanes access memory with a stride, which
moves several times as many sectors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .parse import SIZES, Instruction, Module

_WIDTH = re.compile(r"if constexpr \(sizeof\(Vector\) == (\d+)\)")
_ACCESS = re.compile(r"(ld|st)\.global\.(?:\w+\.)*?(?:v(\d)\.)?(\w+)$")

# Source line, "ld" or "st", requested bytes, accessed bytes.
Width = tuple[str, str, int, int]


def requested_widths(memory: Path) -> dict[str, int]:
    """Width by line of the header ("memory.cuh:65")."""
    lines = enumerate(memory.read_text().splitlines(), 1)
    return {f"{memory.name}:{number}": int(match[1]) for number, line in lines if (match := _WIDTH.search(line))}


def widths(modules: Iterable[Module], requested: dict[str, int]) -> Counter[Width]:
    """Counts the accesses by width, for all instructions from a line in `requested`."""
    found: Counter[Width] = Counter()
    for module in modules:
        for entry in module.entries:
            for each in entry.body:
                if not isinstance(each, Instruction) or each.wrapper not in requested:
                    continue
                if match := _ACCESS.match(each.opcode):
                    bytes_accessed = int(match[2] or 1) * SIZES[match[3]]
                    found[each.place, match[1], requested[each.wrapper], bytes_accessed] += 1
    return found


def split_accesses(found: Counter[Width]) -> list[str]:
    """One message per source line with accesses narrower than requested."""
    return [
        f"{place}: {count} {'loads' if kind == 'ld' else 'stores'} of {accessed} bytes instead of {requested}"
        for (place, kind, requested, accessed), count in sorted(found.items())
        if accessed < requested
    ]
