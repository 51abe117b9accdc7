#include "attention/attention_cuda.h"

#include "rt/device.h"

namespace cuda_ext {
namespace {

constexpr char kNoKernels[] = "the library has no kernels for sm_90a; build it with 9.0a in TORCH_CUDA_ARCH_LIST";

template <class F>
auto with_sm90_tile(const AttentionParams& params, const F& f) {
  return sm80::with_attention_tile<sm90::AttentionForwardSm90>("attention_fwd_sm90", sm90::kForwardTiles, params, f);
}
template <class F>
auto with_sm90_tile(const AttentionBackwardParams& params, const F& f) {
  return sm80::with_attention_tile<sm90::AttentionBackwardSm90>("attention_bwd_sm90", sm90::kBackwardTiles, params, f);
}

}  // namespace

std::string attention_forward_sm90_refusal(const AttentionParams& params) {
  return has_attention_sm90() ? sm90::forward_refusal(params, rt::describe_device("attention_fwd")) : kNoKernels;
}

std::string attention_backward_sm90_refusal(const AttentionBackwardParams& params) {
  return has_attention_sm90() ? sm90::backward_refusal(params, rt::describe_device("attention_bwd")) : kNoKernels;
}

size_t attention_forward_cuda_workspace(const AttentionParams& params) {
  if (!attention_forward_sm90_refusal(params).empty()) return attention_forward_sm80_workspace(params);
  return with_sm90_tile(params, [&](auto forward) { return forward.workspace(params); });
}

void launch_attention_forward_cuda(const AttentionParams& params, Workspace workspace, void* stream) {
  if (!attention_forward_sm90_refusal(params).empty())
    launch_attention_forward_sm80(params, workspace, stream);
  else
    with_sm90_tile(params, [&](auto forward) { forward.launch(params, workspace, stream); });
}

size_t attention_backward_cuda_workspace(const AttentionBackwardParams& params) {
  if (!attention_backward_sm90_refusal(params).empty()) return attention_backward_sm80_workspace(params);
  return with_sm90_tile(params, [&](auto backward) { return backward.workspace(params); });
}

void launch_attention_backward_cuda(const AttentionBackwardParams& params, Workspace workspace, void* stream) {
  if (!attention_backward_sm90_refusal(params).empty())
    launch_attention_backward_sm80(params, workspace, stream);
  else
    with_sm90_tile(params, [&](auto backward) { backward.launch(params, workspace, stream); });
}

}  // namespace cuda_ext
