// Kernels with invalid memory accesses: the launch fails and names the instruction; the process continues.
#include "arch/async_copy.cuh"
#include "arch/tma.cuh"
#include "arch/warp.cuh"
#include "conformance.h"
#include "rt/tensor_map.cuh"

namespace cuda_ext::conformance {

using namespace arch;

struct Sixteen {
  alignas(128) uint32_t x[32];
  Barrier full;
};

// A guard page follows each buffer of 256 bytes.
constexpr int kPast = 64;

CONFORMANCE(plain_load, 32, 0, 256, 128) { out[thread_index()] = in[thread_index() + kPast]; }
CONFORMANCE(plain_store, 32, 0, 256, 128) { out[thread_index() + kPast] = in[0]; }
CONFORMANCE(load_past_the_end, 32, 0, 256, 128) { out[0] = load_global<uint32_t>(in + thread_index() + kPast); }
CONFORMANCE(store_past_the_end, 32, 0, 256, 256) { store_global(out + thread_index() + kPast, in[0]); }
CONFORMANCE(atomic_past_the_end, 32, 0, 256, 256) { atomic_add(out + kPast, 1u); }
CONFORMANCE(cp_async_past_the_end, 32, sizeof(Sixteen), 256, 128) {
  SHARED_STORAGE(Sixteen, shared);
  arch::cp_async<4>(shared_address(shared.x + thread_index()), in + kPast + thread_index());
  cp_async_commit();
  cp_async_wait<0>();
  out[0] = 0;
}
CONFORMANCE(bulk_load_past_the_end, 32, sizeof(Sixteen), 256, 128) {
  SHARED_STORAGE(Sixteen, shared);
  if (thread_index() == 0) {
    barrier_init(shared.full, 1);
    fence_barrier_init();
    barrier_arrive_expect(shared.full, 128);
    bulk_load(shared_address(shared.x), in + kPast - 16, 128, shared.full);
  }
  sync_warp();
  barrier_wait(shared.full, 0);
  out[0] = shared.x[0];
}
DEVICE uint32_t descend(uint32_t depth) {
  volatile uint32_t room[1024];
  room[depth % 1024] = depth;
  return depth == 0 ? 0 : descend(depth - 1) + room[depth % 1024];
}
CONFORMANCE(deep_recursion, 32, 0, 256, 128) { out[0] = descend(in[0] % 1000 + 1000); }
CONFORMANCE(good_kernel, 32, 0, 256, 128) { out[thread_index()] = in[thread_index()] + 1; }

// Launches that the hardware would refuse.
#define REFUSED(name, ...)                                                                            \
  static const Register name##_case({#name, 256, 128, [](const uint32_t* in, uint32_t* out) {         \
                                       rt::launch<good_kernel_kernel>(#name, {__VA_ARGS__}, in, out); \
                                     }})
REFUSED(cluster_of_17, .grid = {34}, .threads = 32, .cluster = {17}, .nonportable_cluster = true);
REFUSED(cluster_of_9, .grid = {18}, .threads = 32, .cluster = {9});
REFUSED(cluster_that_does_not_divide, .grid = {7}, .threads = 32, .cluster = {2});
REFUSED(too_much_shared_memory, .threads = 32, .shared_bytes = 228 * 1024);

#define REFUSED_MAP(name, ...)       \
  static const Register name##_case( \
      {#name, 256, 128, [](const uint32_t* in, uint32_t*) { rt::make_tensor_map(#name, {.data = in, __VA_ARGS__}); }})
REFUSED_MAP(map_of_odd_stride, .sizes = {8, 2}, .strides = {40}, .box = {8, 2});
REFUSED_MAP(map_of_large_box, .sizes = {8, 2}, .strides = {32}, .box = {8, 257});
REFUSED_MAP(map_of_narrow_swizzle, .sizes = {8, 2}, .strides = {32}, .box = {8, 2}, .swizzle_bytes = 128);
REFUSED_MAP(map_of_nothing, .sizes = {8, 0}, .strides = {32}, .box = {8, 2});

// A store to rows that end within a unit of 16 bytes: the hardware writes the whole unit.
GLOBAL(32, 1) store_box(GRID_CONSTANT TensorMap map) {
  SHARED_STORAGE(Sixteen, shared);
  shared.x[thread_index()] = 0;
  fence_async_shared();
  sync_warp();
  if (thread_index() != 0) return;
  tma_store(map, shared_address(shared.x), {0, 0});
  bulk_commit();
  bulk_wait<0>();
}
static const Register ragged_case({"store_to_ragged_rows", 256, 128, [](const uint32_t*, uint32_t* out) {
                                     const TensorMap map = rt::make_tensor_map(
                                         "store_box", {.data = out, .sizes = {15, 2}, .strides = {64}, .box = {16, 2}});
                                     rt::launch<store_box>("store_box",
                                                           {.threads = 32, .shared_bytes = sizeof(Sixteen)}, map);
                                   }});

}  // namespace cuda_ext::conformance
