"""The stages of a GPU check and of its dry run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_check import carried, usable_build, variants
from benchmarks.gpu_check.stages import Stage
from cuda_ext import _build, _emulator, _toolchain

ROOT = _build.SOURCE_ROOT

# Not `python -m cuda_ext.info`, whose exit status is 1 before the library is built.
DESCRIBE = ("{python}", "-c", "from cuda_ext import info; print(info.render(info.report()))")
INFO = r"MiB /|^  (torch|python|setuptools|ninja|compiler|driver|cores|free memory): |, sm_\d|: CUDA \d"
BUILD = r"^cuda_ext: |\berror\b|^FAILED"
CONFORMANCE = r"FAULT|: rounding|faults; answers|^record: |\berror\b"
CORRECT = r": (WRONG|FAILED|HUNG|CRASHED|NOT RUN|not here): |^correct: "
PYTEST = r"^(FAILED|ERROR|lost|hung|crashed|begun)\b|\b(passed|failed|errors?)\b.* in [\d.]+s|^relay: "

# The sources of `python -m benchmarks`.
MEASURING = tuple(
    f"benchmarks/{name}" for name in ("__main__.py", "environment.py", "results.py", "suites", "presentation")
)
ISOLATED = "benchmarks/gpu_check/isolated.py"
CORRECTNESS = (ISOLATED, *(f"benchmarks/gpu_check/{name}.py" for name in ("correct", "mismatch", "product_cases")))
# What a process does first, and what needs several: before anything is measured.
FIRST_TESTS = ("tests/test_first_calls.py", "tests/test_distributed_cuda.py", "tests/test_capture.py")
# Baselines that take longer to compile or to run than everything else together.
SLOW = "torch.compile|FlexAttention|math|efficient"
PROFILED = ("gemm", "attention-forward", "attention-backward", "decode")

# The cases on which variants of the library are compared.
VARIED = r"^gemm forward .*(4096 × 4096 × 4096|8192 × 8192 × 8192|1 × 12288 × 4096) |S=4096 .*D=(64|128|256) bfloat16"

# One case of each family that a CPU measures quickly; the first case of a suite is always measured.
FEW = (
    "^gemm forward .*512 × 512 × 512 float32$|^flash_attention full forward .*S=1024 H=8 D=64 float32$|"
    "^pack forward .*ResNet-50 float32$"
)


def benchmark_stage(device: str, estimate: float, suites: tuple[str, ...], *more: str) -> Stage:
    """One command for all suites, so that the ceilings are measured once. Plots and the page can be made from the
    results on any machine."""
    options = ("--device", device, "--minutes", "{minutes}", "--out", "{out}", "--resume", "--no-plots")
    return Stage(
        "benchmarks",
        (("{python}", "-m", "benchmarks", "{parts}", *options, *more),),
        estimate,
        least=estimate / 15,
        most=1.2 * estimate,
        fills=True,
        needs=("build",),
        parts=suites,
        sources=MEASURING,
    )


def correctness_stage(backend: str, estimate: float) -> Stage:
    """All families of kernels side by side, each case in a process that it can spoil."""
    return Stage(
        "correct",
        (("{python}", "-m", "benchmarks.gpu_check.correct", "all", backend),),
        estimate,
        least=estimate / 3,
        needs=("build",),
        key=CORRECT,
        sources=(*CORRECTNESS, "benchmarks/suites/measure.py"),
    )


def test_stage(name: str, estimate: float, *arguments: str) -> Stage:
    return Stage(
        name,
        (("{python}", "tests/relay.py", "--record", "{state}/record", *arguments),),
        estimate,
        least=min(20, estimate),
        needs=("build",),
        key=PYTEST,
        sign=r"^relay: pytest ",
        sources=("tests",),
    )


def build_seconds(cores: int) -> float:
    """Estimate for the library and one architecture, at least a minute, which the slowest source takes."""
    sources = _build.BuildConfig("", "", _toolchain.Toolkit("", Path()), ("9.0a",), cores).sources
    seconds = {".cpp": _build.SECONDS_PER_CXX_FILE, ".cu": _build.SECONDS_PER_CUDA_FILE + _build.SECONDS_PER_ARCH}
    return 40 + max(60, sum(seconds[path.suffix] for path in sources) / cores)


MEASURED = ("gemm", "attention", "masks", "loss", "experts", "fp8", "bucket", "train")


def stages_on_gpu(cores: int) -> list[Stage]:
    """In the order of what they decide: does everything run, is it right, how fast is it, and why. The estimates are
    for an H100; the table in docs/gpu-check.md repeats them."""
    # Other test files may import packages that are not installed.
    marks = re.compile(r"mark\.(every_backend|cuda)\b")
    files = sorted(path for path in (ROOT / "tests").glob("test_*.py") if marks.search(path.read_text()))
    tests = [str(path.relative_to(ROOT)) for path in files]
    first = [name for name in tests if name in FIRST_TESTS]
    small_cases = ("--kernel-regex", "kns=cuda_ext", "{python}", "-m", "benchmarks.gpu_check.small_cases", "cuda")
    sanitizers = [
        Stage(
            tool,
            (("{sanitizer}", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *more),),
            estimate,
            least=15,
            needs=("build",),
            key=r"={9} .*(SUMMARY|Error|Invalid|hazard|Race|refus|support)",
            sign=r"^small cases on ",
            # memcheck does not see the bounds of allocations in PyTorch's cache.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            sources=("benchmarks/gpu_check/small_cases.py",),
        )
        # Sixty small kernels, each up to a hundred times as slow as without the tool, and the start of the tool.
        for tool, estimate, more in (
            ("memcheck", 45, ("--report-api-errors", "no", *small_cases)),
            ("racecheck", 60, ("--racecheck-report", "analysis", *small_cases)),
        )
    ]
    return [
        Stage("environment", (("nvidia-smi",), DESCRIBE), 5, always=True, repeats=True, key=INFO),
        Stage(
            "build",
            (("{python}", "-m", "benchmarks.gpu_check.build_in_time", "--minutes", "{minutes}"),),
            5 if carried.ARCHIVE.exists() else build_seconds(cores),
            always=True,
            repeats=True,  # ninja knows what is left
            key=BUILD,
        ),
        Stage(
            "conformance",
            (("{python}", "tests/simt/record.py", "--golden", "{scratch}"),),
            15,
            least=10,
            key=CONFORMANCE,
            archive="golden.tar.gz",
            sources=("tests/simt", "tests/ptx", ISOLATED),
        ),
        correctness_stage("cuda", 45),
        test_stage("first-tests", 35, "-m", "cuda", *first),
        benchmark_stage(
            "cuda",
            150,
            ("gemm", "attention", "masks", "loss", "experts", "fp8", "bucket", "train", "overhead", "plans"),
            "--without",
            SLOW,
        ),
        Stage(
            "profile",
            (("{python}", "-m", "benchmarks.gpu_check.profiled", "--ncu", "{scratch}", *PROFILED),),
            50,
            least=20,
            needs=("build",),
            archive="profiles.tar.gz",
            key=r"^=== ncu|Duration|Compute \(SM\) Throughput|No Eligible",
            sources=("benchmarks/gpu_check/profiled.py",),
        ),
        *variant_stages(),
        test_stage("tests", 90, "--processes", "5", "-m", "cuda", *(name for name in tests if name not in first)),
        *sanitizers,
    ]


def variant_stages() -> list[Stage]:
    """One, if libraries of other sources were carried here."""
    carried_here = variants.archives()
    stage = Stage(
        "variants",
        (("{python}", "-m", "benchmarks.gpu_check.variants", "--minutes", "{minutes}", "--only", VARIED),),
        25 * (1 + len(carried_here)),
        least=20,
        fills=True,
        needs=("build",),
        key=r"^\| ",
        sources=(*MEASURING, "benchmarks/gpu_check/variants.py"),
    )
    return [stage] if carried_here else []


def stages_of_dry_run() -> list[Stage]:
    """The estimates were measured on two cores of a server."""
    compiled = emulator_is_compiled()
    tests = ("tests/test_bucket.py", "tests/test_gemm.py", "-m", "simt", "-k", "come_back or gate_comes_first")
    python = "{python}"
    needs = ("build", "emulator")
    return [
        Stage("environment", (DESCRIBE,), 3, always=True, repeats=True, key=INFO),
        Stage(
            "build",
            ((python, "-m", "benchmarks.gpu_check.usable_build", "library"),),
            2,
            least=1,
            always=True,
            repeats=True,
            key=BUILD,
        ),
        Stage(
            "emulator",
            ((python, "-m", "benchmarks.gpu_check.usable_build", "emulator"),),
            3 if compiled else 110,
            always=True,
            repeats=True,
            sign=f"^{usable_build.COMPILING}",
        ),
        Stage(
            "conformance",
            ((python, "tests/simt/record.py", "--emulated", "--golden", "{scratch}"),),
            4 if compiled else 30,
            needs=needs,
            key=CONFORMANCE,
            archive="golden.tar.gz",
            sources=("tests/simt", "tests/ptx", ISOLATED),
        ),
        replace(correctness_stage("simt", 16), needs=needs),
        replace(
            benchmark_stage("cpu", 16, ("gemm", "attention", "bucket"), "--minutes", "0.02", "--only", FEW),
            most=90,  # on a busy machine
            fills=False,
        ),
        replace(test_stage("tests", 4, "--patience", "300", *tests), needs=needs),
        *(
            Stage(
                tool,
                ((python, "-m", "benchmarks.gpu_check.small_cases", "simt", tool, "bfloat16"),),
                estimate,
                needs=needs,
                sources=("benchmarks/gpu_check/small_cases.py",),
            )
            for tool, estimate in (("memcheck", 3), ("racecheck", 5))
        ),
    ]


def emulator_is_compiled() -> bool:
    """Whether the emulator is newer than all of its sources."""
    library = _emulator.FOLDER / "_simt_hooks.so"
    sources = (path for path in _build.CSRC.rglob("*") if path.is_file())
    return library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in sources)
