// Runs the bucket kernels against plain loops: with g++ on the emulator, with nvcc on a GPU. Every launch works on one
// arena, in which guards surround bucket and tensors; afterwards the whole arena is compared with what it should hold.
// The emulator also counts sectors and looks for races.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bucket/bucket_cuda.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#else
#include "simt/options.h"
#endif

using namespace cuda_ext;

namespace {

constexpr unsigned char kGuard = 0xa5;
constexpr int64_t kGuardBytes = 64;
constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16};

enum class Op { kPack, kUnpack, kStats };
constexpr Op kOps[] = {Op::kPack, Op::kUnpack, Op::kStats};
constexpr const char* kOpNames[] = {"pack", "unpack", "stats"};
constexpr const char* kDtypeNames[] = {"float32", "float16", "bfloat16"};

struct TensorSpec {
  int64_t count;
  Dtype dtype;
  int64_t gap = 0;     // elements of the bucket before it
  int misaligned = 0;  // elements behind a multiple of 64 bytes
  bool in_place = false;
};

struct Case {
  std::string name;
  std::vector<TensorSpec> tensors;
  Dtype bucket = Dtype::kFloat32;
  int misaligned = 0;  // of the bucket
  int64_t end_gap = 0;
  double scale = 1.0;
  double special_rate = 0.0;  // of values that are infinite or NaN
};

// Memory that kernel and test both see.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    bytes = (bytes + 255) / 256 * 256 + 256;
#if defined(__CUDACC__)
    if (cudaMallocManaged(&data_, size_t(bytes)) != cudaSuccess) std::abort();
#else
    data_ = std::aligned_alloc(256, size_t(bytes));
#endif
    std::memset(data_, 0, size_t(bytes));
  }
  ~Memory() {
#if defined(__CUDACC__)
    cudaFree(data_);
#else
    std::free(data_);
#endif
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_ = nullptr;
};

bool synchronize() {
#if defined(__CUDACC__)
  return cudaDeviceSynchronize() == cudaSuccess;
#else
  return true;
#endif
}

float to_float(Dtype dtype, uint16_t bits) {
#if defined(__CUDACC__)
  return dtype == Dtype::kFloat16 ? __half2float(__half(__half_raw{bits}))
                                  : __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
#else
  return dtype == Dtype::kFloat16 ? simt::to_float(half_t{bits}) : simt::to_float(bfloat16_t{bits});
#endif
}
uint16_t from_float(Dtype dtype, float x) {
#if defined(__CUDACC__)
  return dtype == Dtype::kFloat16 ? __half_raw(__float2half_rn(x)).x : __nv_bfloat16_raw(__float2bfloat16_rn(x)).x;
#else
  return dtype == Dtype::kFloat16 ? simt::to_half(x).bits : simt::to_bfloat16(x).bits;
#endif
}
float read(Dtype dtype, const unsigned char* p) {
  float x;
  uint16_t bits;
  if (dtype == Dtype::kFloat32) return std::memcpy(&x, p, 4), x;
  return std::memcpy(&bits, p, 2), to_float(dtype, bits);
}
void write(Dtype dtype, unsigned char* p, float x) {
  const uint16_t bits = dtype == Dtype::kFloat32 ? 0 : from_float(dtype, x);
  dtype == Dtype::kFloat32 ? std::memcpy(p, &x, 4) : std::memcpy(p, &bits, 2);
}

// A stretch of the arena that holds numbers.
struct Numbers {
  int64_t at;  // byte of the arena
  int64_t count;
  Dtype dtype;
  int64_t begin;  // element of the bucket
  int64_t address(int64_t i) const { return at + i * size_of(dtype); }
};

int failures = 0, checks = 0;

void fail(const Case& c, Op op, const std::string& what) {
  if (++failures <= 20) {
    std::printf("FAILED %s, %s, bucket %s: %s\n", kOpNames[int(op)], c.name.c_str(), kDtypeNames[int(c.bucket)],
                what.c_str());
  }
}

void run(const Case& c, Op op) {
  ++checks;
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-2.0f, 2.0f), chance(0.0f, 1.0f);

  int64_t bucket_count = c.end_gap;
  for (const TensorSpec& t : c.tensors) bucket_count += t.gap + t.count;
  int64_t cursor = kGuardBytes;
  const auto place = [&](int64_t count, Dtype dtype, int misaligned, int64_t begin) {
    const Numbers n{(cursor + 63) / 64 * 64 + misaligned * size_of(dtype), count, dtype, begin};
    cursor = n.address(count) + kGuardBytes;
    return n;
  };
  const Numbers bucket = place(bucket_count, c.bucket, c.misaligned, 0);
  std::vector<Numbers> tensors;
  int64_t begin = 0;
  for (const TensorSpec& t : c.tensors) {
    begin += t.gap;
    tensors.push_back(t.in_place ? Numbers{bucket.address(begin), t.count, c.bucket, begin}
                                 : place(t.count, t.dtype, t.misaligned, begin));
    begin += t.count;
  }

  const Memory arena(cursor);
  std::memset(arena.data(), kGuard, size_t(cursor));
  const auto fill = [&](const Numbers& n) {
    for (int64_t i = 0; i < n.count; ++i) {
      float x = uniform(random);
      if (chance(random) < c.special_rate)
        x = chance(random) < 0.5f ? INFINITY : chance(random) < 0.5f ? -INFINITY : NAN;
      write(n.dtype, arena.data() + n.address(i), x);
    }
  };
  if (op == Op::kUnpack) fill(bucket);
  if (op != Op::kUnpack) {
    for (const Numbers& t : tensors) fill(t);
  }

  // What the arena and the statistics should be.
  const std::vector<unsigned char> before(arena.data(), arena.data() + cursor);
  std::vector<unsigned char> expected = before;
  if (op == Op::kPack) std::memset(expected.data() + bucket.at, 0, size_t(bucket.count * size_of(bucket.dtype)));
  double squares = 0.0;
  for (const Numbers& t : tensors) {
    for (int64_t i = 0; i < t.count; ++i) {
      const int64_t here = t.address(i), there = bucket.address(t.begin + i);
      const int64_t from = op == Op::kUnpack ? there : here, to = op == Op::kPack ? there : here;
      const Dtype from_dtype = op == Op::kUnpack ? bucket.dtype : t.dtype;
      const Dtype to_dtype = op == Op::kPack ? bucket.dtype : t.dtype;
      const float x = read(from_dtype, before.data() + from);
      if (op != Op::kStats) write(to_dtype, expected.data() + to, x * float(c.scale));
      const double stored = read(to_dtype, expected.data() + to);
      squares += stored * stored;
    }
  }

  const Memory table(int64_t(tensors.size() * sizeof(BucketEntry))), stats_memory(sizeof(BucketStats));
  const Memory workspace(int64_t(bucket_cuda_workspace(bucket_count)));
  BucketEntry* const entries = reinterpret_cast<BucketEntry*>(table.data());
  for (size_t i = 0; i < tensors.size(); ++i)
    entries[i] = {arena.data() + tensors[i].at, tensors[i].begin, tensors[i].count, tensors[i].dtype};
  BucketStats* const stats = reinterpret_cast<BucketStats*>(stats_memory.data());
  const bool has_bucket = op != Op::kStats;
  const BucketParams params{entries,
                            int64_t(tensors.size()),
                            has_bucket ? arena.data() + bucket.at : nullptr,
                            bucket_count,
                            has_bucket ? c.bucket : Dtype::kFloat32,
                            has_bucket ? c.scale : 1.0,
                            stats};
  const auto launch = op == Op::kPack     ? launch_bucket_pack_cuda
                      : op == Op::kUnpack ? launch_bucket_unpack_cuda
                                          : launch_bucket_stats_cuda;
  double first_squares = 0.0;
  for (int repetition = 0; repetition < 2; ++repetition) {  // the second as a replayed graph would: nothing is reset
    std::memcpy(arena.data(), before.data(), before.size());
    *stats = {-1.0, false};
    try {
      launch(params, workspace.data(), nullptr);
    } catch (const std::exception& error) {
      return fail(c, op, error.what());
    }
    if (!synchronize()) return fail(c, op, "the kernel stopped with an error");

    // A NaN is a NaN whatever its bits.
    std::vector<unsigned char> actual(arena.data(), arena.data() + cursor);
    const auto forget_nan_bits = [&](const Numbers& n) {
      for (int64_t i = 0; i < n.count; ++i) {
        const int64_t at = n.address(i);
        if (!std::isnan(read(n.dtype, actual.data() + at)) || !std::isnan(read(n.dtype, expected.data() + at)))
          continue;
        std::memcpy(actual.data() + at, expected.data() + at, size_t(size_of(n.dtype)));
      }
    };
    forget_nan_bits(bucket);
    for (const Numbers& t : tensors) forget_nan_bits(t);
    int64_t wrong = 0, first_wrong = -1;
    for (int64_t i = 0; i < cursor; ++i) {
      if (actual[i] == expected[i]) continue;
      if (wrong++ == 0) first_wrong = i;
    }
    if (wrong > 0) {
      fail(c, op,
           std::to_string(wrong) + " wrong bytes, the first at " + std::to_string(first_wrong) +
               " of the arena, where the bucket is at " + std::to_string(bucket.at) + " to " +
               std::to_string(bucket.address(bucket.count)));
    }
    if (stats->nonfinite != !std::isfinite(squares)) fail(c, op, "wrong non-finite flag");
    if (std::isfinite(squares) && !(std::abs(stats->squares - squares) <= 1e-12 * squares))
      fail(c, op, "squares " + std::to_string(stats->squares) + ", expected " + std::to_string(squares));
    uint32_t counter;
    std::memcpy(&counter, workspace.data(), 4);
    if (counter != 0) fail(c, op, "the counter is left at " + std::to_string(counter));
    if (repetition == 0) first_squares = stats->squares;
    if (std::isfinite(squares) && stats->squares != first_squares) fail(c, op, "two runs, two sums of squares");
#if !defined(__CUDACC__)
    simt::options().seed += 1;  // with the PCT schedule: another order of the warps
#endif
  }
}

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  std::mt19937 random(11);
  const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  const auto dtype = [&] { return kDtypes[below(3)]; };

  cases.push_back({.name = "nothing"});
  cases.push_back({.name = "one gap", .end_gap = 20000});
  for (const int64_t count : {0, 1, 7, 255, 256, 257, 2047, 2048, 2049, 16383, 16384, 16385, 40000}) {
    for (const Dtype d : kDtypes) {
      cases.push_back({.name = "one tensor of " + std::to_string(count) + " " + kDtypeNames[int(d)],
                       .tensors = {{.count = count, .dtype = d}},
                       .scale = 0.125});
    }
  }
  for (int by = 0; by < 18; ++by) {
    for (const Dtype d : kDtypes) {
      cases.push_back({.name = std::string(kDtypeNames[int(d)]) + " misaligned by " + std::to_string(by),
                       .tensors = {{.count = 3000, .dtype = d, .misaligned = by}, {.count = 700, .dtype = d}},
                       .misaligned = by / 2,
                       .scale = 3.0});
    }
  }
  for (const int largest : {1, 2, 16, 70, 300}) {
    Case c{.name = "1000 tensors of at most " + std::to_string(largest), .misaligned = 1, .end_gap = 5, .scale = -0.5};
    for (int i = 0; i < 1000; ++i) {
      const int64_t gap = below(4) == 0 ? below(largest) : 0;
      c.tensors.push_back({below(largest + 1), dtype(), gap, int(below(8))});
    }
    cases.push_back(c);
  }
  for (int trial = 0; trial < 12; ++trial) {
    Case c{.name = "all sizes, trial " + std::to_string(trial),
           .misaligned = int(below(9)),
           .end_gap = below(3000),
           .scale = trial % 3 == 0 ? 1.0 : 0.3,
           .special_rate = trial % 4 == 3 ? 1e-3 : 0.0};
    for (int i = 0; i < 30; ++i) {
      const int64_t sizes[] = {0, below(8), below(64), below(600), 256 + below(3000), below(20000)};
      const int64_t gaps[] = {0, 0, below(16), below(3000)};
      c.tensors.push_back({sizes[below(6)], dtype(), gaps[below(4)], int(below(17)), below(4) == 0});
    }
    cases.push_back(c);
  }
  for (const double scale : {1.0, 0.25}) {
    cases.push_back({.name = "in place, scale " + std::to_string(scale),
                     .tensors = {{.count = 5000, .dtype = Dtype::kFloat32, .in_place = true},
                                 {.count = 3, .dtype = Dtype::kFloat32, .gap = 2, .in_place = true},
                                 {.count = 20, .dtype = Dtype::kFloat16},
                                 {.count = 15000, .dtype = Dtype::kFloat32, .gap = 1, .in_place = true}},
                     .misaligned = 1,
                     .scale = scale});
  }
  for (const float special : {INFINITY, NAN}) {
    cases.push_back({.name = std::isnan(special) ? "one value in 50 not finite" : "one value in 30000 not finite",
                     .tensors = {{.count = 30001, .dtype = Dtype::kBFloat16}, {.count = 30, .dtype = Dtype::kFloat32}},
                     .special_rate = std::isnan(special) ? 0.02 : 1.0 / 30000});
  }
  // Squares beyond float32 and values that overflow float16.
  cases.push_back({.name = "large values", .tensors = {{.count = 3000, .dtype = Dtype::kFloat32}}, .scale = 1e30});
  return cases;
}

void run_all() {
  for (Case c : make_cases()) {
    for (const Dtype bucket : kDtypes) {
      c.bucket = bucket;
      for (const Op op : kOps) run(c, op);
    }
  }
}

#if !defined(__CUDACC__)

// Where tensors lie on sectors of 32 bytes, each sector is read once and written once.
void check_sectors() {
  for (const Dtype dtype : kDtypes) {
    for (const Dtype bucket : kDtypes) {
      for (const Op op : kOps) {
        const Case c{.name = std::string("sectors of ") + kDtypeNames[int(dtype)],
                     .tensors = {{.count = 20000, .dtype = dtype}, {.count = 16016, .dtype = dtype}},
                     .bucket = bucket};
        simt::reset_counters();
        run(c, op);
        const auto sectors = [](int64_t count, Dtype d) { return uint64_t(2 * count * size_of(d) / 32); };  // two runs
        const uint64_t in_tensors = sectors(36016, dtype), in_bucket = sectors(36016, bucket);
        const uint64_t loads = simt::counters()[size_t(simt::Count::kGlobalLoadSectors)];
        const uint64_t stores = simt::counters()[size_t(simt::Count::kGlobalStoreSectors)];
        const uint64_t expected_loads = op == Op::kUnpack ? in_bucket : in_tensors;
        const uint64_t expected_stores = op == Op::kPack ? in_bucket : op == Op::kUnpack ? in_tensors : 0;
        if (loads != expected_loads || stores != expected_stores) {
          fail(c, op,
               std::to_string(loads) + " sectors loaded and " + std::to_string(stores) + " stored, expected " +
                   std::to_string(expected_loads) + " and " + std::to_string(expected_stores));
        }
      }
    }
  }
}

#endif

}  // namespace

int main() {
#if defined(__CUDACC__)
  run_all();
#else
  simt::options() = {};
  run_all();
  check_sectors();
  simt::options() = {.completion = simt::Completion::kLazy, .schedule = simt::Schedule::kPct};
  run_all();
  simt::options() = {.schedule = simt::Schedule::kPct, .check_races = true, .threads = 1};
  run_all();
#endif
  std::printf("%d launches checked, %d failures\n", 2 * checks, failures);
  return failures == 0 ? 0 : 1;
}
