// The Python module `_simt`: the CUDA kernels compiled for the emulator, the emulator's options and counters.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "emulated/choices.h"
#include "launchers/cuda_kernels.h"
#include "simt/options.h"

namespace py = pybind11;
using namespace cuda_ext;

namespace {

using Site = std::tuple<std::string, int, std::string>;  // file, line, instruction

void configure(int compute_capability, bool lazy, bool pct, uint64_t seed, bool check_races, bool ordered_sums,
               int threads, const std::optional<Site>& skip, int processors) {
  static simt::SyncSite skipped;
  if (skip) skipped = {std::get<0>(*skip), std::get<1>(*skip), std::get<2>(*skip)};
  simt::options() = {.completion = lazy ? simt::Completion::kLazy : simt::Completion::kEager,
                     .schedule = pct ? simt::Schedule::kPct : simt::Schedule::kFifo,
                     .seed = seed,
                     .check_races = check_races,
                     .ordered_sums = ordered_sums,
                     .threads = threads,
                     .skip = skip ? &skipped : nullptr,
                     .compute_capability = compute_capability,
                     .num_sms = processors};
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

}  // namespace

PYBIND11_MODULE(_simt, m) {
  m.doc() = "The CUDA kernels of cuda_ext on the emulator.";
  m.def(
      "kernels",
      [] {
        static const CudaKernels kernels = linked_cuda_kernels();
        return reinterpret_cast<intptr_t>(&kernels);
      },
      "The address of the table of launchers, for the op _emulate.");
  m.def("configure", configure, py::arg("compute_capability"), py::arg("lazy"), py::arg("pct"), py::arg("seed"),
        py::arg("check_races"), py::arg("ordered_sums"), py::arg("threads"), py::arg("skip"), py::arg("processors"),
        "Sets the options of later launches; see csrc/simt/options.h.");
  m.def(
      "set_float8_sum_bits", [](int bits) { simt::options().float8_sum_bits = bits; }, py::arg("bits"),
      "Of later launches, until the next call of configure; see csrc/simt/float8_sum.h.");
  bind_choices(m);
  m.def("counters", counters, "Counters of the launches since the last reset.");
  m.def("reset_counters", simt::reset_counters);
  m.def("sync_sites", sync_sites, "The synchronisation calls since the last reset, as (file, line, instruction).");
  m.def("reset_sync_sites", simt::reset_sync_sites);
}
