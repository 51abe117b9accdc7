// The state of the blocks that are resident on one thread of the host: their fibers, warps, barriers and clusters.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "simt/api.h"
#include "simt/fiber.h"

namespace cuda_ext::simt {

struct Block;
struct Cluster;
struct Operation;
struct Warp;
struct WgmmaUnit;

constexpr int kLanes = 32;
constexpr int kWarpgroupThreads = 128;
constexpr uint32_t kReservedSharedBytes = 1024;  // at the start of every block's window, as on the hardware
constexpr uint8_t kPoison = 0xff;                // a NaN in every floating type

// A shared address in another block of the cluster holds that block's rank plus 1 above bit 24; its own addresses are as
// they are.
constexpr int kRankShift = 24;

// The line of a Site that holds an address of code in place of a file's name.
constexpr int kCodeAddress = -1;
constexpr Site kNoSite{"", 0};  // of what no call does
// "gemm_sm80.cuh:120".
std::string location(Site site);

// One of a kernel's instructions.
struct Instruction {
  const char* name;
  Site site;
};

// What a parked fiber waits for, as the deadlock table tells it.
struct Wait {
  const char* instruction;
  Site site;
  SharedAddress barrier = 0;  // of an mbarrier, or the number of a named one
  uint32_t parity = 0;
};

// One copy that cp.async started.
struct AsyncCopy {
  std::byte* to;
  SharedAddress address;
  const void* from;
  int bytes;
  int valid;
  Site site;
};

// One store of a tile or of bytes that the bulk engine was given.
struct BulkStore {
  std::function<std::vector<std::byte>()> read;              // shared memory, when it is due
  std::function<void(const std::vector<std::byte>&)> write;  // global memory, after that
  std::optional<std::vector<std::byte>> data;                // what was read
  bool written = false;
  bool waited = false;                                // for the reading
  std::shared_ptr<const Operation> reading, writing;  // for the checker
  Site site;
};

struct Fiber {
  void* stack_pointer;
  const Stack* stack;
  Block* block;
  Warp* warp;
  int lane;
  int index;   // among all threads of the machine: its number for the checker
  int thread;  // threadIdx.x
  bool exited = false;
  Wait wait{};                      // holds while the fiber cannot run
  bool in_cluster_barrier = false;  // has arrived and not yet waited
  uint32_t cluster_phase = 0;       // of that arrival
  bool wgmma_fenced = false;        // since its last wait
  bool wgmma_group_fenced = false;  // since its last commit
  uint64_t wgmma_committed = 0;     // groups
  uint64_t wgmma_retired = 0;
  std::vector<AsyncCopy> open_copies;  // since the last commit
  std::vector<BulkStore> open_stores;
  std::deque<std::vector<BulkStore>> store_groups;
  std::deque<std::vector<AsyncCopy>> copy_groups;  // oldest first
};

// Lanes that came to one warp-wide instruction, until the last one acts for all.
struct WarpCollective {
  const char* instruction = nullptr;
  Site site;
  uint32_t mask = 0;  // 0: nobody is here
  uint32_t arrived = 0;
  void* arguments[kLanes];
};

// The n-th time that lanes reach one memory instruction: what the hardware serves as one access of the warp.
struct WarpAccess {
  uint32_t lanes = 0;
  int bytes = 0;
  uint64_t addresses[kLanes];
};
struct AccessStream {
  uint32_t next[kLanes] = {};
  uint32_t first = 0;  // number of the oldest open access
  std::deque<WarpAccess> open;
};

struct Warp {
  Block* block;
  int index;      // in the block
  int number;     // in the machine
  Fiber* fibers;  // (kLanes)
  uint32_t alive = 0;
  uint32_t runnable = 0;
  uint32_t priority = 0;               // PCT
  bool backwards = false;              // PCT: lanes run from the last to the first
  WarpCollective collectives[kLanes];  // one for each lane that may be the lowest of a mask
  uint32_t in_collective = 0;          // lanes that wait in one of these
  std::unordered_map<uint64_t, AccessStream> accesses;
  uint64_t last_key = 0;  // the stream of the last access is mostly that of the next
  AccessStream* last_access = nullptr;
};

struct NamedBarrier {
  int expected = 0;  // threads, of the phase that is open
  int arrived = 0;
  std::vector<Fiber*> waiting;
  std::vector<int> arrivals;  // fiber indices, for the checker
};

// An mbarrier's state; the word in shared memory only shows whether it is still there.
struct BarrierState {
  uint32_t expected = 0;
  uint32_t pending = 0;
  int64_t bytes = 0;  // announced and not yet complete; negative where copies came before their announcement
  uint32_t phase = 0;
  int copies = 0;  // under way
  std::vector<Fiber*> waiting;
};

// Threads of a warpgroup that came to one instruction, until the last one acts for all.
struct WarpgroupCollective {
  const char* instruction = nullptr;  // null: nobody is here
  Site site;
  int arrived = 0;
  std::array<void*, kWarpgroupThreads> arguments{};
};

struct Warpgroup {
  WarpgroupCollective collective;
  int registers = 0;                 // of a thread
  std::unique_ptr<WgmmaUnit> wgmma;  // made by the first wgmma

  Warpgroup();
  Warpgroup(Warpgroup&&) noexcept;
  ~Warpgroup();
};

// The blocks that share their shared memory, and the barrier of all their threads.
struct Cluster {
  std::vector<Block*> blocks;  // by rank
  int threads_left = 0;
  int arrived = 0;
  uint32_t phase = 0;
  std::vector<Fiber*> waiting;
};

struct Block {
  int index[3];  // blockIdx
  int rank = 0;  // in the cluster
  Cluster* cluster = nullptr;
  uint32_t priority = 0;  // PCT
  int number = 0;
  std::byte* shared = nullptr;  // the window: reserved bytes, then shared_bytes
  uint32_t shared_end = 0;      // first address past the window
  int threads_left = 0;
  int copies = 0;          // under way into its shared memory
  int registers_left = 0;  // for setmaxnreg
  std::array<NamedBarrier, 16> barriers;
  std::unordered_map<SharedAddress, BarrierState> mbarriers;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::unique_ptr<Fiber[]> fibers;
};

}  // namespace cuda_ext::simt
