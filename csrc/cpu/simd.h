// Vectors of the instruction set that is being compiled, as GCC/Clang vector extensions: arithmetic operators work lane
// by lane. Loads convert from the storage type (float, half_t, bfloat16_t, double) to the compute type; stores convert
// back and round to nearest even.
#pragma once

#ifndef CUDA_EXT_ISA
#error "include cpu/isa_<name>.h first"
#endif

#define CUDA_EXT_INLINE inline __attribute__((always_inline))

// The vectors for which there are intrinsics, where operators do not suffice: none in a model of an instruction set,
// which every CPU runs.
#if defined(CUDA_EXT_BFLOAT16_PAIRS_MODEL)
#define CUDA_EXT_INTRINSIC_BYTES 0
#else
#define CUDA_EXT_INTRINSIC_BYTES CUDA_EXT_VECTOR_BYTES
#endif
#if defined(__aarch64__) && CUDA_EXT_INTRINSIC_BYTES == 16
#define CUDA_EXT_NEON
#endif

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int kVectorBytes = CUDA_EXT_VECTOR_BYTES;
#if CUDA_EXT_VECTOR_BYTES == 64 || defined(CUDA_EXT_NEON)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  static constexpr int count = kVectorBytes / 4;
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Lanes<double> {
  static constexpr int count = kVectorBytes / 8;
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename Lanes<T>::Vec;
template <class T>
using IntVec = typename Lanes<T>::Int;
template <class T>
constexpr int kLanes = Lanes<T>::count;

template <class T>
CUDA_EXT_INLINE Vec<T> splat(T value) {
  return value - Vec<T>{};
}
template <class T>
CUDA_EXT_INLINE Vec<T> select(IntVec<T> mask, Vec<T> yes, Vec<T> no) {
  return mask ? yes : no;
}
template <class T>
CUDA_EXT_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}
template <class T>
CUDA_EXT_INLINE Vec<T> min(Vec<T> a, Vec<T> b) {
  return a < b ? a : b;
}
// sum + a * b, rounded once where the CPU can: whether a compiler fuses the operators differs from loop to loop, and
// the bits of a sum must not.
CUDA_EXT_INLINE Vec<float> multiply_add(Vec<float> sum, Vec<float> a, Vec<float> b) {
#if CUDA_EXT_INTRINSIC_BYTES == 64
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(CUDA_EXT_NEON)
  return (Vec<float>)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return sum + a * b;
#endif
}
CUDA_EXT_INLINE Vec<double> multiply_add(Vec<double> sum, Vec<double> a, Vec<double> b) {
#if CUDA_EXT_INTRINSIC_BYTES == 64
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
#elif defined(CUDA_EXT_NEON)
  return (Vec<double>)vfmaq_f64((float64x2_t)sum, (float64x2_t)a, (float64x2_t)b);
#else
  return sum + a * b;
#endif
}
template <class T>
CUDA_EXT_INLINE T horizontal_sum(Vec<T> v) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += v[i];
  return sum;
}

// Scalar conversions.

CUDA_EXT_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
CUDA_EXT_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

CUDA_EXT_INLINE float to_compute(float value) { return value; }
CUDA_EXT_INLINE double to_compute(double value) { return value; }
CUDA_EXT_INLINE float to_compute(bfloat16_t value) { return bits_to_float(uint32_t(value.bits) << 16); }
CUDA_EXT_INLINE float to_compute(half_t value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Shifted into float's exponent field, the number is too small by the ratio of the biases, 2^112; also if subnormal.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
#endif
}

template <class Storage>
Storage from_compute(Compute<Storage> value);
template <>
CUDA_EXT_INLINE float from_compute<float>(float value) {
  return value;
}
template <>
CUDA_EXT_INLINE double from_compute<double>(double value) {
  return value;
}
template <>
CUDA_EXT_INLINE bfloat16_t from_compute<bfloat16_t>(float value) {
  const uint32_t bits = float_to_bits(value);
  if (value != value) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
CUDA_EXT_INLINE half_t from_compute<half_t>(float value) {
#if defined(__F16C__)
  return {uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
#else
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
  if (magnitude < 0x38800000) {
    // Adding 0.5 aligns the last bit of the subnormal with that of the float, so that the hardware rounds.
    return {uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000))};
  }
  return {uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13))};
#endif
}

// Vector loads: a full vector from any address.

CUDA_EXT_INLINE Vec<float> load(const float* p) { return *reinterpret_cast<const Lanes<float>::Unaligned*>(p); }
CUDA_EXT_INLINE Vec<double> load(const double* p) { return *reinterpret_cast<const Lanes<double>::Unaligned*>(p); }

typedef uint16_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t UnalignedHalfWords __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

// Conversions use intrinsics, because GCC 12 compiles __builtin_convertvector to two halves that it then joins.
template <class Storage>
Vec<float> from_bits(HalfWords bits);
template <>
CUDA_EXT_INLINE Vec<float> from_bits<bfloat16_t>(HalfWords bits) {
#if CUDA_EXT_INTRINSIC_BYTES == 64
  return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#else
  return (Vec<float>)(__builtin_convertvector(bits, Words) << 16);
#endif
}
template <>
CUDA_EXT_INLINE Vec<float> from_bits<half_t>(HalfWords bits) {
#if CUDA_EXT_INTRINSIC_BYTES == 64
  return (Vec<float>)_mm512_cvtph_ps((__m256i)bits);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  return (Vec<float>)_mm256_cvtph_ps((__m128i)bits);
#elif defined(CUDA_EXT_NEON)
  return (Vec<float>)vcvt_f32_f16((float16x4_t)bits);
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_compute(half_t{bits[i]});
  return v;
#endif
}

CUDA_EXT_INLINE Vec<float> load(const bfloat16_t* p) {
  return from_bits<bfloat16_t>(*reinterpret_cast<const UnalignedHalfWords*>(p));
}
CUDA_EXT_INLINE Vec<float> load(const half_t* p) {
  return from_bits<half_t>(*reinterpret_cast<const UnalignedHalfWords*>(p));
}

typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));
typedef uint8_t UnalignedBytes __attribute__((vector_size(kVectorBytes / 4), aligned(1), may_alias));

CUDA_EXT_INLINE Words widen(Bytes bytes) {
#if CUDA_EXT_INTRINSIC_BYTES == 64
  return (Words)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&bytes)));
#else
  return __builtin_convertvector(bytes, Words);
#endif
}
CUDA_EXT_INLINE Vec<float> load(const float8_e4m3_t* p) {
  using Format = Float8Format<float8_e4m3_t>;
  const Words bits = widen(*reinterpret_cast<const UnalignedBytes*>(p)), magnitude = bits & 0x7f;
  const Words value = (Words)((Vec<float>)(magnitude << (23 - Format::kMantissa)) * Format::kToFloat);
  return (Vec<float>)((bits & 0x80) << 24 | (magnitude == kFloat8Nan ? Words{} + 0x7fc00000 : value));
}
// The upper half of a float16.
CUDA_EXT_INLINE Vec<float> load(const float8_e5m2_t* p) {
  return from_bits<half_t>(__builtin_convertvector(*reinterpret_cast<const UnalignedBytes*>(p), HalfWords) << 8);
}

CUDA_EXT_INLINE void store(float* p, Vec<float> v) { *reinterpret_cast<Lanes<float>::Unaligned*>(p) = v; }
CUDA_EXT_INLINE void store(double* p, Vec<double> v) { *reinterpret_cast<Lanes<double>::Unaligned*>(p) = v; }

// The bits of the bfloat16 nearest to each lane, in the low half of a word.
CUDA_EXT_INLINE Words bfloat16_words(Vec<float> v) {
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words quiet_nan = bits >> 16 | 0x40;
  return v != v ? quiet_nan : rounded;
}

template <class Storage>
HalfWords to_bits(Vec<float> v);
template <>
CUDA_EXT_INLINE HalfWords to_bits<bfloat16_t>(Vec<float> v) {
  const Words words = bfloat16_words(v);
#if CUDA_EXT_INTRINSIC_BYTES == 64
  return (HalfWords)_mm512_cvtepi32_epi16((__m512i)words);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  const __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);  // lanes 0..3 0..3 4..7 4..7
  return (HalfWords)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
#else
  return __builtin_convertvector(words, HalfWords);
#endif
}
template <>
CUDA_EXT_INLINE HalfWords to_bits<half_t>(Vec<float> v) {
#if CUDA_EXT_INTRINSIC_BYTES == 64
  return (HalfWords)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  return (HalfWords)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(CUDA_EXT_NEON)
  return (HalfWords)vcvt_f16_f32((float32x4_t)v);
#else
  HalfWords bits;
  for (int i = 0; i < kLanes<float>; ++i) bits[i] = from_compute<half_t>(v[i]).bits;
  return bits;
#endif
}

CUDA_EXT_INLINE void store(bfloat16_t* p, Vec<float> v) {
  *reinterpret_cast<UnalignedHalfWords*>(p) = to_bits<bfloat16_t>(v);
}
CUDA_EXT_INLINE void store(half_t* p, Vec<float> v) { *reinterpret_cast<UnalignedHalfWords*>(p) = to_bits<half_t>(v); }

// v rounded to Storage.
template <class Storage>
CUDA_EXT_INLINE Vec<Compute<Storage>> round_to(Vec<Compute<Storage>> v) {
  if constexpr (sizeof(Storage) == 2) return from_bits<Storage>(to_bits<Storage>(v));
  return v;
}

// Non-temporal stores, for results larger than the caches: they neither read the lines they overwrite nor evict others.
// p must be aligned to the bytes written. Call stream_end() on the same thread before another thread reads the result.
template <class Storage>
CUDA_EXT_INLINE void stream(Storage* p, Vec<Compute<Storage>> v) {
#if defined(__x86_64__) && CUDA_EXT_INTRINSIC_BYTES > 0
  if constexpr (sizeof(Storage) == 2) {
    const HalfWords bits = to_bits<Storage>(v);
#if CUDA_EXT_INTRINSIC_BYTES == 64
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)bits);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)bits);
#else
    _mm_stream_si64(reinterpret_cast<long long*>(p), (long long)bits);
#endif
  } else {
#if CUDA_EXT_INTRINSIC_BYTES == 64
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif CUDA_EXT_INTRINSIC_BYTES == 32
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
#endif
  }
#else
  store(p, v);
#endif
}
CUDA_EXT_INLINE void stream_end() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The lanes of v in float64, in order.
CUDA_EXT_INLINE std::array<Vec<double>, 2> widen(Vec<float> v) {
  typedef float HalfVec __attribute__((vector_size(kVectorBytes / 2)));
  std::array<HalfVec, 2> half;
  std::memcpy(&half, &v, sizeof v);
#if CUDA_EXT_INTRINSIC_BYTES == 64
  return {(Vec<double>)_mm512_cvtps_pd((__m256)half[0]), (Vec<double>)_mm512_cvtps_pd((__m256)half[1])};
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  return {(Vec<double>)_mm256_cvtps_pd((__m128)half[0]), (Vec<double>)_mm256_cvtps_pd((__m128)half[1])};
#else
  return {__builtin_convertvector(half[0], Vec<double>), __builtin_convertvector(half[1], Vec<double>)};
#endif
}

// Partial loads and stores access only `count` elements (0 <= count <= lanes); other lanes are loaded as zeros.

#if CUDA_EXT_INTRINSIC_BYTES == 64
CUDA_EXT_INLINE __mmask16 first_lanes(int64_t count) { return __mmask16((1u << count) - 1); }
#elif CUDA_EXT_INTRINSIC_BYTES == 32
CUDA_EXT_INLINE __m256i first_words(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
CUDA_EXT_INLINE __m256i first_double_words(int64_t count) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
}
#endif

template <class Storage>
CUDA_EXT_INLINE Vec<Compute<Storage>> load_partial(const Storage* p, int64_t count) {
  constexpr int lanes = kLanes<Compute<Storage>>;
  if (count >= lanes) return load(p);
#if CUDA_EXT_INTRINSIC_BYTES == 64
  // Masked, because a copy to a padded array would stall on store forwarding.
  const auto mask = first_lanes(count);
  if constexpr (std::is_same_v<Storage, float>) return (Vec<float>)_mm512_maskz_loadu_ps(mask, p);
  if constexpr (std::is_same_v<Storage, double>) return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8(mask), p);
  if constexpr (sizeof(Storage) == 2) return from_bits<Storage>((HalfWords)_mm256_maskz_loadu_epi16(mask, p));
#elif CUDA_EXT_INTRINSIC_BYTES == 32
  if constexpr (std::is_same_v<Storage, float>) return (Vec<float>)_mm256_maskload_ps(p, first_words(count));
  if constexpr (std::is_same_v<Storage, double>) return (Vec<double>)_mm256_maskload_pd(p, first_double_words(count));
#endif
  Storage padded[lanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return load(padded);
}

template <class Storage>
CUDA_EXT_INLINE void store_partial(Storage* p, Vec<Compute<Storage>> v, int64_t count) {
  constexpr int lanes = kLanes<Compute<Storage>>;
  if (count >= lanes) return store(p, v);
#if CUDA_EXT_INTRINSIC_BYTES == 64
  const auto mask = first_lanes(count);
  if constexpr (std::is_same_v<Storage, float>) return _mm512_mask_storeu_ps(p, mask, (__m512)v);
  if constexpr (std::is_same_v<Storage, double>) return _mm512_mask_storeu_pd(p, __mmask8(mask), (__m512d)v);
  if constexpr (sizeof(Storage) == 2) return _mm256_mask_storeu_epi16(p, mask, (__m256i)to_bits<Storage>(v));
#endif
#if CUDA_EXT_INTRINSIC_BYTES == 32
  // In up to three pieces, because masked stores are slow on some CPUs.
  if constexpr (std::is_same_v<Storage, float>) {
    __m128 rest = _mm256_castps256_ps128((__m256)v);
    if (count & 4) {
      _mm_storeu_ps(p, rest);
      rest = _mm256_extractf128_ps((__m256)v, 1);
      p += 4;
    }
    if (count & 2) {
      _mm_storel_pi(reinterpret_cast<__m64*>(p), rest);
      rest = _mm_movehl_ps(rest, rest);
      p += 2;
    }
    if (count & 1) _mm_store_ss(p, rest);
    return;
  }
#endif
  Storage padded[lanes];
  store(padded, v);
  for (int64_t i = 0; i < count; ++i) p[i] = padded[i];
}

// Calls f(offset, count) over [0, n) in steps of one vector of T; count is less than a vector only in the last call.
template <class T, class F>
CUDA_EXT_INLINE void for_vectors(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) f(i, int64_t(kLanes<T>));
  if (i < n) f(i, n - i);
}

// Alternates units of `unit` lanes from a and b: of every `span` lanes, those of the low (kHigh = false) or high half.
template <bool kHigh, int unit, int span, class T>
CUDA_EXT_INLINE Vec<T> interleave(Vec<T> a, Vec<T> b) {
  constexpr int lanes = kLanes<T>;
  IntVec<T> index;
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    const int turn = i % span / unit;
    index[i] = i / span * span + (kHigh ? span / 2 : 0) + turn / 2 * unit + i % unit + turn % 2 * lanes;
  }
#if defined(__clang__)
  Vec<T> interleaved;
  for (int i = 0; i < lanes; ++i) interleaved[i] = index[i] < lanes ? a[index[i]] : b[index[i] - lanes];
  return interleaved;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// Transposes squares of (span / unit)^2 units in rows first, first + step, ..., by interleaving rows i and i + count /
// 2 in log2(span / unit) rounds.
template <int unit, int span, class T>
CUDA_EXT_INLINE void transpose_units(Vec<T> (&rows)[kLanes<T>], int first, int step) {
  constexpr int count = span / unit;
#pragma GCC unroll 4
  for (int width = 1; width < count; width *= 2) {
    Vec<T> interleaved[count];
#pragma GCC unroll 16
    for (int i = 0; i < count / 2; ++i) {
      const Vec<T> low = rows[first + i * step], high = rows[first + (i + count / 2) * step];
      interleaved[2 * i] = interleave<false, unit, span, T>(low, high);
      interleaved[2 * i + 1] = interleave<true, unit, span, T>(low, high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) rows[first + i * step] = interleaved[i];
  }
}

// Transposes a square of lanes x lanes in registers: first within units of 16 bytes, where shuffles are cheap, then the
// units themselves.
template <class T>
CUDA_EXT_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int lanes = kLanes<T>, unit = 16 / int(sizeof(T));
#pragma GCC unroll 8
  for (int first = 0; first < lanes; first += unit) transpose_units<1, unit, T>(rows, first, 1);
#pragma GCC unroll 8
  for (int i = 0; i < unit; ++i) transpose_units<unit, lanes, T>(rows, i, unit);
}

// Lane l = the sum of the lanes of rows[l]. Needs half as many shuffles as a transpose: each round adds the two vectors
// that it interleaves.
template <class T>
CUDA_EXT_INLINE Vec<T> horizontal_sums(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int lanes = kLanes<T>, piece = 16 / int(sizeof(T));
  const auto round = [&](auto unit, int count) {
    constexpr int span = std::max(2 * decltype(unit)::value, piece);
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i)
      rows[i] = interleave<false, decltype(unit)::value, span, T>(rows[2 * i], rows[2 * i + 1]) +
                interleave<true, decltype(unit)::value, span, T>(rows[2 * i], rows[2 * i + 1]);
  };
  round(std::integral_constant<int, 1>{}, lanes / 2);
  if constexpr (lanes > 2) round(std::integral_constant<int, 2>{}, lanes / 4);
  if constexpr (lanes > 4) round(std::integral_constant<int, 4>{}, lanes / 8);
  if constexpr (lanes > 8) round(std::integral_constant<int, 8>{}, lanes / 16);
  return rows[0];
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
