// Gradient buckets on the GPU: pack, unpack and statistics of any number of tensors of mixed dtype in one launch.
//
// Problem. As BucketParams (bucket.h) says. A pass over memory and nothing else: each byte is read once and written
// once, and scale, cast, sum of squares and non-finite flag ride along in registers.
//
// Table. The entries travel as parameters of a small kernel of their own, which writes them to the workspace: nothing on
// the host has to outlive the call, nothing is pinned, and a captured graph carries them in its nodes. That kernel also
// clears the counter below. A pack of up to 126 tensors whose statistics nobody wants has no counter, and is one launch:
// the entries are its own parameters, and each block copies those of its elements to shared memory, where lanes find them
// at any index.
//
// Work. Block b owns bucket elements [b, b + 1) * kBlockElements, whatever tensors lie there, and each of its warps an
// equal region of them; from there on a warp needs no other. It finds its first entry by a search in which every lane
// probes one (three rounds for 1,000 tensors) and walks on. What it meets is moved in one of two ways:
//   - A long piece of one tensor by vectors, 64 bytes in flight per lane: 16 bytes of the wider of the two dtypes where
//     source and target have a common alignment, else the widest vector for which they have one. Vectors start at a
//     32-byte sector of the target; the up to 15 elements before it and 7 behind the last vector go one per lane.
//   - Among short tensors and gaps, 256 elements at once, each by a lane that searches its entry on its own: a region
//     of one-element tensors then takes 8 rounds of the warp, not one per tensor.
// A gap is written as zeros by pack and passed over by the others; an entry without data is passed over by all.
//
// Statistics. Squares are summed in float64, where a sum of finite float32 values cannot overflow: an infinite or NaN
// sum is the non-finite flag. Lane, warp, block, grid: each level adds in an order that only positions and alignments
// decide. The grid's level is the block that arrives last at a counter. Each arrival releases the block's sum and acquires
// those before it, and the barrier passes them on to the block's other threads.
//
// In place. Where a tensor is its own place in the bucket, the lane that writes an element is the one that has read it,
// and with scale = 1 nothing is written. The data must not be read through the read-only path for this, nor may the
// partial sums, which other blocks write; the table may.
//
// Barriers. sync_threads, all threads: between warps' sums and their use, and after the arrival at the counter; in the
// kernel without statistics, once, behind the copy of the table.
// Shared memory. SharedStorage: one sum a warp and one flag. SharedEntries: the table of the kernel without statistics.
// Registers. 16 hold what is in flight; capped at 64 a thread, so that 4 blocks, 64 KiB in flight, fit a processor.
#pragma once

#include <type_traits>

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "arch/warp.cuh"
#include "bucket/bucket.h"

namespace cuda_ext {

enum class BucketOp { kPack, kUnpack, kStats };

struct BucketConfig {
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;  // per multiprocessor
  static constexpr int kWarps = kThreads / arch::kWarpSize;
  static constexpr int kRegionElements = int(kBlockElements) / kWarps;
  static constexpr int kBytesInFlight = 64;  // per lane, of 16-byte loads
  static constexpr int kMaxLoads = 8;        // per lane, of narrower ones
  static constexpr int kShortElements = 8;   // per lane, among short tensors
  // A piece this long is worth the warp's full attention; shorter ones are moved together.
  static constexpr int kLongPiece = kShortElements * arch::kWarpSize;
  static_assert(kBlockElements % kWarps == 0);
};

namespace bucket {

// An entry as the device reads it: a search reads the ends alone.
struct alignas(16) TableEntry {
  void* data;
  int64_t begin;  // elements of the bucket
  int64_t end;
  Dtype dtype;
};

// Entries on their way to the device. A kernel takes 4 KiB of parameters as ever, and 32764 bytes at most.
template <int capacity>
struct TableChunk {
  TableEntry* target;
  uint32_t* counter;
  int count;
  TableEntry entries[capacity];
};
constexpr int kSmallChunk = 126, kLargeChunk = 1022;
static_assert(sizeof(TableChunk<kSmallChunk>) <= 4096 && sizeof(TableChunk<kLargeChunk>) <= 32764);

// What is moved. A table has end(i) and entry(i).
template <class Table>
struct Move {
  Table table;
  int64_t num_entries;
  void* bucket;  // (count,); not used for stats
  int64_t count;
  float scale;
};

struct GlobalTable {
  const TableEntry* entries;
  DEVICE int64_t end(int64_t i) const { return arch::load_global<int64_t>(&entries[i].end); }
  DEVICE TableEntry entry(int64_t i) const {
    struct {
      arch::Words4 low, high;
    } const words{arch::load_global<arch::Words4>(entries + i), arch::load_global<arch::Words4>(&entries[i].end)};
    return __builtin_bit_cast(TableEntry, words);
  }
};
struct SharedTable {
  const TableEntry* entries;
  DEVICE int64_t end(int64_t i) const { return entries[i].end; }
  DEVICE TableEntry entry(int64_t i) const { return entries[i]; }
};

struct Params {
  Move<GlobalTable> move;
  float* stats;       // (2,): sum of squares; 1 if a value is infinite or NaN, else 0
  uint32_t* counter;  // (1,), 0
  double* partial;    // (blocks,)
};

// Of the kernel without statistics.
struct PackParams {
  void* bucket;
  int64_t count;
  float scale;
  int num_entries;
  TableEntry entries[kSmallChunk];
};
static_assert(sizeof(PackParams) <= 4096);

using Config = BucketConfig;
using arch::kWarpSize;

struct SharedStorage {
  double warp_squares[Config::kWarps];
  uint32_t is_last;
};
struct SharedEntries {
  TableEntry entries[kSmallChunk];
};

DEVICE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class F>
DEVICE auto with_type(Dtype dtype, F f) {
  if (dtype == Dtype::kFloat16) return f(half_t{});
  if (dtype == Dtype::kBFloat16) return f(bfloat16_t{});
  return f(float{});
}

// `width` elements as they travel through registers.
template <class T, int width>
using Packed = std::conditional_t<width == 1, T, arch::Words<int(sizeof(T)) * width / 4>>;

template <class T, int width>
DEVICE void widen(const Packed<T, width>& packed, float (&v)[width]) {
  if constexpr (width == 1) {
    v[0] = arch::to_float(packed);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] = arch::bits_float(packed.data[i]);
  } else {
#pragma unroll
    for (int i = 0; i < width; i += 2) {
      v[i] = arch::unpack_low<T>(packed.data[i / 2]);
      v[i + 1] = arch::unpack_high<T>(packed.data[i / 2]);
    }
  }
}

template <class T, int width>
DEVICE Packed<T, width> narrow(const float (&v)[width]) {
  if constexpr (width == 1) {
    return arch::from_float<T>(v[0]);
  } else {
    Packed<T, width> packed;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < width; ++i) packed.data[i] = arch::float_bits(v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < width; i += 2) packed.data[i / 2] = arch::pack<T>(v[i], v[i + 1]);
    }
    return packed;
  }
}

// target[0..width) = cast(loaded * scale), unless `write` is false, and the sum of squares of what target then holds.
template <BucketOp op, int width, class Source, class Target>
DEVICE double finish(const Packed<Source, width>& loaded, Target* target, float scale, bool write) {
  float v[width];
  widen<Source, width>(loaded, v);
  if constexpr (op != BucketOp::kStats) {
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] *= scale;
    const Packed<Target, width> stored = narrow<Target, width>(v);
    if (write) arch::store_global_streaming(target, stored);
    widen<Target, width>(stored, v);
  }
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < width; ++i) squares += double(v[i]) * double(v[i]);  // exact products, so fused or not is one
  return squares;
}

// The elements before the first 32-byte sector that `pointer` begins, at most `count`.
template <class T>
DEVICE int head_of(const T* pointer, int count) {
  constexpr int kSector = 32;
  const int head = int(-reinterpret_cast<uintptr_t>(pointer) % kSector / sizeof(T));
  return head < count ? head : count;
}

// The element that this lane moves alone in an array of `count`, of which [head, count - tail) moves as vectors; or -1.
DEVICE int single_of(int head, int tail, int count) {
  constexpr int kFirstTailLane = kWarpSize / 2;
  const int lane = arch::lane_index();
  if (lane < head) return lane;
  if (lane >= kFirstTailLane && lane < kFirstTailLane + tail) return count - tail + (lane - kFirstTailLane);
  return -1;
}

// Moves a piece with the whole warp, in vectors of `width` elements: what brings the target to a multiple of `width`
// elements brings the source to one. Returns this lane's share of the squares.
template <BucketOp op, int width, class Source, class Target>
DEVICE double move_vectors(const Source* source, Target* target, int count, float scale, bool write) {
  constexpr int kWanted = Config::kBytesInFlight / (width * int(sizeof(Source)));
  constexpr int kLoads = kWanted < Config::kMaxLoads ? kWanted : Config::kMaxLoads;
  const int head = head_of(target, count);
  const int vectors = (count - head) / width;
  const int single = single_of(head, (count - head) % width, count);
  double squares = 0.0;
  if (single >= 0) {
    const Source loaded = arch::load_global_streaming<Source>(source + single);
    squares = finish<op, 1, Source>(loaded, target + single, scale, write);
  }
  source += head;
  target += head;
  for (int first = arch::lane_index(); first < vectors; first += kLoads * kWarpSize) {
    Packed<Source, width> loaded[kLoads] = {};  // zeros behind the end add nothing, which is cheaper than a branch
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + i * kWarpSize;
      if (vector < vectors) loaded[i] = arch::load_global_streaming<Packed<Source, width>>(source + vector * width);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + i * kWarpSize;
      squares += finish<op, width, Source>(loaded[i], target + vector * width, scale, write && vector < vectors);
    }
  }
  return squares;
}

// As many elements as 16 bytes of the wider dtype hold.
template <class Source, class Target>
constexpr int kWidest = 16 / int(sizeof(Source) > sizeof(Target) ? sizeof(Source) : sizeof(Target));

// move_vectors with the widest vector, of at most `width` elements, that source and target can both be aligned to.
template <BucketOp op, class Source, class Target, int width = kWidest<Source, Target>>
DEVICE double move_piece(const Source* source, Target* target, int count, float scale, bool write) {
  if constexpr (width > 1) {
    const uintptr_t phase =
        reinterpret_cast<uintptr_t>(source) / sizeof(Source) - reinterpret_cast<uintptr_t>(target) / sizeof(Target);
    if (phase % width != 0) return move_piece<op, Source, Target, width / 2>(source, target, count, scale, write);
  }
  return move_vectors<op, width>(source, target, count, scale, write);
}

template <class T>
DEVICE void fill_zeros(T* target, int count) {
  constexpr int width = 16 / int(sizeof(T));
  const int head = head_of(target, count);
  const int vectors = (count - head) / width;
  const int single = single_of(head, (count - head) % width, count);
  if (single >= 0) arch::store_global_streaming(target + single, T{});
  for (int vector = arch::lane_index(); vector < vectors; vector += kWarpSize)
    arch::store_global_streaming(target + head + vector * width, arch::Words4{});
}

// How many of the lowest bits are set, the others being clear.
DEVICE int count_low_bits(uint32_t bits) {
  int count = 0;
#pragma unroll
  for (int half = 16; half > 0; half /= 2)
    if (bits >> count >> (half - 1) & 1) count += half;
  return count + int(bits >> 31);  // five halvings count to 31
}

// The first entry at or after `entry` that ends behind `position`, or num_entries. All lanes together: each looks at
// one of the next 32, where the answer is but for a region's first search, then at the end of a 32nd part of the rest.
template <class Table>
DEVICE int64_t find_entry(const Move<Table>& params, int64_t entry, int64_t position) {
  int64_t last = params.num_entries;  // the answer is in [entry, last]
  int64_t stride = 1;
  while (entry < last) {
    const int64_t probe = entry + (arch::lane_index() + 1) * stride - 1;
    const bool passed = probe < last && params.table.end(probe) <= position;
    const int parts = count_low_bits(arch::ballot(passed));
    entry += parts * stride;
    if (parts < kWarpSize) {
      if (stride == 1) return entry;
      last = smaller(entry + stride - 1, last);
    }
    stride = (last - entry + kWarpSize - 1) / kWarpSize;
  }
  return entry;
}

DEVICE uint32_t load_bits(const void* data, int64_t index, Dtype dtype) {
  if (dtype == Dtype::kFloat32)
    return arch::load_global_streaming<uint32_t>(static_cast<const uint32_t*>(data) + index);
  return arch::load_global_streaming<uint16_t>(static_cast<const uint16_t*>(data) + index);
}
DEVICE float float_of(uint32_t bits, Dtype dtype) {
  if (dtype == Dtype::kFloat32) return arch::bits_float(bits);
  if (dtype == Dtype::kFloat16) return arch::unpack_low<half_t>(bits);
  return arch::unpack_low<bfloat16_t>(bits);
}

// Moves bucket elements [position, position + count), at most kLongPiece, one per lane at a time. Their entries are in
// [first_entry, last_entry]; gaps are among them.
template <BucketOp op, class Bucket, class Table>
DEVICE double move_short(const Move<Table>& params, int64_t first_entry, int64_t last_entry, int64_t position,
                         int count) {
  constexpr int kElements = Config::kShortElements;
  constexpr Dtype kBucketDtype = DtypeOf<Bucket>::value;
  constexpr int kGap = -1, kAbsent = -2;
  const float scale = params.scale;
  Bucket* const bucket = static_cast<Bucket*>(params.bucket);  // null for stats
  const int num_entries = int(last_entry - first_entry);

  // Every lane searches all its elements' entries side by side: at each step, half of what is left is passed or not.
  int passed[kElements] = {};  // then the element's entry; or kGap, or kAbsent where nothing is to be done
  int step = 1;
  while (step <= num_entries / 2) step *= 2;
  for (; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int probe = passed[i] + step - 1;
      const int element = arch::lane_index() + i * kWarpSize;
      if (probe < num_entries && params.table.end(first_entry + probe) <= position + element) passed[i] += step;
    }
  }

  uint32_t bits[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int element = arch::lane_index() + i * kWarpSize;
    const int64_t at = position + element;
    bits[i] = 0;
    if (element >= count || first_entry + passed[i] >= params.num_entries) {
      passed[i] = element >= count ? kAbsent : kGap;
      continue;
    }
    const TableEntry entry = params.table.entry(first_entry + passed[i]);
    if (entry.begin > at)
      passed[i] = kGap;
    else if (entry.data == nullptr)
      passed[i] = kAbsent;
    else if (op == BucketOp::kUnpack)
      bits[i] = load_bits(bucket, at, kBucketDtype);
    else
      bits[i] = load_bits(entry.data, at - entry.begin, entry.dtype);
  }

  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int element = arch::lane_index() + i * kWarpSize;
    const int64_t at = position + element;
    if (passed[i] < 0) {
      if (op == BucketOp::kPack && passed[i] == kGap) arch::store_global_streaming(bucket + at, Bucket{});
      continue;
    }
    const TableEntry entry = params.table.entry(first_entry + passed[i]);
    const int64_t offset = at - entry.begin;
    if constexpr (op == BucketOp::kStats) {
      const double v = float_of(bits[i], entry.dtype);
      squares += v * v;
    } else if constexpr (op == BucketOp::kPack) {
      const Dtype dtype = entry.dtype;
      const bool in_place = dtype == kBucketDtype && static_cast<Bucket*>(entry.data) + offset == bucket + at;
      squares += finish<op, 1, float>(float_of(bits[i], dtype), bucket + at, scale, !in_place || scale != 1.0f);
    } else {
      squares += with_type(entry.dtype, [&](auto tag) {
        auto* const place = static_cast<decltype(tag)*>(entry.data) + offset;
        const bool in_place = static_cast<void*>(place) == bucket + at;
        return finish<op, 1, float>(float_of(bits[i], kBucketDtype), place, scale, !in_place || scale != 1.0f);
      });
    }
  }
  return squares;
}

// Moves [position, position + count) of the bucket, all of it in `entry`.
template <BucketOp op, class Bucket, class Table>
DEVICE double move_long(const Move<Table>& params, const TableEntry& entry, int64_t position, int count) {
  const float scale = params.scale;
  return with_type(entry.dtype, [&](auto tag) {
    using T = decltype(tag);
    T* const data = static_cast<T*>(entry.data) + (position - entry.begin);
    if constexpr (op == BucketOp::kStats) {
      return move_piece<op>(data, data, count, scale, false);
    } else {
      Bucket* const place = static_cast<Bucket*>(params.bucket) + position;
      const bool write = static_cast<void*>(place) != data || scale != 1.0f;
      if constexpr (op == BucketOp::kPack)
        return move_piece<op>(data, place, count, scale, write);
      else
        return move_piece<op>(place, data, count, scale, write);
    }
  });
}

// Moves bucket elements [position, end) with one warp; returns this lane's share of the squares.
template <BucketOp op, class Bucket, class Table>
DEVICE double move_region(const Move<Table>& params, int64_t position, int64_t end) {
  double squares = 0.0;
  int64_t index = 0;
  while (position < end) {
    index = find_entry(params, index, position);
    TableEntry entry{nullptr, end, end, Dtype::kFloat32};  // behind the last one is a gap
    if (index < params.num_entries) entry = params.table.entry(index);
    const bool is_gap = entry.begin > position;
    const int64_t piece_end = smaller(is_gap ? entry.begin : entry.end, end);
    const int count = int(piece_end - position);
    if (is_gap ? op != BucketOp::kPack : entry.data == nullptr) {
      position = piece_end;
    } else if (count >= Config::kLongPiece || piece_end == end) {
      if (is_gap)
        fill_zeros(static_cast<Bucket*>(params.bucket) + position, count);
      else
        squares += move_long<op, Bucket>(params, entry, position, count);
      position = piece_end;
    } else {
      const int64_t short_end = smaller(position + Config::kLongPiece, end);
      const int64_t last = find_entry(params, index, short_end - 1);
      squares += move_short<op, Bucket>(params, index, last, position, int(short_end - position));
      position = short_end;
      index = last;
    }
  }
  return squares;
}

// The same in all threads. Storage is free again after the next barrier.
DEVICE double sum_over_block(double value, SharedStorage& shared) {
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) value += arch::shuffle_xor(value, lanes);
  if (arch::lane_index() == 0) shared.warp_squares[arch::thread_index() / kWarpSize] = value;
  arch::sync_threads();
  double sum = 0.0;
#pragma unroll
  for (int warp = 0; warp < Config::kWarps; ++warp) sum += shared.warp_squares[warp];
  return sum;
}

// Writes a chunk of the table, an entry per lane: parameters are read one address at a time.
template <int capacity>
GLOBAL(kWarpSize, 1)
bucket_table_kernel(GRID_CONSTANT TableChunk<capacity> chunk) {
  const int index = arch::block_x() * kWarpSize + arch::thread_index();
  if (index == 0) arch::store_global(chunk.counter, 0u);
  if (index >= chunk.count) return;
  const TableEntry& entry = chunk.entries[index];
  TableEntry* const target = chunk.target + index;
  arch::store_global(&target->data, entry.data);
  arch::store_global(&target->begin, entry.begin);
  arch::store_global(&target->end, entry.end);
  arch::store_global(&target->dtype, uint32_t(entry.dtype));
}

// Moves what belongs to this warp of this block; returns this lane's share of the squares.
template <BucketOp op, class Bucket, class Table>
DEVICE double move_own_region(const Move<Table>& params) {
  const int warp = arch::thread_index() / kWarpSize;
  const int64_t begin = arch::block_x() * kBlockElements + warp * int64_t(Config::kRegionElements);
  return move_region<op, Bucket>(params, begin, smaller(begin + Config::kRegionElements, params.count));
}

template <class Bucket>
GLOBAL(Config::kThreads, Config::kMinBlocks)
bucket_pack_kernel(GRID_CONSTANT PackParams params) {
  SHARED_STORAGE(SharedEntries, shared);
  const int64_t block_begin = arch::block_x() * kBlockElements, block_end = block_begin + kBlockElements;
  for (int i = arch::thread_index(); i < params.num_entries; i += Config::kThreads) {
    // Parameters are read one address at a time, so a search gets all the ends, but the rest only of entries that it can
    // find in this block: those from the first that ends in it or later to the first that does so behind it.
    const int64_t end = params.entries[i].end;
    shared.entries[i].end = end;
    if (end > block_begin && (i == 0 || params.entries[i - 1].end < block_end)) shared.entries[i] = params.entries[i];
  }
  arch::sync_threads();
  move_own_region<BucketOp::kPack, Bucket>(
      Move<SharedTable>{{shared.entries}, params.num_entries, params.bucket, params.count, params.scale});
}

template <BucketOp op, class Bucket>
GLOBAL(Config::kThreads, Config::kMinBlocks)
bucket_kernel(GRID_CONSTANT Params params) {
  SHARED_STORAGE(SharedStorage, shared);
  const int thread = arch::thread_index();
  const double squares = sum_over_block(move_own_region<op, Bucket>(params.move), shared);

  if (thread == 0) {
    arch::store_global(params.partial + arch::block_x(), squares);
    shared.is_last = arch::atomic_add_acq_rel(params.counter, 1) == uint32_t(arch::grid_x() - 1);
  }
  arch::sync_threads();
  if (!shared.is_last) return;

  double total = 0.0;
  for (int block = thread; block < arch::grid_x(); block += Config::kThreads)
    total += arch::load_global_streaming<double>(params.partial + block);
  total = sum_over_block(total, shared);
  if (thread == 0) {
    constexpr double kLargest = 0x1.fffffffffffffp1023;
    arch::store_global(params.stats, float(total));
    arch::store_global(params.stats + 1, total <= kLargest ? 0.0f : 1.0f);
  }
}

}  // namespace bucket

}  // namespace cuda_ext
