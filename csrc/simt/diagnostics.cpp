// Error messages: which thread and source line, and what each thread waits for in a deadlock.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "simt/machine.h"

namespace cuda_ext::simt {

namespace {

std::string format_text(const char* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  std::string text(std::vsnprintf(nullptr, 0, format, again), '\0');
  va_end(again);
  std::vsnprintf(text.data(), text.size() + 1, format, arguments);
  return text;
}

// The source line of a code address, from addr2line; a plain access has no Site. Only for error messages: it is slow.
std::string location_of_code(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "an unknown location";
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase);
  char command[1024];
  std::snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname, size_t(offset - 1));
  std::string line;
  if (FILE* pipe = popen(command, "r")) {
    char text[512] = "";
    if (std::fgets(text, sizeof text, pipe) != nullptr) line = text;
    pclose(pipe);
  }
  line = line.substr(0, line.find_first_of(" \n"));
  return line.empty() || line[0] == '?' ? "code address +" + std::to_string(offset) : line.substr(line.rfind('/') + 1);
}

}  // namespace

std::string location(Site site) {
  if (site.line == kCodeAddress) return location_of_code(site.file);
  const std::string file = site.file;
  const size_t slash = file.rfind('/');
  return (slash == std::string::npos ? file : file.substr(slash + 1)) + ":" + std::to_string(site.line);
}

std::string Machine::describe(const Fiber& fiber) const {
  const Block& block = *fiber.block;
  char text[160];
  std::snprintf(text, sizeof text, "block (%d, %d, %d), thread %d (warp %d, lane %d)", block.index[0], block.index[1],
                block.index[2], fiber.thread, fiber.warp->index, fiber.lane);
  return std::string(kernel_) + ": " + text;
}

std::string Machine::describe_address(const void* memory) const {
  const auto* byte = static_cast<const std::byte*>(memory);
  char text[96];
  for (const auto& block : blocks_) {
    if (byte < block->shared || byte >= block->shared + block->shared_end) continue;
    const int written = std::snprintf(text, sizeof text, "shared address 0x%x", unsigned(byte - block->shared));
    if (block.get() != current_->block)
      std::snprintf(text + written, sizeof text - size_t(written), " in block (%d, %d, %d)", block->index[0],
                    block->index[1], block->index[2]);
    return text;
  }
  std::snprintf(text, sizeof text, "global address %p", memory);
  return text;
}

void Machine::fail(const char* instruction, Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string text = format_text(format, arguments);
  va_end(arguments);
  const std::string at = site.line == 0 ? "" : " at " + location(site);
  fail_with(describe(*current_) + ", " + instruction + at + ": " + text);
}

// Abandons the fibers without unwinding: kernels own no resources.
void Machine::refuse_instruction(const char* instruction, Site site) {
  fail(instruction, site, "sm_%d has no such instruction", options_.compute_capability);
}

void Machine::fail_with(const std::string& message) {
  failure_ = message;
  void* abandoned;
  cuda_ext_simt_switch(&abandoned, main_stack_);
  __builtin_unreachable();
}

std::string Machine::deadlock_table() const {
  std::string text =
      std::string(kernel_) + ": deadlock: no thread can run and no asynchronous operation is in flight\n";
  std::map<std::string, int> rows;
  for (const auto& block : blocks_) {
    for (int t = 0; t < geometry_.block; ++t) {
      const Fiber& fiber = block->fibers[t];
      char where[96];
      std::snprintf(where, sizeof where, "  block (%d, %d, %d) warp %2d: ", block->index[0], block->index[1],
                    block->index[2], fiber.warp->index);
      std::string row = where;
      if (fiber.exited) {
        row += "exited";
      } else {
        row += std::string(fiber.wait.instruction) + " at " + location(fiber.wait.site) + describe_barrier(fiber);
      }
      ++rows[row];
    }
  }
  for (const auto& [row, threads] : rows) text += row + " (" + std::to_string(threads) + " threads)\n";
  return text;
}

std::string Machine::describe_barrier(const Fiber& fiber) const {
  const Wait& wait = fiber.wait;
  if (std::strcmp(wait.instruction, "named_barrier") == 0 || std::strcmp(wait.instruction, "sync_threads") == 0) {
    const NamedBarrier& barrier = fiber.block->barriers[wait.barrier];
    return ": barrier " + std::to_string(wait.barrier) + " has " + std::to_string(barrier.arrived) + " of " +
           std::to_string(barrier.expected) + " threads";
  }
  if (std::strcmp(wait.instruction, "cluster_wait") == 0) {
    const Cluster& cluster = *fiber.block->cluster;
    return ": " + std::to_string(cluster.arrived) + " of " + std::to_string(cluster.threads_left) +
           " threads of the cluster have arrived";
  }
  if (std::strncmp(wait.instruction, "barrier_wait", 12) == 0) {
    const auto found = fiber.block->mbarriers.find(wait.barrier);
    if (found == fiber.block->mbarriers.end()) return ": the barrier has been invalidated";
    const BarrierState& state = found->second;
    char text[160];
    std::snprintf(
        text, sizeof text,
        ": barrier 0x%x in phase %u, waits for the end of parity %u; %u of %u arrivals and %lld bytes are missing",
        wait.barrier, state.phase, wait.parity, state.pending, state.expected, (long long)state.bytes);
    return text;
  }
  return "";
}

}  // namespace cuda_ext::simt
