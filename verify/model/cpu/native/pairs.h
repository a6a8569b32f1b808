// Two products at once, of 16-bit integers: for CPUs that do not multiply bytes, or whose sums of them saturate.
#pragma once
#include "values.h"

namespace outrider {

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
inline void sum_group(const PackedBlock& block, int group, const int8_t (&table)[16], const RowBlock* x, Ints (&sums)[R][2]) {
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = Ints{};
  if constexpr (FORMAT.bits == 8) {
    const int8_t* weights = block.bytes;
#pragma GCC unroll 16
    for (int pair = 0; pair < BLOCK / 2; pair++, weights += 2 * PANEL)
      add_pair<R>(load_pairs(weights), load_pairs(weights + 2 * LANES), x, 2 * pair, sums);
  } else {
    each_value<FORMAT>(block, group, table, [&](int input, Ints w0, Ints w1) ALWAYS_INLINED { add_pair<R>(w0, w1, x, input, sums); });
  }
}

}  // namespace outrider
