// Gradient slots: memory, typically part of a flat bucket, into which backward functions write or accumulate the
// gradient of a weight in the epilogue of the product that computes it, instead of returning the gradient.
//
// A slot holds the sum of the gradients of the current pass, times the pass's scale. Gradients from ops that do not
// support slots add up in parameter.grad as usual; after the parameter's AccumulateGrad has run, they are added to the
// slot (collect), or also moved there if the slot is still empty (take). AccumulateGrad must not find the
// slot in parameter.grad, or it would add unscaled to scaled values. Therefore parameter.grad is undefined from the
// first write until no more gradients can arrive; with a scale of 1 it may be the slot.
#pragma once

#include <atomic>
#include <memory>

#include "ops/op.h"

namespace cuda_ext {

struct GradientSlot;

// The number of slots in the process; while it is 0, ops need no further check.
inline std::atomic<int64_t> gradient_slot_count{0};

// The slot for the gradient of one weight in the current backward pass, if there is one. A backward function constructs
// it, lets its op write alpha * gradient + beta * slot to view(), calls done(), and returns no gradient.
class SlotWrite {
 public:
  // The weight is input `input` of the current autograd node; `grad` is the gradient that arrived at the node.
  SlotWrite(bool wanted, uint32_t input, const Tensor& grad) {
    if (wanted && gradient_slot_count.load(std::memory_order_relaxed) > 0) find(input, grad);
  }
  ~SlotWrite() { end(); }
  SlotWrite(const SlotWrite&) = delete;
  SlotWrite& operator=(const SlotWrite&) = delete;

  bool found() const { return slot_ != nullptr; }
  OptionalTensor view() const;
  double alpha() const { return alpha_; }
  double beta() const { return beta_; }
  // Must be called after the op has written.
  void done();
  // Nothing is written after it. In Python an exception would keep the object until a handler is done with it.
  void end() {
    if (slot_ != nullptr) release();
  }

 private:
  void find(uint32_t input, const Tensor& grad);
  void release();

  std::shared_ptr<GradientSlot> slot_;  // null: return the gradient as usual
  Tensor parameter_;
  double alpha_ = 1.0;
  double beta_ = 0.0;
  bool took_grad_ = false;  // parameter.grad was the slot, and was reset
};

}  // namespace cuda_ext
