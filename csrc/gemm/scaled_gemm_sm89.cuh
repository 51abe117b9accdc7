// Scaled products of FP8 on mma.sync, for GPUs with tensor cores of FP8 and without wgmma: sm_89, sm_120; and sm_100.
//
// Problem        ScaledGemmParams in scaled_gemm.h; a and b contiguous along k, lines at multiples of 16 bytes. The
//                parts that are of the GEMM for sm_80 (tiles, copies, groups of rows, epilogue) read it as GemmParams.
// Tile           (block_m, block_n), in k tiles of 128: a line of 128 bytes, and one block of scales. Sizes: kTiles in
//                tiles_sm80.h.
// Warps          (warps_m, warps_n) of them share the tile; all have the same role, and all threads take part in
//                copies.
// Pipeline       A ring of stages: a k tile of both operands and the scales of its lines, filled by cp.async, 16 bytes
//                of an operand or one scale each. A scale that is the same for all k or for several lines is copied
//                again for each, from L1.
// Barriers       sync_threads, all threads. One before the loop and one per k tile: the next tile has arrived, and the
//                previous one has been read. Before and after staging each pass of the result.
// Shared memory  (stages, (block_m + block_n) lines of 128 bytes and a scale): 99 KiB. After the loop reused for
//                (64, block_n + 8) floats of the result at a time.
// Registers      Of the tile 128 x 128, with 64 x 32 per warp: 64 sums; fragments of a k tile, 32 of b and 16 of 16
//                rows of a, each replaced after its last use; 16 of their product, twice, as one is added to the sums
//                while the next is formed; 12 scales. 213 to 219 in all.
// Promotion      The tensor cores of Ada add products of FP8 with about 22 bits (SageAttention2, arXiv 2411.10958),
//                those of Hopper with fewer. So the products of 16 rows and a k tile, four mma deep, begin at zero.
//                Times the scales of row and column, they are added to float32 registers, while the next 16 rows are
//                multiplied.
// Elsewhere      sm_100 has no such instruction: ptxas converts the operands to float16, and their products take as
//                long as those of float16. Only the smaller tile has the registers for it.
#pragma once

#include <type_traits>

#include "gemm/groups_sm80.cuh"
#include "gemm/scaled_gemm.h"

namespace cuda_ext::sm80 {

template <class A, GemmConfig config, Groups::Cut cut>
using TilesOfFloat8 = std::conditional_t<cut == Groups::Cut::kNone, Gemm<A, Arithmetic::kFloat8, true, true, config>,
                                         GroupedGemm<A, Arithmetic::kFloat8, true, config, Groups::Cut::kRows>>;

// One instantiation of the kernel: tiles, copies and epilogue of the GEMM for sm_80, whose tiles of b are as those of
// a, and what scales add to them. cut: kNone or kRows.
template <class A, class B, GemmConfig config, Groups::Cut cut>
struct ScaledGemm : TilesOfFloat8<A, config, cut> {
  using Base = TilesOfFloat8<A, config, cut>;
  static constexpr GemmConfig kConfig = config;
  static constexpr Groups::Cut kCut = cut;
  static constexpr int kLines = Base::kBlockM + Base::kBlockN;
  static_assert(Base::kBlockK == kScaleBlock && kLines <= Base::kThreads && Base::kRows > 1);

  struct Stage {
    alignas(128) unsigned char a[Base::TileA::kBytes];
    alignas(128) unsigned char b[Base::TileB::kBytes];
    float scales[kLines];  // of the rows, then of the columns
  };
  struct Storage {
    union {
      Stage stages[Base::kStages];
      alignas(16) float result[Base::kStagedRows * Base::kResultStride];  // as in Gemm
    };
  };
  static_assert(sizeof(Storage) == config.shared_bytes(sizeof(A)), "plans would count on other tiles");

  using FragmentsOfA = uint32_t[Base::kSteps][4];                      // of 16 rows and a k tile
  using FragmentsOfB = uint32_t[Base::kSteps][Base::kColumns / 2][4];  // of the warp's columns and a k tile
  using Product = float[Base::kColumns][4];                            // of 16 rows
  using ScalesOfRows = float[2];                                       // of a lane's rows among 16
  using ScalesOfColumns = float[Base::kColumns][2];                    // of a lane's columns

  // From the scale of the first of these rows or columns.
  DEVICE static void load_scales(ScalesOfRows& scales, arch::SharedAddress first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) scales[half] = arch::load_shared<float>(first + 4 * 8 * half);
  }
  DEVICE static void load_scales(ScalesOfColumns& scales, arch::SharedAddress first) {
#pragma unroll
    for (int j = 0; j < Base::kColumns; ++j) {
      const auto pair = arch::load_shared<arch::Words2>(first + 4 * 8 * j);
      scales[j][0] = arch::bits_float(pair.data[0]);
      scales[j][1] = arch::bits_float(pair.data[1]);
    }
  }

  DEVICE static void load_b(FragmentsOfB& b, arch::SharedAddress lane_b, int step) {
#pragma unroll
    for (int j = 0; j < Base::kColumns / 2; ++j) Base::TileB::load_fragment(b[step][j], lane_b, j, step);
  }

  DEVICE static void multiply(Product& product, const FragmentsOfA& a, const FragmentsOfB& b, int step) {
#pragma unroll
    for (int j = 0; j < Base::kColumns; ++j) {
      const uint32_t b_fragment[2] = {b[step][j / 2][j % 2 * 2], b[step][j / 2][j % 2 * 2 + 1]};
      arch::mma_m16n8k32<A, B>(product[j], a[step], b_fragment);
    }
  }
};

// Copies the scale of one line of the tile, one k tile after the other.
template <class Gemm>
class ScaleCopy {
 public:
  DEVICE ScaleCopy(const ScaledGemmParams& params, const GemmParams& product, const typename Gemm::Position& position) {
    const int thread = arch::thread_index();
    const bool is_row = thread < Gemm::kBlockM;
    const Scales& scales = is_row ? params.scale_a : params.scale_b;
    const int64_t line = is_row ? position.row + thread : position.column + thread - Gemm::kBlockM;
    const bool exists = thread < Gemm::kLines && line < (is_row ? position.row_end(product) : params.n);
    source_ = scales.at(exists ? line : 0, 0);
    if (Gemm::kCut == Groups::Cut::kRows && !is_row) source_ += position.batch * params.scale_b_group_stride;
    step_ = scales.block_stride;
    bytes_ = exists ? sizeof(float) : 0;
  }

  // To the scales of a stage; 0 for a line that does not exist.
  DEVICE void copy(arch::SharedAddress to) {
    if (Gemm::kLines == Gemm::kThreads || arch::thread_index() < Gemm::kLines)
      arch::cp_async<4>(to + 4 * arch::thread_index(), source_, bytes_);
    source_ += step_;
  }

 private:
  const float* source_;
  int64_t step_;
  int bytes_;
};

// Copies a stage's part of the operands and their scales, one k tile after the other.
template <class Gemm>
class StageCopy {
 public:
  DEVICE StageCopy(const ScaledGemmParams& params, const GemmParams& product, const GemmPlan& plan,
                   const typename Gemm::Position& position)
      : left_(Gemm::k_tiles_of_block(plan, position)),
        tail_(Gemm::k_tail(plan, position)),
        a_(params.a.data, plan.a, position.row, position.row_end(product), false),
        b_(params.b.data, plan.b, first_line_of_b(params, position) + position.column,
           first_line_of_b(params, position) + params.n, false),
        scales_(params, product, position) {}

  // Starts copying the next k tile, if there is one. The group may be empty, so that wait_group counts correctly.
  DEVICE void copy(arch::SharedAddress stage) {
    if (left_ > 0) {
      const int depth = left_-- == 1 ? tail_ : Gemm::kBlockK;
      a_.template copy<true>(stage + offsetof(typename Gemm::Stage, a), depth);
      b_.template copy<true>(stage + offsetof(typename Gemm::Stage, b), depth);
      scales_.copy(stage + offsetof(typename Gemm::Stage, scales));
    }
    arch::cp_async_commit();
  }

 private:
  // The matrices b of all groups are one, (groups n, k).
  DEVICE static int64_t first_line_of_b(const ScaledGemmParams& params, const typename Gemm::Position& position) {
    return Gemm::kCut == Groups::Cut::kRows ? position.batch * params.n : 0;
  }

  int left_, tail_;  // k tiles, and the depth of the last
  typename Gemm::CopyA a_;
  typename Gemm::CopyB b_;
  ScaleCopy<Gemm> scales_;
};

// sums += product times the scales of its rows and columns.
template <class Gemm>
DEVICE void promote(const typename Gemm::Product& product, const typename Gemm::ScalesOfRows& of_rows,
                    const typename Gemm::ScalesOfColumns& of_columns, typename Gemm::Product& sums) {
#pragma unroll
  for (int j = 0; j < Gemm::kColumns; ++j)
#pragma unroll
    for (int q = 0; q < 4; ++q) sums[j][q] += product[j][q] * of_rows[q / 2] * of_columns[j][q % 2];
}

// sums = the scaled products of all k tiles: the kernel's main loop.
template <class Gemm>
DEVICE void multiply_scaled_tiles(const ScaledGemmParams& params, const GemmParams& product_params,
                                  const GemmPlan& plan, const typename Gemm::Position& position,
                                  typename Gemm::Storage& shared, typename Gemm::Accumulators& sums) {
  int left = Gemm::k_tiles_of_block(plan, position);
  if (left <= 0) return;
  using arch::SharedAddress;
  using Stage = typename Gemm::Stage;
  constexpr SharedAddress kStageBytes = sizeof(Stage), kLastStage = (Gemm::kStages - 1) * kStageBytes;
  constexpr int kAhead = Gemm::kStages - 1;
  const SharedAddress stages = arch::shared_address(shared.stages);

  StageCopy<Gemm> next(params, product_params, plan, position);
  const int warp_row = Gemm::warp_row() * Gemm::kWarpM, warp_column = Gemm::warp_column() * Gemm::kWarpN;
  const SharedAddress lane_a = stages + offsetof(Stage, a) + Gemm::TileA::lane_offset(warp_row);
  const SharedAddress lane_b = stages + offsetof(Stage, b) + Gemm::TileB::lane_offset(warp_column);
  const int lane = arch::lane_index();
  const SharedAddress lane_rows = stages + offsetof(Stage, scales) + 4 * (warp_row + lane / 4);
  const SharedAddress lane_columns =
      stages + offsetof(Stage, scales) + 4 * (Gemm::kBlockM + warp_column + lane % 4 * 2);
  typename Gemm::FragmentsOfA a;
  typename Gemm::FragmentsOfB b;

  // Fill the ring, but for one stage.
#pragma unroll 1
  for (int tile = 0; tile < kAhead; ++tile) next.copy(stages + tile * kStageBytes);
  // Wait for the first stage.
  arch::cp_async_wait<kAhead - 1>();
  arch::sync_threads();
#pragma unroll
  for (int step = 0; step < Gemm::kSteps; ++step) {
    Gemm::TileA::load_fragment(a[step], lane_a, 0, step);
    Gemm::load_b(b, lane_b, step);
  }
  SharedAddress stage = 0, free_stage = kLastStage;  // the one that is multiplied, and the one before it
#pragma unroll 1
  for (; left > 0; --left) {
    typename Gemm::ScalesOfColumns of_columns;
    Gemm::load_scales(of_columns, lane_columns + stage);
#pragma unroll
    for (int i = 0; i < Gemm::kRows; ++i) {
      typename Gemm::ScalesOfRows of_rows;
      Gemm::load_scales(of_rows, lane_rows + stage + 4 * 16 * i);
      const bool last_rows = i + 1 == Gemm::kRows;
      if (last_rows) {
        // Wait for the next stage. The barrier also says that all warps have read this one.
        arch::cp_async_wait<kAhead - 1>();
        arch::sync_threads();
        free_stage = stage;
        if (left > 1) stage = stage == kLastStage ? 0 : stage + kStageBytes;
      }
      // Multiply, and replace fragments after their last use. After the last k tile nothing uses what is loaded; a
      // branch would cost registers.
      typename Gemm::Product product = {};
#pragma unroll
      for (int step = 0; step < Gemm::kSteps; ++step) {
        Gemm::multiply(product, a, b, step);
        Gemm::TileA::load_fragment(a[step], lane_a + stage, (i + 1) % Gemm::kRows, step);
        if (last_rows) Gemm::load_b(b, lane_b + stage, step);
      }
      // Start to fill the free stage.
      if (i == 0) next.copy(stages + free_stage);
      promote<Gemm>(product, of_rows, of_columns, sums[i]);
    }
  }
}

// Whether launchers choose the kernel on the architecture that is compiled for. On sm_90 they choose the one on wgmma.
template <class Gemm>
constexpr bool kIsLaunched = arch::has_float8_mma() && arch::kComputeCapability / 10 != 9 &&
                             has_float8_tile(Gemm::kConfig, arch::kComputeCapability);

// Grid: (tiles,).
template <class Gemm>
GLOBAL(Gemm::kThreads, Gemm::kMinBlocks)
scaled_gemm_sm89(GRID_CONSTANT ScaledGemmParams params, GRID_CONSTANT GemmParams product, GRID_CONSTANT GemmPlan plan) {
  if constexpr (kIsLaunched<Gemm>) {
    SHARED_STORAGE(typename Gemm::Storage, shared);
    const typename Gemm::Position position = Gemm::find_position(product, plan, arch::block_x());
    if (position.is_empty()) return;
    typename Gemm::Accumulators sums = {};
    multiply_scaled_tiles<Gemm>(params, product, plan, position, shared, sums);
    run_epilogue<Gemm>(product, position, shared.result, sums, [](const typename Gemm::Epilogue&) {});
  }
}

}  // namespace cuda_ext::sm80
