// The launcher of the second kernel of attention forward, if the keys of tiles are divided among several blocks.
#pragma once

#include "attention/attention.h"

namespace cuda_ext::attention {

struct ForwardPlan;

// Does nothing if no tile is divided. T: float, half_t or bfloat16_t.
template <class T>
void launch_combine(const AttentionParams& params, const ForwardPlan& plan, void* stream);

}  // namespace cuda_ext::attention
