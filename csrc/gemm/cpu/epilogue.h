// The epilogues: short passes over a tile of results (rows, kPanelColumns) while it is in L1, one for each term of the
// formulas in gemm.h. A gated tile has two parts, gate and up, `part_size` apart in memory.
#pragma once

#include "gemm/cpu/activation.h"
#include "gemm/cpu/addresses.h"
#include "gemm/cpu/panels.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

template <class T>
constexpr int64_t kTileSize = int64_t(kPanelRows) * kPanelColumns<T>;

// Bias gradients are sums over blocks of this many rows, added in order, so that they do not depend on the threads.
constexpr int64_t kRowBlock = 72;
static_assert(kRowBlock % kPanelRows == 0);
inline int64_t num_row_blocks(int64_t rows) { return (rows + kRowBlock - 1) / kRowBlock; }

// The position of a tile in its matrix.
struct TilePosition {
  int64_t row;
  int64_t column;
  int64_t rows;     // <= kPanelRows
  int64_t columns;  // <= kPanelColumns
};

// tile = the part of `matrix` at `position`; elements outside the matrix are undefined.
template <class T>
void load_tile(const Operand& matrix, const TilePosition& position, T* tile) {
  with_storage<T>(matrix.dtype, [&](auto* type) {
    using Storage = std::remove_pointer_t<decltype(type)>;
    const auto* from = static_cast<const Storage*>(matrix.data) + position.row * matrix.row_stride +
                       position.column * matrix.column_stride;
    for (int64_t i = 0; i < position.rows; ++i, from += matrix.row_stride, tile += kPanelColumns<T>) {
      if (matrix.column_stride == 1) {
        for_vectors<T>(position.columns,
                       [&](int64_t j, int64_t count) { store(tile + j, load_partial(from + j, count)); });
      } else {
        for (int64_t j = 0; j < position.columns; ++j) tile[j] = to_compute(from[j * matrix.column_stride]);
      }
    }
  });
}

template <class T>
void store_tile(const Output& matrix, int64_t row_stride, const TilePosition& position, const T* tile) {
  with_storage<T>(matrix.dtype, [&](auto* type) {
    using Storage = std::remove_pointer_t<decltype(type)>;
    auto* to = static_cast<Storage*>(matrix.data) + position.row * row_stride + position.column;
    for (int64_t i = 0; i < position.rows; ++i, to += row_stride, tile += kPanelColumns<T>)
      for_vectors<T>(position.columns, [&](int64_t j, int64_t count) { store_partial(to + j, load(tile + j), count); });
  });
}

// Calls f(offset) for every vector of a tile that has a column of the matrix. The others are skipped: they may contain
// subnormal numbers by chance, on which arithmetic is a hundred times slower.
template <class T, class F>
CUDA_EXT_INLINE void for_tile(const TilePosition& position, F&& f) {
  for (int64_t row = 0; row < position.rows; ++row)
    for (int64_t column = 0; column < position.columns; column += kLanes<T>) f(row * kPanelColumns<T> + column);
}

template <class T>
void add_scaled(const Operand& matrix, T scale, const TilePosition& position, T* tile) {
  alignas(64) T term[kTileSize<T>];
  load_tile(matrix, position, term);
  for_tile<T>(position, [&](int64_t i) { store(tile + i, load(tile + i) + scale * load(term + i)); });
}

template <class T>
void add_row(const Operand& row, const TilePosition& position, T* tile) {
  alignas(64) T term[kPanelColumns<T>];
  load_tile(row, {0, position.column, 1, position.columns}, term);
  for (int64_t i = 0; i < position.rows; ++i, tile += kPanelColumns<T>)
    for (int64_t j = 0; j < position.columns; j += kLanes<T>) store(tile + j, load(tile + j) + load(term + j));
}

// Adds the tile's rows to the sums of their row block, sums (num_row_blocks, row_stride). The first tile of a row block
// overwrites them.
template <class T>
void add_column_sums(T* sums, int64_t row_stride, const TilePosition& position, const T* tile) {
  sums += position.row / kRowBlock * row_stride + position.column;
  const bool first = position.row % kRowBlock == 0;
  for_vectors<T>(position.columns, [&](int64_t j, int64_t count) {
    Vec<T> sum = first ? Vec<T>{} : load_partial(sums + j, count);
    for (int64_t i = 0; i < position.rows; ++i) sum += load(tile + i * kPanelColumns<T> + j);
    store_partial(sums + j, sum, count);
  });
}

// bias_grad (n,) = the sum of the rows of sums (rows, n), in order.
template <class T>
void sum_rows_of(const T* sums, int64_t rows, int64_t n, const Output& bias_grad) {
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    alignas(64) T tile[kPanelColumns<T>];
    for (int64_t column = begin; column < end; column += kPanelColumns<T>) {
      const int64_t columns = std::min<int64_t>(kPanelColumns<T>, end - column);
      for_vectors<T>(columns, [&](int64_t j, int64_t count) {
        Vec<T> sum{};
        for (int64_t row = 0; row < rows; ++row) sum += load_partial(sums + row * n + column + j, count);
        store(tile + j, sum);
      });
      store_tile<T>(bias_grad, n, {0, column, 1, columns}, tile);
    }
  });
}

// The forward formulas of GemmParams; the tile holds the products, alpha not yet applied.
template <class T>
struct ForwardEpilogue {
  T alpha;
  T beta;
  Activation activation;
  bool gated;
  int64_t n;
  Operand c;
  Operand bias;
  Operand residual;
  Output preact_out;
  Output out;

  void operator()(const TilePosition& position, T* tile, int64_t part_size = kTileSize<T>) const {
    for (int64_t part = 0; part < (gated ? 2 : 1); ++part) {
      T* const z = tile + part * part_size;
      const TilePosition z_position{position.row, position.column + part * n, position.rows, position.columns};
      if (alpha != T(1)) for_tile<T>(position, [&](int64_t i) { store(z + i, alpha * load(z + i)); });
      if (c.data != nullptr) add_scaled(c, beta, z_position, z);
      if (bias.data != nullptr) add_row(bias, z_position, z);
      if (preact_out.data != nullptr) store_tile(preact_out, gated ? 2 * n : n, z_position, z);
    }
    if (gated) {
      const T* const up = tile + part_size;
      with_activation<T>(activation, [&](auto f) {
        for_tile<T>(position, [&](int64_t i) { store(tile + i, f.value(load(tile + i)) * load(up + i)); });
      });
    } else if (activation != Activation::kNone) {
      with_activation<T>(activation, [&](auto f) {
        for_tile<T>(position, [&](int64_t i) { store(tile + i, f.value(load(tile + i))); });
      });
    }
    if (residual.data != nullptr) add_scaled(residual, T(1), position, tile);
    store_tile(out, n, position, tile);
  }
};

// The backward formulas of GemmParams; the tile holds g, the gradient of h = activation(z). `hidden` and `sums` may be
// absent.
template <class T>
struct BackwardEpilogue {
  T alpha;
  Activation activation;
  bool gated;
  int64_t n;
  Operand preact;
  Output out;
  Output hidden;
  T* sums;  // (num_row_blocks, n), gated: (num_row_blocks, 2n)

  void operator()(const TilePosition& position, T* tile, int64_t = 0) const {
    alignas(64) T z[kTileSize<T>];
    alignas(64) T h[kTileSize<T>];
    const TilePosition up_position{position.row, position.column + n, position.rows, position.columns};
    if (preact.data != nullptr) load_tile(preact, position, z);
    if (gated) {
      alignas(64) T up[kTileSize<T>];
      alignas(64) T grad_up[kTileSize<T>];
      load_tile(preact, up_position, up);
      with_activation<T>(activation, [&](auto f) {
        for_tile<T>(position, [&](int64_t i) {
          const auto gate = f.both(load(z + i));
          const Vec<T> grad = alpha * load(tile + i);
          store(h + i, gate.value * load(up + i));
          store(grad_up + i, grad * gate.value);
          store(tile + i, grad * load(up + i) * gate.derivative);
        });
      });
      store_gradient(up_position, grad_up);
    } else if (activation != Activation::kNone || hidden.data != nullptr || alpha != T(1)) {
      with_activation<T>(activation, [&](auto f) {
        for_tile<T>(position, [&](int64_t i) {
          const auto y = f.both(load(z + i));
          store(h + i, y.value);
          store(tile + i, alpha * load(tile + i) * y.derivative);
        });
      });
    }
    if (hidden.data != nullptr) store_tile(hidden, n, position, h);
    store_gradient(position, tile);
  }

 private:
  void store_gradient(const TilePosition& position, const T* grad) const {
    const int64_t width = gated ? 2 * n : n;
    if (out.data != nullptr) store_tile(out, width, position, grad);
    if (sums != nullptr) add_column_sums(sums, width, position, grad);
  }
};

inline bool accumulates(const GemmParams& params) {
  return params.c.data != nullptr && params.c.data == params.out.data;
}

// Whether a product needs more than a BLAS call, which can scale and accumulate.
inline bool has_epilogue(const GemmParams& params) {
  return (params.c.data != nullptr && !accumulates(params)) || params.bias.data != nullptr ||
         params.residual.data != nullptr || params.preact_out.data != nullptr || params.preact.data != nullptr ||
         params.activation != Activation::kNone;
}

// The output, if the sums of products are the results: null if there is an epilogue or a conversion.
template <class T>
T* plain_result(const GemmParams& params, int64_t batch) {
  const bool plain = !has_epilogue(params) && params.c.data == nullptr && params.alpha == 1.0 && !params.gated &&
                     params.out.dtype == DtypeOf<T>::value;
  return plain ? static_cast<T*>(params.out.data) + batch * params.m * params.n : nullptr;
}

// Makes the epilogue of a product, for each of its batches.
template <class T>
struct Epilogues {
  const GemmParams& params;
  T alpha;
  T* bias_sums;

  bool is_backward() const { return params.preact.data != nullptr; }
  int64_t width() const { return params.gated ? 2 * params.n : params.n; }
  BackwardEpilogue<T> backward() const {
    return {alpha, params.activation, params.gated, params.n, params.preact, params.out, params.hidden, bias_sums};
  }
  ForwardEpilogue<T> forward(int64_t batch) const {
    return {alpha,
            T(params.beta),
            params.activation,
            params.gated,
            params.n,
            of_batch(params, params.c, batch),
            params.bias,
            of_batch(params, params.residual, batch),
            of_batch(params.preact_out, batch, params.m * width()),
            of_batch(params.out, batch, params.m * params.n)};
  }
};

// Calls f(row_begin, row_end, column_begin, column_end) for all of a matrix (rows, n), on all threads: pieces of a row
// block, or several pieces one after the other. A piece has all columns if there are enough row blocks for the threads,
// otherwise a multiple of `multiple` of them; it is worth a thread from `elements` on.
template <class F>
void for_row_blocks(int64_t rows, int64_t n, int64_t multiple, int64_t elements, const F& f) {
  const int64_t row_blocks = num_row_blocks(rows);
  const int64_t wanted = ceil_div(num_threads(), std::max<int64_t>(1, row_blocks));
  const int64_t width = std::max<int64_t>(1, ceil_div(ceil_div(n, wanted), multiple) * multiple);
  const int64_t pieces = ceil_div(n, width);
  const int64_t grain = 1 + elements / std::max<int64_t>(1, width * std::min(rows, kRowBlock));
  parallel_for(row_blocks * pieces, grain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / pieces * kRowBlock, column = index % pieces * width;
      f(row, std::min(rows, row + kRowBlock), column, std::min(n, column + width));
    }
  });
}

// Calls epilogue(position, tile) for every tile of `matrix` (rows, n).
template <class T, class Epilogue>
void for_tiles_of(const Operand& matrix, int64_t rows, int64_t n, const Epilogue& epilogue) {
  for_row_blocks(rows, n, kPanelColumns<T>, 16384, [&](int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
    alignas(64) T tile[kTileSize<T>];
    for (int64_t row = row_begin; row < row_end; row += kPanelRows)
      for (int64_t column = begin; column < end; column += kPanelColumns<T>) {
        const TilePosition position{row, column, std::min<int64_t>(kPanelRows, row_end - row),
                                    std::min<int64_t>(kPanelColumns<T>, end - column)};
        load_tile(matrix, position, tile);
        epilogue(position, tile);
      }
  });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
