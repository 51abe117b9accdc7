#include "attention/attention_combine.h"

#include "attention/attention_combine.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::attention {

template <class T>
void launch_combine(const AttentionParams& params, const ForwardPlan& plan, void* stream) {
  if (sizeof(T) == 2 && params.float32_out) return launch_combine<float>(params, plan, stream);
  constexpr int kThreads = 128;
  const auto launch = [&]<auto kernel>(const char* name, int64_t rows) {
    const int64_t blocks = (rows + kThreads / 32 - 1) / (kThreads / 32);
    rt::launch<kernel>(name, {.grid = {int(blocks)}, .threads = kThreads, .stream = stream}, params, plan);
  };
  if (plan.splits > 1)
    launch.template operator()<attention_combine<T, kThreads>>("attention_combine", lse_rows(params));
  if (plan.long_lists.slots > 0)
    launch.template operator()<attention_combine_lists<T, kThreads>>(
        "attention_combine_lists", int64_t(plan.long_lists.slots) * plan.long_lists.rows);
}

template void launch_combine<float>(const AttentionParams&, const ForwardPlan&, void*);
template void launch_combine<half_t>(const AttentionParams&, const ForwardPlan&, void*);
template void launch_combine<bfloat16_t>(const AttentionParams&, const ForwardPlan&, void*);

}  // namespace cuda_ext::attention
