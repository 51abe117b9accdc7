// Which kernel computes a product whose results are logits, and the launchers of the instantiations.
#pragma once

#include <optional>

#include "gemm/tiles_sm80.h"
#include "gemm/tiles_sm90.h"
#include "loss/loss.h"

namespace cuda_ext::loss {

// The tiles of the kernels: 128 x 256 on wgmma, the fastest for the K of language models; on mma.sync 128 x 128, of
// float32 in three products 64 x 64. A part of a row's statistics is as many columns as registers permit.
constexpr int kLogitShape = 1;   // of sm80::kTiles
constexpr int kLogitConfig = 0;  // of sm90::kConfigs
constexpr int kPartColumnsSm80 = 32, kPartColumnsSm90 = 64;

struct LogitPlan {
  std::optional<sm90::GemmPlan> sm90;  // on wgmma; else on mma.sync:
  sm80::GemmPlan sm80;
  sm80::Arithmetic arithmetic;

  int64_t parts() const {
    return sm90 ? int64_t(sm90->column_tiles) * (sm90::kConfigs[kLogitConfig].block_n / kPartColumnsSm90)
                : int64_t(sm80.column_tiles) * (sm80::kTiles[int(arithmetic)][kLogitShape].block_n / kPartColumnsSm80);
  }
};

// For the current device; none if the kernels cannot read the operands: they must be contiguous along k.
std::optional<LogitPlan> plan_logits(const GemmParams& product, Float32Product float32);

// Whether the epilogues can read the coefficients: float32, the same for all rows.
inline bool have_epilogue(const Operand& coefficients) {
  return coefficients.data == nullptr || (coefficients.dtype == Dtype::kFloat32 && coefficients.row_stride == 0);
}

// Adds the statistics of parts of rows (loss_passes.cu).
void launch_total_statistics(const LogitTotalParams& params, void* stream);

// One instantiation per storage type and product, in instantiations/logits_sm80_{f16,bf16,f32,tf32}.cu and
// logits_sm90_{f16,bf16,tf32}.cu.
template <class T, sm80::Arithmetic arithmetic>
struct LogitsSm80 {
  static void statistics(const GemmParams& product, const sm80::GemmPlan& plan, const LogitPartsParams& params,
                         void* stream);
  static void gradient(const GemmParams& product, const sm80::GemmPlan& plan, const LogitGradParams& params,
                       void* stream);
};
template <class T>
struct LogitsSm90 {
  static void statistics(const GemmParams& product, const sm90::GemmPlan& plan, const LogitPartsParams& params,
                         void* stream);
  static void gradient(const GemmParams& product, const sm90::GemmPlan& plan, const LogitGradParams& params,
                       void* stream);
};

}  // namespace cuda_ext::loss
