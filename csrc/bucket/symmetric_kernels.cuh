// All-reduce in symmetric memory on the GPU: the algorithm of symmetric.h in one launch, without a collective of NCCL.
//
// Problem. As SymmetricParams (symmetric_cuda.h) says: all buckets = round(sum of all buckets), in float32, in the order of
// the ranks.
//
// Work. The 16-byte vectors of this rank's chunk go round the threads of all blocks, 4 to a thread at a time: each is read
// from all ranks, then written to all of them, beginning with the one behind this rank, so that not all write to the same.
// What is left of the last chunk behind its vectors, less than 16 bytes, goes one element to a thread of block 0.
//
// Waiting. Block b waits for the blocks b of the other ranks, and for no other: thread p announces this block to rank p and
// waits for that rank, then the block synchronises. At the first arrival the bucket is packed, by an earlier kernel of the
// stream; at the second the part of the chunk that belongs to the block is written. A launch has ended when all its blocks
// have seen all second arrivals, and nobody touches this rank's bucket behind them. The grid depends on count and ranks
// alone, so that each block has its counterparts. They wait with a limit of time, then the kernel ends with a trap.
//
// Epochs are counted in the pad, not by the host, so that a captured graph may be replayed. Every block reads the slot's
// epoch; the last to finish increments it.
//
// Statistics. Squares of the stored values are summed in float64 by lane, warp and block, and each block leaves its sum in
// the pads of all ranks before its second arrival. The block that finishes last adds them in the order of ranks and blocks,
// which is the same everywhere, and so are the bits. An infinite or NaN sum is the non-finite flag.
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
  static constexpr int kVectors = 4;     // of 16 bytes, in flight per thread and rank
  static constexpr int kMaxBlocks = 32;  // enough to fill NVLink, and they leave the GPU to the kernels beside them
};

// The pad of a rank on the device; zeros are an empty one.
struct DevicePad {
  struct Slot {
    uint32_t epoch;                                   // of the all-reduce that has ended last
    uint32_t finished;                                // blocks of the one under way
    uint32_t arrived[Config::kMaxBlocks][kMaxRanks];  // written by the rank of that index
    double squares[Config::kMaxBlocks][kMaxRanks];    // the same, before the second arrival
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
  int64_t chunk;  // elements a rank
  float* stats;   // (2,)
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

// Sums `vectors` times `width` elements at `at`, `stride` apart, and writes the sums to all ranks; those at or behind `end`
// are left out. Returns this thread's share of the squares.
template <class T, int width, int vectors>
DEVICE double sum_vectors(const KernelParams& params, int rank, int64_t at, int64_t stride, int64_t end) {
  float sums[vectors][width];
#pragma unroll
  for (int i = 0; i < vectors; ++i)
#pragma unroll
    for (int k = 0; k < width; ++k) sums[i][k] = -0.0f;  // what to add leaves any number as it is
#pragma unroll 2
  for (int peer = 0; peer < params.num_ranks; ++peer) {
    const T* const source = bucket_of<T>(params, peer);
    Packed<T, width> loaded[vectors] = {};
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      if (at + i * stride < end) loaded[i] = arch::load_global_streaming<Packed<T, width>>(source + at + i * stride);
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
  for (int step = 1; step <= params.num_ranks; ++step) {
    const int peer = rank + step < params.num_ranks ? rank + step : rank + step - params.num_ranks;
    T* const target = bucket_of<T>(params, peer);
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      if (at + i * stride < end) arch::store_global_streaming(target + at + i * stride, stored[i]);
  }
  return squares;
}

// Sums what belongs to this block of the chunk of `rank`; returns this thread's share of the squares.
template <class T>
DEVICE double sum_chunk(const KernelParams& params, int rank, int block, int num_blocks) {
  constexpr int width = 16 / int(sizeof(T));
  const int64_t begin = bucket::smaller(rank * params.chunk, params.count);
  const int64_t end = bucket::smaller(begin + params.chunk, params.count);
  const int64_t vectors_end = begin + (end - begin) / width * width;
  const int thread = arch::thread_index();
  const int64_t stride = int64_t(num_blocks) * Config::kThreads * width;
  double squares = 0.0;
  for (int64_t at = begin + (int64_t(block) * Config::kThreads + thread) * width; at < vectors_end;
       at += Config::kVectors * stride)
    squares += sum_vectors<T, width, Config::kVectors>(params, rank, at, stride, vectors_end);
  if (block == 0 && vectors_end + thread < end)
    squares += sum_vectors<T, 1, 1>(params, rank, vectors_end + thread, 0, end);
  return squares;
}

// Block `block` of `num_blocks` on rank `rank`.
template <class T>
DEVICE void all_reduce(const KernelParams& params, int rank, int block, int num_blocks, float* stats,
                       SharedStorage& shared) {
  DevicePad::Slot& own = slot_of(params, rank);
  const int thread = arch::thread_index();
  const uint32_t epoch = arch::load_global_streaming<uint32_t>(&own.epoch) + 1;
  meet(params, rank, block, 2 * epoch - 1);
  const double squares = bucket::sum_over_block(sum_chunk<T>(params, rank, block, num_blocks), shared);
  if (thread < params.num_ranks) arch::store_global(&slot_of(params, thread).squares[block][rank], squares);
  meet(params, rank, block, 2 * epoch);

  if (thread == 0) shared.is_last = arch::atomic_add_acq_rel(&own.finished, 1) == uint32_t(num_blocks - 1);
  arch::sync_threads();
  if (!shared.is_last) return;
  const int sums = params.num_ranks * num_blocks;
  double total = 0.0;
  for (int sum = thread; sum < sums; sum += Config::kThreads)
    total += arch::load_global_streaming<double>(&own.squares[sum % num_blocks][sum / num_blocks]);
  total = bucket::sum_over_block(total, shared);
  if (thread == 0) {
    constexpr double kLargest = 0x1.fffffffffffffp1023;
    arch::store_global(stats, float(total));
    arch::store_global(stats + 1, total <= kLargest ? 0.0f : 1.0f);
    arch::store_global(&own.finished, 0u);
    arch::store_global(&own.epoch, epoch);
  }
}

template <class T>
GLOBAL(Config::kThreads, Config::kMinBlocks)
all_reduce_kernel(GRID_CONSTANT KernelParams params) {
  SHARED_STORAGE(SharedStorage, shared);
  all_reduce<T>(params, params.rank, arch::block_x(), arch::grid_x(), params.stats, shared);
}

// Blocks of a launch: as many as have work, up to kMaxBlocks; the same on all ranks.
inline int num_blocks(int64_t chunk, Dtype dtype) {
  constexpr int64_t kBlockBytes = int64_t(Config::kThreads) * Config::kVectors * 16;
  const int64_t blocks = (chunk * size_of(dtype) + kBlockBytes - 1) / kBlockBytes;
  return blocks < 1 ? 1 : blocks < Config::kMaxBlocks ? int(blocks) : Config::kMaxBlocks;
}

inline KernelParams kernel_params(const SymmetricParams& params, float* stats) {
  KernelParams kernel{.num_ranks = params.num_ranks,
                      .rank = params.rank,
                      .slot = params.slot,
                      .begin = params.begin,
                      .count = params.count,
                      .chunk = chunk_elements(params.count, params.num_ranks, size_of(params.dtype)),
                      .stats = stats,
                      .timeout_ns = uint64_t(params.timeout * 1e9)};
  for (int rank = 0; rank < params.num_ranks; ++rank) kernel.segments[rank] = static_cast<char*>(params.segments[rank]);
  return kernel;
}

}  // namespace cuda_ext::symmetric
