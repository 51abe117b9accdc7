"""Runs one op at a size that fills a GPU, for a profiler of kernels.

    ncu --set full --kernel-name regex:gemm_sm90 --launch-skip 1 --launch-count 1 --clock-control none \\
        python -m benchmarks.gpu_check.profiled gemm
    python -m benchmarks.gpu_check.profiled --ncu FOLDER gemm decode    # such a command for each, one after the other

With --ncu, a missing profiler is reported and is no failure.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import cuda_ext

CALLS = 3  # the first loads the kernel


class Profile(NamedTuple):
    kernel: str  # a regular expression for its name
    run: Callable[[], object]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def gemm(m: int, n: int, k: int) -> None:
    a, b = normal(m, k), normal(n, k)
    for _ in range(CALLS):
        cuda_ext.gemm(a, b.t())


def attention(backward: bool, length: int = 4096, dim: int = 128) -> None:
    q, k, v = (normal(16384 // length, length, 2048 // dim, dim).requires_grad_(backward) for _ in range(3))
    for _ in range(CALLS):
        out = cuda_ext.flash_attention(q, k, v, causal=True)
        if backward:
            torch.autograd.grad(out, (q, k, v), out.detach())


def decode(batch: int = 8, keys: int = 16384, heads: int = 64, heads_kv: int = 8, dim: int = 128) -> None:
    query = normal(batch, 1, heads, dim)
    caches = [normal(batch, keys, heads_kv, dim) for _ in range(2)]
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    for _ in range(CALLS):
        cuda_ext.flash_attention_with_kvcache(query, *caches, cache_seqlens=lengths)


PROFILES = {
    "gemm": Profile("gemm_sm90", lambda: gemm(4096, 4096, 4096)),
    "gemm-small": Profile("gemm_sm90", lambda: gemm(512, 512, 512)),
    "gemm-16-rows": Profile("gemm_sm90", lambda: gemm(16, 4096, 4096)),
    "attention-forward": Profile("attention_fwd_sm90", lambda: attention(backward=False)),
    "attention-backward": Profile("attention_bwd_sm90", lambda: attention(backward=True)),
    "decode": Profile("attention_cache", lambda: decode()),
}


def profile(name: str, folder: Path) -> int:
    """Prints ncu's details of a kernel, and writes its report and its counters by instruction to `folder`."""
    ncu = shutil.which("ncu")
    if ncu is None:
        print("ncu: not found")
        return 0
    print(f"=== ncu: {name}", flush=True)
    report = folder / f"{name}.ncu-rep"
    options = ["--set", "full", "--kernel-name", f"regex:{PROFILES[name].kernel}", "--launch-skip", "1"]
    options += ["--launch-count", "1", "--clock-control", "none", "--export", str(report)]
    command = [ncu, *options, sys.executable, "-m", "benchmarks.gpu_check.profiled", name]
    if status := subprocess.run(command).returncode:
        return status
    with open(folder / f"{name}.csv", "w") as by_instruction:
        subprocess.run([ncu, "--import", str(report), "--page", "source", "--csv"], stdout=by_instruction)
    return subprocess.run([ncu, "--import", str(report), "--page", "details"]).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="+", choices=list(PROFILES), help="which ops to run")
    parser.add_argument("--ncu", type=Path, metavar="FOLDER", help="run each under ncu, and write its reports there")
    options = parser.parse_args(arguments)
    if options.ncu:
        return max([profile(name, options.ncu) for name in options.ops])
    for name in options.ops:
        PROFILES[name].run()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
