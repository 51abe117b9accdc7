// Matrix products with fused epilogues on sm_80 and later: GemmParams as one kernel, for float16, bfloat16 and float32.
//
// Tile      A block makes block_m x block_n of the output, going through k (and the reduced products) block_k at a
//           time. If the product is gated the tile's left half are gate columns, its right half the up columns that go
//           with them, so it covers block_n / 2 columns of the output. Sizes: the table kTiles below.
// Warps     All do the same: warps_m x warps_n of them share the tile, and all threads share every copy.
// Waiting   A ring of `stages` pairs of operand tiles, filled by cp.async. Each thread waits for its own copies, then
//           one sync_threads per k tile says both that the next tile has arrived and that the one before has been read.
// Shared    (stages, A tile + B tile), written over by the result, (block_m, block_n + 8) floats, for the epilogue.
// Registers A warp holds its part of the output, block_m / warps_m x block_n / warps_n floats, and two sets of operand
//           fragments: one is loaded while the other is multiplied.
// Operands  are read in place, whichever of their dims has stride 1, from any address: 16 bytes at a time where base
//           and strides allow, else 4, else 2. What lies outside the matrix arrives as zeros.
// Split k   A small output has its k tiles divided among several blocks. Each leaves its sums in the workspace; the
//           last to arrive adds them up in the order of k, whichever block it is, and runs the epilogue.
#pragma once

#include <algorithm>
#include <limits>
#include <string>

#include "arch/async_copy.cuh"
#include "arch/mma.cuh"
#include "gemm/epilogue_sm80.cuh"
#include "gemm/gemm_sm80.h"
#include "rt/launch.cuh"

namespace cuda_ext::sm80 {

// A tile shape and all that hangs on it.
struct GemmConfig {
  int block_m;
  int block_n;
  int block_k;
  int stages;
  int warps_m;
  int warps_n;
  int min_blocks;  // of a multiprocessor: bounds the registers

  constexpr int threads() const { return 32 * warps_m * warps_n; }
};

// How fragments are multiplied: 16-bit ones as they are, float32 ones as tf32 in one or three products.
enum class Arithmetic { k16Bit, kTf32, kThreeTf32 };

// The shapes of each arithmetic: [0] for large outputs, [1] for small ones.
constexpr GemmConfig kTiles[3][2] = {
    {
        // 64 x 64 a warp reads least from shared memory, and two blocks of 4 warps hide each other's epilogues.
        {.block_m = 128, .block_n = 128, .block_k = 32, .stages = 4, .warps_m = 2, .warps_n = 2, .min_blocks = 2},
        // Deeper k tiles: half as many waits, where there is little to do between them.
        {.block_m = 64, .block_n = 64, .block_k = 64, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 3},
    },
    {
        // The same in bytes.
        {.block_m = 128, .block_n = 128, .block_k = 16, .stages = 4, .warps_m = 2, .warps_n = 2, .min_blocks = 2},
        {.block_m = 64, .block_n = 64, .block_k = 32, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 3},
    },
    {
        // Three products want both parts of every fragment in registers, so a warp takes half as much of the output.
        {.block_m = 128, .block_n = 128, .block_k = 16, .stages = 4, .warps_m = 4, .warps_n = 2, .min_blocks = 1},
        {.block_m = 64, .block_n = 64, .block_k = 32, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 3},
    },
};

// An operand's tile in shared memory: lines of 16-byte chunks. A line goes along the dim with stride 1, which is k if
// `k_major`; the chunks of a line are permuted, so that neither copies nor fragment loads meet in a bank.
template <class T, bool k_major, int extent, int depth>
struct OperandTile {
  static constexpr int kElements = 16 / sizeof(T);  // of a chunk
  static constexpr int kLines = k_major ? extent : depth;
  static constexpr int kChunks = (k_major ? depth : extent) / kElements;  // of a line
  static constexpr int kBytes = kLines * kChunks * 16;
  static_assert(kChunks == 4 || kChunks % 8 == 0);

  DEVICE static int offset(int line, int chunk) {
    if constexpr (kChunks == 4)  // 2 lines fill the banks, and ldmatrix reads one chunk of each of 8
      chunk ^= line >> 1 & 3;
    else if constexpr (!k_major && sizeof(T) == 4)  // plain loads of 2 chunks of each of 4 lines
      chunk ^= (line & 3) << 1;
    else  // one chunk of each of 8 lines
      chunk ^= line & 7;
    return (line * kChunks + chunk) * 16;
  }

  // The part of a warp's fragments that begins at index `first` of the extent, in step `step` of 32 bytes along k, as 4
  // quadrants of 8 x 16 bytes: m[0], m[1] = indices 0-7, 8-15 in the first half of k, m[2], m[3] in the second. That is
  // a fragment of A (16 rows); and two of B (16 columns), {m[0], m[2]} and {m[1], m[3]}.
  DEVICE static void load_fragment(uint32_t (&m)[4], arch::SharedAddress tile, int first, int step) {
    const int lane = arch::lane_index();
    if constexpr (k_major) {
      arch::ldmatrix<4>(m, tile + offset(first + (lane & 15), step * 2 + (lane >> 4)));
    } else if constexpr (sizeof(T) == 2) {
      const int line = step * 16 + (lane & 7) + (lane >> 4) * 8;
      arch::ldmatrix<4, true>(m, tile + offset(line, first / kElements + (lane >> 3 & 1)));
    } else {  // ldmatrix transposes 16-bit elements only
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int index = first + lane / 4 + i % 2 * 8, line = step * 8 + lane % 4 + i / 2 * 4;
        m[i] = arch::load_shared<uint32_t>(tile + offset(line, index / kElements) + index % kElements * 4);
      }
    }
  }
};

// What one thread copies of an operand, k tile after k tile: the same chunk of every kLinesPerPass-th line.
template <class T, bool k_major, int extent, int depth, int threads>
class TileCopy {
  using Tile = OperandTile<T, k_major, extent, depth>;
  static constexpr int kLinesPerPass = threads / Tile::kChunks;
  static constexpr int kPasses = Tile::kLines / kLinesPerPass;
  static constexpr int kHalf = extent / 2;  // where `up` begins in a gated tile
  static_assert(kLinesPerPass * kPasses == Tile::kLines);
  static_assert(!k_major || kHalf % kLinesPerPass == 0, "a pass is of one half");

 public:
  // The tile at [first, first + extent) of an operand whose lines are line_stride elements apart and whose extent is
  // `size`; gated: its second half at [first + size, ..) of an extent of 2 size.
  DEVICE TileCopy(const void* data, int64_t line_stride, int64_t first, int64_t size, bool gated, int vector_bytes)
      : line_bytes_(line_stride * int64_t(sizeof(T))), vector_bytes_(vector_bytes) {
    line_ = arch::thread_index() / Tile::kChunks;
    chunk_ = arch::thread_index() % Tile::kChunks;
    const int half = gated ? kHalf : extent;
    const int left = size - first < half ? int(size - first) : half;
    int64_t column = first + (k_major ? 0 : chunk_ * Tile::kElements);
    if constexpr (k_major) {
      end_ = left;
      upper_end_ = gated ? half + left : left;
      upper_bytes_ = gated ? (size - half) * line_bytes_ : 0;
    } else {
      const int begin = chunk_ * Tile::kElements;
      const bool upper = begin >= half;
      column += upper ? size - half : 0;
      valid_ = clamp_bytes((upper ? half + left : left) - begin);
    }
    const int64_t line = k_major ? first + line_ : line_;
    origin_ = static_cast<const char*>(data) + line * line_bytes_ +
              (k_major ? chunk_ * Tile::kElements : column) * int64_t(sizeof(T));
    source_ = origin_;
  }

  // Goes to the k-th element of a product that begins `offset` elements from the first.
  DEVICE void seek(int64_t offset, int64_t k) {
    source_ = origin_ + offset * int64_t(sizeof(T)) + k * (k_major ? int64_t(sizeof(T)) : line_bytes_);
  }

  // Starts copying a k tile, of which min(k_left, depth) are inside the matrix, and goes to the next.
  DEVICE void copy(arch::SharedAddress tile, int64_t k_left) {
    const int left = k_left < depth ? int(k_left) : depth;
    if (vector_bytes_ == 16) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) copy_pass<16>(tile, pass, left);
    } else if (sizeof(T) == 4 || vector_bytes_ == 4) {
#pragma unroll 1  // few registers matter more than speed here
      for (int pass = 0; pass < kPasses; ++pass) copy_pass<4>(tile, pass, left);
    } else {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) copy_pass<2>(tile, pass, left);
    }
    source_ += k_major ? int64_t(depth * sizeof(T)) : depth * line_bytes_;
  }

 private:
  DEVICE static int clamp_bytes(int elements) {
    return (elements < 0 ? 0 : elements < Tile::kElements ? elements : Tile::kElements) * int(sizeof(T));
  }

  template <int vector_bytes>
  DEVICE void copy_pass(arch::SharedAddress tile, int pass, int left) const {
    const int line = line_ + pass * kLinesPerPass;
    const char* from = source_ + pass * kLinesPerPass * line_bytes_;
    int valid;
    if constexpr (k_major) {
      const bool upper = pass * kLinesPerPass >= kHalf;
      valid = line < (upper ? upper_end_ : end_) ? clamp_bytes(left - chunk_ * Tile::kElements) : 0;
      if (upper) from += upper_bytes_;
    } else {
      valid = line < left ? valid_ : 0;
    }
    copy_chunk<vector_bytes>(tile + Tile::offset(line, chunk_), from, valid);
  }

  template <int vector_bytes>
  DEVICE static void copy_chunk(arch::SharedAddress to, const char* from, int valid) {
    if constexpr (vector_bytes == 16) {
      arch::cp_async<16>(to, from, valid);
    } else if constexpr (vector_bytes == 4) {
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        const int left = valid - i;
        arch::cp_async<4>(to + i, from + i, left < 0 ? 0 : left < 4 ? left : 4);
      }
    } else {  // less than cp.async can carry: through registers
      arch::Words4 words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = valid > 4 * i ? arch::load_global<uint16_t>(from + 4 * i) : 0;
        const uint32_t high = valid > 4 * i + 2 ? arch::load_global<uint16_t>(from + 4 * i + 2) : 0;
        words.data[i] = high << 16 | low;
      }
      arch::store_shared(to, words);
    }
  }

  const char* origin_;  // this thread's first chunk of k = 0
  const char* source_;  // and of the next k tile
  int64_t line_bytes_;
  int64_t upper_bytes_ = 0;  // k_major: from where a line of the second half would be to where it is
  int line_;
  int chunk_;
  int end_ = 0;        // k_major: lines of the first half that are inside the matrix
  int upper_end_ = 0;  // and of the second
  int valid_ = 0;      // else: bytes of the chunk that are
  int vector_bytes_;
};

// The nearest tf32 as what mma reads, which ignores the lower 13 bits: half of the last place is added. Infinities and
// NaN stay. (cvt.rna would do it, at a quarter of the speed of integer arithmetic.)
DEVICE uint32_t round_to_tf32(uint32_t bits) { return bits << 1 < 0xff000000u ? bits + 0x1000 : bits; }

// x = high + low, tf32 both: what truncation loses of x is exact in float32.
DEVICE void split_tf32(uint32_t bits, uint32_t& high, uint32_t& low) {
  high = bits & 0xffffe000u;
  low = round_to_tf32(arch::float_bits(arch::bits_float(bits) - arch::bits_float(high)));
}

// One instantiation of the kernel: constants and the main loop.
template <class T, Arithmetic arithmetic, bool a_k_major, bool b_k_major, GemmConfig config>
struct Gemm {
  static constexpr bool kAKMajor = a_k_major;
  static constexpr bool kBKMajor = b_k_major;
  static constexpr int kThreads = config.threads();
  static constexpr int kMinBlocks = config.min_blocks;
  static constexpr int kStages = config.stages;
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kBlockK = config.block_k;
  static constexpr int kWarpsM = config.warps_m;
  static constexpr int kWarpM = kBlockM / kWarpsM;
  static constexpr int kWarpN = kBlockN / config.warps_n;
  static constexpr int kRows = kWarpM / 16;                     // fragments of A a warp holds
  static constexpr int kColumns = kWarpN / 8;                   // and of B
  static constexpr int kSteps = kBlockK * int(sizeof(T)) / 32;  // an mma is 32 bytes deep
  static_assert(kWarpN % 16 == 0 && kSteps % 2 == 0);

  using TileA = OperandTile<T, a_k_major, kBlockM, kBlockK>;
  using TileB = OperandTile<T, b_k_major, kBlockN, kBlockK>;
  using CopyA = TileCopy<T, a_k_major, kBlockM, kBlockK, kThreads>;
  using CopyB = TileCopy<T, b_k_major, kBlockN, kBlockK, kThreads>;

  // Padded by 8 floats: a warp stores float pairs of 8 rows at once.
  static constexpr int kResultStride = kBlockN + 8;
  using Epilogue = epilogue::TileEpilogue<kThreads, kBlockM, kResultStride>;

  struct Stage {
    alignas(128) unsigned char a[TileA::kBytes];
    alignas(128) unsigned char b[TileB::kBytes];
  };
  struct Storage {
    union {
      Stage stages[kStages];
      float result[kBlockM * kResultStride];  // (kBlockM, kResultStride), of which kBlockN columns are used
    };
    uint32_t arrived;  // split k: blocks of this tile that arrived before this one
  };

  using Accumulators = float[kRows][kColumns][4];

  struct Fragments {
    uint32_t a[kRows][4];
    uint32_t b[kColumns / 2][4];

    DEVICE void load(const Stage& stage, int step) {
      const int warp = arch::thread_index() / arch::kWarpSize;
      const int row = warp % kWarpsM * kWarpM, column = warp / kWarpsM * kWarpN;
      const arch::SharedAddress tile_a = arch::shared_address(stage.a), tile_b = arch::shared_address(stage.b);
#pragma unroll
      for (int i = 0; i < kRows; ++i) TileA::load_fragment(a[i], tile_a, row + i * 16, step);
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) TileB::load_fragment(b[j], tile_b, column + j * 16, step);
    }

    DEVICE void multiply(Accumulators& sums) {
      if constexpr (arithmetic == Arithmetic::kThreeTf32)
        multiply_three_tf32(sums);
      else
        multiply_once(sums);
    }

   private:
    DEVICE void multiply_once(Accumulators& sums) {
      if constexpr (arithmetic == Arithmetic::kTf32) {
#pragma unroll
        for (auto& fragment : a)
#pragma unroll
          for (uint32_t& x : fragment) x = round_to_tf32(x);
#pragma unroll
        for (auto& fragment : b)
#pragma unroll
          for (uint32_t& x : fragment) x = round_to_tf32(x);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const uint32_t b_fragment[2] = {b[j / 2][j % 2], b[j / 2][j % 2 + 2]};
          if constexpr (arithmetic == Arithmetic::k16Bit)
            arch::mma_m16n8k16<T>(sums[i][j], a[i], b_fragment);
          else
            arch::mma_m16n8k8_tf32(sums[i][j], a[i], b_fragment);
        }
    }

    // (high + low)_a (high + low)_b less the product of the lows, which is beyond float32; the small terms first.
    DEVICE void multiply_three_tf32(Accumulators& sums) const {
      uint32_t a_high[kRows][4], a_low[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q) split_tf32(a[i][q], a_high[i][q], a_low[i][q]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        uint32_t b_high[2], b_low[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) split_tf32(b[j / 2][j % 2 + 2 * q], b_high[q], b_low[q]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) arch::mma_m16n8k8_tf32(sums[i][j], a_low[i], b_high);
#pragma unroll
        for (int i = 0; i < kRows; ++i) arch::mma_m16n8k8_tf32(sums[i][j], a_high[i], b_low);
#pragma unroll
        for (int i = 0; i < kRows; ++i) arch::mma_m16n8k8_tf32(sums[i][j], a_high[i], b_high);
      }
    }
  };

  // All of it at once: the epilogue needs the registers.
  DEVICE static void store_result(float* result, const Accumulators& sums) {
    const int warp = arch::thread_index() / arch::kWarpSize, lane = arch::lane_index();
    const int row = warp % kWarpsM * kWarpM + lane / 4, column = warp / kWarpsM * kWarpN + lane % 4 * 2;
    const arch::SharedAddress to = arch::shared_address(result + row * kResultStride + column);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const pair = sums[i][j] + 2 * half;
          arch::store_shared(to + 4 * ((i * 16 + half * 8) * kResultStride + j * 8),
                             arch::Words2{{arch::float_bits(pair[0]), arch::float_bits(pair[1])}});
        }
  }

  // A block's sums in the workspace, as threads hold them: (kRows, kColumns, kThreads) vectors of 4.
  DEVICE static void store_partial(float* partial, const Accumulators& sums) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float (&d)[4] = sums[i][j];
        arch::store_global(partial + ((i * kColumns + j) * kThreads + arch::thread_index()) * 4,
                           arch::Words4{{arch::float_bits(d[0]), arch::float_bits(d[1]), arch::float_bits(d[2]),
                                         arch::float_bits(d[3])}});
      }
  }
  DEVICE static void add_partial(const float* partial, Accumulators& sums) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const auto words = arch::load_global_streaming<arch::Words4>(
            partial + ((i * kColumns + j) * kThreads + arch::thread_index()) * 4);
#pragma unroll
        for (int q = 0; q < 4; ++q) sums[i][j][q] += arch::bits_float(words.data[q]);
      }
  }
};

// What the host decides; the same for all blocks.
struct GemmPlan {
  int shape = 0;  // of kTiles
  int row_tiles = 0;
  int column_tiles = 0;
  int64_t tiles = 0;          // of all batches
  int64_t k_tiles = 0;        // of one product
  int64_t all_k_tiles = 0;    // of all reduced products
  int64_t split_k_tiles = 0;  // of one block
  int splits = 1;
  int vector_bytes_a = 16;  // aligned bytes that a and b can be read by
  int vector_bytes_b = 16;
  // In the workspace; null if not needed.
  uint32_t* arrivals = nullptr;  // (tiles,)
  float* partials = nullptr;     // (splits, tiles, block_m * block_n)
  float* bias_sums = nullptr;    // (row_tiles, n), gated: (row_tiles, 2n)
};

// Blocks that run at the same time should share operands in L2: tiles go down columns of kGroup rows.
DEVICE epilogue::TilePosition find_tile(const GemmPlan& plan, int tile, int block_m, int columns) {
  constexpr int kGroup = 8;
  const int tiles = plan.row_tiles * plan.column_tiles, of_group = kGroup * plan.column_tiles;
  const int t = tile % tiles, group = t / of_group, in_group = t % of_group;
  const int left = plan.row_tiles - group * kGroup, rows = left < kGroup ? left : kGroup;
  return {tile / tiles, int64_t(group * kGroup + in_group % rows) * block_m, int64_t(in_group / rows) * columns,
          columns};
}

// Grid: (tiles, splits).
template <class Gemm>
GLOBAL(Gemm::kThreads, Gemm::kMinBlocks)
gemm_sm80(GRID_CONSTANT GemmParams params, GRID_CONSTANT GemmPlan plan) {
  using Storage = typename Gemm::Storage;
  SHARED_STORAGE(Storage, shared);
  const bool gated = params.gated && params.preact.data == nullptr;
  const epilogue::TilePosition at =
      find_tile(plan, arch::block_x(), Gemm::kBlockM, gated ? Gemm::kBlockN / 2 : Gemm::kBlockN);
  typename Gemm::Accumulators sums = {};

  {
    const int64_t batch_a =
        epilogue::offset_of(at.batch, params.batch_dims, params.batch_sizes, params.a.batch_strides);
    const int64_t batch_b =
        epilogue::offset_of(at.batch, params.batch_dims, params.batch_sizes, params.b.batch_strides);
    typename Gemm::CopyA copy_a(params.a.data, Gemm::kAKMajor ? params.a.row_stride : params.a.column_stride, at.row,
                                params.m, false, plan.vector_bytes_a);
    typename Gemm::CopyB copy_b(params.b.data, Gemm::kBKMajor ? params.b.column_stride : params.b.row_stride, at.column,
                                params.n, gated, plan.vector_bytes_b);

    const int64_t first = arch::block_y() * plan.split_k_tiles;
    const int64_t left = plan.all_k_tiles - first;
    const int64_t count = left < plan.split_k_tiles ? left : plan.split_k_tiles;
    int64_t product = 0, k = 0;
    const auto seek = [&] {
      copy_a.seek(
          batch_a + epilogue::offset_of(product, params.reduced_dims, params.reduced_sizes, params.reduced_strides_a),
          k);
      copy_b.seek(
          batch_b + epilogue::offset_of(product, params.reduced_dims, params.reduced_sizes, params.reduced_strides_b),
          k);
    };
    const auto copy_next = [&](int slot) {
      typename Gemm::Stage& stage = shared.stages[slot];
      copy_a.copy(arch::shared_address(stage.a), params.k - k);
      copy_b.copy(arch::shared_address(stage.b), params.k - k);
      k += Gemm::kBlockK;
      if (k >= params.k) {
        ++product;
        k = 0;
        if (params.reduced_dims > 0) seek();
      }
    };
    if (count > 0) {
      product = first / plan.k_tiles;
      k = first % plan.k_tiles * Gemm::kBlockK;
      seek();
    }

    constexpr int kAhead = Gemm::kStages - 1;
    for (int slot = 0; slot < kAhead; ++slot) {
      if (slot < count) copy_next(slot);
      arch::cp_async_commit();
    }
    typename Gemm::Fragments fragments[2];
    if (count > 0) {
      arch::cp_async_wait<kAhead - 1>();
      arch::sync_threads();
      fragments[0].load(shared.stages[0], 0);
    }
    int slot = 0;            // that is multiplied
    int free_slot = kAhead;  // that was multiplied before
    for (int64_t tile = 0; tile < count; ++tile) {
#pragma unroll
      for (int step = 0; step < Gemm::kSteps; ++step) {
        if (step + 1 < Gemm::kSteps) {
          fragments[(step + 1) % 2].load(shared.stages[slot], step + 1);
        } else {
          arch::cp_async_wait<kAhead - 1>();
          arch::sync_threads();
          free_slot = slot;
          slot = slot + 1 == Gemm::kStages ? 0 : slot + 1;
          if (tile + 1 < count) fragments[0].load(shared.stages[slot], 0);
        }
        if (step == 0) {
          if (tile + kAhead < count) copy_next(free_slot);
          arch::cp_async_commit();  // empty at the end, so that the count of groups holds
        }
        fragments[step % 2].multiply(sums);
      }
    }
    arch::cp_async_wait<0>();
  }

  if (plan.splits > 1) {
    constexpr int64_t kSize = Gemm::kBlockM * Gemm::kBlockN;
    float* const partial = plan.partials + arch::block_x() * kSize;
    Gemm::store_partial(partial + arch::block_y() * plan.tiles * kSize, sums);
    arch::fence_device();
    arch::sync_threads();
    if (arch::thread_index() == 0) shared.arrived = arch::atomic_add_acq_rel(plan.arrivals + arch::block_x(), 1u);
    arch::sync_threads();
    if (shared.arrived + 1 < uint32_t(plan.splits)) return;
    arch::fence_device();
#pragma unroll
    for (auto& row : sums)
#pragma unroll
      for (auto& fragment : row)
#pragma unroll
        for (float& x : fragment) x = 0.0f;
    for (int split = 0; split < plan.splits; ++split) Gemm::add_partial(partial + split * plan.tiles * kSize, sums);
  }

  arch::sync_threads();  // the stages have been read
  Gemm::store_result(shared.result, sums);
  arch::sync_threads();
  typename Gemm::Epilogue finish(params, at);
  finish.run(shared.result);
  if (plan.bias_sums != nullptr) {
    arch::sync_threads();
    finish.store_sums(shared.result, plan.bias_sums + at.row / Gemm::kBlockM * (params.gated ? 2 : 1) * params.n);
  }
}

// No block of a tile has arrived.
inline GLOBAL(256, 1) clear_arrivals(GRID_CONSTANT GemmPlan plan) {
  const int64_t i = int64_t(arch::block_x()) * arch::block_size() + arch::thread_index();
  if (i < plan.tiles) plan.arrivals[i] = 0;
}

// bias_grad = the sums of the rows of tiles, added in order; a thread for each column.
inline GLOBAL(128, 1) reduce_bias_sums(GRID_CONSTANT GemmPlan plan, GRID_CONSTANT Output bias_grad, int64_t width) {
  const int64_t column = int64_t(arch::block_x()) * arch::block_size() + arch::thread_index();
  if (column >= width) return;
  float sum = 0.0f;
  for (int tile = 0; tile < plan.row_tiles; ++tile)
    sum += arch::load_global<float>(plan.bias_sums + tile * width + column);
  const float sums[epilogue::kVector] = {sum};
  epilogue::write(bias_grad, column, 1, sums);
}

// The host's side.

inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline int processor_count() {
#if defined(__CUDACC__)
  int device = 0, count = 0;
  rt::check(cudaGetDevice(&device), "gemm_sm80", "ask for the current device");
  rt::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "gemm_sm80", "count processors");
  return count;
#else
  return 4;  // so that the emulator sees split k and several waves in small problems
#endif
}

// Whether k is the dim that is read as contiguous; the other one is, if not, or has but one index.
inline bool is_k_major(int64_t k, int64_t k_stride, int64_t other_stride) {
  return k == 1 ? other_stride != 1 : k_stride == 1;
}
inline bool is_k_major_a(const GemmParams& params) {
  return is_k_major(params.k, params.a.column_stride, params.a.row_stride);
}
inline bool is_k_major_b(const GemmParams& params) {
  return is_k_major(params.k, params.b.row_stride, params.b.column_stride);
}

inline int64_t product_of(int dims, const int64_t* sizes) {
  int64_t count = 1;
  for (int d = 0; d < dims; ++d) count *= sizes[d];
  return count;
}

// The largest of 16, 4 and 2 that divides the address and the strides, in bytes, between whatever is read.
inline int vector_bytes(const GemmParams& params, const Operand& operand, int64_t line_stride,
                        const int64_t* reduced_strides, int64_t upper_offset) {
  int64_t bits = line_stride | upper_offset;
  for (int d = 0; d < params.batch_dims; ++d) bits |= operand.batch_strides[d];
  for (int d = 0; d < params.reduced_dims; ++d) bits |= reduced_strides[d];
  bits = bits * size_of(operand.dtype) | int64_t(reinterpret_cast<uintptr_t>(operand.data));
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
}

// The tile shape and the split of k that are done first, in cycles of one multiprocessor: each makes its share of the
// blocks, a block's k tile costs the larger of its arithmetic and its way from L2, and a split adds the way of the sums
// through the workspace. The rates are an A100's; only their ratios matter.
inline GemmPlan choose_plan(const GemmParams& params, Arithmetic arithmetic) {
  constexpr double kMultiplyAdds[] = {1024, 512, 512.0 / 3};  // a cycle, of each arithmetic
  constexpr double kBytes = 48;                               // a cycle, from L2
  constexpr double kStartCycles = 1500;                       // of a block: fill the stages, run the epilogue
  constexpr double kSplitCycles = 4000;                       // the kernel that clears, the blocks that wait
  constexpr int kMaxSplits = 32;
  constexpr int64_t kMinSplitTiles = 4;  // as long as the pipeline takes to fill

  const bool gated = params.gated && params.preact.data == nullptr;
  const int64_t batches = product_of(params.batch_dims, params.batch_sizes);
  const int64_t reduced = product_of(params.reduced_dims, params.reduced_sizes);
  const int processors = processor_count();
  GemmPlan best;
  double best_cycles = std::numeric_limits<double>::infinity();
  for (int shape = 0; shape < 2; ++shape) {
    const GemmConfig& tile = kTiles[int(arithmetic)][shape];
    GemmPlan plan;
    plan.shape = shape;
    const int64_t row_tiles = ceil_div(params.m, tile.block_m);
    const int64_t column_tiles = ceil_div(params.n, gated ? tile.block_n / 2 : tile.block_n);
    plan.tiles = row_tiles * column_tiles * batches;
    if (plan.tiles > std::numeric_limits<int>::max() / 8)
      throw std::invalid_argument("gemm_sm80: expected fewer than 2^28 output tiles, got " +
                                  std::to_string(plan.tiles));
    plan.row_tiles = int(row_tiles);
    plan.column_tiles = int(column_tiles);
    plan.k_tiles = ceil_div(params.k, tile.block_k);
    plan.all_k_tiles = plan.k_tiles * reduced;
    const double element = arithmetic == Arithmetic::k16Bit ? 2 : 4;
    const double tile_cycles =
        std::max(double(tile.block_m) * tile.block_n * tile.block_k / kMultiplyAdds[int(arithmetic)],
                 double(tile.block_m + tile.block_n) * tile.block_k * element / kBytes);
    const double sum_cycles = double(tile.block_m) * tile.block_n * sizeof(float) / kBytes;
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
      plan.split_k_tiles = ceil_div(plan.all_k_tiles, splits);
      if (splits > 1 && plan.split_k_tiles < kMinSplitTiles) break;
      if (splits > 1 && plan.tiles * splits > 4 * processors) break;  // there are blocks enough, and memory is finite
      if (splits > 1 && ceil_div(plan.all_k_tiles, plan.split_k_tiles) != splits) continue;  // one would have nothing
      plan.splits = splits;
      const double blocks = double(ceil_div(plan.tiles * splits, processors));
      double cycles = blocks * (double(plan.split_k_tiles) * tile_cycles + kStartCycles);
      if (splits > 1) cycles += kSplitCycles + (blocks + splits) * sum_cycles;
      if (cycles < best_cycles) {
        best_cycles = cycles;
        best = plan;
      }
    }
  }
  best.vector_bytes_a =
      vector_bytes(params, params.a, is_k_major_a(params) ? params.a.row_stride : params.a.column_stride,
                   params.reduced_strides_a, 0);
  best.vector_bytes_b =
      vector_bytes(params, params.b, is_k_major_b(params) ? params.b.column_stride : params.b.row_stride,
                   params.reduced_strides_b, gated && !is_k_major_b(params) ? params.n : 0);
  return best;
}

// Divides the workspace; returns the bytes used.
inline size_t place_workspace(const GemmParams& params, const GemmConfig& tile, void* data, GemmPlan& plan) {
  size_t used = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(reinterpret_cast<uintptr_t>(data) + used);
    used += (size_t(count) * sizeof(*pointer) + 255) / 256 * 256;
  };
  if (plan.splits > 1) {
    take(plan.arrivals, plan.tiles);
    take(plan.partials, plan.splits * plan.tiles * tile.block_m * tile.block_n);
  }
  if (params.bias_grad.data != nullptr) take(plan.bias_sums, plan.row_tiles * (params.gated ? 2 : 1) * params.n);
  return used;
}

template <class T, Arithmetic arithmetic, bool a_k_major, bool b_k_major, int shape>
void launch_shape(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  using Kernel = Gemm<T, arithmetic, a_k_major, b_k_major, kTiles[int(arithmetic)][shape]>;
  rt::launch<gemm_sm80<Kernel>>("gemm_sm80",
                                {.grid = {int(plan.tiles), plan.splits},
                                 .threads = Kernel::kThreads,
                                 .shared_bytes = sizeof(typename Kernel::Storage),
                                 .stream = stream},
                                params, plan);
}

template <class T, Arithmetic arithmetic>
void launch_with(const GemmParams& params, Workspace workspace, rt::Stream stream) {
  const int64_t batches = product_of(params.batch_dims, params.batch_sizes);
  if (params.m == 0 || params.n == 0 || batches == 0) return;
  GemmPlan plan = choose_plan(params, arithmetic);
  const size_t needed = place_workspace(params, kTiles[int(arithmetic)][plan.shape], workspace.data, plan);
  if (needed > workspace.bytes)
    throw std::invalid_argument("gemm_sm80: expected a workspace of " + std::to_string(needed) + " bytes, got " +
                                std::to_string(workspace.bytes));
  if (plan.splits > 1)
    rt::launch<clear_arrivals>("clear_arrivals",
                               {.grid = {int(ceil_div(plan.tiles, 256))}, .threads = 256, .stream = stream}, plan);
  using Launch = void (*)(const GemmParams&, const GemmPlan&, rt::Stream);
  constexpr Launch kLaunch[2][2][2] = {
      // [a is k-major][b is k-major][shape]
      {{launch_shape<T, arithmetic, false, false, 0>, launch_shape<T, arithmetic, false, false, 1>},
       {launch_shape<T, arithmetic, false, true, 0>, launch_shape<T, arithmetic, false, true, 1>}},
      {{launch_shape<T, arithmetic, true, false, 0>, launch_shape<T, arithmetic, true, false, 1>},
       {launch_shape<T, arithmetic, true, true, 0>, launch_shape<T, arithmetic, true, true, 1>}}};
  kLaunch[is_k_major_a(params)][is_k_major_b(params)][plan.shape](params, plan, stream);
  if (plan.bias_sums != nullptr) {
    const int64_t width = (params.gated ? 2 : 1) * params.n;
    rt::launch<reduce_bias_sums>("reduce_bias_sums",
                                 {.grid = {int(ceil_div(width, 128))}, .threads = 128, .stream = stream}, plan,
                                 params.bias_grad, width);
  }
}

template <class T>
Arithmetic arithmetic_of(Float32Product float32) {
  if (sizeof(T) == 2) return Arithmetic::k16Bit;
  return float32 == Float32Product::kTf32 ? Arithmetic::kTf32 : Arithmetic::kThreeTf32;
}

}  // namespace cuda_ext::sm80

namespace cuda_ext {

template <class T>
size_t gemm_sm80_workspace_of(const GemmParams& params, Float32Product float32) {
  if (params.m == 0 || params.n == 0) return 0;
  const sm80::Arithmetic arithmetic = sm80::arithmetic_of<T>(float32);
  sm80::GemmPlan plan = sm80::choose_plan(params, arithmetic);
  return sm80::place_workspace(params, sm80::kTiles[int(arithmetic)][plan.shape], nullptr, plan);
}

template <class T>
void launch_gemm_sm80_of(const GemmParams& params, Workspace workspace, void* stream, Float32Product float32) {
  using sm80::Arithmetic;
  if constexpr (sizeof(T) == 2)
    sm80::launch_with<T, Arithmetic::k16Bit>(params, workspace, stream);
  else if (float32 == Float32Product::kTf32)
    sm80::launch_with<T, Arithmetic::kTf32>(params, workspace, stream);
  else
    sm80::launch_with<T, Arithmetic::kThreeTf32>(params, workspace, stream);
}

}  // namespace cuda_ext
