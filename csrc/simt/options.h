// Options of the emulator, and what it recorded about launches.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/device.h"
#include "simt/api.h"

namespace cuda_ext::simt {

// When asynchronous copies and matrix products take effect: as soon as they are issued, or as late as the kernel's
// waits allow, with NaNs at their destination until then.
enum class Completion { kEager, kLazy };

// Which warp runs next: in turn, or the one with the highest random priority, with occasional priority changes (PCT:
// Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010).
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
  bool check_races = false;   // run the happens-before checker; uses one host thread
  bool ordered_sums = false;  // unordered atomic additions of floats are races too
  int threads = 0;            // host threads; 0: one per core
  // Significant bits in sums of products of 8-bit floats, see float8_sum.h; 0: sums in float32, as of other types.
  int float8_sum_bits = 0;
  const SyncSite* skip = nullptr;  // a mutation: calls from this site do nothing
  // The device that launchers see. It has few SMs, so that small problems have several waves or are split.
  int compute_capability = 80;
  int num_sms = 4;

  int shared_bytes() const { return rt::shared_bytes_of_sm(compute_capability); }  // of an SM
};

// Options of later launches in this process.
Options& options();

// What launches did, summed over their threads. A wavefront is the part of a warp's shared-memory access that uses no
// bank twice; a sector is 32 bytes of global memory.
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
  kSharedWavefronts,       // of loads and stores
  kSharedIdealWavefronts,  // the same without bank conflicts
  kMatrixWavefronts,       // of ldmatrix and stmatrix
  kMatrixIdealWavefronts,
  kWgmma,
  kTmaLoadBytes,
  kTmaStoreBytes,
  kNumCounts
};
const char* name_of(Count count);

using Counters = std::array<uint64_t, size_t(Count::kNumCounts)>;

// Sums over all launches since the last reset.
Counters counters();
void reset_counters();

// The synchronisation calls reached since the last reset; a mutation test skips each in turn.
std::vector<SyncSite> sync_sites();
void reset_sync_sites();

}  // namespace cuda_ext::simt
