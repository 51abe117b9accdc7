#include "attention/attention_bwd_passes.h"

#include "attention/attention_bwd_passes.cuh"
#include "attention/backward_results_sm90.cuh"

namespace cuda_ext::sm90 {

template <class T, int tile>
void BackwardPasses<T, tile>::launch_before(const AttentionBackwardParams& params, const sm80::BackwardPlan& plan,
                                            void* stream) {
  sm80::launch_rows<T, kBackwardTiles[tile].block_m, kBackwardTiles[tile].dim>(params, plan, stream);
}

template <class T, int tile>
void BackwardPasses<T, tile>::launch_after(const AttentionBackwardParams& params, const sm80::BackwardPlan& plan,
                                           void* stream) {
  sm80::launch_after<T, BackwardResults<kBackwardTiles[tile]>>(params, plan, stream);
}

template struct BackwardPasses<half_t, 0>;
template struct BackwardPasses<half_t, 1>;
template struct BackwardPasses<bfloat16_t, 0>;
template struct BackwardPasses<bfloat16_t, 1>;
static_assert(kNumBackwardTiles == 2);

}  // namespace cuda_ext::sm90
