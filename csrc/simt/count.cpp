// Counters: how the hardware would serve memory accesses.
#include <algorithm>
#include <bit>

#include "simt/machine.h"

namespace cuda_ext::simt {

const char* name_of(Count count) {
  static constexpr const char* names[] = {"blocks",
                                          "ldmatrix",
                                          "mma",
                                          "shuffle",
                                          "barrier",
                                          "atomic",
                                          "cp_async_bytes",
                                          "global_load_bytes",
                                          "global_store_bytes",
                                          "global_load_sectors",
                                          "global_store_sectors",
                                          "shared_wavefronts",
                                          "shared_ideal_wavefronts",
                                          "matrix_wavefronts",
                                          "matrix_ideal_wavefronts",
                                          "wgmma",
                                          "tma_load_bytes",
                                          "tma_store_bytes"};
  static_assert(std::size(names) == size_t(Count::kNumCounts));
  return names[size_t(count)];
}

void Machine::record_access(Space space, uint64_t address, int bytes, Site site) {
  Fiber& self = *current_;
  Warp& warp = *self.warp;
  // The width is part of the key because template instances of different widths share a source line.
  const uint64_t instruction =
      (reinterpret_cast<uintptr_t>(site.file) * 31 + uint64_t(site.line)) * 32 + uint64_t(bytes);
  const uint64_t key = instruction << 2 | uint64_t(space);
  if (warp.last_access == nullptr || warp.last_key != key) {
    warp.last_access = &warp.accesses[key];
    warp.last_key = key;
  }
  AccessStream& stream = *warp.last_access;
  const uint32_t turn = stream.next[self.lane]++ - stream.first;
  if (turn >= stream.open.size()) stream.open.resize(turn + 1);
  WarpAccess& access = stream.open[turn];
  access.lanes |= uint32_t(1) << self.lane;
  access.addresses[self.lane] = address;
  access.bytes = bytes;
  // An access that some lanes skip stays open until the warp exits.
  while (!stream.open.empty() && stream.open.front().lanes == ~uint32_t(0)) {
    count_access(space, stream.open.front());
    stream.open.pop_front();
    ++stream.first;
  }
}

static int wavefronts_of(uint32_t lanes, const uint64_t* addresses, int bytes, int* ideal) {
  const int lanes_per_phase = bytes <= 4 ? 32 : 128 / bytes;  // the hardware serves 128 bytes at a time
  int wavefronts = 0;
  *ideal = 0;
  for (int first = 0; first < kLanes; first += lanes_per_phase) {
    uint64_t words[32][8];
    int per_bank[32] = {};
    int most = 0;
    for (int lane = first; lane < first + lanes_per_phase; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      for (uint64_t word = addresses[lane] / 4; word * 4 < addresses[lane] + uint64_t(bytes); ++word) {
        const int bank = int(word % 32);
        const int known = std::min(per_bank[bank], 8);
        if (std::find(words[bank], words[bank] + known, word) != words[bank] + known) continue;
        if (known < 8) words[bank][known] = word;
        most = std::max(most, ++per_bank[bank]);
      }
    }
    wavefronts += most;
    *ideal += most > 0;
  }
  return wavefronts;
}

void Machine::count_access(Space space, const WarpAccess& access) {
  if (space == Space::kSharedLoad || space == Space::kSharedStore) {
    int ideal = 0;
    count(Count::kSharedWavefronts) += wavefronts_of(access.lanes, access.addresses, access.bytes, &ideal);
    count(Count::kSharedIdealWavefronts) += ideal;
    return;
  }
  std::array<uint64_t, kLanes * 2> sectors;
  size_t num_sectors = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(access.lanes >> lane & 1)) continue;
    const uint64_t begin = access.addresses[lane] / 32, end = (access.addresses[lane] + access.bytes - 1) / 32;
    for (uint64_t sector = begin; sector <= end; ++sector) {
      if (std::find(sectors.begin(), sectors.begin() + num_sectors, sector) == sectors.begin() + num_sectors)
        sectors[num_sectors++] = sector;
    }
  }
  const bool store = space == Space::kGlobalStore;
  count(store ? Count::kGlobalStoreSectors : Count::kGlobalLoadSectors) += num_sectors;
  count(store ? Count::kGlobalStoreBytes : Count::kGlobalLoadBytes) +=
      uint64_t(std::popcount(access.lanes) * access.bytes);
}

}  // namespace cuda_ext::simt
