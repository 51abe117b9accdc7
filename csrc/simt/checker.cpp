#include "simt/checker.h"

#include <algorithm>

namespace cuda_ext::simt {

void Clock::join(const Clock& other) {
  if (own.size() < other.own.size()) own.resize(other.own.size());
  for (size_t i = 0; i < other.own.size(); ++i) own[i] = std::max(own[i], other.own[i]);
  for (const auto& [run, clocks] : other.earlier) {
    auto& mine = earlier[run];
    if (mine == nullptr || mine == clocks) {
      mine = clocks;
      continue;
    }
    auto joined = std::make_shared<std::vector<uint32_t>>(*mine);
    joined->resize(std::max(mine->size(), clocks->size()));
    for (size_t i = 0; i < clocks->size(); ++i) (*joined)[i] = std::max((*joined)[i], (*clocks)[i]);
    mine = joined;
  }
}

void Checker::start_blocks(size_t threads) {
  // Agents get new numbers in each run, so what was released moves to `earlier`, under the number of its run.
  if (run_ != 0) {
    for (auto& [key, knowledge] : released_) {
      for (Clock* clock : {&knowledge.seen, &knowledge.async}) {
        if (clock->own.empty()) continue;
        Clock moved;
        moved.earlier[run_] = std::make_shared<const std::vector<uint32_t>>(std::move(clock->own));
        clock->own.clear();
        clock->join(moved);
      }
    }
  }
  ++run_;
  num_agents_ = uint32_t(threads);
  engines_.clear();
  remote_.clear();
  agents_.assign(threads, {});
  for (size_t i = 0; i < threads; ++i) {
    agents_[i].now.seen.own.resize(threads);
    agents_[i].now.seen.own[i] = 1;
  }
}

Checker::Cell& Checker::cell(uintptr_t address) {
  const uintptr_t page = address / kPageBytes;
  if (last_cells_ == nullptr || page != last_page_) {
    auto& cells = pages_[page];
    if (cells == nullptr) cells = std::make_unique<Page>(kPageCells);
    last_page_ = page;
    last_cells_ = cells.get();
  }
  return (*last_cells_)[address % kPageBytes / kCellBytes];
}

void Checker::add_shared(const void* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  for (uintptr_t at = begin; at < begin + bytes; at += kCellBytes) {
    Cell& fresh = cell(at);
    fresh = {};
    fresh.shared = true;
  }
}

uint32_t Checker::intern(const char* instruction, Site site) {
  const auto [entry, is_new] =
      instruction_index_.try_emplace({instruction, {site.file, site.line}}, uint32_t(instructions_.size()));
  if (is_new) instructions_.push_back({instruction, site});
  return entry->second;
}

bool Checker::ordered(const Epoch& before, const Clock& clock) const {
  if (before.run == run_) return before.agent < clock.own.size() && before.clock <= clock.own[before.agent];
  const auto known = clock.earlier.find(before.run);
  return known != clock.earlier.end() && before.agent < known->second->size() &&
         before.clock <= (*known->second)[before.agent];
}

void Checker::access(Access kind, const void* memory, int bytes, const char* instruction, Site site) {
  const auto index = uint32_t(machine_.current().index);
  const Knowledge& known = agents_[index].now;
  access(Actor{index, known.seen.own[index], index, known}, kind, memory, bytes, instruction, site);
}
void Checker::access(const Operation& operation, Access kind, const void* memory, int bytes, const char* instruction,
                     Site site) {
  access(Actor{operation.agent, operation.clock, operation.thread, operation.known}, kind, memory, bytes, instruction,
         site);
}

void Checker::access(const Actor& actor, Access kind, const void* memory, int bytes, const char* instruction,
                     Site site) {
  const bool atomic = kind == Access::kAtomic;
  const bool async = kind == Access::kAsyncRead || kind == Access::kAsyncWrite;
  const bool writes = kind != Access::kRead && kind != Access::kReadOnly && kind != Access::kAsyncRead;
  const uint32_t index = actor.agent;
  const Clock& seen = actor.known.seen;
  const Epoch now{run_, index, actor.clock, intern(instruction, site), actor.thread, atomic, async};
  // An asynchronous access sees a plain write to shared memory only after a fence.
  const auto visible = [&](const Epoch& write, bool in_shared) {
    if (write.run == run_ && write.agent == index && write.clock == actor.clock) return true;
    return ordered(write, async && in_shared && !write.async ? actor.known.async : seen);
  };
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  for (uintptr_t at = begin / kCellBytes * kCellBytes; at < begin + uintptr_t(bytes); at += kCellBytes) {
    Cell& c = cell(at);
    if (writes ? c.read_only != 0 : kind == Access::kReadOnly && c.write.run != 0) {
      const Instruction& other = instructions_[writes ? c.read_only - 1 : c.write.instruction];
      machine_.fail(instruction, site,
                    "%s is read through the read-only path, and written by the same launch; see %s at %s",
                    machine_.describe_address(reinterpret_cast<const void*>(at)).c_str(), other.name,
                    location(other.site).c_str());
    }
    if (kind == Access::kReadOnly) c.read_only = now.instruction + 1;
    if (c.write.run == 0) {
      if (c.shared && !writes)
        machine_.fail(instruction, site, "reads %s, which was never written",
                      machine_.describe_address(reinterpret_cast<const void*>(at)).c_str());
    } else if (!(atomic && c.write.atomic) && !visible(c.write, c.shared)) {
      report(c.write, true, writes, reinterpret_cast<const void*>(at), instruction, site);
    }
    if (!writes) {
      if (c.read.run == 0 || (c.read.run == run_ && c.read.agent == index) || ordered(c.read, seen)) {
        c.read = now;
      } else {
        if (c.more_reads == nullptr) c.more_reads = std::make_unique<std::vector<Epoch>>();
        auto& reads = *c.more_reads;
        const auto mine = std::find_if(reads.begin(), reads.end(), [&](const Epoch& e) {
          return (e.run == run_ && e.agent == index) || ordered(e, seen);
        });
        if (mine != reads.end())
          *mine = now;
        else
          reads.push_back(now);
      }
      continue;
    }
    if (c.read.run != 0 && !ordered(c.read, seen))
      report(c.read, false, true, reinterpret_cast<const void*>(at), instruction, site);
    if (c.more_reads != nullptr) {
      for (const Epoch& read : *c.more_reads)
        if (!ordered(read, seen)) report(read, false, true, reinterpret_cast<const void*>(at), instruction, site);
      c.more_reads.reset();
    }
    c.read = {};
    c.write = now;
  }
}

void Checker::report(const Epoch& before, bool before_writes, bool now_writes, const void* memory,
                     const char* instruction, Site site) {
  const Instruction& what = instructions_[before.instruction];
  const std::string where = machine_.describe_address(memory);
  machine_.fail(instruction, site, "race: this %s of %s and the %s by %s, %s at %s, are not ordered",
                now_writes ? "write" : "read", where.c_str(), before_writes ? "write" : "read",
                describe_thread(before).c_str(), what.name, location(what.site).c_str());
}

std::string Checker::describe_thread(const Epoch& epoch) const {
  if (epoch.run != run_) return "a thread of an earlier block";
  const int threads = machine_.geometry().block, block = int(epoch.thread) / threads;
  return "thread " + std::to_string(int(epoch.thread) % threads) +
         (machine_.current().block->number == block ? " of this block" : " of another block");
}

void Checker::join(const std::vector<int>& fibers) {
  // Device-wide fences have a single order (fence.sc): what a thread's fence covered before the barrier is covered for
  // all threads after it.
  Knowledge all, fenced;
  for (const int fiber : fibers) {
    all.join(agents_[fiber].now);
    fenced.join(agents_[fiber].at_device_fence);
  }
  for (const int fiber : fibers) {
    agents_[fiber].now = all;
    agents_[fiber].at_device_fence = fenced;
    ++agents_[fiber].now.seen.own[fiber];
  }
}

void Checker::release(const void* key) {
  const int index = machine_.current().index;
  released_[key].join(agents_[index].now);
  ++agents_[index].now.seen.own[index];
}
void Checker::acquire(const void* key) {
  const auto released = released_.find(key);
  if (released != released_.end()) agents_[machine_.current().index].now.join(released->second);
}
void Checker::relaxed_atomic(const void* key) {
  Agent& agent = agents_[machine_.current().index];
  const auto released = released_.find(key);
  if (released != released_.end()) agent.read_by_atomics.join(released->second);
  released_[key].join(agent.at_device_fence);
}
void Checker::fence_device() {
  fence();
  Agent& agent = agents_[machine_.current().index];
  agent.at_device_fence.join(agent.at_fence);
}
void Checker::fence() {
  const int index = machine_.current().index;
  Agent& agent = agents_[index];
  agent.now.join(agent.read_by_atomics);
  agent.at_fence = agent.now;
  agent.fenced = true;
  ++agent.now.seen.own[index];
}
void Checker::fence_async() {
  const int index = machine_.current().index;
  Knowledge& now = agents_[index].now;
  now.async.join(now.seen);
  ++now.seen.own[index];
}

void Checker::fence_barrier_init() {
  fence_async();
  fence();
}
void Checker::release_fenced(const void* key) {
  const Agent& agent = agents_[machine_.current().index];
  if (agent.fenced) released_[key].join(agent.at_fence);
}

std::shared_ptr<const Operation> Checker::start(const void* engine, const Knowledge& known) {
  auto& [agent, clock] = engines_[engine];
  if (clock == 0) agent = num_agents_++;
  return std::make_shared<const Operation>(Operation{agent, ++clock, uint32_t(machine_.current().index), known});
}
std::shared_ptr<const Operation> Checker::start(const void* engine) {
  const int index = machine_.current().index;
  auto operation = start(engine, agents_[index].now);
  ++agents_[index].now.seen.own[index];
  return operation;
}
std::shared_ptr<const Operation> Checker::start(const void* engine, const std::vector<int>& fibers) {
  Knowledge common = agents_[fibers[0]].now;
  const auto keep_common = [](std::vector<uint32_t>& mine, const std::vector<uint32_t>& other) {
    mine.resize(std::min(mine.size(), other.size()));
    for (size_t i = 0; i < mine.size(); ++i) mine[i] = std::min(mine[i], other[i]);
  };
  for (const int fiber : fibers) {
    keep_common(common.seen.own, agents_[fiber].now.seen.own);
    keep_common(common.async.own, agents_[fiber].now.async.own);
  }
  return start(engine, common);
}

static void record_end(Clock& clock, const Operation& operation) {
  if (clock.own.size() <= operation.agent) clock.own.resize(operation.agent + 1);
  clock.own[operation.agent] = std::max(clock.own[operation.agent], operation.clock);
}
void Checker::end(const Operation& operation, const void* key) { record_end(released_[key].seen, operation); }
void Checker::end(const Operation& operation) { record_end(agents_[machine_.current().index].now.seen, operation); }

void Checker::transfer(const void* from, const void* to) {
  const auto passed = released_.find(from);
  if (passed == released_.end()) return;
  released_[to].join(passed->second);
  released_.erase(from);
}
void Checker::forget(const void* key) { released_.erase(key); }

void Checker::record_remote_access(const Block& owner, const char* instruction, Site site) {
  const auto index = uint32_t(machine_.current().index);
  const Epoch now{run_, index, agents_[index].now.seen.own[index], intern(instruction, site), index};
  for (RemoteAccess& known : remote_) {
    if (known.owner != &owner || known.when.agent != index) continue;
    known.when = now;
    return;
  }
  remote_.push_back({&owner, now});
}
void Checker::end_block(const Block& block) {
  Clock known;
  for (int t = 0; t < machine_.geometry().block; ++t) known.join(agents_[block.fibers[t].index].now.seen);
  for (const RemoteAccess& access : remote_) {
    if (access.owner != &block || ordered(access.when, known)) continue;
    const Instruction& what = instructions_[access.when.instruction];
    machine_.fail("exit", kNoSite,
                  "the block's exit is not ordered after an access to its distributed shared memory by %s, %s at %s",
                  describe_thread(access.when).c_str(), what.name, location(what.site).c_str());
  }
}

}  // namespace cuda_ext::simt
