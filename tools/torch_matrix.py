"""Builds the library against other releases of torch and runs the tests of the ops with each.

    python tools/torch_matrix.py 2.11.0 2.13.0 2.15.0
    python tools/torch_matrix.py --keep 2.15.0          # a second run compiles only what has changed
    python tools/torch_matrix.py /some/venv/bin/python  # with the torch of this Python
    python tools/torch_matrix.py 2.15.0 --tests tests/test_gemm.py -- -k bias -x

Each release gets a copy of the sources and a virtual environment in build/torch_matrix, about 7 GB for a release of
torch with CUDA, which is removed afterwards unless --keep is given. The build has no CUDA kernels (CUDA_EXT_CUDA=0).
Arguments after -- are passed to pytest instead of `-m "not simt"`, which deselects the emulated kernels: they are
compiled without torch.

On stdout there is one line per release; the output of the commands is in build/torch_matrix/NAME.log. The exit status
is the number of releases that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("cuda_ext", "csrc", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TESTS = ("gemm*", "attention", "attention_[at]*", "bucket", "gradient_slot*", "nn", "compat*", "jagged", "dtensor")
PACKAGES = ("numpy", "setuptools", "ninja", "pybind11", "pytest", "hypothesis")
VERSIONS = "import platform, torch; print('torch', torch.__version__, 'Python', platform.python_version())"
REPORT_EVERY = 30.0  # seconds, if stderr is not a terminal


class Failure(Exception):
    """A command failed; the message says which."""


class Trial:
    """One release of torch: its folder, its log, and its commands."""

    def __init__(self, release: str, folder: Path) -> None:
        self.has_python = "/" in release
        self.name = release.strip("/").replace("/", "-") if self.has_python else f"torch-{release}"
        self.release = release
        self.folder = folder / self.name
        self.python = Path(release).absolute() if self.has_python else self.folder / "venv/bin/python"
        self.source = self.folder / "source"
        self.log = folder / f"{self.name}.log"
        self.begin = time.monotonic()

    def run(self, tests: Sequence[str], pytest_arguments: Sequence[str]) -> str:
        """Creates the environment, builds and tests; returns the last line of pytest. Raises Failure."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        if not self.has_python:
            self._install()
        copy_sources(self.source)
        versions = self._command("looking at torch", [self.python, "-c", VERSIONS])
        build: list[str | Path] = [self.python, "setup.py", "build_ext", "--inplace"]
        self._command("building", build, {"CUDA_EXT_CUDA": "0"})
        verdict = self._command("testing", [self.python, "-m", "pytest", *pytest_arguments, *tests])
        return f"{versions}: {verdict.strip('= ')}"

    def _install(self) -> None:
        constraints = self.folder / "constraints.txt"
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        constraints.write_text("".join(f"{pin}\n" for pin in pins if not pin.startswith("torch==")))
        if not self.python.exists():
            self._command("making an environment", [sys.executable, "-m", "venv", self.folder / "venv"])
        pip: list[str | Path] = [self.python, "-m", "pip", "--disable-pip-version-check", "install"]
        pip += ["--constraint", constraints]
        self._command("installing", [*pip, f"torch=={self.release}", *PACKAGES])

    def _command(self, step: str, command: Sequence[str | Path], variables: Mapping[str, str] | None = None) -> str:
        """Runs `command` in the copy of the sources and shows its progress; returns its last line."""
        words = [str(word) for word in command]
        environment = {**os.environ, "PYTHONPATH": str(self.source), **(variables or {})}
        folder = self.source if self.source.exists() else self.folder
        processor_before = processor_seconds()
        with open(self.log, "a", buffering=1) as log:
            log.write(f"$ {shlex.join(words)}\n")
            process = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                self._show_until_done(step, process)
            finally:
                process.kill()
        last_line = self._lines()[-1]
        with open(self.log, "a") as log:
            log.write(f"# {processor_seconds() - processor_before:.0f} s of CPU time while {step}\n")
        if process.returncode != 0:
            raise Failure(f"failed while {step}, exit status {process.returncode}: {last_line}")
        return last_line

    def _show_until_done(self, step: str, process: subprocess.Popen[bytes]) -> None:
        shown = 0.0
        terminal = sys.stderr.isatty()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
            done = process.returncode is not None
            if terminal or shown == 0.0 or time.monotonic() - shown > REPORT_EVERY:
                shown = time.monotonic()
                line = "" if done else progress(self._lines())
                text = f"{self.name}  {time.monotonic() - self.begin:.0f} s  {step}  {line}"[:100]
                print(f"\r{text:100}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
            if done:
                if terminal:
                    print(f"\r{'':100}\r", end="", file=sys.stderr, flush=True)
                return

    def _lines(self) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]

    def clean_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def processor_seconds() -> float:
    """CPU time of all finished commands."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="such as 2.15.0, or a Python that has torch")
    parser.add_argument("--keep", action="store_true", help="keep environments, copies and builds")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/torch_matrix", help="default: %(default)s")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help=f"default: tests/test_{{{','.join(TESTS)}}}.py")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    pytest_arguments = sys.argv[split + 1 :] or ["-q", "-m", "not simt"]
    tests = options.tests or sorted(
        str(path.relative_to(ROOT)) for name in TESTS for path in (ROOT / "tests").glob(f"test_{name}.py")
    )
    failed = 0
    for release in options.releases:
        trial = Trial(release, options.folder.absolute())
        try:
            print(trial.run(tests, pytest_arguments), flush=True)
        except Failure as failure:
            failed += 1
            print(f"{trial.name}: {failure}\n  see {trial.log}", flush=True)
        finally:
            if not options.keep:
                trial.clean_up()
    return failed


if __name__ == "__main__":
    sys.exit(main())
