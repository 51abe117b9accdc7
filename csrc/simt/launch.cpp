// Checks a launch and distributes its clusters over host threads; also the options, counters and sites of the process.
#include "simt/launch.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>

#include "simt/guard.h"
#include "simt/machine.h"

namespace cuda_ext::simt {

namespace {

constexpr uint32_t kMaxSharedBytes = 227 * 1024;
constexpr int kMaxThreads = 1024;

std::mutex global_mutex;
Counters total_counters{};
std::set<std::tuple<std::string, int, std::string>> seen_sites;

}  // namespace

Options& options() {
  static Options instance;
  return instance;
}
int compute_capability() { return options().compute_capability; }

Counters counters() {
  const std::lock_guard<std::mutex> lock(global_mutex);
  return total_counters;
}
void reset_counters() {
  const std::lock_guard<std::mutex> lock(global_mutex);
  total_counters = {};
}
std::vector<SyncSite> sync_sites() {
  const std::lock_guard<std::mutex> lock(global_mutex);
  std::vector<SyncSite> sites;
  for (const auto& [file, line, instruction] : seen_sites) sites.push_back({file, line, instruction});
  return sites;
}
void reset_sync_sites() {
  const std::lock_guard<std::mutex> lock(global_mutex);
  seen_sites.clear();
}

void record_sync_site(const SyncSite& site) {
  const std::lock_guard<std::mutex> lock(global_mutex);
  seen_sites.emplace(site.file, site.line, site.instruction);
}

void launch(const char* kernel, const Geometry& geometry, const std::function<void()>& thread) {
  const auto refuse = [&](const std::string& text) { throw Fault(std::string(kernel) + ": " + text); };
  const Extent& g = geometry.grid;
  const Extent& c = geometry.cluster;
  if (g.x < 1 || g.y < 1 || g.z < 1 || g.y > 65535 || g.z > 65535)
    refuse("a grid of (" + std::to_string(g.x) + ", " + std::to_string(g.y) + ", " + std::to_string(g.z) +
           ") blocks; each axis has at least 1, y and z at most 65535");
  if (geometry.block < 1 || geometry.block > kMaxThreads)
    refuse("a block of " + std::to_string(geometry.block) + " threads; a block has 1 to 1024");
  // With compute capability 80, the default, kernels for sm_90 can be launched too.
  const uint32_t shared_limit = options().compute_capability == 80
                                    ? kMaxSharedBytes
                                    : uint32_t(rt::shared_bytes_of_block(options().compute_capability));
  if (geometry.shared_bytes > shared_limit)
    refuse(std::to_string(geometry.shared_bytes) + " bytes of shared memory; a block has at most " +
           std::to_string(shared_limit));
  const int64_t clusters = g.count() / c.count();
  const int64_t concurrent = geometry.concurrent_clusters == 0 ? clusters : geometry.concurrent_clusters;
  int workers = options().threads > 0 ? options().threads : int(std::thread::hardware_concurrency());
  if (concurrent > 1 || options().check_races) workers = 1;
  workers = int(std::clamp<int64_t>(clusters, 1, workers));

  std::atomic<int64_t> next{0};
  std::mutex failure_mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    MemoryGuard guard;
    Machine emulated(kernel, geometry, thread, guard);
    try {
      for (int64_t first; (first = next.fetch_add(concurrent)) < clusters;) {
        std::vector<int64_t> batch(size_t(std::min(concurrent, clusters - first)));
        std::iota(batch.begin(), batch.end(), first);
        emulated.run(batch);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure) failure = std::current_exception();
      next = clusters;
    }
    const std::lock_guard<std::mutex> lock(global_mutex);
    for (size_t i = 0; i < total_counters.size(); ++i) total_counters[i] += emulated.counters()[i];
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < workers; ++i) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace cuda_ext::simt
