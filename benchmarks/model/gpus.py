"""The figures of GPUs that the paper model (docs/model.md) uses, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """Cycles are those of the sustained clock; rates per cycle are per SM."""

    name: str
    folder: str  # in benchmarks/results
    arch: str  # the architecture whose machine code it runs: as in golden_kernels.json
    compute_capability: int
    sms: int
    clock: float  # hertz, sustained while mma.sync multiplies random numbers
    multiply_adds: float  # per cycle, mma.sync with 16-bit operands and float32 sums; half for tf32
    shared_bytes: float  # per cycle
    issued: float  # warp instructions per cycle
    special: float  # exponentials per cycle
    l2_bytes: float  # per cycle, from or to L2, while all SMs do so
    reduced_bytes: float  # per cycle, float32 numbers added to sums in L2, while all SMs do so
    l2_capacity: float  # bytes
    memory_bytes: float  # per second, a large copy, read and written
    memory_latency: float  # cycles from a load to its data
    launch: float  # seconds for one more kernel in a stream that does almost nothing
    library_flops: float  # per second: the fastest known product of 16-bit random matrices by a library
    # Of wgmma; 0 on GPUs without it.
    wgmma_clock: float = 0.0  # hertz, sustained while wgmma multiplies random numbers
    wgmma_multiply_adds: float = 0.0  # per cycle, as multiply_adds
    port_bytes: float = 0.0  # per cycle, from L2 to one SM while few others read
    # Of sm_75, as multiply_adds: bfloat16 and float32, which are multiplied in float32 arithmetic; 0 elsewhere.
    float32_multiply_adds: float = 0.0
    sources: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def has_cp_async(self) -> bool:
        return self.compute_capability >= 80


def _gpu(**figures: Any) -> Gpu:
    values = {name: figure[0] if isinstance(figure, tuple) else figure for name, figure in figures.items()}
    sources = {name: figure[1] for name, figure in figures.items() if isinstance(figure, tuple)}
    return Gpu(**values, sources=sources)


_A100 = "NVIDIA A100 Tensor Core GPU Architecture (whitepaper)"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture (whitepaper)"
_ADA = "NVIDIA Ada GPU Architecture (whitepaper)"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture (whitepaper)"
_TURING = "NVIDIA Turing GPU Architecture (whitepaper)"
_LEARN = "github.com/gau-nernst/learn-cuda at 1454f8b"
_GUIDE = "CUDA C++ Programming Guide, Compute Capabilities: 4 schedulers; 32 banks of 4 bytes"
_SPECIAL = "CUDA C++ Programming Guide, Arithmetic Instructions: 16 results of exp2 per cycle"
_REDUCED = "30 GB/s of red.add per SM of an H200 (flash-attention pull request 2889), if at 1755 MHz"
_BENCHES = "github.com/te42kyfo/gpu-benches at 1c36d50"
_MAMF = "maximum achievable matmul, github.com/stas00/ml-engineering, compute/accelerator"
_MMA_SYNC = "4096 / 2 by the whitepaper, of which mma.sync reaches 64.9 % (arXiv 2402.13499)"
_RATES = "github.com/zzc0721/torch-performance-test-data"
_SPARK = "NVIDIA DGX Spark datasheet"
_LAUNCH = f"2.5 to 2.7 us per kernel that moves 64 KiB ({_BENCHES}, gpu-small-kernels), minus twice the memory latency"
_HOPPER_CLOCK = (
    "assumed, within 10 %: above the 1570 MHz at which wgmma, at 95 % of its rate, reaches 808 TFLOP/s "
    "(github.com/pranjalssh/fast.cu), as mma.sync does less work; below the limit of 1980 MHz"
)
_HOPPER_L2 = (
    f"between 34.5 (H100 PCIe: 6.9 TB/s, 1755 MHz, 114 SMs) and 37.3 (H200: 9.75 TB/s, if at 1980 MHz), "
    f"{_BENCHES}, gpu-l2-cache"
)
_WGMMA_CLOCK = (
    "about 1600 MHz under load, by the power limit (FlashMLA, docs/20250422-new-kernel-deep-dive.md, H800 SXM); "
    "808 TFLOP/s at 8192^3 (github.com/pranjalssh/fast.cu, H100 SXM) need at least 1552"
)
_WGMMA = "96.3 % of 4096 / 2: m64n256k16 on zeros, which the power limit does not slow down (arXiv 2402.13499)"
_PORT = "assumed: 64 bytes per cycle, as DeepGEMM's cost model does (csrc/jit_kernels/heuristics/sm90.hpp)"
_HOPPER_LATENCY = f"H100 PCIe, {_BENCHES}, gpu-latency"

GPUS = {
    "a100": _gpu(
        name="A100 SXM 80GB",
        folder="nvidia-a100-sxm4-80gb",
        arch="sm_80",
        compute_capability=80,
        sms=(108, _A100),
        clock=(1228e6, "1410 MHz (whitepaper) x 257 / 295 TFLOP/s of random numbers and of zeros, thonking.ai"),
        multiply_adds=(1024, _A100),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(35.5, f"5.4 TB/s at 1410 MHz, {_BENCHES}, gpu-l2-cache"),
        reduced_bytes=(17, f"assumed: as on Hopper, whose L2 has the same bandwidth. {_REDUCED}"),
        l2_capacity=(40 << 20, _A100),
        memory_bytes=(1732e9, f"SCALE, {_BENCHES}, gpu-stream; 85 % of 2039"),
        memory_latency=(570, f"{_BENCHES}, gpu-latency"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(271.2e12, _MAMF),
    ),
    "h100": _gpu(
        name="H100 SXM",
        folder="nvidia-h100-80gb-hbm3",
        arch="sm_90a",
        compute_capability=90,
        sms=(132, _H100),
        clock=(1755e6, _HOPPER_CLOCK),
        multiply_adds=(1329, _MMA_SYNC),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(36, _HOPPER_L2),
        reduced_bytes=(17, _REDUCED),
        l2_capacity=(50 << 20, _H100),
        memory_bytes=(2.8e12, "elementwise kernels, VeOmni pull request 1167; 84 % of 3352 GB/s"),
        memory_latency=(650, _HOPPER_LATENCY),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(794.5e12, _MAMF),
        wgmma_clock=(1600e6, _WGMMA_CLOCK),
        wgmma_multiply_adds=(1972, _WGMMA),
        port_bytes=(64, _PORT),
    ),
    "h200": _gpu(
        name="H200 SXM",
        folder="nvidia-h200",
        arch="sm_90a",
        compute_capability=90,
        sms=(132, "NVIDIA H200 datasheet: the chip of the H100 SXM"),
        clock=(1755e6, _HOPPER_CLOCK),
        multiply_adds=(1329, _MMA_SYNC),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(36, _HOPPER_L2),
        reduced_bytes=(17, _REDUCED),
        l2_capacity=(50 << 20, _H100),
        memory_bytes=(4.08e12, "assumed: 85 % of 4.8 TB/s (NVIDIA H200 datasheet), as A100 reaches"),
        memory_latency=(650, _HOPPER_LATENCY),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(794.5e12, _MAMF),
        wgmma_clock=(1600e6, _WGMMA_CLOCK),
        wgmma_multiply_adds=(1972, _WGMMA),
        port_bytes=(64, _PORT),
    ),
    "4090": _gpu(
        name="RTX 4090",
        folder="nvidia-geforce-rtx-4090",
        arch="sm_80",
        compute_capability=89,
        sms=(128, _ADA),
        clock=(2520e6, f"boost, which it sustains: {_ADA}"),
        multiply_adds=(256, f"165.2 TFLOP/s with float32 sums, {_ADA}"),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(16, f"L40, of the same design: 5.2 TB/s at 2490 MHz, {_BENCHES}, gpu-l2-cache"),
        reduced_bytes=(8, "assumed: half of the L2 bandwidth, as on Hopper"),
        l2_capacity=(72 << 20, _ADA),
        memory_bytes=(921e9, "github.com/krrishnarraj/clpeak issue 106; 91 % of 1008"),
        memory_latency=(632, f"L40, {_BENCHES}, gpu-latency"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(165e12, "PyTorch, github.com/tinygrad/tinygrad pull request 13623"),
    ),
    # Of those below the registers and instructions are those of sm_80.
    "3090": _gpu(
        name="RTX 3090",
        folder="nvidia-geforce-rtx-3090",
        arch="sm_80",
        compute_capability=86,
        sms=(82, _GA102),
        clock=(1695e6, f"boost, assumed to be sustained: {_GA102}"),
        multiply_adds=(256, f"71 TFLOP/s with float32 sums, {_GA102}"),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(16, "assumed: as the RTX 4090"),
        reduced_bytes=(8, "assumed: half of the L2 bandwidth, as on Hopper"),
        l2_capacity=(6 << 20, _GA102),
        memory_bytes=(852e9, "assumed: 91 % of 936 GB/s, as the RTX 4090 reaches"),
        memory_latency=(632, "assumed: as the L40"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(71e12, "assumed: the peak, as a library reaches on the RTX 4090"),
    ),
    "b200": _gpu(
        name="B200",
        folder="nvidia-b200",
        arch="sm_80",
        compute_capability=100,
        sms=(148, "NVIDIA Blackwell B200: 148 SMs enabled"),
        clock=(1850e6, "assumed: sustained while mma.sync, 30 % of the tensor cores' rate, multiplies"),
        multiply_adds=(768, f"409 TFLOP/s of mma.sync at 4096^3 are 747, {_LEARN}"),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(36, "assumed: as on Hopper"),
        reduced_bytes=(17, "assumed: as on Hopper"),
        l2_capacity=(126 << 20, "NVIDIA Blackwell B200: 126 MB"),
        memory_bytes=(6.8e12, "assumed: 85 % of 8 TB/s, as A100 reaches"),
        memory_latency=(650, "assumed: as on Hopper"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(1414e12, f"cuBLAS at 8192^3, {_LEARN}"),
    ),
    "5090": _gpu(
        name="RTX 5090",
        folder="nvidia-geforce-rtx-5090",
        arch="sm_80",
        compute_capability=120,
        sms=(170, _LEARN),
        clock=(2407e6, f"boost, by which the peak of 209.5 TFLOP/s is counted, {_LEARN}"),
        multiply_adds=(256, f"209.5 TFLOP/s with float32 sums, {_LEARN}"),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(12.7, "assumed: the 5.2 TB/s of an L40"),
        reduced_bytes=(6.4, "assumed: half of the L2 bandwidth, as on Hopper"),
        l2_capacity=(96 << 20, "NVIDIA RTX Blackwell GPU Architecture (whitepaper)"),
        memory_bytes=(1.63e12, "assumed: 91 % of 1.79 TB/s, as the RTX 4090 reaches"),
        memory_latency=(632, "assumed: as the L40"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(201e12, f"the fastest of cuBLAS, Triton and others at 8192^3 and 400 W, {_LEARN}"),
    ),
    # Cards with a power limit far below what their tensor cores would take.
    "t4": _gpu(
        name="T4",
        folder="tesla-t4",
        arch="sm_80",
        compute_capability=75,
        sms=(40, _TURING),
        clock=(1000e6, f"assumed: by 70 W; the same chip with more reaches 56 TFLOP/s, 0.86 of 65 ({_RATES} issue 90)"),
        multiply_adds=(512, f"65 TFLOP/s at 1590 MHz, {_TURING}"),
        float32_multiply_adds=(32, "32 shuffles of a float32 product of 1024, at 32 lanes per cycle; bfloat16 assumed"),
        shared_bytes=(64, "Jia et al., arXiv 1903.07486"),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(20, "Jia et al., arXiv 1903.07486"),
        reduced_bytes=(10, "assumed: half of the L2 bandwidth, as on Hopper"),
        l2_capacity=(4 << 20, _TURING),
        memory_bytes=(240e9, "assumed: 75 % of 320 GB/s (NVIDIA T4 datasheet)"),
        memory_latency=(570, "assumed: as the A100"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(41e12, "assumed: the peak at that clock, as a library reaches on the RTX 4090"),
    ),
    "a10": _gpu(
        name="A10",
        folder="nvidia-a10",
        arch="sm_80",
        compute_capability=86,
        sms=(72, "NVIDIA A10 datasheet: 9216 CUDA cores, 128 per SM"),
        clock=(950e6, f"assumed: by 150 W; 48 such SMs reach 60 TFLOP/s at 140 W (RTX A4000, {_RATES} issue 97)"),
        multiply_adds=(512, "125 TFLOP/s at 1695 MHz, NVIDIA A10 datasheet"),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(16, "assumed: as the RTX 4090"),
        reduced_bytes=(8, "assumed: half of the L2 bandwidth, as on Hopper"),
        l2_capacity=(6 << 20, _GA102),
        memory_bytes=(546e9, "assumed: 91 % of 600 GB/s (NVIDIA A10 datasheet), as the RTX 4090 reaches"),
        memory_latency=(632, "assumed: as the L40"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(70e12, "assumed: the peak at that clock, as a library reaches on the RTX 4090"),
    ),
    "l4": _gpu(
        name="L4",
        folder="nvidia-l4",
        arch="sm_80",
        compute_capability=89,
        sms=(58, "NVIDIA L4 datasheet: 7424 CUDA cores, 128 per SM"),
        clock=(1000e6, "assumed: the library's TFLOP/s, if they are the peak at the clock that 72 W allow"),
        multiply_adds=(512, "121 TFLOP/s without sparsity at 2040 MHz, NVIDIA L4 datasheet"),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(16, "assumed: as the RTX 4090"),
        reduced_bytes=(8, "assumed: half of the L2 bandwidth, as on Hopper"),
        l2_capacity=(48 << 20, "NVIDIA L4 datasheet"),
        memory_bytes=(273e9, "assumed: 91 % of 300 GB/s (NVIDIA L4 datasheet), as the RTX 4090 reaches"),
        memory_latency=(632, "assumed: as the L40"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(59.4e12, f"PyTorch, bfloat16 at 8192^3, {_RATES} issue 120"),
    ),
    "spark": _gpu(
        name="DGX Spark",
        folder="nvidia-gb10",
        arch="sm_80",
        compute_capability=121,
        sms=(48, f"6144 CUDA cores, 128 per SM, {_SPARK}"),
        clock=(2418e6, "boost, assumed to be sustained: 29.7 float32 TFLOP/s, huggingface.js pull request 1861"),
        multiply_adds=(256, f"assumed: as the RTX 5090; 1/16 of the 1 PFLOP/s of FP4 with sparsity, {_SPARK}"),
        shared_bytes=(128, _GUIDE),
        issued=(4, _GUIDE),
        special=(16, _SPECIAL),
        l2_bytes=(16, "assumed: as the RTX 4090"),
        reduced_bytes=(8, "assumed: half of the L2 bandwidth, as on Hopper"),
        l2_capacity=(24 << 20, "assumed: 24 MB, as its device properties are reported"),
        memory_bytes=(232e9, f"assumed: 85 % of 273 GB/s ({_SPARK}), as A100 reaches"),
        memory_latency=(800, "assumed: LPDDR5X behind another chip, longer than an L40's 632"),
        launch=(1.8e-6, _LAUNCH),
        library_flops=(59.4e12, "assumed: the peak, as a library reaches on the RTX 4090"),
    ),
}


def figures(gpu: Gpu) -> list[tuple[str, float, str]]:
    """Name, value and source of each figure that has one."""
    return [(f.name, getattr(gpu, f.name), gpu.sources[f.name]) for f in fields(gpu) if f.name in gpu.sources]
