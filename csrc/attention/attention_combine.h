// The launcher of the second kernel of attention forward, if the keys of a tile are divided among several blocks.
#pragma once

#include "attention/attention.h"

namespace cuda_ext::attention {

struct ForwardPlan;

// T: half_t or bfloat16_t.
template <class T>
void launch_combine(const AttentionParams& params, const ForwardPlan& plan, void* stream);

}  // namespace cuda_ext::attention
