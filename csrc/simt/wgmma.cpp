// wgmma: asynchronous tensor core products of a warpgroup.
//
// Under lazy completion a product reads shared memory only when a thread waits for its group and no other can run, and
// a thread's accumulators hold NaNs until its own wait. The wait also detects writes to the fragment of A or to the
// accumulators while the product was in flight.
#include <algorithm>
#include <utility>

#include "simt/engines.h"
#include "simt/float8_sum.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CUDA_EXT_SIMT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CUDA_EXT_SIMT_CLONES
#endif

namespace cuda_ext::simt {

namespace {

constexpr int kRows = 64, kMaxColumns = 256, kMaxK = 32, kFragment = 4;
constexpr int kDepth = 32;  // bytes of K
constexpr int kUnit = 16;   // bytes that stay together under every swizzle

// Accumulators of a warpgroup with products in flight; each product adds to `value`.
struct Accumulators {
  int n;
  std::array<float*, kWarpgroupThreads> registers;  // (n / 2) of each thread
  std::array<int, kWarpgroupThreads> pending{};     // products that the thread has not waited for
  std::vector<float> value;                         // (64, n)
};

struct Product {
  const Block* block;  // holds the operands in shared memory; compute() may run on a fiber of another block
  WgmmaOperands operands;
  std::shared_ptr<Accumulators> accumulators;
  std::array<const uint32_t*, kWarpgroupThreads> a{};
  std::vector<uint32_t> a_at_issue;  // (128, 4), if A is in registers
  std::shared_ptr<const Operation> operation;
  Site site;
};

struct Group {
  std::vector<Product> products;
  bool computed = false;
  bool requested = false;  // by a waiting thread
  std::vector<Fiber*> waiting;
  int retired = 0;  // threads that have waited for it
};

using Threads = std::array<int, kWarpgroupThreads>;

}  // namespace

// The state of one warpgroup's products.
struct WgmmaUnit {
  std::vector<std::shared_ptr<Accumulators>> accumulators;
  std::vector<Product> open;  // since the last commit
  std::deque<Group> groups;
  uint64_t first = 0;  // number of groups.front()
};

Warpgroup::Warpgroup() = default;
Warpgroup::Warpgroup(Warpgroup&&) noexcept = default;
Warpgroup::~Warpgroup() = default;

namespace {

// A shared memory descriptor, decoded; offsets in bytes.
struct Descriptor {
  SharedAddress start;
  uint32_t leading;
  uint32_t stride;
  int swizzle_bytes;  // 16 for none
};

Descriptor decode(uint64_t bits, Site site) {
  static constexpr int kSwizzleBytes[] = {16, 128, 64, 32};
  const auto field = [bits](int at) { return uint32_t(bits >> at & 0x3fff) << 4; };
  const Descriptor d{field(0), field(16), field(32), kSwizzleBytes[bits >> 62]};
  if ((bits >> 49 & 7) != 0) machine->fail("wgmma", site, "expected a descriptor without base offset; align the atoms");
  const uint32_t width = uint32_t(d.swizzle_bytes), atom = 8 * width;
  if (width > 16 && d.start % atom >= width)
    machine->fail("wgmma", site,
                  "the matrix at 0x%x begins in row %u of an atom of the %d-byte swizzle, expected row 0", d.start,
                  d.start % atom / width, d.swizzle_bytes);
  if (width > 16 && d.stride % atom != 0)
    machine->fail("wgmma", site, "a stride of %u bytes between atoms of the %d-byte swizzle, expected a multiple of %u",
                  d.stride, d.swizzle_bytes, atom);
  return d;
}

// Calls f(row, k, 16 bytes of shared memory) for an operand of `rows` x 32 bytes. The bytes run along k or, if the
// operand is MN-major, along the rows. `element` is in bytes.
template <class F>
void for_units(const Block& block, uint64_t descriptor, int rows, int element, bool mn_major, Site site, F&& f) {
  const Descriptor d = decode(descriptor, site);
  const int per_unit = kUnit / element, k_size = kDepth / element;
  const uint32_t width = uint32_t(d.swizzle_bytes);
  const auto unit = [&](int row, int k, uint32_t offset) {
    f(row, k, machine->shared(block, swizzled(d.start + offset, d.swizzle_bytes), kUnit, kUnit, "wgmma", site));
  };
  if (!mn_major) {
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < k_size; k += per_unit) {
        const uint32_t along = uint32_t(k / per_unit);
        unit(row, k, uint32_t(row % 8) * width + uint32_t(row / 8) * d.stride + along * (width > 16 ? 16 : d.leading));
      }
    }
    return;
  }
  const int atom_rows = int(width) / element;
  for (int k = 0; k < k_size; ++k) {
    for (int row = 0; row < rows; row += per_unit) {
      const uint32_t atom = uint32_t(row / atom_rows), within = uint32_t(row % atom_rows * element);
      const uint32_t atoms_k = uint32_t(k / 8), k_within = uint32_t(k % 8) * width;
      unit(row, k,
           within + k_within +
               (width > 16 ? atom * d.leading + atoms_k * d.stride : atom * d.stride + atoms_k * d.leading));
    }
  }
}

float element_of(MatrixType type, const std::byte* at) {
  if (type == MatrixType::kFloat8E4M3) return to_float(float8_e4m3_t{uint8_t(*at)});
  if (type == MatrixType::kFloat8E5M2) return to_float(float8_e5m2_t{uint8_t(*at)});
  if (type == MatrixType::kTf32) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    return bits_float(bits & ~uint32_t(0x1fff));  // the hardware ignores the low 13 bits
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return type == MatrixType::kFloat16 ? to_float(half_t{bits}) : to_float(bfloat16_t{bits});
}

// The operand as floats: out[row * row_step + k * k_step].
void read_operand(const Block& block, uint64_t descriptor, int rows, MatrixType type, bool mn_major, Site site,
                  float* out, int row_step, int k_step) {
  const int element = bytes_of(type);
  const int step = mn_major ? row_step : k_step;
  for_units(block, descriptor, rows, element, mn_major, site, [&](int row, int k, const std::byte* from) {
    float* to = out + row * row_step + k * k_step;
    for (int i = 0; i < kUnit / element; ++i) to[i * step] = element_of(type, from + i * element);
  });
}

void read_fragments(MatrixType type, const uint32_t* a, float (&out)[kRows][kMaxK]) {
  for (int t = 0; t < kWarpgroupThreads; ++t) {
    const int row = t / kLanes * 16 + t % kLanes / 4, quad = t % 4;
    for (int i = 0; i < kFragment; ++i) {
      const auto* word = reinterpret_cast<const std::byte*>(a + t * kFragment + i);
      float* to = out[row + i % 2 * 8];
      if (type == MatrixType::kTf32) {
        to[quad + i / 2 * 4] = element_of(type, word);
      } else {
        to[2 * quad + i / 2 * 8] = element_of(type, word);
        to[2 * quad + i / 2 * 8 + 1] = element_of(type, word + 2);
      }
    }
  }
}

// Columns that are summed in parallel.
typedef float Eight __attribute__((vector_size(32)));
typedef float Sixteen __attribute__((vector_size(64)));

// d += a @ b for four rows and the columns of one vector.
template <class Columns>
[[gnu::always_inline]] inline void multiply_block(int n, int k, const float (*a)[kMaxK], const float* b, float* d) {
  constexpr int kBlockRows = 4;
  Columns sum[kBlockRows];
  for (int r = 0; r < kBlockRows; ++r) std::memcpy(&sum[r], d + r * n, sizeof(Columns));
  for (int p = 0; p < k; ++p) {
    Columns row;
    std::memcpy(&row, b + p * n, sizeof(Columns));
#pragma GCC unroll 4
    for (int r = 0; r < kBlockRows; ++r) sum[r] += a[r][p] * row;
  }
  for (int r = 0; r < kBlockRows; ++r) std::memcpy(d + r * n, &sum[r], sizeof(Columns));
}

// d (64, n) += a (64, k) @ b (k, n), summed in order of k. Products of the operands' types are exact in float32.
CUDA_EXT_SIMT_CLONES
void multiply(int n, int k, const float (&a)[kRows][kMaxK], const float* b, float* d) {
  for (int i = 0; i < kRows; i += 4) {
    int j = 0;
    for (; j + 16 <= n; j += 16) multiply_block<Sixteen>(n, k, a + i, b + j, d + i * n + j);
    if (j < n) multiply_block<Eight>(n, k, a + i, b + j, d + i * n + j);
  }
}

void compute(const Product& product) {
  const WgmmaOperands& operands = product.operands;
  const int n = operands.n, k = kDepth / bytes_of(operands.a_type);
  float a[kRows][kMaxK];
  alignas(64) float b[kMaxK * kMaxColumns];
  if (operands.a != nullptr)
    read_fragments(operands.a_type, product.a_at_issue.data(), a);
  else
    read_operand(*product.block, operands.a_descriptor, kRows, operands.a_type, operands.a_transposed, product.site,
                 a[0], kMaxK, 1);
  read_operand(*product.block, operands.b_descriptor, n, operands.b_type, operands.b_transposed, product.site, b, 1, n);
  std::vector<float>& value = product.accumulators->value;
  if (!operands.accumulate) std::fill(value.begin(), value.end(), 0.0f);
  if (const int bits = machine->float8_sum_bits(); bytes_of(operands.a_type) == 1 && bits != 0) {
    for (int i = 0; i < kRows * n; ++i)
      value[size_t(i)] = add_float8_products(value[size_t(i)], a[i / n], b + i % n, n, k, bits);
    return;
  }
  multiply(n, k, a, b, value.data());
}

// Calls f(a pair of the thread's accumulators, its index in a (64, n) matrix).
template <class F>
void for_pairs(float* registers, int thread, int n, F&& f) {
  const int row = thread / kLanes * 16 + thread % kLanes / 4, column = 2 * (thread % 4);
  for (int j = 0; j < n / 8; ++j) {
    f(registers + 4 * j, row * n + 8 * j + column);
    f(registers + 4 * j + 2, (row + 8) * n + 8 * j + column);
  }
}
void write_back(const Accumulators& accumulators, int thread) {
  const float* const value = accumulators.value.data();
  for_pairs(accumulators.registers[size_t(thread)], thread, accumulators.n,
            [value](float* pair, int at) { std::memcpy(pair, value + at, 8); });
}
// A signalling NaN: arithmetic on it gives a quiet NaN, so even `d += x` on a poisoned accumulator is detected.
constexpr uint32_t kPoisonedAccumulator = 0xffbfffff;

void poison(const Accumulators& accumulators, int thread) {
  float* const registers = accumulators.registers[size_t(thread)];
  for (int i = 0; i < accumulators.n / 2; ++i) std::memcpy(registers + i, &kPoisonedAccumulator, 4);
}
void check_poison(const Accumulators& accumulators, int thread, Site site) {
  const float* const registers = accumulators.registers[size_t(thread)];
  if (std::all_of(registers, registers + accumulators.n / 2,
                  [](const float& x) { return std::memcmp(&x, &kPoisonedAccumulator, 4) == 0; }))
    return;
  machine->fail("wgmma", site, "accumulators of thread %d of the warpgroup were written while products were in flight",
                thread);
}

struct Arguments {
  float* d;
  const WgmmaOperands* operands;
  int fiber;
};

void check_same(const WgmmaOperands& mine, const WgmmaOperands& other, Site site) {
  if (mine.n != other.n || mine.a_type != other.a_type || mine.b_type != other.b_type ||
      mine.a_descriptor != other.a_descriptor || mine.b_descriptor != other.b_descriptor ||
      mine.accumulate != other.accumulate)
    machine->fail("wgmma", site, "threads of the warpgroup passed different descriptors or scales");
}

// The accumulators with products in flight in these registers, or new ones with the registers' values.
std::shared_ptr<Accumulators> find_accumulators(WgmmaUnit& unit, const std::array<Arguments*, kWarpgroupThreads>& all,
                                                Site site) {
  const int n = all[0]->operands->n;
  for (const auto& known : unit.accumulators) {
    bool any = false, every = known->n == n;
    for (int t = 0; t < kWarpgroupThreads; ++t) {
      const bool same = known->registers[size_t(t)] == all[size_t(t)]->d && known->pending[size_t(t)] > 0;
      any |= same;
      every &= same;
    }
    if (!any) continue;
    if (!every)
      machine->fail("wgmma", site,
                    "not all threads of the warpgroup have waited for the same products on these accumulators");
    for (int t = 0; t < kWarpgroupThreads && machine->lazy(); ++t) check_poison(*known, t, site);
    return known;
  }
  if (!machine->current().wgmma_group_fenced)
    machine->fail("wgmma", site,
                  "a group that starts on new accumulators needs a wgmma_fence first; ptxas would insert one and wait");
  auto fresh = std::make_shared<Accumulators>();
  fresh->n = n;
  fresh->value.resize(size_t(kRows) * size_t(n));
  for (int t = 0; t < kWarpgroupThreads; ++t) {
    float* registers = fresh->registers[size_t(t)] = all[size_t(t)]->d;
    for_pairs(registers, t, n, [&](const float* pair, int at) { std::memcpy(&fresh->value[size_t(at)], pair, 8); });
    if (machine->lazy()) poison(*fresh, t);
  }
  unit.accumulators.push_back(fresh);
  return fresh;
}

void check_reads(const Product& product, const std::array<Arguments*, kWarpgroupThreads>& all, WgmmaUnit& unit,
                 std::shared_ptr<const Operation>& operation) {
  Checker* const checker = machine->checker();
  if (checker == nullptr) return;
  std::vector<int> fibers;
  for (const Arguments* each : all) fibers.push_back(each->fiber);
  operation = checker->start(&unit, fibers);
  const WgmmaOperands& operands = product.operands;
  const int element = bytes_of(operands.a_type);
  const auto check = [&](int, int, const std::byte* at) {
    checker->access(*operation, Access::kAsyncRead, at, kUnit, "wgmma", product.site);
  };
  if (operands.a == nullptr)
    for_units(*product.block, operands.a_descriptor, kRows, element, operands.a_transposed, product.site, check);
  for_units(*product.block, operands.b_descriptor, operands.n, element, operands.b_transposed, product.site, check);
}

Warpgroup& own_warpgroup() {
  const Fiber& self = machine->current();
  return self.block->warpgroups[size_t(self.thread / kWarpgroupThreads)];
}
WgmmaUnit& own_unit() {
  auto& unit = own_warpgroup().wgmma;
  if (unit == nullptr) unit = std::make_unique<WgmmaUnit>();
  return *unit;
}

// Called after the current thread has waited for the product.
void retire(Product& product, WgmmaUnit& unit, int thread) {
  Accumulators& accumulators = *product.accumulators;
  const uint32_t* const a = product.a[size_t(thread)];
  if (a != nullptr && std::memcmp(a, &product.a_at_issue[size_t(thread * kFragment)], kFragment * 4) != 0)
    machine->fail("wgmma", product.site, "the fragment of A in registers was changed while the product was in flight");
  if (product.operation) machine->checker()->end(*product.operation);
  if (--accumulators.pending[size_t(thread)] != 0) return;
  if (machine->lazy()) {
    check_poison(accumulators, thread, product.site);
    write_back(accumulators, thread);
  }
  const auto& pending = accumulators.pending;
  if (std::all_of(pending.begin(), pending.end(), [](int p) { return p == 0; }))
    std::erase(unit.accumulators, product.accumulators);
}

}  // namespace

void wgmma(float* d, const WgmmaOperands& operands, Site site) {
  machine->require_wgmma("wgmma", site);
  Fiber& self = machine->current();
  if (!self.wgmma_fenced)
    machine->fail("wgmma", site,
                  "no wgmma_fence since the thread started or last waited; registers may still be written");
  Arguments mine{d, &operands, self.index};
  machine->warpgroup_collective("wgmma", site, mine, [&](const std::array<Arguments*, kWarpgroupThreads>& all) {
    ++machine->count(Count::kWgmma);
    WgmmaUnit& unit = own_unit();
    Product product{self.block, operands, find_accumulators(unit, all, site), {}, {}, {}, site};
    for (int t = 0; t < kWarpgroupThreads; ++t) {
      const WgmmaOperands& theirs = *all[size_t(t)]->operands;
      check_same(operands, theirs, site);
      ++product.accumulators->pending[size_t(t)];
      if (operands.a == nullptr) continue;
      product.a[size_t(t)] = theirs.a;
      product.a_at_issue.insert(product.a_at_issue.end(), theirs.a, theirs.a + kFragment);
    }
    check_reads(product, all, unit, product.operation);
    if (!machine->lazy()) compute(product);
    unit.open.push_back(std::move(product));
  });
}

void wgmma_fence(Site site) {
  if (!machine->synchronizes("wgmma_fence", site)) return;
  machine->current().wgmma_fenced = true;
  machine->current().wgmma_group_fenced = true;
}

void wgmma_commit(Site site) {
  if (!machine->synchronizes("wgmma_commit", site)) return;
  machine->current().wgmma_group_fenced = false;
  WgmmaUnit& unit = own_unit();
  const int thread = machine->current().thread % kWarpgroupThreads;
  if (!machine->lazy())  // once per group
    for (const auto& known : unit.accumulators)
      if (known->pending[size_t(thread)] > 0) write_back(*known, thread);
  // The first thread to commit creates the group.
  if (machine->current().wgmma_committed++ < unit.first + unit.groups.size()) return;
  unit.groups.push_back({.products = std::move(unit.open), .computed = !machine->lazy()});
  unit.open.clear();
}

// Waits until the group and those before it, whose accumulators it may use, are computed.
static void wait_for_group(WgmmaUnit& unit, uint64_t number, Site site) {
  Group& group = unit.groups[number - unit.first];
  while (!group.computed) {
    group.waiting.push_back(&machine->current());
    if (!std::exchange(group.requested, true)) {
      machine->start([&unit, number] {
        for (uint64_t g = unit.first; g <= number; ++g) {
          Group& due = unit.groups[g - unit.first];
          if (!std::exchange(due.computed, true))
            for (const Product& product : due.products) compute(product);
          for (Fiber* fiber : std::exchange(due.waiting, {})) machine->wake(*fiber);
        }
      });
    }
    machine->park({"wgmma_wait", site});
  }
}

void wgmma_wait(int pending, Site site) {
  if (!machine->synchronizes("wgmma_wait", site)) return;
  Fiber& self = machine->current();
  self.wgmma_fenced = false;
  WgmmaUnit& unit = own_unit();
  while (self.wgmma_committed - self.wgmma_retired > uint64_t(pending)) {
    const uint64_t number = self.wgmma_retired++;
    wait_for_group(unit, number, site);
    Group& group = unit.groups[number - unit.first];
    for (Product& product : group.products) retire(product, unit, self.thread % kWarpgroupThreads);
    ++group.retired;
    while (!unit.groups.empty() && unit.groups.front().retired == kWarpgroupThreads) {
      unit.groups.pop_front();
      ++unit.first;
    }
  }
}

void wgmma_expect_idle(const float* d, Site site) {
  const int thread = machine->current().thread % kWarpgroupThreads;
  for (const auto& known : own_unit().accumulators)
    if (known->registers[size_t(thread)] == d && known->pending[size_t(thread)] > 0)
      machine->fail("wgmma_wait", site, "products on the accumulators of this wait are still in flight");
}

void check_wgmma_at_exit(Fiber& fiber) {
  const size_t group = size_t(fiber.thread / kWarpgroupThreads);
  const WgmmaUnit* unit = fiber.block->warpgroups[group].wgmma.get();
  if (unit == nullptr || (fiber.wgmma_retired == fiber.wgmma_committed && unit->open.empty())) return;
  machine->fail("exit", kNoSite, "the thread never waited for wgmma products that are in flight");
}

}  // namespace cuda_ext::simt
