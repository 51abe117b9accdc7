#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

namespace cuda_ext::simt {

namespace {

// nvcc's code has a variable for each value, so the frame of one of its kernels, as the host's compiler makes it, may
// exceed 100 kB. Pages that are not touched take no memory. The guard is a multiple of every page size in use here, and
// larger than a frame, which could else begin below it.
constexpr size_t kStackBytes = 512 * 1024;
constexpr size_t kGuardBytes = 256 * 1024;

}  // namespace

Stack::Stack() {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kGuardBytes, PROT_NONE);
  base_ = static_cast<std::byte*>(memory);
}
Stack::~Stack() {
  if (base_ != nullptr) munmap(base_, kGuardBytes + kStackBytes);
}
Stack::Stack(Stack&& other) noexcept : base_(std::exchange(other.base_, nullptr)) {}

bool Stack::contains(const void* pointer) const {
  const auto* at = static_cast<const std::byte*>(pointer);
  return at >= base_ && at < base_ + kGuardBytes + kStackBytes;
}

#if defined(__x86_64__)

// The callee-saved registers of the System V ABI; the rest is dead across a call.
asm(R"(
  .text
  .globl cuda_ext_simt_switch
  .hidden cuda_ext_simt_switch
  .type cuda_ext_simt_switch, @function
cuda_ext_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cuda_ext_simt_switch, . - cuda_ext_simt_switch
)");
constexpr size_t kSavedWords = 6;

void* Stack::prepare(void (*entry)(), size_t colour) {
  std::byte* top = base_ + kGuardBytes + kStackBytes - 64 - colour % 61 * 320;
  auto* words = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
  *--words = 0;  // entry's return address; keeps the stack aligned as after a call
  *--words = reinterpret_cast<uintptr_t>(entry);
  for (size_t i = 0; i < kSavedWords; ++i) *--words = 0;
  return words;
}

#elif defined(__aarch64__)

asm(R"(
  .text
  .globl cuda_ext_simt_switch
  .hidden cuda_ext_simt_switch
  .type cuda_ext_simt_switch, %function
cuda_ext_simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size cuda_ext_simt_switch, . - cuda_ext_simt_switch
)");

void* Stack::prepare(void (*entry)(), size_t colour) {
  std::byte* top = base_ + kGuardBytes + kStackBytes - 64 - colour % 61 * 320;
  auto* words = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15)) - 160);
  for (int i = 0; i < 20; ++i) words[i] = 0;
  words[11] = reinterpret_cast<uintptr_t>(entry);  // x30
  return words;
}

#else
#error "the emulator can switch stacks on x86-64 and aarch64 only; other processors need cuda_ext_simt_switch here"
#endif

}  // namespace cuda_ext::simt
