// The kernels of translated PTX files; the replacement of the CUDA runtime launches them.
#pragma once

#include <cstddef>
#include <vector>

namespace cuda_ext::ptx {

struct Parameter {
  int size;
  int offset;
};

// A kernel, as its PTX declares it.
struct Entry {
  const char* name;  // mangled
  void (*run)(const std::byte* parameters);
  std::vector<Parameter> parameters;
  int max_threads;        // per block: the launch bound
  int min_blocks;         // per SM
  bool waits_for_others;  // a block may wait for other blocks
};

// Registers the entries of a file, compiled for `architecture` (90), with the runtime.
struct Registered {
  Registered(const Entry* entries, int count, int architecture);
};

}  // namespace cuda_ext::ptx
