#include "attention/attention_cuda.h"

#include "attention/attention_tail.cuh"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext {
namespace {

// Why the kernel on wgmma cannot run a problem; empty if it can.
std::string refusal_of(const AttentionParams& params, const rt::Device& device) {
  return sm90::forward_refusal(params, device);
}
std::string refusal_of(const AttentionBackwardParams& params, const rt::Device& device) {
  return sm90::backward_refusal(params, device);
}

// Calls f with the launcher on wgmma that runs a problem, or with the one on mma.sync.
template <class F>
auto with_sm90(const AttentionParams& params, const F& f) {
  return sm80::with_attention_tile<sm90::AttentionForwardSm90>("attention_fwd_sm90", sm90::kForwardTiles, params, f);
}
template <class F>
auto with_sm90(const AttentionBackwardParams& params, const F& f) {
  return sm80::with_attention_tile<sm90::AttentionBackwardSm90>("attention_bwd_sm90", sm90::kBackwardTiles, params, f);
}
template <class F>
auto with_sm80(const AttentionParams& params, const F& f) {
  return sm80::with_attention_tile<sm80::AttentionForwardSm80>("attention_fwd_sm80", sm80::kForwardTiles, params, f);
}
template <class F>
auto with_sm80(const AttentionBackwardParams& params, const F& f) {
  return sm80::with_attention_tile<sm80::AttentionBackwardSm80>("attention_bwd_sm80", sm80::kBackwardTiles, params, f);
}

// The same with the one that the device and the problem require.
template <class Params, class F>
auto with_launcher(const Params& params, const rt::Device& device, std::string& refusal, const F& f) {
  refusal = has_attention_sm90() ? refusal_of(params, device)
                                 : "the library has no kernels for sm_90a; build it with 9.0a in TORCH_CUDA_ARCH_LIST";
  return refusal.empty() ? with_sm90(params, f) : with_sm80(params, f);
}
template <class Params, class F>
auto with_launcher(const char* kernel, const Params& params, const F& f) {
  std::string refusal;
  return with_launcher(params, rt::describe_device(kernel), refusal, f);
}

sm80::Tail queries_tail(const AttentionParams& p, const HeadsView& to, int64_t width, float* lse = nullptr) {
  return {to, p.cu_seqlens_q + p.batch, p.total_q, int(p.heads), int(width), lse};
}
sm80::Tail keys_tail(const AttentionParams& p, const HeadsView& to, int64_t width) {
  return {to, p.cu_seqlens_k + p.batch, p.total_k, int(p.heads_kv), int(width)};
}

// Fills the rows of `count` tensors that are after the last sequence.
void launch_tail(const sm80::Tails& tails, int count, void* stream) {
  constexpr int kThreads = 256;
  int64_t blocks = rt::describe_device("attention_tail").num_sms, rows = 0;
  for (const sm80::Tail& tail : tails.of) rows = rows < tail.rows ? tail.rows : rows;
  blocks = blocks < rows ? blocks : rows;
  if (blocks == 0) return;
  rt::launch<sm80::attention_tail<kThreads>>(
      "attention_tail", {.grid = {int(blocks), count}, .threads = kThreads, .stream = stream}, tails);
}

}  // namespace

AttentionPlan plan_attention_cuda(const AttentionBackwardParams& params, bool backward, const rt::Device& device,
                                  std::string& refusal) {
  const auto plan = [&](const auto& params) {
    return with_launcher(params, device, refusal, [&](auto launcher) { return launcher.plan(params, device); });
  };
  return backward ? plan(params) : plan(static_cast<const AttentionParams&>(params));
}

rt::Device attention_cuda_device() { return rt::describe_device("attention_plan"); }

size_t attention_forward_cuda_workspace(const AttentionParams& params) {
  return with_launcher("attention_fwd", params, [&](auto forward) { return forward.workspace(params); });
}

void launch_attention_forward_cuda(const AttentionParams& params, Workspace workspace, void* stream) {
  with_launcher("attention_fwd", params, [&](auto forward) { forward.launch(params, workspace, stream); });
  if (params.cu_seqlens_q != nullptr)
    launch_tail({{queries_tail(params, params.out, params.dim_v, static_cast<float*>(params.lse))}}, 1, stream);
}

size_t attention_backward_cuda_workspace(const AttentionBackwardParams& params) {
  return with_launcher("attention_bwd", params, [&](auto backward) { return backward.workspace(params); });
}

void launch_attention_backward_cuda(const AttentionBackwardParams& params, Workspace workspace, void* stream) {
  with_launcher("attention_bwd", params, [&](auto backward) { backward.launch(params, workspace, stream); });
  if (params.cu_seqlens_q != nullptr)
    launch_tail({{queries_tail(params, params.grad_query, params.dim), keys_tail(params, params.grad_key, params.dim),
                  keys_tail(params, params.grad_value, params.dim_v)}},
                3, stream);
}

}  // namespace cuda_ext
