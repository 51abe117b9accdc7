// Gradient buckets on the GPU: pack, unpack and statistics of any number of tensors of mixed dtype.
//
// Problem        BucketParams in bucket.h. The kernels only move memory: each byte is read once and written once;
//                scale, cast, sum of squares and non-finite flag are computed in registers on the way.
// Table          The entries are passed as parameters of a small kernel, bucket_table_kernel, which writes them to the
//                workspace and clears the counter below. Nothing on the host has to outlive the call, nothing is
//                pinned, and a captured graph contains the entries in its nodes. A pack of up to 126 tensors without
//                statistics needs no counter and is a single launch: the entries are parameters of bucket_pack_kernel,
//                and each block copies those of its elements to shared memory, where lanes can index them.
// Blocks         Block b owns bucket elements [b, b + 1) * kBlockElements, whatever tensors they belong to. Each of its
//                warps owns an equal region of them and works independently (bucket_move.cuh).
// Statistics     Squares are summed in float64, where a sum of finite float32 values cannot overflow: the non-finite
//                flag is whether the sum is infinite or NaN. Sums over lanes, warps, blocks and grid are each added in
//                an order that depends only on positions and alignments. The last block to arrive at a counter adds
//                those of the blocks: each arrival releases the block's sum and acquires the earlier ones, and the
//                barrier after it makes them visible to the other threads of the block.
// In place       If a tensor already lies in the bucket at its own elements, each element is written by the lane that
//                has read it, and with scale = 1 not at all. Therefore data must not be read through the read-only
//                path, nor must the partial sums, which other blocks write; the table may be.
// Barriers       sync_threads, all threads: between storing and reading the warps' sums, and after the arrival at the
//                counter; in bucket_pack_kernel one, after the copy of the table.
// Shared memory  SharedStorage: one sum per warp and one flag. bucket_pack_kernel: SharedEntries, the table.
// Registers      16 for loads in flight; limited to 64 per thread, so that 4 blocks (64 KiB in flight) fit on an SM.
#pragma once

#include "bucket/bucket_move.cuh"

namespace cuda_ext::bucket {

struct Params {
  Move<GlobalTable> move;
  float* stats;       // (2,): sum of squares; 1 if a value is infinite or NaN, else 0
  uint32_t* counter;  // (1,), 0
  double* partial;    // (blocks,)
};

// Parameters of the kernel without statistics.
struct PackParams {
  void* bucket;
  int64_t count;
  float scale;
  int num_entries;
  TableEntry entries[kSmallChunk];
};
static_assert(sizeof(PackParams) <= 4096);

struct SharedStorage {
  double warp_squares[Config::kWarps];
  uint32_t is_last;
};
struct SharedEntries {
  TableEntry entries[kSmallChunk];
};

// Returns the sum in all threads. `shared` must not be written before the next barrier.
DEVICE double sum_over_block(double value, SharedStorage& shared) {
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) value += arch::shuffle_xor(value, lanes);
  if (arch::lane_index() == 0) shared.warp_squares[arch::thread_index() / kWarpSize] = value;
  arch::sync_threads();
  double sum = 0.0;
#pragma unroll
  for (int warp = 0; warp < Config::kWarps; ++warp) sum += shared.warp_squares[warp];
  return sum;
}

// Writes a chunk of the table, one entry per lane.
template <int capacity>
GLOBAL(kWarpSize, 1)
bucket_table_kernel(GRID_CONSTANT TableChunk<capacity> chunk) {
  const int index = arch::block_x() * kWarpSize + arch::thread_index();
  if (index == 0) arch::store_global(chunk.counter, 0u);
  if (index >= chunk.count) return;
  const TableEntry& entry = chunk.entries[index];
  TableEntry* const target = chunk.target + index;
  arch::store_global(&target->data, entry.data);
  arch::store_global(&target->begin, entry.begin);
  arch::store_global(&target->end, entry.end);
  arch::store_global(&target->dtype, uint32_t(entry.dtype));
}

// Moves the region of this warp; returns this lane's part of the sum of squares.
template <BucketOp op, class Bucket, class Table>
DEVICE double move_own_region(const Move<Table>& params) {
  const int warp = arch::thread_index() / kWarpSize;
  const int64_t begin = arch::block_x() * kBlockElements + warp * int64_t(Config::kRegionElements);
  return move_region<op, Bucket>(params, begin, smaller(begin + Config::kRegionElements, params.count));
}

template <class Bucket>
GLOBAL(Config::kThreads, Config::kMinBlocks)
bucket_pack_kernel(GRID_CONSTANT PackParams params) {
  SHARED_STORAGE(SharedEntries, shared);
  const int64_t block_begin = arch::block_x() * kBlockElements, block_end = block_begin + kBlockElements;
  for (int i = arch::thread_index(); i < params.num_entries; i += Config::kThreads) {
    // Reads of parameters at different addresses are serialised. So all entries are copied only as far as a search
    // reads them, their ends. The rest is copied for the entries that overlap this block, and the first one after it.
    const int64_t end = params.entries[i].end;
    shared.entries[i].end = end;
    if (end > block_begin && (i == 0 || params.entries[i - 1].end < block_end)) shared.entries[i] = params.entries[i];
  }
  arch::sync_threads();
  move_own_region<BucketOp::kPack, Bucket>(
      Move<SharedTable>{{shared.entries}, params.num_entries, params.bucket, params.count, params.scale});
}

template <BucketOp op, class Bucket>
GLOBAL(Config::kThreads, Config::kMinBlocks)
bucket_kernel(GRID_CONSTANT Params params) {
  SHARED_STORAGE(SharedStorage, shared);
  const int thread = arch::thread_index();
  const double squares = sum_over_block(move_own_region<op, Bucket>(params.move), shared);

  if (thread == 0) {
    arch::store_global(params.partial + arch::block_x(), squares);
    shared.is_last = arch::atomic_add_acq_rel(params.counter, 1) == uint32_t(arch::grid_x() - 1);
  }
  arch::sync_threads();
  if (!shared.is_last) return;

  double total = 0.0;
  for (int block = thread; block < arch::grid_x(); block += Config::kThreads)
    total += arch::load_global_streaming<double>(params.partial + block);
  total = sum_over_block(total, shared);
  if (thread == 0) {
    constexpr double kLargest = 0x1.fffffffffffffp1023;
    arch::store_global(params.stats, float(total));
    arch::store_global(params.stats + 1, total <= kLargest ? 0.0f : 1.0f);
  }
}

}  // namespace cuda_ext::bucket
