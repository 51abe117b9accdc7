// Bad memory is the kernel's mistake, not the end of the process.
#pragma once

#include <cstddef>
#include <vector>

namespace cuda_ext::simt {

// While one lives, an access by a kernel on this thread of the host to memory that is not there ends its launch with a
// Fault that names the instruction.
class MemoryGuard {
 public:
  MemoryGuard();
  ~MemoryGuard();
  MemoryGuard(const MemoryGuard&) = delete;
  MemoryGuard& operator=(const MemoryGuard&) = delete;

  // The access that the last signal told of, and the top of the stack on which the kernel's thread then goes on.
  const void* memory = nullptr;
  const void* code = nullptr;
  std::byte* handler_top() { return handler_stack_.data() + handler_stack_.size() - 64; }

 private:
  std::vector<std::byte> signal_stack_, handler_stack_;
  void* previous_stack_;
  size_t previous_size_;
  int previous_flags_;
};

}  // namespace cuda_ext::simt
