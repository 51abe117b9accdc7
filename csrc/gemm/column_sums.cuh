// Column sums in an order that depends only on the shape: each thread adds its rows, each block its threads, and a last
// small kernel the blocks.
#pragma once

#include "gemm/activation.cuh"

namespace cuda_ext::epilogue {

// The threads that share a tile: all threads of a block.
template <int threads>
struct BlockThreads {
  static constexpr int kThreads = threads;
  DEVICE static int index() { return arch::thread_index(); }
  DEVICE static void sync(Site site = {}) { arch::sync_threads(site); }
};

// How these threads share the columns of the tile: kVector columns per thread, `rows` rows at once.
struct ThreadColumns {
  int columns;
  int row;  // of this thread, in [0, rows)
  int rows;
  int column;  // this thread's first

  DEVICE ThreadColumns(int threads, int thread, int tile_columns) : columns(tile_columns) {
    const int threads_of_row = columns / kVector;
    rows = threads / threads_of_row;
    row = thread / threads_of_row;
    column = thread % threads_of_row * kVector;
  }
};

// sums (parts, n) at columns [first, first + columns) = the total of thread_sums over Threads. `shared` has space for
// kThreads * parts * kVector floats, which must not be in use.
template <class Threads>
DEVICE void store_block_sums(const float (&thread_sums)[2][kVector], int parts, const ThreadColumns& mine,
                             int64_t first, int64_t n, float* shared, float* sums) {
  const int width = parts * mine.columns;
#pragma unroll
  for (int part = 0; part < 2; ++part)
    if (part < parts) {
      arch::Words4 words;
#pragma unroll
      for (int i = 0; i < kVector; ++i) words.data[i] = arch::float_bits(thread_sums[part][i]);
      arch::store_shared(arch::shared_address(shared + mine.row * width + part * mine.columns + mine.column), words);
    }
  Threads::sync();
  for (int j = Threads::index(); j < width; j += Threads::kThreads) {
    float sum = 0.0f;
    for (int i = 0; i < mine.rows; ++i) sum += arch::load_shared<float>(arch::shared_address(shared + i * width + j));
    const int64_t column = first + j % mine.columns;
    if (column < n) arch::store_global(sums + j / mine.columns * n + column, sum);
  }
}

}  // namespace cuda_ext::epilogue
