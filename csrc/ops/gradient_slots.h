// Gradient slots: the places, in a flat bucket say, into which backward functions write or accumulate the gradients of
// weights from the epilogue of the product that forms them, instead of returning them.
//
// What lies in a slot is the sum of everything that has come in the running pass, times the pass's scale. Gradients that
// take the usual way, from ops that know nothing of slots, meanwhile add up in parameter.grad, and are added to the slot
// when the parameter's AccumulateGrad has run (collect), or moved there if it is empty (take). AccumulateGrad must not find the slot in parameter.grad then,
// or it would add unscaled values to scaled ones: so parameter.grad is undefined from the first write to the moment when
// nothing more can come, or when the scale is 1 and does not matter.
#pragma once

#include <atomic>
#include <memory>

#include "ops/op.h"

namespace cuda_ext {

struct GradientSlot;

// Of all holders; 0 is all that ops ask for where nobody uses slots.
inline std::atomic<int64_t> gradient_slot_count{0};

// The slot that takes the gradient of one weight in the backward pass that runs, if there is one: a backward function
// asks, lets its op write alpha * gradient + beta * slot into the slot, says so, and returns no gradient.
class SlotWrite {
 public:
  // The weight is input `input` of the autograd node that is being evaluated; `grad` is what arrived there.
  SlotWrite(bool wanted, uint32_t input, const Tensor& grad) {
    if (wanted && gradient_slot_count.load(std::memory_order_relaxed) > 0) find(input, grad);
  }
  ~SlotWrite() {
    if (slot_ != nullptr) end();
  }
  SlotWrite(const SlotWrite&) = delete;
  SlotWrite& operator=(const SlotWrite&) = delete;

  bool found() const { return slot_ != nullptr; }
  OptionalTensor view() const;
  double alpha() const { return alpha_; }
  double beta() const { return beta_; }
  // The op has written.
  void done();

 private:
  void find(uint32_t input, const Tensor& grad);
  void end();

  std::shared_ptr<GradientSlot> slot_;  // null: the gradient takes the usual way
  Tensor parameter_;
  double alpha_ = 1.0;
  double beta_ = 0.0;
  bool took_grad_ = false;  // parameter.grad was the slot
};

}  // namespace cuda_ext
