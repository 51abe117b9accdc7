// Launches the kernel of gemm_sm80.cuh: checks, plan, workspace, and the instantiation for dtype, layout and tile
// shape.
#pragma once

#include <stdexcept>
#include <string>

#include "gemm/gemm_sm80.cuh"
#include "gemm/gemm_sm80.h"
#include "gemm/gemm_passes.h"
#include "gemm/plan_sm80.h"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext::sm80 {

template <class T, Arithmetic arithmetic, bool a_k_major, bool b_k_major, int shape>
void launch_shape(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  if constexpr (shape < kNumShapes[int(arithmetic)]) {
    using Kernel = Gemm<T, arithmetic, a_k_major, b_k_major, kTiles[int(arithmetic)][shape]>;
    rt::launch<gemm_sm80<Kernel>>("gemm_sm80",
                                  {.grid = {plan.tiles, plan.splits},
                                   .threads = Kernel::kThreads,
                                   .shared_bytes = sizeof(typename Kernel::Storage),
                                   .stream = stream},
                                  params, plan);
  }
}

template <class T, Arithmetic arithmetic, bool a_k_major, bool b_k_major>
void launch_layout(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  switch (plan.shape) {
    case 0: return launch_shape<T, arithmetic, a_k_major, b_k_major, 0>(params, plan, stream);
    case 1: return launch_shape<T, arithmetic, a_k_major, b_k_major, 1>(params, plan, stream);
    default: return launch_shape<T, arithmetic, a_k_major, b_k_major, 2>(params, plan, stream);
  }
}

inline void check_operand(const char* name, const Operand& operand, int64_t rows, int64_t columns) {
  if (rows > 0 && columns > 0 && !gemm_sm80_reads(operand, rows, columns))
    throw std::invalid_argument("expected a row or column stride of 1 in " + std::string(name) + ", got " +
                                std::to_string(operand.row_stride) + " and " + std::to_string(operand.column_stride) +
                                "; make it contiguous");
}

template <class T, Arithmetic arithmetic>
void launch_with(const GemmParams& params, const Restriction& only, const AllocateWorkspace& allocate,
                 rt::Stream stream) {
  if (is_empty(params)) return;
  check_operand("a", params.a, params.m, params.k);
  check_operand("b", params.b, params.k, has_gate_up(params) ? 2 * params.n : params.n);
  GemmPlan plan = choose_plan(params, arithmetic, rates_of(rt::describe_device("gemm_sm80")), only);
  provide_workspace("gemm_sm80", allocate, [&](void* data) {
    return assign_workspace(params, kTiles[int(arithmetic)][plan.shape], data, plan);
  });
  if (plan.splits > 1) launch_clear_words(plan.arrivals, plan.tiles, stream);
  const auto launch = is_k_major_a(params)   ? is_k_major_b(params) ? launch_layout<T, arithmetic, true, true>
                                                                    : launch_layout<T, arithmetic, true, false>
                      : is_k_major_b(params) ? launch_layout<T, arithmetic, false, true>
                                             : launch_layout<T, arithmetic, false, false>;
  launch(params, plan, stream);
  if (plan.bias_sums != nullptr)
    launch_add_block_sums(plan.bias_sums, plan.row_tiles, (params.gated ? 2 : 1) * params.n, params.bias_grad, stream);
}

}  // namespace cuda_ext::sm80

namespace cuda_ext {

template <class T, Float32Product float32>
void GemmSm80<T, float32>::launch(const GemmParams& params, const Restriction& only, const AllocateWorkspace& allocate,
                                  void* stream) {
  sm80::launch_with<T, sm80::kArithmeticOf<T, float32>>(params, only, allocate, stream);
}

}  // namespace cuda_ext
