// Stacks of fibers, and the switch between fibers.
#pragma once

#include <cstddef>
#include <vector>

namespace cuda_ext::simt {

// A stack with a guard page below it.
class Stack {
 public:
  Stack();
  ~Stack();
  Stack(Stack&& other) noexcept;
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  Stack& operator=(Stack&&) = delete;

  // Prepares the stack so that the first switch to the result calls entry(), which never returns. `colour` shifts the
  // top, so that the tops of many stacks do not map to the same few cache sets.
  void* prepare(void (*entry)(), size_t colour);
  bool contains(const void* pointer) const;

 private:
  std::byte* base_;
};

// Saves the running fiber in *from and resumes `to`, which an earlier switch saved or Stack::prepare returned.
extern "C" void cuda_ext_simt_switch(void** from, void* to);

}  // namespace cuda_ext::simt
