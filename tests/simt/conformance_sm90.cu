// stmatrix, mbarriers, TMA and bulk copies.
#include "arch/mma.cuh"
#include "arch/tma.cuh"
#include "arch/warp.cuh"
#include "conformance.h"
#include "rt/tensor_map.cuh"

namespace cuda_ext::conformance {

using namespace arch;

struct MatrixStorage {
  alignas(16) uint32_t x[128];
};

// in: 4 words per lane; the position of a matrix row in shared memory differs from its index.
template <int count, bool transposed>
DEVICE void store_matrices(const uint32_t* in, uint32_t* out) {
  SHARED_STORAGE(MatrixStorage, shared);
  const int lane = lane_index();
  store_shared(shared_address(shared.x + 4 * lane), Words4{});
  uint32_t m[count];
  for (int i = 0; i < count; ++i) m[i] = in[i * 32 + lane];
  sync_warp();
  stmatrix<count, transposed>(shared_address(shared.x) + 16 * uint32_t(lane * 5 % 32), m);
  sync_warp();
  store_global(out + 4 * lane, load_shared<Words4>(shared_address(shared.x + 4 * lane)));
}
CONFORMANCE(stmatrix_x1, 32, sizeof(MatrixStorage), 512, 512) { store_matrices<1, false>(in, out); }
CONFORMANCE(stmatrix_x2, 32, sizeof(MatrixStorage), 512, 512) { store_matrices<2, false>(in, out); }
CONFORMANCE(stmatrix_x4, 32, sizeof(MatrixStorage), 512, 512) { store_matrices<4, false>(in, out); }
CONFORMANCE(stmatrix_x1_trans, 32, sizeof(MatrixStorage), 512, 512) { store_matrices<1, true>(in, out); }
CONFORMANCE(stmatrix_x2_trans, 32, sizeof(MatrixStorage), 512, 512) { store_matrices<2, true>(in, out); }
CONFORMANCE(stmatrix_x4_trans, 32, sizeof(MatrixStorage), 512, 512) { store_matrices<4, true>(in, out); }

struct RingStorage {
  uint32_t slot[2][32];
  Barrier full[2], empty[2];
};

// Warp 0 passes 8 rows of 32 words to warp 1 through a ring of two slots; the mbarriers are the only synchronisation.
CONFORMANCE(barrier_ring, 64, sizeof(RingStorage), 8 * 128, 8 * 128) {
  SHARED_STORAGE(RingStorage, shared);
  const int warp = thread_index() / 32, lane = lane_index();
  if (thread_index() == 0) {
    for (int s = 0; s < 2; ++s) {
      barrier_init(shared.full[s], 32);
      barrier_init(shared.empty[s], 1);
    }
    fence_barrier_init();
  }
  arch::sync_threads();
  for (int row = 0; row < 8; ++row) {
    const int slot = row % 2;
    const uint32_t parity = row / 2 % 2;
    if (warp == 0) {
      barrier_wait(shared.empty[slot], parity ^ 1);
      store_shared(shared_address(&shared.slot[slot][lane]), in[row * 32 + lane]);
      barrier_arrive(shared.full[slot]);
    } else {
      barrier_wait(shared.full[slot], parity);
      out[row * 32 + lane] = load_shared<uint32_t>(shared_address(&shared.slot[slot][31 - lane]));
      arch::sync_warp();
      if (lane == 0) barrier_arrive(shared.empty[slot]);
    }
  }
}

struct BulkStorage {
  alignas(128) uint32_t x[256];
  Barrier full;
};

// The copy starts before its bytes are expected; afterwards the barrier's memory is reused.
CONFORMANCE(barrier_order, 32, sizeof(BulkStorage), 512, 4 + 512) {
  SHARED_STORAGE(BulkStorage, shared);
  const int lane = lane_index();
  if (lane == 0) {
    barrier_init(shared.full, 2);
    fence_barrier_init();
    bulk_load(shared_address(shared.x), in, 512, shared.full);
    barrier_arrive(shared.full);
    barrier_expect(shared.full, 512);
    barrier_arrive(shared.full);
  }
  arch::sync_warp();
  barrier_wait(shared.full, 0);
  barrier_wait(shared.full, 1 ^ 1);
  for (int i = 0; i < 4; ++i) out[1 + i * 32 + lane] = shared.x[i * 32 + lane];
  arch::sync_warp();
  if (lane == 0) {
    barrier_invalidate(shared.full);
    store_shared(shared_address(&shared.full), in[0]);
    out[0] = load_shared<uint32_t>(shared_address(&shared.full));
  }
}

// Copies in (256 words) to out with two loads, and three stores in two groups; the first part is reversed in between.
// After waiting for the stores, the thread reads the first and the last stored word.
CONFORMANCE(bulk_copies, 32, sizeof(BulkStorage), 1024, 1024 + 4) {
  SHARED_STORAGE(BulkStorage, shared);
  const int lane = lane_index();
  if (lane == 0) {
    barrier_init(shared.full, 1);
    fence_barrier_init();
    barrier_arrive_expect(shared.full, 1024);
    bulk_load(shared_address(shared.x), in, 16, shared.full);
    bulk_load(shared_address(shared.x + 4), in + 4, 1008, shared.full);
  }
  arch::sync_warp();
  barrier_wait(shared.full, 0);
  const uint32_t turned = shared.x[31 - lane];
  arch::sync_warp();
  store_shared(shared_address(shared.x + lane), turned);
  fence_async_shared();
  arch::sync_warp();
  if (lane == 0) {
    bulk_store(out, shared_address(shared.x), 128);
    bulk_commit();
    bulk_store(out + 32, shared_address(shared.x + 32), 16);
    bulk_store(out + 36, shared_address(shared.x + 36), 880);
    bulk_commit();
    bulk_wait_read<1>();
    bulk_wait<0>();
    out[256] = load_global_streaming<uint32_t>(out) ^ load_global_streaming<uint32_t>(out + 255);
  }
}

// TMA. in: the corner's coordinates as signed 16-bit numbers in five words, three unused words, then a tensor with a
// different size in every dimension and rows padded to multiples of 16 bytes. A load outputs the box in its layout in
// shared memory. A store outputs the tensor, initialised with other words of the input (for add: the sum).
constexpr int kHeadWords = 8;
constexpr int kOuter[5] = {0, 5, 3, 4, 3}, kOuterBox[5] = {0, 4, 2, 3, 2};

template <class T>
constexpr rt::Element kElement = rt::Element::kUint8;
template <>
constexpr rt::Element kElement<float> = rt::Element::kFloat32;
template <>
constexpr rt::Element kElement<half_t> = rt::Element::kFloat16;
template <>
constexpr rt::Element kElement<bfloat16_t> = rt::Element::kBFloat16;

template <class T, int rank, int row_bytes, int swizzle, bool stored>
struct Tile {
  static constexpr int kBoxRow = row_bytes / int(sizeof(T));
  // Of the innermost dimension; a tensor that is stored to has rows of whole units of 16 bytes.
  static constexpr int kSize = 2 * kBoxRow + (stored ? 16 / int(sizeof(T)) : 3);
  static constexpr int kPitch = (kSize * int(sizeof(T)) + 15) / 16 * 16;  // bytes
  static constexpr int tensor_bytes() {
    int bytes = kPitch;
    for (int d = 1; d < rank; ++d) bytes *= kOuter[d];
    return bytes;
  }
  static constexpr int box_bytes() {
    int bytes = row_bytes;
    for (int d = 1; d < rank; ++d) bytes *= kOuterBox[d];
    return bytes;
  }
  static TensorMap map(const void* data) {
    rt::TensorLayout layout{.data = data, .element = kElement<T>, .rank = rank, .swizzle_bytes = swizzle};
    int64_t stride = kPitch;
    for (int d = 0; d < rank; ++d) {
      layout.sizes[d] = d == 0 ? kSize : kOuter[d];
      layout.box[d] = d == 0 ? kBoxRow : kOuterBox[d];
      if (d == 0) continue;
      layout.strides[d - 1] = stride;
      stride *= kOuter[d];
    }
    return rt::make_tensor_map("tma", layout);
  }
};

struct TmaStorage {
  alignas(1024) uint32_t x[128 * 4 * 2 * 3 * 2 / 4];
  Barrier full;
};

template <int rank>
DEVICE void read_corner(const uint32_t* in, int (&at)[rank]) {
  for (int d = 0; d < rank; ++d) at[d] = int16_t(in[d]);
}

template <int rank>
GLOBAL(32, 1)
tma_load_case(GRID_CONSTANT TensorMap map, const uint32_t* in, uint32_t* out, int bytes) {
  SHARED_STORAGE(TmaStorage, shared);
  const int lane = lane_index();
  if (lane == 0) {
    tma_prefetch(map);
    barrier_init(shared.full, 1);
    fence_barrier_init();
    barrier_arrive_expect(shared.full, uint32_t(bytes));
    int at[rank];
    read_corner(in, at);
    tma_load(shared_address(shared.x), map, shared.full, at);
  }
  arch::sync_warp();
  barrier_wait(shared.full, 0);
  for (int i = lane; i < bytes / 4; i += 32) out[i] = shared.x[i];
}

template <int rank, bool add>
GLOBAL(32, 1)
tma_store_case(GRID_CONSTANT TensorMap map, const uint32_t* in, const uint32_t* box, int bytes) {
  SHARED_STORAGE(TmaStorage, shared);
  const int lane = lane_index();
  for (int i = lane; i < bytes / 4; i += 32) store_shared(shared_address(shared.x + i), box[i]);
  fence_async_shared();
  arch::sync_warp();
  if (lane == 0) {
    int at[rank];
    read_corner(in, at);
    tma_store<add>(map, shared_address(shared.x), at);
    bulk_commit();
    bulk_wait<0>();
  }
}

// A kernel initialises the tensor, so that a GPU needs no other operation than launches.
GLOBAL(32, 1) copy_words(const uint32_t* in, uint32_t* out, int words) {
  for (int i = thread_index(); i < words; i += 32) out[i] = in[i];
}

template <class T, int rank, int row_bytes, int swizzle>
Case load_case(const char* name) {
  using Of = Tile<T, rank, row_bytes, swizzle, false>;
  return {name, kHeadWords * 4 + Of::tensor_bytes(), Of::box_bytes(), [](const uint32_t* in, uint32_t* out) {
            rt::launch<tma_load_case<rank>>("tma_load", {.threads = 32, .shared_bytes = sizeof(TmaStorage)},
                                            Of::map(in + kHeadWords), in, out, Of::box_bytes());
          }};
}
template <class T, int rank, int row_bytes, int swizzle, bool add>
Case store_case(const char* name) {
  using Of = Tile<T, rank, row_bytes, swizzle, true>;
  return {name, kHeadWords * 4 + Of::tensor_bytes() + Of::box_bytes(), Of::tensor_bytes(),
          [](const uint32_t* in, uint32_t* out) {
            const uint32_t* const tensor = in + kHeadWords;
            rt::launch<copy_words>("copy_words", {.threads = 32}, tensor, out, Of::tensor_bytes() / 4);
            rt::launch<tma_store_case<rank, add>>("tma_store", {.threads = 32, .shared_bytes = sizeof(TmaStorage)},
                                                  Of::map(out), in, tensor + Of::tensor_bytes() / 4, Of::box_bytes());
          }};
}

// Names: rank, bytes of a row, swizzle, type.
static const Register tma_cases[] = {
    Register(load_case<float, 1, 64, 0>("tma_load_1d_64_none_float32")),
    Register(load_case<uint8_t, 2, 16, 0>("tma_load_2d_16_none_uint8")),
    Register(load_case<bfloat16_t, 2, 32, 32>("tma_load_2d_32_swizzle32_bfloat16")),
    Register(load_case<half_t, 2, 64, 64>("tma_load_2d_64_swizzle64_float16")),
    Register(load_case<half_t, 2, 128, 128>("tma_load_2d_128_swizzle128_float16")),
    Register(load_case<uint8_t, 2, 128, 128>("tma_load_2d_128_swizzle128_uint8")),
    Register(load_case<float, 3, 128, 128>("tma_load_3d_128_swizzle128_float32")),
    Register(load_case<half_t, 3, 48, 0>("tma_load_3d_48_none_float16")),
    Register(load_case<bfloat16_t, 4, 64, 64>("tma_load_4d_64_swizzle64_bfloat16")),
    Register(load_case<half_t, 5, 32, 32>("tma_load_5d_32_swizzle32_float16")),
    Register(load_case<float, 5, 128, 128>("tma_load_5d_128_swizzle128_float32")),
    Register(store_case<float, 1, 64, 0, false>("tma_store_1d_64_none_float32")),
    Register(store_case<bfloat16_t, 2, 128, 128, false>("tma_store_2d_128_swizzle128_bfloat16")),
    Register(store_case<half_t, 3, 64, 64, false>("tma_store_3d_64_swizzle64_float16")),
    Register(store_case<uint8_t, 2, 128, 128, false>("tma_store_2d_128_swizzle128_uint8")),
    Register(store_case<uint8_t, 4, 32, 32, false>("tma_store_4d_32_swizzle32_uint8")),
    Register(store_case<half_t, 5, 16, 0, false>("tma_store_5d_16_none_float16")),
    Register(store_case<float, 1, 128, 128, true>("tma_add_1d_128_swizzle128_float32")),
    Register(store_case<half_t, 2, 64, 64, true>("tma_add_2d_64_swizzle64_float16")),
    Register(store_case<bfloat16_t, 3, 32, 32, true>("tma_add_3d_32_swizzle32_bfloat16")),
    Register(store_case<float, 5, 32, 0, true>("tma_add_5d_32_none_float32"))};

}  // namespace cuda_ext::conformance
