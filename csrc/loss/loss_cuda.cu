#include "loss/loss.cuh"

#include "loss/loss_cuda.h"
#include "rt/launch.cuh"

namespace cuda_ext {

void launch_logit_statistics_cuda(const LogitStatisticsParams& params, void* stream) {
  if (params.tile.rows == 0 || params.tile.columns == 0) return;
  rt::launch<loss::logit_statistics<loss::kThreads>>("logit_statistics",
                                                     {.grid = {int(params.tile.rows)},
                                                      .threads = loss::kThreads,
                                                      .shared_bytes = sizeof(loss::Storage),
                                                      .stream = stream},
                                                     params);
}

void launch_logit_grad_cuda(const LogitGradParams& params, void* stream) {
  constexpr int64_t kColumns = loss::kThreads * loss::kVector;
  const int64_t column_tiles = (params.tile.columns + kColumns - 1) / kColumns;
  if (params.tile.rows == 0 || column_tiles == 0) return;
  rt::launch<loss::logit_grad<loss::kThreads>>(
      "logit_grad", {.grid = {int(params.tile.rows * column_tiles)}, .threads = loss::kThreads, .stream = stream},
      params, int(column_tiles));
}

}  // namespace cuda_ext
