// Attention on CUDA devices: the kernels on wgmma where they can run, else those on mma.sync.
#pragma once

#include <string>

#include "attention/attention_bwd_sm80.h"
#include "attention/attention_bwd_sm90.h"

namespace cuda_ext {

// What forward or backward with these parameters would run on `device`. The kernel is the one on wgmma unless
// `refusal`, an output, says why not.
AttentionPlan plan_attention_cuda(const AttentionBackwardParams& params, bool backward, const rt::Device& device,
                                  std::string& refusal);
rt::Device attention_cuda_device();

// Bytes of workspace that a launch with these parameters needs. Pointers are not dereferenced; null means absent.
size_t attention_forward_cuda_workspace(const AttentionParams& params);
size_t attention_backward_cuda_workspace(const AttentionBackwardParams& params);

// Launches on `stream`, an rt::Stream. float16 or bfloat16; head dims are multiples of 8 up to 256; views
// fulfil attention_sm80_reads. For packed sequences, seqlen_q and seqlen_k are at least the longest lengths.
void launch_attention_forward_cuda(const AttentionParams& params, Workspace workspace, void* stream);
void launch_attention_backward_cuda(const AttentionBackwardParams& params, Workspace workspace, void* stream);

}  // namespace cuda_ext
