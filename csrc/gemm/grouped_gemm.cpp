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
  product.groups = {};
  product.batch_dims = 0;
  if (of_rows) {
    product.m = end - begin;
    offset_by(product.a, begin * params.a.row_stride);
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
    offset_by(product.b, begin * params.b.row_stride);
    offset_by(product.out, group * params.m * params.n);
  }
  return product;
}

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
    launch_gemm(products[next++]);
  cpu::run_workers(int64_t(products.size() - next), [&](cpu::TaskQueue& queue) {
    for (int64_t index; queue.next(index);) launch_gemm(products[next + size_t(index)]);
  });
}

}  // namespace cuda_ext
