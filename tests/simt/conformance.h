// Kernels that each test one primitive, with the same inputs on a GPU and on the emulator. A case maps input bytes to
// output bytes, which are initialised to 0xff. nvcc or a C++ compiler builds a library that harness.py loads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rt/launch.cuh"

namespace cuda_ext::conformance {

struct Case {
  const char* name;
  size_t in_bytes;  // 0: any size, only on the emulator
  size_t out_bytes;
  void (*run)(const uint32_t* in, uint32_t* out);
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
struct Register {
  explicit Register(const Case& c) { cases().push_back(c); }
};

// One block of `threads` with `shared` bytes that runs kernel(in, out).
#define CONFORMANCE(case_name, num_threads, num_shared, in_size, out_size)                                          \
  GLOBAL(num_threads, 1) case_name##_kernel(const uint32_t* in, uint32_t* out);                                     \
  [[maybe_unused]] static const Register case_name##_case(                                                          \
      {#case_name, in_size, out_size, [](const uint32_t* in, uint32_t* out) {                                       \
         rt::launch<case_name##_kernel>(#case_name, {.threads = num_threads, .shared_bytes = num_shared}, in, out); \
       }});                                                                                                         \
  GLOBAL(num_threads, 1) case_name##_kernel(const uint32_t* in, uint32_t* out)

}  // namespace cuda_ext::conformance
