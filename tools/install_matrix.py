"""Installs the package in fresh environments, in every way that the documentation names, and checks what it gets.

    python tools/install_matrix.py                            # everything; an hour or more
    python tools/install_matrix.py --list
    python tools/install_matrix.py 3.13 2.15.0 jit            # cells whose name contains one of these words
    python tools/install_matrix.py --write                    # and puts the results so far into docs/install.md
    python tools/install_matrix.py source-3.11-torch2.15.0 --tests -- -k bias -x
    python tools/install_matrix.py --python /some/venv/bin/python --tests    # with the torch of this Python

A cell is a Python, a torch, perhaps a C++ compiler, and a way to install. The cells that differ in the way alone share
a virtual environment and a copy of the sources in build/install_matrix, about 7 GB with torch for CUDA, which is
removed afterwards unless --keep is given. Pythons are looked for on PATH and in ~/.pyenv; cells of a compiler that is
not on PATH are left out. Builds have no CUDA kernels (CUDA_EXT_CUDA=0), except in the cells that compile them.

Each cell must end in a library whose ops give the right values and gradients, or in the one message that says what to
do. With --tests the tests of the ops run as well; arguments after -- go to pytest instead of `-m "not simt"`, which
deselects the emulated kernels: they are compiled without torch.

On stdout there is one line per cell; the output of the commands is in build/install_matrix/NAME.log. The exit status is
the number of cells that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cuda_ext._toolchain import MEMORY_PER_JOB_GIB  # noqa: E402

PAGE = ROOT / "docs" / "install.md"
MARKERS = ("<!-- matrix: written by tools/install_matrix.py -->", "<!-- end of matrix -->")
SOURCES = ("cuda_ext", "csrc", "tests", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
TESTS = ("gemm*", "attention", "attention_[at]*", "bucket", "gradient_slot*", "nn", "compat*", "jagged", "dtensor")
BUILD_PACKAGES = ("setuptools", "ninja")
TEST_PACKAGES = ("numpy", "pybind11", "pytest", "hypothesis")
REPORT_EVERY = 30.0  # seconds, if stderr is not a terminal

# The ops in float64 against torch's own, forward and backward.
CHECK = """
import platform, torch, cuda_ext
from torch.nn import functional as F
torch.manual_seed(0)
def leaf(*shape): return torch.randn(*shape, dtype=torch.float64, requires_grad=True)
q, k, v, x, w, b = leaf(2, 33, 4, 16), leaf(2, 33, 2, 16), leaf(2, 33, 2, 16), leaf(7, 19), leaf(13, 19), leaf(13)
def gradients(attention, linear):
    return [attention, linear, *torch.autograd.grad((attention.sin().sum() + linear.sin().sum()), (q, k, v, x, w, b))]
ours = gradients(cuda_ext.flash_attention(q, k, v, causal=True), cuda_ext.linear(x, w, b, activation="gelu"))
heads = [t.transpose(1, 2) for t in (q, k, v)]
torchs = gradients(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2),
                   F.gelu(F.linear(x, w, b)))
torch.testing.assert_close(ours, torchs)
print("works:", "Python", platform.python_version(), "torch", torch.__version__)
"""
# `JIT` runs in the copy of the sources; the folder of its build is the first argument.
JIT = """
import sys, cuda_ext
print(cuda_ext.dev.load(build_root=sys.argv[1]))
"""


class Failure(Exception):
    """A command failed, or did not fail as expected; the message says which."""


class Trial:
    """One Python and torch: their environment, a copy of the sources, and a log of the commands.

    `variables` are set for all commands.
    """

    def __init__(
        self, name: str, folder: Path, python: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.folder, self.log = name, folder / name, folder / f"{name}.log"
        self.python = python or self.folder / "venv/bin/python"
        self.source = self.folder / "source"
        self.dist = folder / "dist"  # the wheels of all trials
        self.variables = {"CUDA_EXT_CUDA": "0", **(variables or {})}
        self.begin = time.monotonic()

    def create(self, interpreter: str, torch: str | None) -> None:
        """Makes the environment, unless it is there already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        if not self.python.exists():
            self.run("making an environment", [find_python(interpreter), "-m", "venv", self.folder / "venv"])
            self.pip("installing pip", "--upgrade", "pip")
        if torch:
            self.pip(f"installing torch {torch}", f"torch=={torch}", *BUILD_PACKAGES)
        copy_sources(self.source)

    def pip(
        self,
        step: str,
        *arguments: str | Path,
        fails: str = "",
        inside: Sequence[str] = (),
        **variables: str,
    ) -> str:
        """`pip install` in the folder of the sources. `inside`: a command that runs pip, such as nice."""
        constraints = self.folder / "constraints.txt"
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        constraints.write_text("".join(f"{pin}\n" for pin in pins if not pin.startswith(("torch==", "torchvision=="))))
        pip: list[str | Path] = [
            *inside,
            self.python,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--constraint",
            constraints,
        ]
        return self.run(
            step, [*pip, *arguments], variables, cwd=self.source if self.source.exists() else None, fails=fails
        )

    def run(
        self,
        step: str,
        command: Sequence[str | Path],
        variables: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        fails: str = "",
    ) -> str:
        """Runs `command` and shows its progress; returns its last line. `fails`: it must fail, and print a line that
        this pattern matches, which is returned."""
        words = [str(word) for word in command]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {**self.variables, **(variables or {})}
        with open(self.log, "a", buffering=1) as log:
            log.write(f"$ {shlex.join(words)}\n")
            start = log.tell()  # in bytes
            process = subprocess.Popen(
                words, cwd=cwd or self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                self._show_until_done(step, process)
            finally:
                process.kill()
        lines = [
            line.strip() for line in self.log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()
        ]
        last = lines[-1] if lines else ""
        if fails:
            found = [line for line in lines if re.search(fails, line)]
            if process.returncode == 0 or not found:
                raise Failure(f"{step} was expected to fail with {fails!r}: status {process.returncode}, {last}")
            return found[-1].replace(str(self.folder), "...")
        if process.returncode != 0:
            raise Failure(f"failed while {step}, exit status {process.returncode}: {last}")
        return last

    def _show_until_done(self, step: str, process: subprocess.Popen[bytes]) -> None:
        shown = 0.0
        terminal = sys.stderr.isatty()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
            done = process.returncode is not None
            if terminal or shown == 0.0 or time.monotonic() - shown > REPORT_EVERY:
                shown = time.monotonic()
                line = "" if done else progress(self.log.read_text(errors="replace").splitlines())
                text = f"{self.name}  {time.monotonic() - self.begin:.0f} s  {step}  {line}"[:100]
                print(f"\r{text:100}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
            if done:
                if terminal:
                    print(f"\r{'':100}\r", end="", file=sys.stderr, flush=True)
                return

    def check(self) -> str:
        """The installed package, from a folder without the sources."""
        self.run("asking for the report", [self.python, "-m", "cuda_ext.info"])
        return self.run("checking the ops", [self.python, "-c", CHECK])

    def uninstall(self) -> None:
        self.run("uninstalling", [self.python, "-m", "pip", "uninstall", "--yes", "cuda_ext"])

    def wheel(self) -> Path:
        (wheel,) = self.dist.glob("cuda_ext-*torch2.11.0*.whl")
        return wheel


# The ways to install. Each returns what it found.


def source(trial: Trial) -> str:
    trial.pip("installing", "--no-build-isolation", ".")
    return trial.check()


def isolated(trial: Trial) -> str:
    trial.pip("installing", ".")
    return trial.check()


def editable(trial: Trial) -> str:
    trial.pip("installing", "--no-build-isolation", "--editable", ".")
    said = trial.check()
    trial.uninstall()
    return said


def wheel(trial: Trial) -> str:
    shutil.rmtree(trial.dist, ignore_errors=True)
    pip: list[str | Path] = [
        trial.python,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        trial.dist,
    ]
    trial.run("building a wheel", [*pip, "."], cwd=trial.source)
    trial.pip("installing it", "--force-reinstall", "--no-deps", trial.wheel())
    return trial.check()


def sdist(trial: Trial) -> str:
    trial.pip("installing build", "build")
    out = trial.folder / "sdist"
    trial.run(
        "building an sdist",
        [trial.python, "-m", "build", "--sdist", "--no-isolation", "--outdir", out],
        cwd=trial.source,
    )
    (archive,) = out.glob("*.tar.gz")
    trial.pip("installing it", "--no-build-isolation", "--force-reinstall", "--no-deps", archive)
    return trial.check()


def uv(trial: Trial) -> str:
    trial.pip("installing uv", "uv")
    command: list[str | Path] = [
        trial.python,
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        trial.python,
        "--reinstall-package",
        "cuda_ext",
    ]
    trial.run("installing", [*command, "--no-deps", "--no-build-isolation", "."], cwd=trial.source)
    return trial.check()


def uv_isolated(trial: Trial) -> str:
    command: list[str | Path] = [
        trial.python,
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        trial.python,
        "--reinstall-package",
        "cuda_ext",
    ]
    return "refused: " + trial.run("installing", [*command, "."], cwd=trial.source, fails="this environment has none")


def jit(trial: Trial) -> str:
    """Two processes at once build in one folder, which then moves to another place."""
    cache, moved = trial.folder / "cache", trial.folder / "moved"
    script = f"for i in 1 2; do {shlex.join([str(trial.python), '-c', JIT, str(cache)])} & done; wait -n && wait -n"
    trial.run("loading twice at once", ["bash", "-c", script], cwd=trial.source)
    shutil.rmtree(moved, ignore_errors=True)
    cache.rename(moved)
    program = f"{JIT}\n{CHECK}"
    return trial.run("loading from a folder that moved", [trial.python, "-c", program, moved], cwd=trial.source)


def without_compiler(trial: Trial) -> str:
    refusal = "does not run; install g\\+\\+"
    return "refused: " + trial.pip("installing", "--no-build-isolation", ".", fails=refusal, CXX="no-such-compiler")


def little_memory(trial: Trial) -> str:
    """Each process of the compiler gets the memory that the build counts for it, so 4 GB hold two."""
    shutil.rmtree(trial.source / "build", ignore_errors=True)
    limited = f"prlimit --as={int(MEMORY_PER_JOB_GIB * 2**30)} {trial.variables.get('CXX', 'c++')}"
    trial.pip("installing", "--no-build-isolation", "--force-reinstall", "--no-deps", ".", CXX=limited)
    return trial.check()


def read_only_home(trial: Trial) -> str:
    """A home on a file system that cannot be written, for root neither."""
    home = trial.folder / "home"
    home.mkdir(exist_ok=True)
    read_only = 'mount --bind "$HOME" "$HOME" && mount -o remount,ro,bind "$HOME" && exec "$@"'
    as_root = ["--map-root-user"] * (os.geteuid() != 0)  # which root may not ask for in a chroot
    inside = ["unshare", *as_root, "--mount", "sh", "-c", read_only, "sh"]
    variables = {"HOME": str(home), "TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": ""}
    trial.pip(
        "installing",
        "--no-build-isolation",
        "--force-reinstall",
        "--no-deps",
        ".",
        inside=inside,
        **variables,
    )
    load = [*inside, str(trial.python), "-c", "import cuda_ext; cuda_ext.dev.load()"]
    refusal = "expected a build folder that can be written"
    refused = trial.run("loading", load, variables, cwd=trial.source, fails=refusal)
    works = trial.run("checking the ops", [*inside, trial.python, "-c", CHECK], variables)
    return f"{works}; `load` refused: {refused}"


def cuda_home(trial: Trial) -> str:
    """A toolkit outside the environment."""
    toolkit = trial.folder / "toolkit"
    trial.pip("installing nvcc elsewhere", "--target", toolkit, toolkit_requirement(trial))
    (home,) = toolkit.glob("nvidia/cu*")
    return build_kernels(trial, "CUDA_HOME", TORCH_CUDA_ARCH_LIST="8.0", CUDA_HOME=str(home))


def cuda(trial: Trial) -> str:
    trial.pip("installing nvcc", toolkit_requirement(trial))
    return build_kernels(trial, "pip", TORCH_CUDA_ARCH_LIST="8.0;9.0a")


def toolkit_requirement(trial: Trial) -> str:
    command = [str(trial.python), "-m", "cuda_ext._toolchain"]
    return subprocess.run(command, cwd=trial.source, capture_output=True, text=True).stdout.strip()


def build_kernels(trial: Trial, origin: str, **variables: str) -> str:
    """The CUDA kernels of one head dim, with the toolkit found at `origin` and no nvcc on PATH."""
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "nvcc").exists()]
    variables |= {"PATH": os.pathsep.join(path), "CUDA_EXT_CUDA": "1", "CUDA_EXT_HEAD_DIMS": "64"}
    ask = "from cuda_ext import _build; print(_build.choose_toolkit().toolkit.describe())"
    chosen = trial.run("looking for a toolkit", [trial.python, "-c", ask], variables, cwd=trial.source)
    if f" [{origin}]: CUDA " not in chosen:
        raise Failure(f"expected the toolkit of {origin}, got {chosen}")
    trial.pip("installing", "--no-deps", "--force-reinstall", ".", **variables)
    return trial.check()


def other_wheel(trial: Trial) -> str:
    """The wheel that another Python compiled."""
    trial.pip("installing the wheel", "--no-deps", trial.wheel())
    return trial.check()


def wheel_of_another_torch(trial: Trial) -> str:
    trial.pip("installing the wheel", "--force-reinstall", "--no-deps", trial.wheel())
    return "refused: " + trial.run("importing", [trial.python, "-c", CHECK], fails="it was built for torch")


def without_torch(trial: Trial) -> str:
    trial.pip("installing", *BUILD_PACKAGES)
    return "refused: " + trial.pip("installing", "--no-build-isolation", ".", fails="this environment has none")


@dataclass(frozen=True)
class Environment:
    python: str
    torch: str | None
    ways: tuple[Callable[[Trial], str], ...]
    cxx: str = ""  # the C++ compiler; default: that of the machine

    @property
    def name(self) -> str:
        name = f"{self.python}-torch{self.torch}" if self.torch else f"{self.python}-no-torch"
        return f"{name}-{self.cxx}" if self.cxx else name

    @property
    def variables(self) -> dict[str, str]:
        return {"CXX": self.cxx} if self.cxx else {}

    def row(self, way: Callable[[Trial], str]) -> str:
        """The cell's row of the table up to its result."""
        compiler = f", `CXX={self.cxx}`" if self.cxx else ""
        return f"| {self.python} | {self.torch or 'none'} | {COMMANDS[way]}{compiler} | "

    def cell(self, way: Callable[[Trial], str]) -> str:
        return f"{way.__name__.replace('_', '-')}-{self.name}"


# The first makes the wheel that others install.
ENVIRONMENTS = (
    Environment(
        "3.11",
        "2.11.0",
        (wheel, source, isolated, editable, sdist, uv, uv_isolated, jit, without_compiler, cuda),
    ),
    Environment("3.10", "2.11.0", (other_wheel,)),
    Environment("3.12", "2.11.0", (other_wheel,)),
    Environment("3.13", "2.11.0", (other_wheel, source)),
    Environment("3.14", "2.11.0", (other_wheel, source)),
    Environment("3.11", "2.12.1", (wheel_of_another_torch, source)),
    Environment("3.11", "2.13.0+cpu", (source,)),
    Environment("3.11", "2.13.0+cpu", (little_memory,), "g++-13"),
    Environment("3.11", "2.13.0+cpu", (source, read_only_home), "g++-14"),
    Environment("3.12", "2.14.1", (source,)),
    Environment("3.11", "2.15.0", (cuda, cuda_home)),
    Environment("3.13", "2.15.0", (source,)),
    Environment("3.14", "2.15.0", (source,)),
    Environment("3.11", None, (without_torch,)),
)
COMMANDS: dict[Callable[[Trial], str], str] = {
    wheel: "`pip wheel --no-build-isolation .`, then that wheel",
    source: "`pip install --no-build-isolation .`",
    isolated: "`pip install .`",
    editable: "`pip install --no-build-isolation -e .`",
    sdist: "`python -m build --sdist`, then that archive",
    uv: "`uv pip install --no-build-isolation .`",
    uv_isolated: "`uv pip install .`",
    jit: "`cuda_ext.dev.load()` in two processes at once, then from the moved folder",
    without_compiler: "`pip install --no-build-isolation .` without a C++ compiler",
    little_memory: "`pip install --no-build-isolation .`, with 1.5 GiB for each compiler",
    read_only_home: "`pip install --no-build-isolation .` and `cuda_ext.dev.load()` with a read-only home",
    cuda_home: "the CUDA kernels with nvcc in `CUDA_HOME`, and none on `PATH`",
    cuda: "the CUDA kernels with nvcc from PyPI",
    other_wheel: "the wheel that Python 3.11 compiled",
    wheel_of_another_torch: "the wheel that was compiled for torch 2.11.0",
    without_torch: "`pip install --no-build-isolation .` without torch",
}


def find_python(version: str) -> Path:
    candidates = [*sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))]
    if found := shutil.which(f"python{version}"):
        candidates.append(Path(found))
    if not candidates:
        raise Failure(f"no Python {version} on PATH or in ~/.pyenv")
    return candidates[0]


def progress(lines: Sequence[str]) -> str:
    """The progress of ninja or pytest according to its last lines, or else the last line."""
    counts = re.findall(r"\[ *\d+%\]|\[\d+/\d+\]", "".join(lines[-2:]))
    return counts[-1] if counts else lines[-1]


def copy_sources(target: Path) -> None:
    """Updates the sources in `target`, and keeps what was built from them."""
    target.mkdir(parents=True, exist_ok=True)
    built = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.py")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.rmtree(target / name, ignore_errors=True)
            shutil.copytree(ROOT / name, target / name, ignore=built)
        else:
            shutil.copy2(ROOT / name, target / name)


def run_tests(trial: Trial, pytest_arguments: Sequence[str]) -> str:
    trial.pip("installing the packages of the tests", *TEST_PACKAGES)
    files = sorted(str(path.relative_to(ROOT)) for name in TESTS for path in (ROOT / "tests").glob(f"test_{name}.py"))
    trial.run("building in place", [trial.python, "setup.py", "build_ext", "--inplace"], cwd=trial.source)
    command: list[str | Path] = [trial.python, "-m", "pytest", *(pytest_arguments or ["-q", "-m", "not simt"]), *files]
    return trial.run("testing", command, {"PYTHONPATH": str(trial.source)}, cwd=trial.source)


def table(results: Mapping[str, str], page: Sequence[str] = ()) -> str:
    """The table of all cells. One without a result keeps its row in `page`, the lines of an earlier table."""
    lines = ["| Python | torch | command | result |", "|---|---|---|---|"]
    for environment in ENVIRONMENTS:
        for way in environment.ways:
            start = environment.row(way)
            before = next((line for line in page if line.startswith(start)), f"{start}not run |")
            result = results.get(environment.cell(way), "").replace("|", "\\|")
            lines.append(f"{start}{result} |" if result else before)
    return "\n".join(lines)


def write_page(results: Mapping[str, str]) -> None:
    text = PAGE.read_text()
    begin, end = (text.index(marker) for marker in MARKERS)
    rows = table(results, text[begin:end].splitlines())
    PAGE.write_text(f"{text[: begin + len(MARKERS[0])]}\n{rows}\n{text[end:]}")


def try_ways(
    trial: Trial, environment: Environment, ways: Sequence[Callable[[Trial], str]]
) -> Iterator[tuple[str, str]]:
    """(name, result) of each way; a result that begins with "failed" is a failure."""
    try:
        trial.create(environment.python, environment.torch)
    except Failure as failure:
        yield from ((environment.cell(way), f"failed: {failure}") for way in ways)
        return
    for way in ways:
        try:
            yield environment.cell(way), way(trial)
        except Failure as failure:
            yield environment.cell(way), f"failed: {failure}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="run the cells whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    parser.add_argument("--keep", action="store_true", help="keep environments, copies and builds")
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.relative_to(ROOT)}")
    parser.add_argument("--tests", action="store_true", help="also run the tests of the ops, once per environment")
    parser.add_argument(
        "--python", type=Path, help="build in place with this Python, which has torch, and run the tests"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build/install_matrix", help="default: %(default)s")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    pytest_arguments, folder = sys.argv[split + 1 :], options.folder.absolute()
    if options.python:
        trial = Trial("given-python", folder, options.python.absolute())
        copy_sources(trial.source)
        print(run_tests(trial, pytest_arguments))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    results: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    failed = 0
    for environment in ENVIRONMENTS:
        chosen = [way for way in environment.ways if matches(environment.cell(way), options.words)]
        if not chosen:
            continue
        if options.list:
            print(*map(environment.cell, chosen), sep="\n")
            continue
        if environment.cxx and not shutil.which(environment.cxx):
            print(f"{environment.name}: left out, as {environment.cxx} is not on PATH", flush=True)
            continue
        trial = Trial(environment.name, folder, variables=environment.variables)
        try:
            for name, result in try_ways(trial, environment, chosen):
                results[name] = result
                file.write_text(json.dumps(results, indent=1) + "\n")
                failed += result.startswith("failed")
                print(f"{name}: {result}", flush=True)
            if options.tests:
                print(f"tests-{environment.name}: {run_tests(trial, pytest_arguments)}", flush=True)
        finally:
            if not options.keep:
                shutil.rmtree(trial.folder, ignore_errors=True)
    if options.write:
        write_page(results)
    return failed


def matches(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main())
