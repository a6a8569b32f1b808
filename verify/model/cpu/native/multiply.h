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

// A block of a row for quantised weights: value / scale, rounded to 9 bits. With 8 bits, a real model's answers would be those of
// another model: its activations have outliers. 9 bits are a byte and a sign, and each half of the byte fits a signed byte.
struct RowBlock {
#if QUADS
  uint8_t magnitudes[BLOCK], flips[BLOCK];  // flips: 255 where the value is negative, else 0
#else
  int16_t integers[BLOCK];
#endif
  float scale, sum;      // sum: of the values, as they were rounded
  int32_t negatives[2];  // sums of the magnitudes of negative values, of each half
};

constexpr float LARGEST_INPUT = 254;

// Rows that are multiplied together: their sums, with a panel's weights, fill the registers.
#if defined(__AVX512F__)
constexpr int MOST = 12;
constexpr int MOST_ROWS[] = {12, 12, 12};  // float32, bfloat16, quantised
#else
constexpr int MOST = 6;
constexpr int MOST_ROWS[] = {6, 5, 5};
#endif

// Parts of nearly equal size of `count` rows, each of which is multiplied together.
struct Parts {
  int count, number;

  Parts(int count, int kind) : count(count), number((count + MOST_ROWS[std::min<int>(kind, INT8)] - 1) / MOST_ROWS[std::min<int>(kind, INT8)]) {}
  int larger() const { return count % number; }  // parts that have one row more, the first ones
  int first(int part) const { return part * (count / number) + std::min(part, larger()); }
  int size(int part) const { return count / number + (part < larger()); }
  int part_of(int row) const {
    const int most = count / number + 1;
    return row < larger() * most ? row / most : larger() + (row - larger() * most) / (count / number);
  }
};

// The rows of a product, float32 [count, inputs], and their blocks, which lie in the order in which they are multiplied:
// [parts, inputs / BLOCK, rows of the part].
struct Rows {
  int inputs, count;
  float* floats;
  RowBlock* blocks;
};

// Rounds a block of a row.
inline void quantize(const float* from, RowBlock& to) {
  Ints most{};  // as integers, the bits of absolute values are in their order, and NaN is the largest
  for (int i = 0; i < BLOCK; i += LANES) {
    const Ints bits = load_ints(from + i) & 0x7fffffff;
    most = most > bits ? most : bits;
  }
  const float largest = from_bits(outrider::largest(most));
  // NaN where a value is NaN or infinite, which no integer can say.
  const float scale = largest / LARGEST_INPUT + largest * 0, inverse = scale > 0 ? 1 / scale : 0;
  Ints totals{}, negatives[2] = {};
  for (int i = 0; i < BLOCK; i += LANES) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the lower bits.
    const Ints rounded = (Ints)fma(load(from + i), all(inverse), all(12582912.0f)) - all_ints(0x4b400000);
    totals += rounded;
#if QUADS
    const Ints flips = rounded >> 31;
    store_bytes(to.magnitudes + i, (rounded ^ flips) - flips);
    store_bytes(to.flips + i, flips);
    negatives[i / (BLOCK / 2)] -= rounded & flips;
#else
    store_shorts(to.integers + i, rounded);
#endif
  }
  to.scale = scale;
  to.sum = scale * (float)total(totals);
  for (int half = 0; half < 2; half++) to.negatives[half] = total(negatives[half]);
}

inline void quantize(const Rows& rows, int row) {
  const Parts parts(rows.count, INT8);
  const int part = parts.part_of(row), first = parts.first(part), blocks = rows.inputs / BLOCK;
  RowBlock* to = rows.blocks + (size_t)first * blocks + row - first;
  for (int b = 0; b < blocks; b++) quantize(rows.floats + (size_t)row * rows.inputs + b * BLOCK, to[(size_t)b * parts.size(part)]);
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

#if QUADS

typedef int8_t Quads __attribute__((vector_size(4 * LANES)));

// Adds the products of four bytes, the first ones without a sign, to each lane.
inline Ints add_products(Ints sums, Ints x, Ints weights) {
#if defined(__AVX512F__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)weights);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)x, (__m256i)weights);
#else
  int32x4_t totals[LANES / 4];
  uint8x16_t values[LANES / 4];
  int8x16_t bytes[LANES / 4];
  std::memcpy(totals, &sums, sizeof sums);
  std::memcpy(values, &x, sizeof x);
  std::memcpy(bytes, &weights, sizeof weights);
  for (int part = 0; part < LANES / 4; part++) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    totals[part] = vusdotq_s32(totals[part], values[part], bytes[part]);
#else
    const uint8x16_t lower = vshrq_n_u8(values[part], 1), upper = vrhaddq_u8(values[part], vdupq_n_u8(0));
    totals[part] = vdotq_s32(totals[part], vreinterpretq_s8_u8(lower), bytes[part]);
    totals[part] = vdotq_s32(totals[part], vreinterpretq_s8_u8(upper), bytes[part]);
#endif
  }
  return load_ints(totals);
#endif
}

// The entries of TABLE that bytes name.
inline Ints look_up(Ints places) {
#if defined(__AVX512F__)
  const __m128i table = _mm_loadu_si128((const __m128i*)TABLE);
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)places);
#elif defined(__AVXVNNI__)
  const __m128i table = _mm_loadu_si128((const __m128i*)TABLE);
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)places);
#else
  uint8x16_t bytes[LANES / 4];
  std::memcpy(bytes, &places, sizeof places);
  for (auto& part : bytes) part = vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(TABLE), part));
  return load_ints(bytes);
#endif
}

// The values of four inputs. `low` has the lower bits of eight of them, and `high` begins with the others.
template <const Format& FORMAT>
inline Ints values_of(Ints low, Ints high, int quad) {
  Ints values = low >> 4 * quad & 0x0f0f0f0f;
  if constexpr (FORMAT.high() > 0) {
    const int shift = quad * FORMAT.high() - 4;
    values |= (shift < 0 ? high << -shift : high >> shift) & ((1 << FORMAT.high()) - 1) * 0x10101010;
  }
  if constexpr (FORMAT.is_table) values = look_up(values);
  if constexpr (FORMAT.offset > 0) values = (Ints)((Quads)values - (int8_t)FORMAT.offset);
  return values;
}

inline Ints quad_of(const uint8_t* from) {
  int32_t quad;
  std::memcpy(&quad, from, 4);
  return all_ints(quad);
}

// Adds the products of four inputs of R rows, the first of which is `input`, with their weights, of both halves of a panel. Where a
// row is negative, its weights w become -1 - w: `negatives`, at which the sums begin, is what is then missing.
template <int R>
inline void add_quad(Ints w0, Ints w1, const RowBlock* x, int input, Ints (&sums)[R][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const Ints values = quad_of(x[r].magnitudes + input), flips = quad_of(x[r].flips + input);
    sums[r][0] = add_products(sums[r][0], values, w0 ^ flips);
    sums[r][1] = add_products(sums[r][1], values, w1 ^ flips);
  }
}

// Sums of products of a group's weights with R rows.
template <const Format& FORMAT, int R>
inline void sum_group(const PackedBlock& block, int group, const RowBlock* x, Ints (&sums)[R][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const int32_t negatives = FORMAT.groups() == 2 ? x[r].negatives[group] : x[r].negatives[0] + x[r].negatives[1];
    sums[r][0] = sums[r][1] = all_ints(negatives);
  }
  if constexpr (FORMAT.bits == 8) {
    const int8_t* weights = block.bytes;
#pragma GCC unroll 2
    for (int input = 0; input < BLOCK; input += 4, weights += 4 * PANEL)
      add_quad<R>(load_ints(weights), load_ints(weights + 4 * LANES), x, input, sums);
  } else {
    const uint32_t* weights = block.nibbles + group * FORMAT.group / NIBBLES * PANEL;
    Ints high[2] = {};
    if constexpr (FORMAT.high() > 0)
      for (int part = 0; part < 2; part++) high[part] = load_ints(block.high + group * PANEL + part * LANES);
    const int first = group * FORMAT.group;
    for (int input = first; input < first + FORMAT.group; input += NIBBLES, weights += PANEL) {
      const Ints low[2] = {load_ints(weights), load_ints(weights + LANES)};
#pragma GCC unroll 2
      for (int quad = 0; quad < 2; quad++)
        add_quad<R>(values_of<FORMAT>(low[0], high[0], quad), values_of<FORMAT>(low[1], high[1], quad), x, input + 4 * quad, sums);
      for (int part = 0; part < 2; part++) high[part] >>= 2 * FORMAT.high();
    }
  }
}

#else

// Adds the products of pairs of 16-bit integers to each lane.
inline Ints add_products(Ints sums, Ints weights, Ints x) {
#if defined(__AVX2__)
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
#if defined(__AVX2__)
  asm("" : "+x"(sums));
#else
  (void)sums;
#endif
}

// LANES pairs of 8-bit weights as 16-bit integers.
inline Ints load_pairs(const int8_t* from) {
#if defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
  Ints pairs;
  for (int lane = 0; lane < LANES; lane++) pairs[lane] = (from[2 * lane] & 0xffff) | (int32_t)((uint32_t)from[2 * lane + 1] << 16);
  return pairs;
#endif
}

// The entries of TABLE that 16-bit integers name.
inline Ints look_up(Ints places) {
#if defined(__AVX2__)
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

// Adds the products of a pair of inputs of R rows, the first of which is `input`, with their weights, of both halves of a panel.
template <int R>
inline void add_pair(Ints w0, Ints w1, const RowBlock* x, int input, Ints (&sums)[R][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const Ints values = pair_of(x[r].integers + input);
    sums[r][0] = add_products(sums[r][0], w0, values);
    sums[r][1] = add_products(sums[r][1], w1, values);
    settle(sums[r][0]);
    settle(sums[r][1]);
  }
}

// Sums of products of a group's weights with R rows.
template <const Format& FORMAT, int R>
inline void sum_group(const PackedBlock& block, int group, const RowBlock* x, Ints (&sums)[R][2]) {
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = Ints{};
  if constexpr (FORMAT.bits == 8) {
    const int8_t* weights = block.bytes;
#pragma GCC unroll 16
    for (int pair = 0; pair < BLOCK / 2; pair++, weights += 2 * PANEL)
      add_pair<R>(load_pairs(weights), load_pairs(weights + 2 * LANES), x, 2 * pair, sums);
  } else {
    const uint32_t* weights = block.nibbles + group * FORMAT.group / NIBBLES * PANEL;
    Ints high[2] = {};
    if constexpr (FORMAT.high() > 0)
      for (int part = 0; part < 2; part++) high[part] = load_ints(block.high + group * PANEL + part * LANES);
    const int first = group * FORMAT.group;
    for (int input = first; input < first + FORMAT.group; input += NIBBLES, weights += PANEL) {
      const Ints low[2] = {load_ints(weights), load_ints(weights + LANES)};
#pragma GCC unroll 4
      for (int pair = 0; pair < NIBBLES / 2; pair++)
        add_pair<R>(values_of<FORMAT>(low[0], high[0], pair), values_of<FORMAT>(low[1], high[1], pair), x, input + 2 * pair, sums);
      for (int part = 0; part < 2; part++) high[part] >>= NIBBLES / 2 * FORMAT.high();
    }
  }
}

#endif

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
  const RowBlock* x = rows.blocks + (size_t)first * blocks;
  for (int b = 0; b < blocks; b++, x += R) {
    const PackedBlock block = block_of(FORMAT, (char*)panel, b);
    prefetch(block.scales, FORMAT.block_bytes());
    for (int group = 0; group < FORMAT.groups(); group++) {
      asm volatile("" ::: "memory");  // keeps totals in `out`: registers are for the sums
      Ints sums[R][2];
      sum_group<FORMAT, R>(block, group, x, sums);
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const Floats scales = load_scales<FORMAT>(block.scales, block.factors, group * PANEL + part * LANES);
        Floats minimums{};
        if constexpr (FORMAT.has_minimums)
          minimums = load_scales<FORMAT>(block.minimums, block.minimum_factors, part * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          float* total = out + r * PANEL + part * LANES;
          Floats sum = fma(to_floats(sums[r][part]), scales * all(x[r].scale), load(total));
          if constexpr (FORMAT.has_minimums) sum = fma(minimums, all(x[r].sum), sum);
          store(total, sum);
        }
      }
    }
  }
}

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

// Multiplies all rows with a panel, part by part, and calls `use(row, sums)` with float32 [PANEL].
template <class Use>
void multiply_panel(const Matrix& matrix, int panel, const Rows& rows, const Use& use) {
  const Parts parts(rows.count, matrix.kind);
  const char* weights = matrix.panel(panel);
  float out[MOST * PANEL];
  for (int part = 0; part < parts.number; part++) {
    const int first = parts.first(part);
    KERNELS[parts.size(part) - 1][matrix.kind](matrix, weights, rows, first, out);
    for (int r = 0; r < parts.size(part); r++) use(first + r, out + r * PANEL);
  }
}

}  // namespace outrider
