// The base n-gram table of ADED (Eq. 1): the likeliest successors of contexts of one to three tokens in a corpus. Read-only.
#pragma once
#include "array.h"

namespace outrider {

// Keys are sorted; the successors of context i are offsets[i] to offsets[i + 1].
struct BaseArrays {
  Array<uint64_t> keys;           // [C]
  Array<uint32_t> offsets;        // [C+1]
  Array<void> tokens;             // uint16 or uint32 [S], likeliest first within a context
  Array<uint16_t> probabilities;  // [S], in units of 1 / PROBABILITY_UNIT

  int32_t token(int64_t i) const {
    return tokens.width == 2 ? static_cast<uint16_t*>(tokens.data)[i] : (int32_t)static_cast<uint32_t*>(tokens.data)[i];
  }
};

namespace base_table {

// A token id has at most this many bits.
constexpr int TOKEN_BITS = 21;
constexpr double PROBABILITY_UNIT = 65535;

// 42 bits of hash below a bit that pair keys never set.
inline uint64_t triple_key(uint64_t before, uint64_t previous, uint64_t last) {
  uint64_t mixed = (before * 0x9E3779B97F4A7C15 + previous) * 0xD1B54A32D192ED03 + last;
  mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9;
  return (uint64_t)1 << 42 | mixed >> 22;
}

// The key of a context of up to three tokens, -1 = none. Exact for one and two tokens, a hash for three.
inline uint64_t context_key(int64_t before, int64_t previous, int64_t last) {
  if (before < 0) return (uint64_t)(((previous + 1) << TOKEN_BITS) | last);
  return triple_key((uint64_t)before, (uint64_t)previous, (uint64_t)last);
}

// The context's index, or -1.
inline int64_t find(const BaseArrays& base, uint64_t key) {
  int64_t low = 0, high = base.keys.size();
  while (low < high) {
    const int64_t middle = (low + high) >> 1;
    if (base.keys[middle] < key) low = middle + 1;
    else high = middle;
  }
  return low < base.keys.size() && base.keys[low] == key ? low : -1;
}

}  // namespace base_table
}  // namespace outrider
