// Clusters: ranks, their barrier, access to the shared memory of other blocks; and setmaxnreg.
#include <utility>

#include "simt/checker.h"

namespace cuda_ext::simt {

int cluster_rank() { return machine->current().block->rank; }
int cluster_size() { return int(machine->current().block->cluster->blocks.size()); }

SharedAddress mapa(SharedAddress address, int rank, Site site) {
  machine->require(80, "mapa", site);
  machine->shared(address, 1, 1, "mapa", site);
  machine->block_of_rank(rank, "mapa", site);
  return address | SharedAddress(rank + 1) << kRankShift;
}

namespace {

// The checker's keys for the phases that have ended and for the current one.
const void* ended(const Cluster& cluster) { return &cluster.phase; }
const void* open(const Cluster& cluster) { return &cluster.arrived; }

}  // namespace

void end_cluster_phase_if_complete(Cluster& cluster) {
  if (cluster.arrived == 0 || cluster.arrived < cluster.threads_left) return;
  cluster.arrived = 0;
  ++cluster.phase;
  if (Checker* checker = machine->checker()) checker->transfer(open(cluster), ended(cluster));
  for (Fiber* fiber : std::exchange(cluster.waiting, {})) machine->wake(*fiber);
}

void cluster_arrive(bool relaxed, Site site) {
  machine->require(80, "cluster_arrive", site);
  const char* const instruction = relaxed ? "cluster_arrive_relaxed" : "cluster_arrive";
  if (!machine->synchronizes(instruction, site)) return;
  Fiber& self = machine->current();
  if (self.in_cluster_barrier) machine->fail(instruction, site, "the thread has already arrived and not yet waited");
  Cluster& cluster = *self.block->cluster;
  self.in_cluster_barrier = true;
  self.cluster_phase = cluster.phase;
  if (Checker* checker = machine->checker()) {
    if (relaxed)
      checker->release_fenced(open(cluster));
    else
      checker->release(open(cluster));
  }
  ++cluster.arrived;
  end_cluster_phase_if_complete(cluster);
}

void cluster_wait(Site site) {
  if (!machine->synchronizes("cluster_wait", site)) {
    machine->current().in_cluster_barrier = false;
    return;
  }
  Fiber& self = machine->current();
  if (!self.in_cluster_barrier) machine->fail("cluster_wait", site, "the thread has not arrived");
  Cluster& cluster = *self.block->cluster;
  while (cluster.phase == self.cluster_phase) {
    cluster.waiting.push_back(&self);
    machine->park({"cluster_wait", site});
  }
  self.in_cluster_barrier = false;
  if (Checker* checker = machine->checker()) checker->acquire(ended(cluster));
}

void load_shared_cluster(void* to, SharedAddress from, int bytes, Site site) {
  const Block& owner = machine->owner_of(from, "load_shared_cluster", site);
  const std::byte* at = machine->shared(owner, from, bytes, bytes, "load_shared_cluster", site);
  if (Checker* checker = machine->checker()) checker->access(Access::kRead, at, bytes, "load_shared_cluster", site);
  std::memcpy(to, at, size_t(bytes));
}
void store_shared_cluster(SharedAddress to, const void* from, int bytes, Site site) {
  const Block& owner = machine->owner_of(to, "store_shared_cluster", site);
  std::byte* at = machine->shared(owner, to, bytes, bytes, "store_shared_cluster", site);
  if (Checker* checker = machine->checker()) checker->access(Access::kWrite, at, bytes, "store_shared_cluster", site);
  std::memcpy(at, from, size_t(bytes));
}

// The emulator runs kernels one after the other, so there is nothing to wait for.
void grid_dependency_wait(Site site) { machine->synchronizes("grid_dependency_wait", site); }
void grid_launch_dependents(Site site) { machine->synchronizes("grid_launch_dependents", site); }

void set_max_registers(int count, bool increase, Site site) {
  const char* const instruction = increase ? "increase_registers" : "decrease_registers";
  if (count % 8 != 0 || count < 24 || count > 256)
    machine->fail(instruction, site, "expected a multiple of 8 from 24 to 256 registers, got %d", count);
  machine->warpgroup_collective(instruction, site, count, [&](const std::array<int*, kWarpgroupThreads>& all) {
    for (const int* other : all)
      if (*other != count)
        machine->fail(instruction, site, "%d registers, but other threads ask for %d", count, *other);
    Block& block = *machine->current().block;
    Warpgroup& group = block.warpgroups[size_t(machine->current().thread / kWarpgroupThreads)];
    if (increase ? count < group.registers : count > group.registers)
      machine->fail(instruction, site, "%d registers, but the thread has %d", count, group.registers);
    if (increase) return;
    block.registers_left += (group.registers - count) * kWarpgroupThreads;
    group.registers = count;
  });
  if (!increase) return;
  // As on the hardware, wait until other warps have released enough registers.
  Fiber& self = machine->current();
  Block& block = *self.block;
  Warpgroup& group = block.warpgroups[size_t(self.thread / kWarpgroupThreads)];
  machine->park_until({instruction, site}, [&block, &group, count] {
    return group.registers >= count || (count - group.registers) * kWarpgroupThreads <= block.registers_left;
  });
  if (group.registers >= count) return;
  block.registers_left -= (count - group.registers) * kWarpgroupThreads;
  group.registers = count;
}

}  // namespace cuda_ext::simt
