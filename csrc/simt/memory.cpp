// Loads, stores, atomics and cp.async.
#include <algorithm>
#include <atomic>
#include <type_traits>

#include "simt/checker.h"

namespace cuda_ext::simt {

namespace {

void check(Access kind, const void* memory, int bytes, const char* instruction, Site site) {
  if (Checker* checker = machine->checker()) checker->access(kind, memory, bytes, instruction, site);
}

void check_global(const void* pointer, int bytes, const char* instruction, Site site) {
  if (reinterpret_cast<uintptr_t>(pointer) % uintptr_t(bytes) != 0)
    machine->fail(instruction, site, "global address %p is not a multiple of %d", pointer, bytes);
}

}  // namespace

void* shared_storage(size_t bytes) {
  Fiber& self = machine->current();
  if (bytes > machine->geometry().shared_bytes)
    machine->fail("SHARED_STORAGE", {}, "the kernel uses %zu bytes of shared memory, but was launched with %zu", bytes,
                  machine->geometry().shared_bytes);
  return self.block->shared + kReservedSharedBytes;
}

SharedAddress shared_address(const void* pointer) {
  const Block& block = *machine->current().block;
  const auto* at = static_cast<const std::byte*>(pointer);
  if (at < block.shared || at > block.shared + block.shared_end)
    machine->fail("shared_address", {}, "%p does not point into the block's shared memory", pointer);
  return machine->address_of(pointer);
}

void load_shared(void* to, SharedAddress from, int bytes, Site site) {
  const std::byte* at = machine->shared(from, bytes, bytes, "load_shared", site);
  machine->record_access(Machine::Space::kSharedLoad, from, bytes, site);
  check(Access::kRead, at, bytes, "load_shared", site);
  std::memcpy(to, at, size_t(bytes));
}
void store_shared(SharedAddress to, const void* from, int bytes, Site site) {
  std::byte* at = machine->shared(to, bytes, bytes, "store_shared", site);
  machine->record_access(Machine::Space::kSharedStore, to, bytes, site);
  check(Access::kWrite, at, bytes, "store_shared", site);
  std::memcpy(at, from, size_t(bytes));
}
void load_global(void* to, const void* from, int bytes, bool read_only, Site site) {
  check_global(from, bytes, "load_global", site);
  machine->record_access(Machine::Space::kGlobalLoad, reinterpret_cast<uintptr_t>(from), bytes, site);
  check(read_only ? Access::kReadOnly : Access::kRead, from, bytes, "load_global", site);
  const GlobalAccess scope("load_global", site);
  std::memcpy(to, from, size_t(bytes));
}
void store_global(void* to, const void* from, int bytes, Site site) {
  check_global(to, bytes, "store_global", site);
  machine->record_access(Machine::Space::kGlobalStore, reinterpret_cast<uintptr_t>(to), bytes, site);
  check(Access::kWrite, to, bytes, "store_global", site);
  const GlobalAccess scope("store_global", site);
  std::memcpy(to, from, size_t(bytes));
}

namespace {

template <class T, class Change>
T change_one(T* pointer, Site site, Change&& next) {
  if (Checker* checker = machine->checker()) {
    // The rounding of a sum of floats depends on the order.
    const bool needs_order = std::is_floating_point_v<T> && machine->ordered_sums();
    checker->access(needs_order ? Access::kWrite : Access::kAtomic, pointer, sizeof(T), "atomic", site);
    checker->relaxed_atomic(pointer);
  }
  const GlobalAccess scope("atomic", site);
  std::atomic_ref<T> value(*pointer);
  T old = value.load(std::memory_order_relaxed);
  while (!value.compare_exchange_weak(old, next(old), std::memory_order_seq_cst)) {
  }
  return old;
}
template <class T, class Change>
T change(T* pointer, Site site, Change&& next) {
  check_global(pointer, sizeof(T), "atomic", site);
  ++machine->count(Count::kAtomic);
  const T old = change_one(pointer, site, next);
  machine->yield();
  return old;
}
template <class T>
T add(T* pointer, T amount, Site site) {
  return change(pointer, site, [amount](T old) { return T(old + amount); });
}

}  // namespace

float atomic_add(float* pointer, float value, Site site) { return add(pointer, value, site); }
int32_t atomic_add(int32_t* pointer, int32_t value, Site site) { return add(pointer, value, site); }
uint32_t atomic_add(uint32_t* pointer, uint32_t value, Site site) { return add(pointer, value, site); }
uint64_t atomic_add(uint64_t* pointer, uint64_t value, Site site) { return add(pointer, value, site); }
uint32_t atomic_max(uint32_t* pointer, uint32_t value, Site site) {
  return change(pointer, site, [value](uint32_t old) { return std::max(old, value); });
}
uint32_t atomic_or(uint32_t* pointer, uint32_t value, Site site) {
  return change(pointer, site, [value](uint32_t old) { return old | value; });
}

void reduce_add(float* pointer, const float* values, int count, Site site) {
  check_global(pointer, count * int(sizeof(float)), "atomic", site);
  ++machine->count(Count::kAtomic);
  for (int i = 0; i < count; ++i) change_one(pointer + i, site, [&](float old) { return old + values[i]; });
  machine->yield();
}

uint32_t atomic_add_acq_rel(uint32_t* pointer, uint32_t value, Site site) {
  check(Access::kAtomic, pointer, sizeof *pointer, "atomic_add_acq_rel", site);
  ++machine->count(Count::kAtomic);
  // A mutation removes the ordering, not the addition.
  const bool ordered = machine->synchronizes("atomic_add_acq_rel", site);
  if (Checker* checker = machine->checker(); checker != nullptr && ordered) {
    checker->acquire(pointer);
    checker->release(pointer);
  }
  const GlobalAccess scope("atomic_add_acq_rel", site);
  return std::atomic_ref<uint32_t>(*pointer).fetch_add(value);
}
void store_release(uint32_t* pointer, uint32_t value, Site site) {
  check(Access::kAtomic, pointer, sizeof *pointer, "store_release", site);
  const bool ordered = machine->synchronizes("store_release", site);
  if (Checker* checker = machine->checker(); checker != nullptr && ordered) checker->release(pointer);
  const GlobalAccess scope("store_release", site);
  std::atomic_ref<uint32_t>(*pointer).store(value);
}
namespace {

template <class Ready>
void wait_until(const uint32_t* pointer, Ready ready, const char* instruction, Site site) {
  if (!machine->synchronizes(instruction, site)) return;
  std::atomic_ref<uint32_t> word(*const_cast<uint32_t*>(pointer));
  machine->park_until({instruction, site}, [=] { return ready(word.load()); });
  check(Access::kAtomic, pointer, sizeof *pointer, instruction, site);
  if (Checker* checker = machine->checker()) checker->acquire(pointer);
}

}  // namespace

void wait_equal(const uint32_t* pointer, uint32_t value, Site site) {
  wait_until(pointer, [value](uint32_t seen) { return seen == value; }, "wait_equal", site);
}
void wait_reached(const uint32_t* pointer, uint32_t value, Site site) {
  wait_until(pointer, [value](uint32_t seen) { return int32_t(seen - value) >= 0; }, "wait_reached", site);
}

uint32_t load_acquire(const uint32_t* pointer, Poll& last, Site site) {
  check_global(pointer, sizeof *pointer, "load_acquire", site);
  const bool ordered = machine->synchronizes("load_acquire", site);
  std::atomic_ref<uint32_t> word(*const_cast<uint32_t*>(pointer));
  const GlobalAccess scope("load_acquire", site);
  if (last.pointer == pointer && last.line == site.line)
    machine->park_until({"load_acquire", site}, [word, seen = last.value] { return word.load() != seen; });
  check(Access::kAtomic, pointer, sizeof *pointer, "load_acquire", site);
  if (Checker* checker = machine->checker(); checker != nullptr && ordered) checker->acquire(pointer);
  last = {pointer, word.load(), site.line};
  return last.value;
}

namespace {

void perform(const AsyncCopy& copy) {
  check(Access::kWrite, copy.to, copy.bytes, "cp_async", copy.site);
  const GlobalAccess scope("cp_async", copy.site);
  std::memcpy(copy.to, copy.from, size_t(copy.valid));
  std::memset(copy.to + copy.valid, 0, size_t(copy.bytes - copy.valid));
}

}  // namespace

void cp_async(SharedAddress shared, const void* global, int bytes, int valid, Site site) {
  machine->require(80, "cp_async", site);
  std::byte* to = machine->shared(shared, bytes, bytes, "cp_async", site);
  if (valid < 0 || valid > bytes) machine->fail("cp_async", site, "expected 0 to %d valid bytes, got %d", bytes, valid);
  machine->count(Count::kCpAsyncBytes) += uint64_t(bytes);
  machine->record_access(Machine::Space::kSharedStore, shared, bytes, site);
  if (valid > 0) {
    check_global(global, bytes, "cp_async", site);
    machine->record_access(Machine::Space::kGlobalLoad, reinterpret_cast<uintptr_t>(global), valid, site);
    check(Access::kRead, global, valid, "cp_async", site);
  }
  const AsyncCopy copy{to, shared, global, bytes, valid, site};
  check(Access::kWrite, to, bytes, "cp_async", site);
  if (machine->lazy()) {
    std::memset(to, kPoison, size_t(bytes));
  } else {
    const GlobalAccess scope("cp_async", site);
    std::memcpy(to, global, size_t(valid));
    std::memset(to + valid, 0, size_t(bytes - valid));
  }
  machine->current().open_copies.push_back(copy);
}

void cp_async_commit(Site site) {
  if (!machine->synchronizes("cp_async_commit", site)) return;
  Fiber& self = machine->current();
  self.copy_groups.push_back(std::move(self.open_copies));
  self.open_copies.clear();
}

void cp_async_wait(int pending, Site site) {
  if (!machine->synchronizes("cp_async_wait", site)) return;
  Fiber& self = machine->current();
  while (self.copy_groups.size() > size_t(pending)) {
    for (const AsyncCopy& copy : self.copy_groups.front()) perform(copy);
    self.copy_groups.pop_front();
  }
}

}  // namespace cuda_ext::simt
