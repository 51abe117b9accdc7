// Clusters: ranks, barriers, each other's shared memory, multicast.
#include "arch/cluster.cuh"
#include "arch/tma.cuh"
#include "arch/warp.cuh"
#include "conformance.h"
#include "rt/tensor_map.cuh"

namespace cuda_ext::conformance {

using namespace arch;

constexpr int kBlocks = 4;

// A cluster of 4 blocks of 32 threads.
#define CLUSTER_CASE(case_name, Storage, in_size, out_size)                                                           \
  static const Register case_name##_case(                                                                             \
      {#case_name, in_size, out_size, [](const uint32_t* in, uint32_t* out) {                                         \
         rt::launch<case_name##_kernel>(                                                                              \
             #case_name,                                                                                              \
             {.grid = {2 * kBlocks}, .threads = 32, .cluster = {kBlocks}, .shared_bytes = sizeof(Storage)}, in, out); \
       }})

struct RowStorage {
  alignas(16) uint32_t row[32];
};

// out: rank and size for each block of the grid, then the values of the next block of the cluster, read by loads.
GLOBAL(32, 1) cluster_loads_kernel(const uint32_t* in, uint32_t* out) {
  SHARED_STORAGE(RowStorage, shared);
  const int lane = lane_index(), block = block_x(), rank = cluster_rank();
  if (lane == 0) {
    out[2 * block] = uint32_t(rank);
    out[2 * block + 1] = uint32_t(cluster_size());
  }
  store_shared(shared_address(&shared.row[lane]), in[block * 32 + lane]);
  cluster_arrive();
  cluster_wait();
  uint32_t* const to = out + 4 * kBlocks + block * 32;
  const SharedAddress peer = mapa(shared_address(shared.row), (rank + 1) % kBlocks);
  if (lane < 8) store_global(to + 4 * lane, load_shared_cluster<Words4>(peer + 16 * uint32_t(7 - lane)));
  cluster_arrive();
  cluster_wait();
}
CLUSTER_CASE(cluster_loads, RowStorage, 2 * kBlocks * 128, 4 * kBlocks * 4 + 2 * kBlocks * 128);

// Loads of other widths, and stores of all widths: block r stores its row in the next block, which outputs what it
// received, and loads from its neighbours.
struct RowsStorage {
  alignas(16) uint32_t own[32], got[3][32];
};
GLOBAL(32, 1) cluster_vectors_kernel(const uint32_t* in, uint32_t* out) {
  SHARED_STORAGE(RowsStorage, shared);
  const int lane = lane_index(), block = block_x(), next = (cluster_rank() + 1) % kBlocks;
  const uint32_t* const row = in + block * 32;
  store_shared(shared_address(&shared.own[lane]), row[lane]);
  const auto there = [&](int width) { return mapa(shared_address(shared.got[width]), next); };
  if (lane < 8) store_shared_cluster(there(0) + 16 * uint32_t(lane), load_global<Words4>(row + 4 * lane));
  if (lane < 16) store_shared_cluster(there(1) + 8 * uint32_t(lane), load_global<Words2>(row + 2 * lane));
  store_shared_cluster(there(2) + 4 * uint32_t(lane), row[lane]);
  cluster_arrive();
  cluster_wait();
  uint32_t* const to = out + block * 5 * 32;
  for (int width = 0; width < 3; ++width) to[32 * width + lane] = shared.got[width][lane];
  const SharedAddress peer = mapa(shared_address(shared.own), next);
  if (lane < 16) store_global(to + 96 + 2 * lane, load_shared_cluster<Words2>(peer + 8 * uint32_t(15 - lane)));
  to[128 + lane] = load_shared_cluster<uint32_t>(peer + 4 * uint32_t(31 - lane));
  cluster_arrive();
  cluster_wait();
}
CLUSTER_CASE(cluster_vectors, RowsStorage, 2 * kBlocks * 128, 2 * kBlocks * 5 * 128);

struct MailStorage {
  alignas(16) uint32_t mail[32];
  Barrier full;
};

// Each block writes to the previous one and arrives at that block's barrier, once per lane.
GLOBAL(32, 1) cluster_stores_kernel(const uint32_t* in, uint32_t* out) {
  SHARED_STORAGE(MailStorage, shared);
  const int lane = lane_index(), block = block_x();
  if (lane == 0) {
    barrier_init(shared.full, 32);
    fence_barrier_init();
  }
  cluster_arrive_relaxed();
  cluster_wait();
  const int peer = (cluster_rank() + kBlocks - 1) % kBlocks;
  store_shared_cluster(mapa(shared_address(&shared.mail[lane]), peer), in[block * 32 + lane]);
  barrier_arrive_remote(mapa(shared_address(&shared.full), peer));
  barrier_wait_cluster(shared.full, 0);
  out[block * 32 + lane] = shared.mail[31 - lane];
  cluster_arrive();
  cluster_wait();
}
CLUSTER_CASE(cluster_stores, MailStorage, 2 * kBlocks * 128, 2 * kBlocks * 128);

struct TileStorage {
  alignas(128) uint32_t tile[kBlocks][32];
  Barrier full;
};

// in (8, 32): block r loads row r of its cluster for all blocks except rank r ^ 2.
GLOBAL(32, 1) multicast_kernel(GRID_CONSTANT TensorMap map, uint32_t* out) {
  SHARED_STORAGE(TileStorage, shared);
  const int lane = lane_index(), rank = cluster_rank(), cluster = block_x() / kBlocks;
  for (int r = 0; r < kBlocks; ++r) store_shared(shared_address(&shared.tile[r][lane]), 0u);
  fence_async_shared();
  arch::sync_warp();
  if (lane == 0) {
    barrier_init(shared.full, 1);
    fence_barrier_init();
    barrier_arrive_expect(shared.full, (kBlocks - 1) * 128);
  }
  cluster_arrive();
  cluster_wait();
  if (lane == 0)
    tma_load_multicast(shared_address(shared.tile[rank]), map, shared.full, {0, cluster * kBlocks + rank},
                       uint16_t(15 & ~(1 << (rank ^ 2))));
  barrier_wait(shared.full, 0);
  for (int r = 0; r < kBlocks; ++r) out[(block_x() * kBlocks + r) * 32 + lane] = shared.tile[r][lane];
  cluster_arrive();
  cluster_wait();
}
static const Register multicast_case(
    {"multicast", 2 * kBlocks * 128, 2 * kBlocks * kBlocks * 128, [](const uint32_t* in, uint32_t* out) {
       const TensorMap map = rt::make_tensor_map("multicast", {.data = in,
                                                               .element = rt::Element::kFloat32,
                                                               .rank = 2,
                                                               .sizes = {32, 2 * kBlocks},
                                                               .strides = {128},
                                                               .box = {32, 1}});
       rt::launch<multicast_kernel>(
           "multicast",
           {.grid = {2 * kBlocks}, .threads = 32, .cluster = {kBlocks}, .shared_bytes = sizeof(TileStorage)}, map, out);
     }});

// Two kernels; the second may start before the first ends, and adds to the first one's output.
GLOBAL(32, 1) programmatic_kernel(const uint32_t* in, uint32_t* out, int second) {
  const int lane = lane_index();
  grid_launch_dependents();
  const uint32_t own = in[second * 32 + lane];
  grid_dependency_wait();
  store_global(out + second * 32 + lane, second == 0 ? own : own + load_global_streaming<uint32_t>(out + 31 - lane));
}
static const Register programmatic_case({"programmatic_launch", 256, 256, [](const uint32_t* in, uint32_t* out) {
                                           for (int i = 0; i < 2; ++i)
                                             rt::launch<programmatic_kernel>("programmatic_launch",
                                                                             {.threads = 32, .programmatic = true}, in,
                                                                             out, i);
                                         }});

}  // namespace cuda_ext::conformance
