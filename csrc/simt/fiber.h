// Stacks and the switch between them.
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

  // Prepares it so that the first switch to the result calls entry(), which never returns. `colour` shifts the top, so
  // that a thousand stacks do not share the same few cache sets.
  void* prepare(void (*entry)(), size_t colour);
  bool contains(const void* pointer) const;

 private:
  std::byte* base_;
};

// Saves the running fiber in *from and goes on with `to`, as saved by an earlier switch or made by Stack::prepare.
extern "C" void cuda_ext_simt_switch(void** from, void* to);

}  // namespace cuda_ext::simt
