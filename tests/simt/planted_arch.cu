// Instructions that some architectures lack, issued without asking: the launch fails and names the instruction.
#include "arch/async_copy.cuh"
#include "arch/mma.cuh"
#include "arch/tma.cuh"
#include "arch/wgmma.cuh"
#include "conformance.h"

namespace cuda_ext::conformance {

using namespace arch;

struct Storage {
  alignas(1024) uint32_t x[2048];
  Barrier full;
};

CONFORMANCE(cp_async, 32, sizeof(Storage), 256, 128) {
  SHARED_STORAGE(Storage, shared);
  issue_cp_async<4>(shared_address(shared.x + thread_index()), in + thread_index(), 4);
}
template <class T>
DEVICE void issue_16_deep() {
  const uint32_t a[4] = {}, b[2] = {};
  float d[4] = {};
  issue_mma_m16n8k16<T>(d, a, b);
}
CONFORMANCE(mma_f16_16_deep, 32, 0, 256, 128) { issue_16_deep<half_t>(); }
CONFORMANCE(mma_bf16, 32, 0, 256, 128) { issue_16_deep<bfloat16_t>(); }
CONFORMANCE(mma_tf32, 32, 0, 256, 128) {
  const uint32_t a[4] = {}, b[2] = {};
  float d[4] = {};
  issue_mma_m16n8k8_tf32(d, a, b);
}
CONFORMANCE(mma_float8, 32, 0, 256, 128) {
  const uint32_t a[4] = {}, b[2] = {};
  float d[4] = {};
  issue_mma_m16n8k32<float8_e4m3_t, float8_e5m2_t>(d, a, b);
}
CONFORMANCE(mbarrier, 32, sizeof(Storage), 256, 128) {
  SHARED_STORAGE(Storage, shared);
  if (thread_index() == 0) barrier_init(shared.full, 1);
}
CONFORMANCE(bulk_copy, 32, sizeof(Storage), 256, 128) {
  SHARED_STORAGE(Storage, shared);
  if (thread_index() == 0) bulk_store(out, shared_address(shared.x), 128);
}
CONFORMANCE(wgmma, 128, sizeof(Storage), 256, 128) {
  SHARED_STORAGE(Storage, shared);
  const uint64_t operand = make_descriptor(shared_address(shared.x), 16, 1024, Swizzle::k128);
  float d[4] = {};
  wgmma_m64k16<half_t, Major::kK, Major::kK>(d, operand, operand, 0);
}
CONFORMANCE(wgmma_float8, 128, sizeof(Storage), 256, 128) {
  SHARED_STORAGE(Storage, shared);
  const uint64_t operand = make_descriptor(shared_address(shared.x), 16, 1024, Swizzle::k128);
  float d[4] = {};
  wgmma_m64k32<float8_e4m3_t, float8_e4m3_t>(d, operand, operand, 0);
}

}  // namespace cuda_ext::conformance
