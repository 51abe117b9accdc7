#include "simt/machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "simt/checker.h"

namespace cuda_ext::simt {

// The only thread-local variable: a process reserves little static TLS for libraries that it loads at run time.
thread_local Machine* machine = nullptr;

namespace {

constexpr uint32_t kCanaryBytes = 256;
constexpr auto kCanary = std::byte{0xa5};

// Stacks are reused by later launches.
std::mutex free_stacks_mutex;
std::vector<std::vector<Stack>> free_stacks;

std::vector<Stack> acquire_stacks() {
  const std::lock_guard<std::mutex> lock(free_stacks_mutex);
  if (free_stacks.empty()) return {};
  std::vector<Stack> stacks = std::move(free_stacks.back());
  free_stacks.pop_back();
  return stacks;
}
void release_stacks(std::vector<Stack> stacks) {
  const std::lock_guard<std::mutex> lock(free_stacks_mutex);
  free_stacks.push_back(std::move(stacks));
}

// Registers per thread at launch: an even share, as ptxas assigns to kernels that use setmaxnreg.
constexpr int kRegisters = 65536;
int registers_at_start(int threads) { return std::min(248, kRegisters / threads / 8 * 8); }

}  // namespace

// The entry of every fiber.
void fiber_main() {
  try {
    machine->thread_();
  } catch (const std::exception& error) {
    machine->fail_with(std::string(machine->kernel_) + ": " + error.what());
  }
  machine->exit_current();
}

Machine::Machine(const char* kernel, const Geometry& geometry, const std::function<void()>& thread, MemoryGuard& guard)
    : kernel_(kernel),
      geometry_(geometry),
      thread_(thread),
      guard_(guard),
      stacks_(acquire_stacks()),
      options_(options()),
      random_state_(options_.seed * 0x9e3779b97f4a7c15 + 0x1234567) {
  if (options_.check_races) checker_ = std::make_unique<Checker>(*this);
}

Machine::~Machine() {
  for (auto& block : blocks_)
    if (block->shared != nullptr) std::free(block->shared);
  release_stacks(std::move(stacks_));
}

void Machine::start_block(int64_t cluster, int rank) {
  const Extent& c = geometry_.cluster;
  const Extent clusters{geometry_.grid.x / c.x, geometry_.grid.y / c.y, geometry_.grid.z / c.z};
  auto block = std::make_unique<Block>();
  block->index[0] = int(cluster % clusters.x) * c.x + rank % c.x;
  block->index[1] = int(cluster / clusters.x % clusters.y) * c.y + rank / c.x % c.y;
  block->index[2] = int(cluster / clusters.x / clusters.y) * c.z + rank / c.x / c.y;
  block->rank = rank;
  block->number = int(blocks_.size());
  block->shared_end = kReservedSharedBytes + uint32_t(geometry_.shared_bytes);
  const size_t window = (block->shared_end + kCanaryBytes + 1023) / 1024 * 1024;
  block->shared = static_cast<std::byte*>(std::aligned_alloc(1024, window));
  std::memset(block->shared, kPoison, block->shared_end);
  std::fill(block->shared + block->shared_end, block->shared + window, kCanary);
  if (checker_) checker_->add_shared(block->shared, block->shared_end);

  const int threads = geometry_.block, num_warps = (threads + kLanes - 1) / kLanes;
  block->threads_left = threads;
  block->cluster = clusters_.back().get();
  block->cluster->blocks.push_back(block.get());
  block->cluster->threads_left += threads;
  block->priority = uint32_t(random());
  block->warpgroups.resize(size_t(threads + kWarpgroupThreads - 1) / kWarpgroupThreads);
  const int registers = registers_at_start(threads);
  block->registers_left = kRegisters - registers * threads;
  for (Warpgroup& warpgroup : block->warpgroups) warpgroup.registers = registers;
  block->fibers = std::make_unique<Fiber[]>(threads);
  block->warps.resize(num_warps);
  for (int w = 0; w < num_warps; ++w) {
    Warp& warp = block->warps[w];
    warp.block = block.get();
    warp.index = w;
    warp.number = block->number * num_warps + w;
    warp.fibers = block->fibers.get() + w * kLanes;
    const int lanes = std::min(kLanes, threads - w * kLanes);
    warp.alive = warp.runnable = lanes == kLanes ? ~uint32_t(0) : (uint32_t(1) << lanes) - 1;
    draw_priority(warp);
    order_.push_back(&warp);
  }
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = block->fibers[t];
    fiber.block = block.get();
    fiber.warp = &block->warps[t / kLanes];
    fiber.lane = t % kLanes;
    fiber.thread = t;
    fiber.index = block->number * threads + t;
    if (stacks_.size() <= size_t(fiber.index)) stacks_.emplace_back();
    fiber.stack = &stacks_[fiber.index];
  }
  blocks_.push_back(std::move(block));
}

void Machine::run(const std::vector<int64_t>& clusters) {
  machine = this;
  for (auto& block : blocks_) std::free(std::exchange(block->shared, nullptr));
  blocks_.clear();
  clusters_.clear();
  in_flight_.clear();
  pollers_.clear();
  order_.clear();
  turn_ = 0;
  const size_t num_threads = clusters.size() * size_t(geometry_.cluster.count()) * size_t(geometry_.block);
  stacks_.reserve(num_threads);
  if (checker_) checker_->start_blocks(num_threads);
  for (const int64_t cluster : clusters) {
    clusters_.push_back(std::make_unique<Cluster>());
    for (int rank = 0; rank < geometry_.cluster.count(); ++rank) start_block(cluster, rank);
  }
  fibers_left_ = 0;
  for (auto& block : blocks_) {
    fibers_left_ += geometry_.block;
    for (int t = 0; t < geometry_.block; ++t) {
      Fiber& fiber = block->fibers[t];
      fiber.stack_pointer = stacks_[fiber.index].prepare(fiber_main, size_t(fiber.index));
    }
  }
  count(Count::kBlocks) += blocks_.size();
  if (options_.schedule == Schedule::kPct) sort_by_priority();
  current_ = choose();
  cuda_ext_simt_switch(&main_stack_, current_->stack_pointer);
  machine = nullptr;
  current_ = nullptr;
  if (failure_) throw Fault(*failure_);
}

void Machine::exit_current() {
  Fiber& self = *current_;
  complete_stores_at_exit(self);
  check_wgmma_at_exit(self);
  if (self.in_cluster_barrier)
    fail("exit", kNoSite, "the thread has arrived at the cluster's barrier but never waited");
  const uint32_t mine = uint32_t(1) << self.lane;
  self.exited = true;
  self.warp->runnable &= ~mine;
  self.warp->alive &= ~mine;
  --fibers_left_;
  if (self.warp->alive == 0)
    for (auto& [key, stream] : self.warp->accesses)
      for (const WarpAccess& access : stream.open) count_access(Space(key & 3), access);
  if (--self.block->threads_left == 0) end_block(*self.block);
  --self.block->cluster->threads_left;
  end_cluster_phase_if_complete(*self.block->cluster);
  Fiber* next = choose_or_complete();
  current_ = next;
  cuda_ext_simt_switch(&self.stack_pointer, next != nullptr ? next->stack_pointer : main_stack_);
  __builtin_unreachable();
}

void Machine::end_block(Block& block) {
  const std::byte* canary = block.shared + block.shared_end;
  if (!std::all_of(canary, canary + kCanaryBytes, [](std::byte b) { return b == kCanary; }))
    fail_with(describe(*current_) + ": a store reached past the " + std::to_string(geometry_.shared_bytes) +
              " bytes of shared memory of its block");
  if (block.copies != 0)
    fail("exit", kNoSite, "the block exits while %d copies into its shared memory are in flight", block.copies);
  check_barriers(block);
  if (checker_ && block.cluster->blocks.size() > 1) checker_->end_block(block);
}

bool Machine::synchronizes(const char* instruction, Site site) {
  const std::tuple key(site.file, site.line, instruction);
  if (!recorded_sites_.contains(key)) {
    recorded_sites_.insert(key);
    record_sync_site({site.file, site.line, instruction});
  }
  const SyncSite* skip = options_.skip;
  if (skip != nullptr && skip->line == site.line && skip->file == site.file && skip->instruction == instruction)
    return false;
  yield();
  return true;
}

void Machine::plain_access(bool write, const void* memory, int bytes, const void* code_address) {
  if (current_ == nullptr || current_->stack->contains(memory)) return;
  const Block& block = *current_->block;
  const char* instruction = write ? "store" : "load";
  const Site site(static_cast<const char*>(code_address), kCodeAddress);
  const auto* at = static_cast<const std::byte*>(memory);
  const bool is_shared = at >= block.shared && at < block.shared + block.shared_end + kCanaryBytes;
  if (is_shared && (at < block.shared + kReservedSharedBytes || at + bytes > block.shared + block.shared_end))
    fail(instruction, site, "%d bytes at shared address 0x%x are outside of the block's %zu bytes, 0x%x to 0x%x", bytes,
         address_of(memory), geometry_.shared_bytes, kReservedSharedBytes, block.shared_end);
  using enum Space;
  const Space space = is_shared ? (write ? kSharedStore : kSharedLoad) : (write ? kGlobalStore : kGlobalLoad);
  record_access(space, is_shared ? address_of(memory) : reinterpret_cast<uintptr_t>(memory), bytes, site);
  if (checker_) checker_->access(write ? Access::kWrite : Access::kRead, memory, bytes, instruction, site);
}

SharedAddress Machine::address_of(const void* pointer) const {
  const Block& block = *current_->block;
  return SharedAddress(static_cast<const std::byte*>(pointer) - block.shared);
}

std::byte* Machine::shared(SharedAddress address, int bytes, int alignment, const char* instruction, Site site) {
  return shared(*current_->block, address, bytes, alignment, instruction, site);
}
std::byte* Machine::shared(const Block& block, SharedAddress address, int bytes, int alignment, const char* instruction,
                           Site site) {
  if (address >> kRankShift != 0)
    fail(instruction, site,
         "0x%x is an address of block %u of the cluster; this instruction accesses its own block only", address,
         (address >> kRankShift) - 1);
  if (address < kReservedSharedBytes || uint64_t(address) + uint64_t(bytes) > block.shared_end)
    fail(instruction, site, "%d bytes at shared address 0x%x are outside of the block's %zu bytes, 0x%x to 0x%x", bytes,
         address, geometry_.shared_bytes, kReservedSharedBytes, block.shared_end);
  if (address % uint32_t(alignment) != 0)
    fail(instruction, site, "shared address 0x%x is not a multiple of %d", address, alignment);
  return block.shared + address;
}

Block& Machine::block_of_rank(int rank, const char* instruction, Site site) {
  const Cluster& cluster = *current_->block->cluster;
  if (rank < 0 || rank >= int(cluster.blocks.size()))
    fail(instruction, site, "block %d of a cluster of %zu blocks", rank, cluster.blocks.size());
  return *cluster.blocks[size_t(rank)];
}
Block& Machine::owner_of(SharedAddress& address, const char* instruction, Site site) {
  const int above = int(address >> kRankShift);
  if (above == 0) return *current_->block;
  Block& block = block_of_rank(above - 1, instruction, site);
  address &= (SharedAddress(1) << kRankShift) - 1;
  if (block.threads_left == 0)
    fail(instruction, site, "0x%x is distributed shared memory of the block of rank %d, which has exited", address,
         block.rank);
  if (checker_ && &block != current_->block) checker_->record_remote_access(block, instruction, site);
  return block;
}

}  // namespace cuda_ext::simt
