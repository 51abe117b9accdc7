// mma.sync of 8-bit floats.
#include "arch/mma.cuh"
#include "conformance.h"

namespace cuda_ext::conformance {

using namespace arch;

// in: a (4 words a lane), b (2), c (4 floats); out: d.
template <class A, class B>
DEVICE void multiply_float8(const uint32_t* in, uint32_t* out) {
  if constexpr (has_float8_mma()) {
    const int lane = lane_index();
    uint32_t a[4], b[2];
    float d[4];
    for (int i = 0; i < 4; ++i) a[i] = in[i * 32 + lane];
    for (int i = 0; i < 2; ++i) b[i] = in[128 + i * 32 + lane];
    for (int i = 0; i < 4; ++i) d[i] = bits_float(in[192 + i * 32 + lane]);
    mma_m16n8k32<A, B>(d, a, b);
    for (int i = 0; i < 4; ++i) out[i * 32 + lane] = float_bits(d[i]);
  }
}
using E4M3 = float8_e4m3_t;
using E5M2 = float8_e5m2_t;
CONFORMANCE(mma_e4m3_e4m3, 32, 0, 10 * 128, 512) { multiply_float8<E4M3, E4M3>(in, out); }
CONFORMANCE(mma_e4m3_e5m2, 32, 0, 10 * 128, 512) { multiply_float8<E4M3, E5M2>(in, out); }
CONFORMANCE(mma_e5m2_e4m3, 32, 0, 10 * 128, 512) { multiply_float8<E5M2, E4M3>(in, out); }
CONFORMANCE(mma_e5m2_e5m2, 32, 0, 10 * 128, 512) { multiply_float8<E5M2, E5M2>(in, out); }

}  // namespace cuda_ext::conformance
