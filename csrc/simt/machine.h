// The emulated multiprocessor: the blocks that are resident on one thread of the host, their warps and fibers, and the
// scheduler that decides which fiber runs next. One Machine serves one launch on one host thread.
//
// A fiber runs until it has to wait for others; then it parks and jumps straight to the next fiber that can run. When
// none can, asynchronous copies that are still under way complete, one at a time; when none are left, it is a deadlock.
#pragma once

#include <bit>
#include <cstdarg>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "simt/block.h"
#include "simt/launch.h"

namespace cuda_ext::simt {

class Checker;

// Something the hardware does on its own: when it acts, fibers may become runnable.
using Action = std::function<void()>;

class MemoryGuard;

class Machine {
 public:
  Machine(const char* kernel, const Geometry& geometry, const std::function<void()>& thread, MemoryGuard& guard);
  ~Machine();

  // Runs cluster `cluster` of the grid (a block, where there are no clusters) to its end.
  void run(const std::vector<int64_t>& clusters);

  Fiber& current() { return *current_; }
  bool is_running() const { return current_ != nullptr; }
  const Geometry& geometry() const { return geometry_; }
  MemoryGuard& guard() { return guard_; }
  bool ordered_sums() const { return options_.ordered_sums; }
  bool lazy() const { return options_.completion == Completion::kLazy; }
  Checker* checker() { return checker_.get(); }
  uint64_t& count(Count what) { return counters_[size_t(what)]; }
  const Counters& counters() const { return counters_; }

  // The current fiber waits until somebody wakes it.
  void park(const Wait& wait);
  void wake(Fiber& fiber);
  // The current fiber waits until `ready` holds; it is asked when nothing else can run.
  void park_until(const Wait& wait, std::function<bool()> ready);
  // Lets `action` happen: now, or when no fiber can run.
  void start(Action action);
  // Lets a warp of higher priority go first.
  void yield();

  // All lanes of `mask` have to come here; the last to come calls act(arguments of each lane) and returns, the others
  // return after it.
  template <class Arguments, class Act>
  void warp_collective(const char* instruction, Site site, uint32_t mask, Arguments& arguments, Act&& act);

  // The same for the 128 threads of a warpgroup.
  template <class Arguments, class Act>
  void warpgroup_collective(const char* instruction, Site site, Arguments& arguments, Act&& act);

  // Whether this synchronisation call is to be carried out: it is noted, and a mutation leaves one out.
  bool synchronizes(const char* instruction, Site site);

  // `bytes` of shared memory at `address` of the current block, or of this one.
  std::byte* shared(SharedAddress address, int bytes, int alignment, const char* instruction, Site site);
  std::byte* shared(const Block& block, SharedAddress address, int bytes, int alignment, const char* instruction,
                    Site site);
  SharedAddress address_of(const void* pointer) const;
  // The block that an address of the cluster's window belongs to, and its address there; fails if the block has exited.
  Block& owner_of(SharedAddress& address, const char* instruction, Site site);
  Block& block_of_rank(int rank, const char* instruction, Site site);
  // One lane's part of a warp's access to memory, for the counters.
  enum class Space { kSharedLoad, kSharedStore, kGlobalLoad, kGlobalStore };
  void record_access(Space space, uint64_t address, int bytes, Site site);

  // A plain load or store of the current fiber, seen where kernels are compiled with hooks (raw_access.cpp).
  void plain_access(bool write, const void* memory, int bytes, const void* code_address);

  // The mbarrier at `address` of `block`, and its word.
  BarrierState& barrier(Block& block, SharedAddress address, const char* instruction, Site site);
  uint64_t* barrier_word(const Block& block, SharedAddress address) const;

  // Ends the launch with what is wrong, as seen from the current fiber.
  [[noreturn]] void fail(const char* instruction, Site site, const char* format, ...)
      __attribute__((format(printf, 4, 5)));
  Instruction global_access{nullptr, kNoSite};  // under way, by the emulator
  // Where a signal of bad memory lands, on the stack of the fiber that met it.
  [[noreturn]] void bad_memory(const void* memory, const void* code);
  std::string describe(const Fiber& fiber) const;
  std::string describe_address(const void* memory) const;
  const char* kernel() const { return kernel_; }
  uint64_t random();

 private:
  friend void fiber_main();
  void start_block(int64_t cluster, int rank);
  void end_block(Block& block);
  [[noreturn]] void exit_current();
  // The next fiber that can run, or null.
  Fiber* choose();
  Fiber* choose_lane(Warp& warp);
  Fiber* choose_or_complete();
  void switch_to(Fiber* next);
  void draw_priority(Warp& warp);
  [[noreturn]] void fail_with(const std::string& message);
  std::string deadlock_table() const;
  std::string describe_barrier(const Fiber& fiber) const;
  WarpCollective& join_warp_collective(const char* instruction, Site site, uint32_t mask);
  [[noreturn]] void reject_warp_collective(const char* instruction, Site site, uint32_t mask);
  void count_access(Space space, const WarpAccess& access);
  void sort_by_priority();
  WarpgroupCollective& join_warpgroup_collective(const char* instruction, Site site);

  const char* kernel_;
  Geometry geometry_;
  const std::function<void()>& thread_;
  MemoryGuard& guard_;
  std::vector<Stack> stacks_;  // of the fibers
  Options options_;
  Counters counters_{};
  std::unique_ptr<Checker> checker_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Warp*> order_;  // PCT: by priority
  size_t turn_ = 0;           // FIFO: index into order_
  std::deque<Action> in_flight_;
  struct Poller {
    Fiber* fiber;
    std::function<bool()> ready;
  };
  std::vector<Poller> pollers_;
  Fiber* current_ = nullptr;
  void* main_stack_ = nullptr;
  int fibers_left_ = 0;
  uint64_t random_state_;
  std::optional<std::string> failure_;
  std::set<std::tuple<const char*, int, const char*>> recorded_sites_;
};

// What the bulk engine and the tensor cores still owe a thread that exits.
void complete_stores_at_exit(Fiber& fiber);
void check_wgmma_at_exit(Fiber& fiber);
// A thread of the cluster has arrived at its barrier, or exited.
void end_cluster_phase_if_complete(Cluster& cluster);
// Fails if a barrier of the block that ends has been overwritten.
void check_barriers(Block& block);
// For mutations to choose from.
void record_sync_site(const SyncSite& site);

extern thread_local Machine* machine __attribute__((tls_model("initial-exec")));

// While it lives the emulator reads or writes global memory for this instruction: a fault is the instruction's.
class GlobalAccess {
 public:
  GlobalAccess(const char* instruction, Site site) : before_(machine->global_access) {
    machine->global_access = {instruction, site};
  }
  ~GlobalAccess() { machine->global_access = before_; }
  GlobalAccess(const GlobalAccess&) = delete;
  GlobalAccess& operator=(const GlobalAccess&) = delete;

 private:
  Instruction before_;
};

inline WarpCollective& Machine::join_warp_collective(const char* instruction, Site site, uint32_t mask) {
  Warp& warp = *current_->warp;
  const uint32_t mine = uint32_t(1) << current_->lane;
  WarpCollective& collective = warp.collectives[std::countr_zero(mask | uint32_t(1) << 31)];
  if (collective.mask == 0) {
    if ((mask & mine) == 0 || (mask & ~warp.alive) != 0 || (mask & warp.in_collective) != 0)
      reject_warp_collective(instruction, site, mask);
    collective.instruction = instruction;
    collective.site = site;
    collective.mask = mask;
    collective.arrived = 0;
    warp.in_collective |= mask;
  } else if (collective.mask != mask || collective.instruction != instruction || collective.site.line != site.line) {
    reject_warp_collective(instruction, site, mask);
  }
  collective.arrived |= mine;
  return collective;
}

template <class Arguments, class Act>
void Machine::warp_collective(const char* instruction, Site site, uint32_t mask, Arguments& arguments, Act&& act) {
  WarpCollective& collective = join_warp_collective(instruction, site, mask);
  Warp& warp = *current_->warp;
  collective.arguments[current_->lane] = &arguments;
  if (collective.arrived != mask) return park({instruction, site});
  Arguments* all[kLanes];
  for (int lane = 0; lane < kLanes; ++lane)
    all[lane] = mask >> lane & 1 ? static_cast<Arguments*>(collective.arguments[lane]) : nullptr;
  collective.mask = 0;
  warp.in_collective &= ~mask;
  act(all);
  warp.runnable |= mask;
}

template <class Arguments, class Act>
void Machine::warpgroup_collective(const char* instruction, Site site, Arguments& arguments, Act&& act) {
  WarpgroupCollective& collective = join_warpgroup_collective(instruction, site);
  const int first = current_->thread / kWarpgroupThreads * kWarpgroupThreads;
  collective.arguments[size_t(current_->thread - first)] = &arguments;
  if (++collective.arrived < kWarpgroupThreads) return park({instruction, site});
  std::array<Arguments*, kWarpgroupThreads> all;
  for (int t = 0; t < kWarpgroupThreads; ++t) all[size_t(t)] = static_cast<Arguments*>(collective.arguments[size_t(t)]);
  collective.instruction = nullptr;
  collective.arrived = 0;
  act(all);
  for (int t = 0; t < kWarpgroupThreads; ++t) wake(current_->block->fibers[first + t]);
}

}  // namespace cuda_ext::simt
