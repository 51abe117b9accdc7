from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
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
    # As on a machine with a GPU and little else: what hypothesis would have run is reported as skipped.
    from without_hypothesis import HealthCheck, settings

from cuda_ext import _stamp, testing

ROOT = Path(__file__).resolve().parent.parent

# Inputs are fresh in every run; the report's header says how to repeat one.
# In the environment, so that all processes of a run have the same.
SEED = int(os.environ.setdefault("CUDA_EXT_TEST_SEED", str(random.SystemRandom().randrange(2**31))))

# The backend stays the same for all examples of a test, as it should.
settings.register_profile(
    "cuda_ext", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("cuda_ext")


def pytest_report_header() -> str:
    return f"random inputs: CUDA_EXT_TEST_SEED={SEED}"


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seeds each test on its own, so that it sees the same numbers whichever tests ran before it."""
    seed = SEED ^ zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


# Where the ops of a test run: the CPU's kernels; the CUDA kernels, emulated; nvcc's own code of them, emulated too
# (tests/ptx); and on a GPU, if there is one.
BACKENDS = ("cpu", "simt", "ptx", "ptx_sm_90a", *(["cuda"] if torch.cuda.is_available() else []))
# On ptx, without --all-ptx: the suites of the ops. Of those whose sources have one dtype each, only this one, and no
# test that draws its dtype.
PTX_SUITES: dict[str, set[torch.dtype] | None] = {
    "test_bucket": None,
    "test_gemm": {torch.bfloat16},
    "test_attention_cuda": {torch.bfloat16},
}
NEEDS_ALL_PTX = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-ptx",
        action="store_true",
        help="on the backend ptx: all tests, all dtypes, and kernels compiled for sm_90a too",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_backend: runs the test on each of the backends cpu, simt, ptx and cuda")
    for name in ("cpu", "simt", "ptx", "cuda"):
        config.addinivalue_line("markers", f"{name}: what every_backend runs there; `pytest -m {name}` selects it")
    config.addinivalue_line("markers", "cpu_only(reason): keeps a test of such a module to the CPU's kernels")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_backend"):
        cpu_only = metafunc.definition.get_closest_marker("cpu_only")
        backends = list(BACKENDS[:1] if cpu_only else BACKENDS)
        if not metafunc.config.getoption("--all-ptx"):
            of_an_op = metafunc.module.__name__ in PTX_SUITES
            backends = [name for name in backends if not name.startswith("ptx") or (of_an_op and name == "ptx")]
        marked = [pytest.param(name, marks=getattr(pytest.mark, name.partition("_")[0])) for name in backends]
        metafunc.parametrize("backend", marked, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """float64 has no CUDA kernel; and see PTX_SUITES."""
    all_ptx = config.getoption("--all-ptx")

    def applies(item: pytest.Item) -> bool:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        backend, dtypes = (
            params.get("backend", "cpu"),
            {each for each in params.values() if isinstance(each, torch.dtype)},
        )
        of_suite = PTX_SUITES.get(item.module.__name__) if isinstance(item, pytest.Function) else None
        if backend == "ptx" and not all_ptx and of_suite is not None:
            draws = getattr(item.obj, "is_hypothesis_test", False)  # type: ignore[attr-defined]
            if draws or dtypes - of_suite:
                return False
        return backend == "cpu" or torch.float64 not in dtypes

    config.hook.pytest_deselected(items=[item for item in items if not applies(item)])
    items[:] = [item for item in items if applies(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that turns out to need kernels of other dtypes than PTX_SUITES has is for --all-ptx. Anywhere else a
    kernel that is missing is a failure."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    has_one_dtype = params.get("backend") == "ptx" and not item.config.getoption("--all-ptx")
    try:
        yield
    except RuntimeError as error:
        if not has_one_dtype or "is not in this library" not in str(error):
            raise
        item.stash[NEEDS_ALL_PTX] = True
        pytest.skip("needs kernels of other dtypes than bfloat16, which --all-ptx compiles")


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, seeded: None) -> Iterator[str]:
    name = getattr(request, "param", "cpu")
    if name == "simt" or name.startswith("ptx"):
        with emulation_of(name, request.config.getoption("--all-ptx")) as emulation:
            yield name
        ran = emulation.counters["blocks"] > 0 or request.node.stash.get(NEEDS_ALL_PTX, False)
        assert ran, "the test has run no CUDA kernel"
    elif name == "cuda":
        with torch.device("cuda"):
            yield name
    else:
        yield name


def emulation_of(name: str, all_ptx: bool) -> AbstractContextManager[testing.Emulation]:
    """The ops on the emulator, on the backend simt, ptx or ptx_sm_90a, at its harshest."""
    seed = random.randrange(2**31)
    if name == "simt":
        return testing.emulated(mode="lazy", schedule="pct", seed=seed)
    from ptx import build, kernels

    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    arch = "sm_80" if name == "ptx" else name.removeprefix("ptx_")
    return kernels.emulated(kernels.load(arch, all_ptx), arch, mode="lazy", schedule="pct", seed=seed)


def is_alive(pid: int) -> bool:
    """Whether it runs: a process that has ended may still wait for its parent to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone, for what needs no second rank to be seen."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A folder to import `cuda_ext` from: its Python files, the stamp and a link to the library, free to be broken."""
    folder = tmp_path / "installed"
    shutil.copytree(_stamp.PACKAGE, folder / "cuda_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "cuda_ext" / _stamp.LIBRARY.name).symlink_to(_stamp.LIBRARY)
    return folder


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in a new process, away from the checkout, with `path` first among the places it imports from."""

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
