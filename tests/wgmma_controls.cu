// Kernels for test_static_gates.py: one on wgmma as it should be, and others that each lack one property.
#include "arch/cluster.cuh"
#include "arch/wgmma.cuh"

using namespace cuda_ext;
using arch::Major;

namespace {

constexpr int kThreads = 128;
constexpr int kSteps = 4;

struct Problem {
  float* out;
  uint64_t a, b;  // descriptors
  int turns;
  float scale;
  arch::SharedAddress barrier;
};

template <int count>
DEVICE void multiply(float (&d)[count], const Problem& p, int step) {
  arch::wgmma_m64k16<bfloat16_t, Major::kK, Major::kK>(d, p.a + 2 * step, p.b + 2 * step, 1);
}
template <int count>
DEVICE void store(const Problem& p, const float (&d)[count], int first = 0) {
  for (int i = 0; i < count; ++i) p.out[(first + i) * kThreads + threadIdx.x] = d[i];
}

// The loop of a kernel. `between(d, step)` runs after each product but the last, `after(d)` after the commit.
template <int count, class Between, class After>
DEVICE void run(const Problem& p, float (&d)[count], const Between& between, const After& after) {
  int turns = p.turns;
#pragma unroll 1
  do {
    arch::wgmma_fence(d);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply(d, p, step);
      if (step + 1 < kSteps) between(d, step);
    }
    arch::wgmma_commit();
    after(d);
    arch::wgmma_wait<1>();
  } while (--turns > 0);
  arch::wgmma_wait<0>(d);
  store(p, d);
}

struct Nothing {
  template <class... T>
  DEVICE void operator()(T&&...) const {}
};

template <int count>
__device__ __noinline__ void called(float (&d)[count], const Problem& p) {
  multiply(d, p, 0);
}

}  // namespace

__global__ void __launch_bounds__(kThreads) is_fine(Problem p) {
  float d[32] = {};
  run(p, d, Nothing{}, Nothing{});
}

__global__ void __launch_bounds__(kThreads) has_no_fence(Problem p) {
  float d[32] = {};
  int turns = p.turns;
#pragma unroll 1
  do {
    for (int step = 0; step < kSteps; ++step) multiply(d, p, step);
    arch::wgmma_commit();
    arch::wgmma_wait<1>();
  } while (--turns > 0);
  arch::wgmma_wait<0>(d);
  store(p, d);
}

__global__ void __launch_bounds__(kThreads) reads_before_the_wait(Problem p) {
  float d[32] = {};
  run(p, d, Nothing{}, [&](float (&sums)[32]) { p.out[threadIdx.x] = sums[0]; });
}

__global__ void __launch_bounds__(kThreads) scales_between_products(Problem p) {
  float d[32] = {};
  run(
      p, d,
      [&](float (&sums)[32], int step) {
        if (step == 1)
          for (float& x : sums) x *= p.scale;
      },
      Nothing{});
}

// Two groups in flight; one is scaled while only the other has been awaited.
__global__ void __launch_bounds__(kThreads) scales_in_flight(Problem p) {
  float d[32] = {}, e[32] = {};
  int turns = p.turns;
#pragma unroll 1
  do {
    arch::wgmma_fence(d);
    arch::wgmma_fence(e);
    for (int step = 0; step < kSteps; ++step) multiply(d, p, step);
    arch::wgmma_commit();
    for (int step = 0; step < kSteps; ++step) multiply(e, p, step);
    arch::wgmma_commit();
    arch::wgmma_wait<1>();
    for (float& x : e) x *= p.scale;
    arch::wgmma_wait<0>();
  } while (--turns > 0);
  store(p, d);
  store(p, e, 32);
}

__global__ void __launch_bounds__(kThreads) never_waits(Problem p) {
  float d[32] = {};
  arch::wgmma_fence(d);
  for (int step = 0; step < kSteps; ++step) multiply(d, p, step);
  store(p, d);
}

__global__ void __launch_bounds__(kThreads) calls_a_function(Problem p) {
  float d[32] = {};
  arch::wgmma_fence(d);
  called(d, p);
  arch::wgmma_commit();
  arch::wgmma_wait<0>(d);
  store(p, d);
}

__global__ void __launch_bounds__(kThreads) diverges(Problem p) {
  float d[32] = {};
  arch::wgmma_fence(d);
  if (threadIdx.x < unsigned(p.turns))
    for (int step = 0; step < kSteps; ++step) multiply(d, p, step);
  arch::wgmma_commit();
  arch::wgmma_wait<0>(d);
  store(p, d);
}

// 128 rows, 256 columns and one warpgroup: 256 accumulators per thread.
__global__ void __launch_bounds__(kThreads) has_too_many_sums(Problem p) {
  float d[2][128] = {};
  int turns = p.turns;
#pragma unroll 1
  do {
    arch::wgmma_fence(d);
    for (int step = 0; step < kSteps; ++step)
      for (int i = 0; i < 2; ++i)
        arch::wgmma_m64k16<bfloat16_t, Major::kK, Major::kK>(d[i], p.a + 512 * i + 2 * step, p.b + 2 * step, 1);
    arch::wgmma_commit();
    arch::wgmma_wait<1>();
  } while (--turns > 0);
  arch::wgmma_wait<0>(d);
  for (int i = 0; i < 2; ++i) store(p, d[i], 128 * i);
}

template <int producer, int consumer>
DEVICE void change_registers(const Problem& p) {
  if (threadIdx.x < kThreads) {
    arch::decrease_registers<producer>();
    return;
  }
  arch::increase_registers<consumer>();
  float d[32] = {};
  run(p, d, Nothing{}, Nothing{});
}
__global__ void __launch_bounds__(3 * kThreads, 1) has_roles(Problem p) { change_registers<24, 240>(p); }
__global__ void __launch_bounds__(3 * kThreads, 1) has_other_roles(Problem p) { change_registers<40, 232>(p); }
__global__ void __launch_bounds__(3 * kThreads) has_roles_without_bounds(Problem p) { change_registers<24, 240>(p); }
__global__ void __launch_bounds__(3 * kThreads, 1) gives_up_registers_it_uses(Problem p) {
  arch::decrease_registers<24>();
  float d[64] = {};
  run(p, d, Nothing{}, Nothing{});
}

// What ptxas says nothing about.
__global__ void __launch_bounds__(kThreads) commits_each_product(Problem p) {
  float d[32] = {};
  run(p, d, [](auto&&...) { arch::wgmma_commit(); }, Nothing{});
}
__global__ void __launch_bounds__(kThreads) waits_in_between(Problem p) {
  float d[32] = {};
  run(
      p, d,
      [](auto&&, int step) {
        if (step == 1) {
          arch::wgmma_commit();
          arch::wgmma_wait<0>();
        }
      },
      Nothing{});
}
__global__ void __launch_bounds__(kThreads) branches_in_between(Problem p) {
  float d[32] = {};
  run(
      p, d,
      [&](auto&&, int step) {
        if (step == 1) arch::barrier_wait(*reinterpret_cast<arch::Barrier*>(p.out), 0);
      },
      Nothing{});
}
__global__ void __launch_bounds__(kThreads) computes_in_between(Problem p) {
  float d[32] = {};
  unsigned x = threadIdx.x;
  run(
      p, d,
      [&](auto&&...) {
        for (int i = 0; i < 20; ++i) asm volatile("xor.b32 %0, %0, %1;" : "+r"(x) : "r"(x >> 1));
      },
      Nothing{});
  p.out[threadIdx.x] = x;
}
__global__ void __launch_bounds__(kThreads) releases_with_a_fence(Problem p) {
  float d[32] = {};
  run(p, d, Nothing{}, [&](auto&&...) { arch::barrier_arrive_remote(p.barrier); });
}
__global__ void __launch_bounds__(kThreads) loads_an_operand(Problem p) {
  float d[32] = {};
  uint32_t a[4];
  for (uint32_t& x : a) x = threadIdx.x;
  int turns = p.turns;
#pragma unroll 1
  do {
    arch::wgmma_fence(d, a);
    for (int step = 0; step < kSteps; ++step) arch::wgmma_m64k16<bfloat16_t, Major::kK>(d, a, p.b + 2 * step, 1);
    arch::wgmma_commit();
    arch::wgmma_wait<1>();
  } while (--turns > 0);
  arch::wgmma_wait<0>(d);
  store(p, d);
}

#ifdef TOO_MANY_THREADS
// 512 threads leave 128 registers, the accumulators alone.
__global__ void __launch_bounds__(4 * kThreads, 1) has_too_many_threads(Problem p) {
  float d[128] = {};
  run(p, d, Nothing{}, Nothing{});
}
#endif
