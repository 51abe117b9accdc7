// Parameters of the two passes over tiles of logits from which losses without logits are made: statistics of each row,
// and the gradient at the logits. csrc/ops/loss.cpp makes the tiles by products, and drops them.
#pragma once

#include "base/host_device.h"
#include "cpu/isa.h"
#include "gemm/gemm.h"

namespace cuda_ext {

// Targets (rows,) of a loss, of which all are classes or `ignore_index`.
struct LossTargets {
  const int64_t* target;
  int64_t rows, classes, ignore_index;

  HOST_DEVICE bool is_wrong(int64_t row) const {
    return target[row] != ignore_index && (target[row] < 0 || target[row] >= classes);
  }
};

// A tile (rows, columns) of x = scale (input @ weight^T + bias), contiguous, of the accumulation type: float32, or
// float64 on the CPU. Logits are z = softcap tanh(x / softcap), or x if softcap is 0.
struct LogitTile {
  int64_t rows = 0, columns = 0;
  int64_t first_column = 0;  // in the vocabulary
  Dtype dtype = Dtype::kFloat32;
  double softcap = 0;
  const int64_t* target = nullptr;  // (rows,), in the vocabulary. May be null
  int64_t ignore_index = -1;        // a target that is none
  Operand coefficients;             // (rows, columns), or a row that is broadcast; column_stride 1. May be absent
};

// Arrays (rows,) of the accumulation type, which a tile updates: the maximum of the logits of all tiles so far, and
// sums over them. Those after `sum` may be null. Differences from the maximum are exact where logits are nearly equal,
// however large they are.
struct RowStatistics {
  void* max;     // starts at -inf
  void* sum;     // of exp(z - max), like the others starts at 0
  void* moment;  // of exp(z - max) (z - max)
  void* dot;     // of coefficients z
  void* picked;  // z at the target
};
struct LogitStatisticsParams {
  LogitTile tile;
  void* logits;  // x, which becomes z
  RowStatistics statistics;
};

// grad = scale dz/dx (p (by_lse + by_entropy (log p + entropy)) + by_dot coefficients + by_picked [column is target])
// with log p = z - lse: the gradient at input @ weight^T + bias. The entropy's gradient enters with the other sign.
// Arrays (rows,) of the accumulation type; those named by_... may be null.
struct LogitGradParams {
  LogitTile tile;
  const void* logits;  // x, or z if `capped`
  bool capped = false;
  double scale = 1;
  const void *lse, *lse_low;  // their sum is the log-sum-exp: the second is what the first lost by rounding
  const void* entropy;        // null without by_entropy
  const void *by_lse, *by_entropy, *by_dot, *by_picked;
  Output grad;  // (rows, columns)
  // For the bias's gradient, a sum over rows that roundings of `grad` to 16 bits would spoil. Null if it is not wanted.
  void* unrounded = nullptr;     // (rows, columns), of the accumulation type; may be `logits`
  float* column_sums = nullptr;  // of epilogues instead: sums of kSummedRows rows each, (ceil(rows / that), columns)
};
constexpr int kSummedRows = 16;

// On GPUs, epilogues of products do the same without x in memory (logits.cuh). Statistics of `count` parts of each row,
// (count, rows), and their total, which is added to `statistics`.
struct LogitParts {
  int64_t count = 0;
  float *max = nullptr, *sum = nullptr;
  float *moment = nullptr, *dot = nullptr;  // null as in the statistics
};
struct LogitPartsParams {
  LogitTile tile;  // rows and columns are the product's
  LogitParts parts;
  float* picked = nullptr;  // (rows,), z at the target; may be null
  float* logits = nullptr;  // (rows, columns), z; null if it need not be stored
};
struct LogitTotalParams {
  int64_t rows;
  LogitParts parts;
  RowStatistics statistics;
};

CUDA_EXT_CPU_LAUNCHER(launch_logit_statistics, LogitStatisticsParams)
CUDA_EXT_CPU_LAUNCHER(launch_logit_grad, LogitGradParams)

}  // namespace cuda_ext
