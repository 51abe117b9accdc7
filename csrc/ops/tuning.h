// Plans of products that were measured to be the fastest. Nothing is measured, or taken from a file, unasked.
#pragma once

#include <c10/util/FunctionRef.h>

#include "launchers/cuda_kernels.h"
#include "ops/op.h"

namespace cuda_ext {

// The plan that was measured for this product on the current device; without one, no restriction.
Restriction measured_plan(const CudaKernels& kernels, const GemmParams& params, Float32Product float32);

// The same, but while measuring is on, a product that is new is measured first. `launch` runs it, restricted to a plan.
Restriction tuned_plan(const CudaKernels& kernels, const GemmParams& params, Float32Product float32, at::Device device,
                       c10::function_ref<void(const GemmParams&, const Restriction&)> launch);
Restriction tuned_plan(const CudaKernels& kernels, const ScaledGemmParams& params, at::Device device,
                       c10::function_ref<void(const ScaledGemmParams&, const Restriction&)> launch);

}  // namespace cuda_ext
