// Memory that a caller lends to a launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace cuda_ext {

// Device memory a launch may use until it has ended; its contents before and after mean nothing.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// Gives out pieces of a workspace; with none behind it, it tells how many bytes there would have to be.
class WorkspaceCursor {
 public:
  explicit WorkspaceCursor(void* data = nullptr) : data_(reinterpret_cast<uintptr_t>(data)) {}

  template <class T>
  void take(T*& piece, int64_t count) {
    constexpr size_t kAlignment = 256;
    piece = reinterpret_cast<T*>(data_ + used_);
    used_ += (size_t(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }

  size_t used() const { return used_; }

  void expect_room(const char* who, const Workspace& workspace) const {
    if (used_ > workspace.bytes)
      throw std::invalid_argument(std::string(who) + ": expected a workspace of " + std::to_string(used_) +
                                  " bytes, got " + std::to_string(workspace.bytes) +
                                  "; ask the function that tells its size");
  }

 private:
  uintptr_t data_;
  size_t used_ = 0;
};

}  // namespace cuda_ext
