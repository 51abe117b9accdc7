from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

# Before PyTorch is loaded: by default its threads spin while they wait, which costs processes that share the cores more
# time than the work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import sampling
import torch
import torch.distributed as dist
from ranks import workers  # noqa: F401
from toolkits import no_toolkit  # noqa: F401

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    # A machine with a GPU may lack hypothesis: its tests are then reported as skipped.
    from without_hypothesis import HealthCheck, settings

from cuda_ext import _stamp, testing

ROOT = Path(__file__).resolve().parent.parent

# Function-scoped fixtures are fine: all examples of a test share its backend.
settings.register_profile(
    "cuda_ext", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("cuda_ext")


def pytest_report_header(config: pytest.Config) -> str:
    what = "all tests" if config.getoption("--full") else "a sample of the tests, which follows from the commit"
    return f"CUDA_EXT_TEST_SEED={sampling.SEED}: random inputs; {what}"


def set_seed(name: str) -> None:
    seed = sampling.SEED ^ zlib.crc32(name.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seeds each test separately, so that its numbers do not depend on the tests before it."""
    set_seed(request.node.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
    """Seeds each fixture that tests share, so that its numbers do not depend on which test comes first."""
    if fixturedef.scope == "function":
        return (yield)
    before = random.getstate(), torch.get_rng_state()
    set_seed(f"{fixturedef.baseid}::{fixturedef.argname}")
    try:
        return (yield)
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])


# The backends of the ops: the CPU kernels; the CUDA kernels on the emulator; nvcc's code of the CUDA kernels on the
# emulator (tests/ptx); and a GPU, if there is one.
BACKENDS = ("cpu", "simt", "ptx", "ptx_sm_90a", *(["cuda"] if torch.cuda.is_available() else []))
# What a test on the backend simt draws its device from: every kind of kernel, shared memory and instructions. Half of
# the tests run the kernels on wgmma.
SIMT_ARCHS = ("sm_75", "sm_80", "sm_89", "sm_120", *("sm_90a",) * 4)
# The suites that run on the backend ptx without --full. If a suite has sources for single dtypes, only the listed
# dtypes are compiled, and tests that draw a dtype do not run.
PTX_SUITES: dict[str, set[torch.dtype] | None] = {
    "test_bucket": None,
    "test_gemm": {torch.bfloat16},
    "test_attention_cuda": {torch.bfloat16},
}
# The files in tests/ptx that compile the kernels of the package; the others compile those of the tests.
PTX_OF_OPS = {
    "test_counters",
    "test_gemm_sm90",
    "test_planted",
    "test_same_bits",
    "test_scaled_gemm_sm89",
    "test_widths",
}
NEEDS_FULL = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all tests, not only those that the commit draws")
    parser.addoption("--arch", default="", help="the architecture of the backend simt, such as sm_75")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(sampling.SEED)
    config.addinivalue_line("markers", sampling.MARKER)
    config.addinivalue_line("markers", "every_backend: run the test on each of the backends cpu, simt, ptx and cuda")
    for name in ("cpu", "simt", "ptx", "cuda"):
        config.addinivalue_line("markers", f"{name}: tests on this backend; `pytest -m {name}` selects them")
    config.addinivalue_line("markers", "cpu_only(reason): run only on the backend cpu, in a module of every_backend")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_backend"):
        cpu_only = metafunc.definition.get_closest_marker("cpu_only")
        backends = list(BACKENDS[:1] if cpu_only else BACKENDS)
        marked = [pytest.param(name, marks=getattr(pytest.mark, name.partition("_")[0])) for name in backends]
        metafunc.parametrize("backend", marked, indirect=True)


# The files that take longest. They run first, so that no process is left with one of them at the end.
LONGEST = (
    *("test_attention_cuda", "test_distributed_training", "test_build", "test_conformance", "test_gpu_check"),
    *("test_static_gates", "test_distributed_faults", "test_four_hosts", "test_attention_autograd", "test_train_gpt"),
    *("test_torch_features", "test_patch", "test_examples", "test_integration_sdpa_models", "test_savers"),
    *("test_benchmarks", "test_grouped_gemm_sm90", "test_grouped_mm", "test_integration_flex", "test_architectures"),
    *("test_context_parallel_models", "test_loss", "test_fp8_activation", "test_planted_sm90", "test_model_command"),
)


@pytest.hookimpl(trylast=True)  # after -k and -m, so that the samples are of what they select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects float64 as nvcc's code, of which there is none, and what this run leaves out; puts the longest files
    first."""

    def applies(item: pytest.Item) -> bool:
        backend = str(sampling.parameters_of(item).get("backend", ""))
        return not backend.startswith("ptx") or torch.float64 not in dtypes(item)

    chosen = [item for item in items if applies(item)]
    for item in chosen:
        if settings := sampled_as_nvccs_code(item):
            item.add_marker(pytest.mark.sampled(**settings))
    left_out = {} if config.getoption("--full") else sampling.left_out(chosen)
    config.stash[sampling.LEFT_OUT] = Counter(left_out.values())
    chosen = [item for item in chosen if item not in left_out]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    order = {name: number for number, name in enumerate(LONGEST)}
    items[:] = sorted(chosen, key=lambda item: order.get(item.path.stem, len(order)))


def dtypes(item: pytest.Item) -> set[torch.dtype]:
    return {each for each in sampling.parameters_of(item).values() if isinstance(each, torch.dtype)}


def sampled_as_nvccs_code(item: pytest.Item) -> dict[str, Any]:
    """The arguments of the marker `sampled` that a test of nvcc's code gets; none for other tests."""
    params, module = sampling.parameters_of(item), item.path.stem
    backend, library = str(params.get("backend", "")), str(params.get("library", ""))
    in_ptx = item.path.parent.name == "ptx"
    if backend.startswith("ptx"):
        compiled = PTX_SUITES.get(module)
        draws_dtypes = getattr(item.obj, "is_hypothesis_test", False) if isinstance(item, pytest.Function) else False
        left = compiled is not None and (draws_dtypes or bool(dtypes(item) - compiled))
        return {"check": "nvcc's ops", "full": backend != "ptx" or module not in PTX_SUITES or left}
    if in_ptx and module == "test_sm75":
        return {"check": "nvcc's code for sm_75"}
    if in_ptx and module in PTX_OF_OPS:
        return {"check": "nvcc's ops"}
    if in_ptx or library.startswith("ptx"):
        return {"check": "nvcc's primitives", "full": library == "ptx_sm_80"}  # ptx_sm_90a has the same cases and more
    return {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(sampling.LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[sampling.LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in sampling.summary(config.stash.get(sampling.LEFT_OUT, {})):
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips a test that needs kernels that only --full compiles. Else a missing kernel is a failure."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    on_ptx = params.get("backend") == "ptx" or item.path.stem == "test_same_bits"
    lacks_kernels = on_ptx and not item.config.getoption("--full")
    try:
        yield
    except RuntimeError as error:
        if not lacks_kernels or "is not in this library" not in str(error):
            raise
        item.stash[NEEDS_FULL] = True
        pytest.skip("needs kernels that only --full compiles")


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, seeded: None) -> Iterator[str]:
    name = getattr(request, "param", "cpu")
    if name == "simt" or name.startswith("ptx"):
        with emulation_of(name, *map(request.config.getoption, ("--full", "--arch"))) as emulation:
            yield name
        ran = emulation.counters["blocks"] > 0 or request.node.stash.get(NEEDS_FULL, False)
        assert ran or torch.float64 in dtypes(request.node), "the test ran no CUDA kernel"
    elif name == "cuda":
        with torch.device("cuda"):
            yield name
    else:
        yield name


def emulation_of(name: str, full: bool, arch: str = "") -> AbstractContextManager[testing.Emulation]:
    """Runs the ops on the backend simt, ptx or ptx_sm_90a, with late completion and a random schedule. On simt the
    device is of any architecture, unless --arch names one."""
    seed = random.randrange(2**31)
    if name == "simt":
        return testing.emulated(arch or random.choice(SIMT_ARCHS), mode="lazy", schedule="pct", seed=seed)
    from ptx import build, kernels

    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    arch = "sm_80" if name == "ptx" else name.removeprefix("ptx_")
    return kernels.emulated(kernels.load(arch, full), arch, mode="lazy", schedule="pct", seed=seed)


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
