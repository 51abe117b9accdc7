// The happens-before checker: finds accesses to the same memory that nothing orders, whether or not this run was hurt by
// them. Vector clocks per thread (Mattern 1989; epochs as in FastTrack, Flanagan and Freund, PLDI 2009), for shared and
// global memory, 2 bytes to a cell.
//
// Orders: barriers join those who take part; an acquire sees what was released under the same address; a cp.async writes
// when it is issued and again when its thread waits for it. Shuffles and mma order nothing. Instruction TMA and wgmma do in the
// background are accesses of agents of their own (engines): they know what the threads that started them knew, and no
// thread knows of them until it has waited for them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "simt/machine.h"

namespace cuda_ext::simt {

// Instruction an agent knows of all others. Agents are numbered within a run (the blocks that are resident together); of agents
// in earlier runs it knows what it acquired through atomics.
struct Clock {
  std::vector<uint32_t> own;
  std::map<uint32_t, std::shared_ptr<const std::vector<uint32_t>>> earlier;

  void join(const Clock& other);
};

// Instruction a thread knows to have happened, and the part of it that asynchronous accesses (TMA, wgmma) see: plain accesses to
// shared memory count only from a fence.proxy.async on.
struct Knowledge {
  Clock seen;
  Clock async;

  void join(const Knowledge& other) {
    seen.join(other.seen);
    async.join(other.async);
  }
};

// The asynchronous ones are of TMA and wgmma; cp.async counts as plain. Instruction is read as read-only must not be written by
// the same launch, before or after, whatever the order.
enum class Access : uint8_t { kRead, kReadOnly, kWrite, kAtomic, kAsyncRead, kAsyncWrite };

// Something that an engine does in the background: a copy, a matrix product.
struct Operation {
  uint32_t agent = 0;
  uint32_t clock = 0;
  uint32_t thread = 0;  // who started it
  Knowledge known;      // by those who started it
};

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
  // Instruction the current thread has done is seen by those who acquire under the same key.
  void release(const void* key);
  void acquire(const void* key);
  // A relaxed atomic and a fence make a release or an acquire together.
  void relaxed_atomic(const void* key);
  void fence_device();
  void fence_async();
  // Instruction a barrier's initialisation needs to be known to the cluster and to asynchronous accesses.
  void fence_barrier_init();
  // Instruction the last fence covered is released, nothing later.
  void release_fenced(const void* key);

  // An operation of the engine of that name, started by the current thread, or by these together.
  std::shared_ptr<const Operation> start(const void* engine);
  std::shared_ptr<const Operation> start(const void* engine, const std::vector<int>& fibers);
  void access(const Operation& operation, Access kind, const void* memory, int bytes, const char* instruction,
              Site site);
  // The operation is done, as those will know who acquire under the key, or as the current thread knows.
  void end(const Operation& operation, const void* key);
  void end(const Operation& operation);
  // Instruction was released under `from` is so under `to`; of a key that gets a new meaning nothing is known.
  void transfer(const void* from, const void* to);
  void forget(const void* key);
  // Fails if anything that was accessed through the cluster is in no order before the end of `block`, all of whose threads
  // have come to it.
  void record_remote_access(const Block& owner, const char* instruction, Site site);
  void end_block(const Block& block);

 private:
  void fence();
  struct Epoch {
    uint32_t run = 0;  // 0: nobody
    uint32_t agent = 0;
    uint32_t clock = 0;
    uint32_t instruction = 0;  // index into instructions_
    uint32_t thread = 0;       // the agent, or who started what the agent does
    bool atomic = false;
    bool async = false;
  };
  struct Cell {
    Epoch write;
    Epoch read;
    std::unique_ptr<std::vector<Epoch>> more_reads;
    uint32_t read_only = 0;  // what has read it as read-only: 1 + index into instructions_; 0: nothing
    bool shared = false;
  };
  struct Agent {
    Knowledge now;
    Knowledge at_fence;         // what the last fence covered
    Knowledge at_device_fence;  // and those of the device, by this thread or by others that a barrier came after
    Knowledge read_by_atomics;  // what a fence would acquire
    bool fenced = false;
  };
  static constexpr size_t kCellBytes = 2, kPageBytes = 4096, kPageCells = kPageBytes / kCellBytes;
  using Page = std::vector<Cell>;

  // Who accesses memory, and what it knows.
  struct Actor {
    uint32_t agent;
    uint32_t clock;
    uint32_t thread;
    const Knowledge& known;
  };
  struct RemoteAccess {
    const Block* owner;
    Epoch when;
  };

  void access(const Actor& actor, Access kind, const void* memory, int bytes, const char* instruction, Site site);
  std::shared_ptr<const Operation> start(const void* engine, const Knowledge& known);
  Cell& cell(uintptr_t address);
  bool ordered(const Epoch& before, const Clock& clock) const;
  [[noreturn]] void report(const Epoch& before, bool before_writes, bool now_writes, const void* memory,
                           const char* instruction, Site site);
  std::string describe_thread(const Epoch& epoch) const;
  uint32_t intern(const char* instruction, Site site);

  Machine& machine_;
  uint32_t run_ = 0;
  std::vector<Agent> agents_;
  uint32_t num_agents_ = 0;                                                 // engines are numbered after the threads
  std::unordered_map<const void*, std::pair<uint32_t, uint32_t>> engines_;  // agent and clock
  std::vector<RemoteAccess> remote_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  uintptr_t last_page_ = 0;
  Page* last_cells_ = nullptr;
  std::unordered_map<const void*, Knowledge> released_;
  std::vector<Instruction> instructions_;
  std::map<std::pair<const char*, std::pair<const char*, int>>, uint32_t> instruction_index_;
};

}  // namespace cuda_ext::simt
