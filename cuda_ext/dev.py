"""Just-in-time builds for work on the kernels: `cuda_ext.dev.load()` compiles csrc/ and loads it into this process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from cuda_ext import _build, _stamp
from cuda_ext._toolchain import NAMESPACE

__all__ = ["load"]


def load(
    sources: Sequence[str | Path] | None = None,
    *,
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    build_root: str | Path | None = None,
    verbose: bool = False,
) -> Path:
    """Compiles the library with `torch.utils.cpp_extension.load` and loads it instead of the installed one.

    Call it before the first op is used; afterwards `cuda_ext.gemm` and all other ops run the new code. Only files that
    have changed since the last call are compiled. It respects the same variables as `setup.py`: CUDA_EXT_CUDA,
    TORCH_CUDA_ARCH_LIST, MAX_JOBS, CUDA_HOME, CXX.

    Args:
        sources: C++ and CUDA files with distinct names; default all files under csrc/.
        extra_cflags: flags for the C++ compiler after the project's own, such as ["-O0", "-g"].
        extra_cuda_cflags: likewise for nvcc.
        build_root: the parent of the build folder; default TORCH_EXTENSIONS_DIR, else ~/.cache/torch_extensions. The
            folder's name contains the versions of torch and the compiler, the architectures and a digest of the flags,
            so that builds that differ in one of these share no files.
        verbose: print the compilers' commands.

    Returns:
        The path of the library.

    Raises:
        RuntimeError: the ops are already loaded in this process, or a compiler failed; the error contains its messages.
        BuildError: there are no sources, no compiler, or no folder that can be written.
    """
    if _stamp.ops_are_defined():
        raise RuntimeError(
            f"cuda_ext.dev.load: the ops of torch.ops.{NAMESPACE} are already loaded in this process, and can be "
            "defined only once; call it in a new process before using an op"
        )
    config = _build.configure()
    files = [Path(source).resolve() for source in sources] if sources is not None else config.sources
    _check(config, files)
    root = Path(build_root or os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    folder = (root / "cuda_ext" / _folder_name(config, extra_cflags, extra_cuda_cflags)).absolute()
    with _build.lock(folder, "another one: pass build_root, or set TORCH_EXTENSIONS_DIR"):
        # A killed build leaves the lock file of torch's loader behind, which the next one would wait for without end.
        # No other process can need that file, because this one holds `_build.lock`.
        (folder / "lock").unlink(missing_ok=True)
        with _build.prepared(config, folder):
            library: str = _build.torch_helpers().load(
                "cuda_ext_jit",
                [str(file) for file in files],
                extra_cflags=[*config.cxx_flags(folder), *extra_cflags],
                extra_cuda_cflags=[*config.nvcc_flags(folder), *extra_cuda_cflags],
                extra_ldflags=config.link_flags(folder),
                build_directory=str(folder),
                verbose=verbose,
                with_cuda=config.cuda,
                is_python_module=False,
            )
    return Path(library)


def _folder_name(config: _build.BuildConfig, extra_cflags: Sequence[str], extra_cuda_cflags: Sequence[str]) -> str:
    flags = repr([_build.CXX_FLAGS, config.nvcc_flags(), [*extra_cflags], [*extra_cuda_cflags], str(_build.CSRC)])
    archs = "-".join(config.archs) or "cpu"
    return f"{config.name}-{archs}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _archs_for(sources: Sequence[str]) -> str:
    needed = {_build.SM90A_SOURCES: "9.0a", _build.SM89_SOURCES: "8.9, 10.0 or 12.0"}
    return " and ".join(archs for marker, archs in needed.items() if any(marker in name for name in sources))


def _check(config: _build.BuildConfig, files: Sequence[Path]) -> None:
    if missing := [str(file) for file in files if not file.is_file()]:
        raise _build.BuildError(f"cuda_ext.dev.load: expected sources that exist, got {', '.join(missing)}")
    if not files:
        raise _build.BuildError(
            f"cuda_ext.dev.load: no sources in {_build.CSRC}; use a source checkout, or pass sources="
        )
    if left_out := [file.name for file in files if config.cuda and file.suffix == ".cu" and not config.archs_of(file)]:
        raise _build.BuildError(
            f"cuda_ext.dev.load: expected {_archs_for(left_out)} in TORCH_CUDA_ARCH_LIST for {', '.join(left_out)}, "
            f"got {config.arch_names}"
        )
    names = [file.name for file in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _build.BuildError(
            f"cuda_ext.dev.load: expected sources with distinct names, got {', '.join(twice)} twice"
        )
