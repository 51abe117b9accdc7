#include "attention/attention_cuda.h"

#include "attention/attention_bwd_sm80.h"
#include "attention/attention_bwd_sm90.h"
#include "attention/attention_fwd_sm80.h"
#include "attention/attention_fwd_sm90.h"
#include "attention/attention_tail.cuh"
#include "attention/dispatch.h"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext {
namespace attention {
namespace {

// Why the kernel on wgmma cannot run a problem; empty if it can.
std::string refusal_of(const AttentionParams& params, const rt::Device& device) {
  return sm90::forward_refusal(params, device);
}
std::string refusal_of(const AttentionBackwardParams& params, const rt::Device& device) {
  return sm90::backward_refusal(params, device);
}

// Calls f with the launcher that the device and the problem require: on wgmma unless `refusal`, an output, says why
// not.
template <template <class, int> class LauncherSm90, template <class, int> class LauncherSm80, const auto& float32_dims,
          class Params, class F>
auto with_launcher(const char* op, const Params& params, const rt::Device& device, std::string& refusal, const F& f) {
  if constexpr (kBuiltForSm90a) {
    refusal = refusal_of(params, device);
    if (refusal.empty()) return with_kernel<LauncherSm90, kHeadDims, kNoHeadDims>(op, params, f);
  } else {
    refusal = kNotBuiltForSm90a;
  }
  return with_kernel<LauncherSm80, kHeadDims, float32_dims>(op, params, f);
}
template <class F>
auto with_launcher(const AttentionParams& params, const rt::Device& device, std::string& refusal, const F& f) {
  return with_launcher<sm90::ForwardLauncher, sm80::ForwardLauncher, kFloat32HeadDims>("flash_attention", params,
                                                                                       device, refusal, f);
}
template <class F>
auto with_launcher(const AttentionBackwardParams& params, const rt::Device& device, std::string& refusal, const F& f) {
  return with_launcher<sm90::BackwardLauncher, sm80::BackwardLauncher, kFloat32BackwardHeadDims>(
      "flash_attention_backward", params, device, refusal, f);
}
template <class Params>
void launch(const Params& params, const AllocateWorkspace& allocate, void* stream) {
  std::string refusal;
  with_launcher(params, rt::describe_device("attention"), refusal,
                [&](auto launcher) { launcher.launch(params, allocate, stream); });
}

Tail tail_of(const AttentionParams& p, HeadsView to, int64_t width, bool of_queries, bool is_float32,
             float* lse = nullptr) {
  const int64_t halves = is_float32 ? 2 : size_of(p.dtype) / 2;  // of an element
  to.seq_stride *= halves, to.head_stride *= halves;
  return {to,
          (of_queries ? p.cu_seqlens_q : p.cu_seqlens_k) + p.batch,
          of_queries ? p.total_q : p.total_k,
          int(of_queries ? p.heads : p.heads_kv),
          int(width * halves),
          lse};
}
// Fills the rows of `count` tensors that are after the last sequence.
void launch_tail(const Tails& tails, int count, void* stream) {
  constexpr int kThreads = 256;
  int64_t blocks = rt::describe_device("attention_tail").num_sms, rows = 0;
  for (const Tail& tail : tails.of) rows = rows < tail.rows ? tail.rows : rows;
  blocks = blocks < rows ? blocks : rows;
  if (blocks == 0) return;
  rt::launch<attention_tail<kThreads>>("attention_tail",
                                       {.grid = {int(blocks), count}, .threads = kThreads, .stream = stream}, tails);
}

}  // namespace
}  // namespace attention

AttentionPlan plan_attention_cuda(const AttentionBackwardParams& params, bool backward, const rt::Device& device,
                                  std::string& refusal) {
  const auto plan = [&](const auto& params) {
    return attention::with_launcher(params, device, refusal,
                                    [&](auto launcher) { return launcher.plan(params, device); });
  };
  return backward ? plan(params) : plan(static_cast<const AttentionParams&>(params));
}

rt::Device attention_cuda_device() { return rt::describe_device("attention_plan"); }

void launch_attention_forward_cuda(const AttentionParams& params, const AllocateWorkspace& allocate, void* stream) {
  attention::launch(params, allocate, stream);
  if (params.cu_seqlens_q != nullptr)
    attention::launch_tail({{attention::tail_of(params, params.out, params.dim_v, /*of_queries=*/true,
                                                params.float32_out, static_cast<float*>(params.lse))}},
                           1, stream);
}

void launch_attention_backward_cuda(const AttentionBackwardParams& params, const AllocateWorkspace& allocate,
                                    void* stream) {
  using namespace attention;
  attention::launch(params, allocate, stream);
  if (params.cu_seqlens_q != nullptr)
    launch_tail({{tail_of(params, params.grad_query, params.dim, /*of_queries=*/true, params.float32_grads),
                  tail_of(params, params.grad_key, params.dim, /*of_queries=*/false, params.float32_grads),
                  tail_of(params, params.grad_value, params.dim_v, /*of_queries=*/false, params.float32_grads)}},
                3, stream);
}

}  // namespace cuda_ext
