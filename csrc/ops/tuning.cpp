#include "ops/torch_headers.h"

#include "ops/tuning.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_map>

#include "gemm/plan_sm80.h"
#include "gemm/plan_sm90.h"
#include "ops/backend.h"

namespace cuda_ext {
namespace {

struct Measured {
  Restriction plan;
  double seconds;             // of one launch
  double seconds_of_default;  // of the plan that was predicted to be the fastest
};

std::mutex mutex;  // of `table`
std::unordered_map<std::string, Measured> table;
std::atomic<bool> table_has_plans = false;  // so that a launch without tuning takes no lock
std::atomic<int> most_candidates = 0;       // to measure of a new product; 0: measuring is off

const char* name_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? "float32" : dtype == Dtype::kFloat16 ? "float16" : "bfloat16";
}

// The device and the sizes of a product.
std::string name_of(const rt::Device& device, int64_t m, int64_t n, int64_t k) {
  return "sm_" + std::to_string(device.compute_capability) + " x " + std::to_string(device.num_sms) + ": " +
         std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
}

// The device and everything of a product that a plan depends on, but for alignments.
std::string name_of(const rt::Device& device, const GemmParams& params, Float32Product float32) {
  std::string name = name_of(device, params.m, params.n, params.k);
  const auto add = [&](bool applies, const std::string& text) {
    if (applies) name += text;
  };
  const auto count = [&](const char* text, int64_t count) { add(count > 1, text + std::to_string(count)); };
  name += std::string(" ") + name_of(params.a.dtype) + (is_k_major_a(params) ? ", a along k" : ", a along m") +
          (is_k_major_b(params) ? ", b along k" : ", b along n");
  count(", batches ", product_of(params.batch_dims, params.batch_sizes));
  count(", summed batches ", product_of(params.reduced_dims, params.reduced_sizes));
  add(params.a.dtype == Dtype::kFloat32 && float32 == Float32Product::kTf32, ", tf32");
  add(params.out.dtype != params.a.dtype, std::string(", to ") + name_of(params.out.dtype));
  add(params.gated, ", gated");
  add(params.bias.data != nullptr, ", bias");
  add(params.activation != Activation::kNone, ", activation");
  add(params.residual.data != nullptr, ", residual");
  add(params.c.data != nullptr, params.c.data == params.out.data ? ", accumulated" : ", c");
  add(params.preact_out.data != nullptr, ", saved");
  add(params.preact.data != nullptr, ", of backward");
  add(params.hidden.data != nullptr, ", hidden");
  add(params.bias_grad.data != nullptr, ", bias gradient");
  add(params.batch_invariant, ", batch-invariant");
  return name;
}

// The same of a scaled product. Groups are told by their number alone: their sizes are on the device.
std::string name_of(const rt::Device& device, const ScaledGemmParams& params) {
  std::string name = name_of(device, params.m, params.n, params.k);
  const auto add = [&](bool applies, const std::string& text) {
    if (applies) name += text;
  };
  const auto scales = [](const Scales& scales) {
    if (scales.has_blocks) return scales.line_shift > 0 ? "squares" : "blocks";
    return scales.line_stride == 0 ? "all" : "lines";
  };
  const auto format = [](const Operand& operand) { return operand.dtype == Dtype::kFloat8E4M3 ? "e4m3" : "e5m2"; };
  name += std::string(" ") + format(params.a) + " of " + scales(params.scale_a) + ", " + format(params.b) + " of " +
          scales(params.scale_b) + ", to " + name_of(params.out.dtype);
  add(params.groups.cut == Groups::Cut::kRows, ", groups " + std::to_string(params.groups.count));
  add(params.groups.cut == Groups::Cut::kTerms, ", groups of terms " + std::to_string(params.groups.count));
  add(params.fast_accum, ", fast");
  add(params.batch_invariant, ", batch-invariant");
  add(params.bias.data != nullptr, ", bias");
  add(params.c.data != nullptr, params.c.data == params.out.data ? ", accumulated" : ", c");
  return name;
}

// The first `most`, by the numbers in front of them.
std::vector<Restriction> best_of(std::vector<std::pair<double, Restriction>> found, int most) {
  std::stable_sort(found.begin(), found.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
  std::vector<Restriction> result;
  for (int i = 0; i < std::min(most, int(found.size())); ++i) result.push_back(found[i].second);
  return result;
}

// The best plan of each tile and cluster, the one that is predicted to be the fastest first.
std::vector<Restriction> candidates_of(const CudaKernels& kernels, const GemmParams& params, Float32Product float32,
                                       int most) {
  std::vector<std::pair<double, Restriction>> found;  // by predicted cycles
  const std::optional<sm90::GemmPlan> best = kernels.choose_gemm_sm90(params, float32, {}).plan;
  if (best) {
    for (int config = 0; config < sm90::kNumConfigs; ++config)
      for (int cluster = 1; cluster <= 2; ++cluster) {
        const auto plan = kernels.choose_gemm_sm90(params, float32, {.config = config, .cluster = cluster}).plan;
        if (plan && plan->config == config && plan->cluster == cluster)
          found.push_back({plan->cycles, {config, cluster, plan->k_blocks, plan->splits}});
      }
  }
  if (!best || best->copies.any()) {  // mma.sync needs no copies
    const sm80::Arithmetic arithmetic = sm80::arithmetic_of(params, float32);
    const sm80::Rates rates = sm80::rates_of(kernels.gemm_device());
    for (int shape = 0; shape < sm80::kNumShapes[int(arithmetic)]; ++shape) {
      const sm80::GemmPlan plan = sm80::choose_plan(params, arithmetic, rates, {.config = shape, .sm80 = true});
      if (plan.shape != shape) continue;  // the device has too little shared memory
      const double cycles = sm80::expected_cycles(plan, sm80::kTiles[int(arithmetic)][shape], arithmetic, rates);
      found.push_back({cycles, {.config = shape, .splits = plan.splits, .sm80 = true}});
    }
  }
  return best_of(std::move(found), most);
}
std::vector<Restriction> candidates_of(const CudaKernels& kernels, const ScaledGemmParams& params, int most) {
  std::vector<std::pair<double, Restriction>> found;  // by predicted cycles
  for (int cluster = 2; cluster >= 1; --cluster)
    for (int config = 0; config < sm90::kNumScaledConfigs; ++config) {
      const ScaledGemmChoice choice = kernels.choose_scaled_gemm(params, {.config = config, .cluster = cluster});
      const sm90::ScaledPlan& plan = choice.plan_sm90;
      if (choice.kernel == ScaledGemmChoice::Kernel::kSm90 && plan.config == config && plan.cluster == cluster)
        found.push_back({plan.cycles, {.config = config, .cluster = cluster, .splits = plan.splits}});
    }
  return best_of(std::move(found), most);
}

int64_t elements_of_output(const GemmParams& params) {
  return params.m * params.n * product_of(params.batch_dims, params.batch_sizes);
}
int64_t elements_of_output(const ScaledGemmParams& params) {
  return params.m * params.n * (params.groups.cut == Groups::Cut::kTerms ? params.groups.count : 1);
}

// The time from the call of the constructor to that of `seconds`, of the current stream of a CUDA device. CPU tensors,
// on which the emulator runs, have the time of the host.
class Stopwatch {
 public:
  explicit Stopwatch(at::Device device) : device_(device) {
    if (device.is_cuda()) record(begin_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT));
  }
  double seconds() {
    if (!device_.is_cuda()) return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    c10::Event end(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    record(end);
    end.synchronize();
    return 1e-3 * begin_->elapsedTime(end);
  }

 private:
  void record(c10::Event& event) { event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_)); }

  at::Device device_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::optional<c10::Event> begin_;
};

// Of one launch, the least of several rounds: what disturbs a measurement makes it longer.
double seconds_of(at::Device device, c10::function_ref<void()> launch) {
  constexpr int kRounds = 5, kMostLaunches = 20;
  constexpr double kRoundSeconds = 1e-3;
  launch();  // loads the kernel
  Stopwatch once(device);
  launch();
  double least = once.seconds();
  const int launches = std::clamp(int(kRoundSeconds / std::max(least, 1e-6)), 1, kMostLaunches);
  for (int round = 0; round < kRounds; ++round) {
    Stopwatch watch(device);
    for (int i = 0; i < launches; ++i) launch();
    least = std::min(least, watch.seconds() / launches);
  }
  return least;
}

// `candidates`: the default first.
template <class Params>
Measured measure(const std::vector<Restriction>& candidates, Params params, at::Device device,
                 c10::function_ref<void(const Params&, const Restriction&)> launch) {
  constexpr double kWorthwhile = 0.98;  // of the time of the default; less would be noise
  Tensor scratch;
  if (params.c.data != nullptr && params.c.data == params.out.data) {  // every launch would add the product again
    scratch = empty_on(device, {elements_of_output(params) * size_of(params.out.dtype)}, at::kByte);
    params.c.data = params.out.data = scratch.data_ptr();
  }
  Measured best{};
  for (const Restriction& only : candidates) {
    const double seconds = seconds_of(device, [&] { launch(params, only); });
    const bool is_default = best.seconds_of_default == 0;
    if (is_default) best.seconds_of_default = seconds;
    if (is_default || seconds < kWorthwhile * best.seconds) {
      best.plan = only;
      best.seconds = seconds;
    }
  }
  return best;
}

std::optional<Restriction> find(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = table.find(name);
  return found == table.end() ? std::nullopt : std::optional(found->second.plan);
}

void keep(const std::string& name, const Measured& measured) {
  const std::lock_guard<std::mutex> lock(mutex);
  table[name] = measured;
  table_has_plans = true;
}

}  // namespace

namespace {

// See tuned_plan. `candidates(most)`: the plans to measure.
template <class Params>
Restriction plan_of(const std::string& name, const Params& params, at::Device device,
                    c10::function_ref<std::vector<Restriction>(int)> candidates,
                    c10::function_ref<void(const Params&, const Restriction&)> launch) {
  static std::mutex one_at_a_time;  // launches of another thread would take part of the device
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (const auto known = find(name)) return *known;
  if (is_capturing(device)) return {};  // the host cannot wait for what is captured
  const Measured measured = measure(candidates(most_candidates), params, device, launch);
  keep(name, measured);
  return measured.plan;
}

bool measures() { return most_candidates.load(std::memory_order_relaxed) > 0; }

}  // namespace

Restriction measured_plan(const CudaKernels& kernels, const GemmParams& params, Float32Product float32) {
  if (!table_has_plans.load(std::memory_order_relaxed)) return {};
  return find(name_of(kernels.gemm_device(), params, float32)).value_or(Restriction{});
}

Restriction tuned_plan(const CudaKernels& kernels, const GemmParams& params, Float32Product float32, at::Device device,
                       c10::function_ref<void(const GemmParams&, const Restriction&)> launch) {
  if (!measures()) return measured_plan(kernels, params, float32);
  if (is_empty(params)) return {};
  return plan_of<GemmParams>(
      name_of(kernels.gemm_device(), params, float32), params, device,
      [&](int most) { return candidates_of(kernels, params, float32, most); }, launch);
}

Restriction tuned_plan(const CudaKernels& kernels, const ScaledGemmParams& params, at::Device device,
                       c10::function_ref<void(const ScaledGemmParams&, const Restriction&)> launch) {
  const auto name = [&] { return name_of(kernels.gemm_device(), params); };
  if (!measures())
    return table_has_plans.load(std::memory_order_relaxed) ? find(name()).value_or(Restriction{}) : Restriction{};
  if (kernels.choose_scaled_gemm(params, {}).kernel != ScaledGemmChoice::Kernel::kSm90) return {};  // it has one plan
  return plan_of<ScaledGemmParams>(
      name(), params, device, [&](int most) { return candidates_of(kernels, params, most); }, launch);
}

namespace {

constexpr int kPlanNumbers = 5;

void set_measured_gemm(std::string name, std::vector<int64_t> plan, std::vector<double> seconds) {
  CUDA_EXT_CHECK(plan.size() == kPlanNumbers && seconds.size() == 2, "_set_measured_gemm", "expected ", kPlanNumbers,
                 " numbers of a plan and 2 times, got ", plan.size(), " and ", seconds.size());
  const auto number = [&](int i) { return int(plan[i]); };
  keep(name, {{number(0), number(1), number(2), number(3), number(4) != 0}, seconds[0], seconds[1]});
}

std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<double>> measured_gemms() {
  std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<double>> result;
  auto& [names, plans, seconds] = result;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [name, measured] : table) {
    names.push_back(name);
    const Restriction& plan = measured.plan;
    plans.insert(plans.end(), {plan.config, plan.cluster, plan.k_blocks, plan.splits, plan.sm80});
    seconds.insert(seconds.end(), {measured.seconds, measured.seconds_of_default});
  }
  return result;
}

void clear_measured_gemms() {
  const std::lock_guard<std::mutex> lock(mutex);
  table.clear();
  table_has_plans = false;
}

}  // namespace
}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  // From now on measures every new product, with this many plans; 0: no longer. Returns what was set.
  m.def("_measure_gemms(int candidates) -> int",
        [](int64_t candidates) { return int64_t(cuda_ext::most_candidates.exchange(int(candidates))); });
  // Names; config, cluster, k_blocks, splits and sm80 of each; seconds of each and of the plan without tuning.
  m.def("_measured_gemms() -> (str[], int[], float[])", cuda_ext::measured_gemms);
  m.def("_set_measured_gemm(str name, int[] plan, float[] seconds) -> ()", cuda_ext::set_measured_gemm);
  m.def("_clear_measured_gemms() -> ()", cuda_ext::clear_measured_gemms);
}
