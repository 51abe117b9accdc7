// The launchers of the CUDA kernels of loss.h. On `stream`, an rt::Stream. Any dtypes except float64.
#pragma once

#include "loss/loss.h"

namespace cuda_ext {

void launch_logit_statistics_cuda(const LogitStatisticsParams& params, void* stream);
void launch_logit_grad_cuda(const LogitGradParams& params, void* stream);

}  // namespace cuda_ext
