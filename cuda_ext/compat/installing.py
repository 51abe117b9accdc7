"""Lets programs that import `flash_attn` get `cuda_ext.compat.flash_attn`, without a change to their code."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cuda_ext._switch import Enabled, Switch
from cuda_ext.compat import flash_attn, flash_attn_interface

__all__ = ["install", "uninstall"]

# The versions whose interfaces `cuda_ext.compat` has. Libraries compare them.
VERSION, VERSION_3 = "2.8.3", "3.0.0"


def _missing(name: str) -> Any:
    """A name that libraries import together with those that they use."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"cuda_ext.compat: {name} is not there; use flash_attn_func or flash_attn_varlen_func, or install the "
            "flash-attn package"
        )

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Raises NotImplementedError: `cuda_ext.compat` has no {name}."
    return function


def _contents() -> dict[str, dict[str, dict[str, Any]]]:
    """From each distribution to its modules, and to their names."""
    inner = flash_attn.flash_attn_interface
    # diffusers imports these for context parallelism.
    wrapped = {name: _missing(name) for name in ("_wrapped_flash_attn_forward", "_wrapped_flash_attn_backward")}
    functions = _public(inner)
    functions_3 = _public(flash_attn_interface)
    return {
        "flash_attn": {
            "flash_attn": {**functions, "__version__": VERSION},
            "flash_attn.flash_attn_interface": {**functions, **wrapped},
            "flash_attn.bert_padding": _public(flash_attn.bert_padding),
            "flash_attn.layers": {},
            "flash_attn.layers.rotary": _public(flash_attn.layers.rotary),
        },
        "flash_attn_3": {
            "flash_attn_interface": {**functions_3, "__version__": VERSION_3},
            "flash_attn_3": {"__version__": VERSION_3},
            "flash_attn_3.flash_attn_interface": functions_3,
        },
    }


def _public(module: types.ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str, version: str, modules: Iterable[str]) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: provided by cuda_ext\n",
            "top_level.txt": "".join(f"{module}\n" for module in modules if "." not in module),
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return Path(__file__).parent / path


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the modules and for the metadata of the distributions."""

    def __init__(self, flash_attn_3: bool) -> None:
        contents = _contents()
        chosen = ["flash_attn", "flash_attn_3"] if flash_attn_3 else ["flash_attn"]
        self.modules = {name: names for each in chosen for name, names in contents[each].items()}
        self.distributions = {
            # Names as the packages write them: libraries compare them with "flash-attn" and "flash-attn-3".
            "flash-attn": _Distribution("flash-attn", VERSION, contents["flash_attn"]),
            **(
                {"flash-attn-3": _Distribution("flash_attn_3", VERSION_3, contents["flash_attn_3"])}
                if flash_attn_3
                else {}
            ),
        }

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.modules:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self.modules)
        return importlib.machinery.ModuleSpec(fullname, self, origin=__file__, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__doc__ = f"`{module.__name__}` on top of cuda_ext, see `cuda_ext.compat`."
        module.__file__ = __file__
        module.__dict__.update(self.modules[module.__name__])

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if name is None:
            return list(self.distributions.values())
        found = self.distributions.get(name.lower().replace("_", "-").replace(".", "-"))
        return [] if found is None else [found]


class _Installed(NamedTuple):
    finder: _Finder
    replaced: dict[str, types.ModuleType]


def install(*, flash_attn_3: bool = False, force: bool = False) -> Enabled:
    """Makes ``import flash_attn`` give `cuda_ext.compat.flash_attn`, in this process.

    Also what libraries look for before they import it: the version, the metadata of the distribution ``flash-attn``
    and its entry in `importlib.metadata.packages_distributions`. Call it before importing diffusers, which looks for
    flash-attn while it is imported; transformers may be imported before.

    Names that libraries import but that `cuda_ext.compat` lacks, such as ``_wrapped_flash_attn_forward``, raise
    NotImplementedError when called. Of ``flash_attn.layers`` only ``rotary`` is there, of other modules such as
    ``flash_attn.ops`` nothing. Where a library wants a CUDA device to use flash-attn, it still does.

    Args:
        flash_attn_3: whether to also provide FlashAttention-3, as the modules ``flash_attn_interface`` and
            ``flash_attn_3`` of the distribution ``flash_attn_3``. Default False.
        force: whether to do so although the real package is installed. Default False.

    Returns:
        An object for `with`: at the end of the block flash-attn is what it was before. Blocks may be nested, and
        overlap in several threads. Without `with`, it stays installed until `uninstall`.

    Raises:
        RuntimeError: the real package is installed, and ``force`` is False; or ``flash_attn_3`` differs from that of
            the call that installed.

    Example::

        import cuda_ext.compat
        cuda_ext.compat.install()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_attention_2")
    """
    with _switch.lock:
        if _switch.is_active and flash_attn_3 != ("flash_attn_3" in _switch.state.finder.modules):
            raise RuntimeError(
                f"cuda_ext.compat.install: expected flash_attn_3={not flash_attn_3}, as it is installed with, got "
                f"{flash_attn_3}; call cuda_ext.compat.uninstall first"
            )
        return _switch.turn_on(flash_attn_3=flash_attn_3, force=force)


def uninstall() -> None:
    """Undoes `install`: afterwards ``import flash_attn`` finds the real package, or nothing.

    What a program or library has already imported keeps working. A `with` block of `install` that is running keeps it
    installed to its end. Does nothing if not installed.
    """
    _switch.turn_off()


def _activate(flash_attn_3: bool, force: bool) -> _Installed:
    finder = _Finder(flash_attn_3)
    if not force and (found := _real_packages(finder)):
        raise RuntimeError(
            f"cuda_ext.compat.install: expected that {' and '.join(found)} cannot be imported, got an installed "
            "package; uninstall it with pip, or pass force=True to hide it in this process"
        )
    replaced = {name: sys.modules.pop(name) for name in list(sys.modules) if _belongs(name, finder)}
    sys.meta_path.insert(0, finder)
    _forget_answers()
    if "diffusers" in sys.modules:
        warnings.warn(
            "cuda_ext.compat.install: diffusers looks for flash-attn while it is imported, and was imported before; "
            "call install first",
            stacklevel=5,
        )
    return _Installed(finder, replaced)


def _deactivate(installed: _Installed) -> None:
    sys.meta_path.remove(installed.finder)
    for name in [name for name in sys.modules if _belongs(name, installed.finder)]:
        del sys.modules[name]
    sys.modules.update(installed.replaced)
    _forget_answers()


_switch = Switch(_activate, _deactivate)


def _belongs(name: str, finder: _Finder) -> bool:
    return name.partition(".")[0] in finder.modules


def _real_packages(finder: _Finder) -> Sequence[str]:
    return [name for name in finder.modules if "." not in name and importlib.util.find_spec(name) is not None]


def _forget_answers() -> None:
    """Of transformers, which asks for flash-attn once and keeps the answers and the functions."""
    importlib.invalidate_caches()
    probes = sys.modules.get("transformers.utils.import_utils")
    for name, value in list(vars(probes).items()) if probes is not None else ():
        if ("flash_attn" in name or name == "_package_distribution_mapping") and hasattr(value, "cache_clear"):
            value.cache_clear()
    loaded: Any = sys.modules.get("transformers.modeling_flash_attention_utils")
    if hasattr(loaded, "_loaded_implementation"):
        loaded._loaded_implementation = None
