// What a CPU kernel needs from its host process: threads, a BLAS and scratch memory. Declared here without torch, so
// that kernels compile in seconds and a program without torch can supply its own. ops/host.cpp implements them with
// torch's thread pool, BLAS and allocator.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace cuda_ext::cpu {

// A non-owning reference to a callable: two words, no allocation. The callable must outlive it.
template <class Signature>
class FunctionRef;

template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, FunctionRef>>>
  FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(args...);
        }) {}
  R operator()(Args... args) const { return call_(object_, args...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

int num_threads();

// Splits [0, count) into contiguous ranges of at least `grain` and runs body(begin, end) on the pool's threads. Results
// do not depend on the ranges: kernels combine partial results in index order.
void parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t begin, int64_t end)> body);

// Tasks of unequal cost: each worker fetches the next one when it is free. Put the expensive ones first.
class TaskQueue {
 public:
  explicit TaskQueue(int64_t count) : count_(count) {}
  bool next(int64_t& task) {
    task = next_.fetch_add(1, std::memory_order_relaxed);
    return task < count_;
  }

 private:
  std::atomic<int64_t> next_{0};
  int64_t count_;
};

// Runs `worker` once on each thread that `count` tasks can use; a worker allocates its buffers, then loops
// `while (queue.next(task))`.
void run_workers(int64_t count, FunctionRef<void(TaskQueue& queue)> worker);

// C (m, n) = alpha * op(A) (m, k) @ op(B) (k, n) + beta * C, all row-major with leading dimensions lda, ldb, ldc.
// `transpose_a` means A is stored (k, m). Runs on the calling thread when called inside parallel_for.
void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
          const float* b, int64_t ldb, float beta, float* c, int64_t ldc);
void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
          int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc);

// Scratch memory, freed with the object: 64-byte aligned, uninitialised, from the CPU allocator of the host process, so
// that tools that measure that allocator see it.
class Scratch {
 public:
  explicit Scratch(int64_t bytes);
  ~Scratch();
  Scratch(Scratch&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Scratch& operator=(Scratch&&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  int64_t bytes_;
};

}  // namespace cuda_ext::cpu
