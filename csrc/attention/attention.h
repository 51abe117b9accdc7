// Parameters of flash attention, for launchers on any device.
#pragma once

#include "base/dtype.h"
#include "base/philox.h"
#include "cpu/isa.h"

namespace cuda_ext {

// A (batch, seq, heads, dim) tensor whose last dim is contiguous; strides in elements. With varlen, (total, heads,
// dim), the batch stride is zero, and rows are counted from the first sequence on.
struct HeadsView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// The element type of a bias.
enum class BiasKind : uint8_t {
  kNone,
  kStorage,       // the dtype of the call
  kAccumulation,  // the accumulation type
  kBoolean,       // on CUDA: bytes, 1 where a key is visible, 0 where it is hidden
};

// Where the keys and values of each sequence are, if they are in a cache. A sequence has the keys of rows
// [left_padding, lengths + appended); each pointer may be null. Only CPU kernels and those of attention_cache.h read
// it.
struct KeyCache {
  int64_t capacity = 0;                   // rows of a sequence; 0: there is no cache
  const int32_t* lengths = nullptr;       // (batch,); null: capacity
  int64_t appended = 0;                   // rows after `lengths`
  const int32_t* left_padding = nullptr;  // (batch,); null: 0
  const int32_t* rows = nullptr;          // (batch,): which sequence of the cache; null: the same
  // Pages: row r of a sequence is row r % page_size of page block_table[r / page_size]. The batch stride of keys and
  // values is that of pages.
  const int32_t* block_table = nullptr;  // (batch, ..); null: the cache is contiguous
  int64_t table_stride = 0;
  int64_t page_size = 0;
  int64_t pages = 0;
  // Which of the newest seqlen_q keys each query sees, as bytes (batch, query, key): key Sk - seqlen_q + n is hidden
  // from query i if element (i, n) is 0. Null: all are visible. Keys before the first of a sequence have elements, too.
  const uint8_t* tree_mask = nullptr;
  int64_t tree_strides[3] = {};
};

// For each block of kMaskBlock rows of one operand, the blocks of the other that it takes part with, in int32: one
// element of a permutation of the blocks, by which those with the longest lists come first; a count; and so many pairs
// (block, tile), in any order. What follows them is not read. tile: the bits of the pair's elements, or kFullBlock if
// all take part. Strides in elements, even; 0 broadcasts.
constexpr int64_t kMaskBlock = 128;
constexpr int32_t kFullBlock = -1;
constexpr int64_t kTileRowWords = kMaskBlock / 32;
struct BlockLists {
  const int32_t* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, block_stride = 0;

  const int32_t* at(int64_t batch, int64_t head, int64_t block) const {
    return data + batch * batch_stride + head * head_stride + block * block_stride;
  }
};

// Which blocks of queries and keys take part, and the bits of those that take part in part. Blocks are counted within a
// sequence. A tile is kMaskBlock rows of four words: bit 2n + c of word t is that of column 8n + 2t + c, the columns
// that a thread has of a row of accumulators. Bits past the last query or key are not read.
struct BlockMask {
  BlockLists keys_of_queries, queries_of_keys;  // queries_of_keys: read by backward alone
  const int32_t* tiles = nullptr;               // rows are queries
  const int32_t* tiles_t = nullptr;             // rows are keys
  int64_t query_blocks = 0, key_blocks = 0;     // of the lists; 0: no mask

  explicit operator bool() const { return keys_of_queries.data != nullptr; }
};

// In elements, over (batch, heads, seqlen_q, seqlen_k) and Sk - Sq, the key on the diagonal of query 0; 0 broadcasts. A
// relative bias has an element for each distance by which a key can be before the diagonal of its query, so its last
// three strides are 1, -1 and 1.
using BiasStrides = int64_t[5];

// Where the random numbers of dropout are among all counters, of which four keys of a row share one. A call that is a
// part of a larger one has the counters of that.
struct DropoutCounters {
  int64_t heads = 0, rows = 0;  // of the larger call; rows of a head, with varlen of all sequences
  int64_t of_row = 0;           // counters
  int64_t first = 0;            // the counter of head 0, row 0, key 0
};

struct AttentionParams {
  Dtype dtype = Dtype::kFloat32;
  int64_t batch = 0;
  int64_t heads = 0;     // query heads
  int64_t heads_kv = 0;  // heads is a multiple of it
  int64_t dim = 0;       // of query and key
  int64_t dim_v = 0;

  // Either every sequence has these lengths, or sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1]: varlen.
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t total_q = 0;  // rows of all sequences
  int64_t total_k = 0;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;

  // Key j is visible to query i iff -window_left <= j - (i + Sk - Sq) <= window_right; causal is window_right = 0.
  int64_t window_left = kUnbounded;
  int64_t window_right = kUnbounded;
  static constexpr int64_t kUnbounded = -1;

  double scale = 1.0;
  double softcap = 0.0;  // 0: none; else logits become softcap * tanh(logits / softcap)
  // The pointers below are to the accumulation type: double for float64, else float.
  const void* alibi_slopes = nullptr;  // (batch or 1, heads): logits += -slope * |i + Sk - Sq - j|
  int64_t alibi_batch_stride = 0;
  const void* sinks = nullptr;  // (heads,): one more logit per row, without a value
  void* lse = nullptr;          // (batch, heads, seqlen_q) or (heads, total_q), contiguous

  // Added to the logits after softcap and ALiBi. Queries and keys are counted within their sequence.
  BiasKind bias_kind = BiasKind::kNone;
  const void* bias = nullptr;  // the element whose indices are all 0
  BiasStrides bias_strides = {};
  // 1 where a key takes part, 0 where it is hidden; null for none. Only on the CPU: the CUDA kernels lack the registers
  // for two tensors, so there the bias includes the mask.
  const uint8_t* mask = nullptr;
  BiasStrides mask_strides = {};
  BlockMask block_mask;

  // Philox4x32-10 with key = seed and counter = (n, offset), where row i of a head and key j have word j % 4 of
  // n = ((batch * heads + head) * rows + i) * of_row + first + j / 4. With varlen batch is 0, and i counts the rows of
  // all sequences.
  double dropout_p = 0.0;
  RngSource rng;
  uint64_t* rng_state = nullptr;  // (2,): output of a CUDA forward, seed and offset; null in backward
  DropoutCounters dropout_counters;

  HeadsView query, key, value, out;
  bool float32_out = false;  // of a dtype of 16 bits: `out` is float32, as summed
  KeyCache cache;

  bool uses_wgmma = true;  // on devices that have it
  bool in_tf32 = false;    // products of float32 on CUDA; else as exact as float32
};

struct AttentionBackwardParams : AttentionParams {
  HeadsView grad_out, grad_query, grad_key, grad_value;
  bool float32_grads = false;      // of a dtype of 16 bits: those of query, key and value are float32, as summed
  const void* grad_lse = nullptr;  // like lse; may be null
  void* grad_sinks = nullptr;      // like sinks; null when not wanted
  bool deterministic = false;      // the same bits in every run; always so on a CPU, for the same number of threads

  // In the shape of the bias, contiguous, in the accumulation type; null when not wanted. The launch adds to it, so it
  // must be zero before.
  void* grad_bias = nullptr;
  BiasStrides grad_bias_strides = {};
  int64_t grad_bias_elements = 0;
  int64_t grad_bias_origin = 0;  // the element whose indices are all 0
};

CUDA_EXT_CPU_LAUNCHER_WITH_BFLOAT16(attention_forward, AttentionParams)
CUDA_EXT_CPU_LAUNCHER_WITH_BFLOAT16(attention_backward, AttentionBackwardParams)

}  // namespace cuda_ext
