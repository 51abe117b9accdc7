// mbarriers.
#include <utility>

#include "simt/checker.h"

namespace cuda_ext::simt {

namespace {

constexpr uint64_t kMagic = 0x6d62617272696572;  // what an initialised word holds; nothing else may write there

void end_phase_if_complete(uint64_t* word, BarrierState& state) {
  if (state.pending != 0 || state.bytes != 0) return;
  ++state.phase;
  state.pending = state.expected;
  for (Fiber* fiber : std::exchange(state.waiting, {})) machine->wake(*fiber);
  (void)word;
}

}  // namespace

BarrierState& Machine::barrier(uint64_t* word, const char* instruction, Site site) {
  Block& block = *current_->block;
  const SharedAddress address = address_of(word);
  shared(address, 8, 8, instruction, site);
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail(instruction, site, "no barrier was initialised at 0x%x", address);
  if (*word != kMagic) fail(instruction, site, "the barrier at 0x%x has been overwritten", address);
  return found->second;
}

void barrier_init(uint64_t* word, int arrivals, Site site) {
  const SharedAddress address = machine->address_of(word);
  machine->shared(address, 8, 8, "barrier_init", site);
  if (arrivals < 1 || arrivals >= 1 << 20)
    machine->fail("barrier_init", site, "%d arrivals; a barrier takes 1 to 2^20 - 1", arrivals);
  auto& barriers = machine->current().block->mbarriers;
  if (barriers.count(address) != 0) machine->fail("barrier_init", site, "a barrier at 0x%x is there already", address);
  *word = kMagic;
  BarrierState& state = barriers[address];
  state.expected = state.pending = uint32_t(arrivals);
  if (Checker* checker = machine->checker()) checker->access(Access::kAtomic, word, 8, "barrier_init", site);
}

void barrier_invalidate(uint64_t* word, Site site) {
  const BarrierState& state = machine->barrier(word, "barrier_invalidate", site);
  if (!state.waiting.empty()) machine->fail("barrier_invalidate", site, "threads wait at the barrier");
  machine->current().block->mbarriers.erase(machine->address_of(word));
}

void fence_barrier_init(Site site) { machine->synchronizes("fence_barrier_init", site); }

void fence_async_shared(Site site) {
  if (!machine->synchronizes("fence_async_shared", site)) return;
  if (Checker* checker = machine->checker()) checker->fence_async();
}

void barrier_arrive(uint64_t* word, uint32_t bytes, Site site) {
  if (!machine->synchronizes("barrier_arrive", site)) return;
  BarrierState& state = machine->barrier(word, "barrier_arrive", site);
  ++machine->count(Count::kBarrier);
  if (state.pending == 0)
    machine->fail("barrier_arrive", site, "more than the %u arrivals of phase %u at the barrier at 0x%x",
                  state.expected, state.phase, machine->address_of(word));
  if (Checker* checker = machine->checker()) {
    checker->access(Access::kAtomic, word, 8, "barrier_arrive", site);
    checker->release(word);
  }
  state.bytes += bytes;
  --state.pending;
  end_phase_if_complete(word, state);
}

// Bytes that a copy brought; in whatever fiber's turn it happens.
void complete_bytes(uint64_t* word, BarrierState& state, int64_t bytes) {
  state.bytes -= bytes;
  end_phase_if_complete(word, state);
}

void barrier_wait(uint64_t* word, uint32_t parity, Site site) {
  if (parity > 1) machine->fail("barrier_wait", site, "parity %u; it is 0 or 1", parity);
  if (!machine->synchronizes("barrier_wait", site)) return;
  const SharedAddress address = machine->address_of(word);
  for (;;) {
    BarrierState& state = machine->barrier(word, "barrier_wait", site);
    if ((state.phase & 1) != parity) break;
    state.waiting.push_back(&machine->current());
    machine->park({"barrier_wait", site, address, parity});
  }
  if (Checker* checker = machine->checker()) {
    checker->access(Access::kAtomic, word, 8, "barrier_wait", site);
    checker->acquire(word);
  }
}

}  // namespace cuda_ext::simt
