"""`emulated` runs the CUDA kernels on CPU tensors, without a GPU; `attention_without_wgmma` chooses among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Emulation", "attention_without_wgmma", "emulated", "emulated_by", "is_emulating"]

EMULATED_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")


@dataclass(frozen=True)
class Emulation:
    """What the kernels in an `emulated` block have done so far, or in all of it once it has ended."""

    _module: Any
    _before: dict[str, int]
    _final: dict[str, int]
    _sites: set[tuple[str, int, str]]

    @property
    def counters(self) -> dict[str, int]:
        """Instructions and bytes by name, summed over all launches and threads.

        ``blocks``, ``mma``, ``wgmma``, ``ldmatrix``, ``shuffle``, ``barrier``, ``atomic``; bytes moved by
        ``cp_async``, ``tma_load``, ``tma_store``, ``global_load``, ``global_store``; 32-byte sectors of global memory
        touched; ``wavefronts`` of shared memory, and their number without bank conflicts (``ideal``).
        """
        return self._final or {name: count - self._before[name] for name, count in self._module.counters().items()}

    @property
    def sync_sites(self) -> list[tuple[str, int, str]]:
        """File, line and instruction of every synchronisation call that these kernels have executed, in this order."""
        if not self._final:
            _hand_out_sync_sites()
        return sorted(self._sites)


_open_blocks: list[tuple[Emulation, dict[str, Any], int]] = []


def _hand_out_sync_sites() -> None:
    """Gives the synchronisation calls since the last time to all open blocks."""
    for module in {id(emulation._module): emulation._module for emulation, *_ in _open_blocks}.values():
        sites = module.sync_sites()
        module.reset_sync_sites()
        for emulation, *_ in _open_blocks:
            if emulation._module is module:
                emulation._sites.update(sites)


@contextmanager
def emulated(
    arch: str = "sm_80",
    mode: str = "eager",
    schedule: str = "fifo",
    seed: int = 0,
    *,
    check_races: bool = False,
    ordered_sums: bool = False,
    threads: int = 0,
    skip: tuple[str, int, str] | None = None,
    processors: int = 4,
    float8_sum_bits: int = 0,
) -> Iterator[Emulation]:
    """Inside the block, the public ops on CPU tensors run the *CUDA* kernels on an emulator.

    The kernels are compiled from the same sources as by nvcc, and started by the same launchers with the same
    heuristics; an op without a CUDA kernel raises NotImplementedError. The first use compiles them with the C++
    compiler, which needs a source checkout and takes one to three minutes. All threads of the process are affected;
    blocks may be nested.

    Args:
        arch: the GPU to emulate, one of `EMULATED_ARCHS`: "sm_75" (64 KiB of shared memory per block, no cp.async,
            tensor cores for float16 alone), "sm_80" (163 KiB), "sm_86", "sm_89", "sm_120" (99 KiB), "sm_90a" (227 KiB,
            wgmma), "sm_100" (227 KiB), ... An instruction that the GPU lacks is an error; but "sm_80" also runs kernels
            for Hopper that a test launches itself.
        mode: when asynchronous copies and products complete: "eager", as soon as they are issued; "lazy", as late as
            the kernel's waits allow, and until then their destination holds NaNs.
        schedule: "fifo": warps run in turn. "pct": by random priorities that change at random times (Burckhardt et al.,
            A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010).
        seed: of the schedule.
        check_races: report unordered accesses to the same memory as races, including plain loads and stores; several
            times slower.
        ordered_sums: with `check_races`, unordered atomic additions of floats are races too. For kernels that promise
            the same bits in every run.
        threads: the number of host threads; 0 for all cores.
        skip: a synchronisation call (file, line, instruction) to ignore, to show that a test notices it.
        processors: the number of SMs, by which launchers divide the work: an A100 has 108, an H200 132, an RTX 4090
            128. The default is small so that small problems take several waves.
        float8_sum_bits: significant bits of the sums that tensor cores form of products of FP8. 0, the default, is a
            sum in float32; 14 is about what Hopper is reported to have (DeepSeek-V3, arXiv 2412.19437).

    Raises RuntimeError, naming kernel, thread, instruction and source line, for a race, a deadlock, an access out of
    bounds or an invalid launch.

    >>> with emulated(mode="lazy", schedule="pct", seed=3) as emulation:
    ...     out = cuda_ext.gemm(a, b)
    >>> emulation.counters["mma"]
    """
    from cuda_ext import _emulator

    for name, value, allowed in (
        ("arch", arch, EMULATED_ARCHS),
        ("mode", mode, ("eager", "lazy")),
        ("schedule", schedule, ("fifo", "pct")),
    ):
        if value not in allowed:
            raise ValueError(f"cuda_ext.testing.emulated: expected {name} to be one of {allowed}, got {value!r}")
    if not (isinstance(processors, int) and processors >= 1):
        raise ValueError(
            f"cuda_ext.testing.emulated: expected processors to be an int of at least 1, got {processors!r}"
        )
    module = _emulator.load(hooks=check_races)
    settings = {
        "compute_capability": int(arch.removeprefix("sm_").rstrip("a")),
        "lazy": mode == "lazy",
        "pct": schedule == "pct",
        "seed": seed,
        "check_races": check_races,
        "ordered_sums": ordered_sums,
        "threads": threads,
        "skip": skip,
        "processors": processors,
    }
    with emulated_by(module, settings, float8_sum_bits) as emulation:
        yield emulation


@contextmanager
def emulated_by(module: Any, settings: dict[str, Any], float8_sum_bits: int = 0) -> Iterator[Emulation]:
    """`emulated` with the kernels of `module`, which has the interface of the module `_simt` (csrc/emulated)."""
    from cuda_ext._load import ops

    _hand_out_sync_sites()
    module.reset_sync_sites()
    emulation = Emulation(module, dict(module.counters()), {}, set())
    _open_blocks.append((emulation, settings, float8_sum_bits))
    try:
        _apply_emulation(ops)
        yield emulation
    finally:
        _hand_out_sync_sites()
        emulation._final.update(emulation.counters)
        _open_blocks.pop()
        _apply_emulation(ops)


def is_emulating() -> bool:
    """Whether an `emulated` block is open."""
    return bool(_open_blocks)


@contextmanager
def attention_without_wgmma() -> Iterator[None]:
    """Inside the block, attention runs the kernels for sm_80 on every device, to test or measure them on Hopper.

    Holds for all threads of the process. `cuda_ext.attention_plan` says which kernel a call runs.
    """
    from cuda_ext._load import ops

    before = ops._attention_wgmma(False)
    try:
        yield
    finally:
        ops._attention_wgmma(before)


def _apply_emulation(ops: Any) -> None:
    """Applies the settings of the innermost block, or ends the emulation outside all blocks."""
    if not _open_blocks:
        ops._emulate(0)
        return
    emulation, settings, float8_sum_bits = _open_blocks[-1]
    emulation._module.configure(**settings)
    if float8_sum_bits:
        emulation._module.set_float8_sum_bits(float8_sum_bits)
    ops._emulate(emulation._module.kernels())
