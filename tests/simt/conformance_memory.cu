// Loads, stores, atomics, cp.async, conversions.
#include "arch/async_copy.cuh"
#include "arch/math.cuh"
#include "arch/warp.cuh"
#include "conformance.h"

namespace cuda_ext::conformance {

using namespace arch;

struct Bytes2048 {
  alignas(16) uint32_t x[512];
};

CONFORMANCE(global_vectors, 32, 0, 4 * 512, 4 * 512) {
  const int t = thread_index();
  store_global(out + 4 * t, load_global<Words4>(in + 4 * t));
  store_global_streaming(out + 128 + 2 * t, load_global_streaming<Words2>(in + 128 + 2 * t));
  store_global(out + 256 + t, load_global<uint32_t>(in + 256 + t));
  const auto* halves = reinterpret_cast<const uint16_t*>(in + 384);
  auto* half_out = reinterpret_cast<uint16_t*>(out + 384);
  store_global(half_out + t, load_global_streaming<uint16_t>(halves + t));
}
CONFORMANCE(shared_vectors, 32, sizeof(Bytes2048), 512, 3 * 512) {
  SHARED_STORAGE(Bytes2048, shared);
  const int t = thread_index();
  const SharedAddress base = shared_address(shared.x);
  store_shared(base + 16 * uint32_t(t), load_global<Words4>(in + 4 * t));
  sync_warp();
  store_global(out + 4 * t, load_shared<Words4>(base + 16 * uint32_t(31 - t)));
  store_global(out + 128 + 2 * t, load_shared<Words2>(base + 8 * uint32_t(31 - t)));
  out[256 + t] = load_shared<uint32_t>(base + 4 * uint32_t(31 - t));
}
// The widths that global_vectors does not cover.
CONFORMANCE(global_widths, 32, 0, 512, 512 + 512 + 128 + 64 + 128) {
  const int t = thread_index();
  store_global_streaming(out + 4 * t, load_global_streaming<Words4>(in + 4 * t));
  for (int i = 0; i < 2; ++i) store_global(out + 128 + 64 * i + 2 * t, load_global<Words2>(in + 64 * i + 2 * t));
  store_global_streaming(out + 256 + t, load_global_streaming<uint32_t>(in + t));
  auto* const halves = reinterpret_cast<uint16_t*>(out + 288);
  store_global_streaming(halves + t, load_global<uint16_t>(reinterpret_cast<const uint16_t*>(in) + t));
  out[304 + t] = load_global<uint8_t>(reinterpret_cast<const uint8_t*>(in) + t);
}
CONFORMANCE(atomics, 64, 0, 256, 32) {
  const int t = thread_index();
  if (t < 8) out[t] = 0;
  arch::sync_threads();
  atomic_add(out, in[t]);
  reduce_add(reinterpret_cast<float*>(out + 1), float(in[t] % 256));
  reduce_or(out + 2, 1u << in[t] % 32);
  atomic_add_acq_rel(out + 3, 1);
  reduce_add(out + 4, in[t]);
  atomic_add(reinterpret_cast<float*>(out + 5), float(in[t] % 256));
  atomic_add(reinterpret_cast<uint64_t*>(out + 6), in[t] | uint64_t(in[t]) << 32);
}
// Four threads add to each vector of four.
CONFORMANCE(vector_reductions, 32, 0, 512, 128) {
  const int t = thread_index();
  reinterpret_cast<float*>(out)[t] = 0.0f;
  arch::sync_threads();
  const Words4 words = load_global<Words4>(in + 4 * t);
  float values[4];
  for (int i = 0; i < 4; ++i) values[i] = float(words.data[i] % 256);
  reduce_add(reinterpret_cast<float*>(out) + t % 8 * 4, values);
}
// Every size, with all, some or none of the bytes valid; two groups in flight.
CONFORMANCE(cp_async, 32, sizeof(Bytes2048), 2048, 2048) {
  SHARED_STORAGE(Bytes2048, shared);
  const int t = thread_index();
  const SharedAddress base = shared_address(shared.x);
  arch::cp_async<16>(base + 16 * uint32_t(t), in + 4 * t, t % 2 == 0 ? 16 : t % 16);
  cp_async_commit();
  arch::cp_async<8>(base + 512 + 8 * uint32_t(t), in + 128 + 2 * t, t % 9);
  arch::cp_async<4>(base + 1024 + 4 * uint32_t(t), in + 256 + t, t % 5);
  cp_async_commit();
  cp_async_wait<1>();
  sync_warp();
  store_global(out + 4 * t, load_shared<Words4>(base + 16 * uint32_t(31 - t)));
  cp_async_wait<0>();
  sync_warp();
  store_global(out + 128 + 2 * t, load_shared<Words2>(base + 512 + 8 * uint32_t(31 - t)));
  out[256 + t] = load_shared<uint32_t>(base + 1024 + 4 * uint32_t(31 - t));
}

// All roundings, for arbitrary input bits.
CONFORMANCE(conversions, 128, 0, 512, 8 * 512) {
  const int t = thread_index();
  const float x = bits_float(in[t]);
  out[t] = from_float<half_t>(x).bits;
  out[128 + t] = from_float<bfloat16_t>(x).bits;
  out[256 + t] = to_tf32(x);
  out[384 + t] = pack<half_t>(x, -x);
  out[512 + t] = pack<bfloat16_t>(x, -x);
  out[640 + t] = float_bits(to_float(half_t{uint16_t(in[t])}));
  out[768 + t] = float_bits(to_float(bfloat16_t{uint16_t(in[t])}));
  out[896 + t] = float_bits(arch::fma(x, x, 1.0f));
}
// in: all 256 elements of an 8-bit format, in any order. out: as floats, of each format; and these rounded to it again.
template <class T>
DEVICE void convert_elements(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  const Words<1> elements{in[t]};
  float x[4];
  unpack<T>(elements, x);
  for (int i = 0; i < 4; ++i) out[4 * t + i] = float_bits(x[i]);
  out[256 + t] = words_of<T>(x).data[0];
  out[320 + t] = float_bits(to_float(T{uint8_t(in[t])}));
}
CONFORMANCE(float8_elements, 64, 0, 256, 2 * 384 * 4) {
  convert_elements<float8_e4m3_t>(in, out);
  convert_elements<float8_e5m2_t>(in, out + 384);
}
// in: 4096 floats. out: each with its neighbour as two elements of the 8-bit formats, then each alone.
CONFORMANCE(float8_rounding, 128, 0, 4096 * 4, 6144 * 4) {
  for (int i = thread_index(); i < 4096; i += 128) {
    const float x = bits_float(in[i]), next = bits_float(in[i ^ 1]);
    if (i % 2 == 0)
      out[i / 2] = uint32_t(pack_float8<float8_e5m2_t>(x, next)) << 16 | pack_float8<float8_e4m3_t>(x, next);
    out[2048 + i] = uint32_t(from_float<float8_e5m2_t>(x).bits) << 8 | from_float<float8_e4m3_t>(x).bits;
  }
}
// Approximate in hardware, so compared with a tolerance.
CONFORMANCE(special_functions, 128, 0, 512, 7 * 512) {
  const int t = thread_index();
  const float x = (float(in[t] >> 8) / 8388608.0f - 1.0f) * 6.0f;
  out[t] = float_bits(fast_exp2(x));
  out[128 + t] = float_bits(fast_log2(x * x + 0.5f));
  out[256 + t] = float_bits(fast_reciprocal(x));
  out[384 + t] = float_bits(fast_tanh(x));
  out[512 + t] = float_bits(arch::exp(x));
  out[640 + t] = float_bits(arch::erf(x));
  out[768 + t] = float_bits(arch::tanh(x));
}

}  // namespace cuda_ext::conformance
