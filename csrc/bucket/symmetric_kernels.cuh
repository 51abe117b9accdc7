// All-reduce in symmetric memory on the GPU: the algorithms of symmetric.h, each in one launch, without NCCL.
//
// Problem        SymmetricParams in symmetric_cuda.h: every bucket = round(sum of all buckets), added in float32, in
//                the order of the ranks.
// Work           The 16-byte vectors of a range are distributed cyclically over the threads of all blocks. Two-shot,
//                the range is this rank's chunk, with 4 vectors per thread at a time: each is read from all ranks, and
//                then written to all, starting with the next rank, so that ranks do not all write to the same one.
//                One-shot, the range is the bucket, one vector per thread: it is written to the staging of all other
//                ranks, and after the signal the rows of all ranks are read and their sum is written here. The rest of
//                a range, less than 16 bytes, is done by threads of block 0, one element each.
// Waiting        Block b waits only for blocks b of the other ranks: thread p signals rank p and waits for its signal,
//                then the block synchronises. Two-shot, the first signal says that the bucket is packed (by an earlier
//                kernel of the stream), the second that this block's part of the chunk is written. When all blocks of a
//                launch have seen all second signals, no other rank accesses this rank's bucket any more. One-shot, the
//                only signal says that this block's part of the bucket is in all stagings; the block sums the same
//                part, and no rank accesses another's bucket. The grid depends only on count and ranks, so every block
//                has its counterparts. Waits have a time limit, after which the kernel traps.
// Epochs         are counted in the pad, not by the host, so that a captured graph can be replayed. Every block reads
//                the slot's epoch; the last block to finish increments it.
// Statistics     Squares of the stored values are summed in float64 by lane, warp and block. Two-shot, each block
//                writes its sum to the pads of all ranks before its second signal; one-shot, where all ranks sum the
//                same values, only to its own. The last block to finish adds them in the order of ranks and blocks, so
//                that all ranks get the same bits. The non-finite flag is whether that sum is infinite or NaN.
// Shared memory  SharedStorage of the bucket kernels: one sum per warp and one flag.
#pragma once

#include "bucket/bucket_kernels.cuh"
#include "bucket/symmetric_cuda.h"

namespace cuda_ext::symmetric {

using bucket::Packed;
using bucket::SharedStorage;

struct Config {
  static constexpr int kThreads = BucketConfig::kThreads;
  static constexpr int kMinBlocks = 2;   // per SM
  static constexpr int kVectors = 4;     // 16-byte vectors in flight per thread and rank, two-shot
  static constexpr int kMaxBlocks = 32;  // enough to saturate NVLink, few enough to leave SMs to concurrent kernels
};

// The signal pad of a rank. Initially zero.
struct DevicePad {
  struct Slot {
    uint32_t epoch;                                   // of the last all-reduce that has ended
    uint32_t finished;                                // blocks of the current one that have finished
    uint32_t arrived[Config::kMaxBlocks][kMaxRanks];  // word [block][rank] is written by that rank
    double squares[Config::kMaxBlocks][kMaxRanks];    // likewise; two-shot, before the second signal
  };
  Slot slots[kSlots];
};
static_assert(sizeof(DevicePad) <= kPadBytes);

struct KernelParams {
  char* segments[kMaxRanks];
  int num_ranks;
  int rank;
  int slot;
  int64_t begin;  // bytes
  int64_t count;  // elements
  int64_t chunk;  // elements per rank, two-shot
  Staging staging;
  float* stats;  // (2,)
  uint64_t timeout_ns;
};

DEVICE DevicePad::Slot& slot_of(const KernelParams& params, int rank) {
  return reinterpret_cast<DevicePad*>(params.segments[rank])->slots[params.slot];
}

// Signals `mark` to this block's counterparts on all ranks, and waits until all have signalled it. Each then sees what
// the others wrote before.
DEVICE void sync_ranks(const KernelParams& params, int rank, int block, uint32_t mark, Site site = {}) {
  arch::sync_threads(site);
  const int peer = arch::thread_index();
  if (peer < params.num_ranks) {
    arch::store_release_system(&slot_of(params, peer).arrived[block][rank], mark, site);
    arch::wait_reached_system(&slot_of(params, rank).arrived[block][peer], mark, params.timeout_ns, site);
  }
  arch::sync_threads(site);
}

template <class T>
DEVICE T* bucket_of(const KernelParams& params, int rank) {
  return reinterpret_cast<T*>(params.segments[rank] + params.begin);
}

// The rank `step` after `rank`, cyclically, for step from 1 to num_ranks.
DEVICE int rank_after(int rank, int step, int num_ranks) {
  return rank + step < num_ranks ? rank + step : rank + step - num_ranks;
}

// The number of elements in one call of for_range's body: `vectors` times `width`.
template <int width_, int vectors_>
struct Span {
  static constexpr int width = width_;
  static constexpr int vectors = vectors_;
};

// Calls body(span, at, stride, end) for this thread's part of elements [begin, end): span.vectors groups of span.width
// elements, the first is `first`, `stride` apart, except those from `end` on.
template <class T, int vectors, class Body>
DEVICE void for_range(int64_t begin, int64_t end, int block, int num_blocks, Body body) {
  constexpr int width = 16 / int(sizeof(T));
  const int64_t vectors_end = begin + (end - begin) / width * width;
  const int thread = arch::thread_index();
  const int64_t stride = int64_t(num_blocks) * Config::kThreads * width;
  for (int64_t first = begin + (int64_t(block) * Config::kThreads + thread) * width; first < vectors_end;
       first += vectors * stride)
    body(Span<width, vectors>(), first, stride, vectors_end);
  if (block == 0 && vectors_end + thread < end) body(Span<1, 1>(), vectors_end + thread, int64_t(0), end);
}

// Writes the sum of source(rank) over all ranks, at the elements of a span, to target(i) for all i < num_targets.
// Returns this thread's part of the sum of squares.
template <class T, class Source, class Target, int width, int vectors>
DEVICE double sum_span(Span<width, vectors>, int num_ranks, Source source, int num_targets, Target target,
                       int64_t first, int64_t stride, int64_t end) {
  float sums[vectors][width];
#pragma unroll
  for (int i = 0; i < vectors; ++i)
#pragma unroll
    for (int k = 0; k < width; ++k) sums[i][k] = -0.0f;  // the neutral element: 0.0f would change -0.0f
#pragma unroll 8 / vectors
  for (int rank = 0; rank < num_ranks; ++rank) {
    const T* const values = source(rank);
    Packed<T, width> loaded[vectors] = {};
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      if (first + i * stride < end)
        loaded[i] = arch::load_global_streaming<Packed<T, width>>(values + first + i * stride);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      float v[width];
      bucket::widen<T, width>(loaded[i], v);
#pragma unroll
      for (int k = 0; k < width; ++k) sums[i][k] += v[k];
    }
  }
  Packed<T, width> stored[vectors];
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    stored[i] = bucket::narrow<T, width>(sums[i]);
    float v[width];
    bucket::widen<T, width>(stored[i], v);
#pragma unroll
    for (int k = 0; k < width; ++k) squares += double(v[k]) * double(v[k]);
  }
  for (int i = 0; i < num_targets; ++i) {
    T* const sum = target(i);
#pragma unroll
    for (int j = 0; j < vectors; ++j)
      if (first + j * stride < end) arch::store_global_streaming(sum + first + j * stride, stored[j]);
  }
  return squares;
}

// Called by all blocks. The last one adds the squares of `num_ranks` ranks from `first_rank` on, and ends the epoch.
DEVICE void end_epoch(DevicePad::Slot& own, uint32_t epoch, int first_rank, int num_ranks, int num_blocks, float* stats,
                      SharedStorage& shared) {
  const int thread = arch::thread_index();
  if (thread == 0) shared.is_last = arch::atomic_add_acq_rel(&own.finished, 1) == uint32_t(num_blocks - 1);
  arch::sync_threads();
  if (!shared.is_last) return;
  double total = 0.0;
  for (int sum = thread; sum < num_ranks * num_blocks; sum += Config::kThreads)
    total += arch::load_global_streaming<double>(&own.squares[sum % num_blocks][first_rank + sum / num_blocks]);
  total = bucket::sum_over_block(total, shared);
  if (thread == 0) {
    constexpr double kLargest = 0x1.fffffffffffffp1023;
    arch::store_global(stats, float(total));
    arch::store_global(stats + 1, total <= kLargest ? 0.0f : 1.0f);
    arch::store_global(&own.finished, 0u);
    arch::store_global(&own.epoch, epoch);
  }
}

// Block `block` of `num_blocks` on rank `rank`, two-shot.
template <class T>
DEVICE void two_shot(const KernelParams& params, int rank, int block, int num_blocks, float* stats,
                     SharedStorage& shared) {
  DevicePad::Slot& own = slot_of(params, rank);
  const int num_ranks = params.num_ranks;
  const int thread = arch::thread_index();
  const uint32_t epoch = arch::load_global_streaming<uint32_t>(&own.epoch) + 1;
  sync_ranks(params, rank, block, 2 * epoch - 1);
  const int64_t begin = bucket::smaller(rank * params.chunk, params.count);
  const int64_t end = bucket::smaller(begin + params.chunk, params.count);
  const auto source = [&](int peer) { return bucket_of<T>(params, peer); };
  const auto target = [&](int i) { return bucket_of<T>(params, rank_after(rank, 1 + i, num_ranks)); };
  double squares = 0.0;
  for_range<T, Config::kVectors>(
      begin, end, block, num_blocks, [&](auto span, int64_t first, int64_t stride, int64_t span_end) {
        squares += sum_span<T>(span, num_ranks, source, num_ranks, target, first, stride, span_end);
      });
  squares = bucket::sum_over_block(squares, shared);
  if (thread < num_ranks) arch::store_global(&slot_of(params, thread).squares[block][rank], squares);
  sync_ranks(params, rank, block, 2 * epoch);
  end_epoch(own, epoch, 0, num_ranks, num_blocks, stats, shared);
}

// The same, one-shot.
template <class T>
DEVICE void one_shot(const KernelParams& params, int rank, int block, int num_blocks, float* stats,
                     SharedStorage& shared) {
  DevicePad::Slot& own = slot_of(params, rank);
  const int num_ranks = params.num_ranks;
  const uint32_t epoch = arch::load_global_streaming<uint32_t>(&own.epoch) + 1;
  T* const bucket = bucket_of<T>(params, rank);
  const auto row = [&](int owner, int of_rank) {
    return reinterpret_cast<T*>(params.segments[owner] + params.staging.row(epoch, of_rank, num_ranks));
  };
  for_range<T, 1>(0, params.count, block, num_blocks, [&](auto span, int64_t first, int64_t, int64_t) {
    using Vector = Packed<T, decltype(span)::width>;
    const Vector packed = arch::load_global_streaming<Vector>(bucket + first);
    for (int step = 1; step < num_ranks; ++step)
      arch::store_global_streaming(row(rank_after(rank, step, num_ranks), rank) + first, packed);
  });
  sync_ranks(params, rank, block, 2 * epoch);
  const auto source = [&](int peer) -> const T* { return peer == rank ? bucket : row(rank, peer); };
  const auto target = [&](int) { return bucket; };
  double squares = 0.0;
  for_range<T, 1>(0, params.count, block, num_blocks, [&](auto span, int64_t first, int64_t stride, int64_t end) {
    squares += sum_span<T>(span, num_ranks, source, 1, target, first, stride, end);
  });
  squares = bucket::sum_over_block(squares, shared);
  if (arch::thread_index() == 0) arch::store_global(&own.squares[block][rank], squares);
  end_epoch(own, epoch, rank, 1, num_blocks, stats, shared);
}

template <class T>
GLOBAL(Config::kThreads, Config::kMinBlocks)
two_shot_kernel(GRID_CONSTANT KernelParams params) {
  SHARED_STORAGE(SharedStorage, shared);
  two_shot<T>(params, params.rank, arch::block_x(), arch::grid_x(), params.stats, shared);
}

template <class T>
GLOBAL(Config::kThreads, Config::kMinBlocks)
one_shot_kernel(GRID_CONSTANT KernelParams params) {
  SHARED_STORAGE(SharedStorage, shared);
  one_shot<T>(params, params.rank, arch::block_x(), arch::grid_x(), params.stats, shared);
}

inline bool is_one_shot(const SymmetricParams& params) {
  return params.staging.takes(params.count * size_of(params.dtype));
}

// The number of blocks of a launch: as many as have work, up to kMaxBlocks; the same on all ranks.
inline int num_blocks(const SymmetricParams& params) {
  const int64_t range =
      is_one_shot(params) ? params.count : chunk_elements(params.count, params.num_ranks, size_of(params.dtype));
  const int64_t block_bytes = int64_t(Config::kThreads) * (is_one_shot(params) ? 1 : Config::kVectors) * 16;
  const int64_t blocks = (range * size_of(params.dtype) + block_bytes - 1) / block_bytes;
  return blocks < 1 ? 1 : blocks < Config::kMaxBlocks ? int(blocks) : Config::kMaxBlocks;
}

inline KernelParams kernel_params(const SymmetricParams& params, float* stats) {
  KernelParams kernel{.num_ranks = params.num_ranks,
                      .rank = params.rank,
                      .slot = params.slot,
                      .begin = params.begin,
                      .count = params.count,
                      .chunk = chunk_elements(params.count, params.num_ranks, size_of(params.dtype)),
                      .staging = params.staging,
                      .stats = stats,
                      .timeout_ns = uint64_t(params.timeout * 1e9)};
  for (int rank = 0; rank < params.num_ranks; ++rank) kernel.segments[rank] = static_cast<char*>(params.segments[rank]);
  return kernel;
}

}  // namespace cuda_ext::symmetric
