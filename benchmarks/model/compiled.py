"""The kernels as compiled, from tests/simt/golden_kernels.json, and how many of their blocks fit on an SM."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "simt" / "golden_kernels.json"


@dataclass(frozen=True)
class Loop:
    """Instructions of one iteration of a kernel's loop of matrix products."""

    instructions: int = 0
    lead: int = 0  # before the first matrix product, while the tensor cores idle
    pause: int = 0  # the longest run without a product, including the next iteration
    gap: int = 0  # the same between the first and the last product of an iteration
    burst: int = field(default=0, compare=False)  # most LDSM and LDGSTS between two products
    body: tuple[str, ...] = field(default=(), compare=False, repr=False)


@dataclass
class Kernel:
    arch: str  # "sm_90a"
    name: str = ""  # demangled, without namespaces and parameters
    registers: int = 0
    threads: int = 0  # upper limit per block; 0: no launch bounds
    shared_bytes: int = 0  # static; in golden_kernels.json the total, or 0 if instances differ
    loop: Loop = Loop()  # empty if no loop multiplies


def golden_kernels(path: Path = GOLDEN) -> dict[str, dict[str, Kernel]]:
    """architecture -> name -> kernel."""
    return {
        arch: {
            name: Kernel(
                arch,
                name,
                record["registers"],
                record["threads"],
                record.get("shared_bytes", 0),
                Loop(*record.get("loop", ())),
            )
            for name, record in kernels.items()
        }
        for arch, kernels in json.loads(path.read_text()).items()
        if arch != "cuda"
    }


def readable(symbols: Sequence[str]) -> list[str]:
    """Demangled names without return types, parameters and namespaces."""
    names = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    readable = []
    for name in names.splitlines():
        if name.endswith(")"):  # the parameters: find their opening parenthesis
            depth = 0
            for i in range(len(name) - 1, -1, -1):
                depth += {")": 1, "(": -1}.get(name[i], 0)
                if depth == 0:
                    name = name[:i]
                    break
        name = re.sub(r"\((?:[\w:]+::)?\w+\)(?=-?\d)", "", name)  # the type of an enumerator: (Op)2
        name = re.sub(r"(?:\b\w+|\(anonymous namespace\))::", "", name)
        readable.append(name.removeprefix("void ").replace("> >", ">>"))
    return readable


RESERVED_SHARED_BYTES = 1024  # per block, for the system, from sm_80 on


@dataclass(frozen=True)
class SmLimits:
    shared_bytes: int
    registers: int = 65536
    threads: int = 2048
    blocks: int = 32
    reserved_bytes: int = RESERVED_SHARED_BYTES


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SM_LIMITS = {
    "sm_75": SmLimits(64 * 1024, threads=1024, blocks=16, reserved_bytes=0),
    "sm_80": SmLimits(164 * 1024),
    "sm_86": SmLimits(100 * 1024, threads=1536, blocks=16),
    "sm_89": SmLimits(100 * 1024, threads=1536, blocks=24),
    "sm_90a": SmLimits(228 * 1024),
    "sm_100": SmLimits(228 * 1024),
    "sm_120": SmLimits(100 * 1024, threads=1536, blocks=24),
    "sm_121": SmLimits(100 * 1024, threads=1536, blocks=24),
}


def blocks_per_sm(kernel: Kernel, arch: str, shared_bytes: int) -> int:
    """The number of blocks that fit on an SM at once."""
    limits = SM_LIMITS[arch]
    warps = -(-kernel.threads // 32)
    registers_of_warp = -(-kernel.registers * 32 // 256) * 256
    shared = -(-(shared_bytes + limits.reserved_bytes) // 128) * 128
    return min(
        limits.blocks,
        limits.threads // (warps * 32),
        limits.registers // registers_of_warp // warps,
        limits.shared_bytes // max(shared, 1),
    )
