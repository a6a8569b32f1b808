// Values of packed weights, as they are multiplied: TOGETHER inputs of an output lie in 32 bits.
#pragma once
#include "rows.h"

namespace outrider {

#if QUADS

// The entries of a table that bytes name.
inline Ints look_up(Ints places, const int8_t (&entries)[16]) {
#if defined(__AVX512F__)
  const __m128i table = _mm_loadu_si128((const __m128i*)entries);
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)places);
#elif defined(__AVXVNNI__)
  const __m128i table = _mm_loadu_si128((const __m128i*)entries);
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)places);
#else
  uint8x16_t bytes[LANES / 4];
  std::memcpy(bytes, &places, sizeof places);
  for (auto& part : bytes) part = vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(entries), part));
  return load_ints(bytes);
#endif
}

typedef int8_t Value;
typedef Value ValueLanes __attribute__((vector_size(4 * LANES)));
constexpr int32_t LOWEST = 0x01010101;  // the lowest bit of each value

#else

// The entries of a table that 16-bit integers name.
inline Ints look_up(Ints places, const int8_t (&entries)[16]) {
#if defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)entries));
  const __m256i found = _mm256_shuffle_epi8(table, (__m256i)places);  // in the lower byte of 16 bits
  return (Ints)_mm256_srai_epi16(_mm256_slli_epi16(found, 8), 8);
#else
  for (int lane = 0; lane < LANES; lane++)
    places[lane] = (entries[places[lane] & 15] & 0xffff) | (int32_t)((uint32_t)entries[places[lane] >> 16] << 16);
  return places;
#endif
}

typedef int16_t Value;
typedef Value ValueLanes __attribute__((vector_size(4 * LANES)));
constexpr int32_t LOWEST = 0x00010001;

#endif

// The values of TOGETHER inputs, of number `part`. `low` has the lower bits of some inputs, and `high` begins with the others.
template <const Format& FORMAT>
ALWAYS_INLINE Ints values_of(Ints low, Ints high, int part, const int8_t (&table)[16]) {
  constexpr int LOW = FORMAT.low(), HIGH = FORMAT.high();
  Ints values = low >> LOW * part & ((1 << LOW) - 1) * LOWEST;
  if constexpr (HIGH > 0) {
    const int shift = part * HIGH - LOW;
    values |= (shift < 0 ? high << -shift : high >> shift) & (((1 << HIGH) - 1) << LOW) * LOWEST;
  }
  if constexpr (FORMAT.table != VALUES) values = look_up(values, table);
  if constexpr (FORMAT.offset > 0) values = (Ints)((ValueLanes)values - (ValueLanes{} + (Value)FORMAT.offset));
  return values;
}

// Calls `use(input, w0, w1)` with the values of TOGETHER inputs of a group, of both halves of a panel. Not for 8 bits.
template <const Format& FORMAT, class Use>
ALWAYS_INLINE void each_value(const PackedBlock& block, int group, const int8_t (&table)[16], const Use& use) {
  constexpr int LOW = FORMAT.low(), HIGH = FORMAT.high(), WORD = in_word(LOW), PARTS = WORD / TOGETHER;
  const int first = group * FORMAT.group;
  Ints high[2] = {};
  if constexpr (HIGH > 0)
    for (int half = 0; half < 2; half++) high[half] = load_ints(block.high + word_of(first, HIGH, half * LANES)) >> shift_of(first, HIGH);
  for (int input = first; input < first + FORMAT.group; input += WORD) {
    const Ints low[2] = {load_ints(block.low + word_of(input, LOW, 0)), load_ints(block.low + word_of(input, LOW, LANES))};
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++)
      use(input + part * TOGETHER, values_of<FORMAT>(low[0], high[0], part, table), values_of<FORMAT>(low[1], high[1], part, table));
    for (int half = 0; half < 2; half++) high[half] >>= PARTS * HIGH;
  }
}

}  // namespace outrider
