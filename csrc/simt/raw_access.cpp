// Hooks for plain loads and stores of kernels: the kernel's source is compiled with -fsanitize=thread and linked with
// these functions instead of the sanitizer's. The emulator itself is compiled without that flag.
#include <algorithm>

#include "simt/machine.h"

namespace {

void access(bool write, const void* memory, size_t bytes, const void* code) {
  if (cuda_ext::simt::machine != nullptr) cuda_ext::simt::machine->plain_access(write, memory, int(bytes), code);
}

// A copy of a struct, in pieces that one instruction can move.
void access_range(bool write, const void* memory, size_t bytes, const void* code) {
  constexpr size_t kPiece = 16;
  for (size_t done = 0; done < bytes; done += kPiece)
    access(write, static_cast<const char*>(memory) + done, std::min(bytes - done, kPiece), code);
}

}  // namespace

#define HOOK extern "C" __attribute__((visibility("hidden"))) void
#define CALLER __builtin_return_address(0)
#define ACCESS(bytes)                                                                       \
  HOOK __tsan_read##bytes(void* memory) { access(false, memory, bytes, CALLER); }           \
  HOOK __tsan_write##bytes(void* memory) { access(true, memory, bytes, CALLER); }           \
  HOOK __tsan_unaligned_read##bytes(void* memory) { access(false, memory, bytes, CALLER); } \
  HOOK __tsan_unaligned_write##bytes(void* memory) { access(true, memory, bytes, CALLER); }

ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
HOOK __tsan_read_range(void* memory, size_t bytes) { access_range(false, memory, bytes, CALLER); }
HOOK __tsan_write_range(void* memory, size_t bytes) { access_range(true, memory, bytes, CALLER); }
HOOK __tsan_vptr_update(void**, void*) {}
HOOK __tsan_vptr_read(void**) {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_init() {}
