// Attention over a cache: the plan of a launch, where keys are, and how blocks divide the work.
//
// The host does not know the lengths. Blocks are persistent: each reads the lengths of all sequences and takes every
// grid-th item, so that a captured graph serves growing lengths. An item is a tile of rows of one key head and a part
// of the keys. Into how many parts the keys of a sequence are split depends on its own length alone; so do the bits of
// its results.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "arch/warp.cuh"
#include "attention/attention_cache.h"
#include "attention/plan_fwd.cuh"
#include "tile/warp_scan.cuh"
#include "attention/mask.cuh"
#include "base/device.h"

namespace cuda_ext::attention {

// Everything the host decides. `splits` is the most that any sequence can have.
struct CachePlan : ForwardPlan {
  int group = 1;      // query heads that share a key head: a tile has rows of all of them
  int row_tiles = 0;  // of a key head
  int block_m = 0;
  int wanted_splits = 1;  // parts of the keys that fill the device with one sequence
  bool fixed_splits = false;
};

// The parts of `tiles` tiles of keys: as many as fill the device or, of long sequences, twice as many, of at least 8
// tiles, because two blocks of an SM hide each other's latency. More would cost bandwidth for parts of sums.
HOST_DEVICE int most_splits(int tiles, int wanted, bool fixed) {
  constexpr int kLongSplit = 8;
  int splits = wanted;
  if (!fixed && wanted > 1) {
    const int most = tiles / kLongSplit < 2 * wanted ? tiles / kLongSplit : 2 * wanted;
    splits = splits > most ? splits : most;
  }
  splits = splits < tiles ? splits : tiles;
  splits = splits < kMaxSplits ? splits : kMaxSplits;
  return splits > 1 ? splits : 1;
}
// The same without empty parts.
HOST_DEVICE int cache_splits(int tiles, int wanted, bool fixed) {
  const int splits = most_splits(tiles, wanted, fixed);
  const int tiles_of_split = (tiles + splits - 1) / splits;
  return splits == 1 ? 1 : (tiles + tiles_of_split - 1) / tiles_of_split;
}

// The keys of a sequence, with the new ones. Lengths that exceed the cache end with it.
DEVICE Sequence cached_sequence(const CachedAttentionParams& p, int batch) {
  const KeyCache& cache = p.cache;
  Sequence s(p, batch);
  const int64_t length =
      cache.lengths != nullptr ? arch::load_global<int32_t>(cache.lengths + batch) + cache.appended : cache.capacity;
  const int end = int(length < 0 ? 0 : length < cache.capacity ? length : cache.capacity);
  const int begin = cache.left_padding != nullptr ? arch::load_global<int32_t>(cache.left_padding + batch) : 0;
  s.k_begin = begin < 0 ? 0 : begin < end ? begin : end;
  s.k_len = end - s.k_begin;
  return s;
}

// The tiles of keys that any query in [first, last] sees.
template <int block_n>
DEVICE Span seen_tiles(const Visibility& visible, int first, int last) {
  const int begin = visible.key_begin(first) / block_n, end = (visible.key_end(last) + block_n - 1) / block_n;
  return {begin, end > begin ? end : begin};
}

// The parts into which the keys of a sequence are split; the same for all of its tiles.
template <int block_n>
DEVICE int splits_of(const CachedAttentionParams& p, const CachePlan& plan, const Sequence& s) {
  const Span seen = seen_tiles<block_n>(Visibility(p, s), 0, s.q_len - 1);
  return cache_splits(seen.end - seen.begin, plan.wanted_splits, plan.fixed_splits);
}

// An item of the work: part `split` of the keys, for one tile of rows.
struct CacheItem {
  int batch, head_kv, row_tile, split, splits;
};

// Finds items in ascending order, by all lanes of a warp together.
template <int block_n>
class CacheItems {
 public:
  DEVICE CacheItems(const CachedAttentionParams& p, const CachePlan& plan) : p_(p), plan_(plan) { load(); }

  // Whether there is an item `index`, which is not less than the one before.
  DEVICE bool find(int index, CacheItem& item) {
    while (index >= before_ + total_) {
      if (base_ + arch::kWarpSize >= int(p_.batch)) return false;
      before_ += total_;
      base_ += arch::kWarpSize;
      load();
    }
    const int here = index - before_;
    const uint32_t later = arch::ballot(prefix_ + splits_ * of_split() > here);  // of the lane that has it, and after
    const int lane = tile::lowest_bit(later);
    const int splits = arch::shuffle(splits_, lane), rest = here - arch::shuffle(prefix_, lane);
    const int tile = rest / splits;
    item = {base_ + lane, tile / plan_.row_tiles, tile % plan_.row_tiles, rest % splits, splits};
    return true;
  }

 private:
  DEVICE int of_split() const { return int(p_.heads_kv) * plan_.row_tiles; }

  // The lanes get the sequences from base_ on.
  DEVICE void load() {
    const int batch = base_ + arch::lane_index();
    splits_ = batch < int(p_.batch) ? splits_of<block_n>(p_, plan_, cached_sequence(p_, batch)) : 0;
    const int items = splits_ * of_split(), sum = tile::sum_up_to_lane(items);
    prefix_ = sum - items;
    total_ = arch::shuffle(sum, arch::kWarpSize - 1);
  }

  const CachedAttentionParams& p_;
  const CachePlan& plan_;
  int base_ = 0, before_ = 0;  // the first sequence of the lanes, and the items of those before
  int splits_, prefix_;        // of the lane's sequence; the items of the lanes before
  int total_;                  // items of all lanes
};

// A row of the cache.
struct alignas(8) CacheRow {
  int page;  // or the row of a contiguous cache
  int row;   // within it
};

// Where key `key` of a sequence is. Entries of the table beyond the keys are not read; wrong ones are kept inside.
DEVICE CacheRow row_of_key(const KeyCache& cache, const Sequence& s, int batch, int key) {
  if (key >= s.k_len) return {0, 0};
  const int row = s.k_begin + key;
  if (cache.block_table == nullptr)
    return {cache.rows != nullptr ? arch::load_global<int32_t>(cache.rows + batch) : batch, row};
  const int page_size = int(cache.page_size), index = row / page_size;
  const int page = arch::load_global<int32_t>(cache.block_table + batch * cache.table_stride + index);
  const int last = int(cache.pages) - 1;
  return {page < 0 ? 0 : page < last ? page : last, row - index * page_size};
}

template <class Config>
CachePlan plan_cache(const CachedAttentionParams& p, const Config& config, const rt::Device& device) {
  const auto tiles_of = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  CachePlan plan;
  static_cast<ForwardPlan&>(plan) =
      plan_forward(p, {.block_m = config.block_m, .block_n = config.block_n, .at_once = 1});
  plan.block_m = config.block_m;
  plan.group = plan.pack_gqa = int(p.heads / p.heads_kv);
  plan.row_tiles = int(tiles_of(p.seqlen_q * plan.group, config.block_m));
  const int64_t heads = p.heads_kv * plan.row_tiles;
  plan.fixed_splits = p.num_splits > 0;
  plan.wanted_splits = plan.fixed_splits ? int(p.num_splits) : int(tiles_of(device.num_sms, heads));
  plan.splits = most_splits(int(tiles_of(p.cache.capacity, config.block_n)), plan.wanted_splits, plan.fixed_splits);
  if (p.batch * heads * plan.splits > std::numeric_limits<int>::max())
    throw std::invalid_argument("expected at most 2^31 parts of rows and keys, got " +
                                std::to_string(p.batch * heads * plan.splits) + "; divide the batch");
  return plan;
}

}  // namespace cuda_ext::attention
