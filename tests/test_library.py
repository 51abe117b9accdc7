"""The stamp that guards the compiled library, and the import of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cuda_ext
from cuda_ext import _load, _stamp

ROOT = Path(__file__).resolve().parent.parent
RunPython = Callable[..., subprocess.CompletedProcess[str]]


class TestStamp:
    def test_the_library_under_test_fits(self) -> None:
        assert _stamp.mismatches(_stamp.read(), _stamp.running()) == []
        _stamp.check()

    @pytest.mark.parametrize("entry", list(_stamp.COMPARED))
    def test_each_entry_is_compared(self, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
        monkeypatch.setattr(_stamp, "read", lambda: {**_stamp.running(), entry: "0.1.2.3"})
        with pytest.raises(ImportError) as refusal:
            _stamp.check()
        name, here = _stamp.COMPARED[entry], _stamp.running()[entry]
        assert str(refusal.value) == (
            f"cuda_ext: the compiled library {_stamp.LIBRARY} does not fit: it was built for {name} 0.1.2.3, "
            f"but this process runs {name} {here}. Rebuild it with\n  {_stamp.build_command()}"
        )

    def test_all_that_differs_is_named(self) -> None:
        stamp = {**_stamp.running(), "torch": "1.0", "machine": "vax"}
        assert [sentence.split(",")[0] for sentence in _stamp.mismatches(stamp, _stamp.running())] == [
            "it was built for torch 1.0",
            "it was built for processor vax",
        ]

    def test_build_command_depends_on_where_the_package_lies(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert _stamp.build_command() == f"cd {ROOT} && {sys.executable} setup.py build_ext --inplace"
        monkeypatch.setattr(_stamp, "PACKAGE", tmp_path / "site-packages/cuda_ext")
        pip = f"{sys.executable} -m pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps ."
        assert _stamp.build_command().startswith(pip)

    @pytest.mark.sampled
    def test_stamp_is_compared_before_the_library_is_opened(self, package_copy: Path, run_python: RunPython) -> None:
        _stamp.write(package_copy / "cuda_ext", {**_stamp.read(), "torch": "1.0"})
        # Were it opened, the error would be that of the dynamic loader.
        (package_copy / "cuda_ext/_C.so").unlink()
        (package_copy / "cuda_ext/_C.so").write_text("not a library")
        done = run_python("-c", "from cuda_ext import gemm", path=package_copy)
        assert done.returncode == 1
        assert "ImportError: cuda_ext: the compiled library" in done.stdout
        assert f"built for torch 1.0, but this process runs torch {torch.__version__}. Rebuild it with" in done.stdout

    @pytest.mark.sampled
    @pytest.mark.parametrize("missing", ["_C.so", "_build_info.py"])
    def test_library_that_was_not_built(self, package_copy: Path, run_python: RunPython, missing: str) -> None:
        (package_copy / "cuda_ext" / missing).unlink()
        (package_copy / "setup.py").touch()
        (package_copy / "csrc").mkdir()
        done = run_python("-c", "import cuda_ext; cuda_ext.flash_attention", path=package_copy)
        command = f"cd {package_copy} && {sys.executable} setup.py build_ext --inplace"
        assert (
            f"ImportError: cuda_ext: the compiled library has not been built; build it with\n  {command}" in done.stdout
        )

    @pytest.mark.sampled
    def test_checkout_that_hides_an_installed_library(
        self, tmp_path: Path, package_copy: Path, run_python: RunPython
    ) -> None:
        checkout = tmp_path / "cuda_ext"
        shutil.copytree(ROOT / "cuda_ext", checkout, ignore=shutil.ignore_patterns("*.so", "_build_info.py"))
        done = run_python("-c", "import cuda_ext; cuda_ext.flash_attention", path=package_copy)
        expected = (
            f"ImportError: cuda_ext: {checkout} has not been built, and hides the installed {package_copy}/cuda_ext;"
        )
        assert f"{expected} start Python elsewhere, or build it with" in done.stdout

    def test_library_that_does_not_load(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = tmp_path / "_C.so"
        library.write_text("not a library")
        monkeypatch.setattr(_stamp, "LIBRARY", library)
        with pytest.raises(ImportError, match=r"cannot load the compiled library: .*_C\.so: .* Rebuild it with\n"):
            _load._load_installed()


class TestPackage:
    def test_import_loads_nothing(self, run_python: RunPython) -> None:
        code = "import sys, cuda_ext; print(cuda_ext.__version__, {'torch', 'cuda_ext._load'} & set(sys.modules))"
        assert run_python("-c", code).stdout == f"{cuda_ext.__version__} set()\n"

    def test_every_public_name_is_there(self) -> None:
        assert set(cuda_ext.__all__) <= set(dir(cuda_ext))
        for name in cuda_ext.__all__:
            assert getattr(cuda_ext, name) is not None
        with pytest.raises(AttributeError, match="module 'cuda_ext' has no attribute 'gem'"):
            _ = cuda_ext.gem  # type: ignore[attr-defined]

    @pytest.mark.sampled(cases=2, slow=True)
    @pytest.mark.parametrize(
        "first",
        ["from cuda_ext import gemm", "from cuda_ext._gemm import linear", "import cuda_ext.nn"],
    )
    def test_gemm_is_the_function_whatever_is_imported_first(self, run_python: RunPython, first: str) -> None:
        code = f"{first}; import cuda_ext; print(type(cuda_ext.gemm).__name__, cuda_ext.gemm.__module__)"
        assert run_python("-c", code).stdout == "function cuda_ext._gemm\n"
