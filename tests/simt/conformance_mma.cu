// ldmatrix and mma.sync.
#include "arch/mma.cuh"
#include "conformance.h"

namespace cuda_ext::conformance {

using namespace arch;

struct Bytes512 {
  alignas(16) uint32_t x[128];
};

// in: 32 rows of 16 bytes; row r is at position (r * 5) % 32, so that mixing up addresses and rows changes the result.
template <int count, bool transposed>
DEVICE void load_matrices(const uint32_t* in, uint32_t* out) {
  SHARED_STORAGE(Bytes512, shared);
  const int lane = lane_index();
  const SharedAddress place = shared_address(shared.x) + 16 * uint32_t(lane * 5 % 32);
  store_shared(place, load_global<Words4>(in + 4 * lane));
  sync_warp();
  uint32_t m[count];
  ldmatrix<count, transposed>(m, place);
  for (int i = 0; i < count; ++i) out[i * 32 + lane] = m[i];
}
CONFORMANCE(ldmatrix_x1, 32, sizeof(Bytes512), 512, 128) { load_matrices<1, false>(in, out); }
CONFORMANCE(ldmatrix_x2, 32, sizeof(Bytes512), 512, 256) { load_matrices<2, false>(in, out); }
CONFORMANCE(ldmatrix_x4, 32, sizeof(Bytes512), 512, 512) { load_matrices<4, false>(in, out); }
CONFORMANCE(ldmatrix_x1_trans, 32, sizeof(Bytes512), 512, 128) { load_matrices<1, true>(in, out); }
CONFORMANCE(ldmatrix_x2_trans, 32, sizeof(Bytes512), 512, 256) { load_matrices<2, true>(in, out); }
CONFORMANCE(ldmatrix_x4_trans, 32, sizeof(Bytes512), 512, 512) { load_matrices<4, true>(in, out); }

// in: a (4 words a lane), b (2), c (4 floats); out: d.
template <class Mma>
DEVICE void multiply_fragments(const uint32_t* in, uint32_t* out, Mma&& mma) {
  const int lane = lane_index();
  uint32_t a[4], b[2];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = in[i * 32 + lane];
  for (int i = 0; i < 2; ++i) b[i] = in[128 + i * 32 + lane];
  for (int i = 0; i < 4; ++i) d[i] = __builtin_bit_cast(float, in[192 + i * 32 + lane]);
  mma(d, a, b);
  for (int i = 0; i < 4; ++i) out[i * 32 + lane] = __builtin_bit_cast(uint32_t, d[i]);
}
CONFORMANCE(mma_f16, 32, 0, 10 * 128, 512) {
  multiply_fragments(in, out, [](auto& d, auto& a, auto& b) { mma_m16n8k16<half_t>(d, a, b); });
}
CONFORMANCE(mma_bf16, 32, 0, 10 * 128, 512) {
  multiply_fragments(in, out, [](auto& d, auto& a, auto& b) { mma_m16n8k16<bfloat16_t>(d, a, b); });
}
CONFORMANCE(mma_tf32, 32, 0, 10 * 128, 512) {
  multiply_fragments(in, out, [](auto& d, auto& a, auto& b) { mma_m16n8k8_tf32(d, a, b); });
}

}  // namespace cuda_ext::conformance
