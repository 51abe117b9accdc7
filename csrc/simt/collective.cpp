// Checks of instructions that a whole warp or warpgroup executes together.
#include <cstdlib>
#include <cstring>

#include "simt/machine.h"

namespace cuda_ext::simt {

WarpgroupCollective& Machine::join_warpgroup_collective(const char* instruction, Site site) {
  Block& block = *current_->block;
  const int group = current_->thread / kWarpgroupThreads;
  if ((group + 1) * kWarpgroupThreads > geometry_.block)
    fail(instruction, site, "the threads from %d on are not a full warpgroup of %d in a block of %d",
         group * kWarpgroupThreads, kWarpgroupThreads, geometry_.block);
  WarpgroupCollective& collective = block.warpgroups[size_t(group)].collective;
  if (collective.instruction == nullptr) {
    for (int t = group * kWarpgroupThreads; t < (group + 1) * kWarpgroupThreads; ++t)
      if (block.fibers[t].exited) fail(instruction, site, "thread %d of the warpgroup has exited", t);
    collective.instruction = instruction;
    collective.site = site;
  } else if (std::strcmp(collective.instruction, instruction) != 0 || collective.site.line != site.line) {
    fail(instruction, site, "the warpgroup has diverged: other threads are at %s, %s", collective.instruction,
         location(collective.site).c_str());
  }
  return collective;
}

void Machine::reject_warp_collective(const char* instruction, Site site, uint32_t mask) {
  const Warp& warp = *current_->warp;
  if ((mask >> current_->lane & 1) == 0) fail(instruction, site, "the mask 0x%08x leaves out this lane", mask);
  if ((mask & ~warp.alive) != 0)
    fail(instruction, site, "the mask 0x%08x contains lanes that have exited; 0x%08x are left", mask, warp.alive);
  for (const WarpCollective& other : warp.collectives)
    if ((other.mask & mask) != 0)
      fail(instruction, site, "the warp has diverged: other lanes are at %s, %s with mask 0x%08x; this mask is 0x%08x",
           other.instruction, location(other.site).c_str(), other.mask, mask);
  std::abort();
}

}  // namespace cuda_ext::simt
