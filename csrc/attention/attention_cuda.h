// Attention on CUDA devices: the kernels on wgmma where they can run, else those on mma.sync.
#pragma once

#include <string>

#include "attention/attention_plan.h"
#include "attention/head_dims.h"
#include "base/device.h"
#include "base/workspace.h"

namespace cuda_ext {

// Whether there are kernels for a dtype and head dims, on SMs of so much shared memory; head dims that are not
// multiples of 8 are padded.
inline bool attention_cuda_runs(Dtype dtype, int64_t dim, int64_t dim_v, bool backward, int64_t sm_bytes) {
  return dtype != Dtype::kFloat64 && attention::has_kernel(dtype == Dtype::kFloat32, backward, sm_bytes, dim, dim_v);
}

// Whether the kernels can read a view in place: rows must be aligned to 16 bytes.
inline bool attention_cuda_reads(const HeadsView& view) {
  constexpr int64_t kBytes = 16, kElements = 8;
  return reinterpret_cast<uintptr_t>(view.data) % kBytes == 0 &&
         (view.batch_stride | view.seq_stride | view.head_stride) % kElements == 0;
}

// What forward or backward with these parameters would run on `device`. The kernel is the one on wgmma unless
// `refusal`, an output, says why not.
AttentionPlan plan_attention_cuda(const AttentionBackwardParams& params, bool backward, const rt::Device& device,
                                  std::string& refusal);
rt::Device attention_cuda_device();

// Launches on `stream`, an rt::Stream. attention_cuda_runs; head dims are multiples of 8; views fulfil
// attention_cuda_reads. With varlen, seqlen_q and seqlen_k are at least the longest lengths.
void launch_attention_forward_cuda(const AttentionParams& params, const AllocateWorkspace& allocate, void* stream);
void launch_attention_backward_cuda(const AttentionBackwardParams& params, const AllocateWorkspace& allocate,
                                    void* stream);

}  // namespace cuda_ext
