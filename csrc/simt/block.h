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
constexpr uint32_t kReservedSharedBytes = 1024;  // at the start of every block's shared memory, as on the hardware
constexpr uint8_t kPoison = 0xff;                // a NaN in every floating type

// An address in the shared memory of another block of the cluster holds that block's rank plus 1 from bit 24 up; in
// addresses of the own block these bits are 0.
constexpr int kRankShift = 24;

// The line number of a Site whose `file` is a code address instead of a name.
constexpr int kCodeAddress = -1;
constexpr Site kNoSite{"", 0};  // for events that no instruction causes
// "gemm_sm80.cuh:120".
std::string location(Site site);

struct Instruction {
  const char* name;
  Site site;
};

// What a parked fiber waits for; shown in the deadlock table.
struct Wait {
  const char* instruction;
  Site site;
  SharedAddress barrier = 0;  // address of an mbarrier, or number of a named barrier
  uint32_t parity = 0;
};

// A copy started by cp.async.
struct AsyncCopy {
  std::byte* to;
  SharedAddress address;
  const void* from;
  int bytes;
  int valid;
  Site site;
};

// A store of a tile or of bytes by the bulk engine.
struct BulkStore {
  std::function<std::vector<std::byte>()> read;              // reads shared memory
  std::function<void(const std::vector<std::byte>&)> write;  // then writes global memory
  std::optional<std::vector<std::byte>> data;                // once read
  bool written = false;
  bool waited = false;                                // the thread has waited for the read
  std::shared_ptr<const Operation> reading, writing;  // the checker's
  Site site;
};

struct Fiber {
  void* stack_pointer;
  const Stack* stack;
  Block* block;
  Warp* warp;
  int lane;
  int index;   // among all threads of the machine; identifies the thread to the checker
  int thread;  // threadIdx.x
  bool exited = false;
  Wait wait{};                         // valid while the fiber cannot run
  bool in_cluster_barrier = false;     // has arrived but not yet waited
  uint32_t cluster_phase = 0;          // phase of that arrival
  bool wgmma_fenced = false;           // since its last wait
  bool wgmma_group_fenced = false;     // since its last commit
  uint64_t wgmma_committed = 0;        // number of groups
  uint64_t wgmma_retired = 0;          // number of groups that the thread has waited for
  std::vector<AsyncCopy> open_copies;  // since the last commit
  std::vector<BulkStore> open_stores;
  std::deque<std::vector<BulkStore>> store_groups;
  std::deque<std::vector<AsyncCopy>> copy_groups;  // oldest first
};

// The lanes that have arrived at a warp-wide instruction; the last one executes it for all.
struct WarpCollective {
  const char* instruction = nullptr;
  Site site;
  uint32_t mask = 0;  // 0: not in use
  uint32_t arrived = 0;
  void* arguments[kLanes];
};

// The n-th execution of a memory instruction by the lanes of a warp, which the hardware serves as one access.
struct WarpAccess {
  uint32_t lanes = 0;
  int bytes = 0;
  uint64_t addresses[kLanes];
};
struct AccessStream {
  uint32_t next[kLanes] = {};
  uint32_t first = 0;  // index of the oldest open access
  std::deque<WarpAccess> open;
};

struct Warp {
  Block* block;
  int index;      // in the block
  int number;     // among all warps of the machine
  Fiber* fibers;  // (kLanes)
  uint32_t alive = 0;
  uint32_t runnable = 0;
  uint32_t priority = 0;               // under PCT
  bool backwards = false;              // under PCT: lanes run from the last to the first
  WarpCollective collectives[kLanes];  // one for each lane that may be the lowest of a mask
  uint32_t in_collective = 0;          // lanes that wait in one of these
  std::unordered_map<uint64_t, AccessStream> accesses;
  uint64_t last_key = 0;  // cache: successive accesses mostly belong to one stream
  AccessStream* last_access = nullptr;
};

struct NamedBarrier {
  int expected = 0;  // threads, in the current phase
  int arrived = 0;
  std::vector<Fiber*> waiting;
  std::vector<int> arrivals;  // fiber indices, for the checker
};

// The state of an mbarrier. The word in shared memory only shows whether something has overwritten it.
struct BarrierState {
  uint32_t expected = 0;
  uint32_t pending = 0;
  int64_t bytes = 0;  // expected minus arrived; negative if copies complete before they are announced
  uint32_t phase = 0;
  int copies = 0;  // in flight
  std::vector<Fiber*> waiting;
};

// The threads of a warpgroup that have arrived at an instruction; the last one executes it for all.
struct WarpgroupCollective {
  const char* instruction = nullptr;  // null: not in use
  Site site;
  int arrived = 0;
  std::array<void*, kWarpgroupThreads> arguments{};
};

struct Warpgroup {
  WarpgroupCollective collective;
  int registers = 0;                 // per thread
  std::unique_ptr<WgmmaUnit> wgmma;  // created by the first wgmma

  Warpgroup();
  Warpgroup(Warpgroup&&) noexcept;
  ~Warpgroup();
};

// The blocks of a cluster, and the barrier of all their threads.
struct Cluster {
  std::vector<Block*> blocks;  // by rank
  int threads_left = 0;
  int arrived = 0;
  uint32_t phase = 0;
  std::vector<Fiber*> waiting;
};

struct Block {
  int index[3];  // blockIdx
  int rank = 0;  // within the cluster
  Cluster* cluster = nullptr;
  uint32_t priority = 0;        // under PCT
  int number = 0;               // among all blocks of the machine
  std::byte* shared = nullptr;  // reserved bytes, then the kernel's shared_bytes
  uint32_t shared_end = 0;      // first address past them
  int threads_left = 0;
  int copies = 0;          // in flight into its shared memory
  int registers_left = 0;  // that setmaxnreg can assign
  std::array<NamedBarrier, 16> barriers;
  std::unordered_map<SharedAddress, BarrierState> mbarriers;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::unique_ptr<Fiber[]> fibers;
};

}  // namespace cuda_ext::simt
