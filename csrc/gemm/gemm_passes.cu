#include "gemm/gemm_passes.h"

#include "gemm/activation.cuh"
#include "gemm/groups.cuh"
#include "rt/launch.cuh"

namespace cuda_ext {

template <int threads>
GLOBAL(threads, 1)
clear_words(uint32_t* words, int count) {
  const int i = arch::block_x() * threads + arch::thread_index();
  if (i < count) arch::store_global(words + i, 0u);
}

template <int threads>
GLOBAL(threads, 1)
clear_rest(GRID_CONSTANT Groups groups, int rows, int64_t row_words, arch::Words4* out) {
  const int64_t first = end_of_group(groups, int(groups.count) - 1, rows) * row_words;
  const int64_t step = int64_t(arch::grid_x()) * threads;
  for (int64_t i = first + arch::block_x() * threads + arch::thread_index(); i < rows * row_words; i += step)
    arch::store_global(out + i, arch::Words4{});
}

// out (width,) = the column sums of block_sums (blocks, width). A thread block has 32 columns; its warp w adds rows w,
// w + warps, ...
template <int warps>
GLOBAL(warps * 32, 1)
add_block_sums(const float* block_sums, int64_t blocks, int64_t width, GRID_CONSTANT Output out) {
  struct Storage {
    float sums[warps][arch::kWarpSize];
  };
  SHARED_STORAGE(Storage, shared);
  const int lane = arch::lane_index(), warp = arch::thread_index() / arch::kWarpSize;
  const int64_t column = int64_t(arch::block_x()) * arch::kWarpSize + lane;
  float sum = 0.0f;
  if (column < width)
    for (int64_t block = warp; block < blocks; block += warps)
      sum += arch::load_global<float>(block_sums + block * width + column);
  arch::store_shared(arch::shared_address(&shared.sums[warp][lane]), sum);
  arch::sync_threads();
  if (warp > 0 || column >= width) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < warps; ++i) sum += arch::load_shared<float>(arch::shared_address(&shared.sums[i][lane]));
  epilogue::with_storage(out.dtype, [&](auto tag) {
    using T = decltype(tag);
    arch::store_global(static_cast<T*>(out.data) + column, arch::from_float<T>(sum));
  });
}

void launch_add_block_sums(const float* block_sums, int64_t blocks, int64_t width, const Output& out, void* stream) {
  constexpr int kWarps = 8;
  const int grid = int((width + arch::kWarpSize - 1) / arch::kWarpSize);
  rt::launch<add_block_sums<kWarps>>("add_block_sums",
                                     {.grid = {grid},
                                      .threads = kWarps * arch::kWarpSize,
                                      .shared_bytes = kWarps * arch::kWarpSize * sizeof(float),
                                      .stream = stream},
                                     block_sums, blocks, width, out);
}

void launch_clear_rest(const Groups& groups, int64_t rows, int64_t row_bytes, void* out, void* stream) {
  constexpr int kThreads = 256, kBlocks = 128;  // the rows are rarely many
  rt::launch<clear_rest<kThreads>>("clear_rest", {.grid = {kBlocks}, .threads = kThreads, .stream = stream}, groups,
                                   int(rows), row_bytes / int64_t(sizeof(arch::Words4)),
                                   static_cast<arch::Words4*>(out));
}

void launch_clear_words(uint32_t* words, int count, void* stream) {
  constexpr int kThreads = 256;
  rt::launch<clear_words<kThreads>>(
      "clear_words", {.grid = {(count + kThreads - 1) / kThreads}, .threads = kThreads, .stream = stream}, words,
      count);
}

}  // namespace cuda_ext
