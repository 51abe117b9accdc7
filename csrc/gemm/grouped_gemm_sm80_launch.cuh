// Launches grouped products on the kernel of gemm_sm80.cuh: plan, and the instantiation for dtype, layout and tile
// shape.
#pragma once

#include "gemm/grouped_gemm_sm80.h"
#include "gemm/groups_sm80.cuh"
#include "gemm/plan_sm80.h"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext {
namespace sm80 {

template <class T, Arithmetic arithmetic, bool b_k_major, Groups::Cut cut, bool gathers>
void launch_grouped(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  constexpr int kFirst = first_grouped_shape(arithmetic);
  const auto launch = [&]<int shape>() {
    using Kernel = GroupedGemm<T, arithmetic, b_k_major, kTiles[int(arithmetic)][shape], cut, gathers>;
    rt::launch<gemm_sm80<Kernel>>("gemm_sm80",
                                  {.grid = {plan.tiles, 1},
                                   .threads = Kernel::kThreads,
                                   .shared_bytes = sizeof(typename Kernel::Storage),
                                   .stream = stream},
                                  params, plan);
  };
  constexpr int kLast = kNumShapes[int(arithmetic)] - 1;
  static_assert(kLast - kFirst <= 1);
  if (plan.shape == kFirst)
    launch.template operator()<kFirst>();
  else
    launch.template operator()<kLast>();
}

template <class T, Arithmetic arithmetic, bool gathers>
void launch_grouped(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  if (params.groups.cut == Groups::Cut::kTerms)
    return launch_grouped<T, arithmetic, false, Groups::Cut::kTerms, gathers>(params, plan, stream);
  if (is_grouped_b_k_major(params))
    return launch_grouped<T, arithmetic, true, Groups::Cut::kRows, gathers>(params, plan, stream);
  launch_grouped<T, arithmetic, false, Groups::Cut::kRows, gathers>(params, plan, stream);
}

}  // namespace sm80

template <class T, Float32Product float32>
void GroupedGemmSm80<T, float32>::launch(const GemmParams& params, void* stream) {
  using namespace sm80;
  constexpr Arithmetic kArithmetic = kArithmeticOf<T, float32>;
  const GemmPlan plan = choose_grouped_plan(params, kArithmetic, rates_of(rt::describe_device("gemm_sm80")));
  if constexpr (sizeof(T) == 2)  // other rows are copied before the product (ops/grouped_mm.cpp)
    if (params.groups.indices != nullptr) return launch_grouped<T, kArithmetic, true>(params, plan, stream);
  launch_grouped<T, kArithmetic, false>(params, plan, stream);
}

}  // namespace cuda_ext
