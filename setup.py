"""Builds the compiled library with torch's build helpers; the rest of the package is described in pyproject.toml."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

from cuda_ext import _build, _stamp  # noqa: E402
from cuda_ext import _toolchain as toolchain  # noqa: E402

# An older one stops at pyproject.toml, with a message that names neither itself nor what to do.
if problem := toolchain.setuptools_problem():
    sys.exit(f"cuda_ext: {problem}")

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.egg_info import egg_info  # noqa: E402

CALLS = "_calls"

_build.find_torch()
try:
    torch_helpers = _build.torch_helpers()
except ImportError as error:
    sys.exit(
        f"cuda_ext is compiled against the torch it will run with, and this environment has none ({error}). Run: "
        "pip install 'torch>=2.11' 'setuptools>=77' ninja && pip install --no-build-isolation ."
    )


class BuildLibrary(torch_helpers.BuildExtension):
    """Compiles what `_build.configure` decides, and leaves the stamp beside the library."""

    def run(self) -> None:
        try:
            with _build.lock(ROOT / "build"):
                config = _build.configure()
                self.build(config, ROOT / "build" / config.name)
        except _build.BuildError as error:
            sys.exit(str(error))
        print(f"cuda_ext: built {config.summary}", flush=True)

    def build(self, config: _build.BuildConfig, folder: Path) -> None:
        self.build_temp = str(folder)
        for extension in self.extensions:
            extension.extra_compile_args = {
                "cxx": [*config.cxx_flags(folder), *(f"-isystem{path}" for path in torch_helpers.include_paths())],
                "nvcc": config.nvcc_flags(folder),
            }
            extension.library_dirs = torch_helpers.library_paths()
        library = self.extensions[-1]
        library.sources = [str(path.relative_to(ROOT)) for path in config.sources]
        library.libraries = config.libraries
        library.extra_link_args = config.link_flags(folder)
        with _build.prepared(config, folder):
            super().run()
        _stamp.write(Path(self.get_ext_fullpath(library.name)).parent, config.stamp())
        _build.write_compile_commands(folder, ROOT / "build")

    def build_extension(self, ext: Extension) -> None:
        """Starts the sources in the order given; setuptools would sort them by name."""
        compile_sorted, order = self.compiler.compile, {name: place for place, name in enumerate(ext.sources)}
        self.compiler.compile = lambda sources, *rest, **options: compile_sorted(
            sorted(sources, key=order.__getitem__), *rest, **options
        )
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_sorted

    def copy_extensions_to_source(self) -> None:
        (_stamp.PACKAGE / _stamp.STAMP_FILE).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def get_ext_filename(self, fullname: str) -> str:
        """The library without the tag of a Python version: it uses nothing of Python."""
        return super().get_ext_filename(fullname) if fullname.endswith(CALLS) else fullname.replace(".", os.sep) + ".so"


class Metadata(egg_info):
    """Adds a local version: "0.1.0+cpu.torch2.11.0" is what pip says in its last line, and the name of the wheel."""

    def finalize_options(self) -> None:
        if "sdist" not in self.distribution.commands:
            try:
                self.tag_build = f"+{_build.local_version()}"
            except _build.BuildError as error:
                sys.exit(str(error))
        super().finalize_options()


class Wheel(bdist_wheel):
    """For every Python 3, but for one torch."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def extensions() -> list[Extension]:
    """The library and, where the headers of this Python are installed, faster calls from it."""
    library = Extension("cuda_ext._C", sources=[], language="c++")
    calls = Extension(
        f"cuda_ext.{CALLS}",
        sources=["csrc/python/calls.cpp"],
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        language="c++",
    )
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    return [*[calls] * has_headers, library]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildLibrary, "egg_info": Metadata, "bdist_wheel": Wheel},
)
