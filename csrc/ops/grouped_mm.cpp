// grouped_mm: products of groups of rows, or of terms, with a matrix of each group. Its derivatives are grouped
// products, too, so that all orders and modes of autograd are the op itself. With an activation or a gate forward is
// grouped_mm_forward, which also returns the pre-activation, as in ops/gemm.cpp.
#include "ops/torch_headers.h"

#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/new_ones.h>
#include <ATen/ops/where.h>

#include <limits>

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

// (T,): the rows of a tensor at these indices, 0 where there is none, on a GPU.
Tensor rows_at(const Tensor& tensor, const Tensor& indices) {
  const int64_t rows = tensor.size(0);
  if (rows == 0) return at::zeros({indices.size(0), tensor.size(1)}, tensor.options());
  const Tensor exists = indices.ge(0).logical_and_(indices.lt(rows)).unsqueeze(1);
  return at::where(exists, tensor.index_select(0, indices.clamp(0, rows - 1)), tensor.new_zeros({}));
}

struct GroupedShape {
  bool cuts_rows;
  int64_t groups, m, n, k;  // n: of the output
  Sizes out() const { return cuts_rows ? Sizes{m, n} : Sizes{groups, m, n}; }
};

void check_indices(const Tensor& indices, const Tensor& a, const GroupedShape& shape) {
  check_same_device(kOp, "indices", indices, "mat_a", a);
  CUDA_EXT_CHECK(indices.dim() == 1 && (indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong), kOp,
                 "expected indices of shape (T,) and dtype int32 or int64, got ", shape_string(indices), " of ",
                 dtype_name(indices.scalar_type()));
  CUDA_EXT_CHECK(shape.cuts_rows || indices.size(0) == shape.k, kOp, "expected ", shape.k,
                 " indices, one for each term of mat_a ", shape_string(a), ", got ", indices.size(0));
}

// On the CPU: those of the rows or terms of the groups.
void check_values_of_indices(const Tensor& indices, const Tensor& ends, int64_t rows) {
  const int64_t count = ends.numel() == 0 ? 0 : ends.const_data_ptr<int32_t>()[ends.numel() - 1];
  const Tensor wide = indices.to(at::kLong).contiguous();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = wide.const_data_ptr<int64_t>()[i];
    CUDA_EXT_CHECK(index >= 0 && index < rows, kOp, "expected indices from 0 to ", rows - 1, ", of the ", rows,
                   " rows to gather from, got ", index, " at index ", i);
  }
}

// Checks the indices, mat_b and the options of the epilogue.
GroupedShape check_shape(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& indices,
                         const GroupedEpilogue& epilogue) {
  const int64_t columns = b.size(-1);
  GroupedShape shape{b.dim() == 3, offs.size(0), a.size(0), epilogue.gated ? columns / 2 : columns, a.size(1)};
  if (is_given(indices)) {
    check_indices(*indices, a, shape);
    if (shape.cuts_rows) shape.m = indices->size(0);
  }
  const bool gathers_b = is_given(indices) && !shape.cuts_rows;
  CUDA_EXT_CHECK(gathers_b || b.size(-2) == shape.k, kOp, "expected mat_b of shape (",
                 shape.cuts_rows ? "groups, " : "", shape.k, ", N) to match mat_a ", shape_string(a), ", got ",
                 shape_string(b));
  CUDA_EXT_CHECK(!shape.cuts_rows || b.size(0) == shape.groups, kOp, "expected mat_b of ", shape.groups,
                 " matrices, one for each element of offs, got ", shape_string(b));
  CUDA_EXT_CHECK(shape.cuts_rows || !(epilogue.gated || epilogue.activation != Activation::kNone), kOp,
                 "expected activation=None and gated=False where the groups cut the terms of a sum");
  CUDA_EXT_CHECK(!epilogue.gated || columns % 2 == 0, kOp, "expected mat_b of shape (groups, ", shape.k,
                 ", 2N), [gate, up], with gated=True, got ", shape_string(b));
  return shape;
}

GroupedShape check_grouped(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                           const OptionalTensor& indices, const GroupedEpilogue& epilogue, at::ScalarType out_type) {
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
  const GroupedShape shape = check_shape(a, b, offs, indices, epilogue);
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

Tensor to_int32(const Tensor& numbers) {
  using Limits = std::numeric_limits<int32_t>;
  const bool is_wide = numbers.scalar_type() == at::kLong;
  return (is_wide ? numbers.clamp(Limits::min(), Limits::max()) : numbers).to(at::kInt).contiguous();
}

void check_group_ends(const char* op, const Tensor& ends, int64_t size) {
  const int32_t* const data = ends.const_data_ptr<int32_t>();
  for (int64_t group = 0; group < ends.numel(); ++group) {
    const int64_t before = group == 0 ? 0 : data[group - 1];
    CUDA_EXT_CHECK(data[group] >= before && data[group] <= size, op, "expected offs to be ends that do not decrease, ",
                   "from 0 to at most ", size, ", got ", data[group], " after ", before, " at index ", group);
  }
}

GroupedCall describe_grouped(const char* op, const Tensor& given_a, const Tensor& given_b, const Tensor& offs,
                             const OptionalTensor& bias, const OptionalTensor& indices, const GroupedEpilogue& epilogue,
                             OptionalType out_dtype, bool for_gpu) {
  check_floating(op, "mat_a", given_a);
  const auto type = output_type(op, out_dtype, given_a.scalar_type());
  const GroupedShape shape = check_grouped(given_a, given_b, offs, bias, indices, epilogue, type);
  GroupedCall call{{}, given_a, given_b, to_int32(offs), {}, shape.out(), type};
  Tensor& gathered = shape.cuts_rows ? call.a : call.b;
  if (is_given(indices)) call.indices = to_int32(*indices);
  if (!for_gpu) {
    check_group_ends(op, call.ends, shape.cuts_rows ? shape.m : shape.k);
    if (is_given(indices)) check_values_of_indices(*indices, call.ends, gathered.size(0));
  } else {  // rows contiguous along k, or b along n; terms along m and n
    if (is_given(indices) && gathered.element_size() > 2) {  // kernels gather 16-bit rows
      gathered = rows_at(gathered, *indices);
      call.indices = Tensor();
    }
    call.a = shape.cuts_rows ? with_contiguous_rows(call.a) : with_contiguous_rows(call.a.t()).t();
    call.b = shape.cuts_rows ? with_unit_stride(call.b) : with_contiguous_rows(call.b);
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
  if (call.indices.defined()) {
    params.groups.indices = static_cast<const int32_t*>(call.indices.const_data_ptr());
    params.groups.source_rows = gathered.size(0);
  }
  params.batch_invariant = is_batch_invariant();
  return call;
}

namespace {

GroupedCall describe(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                     const OptionalTensor& indices, const GroupedEpilogue& epilogue, OptionalType out_dtype) {
  check_floating(kOp, "mat_a", a);
  return describe_grouped(kOp, a, b, offs, bias, indices, epilogue, out_dtype,
                          cuda_kernels(kOp, a.device()) != nullptr);
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
                  const OptionalTensor& indices, OptionalType out_dtype, ActivationName activation, bool gated) {
  GroupedCall call = describe(a, b, offs, bias, indices, {parse_activation(kOp, activation), gated}, out_dtype);
  const Tensor out = empty_beside(a, call.sizes, call.type);
  run_grouped(call, out);
  return out;
}

// Also the pre-activation, or an empty tensor if it is not needed.
std::tuple<Tensor, Tensor> grouped_mm_forward(const Tensor& a, const Tensor& b, const Tensor& offs,
                                              const OptionalTensor& bias, const OptionalTensor& indices,
                                              OptionalType out_dtype, ActivationName activation, bool gated) {
  GroupedCall call = describe(a, b, offs, bias, indices, {parse_activation(kOp, activation), gated}, out_dtype);
  const Tensor out = empty_beside(a, call.sizes, call.type);
  if (!needs_preact(call.params.activation, gated, false)) {
    run_grouped(call, out);
    return {out, absent(a, call.type)};
  }
  const Tensor preact = empty_beside(a, {call.params.m, b.size(2)}, call.type);
  run_grouped(call, out, preact);
  return {out, preact};
}

// The gradient of the matrices of all groups, into its slot (ops/gradient_slots.h): slot = alpha * product +
// beta * slot.
void grouped_mm_slot(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& indices,
                     const Tensor& slot, double alpha, double beta) {
  check_given(kOp, "weight_slot", slot);
  const auto sum_type = accumulation_type(slot.scalar_type());
  GroupedCall call = describe(a, b, offs, {}, indices, {}, beta == 0 ? slot.scalar_type() : sum_type);
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
                       OptionalType out_dtype, const OptionalTensor& indices) {
  static const auto op = find_op<decltype(grouped_mm)>(CUDA_EXT_OP("grouped_mm"));
  return op.call(a, b, offs, bias, indices, out_dtype, {}, false);
}

namespace {

// (groups, N): the sum of the rows of each group.
Tensor sum_of_groups(const Tensor& rows, const Tensor& offs, at::ScalarType type) {
  const Tensor ones = rows.new_ones_symint({c10::SymInt(1), rows.sym_size(0)});  // in the class of `rows`
  return call_grouped_mm(ones, rows, offs, {}, accumulation_type(rows.scalar_type())).squeeze(1).to(type);
}

// (sources, K): for each source the sum of the rows with its index, in their order; of rows (T, K), and indices (T,).
Tensor sum_by_index(const Tensor& rows, const Tensor& indices, const c10::SymInt& sources, at::ScalarType type) {
  const c10::Scalar last(sources);  // one more, of rows that have none
  const Tensor known = indices.masked_fill(indices.lt(0).logical_or(indices.ge(last)), last);
  return at::embedding_dense_backward_symint(rows, known, sources + 1, -1, false).narrow_symint(0, 0, sources).to(type);
}

}  // namespace

// The autograd node. Its name shows in profiles and as grad_fn, so it is outside of the anonymous namespace.
struct GroupedMmBackward : torch::autograd::Function<GroupedMmBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("GroupedMmBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    variable_list result(5);
    if (!grads[0].defined()) return result;
    auto saved = ctx->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1], &offs = saved[2], &bias = saved[3], &indices = saved[4];
    const auto type = a.scalar_type();
    const Tensor grad = through_epilogue(ctx, std::move(grads[0]), saved).to(type);
    const bool gathers = indices.defined();
    const OptionalType type_of_rows = gathers ? OptionalType(accumulation_type(type)) : OptionalType();
    // Of rows that were gathered, their sum where they came from.
    const auto of_source = [&](const Tensor& rows, const Tensor& source) {
      return gathers ? sum_by_index(rows, indices, source.sym_size(0), type) : rows;
    };
    if (b.dim() == 3) {
      if (ctx->needs_input_grad(0))
        result[0] = of_source(call_grouped_mm(grad, b.transpose(-2, -1), offs, {}, type_of_rows), a);
      if (ctx->needs_input_grad(1)) {
        // In the memory order of b, which is often the transpose of a parameter, whose gradient is then not copied.
        // Rows of a that are gathered have to be the right operand.
        const bool transposed =
            gathers || (b.sym_stride(-2).maybe_as_int() == 1 && b.sym_stride(-1).maybe_as_int() != 1);
        result[1] = transposed ? call_grouped_mm(grad.t(), a, offs, {}, {}, indices).transpose(-2, -1)
                               : call_grouped_mm(a.t(), grad, offs);
      }
      if (bias.defined() && ctx->needs_input_grad(3)) result[3] = sum_of_groups(grad, offs, bias.scalar_type());
    } else {
      if (ctx->needs_input_grad(0)) result[0] = call_grouped_mm(b, grad.transpose(-2, -1), offs, {}, {}, indices).t();
      if (ctx->needs_input_grad(1)) result[1] = of_source(call_grouped_mm(a.t(), grad, offs, {}, type_of_rows), b);
    }
    return result;
  }

  // The gradient at the product, from that at the output. In rows of no group it may be anything: no product of groups
  // reads them.
  static Tensor through_epilogue(AutogradContext* ctx, Tensor grad, variable_list& saved) {
    const ActivationName activation = saved_activation(ctx);
    const bool gated = saved_option<bool>(ctx, "gated");
    if (!gated && !activation.has_value()) return grad;
    Tensor& preact = saved[5];
    if (!preact.defined() || needs_composed_backward(grad)) {
      const Tensor z =
          call_grouped_mm(saved[0], saved[1], saved[2], optional(saved[3]), grad.scalar_type(), optional(saved[4]));
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
               const OptionalTensor& indices, const GroupedEpilogue& epilogue, at::ScalarType type) {
  if (epilogue.gated || epilogue.activation != Activation::kNone)
    return tangent_of(hidden_of(call_grouped_mm(a, b, offs, bias, type, indices), epilogue.activation, epilogue.gated));
  Tensor sum;
  const auto add = [&](const Tensor& term) { sum = sum.defined() ? sum + term : term; };
  if (const Tensor t = tangent_of(a); t.defined()) add(call_grouped_mm(t, primal(b), offs, {}, type, indices));
  if (const Tensor t = tangent_of(b); t.defined()) add(call_grouped_mm(primal(a), t, offs, {}, type, indices));
  if (const Tensor t = tangent_of(bias); t.defined())  // the rows of each group, of sums without terms
    add(call_grouped_mm(primal(a).narrow(1, 0, 0), primal(b).narrow(1, 0, 0), offs, t, type, indices));
  return sum;
}

Tensor grouped_mm_autograd(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                           const OptionalTensor& indices, OptionalType out_dtype, ActivationName activation,
                           bool gated) {
  static const auto op = find_op<decltype(grouped_mm)>(CUDA_EXT_OP("grouped_mm"));
  static const auto forward_op = find_op<decltype(grouped_mm_forward)>(CUDA_EXT_OP("grouped_mm_forward"));
  const GroupedEpilogue epilogue{parse_activation(kOp, activation), gated};
  const Derivatives wanted = derivatives_of(a, b, bias);
  const bool saves = gated || activation.has_value();
  auto [out, preact] = call_below_autograd({wanted.reverse && saves, wanted.forward, wanted.composed}, op, forward_op,
                                           a, b, offs, bias, indices, out_dtype, activation, gated);
  if (wanted.reverse) {
    const auto node = make_node<GroupedMmBackward>(a, b, offs, bias, indices);
    save_activation(&node->ctx_, activation);
    save_option(&node->ctx_, "gated", gated);
    const bool output_serves = preact.defined() && !needs_preact(epilogue.activation, gated, false);
    attach_node(node, {a, b, offs, value_or_empty(bias), value_or_empty(indices), output_serves ? out : preact}, out);
  }
  if (wanted.forward) set_tangent(out, tangent(a, b, offs, bias, indices, epilogue, out.scalar_type()));
  return out;
}

template <c10::DeviceType device>
Tensor grouped_mm_autocast(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias,
                           const OptionalTensor& indices, OptionalType out_dtype, ActivationName activation,
                           bool gated) {
  static const auto op = find_op<decltype(grouped_mm)>(CUDA_EXT_OP("grouped_mm"));
  const Autocast cast(device);
  return op.call(cast(a), cast(b), offs, cast(bias), indices, out_dtype, activation, gated);
}

}  // namespace

#define GROUPED_MM_ARGUMENTS                                                                                           \
  "(Tensor mat_a, Tensor mat_b, Tensor offs, Tensor? bias=None, Tensor? indices=None, *, ScalarType? out_dtype=None, " \
  "str? activation=None, bool gated=False)"

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("grouped_mm" GROUPED_MM_ARGUMENTS " -> Tensor", tags);
  m.def("grouped_mm_forward" GROUPED_MM_ARGUMENTS " -> (Tensor out, Tensor preact)", tags);
  m.def(
      "grouped_mm.slot(Tensor mat_a, Tensor mat_b, Tensor offs, Tensor? indices=None, *, Tensor(a!) weight_slot, "
      "float slot_alpha, float slot_beta) -> ()",
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
