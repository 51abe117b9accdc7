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

template <class T, Arithmetic arithmetic, bool b_k_major, Groups::Cut cut>
void launch_grouped(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  constexpr int kFirst = first_grouped_shape(arithmetic);
  const auto launch = [&]<int shape>() {
    using Kernel = GroupedGemm<T, arithmetic, b_k_major, kTiles[int(arithmetic)][shape], cut>;
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

}  // namespace sm80

template <class T, Float32Product float32>
void GroupedGemmSm80<T, float32>::launch(const GemmParams& params, void* stream) {
  using namespace sm80;
  constexpr Arithmetic kArithmetic = kArithmeticOf<T, float32>;
  const GemmPlan plan = choose_grouped_plan(params, kArithmetic, rates_of(rt::describe_device("gemm_sm80")));
  if (params.groups.cut == Groups::Cut::kTerms)
    return launch_grouped<T, kArithmetic, false, Groups::Cut::kTerms>(params, plan, stream);
  if (is_grouped_b_k_major(params))
    return launch_grouped<T, kArithmetic, true, Groups::Cut::kRows>(params, plan, stream);
  launch_grouped<T, kArithmetic, false, Groups::Cut::kRows>(params, plan, stream);
}

}  // namespace cuda_ext
