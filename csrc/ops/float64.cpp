#include "ops/torch_headers.h"

#include "ops/float64.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "gemm/grouped_gemm.h"
#include "ops/gemm_composed.h"

namespace cuda_ext {
namespace {

using Numbers = std::vector<int64_t>;

at::ScalarType type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16: return at::kHalf;
    case Dtype::kBFloat16: return at::kBFloat16;
    case Dtype::kFloat64: return at::kDouble;
    default: return at::kFloat;
  }
}

Tensor view(const void* data, const Numbers& sizes, const Numbers& strides, Dtype dtype, at::Device device) {
  const auto options = at::TensorOptions(device).dtype(type_of(dtype));
  return data == nullptr ? at::zeros(sizes, options) : at::from_blob(const_cast<void*>(data), sizes, strides, options);
}

// Views of the matrices of a product, as tensors (batch, ..., rows, columns).
class Matrices {
 public:
  Matrices(const GemmParams& params, at::Device device) : p_(params), device_(device) {
    for (int d = p_.batch_dims - 1; d >= 0; --d) batch_.push_back(p_.batch_sizes[d]);
  }

  Tensor of(const Operand& x, int64_t rows, int64_t columns, const int64_t* reduced_strides = nullptr) const {
    Numbers sizes = batch_, strides;
    for (int d = p_.batch_dims - 1; d >= 0; --d) strides.push_back(x.batch_strides[d]);
    for (int d = p_.reduced_dims - 1; reduced_strides != nullptr && d >= 0; --d) {
      sizes.push_back(p_.reduced_sizes[d]);
      strides.push_back(reduced_strides[d]);
    }
    sizes.insert(sizes.end(), {rows, columns});
    strides.insert(strides.end(), {x.row_stride, x.column_stride});
    return view(x.data, sizes, strides, x.dtype, device_);
  }
  Tensor of(const Output& x, int64_t columns) const {
    Numbers sizes = batch_;
    sizes.insert(sizes.end(), {p_.m, columns});
    const auto strides = c10::contiguous_strides(sizes);
    return view(x.data, sizes, Numbers(strides.begin(), strides.end()), x.dtype, device_);
  }
  // (n,)
  Tensor row(const Operand& x, int64_t columns) const {
    return view(x.data, {columns}, {x.column_stride}, x.dtype, device_);
  }
  Tensor row(const Output& x, int64_t columns) const { return view(x.data, {columns}, {1}, x.dtype, device_); }

 private:
  const GemmParams& p_;
  at::Device device_;
  Numbers batch_;
};

// Views of a bucket and of its tensors, and the statistics of what is stored.
class Bucket {
 public:
  Bucket(const BucketParams& params, at::Device device, const Tensor& stats)
      : p_(params), device_(device), stats_(stats) {
    if (stats_.numel() > 0) stats_.zero_();
  }

  Tensor part(int64_t begin, int64_t end) const {
    char* const data = static_cast<char*>(p_.bucket) + begin * size_of(p_.bucket_dtype);
    return view(data, {end - begin}, {1}, p_.bucket_dtype, device_);
  }
  Tensor part(const BucketEntry& entry) const { return part(entry.begin, entry.begin + entry.count); }
  Tensor tensor(const BucketEntry& entry) const { return view(entry.data, {entry.count}, {1}, entry.dtype, device_); }

  void store(const Tensor& from, const Tensor& to) const {
    to.copy_(from.to(at::kDouble) * p_.scale);
    count(to);
  }
  void count(const Tensor& stored) const {
    if (stats_.numel() == 0) return;
    stats_.select(0, 0).add_(stored.to(at::kDouble).square().sum());
    stats_.select(0, 1).logical_or_(at::isfinite(stored).all().logical_not());
  }

 private:
  const BucketParams& p_;
  at::Device device_;
  Tensor stats_;
};

}  // namespace

void gemm_in_float64(const GemmParams& p, at::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(device);
  if (p.groups.cut != Groups::Cut::kNone) {
    const auto options = at::TensorOptions(device).dtype(at::kInt);
    const Tensor ends = at::from_blob(const_cast<int32_t*>(p.groups.ends), {p.groups.count}, options).cpu();
    for (int64_t group = 0; group < number_of_products(p); ++group)
      if (const GemmParams product = product_of_group(p, ends.const_data_ptr<int32_t>(), group); product.m > 0)
        gemm_in_float64(product, device);
    return;
  }
  const Matrices matrices(p, device);
  const bool is_backward = p.preact.data != nullptr;
  const int64_t width = p.gated ? 2 * p.n : p.n;  // of the pre-activation
  Tensor z = at::matmul(matrices.of(p.a, p.m, p.k, p.reduced_strides_a),
                        matrices.of(p.b, p.k, is_backward ? p.n : width, p.reduced_strides_b));
  for (int d = 0; d < p.reduced_dims; ++d) z = z.sum(-3);
  z = z * p.alpha;
  if (is_backward) {
    const Tensor preact = matrices.of(p.preact, p.m, width);
    const Tensor grad = hidden_backward(z, preact, p.activation, p.gated);
    if (p.hidden.data != nullptr) matrices.of(p.hidden, p.n).copy_(hidden_of(preact, p.activation, p.gated));
    if (p.bias_grad.data != nullptr) matrices.row(p.bias_grad, width).copy_(grad.sum(0));
    matrices.of(p.out, width).copy_(grad);
    return;
  }
  if (p.c.data != nullptr) z = z + p.beta * matrices.of(p.c, p.m, p.n);
  if (p.bias.data != nullptr) z = z + matrices.row(p.bias, width);
  if (p.preact_out.data != nullptr) matrices.of(p.preact_out, width).copy_(z);
  Tensor out = hidden_of(z, p.activation, p.gated);
  if (p.residual.data != nullptr) out = out + matrices.of(p.residual, p.m, p.n);
  matrices.of(p.out, p.n).copy_(out);
}

void activation_grad_in_float64(const ActivationGradParams& p, at::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(device);
  GemmParams shape;
  shape.m = p.rows;
  const Matrices matrices(shape, device);
  const int64_t width = p.gated ? 2 * p.n : p.n;
  Tensor grad = matrices.of(p.grad_out, p.rows, p.n).to(at::kDouble);
  if (p.grad_preact.data != nullptr) {
    grad = hidden_backward(grad, matrices.of(p.preact, p.rows, width).to(at::kDouble), p.activation, p.gated);
    matrices.of(p.grad_preact, width).copy_(grad);
  }
  if (p.bias_grad.data != nullptr) matrices.row(p.bias_grad, width).copy_(grad.sum(0));
}

void bucket_pack_in_float64(const BucketParams& p, at::Device device, const Tensor& stats) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Bucket bucket(p, device, stats);
  int64_t end = 0;  // of what is filled
  for (const BucketEntry* entry = p.entries; entry != p.entries + p.num_entries; ++entry) {
    bucket.part(end, entry->begin).zero_();
    end = entry->begin + entry->count;
    if (entry->data != nullptr) bucket.store(bucket.tensor(*entry), bucket.part(*entry));
  }
  bucket.part(end, p.count).zero_();
}

void bucket_unpack_in_float64(const BucketParams& p, at::Device device, const Tensor& stats) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Bucket bucket(p, device, stats);
  for (const BucketEntry* entry = p.entries; entry != p.entries + p.num_entries; ++entry)
    bucket.store(bucket.part(*entry), bucket.tensor(*entry));
}

void bucket_stats_in_float64(const BucketParams& p, at::Device device, const Tensor& stats) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Bucket bucket(p, device, stats);
  for (const BucketEntry* entry = p.entries; entry != p.entries + p.num_entries; ++entry)
    bucket.count(bucket.tensor(*entry));
}

}  // namespace cuda_ext
