#include "attention/attention_bwd_passes.h"

#include "attention/attention_bwd_passes.cuh"
#include "attention/backward_results_sm90.cuh"

namespace cuda_ext::sm90 {

template <class T, int tile>
void BackwardPasses<T, tile>::launch_before(const AttentionBackwardParams& params, const sm80::BackwardPlan& plan,
                                            void* stream) {
  constexpr const BackwardConfig& config = kBackwardTiles[tile];
  sm80::launch_rows<T, config.block_m, config.separate ? 0 : config.sums_dim()>(params, plan, stream);
}

template <class T, int tile>
void BackwardPasses<T, tile>::launch_after(const AttentionBackwardParams& params, const sm80::BackwardPlan& plan,
                                           void* stream) {
  sm80::launch_after<T, BackwardResults<kBackwardTiles[tile]>>(params, plan, stream);
}

template struct BackwardPasses<half_t, 0>;
template struct BackwardPasses<half_t, 1>;
template struct BackwardPasses<half_t, 2>;
template struct BackwardPasses<half_t, 3>;
template struct BackwardPasses<half_t, 4>;
template struct BackwardPasses<bfloat16_t, 0>;
template struct BackwardPasses<bfloat16_t, 1>;
template struct BackwardPasses<bfloat16_t, 2>;
template struct BackwardPasses<bfloat16_t, 3>;
template struct BackwardPasses<bfloat16_t, 4>;
static_assert(kNumBackwardTiles == 5);

}  // namespace cuda_ext::sm90
