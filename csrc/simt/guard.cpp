#include "simt/guard.h"

#include <signal.h>
#include <ucontext.h>

#include <mutex>

#include "simt/machine.h"

namespace cuda_ext::simt {

namespace {

constexpr size_t kSignalStackBytes = 64 * 1024, kHandlerStackBytes = 256 * 1024;
constexpr int kSignals[] = {SIGSEGV, SIGBUS};

std::mutex guards_mutex;
int guards = 0;
struct sigaction previous_actions[std::size(kSignals)];

// Runs as if the kernel had called it, on its own stack, because the fault may be an overflow of the fiber's stack.
[[noreturn]] void report_fault() { machine->bad_memory(machine->guard().memory, machine->guard().code); }

void on_signal(int signal, siginfo_t* info, void* context) {
  if (machine == nullptr || !machine->is_running()) {  // not in a kernel: restore the previous handler, then retry
    for (size_t i = 0; i < std::size(kSignals); ++i)
      if (kSignals[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
    return;
  }
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
  MemoryGuard& guard = machine->guard();
  guard.memory = info->si_addr;
  const uintptr_t top = reinterpret_cast<uintptr_t>(guard.handler_top()) & ~uintptr_t(15);
#if defined(__x86_64__)
  guard.code = reinterpret_cast<const void*>(registers.gregs[REG_RIP]);
  registers.gregs[REG_RIP] = greg_t(reinterpret_cast<uintptr_t>(&report_fault));
  registers.gregs[REG_RSP] = greg_t(top - 8);  // as after a call
#else
  guard.code = reinterpret_cast<const void*>(registers.pc);
  registers.pc = reinterpret_cast<uintptr_t>(&report_fault);
  registers.sp = top;
#endif
}

}  // namespace

MemoryGuard::MemoryGuard() : signal_stack_(kSignalStackBytes), handler_stack_(kHandlerStackBytes) {
  stack_t mine{}, before{};
  mine.ss_sp = signal_stack_.data();
  mine.ss_size = signal_stack_.size();
  sigaltstack(&mine, &before);
  previous_stack_ = before.ss_sp;
  previous_size_ = before.ss_size;
  previous_flags_ = before.ss_flags;
  const std::lock_guard<std::mutex> lock(guards_mutex);
  if (guards++ != 0) return;
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &previous_actions[i]);
}

MemoryGuard::~MemoryGuard() {
  {
    const std::lock_guard<std::mutex> lock(guards_mutex);
    if (--guards == 0)
      for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &previous_actions[i], nullptr);
  }
  stack_t before{};
  before.ss_sp = previous_stack_;
  before.ss_size = previous_size_;
  before.ss_flags = previous_flags_;
  sigaltstack(&before, nullptr);
}

void Machine::bad_memory(const void* memory, const void* code) {
  if (current_->stack->contains(memory)) fail("stack", kNoSite, "the thread's local variables do not fit on its stack");
  if (global_access.name != nullptr)
    fail(global_access.name, global_access.site, "there is no memory at global address %p", memory);
  // Locations are looked up for the byte before a code address, as it is mostly a return address.
  fail("load or store", Site(static_cast<const char*>(code) + 1, kCodeAddress), "there is no memory at address %p",
       memory);
}

}  // namespace cuda_ext::simt
