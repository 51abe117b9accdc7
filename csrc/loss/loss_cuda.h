// The launchers of the CUDA kernels of loss.h. On `stream`, an rt::Stream. Any dtypes except float64.
#pragma once

#include "base/workspace.h"
#include "gemm/problem.h"
#include "loss/loss.h"

namespace cuda_ext {

// The host cannot know wrong targets without waiting for the device, which prints them.
void launch_report_wrong_targets_cuda(const LossTargets& targets, void* stream);

// Of a tile in memory.
void launch_logit_statistics_cuda(const LogitStatisticsParams& params, void* stream);
void launch_logit_grad_cuda(const LogitGradParams& params, void* stream);

// The same, of the tile x that `product` would form, a float32 bias included, without `out`. `logits` may be null; else
// it gets z. They return false if no kernel can read the operands, and then do nothing.
bool launch_product_statistics_cuda(const GemmParams& product, const LogitStatisticsParams& params,
                                    const AllocateWorkspace& allocate, void* stream, Float32Product float32);
// Its gradient has the dtype of the operands, and `column_sums` instead of `unrounded`.
bool launch_product_grad_cuda(const GemmParams& product, const LogitGradParams& params, void* stream,
                              Float32Product float32);

}  // namespace cuda_ext
