// Temporary device memory that the caller of a launcher provides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace cuda_ext {

// Device memory that a launch may use until its kernels have ended. It need not be initialised.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// The caller's function that provides a workspace of so many bytes. A reference to it, valid during a call.
class AllocateWorkspace {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<F, AllocateWorkspace>>>
  AllocateWorkspace(const F& f)
      : f_(&f), call_([](const void* f, size_t bytes) -> Workspace { return (*static_cast<const F*>(f))(bytes); }) {}

  Workspace operator()(size_t bytes) const { return call_(f_, bytes); }

 private:
  const void* f_;
  Workspace (*call_)(const void*, size_t);
};

// Allocates arrays in a workspace, one after the other. With a null workspace it only counts the bytes.
class WorkspaceCursor {
 public:
  explicit WorkspaceCursor(void* data = nullptr) : data_(reinterpret_cast<uintptr_t>(data)) {}

  template <class T>
  void allocate(T*& array, int64_t count) {
    constexpr size_t kAlignment = 256;
    array = reinterpret_cast<T*>(data_ + used_);
    used_ += (size_t(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }

  size_t used() const { return used_; }

 private:
  uintptr_t data_;
  size_t used_ = 0;
};

// Allocates a workspace for the arrays that assign(data) takes from it; null data only counts them. `assign` returns
// its WorkspaceCursor.
template <class Assign>
void provide_workspace(const char* op, const AllocateWorkspace& allocate, const Assign& assign) {
  const size_t bytes = assign(nullptr).used();
  if (bytes == 0) return;
  const Workspace workspace = allocate(bytes);
  if (workspace.bytes < bytes)
    throw std::invalid_argument(std::string(op) + ": expected a workspace of " + std::to_string(bytes) +
                                " bytes, got " + std::to_string(workspace.bytes));
  assign(workspace.data);
}

}  // namespace cuda_ext
