// Scale and softcap of the logits in kernels with options.
#pragma once

#include "arch/math.cuh"
#include "attention/attention.h"

namespace cuda_ext::attention {

struct LogitOptions {
  float scale;
  float softcap;  // 0: none
  float inverse_softcap;

  DEVICE float logit(float score) const {
    const float x = score * scale;
    return softcap > 0.0f ? softcap * arch::tanh(x * inverse_softcap) : x;
  }
  // The same, and its derivative by score * scale.
  DEVICE float logit(float score, float& slope) const {
    float x = score * scale;
    slope = 1.0f;
    if (softcap > 0.0f) {
      const float t = arch::tanh(x * inverse_softcap);
      x = softcap * t;
      slope = 1.0f - t * t;
    }
    return x;
  }
};

inline LogitOptions logit_options_of(const AttentionParams& p) {
  return {float(p.scale), float(p.softcap), p.softcap > 0 ? float(1 / p.softcap) : 0.0f};
}

}  // namespace cuda_ext::attention
