// Attention over a cache of keys and values (flash_attention_with_kvcache): the parameters of the kernels that append
// to the cache and of those that read it, and their launchers.
#pragma once

#include "attention/attention.h"
#include "base/host_device.h"
#include "base/workspace.h"

namespace cuda_ext {

struct CachedAttentionParams : AttentionParams {
  int64_t num_splits = 0;  // parts of the keys of each sequence; 0: chosen by its length
};

// Appends `count` keys and values to each sequence, and rotates queries and new keys (Su et al., arXiv 2104.09864).
struct CacheAppendParams {
  Dtype dtype = Dtype::kFloat32;
  int64_t batch = 0, heads = 0, heads_kv = 0, dim = 0, dim_v = 0;
  int64_t seqlen_q = 0, count = 0;
  KeyCache cache;                  // lengths are those before the append
  HeadsView query, rotated_query;  // without data if queries are not rotated
  HeadsView key, value;            // the new ones
  HeadsView key_cache, value_cache;

  // cos and sin (positions, rotary_dim / 2), contiguous, in the storage type; null for none.
  const void* rotary_cos = nullptr;
  const void* rotary_sin = nullptr;
  int64_t positions = 0;
  int64_t rotary_dim = 0;
  bool interleaved = false;                  // pairs (0, 1), (2, 3), ..; else (i, i + rotary_dim / 2)
  bool queries_advance = false;              // query i has position first + i; else all have the first
  const int32_t* first_positions = nullptr;  // (batch,): of the first query and the first new key

  // The position of query or key i of a sequence whose first is at `first`.
  HOST_DEVICE int64_t position(int64_t first, int64_t i, bool of_query) const {
    return first + (of_query && !queries_advance ? 0 : i);
  }
};

CUDA_EXT_CPU_LAUNCHER(cache_append, CacheAppendParams)

size_t attention_cache_cuda_workspace(const CachedAttentionParams& params);
void launch_attention_cache_cuda(const CachedAttentionParams& params, Workspace workspace, void* stream);
void launch_cache_append_cuda(const CacheAppendParams& params, void* stream);

namespace sm80 {

// A tile shape of the kernel that reads a cache, and everything derived from it.
struct CacheConfig {
  int dim;         // of query and key, padded with zeros
  int dim_v;       // of value and output
  int block_m;     // rows: queries x heads of a group; 16 for each warp
  int block_n;     // keys
  int key_warps;   // warps that share rows, each with block_n / key_warps keys
  int min_blocks;  // per SM

  constexpr int warps() const { return block_m / 16 * key_warps; }
  constexpr int threads() const { return 32 * warps(); }
};

// By head dims, from small to large: for few rows, as in decoding, and for more of them.
struct CacheTile {
  int dim;
  int dim_v;
  CacheConfig few, many;
};
constexpr CacheTile kCacheTiles[] = {
    // 34 and 40 KiB
    {64,
     64,
     {.dim = 64, .dim_v = 64, .block_m = 16, .block_n = 64, .key_warps = 4, .min_blocks = 2},
     {.dim = 64, .dim_v = 64, .block_m = 64, .block_n = 64, .key_warps = 1, .min_blocks = 2}},
    // 68 and 80 KiB
    {128,
     128,
     {.dim = 128, .dim_v = 128, .block_m = 16, .block_n = 64, .key_warps = 4, .min_blocks = 2},
     {.dim = 128, .dim_v = 128, .block_m = 64, .block_n = 64, .key_warps = 1, .min_blocks = 2}},
    // 72 and 96 KiB
    {256,
     256,
     {.dim = 256, .dim_v = 256, .block_m = 16, .block_n = 32, .key_warps = 2, .min_blocks = 2},
     {.dim = 256, .dim_v = 256, .block_m = 64, .block_n = 32, .key_warps = 1, .min_blocks = 1}},
};

// One instantiation per storage type and tile, in attention_cache_sm80_{f16,bf16}_d{64,128,256}.cu.
template <class T, int tile>
struct AttentionCacheSm80 {
  static size_t workspace(const CachedAttentionParams& params);
  static void launch(const CachedAttentionParams& params, Workspace workspace, void* stream);
};
extern template struct AttentionCacheSm80<half_t, 0>;
extern template struct AttentionCacheSm80<half_t, 1>;
extern template struct AttentionCacheSm80<half_t, 2>;
extern template struct AttentionCacheSm80<bfloat16_t, 0>;
extern template struct AttentionCacheSm80<bfloat16_t, 1>;
extern template struct AttentionCacheSm80<bfloat16_t, 2>;

}  // namespace sm80

}  // namespace cuda_ext
