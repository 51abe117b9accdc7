// The emulated SM: the blocks that are resident on one host thread, and the scheduler that decides which of their
// fibers runs next. One Machine runs one launch on one host thread.
//
// A fiber runs until it has to wait for others; then it parks and switches directly to the next fiber that can run.
// When none can, asynchronous operations in flight complete, one at a time; when none are left, the kernel is
// deadlocked.
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

// The completion of an asynchronous operation; it may wake fibers.
using Action = std::function<void()>;

class MemoryGuard;

class Machine {
 public:
  Machine(const char* kernel, const Geometry& geometry, const std::function<void()>& thread, MemoryGuard& guard);
  ~Machine();

  // Runs these clusters of the grid (blocks, in a launch without clusters) concurrently until all have exited.
  void run(const std::vector<int64_t>& clusters);

  Fiber& current() { return *current_; }
  bool is_running() const { return current_ != nullptr; }
  const Geometry& geometry() const { return geometry_; }
  MemoryGuard& guard() { return guard_; }
  bool ordered_sums() const { return options_.ordered_sums; }
  int float8_sum_bits() const { return options_.float8_sum_bits; }
  bool lazy() const { return options_.completion == Completion::kLazy; }
  Checker* checker() { return checker_.get(); }
  uint64_t& count(Count what) { return counters_[size_t(what)]; }
  const Counters& counters() const { return counters_; }

  // Suspends the current fiber until another one wakes it.
  void park(const Wait& wait);
  void wake(Fiber& fiber);
  // Suspends the current fiber until ready() is true; it is evaluated when no other fiber can run.
  void park_until(const Wait& wait, std::function<bool()> ready);
  // Calls `action` now (eager completion) or when no fiber can run (lazy completion).
  void start(Action action);
  // Switches to a warp of higher priority, if one can run.
  void yield();

  // A warp-wide instruction: every lane of `mask` calls this, and the last one to arrive calls act(arguments of each
  // lane). The others return after that.
  template <class Arguments, class Act>
  void warp_collective(const char* instruction, Site site, uint32_t mask, Arguments& arguments, Act&& act);

  // The same for all 128 threads of a warpgroup.
  template <class Arguments, class Act>
  void warpgroup_collective(const char* instruction, Site site, Arguments& arguments, Act&& act);

  // Records this synchronisation call; returns false if the options say to skip it.
  bool synchronizes(const char* instruction, Site site);

  // The memory at a shared address of the current block, or of `block`. Fails if it is out of bounds or misaligned.
  std::byte* shared(SharedAddress address, int bytes, int alignment, const char* instruction, Site site);
  std::byte* shared(const Block& block, SharedAddress address, int bytes, int alignment, const char* instruction,
                    Site site);
  SharedAddress address_of(const void* pointer) const;
  // The block of the cluster that `address` belongs to; `address` becomes the address within it. Fails if the block has
  // exited.
  Block& owner_of(SharedAddress& address, const char* instruction, Site site);
  Block& block_of_rank(int rank, const char* instruction, Site site);
  // Counts one lane's part of a warp's memory access.
  enum class Space { kSharedLoad, kSharedStore, kGlobalLoad, kGlobalStore };
  void record_access(Space space, uint64_t address, int bytes, Site site);

  // Checks and counts a plain load or store of the current fiber; called if the kernel was compiled with hooks
  // (raw_access.cpp).
  void plain_access(bool write, const void* memory, int bytes, const void* code_address);

  // The mbarrier at `address` of `block`, and its word in shared memory.
  BarrierState& barrier(Block& block, SharedAddress address, const char* instruction, Site site);
  uint64_t* barrier_word(const Block& block, SharedAddress address) const;

  // Ends the launch with an error that names the current fiber.
  [[noreturn]] void fail(const char* instruction, Site site, const char* format, ...)
      __attribute__((format(printf, 4, 5)));
  // Fails if the device lacks the instruction, which compute capability `first` introduced. Those of sm_90 pass 80,
  // because the default device runs kernels for sm_90 too.
  void require(int first, const char* instruction, Site site) {
    if (options_.compute_capability < first) refuse_instruction(instruction, site);
  }
  // wgmma is neither before nor after sm_90a.
  void require_wgmma(const char* instruction, Site site) {
    const int capability = options_.compute_capability;
    if (capability != 90 && capability != 80) refuse_instruction(instruction, site);
  }
  // Products of 8-bit floats in registers are of sm_89 and later, and of the default device.
  void require_float8(const char* instruction, Site site) {
    const int capability = options_.compute_capability;
    if (capability != 80 && capability < 89) refuse_instruction(instruction, site);
  }
  Instruction global_access{nullptr, kNoSite};  // that the emulator is executing; for faults
  // Ends the launch after a segmentation fault of the current fiber.
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
  // The next fiber to run, or null if none can.
  Fiber* choose();
  Fiber* choose_lane(Warp& warp);
  Fiber* choose_or_complete();
  void switch_to(Fiber* next);
  void draw_priority(Warp& warp);
  [[noreturn]] void fail_with(const std::string& message);
  [[noreturn]] void refuse_instruction(const char* instruction, Site site);
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
  std::vector<Stack> stacks_;  // by Fiber::index
  Options options_;
  Counters counters_{};
  std::unique_ptr<Checker> checker_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Warp*> order_;      // under PCT: by priority
  size_t turn_ = 0;               // under FIFO: index into order_
  std::deque<Action> in_flight_;  // started, not complete
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

// Called when a thread exits: completes its bulk stores, or fails if it has not waited for them or for its products.
void complete_stores_at_exit(Fiber& fiber);
void check_wgmma_at_exit(Fiber& fiber);
// Called when a thread of the cluster arrives at the cluster's barrier or exits.
void end_cluster_phase_if_complete(Cluster& cluster);
// Called when a block exits: fails if one of its mbarriers was overwritten.
void check_barriers(Block& block);
// Adds to the list that sync_sites() returns.
void record_sync_site(const SyncSite& site);

extern thread_local Machine* machine __attribute__((tls_model("initial-exec")));

// Marks a scope in which the emulator accesses global memory for an instruction, so that a fault is reported for it.
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
