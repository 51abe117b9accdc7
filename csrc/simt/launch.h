// Runs a kernel on the emulator: every thread of every block is a fiber.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "simt/options.h"

namespace cuda_ext::simt {

struct Extent {
  int x = 1, y = 1, z = 1;
  int64_t count() const { return int64_t(x) * y * z; }
};

struct Geometry {
  Extent grid;
  int block = 1;
  Extent cluster;  // divides the grid
  size_t shared_bytes = 0;
  // Clusters whose blocks wait for one another through global memory: so many run side by side, in order, on one host
  // thread; 0 stands for all, 1 for none that wait.
  int concurrent_clusters = 1;
};

// A hazard, a deadlock, a bad launch; what() tells all.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// `thread` is the kernel with its arguments bound. Throws Fault.
void launch(const char* kernel, const Geometry& geometry, const std::function<void()>& thread);

}  // namespace cuda_ext::simt
