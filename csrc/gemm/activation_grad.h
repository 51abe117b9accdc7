// The launcher of the gradient through an activation and a bias on a GPU.
#pragma once

#include "gemm/gemm.h"
#include "base/workspace.h"

namespace cuda_ext {

// Bytes of workspace that a launch with these parameters needs. Pointers are not dereferenced; null means absent.
size_t activation_grad_workspace(const ActivationGradParams& params);

// Launches the gradient on `stream`, an rt::Stream. Any dtypes except float64.
void launch_activation_grad_cuda(const ActivationGradParams& params, Workspace workspace, void* stream);

}  // namespace cuda_ext
