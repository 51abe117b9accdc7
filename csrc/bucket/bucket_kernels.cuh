// Gradient buckets on the GPU: pack, unpack and statistics of any number of tensors of mixed dtype in one launch.
//
// Problem. As BucketParams (bucket.h) says. A pass over memory and nothing else: each byte is read once and written
// once, and scale, cast, sum of squares and non-finite flag ride along in registers.
//
// Table. The entries travel as parameters of a small kernel of their own, which writes them to the workspace: nothing on
// the host has to outlive the call, nothing is pinned, and a captured graph carries them in its nodes. That kernel also
// clears the counter below. A pack of up to 126 tensors whose statistics nobody wants has no counter, and is one launch:
// the entries are its own parameters, and each block copies those of its elements to shared memory, where lanes find them
// at any index.
//
// Work. Block b owns bucket elements [b, b + 1) * kBlockElements, whatever tensors lie there, and each of its warps an
// equal region of them; from there on a warp needs no other. It finds its first entry by a search in which every lane
// probes one (three rounds for 1,000 tensors) and walks on. What it meets is moved in one of two ways:
//   - A long piece of one tensor by vectors, 64 bytes in flight per lane: 16 bytes of the wider of the two dtypes where
//     source and target have a common alignment, else the widest vector for which they have one. Vectors start at a
//     32-byte sector of the target; the up to 15 elements before it and 7 behind the last vector go one per lane.
//   - Among short tensors and gaps, 256 elements at once, each by a lane that searches its entry on its own: a region
//     of one-element tensors then takes 8 rounds of the warp, not one per tensor.
// A gap is written as zeros by pack and passed over by the others; an entry without data is passed over by all.
//
// Statistics. Squares are summed in float64, where a sum of finite float32 values cannot overflow: an infinite or NaN
// sum is the non-finite flag. Lane, warp, block, grid: each level adds in an order that only positions and alignments
// decide. The grid's level is the block that arrives last at a counter. Each arrival releases the block's sum and acquires
// those before it, and the barrier passes them on to the block's other threads.
//
// In place. Where a tensor is its own place in the bucket, the lane that writes an element is the one that has read it,
// and with scale = 1 nothing is written. The data must not be read through the read-only path for this, nor may the
// partial sums, which other blocks write; the table may.
//
// Barriers. sync_threads, all threads: between warps' sums and their use, and after the arrival at the counter; in the
// kernel without statistics, once, behind the copy of the table.
// Shared memory. SharedStorage: one sum a warp and one flag. SharedEntries: the table of the kernel without statistics.
// Registers. 16 hold what is in flight; capped at 64 a thread, so that 4 blocks, 64 KiB in flight, fit a processor.
#pragma once

#include "bucket/bucket_move.cuh"

namespace cuda_ext::bucket {

struct Params {
  Move<GlobalTable> move;
  float* stats;       // (2,): sum of squares; 1 if a value is infinite or NaN, else 0
  uint32_t* counter;  // (1,), 0
  double* partial;    // (blocks,)
};

// Of the kernel without statistics.
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

// The same in all threads. Storage is free again after the next barrier.
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

// Writes a chunk of the table, an entry per lane: parameters are read one address at a time.
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

// Moves what belongs to this warp of this block; returns this lane's share of the squares.
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
    // Parameters are read one address at a time, so a search gets all the ends, but the rest only of entries that it can
    // find in this block: those from the first that ends in it or later to the first that does so behind it.
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
