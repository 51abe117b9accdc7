// The CPU kernels' variants for AVX512-BF16, on one thread, with a model of the instruction and a vector length that
// every CPU supports. With MODEL_TILES they use a model of AMX, too; vectors are then of 64 bytes, which GCC splits.
// Also defines the functions of the host process that CPU kernels call.
#include "cpu/isa_prelude.h"

#define CUDA_EXT_ISA modelled
#if defined(MODEL_TILES)
#define CUDA_EXT_VECTOR_BYTES 64
#define CUDA_EXT_HAS_AMX_TILES
#else
#define CUDA_EXT_VECTOR_BYTES 16
#endif
#define CUDA_EXT_BFLOAT16_PAIRS
#define CUDA_EXT_ISA_WITHOUT_PAIRS other_types
#define CUDA_EXT_BFLOAT16_PAIRS_MODEL

#include "attention/attention.h"
#include "gemm/gemm.h"

namespace cuda_ext::cpu {

int num_threads() { return 1; }
bool has_amx() { return true; }
void parallel_for(int64_t count, int64_t, FunctionRef<void(int64_t, int64_t)> body) { body(0, count); }
void run_workers(int64_t count, FunctionRef<void(TaskQueue&)> worker) {
  TaskQueue queue(count);
  worker(queue);
}
void gemm(bool, bool, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t, float, float*,
          int64_t) {
  std::abort();  // never called: 16-bit operands do not use the BLAS
}
Scratch::Scratch(int64_t bytes) : data_(std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64)), bytes_(bytes) {}
Scratch::~Scratch() { std::free(data_); }

namespace other_types {
// Never called: for operands of other types, and for small products.
void launch_gemm(const GemmParams&) { std::abort(); }
void attention_forward(const AttentionParams&) { std::abort(); }
void attention_backward(const AttentionBackwardParams&) { std::abort(); }
}  // namespace other_types

}  // namespace cuda_ext::cpu

#include "attention/cpu/attention_cpu.inc"
#include "gemm/cpu/gemm_cpu.inc"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void pairs_gemm(const cuda_ext::GemmParams* params) { cuda_ext::cpu::modelled::run_gemm<float, 2>(*params); }
// sum (4,) += the products of 4 pairs.
EXPORT void pairs_multiply_add(float* sum, const uint32_t* a, const uint32_t* b) {
  using namespace cuda_ext::cpu::modelled;
  const auto pairs = [](const uint32_t* bits) { return (Words)load_partial(reinterpret_cast<const float*>(bits), 4); };
  store_partial(sum, multiply_add(load_partial(sum, 4), pairs(a), pairs(b)), 4);
}

// One sequence: query, out, grad_out and grad_query are (queries, heads, dim or dim_v), contiguous and bfloat16, key,
// value and their gradients (keys, heads_kv, ...). lse: (heads, queries) of float. tree: a mask (queries, queries), or
// null for a causal one; there are no gradients with it.
EXPORT void pairs_attention(int64_t queries, int64_t keys, int64_t heads, int64_t heads_kv, int64_t dim, int64_t dim_v,
                            double scale, double softcap, void* query, void* key, void* value, void* grad_out,
                            void* out, float* lse, void* grad_query, void* grad_key, void* grad_value,
                            const uint8_t* tree) {
  const auto view = [](void* data, int64_t heads, int64_t dim) {
    return cuda_ext::HeadsView{data, 0, heads * dim, dim};
  };
  cuda_ext::AttentionBackwardParams p;
  p.dtype = cuda_ext::Dtype::kBFloat16;
  p.batch = 1;
  p.heads = heads;
  p.heads_kv = heads_kv;
  p.dim = dim;
  p.dim_v = dim_v;
  p.seqlen_q = queries;
  p.seqlen_k = keys;
  if (tree == nullptr) p.window_right = 0;
  p.cache.tree_mask = tree;
  p.cache.tree_strides[1] = queries;
  p.cache.tree_strides[2] = 1;
  p.scale = scale;
  p.softcap = softcap;
  p.lse = lse;
  p.query = view(query, heads, dim);
  p.key = view(key, heads_kv, dim);
  p.value = view(value, heads_kv, dim_v);
  p.out = view(out, heads, dim_v);
  p.grad_out = view(grad_out, heads, dim_v);
  p.grad_query = view(grad_query, heads, dim);
  p.grad_key = view(grad_key, heads_kv, dim);
  p.grad_value = view(grad_value, heads_kv, dim_v);
  cuda_ext::cpu::modelled::attention_forward(p);
  if (tree == nullptr) cuda_ext::cpu::modelled::attention_backward(p);
}
