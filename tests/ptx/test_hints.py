"""nvcc's code contains the hints that the emulator ignores: performance hints (cache policies, prefetches, bounds), and
system scope, which orders accesses between devices (the emulator has only one)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptx import build, parse

SIMT = Path(__file__).resolve().parent.parent / "simt"
# Prefixes of opcodes by source and kernel. nc: read-only path; cs: evict first; cg: bypass L1.
HINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "conformance_memory": {
        "global_vectors_kernel": ("ld.global.nc.v4", "ld.global.cs.v2", "st.global.cs.v2"),
        "global_widths_kernel": ("ld.global.cs.v4", "st.global.cs.v4", "ld.global.nc.v2", "ld.global.cs.u32"),
        "cp_async_kernel": ("cp.async.cg", "cp.async.ca"),
    },
    "conformance_grid": {
        "turns_kernelILb0E": ("ld.global.acquire.gpu", "st.global.release.gpu"),
        "turns_kernelILb1E": ("ld.global.acquire.sys", "st.global.release.sys"),
    },
    "conformance_sm90": {"tma_load_case": ("prefetch.tensormap",)},
}


def missing(source: str, ptx: Path) -> list[str]:
    """The hints that the PTX of a source lacks."""
    module = parse.parse(ptx.read_text(), ptx.name)
    lacking = [f"{entry.name} bounds no blocks" for entry in module.entries if entry.min_blocks == 0]
    for kernel, opcodes in HINTS[source].items():
        entries = [entry for entry in module.entries if kernel in entry.name]
        assert entries, kernel
        for entry in entries:
            used = [each.opcode for each in entry.body if isinstance(each, parse.Instruction)]
            lacking += [f"{entry.name} has no {each}" for each in opcodes if not any(o.startswith(each) for o in used)]
    return lacking


@pytest.mark.parametrize("source", HINTS)
def test_hints_are_in_the_code(source: str) -> None:
    toolkit = build.find_toolkit()
    if toolkit is None:
        pytest.skip(build.NO_NVCC)
    with build._build.lock(build.FOLDER):
        _, ptx = build.compile_with_nvcc(toolkit, SIMT / f"{source}.cu", "sm_90a" if "sm90" in source else "sm_80")
    assert not missing(source, ptx)
