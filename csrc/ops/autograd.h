// What the ops share of autograd: which derivatives a call needs, and nodes that work under torch.func.
//
// torch::autograd::Function<T>::apply refuses the transforms of torch.func. Our ops therefore tie their results to nodes
// themselves, the way PyTorch's own ops do, and dispatch to an op below autograd, where the next transform finds it.
//
// There are two ways to differentiate an op. The fused one runs X_forward, which saves what the fused X_backward needs.
// The composed one saves only the inputs and forms the gradients from differentiable ops, so it can be differentiated
// again, in either mode, and be mapped. It serves the transforms of torch.func, forward mode, and a backward pass with
// create_graph=True.
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

// What backward must know beside tensors. Only what is not the default is stored: most calls then store nothing, and a
// call on small tensors feels every entry.
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
  bool composed;  // backward has to be composed of differentiable ops
};
template <class... Tensors>
Derivatives derivatives_of(const Tensors&... inputs) {
  const bool reverse = any_requires_grad(inputs...), forward = any_has_tangent(inputs...);
  return {reverse, forward, reverse && (forward || under_transform())};
}

// Whether this backward pass has to be composed although forward saved what the fused one needs.
inline bool needs_composed_backward(const Tensor& grad) {
  return c10::GradMode::is_enabled() || under_transform() || tangent_of(grad).defined();
}

// A node that can let go of what forward saved while its backward pass still runs.
struct ReleasingNode {
  virtual void release_saved(const AutogradContext* ctx) = 0;

 protected:
  ~ReleasingNode() = default;
};

// The autograd node of an op. T derives from torch::autograd::Function<T> and has `kNodeName`, shown by profilers and as
// grad_fn, and `static variable_list backward(AutogradContext*, variable_list& grads)`, which returns a gradient for each
// input given to `make_node`, may find gradients of outputs undefined, and may take those that it finds.
template <class T>
struct OpNode final : torch::autograd::CppNode<T>, ReleasingNode {
  std::string name() const override { return T::kNodeName; }

  // The engine says so just before `apply`, unless the graph is kept.
  void will_release_variables() override { releases_ = true; }

  variable_list apply(variable_list&& inputs) override {
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    struct Reset {
      bool& flag;
      ~Reset() { flag = false; }
    } reset{releases_};
    return torch::autograd::CppNode<T>::apply(std::move(inputs));
  }

  void release_saved(const AutogradContext* ctx) override {
    if (!releases_ || ctx != &this->ctx_) return;
    // Not `release_variables`: it takes the lock that `apply` holds.
    this->ctx_.save_for_backward({});
    this->save_variables_to_ctx();
    released_ = true;
  }

 private:
  bool releases_ = false, released_ = false;
};

// In backward: drops what forward saved, if this pass is the last to need it. What `get_saved_variables` returned stays
// until the caller drops that, too.
inline void release_saved(const AutogradContext* ctx) {
  const auto node = torch::autograd::get_current_node();
  if (auto* const releasing = dynamic_cast<ReleasingNode*>(node.get())) releasing->release_saved(ctx);
}

// A new node, in the pointer that this torch holds nodes by: shared_ptr until 2.14, intrusive_ptr since.
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

// A node whose edges lead to `inputs`, tensors and optional tensors; `finish_node` ties it to the outputs.
template <class T, class... Inputs>
auto make_node(const Inputs&... inputs) {
  auto node = new_node<T>();
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  node->is_variable_input_.assign(sizeof...(inputs), true);
  node->ctx_.set_materialize_grads(false);
  return node;
}

// Saves tensors for backward. Outputs of the node may be among them, once they are tied to it.
template <class Node>
void save_variables(const Node& node, const variable_list& saved) {
  node->ctx_.save_for_backward(saved);
  node->save_variables_to_ctx();
}
// Ties the only output to the node, then saves.
template <class Node>
void finish_node(const Node& node, const variable_list& saved, const Tensor& out) {
  torch::autograd::set_history(out, node);
  save_variables(node, saved);
}

// Calls X below autograd, or X_forward where the fused backward needs what that saves: the pre-activation, else undefined.
template <class Op, class ForwardOp, class... Arguments>
std::tuple<Tensor, Tensor> call_below_autograd(const Derivatives& wanted, const Op& op, const ForwardOp& forward_op,
                                               const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (wanted.reverse && !wanted.composed) return forward_op.call(arguments...);
  return {op.call(arguments...), Tensor()};
}

// Makes `tangent` the derivative that forward mode finds in `out`.
inline void set_tangent(const Tensor& out, const Tensor& tangent) {
  if (tangent.defined())
    out._set_fw_grad(tangent.to(out.scalar_type()).expand_symint(out.sym_sizes()), /*level=*/0,
                     /*is_inplace_op=*/false);
}

}  // namespace cuda_ext
