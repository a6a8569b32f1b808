// Vectors of float32, and the few operations that kernels need on them. Every operation is defined lane by lane, and a sum over
// lanes is always one of SUMMED partial sums in the same order, so that a value has the same bits whichever instructions compute
// it. Products are added with one rounding (`fma`) and never contracted.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For the parts of inner loops: the compiler's own choice depends on all else in the file.
#define ALWAYS_INLINED __attribute__((always_inline))
#define ALWAYS_INLINE inline ALWAYS_INLINED

namespace outrider {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int PANEL = 2 * LANES;  // outputs whose weights lie together

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Floats all(float value) { return value - Floats{}; }
inline Ints all_ints(int32_t value) { return value - Ints{}; }

inline Floats load(const float* from) {
  Floats found;
  std::memcpy(&found, from, sizeof found);
  return found;
}
inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }
inline Ints load_ints(const void* from) {
  Ints found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline void store_bytes(void* to, Ints values) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  const Bytes found = __builtin_convertvector(values, Bytes);
  std::memcpy(to, &found, sizeof found);
}
inline void store_shorts(int16_t* to, Ints values) {
  typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
  const Shorts found = __builtin_convertvector(values, Shorts);
  std::memcpy(to, &found, sizeof found);
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  float32x4_t parts[3][LANES / 4];
  std::memcpy(parts[0], &a, sizeof a);
  std::memcpy(parts[1], &b, sizeof b);
  std::memcpy(parts[2], &c, sizeof c);
  for (int part = 0; part < LANES / 4; part++) parts[2][part] = vfmaq_f32(parts[2][part], parts[0][part], parts[1][part]);
  std::memcpy(&c, parts[2], sizeof c);
  return c;
#else
  for (int lane = 0; lane < LANES; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#endif
}

// One step of `transpose`: of every two lanes STEP apart, the upper one of `a` and the lower one of `b` change places.
template <int STEP, int... LANE>
ALWAYS_INLINE void exchange(Floats& a, Floats& b, std::integer_sequence<int, LANE...>) {
  const Floats lower = __builtin_shufflevector(a, b, (LANE & STEP ? LANES + LANE - STEP : LANE)...);
  b = __builtin_shufflevector(a, b, (LANE & STEP ? LANES + LANE : LANE + STEP)...);
  a = lower;
}

// Rows become columns.
template <int STEP = 1>
ALWAYS_INLINE void transpose(Floats (&square)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & STEP)) exchange<STEP>(square[i], square[i + STEP], std::make_integer_sequence<int, LANES>());
  if constexpr (2 * STEP < LANES) transpose<2 * STEP>(square);
}

// Lanes DISTANCE apart have changed places.
template <int DISTANCE, class Vector, int... LANE>
inline Vector swapped(Vector values, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(values, values, (LANE ^ DISTANCE)...);
}
template <int DISTANCE, class Vector>
inline Vector swapped(Vector values) {
  return swapped<DISTANCE>(values, std::make_integer_sequence<int, LANES>());
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Partial sums of a value that is summed over inputs: input i belongs to the sum i % SUMMED, however wide vectors are.
constexpr int SUMMED = 16;
struct Sums {
  Floats parts[SUMMED / LANES];
};

// The sum of all: halves are added until four values are left, then (0 + 1) + (2 + 3).
inline float total(const Sums& sums) {
  Floats found = sums.parts[0];
  if constexpr (SUMMED == LANES) found += swapped<8>(found);
  else found += sums.parts[1];
  found += swapped<4>(found);
  found += swapped<1>(found);
  return found[0] + found[2];
}

// `join` of all lanes, in any order.
template <class Vector, class Join>
inline auto reduced(Vector values, const Join& join) {
  if constexpr (LANES == 16) values = join(values, swapped<8>(values));
  values = join(values, swapped<4>(values));
  values = join(values, swapped<2>(values));
  values = join(values, swapped<1>(values));
  return values[0];
}
inline int32_t total(Ints values) {
  return reduced(values, [](Ints a, Ints b) { return a + b; });
}
inline int32_t largest(Ints values) {
  return reduced(values, [](Ints a, Ints b) { return a > b ? a : b; });
}

// Whether any lane of a comparison holds.
inline bool any(Ints lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
  int32_t found = 0;
  for (int lane = 0; lane < LANES; lane++) found |= lanes[lane];
  return found;
#endif
}
inline float largest(Floats values) {
  if constexpr (LANES == 16) values = larger(values, swapped<8>(values));
  values = larger(values, swapped<4>(values));
  values = larger(values, swapped<2>(values));
  return std::fmax(values[0], values[1]);
}

// bfloat16 is the upper half of a float32.
inline Floats load_bfloat16(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
  Halves found;
  std::memcpy(&found, from, sizeof found);
  return (Floats)(__builtin_convertvector(found, Ints) << 16);
#endif
}
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float from_bfloat16(uint16_t half) { return from_bits((uint32_t)half << 16); }

#if defined(__aarch64__)
typedef __fp16 Half;  // GCC before 13 has no _Float16 there
#else
typedef _Float16 Half;
#endif

inline float from_half(uint16_t half) {
  Half value;
  std::memcpy(&value, &half, 2);
  return (float)value;
}
inline uint16_t to_half(float value) {
  Half rounded = (Half)value;
  uint16_t half;
  std::memcpy(&half, &rounded, 2);
  return half;
}
inline Floats load_half(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Floats found;
  for (int lane = 0; lane < LANES; lane++) found[lane] = from_half(from[lane]);
  return found;
#endif
}

// float8_e4m3fn: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa.
constexpr float MOST_FLOAT8 = 448;

// Rounds to the nearest, ties to even. The value is between -MOST_FLOAT8 and MOST_FLOAT8.
inline uint8_t to_float8(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 31 << 7, absolute = bits & 0x7fffffff;
  if (std::fabs(value) < 0x1p-6f) return (uint8_t)(sign | (uint32_t)std::nearbyint(std::fabs(value) * 0x1p9f));  // subnormal
  return (uint8_t)(sign | (((absolute + 0x7ffff + (absolute >> 20 & 1)) >> 20) - (120 << 3)));
}
// Its bits are those of a float16 with another bias. NaN is not stored.
inline Floats load_float8(const uint8_t* from) {
  uint16_t halves[LANES];
  for (int lane = 0; lane < LANES; lane++) halves[lane] = (uint16_t)((from[lane] & 0x80) << 8 | (from[lane] & 0x7f) << 7);
  return load_half(halves) * all(0x1p8f);
}

// e to the power of each lane, to about one unit in the last place; 0 below -87.
// 2^n * e^r with r in [-ln 2 / 2, ln 2 / 2]; the polynomial is Taylor's, whose error at that end is below 2^-25.
inline Floats exponential(Floats x) {
  const Floats low = all(-87.0f), high = all(88.0f);
  const Ints tiny = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Floats magic = all(12582912.0f);  // adding it rounds to an integer
  Floats n = fma(x, all(1.44269504f), magic) - magic;
  Floats r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Floats p = all(1.0f / 5040);
  p = fma(p, r, all(1.0f / 720));
  p = fma(p, r, all(1.0f / 120));
  p = fma(p, r, all(1.0f / 24));
  p = fma(p, r, all(1.0f / 6));
  p = fma(p, r, all(0.5f));
  p = fma(p, r, all(1.0f));
  p = fma(p, r, all(1.0f));
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats found = p * (Floats)exponent;
  return tiny ? all(0.0f) : found;
}

}  // namespace outrider
