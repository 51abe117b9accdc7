// How a warp moves its region of a bucket. It finds the first entry by a search in which each lane tests one entry
// (three rounds for 1,000 tensors), and continues from there. There are two cases:
//   - A long piece of one tensor moves in vectors, with 64 bytes in flight per lane. A vector is 16 bytes of the wider
//     dtype if source and target can both be aligned to it, else the widest for which they can. Vectors start at a
//     32-byte sector of the target; the up to 15 elements before it, and the up to 7 after the last vector, move one
//     per lane.
//   - Short tensors and gaps move 256 elements at a time; each lane searches for the entries of its own elements. A
//     region of one-element tensors then takes 8 rounds of the warp instead of one per tensor.
// Gaps are zeroed by pack and skipped by the others; entries without data are skipped by all.
#pragma once

#include <type_traits>

#include "arch/math.cuh"
#include "bucket/bucket_table.cuh"

namespace cuda_ext {

enum class BucketOp { kPack, kUnpack, kStats };

struct BucketConfig {
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;  // per SM
  static constexpr int kWarps = kThreads / arch::kWarpSize;
  static constexpr int kRegionElements = int(kBlockElements) / kWarps;
  static constexpr int kBytesInFlight = 64;  // per lane, in 16-byte loads
  static constexpr int kMaxLoads = 8;        // per lane, in narrower loads
  static constexpr int kShortElements = 8;   // per lane, among short tensors
  // The warp moves pieces of at least this length one by one, shorter ones together.
  static constexpr int kLongPiece = kShortElements * arch::kWarpSize;
  static_assert(kBlockElements % kWarps == 0);
};

namespace bucket {

using Config = BucketConfig;

template <class F>
DEVICE auto with_type(Dtype dtype, F f) {
  if (dtype == Dtype::kFloat16) return f(half_t{});
  if (dtype == Dtype::kBFloat16) return f(bfloat16_t{});
  return f(float{});
}

// `width` elements in registers, in storage type T.
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

// target[0..width) = cast(loaded * scale), unless `write` is false. Returns the sum of squares of the values in target.
template <BucketOp op, int width, class Source, class Target>
DEVICE double store_scaled(const Packed<Source, width>& loaded, Target* target, float scale, bool write) {
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
  for (int i = 0; i < width; ++i) squares += double(v[i]) * double(v[i]);  // the product is exact, fused or not
  return squares;
}

// The number of elements from `pointer` to the next 32-byte boundary, at most `count`.
template <class T>
DEVICE int head_of(const T* pointer, int count) {
  constexpr int kSector = 32;
  const int head = int(-reinterpret_cast<uintptr_t>(pointer) % kSector / sizeof(T));
  return head < count ? head : count;
}

// The element that this lane moves individually, in an array of `count` of which [head, count - tail) moves in vectors;
// or -1.
DEVICE int single_of(int head, int tail, int count) {
  constexpr int kFirstTailLane = kWarpSize / 2;
  const int lane = arch::lane_index();
  if (lane < head) return lane;
  if (lane >= kFirstTailLane && lane < kFirstTailLane + tail) return count - tail + (lane - kFirstTailLane);
  return -1;
}

// Moves a piece with the whole warp, in vectors of `width` elements. Source and target must have the same offset from a
// multiple of `width` elements. Returns this lane's part of the sum of squares.
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
    squares = store_scaled<op, 1, Source>(loaded, target + single, scale, write);
  }
  source += head;
  target += head;
  for (int first = arch::lane_index(); first < vectors; first += kLoads * kWarpSize) {
    Packed<Source, width> loaded[kLoads] = {};  // zeros past the end add nothing; a branch would cost more
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + i * kWarpSize;
      if (vector < vectors) loaded[i] = arch::load_global_streaming<Packed<Source, width>>(source + vector * width);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + i * kWarpSize;
      squares += store_scaled<op, width, Source>(loaded[i], target + vector * width, scale, write && vector < vectors);
    }
  }
  return squares;
}

// The number of elements of the wider dtype in 16 bytes.
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
// [first_entry, last_entry], possibly with gaps between them.
template <BucketOp op, class Bucket, class Table>
DEVICE double move_short(const Move<Table>& params, int64_t first_entry, int64_t last_entry, int64_t position,
                         int count) {
  constexpr int kElements = Config::kShortElements;
  constexpr Dtype kBucketDtype = DtypeOf<Bucket>::value;
  constexpr int kGap = -1, kAbsent = -2;
  const float scale = params.scale;
  Bucket* const bucket = static_cast<Bucket*>(params.bucket);  // null for stats
  const int num_entries = int(last_entry - first_entry);

  // Every lane searches the entries of all its elements at once, by bisection.
  // The number of entries before the element's. After the search: its entry, or kGap, or kAbsent if nothing is to be
  // moved.
  int passed[kElements] = {};
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
    const int64_t index = position + element;
    bits[i] = 0;
    if (element >= count || first_entry + passed[i] >= params.num_entries) {
      passed[i] = element >= count ? kAbsent : kGap;
      continue;
    }
    const TableEntry entry = params.table.entry(first_entry + passed[i]);
    if (entry.begin > index)
      passed[i] = kGap;
    else if (entry.data == nullptr)
      passed[i] = kAbsent;
    else if (op == BucketOp::kUnpack)
      bits[i] = load_bits(bucket, index, kBucketDtype);
    else
      bits[i] = load_bits(entry.data, index - entry.begin, entry.dtype);
  }

  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int element = arch::lane_index() + i * kWarpSize;
    const int64_t index = position + element;
    if (passed[i] < 0) {
      if (op == BucketOp::kPack && passed[i] == kGap) arch::store_global_streaming(bucket + index, Bucket{});
      continue;
    }
    const TableEntry entry = params.table.entry(first_entry + passed[i]);
    const int64_t offset = index - entry.begin;
    if constexpr (op == BucketOp::kStats) {
      const double v = float_of(bits[i], entry.dtype);
      squares += v * v;
    } else if constexpr (op == BucketOp::kPack) {
      const Dtype dtype = entry.dtype;
      const bool in_place = dtype == kBucketDtype && static_cast<Bucket*>(entry.data) + offset == bucket + index;
      squares +=
          store_scaled<op, 1, float>(float_of(bits[i], dtype), bucket + index, scale, !in_place || scale != 1.0f);
    } else {
      squares += with_type(entry.dtype, [&](auto tag) {
        auto* const target = static_cast<decltype(tag)*>(entry.data) + offset;
        const bool in_place = static_cast<void*>(target) == bucket + index;
        return store_scaled<op, 1, float>(float_of(bits[i], kBucketDtype), target, scale, !in_place || scale != 1.0f);
      });
    }
  }
  return squares;
}

// Moves [position, position + count) of the bucket, which lies entirely in `entry`.
template <BucketOp op, class Bucket, class Table>
DEVICE double move_long(const Move<Table>& params, const TableEntry& entry, int64_t position, int count) {
  const float scale = params.scale;
  return with_type(entry.dtype, [&](auto tag) {
    using T = decltype(tag);
    T* const data = static_cast<T*>(entry.data) + (position - entry.begin);
    if constexpr (op == BucketOp::kStats) {
      return move_piece<op>(data, data, count, scale, false);
    } else {
      Bucket* const in_bucket = static_cast<Bucket*>(params.bucket) + position;
      const bool write = static_cast<void*>(in_bucket) != data || scale != 1.0f;
      if constexpr (op == BucketOp::kPack)
        return move_piece<op>(data, in_bucket, count, scale, write);
      else
        return move_piece<op>(in_bucket, data, count, scale, write);
    }
  });
}

// Moves bucket elements [position, end) with one warp; returns this lane's part of the sum of squares.
template <BucketOp op, class Bucket, class Table>
DEVICE double move_region(const Move<Table>& params, int64_t position, int64_t end) {
  double squares = 0.0;
  int64_t index = 0;
  while (position < end) {
    index = find_entry(params, index, position);
    TableEntry entry{nullptr, end, end, Dtype::kFloat32};  // after the last entry there is a gap
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

}  // namespace bucket

}  // namespace cuda_ext
