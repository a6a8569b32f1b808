// Products of rows with a panel of weights.
//
// Each output is one sum in one order, input after input or block after block, however many rows are multiplied together: a row's
// bits do not depend on its neighbours. Rows are multiplied in blocks that fit the registers, so that a weight is loaded and
// unpacked once for all of them.
#pragma once
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

constexpr int PREFETCHED = 2048;  // bytes ahead of those that are multiplied

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
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
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

inline Ints pair_of(const int16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, 4);
  return all_ints(pair);
}

// Sums of products of a block's weights with R rows, of both halves of a panel.
template <int R, bool IS_INT4>
inline void sum_block(const char* block, const Rows& rows, size_t place, Ints (&sums)[R][2]) {
  const int16_t* x = rows.integers + place;
  if constexpr (IS_INT4) {
    const uint32_t* weights = nibbles_of((char*)block);
    for (int eight = 0; eight < BLOCK / NIBBLES; eight++, x += NIBBLES, weights += PANEL) {
      const Ints both[2] = {load_ints(weights), load_ints(weights + LANES)};
#pragma GCC unroll 4
      for (int pair = 0; pair < NIBBLES / 2; pair++) {
        const Ints w0 = both[0] >> 4 * pair & 0x000f000f, w1 = both[1] >> 4 * pair & 0x000f000f;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const Ints values = pair_of(x + (size_t)r * rows.inputs + 2 * pair);
          sums[r][0] = add_pairs(sums[r][0], w0, values);
          sums[r][1] = add_pairs(sums[r][1], w1, values);
          settle(sums[r][0]);
          settle(sums[r][1]);
        }
      }
    }
  } else {
    const int8_t* weights = bytes_of((char*)block);
#pragma GCC unroll 2
    for (int pair = 0; pair < PAIRS; pair++, weights += 2 * PANEL) {
      const Ints w0 = load_pairs(weights), w1 = load_pairs(weights + 2 * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Ints values = pair_of(x + (size_t)r * rows.inputs + 2 * pair);
        sums[r][0] = add_pairs(sums[r][0], w0, values);
        sums[r][1] = add_pairs(sums[r][1], w1, values);
        settle(sums[r][0]);
        settle(sums[r][1]);
      }
    }
  }
}

template <int R, bool IS_INT4>
void multiply_blocks(const Matrix& matrix, const char* panel, const Rows& rows, int first, float* out) {
  for (int i = 0; i < R * PANEL; i += LANES) store(out + i, Floats{});
  const int blocks = matrix.inputs / BLOCK;
  char* block = (char*)panel;
  for (int b = 0; b < blocks; b++, block += matrix.block_bytes()) {
    prefetch(block, matrix.block_bytes());
    Ints sums[R][2] = {};
    sum_block<R, IS_INT4>(block, rows, (size_t)first * rows.inputs + b * BLOCK, sums);
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      const Floats scales = load_half(scales_of(block) + part * LANES);
      Floats minimums{};
      if constexpr (IS_INT4) minimums = load_half(minimums_of(block) + part * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const size_t number = (size_t)(first + r) * blocks + b;
        float* total = out + r * PANEL + part * LANES;
        Floats sum = fma(to_floats(sums[r][part]), scales * all(rows.scales[number]), load(total));
        if constexpr (IS_INT4) sum = fma(minimums, all(rows.sums[number]), sum);
        store(total, sum);
      }
    }
  }
}

// Rows that are multiplied together: their sums, with a panel's weights, fill the registers.
#if defined(__AVX512F__)
constexpr int MOST_ROWS[] = {12, 12, 12, 12};  // by Kind
#else
constexpr int MOST_ROWS[] = {6, 5, 5, 5};
#endif
constexpr int MOST = 12;

typedef void (*Multiply)(const Matrix&, const char*, const Rows&, int, float*);

template <int R>
Multiply kernel_of(int kind) {
  return kind == FLOAT32    ? multiply_float32<R>
         : kind == BFLOAT16 ? multiply_bfloat16<R>
         : kind == INT8     ? multiply_blocks<R, false>
                            : multiply_blocks<R, true>;
}

inline Multiply kernel_for(int kind, int rows) {
  switch (rows) {
    case 1: return kernel_of<1>(kind);
    case 2: return kernel_of<2>(kind);
    case 3: return kernel_of<3>(kind);
    case 4: return kernel_of<4>(kind);
    case 5: return kernel_of<5>(kind);
    case 6: return kernel_of<6>(kind);
#if defined(__AVX512F__)
    case 7: return kernel_of<7>(kind);
    case 8: return kernel_of<8>(kind);
    case 9: return kernel_of<9>(kind);
    case 10: return kernel_of<10>(kind);
    case 11: return kernel_of<11>(kind);
    case 12: return kernel_of<12>(kind);
#endif
  }
  return nullptr;
}

// Multiplies all `count` rows with a panel, in blocks of nearly equal size, and calls `use(row, sums)` with float32 [PANEL].
template <class Use>
void multiply_panel(const Matrix& matrix, int panel, const Rows& rows, int count, const Use& use) {
  const int most = MOST_ROWS[matrix.kind], parts = (count + most - 1) / most;
  const char* weights = matrix.panel(panel);
  float out[MOST * PANEL];
  for (int part = 0, first = 0; part < parts; part++) {
    const int size = count / parts + (part < count % parts);
    kernel_for(matrix.kind, size)(matrix, weights, rows, first, out);
    for (int r = 0; r < size; r++) use(first + r, out + r * PANEL);
    first += size;
  }
}

}  // namespace outrider
