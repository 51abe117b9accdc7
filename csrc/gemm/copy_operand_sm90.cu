// Copies an operand whose lines do not begin at multiples of 16 bytes, or are not along k, so that TMA can read it.
//
//   copy_lines_sm90      adjacent elements stay adjacent: a warp copies a part of a line, in units as large as all
//                        lines are aligned to, each lane kParts of them, all loaded before the first is stored.
//   transpose_tile_sm90  adjacent elements become lines: tiles of 64 x 64 through shared memory, (64, 65) words, whose
//                        padding keeps rows and columns free of bank conflicts.
#include "gemm/copy_operand_sm90.h"

#include "arch/memory.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::sm90 {

namespace {

constexpr int kCopyWarps = 8;
constexpr int kTransposed = 64;  // rows and columns of a tile

// Units of a lane: 13 KiB in flight on each SM saturate the memory of an H100.
template <class Unit>
constexpr int kParts = sizeof(Unit) <= 4 ? 16 : 64 / sizeof(Unit);

// The first elements of a batch, in and out.
struct BatchOffsets {
  int64_t from = 0, to;

  DEVICE BatchOffsets(const OperandCopy& copy, int64_t batch) : to(batch * copy.lines * copy.to_line) {
#pragma unroll
    for (int d = 0; d < OperandCopy::kMaxDims; ++d)
      if (d < copy.dims) {
        from += batch % copy.sizes[d] * copy.from_strides[d];
        batch /= copy.sizes[d];
      }
  }
};

// Grid: (parts of lines, groups of kCopyWarps lines, batches); the last two are looped over if they are many.
template <class Unit>
GLOBAL(kCopyWarps * 32, 1)
copy_lines_sm90(GRID_CONSTANT OperandCopy copy) {
  const int lane = arch::lane_index(), warp = arch::thread_index() / arch::kWarpSize;
  const int64_t unit = sizeof(Unit) / copy.element_bytes, units = copy.length / unit;
  const int64_t first = int64_t(arch::block_x()) * (kParts<Unit> * arch::kWarpSize) + lane;
  for (int64_t batch = arch::block_z(); batch < copy.batches(); batch += arch::grid_z()) {
    const BatchOffsets offsets(copy, batch);
    for (int64_t line = int64_t(arch::block_y()) * kCopyWarps + warp; line < copy.lines;
         line += int64_t(arch::grid_y()) * kCopyWarps) {
      const auto address = [&](const void* data, int64_t element) {
        return static_cast<const char*>(data) + element * copy.element_bytes;
      };
      const Unit* const from = reinterpret_cast<const Unit*>(address(copy.from, offsets.from + line * copy.from_line));
      Unit* const to = reinterpret_cast<Unit*>(const_cast<char*>(address(copy.to, offsets.to + line * copy.to_line)));
      Unit values[kParts<Unit>];
      // Load this lane's units, all of them in flight at once.
#pragma unroll
      for (int i = 0; i < kParts<Unit>; ++i)
        if (first + i * arch::kWarpSize < units)
          values[i] = arch::load_global<Unit>(from + first + i * arch::kWarpSize);
      // Store them.
#pragma unroll
      for (int i = 0; i < kParts<Unit>; ++i)
        if (first + i * arch::kWarpSize < units) arch::store_global(to + first + i * arch::kWarpSize, values[i]);
    }
  }
}

// Grid: (tiles along a line, tiles along the lines, batches), as above.
template <class Element>
GLOBAL(kCopyWarps * 32, 1)
transpose_tile_sm90(GRID_CONSTANT OperandCopy copy) {
  struct Storage {
    uint32_t tile[kTransposed][kTransposed + 1];  // (elements, lines)
  };
  SHARED_STORAGE(Storage, shared);
  const int lane = arch::lane_index(), warp = arch::thread_index() / arch::kWarpSize;
  const int64_t first_element = int64_t(arch::block_x()) * kTransposed;
  const Element* const from = static_cast<const Element*>(copy.from);
  Element* const to = static_cast<Element*>(copy.to);
  for (int64_t batch = arch::block_z(); batch < copy.batches(); batch += arch::grid_z()) {
    const BatchOffsets offsets(copy, batch);
    for (int64_t first_line = int64_t(arch::block_y()) * kTransposed; first_line < copy.lines;
         first_line += int64_t(arch::grid_y()) * kTransposed) {
      // Load the tile: lanes along the lines, which are adjacent in the operand.
#pragma unroll
      for (int row = 0; row < kTransposed / kCopyWarps; ++row)
#pragma unroll
        for (int half = 0; half < kTransposed; half += arch::kWarpSize) {
          const int e = row * kCopyWarps + warp, l = half + lane;
          const int64_t element = first_element + e, line = first_line + l;
          if (element < copy.length && line < copy.lines) {
            const int64_t place = offsets.from + line * copy.from_line + element * copy.from_element;
            arch::store_shared(arch::shared_address(&shared.tile[e][l]),
                               uint32_t(arch::load_global<Element>(from + place)));
          }
        }
      arch::sync_threads();
      // Store it: lanes along the elements of a line.
#pragma unroll
      for (int row = 0; row < kTransposed / kCopyWarps; ++row)
#pragma unroll
        for (int half = 0; half < kTransposed; half += arch::kWarpSize) {
          const int l = row * kCopyWarps + warp, e = half + lane;
          const int64_t element = first_element + e, line = first_line + l;
          if (element < copy.length && line < copy.lines)
            arch::store_global(to + offsets.to + line * copy.to_line + element,
                               Element(arch::load_shared<uint32_t>(arch::shared_address(&shared.tile[e][l]))));
        }
      arch::sync_threads();  // before the next tile overwrites this one
    }
  }
}

template <class Unit>
void launch_lines(const OperandCopy& copy, rt::Extent grid, void* stream) {
  const int64_t units = copy.length * copy.element_bytes / int64_t(sizeof(Unit));
  grid.x = checked_count(ceil_div(units, kParts<Unit> * arch::kWarpSize), "parts of a line");
  rt::launch<copy_lines_sm90<Unit>>("copy_lines_sm90", {.grid = grid, .threads = kCopyWarps * 32, .stream = stream},
                                    copy);
}

template <class Element>
void launch_transpose(const OperandCopy& copy, rt::Extent grid, void* stream) {
  grid.x = checked_count(ceil_div(copy.length, kTransposed), "tiles of a line");
  rt::launch<transpose_tile_sm90<Element>>("transpose_tile_sm90",
                                           {.grid = grid,
                                            .threads = kCopyWarps * 32,
                                            .shared_bytes = kTransposed * (kTransposed + 1) * sizeof(uint32_t),
                                            .stream = stream},
                                           copy);
}

// The largest power of two, at most 16, that divides the bytes of the address, of the length and of all strides.
int alignment_of(const OperandCopy& copy) {
  uint64_t bits = reinterpret_cast<uintptr_t>(copy.from) | 16;
  const auto add = [&](int64_t elements) { bits |= uint64_t(elements * copy.element_bytes); };
  add(copy.length);
  add(copy.from_line);
  for (int d = 0; d < copy.dims; ++d) add(copy.from_strides[d]);
  return int(bits & (~bits + 1));
}

}  // namespace

void launch_copy_operand(const OperandCopy& copy, void* stream) {
  const auto extent = [](int64_t count) { return count < 65535 ? int(count) : 65535; };  // of y and z
  const bool is_transposed = copy.from_element != 1 && copy.length > 1;
  const int64_t rows = ceil_div(copy.lines, is_transposed ? kTransposed : kCopyWarps);
  const rt::Extent grid{1, extent(rows), extent(copy.batches())};
  if (is_transposed) {
    if (copy.element_bytes == 2) return launch_transpose<uint16_t>(copy, grid, stream);
    return launch_transpose<uint32_t>(copy, grid, stream);
  }
  switch (alignment_of(copy)) {
    case 2: return launch_lines<uint16_t>(copy, grid, stream);
    case 4: return launch_lines<uint32_t>(copy, grid, stream);
    case 8: return launch_lines<arch::Words2>(copy, grid, stream);
    default: return launch_lines<arch::Words4>(copy, grid, stream);
  }
}

}  // namespace cuda_ext::sm90
