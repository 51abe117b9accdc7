// The bulk engine: tiles and bytes between global and shared memory.
#include "simt/checker.h"
#include "simt/tensor_map.h"

namespace cuda_ext::simt {

void complete_bytes(uint64_t* word, BarrierState& state, int64_t bytes);

namespace {

constexpr uint16_t kMagic = 0x7a3d;
constexpr uint8_t kPoison = 0xff;  // a NaN in every floating type

void check(Access kind, const void* memory, int64_t bytes, const char* instruction, Site site) {
  if (Checker* checker = machine->checker()) checker->access(kind, memory, int(bytes), instruction, site);
}

TensorMapFields decode(const uint64_t* map, int rank, const char* instruction, Site site) {
  TensorMapFields fields;
  std::memcpy(&fields, map, sizeof fields);
  if (fields.magic != kMagic) machine->fail(instruction, site, "the tensor map was never made, or is overwritten");
  if (fields.rank != rank)
    machine->fail(instruction, site, "%d coordinates for a tensor of %d dimensions", rank, int(fields.rank));
  return fields;
}

int64_t box_bytes(const TensorMapFields& f) {
  int64_t bytes = bytes_of(f.type);
  for (int d = 0; d < f.rank; ++d) bytes *= f.box[d];
  return bytes;
}

// Swizzling exchanges 16-byte units within rows of 128 bytes, by absolute address.
SharedAddress swizzled(SharedAddress address, int swizzle_bytes) {
  const uint32_t units = uint32_t(swizzle_bytes) / 16;
  return units < 2 ? address : address ^ (address >> 7 & (units - 1)) << 4;
}

// f(shared address, global address or null where the box leaves the tensor, bytes) for every 16 bytes of a tile's rows.
template <class F>
void for_units(const TensorMapFields& f, SharedAddress shared, const std::array<int64_t, 5>& at, F&& unit) {
  const int element = bytes_of(f.type), per_unit = 16 / element;
  std::array<int64_t, 5> i{};
  int64_t offset = 0;
  for (;;) {
    bool inside = true;
    int64_t address = int64_t(f.base);
    for (int d = 1; d < f.rank; ++d) {
      const int64_t x = at[d] + i[d];
      inside &= x >= 0 && x < f.sizes[d];
      address += x * int64_t(f.strides[d - 1]);
    }
    for (int64_t x = 0; x < f.box[0]; x += per_unit, offset += 16) {
      const int64_t first = at[0] + x;
      // A unit may be partly inside; element by element then.
      for (int e = 0; e < per_unit; ++e) {
        const bool here = inside && first + e >= 0 && first + e < f.sizes[0];
        unit(swizzled(shared + uint32_t(offset), f.swizzle_bytes) + uint32_t(e * element),
             here ? reinterpret_cast<std::byte*>(address + (first + e) * element) : nullptr, element);
      }
    }
    int d = 1;
    while (d < f.rank && ++i[d] == f.box[d]) i[d++] = 0;
    if (d >= f.rank) return;
  }
}

std::array<int64_t, 5> coordinates(const int* at, int rank) {
  std::array<int64_t, 5> all{};
  for (int d = 0; d < rank; ++d) all[d] = at[d];
  return all;
}

// Starts a copy into [to, to + bytes): `carry_out` fills it, then the barrier learns of the bytes.
void start_load(std::byte* to, int64_t bytes, uint64_t* word, const char* instruction, Site site,
                std::function<void()> carry_out) {
  BarrierState& state = machine->barrier(word, instruction, site);
  machine->count(Count::kTmaLoadBytes) += uint64_t(bytes);
  check(Access::kAsyncWrite, to, bytes, instruction, site);
  std::shared_ptr<const Knowledge> at_start;
  if (Checker* checker = machine->checker()) at_start = checker->start_copy();
  if (machine->lazy()) std::memset(to, kPoison, size_t(bytes));
  machine->start([=, &state, carry_out = std::move(carry_out)] {
    carry_out();
    if (at_start) machine->checker()->end_copy(word, *at_start);
    complete_bytes(word, state, bytes);
  });
}

void start_store(BulkStore store) {
  if (!machine->lazy()) {
    store.data = store.read();
    store.write(*store.data);
    return;
  }
  machine->current().open_stores.push_back(std::move(store));
}

}  // namespace

void encode_tensor_map(uint64_t* map, const TensorMapFields& fields) {
  const auto refuse = [](const std::string& text) { throw Fault("tensor map: " + text); };
  const int element = bytes_of(fields.type);
  if (fields.rank < 1 || fields.rank > 5) refuse("1 to 5 dimensions, got " + std::to_string(fields.rank));
  if (fields.base % 16 != 0) refuse("the tensor's address has to be a multiple of 16");
  const int inner = fields.box[0] * element;
  if (inner % 16 != 0) refuse("rows of the box have to be multiples of 16 bytes, got " + std::to_string(inner));
  if (fields.swizzle_bytes != 0 && inner > fields.swizzle_bytes)
    refuse("rows of the box take " + std::to_string(inner) + " bytes, more than the swizzle's " +
           std::to_string(fields.swizzle_bytes));
  for (int d = 0; d < fields.rank; ++d) {
    if (fields.sizes[d] == 0) refuse("dimension " + std::to_string(d) + " is empty");
    if (fields.box[d] < 1 || fields.box[d] > 256) refuse("a box takes 1 to 256 elements in each dimension");
    if (d > 0 && (fields.strides[d - 1] % 16 != 0 || fields.strides[d - 1] >= uint64_t(1) << 40))
      refuse("strides have to be multiples of 16 bytes below 2^40, got " + std::to_string(fields.strides[d - 1]));
  }
  TensorMapFields stored = fields;
  stored.magic = kMagic;
  std::memset(map, 0, 128);
  std::memcpy(map, &stored, sizeof stored);
}

void tma_load(SharedAddress to, const uint64_t* map, uint64_t* barrier, const int* at, int rank, Site site) {
  const TensorMapFields fields = decode(map, rank, "tma_load", site);
  const int64_t bytes = box_bytes(fields);
  std::byte* memory = machine->shared(to, int(bytes), fields.swizzle_bytes == 128 ? 1024 : 128, "tma_load", site);
  const auto where = coordinates(at, rank);
  for_units(fields, to, where, [&](SharedAddress, const std::byte* global, int size) {
    if (global != nullptr) check(Access::kRead, global, size, "tma_load", site);
  });
  std::byte* const window = memory - to;
  start_load(memory, bytes, barrier, "tma_load", site, [=] {
    for_units(fields, to, where, [&](SharedAddress shared, const std::byte* global, int size) {
      if (global != nullptr)
        std::memcpy(window + shared, global, size_t(size));
      else
        std::memset(window + shared, 0, size_t(size));
    });
  });
}

void bulk_load(SharedAddress to, const void* from, uint32_t bytes, uint64_t* barrier, Site site) {
  std::byte* memory = machine->shared(to, int(bytes), 16, "bulk_load", site);
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    machine->fail("bulk_load", site, "%u bytes from %p; both have to be multiples of 16", bytes, from);
  check(Access::kRead, from, bytes, "bulk_load", site);
  start_load(memory, bytes, barrier, "bulk_load", site, [=] { std::memcpy(memory, from, bytes); });
}

void tma_store(const uint64_t* map, SharedAddress from, const int* at, int rank, bool add, Site site) {
  const TensorMapFields fields = decode(map, rank, "tma_store", site);
  const int64_t bytes = box_bytes(fields);
  const std::byte* memory =
      machine->shared(from, int(bytes), fields.swizzle_bytes == 128 ? 1024 : 128, "tma_store", site);
  machine->count(Count::kTmaStoreBytes) += uint64_t(bytes);
  const auto where = coordinates(at, rank);
  check(Access::kAsyncRead, memory, bytes, "tma_store", site);
  for_units(fields, from, where, [&](SharedAddress, std::byte* global, int size) {
    if (global != nullptr) check(add ? Access::kAtomic : Access::kWrite, global, size, "tma_store", site);
  });
  const auto read = [=] { return std::vector<std::byte>(memory, memory + bytes); };
  const auto write = [=](const std::vector<std::byte>& data) {
    for_units(fields, from, where, [&](SharedAddress shared, std::byte* global, int size) {
      if (global == nullptr) return;
      const std::byte* value = data.data() + (shared - from);
      if (!add) {
        std::memcpy(global, value, size_t(size));
      } else if (fields.type == ElementType::kFloat32) {
        float sum, term;
        std::memcpy(&sum, global, 4);
        std::memcpy(&term, value, 4);
        sum += term;
        std::memcpy(global, &sum, 4);
      } else {
        uint16_t a, b;
        std::memcpy(&a, global, 2);
        std::memcpy(&b, value, 2);
        const uint16_t sum = fields.type == ElementType::kFloat16
                                 ? to_half(to_float(half_t{a}) + to_float(half_t{b})).bits
                                 : to_bfloat16(to_float(bfloat16_t{a}) + to_float(bfloat16_t{b})).bits;
        std::memcpy(global, &sum, 2);
      }
    });
  };
  start_store({read, write, {}});
}

void bulk_store(void* to, SharedAddress from, uint32_t bytes, Site site) {
  const std::byte* memory = machine->shared(from, int(bytes), 16, "bulk_store", site);
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0)
    machine->fail("bulk_store", site, "%u bytes to %p; both have to be multiples of 16", bytes, to);
  machine->count(Count::kTmaStoreBytes) += bytes;
  check(Access::kAsyncRead, memory, bytes, "bulk_store", site);
  check(Access::kWrite, to, bytes, "bulk_store", site);
  start_store({[=] { return std::vector<std::byte>(memory, memory + bytes); },
               [=](const std::vector<std::byte>& data) { std::memcpy(to, data.data(), data.size()); },
               {}});
}

void bulk_commit(Site site) {
  if (!machine->synchronizes("bulk_commit", site)) return;
  Fiber& self = machine->current();
  self.store_groups.push_back(std::move(self.open_stores));
  self.open_stores.clear();
}

namespace {

void read_all(std::vector<BulkStore>& group) {
  for (BulkStore& store : group)
    if (!store.data) store.data = store.read();
}
void write_all(std::vector<BulkStore>& group) {
  read_all(group);
  for (BulkStore& store : group) store.write(*store.data);
}

}  // namespace

void bulk_wait(int pending, bool read_only, Site site) {
  if (!machine->synchronizes(read_only ? "bulk_wait_read" : "bulk_wait", site)) return;
  auto& groups = machine->current().store_groups;
  if (read_only) {
    for (size_t i = 0; i + size_t(pending) < groups.size(); ++i) read_all(groups[i]);
    return;
  }
  while (groups.size() > size_t(pending)) {
    write_all(groups.front());
    groups.pop_front();
  }
}

void finish_stores(Fiber& fiber) {
  for (auto& group : fiber.store_groups) write_all(group);
  write_all(fiber.open_stores);
  fiber.store_groups.clear();
  fiber.open_stores.clear();
}

}  // namespace cuda_ext::simt
