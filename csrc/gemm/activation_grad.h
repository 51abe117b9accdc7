// The gradient through an activation and a bias on a device: what the bindings call.
#pragma once

#include "gemm/gemm.h"
#include "base/workspace.h"

namespace cuda_ext {

// Bytes of workspace that a launch with these parameters needs. Pointers are not followed, but tell what is present.
size_t activation_grad_workspace(const ActivationGradParams& params);

// Starts what ActivationGradParams describes on `stream`, an rt::Stream. Any dtypes but float64.
void launch_activation_grad_cuda(const ActivationGradParams& params, Workspace workspace, void* stream);

}  // namespace cuda_ext
