// All-reduce in symmetric memory on the GPU: the algorithms of symmetric.h, each in one launch, without a collective of NCCL.
//
// Problem. As SymmetricParams (symmetric_cuda.h) says: all buckets = round(sum of all buckets), in float32, in the order of
// the ranks.
//
// Work. The 16-byte vectors of a range go round the threads of all blocks. Two-shot, the range is this rank's chunk, 4
// vectors to a thread at a time: each is read from all ranks, then written to all of them, beginning with the one behind
// this rank, so that not all write to the same. One-shot, the range is the bucket, one vector to a thread: it is written to
// the staging of all other ranks, and after the arrival that of each rank is read here and their sum written here. What is
// left of a range behind its vectors, less than 16 bytes, goes one element to a thread of block 0.
//
// Waiting. Block b waits for the blocks b of the other ranks, and for no other: thread p announces this block to rank p and
// waits for that rank, then the block synchronises. Two-shot: at the first arrival the bucket is packed, by an earlier
// kernel of the stream; at the second the part of the chunk that belongs to the block is written. A launch has ended when
// all its blocks have seen all second arrivals, and nobody touches this rank's bucket behind them. One-shot: at the only
// arrival the block's part of the bucket lies in all stagings, and it sums the same part; nobody touches another's bucket.
// The grid depends on count and ranks alone, so that each block has its counterparts. They wait with a limit of time, then
// the kernel ends with a trap.
//
// Epochs are counted in the pad, not by the host, so that a captured graph may be replayed. Every block reads the slot's
// epoch; the last to finish increments it.
//
// Statistics. Squares of the stored values are summed in float64 by lane, warp and block. Two-shot, each block leaves its
// sum in the pads of all ranks before its second arrival; one-shot, where all ranks sum the same values, in its own. The
// block that finishes last adds them in the order of ranks and blocks, which is the same everywhere, and so are the bits.
// An infinite or NaN sum is the non-finite flag.
//
// Shared memory. SharedStorage of the bucket kernels: one sum a warp and one flag.
#pragma once

#include "bucket/bucket_kernels.cuh"
#include "bucket/symmetric_cuda.h"

namespace cuda_ext::symmetric {

using bucket::Packed;
using bucket::SharedStorage;

struct Config {
  static constexpr int kThreads = BucketConfig::kThreads;
  static constexpr int kMinBlocks = 2;   // per multiprocessor
  static constexpr int kVectors = 4;     // of 16 bytes, in flight per thread and rank, two-shot
  static constexpr int kMaxBlocks = 32;  // enough to fill NVLink, and they leave the GPU to the kernels beside them
};

// The pad of a rank on the device; zeros are an empty one.
struct DevicePad {
  struct Slot {
    uint32_t epoch;                                   // of the all-reduce that has ended last
    uint32_t finished;                                // blocks of the one under way
    uint32_t arrived[Config::kMaxBlocks][kMaxRanks];  // written by the rank of that index
    double squares[Config::kMaxBlocks][kMaxRanks];    // the same, two-shot before the second arrival
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
  int64_t chunk;  // elements a rank, two-shot
  Staging staging;
  float* stats;  // (2,)
  uint64_t timeout_ns;
};

DEVICE DevicePad::Slot& slot_of(const KernelParams& params, int rank) {
  return reinterpret_cast<DevicePad*>(params.segments[rank])->slots[params.slot];
}

// This block announces `mark` to all ranks and waits until theirs have announced it. What the block has written before is
// seen by them, and the other way round.
DEVICE void meet(const KernelParams& params, int rank, int block, uint32_t mark, Site site = {}) {
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

// The rank `step` behind `rank`, 1 to num_ranks, so that not all ranks write to the same.
DEVICE int rank_behind(int rank, int step, int num_ranks) {
  return rank + step < num_ranks ? rank + step : rank + step - num_ranks;
}

// How many elements one call of a body takes: `vectors` times `width`.
template <int width_, int vectors_>
struct Span {
  static constexpr int width = width_;
  static constexpr int vectors = vectors_;
};

// Calls body(span, at, stride, end) for what belongs to this thread of elements [begin, end): span.width of them at `at`,
// and so on, `stride` apart, but for those at or behind `end`.
template <class T, int vectors, class Body>
DEVICE void for_range(int64_t begin, int64_t end, int block, int num_blocks, Body body) {
  constexpr int width = 16 / int(sizeof(T));
  const int64_t vectors_end = begin + (end - begin) / width * width;
  const int thread = arch::thread_index();
  const int64_t stride = int64_t(num_blocks) * Config::kThreads * width;
  for (int64_t at = begin + (int64_t(block) * Config::kThreads + thread) * width; at < vectors_end;
       at += vectors * stride)
    body(Span<width, vectors>(), at, stride, vectors_end);
  if (block == 0 && vectors_end + thread < end) body(Span<1, 1>(), vectors_end + thread, int64_t(0), end);
}

// Writes the sum over the ranks of source(rank), at the elements of a span, to every target(i) below num_targets. Returns
// this thread's share of the squares.
template <class T, class Source, class Target, int width, int vectors>
DEVICE double sum_span(Span<width, vectors>, int num_ranks, Source source, int num_targets, Target target, int64_t at,
                       int64_t stride, int64_t end) {
  float sums[vectors][width];
#pragma unroll
  for (int i = 0; i < vectors; ++i)
#pragma unroll
    for (int k = 0; k < width; ++k) sums[i][k] = -0.0f;  // what to add leaves any number as it is
#pragma unroll 8 / vectors
  for (int rank = 0; rank < num_ranks; ++rank) {
    const T* const values = source(rank);
    Packed<T, width> loaded[vectors] = {};
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      if (at + i * stride < end) loaded[i] = arch::load_global_streaming<Packed<T, width>>(values + at + i * stride);
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
      if (at + j * stride < end) arch::store_global_streaming(sum + at + j * stride, stored[j]);
  }
  return squares;
}

// The block that finishes last adds the squares of `num_ranks` ranks from `first_rank` on, and ends the epoch.
DEVICE void finish(DevicePad::Slot& own, uint32_t epoch, int first_rank, int num_ranks, int num_blocks, float* stats,
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
  meet(params, rank, block, 2 * epoch - 1);
  const int64_t begin = bucket::smaller(rank * params.chunk, params.count);
  const int64_t end = bucket::smaller(begin + params.chunk, params.count);
  const auto source = [&](int peer) { return bucket_of<T>(params, peer); };
  const auto target = [&](int i) { return bucket_of<T>(params, rank_behind(rank, 1 + i, num_ranks)); };
  double squares = 0.0;
  for_range<T, Config::kVectors>(
      begin, end, block, num_blocks, [&](auto span, int64_t at, int64_t stride, int64_t span_end) {
        squares += sum_span<T>(span, num_ranks, source, num_ranks, target, at, stride, span_end);
      });
  squares = bucket::sum_over_block(squares, shared);
  if (thread < num_ranks) arch::store_global(&slot_of(params, thread).squares[block][rank], squares);
  meet(params, rank, block, 2 * epoch);
  finish(own, epoch, 0, num_ranks, num_blocks, stats, shared);
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
  for_range<T, 1>(0, params.count, block, num_blocks, [&](auto span, int64_t at, int64_t, int64_t) {
    using Vector = Packed<T, decltype(span)::width>;
    const Vector packed = arch::load_global_streaming<Vector>(bucket + at);
    for (int step = 1; step < num_ranks; ++step)
      arch::store_global_streaming(row(rank_behind(rank, step, num_ranks), rank) + at, packed);
  });
  meet(params, rank, block, 2 * epoch);
  const auto source = [&](int peer) -> const T* { return peer == rank ? bucket : row(rank, peer); };
  const auto target = [&](int) { return bucket; };
  double squares = 0.0;
  for_range<T, 1>(0, params.count, block, num_blocks, [&](auto span, int64_t at, int64_t stride, int64_t end) {
    squares += sum_span<T>(span, num_ranks, source, 1, target, at, stride, end);
  });
  squares = bucket::sum_over_block(squares, shared);
  if (arch::thread_index() == 0) arch::store_global(&own.squares[block][rank], squares);
  finish(own, epoch, rank, 1, num_blocks, stats, shared);
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

// Blocks of a launch: as many as have work, up to kMaxBlocks; the same on all ranks.
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
