// Statistics of logits that are never in memory as a whole, of which cuda_ext/loss.py makes losses. Backward forms the
// logits again. linear_loss, a weighted sum of the statistics, instead forms its gradients in forward, while the rows
// are complete.
//
// Tiles of logits are products of the GEMM ops and two passes over a tile (loss/loss.h). On GPUs the epilogue of the
// product is such a pass, and of a tile only the gradient is in memory, and the logits where the gradient is formed in
// forward (loss/logits.cuh); not for operands that are not contiguous along K, nor for probabilities.
#include "ops/torch_headers.h"

#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "loss/loss.h"
#include "ops/gemm_autograd.h"
#include "ops/loss_ops.h"

namespace cuda_ext {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kTileRows = 1024, kTileUnit = 128;
// On CPUs, with kTileRows. Measured on Sapphire Rapids, forward and backward at 1024 x 65536 x 512 and 2048 x 32768 x
// 1024: a tile of 2048 columns is at most 3 % slower than the best, one of 16384 columns up to 23 %.
constexpr int64_t kColumnsInCache = 2560;

// The arguments of all these ops, checked.
struct Logits {
  static constexpr const char* op = "linear_cross_entropy";
  Tensor input, weight;  // (M, K), (V, K)
  Tensor bias;           // scale * bias, in the accumulation type; may be undefined
  Tensor target, coefficients;
  LossOptions options;
  at::ScalarType type;  // of accumulation
  int64_t rows, columns;

  // Targets that forward has checked need no check in backward.
  Logits(const Tensor& input_, const Tensor& weight_, const OptionalTensor& bias_, const OptionalTensor& target_,
         const OptionalTensor& coefficients_, const LossOptions& options_, bool checks_targets = true)
      : options(options_), checks_targets_(checks_targets) {
    check_projection(op, "input", input_, "linear_weight", weight_, "linear_bias", bias_, false);
    CUDA_EXT_CHECK(input_.dim() == 2, op, "expected input of shape (M, K), got ", shape_string(input_));
    input = left_operand(input_);
    weight = with_unit_stride(weight_);
    type = accumulation_type(input.scalar_type());
    rows = input.size(0);
    columns = weight.size(0);
    if (is_given(bias_)) bias = bias_->to(type) * options.scale;
    if (is_given(target_)) set_target(*target_);
    if (is_given(coefficients_)) set_coefficients(*coefficients_);
  }

  // CUDA kernels do not compute in float64.
  bool composed() const { return type == at::kDouble && kernels_on(input.device()) != Kernels::kCpu; }
  const CudaKernels* kernels() const { return cuda_kernels(op, input.device()); }
  // Whether products of these operands have epilogues that make tiles in memory unnecessary.
  bool has_epilogues() const {
    return kernels() != nullptr && input.size(1) > 1 && input.stride(1) == 1 && weight.stride(1) == 1 &&
           !(coefficients.defined() && coefficients.dim() == 2);
  }
  int64_t features() const { return input.size(1); }
  bool is_16_bit() const { return type != input.scalar_type(); }
  Tensor row_values(double value) const { return at::full({rows}, value, input.options().dtype(type)); }

 private:
  void set_target(const Tensor& given) {
    check_same_device(op, "target", given, "input", input);
    CUDA_EXT_CHECK(given.scalar_type() == at::kLong && given.dim() == 1 && given.size(0) == rows, op,
                   "expected target of dtype int64 and shape (", rows, ",), got ", dtype_name(given.scalar_type()), " ",
                   shape_string(given));
    target = given.contiguous();
    if (!checks_targets_) return;
    const LossTargets targets{target.const_data_ptr<int64_t>(), rows, columns, options.ignore_index};
    if (kernels_on(input.device()) == Kernels::kCpu) {
      for (int64_t i = 0; i < rows; ++i)
        TORCH_CHECK_INDEX(!targets.is_wrong(i), CUDA_EXT_OP(""), op, ": expected targets in [0, ", columns,
                          ") or ignore_index ", options.ignore_index, ", got ", targets.target[i], " at row ", i);
    } else {
      LaunchScope scope(input.device());
      launch_for(op, [&] { kernels()->report_wrong_targets(targets, scope.stream()); });
    }
  }
  void set_coefficients(const Tensor& given) {
    check_same_device(op, "coefficients", given, "input", input);
    CUDA_EXT_CHECK(is_floating(given.scalar_type()) && given.dim() >= 1 && given.dim() <= 2 &&
                       given.size(-1) == columns && (given.dim() == 1 || given.size(0) == rows),
                   op, "expected coefficients of shape (", columns, ",) or (", rows, ", ", columns, "), got ",
                   shape_string(given));
    // Of the classes: the accumulation type. Probabilities are read as they are, if kernels can.
    const bool converts = given.dim() == 1 || type == at::kDouble || given.scalar_type() == at::kDouble;
    coefficients = converts ? given.to(type) : given;
    if (coefficients.stride(-1) != 1) coefficients = coefficients.contiguous();
  }

  bool checks_targets_;
};

// How many rows and columns a tile has; what it needs beside the results fits in the limit.
struct TileSize {
  int64_t rows, columns;
};

// Bytes of an element of a tile with logits and their gradient.
int64_t bytes_of_element(at::ScalarType type, at::ScalarType own) {
  return int64_t(c10::elementSize(type)) + (type == own ? 0 : int64_t(c10::elementSize(own)));
}

int64_t whole_units(int64_t count, int64_t most) {
  return std::clamp(count / kTileUnit * kTileUnit, kTileUnit, std::max(kTileUnit, most));
}

// Of column sums (LogitGradParams).
int64_t groups_of_rows(int64_t rows) { return (rows + kSummedRows - 1) / kSummedRows; }

// Of a tile in memory that does not need complete rows.
int64_t most_columns(const Logits& logits) {
  return logits.input.is_cpu() ? std::min(logits.columns, kColumnsInCache) : logits.columns;
}

// For statistics: of tiles in memory, or of the parts of rows that epilogues leave.
TileSize tile_of_statistics(const Logits& logits) {
  const int64_t limit = logits.options.memory_limit;
  if (logits.has_epilogues()) {
    constexpr int64_t kLeastColumns = 32, kNumbers = 4;  // of a part
    const int64_t row_bytes = (logits.columns + kLeastColumns - 1) / kLeastColumns * kNumbers * int64_t(sizeof(float));
    return {whole_units(limit / std::max<int64_t>(1, row_bytes), logits.rows), std::max<int64_t>(1, logits.columns)};
  }
  // The bits of a row must not depend on the number of rows, if that is asked for.
  const int64_t rows = is_batch_invariant() ? kTileRows : std::clamp<int64_t>(logits.rows, 1, kTileRows);
  const int64_t fit = limit / (rows * int64_t(c10::elementSize(logits.type)));
  return {rows, whole_units(fit, most_columns(logits))};
}

// For backward. Sums over several tiles, of a part of a 16-bit weight's gradient, are float32.
TileSize tile_of_backward(const Logits& logits, bool has_bias) {
  const bool in_registers = logits.has_epilogues();
  const int64_t limit = logits.options.memory_limit, own = int64_t(logits.input.element_size());
  const int64_t element = in_registers ? own : bytes_of_element(logits.type, logits.input.scalar_type());
  // Each row of tiles adds to the gradient of the weight, each column to that of the input: a square tile moves least.
  // CPUs want rows of a tile in their caches.
  const int64_t square = int64_t(std::sqrt(double(limit / element)));
  // Of fewer rows, more columns are left out by a filter.
  const bool few_rows = !in_registers || logits.options.filter_gradients;
  const int64_t most_rows = few_rows ? kTileRows : std::max(kTileRows, square / kTileUnit * kTileUnit);
  const bool invariant = is_batch_invariant();
  const int64_t rows = invariant ? most_rows : std::clamp<int64_t>(logits.rows, 1, most_rows);
  int64_t sums = logits.is_16_bit() && (invariant || rows < logits.rows) ? 4 * logits.features() : 0;
  if (logits.is_16_bit() && in_registers && has_bias) sums += 4 * groups_of_rows(rows);
  return {rows, whole_units(limit / (rows * element + sums), most_columns(logits))};
}

// Bytes of the float32 sums of a 16-bit weight's gradient, if complete rows do not fit in one tile.
int64_t bytes_of_sums(int64_t columns, int64_t features, at::ScalarType type) {
  return type == accumulation_type(type) ? 0 : 4 * columns * features;
}

// Of complete rows.
TileSize tile_of_rows(const Logits& logits) {
  const auto type = logits.input.scalar_type();
  const int64_t limit = logits.options.memory_limit, rows = std::max<int64_t>(1, logits.rows);
  const int64_t row_bytes = std::max<int64_t>(1, logits.columns) * bytes_of_element(logits.type, type);
  const int64_t sums = limit / row_bytes >= rows ? 0 : bytes_of_sums(logits.columns, logits.features(), type);
  const int64_t left = std::max(limit - sums, limit / 2);  // more sums than that are beyond the limit
  const int64_t fit = std::clamp<int64_t>(left / row_bytes, 1, rows);
  const int64_t tiles = (rows + fit - 1) / fit;
  return {(rows + tiles - 1) / tiles, logits.columns};
}

// out = alpha a @ b + beta out
void product_into(const char* op, const Tensor& a, const Tensor& b, double alpha, double beta, const Tensor& out) {
  if (out.numel() == 0) return;
  GemmCall call = describe_gemm(op, a, b, beta != 0.0 ? OptionalTensor(out) : std::nullopt, std::nullopt, std::nullopt,
                                alpha, beta, out.scalar_type());
  call.params.out = output(out);
  run_gemm(op, out, call.params);
}

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

// The gradients of a loss at the statistics of each row, with what the softmax needs.
struct SavedRows {
  Tensor lse, lse_low, entropy;
  RowGradients by;
};

struct TileGradient {
  Tensor grad;      // (rows, columns), of the operands' dtype
  Tensor summands;  // (any, columns): their sum over rows is the bias's gradient
};

// The tiles of a call, one after the other in the same memory.
class Tiles {
 public:
  Tiles(const Logits& logits, TileSize size) : logits_(logits), size_(size) {}

  void move_to(int64_t row, int64_t column) {
    row_ = row;
    column_ = column;
    rows_ = std::min(size_.rows, logits_.rows - row);
    columns_ = std::min(size_.columns, logits_.columns - column);
  }

  // Adds the tile to the statistics of its rows. `keeps`: the logits are then in memory, for `gradient`.
  void add_to(const RunningStatistics& statistics, bool keeps) {
    const auto of = [&](const Tensor& t) { return t.defined() ? of_rows(t).data_ptr() : nullptr; };
    LogitStatisticsParams params{
        describe(),
        nullptr,
        {of(statistics.max), of(statistics.sum), of(statistics.moment), of(statistics.dot), of(statistics.picked)}};
    if (keeps) params.logits = logits_memory().data_ptr();
    if (logits_.has_epilogues()) {
      const GemmCall call = product();
      bool done = false;
      launch([&](const CudaKernels& kernels, LaunchScope& scope) {
        done = kernels.product_statistics(call.params, params, scope.allocator(), scope.stream(), float32_product());
      });
      if (done) return;
    }
    form();
    params.logits = logits_memory().data_ptr();
    launch([&](const CudaKernels& kernels, LaunchScope& scope) { kernels.logit_statistics(params, scope.stream()); },
           [&] { launch_logit_statistics(params); });
  }

  // The gradient at input @ weight^T + bias. `kept`: add_to has kept the logits, which have their softcap.
  TileGradient gradient(const SavedRows& rows, bool kept, bool has_bias) {
    const auto of = [&](const Tensor& t) -> const void* { return t.defined() ? of_rows(t).const_data_ptr() : nullptr; };
    const auto type = logits_.input.scalar_type();
    // In the memory of the logits, if there is one and elements have the same size.
    if (!grad_buffer_.defined())
      grad_buffer_ = logits_.is_16_bit() || (!kept && logits_.has_epilogues()) ? buffer_of(type) : logits_memory();
    const Tensor grad = part_of(grad_buffer_);
    // nll = lse - picked. The sign of the entropy's term is the kernel's.
    const RowGradients& by = rows.by;
    const Tensor by_lse = !by.nll.defined() ? by.lse : by.lse.defined() ? by.lse + by.nll : by.nll;
    const Tensor by_picked = by.nll.defined() ? -by.nll : Tensor();
    const Tensor by_entropy = by.entropy.defined() ? -by.entropy : Tensor();
    LogitGradParams params;
    params.tile = describe();
    params.capped = kept;
    params.scale = logits_.options.scale;
    params.lse = of(rows.lse);
    params.lse_low = of(rows.lse_low);
    params.entropy = by_entropy.defined() ? of(rows.entropy) : nullptr;
    params.by_lse = of(by_lse);
    params.by_entropy = of(by_entropy);
    params.by_dot = of(by.dot);
    params.by_picked = of(by_picked);
    params.grad = output(grad);
    const bool sums_apart = has_bias && logits_.is_16_bit();
    if (!kept && logits_.has_epilogues()) {
      const GemmCall call = product();
      bool done = false;
      Tensor sums;
      if (sums_apart) {
        sums = column_sums();
        params.column_sums = sums.data_ptr<float>();
      }
      launch([&](const CudaKernels& kernels, LaunchScope& scope) {
        done = kernels.product_grad(call.params, params, scope.stream(), float32_product());
      });
      if (done) return {grad, sums_apart ? sums : grad};
    }
    if (!kept) form();
    params.logits = logits_buffer_.const_data_ptr();
    if (sums_apart) params.unrounded = logits_buffer_.data_ptr();
    launch([&](const CudaKernels& kernels, LaunchScope& scope) { kernels.logit_grad(params, scope.stream()); },
           [&] { launch_logit_grad(params); });
    return {grad, sums_apart ? part_of(logits_buffer_) : grad};
  }

  // Indices of the columns that a filter leaves, or an undefined tensor for all columns. A GPU's host waits for it.
  Tensor columns_that_count(const Tensor& grad, const RowGradients& by) const {
    if (!logits_.options.filter_gradients || grad.numel() == 0) return {};
    // Of softmax - target a sixteenth of what can change a number of the operands' dtype by rounding: 2^-12 in
    // bfloat16 (Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009, section 4.3).
    const double resolution = logits_.input.scalar_type() == at::kBFloat16 ? 0x1p-12
                              : logits_.input.scalar_type() == at::kHalf   ? 0x1p-15
                                                                           : 0x1p-28;
    Tensor factor;  // of softmax - target, the largest of the rows
    for (const Tensor& t : {by.lse, by.nll, by.entropy, by.dot})
      if (t.defined()) factor = factor.defined() ? factor + of_rows(t).abs() : of_rows(t).abs();
    const Tensor least = factor.max() * (resolution * std::abs(logits_.options.scale));
    // On CPUs several times faster than reductions of absolute values.
    const Tensor largest = at::maximum(grad.amax(0), grad.amin(0).neg());
    const Tensor kept = largest.le(least).logical_not().nonzero().view(-1);  // with NaN
    return kept.numel() > columns_ / 4 * 3 ? Tensor() : kept;
  }

  Tensor input() const { return of_rows(logits_.input); }
  Tensor weight() const { return of_columns(logits_.weight); }
  Tensor of_rows(const Tensor& tensor) const { return tensor.narrow(0, row_, rows_); }
  Tensor of_columns(const Tensor& tensor) const { return tensor.narrow(0, column_, columns_); }

 private:
  Tensor buffer_of(at::ScalarType type) const {
    return empty_beside(logits_.input, {std::min(size_.rows, logits_.rows) * std::min(size_.columns, logits_.columns)},
                        type);
  }
  Tensor part_of(const Tensor& flat) const { return flat.narrow(0, 0, rows_ * columns_).view({rows_, columns_}); }

  // x of the tile, but for the output.
  GemmCall product() const {
    const Tensor bias = logits_.bias.defined() ? of_columns(logits_.bias) : Tensor();
    return describe_gemm(logits_.op, input(), weight().t(), std::nullopt, optional(bias), std::nullopt,
                         logits_.options.scale, 1.0, logits_.type);
  }
  const Tensor& logits_memory() {
    if (!logits_buffer_.defined()) logits_buffer_ = buffer_of(logits_.type);
    return logits_buffer_;
  }
  Tensor column_sums() {
    const int64_t most = groups_of_rows(std::min(size_.rows, logits_.rows)) * std::min(size_.columns, logits_.columns);
    if (!sums_buffer_.defined()) sums_buffer_ = empty_beside(logits_.input, {most}, logits_.type);
    const int64_t groups = groups_of_rows(rows_);
    return sums_buffer_.narrow(0, 0, groups * columns_).view({groups, columns_});
  }
  void form() {
    const Tensor out = part_of(logits_memory());
    if (out.numel() == 0) return;
    GemmCall call = product();
    call.params.out = output(out);
    run_gemm(logits_.op, out, call.params);
  }

  LogitTile describe() const {
    LogitTile tile;
    tile.rows = rows_;
    tile.columns = columns_;
    tile.first_column = column_;
    tile.dtype = to_dtype(logits_.type);
    tile.softcap = logits_.options.softcap;
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

  template <class OnGpu, class OnCpu = void (*)()>
  void launch(const OnGpu& on_gpu, const OnCpu& on_cpu = [] {}) const {
    const CudaKernels* kernels = logits_.kernels();
    if (kernels == nullptr) return on_cpu();
    LaunchScope scope(logits_.input.device());
    launch_for(logits_.op, [&] { on_gpu(*kernels, scope); });
  }

  const Logits& logits_;
  TileSize size_;
  Tensor logits_buffer_, grad_buffer_, sums_buffer_;  // made when they are needed
  int64_t row_ = 0, column_ = 0, rows_ = 0, columns_ = 0;
};

// The outputs (lse, nll, dot, entropy, lse_low).
Statistics results_of(const Logits& logits, const RunningStatistics& statistics) {
  const auto given = [&](const Tensor& t) { return t.defined() ? t : absent(logits.input, logits.type); };
  const Tensor lse = statistics.lse();
  const Tensor nll = logits.target.defined() ? statistics.nll(logits.target, logits.options.ignore_index) : Tensor();
  return {lse, given(nll), given(statistics.dot), given(statistics.entropy()), statistics.lse_low(lse)};
}

Statistics logit_statistics(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& target, const OptionalTensor& coefficients, double scale,
                            double softcap, int64_t ignore_index, int64_t memory_limit, bool filter_gradients,
                            bool entropy) {
  const Logits logits(input, weight, bias, target, coefficients,
                      {scale, softcap, ignore_index, memory_limit, filter_gradients});
  if (logits.composed()) {
    const auto all = composed_statistics(input, weight, bias, target, coefficients, logits.options, entropy);
    const auto given = [&](const Tensor& t) { return t.defined() ? t : absent(input, logits.type); };
    return {all[0], given(all[1]), given(all[2]), given(all[3]), at::zeros_like(all[0])};
  }
  const RunningStatistics statistics(logits, entropy);
  const TileSize size = tile_of_statistics(logits);
  Tiles tiles(logits, size);
  for (int64_t row = 0; row < logits.rows; row += size.rows)
    for (int64_t column = 0; column < logits.columns; column += size.columns) {
      tiles.move_to(row, column);
      tiles.add_to(statistics, false);
    }
  return results_of(logits, statistics);
}

// The gradients of input, weight and bias, as tiles add to them. Tiles go down the columns first, so that a part of the
// weight's gradient is complete after the last row.
class GradientSums {
 public:
  // The weight's gradient may go to a slot; else it is a new tensor.
  GradientSums(const Logits& logits, const std::array<bool, 3>& wanted, TileSize size, const WeightSlot* slot = nullptr)
      : logits_(logits), wanted_(wanted), has_slot_(slot != nullptr && is_given(slot->slot)) {
    const auto type = logits.input.scalar_type();
    const int64_t features = logits.features();
    if (wanted[0])
      input_ = empty_beside(logits.input, {logits.rows, features}, size.columns < logits.columns ? logits.type : type);
    if (has_slot_) {
      check_slot(logits.op, *slot, logits.weight);
      weight_ = *slot->slot;
      alpha_ = slot->alpha;
      beta_ = slot->beta;
    } else if (wanted[1]) {
      weight_ = empty_beside(logits.input, {logits.columns, features}, type);
    }
    if (wanted[2]) bias_ = at::zeros({logits.columns}, logits.input.options().dtype(logits.type));
    if (wanted[1] && size.rows < logits.rows && weight_.scalar_type() != logits.type)
      weight_sums_ = empty_beside(logits.input, {std::min(size.columns, logits.columns) * features}, logits.type);
  }

  // `kept`: the columns of the tile whose gradients count; all, if undefined.
  void add(const Tiles& tiles, const TileGradient& tile, const Tensor& kept, bool first_row, bool last_row,
           bool first_column) {
    const auto of_kept = [&](const Tensor& t, int64_t dim) { return kept.defined() ? t.index_select(dim, kept) : t; };
    const Tensor grad = of_kept(tile.grad, 1);
    if (wanted_[0])
      product_into(logits_.op, grad, of_kept(tiles.weight(), 0), 1.0, first_column ? 0.0 : 1.0, tiles.of_rows(input_));
    if (wanted_[1]) {
      const Tensor result = tiles.of_columns(weight_);
      // to = alpha grad^T @ input + beta to
      const auto add_product = [&](double alpha, double beta, const Tensor& to) {
        if (!first_row) beta = 1.0;
        if (kept.defined() && beta != 1.0) beta == 0.0 ? to.zero_() : to.mul_(beta);
        const Tensor of_sum = of_kept(to, 0);
        product_into(logits_.op, grad.t(), tiles.input(), alpha, kept.defined() ? 1.0 : beta, of_sum);
        if (kept.defined()) Tensor(to).index_copy_(0, kept, of_sum);
      };
      if (!weight_sums_.defined()) {
        add_product(alpha_, beta_, result);
      } else {
        const Tensor sums = weight_sums_.narrow(0, 0, result.numel()).view(result.sizes());
        add_product(1.0, 0.0, sums);
        if (last_row) move_sums(sums, result);
      }
    }
    if (wanted_[2]) tiles.of_columns(bias_).add_(bias_gradient(logits_.op, tile.summands, true, logits_.type));
  }

  LogitGradients results(at::ScalarType bias_type) {
    const auto type = logits_.input.scalar_type();
    if (logits_.rows == 0 && wanted_[1]) beta_ == 0.0 ? weight_.zero_() : weight_.mul_(beta_);
    if (logits_.columns == 0 && wanted_[0]) input_.zero_();
    const auto result = [&](bool wanted, const Tensor& t, at::ScalarType to) {
      return wanted ? t.to(to) : absent(logits_.input, type);
    };
    return {result(wanted_[0], input_, type), result(wanted_[1] && !has_slot_, weight_, type),
            result(wanted_[2], bias_, bias_type)};
  }

 private:
  void move_sums(const Tensor& sums, const Tensor& to) const {
    if (alpha_ != 1.0) sums.mul_(alpha_);
    if (beta_ != 0.0) sums.add_(to, beta_);
    to.copy_(sums);
  }

  const Logits& logits_;
  std::array<bool, 3> wanted_;
  bool has_slot_;
  double alpha_ = 1.0, beta_ = 0.0;  // of the weight's gradient
  Tensor input_, weight_, bias_, weight_sums_;
};

LogitGradients run_backward(const Logits& logits, const SavedRows& rows, const std::array<bool, 3>& wanted,
                            at::ScalarType bias_type, const WeightSlot* slot) {
  const TileSize size = tile_of_backward(logits, wanted[2]);
  Tiles tiles(logits, size);
  GradientSums sums(logits, wanted, size, slot);
  for (int64_t column = 0; column < logits.columns; column += size.columns)
    for (int64_t row = 0; row < logits.rows; row += size.rows) {
      tiles.move_to(row, column);
      const TileGradient tile = tiles.gradient(rows, false, wanted[2]);
      sums.add(tiles, tile, tiles.columns_that_count(tile.grad, rows.by), row == 0, row + size.rows >= logits.rows,
               column == 0);
    }
  return sums.results(bias_type);
}

LogitGradients logit_statistics_backward_slot(const OptionalTensor& grad_lse, const OptionalTensor& grad_nll,
                                              const OptionalTensor& grad_dot, const OptionalTensor& grad_entropy,
                                              const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                              const OptionalTensor& target, const OptionalTensor& coefficients,
                                              const Tensor& lse, const Tensor& lse_low, const OptionalTensor& entropy,
                                              double scale, double softcap, int64_t ignore_index, int64_t memory_limit,
                                              bool filter_gradients, std::array<bool, 3> output_mask,
                                              const OptionalTensor& weight_slot, double slot_alpha, double slot_beta) {
  const Logits logits(input, weight, bias, target, coefficients,
                      {scale, softcap, ignore_index, memory_limit, filter_gradients}, false);
  const auto values = [&](const OptionalTensor& t) { return is_given(t) ? t->to(logits.type).contiguous() : Tensor(); };
  RowGradients by{values(grad_lse), values(grad_nll), values(grad_dot), values(grad_entropy)};
  if (by.nll.defined()) by.nll = at::where(logits.target.eq(ignore_index), at::zeros_like(by.nll), by.nll);
  const WeightSlot slot{"weight_slot", weight_slot, slot_alpha, slot_beta};
  if (!logits.composed())
    return run_backward(logits, {lse, lse_low, value_or_empty(entropy), by}, output_mask,
                        is_given(bias) ? bias->scalar_type() : input.scalar_type(), &slot);
  auto all = composed_gradients(by, input, weight, bias, target, coefficients, logits.options, output_mask);
  if (is_given(weight_slot)) {
    check_slot(logits.op, slot, weight);
    slot_beta == 0.0 ? weight_slot->zero_() : weight_slot->mul_(slot_beta);
    weight_slot->add_(all[1], slot_alpha);
    all[1] = Tensor();
  }
  const auto given = [&](const Tensor& t) { return t.defined() ? t : absent(input, input.scalar_type()); };
  return {given(all[0]), given(all[1]), given(all[2])};
}

LogitGradients logit_statistics_backward(const OptionalTensor& grad_lse, const OptionalTensor& grad_nll,
                                         const OptionalTensor& grad_dot, const OptionalTensor& grad_entropy,
                                         const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& target, const OptionalTensor& coefficients,
                                         const Tensor& lse, const Tensor& lse_low, const OptionalTensor& entropy,
                                         double scale, double softcap, int64_t ignore_index, int64_t memory_limit,
                                         bool filter_gradients, std::array<bool, 3> output_mask) {
  return logit_statistics_backward_slot(grad_lse, grad_nll, grad_dot, grad_entropy, input, weight, bias, target,
                                        coefficients, lse, lse_low, entropy, scale, softcap, ignore_index, memory_limit,
                                        filter_gradients, output_mask, std::nullopt, 1.0, 0.0);
}

LossForward composed_loss(const Logits& logits, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& target, const OptionalTensor& coefficients,
                          const OptionalTensor& by_lse, const OptionalTensor& by_nll, const OptionalTensor& by_dot,
                          const OptionalTensor& by_square, const std::array<bool, 3>& output_mask) {
  const auto all = composed_statistics(input, weight, bias, target, coefficients, logits.options, false);
  const RowGradients by = gradients_of_loss(all[0], by_lse, by_nll, by_dot, by_square);
  const auto gradients = composed_gradients(by, input, weight, bias, target, coefficients, logits.options, output_mask);
  const auto given = [&](const Tensor& t) { return t.defined() ? t : absent(input, input.scalar_type()); };
  return {weighted_sum(all[0], all[1], all[2], by_lse, by_nll, by_dot, by_square), given(gradients[0]),
          given(gradients[1]), given(gradients[2])};
}

// sum(by_lse lse + by_nll nll + by_dot dot + by_square lse^2) and its gradients.
LossForward linear_loss_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                const OptionalTensor& target, const OptionalTensor& coefficients,
                                const OptionalTensor& by_lse, const OptionalTensor& by_nll,
                                const OptionalTensor& by_dot, const OptionalTensor& by_square, double scale,
                                double softcap, int64_t ignore_index, int64_t memory_limit, bool filter_gradients,
                                std::array<bool, 3> output_mask) {
  const Logits logits(input, weight, bias, target, coefficients,
                      {scale, softcap, ignore_index, memory_limit, filter_gradients});
  if (logits.composed())
    return composed_loss(logits, input, weight, bias, target, coefficients, by_lse, by_nll, by_dot, by_square,
                         output_mask);
  const TileSize size = tile_of_rows(logits);
  Tiles tiles(logits, size);
  GradientSums sums(logits, output_mask, size);
  const RunningStatistics statistics(logits, false);
  for (int64_t row = 0; row < logits.rows; row += size.rows) {
    tiles.move_to(row, 0);
    tiles.add_to(statistics, true);
    const Tensor lse = statistics.lse();  // of all rows; those of other tiles are not read
    const SavedRows rows{lse, statistics.lse_low(lse), Tensor(),
                         gradients_of_loss(lse, by_lse, by_nll, by_dot, by_square)};
    const TileGradient tile = tiles.gradient(rows, true, output_mask[2]);
    sums.add(tiles, tile, tiles.columns_that_count(tile.grad, rows.by), row == 0, row + size.rows >= logits.rows, true);
  }
  const auto [grad_input, grad_weight, grad_bias] =
      sums.results(is_given(bias) ? bias->scalar_type() : input.scalar_type());
  const auto [lse, nll, dot, entropy, lse_low] = results_of(logits, statistics);
  return {weighted_sum(lse, nll, dot, by_lse, by_nll, by_dot, by_square), grad_input, grad_weight, grad_bias};
}

// Below autograd: without gradients.
Tensor linear_loss(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& target,
                   const OptionalTensor& coefficients, const OptionalTensor& by_lse, const OptionalTensor& by_nll,
                   const OptionalTensor& by_dot, const OptionalTensor& by_square, double scale, double softcap,
                   int64_t ignore_index, int64_t memory_limit, bool filter_gradients, LossMethod) {
  const auto [lse, nll, dot, entropy, lse_low] = logit_statistics(
      input, weight, bias, target, coefficients, scale, softcap, ignore_index, memory_limit, filter_gradients, false);
  return weighted_sum(lse, nll, dot, by_lse, by_nll, by_dot, by_square);
}

static_assert(std::is_same_v<decltype(logit_statistics), StatisticsSignature>);
static_assert(std::is_same_v<decltype(logit_statistics_backward), StatisticsBackwardSignature>);
static_assert(std::is_same_v<decltype(logit_statistics_backward_slot), StatisticsBackwardSlotSignature>);
static_assert(std::is_same_v<decltype(linear_loss), LossSignature>);
static_assert(std::is_same_v<decltype(linear_loss_forward), LossForwardSignature>);

void register_kernels(torch::Library& m) {
  m.impl("logit_statistics", logit_statistics);
  m.impl("logit_statistics_backward", logit_statistics_backward);
  m.impl("logit_statistics_backward.slot", logit_statistics_backward_slot);
  m.impl("linear_loss", linear_loss);
  m.impl("linear_loss_forward", linear_loss_forward);
}

}  // namespace

bool forms_gradients_in_forward(const Tensor& input, const Tensor& weight, int64_t memory_limit, LossMethod method) {
  if (method != "auto") return method == "forward";
  if (is_batch_invariant()) return false;  // the choice depends on the number of rows
  // A GradScaler multiplies gradients before they are rounded to float16, or they would vanish.
  if (input.scalar_type() == at::kHalf) return false;
  // Of fewer rows at once, reading and writing the weight's gradient for each tile is dearer than a fourth product. On
  // a CPU (Sapphire Rapids, 2 cores, float32, K = 1024) tiles of 128 rows are 10 % slower, of 256 rows 10 % faster; if
  // other programs use the memory, too, 256 rows are as fast at best. On GPUs a guess.
  const int64_t least_rows = input.is_cpu() ? 512 : 1024;
  // A program is compiled for any number of rows; the vocabulary is that of the weight.
  const auto rows = input.sym_size(0).maybe_as_int(), columns = weight.sym_size(0).maybe_as_int(),
             features = weight.sym_size(1).maybe_as_int();
  if (!columns || !features) return false;
  const auto type = input.scalar_type();
  const int64_t row_bytes = std::max<int64_t>(1, *columns) * bytes_of_element(accumulation_type(type), type);
  return (rows && memory_limit / row_bytes >= *rows) ||
         (memory_limit - bytes_of_sums(*columns, *features, type)) / row_bytes >= least_rows;
}

#define LOGITS "Tensor input, Tensor weight, Tensor? bias, Tensor? target, Tensor? coefficients"
#define LOGIT_OPTIONS "float scale, float softcap, int ignore_index, int memory_limit, bool filter_gradients=False"
#define SAVED_LOGITS "Tensor lse, Tensor lse_low, Tensor? entropy"
#define ROW_GRADIENTS "Tensor? grad_lse, Tensor? grad_nll, Tensor? grad_dot, Tensor? grad_entropy"
#define LOSS_WEIGHTS "Tensor? by_lse, Tensor? by_nll, Tensor? by_dot, Tensor? by_square"
#define THREE_GRADIENTS "Tensor grad_input, Tensor grad_weight, Tensor grad_bias"

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("logit_statistics(" LOGITS ", *, " LOGIT_OPTIONS
        ", bool entropy) -> (Tensor lse, Tensor nll, Tensor dot, Tensor entropy, Tensor lse_low)",
        tags);
  m.def("logit_statistics_backward(" ROW_GRADIENTS ", " LOGITS ", " SAVED_LOGITS ", *, " LOGIT_OPTIONS
        ", bool[3] output_mask) -> (" THREE_GRADIENTS ")",
        tags);
  m.def("logit_statistics_backward.slot(" ROW_GRADIENTS ", " LOGITS ", " SAVED_LOGITS ", *, " LOGIT_OPTIONS
        ", bool[3] output_mask, Tensor(a!)? weight_slot, float slot_alpha, float slot_beta) -> (" THREE_GRADIENTS ")",
        tags);
  m.def("linear_loss(" LOGITS ", " LOSS_WEIGHTS ", *, " LOGIT_OPTIONS ", str method='auto') -> Tensor", tags);
  m.def("linear_loss_forward(" LOGITS ", " LOSS_WEIGHTS ", *, " LOGIT_OPTIONS
        ", bool[3] output_mask) -> (Tensor loss, " THREE_GRADIENTS ")",
        tags);
  register_layout_errors(m, {"logit_statistics", "logit_statistics_backward", "logit_statistics_backward.slot",
                             "linear_loss", "linear_loss_forward"});
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }

}  // namespace cuda_ext
