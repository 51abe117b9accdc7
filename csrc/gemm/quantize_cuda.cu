// Launches the kernels of quantize.cuh.
#include "gemm/gemm_passes.h"
#include "gemm/problem.h"
#include "gemm/quantize.cuh"
#include "rt/launch.cuh"

namespace cuda_ext {

namespace {

template <class In, class Out>
void launch_tiles(const rt::LaunchConfig& config, const QuantizeParams& params, int column_tiles,
                  const quantize::Maxima& maxima) {
  using namespace quantize;
  constexpr const char* kName = "quantize_tile";
  if (!params.function.is_identity())
    rt::launch<quantize_tile<In, Out, Rounding::kNearest, true>>(kName, config, params, column_tiles, maxima);
  else if (params.stochastic)
    rt::launch<quantize_tile<In, Out, Rounding::kStochastic, false>>(kName, config, params, column_tiles, maxima);
  else
    rt::launch<quantize_tile<In, Out, Rounding::kNearest, false>>(kName, config, params, column_tiles, maxima);
}

template <class In>
void launch_input(const QuantizeParams& params, const AllocateWorkspace& allocate, void* stream) {
  using namespace quantize;
  const int column_tiles = int(ceil_div(params.columns, kTile));
  const int tiles = checked_count(ceil_div(params.rows, kTile) * column_tiles, "tiles of 128 x 128");
  const rt::LaunchConfig config{
      .grid = {tiles}, .threads = kThreads, .shared_bytes = sizeof(Storage), .stream = stream};
  Maxima maxima;
  if (params.has_long_blocks()) {
    const bool is_all = params.shape == ScaleShape::kAll;
    const int64_t rows = is_all ? 1 : params.along_rows.data != nullptr ? params.rows : 0;
    const int64_t columns = !is_all && params.along_columns.data != nullptr ? params.columns : 0;
    provide_workspace("quantize_fp8", allocate, [&](void* data) {
      WorkspaceCursor cursor(data);
      maxima = {};
      cursor.allocate(maxima.rows, rows + columns);
      return cursor;
    });
    launch_clear_words(maxima.rows, checked_count(rows + columns, "lines"), stream);
    if (columns > 0) maxima.columns = maxima.rows + rows;
    if (rows == 0) maxima.rows = nullptr;
    constexpr const char* kName = "largest_magnitudes";
    if (params.function.is_identity())
      rt::launch<largest_magnitudes<In, false>>(kName, config, params, column_tiles, maxima);
    else
      rt::launch<largest_magnitudes<In, true>>(kName, config, params, column_tiles, maxima);
  }
  if (params.dtype == Dtype::kFloat8E4M3)
    launch_tiles<In, float8_e4m3_t>(config, params, column_tiles, maxima);
  else
    launch_tiles<In, float8_e5m2_t>(config, params, column_tiles, maxima);
}

}  // namespace

void launch_quantize_cuda(const QuantizeParams& params, const AllocateWorkspace& allocate, void* stream) {
  switch (params.input.dtype) {
    case Dtype::kFloat32: return launch_input<float>(params, allocate, stream);
    case Dtype::kFloat16: return launch_input<half_t>(params, allocate, stream);
    default: return launch_input<bfloat16_t>(params, allocate, stream);
  }
}

}  // namespace cuda_ext
