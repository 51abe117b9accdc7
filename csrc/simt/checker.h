// The happens-before checker: finds conflicting accesses to shared or global memory that are not ordered, even if this
// run's result is right. It keeps a vector clock per thread (Mattern 1989) and epochs (as in FastTrack, Flanagan and
// Freund, PLDI 2009) per cell of 2 bytes.
//
// What orders accesses: a barrier joins the clocks of its threads; an acquire joins what was released under the same
// address. A cp.async writes when it is issued and again when its thread waits for it. Shuffles and mma order nothing.
// TMA and wgmma access memory asynchronously, as agents with their own clocks (engines): an engine knows what the
// threads that started the operation knew, and a thread knows of the operation only after waiting for it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "simt/machine.h"

namespace cuda_ext::simt {

// A vector clock: what an agent knows of all others. Agents are numbered within a run (the blocks that are resident
// together); agents of earlier runs are known if their clocks were acquired through atomics.
struct Clock {
  std::vector<uint32_t> own;
  std::map<uint32_t, std::shared_ptr<const std::vector<uint32_t>>> earlier;

  void join(const Clock& other);
};

// What happened before, as seen by a thread, and the part of it that asynchronous accesses (TMA, wgmma) see: they see
// plain accesses to shared memory only after a fence.proxy.async.
struct Knowledge {
  Clock seen;
  Clock async;

  void join(const Knowledge& other) {
    seen.join(other.seen);
    async.join(other.async);
  }
};

// Asynchronous accesses are those of TMA and wgmma; cp.async counts as plain. Memory that is read as kReadOnly must not
// be written by the same launch, even if the accesses are ordered.
enum class Access : uint8_t { kRead, kReadOnly, kWrite, kAtomic, kAsyncRead, kAsyncWrite };

// An asynchronous operation of an engine: a copy or a matrix product.
struct Operation {
  uint32_t agent = 0;
  uint32_t clock = 0;
  uint32_t thread = 0;  // that started it
  Knowledge known;      // to the threads that started it
};

class Checker {
 public:
  explicit Checker(Machine& machine) : machine_(machine) {}

  // Starts a run of that many threads.
  void start_blocks(size_t threads);
  // New shared memory of a block; it must be written before it is read.
  void add_shared(const void* memory, size_t bytes);

  // The current thread accesses memory. Fails the launch if a conflicting access is not ordered before it.
  void access(Access kind, const void* memory, int bytes, const char* instruction, Site site);

  // A barrier of these threads.
  void join(const std::vector<int>& fibers);
  // What the current thread has done becomes visible to threads that acquire the same key.
  void release(const void* key);
  void acquire(const void* key);
  // A relaxed atomic, which together with a fence is a release or an acquire.
  void relaxed_atomic(const void* key);
  void fence_device();
  void fence_async();
  // Makes the initialisation of mbarriers visible to the cluster and to asynchronous accesses.
  void fence_barrier_init();
  // Releases what the last fence covered, but nothing later.
  void release_fenced(const void* key);

  // Starts an operation of the engine `engine`, by the current thread or by these threads together.
  std::shared_ptr<const Operation> start(const void* engine);
  std::shared_ptr<const Operation> start(const void* engine, const std::vector<int>& fibers);
  void access(const Operation& operation, Access kind, const void* memory, int bytes, const char* instruction,
              Site site);
  // Ends the operation: what it did becomes visible to threads that acquire `key`, or to the current thread.
  void end(const Operation& operation, const void* key);
  void end(const Operation& operation);
  // Moves what was released under `from` to `to`.
  void transfer(const void* from, const void* to);
  // Drops what was released under `key`, for a key that gets a new meaning.
  void forget(const void* key);
  // end_block fails if an access to the block's shared memory by another block, recorded with record_remote_access, is
  // not ordered before the end of the block.
  void record_remote_access(const Block& owner, const char* instruction, Site site);
  void end_block(const Block& block);

 private:
  void fence();
  struct Epoch {
    uint32_t run = 0;  // 0: no access yet
    uint32_t agent = 0;
    uint32_t clock = 0;
    uint32_t instruction = 0;  // index into instructions_
    uint32_t thread = 0;       // the agent, or the thread that started the operation
    bool atomic = false;
    bool async = false;
  };
  struct Cell {
    Epoch write;
    Epoch read;
    std::unique_ptr<std::vector<Epoch>> more_reads;
    uint32_t read_only = 0;  // a kReadOnly access: 1 + index into instructions_; 0: none
    bool shared = false;
  };
  struct Agent {
    Knowledge now;
    Knowledge at_fence;         // what the last fence covered
    Knowledge at_device_fence;  // what device-wide fences covered: this thread's, and others' before a common barrier
    Knowledge read_by_atomics;  // what the next fence acquires
    bool fenced = false;
  };
  static constexpr size_t kCellBytes = 2, kPageBytes = 4096, kPageCells = kPageBytes / kCellBytes;
  using Page = std::vector<Cell>;

  // The agent of an access, and what it knows.
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
  uint32_t num_agents_ = 0;                                                 // threads first, then engines
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
