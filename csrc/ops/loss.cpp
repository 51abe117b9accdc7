// Statistics of logits that are never in memory as a whole, of which cuda_ext/loss.py makes losses: logit_statistics
// forms tiles of logits by products, reduces each to numbers per row, and drops it. Backward forms the tiles again.
// linear_loss, a weighted sum of the statistics, instead forms its gradients in forward, while the rows are complete.
// Both reuse the products of the GEMM ops and two passes over a tile (loss/loss.h).
#include "ops/torch_headers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "loss/loss.h"
#include "ops/gemm_autograd.h"
#include "ops/loss_composed.h"

namespace cuda_ext {
namespace {

using Statistics = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kTileRows = 1024, kColumnUnit = 128;

// The arguments of all these ops, checked.
struct Logits {
  const char* op;
  Tensor input, weight;  // (M, K), (V, K)
  Tensor bias;           // scale * bias, in the accumulation type; may be undefined
  Tensor target, coefficients;
  LossOptions options;
  at::ScalarType type;  // of accumulation
  int64_t rows, columns;

  Logits(const char* name, const Tensor& input_, const Tensor& weight_, const OptionalTensor& bias_,
         const OptionalTensor& target_, const OptionalTensor& coefficients_, const LossOptions& options_)
      : op(name), input(input_), weight(weight_), options(options_) {
    check_projection(op, "input", input, "linear_weight", weight, "linear_bias", bias_, false);
    CUDA_EXT_CHECK(input.dim() == 2, op, "expected input of shape (M, K), got ", shape_string(input));
    type = accumulation_type(input.scalar_type());
    rows = input.size(0);
    columns = weight.size(0);
    if (is_given(bias_)) bias = bias_->to(type) * options.scale;
    if (is_given(target_)) set_target(*target_);
    if (is_given(coefficients_)) set_coefficients(*coefficients_);
  }

  // CUDA kernels do not compute in float64.
  bool composed() const { return type == at::kDouble && kernels_on(input.device()) != Kernels::kCpu; }
  Tensor row_values(double value) const { return at::full({rows}, value, input.options().dtype(type)); }

 private:
  void set_target(const Tensor& given) {
    check_same_device(op, "target", given, "input", input);
    CUDA_EXT_CHECK(given.scalar_type() == at::kLong && given.dim() == 1 && given.size(0) == rows, op,
                   "expected target of dtype int64 and shape (", rows, ",), got ", dtype_name(given.scalar_type()), " ",
                   shape_string(given));
    target = given.contiguous();
    if (kernels_on(input.device()) != Kernels::kCpu) return;
    const int64_t* values = target.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows; ++i)
      TORCH_CHECK_INDEX(values[i] == options.ignore_index || (values[i] >= 0 && values[i] < columns), CUDA_EXT_OP(""),
                        op, ": expected targets in [0, ", columns, ") or ignore_index ", options.ignore_index, ", got ",
                        values[i], " at row ", i);
  }
  void set_coefficients(const Tensor& given) {
    check_same_device(op, "coefficients", given, "input", input);
    CUDA_EXT_CHECK(is_floating(given.scalar_type()) && given.dim() >= 1 && given.dim() <= 2 &&
                       given.size(-1) == columns && (given.dim() == 1 || given.size(0) == rows),
                   op, "expected coefficients of shape (", columns, ",) or (", rows, ", ", columns, "), got ",
                   shape_string(given));
    coefficients = type == at::kDouble ? given.to(type) : given.scalar_type() == at::kDouble ? given.to(type) : given;
    if (coefficients.stride(-1) != 1) coefficients = coefficients.contiguous();
  }
};

// How many rows and columns a tile has; its logits and their gradient fit in `limit` bytes.
struct TileSize {
  int64_t rows, columns;
};

int64_t bytes_of_element(const Logits& logits) {
  const int64_t own = int64_t(c10::elementSize(logits.type));
  return logits.type == logits.input.scalar_type() ? own : own + int64_t(logits.input.element_size());
}

TileSize tile_of_parts(const Logits& logits) {
  const int64_t rows = std::max<int64_t>(1, std::min(logits.rows, kTileRows));
  // Sums of a part of a 16-bit weight's gradient are float32.
  const bool has_sums = logits.type != logits.input.scalar_type();
  // Sums over the columns of a row have other bits for other tiles.
  const int64_t planned_rows = is_batch_invariant() ? kTileRows : rows;
  const int64_t column_bytes = planned_rows * bytes_of_element(logits) + (has_sums ? 4 * logits.input.size(1) : 0);
  const int64_t fit = logits.options.memory_limit / column_bytes / kColumnUnit * kColumnUnit;
  return {rows, std::clamp(fit, kColumnUnit, std::max(kColumnUnit, logits.columns))};
}
TileSize tile_of_rows(const Logits& logits) {
  const int64_t row_bytes = std::max<int64_t>(1, logits.columns) * bytes_of_element(logits);
  const int64_t fit =
      std::clamp<int64_t>(logits.options.memory_limit / row_bytes, 1, std::max<int64_t>(1, logits.rows));
  const int64_t tiles = (logits.rows + fit - 1) / fit;
  return {tiles == 0 ? 1 : (logits.rows + tiles - 1) / tiles, logits.columns};
}

// out (+)= alpha a @ b + bias.
void product_into(const char* op, const Tensor& a, const Tensor& b, const Tensor& bias, double alpha, bool accumulate,
                  const Tensor& out) {
  if (out.numel() == 0) return;
  GemmCall call = describe_gemm(op, a, b, accumulate ? OptionalTensor(out) : std::nullopt, optional(bias), std::nullopt,
                                alpha, 1.0, out.scalar_type());
  call.params.out = output(out);
  run_gemm(op, out, call.params);
}

// The tiles of a call, one after the other in the same memory.
class Tiles {
 public:
  Tiles(const Logits& logits, TileSize size, bool for_backward)
      : logits_(logits),
        size_(size),
        logits_buffer_(empty_beside(logits.input, {size.rows * size.columns}, logits.type)),
        grad_buffer_(logits.type == logits.input.scalar_type() || !for_backward
                         ? logits_buffer_
                         : empty_beside(logits.input, {size.rows * size.columns}, logits.input.scalar_type())) {}

  // Moves to a tile and forms x, its logits before softcap.
  void form(int64_t row, int64_t column) {
    row_ = row;
    column_ = column;
    rows_ = std::min(size_.rows, logits_.rows - row);
    columns_ = std::min(size_.columns, logits_.columns - column);
    product_into(logits_.op, input(), weight().t(), logits_.bias.defined() ? of_columns(logits_.bias) : Tensor(),
                 logits_.options.scale, false, buffer(logits_buffer_));
  }

  void update(const Tensor& max, const Tensor& sum, const Tensor& moment, const Tensor& dot, const Tensor& picked) {
    const auto of = [&](const Tensor& t) { return t.defined() ? of_rows(t).data_ptr() : nullptr; };
    const LogitStatisticsParams params{
        describe(), logits_buffer_.data_ptr(), {of(max), of(sum), of(moment), of(dot), of(picked)}};
    run([&](const CudaKernels& kernels, void* stream) { kernels.logit_statistics(params, stream); },
        [&] { launch_logit_statistics(params); });
  }

  // The gradient at input @ weight^T + bias, from the gradients of the statistics.
  Tensor gradient(const Tensor& lse, const Tensor& lse_low, const Tensor& entropy, const RowGradients& by,
                  bool capped) {
    const auto of = [&](const Tensor& t) -> const void* { return t.defined() ? of_rows(t).const_data_ptr() : nullptr; };
    const Tensor grad = buffer(grad_buffer_);
    // nll = lse - picked. The sign of the entropy's term is the kernel's.
    const Tensor by_lse = !by.nll.defined() ? by.lse : by.lse.defined() ? by.lse + by.nll : by.nll;
    const Tensor by_picked = by.nll.defined() ? -by.nll : Tensor();
    const Tensor by_entropy = by.entropy.defined() ? -by.entropy : Tensor();
    LogitGradParams params;
    params.tile = describe();
    params.logits = logits_buffer_.const_data_ptr();
    params.capped = capped;
    params.scale = logits_.options.scale;
    params.lse = of(lse);
    params.lse_low = of(lse_low);
    params.entropy = by_entropy.defined() ? of(entropy) : nullptr;
    params.by_lse = of(by_lse);
    params.by_entropy = of(by_entropy);
    params.by_dot = of(by.dot);
    params.by_picked = of(by_picked);
    params.grad = output(grad);
    run([&](const CudaKernels& kernels, void* stream) { kernels.logit_grad(params, stream); },
        [&] { launch_logit_grad(params); });
    return grad;
  }

  Tensor input() const { return of_rows(logits_.input); }
  Tensor weight() const { return of_columns(logits_.weight); }
  Tensor of_rows(const Tensor& tensor) const { return tensor.narrow(0, row_, rows_); }
  Tensor of_columns(const Tensor& tensor) const { return tensor.narrow(0, column_, columns_); }

 private:
  Tensor buffer(const Tensor& flat) const { return flat.narrow(0, 0, rows_ * columns_).view({rows_, columns_}); }

  LogitTile describe() const {
    LogitTile tile{rows_, columns_, column_, to_dtype(logits_.type), logits_.options.softcap};
    tile.ignore_index = logits_.options.ignore_index;
    if (logits_.target.defined()) tile.target = logits_.target.const_data_ptr<int64_t>() + row_;
    if (!logits_.coefficients.defined()) return tile;
    const bool by_row = logits_.coefficients.dim() == 2;
    const Tensor columns = logits_.coefficients.narrow(-1, column_, columns_);
    const Tensor own = by_row ? of_rows(columns) : columns;
    tile.coefficients.data = own.const_data_ptr();
    tile.coefficients.dtype = to_dtype(own.scalar_type());
    tile.coefficients.row_stride = by_row ? own.stride(0) : 0;
    tile.coefficients.column_stride = 1;
    return tile;
  }

  template <class OnGpu, class OnCpu>
  void run(const OnGpu& on_gpu, const OnCpu& on_cpu) const {
    const CudaKernels* kernels = cuda_kernels(logits_.op, logits_.input.device());
    if (kernels == nullptr) return on_cpu();
    LaunchScope scope(logits_.input.device());
    launch_for(logits_.op, [&] { on_gpu(*kernels, scope.stream()); });
  }

  const Logits& logits_;
  TileSize size_;
  Tensor logits_buffer_, grad_buffer_;
  int64_t row_ = 0, column_ = 0, rows_ = 0, columns_ = 0;
};

// The statistics while tiles are added.
struct RunningStatistics {
  Tensor max, sum, moment, dot, picked;

  RunningStatistics(const Logits& logits, bool with_entropy)
      : max(logits.row_values(-kInfinity)), sum(logits.row_values(0)) {
    if (with_entropy) moment = logits.row_values(0);
    if (logits.coefficients.defined()) dot = logits.row_values(0);
    // A target that no tile has leaves a NaN.
    if (logits.target.defined())
      picked = at::where(logits.target.eq(logits.options.ignore_index), logits.row_values(0),
                         logits.row_values(std::numeric_limits<double>::quiet_NaN()));
  }
  void add(Tiles& tiles) { tiles.update(max, sum, moment, dot, picked); }

  // Differences from the maximum first: it may be large.
  Tensor lse() const { return max + sum.log(); }
  Tensor lse_low(const Tensor& lse) const {
    return at::where(max.isfinite(), (max - lse) + sum.log(), at::zeros_like(max));
  }
  Tensor nll(const Tensor& target, int64_t ignore_index) const {
    return at::where(target.eq(ignore_index), at::zeros_like(max), (max - picked) + sum.log());
  }
  Tensor entropy() const { return moment.defined() ? sum.log() - moment / sum : Tensor(); }
};

// (lse, nll, dot, entropy, lse_low)
Statistics results_of(const Logits& logits, const RunningStatistics& statistics) {
  const auto given = [&](const Tensor& t) { return t.defined() ? t : absent(logits.input, logits.type); };
  const Tensor lse = statistics.lse();
  const Tensor nll = logits.target.defined() ? statistics.nll(logits.target, logits.options.ignore_index) : Tensor();
  return {lse, given(nll), given(statistics.dot), given(statistics.entropy()), statistics.lse_low(lse)};
}

Statistics logit_statistics(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& target, const OptionalTensor& coefficients, double scale,
                            double softcap, int64_t ignore_index, int64_t memory_limit, bool entropy) {
  const Logits logits("linear_cross_entropy", input, weight, bias, target, coefficients,
                      {scale, softcap, ignore_index, memory_limit});
  if (logits.composed()) {
    const auto all = composed_statistics(input, weight, bias, target, coefficients, logits.options, entropy);
    const auto given = [&](const Tensor& t) { return t.defined() ? t : absent(input, logits.type); };
    return {all[0], given(all[1]), given(all[2]), given(all[3]), at::zeros_like(all[0])};
  }
  RunningStatistics statistics(logits, entropy);
  const TileSize size = tile_of_parts(logits);
  Tiles tiles(logits, size, false);
  for (int64_t row = 0; row < logits.rows; row += size.rows)
    for (int64_t column = 0; column < logits.columns; column += size.columns) {
      tiles.form(row, column);
      statistics.add(tiles);
    }
  return results_of(logits, statistics);
}

// The gradients of input, weight and bias, as tiles add to them. Sums of several tiles are in the accumulation type.
class GradientSums {
 public:
  GradientSums(const Logits& logits, const std::array<bool, 3>& wanted, TileSize size)
      : logits_(logits), wanted_(wanted) {
    const auto type = logits.input.scalar_type();
    if (wanted[0])
      input_ = empty_beside(logits.input, {logits.rows, logits.input.size(1)},
                            size.columns < logits.columns ? logits.type : type);
    if (wanted[1])
      weight_ = empty_beside(logits.input, {logits.columns, logits.input.size(1)},
                             size.columns == logits.columns && size.rows < logits.rows ? logits.type : type);
    if (wanted[2]) bias_ = at::zeros({logits.columns}, logits.input.options().dtype(logits.type));
    // Tiles go down the columns first if these are in parts: then a part of weight_ is complete after the last row.
    if (wanted[1] && size.columns < logits.columns && size.rows < logits.rows && logits.type != type)
      part_ = empty_beside(logits.input, {size.columns * logits.input.size(1)}, logits.type);
  }

  void add(const Tiles& tiles, const Tensor& grad, bool first_row, bool last_row, bool first_column) {
    if (wanted_[0]) {
      const Tensor to = tiles.of_rows(input_);
      product_into(logits_.op, grad, tiles.weight(), Tensor(), 1.0, !first_column, to);
    }
    if (wanted_[1]) {
      Tensor to = tiles.of_columns(weight_);
      const Tensor result = to;
      if (part_.defined()) to = part_.narrow(0, 0, to.numel()).view(to.sizes());
      product_into(logits_.op, grad.t(), tiles.input(), Tensor(), 1.0, !first_row, to);
      if (part_.defined() && last_row) result.copy_(to);
    }
    if (wanted_[2]) tiles.of_columns(bias_).add_(bias_gradient(logits_.op, grad, true, logits_.type));
  }

  Gradients results(at::ScalarType bias_type) {
    const auto type = logits_.input.scalar_type();
    if (logits_.rows == 0 && wanted_[1]) weight_.zero_();
    if (logits_.columns == 0 && wanted_[0]) input_.zero_();
    const auto result = [&](bool wanted, const Tensor& t, at::ScalarType to) {
      return wanted ? t.to(to) : absent(logits_.input, type);
    };
    return {result(wanted_[0], input_, type), result(wanted_[1], weight_, type), result(wanted_[2], bias_, bias_type)};
  }

 private:
  const Logits& logits_;
  std::array<bool, 3> wanted_;
  Tensor input_, weight_, bias_, part_;
};

Gradients logit_statistics_backward(const OptionalTensor& grad_lse, const OptionalTensor& grad_nll,
                                    const OptionalTensor& grad_dot, const OptionalTensor& grad_entropy,
                                    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                    const OptionalTensor& target, const OptionalTensor& coefficients, const Tensor& lse,
                                    const Tensor& lse_low, const OptionalTensor& entropy, double scale, double softcap,
                                    int64_t ignore_index, int64_t memory_limit, std::array<bool, 3> output_mask) {
  const Logits logits("linear_cross_entropy", input, weight, bias, target, coefficients,
                      {scale, softcap, ignore_index, memory_limit});
  const auto bias_type = is_given(bias) ? bias->scalar_type() : input.scalar_type();
  const auto values = [&](const OptionalTensor& t) { return is_given(t) ? t->to(logits.type).contiguous() : Tensor(); };
  RowGradients by{values(grad_lse), values(grad_nll), values(grad_dot), values(grad_entropy)};
  if (by.nll.defined()) by.nll = at::where(logits.target.eq(ignore_index), at::zeros_like(by.nll), by.nll);
  if (logits.composed()) {
    const auto all = composed_gradients(by, input, weight, bias, target, coefficients, logits.options, output_mask);
    const auto given = [&](const Tensor& t) { return t.defined() ? t : absent(input, input.scalar_type()); };
    return {given(all[0]), given(all[1]), given(all[2])};
  }
  const TileSize size = tile_of_parts(logits);
  Tiles tiles(logits, size, true);
  GradientSums sums(logits, output_mask, size);
  for (int64_t column = 0; column < logits.columns; column += size.columns)
    for (int64_t row = 0; row < logits.rows; row += size.rows) {
      tiles.form(row, column);
      const Tensor grad = tiles.gradient(lse, lse_low, value_or_empty(entropy), by, false);
      sums.add(tiles, grad, row == 0, row + size.rows >= logits.rows, column == 0);
    }
  return sums.results(bias_type);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> composed_loss(const Logits& logits, const Tensor& input,
                                                         const Tensor& weight, const OptionalTensor& bias,
                                                         const OptionalTensor& target,
                                                         const OptionalTensor& coefficients,
                                                         const OptionalTensor& by_lse, const OptionalTensor& by_nll,
                                                         const OptionalTensor& by_dot, const OptionalTensor& by_square,
                                                         const std::array<bool, 3>& output_mask) {
  const auto all = composed_statistics(input, weight, bias, target, coefficients, logits.options, false);
  const RowGradients by = gradients_of_loss(all[0], by_lse, by_nll, by_dot, by_square);
  const auto gradients = composed_gradients(by, input, weight, bias, target, coefficients, logits.options, output_mask);
  const auto given = [&](const Tensor& t) { return t.defined() ? t : absent(input, input.scalar_type()); };
  return {weighted_sum(all[0], all[1], all[2], by_lse, by_nll, by_dot, by_square), given(gradients[0]),
          given(gradients[1]), given(gradients[2])};
}

// sum(by_lse lse + by_nll nll + by_dot dot + by_square lse^2) and its gradients.
std::tuple<Tensor, Tensor, Tensor, Tensor> linear_loss_forward(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& target,
    const OptionalTensor& coefficients, const OptionalTensor& by_lse, const OptionalTensor& by_nll,
    const OptionalTensor& by_dot, const OptionalTensor& by_square, double scale, double softcap, int64_t ignore_index,
    int64_t memory_limit, std::array<bool, 3> output_mask) {
  const Logits logits("linear_cross_entropy", input, weight, bias, target, coefficients,
                      {scale, softcap, ignore_index, memory_limit});
  if (logits.composed())
    return composed_loss(logits, input, weight, bias, target, coefficients, by_lse, by_nll, by_dot, by_square,
                         output_mask);
  const TileSize size = tile_of_rows(logits);
  Tiles tiles(logits, size, true);
  GradientSums sums(logits, output_mask, size);
  RunningStatistics statistics(logits, false);
  for (int64_t row = 0; row < logits.rows; row += size.rows) {
    tiles.form(row, 0);
    statistics.add(tiles);
    const Tensor lse = statistics.lse();  // of all rows; those of other tiles are not read
    const Tensor grad = tiles.gradient(lse, statistics.lse_low(lse), Tensor(),
                                       gradients_of_loss(lse, by_lse, by_nll, by_dot, by_square), true);
    sums.add(tiles, grad, row == 0, true, true);
  }
  const auto [grad_input, grad_weight, grad_bias] =
      sums.results(is_given(bias) ? bias->scalar_type() : input.scalar_type());
  const auto [lse, nll, dot, entropy, lse_low] = results_of(logits, statistics);
  return {weighted_sum(lse, nll, dot, by_lse, by_nll, by_dot, by_square), grad_input, grad_weight, grad_bias};
}

// The public forms below autograd: without gradients.
Tensor linear_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& target,
                   const OptionalTensor& coefficients, const OptionalTensor& by_lse, const OptionalTensor& by_nll,
                   const OptionalTensor& by_dot, const OptionalTensor& by_square, double scale, double softcap,
                   int64_t ignore_index, int64_t memory_limit) {
  const auto [lse, nll, dot, entropy, lse_low] =
      logit_statistics(input, weight, bias, target, coefficients, scale, softcap, ignore_index, memory_limit, false);
  return weighted_sum(lse, nll, dot, by_lse, by_nll, by_dot, by_square);
}

void save_options(AutogradContext* ctx, const LossOptions& options) {
  save_option(ctx, "scale", options.scale, 1.0);
  save_option(ctx, "softcap", options.softcap);
  save_option(ctx, "ignore_index", options.ignore_index);
  save_option(ctx, "memory_limit", options.memory_limit);
}
LossOptions saved_options(const AutogradContext* ctx) {
  return {saved_option(ctx, "scale", 1.0), saved_option<double>(ctx, "softcap"),
          saved_option<int64_t>(ctx, "ignore_index"), saved_option<int64_t>(ctx, "memory_limit")};
}

// Of the first three inputs of the current node.
std::array<bool, 3> wanted_gradients(const AutogradContext* ctx) {
  return {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
}

}  // namespace

struct LogitStatisticsBackward : torch::autograd::Function<LogitStatisticsBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("LogitStatisticsBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &lse = saved[5], &lse_low = saved[6], &entropy = saved[7];
    const OptionalTensor bias = optional(saved[2]), target = optional(saved[3]), coefficients = optional(saved[4]);
    const LossOptions o = saved_options(ctx);
    const auto wanted = wanted_gradients(ctx);
    bool composed = !lse.defined(), any = false;
    for (const Tensor& grad : grads) {
      any = any || grad.defined();
      composed = composed || (grad.defined() && needs_composed_backward(grad));
    }
    if (!any) return variable_list(3);
    // Gradients of outputs that were not requested are those of empty tensors.
    const auto given = [&](size_t i, bool exists) { return exists ? grads[i] : Tensor(); };
    const RowGradients by{grads[0], given(1, target.has_value()), given(2, coefficients.has_value()),
                          given(3, saved_option<bool>(ctx, "entropy"))};
    if (composed) {
      auto result = composed_gradients(by, input, weight, bias, target, coefficients, o, wanted);
      return {result[0], result[1], result[2]};
    }
    static const auto op = find_op<decltype(logit_statistics_backward)>(CUDA_EXT_OP("logit_statistics_backward"));
    auto [grad_input, grad_weight, grad_bias] = op.call(
        optional(by.lse), optional(by.nll), optional(by.dot), optional(by.entropy), input, weight, bias, target,
        coefficients, lse, lse_low, optional(entropy), o.scale, o.softcap, o.ignore_index, o.memory_limit, wanted);
    return {wanted[0] ? grad_input : Tensor(), wanted[1] ? grad_weight : Tensor(), wanted[2] ? grad_bias : Tensor()};
  }
};

struct LinearLossBackward : torch::autograd::Function<LinearLossBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("LinearLossBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    if (!grads[0].defined()) return variable_list(3);
    const auto saved = ctx->get_saved_variables();
    const auto wanted = wanted_gradients(ctx);
    const Tensor& grad = grads[0];
    if (saved_option<bool>(ctx, "composed") || needs_composed_backward(grad)) return composed(ctx, saved, grad, wanted);
    // In training the factor is 1, which costs nothing to know on a CPU.
    const bool is_one = is_last_pass(ctx) && grad.is_cpu() && !grad.unsafeGetTensorImpl()->is_python_dispatch() &&
                        kernels_on(grad.device()) == Kernels::kCpu && grad.item<double>() == 1.0;
    variable_list result(3);
    for (size_t i = 0; i < 3; ++i)
      if (wanted[i]) result[i] = is_one ? saved[9 + i].detach() : saved[9 + i] * grad.to(saved[9 + i].scalar_type());
    return result;
  }

 private:
  static variable_list composed(const AutogradContext* ctx, const variable_list& saved, const Tensor& grad,
                                const std::array<bool, 3>& wanted) {
    const Tensor &input = saved[0], &weight = saved[1];
    const OptionalTensor bias = optional(saved[2]), target = optional(saved[3]), coefficients = optional(saved[4]),
                         by_square = optional(saved[8]);
    const LossOptions o = saved_options(ctx);
    const Tensor lse =
        by_square.has_value() ? composed_statistics(input, weight, bias, target, coefficients, o, false)[0] : Tensor();
    const RowGradients by =
        gradients_of_loss(lse, optional(saved[5]), optional(saved[6]), optional(saved[7]), by_square);
    const auto times = [&](const Tensor& t) { return t.defined() ? t * grad : t; };
    auto result = composed_gradients({times(by.lse), times(by.nll), times(by.dot), Tensor()}, input, weight, bias,
                                     target, coefficients, o, wanted);
    return {result[0], result[1], result[2]};
  }
};

namespace {

Statistics logit_statistics_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                     const OptionalTensor& target, const OptionalTensor& coefficients, double scale,
                                     double softcap, int64_t ignore_index, int64_t memory_limit, bool entropy) {
  static const auto op = find_op<decltype(logit_statistics)>(CUDA_EXT_OP("logit_statistics"));
  const LossOptions options{scale, softcap, ignore_index, memory_limit};
  const Derivatives wanted = derivatives_of(input, weight, bias);
  Statistics result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(input, weight, bias, target, coefficients, scale, softcap, ignore_index, memory_limit, entropy);
  }();
  auto& [lse, nll, dot, own_entropy, lse_low] = result;
  if (wanted.reverse) {
    const auto node = make_node<LogitStatisticsBackward>(input, weight, bias);
    save_options(&node->ctx_, options);
    save_option(&node->ctx_, "entropy", entropy);
    for (const Tensor& output : {lse, nll, dot, own_entropy}) torch::autograd::set_history(output, node);
    save_variables(node, {input, weight, value_or_empty(bias), value_or_empty(target), value_or_empty(coefficients),
                          wanted.composed ? Tensor() : lse, wanted.composed ? Tensor() : lse_low,
                          wanted.composed || !entropy ? Tensor() : own_entropy});
  }
  if (wanted.forward) {
    const auto all = composed_statistics(input, weight, bias, target, coefficients, options, entropy);
    size_t i = 0;
    for (const Tensor& output : {lse, nll, dot, own_entropy}) set_tangent(output, tangent_of(all[i++]));
  }
  return result;
}

Tensor linear_loss_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& target, const OptionalTensor& coefficients,
                            const OptionalTensor& by_lse, const OptionalTensor& by_nll, const OptionalTensor& by_dot,
                            const OptionalTensor& by_square, double scale, double softcap, int64_t ignore_index,
                            int64_t memory_limit) {
  static const auto op = find_op<decltype(linear_loss)>(CUDA_EXT_OP("linear_loss"));
  static const auto forward_op = find_op<decltype(linear_loss_forward)>(CUDA_EXT_OP("linear_loss_forward"));
  const LossOptions options{scale, softcap, ignore_index, memory_limit};
  const Derivatives wanted = derivatives_of(input, weight, bias);
  Tensor loss, gradients[3];
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (wanted.reverse && !wanted.composed)
      std::tie(loss, gradients[0], gradients[1], gradients[2]) = forward_op.call(
          input, weight, bias, target, coefficients, by_lse, by_nll, by_dot, by_square, scale, softcap, ignore_index,
          memory_limit, {input.requires_grad(), weight.requires_grad(), is_given(bias) && bias->requires_grad()});
    else
      loss = op.call(input, weight, bias, target, coefficients, by_lse, by_nll, by_dot, by_square, scale, softcap,
                     ignore_index, memory_limit);
  }
  if (wanted.reverse) {
    const auto node = make_node<LinearLossBackward>(input, weight, bias);
    save_options(&node->ctx_, options);
    save_option(&node->ctx_, "composed", wanted.composed);
    attach_node(node,
                {input, weight, value_or_empty(bias), value_or_empty(target), value_or_empty(coefficients),
                 value_or_empty(by_lse), value_or_empty(by_nll), value_or_empty(by_dot), value_or_empty(by_square),
                 gradients[0], gradients[1], gradients[2]},
                loss);
  }
  if (wanted.forward) {
    const auto all = composed_statistics(input, weight, bias, target, coefficients, options, false);
    set_tangent(loss, tangent_of(weighted_sum(all[0], all[1], all[2], by_lse, by_nll, by_dot, by_square)));
  }
  return loss;
}

template <c10::DeviceType device>
Statistics logit_statistics_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                     const OptionalTensor& target, const OptionalTensor& coefficients, double scale,
                                     double softcap, int64_t ignore_index, int64_t memory_limit, bool entropy) {
  static const auto op = find_op<decltype(logit_statistics)>(CUDA_EXT_OP("logit_statistics"));
  const Autocast cast(device);
  return op.call(cast(input), cast(weight), cast(bias), target, coefficients, scale, softcap, ignore_index,
                 memory_limit, entropy);
}

template <c10::DeviceType device>
Tensor linear_loss_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& target, const OptionalTensor& coefficients,
                            const OptionalTensor& by_lse, const OptionalTensor& by_nll, const OptionalTensor& by_dot,
                            const OptionalTensor& by_square, double scale, double softcap, int64_t ignore_index,
                            int64_t memory_limit) {
  static const auto op = find_op<decltype(linear_loss)>(CUDA_EXT_OP("linear_loss"));
  const Autocast cast(device);
  return op.call(cast(input), cast(weight), cast(bias), target, coefficients, by_lse, by_nll, by_dot, by_square, scale,
                 softcap, ignore_index, memory_limit);
}

void register_kernels(torch::Library& m) {
  m.impl("logit_statistics", logit_statistics);
  m.impl("logit_statistics_backward", logit_statistics_backward);
  m.impl("linear_loss", linear_loss);
  m.impl("linear_loss_forward", linear_loss_forward);
}

}  // namespace

#define LOGITS "Tensor input, Tensor weight, Tensor? bias, Tensor? target, Tensor? coefficients"
#define LOGIT_OPTIONS "float scale, float softcap, int ignore_index, int memory_limit"
#define LOSS_WEIGHTS "Tensor? by_lse, Tensor? by_nll, Tensor? by_dot, Tensor? by_square"
#define THREE_GRADIENTS "Tensor grad_input, Tensor grad_weight, Tensor grad_bias"

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("logit_statistics(" LOGITS ", *, " LOGIT_OPTIONS
        ", bool entropy) -> (Tensor lse, Tensor nll, Tensor dot, Tensor entropy, Tensor lse_low)",
        tags);
  m.def("logit_statistics_backward(Tensor? grad_lse, Tensor? grad_nll, Tensor? grad_dot, Tensor? grad_entropy, " LOGITS
        ", Tensor lse, Tensor lse_low, Tensor? entropy, *, " LOGIT_OPTIONS ", bool[3] output_mask) -> (" THREE_GRADIENTS
        ")",
        tags);
  m.def("linear_loss(" LOGITS ", " LOSS_WEIGHTS ", *, " LOGIT_OPTIONS ") -> Tensor", tags);
  m.def("linear_loss_forward(" LOGITS ", " LOSS_WEIGHTS ", *, " LOGIT_OPTIONS
        ", bool[3] output_mask) -> (Tensor loss, " THREE_GRADIENTS ")",
        tags);
  register_layout_errors(m, {"logit_statistics", "logit_statistics_backward", "linear_loss", "linear_loss_forward"});
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("logit_statistics", logit_statistics_autograd);
  m.impl("linear_loss", linear_loss_autograd);
  for (const char* name : {"logit_statistics_backward", "linear_loss_forward"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) {
  m.impl("logit_statistics", logit_statistics_autocast<c10::DeviceType::CPU>);
  m.impl("linear_loss", linear_loss_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) {
  m.impl("logit_statistics", logit_statistics_autocast<c10::DeviceType::CUDA>);
  m.impl("linear_loss", linear_loss_autocast<c10::DeviceType::CUDA>);
}

}  // namespace cuda_ext
