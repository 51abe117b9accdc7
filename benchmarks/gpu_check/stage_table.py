"""The stages of a GPU check and of its dry run."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.gpu_check.stages import Stage
from cuda_ext import _build, _emulator, _toolchain

ROOT = _build.SOURCE_ROOT

# Not `python -m cuda_ext.info`, whose exit status is 1 before the library is built.
DESCRIBE = ("{python}", "-c", "from cuda_ext import info; print(info.render(info.report()))")
INFO = r"MiB /|^  (torch|python|setuptools|ninja|compiler|driver|cores|free memory): |, sm_\d|: CUDA \d"
BUILD = r"^cuda_ext: |\berror\b|^FAILED"
CONFORMANCE = r"FAULT|: rounding|faults; answers|^record: |\berror\b"
CORRECT = r": (WRONG|FAILED|NOT RUN)\b|: not in this build|^correct: |:$"
PYTEST = r"^(FAILED|ERROR|lost|hung|crashed|begun)\b|\b(passed|failed|errors?)\b.* in [\d.]+s|^relay: "

# The sources of `python -m benchmarks`.
MEASURING = tuple(
    f"benchmarks/{name}" for name in ("__main__.py", "environment.py", "results.py", "suites", "presentation")
)
FAMILIES = ("gemm", "attention-forward", "attention-backward", "bucket")

# One case of each family that a CPU measures quickly; the first case of a suite is always measured.
FEW = (
    "^gemm forward .*512 × 512 × 512 float32$|^flash_attention full forward .*S=1024 H=8 D=64 float32$|"
    "^pack forward .*ResNet-50 float32$"
)
MODEL = "model.md"  # in the folder of the stage "model"


def benchmark_stage(device: str, estimate: float, suites: tuple[str, ...], *more: str) -> Stage:
    """One command for all suites, so that the ceilings are measured once."""
    options = ("--device", device, "--minutes", "{minutes}", "--out", "{out}", "--resume")
    return Stage(
        "benchmarks",
        (("{python}", "-m", "benchmarks", "{parts}", *options, *more),),
        estimate,
        least=estimate / 15,
        fills=True,
        needs=("build",),
        parts=suites,
        sources=MEASURING,
    )


def correctness_stages(backend: str, estimate: float) -> list[Stage]:
    """A stage per family of kernels, so that the report names the broken one."""
    return [
        Stage(
            f"correct-{family}",
            (("{python}", "-m", "benchmarks.gpu_check.correct", family, backend),),
            estimate,
            least=estimate / 2,
            needs=("build",),
            key=CORRECT,
            sources=("benchmarks/gpu_check/correct.py", "benchmarks/suites/measure.py"),
        )
        for family in FAMILIES
    ]


def tuning_stage(backend: str, estimate: float) -> Stage:
    """What the plans of products lose against the best of their candidates."""
    return Stage(
        "tuning",
        (("{python}", "-m", "benchmarks.gpu_check.tuned", backend),),
        estimate,
        least=estimate / 2,
        needs=("build",),
        key=r"times as fast$|^ .* us .*x  sm_",
        sources=("benchmarks/gpu_check/tuned.py",),
    )


def build_seconds(cores: int) -> float:
    """Estimate for the library and one architecture, at least a minute, which the slowest source takes."""
    sources = _build.Plan("", "", _toolchain.Toolkit("", Path()), ("9.0a",), cores).sources
    seconds = {".cpp": _build.SECONDS_PER_CXX_FILE, ".cu": _build.SECONDS_PER_CUDA_FILE + _build.SECONDS_PER_ARCH}
    return 40 + max(60, sum(seconds[path.suffix] for path in sources) / cores)


def stages_on_gpu(cores: int) -> list[Stage]:
    """Most valuable first. The estimates are for an H100 or H200, derived from counts, not measured; the table in
    docs/gpu-check.md repeats them."""
    # Other test files may import packages that are not installed.
    marks = re.compile(r"mark\.(every_backend|cuda)\b")
    files = sorted(path for path in (ROOT / "tests").glob("test_*.py") if marks.search(path.read_text()))
    tests = [str(path.relative_to(ROOT)) for path in files]
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
        Stage("environment", (("nvidia-smi",), DESCRIBE), 10, always=True, repeats=True, key=INFO),
        Stage(
            "build",
            (("{python}", "-m", "benchmarks.gpu_check.build_in_time", "--minutes", "{minutes}"),),
            build_seconds(cores),
            always=True,
            repeats=True,  # ninja knows what is left
            key=BUILD,
        ),
        # nvcc compiles a thousand lines for one architecture; each case takes less than a second.
        Stage(
            "conformance",
            (("{python}", "tests/simt/record.py", "--golden", "{scratch}"),),
            60,
            least=20,
            key=CONFORMANCE,
            archive="golden.tar.gz",
            sources=("tests/simt", "tests/ptx"),
        ),
        # Mostly the start of PyTorch and CUDA.
        *correctness_stages("cuda", 15),
        # 210 cases, 1.2 s each, and the start of six processes.
        benchmark_stage(
            "cuda", 300, ("gemm", "attention", "bucket", "train", "overhead")
        ),  # the stage tells of "build"
        tuning_stage("cuda", 25),
        # 700 tests, 0.2 s each, and a few that compile.
        Stage(
            "tests",
            (("{python}", "tests/relay.py", "--record", "{state}/record", "-m", "cuda", *tests),),
            180,
            least=20,
            needs=("build",),
            key=PYTEST,
            sign=r"^relay: pytest ",
            sources=("tests",),
        ),
        *sanitizers,
        # Half of the time compiles the emulator, which the model queries.
        model_stage(("{out}/results.jsonl",), 40),
    ]


def model_stage(arguments: tuple[str, ...], estimate: float) -> Stage:
    command = ("{python}", "-m", "benchmarks.predicted", *arguments, "--to", f"{{state}}/{MODEL}")
    return Stage("model", (command,), estimate, repeats=True, key=r"^\| ")


def stages_of_dry_run() -> list[Stage]:
    """The estimates were measured on two cores of a server."""
    compiled = emulator_is_compiled()
    tests = ("tests/test_bucket.py", "tests/test_gemm.py", "-m", "simt", "-k", "come_back or gate_comes_first")
    python = "{python}"
    return [
        Stage("environment", (DESCRIBE,), 3, always=True, repeats=True, key=INFO),
        Stage(
            "build",
            ((python, "-m", "benchmarks.gpu_check.usable_build"),),
            3 if compiled else 110,
            always=True,
            repeats=True,
            key=BUILD,
        ),
        Stage(
            "conformance",
            ((python, "tests/simt/record.py", "--emulated", "--golden", "{scratch}"),),
            4 if compiled else 30,
            key=CONFORMANCE,
            archive="golden.tar.gz",
            sources=("tests/simt", "tests/ptx"),
        ),
        *correctness_stages("simt", 4),
        benchmark_stage("cpu", 16, ("gemm", "attention", "bucket"), "--minutes", "0.02", "--only", FEW),
        tuning_stage("simt", 4),
        Stage(
            "tests",
            ((python, "tests/relay.py", "--patience", "300", "--record", "{state}/record", *tests),),
            4,
            needs=("build",),
            key=PYTEST,
            sign=r"^relay: pytest ",
            sources=("tests",),
        ),
        *(
            Stage(
                tool,
                ((python, "-m", "benchmarks.gpu_check.small_cases", "simt", tool, "bfloat16"),),
                estimate,
                needs=("build",),
                sources=("benchmarks/gpu_check/small_cases.py",),
            )
            for tool, estimate in (("memcheck", 3), ("racecheck", 5))
        ),
        model_stage(("--rehearse", "h200"), 3),
    ]


def emulator_is_compiled() -> bool:
    """Whether the emulator is newer than all of its sources."""
    library = _emulator.FOLDER / "_simt_hooks.so"
    sources = (path for path in _build.CSRC.rglob("*") if path.is_file())
    return library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in sources)
