// The bulk engine: asynchronous copies of tiles and bytes between global and shared memory.
#include <utility>

#include "simt/engines.h"
#include "simt/tensor_map.h"

namespace cuda_ext::simt {

namespace {

constexpr uint16_t kMagic = 0x7a3d;
constexpr int kUnit = 16;  // bytes that stay together under every swizzle

std::shared_ptr<const Operation> start_operation(const void* engine) {
  Checker* checker = machine->checker();
  return checker != nullptr ? checker->start(engine) : nullptr;
}
void check(const Operation* operation, Access kind, const void* memory, int64_t bytes, const char* instruction,
           Site site) {
  if (operation != nullptr) machine->checker()->access(*operation, kind, memory, int(bytes), instruction, site);
}

TensorMapFields decode(const uint64_t* map, const int* at, int rank, const char* instruction, Site site) {
  TensorMapFields fields;
  std::memcpy(&fields, map, sizeof fields);
  if (fields.magic != kMagic)
    machine->fail(instruction, site, "the tensor map was never initialised, or has been overwritten");
  if (fields.rank != rank)
    machine->fail(instruction, site, "%d coordinates for a tensor of %d dimensions", rank, int(fields.rank));
  // An H100 stops the kernel with an illegal instruction for others.
  if (at[0] * bytes_of(fields.type) % kUnit != 0)
    machine->fail(instruction, site, "expected the first coordinate to be a multiple of 16 bytes, got %d x %d bytes",
                  at[0], bytes_of(fields.type));
  return fields;
}

int64_t box_bytes(const TensorMapFields& f) {
  int64_t bytes = bytes_of(f.type);
  for (int d = 0; d < f.rank; ++d) bytes *= f.box[d];
  return bytes;
}

// Calls f(shared address, global address, bytes) for each unit of 16 bytes of a tile, or for each element of units that
// the tensor's edge crosses. The global address is null outside the tensor.
template <class F>
void for_pieces(const TensorMapFields& f, SharedAddress shared, const std::array<int64_t, 5>& at, F&& piece) {
  const int element = bytes_of(f.type), per_unit = kUnit / element;
  std::array<int64_t, 5> i{};
  SharedAddress linear = shared;
  for (;;) {
    bool inside = true;
    int64_t row = int64_t(f.base);
    for (int d = 1; d < f.rank; ++d) {
      const int64_t x = at[d] + i[d];
      inside &= x >= 0 && x < int64_t(f.sizes[d]);
      row += x * int64_t(f.strides[d - 1]);
    }
    const auto global = [&](int64_t x) { return reinterpret_cast<std::byte*>(row + x * element); };
    for (int64_t x = at[0]; x < at[0] + f.box[0]; x += per_unit, linear += kUnit) {
      const SharedAddress unit = swizzled(linear, f.swizzle_bytes);
      if (inside && x >= 0 && x + per_unit <= int64_t(f.sizes[0])) {
        piece(unit, global(x), kUnit);
      } else if (!inside || x + per_unit <= 0 || x >= int64_t(f.sizes[0])) {
        piece(unit, static_cast<std::byte*>(nullptr), kUnit);
      } else {
        for (int e = 0; e < per_unit; ++e) {
          const bool here = x + e >= 0 && x + e < int64_t(f.sizes[0]);
          piece(unit + uint32_t(e * element), here ? global(x + e) : nullptr, element);
        }
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

// Starts a copy of `bytes` to `to` in `block`. It completes by calling `perform`, then signals the mbarrier at
// `barrier` of that block.
void start_load(Block& block, SharedAddress to, int64_t bytes, SharedAddress barrier, const char* instruction,
                Site site, std::shared_ptr<const Operation> operation, std::function<void(std::byte*)> perform) {
  machine->count(Count::kTmaLoadBytes) += uint64_t(bytes);
  std::byte* const memory = block.shared + to;
  start_copy(block, barrier, operation.get(), instruction, site);
  check(operation.get(), Access::kAsyncWrite, memory, bytes, instruction, site);
  if (machine->lazy()) std::memset(memory, kPoison, size_t(bytes));
  machine->start([=, &block, operation = std::move(operation), perform = std::move(perform)] {
    perform(block.shared);
    end_copy(block, barrier, bytes, operation.get());
  });
}

void read_now(BulkStore& store) {
  if (!store.data) store.data = store.read();
}
void write_now(BulkStore& store) {
  read_now(store);
  if (!std::exchange(store.written, true)) store.write(*store.data);
}

void start_store(BulkStore store) {
  if (!machine->lazy()) write_now(store);
  machine->current().open_stores.push_back(std::move(store));
}

// To the checker, each thread has two engines for bulk stores: one reads shared memory, one writes global memory.
std::shared_ptr<const Operation> start_reading(const std::byte* memory, int64_t bytes, const char* instruction,
                                               Site site) {
  machine->count(Count::kTmaStoreBytes) += uint64_t(bytes);
  auto operation = start_operation(&machine->current().open_stores);
  check(operation.get(), Access::kAsyncRead, memory, bytes, instruction, site);
  return operation;
}
std::shared_ptr<const Operation> start_writing() { return start_operation(&machine->current().store_groups); }

// to += terms, elementwise in the tensor's type.
void add_elements(ElementType type, std::byte* to, const std::byte* terms, int bytes) {
  for (int i = 0; i < bytes; i += bytes_of(type)) {
    if (type == ElementType::kFloat32) {
      float sum, term;
      std::memcpy(&sum, to + i, 4);
      std::memcpy(&term, terms + i, 4);
      sum += term;
      std::memcpy(to + i, &sum, 4);
    } else {
      uint16_t a, b;
      std::memcpy(&a, to + i, 2);
      std::memcpy(&b, terms + i, 2);
      const uint16_t sum = type == ElementType::kFloat16
                               ? to_half(to_float(half_t{a}) + to_float(half_t{b})).bits
                               : to_bfloat16(to_float(bfloat16_t{a}) + to_float(bfloat16_t{b})).bits;
      std::memcpy(to + i, &sum, 2);
    }
  }
}

int alignment_of(const TensorMapFields& fields) { return fields.swizzle_bytes == 128 ? 1024 : 128; }

}  // namespace

void encode_tensor_map(uint64_t* map, const TensorMapFields& fields) {
  TensorMapFields stored = fields;
  stored.magic = kMagic;
  std::memset(map, 0, 128);
  std::memcpy(map, &stored, sizeof stored);
}

void tma_load(SharedAddress to, const uint64_t* map, uint64_t* barrier, const int* at, int rank, uint32_t blocks,
              Site site) {
  machine->require(80, "tma_load", site);
  const char* const instruction = blocks == 0 ? "tma_load" : "tma_load_multicast";
  const TensorMapFields fields = decode(map, at, rank, instruction, site);
  const int64_t bytes = box_bytes(fields);
  const auto where = coordinates(at, rank);
  Block& own = *machine->current().block;
  const SharedAddress barrier_address = machine->address_of(barrier);
  if (blocks == 0) blocks = 1u << own.rank;
  bool first = true;
  for (int r = 0; r < 32; ++r) {
    if ((blocks >> r & 1) == 0) continue;
    SharedAddress address = to;
    Block* block = &own;
    if (r != own.rank) {
      machine->block_of_rank(r, instruction, site);
      SharedAddress remote = to | SharedAddress(r + 1) << kRankShift;
      block = &machine->owner_of(remote, instruction, site);
    }
    machine->shared(*block, address, int(bytes), alignment_of(fields), instruction, site);
    auto operation = start_operation(machine->barrier_word(*block, barrier_address));
    if (std::exchange(first, false) && operation != nullptr)
      for_pieces(fields, to, where, [&](SharedAddress, const std::byte* global, int size) {
        if (global != nullptr) check(operation.get(), Access::kAsyncRead, global, size, instruction, site);
      });
    start_load(*block, address, bytes, barrier_address, instruction, site, operation, [=](std::byte* window) {
      const GlobalAccess scope(instruction, site);
      for_pieces(fields, to, where, [&](SharedAddress shared, const std::byte* global, int size) {
        if (global != nullptr)
          std::memcpy(window + shared, global, size_t(size));
        else
          std::memset(window + shared, 0, size_t(size));
      });
    });
  }
}

void bulk_load(SharedAddress to, const void* from, uint32_t bytes, uint64_t* barrier, Site site) {
  machine->require(80, "bulk_load", site);
  machine->shared(to, int(bytes), kUnit, "bulk_load", site);
  if (bytes % kUnit != 0 || reinterpret_cast<uintptr_t>(from) % kUnit != 0)
    machine->fail("bulk_load", site, "expected bytes and address to be multiples of 16, got %u bytes from %p", bytes,
                  from);
  auto operation = start_operation(barrier);
  check(operation.get(), Access::kAsyncRead, from, bytes, "bulk_load", site);
  start_load(*machine->current().block, to, bytes, machine->address_of(barrier), "bulk_load", site, operation,
             [=](std::byte* window) {
               const GlobalAccess scope("bulk_load", site);
               std::memcpy(window + to, from, bytes);
             });
}

void tma_store(const uint64_t* map, SharedAddress from, const int* at, int rank, bool add, Site site) {
  machine->require(80, "tma_store", site);
  const char* const instruction = add ? "tma_store<add>" : "tma_store";
  const TensorMapFields fields = decode(map, at, rank, instruction, site);
  // Loads may begin before the tensor. An H100 stopped all ten stores that did so, with an illegal instruction.
  for (int d = 0; d < rank; ++d)
    if (at[d] < 0)
      machine->fail(instruction, site, "expected no negative coordinate in a store, got %d in dimension %d", at[d], d);
  // An H100 wrote whole units: the rest of the last one behind the edge, where a row ended within it.
  if (int64_t(fields.sizes[0]) * bytes_of(fields.type) % kUnit != 0)
    machine->fail(instruction, site, "expected rows of a multiple of 16 bytes in a tensor that is written, got %lld",
                  static_cast<long long>(fields.sizes[0]) * bytes_of(fields.type));
  if (add && fields.type == ElementType::kUint8)
    machine->fail(instruction, site, "expected an element type other than uint8, which cannot be added");
  const int64_t bytes = box_bytes(fields);
  const std::byte* memory = machine->shared(from, int(bytes), alignment_of(fields), instruction, site);
  const auto where = coordinates(at, rank);
  BulkStore store{.read = [=] { return std::vector<std::byte>(memory, memory + bytes); },
                  .write =
                      [=](const std::vector<std::byte>& data) {
                        const GlobalAccess scope(instruction, site);
                        for_pieces(fields, from, where, [&](SharedAddress shared, std::byte* global, int size) {
                          if (global == nullptr) return;
                          const std::byte* value = data.data() + (shared - from);
                          if (add)
                            add_elements(fields.type, global, value, size);
                          else
                            std::memcpy(global, value, size_t(size));
                        });
                      },
                  .data = {},
                  .reading = start_reading(memory, bytes, instruction, site),
                  .writing = start_writing(),
                  .site = site};
  // The rounding of a sum of floats depends on the order.
  const Access access = add && !machine->ordered_sums() ? Access::kAtomic : Access::kAsyncWrite;
  if (const Operation* writing = store.writing.get())
    for_pieces(fields, from, where, [&](SharedAddress, std::byte* global, int size) {
      if (global != nullptr) check(writing, access, global, size, instruction, site);
    });
  start_store(std::move(store));
}

void bulk_store(void* to, SharedAddress from, uint32_t bytes, Site site) {
  machine->require(80, "bulk_store", site);
  const std::byte* memory = machine->shared(from, int(bytes), kUnit, "bulk_store", site);
  if (bytes % kUnit != 0 || reinterpret_cast<uintptr_t>(to) % kUnit != 0)
    machine->fail("bulk_store", site, "expected bytes and address to be multiples of 16, got %u bytes to %p", bytes,
                  to);
  BulkStore store{.read = [=] { return std::vector<std::byte>(memory, memory + bytes); },
                  .write =
                      [=](const std::vector<std::byte>& data) {
                        const GlobalAccess scope("bulk_store", site);
                        std::memcpy(to, data.data(), data.size());
                      },
                  .data = {},
                  .reading = start_reading(memory, bytes, "bulk_store", site),
                  .writing = start_writing(),
                  .site = site};
  check(store.writing.get(), Access::kAsyncWrite, to, bytes, "bulk_store", site);
  start_store(std::move(store));
}

void bulk_commit(Site site) {
  if (!machine->synchronizes("bulk_commit", site)) return;
  Fiber& self = machine->current();
  self.store_groups.push_back(std::move(self.open_stores));
  self.open_stores.clear();
}

void bulk_wait(int pending, bool read_only, Site site) {
  if (!machine->synchronizes(read_only ? "bulk_wait_read" : "bulk_wait", site)) return;
  auto& groups = machine->current().store_groups;
  Checker* const checker = machine->checker();
  const size_t done = groups.size() > size_t(pending) ? groups.size() - size_t(pending) : 0;
  for (size_t i = 0; i < done; ++i) {
    for (BulkStore& store : groups[i]) {
      read_now(store);
      store.waited = true;
      if (checker != nullptr) checker->end(*store.reading);
      if (read_only) continue;
      write_now(store);
      if (checker != nullptr) checker->end(*store.writing);
    }
  }
  if (!read_only) groups.erase(groups.begin(), groups.begin() + ptrdiff_t(done));
}

void complete_stores_at_exit(Fiber& fiber) {
  fiber.store_groups.push_back(std::move(fiber.open_stores));
  for (auto& group : fiber.store_groups) {
    for (BulkStore& store : group) {
      if (!store.waited)
        machine->fail("exit", kNoSite, "the bulk store at %s may still read shared memory; call bulk_wait_read before",
                      location(store.site).c_str());
      write_now(store);
    }
  }
  fiber.store_groups.clear();
}

}  // namespace cuda_ext::simt
