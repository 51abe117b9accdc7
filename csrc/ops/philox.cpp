#include "ops/torch_headers.h"

#include "ops/philox.h"

#include <ATen/ops/from_blob.h>

#include <utility>

namespace cuda_ext {
namespace {

constexpr int64_t kLow = 0xffffffff;
Tensor low_of(const Tensor& x) { return x.bitwise_and(kLow); }
// The upper 32 of 64 bits, whose sign bit is one of them.
Tensor high_of(const Tensor& x) { return x.bitwise_right_shift(32).bitwise_and(kLow); }

}  // namespace

std::vector<Tensor> philox_words(const Tensor& rng_state, const Tensor& counter) {
  const Tensor seed = rng_state.select(0, 0), offset = rng_state.select(0, 1);
  Tensor key0 = low_of(seed), key1 = high_of(seed);
  std::vector<Tensor> words{low_of(counter), high_of(counter), low_of(offset), high_of(offset)};
  for (int round = 0; round < 10; ++round) {
    const Tensor product0 = words[0] * 0xD2511F53, product1 = words[2] * 0xCD9E8D57;  // modulo 2^64
    words = {high_of(product1).bitwise_xor(words[1]).bitwise_xor(key0), low_of(product1),
             high_of(product0).bitwise_xor(words[3]).bitwise_xor(key1), low_of(product0)};
    key0 = low_of(key0 + 0x9E3779B9);
    key1 = low_of(key1 + 0xBB67AE85);
  }
  for (Tensor& word : words)
    if (word.sizes() != counter.sizes()) word = word.expand(counter.sizes());
  return words;
}

void store_rng(const RngSource& rng, const Tensor& rng_state) {
  const auto store = [&](int64_t index, const uint64_t* at, uint64_t value) {
    const Tensor to = rng_state.select(0, index);
    if (at == nullptr) {
      to.fill_(int64_t(value));
    } else {
      to.copy_(at::from_blob(const_cast<uint64_t*>(at), {}, rng_state.options()));
      to.add_(int64_t(value));
    }
  };
  store(0, rng.seed_at, rng.seed);
  store(1, rng.offset_at, rng.offset);
}

}  // namespace cuda_ext
