// Four products at once, of bytes. The bytes of a row are magnitudes; the weights of a negative value are inverted before.
#pragma once
#include "values.h"

namespace outrider {

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

inline Ints quad_of(const uint8_t* from) {
  int32_t quad;
  std::memcpy(&quad, from, 4);
  return all_ints(quad);
}

// Adds the products of four inputs of R rows, the first of which is `input`, with their weights, of both halves of a panel. Where a
// value is negative, its weight w is inverted to -1 - w. The sums begin at `negatives`, which makes up for the -1.
template <int R>
inline void add_quad(Ints w0, Ints w1, const RowBlock* x, int input, Ints (&sums)[R][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const Ints values = quad_of(x[r].first + input), flips = quad_of(x[r].second + input);
    sums[r][0] = add_products(sums[r][0], values, w0 ^ flips);
    sums[r][1] = add_products(sums[r][1], values, w1 ^ flips);
  }
}

// Sums of products of a group's weights with R rows.
template <const Format& FORMAT, int R>
inline void sum_group(const PackedBlock& block, int group, const int8_t (&table)[16], const RowBlock* x, Ints (&sums)[R][2]) {
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
    each_value<FORMAT>(block, group, table, [&](int input, Ints w0, Ints w1) ALWAYS_INLINED { add_quad<R>(w0, w1, x, input, sums); });
  }
}

}  // namespace outrider
