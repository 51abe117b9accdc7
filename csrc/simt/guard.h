// Turns a kernel's access to unmapped memory into a Fault instead of a crash of the process.
#pragma once

#include <cstddef>
#include <vector>

namespace cuda_ext::simt {

// While it exists, an access to unmapped memory by a kernel on this host thread ends the launch with a Fault that names
// the instruction.
class MemoryGuard {
 public:
  MemoryGuard();
  ~MemoryGuard();
  MemoryGuard(const MemoryGuard&) = delete;
  MemoryGuard& operator=(const MemoryGuard&) = delete;

  // Set by the signal handler: the address that was accessed, and the code that accessed it.
  const void* memory = nullptr;
  const void* code = nullptr;
  // Top of the stack on which the fault is reported.
  std::byte* handler_top() { return handler_stack_.data() + handler_stack_.size() - 64; }

 private:
  std::vector<std::byte> signal_stack_, handler_stack_;
  void* previous_stack_;
  size_t previous_size_;
  int previous_flags_;
};

}  // namespace cuda_ext::simt
