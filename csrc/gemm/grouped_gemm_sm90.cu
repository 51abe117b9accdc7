// Tensor maps, the rows after the last group, and the choice of the instantiation.
#include "gemm/grouped_gemm_sm90.h"

#include "gemm/groups.cuh"
#include "gemm/maps_sm90.cuh"
#include "rt/launch.cuh"

namespace cuda_ext {

namespace {

// out (rows, row_words) = 0 after the last group. Every row belongs to one thread or more.
template <int threads>
GLOBAL(threads, 1)
clear_rest(GRID_CONSTANT Groups groups, int rows, int row_words, arch::Words4* out) {
  const int64_t end = int64_t(end_of_group(groups, int(groups.count) - 1, rows)) * row_words;
  const int64_t step = int64_t(arch::grid_x()) * threads;
  for (int64_t i = end + arch::block_x() * threads + arch::thread_index(); i < int64_t(rows) * row_words; i += step)
    arch::store_global(out + i, arch::Words4{});
}

template <class T>
void launch_layout(const GemmParams& params, const sm90::GemmPlan& plan, const sm90::TensorMaps& maps, void* stream) {
  if (is_k_major_b(params)) return sm90::GroupedGemmSm90<T, true>::launch(params, plan, maps, stream);
  sm90::GroupedGemmSm90<T, false>::launch(params, plan, maps, stream);
}

}  // namespace

void launch_grouped_gemm_sm90(const GemmParams& params, const sm90::GemmPlan& plan, void* stream) {
  constexpr int kThreads = 256;
  const sm90::TensorMaps maps = sm90::make_maps(params, plan);  // before anything is launched, because it can fail
  const int row_words = int(params.n * size_of(params.out.dtype) / int64_t(sizeof(arch::Words4)));
  rt::launch<clear_rest<kThreads>>("clear_rest", {.grid = {plan.clusters}, .threads = kThreads, .stream = stream},
                                   params.groups, int(params.m), row_words,
                                   static_cast<arch::Words4*>(params.out.data));
  if (params.a.dtype == Dtype::kFloat16) return launch_layout<half_t>(params, plan, maps, stream);
  launch_layout<bfloat16_t>(params, plan, maps, stream);
}

}  // namespace cuda_ext
