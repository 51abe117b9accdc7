// Launches the kernels of loss.cuh.
#include "loss/loss.cuh"

#include "loss/logits.h"
#include "loss/loss_cuda.h"
#include "rt/launch.cuh"

namespace cuda_ext {

void launch_report_wrong_targets_cuda(const LossTargets& targets, void* stream) {
  if (targets.rows == 0) return;
  rt::launch<loss::report_wrong_targets<loss::kThreads>>(
      "report_wrong_targets",
      {.grid = {int(ceil_div(targets.rows, loss::kThreads))}, .threads = loss::kThreads, .stream = stream}, targets);
}

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
  const int64_t column_tiles = ceil_div(params.tile.columns, loss::kThreads * loss::kVector);
  if (params.tile.rows == 0 || column_tiles == 0) return;
  rt::launch<loss::logit_grad<loss::kThreads>>(
      "logit_grad", {.grid = {int(params.tile.rows * column_tiles)}, .threads = loss::kThreads, .stream = stream},
      params, int(column_tiles));
}

void loss::launch_total_statistics(const LogitTotalParams& params, void* stream) {
  rt::launch<total_statistics<kThreads>>("total_statistics",
                                         {.grid = {int(ceil_div(params.rows, arch::kWarpSize))},
                                          .threads = kThreads,
                                          .shared_bytes = sizeof(Totals),
                                          .stream = stream},
                                         params);
}

}  // namespace cuda_ext
