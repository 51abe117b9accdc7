#include "attention/attention_combine.h"

#include "attention/attention_combine.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::attention {

template <class T>
void launch_combine(const AttentionParams& params, const ForwardPlan& plan, void* stream) {
  constexpr int kThreads = 128;
  const int64_t blocks = (lse_rows(params) + kThreads / 32 - 1) / (kThreads / 32);
  rt::launch<attention_combine<T, kThreads>>(
      "attention_combine", {.grid = {int(blocks)}, .threads = kThreads, .stream = stream}, params, plan);
}

template void launch_combine<float>(const AttentionParams&, const ForwardPlan&, void*);
template void launch_combine<half_t>(const AttentionParams&, const ForwardPlan&, void*);
template void launch_combine<bfloat16_t>(const AttentionParams&, const ForwardPlan&, void*);

}  // namespace cuda_ext::attention
