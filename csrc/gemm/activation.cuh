// Pieces of matrices in registers, and the activations applied to them, for the epilogue of a product and the gradient
// of an activation.
//
// A thread has kVector adjacent columns of a few rows: as many as its registers permit, because that is the number of
// loads in flight. Dtypes, activations and optional terms are selected at run time, uniformly across threads, so that
// one kernel serves all combinations.
#pragma once

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "gemm/gemm.h"

namespace cuda_ext::epilogue {

constexpr int kVector = 4;  // columns: 8 bytes of a 16-bit dtype, 16 bytes of float32

template <int rows>
struct Piece {
  float values[rows][kVector];
};

// The position of a piece. Elements outside the matrix are read as 0 and not written.
template <int rows>
struct PiecePosition {
  int64_t row[rows];
  bool exists[rows];
  int64_t column;
  int count;  // of its columns that are inside the matrix
};

template <int rows, class F>
DEVICE void for_elements(F&& f) {
#pragma unroll
  for (int r = 0; r < rows; ++r)
#pragma unroll
    for (int i = 0; i < kVector; ++i) f(r, i);
}

template <class F>
DEVICE void with_storage(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat16: return f(half_t{});
    case Dtype::kBFloat16: return f(bfloat16_t{});
    default: return f(float{});
  }
}

template <class T>
DEVICE bool is_vector(const T* pointer, int count) {
  return count == kVector && reinterpret_cast<uintptr_t>(pointer) % (kVector * sizeof(T)) == 0;
}

// v = `count` elements, `stride` apart. Not through the read-only path, because outputs may be updated in place.
template <class T>
DEVICE void read_vector(const T* from, int64_t stride, int count, float (&v)[kVector]) {
  if (stride == 1 && is_vector(from, count)) {
    const auto words = arch::load_global_streaming<arch::Words<kVector * sizeof(T) / 4>>(from);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if constexpr (sizeof(T) == 4)
        v[i] = arch::bits_float(words.data[i]);
      else
        v[i] = i % 2 == 0 ? arch::unpack_low<T>(words.data[i / 2]) : arch::unpack_high<T>(words.data[i / 2]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      v[i] = i < count ? arch::to_float(arch::load_global_streaming<T>(from + i * stride)) : 0.0f;
  }
}

template <class T>
DEVICE void write_vector(T* to, int count, const float (&v)[kVector]) {
  if (is_vector(to, count)) {
    arch::Words<kVector * sizeof(T) / 4> words;
#pragma unroll
    for (int i = 0; i < int(kVector * sizeof(T) / 4); ++i) {
      if constexpr (sizeof(T) == 4)
        words.data[i] = arch::float_bits(v[i]);
      else
        words.data[i] = arch::pack<T>(v[2 * i], v[2 * i + 1]);
    }
    arch::store_global(to, words);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (i < count) arch::store_global(to + i, arch::from_float<T>(v[i]));
  }
}

// piece = `matrix` at `position`, shifted by `right` columns; the batch begins at element `batch_offset`.
template <int rows>
DEVICE void read(const Operand& matrix, int64_t batch_offset, const PiecePosition<rows>& position, int64_t right,
                 Piece<rows>& piece) {
  with_storage(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* const from =
        static_cast<const T*>(matrix.data) + batch_offset + (position.column + right) * matrix.column_stride;
    // Many rows are loaded before the first is converted, which waits for it. Epilogues have few, and no registers for
    // that beside their sums.
    if constexpr (rows > 2)
      if (matrix.column_stride == 1 && matrix.row_stride % kVector == 0 && is_vector(from, position.count)) {
        using Vector = arch::Words<kVector * sizeof(T) / 4>;
        Vector words[rows] = {};
#pragma unroll
        for (int r = 0; r < rows; ++r)
          if (position.exists[r])
            words[r] = arch::load_global_streaming<Vector>(from + position.row[r] * matrix.row_stride);
#pragma unroll
        for (int r = 0; r < rows; ++r) arch::unpack<T>(words[r], piece.values[r]);
        return;
      }
#pragma unroll
    for (int r = 0; r < rows; ++r)
      read_vector(from + position.row[r] * matrix.row_stride, matrix.column_stride,
                  position.exists[r] ? position.count : 0, piece.values[r]);
  });
}

// The inverse of `read`, for rows of `width` elements.
template <int rows>
DEVICE void write(const Output& matrix, int64_t batch_offset, int64_t width, const PiecePosition<rows>& position,
                  int64_t right, const Piece<rows>& piece) {
  with_storage(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    T* const to = static_cast<T*>(matrix.data) + batch_offset + position.column + right;
#pragma unroll
    for (int r = 0; r < rows; ++r)
      write_vector(to + position.row[r] * width, position.exists[r] ? position.count : 0, piece.values[r]);
  });
}

// The arithmetic of activations (gemm/activation.h).
struct DeviceMath {
  using Value = float;
  using Scalar = float;
  using Constant = float;
  DEVICE static float broadcast(float x) { return x; }
  DEVICE static float exp(float x) { return arch::exp(x); }
  DEVICE static float erf(float x) { return arch::erf(x); }
  DEVICE static float reciprocal(float x) { return arch::fast_reciprocal(x); }
  DEVICE static float divide(float x, float y) { return x * arch::fast_reciprocal(y); }
};

template <class F>
DEVICE void with_activation(Activation activation, F&& f) {
  activations::with_formula<DeviceMath>(activation, f);
}

// The gradient through h = activation(z); gated: h = activation(gate) * up, z = (gate, up).
struct ActivationBackward {
  Activation activation;
  bool gated;
  int64_t n;                  // columns of h
  const Operand& preact;      // z; may be absent if there is no activation
  const Output& grad_preact;  // may be absent
  const Output& hidden;       // h; may be absent

  // `grad` is the gradient of h at `position`. Stores the gradient of z and adds it to the column sums (gated: of gate
  // and up).
  template <int rows>
  DEVICE void run(const PiecePosition<rows>& position, Piece<rows>& grad, float (&sums)[2][kVector]) const {
    Piece<rows> z, h;
    if (preact.data != nullptr)
      read(preact, 0, position, 0, z);
    else
      z = {};
    if (gated) {
      Piece<rows> up, grad_up;
      read(preact, 0, position, n, up);
      with_activation(activation, [&](auto f) {
        for_elements<rows>([&](int r, int i) {
          const auto gate = f.both(z.values[r][i]);
          h.values[r][i] = gate.value * up.values[r][i];
          grad_up.values[r][i] = grad.values[r][i] * gate.value;
          grad.values[r][i] *= up.values[r][i] * gate.derivative;
        });
      });
      store_gradient(position, 1, grad_up, sums[1]);
    } else {
      with_activation(activation, [&](auto f) {
        for_elements<rows>([&](int r, int i) {
          const auto y = f.both(z.values[r][i]);
          h.values[r][i] = y.value;
          grad.values[r][i] *= y.derivative;
        });
      });
    }
    if (hidden.data != nullptr) write(hidden, 0, n, position, 0, h);
    store_gradient(position, 0, grad, sums[0]);
  }

 private:
  template <int rows>
  DEVICE void store_gradient(const PiecePosition<rows>& position, int part, const Piece<rows>& grad,
                             float (&sums)[kVector]) const {
    if (grad_preact.data != nullptr) write(grad_preact, 0, (gated ? 2 : 1) * n, position, part * n, grad);
    for_elements<rows>([&](int r, int i) {
      if (position.exists[r]) sums[i] += grad.values[r][i];
    });
  }
};

}  // namespace cuda_ext::epilogue
