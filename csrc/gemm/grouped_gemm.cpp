#include "gemm/grouped_gemm.h"

#include <algorithm>
#include <vector>

#include "cpu/host.h"

namespace cuda_ext {
namespace {

const void* offset_by(const void* data, int64_t elements, Dtype dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}
void offset_by(Operand& operand, int64_t elements) { operand.data = offset_by(operand.data, elements, operand.dtype); }
void offset_by(Output& output, int64_t elements) {
  output.data = const_cast<void*>(offset_by(output.data, elements, output.dtype));
}

}  // namespace

GemmParams product_of_group(const GemmParams& params, const int32_t* ends, int64_t group) {
  const bool of_rows = params.groups.cut == Groups::Cut::kRows, is_rest = group == params.groups.count;
  const int64_t size = of_rows ? params.m : params.k;
  const auto end_of = [&](int64_t g) { return g < 0 ? 0 : std::clamp<int64_t>(ends[g], 0, size); };
  const int64_t begin = end_of(group - 1), end = is_rest ? size : std::max(begin, end_of(group));
  GemmParams product = params;
  const int32_t* const indices = params.groups.indices;
  product.groups = {};
  if (indices != nullptr && !is_rest) product.groups.indices = indices + begin;
  product.batch_dims = 0;
  if (of_rows) {
    product.m = end - begin;
    if (indices == nullptr) offset_by(product.a, begin * params.a.row_stride);
    offset_by(product.out, begin * params.n);
    offset_by(product.preact_out, begin * params.n * (params.gated ? 2 : 1));
    if (is_rest) {
      product.k = 0;
      product.bias = {};
    } else {
      offset_by(product.b, group * params.b.batch_strides[0]);
      offset_by(product.bias, group * params.bias.batch_strides[0]);
    }
  } else {
    product.k = end - begin;
    offset_by(product.a, begin * params.a.column_stride);
    if (indices == nullptr) offset_by(product.b, begin * params.b.row_stride);
    offset_by(product.out, group * params.m * params.n);
  }
  return product;
}

namespace {

// to (rows, columns) = the rows of `from` at these indices.
template <class Word>
void copy_rows(const Operand& from, const int32_t* indices, int64_t rows, int64_t columns, Word* to) {
  const int64_t grain = 1 + (64 << 10) / std::max<int64_t>(1, columns);
  cpu::parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Word* const row = static_cast<const Word*>(from.data) + indices[i] * from.row_stride;
      if (from.column_stride == 1)
        std::copy_n(row, columns, to + i * columns);
      else
        for (int64_t j = 0; j < columns; ++j) to[i * columns + j] = row[j * from.column_stride];
    }
  });
}

// The operand (rows, columns) whose rows are those at the indices, in `scratch`.
Operand gathered(const Operand& from, const int32_t* indices, int64_t rows, int64_t columns, void* scratch) {
  switch (size_of(from.dtype)) {
    case 2: copy_rows(from, indices, rows, columns, static_cast<uint16_t*>(scratch)); break;
    case 4: copy_rows(from, indices, rows, columns, static_cast<uint32_t*>(scratch)); break;
    default: copy_rows(from, indices, rows, columns, static_cast<uint64_t*>(scratch));
  }
  return {scratch, from.dtype, columns, 1, {}};
}

// The product of a group. Of rows that are gathered it copies a part at a time, of terms those of the group.
void run_product(const GemmParams& product, Groups::Cut cut) {
  constexpr int64_t kMostRows = 1024;  // of a part, all about as large: the method depends on the number of rows
  const int32_t* const indices = product.groups.indices;
  if (indices == nullptr) return launch_gemm(product);
  GemmParams part = product;
  part.groups = {};
  if (cut == Groups::Cut::kTerms) {
    const cpu::Scratch rows(product.k * product.n * int64_t(size_of(product.b.dtype)));
    part.b = gathered(product.b, indices, product.k, product.n, rows.as<void>());
    return launch_gemm(part);
  }
  const int64_t parts = (product.m + kMostRows - 1) / kMostRows, most = (product.m + parts - 1) / parts;
  const cpu::Scratch rows(most * product.k * int64_t(size_of(product.a.dtype)));
  for (int64_t first = 0; first < product.m; first += most) {
    part.m = std::min(most, product.m - first);
    part.a = gathered(product.a, indices + first, part.m, product.k, rows.as<void>());
    part.out = product.out;
    part.preact_out = product.preact_out;
    offset_by(part.out, first * product.n);
    offset_by(part.preact_out, first * product.n * (product.gated ? 2 : 1));
    launch_gemm(part);
  }
}

}  // namespace

void run_grouped_gemm(const GemmParams& params) {
  std::vector<GemmParams> products;
  double all_work = 0;
  const auto work_of = [](const GemmParams& p) { return double(p.m) * double(p.n) * double(p.k + 1); };
  for (int64_t group = 0; group < number_of_products(params); ++group) {
    const GemmParams product = product_of_group(params, params.groups.ends, group);
    if (product.m == 0 || product.n == 0) continue;
    products.push_back(product);
    all_work += work_of(product);
  }
  std::stable_sort(products.begin(), products.end(),
                   [&](const GemmParams& x, const GemmParams& y) { return work_of(x) > work_of(y); });
  // Large products one after the other, each by all threads; then the others, each by one.
  const double large = all_work / (4 * cpu::num_threads());
  size_t next = 0;
  while (next < products.size() && (cpu::num_threads() == 1 || work_of(products[next]) > large))
    run_product(products[next++], params.groups.cut);
  cpu::run_workers(int64_t(products.size() - next), [&](cpu::TaskQueue& queue) {
    for (int64_t index; queue.next(index);) run_product(products[next + size_t(index)], params.groups.cut);
  });
}

}  // namespace cuda_ext
