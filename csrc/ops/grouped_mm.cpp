// grouped_mm: products of groups of rows, or of terms, with a matrix of each group. Its derivatives are grouped
// products, too, so that all orders and modes of autograd are the op itself. With an activation or a gate forward is
// grouped_mm_forward, which also returns the pre-activation, as in ops/gemm.cpp.
#include "ops/torch_headers.h"

#include <ATen/ops/new_ones.h>

#include "gemm/grouped_gemm.h"
#include "ops/gemm_autograd.h"
#include "ops/gemm_composed.h"
#include "ops/grouped_mm.h"

namespace cuda_ext {
namespace {

constexpr const char* kOp = "grouped_mm";

// Rows contiguous, copied if they are not.
Tensor with_contiguous_rows(const Tensor& tensor) {
  const bool reads = tensor.size(-1) <= 1 || tensor.stride(-1) == 1;
  return reads ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

struct GroupedShape {
  bool cuts_rows;
  int64_t groups, m, n, k;  // n: of the output
  Sizes out() const { return cuts_rows ? Sizes{m, n} : Sizes{groups, m, n}; }
};

// Checks mat_b and the options of the epilogue.
GroupedShape check_shape(const Tensor& a, const Tensor& b, const Tensor& offs, const GroupedEpilogue& epilogue) {
  const bool cuts_rows = b.dim() == 3;
  const int64_t columns = b.size(-1);
  CUDA_EXT_CHECK(b.size(-2) == a.size(1), kOp, "expected mat_b of shape (", cuts_rows ? "groups, " : "", a.size(1),
                 ", N) to match mat_a ", shape_string(a), ", got ", shape_string(b));
  CUDA_EXT_CHECK(!cuts_rows || b.size(0) == offs.size(0), kOp, "expected mat_b of ", offs.size(0),
                 " matrices, one for each element of offs, got ", shape_string(b));
  CUDA_EXT_CHECK(cuts_rows || !(epilogue.gated || epilogue.activation != Activation::kNone), kOp,
                 "expected activation=None and gated=False where the groups cut the terms of a sum");
  CUDA_EXT_CHECK(!epilogue.gated || columns % 2 == 0, kOp, "expected mat_b of shape (groups, ", a.size(1),
                 ", 2N), [gate, up], with gated=True, got ", shape_string(b));
  return {cuts_rows, offs.size(0), a.size(0), epilogue.gated ? columns / 2 : columns, a.size(1)};
}

GroupedShape check_grouped(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                           const GroupedEpilogue& epilogue, at::ScalarType out_type) {
  check_same_dtype(kOp, "mat_b", b, "mat_a", a);
  check_same_device(kOp, "mat_b", b, "mat_a", a);
  check_given(kOp, "offs", offs);
  check_same_device(kOp, "offs", offs, "mat_a", a);
  CUDA_EXT_CHECK(offs.dim() == 1 && (offs.scalar_type() == at::kInt || offs.scalar_type() == at::kLong), kOp,
                 "expected offs of shape (groups,) and dtype int32 or int64, got ", shape_string(offs), " of ",
                 dtype_name(offs.scalar_type()));
  CUDA_EXT_CHECK(a.dim() == 2 && (b.dim() == 2 || b.dim() == 3), kOp,
                 "expected mat_a (T, K) with mat_b (groups, K, N), or mat_a (M, T) with mat_b (T, N), got ",
                 shape_string(a), " and ", shape_string(b));
  const GroupedShape shape = check_shape(a, b, offs, epilogue);
  if (is_given(bias)) {
    CUDA_EXT_CHECK(shape.cuts_rows, kOp, "expected no bias where the groups cut the terms of a sum");
    CUDA_EXT_CHECK(bias->dim() == 2 && bias->size(0) == shape.groups && bias->size(1) == b.size(-1), kOp,
                   "expected bias of shape (", shape.groups, ", ", b.size(-1), "), got ", shape_string(*bias));
    CUDA_EXT_CHECK(bias->scalar_type() == a.scalar_type() || bias->scalar_type() == out_type, kOp,
                   "expected bias of dtype ", dtype_name(a.scalar_type()), " or ", dtype_name(out_type), ", got ",
                   dtype_name(bias->scalar_type()));
    check_same_device(kOp, "bias", *bias, "mat_a", a);
  }
  return shape;
}

}  // namespace

void check_group_ends(const char* op, const Tensor& ends, int64_t size) {
  const int32_t* const data = ends.const_data_ptr<int32_t>();
  for (int64_t group = 0; group < ends.numel(); ++group) {
    const int64_t before = group == 0 ? 0 : data[group - 1];
    CUDA_EXT_CHECK(data[group] >= before && data[group] <= size, op, "expected offs to be ends that do not decrease, ",
                   "from 0 to at most ", size, ", got ", data[group], " after ", before, " at index ", group);
  }
}

GroupedCall describe_grouped(const char* op, const Tensor& given_a, const Tensor& given_b, const Tensor& offs,
                             const OptionalTensor& bias, const GroupedEpilogue& epilogue, OptionalType out_dtype,
                             bool for_gpu) {
  check_floating(op, "mat_a", given_a);
  const auto type = output_type(op, out_dtype, given_a.scalar_type());
  const GroupedShape shape = check_grouped(given_a, given_b, offs, bias, epilogue, type);
  GroupedCall call{{}, given_a, given_b, offs.to(at::kInt).contiguous(), shape.out(), type};
  if (!for_gpu) {
    check_group_ends(op, call.ends, shape.cuts_rows ? shape.m : shape.k);
  } else {  // rows contiguous along k, or b along n; terms along m and n
    call.a = shape.cuts_rows ? with_contiguous_rows(given_a) : with_contiguous_rows(given_a.t()).t();
    call.b = shape.cuts_rows ? with_unit_stride(given_b) : with_contiguous_rows(given_b);
  }
  GemmParams& params = call.params;
  params.m = shape.m;
  params.n = shape.n;
  params.k = shape.k;
  params.activation = epilogue.activation;
  params.gated = epilogue.gated;
  params.a = matrix(call.a);
  params.b = matrix(call.b);
  params.batch_dims = 1;
  params.batch_sizes[0] = shape.groups;
  if (shape.cuts_rows) params.b.batch_strides[0] = call.b.stride(0);
  if (is_given(bias)) {
    params.bias = matrix(*bias);
    params.bias.batch_strides[0] = bias->stride(0);
  }
  const auto cut = shape.cuts_rows ? Groups::Cut::kRows : Groups::Cut::kTerms;
  params.groups = {cut, static_cast<const int32_t*>(call.ends.const_data_ptr()), shape.groups};
  params.batch_invariant = is_batch_invariant();
  return call;
}

namespace {

GroupedCall describe(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                     const GroupedEpilogue& epilogue, OptionalType out_dtype) {
  check_floating(kOp, "mat_a", a);
  return describe_grouped(kOp, a, b, offs, bias, epilogue, out_dtype, cuda_kernels(kOp, a.device()) != nullptr);
}

void run_grouped(GroupedCall& call, const Tensor& out, const Tensor& preact = {}) {
  if (out.numel() == 0) return;
  if (call.params.groups.count == 0) {
    Tensor(out).zero_();
    if (preact.defined()) Tensor(preact).zero_();
    return;
  }
  call.params.out = output(out);
  if (preact.defined()) call.params.preact_out = output(preact);
  run_gemm(kOp, out, call.params);
}

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                  OptionalType out_dtype, ActivationName activation, bool gated) {
  GroupedCall call = describe(a, b, offs, bias, {parse_activation(kOp, activation), gated}, out_dtype);
  const Tensor out = empty_beside(a, call.sizes, call.type);
  run_grouped(call, out);
  return out;
}

// Also the pre-activation, or an empty tensor if it is not needed.
std::tuple<Tensor, Tensor> grouped_mm_forward(const Tensor& a, const Tensor& b, const Tensor& offs,
                                              const OptionalTensor& bias, OptionalType out_dtype,
                                              ActivationName activation, bool gated) {
  GroupedCall call = describe(a, b, offs, bias, {parse_activation(kOp, activation), gated}, out_dtype);
  const Tensor out = empty_beside(a, call.sizes, call.type);
  if (!needs_preact(call.params.activation, gated, false)) {
    run_grouped(call, out);
    return {out, absent(a, call.type)};
  }
  const Tensor preact = empty_beside(a, {a.size(0), b.size(2)}, call.type);
  run_grouped(call, out, preact);
  return {out, preact};
}

// The gradient of the matrices of all groups, into its slot (ops/gradient_slots.h): slot = alpha * product +
// beta * slot.
void grouped_mm_slot(const Tensor& a, const Tensor& b, const Tensor& offs, const Tensor& slot, double alpha,
                     double beta) {
  check_given(kOp, "weight_slot", slot);
  const auto sum_type = accumulation_type(slot.scalar_type());
  GroupedCall call = describe(a, b, offs, {}, {}, beta == 0 ? slot.scalar_type() : sum_type);
  check_same_device(kOp, "weight_slot", slot, "mat_a", a);
  CUDA_EXT_CHECK(slot.sizes() == at::IntArrayRef(call.sizes) && slot.is_contiguous(), kOp,
                 "expected weight_slot contiguous and of shape ", shape_string(call.sizes), ", got shape ",
                 shape_string(slot), " with strides ", shape_string(slot.strides()));
  call.params.alpha = alpha;
  if (beta == 0) return run_grouped(call, slot);
  const Tensor product = empty_beside(a, call.sizes, sum_type);  // kernels of groups add nothing
  run_grouped(call, product);
  slot.copy_(product.add_(slot, beta));
}

}  // namespace

Tensor call_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                       OptionalType out_dtype) {
  static const auto op = find_op<decltype(grouped_mm)>(CUDA_EXT_OP("grouped_mm"));
  return op.call(a, b, offs, bias, out_dtype, {}, false);
}

namespace {

// (groups, N): the sum of the rows of each group.
Tensor sum_of_groups(const Tensor& rows, const Tensor& offs, at::ScalarType type) {
  const Tensor ones = rows.new_ones_symint({c10::SymInt(1), rows.sym_size(0)});  // in the class of `rows`
  return call_grouped_mm(ones, rows, offs, {}, accumulation_type(rows.scalar_type())).squeeze(1).to(type);
}

}  // namespace

// The autograd node. Its name shows in profiles and as grad_fn, so it is outside of the anonymous namespace.
struct GroupedMmBackward : torch::autograd::Function<GroupedMmBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("GroupedMmBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    auto saved = ctx->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1], &offs = saved[2], &bias = saved[3];
    const Tensor grad = through_epilogue(ctx, std::move(grads[0]), saved).to(a.scalar_type());
    if (b.dim() == 3) {
      if (ctx->needs_input_grad(0)) result[0] = call_grouped_mm(grad, b.transpose(-2, -1), offs);
      if (ctx->needs_input_grad(1)) {
        // In the memory order of b, which is often the transpose of a parameter, whose gradient is then not copied.
        const bool transposed = b.sym_stride(-2).maybe_as_int() == 1 && b.sym_stride(-1).maybe_as_int() != 1;
        result[1] =
            transposed ? call_grouped_mm(grad.t(), a, offs).transpose(-2, -1) : call_grouped_mm(a.t(), grad, offs);
      }
      if (bias.defined() && ctx->needs_input_grad(3)) result[3] = sum_of_groups(grad, offs, bias.scalar_type());
    } else {
      if (ctx->needs_input_grad(0)) result[0] = call_grouped_mm(b, grad.transpose(-2, -1), offs).t();
      if (ctx->needs_input_grad(1)) result[1] = call_grouped_mm(a.t(), grad, offs);
    }
    return result;
  }

  // The gradient at the product, from that at the output. In rows of no group it may be anything: no product of groups
  // reads them.
  static Tensor through_epilogue(AutogradContext* ctx, Tensor grad, variable_list& saved) {
    const ActivationName activation = saved_activation(ctx);
    const bool gated = saved_option<bool>(ctx, "gated");
    if (!gated && !activation.has_value()) return grad;
    Tensor& preact = saved[4];
    if (!preact.defined() || needs_composed_backward(grad)) {
      const Tensor z = call_grouped_mm(saved[0], saved[1], saved[2], optional(saved[3]), grad.scalar_type());
      return hidden_backward(grad, z, parse_activation(kOp, activation), gated);
    }
    const Tensor at_preact = std::get<0>(call_activation_backward(grad, preact, activation, gated, std::nullopt));
    preact.reset();
    release_saved(ctx);
    return at_preact;
  }
};

namespace {

Tensor tangent(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
               const GroupedEpilogue& epilogue, at::ScalarType type) {
  if (epilogue.gated || epilogue.activation != Activation::kNone)
    return tangent_of(hidden_of(call_grouped_mm(a, b, offs, bias, type), epilogue.activation, epilogue.gated));
  Tensor sum;
  const auto add = [&](const Tensor& term) { sum = sum.defined() ? sum + term : term; };
  if (const Tensor t = tangent_of(a); t.defined()) add(call_grouped_mm(t, primal(b), offs, {}, type));
  if (const Tensor t = tangent_of(b); t.defined()) add(call_grouped_mm(primal(a), t, offs, {}, type));
  if (const Tensor t = tangent_of(bias); t.defined())  // the rows of each group, of sums without terms
    add(call_grouped_mm(primal(a).narrow(1, 0, 0), primal(b).narrow(1, 0, 0), offs, t, type));
  return sum;
}

Tensor grouped_mm_autograd(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                           OptionalType out_dtype, ActivationName activation, bool gated) {
  static const auto op = find_op<decltype(grouped_mm)>(CUDA_EXT_OP("grouped_mm"));
  static const auto forward_op = find_op<decltype(grouped_mm_forward)>(CUDA_EXT_OP("grouped_mm_forward"));
  const GroupedEpilogue epilogue{parse_activation(kOp, activation), gated};
  const Derivatives wanted = derivatives_of(a, b, bias);
  const bool saves = gated || activation.has_value();
  auto [out, preact] = call_below_autograd({wanted.reverse && saves, wanted.forward, wanted.composed}, op, forward_op,
                                           a, b, offs, bias, out_dtype, activation, gated);
  if (wanted.reverse) {
    const auto node = make_node<GroupedMmBackward>(a, b, offs, bias);
    save_activation(&node->ctx_, activation);
    save_option(&node->ctx_, "gated", gated);
    const bool output_serves = preact.defined() && !needs_preact(epilogue.activation, gated, false);
    attach_node(node, {a, b, offs, value_or_empty(bias), output_serves ? out : preact}, out);
  }
  if (wanted.forward) set_tangent(out, tangent(a, b, offs, bias, epilogue, out.scalar_type()));
  return out;
}

template <c10::DeviceType device>
Tensor grouped_mm_autocast(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                           OptionalType out_dtype, ActivationName activation, bool gated) {
  static const auto op = find_op<decltype(grouped_mm)>(CUDA_EXT_OP("grouped_mm"));
  const Autocast cast(device);
  return op.call(cast(a), cast(b), offs, cast(bias), out_dtype, activation, gated);
}

}  // namespace

#define GROUPED_MM_ARGUMENTS                                                                     \
  "(Tensor mat_a, Tensor mat_b, Tensor offs, Tensor? bias=None, *, ScalarType? out_dtype=None, " \
  "str? activation=None, bool gated=False)"

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("grouped_mm" GROUPED_MM_ARGUMENTS " -> Tensor", tags);
  m.def("grouped_mm_forward" GROUPED_MM_ARGUMENTS " -> (Tensor out, Tensor preact)", tags);
  m.def(
      "grouped_mm.slot(Tensor mat_a, Tensor mat_b, Tensor offs, *, Tensor(a!) weight_slot, float slot_alpha, "
      "float slot_beta) -> ()",
      tags);
  register_layout_errors(m, {"grouped_mm", "grouped_mm_forward", "grouped_mm.slot"});
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) {
  m.impl("grouped_mm", grouped_mm);
  m.impl("grouped_mm_forward", grouped_mm_forward);
  m.impl("grouped_mm.slot", grouped_mm_slot);
}
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) {
  m.impl("grouped_mm", grouped_mm);
  m.impl("grouped_mm_forward", grouped_mm_forward);
  m.impl("grouped_mm.slot", grouped_mm_slot);
}
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("grouped_mm", grouped_mm_autograd);
  m.impl("grouped_mm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("grouped_mm.slot", torch::CppFunction::makeFallthrough());  // called in backward
}
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) {
  m.impl("grouped_mm", grouped_mm_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) {
  m.impl("grouped_mm", grouped_mm_autocast<c10::DeviceType::CUDA>);
}

}  // namespace cuda_ext
