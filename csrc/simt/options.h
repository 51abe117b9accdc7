// How the emulator runs a kernel, and what it says afterwards.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "simt/api.h"

namespace cuda_ext::simt {

// When asynchronous copies and matrix products take effect: when they are issued, or at the last moment that the waits
// in the kernel allow, their destinations holding NaNs until then.
enum class Completion { kEager, kLazy };

// Which warp runs next: in turn, or the one of highest random priority, with rare new draws (PCT: Burckhardt et al.,
// "A randomized scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010).
enum class Schedule { kFifo, kPct };

struct SyncSite {
  std::string file;
  int line;
  std::string instruction;
  bool operator==(const SyncSite&) const = default;
};

struct Options {
  Completion completion = Completion::kEager;
  Schedule schedule = Schedule::kFifo;
  uint64_t seed = 0;
  bool check_races = false;        // happens-before, on one thread of the host
  bool ordered_sums = false;       // atomic additions of floats are races too, unless something orders them
  int threads = 0;                 // of the host; 0: all cores
  const SyncSite* skip = nullptr;  // a mutation: every call from here does nothing
  // What launchers see of the device. So few multiprocessors that small problems have several waves, or are split.
  int compute_capability = 80;
  int num_sms = 4;

  // Shared memory of a multiprocessor. A block may have all but 1 KiB of it.
  int shared_bytes() const { return (compute_capability >= 90 ? 228 : compute_capability == 80 ? 164 : 100) << 10; }
};

// Options of the launches that follow in this process.
Options& options();

// What a launch did, summed over its threads. Memory is counted as the hardware moves it: a wavefront serves the bytes
// of a warp's access to shared memory that need no bank twice, a sector is 32 bytes of global memory.
enum class Count {
  kBlocks,
  kLdmatrix,
  kMma,
  kShuffle,
  kBarrier,
  kAtomic,
  kCpAsyncBytes,
  kGlobalLoadBytes,
  kGlobalStoreBytes,
  kGlobalLoadSectors,
  kGlobalStoreSectors,
  kSharedWavefronts,       // that accesses took
  kSharedIdealWavefronts,  // that they would take without bank conflicts
  kMatrixWavefronts,       // of ldmatrix and stmatrix alone
  kMatrixIdealWavefronts,
  kWgmma,
  kTmaLoadBytes,
  kTmaStoreBytes,
  kNumCounts
};
const char* name_of(Count count);

using Counters = std::array<uint64_t, size_t(Count::kNumCounts)>;

// Summed over the launches since the last reset.
Counters counters();
void reset_counters();

// Every synchronisation call reached since the last reset, for mutation.
std::vector<SyncSite> sync_sites();
void reset_sync_sites();

}  // namespace cuda_ext::simt
