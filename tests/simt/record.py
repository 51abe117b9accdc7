"""Stores what a GPU answers to the conformance cases, so that the emulator is held to it where there is no GPU:

    python tests/simt/record.py

writes golden/<device>/<case>.npz, inputs and outputs, for test_conformance.py. Needs nvcc and a GPU of sm_80 or newer;
the cases of sm_90a are recorded on one of those only.
"""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
from harness import BUILD, CSRC, HERE, Library
from test_conformance import inputs_of
from test_static_gates import SM80, SM90, find_nvcc


def device() -> tuple[str, str]:
    """The name of the GPU and its architecture, "90a" for 9.0."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    name, capability = (
        subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].split(",")
    )
    architecture = capability.strip().replace(".", "")
    return re.sub(r"\W+", "-", name.strip()).lower(), "90a" if architecture == "90" else architecture


def build(architecture: str) -> Library:
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit("record.py: nvcc was not found; put it on the PATH or install the nvidia-cuda-nvcc wheel")
    BUILD.mkdir(parents=True, exist_ok=True)
    target = BUILD / f"conformance-sm_{architecture}.so"
    sources = [str(HERE / name) for name in ("library.cpp", *SM80, *(SM90[:3] if architecture == "90a" else ()))]
    flags = ["-std=c++20", "-O3", f"-I{CSRC}", f"-I{HERE}", "-x", "cu", "-shared", "-Xcompiler", "-fPIC"]
    flags += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    subprocess.run([nvcc, *flags, *sources, "-o", str(target)], check=True)
    return Library(target)


def main() -> None:
    name, architecture = device()
    library = build(architecture)
    folder = HERE / "golden" / name
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for case in sorted(library.index):
        data = inputs_of(case, library.in_bytes(case) // 4, rng)
        np.savez_compressed(folder / f"{case}.npz", input=data, output=library.run(case, data))
    print(f"{len(library.index)} answers of {name} in {folder}")


if __name__ == "__main__":
    main()
