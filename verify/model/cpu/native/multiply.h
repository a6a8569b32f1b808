// Products of rows with a panel of weights.
//
// Each output is one sum in one order, input after input or block after block, however many rows are multiplied together: a row's
// bits do not depend on its neighbours. Rows are multiplied in blocks that fit the registers, so that a weight is loaded and
// unpacked once for all of them.
#pragma once
#include <array>
#include <iterator>
#include <utility>

#include "matrix.h"

namespace outrider {

// The rows of a product, [count, inputs]. Rows for quantised weights become 16-bit integers, in blocks of BLOCK inputs with a scale.
// With 8 bits, a real model's answers would be those of another model: its activations have outliers.
struct Rows {
  int inputs;
  float* floats;
  int16_t* integers;  // value / scale
  float* scales;      // [count, inputs / BLOCK]
  float* sums;        // of a block's integers, times the scale
};

constexpr float LARGEST_INPUT = 32767;

inline void quantize(const Rows& rows, int row) {
  const float* from = rows.floats + (size_t)row * rows.inputs;
  for (int b = 0; b < rows.inputs / BLOCK; b++) {
    Floats most{}, zeros{};
    for (int i = 0; i < BLOCK; i += LANES) {
      const Floats values = load(from + b * BLOCK + i);
      most = larger(most, larger(values, -values));
      zeros += values * all(0);  // but NaN where a value is NaN or infinite, which no integer can say
    }
    float unusable = 0;
    for (int lane = 0; lane < LANES; lane++) unusable += zeros[lane];
    const float scale = largest(most) / LARGEST_INPUT + unusable, inverse = scale > 0 ? 1 / scale : 0;
    const size_t place = (size_t)row * rows.inputs + b * BLOCK;
    Ints totals{};
    for (int i = 0; i < BLOCK; i += LANES) {
      // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the lower bits.
      const Ints rounded = (Ints)fma(load(from + b * BLOCK + i), all(inverse), all(12582912.0f)) - all_ints(0x4b400000);
      store_shorts(rows.integers + place + i, rounded);
      totals += rounded;
    }
    int total = 0;
    for (int lane = 0; lane < LANES; lane++) total += totals[lane];
    rows.scales[place / BLOCK] = scale;
    rows.sums[place / BLOCK] = scale * (float)total;
  }
}

// Bytes ahead of those that are multiplied. With half of it, weights came too late for eight rows: their arithmetic and the reading
// took turns.
constexpr int PREFETCHED = 4096;

// Fetches the weights that come next: the hardware does not look beyond a page.
inline void prefetch(const void* weights, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)weights + PREFETCHED + i, 0, 3);
}

template <int R>
void multiply_float32(const Matrix& matrix, const char* panel, const Rows& rows, int first, float* out) {
  const float* weights = (const float*)panel;
  const float* x = rows.floats + (size_t)first * rows.inputs;
  Floats sums[R][2] = {};
  for (int i = 0; i < matrix.inputs; i++, weights += PANEL) {
    prefetch(weights, 4 * PANEL);
    const Floats w0 = load(weights), w1 = load(weights + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Floats value = all(x[(size_t)r * rows.inputs + i]);
      sums[r][0] = fma(w0, value, sums[r][0]);
      sums[r][1] = fma(w1, value, sums[r][1]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int part = 0; part < 2; part++) store(out + r * PANEL + part * LANES, sums[r][part]);
}

template <int R>
void multiply_bfloat16(const Matrix& matrix, const char* panel, const Rows& rows, int first, float* out) {
  const uint16_t* weights = (const uint16_t*)panel;
  const float* x = rows.floats + (size_t)first * rows.inputs;
  Floats sums[R][2] = {};
  for (int i = 0; i < matrix.inputs; i += 2, weights += 2 * PANEL) {
    prefetch(weights, 4 * PANEL);
    const Ints pairs[2] = {load_ints(weights), load_ints(weights + 2 * LANES)};
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      const Floats w0 = (Floats)(odd ? pairs[0] & (int32_t)0xffff0000 : pairs[0] << 16);
      const Floats w1 = (Floats)(odd ? pairs[1] & (int32_t)0xffff0000 : pairs[1] << 16);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Floats value = all(x[(size_t)r * rows.inputs + i + odd]);
        sums[r][0] = fma(w0, value, sums[r][0]);
        sums[r][1] = fma(w1, value, sums[r][1]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int part = 0; part < 2; part++) store(out + r * PANEL + part * LANES, sums[r][part]);
}

// Adds the products of pairs of 16-bit integers to each lane.
inline Ints add_pairs(Ints sums, Ints weights, Ints x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#elif defined(__aarch64__)
  int16x8_t pairs[2][LANES / 4];
  std::memcpy(pairs[0], &weights, sizeof weights);
  std::memcpy(pairs[1], &x, sizeof x);
  int32x4_t products[LANES / 4];
  for (int part = 0; part < LANES / 4; part++) {
    const int16x8_t w = pairs[0][part], v = pairs[1][part];
    products[part] = vpaddq_s32(vmull_s16(vget_low_s16(w), vget_low_s16(v)), vmull_high_s16(w, v));
  }
  return sums + load_ints(products);
#else
  return sums + (weights << 16 >> 16) * (x << 16 >> 16) + (weights >> 16) * (x >> 16);
#endif
}

// Keeps the compiler from postponing an addition: it would hold more products than there are registers.
inline void settle(Ints& sums) {
#if defined(__AVX512F__)
  asm("" : "+v"(sums));
#elif defined(__AVX2__)
  asm("" : "+x"(sums));
#else
  (void)sums;
#endif
}

// LANES pairs of 8-bit weights as 16-bit integers.
inline Ints load_pairs(const int8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
  Ints pairs;
  for (int lane = 0; lane < LANES; lane++) pairs[lane] = (from[2 * lane] & 0xffff) | (int32_t)((uint32_t)from[2 * lane + 1] << 16);
  return pairs;
#endif
}

// LANES 8-bit integers.
inline Ints load_bytes(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes found;
  std::memcpy(&found, from, sizeof found);
  return __builtin_convertvector(found, Ints);
#endif
}

// The entries of TABLE that 16-bit integers name.
inline Ints look_up(Ints places) {
#if defined(__AVX512F__)
  const __m512i table = _mm512_cvtepi8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)TABLE)));
  return (Ints)_mm512_permutexvar_epi16((__m512i)places, table);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)TABLE));
  const __m256i found = _mm256_shuffle_epi8(table, (__m256i)places);  // in the lower byte of 16 bits
  return (Ints)_mm256_srai_epi16(_mm256_slli_epi16(found, 8), 8);
#else
  for (int lane = 0; lane < LANES; lane++)
    places[lane] = (TABLE[places[lane] & 15] & 0xffff) | (int32_t)((uint32_t)TABLE[places[lane] >> 16] << 16);
  return places;
#endif
}

// The values of a pair of inputs as 16-bit integers. `low` has the lower bits of four pairs, and `high` begins with the others.
template <const Format& FORMAT>
inline Ints values_of(Ints low, Ints high, int pair) {
  Ints values = low >> 4 * pair & 0x000f000f;
  if constexpr (FORMAT.high() > 0) {
    const int shift = pair * FORMAT.high() - 4;
    values |= (shift < 0 ? high << -shift : high >> shift) & ((1 << FORMAT.high()) - 1) * 0x00100010;
  }
  if constexpr (FORMAT.is_table) values = look_up(values);
  if constexpr (FORMAT.offset > 0) {
    typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
    values = (Ints)((Shorts)values - (int16_t)FORMAT.offset);
  }
  return values;
}

inline Ints pair_of(const int16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, 4);
  return all_ints(pair);
}

// Adds the products of a pair of inputs of R rows with its weights, of both halves of a panel.
template <int R>
inline void add_pair(Ints w0, Ints w1, const int16_t* x, int inputs, Ints (&sums)[R][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const Ints values = pair_of(x + (size_t)r * inputs);
    sums[r][0] = add_pairs(sums[r][0], w0, values);
    sums[r][1] = add_pairs(sums[r][1], w1, values);
    settle(sums[r][0]);
    settle(sums[r][1]);
  }
}

// Sums of products of a group's weights with R rows.
template <const Format& FORMAT, int R>
inline void sum_group(const PackedBlock& block, int group, const int16_t* x, int inputs, Ints (&sums)[R][2]) {
  if constexpr (FORMAT.bits == 8) {
    const int8_t* weights = block.bytes;
#pragma GCC unroll 2
    for (int pair = 0; pair < PAIRS; pair++, weights += 2 * PANEL)
      add_pair<R>(load_pairs(weights), load_pairs(weights + 2 * LANES), x + 2 * pair, inputs, sums);
  } else {
    const uint32_t* weights = block.nibbles + group * FORMAT.group / NIBBLES * PANEL;
    Ints high[2] = {};
    if constexpr (FORMAT.high() > 0)
      for (int part = 0; part < 2; part++) high[part] = load_ints(block.high + group * PANEL + part * LANES);
    for (int eight = 0; eight < FORMAT.group / NIBBLES; eight++, x += NIBBLES, weights += PANEL) {
      const Ints low[2] = {load_ints(weights), load_ints(weights + LANES)};
#pragma GCC unroll 4
      for (int pair = 0; pair < NIBBLES / 2; pair++)
        add_pair<R>(values_of<FORMAT>(low[0], high[0], pair), values_of<FORMAT>(low[1], high[1], pair), x + 2 * pair, inputs, sums);
      for (int part = 0; part < 2; part++) high[part] >>= NIBBLES / 2 * FORMAT.high();
    }
  }
}

// LANES scales or minimums.
template <const Format& FORMAT>
inline Floats load_scales(const char* scales, const uint16_t* factors, int place) {
  if constexpr (FORMAT.has_factors) return to_floats(load_bytes(scales + place)) * load_half(factors + place % PANEL);
  return load_half((const uint16_t*)scales + place);
}

template <const Format& FORMAT, int R>
void multiply_blocks(const Matrix& matrix, const char* panel, const Rows& rows, int first, float* out) {
  for (int i = 0; i < R * PANEL; i += LANES) store(out + i, Floats{});
  const int blocks = matrix.inputs / BLOCK;
  for (int b = 0; b < blocks; b++) {
    const PackedBlock block = block_of(FORMAT, (char*)panel, b);
    prefetch(block.scales, FORMAT.block_bytes());
    for (int group = 0; group < FORMAT.groups(); group++) {
      asm volatile("" ::: "memory");  // keeps totals in `out`: registers are for the sums
      Ints sums[R][2] = {};
      const size_t place = (size_t)first * rows.inputs + b * BLOCK + group * FORMAT.group;
      sum_group<FORMAT, R>(block, group, rows.integers + place, rows.inputs, sums);
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const Floats scales = load_scales<FORMAT>(block.scales, block.factors, group * PANEL + part * LANES);
        Floats minimums{};
        if constexpr (FORMAT.has_minimums)
          minimums = load_scales<FORMAT>(block.minimums, block.minimum_factors, part * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const size_t number = (size_t)(first + r) * blocks + b;
          float* total = out + r * PANEL + part * LANES;
          Floats sum = fma(to_floats(sums[r][part]), scales * all(rows.scales[number]), load(total));
          if constexpr (FORMAT.has_minimums) sum = fma(minimums, all(rows.sums[number]), sum);
          store(total, sum);
        }
      }
    }
  }
}

// Rows that are multiplied together: their sums, with a panel's weights, fill the registers.
#if defined(__AVX512F__)
constexpr int MOST = 12;
constexpr int MOST_ROWS[] = {12, 12, 12};  // float32, bfloat16, quantised
#else
constexpr int MOST = 6;
constexpr int MOST_ROWS[] = {6, 5, 5};
#endif

template <int R, size_t... FORMAT>
constexpr auto kernels_of(std::index_sequence<FORMAT...>) {
  return std::array{multiply_float32<R>, multiply_bfloat16<R>, multiply_blocks<FORMATS[FORMAT], R>...};
}
template <size_t... ROWS>
constexpr auto kernels_for(std::index_sequence<ROWS...>) {
  return std::array{kernels_of<ROWS + 1>(std::make_index_sequence<std::size(FORMATS)>())...};
}
// By rows - 1, and kind. No template has a static variable: processes that load several variants would share it.
constexpr auto KERNELS = kernels_for(std::make_index_sequence<MOST>());

// Multiplies all `count` rows with a panel, in blocks of nearly equal size, and calls `use(row, sums)` with float32 [PANEL].
template <class Use>
void multiply_panel(const Matrix& matrix, int panel, const Rows& rows, int count, const Use& use) {
  const int most = MOST_ROWS[std::min<int>(matrix.kind, INT8)], parts = (count + most - 1) / most;
  const char* weights = matrix.panel(panel);
  float out[MOST * PANEL];
  for (int part = 0, first = 0; part < parts; part++) {
    const int size = count / parts + (part < count % parts);
    KERNELS[size - 1][matrix.kind](matrix, weights, rows, first, out);
    for (int r = 0; r < size; r++) use(first + r, out + r * PANEL);
    first += size;
  }
}

}  // namespace outrider
