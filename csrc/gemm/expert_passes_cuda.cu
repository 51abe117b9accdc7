// Launches the kernels of expert_passes.cuh.
#include "gemm/expert_passes.cuh"
#include "gemm/problem.h"
#include "rt/launch.cuh"

namespace cuda_ext {

namespace {

using namespace expert_passes;

template <class F>
void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat16: return f(half_t{});
    case Dtype::kBFloat16: return f(bfloat16_t{});
    default: return f(float{});
  }
}

rt::LaunchConfig config_for(int warps, void* stream) {
  return {.grid = {(warps + kWarps - 1) / kWarps}, .threads = kThreads, .stream = stream};
}

}  // namespace

void launch_combine_cuda(const CombineParams& params, void* stream) {
  with_dtype(params.results.dtype, [&](auto tag) {
    using T = decltype(tag);
    const int column_tiles = int(ceil_div(params.n, RowVector<T>::kWarpColumns));
    const int tiles = checked_count(params.tokens * column_tiles, "parts of 512 bytes");
    rt::launch<combine_rows<T>>("combine_rows", config_for(tiles, stream), params, column_tiles);
  });
}

void launch_gate_grad_cuda(const GateGradParams& params, void* stream) {
  const int rows = checked_count(params.rows, "rows");
  with_dtype(params.product.dtype,
             [&](auto tag) { rt::launch<gate_grad<decltype(tag)>>("gate_grad", config_for(rows, stream), params); });
}

}  // namespace cuda_ext
