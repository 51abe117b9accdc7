// Decides which fiber runs next, and when asynchronous operations complete.
#include <algorithm>
#include <bit>
#include <utility>

#include "simt/machine.h"

namespace cuda_ext::simt {

uint64_t Machine::random() {  // splitmix64
  uint64_t z = random_state_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

void Machine::draw_priority(Warp& warp) {
  const uint64_t draw = random();
  warp.priority = uint32_t(draw);
  warp.backwards = options_.schedule == Schedule::kPct && (draw >> 40 & 1) != 0;
}

// Concurrent blocks have priorities too; otherwise they would run nearly in step.
void Machine::sort_by_priority() {
  std::sort(order_.begin(), order_.end(), [](const Warp* a, const Warp* b) {
    return std::pair(a->block->priority, a->priority) > std::pair(b->block->priority, b->priority);
  });
}

void Machine::wake(Fiber& fiber) { fiber.warp->runnable |= uint32_t(1) << fiber.lane; }

void Machine::park(const Wait& wait) {
  Warp& warp = *current_->warp;
  current_->wait = wait;
  warp.runnable &= ~(uint32_t(1) << current_->lane);
  const bool stay = warp.runnable != 0 && options_.schedule == Schedule::kFifo;
  switch_to(stay ? choose_lane(warp) : choose_or_complete());
}

void Machine::park_until(const Wait& wait, std::function<bool()> ready) {
  if (ready()) return;
  pollers_.push_back({current_, std::move(ready)});
  park(wait);
}

void Machine::yield() {
  if (options_.schedule != Schedule::kPct) return;
  if (random() % 64 == 0) {
    draw_priority(*current_->warp);
    if (random() % 4 == 0) current_->block->priority = uint32_t(random());
    sort_by_priority();
  }
  for (Warp* warp : order_) {
    if (warp == current_->warp) return;
    if (warp->runnable != 0) return switch_to(choose_lane(*warp));
  }
}

void Machine::start(Action action) {
  if (lazy())
    in_flight_.push_back(std::move(action));
  else
    action();
}

Fiber* Machine::choose_lane(Warp& warp) {
  int lane;
  if (warp.backwards) {
    lane = 31 - std::countl_zero(warp.runnable);
  } else {
    const int after = current_ != nullptr && current_->warp == &warp ? current_->lane : -1;
    const uint32_t above = after >= 31 ? 0 : warp.runnable & ~((uint32_t(2) << after) - 1);
    lane = std::countr_zero(after >= 0 && above != 0 ? above : warp.runnable);
  }
  return &warp.fibers[lane];
}

Fiber* Machine::choose() {
  if (options_.schedule == Schedule::kPct) {
    for (Warp* warp : order_)
      if (warp->runnable != 0) return choose_lane(*warp);
    return nullptr;
  }
  for (size_t i = 0; i < order_.size(); ++i) {
    const size_t at = turn_ + i < order_.size() ? turn_ + i : turn_ + i - order_.size();
    if (order_[at]->runnable == 0) continue;
    turn_ = at;
    return choose_lane(*order_[at]);
  }
  return nullptr;
}

Fiber* Machine::choose_or_complete() {
  for (;;) {
    if (Fiber* fiber = choose()) return fiber;
    if (!in_flight_.empty()) {
      const size_t which = options_.schedule == Schedule::kPct ? random() % in_flight_.size() : 0;
      const Action action = std::move(in_flight_[which]);
      in_flight_.erase(in_flight_.begin() + ptrdiff_t(which));
      action();
      continue;
    }
    if (fibers_left_ == 0) return nullptr;
    const auto ready = std::find_if(pollers_.begin(), pollers_.end(), [](const Poller& p) { return p.ready(); });
    if (ready == pollers_.end()) fail_with(deadlock_table());
    wake(*ready->fiber);
    pollers_.erase(ready);
  }
}

void Machine::switch_to(Fiber* next) {
  if (next == current_) return;
  Fiber* self = std::exchange(current_, next);
  cuda_ext_simt_switch(&self->stack_pointer, next->stack_pointer);
}

}  // namespace cuda_ext::simt
