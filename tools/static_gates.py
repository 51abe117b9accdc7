"""Static gates: checks the machine code of every CUDA kernel in the built library, and the compilers' messages.

    python tools/static_gates.py           # checks, and compares tests/simt/golden_kernels.json
    python tools/static_gates.py --write   # checks, and updates that file and the table in docs/kernels.md

It needs no GPU and compiles nothing: cuobjdump (from the CUDA toolkit or the triton wheel) reads the machine code in
the library, and the build stores nvcc's messages next to each object.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.model import compiled  # noqa: E402
from benchmarks.model.compiled import GOLDEN, RESERVED_SHARED_BYTES, Loop, readable  # noqa: E402
from benchmarks.presentation.formatting import with_section  # noqa: E402
from cuda_ext import _build, _stamp, _toolchain  # noqa: E402

DOCUMENT = ROOT / "docs" / "kernels.md"
BEGIN = "<!-- written by tools/static_gates.py -->"


@dataclass(frozen=True)
class Rule:
    """Requirements for kernels whose name begins with a match of `name`, a regular expression."""

    name: str
    contains: tuple[str, ...] = ()  # regular expressions; an opcode must begin with a match of each
    contains_sm90: tuple[str, ...] = ()  # the same for sm_90 and later
    shared_bytes: int | None = None  # dynamic shared memory, if all instances use the same
    lead: int | None = None  # upper limits of what `Loop` counts
    pause: int | None = None
    gap: int | None = None
    burst: int | None = None
    loop_excludes: tuple[str, ...] = ()  # regular expressions; no opcode of the loop may begin with a match of one
    steps: int | None = None  # wgmma: products of an accumulator from one wait to the next, both operands in memory
    registers_from: str | None = None  # wgmma: the source, relative to csrc, with the registers of each role
    overlap: int | None = None  # wgmma: at least so many exponentials between a product of the loop and its wait
    loads: int | None = None  # at least so many vector loads of each width in flight together
    load_bits: int = 0  # of no smaller widths


# The kernels on wgmma. One group of products is in flight while the lead of the next is issued.
WGMMA = Rule(
    "",
    ("HGMMA", "UTMALDG", r"SYNCS\.PHASECHK", "UTMASTG", "STSM"),
    lead=48,
    pause=64,
    gap=16,
    loop_excludes=("MEMBAR", "ERRBAR", "BAR", "UCGABAR", "LDL", "STL"),
    steps=4,
    registers_from="gemm/gemm_sm90.cuh",
)

# Before its products a consumer may clear what the last k tile has of the next group, and wait for the other one.
WGMMA_TERMS = replace(WGMMA, lead=56, loop_excludes=tuple(opcode for opcode in WGMMA.loop_excludes if opcode != "BAR"))

# Two groups of products follow each other, Q K^T and P V. The softmax of the former runs under the latter.
ATTENTION_WGMMA = Rule(
    "",
    ("HGMMA", "UTMALDG", r"SYNCS\.PHASECHK", "UTMASTG", "STSM", r"MUFU\.EX2"),
    lead=48,
    gap=24,
    loop_excludes=("MEMBAR", "ERRBAR", "UCGABAR", "LDL", "STL"),
    registers_from="attention/tiles_sm90.h",
    overlap=48,
)

# P is computed under dP: all exponentials of a step, of which a thread has 32 or 64. Threads write dS in each step,
# which needs the fence of asynchronous accesses (MEMBAR), and dQ leaves by bulk reductions. Before the first product,
# dP, its accumulators are loaded with -delta.
ATTENTION_WGMMA_BACKWARD = replace(
    ATTENTION_WGMMA,
    contains=("HGMMA", "UTMALDG", r"SYNCS\.PHASECHK", "UTMASTG", "UTMAREDG", "STSM", r"MUFU\.EX2"),
    loop_excludes=("ERRBAR", "UCGABAR", "LDL", "STL"),
    lead=112,
    gap=None,
    overlap=32,
)

# One consumer computes P while the other multiplies, so no exponential need be under its own consumer's products.
# Before the first product, accumulators are loaded with -lse or -delta.
ATTENTION_WGMMA_BACKWARD_KEYS = replace(ATTENTION_WGMMA, lead=112, gap=None, overlap=None)
# P is computed under dP.
ATTENTION_WGMMA_BACKWARD_QUERIES = replace(ATTENTION_WGMMA, gap=None, overlap=32)

# The first rule that matches a kernel applies; a kernel without a rule is a fault.
RULES = (
    Rule("probe", shared_bytes=0),
    Rule("bucket_table_kernel", shared_bytes=0),
    # It waits for other devices: acquire and release with system scope.
    Rule("(one|two)_shot_kernel", (r"LDG\.E\.EF\.128", r"STG\.E\.EF\.128", "DFMA", r".*STRONG\.SYS"), shared_bytes=72),
    Rule("bucket_pack_kernel", (r"LDG\.E\.EF\.128", r"STG\.E\.EF\.128"), shared_bytes=4032),
    Rule("bucket_kernel<2", (r"LDG\.E\.EF\.128", "DFMA", "ATOMG"), shared_bytes=72),
    Rule("bucket_kernel", (r"LDG\.E\.EF\.128", r"STG\.E\.EF\.128", "DFMA", "ATOMG"), shared_bytes=72),
    # Both operands of this layout would have to be transposed, which ldmatrix cannot do with 4-byte elements.
    Rule("gemm_sm80<Gemm<float, [12], false, false", ("HMMA", "LDGSTS"), lead=8, pause=112, burst=8),
    Rule("gemm_sm80<Gemm<(half_t|bfloat16_t).*GemmConfig{128, ", ("HMMA", "LDSM", "LDGSTS"), lead=8, pause=12, burst=4),
    # Several blocks of smaller tiles share an SM: the products of one fill the pauses of the others.
    Rule("gemm_sm80<Gemm<(half_t|bfloat16_t)", ("HMMA", "LDSM", "LDGSTS"), lead=8, pause=32, burst=10),
    # The number of terms is no constant: more instructions decide what a step copies. The first has the layout of the
    # rule at the top.
    Rule("gemm_sm80<GroupedGemm<float.*, 2, false>>", ("HMMA", "LDGSTS"), lead=20, pause=112, burst=8),
    Rule("gemm_sm80<GroupedGemm<float", ("HMMA", "LDSM", "LDGSTS"), lead=20, pause=112, burst=10),
    # Of terms that are gathered each k tile has other rows, whose indices are loaded among its products.
    Rule("gemm_sm80<GroupedGemm<.*, 2, true>>", ("HMMA", "LDSM", "LDGSTS"), lead=112, pause=112, burst=16),
    Rule("gemm_sm80<GroupedGemm<.*, 1, true>>", ("HMMA", "LDSM", "LDGSTS"), lead=12, pause=36, burst=10),
    Rule("gemm_sm80<GroupedGemm", ("HMMA", "LDSM", "LDGSTS"), lead=12, pause=32, burst=10),
    # ptxas moves most of the rounding and splitting after the products of a step, whatever the source order.
    Rule("gemm_sm80", ("HMMA", "LDSM", "LDGSTS"), lead=8, pause=112, burst=10),
    # A swapped tile leaves through shared memory and registers; staged for TMA, float32 needs no stmatrix.
    replace(WGMMA, name=r"gemm_sm90<.*GemmConfig{\d+, \d+, \d+, \w+, true", contains=WGMMA.contains[:3]),
    replace(WGMMA, name="gemm_sm90<Gemm<float", contains=WGMMA.contains[:4]),
    replace(WGMMA, name="gemm_sm90<GroupsOfRows", registers_from="gemm/groups_sm90.cuh"),
    replace(WGMMA_TERMS, name="gemm_sm90<GroupsOfTerms<.*, true>", registers_from="gemm/gather_sm90.cuh"),
    replace(WGMMA_TERMS, name="gemm_sm90<GroupsOfTerms", registers_from="gemm/groups_sm90.cuh"),
    replace(WGMMA, name="gemm_sm90"),
    # A consumer adds each k tile to its sums before it issues the next: the other one multiplies meanwhile.
    replace(
        WGMMA,
        name="scaled_gemm_sm90",
        contains=("QGMMA", *WGMMA.contains[1:]),
        lead=None,
        pause=None,
        gap=None,
        registers_from="gemm/scaled_gemm_sm90.cuh",
    ),
    Rule(
        r"scaled_gemm_sm89<ScaledGemm<\w+, \w+, GemmConfig{128",
        ("QMMA", "LDSM", r"LDGSTS\S*\.128"),
        lead=8,
        pause=28,
        burst=4,
    ),
    # sm_100 converts the operands to float16.
    Rule("scaled_gemm_sm89", ("[QH]MMA", "LDSM", r"LDGSTS\S*\.128"), lead=16, pause=96, burst=10),
    # Here ptxas moves the softmax after the wait, so that only the other consumer's products overlap it.
    replace(ATTENTION_WGMMA, name=r"attention_fwd_sm90<Forward<\w+, ForwardConfig{256, 256, \d+, 80", overlap=0),
    replace(ATTENTION_WGMMA, name=r"attention_fwd_sm90<Forward<\w+, ForwardConfig{256", overlap=30),
    replace(ATTENTION_WGMMA, name="attention_fwd_sm90"),
    # dP^T is in flight during the softmax; the kernel with options computes both together, after the wait.
    replace(ATTENTION_WGMMA_BACKWARD, name=r"attention_bwd_sm90<Backward<\w+, \w+{[\w, ]+}, true", overlap=0),
    replace(ATTENTION_WGMMA_BACKWARD, name="attention_bwd_sm90"),
    replace(ATTENTION_WGMMA_BACKWARD_KEYS, name="attention_bwd_keys_sm90"),
    replace(
        ATTENTION_WGMMA_BACKWARD_QUERIES,
        name=r"attention_bwd_queries_sm90<BackwardQueries<\w+, \w+{[\w, ]+}, true",
        overlap=0,
    ),
    replace(ATTENTION_WGMMA_BACKWARD_QUERIES, name="attention_bwd_queries_sm90"),
    Rule("attention_fwd_sm80", ("HMMA", "LDSM", "LDGSTS", r"STG\.E\.128")),
    Rule("attention_combine", shared_bytes=0),
    Rule("attention_tail", (r"STG\.E\.128",), shared_bytes=0),
    Rule("attention_cache_sm80", ("HMMA", "LDSM", "LDGSTS", r"STG\.E\.128")),
    Rule("attention_cache_combine", shared_bytes=0),
    Rule("attention_cache_append", (r"LDG\.E\.128", r"STG\.E\.128"), shared_bytes=0),
    Rule("attention_bwd_sm80", ("HMMA", "LDSM", "LDGSTS", "RED", r"STG\.E\.128"), (r"REDG\.E\.ADD\.F32x4",)),
    Rule("attention_bwd_rows", (r"LDG\.E\.128", r"STG\.E\.128"), shared_bytes=0),
    Rule("attention_bwd_finish", (r"STG\.E\.128",)),
    Rule("attention_bwd_sinks"),
    Rule("activation_grad", loads=4),
    Rule("largest_magnitudes", ("RED",), loads=8),
    Rule("quantize_tile<.*, 1, ", (r"STG\.E\.128",), loads=8, load_bits=128),  # others are of seed and offset
    Rule("quantize_tile", (r"STG\.E\.128",), loads=8),
    Rule("combine_rows", (r"LDG\.E(\.\w+)*\.128", r"STG\.E\.128"), shared_bytes=0, loads=4),
    Rule("gate_grad", (r"LDG\.E(\.\w+)*\.128", r"STG\.E\.128"), shared_bytes=0),
    Rule("add_block_sums"),
    Rule("clear_words", shared_bytes=0),
    Rule("clear_rest", (r"STG\.E\.128",), shared_bytes=0),
    Rule("copy_lines_sm90<Words<4>", (r"LDG\.E\.128", r"STG\.E\.128"), shared_bytes=0),
    Rule("copy_lines_sm90<Words<2>", (r"LDG\.E\.64", r"STG\.E\.64"), shared_bytes=0),
    Rule("copy_lines_sm90<unsigned", ("LDG", "STG"), shared_bytes=0),
    Rule("transpose_tile_sm90", ("LDG", "STS", "LDS", "STG")),
    # The main loops of products. That of tf32 computes the addresses of its copies before its first product.
    Rule("logits_sm80<Gemm<float, 1", ("HMMA", "LDSM", "LDGSTS", r"MUFU\.EX2", "STG"), lead=24, pause=112, burst=10),
    Rule("logits_sm80", ("HMMA", "LDSM", "LDGSTS", r"MUFU\.EX2", "STG"), lead=8, pause=112, burst=10),
    replace(WGMMA, name="logits_sm90", contains=(*WGMMA.contains[:3], r"MUFU\.EX2")),
    Rule("report_wrong_targets", shared_bytes=0),
    Rule("total_statistics", ("LDG", "STG", r"MUFU\.EX2")),
    Rule("logit_statistics", (r"LDG\.E(\.\w+)*\.128", r"STG\.E\.128")),
    Rule("logit_grad", (r"LDG\.E(\.\w+)*\.128", r"STG\.E\.128", r"STG\.E\.64"), shared_bytes=0),
)

# Opcodes that characterize a kernel, in the order of its record.
SHOWN = [*("HGMMA", "QGMMA", "QMMA", "HMMA", "FFMA", "DFMA", "UTMALDG", "UTMASTG", "STSM"), *("LDGSTS", "LDSM")]
SHOWN += ["LDS", "STS", "LDG", "STG", "BAR"]
NOTHING = {"MOV", "LDC", "EXIT", "BRA", "NOP"}  # the opcodes of a kernel that returns at once
PRODUCTS_AND_COPIES = {"HGMMA", "QGMMA", "QMMA", "HMMA", "UTMALDG", "UTMASTG", "STSM", "LDGSTS", "LDSM"}


@dataclass
class Kernel(compiled.Kernel):
    """With what the gates need of its machine code."""

    stack_bytes: int = 0
    local_bytes: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)
    groups: list[tuple[str, ...]] = field(default_factory=list)  # find_group of each wait for wgmma
    role_registers: list[tuple[str, int]] = field(default_factory=list)  # setmaxnreg: "DEALLOC" or "TRY_ALLOC", count
    in_flight: dict[int, int] = field(default_factory=dict)  # bits of a vector load -> the most at once

    @property
    def version(self) -> int:
        """90 for sm_90a."""
        return int(re.sub(r"\D", "", self.arch))

    @property
    def is_empty(self) -> bool:
        """Whether the kernel returns at once: the launchers choose another on this architecture."""
        return bool(self.opcodes) and {code.split(".")[0] for code in self.opcodes} <= NOTHING

    def count(self, opcode: str) -> int:
        """The number of occurrences of `opcode`, with any modifiers."""
        return sum(n for code, n in self.opcodes.items() if code.split(".")[0] == opcode)


def find_tool(name: str) -> str:
    """The path of cuobjdump or nvdisasm; raises FileNotFoundError."""
    try:
        import triton

        bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        if bundled.exists():
            return str(bundled)
    except ImportError:
        pass
    if found := shutil.which(name):
        return found
    raise FileNotFoundError(f"{name} is neither on PATH nor in a triton wheel; pip install triton")


def _dump(binary: Path, *flags: str, folder: Path | None = None) -> str:
    command = [find_tool("cuobjdump"), *flags, str(binary.absolute())]
    with tempfile.TemporaryFile("w+") as out:  # through a pipe it takes twice as long
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=folder)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        out.seek(0)
        return out.read()


def read_kernels(binary: Path, machine_code: bool = True) -> list[Kernel]:
    """The kernels of a library or an object file, sorted by architecture and name. Without `machine_code`, whose text
    takes a minute to write, only their resources."""
    kernels: dict[tuple[str, str], Kernel] = {}

    def of(arch: str, symbol: str) -> Kernel:
        return kernels.setdefault((arch, symbol), Kernel(arch))

    for arch, line in _by_arch(_dump(binary, "-res-usage")):
        if match := re.match(r"\s*Function (\S+):$", line):
            kernel = of(arch, match[1])
        elif match := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            kernel.registers, kernel.stack_bytes, kernel.shared_bytes, kernel.local_bytes = map(int, match.groups())
            # From sm_90 on, cuobjdump includes memory reserved by the system, for kernels where ptxas records it.
            if kernel.shared_bytes >= RESERVED_SHARED_BYTES and not arch.startswith(("sm_7", "sm_8")):
                kernel.shared_bytes -= RESERVED_SHARED_BYTES
    instruction = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?([A-Z][A-Zx0-9_.]*)[^;]*)")
    code: list[tuple[int, str]] = []
    for arch, line in _by_arch(_dump(binary, "-sass") if machine_code else ""):
        if match := re.match(r"\s*Function : (\S+)", line):
            kernel = of(arch, match[1])
            code = []
        elif match := instruction.match(line):
            kernel.opcodes[match[3]] += 1
            code.append((int(match[1], 16), match[2].strip()))
            if load := VECTOR_LOAD.match(code[-1][1]):
                bits = int(load[1])
                kernel.in_flight[bits] = max(kernel.in_flight.get(bits, 0), loads_at_once(code))
            if match[3].startswith("BRA"):
                kernel.loop = kernel.loop if kernel.loop.instructions else find_loop(code)  # innermost first
            elif match[3] == "WARPGROUP.DEPBAR.LE" and (group := find_group(code)):
                kernel.groups.append(group)
            elif change := re.match(r"USETMAXREG\.(DEALLOC|TRY_ALLOC).* 0x([0-9a-f]+)", code[-1][1]):
                kernel.role_registers.append((change[1], int(change[2], 16)))
    full_names = {arch.rstrip("a"): arch for arch, _ in kernels}
    for arch, symbol, threads in _launch_bounds(binary):
        of(full_names[arch], symbol).threads = threads
    names = readable([symbol for _, symbol in kernels])
    for kernel, name in zip(kernels.values(), names):
        kernel.name = name
    return sorted(kernels.values(), key=lambda k: (k.arch, k.name))


def _launch_bounds(binary: Path) -> Iterator[tuple[str, str, int]]:
    """(architecture without its "a", symbol, the most threads of a block) of the kernels that have launch bounds."""
    with tempfile.TemporaryDirectory() as folder:
        _dump(binary, "-xelf", "all", folder=Path(folder))
        for cubin in sorted(Path(folder).iterdir()):
            arch = cubin.name.split(".")[-2].rstrip("a")  # name.sm_90.cubin, or name.sm_90a.cubin of later releases
            for name, data in _elf_sections(cubin.read_bytes()):
                if not name.startswith(".nv.info."):
                    continue
                at = 0
                while at + 4 <= len(data):  # a format, an attribute, and a value or the size of one that follows
                    form, attribute, size = struct.unpack_from("<BBH", data, at)
                    at += 4
                    if form != FOLLOWED_BY_VALUE:
                        continue
                    if attribute in MAX_OR_REQUIRED_THREADS:
                        yield arch, name.removeprefix(".nv.info."), math.prod(struct.unpack_from("<3I", data, at))
                    at += size


def _elf_sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names = elf[headers[names_at][4] :][: headers[names_at][5]]
    for name, _, _, _, offset, length in headers:
        yield names[name : names.index(b"\0", name)].decode(), elf[offset : offset + length]


def find_loop(code: Sequence[tuple[int, str]]) -> Loop:
    """The loop that the last instruction of `code`, (address, text) pairs, closes by a branch back; empty if there is
    none, or one without matrix products. Of the paths through the loop, the one with the most 16-byte copies counts,
    and of these the shortest: it handles the interior of a matrix."""
    last, text = code[-1]
    first = _branch_target(text)
    if first is None or first >= last:
        return Loop()
    body = [(address, text) for address, text in code if address >= first]
    if not any("MMA." in text for _, text in body):
        return Loop()
    # address -> the best path to it: its copies, its instructions (negative: fewer are better), and the address before.
    best: dict[int, tuple[int, int, int]] = {first: (0, 0, first)}
    for (address, text), (following, _) in zip(body, body[1:]):
        if address not in best:
            continue
        copies, instructions, _ = best[address]
        way = (copies + len(re.findall(r"LDGSTS\S*\.128 ", text)), instructions - 1, address)
        target = _branch_target(text)
        for successor in {target} if text.startswith("BRA 0x") else {target, following}:
            if successor is not None and successor > address:  # an inner loop counts once
                best[successor] = max(best.get(successor, way), way)
    if last not in best:
        return Loop()
    texts, path = dict(body), [last]
    while path[-1] != first:
        path.append(best[path[-1]][2])
    return measure_loop([texts[address] for address in reversed(path)])


def measure_loop(body: Sequence[str]) -> Loop:
    """The counts for these instructions of one iteration."""
    pauses, bursts = [0], [0]  # before the first product, between products, and after the last one
    for text in body:
        if "MMA." in text:
            pauses.append(0)
            bursts.append(0)
        else:
            pauses[-1] += 1
            bursts[-1] += bool(re.search(r"\b(LDSM|LDGSTS)\b", text))
    if len(pauses) == 1:  # this path has no products
        return Loop(len(body), len(body) - 1, len(body) - 1, body=tuple(body))
    gap = max(pauses[1:-1], default=0)
    pause = max(gap, pauses[-1] + pauses[0])
    burst = max([*bursts[1:-1], bursts[-1] + bursts[0]])
    return Loop(len(body), pauses[0], pause, gap, burst, tuple(body))


def find_group(code: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """The instructions from the first to the last product of wgmma between the last instruction of `code`, a wait, and
    the wait before it; empty if there are no products."""
    group: list[str] = []
    for _, text in reversed(code[:-1]):
        if "WARPGROUP.DEPBAR" in text:
            break
        group.append(text)
    products = [i for i, text in enumerate(group) if "GMMA." in text]
    return tuple(reversed(group[products[0] : products[-1] + 1])) if products else ()


VECTOR_LOAD = re.compile(r"(?:@!?U?P\w+\s+)?LDG\S*\.(64|128)\b\S* R(\d+), (.*)")


def loads_at_once(code: Sequence[tuple[int, str]]) -> int:
    """The loads as wide as the last instruction of `code`, a vector load, that are in flight when it is issued: back to
    a barrier, or to one whose result was read before."""
    last = VECTOR_LOAD.match(code[-1][1])
    count, read = 0, set[int]()
    for _, text in reversed(code):
        if re.search(r"\b(BAR|CALL|RET)\b", text):
            break
        if (match := VECTOR_LOAD.match(text)) and last and match[1] == last[1]:
            first = int(match[2])
            result = set(range(first, first + int(match[1]) // 32))
            if result & read:
                break
            count += 1
            read |= {int(register) for register in re.findall(r"\bR(\d+)", match[3])}
            continue
        target, _, sources = text.partition(",")
        read -= {int(register) for register in re.findall(r"\bR(\d+)$", target)}  # a value that is not the load's
        read |= {int(register) for register in re.findall(r"\bR(\d+)", sources)}
    return count


def _branch_target(text: str) -> int | None:
    match = re.search(r"\bBRA\b.* (0x[0-9a-f]+)(?:\s+[&?].*)?$", text)  # sm_120: what it waits for comes after it
    return int(match[1], 16) if match else None


def _by_arch(text: str) -> Iterator[tuple[str, str]]:
    arch = ""
    for line in text.splitlines():
        if line.startswith("arch = "):  # absent in a cubin, which has only one
            arch = line.removeprefix("arch = ")
        yield arch, line


def compiler_complaints(text: str) -> list[str]:
    """The lines in which ptxas reports that it serialized wgmma, or ignored a register count."""
    return [line.strip() for line in text.splitlines() if re.search(r"\(C(75\d\d|7602)\)", line)]


def rule_of(kernel: Kernel, rules: Sequence[Rule]) -> Rule | None:
    return next((rule for rule in rules if re.match(rule.name, kernel.name)), None)


LOOP_LIMITS = {  # field of Rule and Loop -> what it counts, and what to do about it
    "lead": (
        "instructions before the first product of its loop",
        "a branch keeps the compiler from interleaving copies and loads with products",
    ),
    "pause": (
        "instructions between two products of its loop",
        "they depend on each other, or the compiler has grouped them",
    ),
    "gap": (
        "instructions from one product of an iteration to the next",
        "compute what they need before the first one",
    ),
    "burst": (
        "LDSM and LDGSTS between two products of its loop",
        "distribute loads and copies among the products",
    ),
}


# Bytes of local memory that ptxas 13.0 is known to use, by a regular expression for the beginning of the kernel's name:
# at the limit of 255 registers a few loads for each tile, with options and block masks; and the arguments of printf.
KNOWN_LOCAL = {
    r"attention_cache_sm80<CacheForward<float, CacheConfig\{256, ": 16,
    r"attention_fwd_sm80<Forward<float, ForwardConfig\{256, .* true>>": 8,
    r"attention_bwd_sm80<Backward<.* true>>": 24,
    "report_wrong_targets": 32,
}


def known_local(kernel: Kernel) -> int:
    return max((size for name, size in KNOWN_LOCAL.items() if re.match(name, kernel.name)), default=0)


def faults(kernels: Iterable[Kernel], rules: Sequence[Rule] = RULES) -> list[str]:
    """The faults of the kernels, one sentence each."""
    found = []
    for kernel in kernels:
        where = f"{kernel.arch} {kernel.name}: "
        loads, stores = kernel.count("LDL"), kernel.count("STL")
        is_known = 0 < kernel.stack_bytes <= known_local(kernel)
        if (loads or stores or kernel.stack_bytes or kernel.local_bytes) and not is_known:
            found.append(
                f"{where}expected everything in registers, got {loads} loads from and {stores} stores to local memory "
                f"and {kernel.stack_bytes} bytes of stack; registers spill (allow more, or use fewer), or an array is "
                "indexed at run time (unroll the loop)"
            )
        if kernel.threads == 0:
            found.append(f"{where}expected launch bounds, got none; declare the kernel with GLOBAL(threads, blocks)")
        rule = rule_of(kernel, rules)
        if rule is None:
            found.append(f"{where}expected a rule in tools/static_gates.py, got none; add one")
            continue
        if kernel.is_empty:
            continue
        # Loops are scheduled around asynchronous copies, which sm_75 does not have.
        for name, (what, advice) in LOOP_LIMITS.items() if kernel.version >= 80 else ():
            limit, got = getattr(rule, name), getattr(kernel.loop, name)
            if limit is not None and got > limit:
                found.append(f"{where}expected at most {limit} {what}, got {got}; {advice}")
        for pattern in rule.loop_excludes:
            if within := [text for text in kernel.loop.body if re.match(rf"(@!?U?P\w+\s+)?{pattern}", text)]:
                found.append(f"{where}expected no {pattern} in its loop, got {within[0]}")
        if rule.steps is not None:
            found += [where + fault for fault in wgmma_faults(kernel, rule.steps)]
        if rule.registers_from is not None:
            found += [where + fault for fault in register_faults(kernel, rule.registers_from)]
        if rule.overlap is not None and (overlap := exponentials_in_flight(kernel.loop)) < rule.overlap:
            found.append(
                f"{where}expected at least {rule.overlap} exponentials between a product of its loop and the wait for "
                f"it, got {overlap}; the compiler has moved the softmax after the wait"
            )
        if rule.loads is not None and (loads := loads_in_flight(kernel, rule)) < rule.loads:
            found.append(
                f"{where}expected {rule.loads} vector loads in flight together, got {loads}; load all "
                "before the first is converted, which waits for it"
            )
        for pattern in wanted_opcodes(kernel, rule):
            if not any(re.match(pattern, opcode) for opcode in kernel.opcodes):
                found.append(f"{where}expected an instruction {pattern}, got none among {kernel.opcodes.total()}")
    return found


def wanted_opcodes(kernel: Kernel, rule: Rule) -> list[str]:
    """The patterns of a rule that apply to the kernel's architecture."""
    wanted = [*rule.contains, *(rule.contains_sm90 if kernel.version >= 90 else ())]
    if kernel.version < 80:  # copies through registers; tensor cores for float16 alone
        multiplies = re.search(r"<Gemm<(bfloat16_t|float)\b|<\w+<bfloat16_t\b", kernel.name) is None
        wanted = ["STS" if opcode == "LDGSTS" else opcode for opcode in wanted if opcode != "HMMA" or multiplies]
    return wanted


def loads_in_flight(kernel: Kernel, rule: Rule) -> int:
    return min((count for bits, count in kernel.in_flight.items() if bits >= rule.load_bits), default=0)


def exponentials_in_flight(loop: Loop) -> int:
    """The most exponentials between a product of the loop and a wait with no product between them."""
    most = 0
    in_flight: int | None = None  # since the last product
    for text in loop.body:
        if "GMMA." in text:
            in_flight = 0
        elif "WARPGROUP.DEPBAR" in text:
            most = max(most, in_flight or 0)
        elif "MUFU.EX2" in text and in_flight is not None:
            in_flight += 1
    return most


def wgmma_faults(kernel: Kernel, steps: int) -> list[str]:
    """What is wrong with the groups of wgmma: ptxas keeps a group in flight only if each accumulator stays in its
    registers and nothing branches, and then only the last product signals the wait's scoreboard, gsb0."""
    product = re.compile(r"GMMA\.\S+ (R\d+), (\S+?), (?:gdesc\S+ )?(\w+)")  # the sums, a, and the sums they add to
    found = []
    waited = sum("GMMA." in text for group in kernel.groups for text in group)
    issued = kernel.count("HGMMA") + kernel.count("QGMMA")
    if waited < issued:
        found.append(f"expected a wait for all {issued} products, got one for {waited}")
    moved, loaded, signals, branches, counts = [], [], [], [], []
    for group in kernel.groups:
        products = [text for text in group if "GMMA." in text]
        operands = [match.groups() for text in products if (match := product.search(text))]
        counts.append(Counter(sums for sums, _, _ in operands))
        moved += [text for text, (sums, _, of) in zip(products, operands) if of not in (sums, "RZ")]
        loaded += [text for text, (_, a, _) in zip(products, operands) if not a.startswith("gdesc")]
        signals += [text for text in products[:-1] if "gsb0" in text]
        branches += [text for text in group if re.search(r"\b(BRA|BRX|JMP|CALL|BSYNC|WARPSYNC)\b", text)]
    for expected, got in (
        ("products that add to their own accumulators", moved),
        ("both operands in shared memory", loaded),
        ("only the last product of a group to signal gsb0", signals),
        ("no branch between the products of a group", branches),
    ):
        if got:
            found.append(f"expected {expected}, got {got[0]}")
    accumulators = set().union(*counts)
    least = min((count[sums] for count in counts for sums in accumulators), default=steps)
    if least < steps:
        found.append(
            f"expected at least {steps} products with each accumulator from one wait to the next, got {least}; the "
            "source waits earlier, or ptxas has serialised them, and its message C75xx says why"
        )
    return found


def register_plan(source: str, consumers: int) -> tuple[int, int]:
    """The registers of a thread of the producer and of a consumer in a source, relative to csrc."""
    text = (_build.CSRC / source).read_text()
    match = re.search(r"kProducerRegisters = (\d+), kConsumerRegisters = (\d+);", text)
    match = match or re.search(rf"kRegistersOf{('One', 'Two', 'Three')[consumers - 1]} = {{(\d+), (\d+)}};", text)
    if match is None:
        raise RuntimeError(f"{source}: expected the registers of {consumers} consumers, got none")
    return int(match[1]), int(match[2])


def register_faults(kernel: Kernel, source: str) -> list[str]:
    """What is wrong with setmaxnreg: its counts differ from the source, or a block has too few registers for them, and
    would wait for more without end."""
    warpgroups = kernel.threads // 128
    producer, consumer = register_plan(source, warpgroups - 1)
    found = []
    if sorted(kernel.role_registers) != [("DEALLOC", producer), ("TRY_ALLOC", consumer)]:
        got = ", ".join(f"USETMAXREG.{kind} {count}" for kind, count in kernel.role_registers) or "none"
        found.append(f"expected setmaxnreg to {producer} and to {consumer}, as in {source}, got {got}")
    needed, limit = producer + (warpgroups - 1) * consumer, warpgroups * kernel.registers
    if needed > limit:
        found.append(
            f"expected at most {limit} registers of {warpgroups} warpgroups, {kernel.registers} each at launch, got "
            f"{producer} + {warpgroups - 1} * {consumer} = {needed} in {source}"
        )
    return found


# Of the attributes in sections .nv.info.*: EIFMT_SVAL; EIATTR_MAX_THREADS and EIATTR_REQNTID, three sizes each.
FOLLOWED_BY_VALUE = 4
MAX_OR_REQUIRED_THREADS = (0x05, 0x10)


Records = dict[str, dict[str, dict[str, Any]]]  # architecture -> name -> record


def record(kernel: Kernel, rules: Sequence[Rule] = RULES) -> dict[str, Any]:
    """A kernel in golden_kernels.json; without shared_bytes if its instances use different amounts."""
    found: dict[str, Any] = {"registers": kernel.registers, "threads": kernel.threads}
    rule = rule_of(kernel, rules)
    if rule and rule.shared_bytes is not None:
        found["shared_bytes"] = kernel.shared_bytes + rule.shared_bytes
    if kernel.loop.instructions:
        found["loop"] = [kernel.loop.instructions, kernel.loop.lead, kernel.loop.pause, kernel.loop.gap]
    opcodes = {opcode: n for opcode in SHOWN if (n := kernel.count(opcode))}
    return found | {"instructions": kernel.opcodes.total(), "opcodes": opcodes}


def records(kernels: Iterable[Kernel]) -> Records:
    found: Records = {}
    for kernel in kernels:
        found.setdefault(kernel.arch, {})[kernel.name] = record(kernel)
    return found


def read_golden(path: Path = GOLDEN) -> tuple[str, Records]:
    """The CUDA version of the records, and the records."""
    golden = json.loads(path.read_text())
    return golden.pop("cuda"), golden


def write_golden(cuda: str, new: Records, path: Path = GOLDEN) -> None:
    """One kernel per line. Architectures that the library was not built for stay, if they are of the same version."""
    old_cuda, old = read_golden(path)
    parts = [f'"cuda": {json.dumps(cuda)}']
    for arch, kernels in sorted({**(old if old_cuda == cuda else {}), **new}.items()):
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kernel)}" for name, kernel in kernels.items())
        parts.append(f"{json.dumps(arch)}: {{\n{lines}\n}}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def stale(cuda: str, new: Records, path: Path = GOLDEN) -> list[str]:
    """The architectures whose records differ from the file; empty if the CUDA versions differ. The file has those that
    `make test` compiles for, and others after --write."""
    old_cuda, old = read_golden(path)
    return [arch for arch, kernels in new.items() if old.get(arch, kernels) != kernels] if old_cuda == cuda else []


def table(path: Path = GOLDEN) -> str:
    """The table in docs/kernels.md: a row per family of kernels."""

    def span(values: Iterable[int]) -> str:
        found = sorted(set(values))
        return "–".join(map(str, dict.fromkeys([*found[:1], *found[-1:]])))

    cuda, golden = read_golden(path)
    families: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for arch, kernels in golden.items():
        for name, kernel in kernels.items():
            families.setdefault(name.partition("<")[0], []).append((arch, kernel))
    head = ["kernel", *golden, "registers", "threads", "loop", "lead", "products and copies"]
    rows = [head, ["---"] * len(head)]
    for family, found in sorted(families.items()):
        loops = [kernel["loop"] for _, kernel in found if "loop" in kernel]
        used = {opcode for _, kernel in found for opcode in kernel["opcodes"]}
        rows.append(
            [
                f"`{family}`",
                *(str(sum(of_arch == arch for of_arch, _ in found)) for arch in golden),
                span(kernel["registers"] for _, kernel in found),
                span(kernel["threads"] for _, kernel in found),
                span(instructions for instructions, *_ in loops),
                span(lead for _, lead, *_ in loops),
                ", ".join(opcode for opcode in SHOWN if opcode in used & PRODUCTS_AND_COPIES),
            ]
        )
    return f"CUDA {cuda}.\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table() -> str:
    """docs/kernels.md with the current table."""
    return with_section(DOCUMENT, BEGIN, table())


def cuda_objects(stamp: dict[str, Any]) -> list[Path]:
    """The objects of the library's CUDA sources."""
    config = _build.BuildConfig(stamp["torch"], stamp["compiler"], None, tuple(stamp["archs"]), jobs=1)
    folder = ROOT / "build" / config.name / "csrc"
    sources = sorted(source for source in _build.CSRC.rglob("*.cu") if config.archs_of(source))
    return [(folder / source.relative_to(_build.CSRC)).with_suffix(".o") for source in sources]


def build_log(stamp: dict[str, Any]) -> str:
    """nvcc's messages for the objects of the library; raises FileNotFoundError if there are none."""
    text = ""
    for path in cuda_objects(stamp):
        log = path.with_suffix(".o" + _build.LOG_SUFFIX)
        if not log.exists():
            raise FileNotFoundError(f"{log}: no compiler messages; build with CUDA_EXT_CUDA=1 make build")
        text += log.read_text()
    return text


def shared_kernels(objects: Iterable[Path]) -> list[str]:
    """The faults of objects for some architectures alone: kernels that are not of these sources, so that others launch
    them too."""
    found = []
    for path in objects:
        for marker, arch in ((_build.SM90A_SOURCES, "sm_90a"), (_build.SM89_SOURCES, "sm_89")):
            if marker not in path.name:
                continue
            symbols = re.findall(r"^\s*Function (\S+):$", _dump(path, "-res-usage"), re.MULTILINE)
            names = readable(symbols) if symbols else []
            found += [
                f"{path.name}: expected only kernels for {arch}, got {name}; launch it from another source"
                for name in names
                if marker not in name.partition("<")[0]
            ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update golden_kernels.json and docs/kernels.md")
    arguments = parser.parse_args()
    stamp = _stamp.read()
    if stamp["cuda"] is None:
        print("static_gates: the library was built without CUDA; build it with CUDA_EXT_CUDA=1 make build")
        return 2
    kernels = read_kernels(_stamp.LIBRARY)
    missing = {_toolchain.sm_name(arch) for arch in stamp["archs"]} - {kernel.arch for kernel in kernels}
    found = [f"{arch}: expected kernels, got none" for arch in sorted(missing)]
    found += faults(kernels) + compiler_complaints(build_log(stamp)) + shared_kernels(cuda_objects(stamp))
    if arguments.write:
        write_golden(stamp["cuda"], records(kernels))
        DOCUMENT.write_text(with_table())
    found += [
        f"{GOLDEN.name}: the records of {arch} are not current; run tools/static_gates.py --write"
        for arch in stale(stamp["cuda"], records(kernels))
    ]
    for fault in found:
        print(fault)
    print(f"static_gates: {len(kernels)} kernels, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
