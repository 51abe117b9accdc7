// Stubs for the attention kernels of head dims that CUDA_EXT_HEAD_DIMS excludes from a build: they throw an error that
// names the missing ones.
#include "build_config.h"

#if CUDA_EXT_WITH_CUDA

#include <stdexcept>
#include <string>

#include "attention/attention_bwd_sm80.h"

namespace cuda_ext::sm80 {
namespace {

[[noreturn]] void refuse(const char* op, const AttentionParams& p) {
  throw std::runtime_error(std::string(op) + ": expected head dims whose CUDA kernels are in this library, those of " +
                           CUDA_EXT_HEAD_DIMS + ", got " + std::to_string(p.dim) + " of query and key and " +
                           std::to_string(p.dim_v) +
                           " of value; build it again without CUDA_EXT_HEAD_DIMS, which left theirs out");
}

}  // namespace

template <class T, int tile>
size_t AttentionForwardSm80<T, tile>::workspace(const AttentionParams& params) {
  refuse("flash_attention", params);
}
template <class T, int tile>
void AttentionForwardSm80<T, tile>::launch(const AttentionParams& params, Workspace, void*) {
  refuse("flash_attention", params);
}
template <class T, int tile>
size_t AttentionBackwardSm80<T, tile>::workspace(const AttentionBackwardParams& params) {
  refuse("flash_attention_backward", params);
}
template <class T, int tile>
void AttentionBackwardSm80<T, tile>::launch(const AttentionBackwardParams& params, Workspace, void*) {
  refuse("flash_attention_backward", params);
}

#define CUDA_EXT_LEFT_OUT(tile)                           \
  template struct AttentionForwardSm80<half_t, tile>;     \
  template struct AttentionForwardSm80<bfloat16_t, tile>; \
  template struct AttentionBackwardSm80<half_t, tile>;    \
  template struct AttentionBackwardSm80<bfloat16_t, tile>;
static_assert(kForwardTiles[0].dim == 64 && kForwardTiles[1].dim == 128 && kForwardTiles[2].dim == 192 &&
              kForwardTiles[3].dim == 256);
#if !CUDA_EXT_HEAD_DIM_64
CUDA_EXT_LEFT_OUT(0)
#endif
#if !CUDA_EXT_HEAD_DIM_128
CUDA_EXT_LEFT_OUT(1)
#endif
#if !CUDA_EXT_HEAD_DIM_192
CUDA_EXT_LEFT_OUT(2)
#endif
#if !CUDA_EXT_HEAD_DIM_256
CUDA_EXT_LEFT_OUT(3)
#endif
#undef CUDA_EXT_LEFT_OUT

}  // namespace cuda_ext::sm80

#endif
