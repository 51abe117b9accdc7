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

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention_params.h"
#include "ops/block_mask.h"
#include "ops/gemm_composed.h"
#include "ops/philox.h"

namespace cuda_ext {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

// The random numbers of dropout for rows of a call, from `first_row` of each head on.
struct DropoutRows {
  Tensor rng_state;
  DropoutCounters counters;
  int64_t first_row;
};

// Consecutive rows of a batch of sequences of equal length, in the accumulation type.
struct Dense {
  Tensor query;   // (B, H, rows, D)
  Tensor key;     // (B, H, Sk, D)
  Tensor value;   // (B, H, Sk, Dv)
  Tensor slopes;  // (H, 1, 1) or (B, H, 1, 1), or undefined
  Tensor sinks;   // (1, H, 1, 1), or undefined
  Tensor bias;    // broadcasts to (B, H, rows, Sk), or undefined; relative: to (B, H, 1, distances)
  Tensor mask;    // the same
  DropoutRows dropout;
  double scale;
  int64_t first_row, all_rows;

  // Row i - column j, counted from the diagonal: (rows, Sk).
  Tensor distance() const {
    const auto options = query.options().dtype(at::kLong);
    const int64_t keys = key.size(2);
    return at::arange(query.size(2), options).unsqueeze(1) + (first_row + keys - all_rows) - at::arange(keys, options);
  }
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
              const DropoutRows& dropout, const AttentionOptions& o) {
  const auto type = accumulation_type(query.scalar_type());
  const int64_t heads = query.size(2);
  Dense d;
  d.query = heads_first(query, heads, type);
  d.key = heads_first(key, heads, type);
  d.value = heads_first(value, heads, type);
  if (is_given(alibi_slopes)) d.slopes = alibi_slopes->to(type).unsqueeze(-1).unsqueeze(-1);
  if (is_given(o.sinks)) d.sinks = o.sinks->to(type).view({1, heads, 1, 1});
  d.bias = value_or_empty(o.bias);
  d.mask = value_or_empty(dense_mask(o));
  if (is_given(o.block_keys)) d.mask = d.mask.narrow(-2, 0, query.size(1)).narrow(-1, 0, key.size(1));
  d.dropout = dropout;
  d.first_row = 0;
  d.all_rows = query.size(1);
  d.scale = o.scale.value_or(1.0 / std::sqrt(double(std::max<int64_t>(1, query.size(3)))));
  return d;
}

// Rows [first, first + count) of a tensor whose rows are dim -2, unless it is broadcast along them.
Tensor some_rows(const Tensor& tensor, int64_t first, int64_t count) {
  return !tensor.defined() || tensor.dim() < 2 || tensor.size(-2) == 1 ? tensor : tensor.narrow(-2, first, count);
}

// Calls f(part, first row) for as many rows at a time as keep a matrix of logits small: memory is linear in Sq and Sk.
template <class F>
void for_parts(const Dense& d, const F& f) {
  constexpr int64_t kMostLogits = 1 << 24;
  const int64_t row_logits = d.query.size(0) * d.query.size(1) * d.key.size(2);
  const int64_t most = std::max<int64_t>(1, kMostLogits / std::max<int64_t>(1, row_logits));
  int64_t first = 0;
  do {
    const int64_t count = std::min(most, d.all_rows - first);
    Dense part = d;
    if (count < d.all_rows) {
      part.query = d.query.narrow(-2, first, count);
      part.bias = some_rows(d.bias, first, count);
      part.mask = some_rows(d.mask, first, count);
      part.dropout.first_row += first;
      part.first_row = first;
    }
    f(part, first);
    first += count;
  } while (first < d.all_rows);
}

// What the kernels multiply probabilities by: 0 or 1 / (1 - p), (B, H, rows, Sk).
Tensor keep_mask(const Dense& d, double dropout_p) {
  const int64_t batch = d.query.size(0), heads = d.query.size(1), keys = d.key.size(2);
  const auto numbers = d.dropout.rng_state.options();
  const DropoutCounters& counters = d.dropout.counters;
  const Tensor head = at::arange(batch, numbers).view({batch, 1, 1, 1}) * counters.heads +
                      at::arange(heads, numbers).view({heads, 1, 1});
  const Tensor row = head * counters.rows + at::arange(d.query.size(2), numbers).unsqueeze(1) + d.dropout.first_row;
  // Four keys share a counter.
  const Tensor counter = row * counters.of_row + at::arange((keys + 3) / 4, numbers) + counters.first;
  const Tensor words = at::stack(philox_words(d.dropout.rng_state, counter), -1).flatten(-2).narrow(-1, 0, keys);
  const int64_t drop_below = int64_t(uint32_t(dropout_p * 4294967296.0));
  return words.ge(drop_below).to(d.query.scalar_type()) / (1 - dropout_p);
}

Probs probs_of(const Dense& d, const AttentionOptions& o) {
  const int64_t batch = d.query.size(0), heads = d.query.size(1), rows = d.query.size(2), keys = d.key.size(2);
  const auto options = d.query.options();
  Probs w;
  w.capped = product(d.query, d.key.mT(), d.scale);
  if (o.softcap > 0) w.capped = (w.capped / o.softcap).tanh() * o.softcap;

  Tensor logits = w.capped;
  const Tensor distance = d.distance();
  if (d.slopes.defined()) logits = logits - d.slopes * distance.abs().to(logits.scalar_type());
  if (d.bias.defined())
    logits = logits + (o.bias_is_relative ? bias_at_distances(d.bias, distance) : d.bias).to(logits.scalar_type());
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
  std::vector<Tensor> outs, lses;
  for_parts(d, [&](const Dense& part, int64_t) {
    const Probs w = probs_of(part, o);
    Tensor p = w.p;
    if (o.dropout_p > 0)
      p = d.dropout.rng_state.defined() ? p * keep_mask(part, o.dropout_p)
                                        : at::dropout(p, o.dropout_p, /*train=*/true);
    outs.push_back(product(p, d.value));
    lses.push_back(w.lse);
  });
  return {at::cat(outs, 2).transpose(1, 2).to(type), at::cat(lses, 2)};
}

// The probabilities among the keys of a larger call, whose lse is (B, H, rows).
void rescale(Probs& w, const Tensor& lse) {
  const Tensor factor = (w.lse - lse).exp().masked_fill(at::isneginf(w.lse), 0).unsqueeze(-1);
  w.p = w.p * factor;
  w.p_sink = w.p_sink * factor;
}

// The gradient of a relative bias: what is added to logits of one distance has the sum of their gradients.
Tensor sum_by_distance(const Tensor& grad_logits, const Dense& d) {
  std::vector<int64_t> sizes = d.bias.sizes().vec();
  if (sizes.size() == 1) sizes.insert(sizes.begin(), 1);
  sizes[sizes.size() - 2] = grad_logits.size(-2);
  sizes.back() = grad_logits.size(-1);
  const Tensor terms = grad_logits.sum_to_size(sizes).flatten(-2);
  sizes.pop_back();
  sizes.back() = d.bias.size(-1);
  const Tensor index = (d.distance() + d.bias.size(-1) / 2).flatten();
  return at::zeros(sizes, terms.options()).index_add(-1, index, terms).reshape(d.bias.sizes());
}

// The sum of tensors, as they come.
void add_to(Tensor& total, const Tensor& term) { total = total.defined() ? total + term : term; }

// One sequence of a packed batch.
struct Segment {
  int64_t index, first_q, rows, first_k, keys;
};
Tensor rows_of(const Tensor& rows, int64_t first, int64_t count) { return rows.narrow(0, first, count).unsqueeze(0); }

// What backward gets besides the inputs: (B, Sq, H, Dv) and (B, H, Sq). All but grad_out may be undefined.
struct Outputs {
  Tensor grad_out, grad_lse, out, lse;

  // Rows of one sequence of a packed batch.
  Outputs of(const Segment& s) const {
    const auto rows = [&](const Tensor& t) { return t.defined() ? rows_of(t, s.first_q, s.rows) : t; };
    const auto statistics = [&](const Tensor& t) {
      return t.defined() ? t.narrow(1, s.first_q, s.rows).unsqueeze(0) : t;
    };
    return {rows(grad_out), statistics(grad_lse), rows(out), statistics(lse)};
  }
};

// Dao et al., arXiv 2205.14135, appendix B.2, with the gradient of lse added to that of the softmax.
AttentionGradients dense_backward(const Outputs& outputs, const Dense& d, int64_t heads_kv, const AttentionOptions& o) {
  const auto type = o.result_dtype.value_or(outputs.grad_out.scalar_type());
  const auto heads_first = [&](const Tensor& t) { return t.to(d.query.scalar_type()).transpose(1, 2); };
  const Tensor all_grads = heads_first(outputs.grad_out);  // (B, H, Sq, Dv)
  const Tensor all_outs = outputs.out.defined() ? heads_first(outputs.out) : Tensor();
  Tensor grad_key, grad_value, grad_sinks, grad_bias;
  std::vector<Tensor> grad_queries, bias_rows;
  for_parts(d, [&](const Dense& part, int64_t first) {
    const int64_t rows = part.query.size(2);
    Probs w = probs_of(part, o);
    if (outputs.lse.defined()) rescale(w, outputs.lse.narrow(2, first, rows));
    const Tensor keep = o.dropout_p > 0 ? keep_mask(part, o.dropout_p) : Tensor();
    const Tensor grad = all_grads.narrow(2, first, rows);
    add_to(grad_value, product((keep.defined() ? w.p * keep : w.p).mT(), grad));
    Tensor grad_p = product(grad, d.value.mT());
    if (keep.defined()) grad_p = grad_p * keep;
    Tensor row = all_outs.defined() ? -(grad * all_outs.narrow(2, first, rows)).sum(-1, /*keepdim=*/true)
                                    : -(w.p * grad_p).sum(-1, /*keepdim=*/true);  // (B, H, rows, 1)
    if (outputs.grad_lse.defined()) row = row + outputs.grad_lse.narrow(2, first, rows).unsqueeze(-1);
    const Tensor grad_logits = w.p * (grad_p + row);
    if (d.sinks.defined()) add_to(grad_sinks, (w.p_sink * row).sum({0, 2, 3}));
    if (d.bias.defined())
      bias_rows.push_back(o.bias_is_relative ? sum_by_distance(grad_logits, part)
                                             : grad_logits.sum_to_size(part.bias.sizes()));
    const Tensor grad_scores = o.softcap > 0 ? grad_logits * (1 - (w.capped / o.softcap).square()) : grad_logits;
    grad_queries.push_back(product(grad_scores, d.key, d.scale));
    add_to(grad_key, product(grad_scores.mT(), part.query, d.scale));
  });
  const bool has_bias_rows = d.bias.defined() && d.bias.dim() >= 2 && d.bias.size(-2) != 1;
  if (has_bias_rows) grad_bias = at::cat(bias_rows, -2);
  for (size_t i = 0; !has_bias_rows && i < bias_rows.size(); ++i) add_to(grad_bias, bias_rows[i]);
  AttentionGradients g;
  g.query = at::cat(grad_queries, 2).transpose(1, 2).to(type);
  g.key = heads_back(grad_key, heads_kv, type);
  g.value = heads_back(grad_value, heads_kv, type);
  if (d.sinks.defined()) g.sinks = grad_sinks.to(o.sinks->scalar_type());
  if (d.bias.defined()) g.bias = grad_bias.to(d.bias.scalar_type());
  return g;
}

std::vector<int64_t> numbers_of(const Tensor& cu_seqlens) {
  CUDA_EXT_CHECK(!is_capturing(cu_seqlens.device()), "flash_attention_varlen",
                 "expected no capture of a graph, got one: float64, head dims above 256 (float32 backward: 128) and "
                 "second derivatives are composed of ops for which the host reads cu_seqlens; pad to a batch of "
                 "flash_attention");
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
OptionalTensor slopes_of(const AttentionOptions& o, int64_t sequence) {
  return is_given(o.alibi_slopes) && o.alibi_slopes->dim() == 2 ? o.alibi_slopes->select(0, sequence) : o.alibi_slopes;
}
// The part of a bias or mask that belongs to a sequence, without the batch dimension.
Tensor part_of(const Tensor& whole, const Segment& s, bool is_relative = false) {
  if (!whole.defined()) return whole;
  Tensor part = whole.dim() == 4 ? whole.select(0, whole.size(0) == 1 ? 0 : s.index) : whole;
  if (is_relative) return part;
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
Dense prepare(const Segment& s, const Tensor& query, const Tensor& key, const Tensor& value, const DropoutRows& dropout,
              const AttentionOptions& o) {
  Dense d = prepare(rows_of(query, s.first_q, s.rows), rows_of(key, s.first_k, s.keys),
                    rows_of(value, s.first_k, s.keys), slopes_of(o, s.index), dropout, o);
  d.bias = part_of(d.bias, s, o.bias_is_relative);
  d.mask = part_of(d.mask, s);
  return d;
}

// query: (total_q, H, D)
DropoutCounters packed_counters(const std::vector<Segment>& segments, const Tensor& query, const AttentionOptions& o) {
  int64_t longest_k = o.max_seqlen_k ? o.max_seqlen_k->guard_int(__FILE__, __LINE__) : 0;
  for (const Segment& s : segments) longest_k = std::max(longest_k, s.keys);
  return dropout_counters(o, query.size(1), query.size(0), longest_k);
}

// The parts one after the other, of dtype `type`, and zeros for the rows of `whole` after them.
Tensor with_tail(std::vector<Tensor> parts, const Tensor& cu_seqlens, const Tensor& whole, at::ScalarType type) {
  parts.push_back(at::zeros({whole.size(0) - numbers_of(cu_seqlens).back(), whole.size(1), whole.size(2)},
                            whole.options().dtype(type)));
  return at::cat(parts, 0);
}

}  // namespace

Tensor bias_at_distances(const Tensor& bias, const Tensor& distance) {
  const int64_t most = bias.size(-1) / 2;
  const Tensor index = (distance + most).clamp(0, 2 * most).flatten(-2);
  Tensor rows = bias.dim() >= 2 ? bias.squeeze(-2) : bias;  // (.., distances)
  if (distance.dim() == 2) {
    rows = rows.index_select(-1, index);
  } else {
    while (rows.dim() < 3) rows = rows.unsqueeze(0);
    const int64_t batch = std::max(rows.size(0), index.size(0)), heads = rows.size(1);
    rows = rows.expand({batch, heads, rows.size(2)}).gather(-1, index.unsqueeze(1).expand({batch, heads, -1}));
  }
  return rows.unflatten(-1, distance.sizes().slice(distance.dim() - 2));
}

std::tuple<Tensor, Tensor> composed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionOptions& o, const Tensor& rng_state) {
  const auto type = o.result_dtype.value_or(query.scalar_type());
  if (!o.is_varlen()) {
    const DropoutRows dropout{rng_state, dropout_counters(o, query.size(2), query.size(1), key.size(1)), 0};
    return dense_forward(prepare(query, key, value, o.alibi_slopes, dropout, o), o, type);
  }
  const int64_t heads = query.size(1);
  std::vector<Tensor> outs{at::zeros({0, heads, value.size(2)}, query.options().dtype(type))};
  std::vector<Tensor> lses{at::zeros({heads, 0}, query.options().dtype(accumulation_type(type)))};
  const std::vector<Segment> segments = segments_of(o);
  const DropoutCounters counters = packed_counters(segments, query, o);
  for (const Segment& s : segments) {
    const DropoutRows dropout{rng_state, counters, s.first_q};
    const auto [out, lse] = dense_forward(prepare(s, query, key, value, dropout, o), o, type);
    outs.push_back(out.squeeze(0));
    lses.push_back(lse.squeeze(0));
  }
  const int64_t tail = query.size(0) - numbers_of(*o.cu_seqlens_q).back();
  outs.push_back(at::zeros({tail, heads, value.size(2)}, outs[0].options()));
  lses.push_back(at::full({heads, tail}, kHidden, lses[0].options()));
  return {at::cat(outs, 0), at::cat(lses, 1)};
}

AttentionGradients composed_attention_backward(const Tensor& grad_out, const Tensor& grad_lse, const Tensor& query,
                                               const Tensor& key, const Tensor& value, const Tensor& rng_state,
                                               const AttentionOptions& o, const Tensor& out, const Tensor& lse) {
  const Outputs outputs{grad_out, grad_lse, out, lse};
  if (!o.is_varlen()) {
    const DropoutRows dropout{rng_state, dropout_counters(o, query.size(2), query.size(1), key.size(1)), 0};
    return dense_backward(outputs, prepare(query, key, value, o.alibi_slopes, dropout, o), key.size(2), o);
  }
  const std::vector<Segment> segments = segments_of(o);
  const DropoutCounters counters = packed_counters(segments, query, o);
  std::vector<Tensor> queries, keys, values, biases;
  AttentionGradients total;
  for (const Segment& s : segments) {
    const DropoutRows dropout{rng_state, counters, s.first_q};
    const AttentionGradients g =
        dense_backward(outputs.of(s), prepare(s, query, key, value, dropout, o), key.size(1), o);
    queries.push_back(g.query.squeeze(0));
    keys.push_back(g.key.squeeze(0));
    values.push_back(g.value.squeeze(0));
    if (g.bias.defined()) biases.push_back(g.bias);
    if (g.sinks.defined()) add_to(total.sinks, g.sinks);
  }
  const auto type = o.result_dtype.value_or(query.scalar_type());
  total.query = with_tail(std::move(queries), *o.cu_seqlens_q, query, type);
  total.key = with_tail(std::move(keys), *o.cu_seqlens_k, key, type);
  total.value = with_tail(std::move(values), *o.cu_seqlens_k, value, type);
  if (is_given(o.bias)) total.bias = bias_from_parts(biases, *o.bias);
  return total;
}

}  // namespace cuda_ext
