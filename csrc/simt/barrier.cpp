// mbarriers, and the fences that go with them.
#include <utility>

#include "simt/engines.h"

namespace cuda_ext::simt {

namespace {

constexpr uint64_t kMagic = 0x6d62617272696572;  // value of an initialised word; nothing else may write there
constexpr int64_t kMaxBytes = (1 << 20) - 1;     // that a phase can wait for
constexpr int kCheckedBytes = 2;                 // one cell of the checker represents the whole word

// The checker's keys for a barrier: for the phases that have ended and for the current one. Releases by threads of
// other blocks have separate keys, because a wait with block scope does not acquire them.
struct Keys {
  explicit Keys(const uint64_t* word) : at(reinterpret_cast<const char*>(word)) {}
  const char* at;
  const void* ended() const { return at; }
  const void* open() const { return at + 1; }
  const void* remote_ended() const { return at + 2; }
  const void* remote_open() const { return at + 3; }
};

void end_phase_if_complete(const uint64_t* word, BarrierState& state) {
  if (state.pending != 0 || state.bytes != 0) return;
  ++state.phase;
  state.pending = state.expected;
  if (Checker* checker = machine->checker()) {
    checker->transfer(Keys(word).open(), Keys(word).ended());
    checker->transfer(Keys(word).remote_open(), Keys(word).remote_ended());
  }
  for (Fiber* fiber : std::exchange(state.waiting, {})) machine->wake(*fiber);
}

// Each use of the barrier must be ordered after its initialisation, and before its memory is reused.
void check_use(const uint64_t* word, const char* instruction, Site site) {
  if (Checker* checker = machine->checker()) checker->access(Access::kRead, word, kCheckedBytes, instruction, site);
}

void announce(const uint64_t* word, BarrierState& state, uint32_t bytes, const char* instruction, Site site) {
  state.bytes += bytes;
  if (state.bytes > kMaxBytes)
    machine->fail(instruction, site,
                  "phase %u of the barrier at 0x%x waits for %lld bytes; at most 2^20 - 1 are possible", state.phase,
                  machine->address_of(word), (long long)state.bytes);
}

void arrive(Block& block, SharedAddress address, uint32_t bytes, const char* instruction, Site site) {
  BarrierState& state = machine->barrier(block, address, instruction, site);
  const uint64_t* word = machine->barrier_word(block, address);
  ++machine->count(Count::kBarrier);
  if (state.pending == 0)
    machine->fail(instruction, site, "more than %u arrivals in phase %u of the barrier at 0x%x", state.expected,
                  state.phase, address);
  check_use(word, instruction, site);
  if (Checker* checker = machine->checker())
    checker->release(&block == machine->current().block ? Keys(word).open() : Keys(word).remote_open());
  announce(word, state, bytes, instruction, site);
  --state.pending;
  end_phase_if_complete(word, state);
}

}  // namespace

BarrierState& Machine::barrier(Block& block, SharedAddress address, const char* instruction, Site site) {
  shared(block, address, 8, 8, instruction, site);
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail(instruction, site, "no barrier has been initialised at 0x%x", address);
  if (*barrier_word(block, address) != kMagic)
    fail(instruction, site, "the barrier at 0x%x has been overwritten", address);
  return found->second;
}
uint64_t* Machine::barrier_word(const Block& block, SharedAddress address) const {
  return reinterpret_cast<uint64_t*>(block.shared + address);
}

void check_barriers(Block& block) {
  for (const auto& [address, state] : block.mbarriers)
    if (*machine->barrier_word(block, address) != kMagic)
      machine->fail("exit", kNoSite, "the barrier at 0x%x has been overwritten, and was never invalidated", address);
}

void barrier_init(uint64_t* word, int arrivals, Site site) {
  machine->require(80, "barrier_init", site);
  const SharedAddress address = machine->address_of(word);
  machine->shared(address, 8, 8, "barrier_init", site);
  if (arrivals < 1 || arrivals >= 1 << 20)
    machine->fail("barrier_init", site, "expected 1 to 2^20 - 1 arrivals, got %d", arrivals);
  auto& barriers = machine->current().block->mbarriers;
  if (barriers.count(address) != 0) machine->fail("barrier_init", site, "there is already a barrier at 0x%x", address);
  *word = kMagic;
  BarrierState& state = barriers[address];
  state.expected = state.pending = uint32_t(arrivals);
  if (Checker* checker = machine->checker()) {
    checker->access(Access::kWrite, word, 8, "barrier_init", site);
    for (int key = 0; key < 4; ++key) checker->forget(Keys(word).at + key);
  }
}

void barrier_invalidate(uint64_t* word, Site site) {
  Block& block = *machine->current().block;
  const SharedAddress address = machine->address_of(word);
  const BarrierState& state = machine->barrier(block, address, "barrier_invalidate", site);
  if (!state.waiting.empty()) machine->fail("barrier_invalidate", site, "threads are waiting at the barrier");
  if (state.copies != 0) machine->fail("barrier_invalidate", site, "copies that the barrier counts are in flight");
  if (Checker* checker = machine->checker()) checker->access(Access::kWrite, word, 8, "barrier_invalidate", site);
  block.mbarriers.erase(address);
}

void fence_barrier_init(Site site) {
  if (!machine->synchronizes("fence_barrier_init", site)) return;
  if (Checker* checker = machine->checker()) checker->fence_barrier_init();
}

void fence_async_shared(Site site) {
  if (!machine->synchronizes("fence_async_shared", site)) return;
  if (Checker* checker = machine->checker()) checker->fence_async();
}

void barrier_arrive(uint64_t* word, Site site) {
  if (!machine->synchronizes("barrier_arrive", site)) return;
  arrive(*machine->current().block, machine->address_of(word), 0, "barrier_arrive", site);
}
void barrier_arrive_expect(uint64_t* word, uint32_t bytes, Site site) {
  if (!machine->synchronizes("barrier_arrive_expect", site)) return;
  arrive(*machine->current().block, machine->address_of(word), bytes, "barrier_arrive_expect", site);
}
void barrier_arrive_remote(SharedAddress barrier, Site site) {
  if (!machine->synchronizes("barrier_arrive_remote", site)) return;
  Block& owner = machine->owner_of(barrier, "barrier_arrive_remote", site);
  arrive(owner, barrier, 0, "barrier_arrive_remote", site);
}
void barrier_expect(uint64_t* word, uint32_t bytes, Site site) {
  if (!machine->synchronizes("barrier_expect", site)) return;
  BarrierState& state = machine->barrier(*machine->current().block, machine->address_of(word), "barrier_expect", site);
  check_use(word, "barrier_expect", site);
  announce(word, state, bytes, "barrier_expect", site);
}

void start_copy(Block& block, SharedAddress address, const Operation* operation, const char* instruction, Site site) {
  BarrierState& state = machine->barrier(block, address, instruction, site);
  ++state.copies;
  ++block.copies;
  if (operation != nullptr)
    machine->checker()->access(*operation, Access::kAsyncRead, machine->barrier_word(block, address), kCheckedBytes,
                               instruction, site);
}
void end_copy(Block& block, SharedAddress address, int64_t bytes, const Operation* operation) {
  BarrierState& state = block.mbarriers.at(address);
  const uint64_t* word = machine->barrier_word(block, address);
  --state.copies;
  --block.copies;
  if (operation != nullptr) machine->checker()->end(*operation, Keys(word).open());
  state.bytes -= bytes;
  end_phase_if_complete(word, state);
}

void barrier_wait(uint64_t* word, uint32_t parity, bool cluster, Site site) {
  const char* const instruction = cluster ? "barrier_wait_cluster" : "barrier_wait";
  if (parity > 1) machine->fail(instruction, site, "expected parity 0 or 1, got %u", parity);
  if (!machine->synchronizes(instruction, site)) return;
  const SharedAddress address = machine->address_of(word);
  for (;;) {
    BarrierState& state = machine->barrier(*machine->current().block, address, instruction, site);
    check_use(word, instruction, site);
    if ((state.phase & 1) != parity) break;
    state.waiting.push_back(&machine->current());
    machine->park({instruction, site, address, parity});
  }
  if (Checker* checker = machine->checker()) {
    checker->acquire(Keys(word).ended());
    if (cluster) checker->acquire(Keys(word).remote_ended());
  }
}

}  // namespace cuda_ext::simt
