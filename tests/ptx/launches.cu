// Launches that test the replacement of the CUDA runtime: passing parameters, and refusals.
#include <cuda.h>

#include <cstdio>
#include <stdexcept>
#include <thread>

#include "arch/cluster.cuh"
#include "arch/tma.cuh"
#include "arch/warp.cuh"
#include "../simt/conformance.h"
#include "rt/tensor_map.cuh"

namespace cuda_ext::conformance {

using namespace arch;

// Parameters of all sizes and alignments.
struct Small {
  uint8_t a;
  uint16_t b[3];
};
struct alignas(64) Large {
  uint64_t x[9];
};
GLOBAL(32, 1)
parameters_kernel(uint8_t a, GRID_CONSTANT Large large, uint16_t b, double c, Small small, uint32_t* out) {
  // Constant indices only: nvcc copies parameters that are indexed by a variable to local memory.
  const uint32_t values[] = {
      a, b, uint32_t(c), small.a, small.b[0], small.b[1], small.b[2], uint32_t(large.x[0]), uint32_t(large.x[8])};
  if (thread_index() != 0) return;
#pragma unroll
  for (int i = 0; i < 9; ++i) out[i] = values[i];
}
static const Register parameters_case({"parameters", 128, 128, [](const uint32_t* in, uint32_t* out) {
                                         Large large{};
                                         large.x[0] = in[7], large.x[8] = in[8];
                                         const Small small{uint8_t(in[3]),
                                                           {uint16_t(in[4]), uint16_t(in[5]), uint16_t(in[6])}};
                                         rt::launch<parameters_kernel>("parameters", {.threads = 32}, uint8_t(in[0]),
                                                                       large, uint16_t(in[1]), double(in[2]), small,
                                                                       out);
                                       }});

struct Words {
  uint32_t x[32];
};
// Function attributes of a kernel persist, so kernels with different attributes are different instances.
template <bool nonportable>
GLOBAL(32, 1)
copy_kernel(const uint32_t* in, uint32_t* out) {
  SHARED_STORAGE(Words, shared);
  shared.x[thread_index()] = in[thread_index()] + 1;
  sync_warp();
  out[thread_index()] = shared.x[31 - thread_index()];
}
#define LAUNCH(name, ...)                                                                                           \
  static const Register name##_case({#name, 128, 128, [](const uint32_t* in, uint32_t* out) {                       \
                                       constexpr rt::LaunchConfig config{__VA_ARGS__};                              \
                                       rt::launch<copy_kernel<config.nonportable_cluster>>(#name, config, in, out); \
                                     }})
LAUNCH(shared_64_kib, .threads = 32, .shared_bytes = 64 << 10);
LAUNCH(shared_100_kib, .threads = 32, .shared_bytes = 100 << 10);
LAUNCH(shared_228_kib, .threads = 32, .shared_bytes = 228 << 10);
LAUNCH(shared_too_little, .threads = 32, .shared_bytes = 64);
LAUNCH(threads_33, .threads = 33, .shared_bytes = sizeof(Words));
LAUNCH(cooperative, .grid = {4}, .threads = 32, .shared_bytes = 100 << 10, .waits = rt::Waits::kForAny);
LAUNCH(cooperative_too_large, .grid = {16}, .threads = 32, .shared_bytes = 100 << 10, .waits = rt::Waits::kForAny);
LAUNCH(cluster_of_8, .grid = {8}, .threads = 32, .cluster = {8}, .shared_bytes = sizeof(Words));
LAUNCH(cluster_of_9, .grid = {18}, .threads = 32, .cluster = {9}, .shared_bytes = sizeof(Words));
LAUNCH(cluster_of_16, .grid = {16}, .threads = 32, .cluster = {16}, .nonportable_cluster = true,
       .shared_bytes = sizeof(Words));
LAUNCH(cluster_of_17, .grid = {34}, .threads = 32, .cluster = {17}, .nonportable_cluster = true,
       .shared_bytes = sizeof(Words));
LAUNCH(cluster_that_does_not_divide, .grid = {7}, .threads = 32, .cluster = {2}, .shared_bytes = sizeof(Words));
LAUNCH(programmatic, .threads = 32, .shared_bytes = sizeof(Words), .programmatic = true);

// Launched twice, the second time with more shared memory.
GLOBAL(32, 1) grows_kernel(const uint32_t* in, uint32_t* out) { out[thread_index()] = in[31 - thread_index()] + 1; }
static const Register grows_case({"shared_grows", 128, 128, [](const uint32_t* in, uint32_t* out) {
                                    for (const size_t kib : {60, 100})
                                      rt::launch<grows_kernel>("shared_grows",
                                                               {.threads = 32, .shared_bytes = kib << 10}, in, out);
                                  }});
// cudaGetLastError() after a refused launch whose error was reported.
static const Register error_case({"no_error_is_left", 128, 4, [](const uint32_t* in, uint32_t* out) {
                                    try {
                                      rt::launch<grows_kernel>("no_error_is_left", {.threads = 33}, in, out);
                                    } catch (const std::runtime_error&) {
                                      out[0] = cudaGetLastError();
                                    }
                                  }});

// Launches with mistakes of a launcher.
GLOBAL(32, 1) unprepared_kernel(uint32_t* out) { out[thread_index()] = 0; }
static const Register unprepared_case({"shared_49_kib_without_asking", 4, 128, [](const uint32_t*, uint32_t* out) {
                                         cudaLaunchConfig_t config{};
                                         config.gridDim = config.blockDim = dim3(1);
                                         config.dynamicSmemBytes = 49 << 10;
                                         rt::check(cudaLaunchKernelEx(&config, unprepared_kernel, out), "raw",
                                                   "launch");
                                       }});
static const Register flat_case({"block_of_two_dimensions", 4, 128, [](const uint32_t*, uint32_t* out) {
                                   cudaLaunchConfig_t config{};
                                   config.gridDim = dim3(1);
                                   config.blockDim = dim3(4, 4);
                                   rt::check(cudaLaunchKernelEx(&config, unprepared_kernel, out), "raw", "launch");
                                 }});

// Tensor maps that bypass the checks of rt::make_tensor_map; out[0] is the result of the driver call.
struct Map {
  int offset = 0;  // of the data, in bytes
  cuuint64_t size = 64, stride = 128;
  cuuint32_t box = 32, step = 1;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
  int map_offset = 0;
};
void encode(const Map& m, const uint32_t* in, uint32_t* out) {
  alignas(64) std::byte map[256];
  const cuuint64_t sizes[] = {m.size, 4}, strides[] = {m.stride};
  const cuuint32_t box[] = {m.box, 4}, steps[] = {m.step, 1};
  char* const data = const_cast<char*>(reinterpret_cast<const char*>(in)) + m.offset;
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult result{};
  rt::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result),
            "encode", "look for the driver's function");
  rt::check(cudaSetDevice(0), "encode", "make the device's context current");
  out[0] = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      reinterpret_cast<CUtensorMap*>(map + m.map_offset), CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, data, sizes, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, m.swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
#define MAP(name, ...)               \
  static const Register name##_case( \
      {#name, 1024, 4, [](const uint32_t* in, uint32_t* out) { encode({__VA_ARGS__}, in, out); }})
MAP(map_good, .offset = 0);
MAP(map_of_odd_address, .offset = 8);
MAP(map_of_odd_stride, .stride = 136);
MAP(map_of_no_size, .size = 0);
MAP(map_of_large_box, .box = 257);
MAP(map_of_narrow_box, .box = 4);
MAP(map_of_wide_box, .box = 64);
MAP(map_of_steps, .step = 2);
MAP(map_in_odd_memory, .map_offset = 8);

// A thread whose first call of CUDA is the one that makes a tensor map. out[0] is 0, or 1 with the error on stderr.
static const Register new_thread_case({"map_in_a_new_thread", 1024, 4, [](const uint32_t* in, uint32_t* out) {
                                         std::thread([&] {
                                           try {
                                             rt::make_tensor_map("map", {.data = in,
                                                                         .element = rt::Element::kFloat16,
                                                                         .sizes = {64, 4},
                                                                         .strides = {128},
                                                                         .box = {32, 4},
                                                                         .swizzle_bytes = 64});
                                             out[0] = 0;
                                           } catch (const std::exception& error) {
                                             std::fprintf(stderr, "%s\n", error.what());
                                             out[0] = 1;
                                           }
                                         }).join();
                                       }});

// A wait for a value that is never written; a wait for the current value; a trap; a division by zero; a race of plain
// stores.
CONFORMANCE(wait_for_nobody, 32, 0, 128, 128) {
  wait_equal(out, in[0] | 1);
  out[1] = 0;
}
CONFORMANCE(wait_that_is_over, 32, 0, 128, 128) {
  wait_equal(in, in[0]);
  out[thread_index()] = in[0];
}
CONFORMANCE(gives_up, 32, 0, 128, 128) {
  if (in[0] != in[1] + 1) __trap();
  out[0] = 0;
}
CONFORMANCE(divides_by_zero, 32, 0, 128, 128) { out[thread_index()] = in[0] / (in[1] - in[1] * in[2]); }
CONFORMANCE(plain_race, 64, sizeof(Words), 128, 128) {
  SHARED_STORAGE(Words, shared);
  shared.x[thread_index() % 32] = in[thread_index() % 32];
  arch::sync_threads();
  out[thread_index() % 32] = shared.x[thread_index() % 32];
}
// Only thread 0 fences before the arrival: the stores of the other threads are not ordered before the reader.
GLOBAL(32, 1) one_fence_kernel(const uint32_t* in, uint32_t* out) {
  const int lane = thread_index();
  out[32 + block_x() * 32 + lane] = in[lane];
  if (lane == 0) fence_device();
  arch::sync_threads();
  if (lane != 0 || atomic_add(out, 1u) + 1 != 1) return;
  fence_device();
  out[1] = out[32 + 31] + out[64 + 31];
}
static const Register one_fence_case({"fence_of_one_thread", 128, 4 * 96, [](const uint32_t* in, uint32_t* out) {
                                        rt::launch<one_fence_kernel>("one_fence", {.grid = {2}, .threads = 32}, in,
                                                                     out);
                                      }});
// Four stores of one source line, each skipped by different lanes.
CONFORMANCE(stores_that_lanes_skip, 32, 0, 128, 4 * 128) {
  const int lane = thread_index();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (lane % 4 != i) store_global(out + 32 * i + lane, in[lane]);
}
// A guard page follows the input.
CONFORMANCE(loads_past_the_end, 32, 0, 256, 128) { out[0] = in[64 + thread_index()]; }

}  // namespace cuda_ext::conformance
