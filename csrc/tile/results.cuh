// Stores of a product's result from registers, where WarpTiles distributes it over threads.
#pragma once

#include "tile/products.cuh"

namespace cuda_ext::tile {

// A tile of float32 sums in the workspace, accessed only by these functions: the first four elements of all threads,
// then their next four, and so on. If the device has vector reductions, the four of a thread are adjacent. Otherwise
// each instruction accesses one element per lane, so those of a warp's lanes are adjacent.
template <class Tiles>
class WorkspaceTile {
 public:
  using Accumulators = typename Tiles::Accumulators;

  DEVICE explicit WorkspaceTile(float* tile, int thread = arch::thread_index())
      : first_(tile + thread * (arch::has_vector_reductions() ? 4 : 1)) {}

  // tile = factor * x
  DEVICE void store(const Accumulators& x, float factor) const {
    for_fours([&](float* to, int m, int n) {
      const float y[4] = {factor * x[m][n][0], factor * x[m][n][1], factor * x[m][n][2], factor * x[m][n][3]};
      if (arch::has_vector_reductions())
        arch::store_global(to, arch::Words4{{arch::float_bits(y[0]), arch::float_bits(y[1]), arch::float_bits(y[2]),
                                             arch::float_bits(y[3])}});
      else
        for_scalars([&](int q) { arch::store_global(to + q * Tiles::kThreads, y[q]); });
    });
  }
  // tile += x, atomically per element.
  DEVICE void reduce_add(const Accumulators& x) const {
    for_fours([&](float* to, int m, int n) {
      if (arch::has_vector_reductions())
        arch::reduce_add(to, x[m][n]);
      else
        for_scalars([&](int q) { arch::reduce_add(to + q * Tiles::kThreads, x[m][n][q]); });
    });
  }
  // x += tile
  DEVICE void add_to(Accumulators& x) const {
    for_fours([&](const float* from, int m, int n) {
      if (arch::has_vector_reductions()) {
        const auto words = arch::load_global<arch::Words4>(from);
        for_scalars([&](int q) { x[m][n][q] += arch::bits_float(words.data[q]); });
      } else {
        for_scalars([&](int q) { x[m][n][q] += arch::load_global<float>(from + q * Tiles::kThreads); });
      }
    });
  }

 private:
  template <class F>
  DEVICE void for_fours(const F& f) const {
    float* next = first_;
#pragma unroll
    for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < Tiles::kColumnTiles; ++n, next += 4 * Tiles::kThreads) f(next, m, n);
  }
  template <class F>
  DEVICE static void for_scalars(const F& f) {
#pragma unroll
    for (int q = 0; q < 4; ++q) f(q);
  }

  float* first_;  // of this thread
};

// Stores factor * x in a tile in shared memory, in the storage type.
template <class Tiles, class Tile>
DEVICE void stage(arch::SharedAddress tile, const typename Tiles::Accumulators& x, float factor) {
  // All addresses are derived from one, by constants, where they are used: there are no registers to keep them.
  constexpr int kElements = Tile::kElements;
  const int thread = arch::opaque_thread_index();
  const arch::SharedAddress first = tile + Tile::offset(Tiles::row(0, 0, thread), Tiles::column(thread) / kElements) +
                                    thread % 4 * 2 % kElements * int(sizeof(typename Tile::Element));
#pragma unroll
  for (int n = 0; n < Tiles::kColumnTiles; ++n) {
    constexpr int kLineBytes = Tile::kLineBytes;
    const int chunk = Tiles::column_step(n) / kElements;
    const arch::SharedAddress to = (first ^ chunk % Tile::kGroup * 16) + chunk / Tile::kGroup * Tile::kGroupBytes;
#pragma unroll
    for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        arch::store_shared(
            to + (m * 16 + half * 8) * kLineBytes,
            arch::pair_of<typename Tile::Element>(factor * x[m][n][2 * half], factor * x[m][n][2 * half + 1]));
  }
}

// Writes factor * x as float32: the first `count` rows, `width` columns of each, to lines that are `stride` elements
// apart. Four lanes write 32 adjacent bytes.
template <class Tiles>
DEVICE void write_float32(const typename Tiles::Accumulators& x, float factor, float* lines, int64_t stride, int count,
                          int width, int thread = arch::thread_index()) {
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Tiles::row(m, half, thread);
      if (row >= count) continue;
      float* const to = lines + row * stride;
#pragma unroll
      for (int n = 0; n < Tiles::kColumnTiles; ++n)
        if (const int column = Tiles::column(thread) + Tiles::column_step(n); column < width)
          arch::store_global(to + column, arch::Words2{{arch::float_bits(factor * x[m][n][2 * half]),
                                                        arch::float_bits(factor * x[m][n][2 * half + 1])}});
    }
}

// Writes the first `count` lines of a tile, `width` elements of each, to lines that are `stride` elements apart.
template <class Tile, int threads>
DEVICE void write_lines(arch::SharedAddress tile, typename Tile::Element* lines, int64_t stride, int count, int width) {
#pragma unroll 1
  for (int index = arch::thread_index(); index < Tile::kLines * Tile::kChunks; index += threads) {
    const int line = index / Tile::kChunks, chunk = index % Tile::kChunks;
    if (line >= count || chunk * Tile::kElements >= width) continue;
    arch::store_global(lines + line * stride + chunk * Tile::kElements,
                       arch::load_shared<arch::Words4>(tile + Tile::offset(line, chunk)));
  }
}

}  // namespace cuda_ext::tile
