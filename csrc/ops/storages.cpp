// Tensors over memory of others: with a storage of their own, or without being views for autograd.
//
// Savers such as safetensors take a storage for the identity of a tensor, and write only one of several tensors that
// share one. Parameters that lie in one buffer therefore have separate storages, which all keep the buffer alive.
#include "ops/torch_headers.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <vector>

#include "ops/op.h"

namespace cuda_ext {

namespace {

// The deleter of a part's storage, whose context is the storage of the buffer.
void release(void* buffer) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(buffer)); }

bool is_part(const at::Storage& storage) { return storage.data_ptr().get_deleter() == &release; }

// The storage of the memory that this one is a part of, or itself.
at::Storage buffer_of(const at::Storage& storage) {
  if (!is_part(storage)) return storage;
  return at::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      static_cast<c10::StorageImpl*>(storage.data_ptr().get_context())));
}

bool has_plain_memory(const Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == at::kStrided && tensor.has_storage() &&
         (tensor.key_set() & at::kTensorSubclassLike).empty() && !tensor.is_conj() && !tensor.is_neg();
}

Tensor over(at::Storage storage, const Tensor& like) {
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), like.options().computeDispatchKey(),
                                                  like.dtype());
}

at::DataPtr part_of(const at::Storage& buffer, void* data) {
  c10::raw::intrusive_ptr::incref(buffer.unsafeGetStorageImpl());
  return {data, buffer.unsafeGetStorageImpl(), release, buffer.device()};
}

// A storage that can be resized as `like` can.
at::Storage new_storage(size_t bytes, at::DataPtr data, const at::Storage& like) {
  const bool resizable = like.resizable() && like.allocator() != nullptr;  // shared memory has no allocator
  return {c10::Storage::use_byte_size_t(), bytes, std::move(data), like.allocator(), resizable};
}

// Moves the memory of a storage to a new one, which nothing else can resize or move, and makes the old one a part of
// that. Otherwise share_memory_() of a tensor would free the memory of all that was made from it.
at::Storage hidden_buffer(const at::Storage& storage) {
  if (is_part(storage)) return buffer_of(storage);
  c10::StorageImpl* visible = storage.unsafeGetStorageImpl();
  at::Storage buffer = new_storage(visible->nbytes(), {nullptr, visible->device()}, storage);
  buffer.set_data_ptr_noswap(visible->set_data_ptr(part_of(buffer, visible->mutable_data())));
  return buffer;
}

OptionalTensor own_storage(const Tensor& tensor, bool is_shared) {
  const bool has_tangent = tensor._fw_grad(/*level=*/0).defined();
  if (!has_plain_memory(tensor) || has_tangent || !tensor.is_non_overlapping_and_dense()) return std::nullopt;
  void* data = tensor.mutable_data_ptr();  // first: this moves a buffer that is copied on write
  const at::Storage buffer = is_shared ? tensor.storage() : hidden_buffer(tensor.storage());
  Tensor part = over(new_storage(tensor.nbytes(), part_of(buffer, data), buffer), tensor);
  part.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return part;
}

OptionalTensor joined_rows(const Tensor& first, const Tensor& second) {
  if (!has_plain_memory(first) || !has_plain_memory(second) || first.scalar_type() != second.scalar_type() ||
      first.dim() == 0 || first.dim() != second.dim() || first.sizes().slice(1) != second.sizes().slice(1) ||
      !first.is_contiguous() || !second.is_contiguous())
    return std::nullopt;
  at::Storage buffer = buffer_of(first.storage());
  if (buffer.unsafeGetStorageImpl() != buffer_of(second.storage()).unsafeGetStorageImpl()) return std::nullopt;
  // Addresses, because a storage may have been given other memory, as by share_memory_().
  const auto* base = static_cast<const char*>(buffer.data());
  const auto* begin = static_cast<const char*>(first.const_data_ptr());
  if (begin < base || (begin - base) % first.itemsize() != 0 || begin + first.nbytes() != second.const_data_ptr() ||
      begin + first.nbytes() + second.nbytes() > base + buffer.nbytes())
    return std::nullopt;
  const int64_t offset = (begin - base) / int64_t(first.itemsize());
  auto sizes = first.sizes().vec();
  sizes[0] += second.size(0);
  Tensor rows = over(std::move(buffer), first);
  rows.unsafeGetTensorImpl()->set_storage_offset(offset);
  rows.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return rows;
}

std::vector<Tensor> not_views(at::TensorList views) {
  std::vector<Tensor> result;
  result.reserve(views.size());
  for (const Tensor& view : views) {
    const c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
    result.emplace_back(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  }
  return result;
}

int64_t memory_holders(const Tensor& tensor) {
  if (!has_plain_memory(tensor) || !is_part(tensor.storage())) return 1;
  return int64_t(buffer_of(tensor.storage()).use_count()) - 1;
}

}  // namespace

}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  // The memory of a dense tensor, as a tensor with a storage and a version counter of its own; None for a subclass, a
  // tensor of a transform, and one without memory. is_shared: other processes use the memory, which stays where it is.
  m.def("_own_storage(Tensor tensor, *, bool is_shared=False) -> Tensor?", cuda_ext::own_storage);
  // The rows of both, as one tensor with a version counter of its own; None unless they are adjacent in one buffer.
  m.def("_joined_rows(Tensor first, Tensor second) -> Tensor?", cuda_ext::joined_rows);
  // The same tensors with the same version counters, but not views for autograd, which has no detach_() of a view.
  m.def("_not_views(Tensor[] views) -> Tensor[]", cuda_ext::not_views);
  // How many storages and other owners keep the memory alive of which the storage of a tensor is a part; else 1.
  m.def("_memory_holders(Tensor tensor) -> int", cuda_ext::memory_holders);
}
