// C interface of a conformance library for harness.py: lists the cases, and runs one on host memory. nvcc builds it for
// a GPU (with copies to and from the device), a C++ compiler for the emulator.
#include <cstdio>
#include <cstring>

#include "conformance.h"

#if !defined(__CUDACC__)
#include "simt/options.h"
#endif

using cuda_ext::conformance::cases;

namespace {

void put(const std::string& text, char* to, size_t size) { std::snprintf(to, size, "%s", text.c_str()); }

#if defined(__CUDACC__)

using cuda_ext::rt::check;

struct DeviceBytes {
  uint32_t* data = nullptr;
  explicit DeviceBytes(size_t bytes) { check(cudaMalloc(&data, bytes), "conformance", "allocate"); }
  ~DeviceBytes() { cudaFree(data); }
};

void run(const cuda_ext::conformance::Case& c, const void* in, void* out) {
  const DeviceBytes device_in(c.in_bytes), device_out(c.out_bytes);
  check(cudaMemcpy(device_in.data, in, c.in_bytes, cudaMemcpyHostToDevice), c.name, "copy the input");
  check(cudaMemset(device_out.data, 0xff, c.out_bytes), c.name, "poison the output");
  c.run(device_in.data, device_out.data);
  check(cudaDeviceSynchronize(), c.name, "run");
  check(cudaMemcpy(out, device_out.data, c.out_bytes, cudaMemcpyDeviceToHost), c.name, "copy the output");
}

#else

void run(const cuda_ext::conformance::Case& c, const void* in, void* out) {
  std::memset(out, 0xff, c.out_bytes);
  c.run(static_cast<const uint32_t*>(in), static_cast<uint32_t*>(out));
}

#endif

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int conformance_count() { return int(cases().size()); }
EXPORT const char* conformance_name(int i) { return cases()[i].name; }
EXPORT size_t conformance_in_bytes(int i) { return cases()[i].in_bytes; }
EXPORT size_t conformance_out_bytes(int i) { return cases()[i].out_bytes; }

// Returns 0, or 1 with a message in `error`.
EXPORT int conformance_run(int i, const void* in, void* out, char* error, size_t error_size) {
  try {
    run(cases()[i], in, out);
    return 0;
  } catch (const std::exception& e) {
    put(e.what(), error, error_size);
    return 1;
  }
}

#if !defined(__CUDACC__)

EXPORT void simt_configure(int lazy, int pct, uint64_t seed, int check_races, int threads, int ordered_sums,
                           int compute_capability, int processors) {
  auto& o = cuda_ext::simt::options();
  o.completion = lazy ? cuda_ext::simt::Completion::kLazy : cuda_ext::simt::Completion::kEager;
  o.schedule = pct ? cuda_ext::simt::Schedule::kPct : cuda_ext::simt::Schedule::kFifo;
  o.seed = seed;
  o.check_races = check_races != 0;
  o.threads = threads;
  o.ordered_sums = ordered_sums != 0;
  o.compute_capability = compute_capability;
  o.num_sms = processors;
}
// How products of 8-bit floats are added from now on, see Options::float8_sum_bits.
EXPORT void simt_set_float8_sum_bits(int bits) { cuda_ext::simt::options().float8_sum_bits = bits; }
// Skips the synchronisation call at this place from now on; none if `file` is null.
EXPORT void simt_skip(const char* file, int line, const char* instruction) {
  static cuda_ext::simt::SyncSite site;
  auto& o = cuda_ext::simt::options();
  o.skip = nullptr;
  if (file == nullptr) return;
  site = {file, line, instruction};
  o.skip = &site;
}
EXPORT int simt_num_counters() { return int(cuda_ext::simt::Count::kNumCounts); }
EXPORT const char* simt_counter_name(int i) { return name_of(cuda_ext::simt::Count(i)); }
EXPORT void simt_read_counters(uint64_t* out) {
  const auto counters = cuda_ext::simt::counters();
  std::memcpy(out, counters.data(), sizeof counters);
}
EXPORT void simt_reset_counters() { cuda_ext::simt::reset_counters(); }
EXPORT void simt_reset_sync_sites() { cuda_ext::simt::reset_sync_sites(); }
// Writes lines of "file\tline\tinstruction"; returns the size of all lines.
EXPORT size_t simt_sync_sites(char* out, size_t size) {
  std::string text;
  for (const auto& site : cuda_ext::simt::sync_sites())
    text += site.file + "\t" + std::to_string(site.line) + "\t" + site.instruction + "\n";
  put(text, out, size);
  return text.size() + 1;
}

#endif
}
