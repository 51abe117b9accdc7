// Grouped products (Groups in gemm.h) as a product for each group, where the groups are known to the host.
#pragma once

#include "gemm/gemm.h"

namespace cuda_ext {

// Products of the groups and, if rows are cut, one more, which sets the rows after the last group to 0.
inline int64_t number_of_products(const GemmParams& params) {
  return params.groups.count + (params.groups.cut == Groups::Cut::kRows ? 1 : 0);
}
// If rows are gathered, its groups.indices are those of the product, and nothing else of its groups is set.
GemmParams product_of_group(const GemmParams& params, const int32_t* ends, int64_t group);

// All of them on the CPU.
void run_grouped_gemm(const GemmParams& params);

}  // namespace cuda_ext
