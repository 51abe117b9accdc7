// Rows of an operand at indices in memory, for the grouped products of groups_sm90.cuh: TMA on sm_90 cannot gather
// them. Warps 1 and 2, beside the producer's, copy them with cp.async to where TMA would have put them: lines of 128
// bytes whose chunks of 16 are permuted by the line. Lines outside of the group, or whose index is not that of a row,
// and what is beyond the matrix, are 0.
//
// Threads        64: each copies one chunk, the same in all, of every 8th line.
// Barriers       empty[stage]: waited for, as by the producer. full[stage]: 1 arrival of the producer, with the bytes
//                of the other operand, and 1 of each of these threads.
// Order          A thread arrives for a k tile when the copies for the next kLag are under way: it waits for its own of
//                that tile, and orders them before the reads of wgmma (fence.proxy.async). Consumers release a stage
//                when the next has arrived, so kLag is at most kStages - 2.
// Indices        Each lane keeps those of one line, or two, of the 8 or 16 that it copies; the 7 lanes that copy the
//                other chunks of these lines have the rest, which shuffles bring.
#pragma once

#include "arch/async_copy.cuh"
#include "gemm/groups.cuh"
#include "tile/warpgroups_sm90.cuh"

namespace cuda_ext::sm90 {

using namespace tile;

constexpr int kGatherThreads = 64;

// What a thread copies of a tile of 128-byte lines: chunk `chunk` of lines `line`, `line` + 8, ...
struct GatherLane {
  static constexpr int kChunks = 8, kLinesAtOnce = kGatherThreads / kChunks, kStepBytes = kLinesAtOnce * 128;
  int chunk, line;

  DEVICE GatherLane() {
    const int thread = arch::opaque_thread_index() - arch::kWarpSize;
    chunk = thread % kChunks;
    line = thread / kChunks;
  }
  DEVICE int offset() const { return line * 128 + (chunk ^ line) * 16; }  // of the first chunk, in the tile
  // The value of the lane that has chunk `of` of the same lines.
  DEVICE static int from_chunk(int value, int of) {
    return arch::shuffle(value, (arch::lane_index() & ~(kChunks - 1)) | of);
  }
  // The bytes of a chunk that begins `from` bytes into a line of `size`.
  DEVICE static int bytes_left(int64_t size, int64_t from) {
    const int64_t left = size - from;
    return int(left < 0 ? 0 : left < 16 ? left : 16);
  }
};

// Rows of the product: (kRows, 128 bytes) of a k tile, whose rows are the same in all k tiles.
template <int rows>
struct RowsGather {
  static constexpr int kSteps = rows / GatherLane::kLinesAtOnce, kOwn = kSteps / GatherLane::kChunks;
  static_assert(kOwn * GatherLane::kChunks == kSteps);
  GatherLane lane;
  int own[kOwn];

  DEVICE RowsGather(const Groups& groups, int row, int row_end) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      own[i] = gathered_row(groups, row + lane.line + (lane.chunk + i * GatherLane::kChunks) * GatherLane::kLinesAtOnce,
                            row_end);
  }

  // Bytes from `begin` on of rows of `row_bytes`, which are `stride` apart from `data` on.
  DEVICE void copy(SharedAddress tile, const void* data, int64_t stride, int64_t row_bytes, int64_t begin) const {
    const int64_t column = begin + lane.chunk * 16;
    const int bytes = GatherLane::bytes_left(row_bytes, column);
    const char* const from = static_cast<const char*>(data) + column;
    tile += lane.offset();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = GatherLane::from_chunk(own[step / GatherLane::kChunks], step % GatherLane::kChunks);
      arch::cp_async<16>(tile + step * GatherLane::kStepBytes, from + row * stride, row < 0 ? 0 : bytes);
    }
  }
};

// Those of warpgroups if terms are gathered: a lane has more copies under way than of rows, and needs more registers.
struct GatherTermsRegisters {
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
};

// Terms: (runs, 64 terms, 128 bytes) of a k tile. The rows of the next k tile are found while one is copied.
template <int runs>
struct TermsGather {
  static constexpr int kTerms = 64, kSteps = kTerms / GatherLane::kLinesAtOnce;
  static_assert(kSteps == GatherLane::kChunks, "each lane has the row of one line");
  GatherLane lane;
  int own, term, end;

  DEVICE TermsGather(const Groups& groups, int begin, int end) : term(begin), end(end) { find(groups); }
  DEVICE void find(const Groups& groups) {
    own = gathered_row(groups, term + lane.line + lane.chunk * GatherLane::kLinesAtOnce, end);
  }

  // As RowsGather, of as many bytes as the runs have, and advances to the next k tile.
  DEVICE void copy(const Groups& groups, SharedAddress tile, const void* data, int64_t stride, int64_t row_bytes,
                   int64_t begin) {
    const int64_t column = begin + lane.chunk * 16;
    const char* const from = static_cast<const char*>(data) + column;
    tile += lane.offset();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = GatherLane::from_chunk(own, step);
#pragma unroll
      for (int run = 0; run < runs; ++run)
        arch::cp_async<16>(tile + run * kTerms * 128 + step * GatherLane::kStepBytes, from + row * stride + run * 128,
                           row < 0 ? 0 : GatherLane::bytes_left(row_bytes, column + run * 128));
    }
    term += kTerms;
    find(groups);
  }
};

// Fills the ring with the gathered operand of all work items: what each of the threads does. Gemm::gather_item(params,
// work) is a function that starts the copies for the next k tile of an item, to a stage.
template <class Gemm>
DEVICE void gather(const GemmParams& params, const GemmPlan& plan, typename Gemm::Storage& shared) {
  constexpr int kLag = Gemm::kStages / 2 - 1;
  static_assert(kLag >= 1 && kLag <= Gemm::kStages - 2);
  Ring<Gemm::kStages> ring, oldest;  // the next stage, and the first for which this thread has not arrived
  int under_way = 0;
  const auto arrive = [&] {
    arch::fence_async_shared();
    arch::barrier_arrive(shared.full[oldest.stage]);
    oldest.advance();
  };
  const int items = Gemm::items(params, plan);
#pragma unroll 1
  for (int item = arch::block_x() / plan.cluster_blocks(); item < items; item += plan.clusters) {
    const auto work = Gemm::work_item(params, plan, item);
    auto copy = Gemm::gather_item(params, work);
#pragma unroll 1
    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ring.advance()) {
      // Wait until all consumers have released the stage.
      arch::barrier_wait(shared.empty[ring.stage], ring.parity ^ 1);
      copy(shared.stages[ring.stage], k_tile);
      arch::cp_async_commit();
      if (under_way < kLag) {
        ++under_way;
        continue;
      }
      // Wait for this thread's copies to the oldest stage.
      arch::cp_async_wait<kLag>();
      arrive();
    }
  }
  arch::cp_async_wait<0>();
  for (; under_way > 0; --under_way) arrive();
}

}  // namespace cuda_ext::sm90
