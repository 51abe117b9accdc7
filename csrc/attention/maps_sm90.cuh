// The tensor maps of attention on wgmma: kernel parameters, made for each launch.
#pragma once

#include "attention/attention.h"
#include "rt/tensor_map.cuh"

namespace cuda_ext::attention::sm90 {

// A (batch, seq, heads, dim) tensor: its map has dims (dim, heads of a group, seq, groups, batch). Coordinates of
// broadcast dims are always 0.
struct HeadsMap {
  arch::TensorMap map;
  int group_step, batch_step;  // 0: broadcast
};

// `group` heads of `lines` rows make up a box; columns of a box: 64.
inline HeadsMap heads_map(const char* kernel, const AttentionParams& p, const HeadsView& view, int64_t dim,
                          int64_t rows, int64_t heads, int group, int lines) {
  constexpr int kSize = 2, kColumns = 64;
  const bool batched = p.batch > 1 && view.batch_stride != 0, headed = heads > group && view.head_stride != 0;
  const auto stride = [](int64_t size, int64_t elements) { return size > 1 ? elements * kSize : int64_t(16); };
  const int64_t groups = headed ? heads / group : 1, batches = batched ? p.batch : 1;
  return {rt::make_tensor_map(
              kernel, {.data = view.data,
                       .element = p.dtype == Dtype::kFloat16 ? rt::Element::kFloat16 : rt::Element::kBFloat16,
                       .rank = 5,
                       .sizes = {dim, group, rows, groups, batches},
                       .strides = {stride(group, view.head_stride), stride(rows, view.seq_stride),
                                   stride(groups, view.head_stride * group), stride(batches, view.batch_stride)},
                       .box = {kColumns, group, lines / group, 1, 1},
                       .swizzle_bytes = kColumns * kSize}),
          headed, batched};
}

}  // namespace cuda_ext::attention::sm90
