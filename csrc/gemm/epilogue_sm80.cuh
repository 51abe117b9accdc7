// What becomes of an output tile after its last product: the formulas of GemmParams, on tiles that lie in shared memory
// as floats.
//
// A thread handles kVector neighbouring columns of every kRowStep-th row, always the same columns: a warp reads and
// writes whole rows of the tile, so every sector that it touches in global memory is full, and column sums stay in
// registers until the end. Dtypes, activation and which terms there are is decided at run time, the same way in all
// threads: one epilogue for each tile shape serves all of them.
#pragma once

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "gemm/gemm.h"

namespace cuda_ext::epilogue {

constexpr int kVector = 4;  // columns: 8 bytes of a 16-bit dtype, 16 bytes of float32

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

// v = `count` columns of row `row`, from `column` on; zeros after them. Absent operands are not read.
DEVICE void read(const Operand& matrix, int64_t batch_offset, int64_t row, int64_t column, int count,
                 float (&v)[kVector]) {
  with_storage(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* from =
        static_cast<const T*>(matrix.data) + batch_offset + row * matrix.row_stride + column * matrix.column_stride;
    if (matrix.column_stride == 1 && is_vector(from, count)) {
      using Vector = arch::Words<kVector * sizeof(T) / 4>;
      const Vector words = arch::load_global<Vector>(from);
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
        v[i] = i < count ? arch::to_float(arch::load_global<T>(from + i * matrix.column_stride)) : 0.0f;
    }
  });
}

// The inverse for the matrices that are written, which have no gaps; `offset` in elements.
DEVICE void write(const Output& matrix, int64_t offset, int count, const float (&v)[kVector]) {
  with_storage(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    T* to = static_cast<T*>(matrix.data) + offset;
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
  });
}

// The activations as in activation_cpu.h, where the reasons and sources are.
struct ValueAndDerivative {
  float value;
  float derivative;
};

struct Identity {
  DEVICE static float value(float x) { return x; }
  DEVICE static ValueAndDerivative both(float x) { return {x, 1.0f}; }
};

struct Relu {
  DEVICE static float value(float x) { return x < 0.0f ? 0.0f : x; }
  DEVICE static ValueAndDerivative both(float x) { return {value(x), x <= 0.0f ? 0.0f : 1.0f}; }
};

struct Gelu {
  DEVICE static float distribution(float x) { return 0.5f + 0.5f * arch::erf(x * 0.70710678118654752f); }
  DEVICE static float value(float x) { return x * distribution(x); }
  DEVICE static ValueAndDerivative both(float x) {
    const float phi = distribution(x);
    const float density = 0.39894228040143268f * arch::exp(-0.5f * x * x);
    return {x * phi, phi + x * density};
  }
};

struct GeluTanh {
  static constexpr float kScale = 2 * 0.79788456080286536f;
  static constexpr float kCubic = 0.044715f;
  DEVICE static float exponential(float x) { return arch::exp(-kScale * x * (1.0f + kCubic * x * x)); }
  DEVICE static float value(float x) { return x * arch::fast_reciprocal(1.0f + exponential(x)); }
  DEVICE static ValueAndDerivative both(float x) {
    const float e = exponential(x);
    const float sigmoid = arch::fast_reciprocal(1.0f + e);
    const float complement = (e > 1e30f ? 1e30f : e) * sigmoid;
    const float slope = kScale * (1.0f + 3 * kCubic * x * x);
    return {x * sigmoid, sigmoid + (x * sigmoid) * complement * slope};
  }
};

struct Silu {
  DEVICE static float value(float x) { return x * arch::fast_reciprocal(1.0f + arch::exp(-x)); }
  DEVICE static ValueAndDerivative both(float x) {
    const float sigmoid = arch::fast_reciprocal(1.0f + arch::exp(-x));
    const float y = x * sigmoid;
    return {y, sigmoid + y * (1.0f - sigmoid)};
  }
};

template <class F>
DEVICE void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kNone: return f(Identity{});
    case Activation::kRelu: return f(Relu{});
    case Activation::kGelu: return f(Gelu{});
    case Activation::kGeluTanh: return f(GeluTanh{});
    case Activation::kSilu: return f(Silu{});
  }
}

// Offset in elements of the index-th of the batches, or of the reduced products; dims are innermost first.
DEVICE int64_t offset_of(int64_t index, int dims, const int64_t (&sizes)[kMaxBatchDims],
                         const int64_t (&strides)[kMaxBatchDims]) {
  int64_t elements = 0;
  for (int d = 0; d < dims; ++d) {
    elements += index % sizes[d] * strides[d];
    index /= sizes[d];
  }
  return elements;
}

// Which piece of the output a block makes: `columns` is the tile's width in the output, half of block_n if the product
// is gated, since gate and up columns then lie side by side in the tile.
struct TilePosition {
  int64_t batch;
  int64_t row;
  int64_t column;
  int columns;
};

// The epilogue of one tile, (rows, stride) floats in shared memory.
template <int threads, int rows, int stride>
class TileEpilogue {
 public:
  DEVICE TileEpilogue(const GemmParams& params, const TilePosition& at) : params_(params), at_(at) {
    const int threads_of_row = at.columns / kVector;
    row_step_ = threads / threads_of_row;
    first_row_ = arch::thread_index() / threads_of_row;
    local_column_ = arch::thread_index() % threads_of_row * kVector;
    column_ = at.column + local_column_;
    const int64_t left = params.n - column_;
    count_ = left <= 0 ? 0 : left < kVector ? int(left) : kVector;
    parts_ = params.gated ? 2 : 1;
    offset_c_ = offset_of(at.batch, params.batch_dims, params.batch_sizes, params.c.batch_strides);
    offset_residual_ = offset_of(at.batch, params.batch_dims, params.batch_sizes, params.residual.batch_strides);
    if (params.bias.data != nullptr && count_ > 0) {
      read(params.bias, 0, 0, column_, count_, bias_[0]);
      if (params.gated) read(params.bias, 0, 0, column_ + params.n, count_, bias_[1]);
    }
  }

  DEVICE void run(const float* tile) {
    if (count_ == 0) return;
    const float* products = tile + first_row_ * stride + local_column_;
    const int64_t left = params_.m - at_.row;
    const int end = left < rows ? int(left) : rows;
    for (int i = first_row_; i < end; i += row_step_, products += row_step_ * stride) {
      if (params_.preact.data != nullptr)
        backward(at_.row + i, products);
      else
        forward(at_.row + i, products);
    }
  }

  // The sums of the tile's columns, in an order that depends on nothing but the shape. `shared` has room for
  // threads * 2 * kVector floats and is not in use; `sums`: (width,) of this row of tiles.
  DEVICE void store_sums(float* shared, float* sums) const {
    const int width = parts_ * at_.columns;
    for (int part = 0; part < parts_; ++part)
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        shared[first_row_ * width + part * at_.columns + local_column_ + i] = part == 0 ? sums_[0][i] : sums_[1][i];
    arch::sync_threads();
    for (int j = arch::thread_index(); j < width; j += threads) {
      float sum = 0.0f;
      for (int i = 0; i < row_step_; ++i) sum += shared[i * width + j];
      const int64_t column = at_.column + j % at_.columns;
      if (column < params_.n) sums[j / at_.columns * params_.n + column] = sum;
    }
  }

 private:
  // z = alpha * products + beta * c + bias, saved if wanted.
  DEVICE void make_preact(int64_t row, int part, const float* products, const float (&bias)[kVector],
                          float (&z)[kVector]) const {
    load_products(products, z);
    if (params_.c.data != nullptr) {
      float term[kVector];
      read(params_.c, offset_c_, row, column_, count_, term);
      const float beta = float(params_.beta);
#pragma unroll
      for (int i = 0; i < kVector; ++i) z[i] += beta * term[i];
    }
    if (params_.bias.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) z[i] += bias[i];
    }
    if (params_.preact_out.data != nullptr)
      write(params_.preact_out, (at_.batch * params_.m + row) * (parts_ * params_.n) + part * params_.n + column_,
            count_, z);
  }

  DEVICE void forward(int64_t row, const float* products) const {
    float y[kVector];
    make_preact(row, 0, products, bias_[0], y);
    if (params_.gated) {
      float up[kVector];
      make_preact(row, 1, products + at_.columns, bias_[1], up);
      with_activation(params_.activation, [&](auto f) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) y[i] = f.value(y[i]) * up[i];
      });
    } else {
      with_activation(params_.activation, [&](auto f) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) y[i] = f.value(y[i]);
      });
    }
    if (params_.residual.data != nullptr) {
      float term[kVector];
      read(params_.residual, offset_residual_, row, column_, count_, term);
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] += term[i];
    }
    write(params_.out, (at_.batch * params_.m + row) * params_.n + column_, count_, y);
  }

  DEVICE void backward(int64_t row, const float* products) {
    float grad[kVector], z[kVector], hidden[kVector];
    load_products(products, grad);
    read(params_.preact, 0, row, column_, count_, z);
    if (params_.gated) {
      float up[kVector], grad_up[kVector];
      read(params_.preact, 0, row, column_ + params_.n, count_, up);
      with_activation(params_.activation, [&](auto f) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const ValueAndDerivative gate = f.both(z[i]);
          hidden[i] = gate.value * up[i];
          grad_up[i] = grad[i] * gate.value;
          grad[i] *= up[i] * gate.derivative;
        }
      });
      finish(row, 1, grad_up, sums_[1]);
    } else {
      with_activation(params_.activation, [&](auto f) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const ValueAndDerivative y = f.both(z[i]);
          hidden[i] = y.value;
          grad[i] *= y.derivative;
        }
      });
    }
    if (params_.hidden.data != nullptr) write(params_.hidden, row * params_.n + column_, count_, hidden);
    finish(row, 0, grad, sums_[0]);
  }

  DEVICE void finish(int64_t row, int part, const float (&grad)[kVector], float (&sums)[kVector]) const {
    if (params_.out.data != nullptr)
      write(params_.out, row * (parts_ * params_.n) + part * params_.n + column_, count_, grad);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += grad[i];
  }

  DEVICE void load_products(const float* products, float (&v)[kVector]) const {
    const float alpha = float(params_.alpha);
    const arch::Words4 words = arch::load_shared<arch::Words4>(arch::shared_address(products));
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] = alpha * arch::bits_float(words.data[i]);
  }

  const GemmParams& params_;
  const TilePosition at_;
  int row_step_;      // rows that the block handles at once
  int first_row_;     // this thread's
  int local_column_;  // this thread's first, in the tile
  int64_t column_;    // and in the output
  int count_;         // of this thread's columns that exist
  int parts_;
  int64_t offset_c_;
  int64_t offset_residual_;
  float bias_[2][kVector] = {};
  float sums_[2][kVector] = {};  // backward: of the columns of out; gated: of gate and up
};

}  // namespace cuda_ext::epilogue
