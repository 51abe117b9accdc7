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
  // How many clusters run concurrently on one host thread, in order, because their blocks wait for one another through
  // global memory; 1 if none wait, 0 for all clusters of the grid.
  int concurrent_clusters = 1;
};

// An error of the kernel or of its launch.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs the kernel; `thread` is its function with the arguments bound. Throws Fault.
void launch(const char* kernel, const Geometry& geometry, const std::function<void()>& thread);

}  // namespace cuda_ext::simt
