"""Measures on a GPU which plan of a matrix product is the fastest, and keeps the results. Only when asked.

    with cuda_ext.tuning.tune() as tuned:   # in the block, each product that is new is measured
        train_step(batch)
    print(tuned)
    ...                                     # from here on this process uses what was measured
    cuda_ext.tuning.load()                  # and so does another one, without measuring

Without this, a product runs the plan whose predicted time is the least (`cuda_ext.gemm_plan`, docs/gemm_plan.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cuda_ext import _stamp
from cuda_ext._checks import check
from cuda_ext._load import ops
from cuda_ext.info import driver_version

__all__ = ["Product", "clear", "default_path", "load", "measured", "tune"]

_PLAN = ("config", "cluster", "k_blocks", "splits", "sm80")
_LARGEST_NUMBER = 1024


@dataclass(frozen=True)
class Product:
    """A product and its fastest plan."""

    #: The device, sizes, layouts and dtype, and what the epilogue does.
    name: str
    #: Of the plan: the tile's number, the blocks of a cluster that share rows, those that divide K, and the parts of K
    #: whose sums go through the workspace. `sm80`: the kernel on mma.sync.
    config: int
    cluster: int
    k_blocks: int
    splits: int
    sm80: bool
    #: Of a launch: of this plan, and of the one that runs without tuning.
    seconds: float
    seconds_of_default: float

    def __str__(self) -> str:
        times = f"{self.seconds_of_default * 1e6:9.1f} us {self.seconds * 1e6:9.1f} us"
        return f"{times} {self.seconds_of_default / self.seconds:6.2f}x  {self.name}"


class tune:
    """Measures every product of a `with` block that is new, of all ops, forward and backward, in all threads.

    The first launch of a new product runs each of its best-predicted plans some ten to a hundred times, which takes
    milliseconds, and then the fastest of them; later launches run that one. A plan is preferred to the predicted one
    only if it is at least 2 % faster. Products are distinguished by device, sizes, layouts, dtypes and epilogue, those
    of FP8 by the kinds of their scales; those of groups by the number of groups, not by their sizes, so that the first
    ones decide. Their operands stay in the L2 cache between the launches if they fit. `cuda_ext.grouped_mm` and FP8 on
    mma.sync have one plan for each product, and are not measured.

    What was measured stays in use after the block, until `clear`. It is written to a file at the end of the block, and
    read from it at the beginning, so that a product is measured once for a device, driver and build. If it cannot be
    written, there is a warning.

    Tuning changes how sums along K are divided, hence the last bits of a result; ranks that tune separately may differ
    in them. Results stay deterministic, and those of `cuda_ext.batch_invariant` independent of the batch. During the
    capture of a CUDA graph nothing is measured. The CPU kernels have no plans, and ignore it.

    Args:
        path: the file; default `default_path()`.
        keep: whether to read and write it; default True.
        candidates: how many plans to measure of each product, at least 1; default 6.

    Attributes:
        products: after the block, those that were measured in it.

    Raises:
        ValueError: the file is damaged, or was measured with another device, driver or build; or ``candidates`` < 1.

    Example::

        with cuda_ext.tuning.tune() as tuned:
            model(inputs).sum().backward()
        print(tuned)    # a line per product: microseconds before and after
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, keep: bool = True, candidates: int = 6) -> None:
        check(
            isinstance(candidates, int) and candidates >= 1,
            "tuning.tune",
            f"expected candidates to be an int of at least 1, got {candidates!r}",
        )
        self.products: list[Product] = []
        self._path = Path(path or default_path()) if keep else None
        self._candidates = candidates

    def __enter__(self) -> tune:
        if self._path is not None and self._path.exists():
            _use(_read(self._path))
        self._known = {product.name for product in measured()}
        self._before = ops._measure_gemms(self._candidates)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ops._measure_gemms(self._before)
        self.products = [product for product in measured() if product.name not in self._known]
        if self._path is None or not self.products:
            return
        try:
            _add(self._path, self.products)
        except OSError as failure:
            warnings.warn(
                f"cuda_ext.tuning.tune: expected a file that can be written, got {self._path} ({failure.strerror}): "
                "the measured plans are in use in this process, but not kept; pass path or keep=False, or set "
                "XDG_CACHE_HOME",
                stacklevel=2,
            )

    def __str__(self) -> str:
        header = f"{'predicted':>12} {'fastest':>12}\n" if self.products else "no new products"
        return header + "\n".join(map(str, self.products))


def load(path: str | os.PathLike[str] | None = None) -> list[Product]:
    """Uses what `tune` has written, in this process, and measures nothing.

    Args:
        path: default `default_path()`.

    Returns:
        The products of the file.

    Raises:
        FileNotFoundError: there is no such file; `tune` writes it.
        ValueError: it is damaged, or for another device, driver or build.
    """
    products = _read(Path(path or default_path()))
    _use(products)
    return products


def measured() -> list[Product]:
    """The products whose measured plans this process uses, those that gain most first."""
    names, plans, seconds = ops._measured_gemms()
    products = []
    for i, name in enumerate(names):
        plan: dict[str, Any] = dict(zip(_PLAN, plans[len(_PLAN) * i :], strict=False))
        plan["sm80"] = bool(plan["sm80"])
        products.append(Product(name, **plan, seconds=seconds[2 * i], seconds_of_default=seconds[2 * i + 1]))
    return sorted(products, key=lambda product: (product.seconds - product.seconds_of_default, product.name))


def clear() -> None:
    """Forgets what was measured and loaded: products run the plans that are predicted to be the fastest."""
    ops._clear_measured_gemms()


def default_path() -> Path:
    """The file for the current device, its driver and this build, in ``$XDG_CACHE_HOME/cuda_ext``, by default
    ``~/.cache/cuda_ext``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(_circumstances(), sort_keys=True).encode()).hexdigest()
    return cache / "cuda_ext" / f"gemms-{digest[:16]}.json"


def _circumstances() -> dict[str, str]:
    stamp = _stamp.read()
    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else "none",
        "driver": driver_version() if has_gpu else "none",
        "cuda_ext": f"{stamp['version']}, sources {stamp['sources']}, CUDA {stamp['cuda']}",
    }


def _read(path: Path) -> list[Product]:
    def is_sound(product: Product) -> bool:
        numbers = (product.config, product.cluster, product.k_blocks, product.splits)
        times = (product.seconds, product.seconds_of_default)
        return (
            isinstance(product.name, str)
            and all(type(number) is int and 0 <= number <= _LARGEST_NUMBER for number in numbers)
            and isinstance(product.sm80, bool)
            and all(isinstance(time, float) and 0 < time < float("inf") for time in times)
        )

    text = path.read_bytes()
    try:
        content: Any = json.loads(text)
        made_for, products = content["made_for"], [Product(**entry) for entry in content["products"]]
        sound = all(map(is_sound, products))
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise ValueError(f"cuda_ext.tuning: {path} was not written by tune(), or is damaged; delete it")
    if made_for != _circumstances():
        raise ValueError(
            f"cuda_ext.tuning: expected measurements for {_circumstances()} in {path}, got {made_for}; measure again "
            "with cuda_ext.tuning.tune and another path"
        )
    return products


def _use(products: list[Product]) -> None:
    for product in products:
        plan = [int(getattr(product, field)) for field in _PLAN]
        ops._set_measured_gemm(product.name, plan, [product.seconds, product.seconds_of_default])


def _add(path: Path, products: list[Product]) -> None:
    """Adds them to the file, which other processes may be reading and writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f"{path.name}.lock")):
        known = {product.name: product for product in _read(path)} if path.exists() else {}
        known |= {product.name: product for product in products}
        content = {"made_for": _circumstances(), "products": [asdict(known[name]) for name in sorted(known)]}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
