// The launcher of flash attention forward on mma.sync (sm_80 and later).
#pragma once

#include <stdexcept>
#include <string>

#include "attention/attention.h"
#include "attention/attention_plan.h"
#include "attention/tile_size.h"
#include "base/device.h"
#include "base/workspace.h"

namespace cuda_ext {

namespace sm80 {

// Whether the logits are more than scale * products, or the scale is not positive.
inline bool needs_general_kernel(const AttentionParams& p) {
  // With smaller scales, sinks divided by the scale would not be finite.
  constexpr double kSmallestScale = 1e-20;
  return p.softcap > 0 || p.alibi_slopes != nullptr || p.dropout_p > 0 || p.bias_kind != BiasKind::kNone ||
         p.scale < kSmallestScale;
}

// One instantiation per storage type and tile, in attention_fwd_sm80_{f16,bf16}_d{64,96,128,192,256}.cu.
template <class T, int tile>
struct AttentionForwardSm80 {
  static AttentionPlan plan(const AttentionParams& params, const rt::Device& device);
  static size_t workspace(const AttentionParams& params);
  static void launch(const AttentionParams& params, Workspace workspace, void* stream);
};
extern template struct AttentionForwardSm80<half_t, 0>;
extern template struct AttentionForwardSm80<half_t, 1>;
extern template struct AttentionForwardSm80<half_t, 2>;
extern template struct AttentionForwardSm80<half_t, 3>;
extern template struct AttentionForwardSm80<half_t, 4>;
extern template struct AttentionForwardSm80<bfloat16_t, 0>;
extern template struct AttentionForwardSm80<bfloat16_t, 1>;
extern template struct AttentionForwardSm80<bfloat16_t, 2>;
extern template struct AttentionForwardSm80<bfloat16_t, 3>;
extern template struct AttentionForwardSm80<bfloat16_t, 4>;
static_assert(kNumForwardTiles == 5);

// Calls f(Op<T, tile>{}) with the dtype of the parameters and the first tile in `table` that fits their head dims.
template <template <class, int> class Op, class T, int tile = 0, class Config, int tiles, class F>
auto with_tile(const Config (&table)[tiles], const AttentionParams& p, F&& f) {
  if constexpr (tile + 1 < tiles) {
    if (p.dim > table[tile].dim || p.dim_v > table[tile].dim_v) return with_tile<Op, T, tile + 1>(table, p, f);
  }
  return f(Op<T, tile>{});
}
template <template <class, int> class Op, class Config, int tiles, class F>
auto with_attention_tile(const char* op, const Config (&table)[tiles], const AttentionParams& p, F&& f) {
  if (p.dim > kMaxHeadDim || p.dim_v > kMaxHeadDim || p.dim % 8 != 0 || p.dim_v % 8 != 0)
    throw std::invalid_argument(std::string(op) + ": expected head dims that are multiples of 8 up to 256, got " +
                                std::to_string(p.dim) + " and " + std::to_string(p.dim_v));
  switch (p.dtype) {
    case Dtype::kFloat16: return with_tile<Op, half_t>(table, p, f);
    case Dtype::kBFloat16: return with_tile<Op, bfloat16_t>(table, p, f);
    default: throw std::invalid_argument(std::string(op) + ": expected float16 or bfloat16");
  }
}

}  // namespace sm80

// Whether the kernels can read a view in place: rows must be aligned to 16 bytes.
inline bool attention_sm80_reads(const HeadsView& view) {
  constexpr int64_t kBytes = 16, kElements = 8;
  return reinterpret_cast<uintptr_t>(view.data) % kBytes == 0 &&
         (view.batch_stride | view.seq_stride | view.head_stride) % kElements == 0;
}

}  // namespace cuda_ext
