// Bucket ops: schemas, checks and dispatch. They move gradients and are not differentiable.
#include "ops/torch_headers.h"

#include "bucket/bucket.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/backend.h"
#include "ops/float64.h"

namespace cuda_ext {

namespace {

constexpr const char* kPack = "bucket_pack";
constexpr const char* kUnpack = "bucket_unpack";
constexpr const char* kStats = "bucket_stats";

constexpr const char* kNeedsNoGradient =
    " to need no gradient, because the op has none, got requires_grad=True; call it under torch.no_grad()";

constexpr const char* kNeedsNoTangent =
    " without a forward-mode tangent, because the op has no derivative, got one from torch.func.jvp or "
    "torch.autograd.forward_ad; call it on the primal";

// Whether two elements of the tensor share memory.
bool overlaps_itself(const Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.is_non_overlapping_and_dense()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.size(i) > 1) dims.emplace_back(tensor.stride(i), tensor.size(i));
  std::sort(dims.begin(), dims.end());
  bool nested = true;  // each stride is larger than the extent of all smaller ones
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride == 0) return true;
    nested = nested && stride > reach;
    reach += stride * (size - 1);
  }
  if (nested) return false;
  if (tensor.numel() > reach + 1) return true;
  // Interleaved strides are rare: check every element.
  std::vector<bool> taken(reach + 1);
  for (int64_t n = 0; n < tensor.numel(); ++n) {
    int64_t offset = 0, rest = n;
    for (const auto& [stride, size] : dims) {
      offset += rest % size * stride;
      rest /= size;
    }
    if (taken[offset]) return true;
    taken[offset] = true;
  }
  return false;
}

// Runs at the Autograd key, because a sparse or meta tensor would dispatch to another backend, and again in the
// kernels, because inference mode skips the Autograd key.
void check_tensors(const char* op, at::TensorList tensors, at::Device device) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    CUDA_EXT_CHECK(tensor.layout() == at::kStrided, op, "expected tensors[", i, "] with a dense layout, got ",
                   tensor.layout(), "; convert it with .to_dense()");
    CUDA_EXT_CHECK(is_floating(tensor.scalar_type()), op, "expected tensors[", i,
                   "] of dtype float32, float16, bfloat16 or float64, got ", dtype_name(tensor.scalar_type()),
                   "; convert it with .to()");
    CUDA_EXT_CHECK(tensor.device() == device, op, "expected tensors[", i, "] on device ", device, ", got ",
                   tensor.device(), "; move it with .to()");
    CUDA_EXT_CHECK(!any_requires_grad(tensor), op, "expected tensors[", i, "]", kNeedsNoGradient);
    CUDA_EXT_CHECK(!any_has_tangent(tensor), op, "expected tensors[", i, "]", kNeedsNoTangent);
  }
}

void check_bucket(const char* op, at::TensorList tensors, const Tensor& bucket, at::IntArrayRef offsets, double scale) {
  check_given(op, "bucket", bucket);
  CUDA_EXT_CHECK(bucket.dim() == 1 && bucket.is_contiguous(), op,
                 "expected bucket of shape (N,) and contiguous, got shape ", shape_string(bucket), " with strides ",
                 shape_string(bucket.strides()));
  check_floating(op, "bucket", bucket);
  check_tensors(op, tensors, bucket.device());
  CUDA_EXT_CHECK(offsets.size() == tensors.size(), op, "expected one offset for each of ", tensors.size(),
                 " tensors, got ", offsets.size());
  CUDA_EXT_CHECK(std::isfinite(scale), op, "expected a finite scale, got ", scale);
  int64_t end = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    CUDA_EXT_CHECK(offsets[i] >= end, op, "expected offsets[", i, "] >= ", end,
                   ", where the tensor before it ends, got ", offsets[i], "; sort the tensors by offset");
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    end = offsets[i] + std::min(tensors[i].numel(), kMost - offsets[i]);
    CUDA_EXT_CHECK(end <= bucket.numel(), op, "expected bucket to hold tensors[", i, "] at elements ", offsets[i],
                   " to ", end, ", got shape ", shape_string(bucket));
  }
}

// A tensor may overlap the bucket only exactly at its offset: otherwise reads and writes would race.
void check_no_overlap(const char* op, size_t i, const Tensor& tensor, const Tensor& bucket, int64_t offset) {
  if (tensor.numel() == 0) return;
  const char* const data = static_cast<const char*>(tensor.const_data_ptr());
  const char* const begin = static_cast<const char*>(bucket.const_data_ptr());
  const char* const target = begin + offset * int64_t(bucket.element_size());
  if (data == target && tensor.scalar_type() == bucket.scalar_type()) return;
  CUDA_EXT_CHECK(data >= begin + bucket.nbytes() || data + tensor.nbytes() <= begin, op, "expected tensors[", i,
                 "] either outside the memory of bucket or at element ", offset,
                 " of it, where its values go, got a tensor that overlaps it elsewhere; clone it");
}

// By tensor, whether it is in `kept`: it is already at its offset in the bucket, and is not copied.
std::vector<bool> check_kept(at::TensorList tensors, const Tensor& bucket, at::IntArrayRef offsets,
                             at::IntArrayRef kept) {
  std::vector<bool> is_kept(tensors.size());
  const char* const begin = static_cast<const char*>(bucket.const_data_ptr());
  for (const int64_t i : kept) {
    CUDA_EXT_CHECK(i >= 0 && i < int64_t(tensors.size()), kPack, "expected kept to hold indices of the ",
                   tensors.size(), " tensors, got ", i);
    const Tensor& tensor = tensors[i];
    const bool in_place = tensor.scalar_type() == bucket.scalar_type() && tensor.is_contiguous() &&
                          tensor.const_data_ptr() == begin + offsets[i] * int64_t(bucket.element_size());
    CUDA_EXT_CHECK(in_place || tensor.numel() == 0, kPack, "expected tensors[", i,
                   "], which is in kept, to be a contiguous view of bucket at element ", offsets[i],
                   " of it, got a tensor elsewhere; leave it out of kept, and it will be copied there");
    is_kept[i] = true;
  }
  return is_kept;
}

BucketEntry read_entry(const Tensor& contiguous, int64_t begin) {
  void* const data = const_cast<void*>(contiguous.const_data_ptr());
  return {data, begin, contiguous.numel(), to_dtype(contiguous.scalar_type())};
}
BucketEntry write_entry(const Tensor& contiguous, int64_t begin) {
  return {contiguous.mutable_data_ptr(), begin, contiguous.numel(), to_dtype(contiguous.scalar_type())};
}

// The kernels of an op.
struct Kernels {
  const char* op;
  void (*cpu)(const BucketParams&);
  void (*CudaKernels::*cuda)(const BucketParams&, float* stats, const AllocateWorkspace&, void* stream);
  void (*cuda_float64)(const BucketParams&, at::Device, const Tensor& stats);
};
constexpr Kernels kPackKernels{kPack, launch_bucket_pack, &CudaKernels::bucket_pack, bucket_pack_in_float64};
constexpr Kernels kUnpackKernels{kUnpack, launch_bucket_unpack, &CudaKernels::bucket_unpack, bucket_unpack_in_float64};
constexpr Kernels kStatsKernels{kStats, launch_bucket_stats, &CudaKernels::bucket_stats, bucket_stats_in_float64};

// Returns the statistics, (2,), in the accumulation type of the bucket; (0,) if they are not wanted.
Tensor run(const Kernels& kernels, const std::vector<BucketEntry>& entries, BucketEntry bucket, double scale,
           at::Device device, bool wants_stats = true) {
  const bool is_double = bucket.dtype == Dtype::kFloat64;
  const Tensor out = empty_on(device, {wants_stats ? 2 : 0}, is_double ? at::kDouble : at::kFloat);
  BucketStats stats;
  const BucketParams params{entries.data(), int64_t(entries.size()), bucket.data, bucket.count, bucket.dtype, scale,
                            &stats};
  const CudaKernels* cuda = cuda_kernels(kernels.op, device);
  if (cuda != nullptr) {
    LaunchScope scope(device);
    const auto has_float64 = [](const BucketEntry& entry) { return entry.dtype == Dtype::kFloat64; };
    if (is_double || std::any_of(entries.begin(), entries.end(), has_float64)) {
      kernels.cuda_float64(params, device, out);
      return out;
    }
    float* const target = wants_stats ? out.mutable_data_ptr<float>() : nullptr;
    (cuda->*kernels.cuda)(params, target, scope.allocator(), scope.stream());
    return out;
  }
  kernels.cpu(params);
  if (!wants_stats) return out;
  const auto write = [&](auto* p) {
    using T = std::remove_pointer_t<decltype(p)>;
    p[0] = T(stats.squares);
    p[1] = T(stats.nonfinite);
  };
  is_double ? write(out.mutable_data_ptr<double>()) : write(out.mutable_data_ptr<float>());
  return out;
}

Tensor pack(at::TensorList tensors, const Tensor& bucket, at::IntArrayRef offsets, double scale, at::IntArrayRef kept,
            bool wants_stats) {
  check_bucket(kPack, tensors, bucket, offsets, scale);
  const std::vector<bool> is_kept = check_kept(tensors, bucket, offsets, kept);
  const BucketEntry target = write_entry(bucket, 0);
  std::vector<Tensor> copies;  // keeps copies alive until the launch
  std::vector<BucketEntry> entries;
  entries.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (is_kept[i]) {
      entries.push_back({nullptr, offsets[i], tensors[i].numel(), target.dtype});
      continue;
    }
    const bool contiguous = tensors[i].is_contiguous();
    if (!contiguous) copies.push_back(tensors[i].contiguous());
    const Tensor& source = contiguous ? tensors[i] : copies.back();
    check_no_overlap(kPack, i, source, bucket, offsets[i]);
    entries.push_back(read_entry(source, offsets[i]));
  }
  return run(kPackKernels, entries, target, scale, bucket.device(), wants_stats);
}

Tensor unpack(const Tensor& bucket, at::TensorList tensors, at::IntArrayRef offsets, double scale) {
  check_bucket(kUnpack, tensors, bucket, offsets, scale);
  std::vector<std::pair<size_t, Tensor>> copies;
  std::vector<BucketEntry> entries;
  entries.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    CUDA_EXT_CHECK(!overlaps_itself(tensors[i]), kUnpack, "expected tensors[", i,
                   "] whose elements do not share memory, got shape ", shape_string(tensors[i]), " with strides ",
                   shape_string(tensors[i].strides()), "; clone it");
    const bool contiguous = tensors[i].is_contiguous();
    if (!contiguous) copies.emplace_back(i, at::empty_like(tensors[i], at::MemoryFormat::Contiguous));
    const Tensor& target = contiguous ? tensors[i] : copies.back().second;
    check_no_overlap(kUnpack, i, target, bucket, offsets[i]);
    entries.push_back(write_entry(target, offsets[i]));
  }
  const Tensor stats = run(kUnpackKernels, entries, read_entry(bucket, 0), scale, bucket.device());
  for (const auto& [i, copy] : copies) tensors[i].copy_(copy);
  return stats;
}

Tensor stats(at::TensorList tensors) {
  check_tensors(kStats, tensors, tensors[0].device());
  std::vector<Tensor> copies;
  std::vector<BucketEntry> entries;
  entries.reserve(tensors.size());
  BucketEntry whole{nullptr, 0, 0, Dtype::kFloat32};  // a bucket without memory: its size, and the dtype of the result
  for (const Tensor& tensor : tensors) {
    // Statistics do not depend on the order of the elements, so any dense layout is read in place.
    const bool dense = tensor.is_non_overlapping_and_dense();
    if (!dense) copies.push_back(tensor.contiguous());
    entries.push_back(read_entry(dense ? tensor : copies.back(), whole.count));
    whole.count += tensor.numel();
    if (tensor.scalar_type() == at::kDouble) whole.dtype = Dtype::kFloat64;
  }
  return run(kStatsKernels, entries, whole, 1.0, tensors[0].device());
}

// Autograd key: rejects tensors that need gradients, and increments the version of the tensors that are written.

void record_write(const Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void check_for_autograd(const char* op, at::TensorList tensors, const Tensor& bucket) {
  check_given(op, "bucket", bucket);
  check_tensors(op, tensors, bucket.device());
  CUDA_EXT_CHECK(!any_requires_grad(bucket), op, "expected bucket", kNeedsNoGradient);
  CUDA_EXT_CHECK(!any_has_tangent(bucket), op, "expected bucket", kNeedsNoTangent);
}

Tensor pack_autograd(at::TensorList tensors, const Tensor& bucket, c10::SymIntArrayRef offsets, double scale,
                     at::IntArrayRef kept, bool wants_stats) {
  static const auto op = find_op<decltype(pack_autograd)>(CUDA_EXT_OP("bucket_pack"));
  check_for_autograd(kPack, tensors, bucket);
  at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor stats = op.call(tensors, bucket, offsets, scale, kept, wants_stats);
  record_write(bucket);
  return stats;
}

Tensor unpack_autograd(const Tensor& bucket, at::TensorList tensors, c10::SymIntArrayRef offsets, double scale) {
  static const auto op = find_op<decltype(unpack_autograd)>(CUDA_EXT_OP("bucket_unpack"));
  check_for_autograd(kUnpack, tensors, bucket);
  at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor stats = op.call(bucket, tensors, offsets, scale);
  for (const Tensor& tensor : tensors) record_write(tensor);
  return stats;
}

Tensor stats_autograd(at::TensorList tensors) {
  static const auto op = find_op<decltype(stats_autograd)>(CUDA_EXT_OP("bucket_stats"));
  check_tensors(kStats, tensors, tensors[0].device());
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(tensors);
}

}  // namespace

}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def(
      "bucket_pack(Tensor[] tensors, Tensor(a!) bucket, SymInt[] offsets, *, float scale=1.0, int[] kept=[], "
      "bool stats=True) -> Tensor",
      tags);
  m.def("bucket_unpack(Tensor bucket, Tensor(a!)[] tensors, SymInt[] offsets, *, float scale=1.0) -> Tensor", tags);
  m.def("bucket_stats(Tensor[] tensors) -> Tensor", tags);
}

static void register_kernels(torch::Library& m) {
  m.impl("bucket_pack", cuda_ext::pack);
  m.impl("bucket_unpack", cuda_ext::unpack);
  m.impl("bucket_stats", cuda_ext::stats);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("bucket_pack", cuda_ext::pack_autograd);
  m.impl("bucket_unpack", cuda_ext::unpack_autograd);
  m.impl("bucket_stats", cuda_ext::stats_autograd);
}
