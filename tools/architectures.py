"""Compiles the CUDA kernels without wgmma for every architecture, one source at a time, without the library.

    python tools/architectures.py                        # the kernels that spill registers, if any
    python tools/architectures.py --arch 7.5 12.0 --only bwd
    python tools/architectures.py --write                # updates the table in docs/kernels.md

It needs nvcc and cuobjdump, and no GPU. A source takes 3 to 30 seconds for each architecture.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

import static_gates  # noqa: E402

from benchmarks.presentation.formatting import with_section  # noqa: E402
from cuda_ext import _build, _toolchain  # noqa: E402

# One for each shared memory and set of instructions; code for 8.6 runs on 8.9, and so on, but for products of FP8.
ARCHS = ("7.5", "8.0", "8.6", "9.0a", "10.0", "12.0")
ALL_ARCHS = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0a", "10.0", "10.3", "12.0", "12.1")
BEGIN = "<!-- written by tools/architectures.py -->"
# Runs a command and prints the processor time that it took.
TIMED = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:], stdout=sys.stderr)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
sys.exit(status)
"""
EMPTY = 8  # registers of a kernel that returns at once, because another is launched on the architecture


HOST_CODE = ("gemm_cuda.cu", "loss_cuda.cu", "scaled_gemm_cuda.cu")  # plans, and the choice of an instantiation

# Bytes of local memory that ptxas 13.0 is known to use, at the limit of registers that the launch bounds set.
KNOWN_LOCAL = {
    **{(arch, "activation_grad.cu"): 8 for arch in ("10.0", "10.3", "12.0", "12.1")},
    **{(arch, "gemm_sm80_tf32.cu"): 8 for arch in ("12.0", "12.1")},
    **{
        (arch, f"grouped_gemm_sm80_{kind}.cu"): 8
        for arch in ("10.0", "10.3", "12.0", "12.1")
        for kind in ("f16", "bf16", "tf32")
    },
    **{(arch, "attention_fwd_sm80_f32_d256.cu"): 8 for arch in ("12.0", "12.1")},
    **{(arch, "attention_cache_sm80_f32_d256.cu"): 16 for arch in ALL_ARCHS},
    **{(arch, "loss_passes.cu"): 32 for arch in ALL_ARCHS},  # the arguments of printf
}


@dataclass(frozen=True)
class Compiled:
    source: str
    arch: str
    seconds: float  # of a core
    bytes: int  # of machine code, compressed as in the library
    kernels: tuple[static_gates.Kernel, ...]

    @property
    def spilling(self) -> list[static_gates.Kernel]:
        """The kernels with more local memory than is known."""
        known = KNOWN_LOCAL.get((self.arch, self.source), 0)
        return [
            kernel
            for kernel in self.kernels
            if kernel.stack_bytes + kernel.local_bytes > max(known, static_gates.known_local(kernel))
        ]


def sources() -> list[Path]:
    """The sources with kernels for other architectures than sm_90a alone."""
    found = [path for path in _build.CSRC.rglob("*.cu") if path.parent.name not in ("rt", "launchers")]
    return sorted(path for path in found if _build.SM90A_SOURCES not in path.name and path.name not in HOST_CODE)


def compile_source(source: Path, arch: str, toolkit: _toolchain.Toolkit) -> Compiled:
    """Raises RuntimeError with nvcc's messages."""
    code = _toolchain.sm_name(arch).removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        cubin, packed = Path(folder, "kernels.cubin"), Path(folder, "kernels.fatbin")
        command = [str(toolkit.home / "bin" / "nvcc"), *_build.NVCC_FLAGS, f"-I{_build.CSRC}", "-cubin"]
        command += [f"-gencode=arch=compute_{code},code=sm_{code}", "-o", str(cubin), str(source)]
        done = subprocess.run([sys.executable, "-c", TIMED, *command], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{source.name} for {arch}: {done.stderr or done.stdout}")
        command = [str(toolkit.home / "bin" / "fatbinary"), f"--create={packed}", "--compress-mode=size", "-64"]
        subprocess.run([*command, f"--image3=kind=elf,sm={code},file={cubin}"], check=True)
        seconds = float(done.stdout.split()[-1])
        kernels = static_gates.read_kernels(packed, machine_code=False)
        return Compiled(source.name, arch, seconds, packed.stat().st_size, tuple(kernels))


def find_toolkit() -> _toolchain.Toolkit | None:
    import torch

    found = _toolchain.find_toolkits(torch.version.cuda) if torch.version.cuda else []
    return next((toolkit for toolkit in found if toolkit.usable), None)


def compile_all(archs: Sequence[str], only: str = "", jobs: int = 1) -> list[Compiled]:
    toolkit = find_toolkit()
    if toolkit is None:
        raise FileNotFoundError("architectures: expected a CUDA toolkit, found none; see python -m cuda_ext.info")
    wanted = [
        (source, arch)
        for arch in archs
        for source in sources()
        if only in source.name and _build.archs_of(source, (arch,))
    ]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda each: compile_source(each[0], each[1], toolkit), wanted))


def table(found: Sequence[Compiled]) -> str:
    """A row per family of kernels: the registers of those that an architecture launches. Then what each costs."""
    archs = list(dict.fromkeys(each.arch for each in found))
    registers: dict[str, dict[str, set[int]]] = {}
    for each in found:
        for kernel in each.kernels:
            if kernel.registers > EMPTY:
                family = registers.setdefault(kernel.name.partition("<")[0], {})
                family.setdefault(each.arch, set()).add(kernel.registers)

    def span(values: set[int]) -> str:
        return "–".join(map(str, sorted({min(values), max(values)}))) if values else ""

    rows = [["registers", *archs], ["---"] * (len(archs) + 1)]
    rows += [[f"`{name}`", *(span(of.get(arch, set())) for arch in archs)] for name, of in sorted(registers.items())]
    rows.append(["**shared memory of a block, KiB**", *map(block_kib, archs)])
    of_arch = [[each for each in found if each.arch == arch] for arch in archs]
    rows.append(["**machine code, MB**", *(f"{sum(each.bytes for each in of) / 1e6:.1f}" for of in of_arch)])
    rows.append(["**seconds of a core**", *(f"{sum(each.seconds for each in of):.0f}" for of in of_arch)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def block_kib(arch: str) -> str:
    """The shared memory that a block may have, as csrc/base/device.h says."""
    major = int(arch.partition(".")[0])
    return "64" if major == 7 else "163" if arch in ("8.0", "8.7") else "99" if major in (8, 12) else "227"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), metavar="ARCH", help=f"of {', '.join(ALL_ARCHS)}")
    parser.add_argument("--only", default="", help="sources whose name contains this")
    parser.add_argument("--write", action="store_true", help="update the table in docs/kernels.md")
    options = parser.parse_args()
    found = compile_all(options.arch, options.only, _toolchain.available_cores())
    spilling = [(each, kernel) for each in found for kernel in each.spilling]
    for each, kernel in spilling:
        used = kernel.stack_bytes + kernel.local_bytes
        print(f"{each.arch} {kernel.name}: expected no local memory, got {used} bytes")
    for arch in options.arch:
        of = [each for each in found if each.arch == arch]
        seconds, size = sum(each.seconds for each in of), sum(each.bytes for each in of) / 1e6
        print(f"{arch}: {len(of)} sources, {seconds:.0f} s, {size:.1f} MB")
    if options.write:
        text = f"CUDA {find_toolkit().version}.\n\n{table(found)}"  # type: ignore[union-attr]
        static_gates.DOCUMENT.write_text(with_section(static_gates.DOCUMENT, BEGIN, text))
    else:
        print(table(found), end="")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
