from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

# Before PyTorch is loaded: by default its threads spin while they wait, which costs processes that share the cores more
# time than the work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import torch.distributed as dist
from ranks import workers  # noqa: F401

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    # A machine with a GPU may lack hypothesis: its tests are then reported as skipped.
    from without_hypothesis import HealthCheck, settings

from cuda_ext import _stamp, testing

ROOT = Path(__file__).resolve().parent.parent

# Inputs are different in every run; the header of the report says how to repeat one. The seed is in the environment, so
# that all processes of a run share it.
SEED = int(os.environ.setdefault("CUDA_EXT_TEST_SEED", str(random.SystemRandom().randrange(2**31))))

# Function-scoped fixtures are fine: all examples of a test share its backend.
settings.register_profile(
    "cuda_ext", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("cuda_ext")


def pytest_report_header(config: pytest.Config) -> str:
    sampling = "all tests" if config.getoption("--full") else "random samples of large test matrices"
    if config.getoption("--draw-slow") < 1:
        sampling += (
            f", {config.getoption('--draw-slow'):.0%} of the slow tests, one of the deep checks; --full runs all"
        )
    return f"CUDA_EXT_TEST_SEED={SEED}: random inputs; {sampling}"


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seeds each test separately, so that its numbers do not depend on the tests before it."""
    seed = SEED ^ zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


# The backends of the ops: the CPU kernels; the CUDA kernels on the emulator; nvcc's code of the CUDA kernels on the
# emulator (tests/ptx); and a GPU, if there is one.
BACKENDS = ("cpu", "simt", "ptx", "ptx_sm_90a", *(["cuda"] if torch.cuda.is_available() else []))
# The suites that run on the backend ptx without --all-ptx. If a suite has sources for single dtypes, only the listed
# dtypes are compiled, and tests that draw a dtype do not run.
PTX_SUITES: dict[str, set[torch.dtype] | None] = {
    "test_bucket": None,
    "test_gemm": {torch.bfloat16},
    "test_attention_cuda": {torch.bfloat16},
}
# Each compiles all kernels once more, or reads the machine code of all: about a minute of two cores.
DEEP_CHECKS = ("races", "nvcc's ops", "nvcc's primitives", "machine code")
# The files in tests/ptx that compile the kernels of the package; the others compile those of the tests.
PTX_OF_OPS = {"test_counters", "test_gemm_sm90", "test_planted", "test_same_bits", "test_widths"}
NEEDS_ALL_PTX = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all tests instead of random samples; implies --all-ptx")
    parser.addoption(
        "--draw-slow",
        metavar="FRACTION",
        type=float,
        default=1.0,
        help="run a random part of the tests marked slow, for example 0.25 of them, and one of the deep checks of the "
        "CUDA kernels: their races, nvcc's code on the emulator (two checks), their machine code (default: all)",
    )
    parser.addoption(
        "--all-ptx",
        action="store_true",
        help="on the backend ptx: all tests, dtypes and head dims, and kernels compiled for sm_90a too",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.full:
        config.option.all_ptx, config.option.draw_slow = True, 1.0
    config.addinivalue_line(
        "markers",
        "sampled(count=None): without --full, run `count` random combinations of the parameters, or by default as many "
        "as it takes to use every value of every parameter; for each backend separately",
    )
    config.addinivalue_line("markers", "slow: takes over a second; --draw-slow runs a random part of these tests")
    config.addinivalue_line("markers", "deep(check): part of one of DEEP_CHECKS; --draw-slow makes one of these checks")
    config.addinivalue_line("markers", "every_backend: run the test on each of the backends cpu, simt, ptx and cuda")
    for name in ("cpu", "simt", "ptx", "cuda"):
        config.addinivalue_line("markers", f"{name}: tests on this backend; `pytest -m {name}` selects them")
    config.addinivalue_line("markers", "cpu_only(reason): run only on the backend cpu, in a module of every_backend")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_backend"):
        cpu_only = metafunc.definition.get_closest_marker("cpu_only")
        backends = list(BACKENDS[:1] if cpu_only else BACKENDS)
        if not metafunc.config.getoption("--all-ptx"):
            has_ptx = metafunc.module.__name__ in PTX_SUITES
            backends = [name for name in backends if not name.startswith("ptx") or (has_ptx and name == "ptx")]
        marked = [pytest.param(name, marks=getattr(pytest.mark, name.partition("_")[0])) for name in backends]
        metafunc.parametrize("backend", marked, indirect=True)


# The files that take longest. They run first, so that no process is left with one of them at the end.
LONGEST = (
    *("test_attention_cuda", "test_distributed_training", "test_build", "test_conformance", "test_gpu_check"),
    *("test_static_gates", "test_distributed_faults", "test_four_hosts", "test_attention_autograd", "test_train_gpt"),
    *("test_torch_features", "test_patch", "test_examples", "test_integration_sdpa_models"),
)


@pytest.hookimpl(trylast=True)  # after -k and -m, so that the samples are of what they select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects float64, which has no CUDA kernel, dtypes that PTX_SUITES excludes, and what this run leaves to others
    (`sampled`, `slow`, `deep`); puts the longest files first."""
    all_ptx = config.getoption("--all-ptx")

    def applies(item: pytest.Item) -> bool:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        backend = params.get("backend", "cpu")
        dtypes = {each for each in params.values() if isinstance(each, torch.dtype)}
        if params.get("library") == "ptx_sm_80" and not all_ptx:  # ptx_sm_90a has the same cases and more
            return False
        compiled = PTX_SUITES.get(item.module.__name__) if isinstance(item, pytest.Function) else None
        if backend == "ptx" and not all_ptx and compiled is not None:
            draws = getattr(item.obj, "is_hypothesis_test", False)  # type: ignore[attr-defined]
            if draws or dtypes - compiled:
                return False
        return backend == "cpu" or torch.float64 not in dtypes

    chosen = [item for item in items if applies(item)]
    if not config.getoption("--full"):
        left_out = not_sampled(chosen)
        chosen = [item for item in chosen if item not in left_out and not is_left_to_other_runs(item)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    order = {name: number for number, name in enumerate(LONGEST)}
    items[:] = sorted(chosen, key=lambda item: order.get(item.path.stem, len(order)))


def is_left_to_other_runs(item: pytest.Item) -> bool:
    """Whether --draw-slow leaves a test out of this run; the same in all processes of a run."""
    fraction = item.config.getoption("--draw-slow")
    if fraction == 1:
        return False
    if (check := deep_check_of(item)) is not None and check != random.Random(f"{SEED} deep").choice(DEEP_CHECKS):
        return True
    return bool(item.get_closest_marker("slow")) and random.Random(f"{SEED} {item.nodeid}").random() >= fraction


def deep_check_of(item: pytest.Item) -> str | None:
    """Which of DEEP_CHECKS a test belongs to, or None."""
    if marker := item.get_closest_marker("deep"):
        assert marker.args[0] in DEEP_CHECKS
        return str(marker.args[0])
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    in_ptx = item.path.parent.name == "ptx"
    if str(params.get("backend", "")).startswith("ptx") or (in_ptx and item.path.stem in PTX_OF_OPS):
        return "nvcc's ops"
    return "nvcc's primitives" if in_ptx or str(params.get("library", "")).startswith("ptx") else None


def not_sampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items with the marker `sampled` that are not in this run's sample."""
    groups: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") and hasattr(item, "callspec"):
            key = (item.nodeid.partition("[")[0], item.callspec.params.get("backend", "cpu"))
            groups.setdefault(key, []).append(item)
    left_out: set[pytest.Item] = set()
    for key, group in groups.items():
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None and not marker.args, "sampled takes count by name"
        kept = sample([item.callspec.params for item in group], marker.kwargs.get("count"), f"{SEED} {key}")
        left_out |= {item for index, item in enumerate(group) if index not in kept}
    return left_out


def sample(rows: Sequence[Mapping[str, object]], count: int | None, seed: str) -> set[int]:
    """Indices of `count` random rows, or of random rows that contain every value of every name. The same in all
    processes of a run."""
    shuffled = random.Random(seed).sample(range(len(rows)), len(rows))
    if count is not None:
        return set(shuffled[:count])
    kept, used = set(), set()
    for index in shuffled:
        values = {(name, repr(value)) for name, value in rows[index].items()}
        if not values <= used:
            kept.add(index)
        used |= values
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips a test that needs kernels that only --all-ptx compiles. Else a missing kernel is a failure."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    on_ptx = params.get("backend") == "ptx" or item.path.stem == "test_same_bits"
    lacks_kernels = on_ptx and not item.config.getoption("--all-ptx")
    try:
        yield
    except RuntimeError as error:
        if not lacks_kernels or "is not in this library" not in str(error):
            raise
        item.stash[NEEDS_ALL_PTX] = True
        pytest.skip("needs kernels that only --all-ptx compiles")


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, seeded: None) -> Iterator[str]:
    name = getattr(request, "param", "cpu")
    if name == "simt" or name.startswith("ptx"):
        with emulation_of(name, request.config.getoption("--all-ptx")) as emulation:
            yield name
        ran = emulation.counters["blocks"] > 0 or request.node.stash.get(NEEDS_ALL_PTX, False)
        assert ran, "the test ran no CUDA kernel"
    elif name == "cuda":
        with torch.device("cuda"):
            yield name
    else:
        yield name


def emulation_of(name: str, all_ptx: bool) -> AbstractContextManager[testing.Emulation]:
    """Runs the ops on the backend simt, ptx or ptx_sm_90a, with late completion and a random schedule. On simt the
    device is of either architecture."""
    seed = random.randrange(2**31)
    if name == "simt":
        return testing.emulated(random.choice(("sm_80", "sm_90a")), mode="lazy", schedule="pct", seed=seed)
    from ptx import build, kernels

    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    arch = "sm_80" if name == "ptx" else name.removeprefix("ptx_")
    return kernels.emulated(kernels.load(arch, all_ptx), arch, mode="lazy", schedule="pct", seed=seed)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A copy of the package (Python files, stamp, link to the library) that a test may modify; returns its folder."""
    folder = tmp_path / "installed"
    shutil.copytree(_stamp.PACKAGE, folder / "cuda_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "cuda_ext" / _stamp.LIBRARY.name).symlink_to(_stamp.LIBRARY)
    return folder


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in a new process, outside the checkout, with `path` first in its import path."""

    def run(*arguments: str, path: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )

    return run
