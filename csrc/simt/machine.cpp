#include "simt/machine.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <mutex>
#include <utility>

#include "simt/checker.h"

namespace cuda_ext::simt {

// The only thread-local variable: what a library has of them comes out of the little room that a process keeps for
// libraries which it loads late.
thread_local Machine* machine = nullptr;

namespace {

constexpr uint32_t kCanaryBytes = 256;
constexpr auto kCanary = std::byte{0xa5};

// Stacks are kept for later launches.
std::mutex free_stacks_mutex;
std::vector<std::vector<Stack>> free_stacks;

std::vector<Stack> take_stacks() {
  const std::lock_guard<std::mutex> lock(free_stacks_mutex);
  if (free_stacks.empty()) return {};
  std::vector<Stack> stacks = std::move(free_stacks.back());
  free_stacks.pop_back();
  return stacks;
}
void give_back(std::vector<Stack> stacks) {
  const std::lock_guard<std::mutex> lock(free_stacks_mutex);
  free_stacks.push_back(std::move(stacks));
}

std::string format_text(const char* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  std::string text(std::vsnprintf(nullptr, 0, format, again), '\0');
  va_end(again);
  std::vsnprintf(text.data(), text.size() + 1, format, arguments);
  return text;
}

// Registers that a thread has from the start: an even share, as ptxas gives to kernels that use setmaxnreg.
constexpr int kRegisters = 65536;
int registers_at_start(int threads) { return std::min(248, kRegisters / threads / 8 * 8); }

// The source line of a plain access, of which only the code address is known: worth a process, once, at the end.
std::string place_of_code(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "an unknown place";
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase);
  char command[1024];
  std::snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname, size_t(offset - 1));
  std::string line;
  if (FILE* pipe = popen(command, "r")) {
    char text[512] = "";
    if (std::fgets(text, sizeof text, pipe) != nullptr) line = text;
    pclose(pipe);
  }
  line = line.substr(0, line.find_first_of(" \n"));
  return line.empty() || line[0] == '?' ? "code address +" + std::to_string(offset) : line.substr(line.rfind('/') + 1);
}

}  // namespace

std::string place(Site site) {
  if (site.line == kCodeAddress) return place_of_code(site.file);
  const std::string file = site.file;
  const size_t slash = file.rfind('/');
  return (slash == std::string::npos ? file : file.substr(slash + 1)) + ":" + std::to_string(site.line);
}

// The entry of every fiber.
void fiber_main() {
  try {
    machine->thread_();
  } catch (const std::exception& error) {
    machine->fail_with(std::string(machine->kernel_) + ": " + error.what());
  }
  machine->finish_current();
}

Machine::Machine(const char* kernel, const Geometry& geometry, const std::function<void()>& thread, MemoryGuard& guard)
    : kernel_(kernel),
      geometry_(geometry),
      thread_(thread),
      guard_(guard),
      stacks_(take_stacks()),
      options_(options()),
      random_state_(options_.seed * 0x9e3779b97f4a7c15 + 0x1234567) {
  if (options_.check_races) checker_ = std::make_unique<Checker>(*this);
}

Machine::~Machine() {
  for (auto& block : blocks_)
    if (block->shared != nullptr) std::free(block->shared);
  give_back(std::move(stacks_));
}

uint64_t Machine::random() {  // splitmix64
  uint64_t z = random_state_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
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

void Machine::draw_priority(Warp& warp) {
  const uint64_t draw = random();
  warp.priority = uint32_t(draw);
  warp.backwards = options_.schedule == Schedule::kPct && (draw >> 40 & 1) != 0;
}

// Blocks that run side by side have priorities too: their warps would else stay nearly in step.
void Machine::sort_by_priority() {
  std::sort(order_.begin(), order_.end(), [](const Warp* a, const Warp* b) {
    return std::pair(a->block->priority, a->priority) > std::pair(b->block->priority, b->priority);
  });
}

void Machine::wake(Fiber& fiber) { fiber.warp->runnable |= uint32_t(1) << fiber.lane; }

void Machine::park(const Wait& wait) {
  Warp& warp = *current_->warp;
  current_->wait = wait;
  warp.runnable &= ~(uint32_t(1) << current_->lane);
  const bool stay = warp.runnable != 0 && options_.schedule == Schedule::kFifo;
  switch_to(stay ? choose_lane(warp) : choose_or_complete());
}

void Machine::park_until(const Wait& wait, std::function<bool()> ready) {
  if (ready()) return;
  pollers_.push_back({current_, std::move(ready)});
  park(wait);
}

void Machine::yield() {
  if (options_.schedule != Schedule::kPct) return;
  if (random() % 64 == 0) {
    draw_priority(*current_->warp);
    if (random() % 4 == 0) current_->block->priority = uint32_t(random());
    sort_by_priority();
  }
  for (Warp* warp : order_) {
    if (warp == current_->warp) return;
    if (warp->runnable != 0) return switch_to(choose_lane(*warp));
  }
}

void Machine::start(Action action) {
  if (lazy())
    in_flight_.push_back(std::move(action));
  else
    action();
}

Fiber* Machine::choose_lane(Warp& warp) {
  int lane;
  if (warp.backwards) {
    lane = 31 - std::countl_zero(warp.runnable);
  } else {
    const int after = current_ != nullptr && current_->warp == &warp ? current_->lane : -1;
    const uint32_t above = after >= 31 ? 0 : warp.runnable & ~((uint32_t(2) << after) - 1);
    lane = std::countr_zero(after >= 0 && above != 0 ? above : warp.runnable);
  }
  return &warp.fibers[lane];
}

Fiber* Machine::choose() {
  if (options_.schedule == Schedule::kPct) {
    for (Warp* warp : order_)
      if (warp->runnable != 0) return choose_lane(*warp);
    return nullptr;
  }
  for (size_t i = 0; i < order_.size(); ++i) {
    const size_t at = turn_ + i < order_.size() ? turn_ + i : turn_ + i - order_.size();
    if (order_[at]->runnable == 0) continue;
    turn_ = at;
    return choose_lane(*order_[at]);
  }
  return nullptr;
}

Fiber* Machine::choose_or_complete() {
  for (;;) {
    if (Fiber* fiber = choose()) return fiber;
    if (!in_flight_.empty()) {
      const size_t which = options_.schedule == Schedule::kPct ? random() % in_flight_.size() : 0;
      const Action action = std::move(in_flight_[which]);
      in_flight_.erase(in_flight_.begin() + ptrdiff_t(which));
      action();
      continue;
    }
    if (fibers_left_ == 0) return nullptr;
    const auto ready = std::find_if(pollers_.begin(), pollers_.end(), [](const Poller& p) { return p.ready(); });
    if (ready == pollers_.end()) fail_with(deadlock_table());
    wake(*ready->fiber);
    pollers_.erase(ready);
  }
}

void Machine::switch_to(Fiber* next) {
  if (next == current_) return;
  Fiber* self = std::exchange(current_, next);
  cuda_ext_simt_switch(&self->stack_pointer, next->stack_pointer);
}

void Machine::finish_current() {
  Fiber& self = *current_;
  finish_stores(self);
  finish_wgmma(self);
  if (self.in_cluster_barrier)
    fail("exit", kNoSite, "the thread has arrived at the cluster's barrier and never waited");
  const uint32_t mine = uint32_t(1) << self.lane;
  self.finished = true;
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
    fail("exit", kNoSite, "the block exits while %d copies into its shared memory are under way", block.copies);
  check_barriers(block);
  if (checker_ && block.cluster->blocks.size() > 1) checker_->end_block(block);
}

bool Machine::synchronizes(const char* instruction, Site site) {
  const std::tuple key(site.file, site.line, instruction);
  if (!noted_sites_.contains(key)) {
    noted_sites_.insert(key);
    remember_site({site.file, site.line, instruction});
  }
  const SyncSite* skip = options_.skip;
  if (skip != nullptr && skip->line == site.line && skip->file == site.file && skip->instruction == instruction)
    return false;
  yield();
  return true;
}

Gathering& Machine::join_gathering(const char* instruction, Site site) {
  Block& block = *current_->block;
  const int group = current_->thread / kWarpgroupThreads;
  if ((group + 1) * kWarpgroupThreads > geometry_.block)
    fail(instruction, site, "threads from %d on are no warpgroup of %d in a block of %d", group * kWarpgroupThreads,
         kWarpgroupThreads, geometry_.block);
  Gathering& gathering = block.warpgroups[size_t(group)].gathering;
  if (gathering.instruction == nullptr) {
    for (int t = group * kWarpgroupThreads; t < (group + 1) * kWarpgroupThreads; ++t)
      if (block.fibers[t].finished) fail(instruction, site, "thread %d of the warpgroup has exited", t);
    gathering.instruction = instruction;
    gathering.site = site;
  } else if (std::strcmp(gathering.instruction, instruction) != 0 || gathering.site.line != site.line) {
    fail(instruction, site, "the warpgroup has diverged: other threads are at %s, %s", gathering.instruction,
         place(gathering.site).c_str());
  }
  return gathering;
}

void Machine::refuse_meeting(const char* instruction, Site site, uint32_t mask) {
  const Warp& warp = *current_->warp;
  if ((mask >> current_->lane & 1) == 0) fail(instruction, site, "the mask 0x%08x leaves out this lane", mask);
  if ((mask & ~warp.alive) != 0)
    fail(instruction, site, "the mask 0x%08x names lanes that have exited; left are 0x%08x", mask, warp.alive);
  for (const Meeting& other : warp.meetings)
    if ((other.mask & mask) != 0)
      fail(instruction, site, "the warp has diverged: other lanes are at %s, %s with mask 0x%08x; this mask is 0x%08x",
           other.instruction, place(other.site).c_str(), other.mask, mask);
  std::abort();
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
  note_access(space, is_shared ? address_of(memory) : reinterpret_cast<uintptr_t>(memory), bytes, site);
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
    fail(instruction, site, "0x%x is an address of block %u of the cluster; this takes addresses of its own block",
         address, (address >> kRankShift) - 1);
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
    fail(instruction, site, "block %d of a cluster of %zu", rank, cluster.blocks.size());
  return *cluster.blocks[size_t(rank)];
}
Block& Machine::owner_of(SharedAddress& address, const char* instruction, Site site) {
  const int above = int(address >> kRankShift);
  if (above == 0) return *current_->block;
  Block& block = block_of_rank(above - 1, instruction, site);
  address &= (SharedAddress(1) << kRankShift) - 1;
  if (block.threads_left == 0)
    fail(instruction, site, "0x%x is distributed shared memory of an exited block, of rank %d", address, block.rank);
  if (checker_ && &block != current_->block) checker_->note_remote(block, instruction, site);
  return block;
}

std::string Machine::describe(const Fiber& fiber) const {
  const Block& block = *fiber.block;
  char text[160];
  std::snprintf(text, sizeof text, "block (%d, %d, %d), thread %d (warp %d, lane %d)", block.index[0], block.index[1],
                block.index[2], fiber.thread, fiber.warp->index, fiber.lane);
  return std::string(kernel_) + ": " + text;
}

std::string Machine::describe_address(const void* memory) const {
  const auto* byte = static_cast<const std::byte*>(memory);
  char text[96];
  for (const auto& block : blocks_) {
    if (byte < block->shared || byte >= block->shared + block->shared_end) continue;
    const int written = std::snprintf(text, sizeof text, "shared address 0x%x", unsigned(byte - block->shared));
    if (block.get() != current_->block)
      std::snprintf(text + written, sizeof text - size_t(written), " in block (%d, %d, %d)", block->index[0],
                    block->index[1], block->index[2]);
    return text;
  }
  std::snprintf(text, sizeof text, "global address %p", memory);
  return text;
}

void Machine::fail(const char* instruction, Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string text = format_text(format, arguments);
  va_end(arguments);
  const std::string at = site.line == 0 ? "" : " at " + place(site);
  fail_with(describe(*current_) + ", " + instruction + at + ": " + text);
}

// Fibers are left as they are: kernels own nothing that would have to be given back.
void Machine::fail_with(const std::string& message) {
  failure_ = message;
  void* abandoned;
  cuda_ext_simt_switch(&abandoned, main_stack_);
  __builtin_unreachable();
}

std::string Machine::deadlock_table() const {
  std::string text = std::string(kernel_) + ": deadlock: no thread can run and no copy is under way\n";
  std::map<std::string, int> rows;
  for (const auto& block : blocks_) {
    for (int t = 0; t < geometry_.block; ++t) {
      const Fiber& fiber = block->fibers[t];
      char where[96];
      std::snprintf(where, sizeof where, "  block (%d, %d, %d) warp %2d: ", block->index[0], block->index[1],
                    block->index[2], fiber.warp->index);
      std::string row = where;
      if (fiber.finished) {
        row += "exited";
      } else {
        row += std::string(fiber.wait.instruction) + " at " + place(fiber.wait.site) + describe_barrier(fiber);
      }
      ++rows[row];
    }
  }
  for (const auto& [row, threads] : rows) text += row + " (" + std::to_string(threads) + " threads)\n";
  return text;
}

std::string Machine::describe_barrier(const Fiber& fiber) const {
  const Wait& wait = fiber.wait;
  if (std::strcmp(wait.instruction, "named_barrier") == 0 || std::strcmp(wait.instruction, "sync_threads") == 0) {
    const NamedBarrier& barrier = fiber.block->barriers[wait.barrier];
    return ": barrier " + std::to_string(wait.barrier) + " has " + std::to_string(barrier.arrived) + " of " +
           std::to_string(barrier.expected) + " threads";
  }
  if (std::strcmp(wait.instruction, "cluster_wait") == 0) {
    const Cluster& cluster = *fiber.block->cluster;
    return ": " + std::to_string(cluster.arrived) + " of " + std::to_string(cluster.threads_left) +
           " threads of the cluster have arrived";
  }
  if (std::strncmp(wait.instruction, "barrier_wait", 12) == 0) {
    const auto found = fiber.block->mbarriers.find(wait.barrier);
    if (found == fiber.block->mbarriers.end()) return ": the barrier is gone";
    const BarrierState& state = found->second;
    char text[160];
    std::snprintf(
        text, sizeof text,
        ": barrier 0x%x in phase %u, waits for the end of parity %u; %u of %u arrivals and %lld bytes are missing",
        wait.barrier, state.phase, wait.parity, state.pending, state.expected, (long long)state.bytes);
    return text;
  }
  return "";
}

}  // namespace cuda_ext::simt
