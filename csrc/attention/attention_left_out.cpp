// Stubs for the attention kernels that a build excludes. Those of head dims that CUDA_EXT_HEAD_DIMS leaves out throw an
// error that names the missing ones; those on wgmma are not called if no architecture of the build has it.
#include "build_config.h"

#if CUDA_EXT_WITH_CUDA

#include <stdexcept>
#include <string>

#include "attention/attention_bwd_sm80.h"
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_cache.h"

namespace cuda_ext {

#if !CUDA_EXT_WITH_SM90A
bool has_attention_sm90() { return false; }
#endif

namespace {

[[noreturn]] void refuse(const char* op, const AttentionParams& p) {
  throw std::runtime_error(std::string(op) + ": expected head dims whose CUDA kernels are in this library, those of " +
                           CUDA_EXT_HEAD_DIMS + ", got " + std::to_string(p.dim) + " of query and key and " +
                           std::to_string(p.dim_v) +
                           " of value; build it again without CUDA_EXT_HEAD_DIMS, which left theirs out");
}

}  // namespace

namespace sm80 {

template <class T, int tile>
AttentionPlan AttentionForwardSm80<T, tile>::plan(const AttentionParams& params, const rt::Device&) {
  refuse("flash_attention", params);
}
template <class T, int tile>
size_t AttentionForwardSm80<T, tile>::workspace(const AttentionParams& params) {
  refuse("flash_attention", params);
}
template <class T, int tile>
void AttentionForwardSm80<T, tile>::launch(const AttentionParams& params, Workspace, void*) {
  refuse("flash_attention", params);
}
template <class T, int tile>
AttentionPlan AttentionBackwardSm80<T, tile>::plan(const AttentionBackwardParams& params, const rt::Device&) {
  refuse("flash_attention_backward", params);
}
template <class T, int tile>
size_t AttentionBackwardSm80<T, tile>::workspace(const AttentionBackwardParams& params) {
  refuse("flash_attention_backward", params);
}
template <class T, int tile>
void AttentionBackwardSm80<T, tile>::launch(const AttentionBackwardParams& params, Workspace, void*) {
  refuse("flash_attention_backward", params);
}

template <class T, int tile>
size_t AttentionCacheSm80<T, tile>::workspace(const CachedAttentionParams& params) {
  refuse("flash_attention_with_kvcache", params);
}
template <class T, int tile>
void AttentionCacheSm80<T, tile>::launch(const CachedAttentionParams& params, Workspace, void*) {
  refuse("flash_attention_with_kvcache", params);
}

}  // namespace sm80

namespace sm90 {

template <class T, int tile>
AttentionPlan AttentionForwardSm90<T, tile>::plan(const AttentionParams& params, const rt::Device&) {
  refuse("flash_attention", params);
}
template <class T, int tile>
size_t AttentionForwardSm90<T, tile>::workspace(const AttentionParams& params) {
  refuse("flash_attention", params);
}
template <class T, int tile>
void AttentionForwardSm90<T, tile>::launch(const AttentionParams& params, Workspace, void*) {
  refuse("flash_attention", params);
}

template <class T, int tile>
AttentionPlan AttentionBackwardSm90<T, tile>::plan(const AttentionBackwardParams& params, const rt::Device&) {
  refuse("flash_attention_backward", params);
}
template <class T, int tile>
size_t AttentionBackwardSm90<T, tile>::workspace(const AttentionBackwardParams& params) {
  refuse("flash_attention_backward", params);
}
template <class T, int tile>
void AttentionBackwardSm90<T, tile>::launch(const AttentionBackwardParams& params, Workspace, void*) {
  refuse("flash_attention_backward", params);
}

}  // namespace sm90

#define CUDA_EXT_LEFT_OUT_SM80(tile)                            \
  template struct sm80::AttentionForwardSm80<half_t, tile>;     \
  template struct sm80::AttentionForwardSm80<bfloat16_t, tile>; \
  template struct sm80::AttentionBackwardSm80<half_t, tile>;    \
  template struct sm80::AttentionBackwardSm80<bfloat16_t, tile>;
#define CUDA_EXT_LEFT_OUT_SM90(tile)                            \
  template struct sm90::AttentionForwardSm90<half_t, tile>;     \
  template struct sm90::AttentionForwardSm90<bfloat16_t, tile>; \
  template struct sm90::AttentionBackwardSm90<half_t, tile>;    \
  template struct sm90::AttentionBackwardSm90<bfloat16_t, tile>;
#define CUDA_EXT_LEFT_OUT_CACHE(tile)                     \
  template struct sm80::AttentionCacheSm80<half_t, tile>; \
  template struct sm80::AttentionCacheSm80<bfloat16_t, tile>;
template <class Tile, int n>
constexpr bool has_dims(const Tile (&tiles)[n], const int (&dims)[n]) {
  for (int i = 0; i < n; ++i)
    if (tiles[i].dim != dims[i]) return false;
  return true;
}
constexpr int kDims[] = {64, 96, 128, 192, 256};
static_assert(has_dims(sm80::kForwardTiles, kDims) && has_dims(sm80::kBackwardTiles, kDims));
static_assert(has_dims(sm90::kForwardTiles, kDims) && has_dims(sm90::kBackwardTiles, kDims));
static_assert(has_dims(sm80::kCacheTiles, {64, 128, 256}));
#if !CUDA_EXT_HEAD_DIM_64
CUDA_EXT_LEFT_OUT_SM80(0)
#endif
#if !CUDA_EXT_HEAD_DIM_96
CUDA_EXT_LEFT_OUT_SM80(1)
#endif
#if !CUDA_EXT_HEAD_DIM_128
CUDA_EXT_LEFT_OUT_SM80(2)
#endif
#if !CUDA_EXT_HEAD_DIM_192
CUDA_EXT_LEFT_OUT_SM80(3)
#endif
#if !CUDA_EXT_HEAD_DIM_256
CUDA_EXT_LEFT_OUT_SM80(4)
#endif
#if !CUDA_EXT_HEAD_DIM_64 || !CUDA_EXT_WITH_SM90A
CUDA_EXT_LEFT_OUT_SM90(0)
#endif
#if !CUDA_EXT_HEAD_DIM_96 || !CUDA_EXT_WITH_SM90A
CUDA_EXT_LEFT_OUT_SM90(1)
#endif
#if !CUDA_EXT_HEAD_DIM_128 || !CUDA_EXT_WITH_SM90A
CUDA_EXT_LEFT_OUT_SM90(2)
#endif
#if !CUDA_EXT_HEAD_DIM_192 || !CUDA_EXT_WITH_SM90A
CUDA_EXT_LEFT_OUT_SM90(3)
#endif
#if !CUDA_EXT_HEAD_DIM_256 || !CUDA_EXT_WITH_SM90A
CUDA_EXT_LEFT_OUT_SM90(4)
#endif
#if !CUDA_EXT_HEAD_DIM_64
CUDA_EXT_LEFT_OUT_CACHE(0)
#endif
#if !CUDA_EXT_HEAD_DIM_128
CUDA_EXT_LEFT_OUT_CACHE(1)
#endif
#if !CUDA_EXT_HEAD_DIM_256
CUDA_EXT_LEFT_OUT_CACHE(2)
#endif
#undef CUDA_EXT_LEFT_OUT_CACHE
#undef CUDA_EXT_LEFT_OUT_SM80
#undef CUDA_EXT_LEFT_OUT_SM90

}  // namespace cuda_ext

#endif
