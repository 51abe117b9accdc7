#include "ops/torch_headers.h"

#include "ops/block_mask.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

namespace cuda_ext {
namespace {

int64_t blocks_of(int64_t rows) { return (rows + kMaskBlock - 1) / kMaskBlock; }

// The values of lists on the CPU: `blocks` of the other operand exist, and `tiles`.
void check_lists(const char* op, const char* name, const Tensor& lists, int64_t blocks, int64_t tiles) {
  const Tensor rows = lists.contiguous().view({-1, lists.size(3)});
  const int64_t width = rows.size(1) / 2 - 1;
  const int32_t* row = rows.const_data_ptr<int32_t>();
  for (int64_t r = 0; r < rows.size(0); ++r, row += rows.size(1)) {
    const int32_t count = row[1];
    CUDA_EXT_CHECK(count >= 0 && count <= width, op, "expected counts in ", name, " of at most ", width,
                   ", the entries of a list, got ", count, "; build the mask with cuda_ext.BlockMask");
    for (int64_t n = 0; n < count; ++n) {
      const int32_t block = row[2 + 2 * n], tile = row[3 + 2 * n];
      CUDA_EXT_CHECK(block >= 0 && block < blocks, op, "expected blocks in ", name, " in [0, ", blocks, "), got ",
                     block, "; build the mask with cuda_ext.BlockMask");
      CUDA_EXT_CHECK(tile == kFullBlock || (tile >= 0 && tile < tiles), op, "expected tiles in ", name, " in [0, ",
                     tiles, ") or ", kFullBlock, " for all of a block, got ", tile,
                     "; build the mask with cuda_ext.BlockMask");
    }
  }
}

BlockLists lists_of(const Tensor& lists) {
  return {lists.const_data_ptr<int32_t>(), lists.size(0) == 1 ? 0 : lists.stride(0),
          lists.size(1) == 1 ? 0 : lists.stride(1), lists.stride(2)};
}

// (tiles, 128, 4) -> (tiles, 128, 128), 0 or 1.
Tensor bits_of(const Tensor& tiles) {
  const Tensor column = at::arange(kMaskBlock, tiles.options().dtype(at::kLong));
  const Tensor word = column.remainder(8).floor_divide(2);
  const Tensor bit = (column.floor_divide(8) * 2 + column.remainder(2)).to(at::kInt);
  return at::bitwise_right_shift(tiles.index_select(2, word), bit).bitwise_and(1);
}

// (batch or 1, heads or 1, query blocks * 128, key blocks * 128)
Tensor booleans_of(const AttentionOptions& o) {
  const Tensor &lists = *o.block_keys, tiles = o.block_tiles->select(0, 0);
  const int64_t batch = lists.size(0), heads = lists.size(1), query_blocks = lists.size(2);
  const int64_t key_blocks = o.block_queries->size(2), width = lists.size(3) / 2 - 1, count = tiles.size(0);
  // The pool with two more tiles: all bits, and none.
  const auto tile_of = [&](int32_t bit) { return at::full({1, kMaskBlock, kMaskBlock}, bit, tiles.options()); };
  const Tensor pool = at::cat({bits_of(tiles), tile_of(1), tile_of(0)});
  const Tensor entries = lists.narrow(3, 2, 2 * width).unflatten(3, {width, 2}).to(at::kLong);
  const Tensor is_listed = at::arange(width, lists.options()).lt(lists.narrow(3, 1, 1));
  // What is not listed goes to one more block, which is then dropped.
  const Tensor block = at::where(is_listed, entries.select(4, 0), at::full({}, key_blocks, entries.options()));
  const Tensor tile = entries.select(4, 1);
  const Tensor own = at::where(tile.eq(kFullBlock), at::full_like(tile, count), tile);
  const Tensor of_blocks = at::full({batch, heads, query_blocks, key_blocks + 1}, count + 1, entries.options())
                               .scatter(3, block, own)
                               .narrow(3, 0, key_blocks);
  return pool.index_select(0, of_blocks.flatten())
      .view({batch, heads, query_blocks, key_blocks, kMaskBlock, kMaskBlock})
      .transpose(3, 4)
      .reshape({batch, heads, query_blocks * kMaskBlock, key_blocks * kMaskBlock})
      .to(at::kBool);
}

}  // namespace

void check_block_mask(const char* op, const Tensor& query, const AttentionShape& shape, const AttentionOptions& o) {
  const bool given = is_given(o.block_keys);
  CUDA_EXT_CHECK(given == is_given(o.block_queries) && given == is_given(o.block_tiles), op,
                 "expected block_keys, block_queries and block_tiles together, got some of them; pass a "
                 "cuda_ext.BlockMask as block_mask=");
  if (!given) return;
  const auto check_one = [&](const char* name, const Tensor& t, int64_t dims) {
    check_same_device(op, name, t, "query", query);
    CUDA_EXT_CHECK(t.scalar_type() == at::kInt && t.dim() == dims, op, "expected ", name, " of dtype int32 and ", dims,
                   " dims, got ", dtype_name(t.scalar_type()), " ", shape_string(t),
                   "; pass a cuda_ext.BlockMask as block_mask=");
  };
  check_one("block_keys", *o.block_keys, 4);
  check_one("block_queries", *o.block_queries, 4);
  check_one("block_tiles", *o.block_tiles, 4);
  const int64_t of_rows[] = {blocks_of(shape.longest_q), blocks_of(shape.longest_k)};
  for (const Tensor* lists : {&*o.block_keys, &*o.block_queries}) {
    const bool of_keys = lists == &*o.block_queries;
    const auto fits = [&](int64_t dim, int64_t size) { return lists->size(dim) == 1 || lists->size(dim) == size; };
    CUDA_EXT_CHECK(fits(0, shape.batch) && fits(1, shape.heads) && lists->size(2) == of_rows[of_keys] &&
                       lists->size(3) >= 2 && lists->size(3) % 2 == 0,
                   op, "expected block_mask of batch ", shape.batch, " or 1, ", shape.heads, " heads or 1 and ",
                   of_rows[of_keys], " blocks of ", of_keys ? "keys" : "queries", " (", kMaskBlock,
                   " rows each), got lists of shape ", shape_string(*lists), "; build it for these lengths");
  }
  CUDA_EXT_CHECK(
      o.block_tiles->size(0) == 2 && o.block_tiles->size(2) == kMaskBlock && o.block_tiles->size(3) == kTileRowWords,
      op, "expected block_tiles of shape (2, tiles, ", kMaskBlock, ", ", kTileRowWords, "), got ",
      shape_string(*o.block_tiles), "; pass a cuda_ext.BlockMask as block_mask=");
  if (!o.block_keys->is_cpu()) return;
  check_lists(op, "block_keys", *o.block_keys, of_rows[1], o.block_tiles->size(1));
  check_lists(op, "block_queries", *o.block_queries, of_rows[0], o.block_tiles->size(1));
}

BlockMask block_mask_of(const AttentionOptions& o, BlockMaskOperands& operands) {
  if (!is_given(o.block_keys)) return {};
  operands = {o.block_keys->contiguous(), o.block_queries->contiguous(), o.block_tiles->contiguous()};
  BlockMask mask;
  mask.keys_of_queries = lists_of(operands.keys);
  mask.queries_of_keys = lists_of(operands.queries);
  mask.tiles = operands.tiles.const_data_ptr<int32_t>();
  mask.tiles_t = mask.tiles + operands.tiles.stride(0);
  mask.query_blocks = operands.keys.size(2);
  mask.key_blocks = operands.queries.size(2);
  return mask;
}

OptionalTensor dense_mask(const AttentionOptions& o) {
  if (!is_given(o.block_keys)) return o.mask;
  Tensor mask = booleans_of(o);
  if (!is_given(o.mask)) return mask;
  for (int64_t d = 1; d <= std::min<int64_t>(2, o.mask->dim()); ++d)
    if (o.mask->size(-d) != 1) mask = mask.narrow(-d, 0, o.mask->size(-d));
  return mask.logical_and(*o.mask);
}

}  // namespace cuda_ext
