"""nvcc's own PTX on the emulator (docs/emulator.md, "nvcc's own code").

`parse` reads a PTX file; `translate` turns one instruction into C++, by the rules of `arithmetic` and `effects`, which
read `operands`; `emit` writes the C++ file of a PTX file; and `build` goes from CUDA sources to a shared library:
nvcc's PTX, translated, and nvcc's host objects, linked with the emulator (csrc/simt) and a replacement of the CUDA
runtime (runtime.cpp). `kernels` builds the package's kernels; `faults` lists the bugs that such a library must detect.
"""
