// Threads, barriers, warp collectives.
#include "simt/checker.h"

namespace cuda_ext::simt {

int thread_index() { return machine->current().thread; }
int block_size() { return machine->geometry().block; }
int block_index(int axis) { return machine->current().block->index[axis]; }
int grid_size(int axis) {
  const Extent& grid = machine->geometry().grid;
  return axis == 0 ? grid.x : axis == 1 ? grid.y : grid.z;
}

namespace {

void arrive(const char* instruction, int number, int threads, bool wait, Site site) {
  Fiber& self = machine->current();
  if (number < 0 || number > 15) machine->fail(instruction, site, "barrier %d; a block has 0 to 15", number);
  if (threads < kLanes || threads % kLanes != 0 || threads > machine->geometry().block)
    if (threads != machine->geometry().block)
      machine->fail(instruction, site, "barrier %d for %d threads; expected a multiple of 32 up to the block's %d",
                    number, threads, machine->geometry().block);
  NamedBarrier& barrier = self.block->barriers[number];
  if (barrier.arrived != 0 && barrier.expected != threads)
    machine->fail(instruction, site, "barrier %d for %d threads, but earlier arrivals of this phase gave %d", number,
                  threads, barrier.expected);
  barrier.expected = threads;
  barrier.arrivals.push_back(self.index);
  if (++barrier.arrived < threads) {
    if (!wait) return;
    barrier.waiting.push_back(&self);
    return machine->park({instruction, site, SharedAddress(number)});
  }
  ++machine->count(Count::kBarrier);
  if (Checker* checker = machine->checker()) checker->join(barrier.arrivals);
  for (Fiber* fiber : barrier.waiting) machine->wake(*fiber);
  barrier.waiting.clear();
  barrier.arrivals.clear();
  barrier.arrived = 0;
}

}  // namespace

void sync_threads(Site site) {
  if (machine->synchronizes("sync_threads", site)) arrive("sync_threads", 0, machine->geometry().block, true, site);
}
void named_barrier(int barrier, int threads, bool wait, Site site) {
  if (machine->synchronizes("named_barrier", site)) arrive("named_barrier", barrier, threads, wait, site);
}

void sync_warp(uint32_t mask, Site site) {
  if (!machine->synchronizes("sync_warp", site)) return;
  int index = machine->current().index;
  machine->warp_collective("sync_warp", site, mask, index, [&](int* const(&all)[kLanes]) {
    Checker* checker = machine->checker();
    if (checker == nullptr) return;
    std::vector<int> fibers;
    for (int* fiber : all)
      if (fiber != nullptr) fibers.push_back(*fiber);
    checker->join(fibers);
  });
}

void fence_device(Site site) {
  if (!machine->synchronizes("fence_device", site)) return;
  if (Checker* checker = machine->checker()) checker->fence_device();
}

namespace {

template <class T>
T shuffle_words(T value, int lane, uint32_t mask, Site site) {
  struct Arguments {
    T value, result;
    int from;
  } mine{value, value, lane};
  machine->warp_collective("shuffle", site, mask, mine, [&](Arguments* const(&all)[kLanes]) {
    ++machine->count(Count::kShuffle);
    for (Arguments* each : all) {
      if (each == nullptr) continue;
      if (all[each->from] == nullptr)
        machine->fail("shuffle", site, "reads lane %d, which the mask 0x%08x leaves out", each->from, mask);
      each->result = all[each->from]->value;
    }
  });
  return mine.result;
}

}  // namespace

uint32_t shuffle(uint32_t value, int lane, uint32_t mask, Site site) { return shuffle_words(value, lane, mask, site); }
uint64_t shuffle(uint64_t value, int lane, uint32_t mask, Site site) { return shuffle_words(value, lane, mask, site); }

uint32_t ballot(bool predicate, uint32_t mask, Site site) {
  struct Arguments {
    bool predicate;
    uint32_t result;
  } mine{predicate, 0};
  machine->warp_collective("ballot", site, mask, mine, [&](Arguments* const(&all)[kLanes]) {
    uint32_t votes = 0;
    for (int lane = 0; lane < kLanes; ++lane)
      if (all[lane] != nullptr && all[lane]->predicate) votes |= uint32_t(1) << lane;
    for (Arguments* each : all)
      if (each != nullptr) each->result = votes;
  });
  return mine.result;
}

}  // namespace cuda_ext::simt
