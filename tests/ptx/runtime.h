// The entries of translated PTX files, which the fake CUDA runtime launches.
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
  int max_threads;        // of a block; its launch bound
  int min_blocks;         // of a multiprocessor
  bool waits_for_others;  // for earlier blocks, or for any
};

// Puts the entries of a file, compiled for `architecture` (90), where the runtime finds them.
struct Registered {
  Registered(const Entry* entries, int count, int architecture);
};

}  // namespace cuda_ext::ptx
