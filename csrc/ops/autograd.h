// Autograd support shared by the ops: which derivatives a call needs, and autograd nodes that work under torch.func.
//
// torch::autograd::Function<T>::apply does not support the transforms of torch.func. Our ops therefore create their
// autograd nodes themselves, as PyTorch's own ops do, and dispatch to an op below autograd, where the next transform
// sees it.
//
// An op is differentiated in one of two ways. The fused backward needs what X_forward saves, and is one or more ops
// X_backward. The composed backward saves only the inputs and computes the gradients with differentiable ops, so it can
// be differentiated again, in either mode, and mapped with vmap. It is used under transforms of torch.func, in forward
// mode, and in a backward pass with create_graph=True.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "ops/op.h"

namespace cuda_ext {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Saves an option for backward, unless it has its default value: on small tensors each saved entry costs measurable
// time.
template <class T>
void save_option(AutogradContext* ctx, const char* name, const T& value, const T& otherwise = T()) {
  if (value != otherwise) ctx->saved_data[name] = value;
}
template <class T>
T saved_option(const AutogradContext* ctx, const char* name, const T& otherwise = T()) {
  const auto found = ctx->saved_data.find(name);
  return found == ctx->saved_data.end() ? otherwise : found->second.to<T>();
}

inline OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Whether a transform of torch.func, or vmap over a backward pass, is active.
inline bool under_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// The derivatives that a call with these inputs needs.
struct Derivatives {
  bool reverse;   // a node for backward
  bool forward;   // a tangent of the output
  bool composed;  // backward must be composed of differentiable ops
};
template <class... Tensors>
Derivatives derivatives_of(const Tensors&... inputs) {
  const bool reverse = any_requires_grad(inputs...), forward = any_has_tangent(inputs...);
  return {reverse, forward, reverse && (forward || under_transform())};
}

// Whether this backward pass must be composed although forward saved what the fused one needs.
inline bool needs_composed_backward(const Tensor& grad) {
  return c10::GradMode::is_enabled() || under_transform() || tangent_of(grad).defined();
}

// A node that can release its saved tensors while its backward function still runs.
struct ReleasingNode {
  virtual bool is_last_pass(const AutogradContext* ctx) const = 0;  // nothing needs what is saved any more
  virtual void release_saved(const AutogradContext* ctx) = 0;

 protected:
  ~ReleasingNode() = default;
};

// The autograd node of an op. T derives from torch::autograd::Function<T> and has `kNodeName`, shown by profilers and
// as grad_fn, and `static variable_list backward(AutogradContext*, variable_list& grads)`, which returns a gradient for
// each input passed to `make_node`. Gradients of outputs may be undefined; backward may move from `grads`.
template <class T>
struct OpNode final : torch::autograd::CppNode<T>, ReleasingNode {
  std::string name() const override { return T::kNodeName; }

  // The engine calls this just before `apply`, unless the graph is retained.
  void will_release_variables() override { releases_ = true; }

  variable_list apply(variable_list&& inputs) override {
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    struct Reset {
      bool& flag;
      ~Reset() { flag = false; }
    } reset{releases_};
    return torch::autograd::CppNode<T>::apply(std::move(inputs));
  }

  bool is_last_pass(const AutogradContext* ctx) const override { return releases_ && ctx == &this->ctx_; }

  void release_saved(const AutogradContext* ctx) override {
    if (!is_last_pass(ctx)) return;
    // Not `release_variables`, which would lock the mutex that `apply` holds.
    this->ctx_.save_for_backward({});
    this->save_variables_to_ctx();
    released_ = true;
  }

 private:
  bool releases_ = false, released_ = false;
};

// Called in backward: releases the saved tensors if this pass is the last to need them. The caller must also release
// what `get_saved_variables` returned to it.
inline void release_saved(const AutogradContext* ctx) {
  const auto node = torch::autograd::get_current_node();
  if (auto* const releasing = dynamic_cast<ReleasingNode*>(node.get())) releasing->release_saved(ctx);
}

// Called in backward: whether gradients may share memory with saved tensors.
inline bool is_last_pass(const AutogradContext* ctx) {
  const auto node = torch::autograd::get_current_node();
  const auto* const releasing = dynamic_cast<const ReleasingNode*>(node.get());
  return releasing != nullptr && releasing->is_last_pass(ctx);
}

// A new node, in the pointer type of this torch: shared_ptr before 2.14, intrusive_ptr since.
template <class Node>
void delete_node(Node* node) {
  deleteNode(node);
}
template <class T, class Pointer = decltype(torch::autograd::Edge::function)>
auto new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<OpNode<T>>(new OpNode<T>(), &delete_node<torch::autograd::Node>);
  else
    return c10::make_intrusive<OpNode<T>>();
}

// A node whose edges lead to `inputs` (tensors and optional tensors); `attach_node` makes it the grad_fn of the output.
template <class T, class... Inputs>
auto make_node(const Inputs&... inputs) {
  auto node = new_node<T>();
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  node->is_variable_input_.assign(sizeof...(inputs), true);
  node->ctx_.set_materialize_grads(false);
  return node;
}

// Saves tensors for backward. Outputs of the node must be attached to it before they are saved.
template <class Node>
void save_variables(const Node& node, const variable_list& saved) {
  node->ctx_.save_for_backward(saved);
  node->save_variables_to_ctx();
}
// Makes the node the grad_fn of its only output, then saves tensors for backward.
template <class Node>
void attach_node(const Node& node, const variable_list& saved, const Tensor& out) {
  torch::autograd::set_history(out, node);
  save_variables(node, saved);
}

// Calls X below autograd, or X_forward if the fused backward needs the pre-activation, which is undefined otherwise.
template <class Op, class ForwardOp, class... Arguments>
std::tuple<Tensor, Tensor> call_below_autograd(const Derivatives& wanted, const Op& op, const ForwardOp& forward_op,
                                               const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (wanted.reverse && !wanted.composed) return forward_op.call(arguments...);
  return {op.call(arguments...), Tensor()};
}

// Sets the forward-mode tangent of `out`.
inline void set_tangent(const Tensor& out, const Tensor& tangent) {
  if (tangent.defined())
    out._set_fw_grad(tangent.to(out.scalar_type()).expand_symint(out.sym_sizes()), /*level=*/0,
                     /*is_inplace_op=*/false);
}

}  // namespace cuda_ext
