// What would run for a product, and why: the op behind cuda_ext.gemm_plan. It asks the plans that the launchers ask.
#include "ops/torch_headers.h"

#include <torch/library.h>

#include "gemm/grouped_plan_sm90.h"
#include "gemm/plan_sm80.h"
#include "gemm/scaled_plan.h"
#include "ops/grouped_mm.h"
#include "ops/scaled_mm.h"
#include "ops/tuning.h"

namespace cuda_ext {
namespace {

using Numbers = c10::Dict<std::string, int64_t>;
using Answer = std::tuple<std::string, std::string, std::string, Numbers, double>;

Numbers numbers(std::initializer_list<std::pair<const char*, int64_t>> values) {
  Numbers result;
  for (const auto& [name, value] : values) result.insert(name, value);
  return result;
}

Answer answer_sm90(const GemmParams& params, sm90::GemmPlan plan, const rt::Device& device) {
  const sm90::GemmConfig& config = sm90::kConfigs[plan.config];
  const sm90::Estimate cost = sm90::estimate(params, plan, config, {device.num_sms});
  return {"sm_90", cost.limit(), "",
          numbers({{"config", plan.config},
                   {"block_m", config.block_m},
                   {"block_n", config.block_n},
                   {"block_k", sm90::kLineBytes / size_of(params.a.dtype)},
                   {"stages", config.stages},
                   {"ping_pong", config.ping_pong},
                   {"swapped", config.swapped},
                   {"cluster", plan.cluster},
                   {"k_blocks", plan.k_blocks},
                   {"clusters", plan.clusters},
                   {"splits", plan.splits},
                   {"raster", plan.raster},
                   {"row_groups", plan.row_groups},
                   {"column_tiles", plan.column_tiles},
                   {"k_tiles", plan.split_k_tiles},
                   {"items", plan.items},
                   {"tma_store", plan.tma_store},
                   {"threads", 128 * (1 + sm90::kConsumers)},
                   {"grid_x", plan.clusters * plan.cluster_blocks()},
                   {"grid_y", 1},
                   {"workspace", int64_t(sm90::workspace_bytes(params, plan))},
                   {"copies", plan.copies.a + 2 * plan.copies.b}}),
          plan.cycles};
}

// `kernel`: "sm_80", or "sm_89" for FP8.
Answer answer_mma_sync(const char* kernel, const GemmParams& params, sm80::GemmPlan plan, sm80::Arithmetic arithmetic,
                       const sm80::Rates& rates, const std::string& refusal) {
  const sm80::GemmConfig& tile = sm80::kTiles[int(arithmetic)][plan.shape];
  const double cycles = sm80::expected_cycles(plan, tile, arithmetic, rates);
  return {kernel, sm80::cost_of_k_tile(tile, arithmetic, rates).limit(), refusal,
          numbers({{"config", plan.shape},
                   {"block_m", tile.block_m},
                   {"block_n", tile.block_n},
                   {"block_k", tile.block_k},
                   {"stages", tile.stages},
                   {"cluster", 1},
                   {"k_blocks", 1},
                   {"splits", plan.splits},
                   {"k_tiles", plan.split_k_tiles},
                   {"vector_bytes", std::min(plan.a.vector_bytes, plan.b.vector_bytes)},
                   {"threads", tile.threads()},
                   {"grid_x", plan.tiles},
                   {"grid_y", plan.splits},
                   {"workspace", int64_t(sm80::assign_workspace(params, tile, nullptr, plan).used())}}),
          cycles};
}

Answer answer_sm80(const GemmParams& params, Float32Product float32, const rt::Device& device,
                   const std::string& refusal, const Restriction& only) {
  const sm80::Arithmetic arithmetic = sm80::arithmetic_of(params, float32);
  const sm80::Rates rates = sm80::rates_of(device);
  const sm80::GemmPlan plan = params.groups.cut == Groups::Cut::kNone
                                  ? sm80::choose_plan(params, arithmetic, rates, only.sm80 ? only : Restriction{})
                                  : sm80::choose_grouped_plan(params, arithmetic, rates);
  return answer_mma_sync("sm_80", params, plan, arithmetic, rates, refusal);
}

// Tensors of the meta device have no addresses, but null means absent. Fresh memory is aligned to 256 bytes.
void set_if_null(const void*& data) {
  if (data == nullptr) data = reinterpret_cast<const void*>(256);
}

Answer answer_scaled_sm90(const ScaledGemmParams& params, sm90::ScaledPlan plan, const rt::Device& device) {
  const sm90::ScaledConfig& config = sm90::kScaledConfigs[plan.config];
  return {"sm_90", sm90::estimate_scaled(params, plan, {device.num_sms}).limit(), "",
          numbers({{"config", plan.config},
                   {"block_m", config.block_m},
                   {"block_n", config.block_n},
                   {"block_k", kScaleBlock},
                   {"stages", config.stages},
                   {"ping_pong", 0},
                   {"cluster", plan.cluster},
                   {"k_blocks", 1},
                   {"splits", plan.splits},
                   {"k_tiles", plan.split_k_tiles},
                   {"threads", 128 * (1 + sm90::kConsumers)},
                   {"grid_x", plan.clusters * plan.cluster},
                   {"grid_y", 1},
                   {"workspace", int64_t(sm90::assign_workspace(nullptr, plan).used())}}),
          plan.cycles};
}

// Of scaled_mm.
Answer plan_scaled(const char* op, const Tensor& a, const Tensor& b, const std::optional<rt::Device>& named) {
  CUDA_EXT_CHECK(a.dim() == 2 && b.dim() == 2 && is_fp8(b.scalar_type()) && a.size(1) == b.size(0), op,
                 "expected a (M, K) and b (K, N), both of FP8, as scaled_mm takes them, got ", shape_string(a), " and ",
                 shape_string(b), " of ", dtype_name(b.scalar_type()));
  ScaledGemmParams params;
  params.m = a.size(0);
  params.n = b.size(1);
  params.k = a.size(1);
  params.batch_invariant = is_batch_invariant();
  params.out = {reinterpret_cast<void*>(256), Dtype::kBFloat16};
  if (params.m == 0 || params.n == 0) return {"none", "", "", Numbers(), 0};
  const CudaKernels* kernels = named ? nullptr : cuda_kernels(op, a.device());
  if (!named && kernels == nullptr) return {"cpu", "", "", Numbers(), 0};
  const int64_t copies = !has_aligned_lines(a) + 2 * !has_aligned_lines(b.t());
  std::optional<Answer> answer;
  launch_for(op, [&] {
    const c10::OptionalDeviceGuard guard(named ? c10::optional<at::Device>() : a.device());
    const ScaledGemmChoice choice =
        named ? choose_scaled_gemm(params, *named) : kernels->choose_scaled_gemm(params, {});
    if (choice.kernel == ScaledGemmChoice::Kernel::kNone) {
      answer = Answer{"composed", "", choice.refusal, Numbers(), 0};
      return;
    }
    const rt::Device device = named ? *named : kernels->gemm_device();
    if (choice.kernel == ScaledGemmChoice::Kernel::kSm90) {
      answer = answer_scaled_sm90(params, choice.plan_sm90, device);
    } else {
      answer = answer_mma_sync("sm_89", without_scales(params), sm80::choose_scaled_plan(params, device),
                               sm80::Arithmetic::kFloat8, sm80::rates_of(device), choice.refusal);
    }
    std::get<Numbers>(*answer).insert("copies", copies);
  });
  return *answer;
}

// Of grouped_mm.
Answer plan_grouped(const char* op, const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                    const OptionalTensor& indices, const GroupedEpilogue& epilogue, bool save_preact,
                    OptionalType out_dtype, const std::optional<rt::Device>& named) {
  const CudaKernels* kernels = named ? nullptr : cuda_kernels(op, a.device());
  GroupedCall call = describe_grouped(op, a, b, offs, bias, indices, epilogue, out_dtype, named || kernels != nullptr);
  GemmParams& params = call.params;
  params.out = {reinterpret_cast<void*>(256), to_dtype(call.type)};
  if (save_preact && needs_preact(epilogue.activation, epilogue.gated, false)) params.preact_out = params.out;
  set_if_null(params.a.data);
  set_if_null(params.b.data);
  if (is_given(bias)) set_if_null(params.bias.data);
  if (call.indices.defined() && params.groups.indices == nullptr)
    params.groups.indices = reinterpret_cast<const int32_t*>(256);
  if (params.m == 0 || params.n == 0 || params.groups.count == 0) return {"none", "", "", Numbers(), 0};
  if (!named && kernels == nullptr) return {"cpu", "", "", Numbers(), 0};
  if (a.scalar_type() == at::kDouble) return {"composed", "", "there are no kernels for float64", Numbers(), 0};
  std::optional<Answer> answer;
  launch_for(op, [&] {
    const c10::OptionalDeviceGuard guard(named ? c10::optional<at::Device>() : a.device());
    const rt::Device device = named ? *named : kernels->gemm_device();
    const sm90::GemmChoice choice = named ? sm90::choose_grouped_plan(params, device) : kernels->choose_grouped(params);
    answer = choice.plan ? answer_sm90(params, *choice.plan, device)
                         : answer_sm80(params, float32_product(), device, choice.refusal, {});
  });
  // Rows that the kernel does not gather are copied before it.
  const bool copies = is_given(indices) && !call.indices.defined(), of_rows = b.dim() == 3;
  auto& found = std::get<Numbers>(*answer);
  found.insert_or_assign("copies", copies ? (of_rows ? 1 : 2) : 0);
  return *answer;
}

// `compute_capability` and `num_sms`: of the device to plan for; 0: that of the tensors. `config`, `cluster`,
// `k_blocks` and `splits`: as in Restriction, for wgmma.
Answer gemm_plan(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& bias,
                 const OptionalTensor& residual, const OptionalTensor& offs, const OptionalTensor& indices,
                 ActivationName activation, double alpha, double beta, OptionalType out_dtype, bool gated,
                 bool save_preact, int64_t compute_capability, int64_t num_sms, int64_t config, int64_t cluster,
                 int64_t k_blocks, int64_t splits) {
  constexpr const char* op = "gemm_plan";
  check_given(op, "a", a);
  check_given(op, "b", b);
  std::optional<rt::Device> of_name;
  if (compute_capability != 0)
    of_name = rt::Device{int(compute_capability), int(num_sms), rt::shared_bytes_of_sm(int(compute_capability))};
  if (is_fp8(a.scalar_type())) return plan_scaled(op, a, b, of_name);
  if (is_given(offs))
    return plan_grouped(op, a, b, *offs, bias, indices, {parse_activation(op, activation), gated}, save_preact,
                        out_dtype, of_name);
  GemmCall call = describe_gemm(op, a, b, c, bias, activation, alpha, beta, out_dtype);
  GemmParams& params = call.params;
  if (gated) {
    CUDA_EXT_CHECK(params.n % 2 == 0, op, "expected b of shape (..., K, 2N), [gate, up], got ", shape_string(b));
    CUDA_EXT_CHECK(!is_given(c), op, "expected c to be None with gated=True");
    params.gated = true;
    params.n /= 2;
    call.sizes.back() = params.n;
  }
  const auto aligned = reinterpret_cast<void*>(256);
  params.out = {aligned, to_dtype(call.type)};
  set_if_null(params.a.data);
  set_if_null(params.b.data);
  if (is_given(c) && beta != 0.0) set_if_null(params.c.data);
  if (is_given(bias)) set_if_null(params.bias.data);
  if (is_given(residual)) {
    check_addend(op, "residual", *residual, a, call.type, call.sizes);
    params.residual = matrix(*residual);
    set_if_null(params.residual.data);
  }
  if (save_preact && needs_preact(params.activation, gated, is_given(residual)))
    params.preact_out = {aligned, to_dtype(call.type)};
  if (is_empty(params)) return {"none", "", "", Numbers(), 0};

  const Float32Product float32 = float32_product();
  const bool named = compute_capability != 0;
  const CudaKernels* kernels = named ? nullptr : cuda_kernels(op, a.device());
  if (!named && kernels == nullptr) return {"cpu", "", "", Numbers(), 0};
  if (a.scalar_type() == at::kDouble) return {"composed", "", "there are no kernels for float64", Numbers(), 0};
  std::optional<Answer> answer;
  launch_for(op, [&] {
    if (named) {
      const rt::Device device{int(compute_capability), int(num_sms), 0};
      const sm90::GemmChoice choice = sm90::choose_plan(
          params, float32 == Float32Product::kTf32, device,
          {.config = int(config), .cluster = int(cluster), .k_blocks = int(k_blocks), .splits = int(splits)});
      answer = choice.plan ? answer_sm90(params, *choice.plan, device)
                           : answer_sm80(params, float32, device, choice.refusal, {});
    } else {
      const LaunchScope scope(a.device());
      const rt::Device device = kernels->gemm_device();
      const Restriction only = measured_plan(*kernels, params, float32);
      const sm90::GemmChoice choice = kernels->choose_gemm_sm90(params, float32, only);
      answer = choice.plan ? answer_sm90(params, *choice.plan, device)
                           : answer_sm80(params, float32, device, choice.refusal, only);
    }
  });
  return *answer;
}

}  // namespace
}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  m.def(
      "_gemm_plan(Tensor a, Tensor b, Tensor? c, Tensor? bias, Tensor? residual, Tensor? offs, Tensor? indices, "
      "str? activation, float alpha, float beta, ScalarType? out_dtype, bool gated, bool save_preact, "
      "int compute_capability, int num_sms, int config=-1, int cluster=0, int k_blocks=0, int splits=0) -> (str, str, "
      "str, Dict(str, int), "
      "float)",
      cuda_ext::gemm_plan);
}
