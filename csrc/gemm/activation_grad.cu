#include "gemm/activation_grad.cuh"

#include "gemm/gemm_passes.h"
#include "rt/launch.cuh"

namespace cuda_ext {

namespace {

struct Plan {
  int64_t column_tiles;
  int64_t block_rows;
  int64_t row_tiles;
  float* block_sums = nullptr;
};

Plan make_plan(const ActivationGradParams& params) {
  using namespace activation_grad;
  constexpr int64_t kBlocks = 1024;  // enough for any GPU, and fixed, so that sums are the same on all of them
  const auto ceil_div = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  Plan plan;
  plan.column_tiles = ceil_div(params.n, kTileColumns);
  const int64_t tile_rows = ceil_div(ceil_div(params.rows * plan.column_tiles, kBlocks), kTileRows);
  plan.block_rows = kTileRows * (tile_rows > 0 ? tile_rows : 1);
  plan.row_tiles = params.rows > 0 ? ceil_div(params.rows, plan.block_rows) : 1;  // at least one, to write zero sums
  return plan;
}

}  // namespace

void launch_activation_grad_cuda(const ActivationGradParams& params, const AllocateWorkspace& allocate, void* stream) {
  if (params.n == 0) return;
  Plan plan = make_plan(params);
  const int64_t width = (params.gated ? 2 : 1) * params.n;
  if (params.bias_grad.data != nullptr)
    provide_workspace("activation_grad", allocate, [&](void* data) {
      WorkspaceCursor cursor(data);
      cursor.allocate(plan.block_sums, plan.row_tiles * width);
      return cursor;
    });
  rt::launch<activation_grad::activation_grad<activation_grad::kThreads>>(
      "activation_grad",
      {.grid = {int(plan.column_tiles), int(plan.row_tiles)},
       .threads = activation_grad::kThreads,
       .shared_bytes = sizeof(activation_grad::Storage),
       .stream = stream},
      params, plan.block_rows, plan.block_sums);
  if (plan.block_sums != nullptr)
    launch_add_block_sums(plan.block_sums, plan.row_tiles, width, params.bias_grad, stream);
}

}  // namespace cuda_ext
