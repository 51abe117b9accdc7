#include "ops/torch_headers.h"

#include "ops/attention_composed.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isneginf.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "base/philox.h"
#include "ops/gemm_composed.h"

namespace cuda_ext {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

// One batch of sequences of equal length, in the accumulation type. G = H / Hk query heads share a key head.
struct Dense {
  Tensor query;   // (B, H, Sq, D)
  Tensor key;     // (B, H, Sk, D)
  Tensor value;   // (B, H, Sk, Dv)
  Tensor slopes;  // (H, 1, 1) or (B, H, 1, 1), or undefined
  Tensor sinks;   // (1, H, 1, 1), or undefined
  Tensor bias;    // broadcasts to (B, H, Sq, Sk), or undefined
  Tensor mask;    // the same
  Tensor keep;    // (B, H, Sq, Sk): 0 for dropped weights, 1 / (1 - p) for others; undefined without dropout
  double scale;
};

// The steps of softmax(logits) that backward needs again.
struct Probs {
  Tensor capped;  // scores after the soft cap, before biases   (B, H, Sq, Sk)
  Tensor p;       // probabilities of the keys, before dropout  (B, H, Sq, Sk)
  Tensor p_sink;  // probability of the sink, or 0              (B, H, Sq, 1)
  Tensor lse;     //                                            (B, H, Sq)
};

Tensor product(const Tensor& a, const Tensor& b, double alpha = 1.0) {
  return call_gemm(a, b, {}, {}, {}, alpha, 1.0, {});
}

// (B, S, Hk, D) as (B, H, S, D)
Tensor heads_first(const Tensor& tensor, int64_t heads, at::ScalarType type) {
  const Tensor t = tensor.to(type).transpose(1, 2);
  const int64_t heads_kv = t.size(1);
  if (heads_kv == heads) return t;
  return t.unsqueeze(2)
      .expand({t.size(0), heads_kv, heads / heads_kv, t.size(2), t.size(3)})
      .reshape({t.size(0), heads, t.size(2), t.size(3)});
}

// (B, H, S, D) as (B, S, Hk, D), summed over the query heads that share a key head.
Tensor heads_back(const Tensor& tensor, int64_t heads_kv, at::ScalarType type) {
  const int64_t heads = tensor.size(1);
  Tensor t = tensor;
  if (heads_kv != heads) t = t.reshape({t.size(0), heads_kv, heads / heads_kv, t.size(2), t.size(3)}).sum(2);
  return t.transpose(1, 2).to(type);
}

// query (B, Sq, H, D), key (B, Sk, Hk, D), value (B, Sk, Hk, Dv); alibi_slopes (H,) or (B, H).
Dense prepare(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& alibi_slopes,
              const Tensor& keep, const AttentionOptions& o) {
  const auto type = accumulation_type(query.scalar_type());
  const int64_t heads = query.size(2);
  Dense d;
  d.query = heads_first(query, heads, type);
  d.key = heads_first(key, heads, type);
  d.value = heads_first(value, heads, type);
  if (is_given(alibi_slopes)) d.slopes = alibi_slopes->to(type).unsqueeze(-1).unsqueeze(-1);
  if (is_given(o.sinks)) d.sinks = o.sinks->to(type).view({1, heads, 1, 1});
  d.bias = value_or_empty(o.bias);
  d.mask = value_or_empty(o.mask);
  d.keep = keep;
  d.scale = o.scale.value_or(1.0 / std::sqrt(double(std::max<int64_t>(1, query.size(3)))));
  return d;
}

Probs probs_of(const Dense& d, const AttentionOptions& o) {
  const int64_t batch = d.query.size(0), heads = d.query.size(1), rows = d.query.size(2), keys = d.key.size(2);
  const auto options = d.query.options();
  Probs w;
  w.capped = product(d.query, d.key.mT(), d.scale);
  if (o.softcap > 0) w.capped = (w.capped / o.softcap).tanh() * o.softcap;

  Tensor logits = w.capped;
  const auto index_options = options.dtype(at::kLong);
  // Row i - column j, counted from the diagonal.
  const Tensor distance =
      at::arange(rows, index_options).unsqueeze(1) + (keys - rows) - at::arange(keys, index_options);
  if (d.slopes.defined()) logits = logits - d.slopes * distance.abs().to(logits.scalar_type());
  if (d.bias.defined()) logits = logits + d.bias.to(logits.scalar_type());
  if (d.mask.defined()) logits = logits.masked_fill(d.mask.logical_not(), kHidden);
  if (o.window_left.has_value()) logits = logits.masked_fill(distance > *o.window_left, kHidden);
  if (o.causal)
    logits = logits.masked_fill(distance < 0, kHidden);
  else if (o.window_right.has_value())
    logits = logits.masked_fill(distance < -*o.window_right, kHidden);

  // The last column is the sink.
  const Tensor sink = d.sinks.defined() ? d.sinks : at::full({1, 1, 1, 1}, kHidden, options);
  logits = at::cat({logits, sink.expand({batch, heads, rows, 1})}, -1);
  // Keeps rows without visible keys finite, so that neither they nor their derivatives become NaN.
  const Tensor maximum = logits.detach().amax(-1, /*keepdim=*/true);
  const Tensor shift = maximum.masked_fill(at::isneginf(maximum), 0);
  const Tensor exponentials = (logits - shift).exp();
  const Tensor sum = exponentials.sum(-1, /*keepdim=*/true);
  const Tensor is_empty = at::isneginf(maximum);
  const Tensor divisor = sum.masked_fill(is_empty, 1);
  const Tensor p = exponentials / divisor;
  w.p = p.narrow(-1, 0, keys);
  w.p_sink = p.narrow(-1, keys, 1);
  w.lse = (shift + divisor.log()).masked_fill(is_empty, kHidden).squeeze(-1);
  return w;
}

std::tuple<Tensor, Tensor> dense_forward(const Dense& d, const AttentionOptions& o, at::ScalarType type) {
  const Probs w = probs_of(d, o);
  const Tensor p = o.dropout_p > 0 ? at::dropout(w.p, o.dropout_p, /*train=*/true) : w.p;
  return {product(p, d.value).transpose(1, 2).to(type), w.lse};
}

// Dao et al., arXiv 2205.14135, appendix B.2, with the gradient of lse added to that of the softmax. grad_lse may be
// undefined, else it is (B, H, Sq).
AttentionGradients dense_backward(const Tensor& grad_out, const Tensor& grad_lse, const Dense& d, int64_t heads_kv,
                                  const AttentionOptions& o) {
  const auto type = grad_out.scalar_type();
  const Probs w = probs_of(d, o);
  const Tensor grad = grad_out.to(d.query.scalar_type()).transpose(1, 2);  // (B, H, Sq, Dv)
  const Tensor dropped = d.keep.defined() ? w.p * d.keep : w.p;
  AttentionGradients g;
  g.value = heads_back(product(dropped.mT(), grad), heads_kv, type);
  Tensor grad_p = product(grad, d.value.mT());
  if (d.keep.defined()) grad_p = grad_p * d.keep;
  Tensor row = -(w.p * grad_p).sum(-1, /*keepdim=*/true);  // (B, H, Sq, 1)
  if (grad_lse.defined()) row = row + grad_lse.unsqueeze(-1);
  const Tensor grad_logits = w.p * (grad_p + row);
  if (d.sinks.defined()) g.sinks = (w.p_sink * row).sum({0, 2, 3}).to(o.sinks->scalar_type());
  if (d.bias.defined()) g.bias = grad_logits.sum_to_size(d.bias.sizes()).to(d.bias.scalar_type());
  const Tensor grad_scores = o.softcap > 0 ? grad_logits * (1 - (w.capped / o.softcap).square()) : grad_logits;
  g.query = product(grad_scores, d.key, d.scale).transpose(1, 2).to(type);
  g.key = heads_back(product(grad_scores.mT(), d.query, d.scale), heads_kv, type);
  return g;
}

// One sequence of a packed batch.
struct Segment {
  int64_t index, first_q, rows, first_k, keys;
};
std::vector<int64_t> numbers_of(const Tensor& cu_seqlens) {
  // Tensors created inside a transform have no memory to read; item() raises a clear error for what vmap maps.
  const bool has_memory = cu_seqlens.has_storage();
  const Tensor source = has_memory ? cu_seqlens.cpu() : cu_seqlens;
  std::vector<int64_t> numbers(size_t(source.size(0)));
  for (size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = has_memory ? source.accessor<int, 1>()[int64_t(i)] : source.select(0, int64_t(i)).item<int>();
  return numbers;
}
std::vector<Segment> segments_of(const AttentionOptions& o) {
  const std::vector<int64_t> q = numbers_of(*o.cu_seqlens_q), k = numbers_of(*o.cu_seqlens_k);
  std::vector<Segment> segments;
  for (size_t n = 0; n + 1 < q.size(); ++n)
    segments.push_back({int64_t(n), q[n], q[n + 1] - q[n], k[n], k[n + 1] - k[n]});
  return segments;
}
Tensor rows_of(const Tensor& rows, int64_t first, int64_t count) { return rows.narrow(0, first, count).unsqueeze(0); }
OptionalTensor slopes_of(const AttentionOptions& o, int64_t sequence) {
  return is_given(o.alibi_slopes) && o.alibi_slopes->dim() == 2 ? o.alibi_slopes->select(0, sequence) : o.alibi_slopes;
}
// The part of a bias or mask that belongs to a sequence, without the batch dimension.
Tensor part_of(const Tensor& whole, const Segment& s) {
  if (!whole.defined()) return whole;
  Tensor part = whole.dim() == 4 ? whole.select(0, whole.size(0) == 1 ? 0 : s.index) : whole;
  if (part.dim() >= 1 && part.size(-1) != 1) part = part.narrow(-1, 0, s.keys);
  if (part.dim() >= 2 && part.size(-2) != 1) part = part.narrow(-2, 0, s.rows);
  return part;
}
// Adds up the gradients of a bias, one part per sequence.
Tensor bias_from_parts(const std::vector<Tensor>& parts, const Tensor& bias) {
  if (parts.empty()) return at::zeros(bias.sizes(), bias.options());
  std::vector<Tensor> padded;
  for (const Tensor& part : parts) {
    std::vector<int64_t> padding;  // from the last dimension on, before and after
    for (int64_t d = 1; d <= std::min<int64_t>(2, bias.dim()); ++d) {
      padding.push_back(0);
      padding.push_back(bias.size(-d) - part.size(-d));
    }
    padded.push_back(at::constant_pad_nd(part, padding));
  }
  const Tensor stacked = at::stack(padded);
  return bias.dim() == 4 && bias.size(0) != 1 ? stacked : stacked.sum(0).reshape(bias.sizes());
}
Dense prepare(const Segment& s, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& keep,
              const AttentionOptions& o) {
  Dense d = prepare(rows_of(query, s.first_q, s.rows), rows_of(key, s.first_k, s.keys),
                    rows_of(value, s.first_k, s.keys), slopes_of(o, s.index), keep, o);
  d.bias = part_of(d.bias, s);
  d.mask = part_of(d.mask, s);
  return d;
}

// The dropout factors that the kernels draw: 0 or 1 / (1 - p) for each of `rows` rows of `batch * heads` matrices. The
// first row of matrix n has the number first_row + n * row_pitch.
Tensor keep_mask(const Tensor& rng_state, const AttentionOptions& o, int64_t batch, int64_t heads, int64_t rows,
                 int64_t keys, int64_t first_row, int64_t row_pitch, int64_t longest_k, const Tensor& query) {
  if (o.dropout_p == 0) return {};
  const Tensor state = rng_state.cpu();
  const uint64_t seed = uint64_t(state.const_data_ptr<int64_t>()[0]);
  const uint64_t offset = uint64_t(state.const_data_ptr<int64_t>()[1]);
  const uint32_t threshold = uint32_t(o.dropout_p * 4294967296.0);
  const int64_t groups = (longest_k + 3) / 4;
  Tensor mask = at::zeros({batch, heads, rows, keys}, at::kDouble);
  double* at = mask.mutable_data_ptr<double>();
  for (int64_t n = 0; n < batch * heads; ++n) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < keys; ++j) {
        const uint64_t counter[1] = {uint64_t(first_row + n * row_pitch + i) * uint64_t(groups) + uint64_t(j / 4)};
        uint32_t words[4][1];
        philox<1>(seed, offset, counter, words);
        *at++ = words[j % 4][0] >= threshold ? 1 / (1 - o.dropout_p) : 0.0;
      }
    }
  }
  return mask.to(query.options().dtype(accumulation_type(query.scalar_type())));
}

// The parts one after the other, and zeros for the rows of `whole` after them.
Tensor with_tail(std::vector<Tensor> parts, const Tensor& cu_seqlens, const Tensor& whole) {
  parts.push_back(
      at::zeros({whole.size(0) - numbers_of(cu_seqlens).back(), whole.size(1), whole.size(2)}, whole.options()));
  return at::cat(parts, 0);
}

}  // namespace

std::tuple<Tensor, Tensor> composed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionOptions& o) {
  const auto type = query.scalar_type();
  if (!o.is_varlen()) return dense_forward(prepare(query, key, value, o.alibi_slopes, {}, o), o, type);
  const int64_t heads = query.size(1);
  std::vector<Tensor> outs{at::zeros({0, heads, value.size(2)}, query.options())};
  std::vector<Tensor> lses{at::zeros({heads, 0}, query.options().dtype(accumulation_type(type)))};
  for (const Segment& s : segments_of(o)) {
    const auto [out, lse] = dense_forward(prepare(s, query, key, value, {}, o), o, type);
    outs.push_back(out.squeeze(0));
    lses.push_back(lse.squeeze(0));
  }
  const int64_t tail = query.size(0) - numbers_of(*o.cu_seqlens_q).back();
  outs.push_back(at::zeros({tail, heads, value.size(2)}, query.options()));
  lses.push_back(at::full({heads, tail}, kHidden, lses[0].options()));
  return {at::cat(outs, 0), at::cat(lses, 1)};
}

AttentionGradients composed_attention_backward(const Tensor& grad_out, const Tensor& grad_lse, const Tensor& query,
                                               const Tensor& key, const Tensor& value, const Tensor& rng_state,
                                               const AttentionOptions& o) {
  if (!o.is_varlen()) {
    const int64_t batch = query.size(0), rows = query.size(1), heads = query.size(2), keys = key.size(1);
    const Tensor keep = keep_mask(rng_state, o, batch, heads, rows, keys, 0, rows, keys, query);
    return dense_backward(grad_out, grad_lse, prepare(query, key, value, o.alibi_slopes, keep, o), key.size(2), o);
  }
  const std::vector<Segment> segments = segments_of(o);
  int64_t longest_k = o.max_seqlen_k ? o.max_seqlen_k->guard_int(__FILE__, __LINE__) : 0;
  for (const Segment& s : segments) longest_k = std::max(longest_k, s.keys);
  std::vector<Tensor> queries, keys, values, biases;
  AttentionGradients total;
  for (const Segment& s : segments) {
    const int64_t heads = query.size(1);
    const Tensor keep = keep_mask(rng_state, o, 1, heads, s.rows, s.keys, s.first_q, query.size(0), longest_k, query);
    const Tensor own_lse = grad_lse.defined() ? grad_lse.narrow(1, s.first_q, s.rows).unsqueeze(0) : grad_lse;
    const AttentionGradients g = dense_backward(rows_of(grad_out, s.first_q, s.rows), own_lse,
                                                prepare(s, query, key, value, keep, o), key.size(1), o);
    queries.push_back(g.query.squeeze(0));
    keys.push_back(g.key.squeeze(0));
    values.push_back(g.value.squeeze(0));
    if (g.bias.defined()) biases.push_back(g.bias);
    if (g.sinks.defined()) total.sinks = total.sinks.defined() ? total.sinks + g.sinks : g.sinks;
  }
  total.query = with_tail(std::move(queries), *o.cu_seqlens_q, query);
  total.key = with_tail(std::move(keys), *o.cu_seqlens_k, key);
  total.value = with_tail(std::move(values), *o.cu_seqlens_k, value);
  if (is_given(o.bias)) total.bias = bias_from_parts(biases, *o.bias);
  return total;
}

}  // namespace cuda_ext
