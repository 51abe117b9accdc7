// Temporary device memory that the caller of a launcher provides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace cuda_ext {

// Device memory that a launch may use until its kernels have ended. It need not be initialised.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
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

  void expect_fits(const char* op, const Workspace& workspace) const {
    if (used_ > workspace.bytes)
      throw std::invalid_argument(std::string(op) + ": expected a workspace of " + std::to_string(used_) +
                                  " bytes, got " + std::to_string(workspace.bytes) +
                                  "; call the op's workspace function for the size");
  }

 private:
  uintptr_t data_;
  size_t used_ = 0;
};

}  // namespace cuda_ext
