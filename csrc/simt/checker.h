// The happens-before checker: finds accesses to the same memory that nothing orders, whether or not this run was hurt by
// them. Vector clocks per thread (Mattern 1989; epochs as in FastTrack, Flanagan and Freund, PLDI 2009), for shared and
// global memory, 2 bytes to a cell.
//
// Orders: barriers join those who take part; an acquire sees what was released under the same address; a cp.async writes
// when it is issued and again when its thread waits for it. Shuffles and mma order nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "simt/machine.h"

namespace cuda_ext::simt {

// What an agent knows of all others. Agents are numbered within a run (the blocks that are resident together); of agents
// in earlier runs it knows what it acquired through atomics.
struct Clock {
  std::vector<uint32_t> own;
  std::map<uint32_t, std::shared_ptr<const std::vector<uint32_t>>> earlier;

  void join(const Clock& other);
};

// What a thread knows to have happened, and the part of it that asynchronous accesses (TMA, wgmma) see: plain accesses to
// shared memory count only from a fence.proxy.async on.
struct Knowledge {
  Clock seen;
  Clock async;

  void join(const Knowledge& other) {
    seen.join(other.seen);
    async.join(other.async);
  }
};

// The asynchronous ones are of TMA and wgmma; cp.async counts as plain.
enum class Access : uint8_t { kRead, kWrite, kAtomic, kAsyncRead, kAsyncWrite };

class Checker {
 public:
  explicit Checker(Machine& machine) : machine_(machine) {}

  // A new run of that many threads.
  void start_blocks(size_t threads);
  // Fresh memory of a block: reading before writing is an error.
  void add_shared(const void* memory, size_t bytes);

  // The current thread accesses memory. Fails the launch if nothing orders it after a conflicting access.
  void access(Access kind, const void* memory, int bytes, const char* instruction, Site site);

  // All of these threads wait for each other.
  void join(const std::vector<int>& fibers);
  // What the current thread has done is seen by those who acquire under the same key.
  void release(const void* key);
  void acquire(const void* key);
  // A relaxed atomic and a fence make a release or an acquire together.
  void relaxed_atomic(const void* key);
  void fence();
  void fence_async();

  // A copy that ends later: what the current thread knows when it starts it, to be released when it is done.
  std::shared_ptr<const Knowledge> start_copy();
  void end_copy(const void* key, const Knowledge& at_start);

 private:
  struct Epoch {
    uint32_t run = 0;  // 0: nobody
    uint32_t agent = 0;
    uint32_t clock = 0;
    uint32_t what = 0;  // index into whats_
    bool atomic = false;
    bool async = false;
  };
  struct Cell {
    Epoch write;
    Epoch read;
    std::unique_ptr<std::vector<Epoch>> more_reads;
    bool shared = false;
  };
  struct Agent {
    Knowledge now;
    Knowledge at_fence;         // what the last fence covered
    Knowledge read_by_atomics;  // what a fence would acquire
    bool fenced = false;
  };
  struct What {
    const char* instruction;
    Site site;
  };
  static constexpr size_t kCellBytes = 2, kPageBytes = 4096, kPageCells = kPageBytes / kCellBytes;
  using Page = std::vector<Cell>;

  Cell& cell(uintptr_t address);
  bool ordered(const Epoch& before, const Clock& clock) const;
  [[noreturn]] void report(const Epoch& before, bool before_writes, bool now_writes, const void* memory,
                           const char* instruction, Site site);
  uint32_t intern(const char* instruction, Site site);

  Machine& machine_;
  uint32_t run_ = 0;
  std::vector<Agent> agents_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  uintptr_t last_page_ = 0;
  Page* last_cells_ = nullptr;
  std::unordered_map<const void*, Knowledge> released_;
  std::vector<What> whats_;
  std::map<std::pair<const char*, std::pair<const char*, int>>, uint32_t> what_index_;
};

}  // namespace cuda_ext::simt
