// What would run for an attention call, and why: the op behind cuda_ext.attention_plan. It asks the launchers.
#include "ops/torch_headers.h"

#include <torch/library.h>

#include "attention/attention_cuda.h"
#include "ops/attention_params.h"
#include "ops/backend.h"

namespace cuda_ext {
namespace {

using Numbers = c10::Dict<std::string, int64_t>;
using Answer = std::tuple<std::string, std::string, Numbers>;

Numbers numbers_of(const AttentionPlan& plan) {
  Numbers numbers;
  const auto add = [&](const char* name, int64_t value) { numbers.insert(name, value); };
  add("dim", plan.dim);
  add("dim_v", plan.dim_v);
  add("block_m", plan.block_m);
  add("block_n", plan.block_n);
  add("with_options", plan.with_options);
  add("pack_gqa", plan.pack_gqa);
  add("splits", plan.splits);
  add("most_parts", plan.most_parts);
  add("tiles", plan.tiles);
  add("blocks", plan.blocks);
  add("threads", plan.threads);
  add("workspace", int64_t(plan.workspace));
  return numbers;
}

// A gradient as backward gets it from a loss that uses every output: rows are dense.
HeadsView dense_view(int64_t dim, bool varlen, int64_t rows, int64_t heads) {
  return {nullptr, varlen ? 0 : rows * heads * dim, heads * dim, dim};
}

// compute_capability, num_sms, shared_bytes: of the device to plan for; 0: that of the tensors.
Answer attention_plan(const Tensor& query, const Tensor& key, const Tensor& value, bool backward,
                      int64_t compute_capability, int64_t num_sms, int64_t shared_bytes,
                      VARLEN_OPTIONS(OptionalTensor)) {
  constexpr const char* op = "attention_plan";
  const AttentionOptions o{VARLEN_NAMES};
  const AttentionShape shape = check_attention(op, query, key, value, o);
  const bool named = compute_capability != 0;
  const CudaKernels* kernels = named ? planning_kernels() : cuda_kernels(op, query.device());
  if (!named && kernels == nullptr) return {"cpu", "", Numbers()};
  TORCH_CHECK_NOT_IMPLEMENTED(kernels != nullptr, CUDA_EXT_OP(""), op,
                              ": expected a build with CUDA kernels, or the emulator, to plan for a named device; call "
                              "it inside `with cuda_ext.testing.emulated():`");
  const rt::Device device = [&] {
    if (named) return rt::Device{int(compute_capability), int(num_sms), int(shared_bytes)};
    const LaunchScope scope(query.device());
    return kernels->attention_device();
  }();
  const Dtype type = to_dtype(query.scalar_type());
  if (!attention_cuda_runs(type, shape.dim, shape.dim_v, backward, device.shared_bytes)) {
    const attention::HeadDims most = attention::most_head_dims(type == Dtype::kFloat32, backward, device.shared_bytes);
    const std::string dims =
        std::to_string(most.dim) + " of query and key, " + std::to_string(most.dim_v) + " of value";
    return {"composed",
            type == Dtype::kFloat64 ? "there are no kernels for float64" : "there are kernels up to head dims " + dims,
            Numbers()};
  }
  AttentionBackwardParams p;
  AttentionOperands operands;
  fill_params(p, operands, shape, query, key, value, o, true);
  p.dim = padded_dim(p.dim);
  p.dim_v = padded_dim(p.dim_v);
  p.deterministic = deterministic.value_or(false);
  p.grad_out = dense_view(p.dim_v, o.is_varlen(), p.seqlen_q, p.heads);
  std::string refusal;
  AttentionPlan plan;
  launch_for(op, [&] {
    const LaunchScope scope(query.device());
    plan = kernels->plan_attention(p, backward, device, refusal);
  });
  if (plan.dim == 0) return {"none", "", Numbers()};
  return {refusal.empty() ? "sm_90" : "sm_80", refusal, numbers_of(plan)};
}

}  // namespace
}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  m.def(
      "_attention_plan(Tensor query, Tensor key, Tensor value, bool backward, int compute_capability, int num_sms, "
      "int shared_bytes, " OPTIONAL_VARLEN_SCHEMA ") -> (str, str, Dict(str, int))",
      cuda_ext::attention_plan);
  m.def("_attention_wgmma(bool enabled) -> bool", cuda_ext::set_attention_wgmma);
}
