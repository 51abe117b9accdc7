// The conversion of a matrix to FP8 with scales.
#pragma once

#include "base/philox.h"
#include "base/workspace.h"
#include "gemm/scaled_gemm.h"

namespace cuda_ext {

// Which elements share a scale. Lines are the rows of the matrix that is written.
enum class ScaleShape : uint8_t {
  kAll,
  kLine,
  kLineBlock,    // kScaleBlock elements of a line
  kSquareBlock,  // of kScaleBlock lines, too
};

// A matrix in FP8 and its scales. Absent if data is null.
struct QuantizedMatrix {
  void* data = nullptr;     // (lines, elements of a line), contiguous along a line
  int64_t line_stride = 0;  // a multiple of 16; kernels may write between lines
  float* scales = nullptr;  // (1 or lines or blocks of lines, 1 or blocks of elements)
  int64_t scale_line_stride = 0;
  int64_t scale_block_stride = 0;
  uint64_t rng_offset = 0;  // added to that of the call: matrices of a call are rounded by different numbers
};

// The matrix that is quantised, of x: activation(x) or, gated, where x is (gate, up) side by side, activation(gate) *
// up; in float32, rounded to the dtype of x.
struct QuantizedFunction {
  Activation activation = Activation::kNone;
  bool gated = false;
  int64_t up_column = 0;  // of x, where up begins

  bool is_identity() const { return activation == Activation::kNone && !gated; }
};

// along_rows = function(input) and along_columns = its transpose, each divided by its own scales and rounded to nearest
// even:
//   scale = max(largest finite magnitude of the block / largest number of the format, 2^-126), 1 if all are zeros;
//           with power_of_two rounded up to one
//   out   = element * (1 / scale), at most the largest number of the format, also if infinite; NaN stays NaN
// With `stochastic`, an element that is a fraction f of the way from one number of the format to the next larger one in
// magnitude becomes that with probability f: if the element's 32 random bits / 2^32 >= 1 - f. (Of subnormals, f is cut
// to 28 bits.) The bits are the words of Philox, of which four adjacent elements of a line share a counter.
struct QuantizeParams {
  int64_t rows = 0;  // at least 1, as columns
  int64_t columns = 0;
  ScaleShape shape = ScaleShape::kAll;
  bool power_of_two = false;
  bool stochastic = false;
  RngSource rng;
  Operand input;  // x, contiguous along a row
  QuantizedFunction function;
  Dtype dtype = Dtype::kFloat8E4M3;           // or kFloat8E5M2
  QuantizedMatrix along_rows, along_columns;  // (rows, columns), (columns, rows)

  // Whether scales depend on more than a tile of kScaleBlock x kScaleBlock elements.
  HOST_DEVICE bool has_long_blocks() const { return shape == ScaleShape::kAll || shape == ScaleShape::kLine; }

  // The counter of an element of a line of `elements`, whose word is that of element % 4.
  static HOST_DEVICE uint64_t rng_counter(int64_t line, int64_t elements, int64_t element) {
    return uint64_t(line) * uint64_t((elements + 3) / 4) + uint64_t(element / 4);
  }

  // Where the scale of a line in a block of kScaleBlock elements is stored; null if that of another one is the same.
  HOST_DEVICE float* place_of_scale(const QuantizedMatrix& out, int64_t line, int64_t block) const {
    const bool is_first_line = shape == ScaleShape::kAll ? line == 0 : line % kScaleBlock == 0;
    const bool own_line = shape == ScaleShape::kLine || shape == ScaleShape::kLineBlock;
    if (!(own_line || is_first_line) || (has_long_blocks() && block > 0)) return nullptr;
    return out.scales + (own_line ? line : line / kScaleBlock) * out.scale_line_stride + block * out.scale_block_stride;
  }
};

CUDA_EXT_CPU_LAUNCHER(launch_quantize, QuantizeParams)

// On a CUDA device; `stream` is an rt::Stream.
void launch_quantize_cuda(const QuantizeParams& params, const AllocateWorkspace& allocate, void* stream);

}  // namespace cuda_ext
