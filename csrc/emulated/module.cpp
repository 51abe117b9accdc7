// The Python module `_simt`: the CUDA kernels, compiled for the emulator, and the emulator's switches.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding/cuda_kernels.h"
#include "bucket/bucket_kernels.cuh"
#include "gemm/gemm_sm80.cuh"
#include "simt/options.h"

namespace py = pybind11;
using namespace cuda_ext;

namespace {

using Site = std::tuple<std::string, int, std::string>;  // file, line, instruction

void configure(int compute_capability, bool lazy, bool pct, uint64_t seed, bool check_races, int threads,
               const std::optional<Site>& skip) {
  static simt::SyncSite skipped;
  if (skip) skipped = {std::get<0>(*skip), std::get<1>(*skip), std::get<2>(*skip)};
  simt::options() = {.completion = lazy ? simt::Completion::kLazy : simt::Completion::kEager,
                     .schedule = pct ? simt::Schedule::kPct : simt::Schedule::kFifo,
                     .seed = seed,
                     .check_races = check_races,
                     .threads = threads,
                     .skip = skip ? &skipped : nullptr,
                     .compute_capability = compute_capability};
}

std::map<std::string, uint64_t> counters() {
  const simt::Counters values = simt::counters();
  std::map<std::string, uint64_t> named;
  for (size_t i = 0; i < values.size(); ++i) named[simt::name_of(simt::Count(i))] = values[i];
  return named;
}

std::vector<Site> sync_sites() {
  std::vector<Site> sites;
  for (const simt::SyncSite& site : simt::sync_sites()) sites.emplace_back(site.file, site.line, site.instruction);
  return sites;
}

// What the paper model (benchmarks/kernel_work.py) has to know of kernels and launchers.
using Numbers = std::map<std::string, int64_t>;

template <sm80::Arithmetic arithmetic, size_t shape>
Numbers gemm_config() {
  using Element = std::conditional_t<arithmetic == sm80::Arithmetic::k16Bit, bfloat16_t, float>;
  constexpr sm80::GemmConfig config = sm80::kTiles[int(arithmetic)][shape];
  return {{"block_m", config.block_m},
          {"block_n", config.block_n},
          {"block_k", config.block_k},
          {"stages", config.stages},
          {"warps_m", config.warps_m},
          {"warps_n", config.warps_n},
          {"min_blocks", config.min_blocks},
          {"element_bytes", sizeof(Element)},
          {"shared_bytes", sizeof(typename sm80::Gemm<Element, arithmetic, true, true, config>::Storage)}};
}
template <sm80::Arithmetic arithmetic, size_t... shapes>
std::vector<Numbers> gemm_configs(std::index_sequence<shapes...>) {
  return {gemm_config<arithmetic, shapes>()...};
}
template <sm80::Arithmetic arithmetic>
std::vector<Numbers> gemm_configs() {
  return gemm_configs<arithmetic>(std::make_index_sequence<sm80::kNumShapes[int(arithmetic)]>());
}
std::vector<std::vector<Numbers>> all_gemm_configs() {
  static_assert(sm80::kNumArithmetics == 3);
  return {gemm_configs<sm80::Arithmetic::k16Bit>(), gemm_configs<sm80::Arithmetic::kTf32>(),
          gemm_configs<sm80::Arithmetic::kThreeTf32>()};
}

Numbers gemm_choice(int arithmetic, int64_t m, int64_t n, int64_t k, int compute_capability, int processors) {
  GemmParams params{.m = m, .n = n, .k = k};
  params.a = {.row_stride = k, .column_stride = 1};
  params.b = {.row_stride = n, .column_stride = 1};
  const sm80::GemmPlan plan =
      sm80::choose_plan(params, sm80::Arithmetic(arithmetic), sm80::rates_of({compute_capability, processors}));
  return {{"shape", plan.shape}, {"splits", plan.splits}};
}

Numbers bucket_config() {
  return {{"threads", BucketConfig::kThreads},
          {"block_elements", kBlockElements},
          {"bytes_in_flight", BucketConfig::kBytesInFlight},
          {"table_entries", bucket::kLargeChunk}};
}

}  // namespace

PYBIND11_MODULE(_simt, m) {
  m.doc() = "The CUDA kernels of cuda_ext on the emulator.";
  m.def(
      "kernels",
      [] {
        static const CudaKernels kernels = linked_cuda_kernels();
        return reinterpret_cast<intptr_t>(&kernels);
      },
      "The address of the launchers, for the op _emulate.");
  m.def("configure", configure, py::arg("compute_capability"), py::arg("lazy"), py::arg("pct"), py::arg("seed"),
        py::arg("check_races"), py::arg("threads"), py::arg("skip"),
        "How the launches that follow run; see csrc/simt/options.h.");
  m.def("gemm_configs", all_gemm_configs, "By arithmetic and shape: the kernels that a product may take.");
  m.def("gemm_choice", gemm_choice, py::arg("arithmetic"), py::arg("m"), py::arg("n"), py::arg("k"),
        py::arg("compute_capability"), py::arg("processors"),
        "Which of gemm_configs a device would take, and among how many blocks it would divide k.");
  m.def("bucket_config", bucket_config);
  m.def("counters", counters, "What launches did since the last reset.");
  m.def("reset_counters", simt::reset_counters);
  m.def("sync_sites", sync_sites, "Every synchronisation call since the last reset: file, line, instruction.");
  m.def("reset_sync_sites", simt::reset_sync_sites);
}
