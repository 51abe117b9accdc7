"""nvcc's own PTX on the emulator (docs/emulator.md, "nvcc's own code").

`parse` reads a PTX file; `translate` turns one instruction into C++, by the rules of `arithmetic` and `effects`, which
read `operands`; `emit` writes the C++ file of a PTX file; and `build` goes from CUDA sources to a shared library:
nvcc's PTX, translated, and nvcc's host objects, linked with the emulator (csrc/simt) and with a runtime that stands in
for CUDA's (runtime.cpp). `kernels` has the package's kernels; `faults`, what such a library has to notice.
"""
