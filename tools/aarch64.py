"""Builds the package for aarch64 and runs tests of its ops there, on Debian or Ubuntu on x86-64, under qemu.

    apt install g++-aarch64-linux-gnu qemu-user-static mmdebstrap ninja-build
    python tools/aarch64.py                                       # one of ten tests of the ops
    python tools/aarch64.py --one-in 1 tests/test_gemm.py -k bias # other tests: arguments for pytest
    python tools/aarch64.py --cpu neoverse-n1                     # a CPU that does not multiply bfloat16

The folder build/aarch64 (6 GB) keeps what one run leaves to the next: a Debian root with Python, of which qemu runs the
interpreter; an environment with torch and what the tests need, whose Python is a script that calls qemu; and a copy of
the sources. The compiler is a cross compiler, which the emulated Python calls as it would call any other: `pip install`
takes minutes, not hours, and its output is in build/aarch64/install.log.

This shows that the package builds, imports and computes the right values. It says nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from install_matrix import TEST_PACKAGES, copy_sources

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "aarch64"
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
COMMANDS = {COMPILER: "g++-aarch64-linux-gnu", QEMU: "qemu-user-static", "mmdebstrap": "mmdebstrap"}
COMMANDS["ninja"] = "ninja-build"  # this machine's, because qemu passes commands on to the kernel
ROOT_PACKAGES = "python3,libstdc++6,libgomp1,zlib1g"
# The wheels of torch and its dependencies have any of these tags.
PLATFORMS = [*(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)), "manylinux2014_aarch64", "any"]
TESTS = ("gemm", "gemm_autograd", "attention", "attention_autograd", "kvcache", "bucket", "loss")


ONE_IN = "CUDA_EXT_AARCH64_ONE_IN"


class Emulated:
    """An environment for aarch64 in `folder`."""

    def __init__(self, folder: Path, cpu: str) -> None:
        self.root, self.venv, self.source = folder / "root", folder / "venv", folder / "source"
        self.log = folder / "install.log"
        self.python = self.venv / "bin" / "python"
        self.environment = os.environ | {
            "QEMU_CPU": cpu,
            "CXX": COMPILER,
            "CUDA_EXT_CUDA": "0",
            "PYTHONUNBUFFERED": "1",  # progress also without a terminal
        }
        self.environment.pop("PYTHONPATH", None)

    def create(self, torch: str) -> None:
        """The root and the environment, unless they are there."""
        if not (self.root / "usr/bin/python3").exists():
            shutil.rmtree(self.root, ignore_errors=True)
            suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
            command = ["mmdebstrap", "--variant=extract", "--architectures=arm64", f"--include={ROOT_PACKAGES}", suite]
            sources = b"".join(path.read_bytes() + b"\n" for path in apt_sources())
            step("unpacking a root for arm64", [*command, self.root, "-"], stdin=sources)
        interpreter = (self.root / "usr/bin/python3").resolve()
        version = interpreter.name.removeprefix("python")
        packages = self.venv / "lib" / f"python{version}" / "site-packages"
        self.python.parent.mkdir(parents=True, exist_ok=True)
        (self.venv / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
        words = [QEMU, "-L", str(self.root), "-0"]  # argv[0], by which Python finds its environment
        self.python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$0" {shlex.quote(str(interpreter))} "$@"\n')
        self.python.chmod(0o755)
        if not (packages / "torch").is_dir():
            shutil.rmtree(packages, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--only-binary=:all:", "--python-version", version]
            pip += [f"--platform={name}" for name in PLATFORMS]
            wanted = [f"torch=={torch}", "pip", "setuptools", "wheel", *TEST_PACKAGES]
            partial = packages.with_name("partial")
            step(f"downloading torch {torch}, 2 GB", [*pip, "--target", partial, *wanted])
            partial.rename(packages)

    def install(self) -> None:
        """`pip install` of a copy of the sources, which the tests run in."""
        copy_sources(self.source)
        pip = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--verbose", "--editable", "."]
        step("pip install", [self.python, *pip], self.environment, self.source, log=self.log)
        last = self.log.read_text(errors="replace").strip().splitlines()[-1]
        print(f"aarch64: {last}", flush=True)

    def test(self, one_in: int, arguments: Sequence[str]) -> int:
        """pytest with this file as a plugin; without the emulated CUDA kernels."""
        options = ["-p", "no:cacheprovider", "-p", Path(__file__).stem, "-m", "not simt and not ptx"]
        variables = {"PYTHONPATH": str(Path(__file__).resolve().parent), ONE_IN: str(one_in)}
        command = [str(self.python), "-m", "pytest", *options, *arguments]
        return subprocess.run(command, env=self.environment | variables, cwd=self.source).returncode


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = items[:: int(os.environ[ONE_IN])]


def apt_sources() -> list[Path]:
    """Where apt gets packages, in either format; the signatures decide which it trusts."""
    lists = sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))
    return lists or [path for path in [Path("/etc/apt/sources.list")] if path.exists()]


def step(
    name: str,
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    *,
    stdin: bytes | None = None,
    log: Path | None = None,
) -> None:
    """Runs a command that must succeed; says how long it takes, and with `log` writes its output there."""
    where = f" (output in {log})" if log else ""
    print(f"aarch64: {name}{where}", flush=True)
    begin = time.monotonic()
    words = [str(word) for word in command]
    with open(log or os.devnull, "wb") as file:
        output = file if log else None
        done = subprocess.run(words, env=environment, cwd=folder, input=stdin, stdout=output, stderr=output)
    if done.returncode:
        sys.exit(f"aarch64: {name} failed with exit status {done.returncode}{where}: {shlex.join(words)}")
    print(f"aarch64: {name} took {time.monotonic() - begin:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", default="max", help="the CPU that qemu emulates (qemu-aarch64-static -cpu help)")
    parser.add_argument("--one-in", type=int, default=10, metavar="N", help="run one of N tests (%(default)s)")
    parser.add_argument("--torch", default="2.11.0", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: %(default)s")
    options, arguments = parser.parse_known_args()
    if missing := [package for command, package in COMMANDS.items() if not shutil.which(command)]:
        sys.exit(f"aarch64: expected {', '.join(COMMANDS)}; apt install {' '.join(missing)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    emulated = Emulated(options.folder.absolute(), options.cpu)
    emulated.create(options.torch)
    emulated.install()
    return emulated.test(options.one_in, arguments or [f"tests/test_{name}.py" for name in TESTS])


if __name__ == "__main__":
    sys.exit(main())
