#include "attention/attention_bwd_passes.h"

#include "attention/attention_bwd_passes.cuh"
#include "attention/bwd_results_sm90.cuh"

namespace cuda_ext::attention::sm90 {

template <class T, int dim>
void BackwardPasses<T, dim>::launch_before(const AttentionBackwardParams& params, const BackwardPlan& plan,
                                           void* stream) {
  constexpr const BackwardConfig& config = tile_of(kBackwardTiles, dim);
  launch_rows<T, config.block_m, config.separate ? 0 : config.sums_dim()>(params, plan, stream);
}

template <class T, int dim>
void BackwardPasses<T, dim>::launch_after(const AttentionBackwardParams& params, const BackwardPlan& plan,
                                          void* stream) {
  attention::launch_after<T, BackwardResults<tile_of(kBackwardTiles, dim)>>(params, plan, stream);
}

template struct BackwardPasses<half_t, 64>;
template struct BackwardPasses<half_t, 96>;
template struct BackwardPasses<half_t, 128>;
template struct BackwardPasses<half_t, 192>;
template struct BackwardPasses<half_t, 256>;
template struct BackwardPasses<bfloat16_t, 64>;
template struct BackwardPasses<bfloat16_t, 96>;
template struct BackwardPasses<bfloat16_t, 128>;
template struct BackwardPasses<bfloat16_t, 192>;
template struct BackwardPasses<bfloat16_t, 256>;

}  // namespace cuda_ext::attention::sm90
