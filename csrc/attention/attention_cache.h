// Attention over a cache of keys and values (flash_attention_with_kvcache): the parameters of the kernels that append
// to the cache and of those that read it, and their launchers.
#pragma once

#include "attention/attention.h"
#include "base/host_device.h"
#include "base/workspace.h"

namespace cuda_ext {

struct CachedAttentionParams : AttentionParams {
  int64_t num_splits = 0;  // parts of the keys of each sequence; 0: chosen by its length
  // On CUDA dim and dim_v are multiples of 8, also where the rows of the cache are shorter: elements of a row, and the
  // alignment of rows in bytes, 16, 4 or 2.
  int64_t key_width = 0, value_width = 0;
  int key_alignment = 16, value_alignment = 16;
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
  bool is_aligned = true;  // all rows to 16 bytes, and head dims are multiples of 8

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

void launch_attention_cache_cuda(const CachedAttentionParams& params, const AllocateWorkspace& allocate, void* stream);
void launch_cache_append_cuda(const CacheAppendParams& params, void* stream);

namespace attention::sm80 {

// One instantiation per storage type and head dim: instantiations/attention_cache_sm80_{f16,bf16}_d*.cu.
template <class T, int dim>
struct CacheLauncher {
  static void launch(const CachedAttentionParams& params, const AllocateWorkspace& allocate, void* stream);
};

}  // namespace attention::sm80

}  // namespace cuda_ext
