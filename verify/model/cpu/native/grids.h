// Blocks of GGUF's types whose values are rows of a grid: 8 or 4 of them are named together. A grid is passed to the library as
// numbers of values, counted from the lowest one, uint8 [rows, 8 or 4].
#pragma once
#include <bit>
#include <cstring>

#include "matrix.h"

namespace outrider {

inline uint16_t half_at(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  return half;
}
inline uint32_t word_at(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return word;
}

// Of 8 values: their rows of the grid, one or two, and the signs of the values.
struct Named {
  int rows[2];
  uint8_t signs;
};

// Seven signs; the eighth makes the number of negative ones even.
inline uint8_t signs_of(uint32_t seven) { return (uint8_t)((seven & 127) | (std::popcount(seven & 127) & 1) << 7); }

template <int KIND>
inline Named read_named(const uint8_t* from, int block, int eight) {
  const int number = 4 * block + eight;
  if constexpr (KIND == IQ2_XXS) {
    const uint8_t* own = from + 2 + 8 * block;
    return {{own[eight]}, signs_of(word_at(own + 4) >> 7 * eight)};
  } else if constexpr (KIND == IQ2_XS) {
    const uint16_t name = half_at(from + 2 + 2 * number);
    return {{name & 511}, signs_of(name >> 9)};
  } else if constexpr (KIND == IQ2_S) {
    return {{from[2 + number] | (from[66 + block] >> 2 * eight & 3) << 8}, from[34 + number]};
  } else if constexpr (KIND == IQ3_XXS) {
    return {{from[2 + 2 * number], from[3 + 2 * number]}, signs_of(word_at(from + 66 + 4 * block) >> 7 * eight)};
  } else if constexpr (KIND == IQ3_S) {
    const int more = from[66 + block] >> 2 * eight;
    return {{from[2 + 2 * number] | (more & 1) << 8, from[3 + 2 * number] | (more & 2) << 7}, from[74 + number]};
  } else if constexpr (KIND == IQ1_S) {  // signs: whether a value is negated, in which case the scale is, too
    const uint16_t more = half_at(from + 34 + 2 * block);
    return {{from[2 + number] | (more >> 3 * eight & 7) << 8}, (uint8_t)(more & 0x8000 ? 255 : 0)};
  } else {
    const int more = from[32 + number / 2] >> number % 2 * 4;
    return {{from[number] | (more & 7) << 8}, (uint8_t)(more & 8 ? 255 : 0)};
  }
}

// The scales of a block's groups, integers.
template <int KIND>
inline int read_grid_scale(const uint8_t* from, int block, int group) {
  const int number = 2 * block + group;
  if constexpr (KIND == IQ2_XXS) return 2 * (word_at(from + 6 + 8 * block) >> 28) + 1;
  if constexpr (KIND == IQ2_XS || KIND == IQ2_S) return 2 * (from[66 + (KIND == IQ2_S ? 8 : 0) + block] >> 4 * group & 15) + 1;
  if constexpr (KIND == IQ3_XXS) return 2 * (word_at(from + 66 + 4 * block) >> 28) + 1;
  if constexpr (KIND == IQ3_S) return 2 * (from[106 + block / 2] >> block % 2 * 4 & 15) + 1;
  if constexpr (KIND == IQ1_M) return 2 * (half_at(from + 48 + number / 4 * 2) >> number % 4 * 3 & 7) + 1;
  const uint16_t more = half_at(from + 34 + 2 * block);
  const int scale = 2 * (more >> 12 & 7) + 1;
  return more & 0x8000 ? -scale : scale;
}

// A block of 32 inputs in a stored block.
template <int KIND>
inline void read_grid(const uint8_t* from, int block, const uint8_t* grid, Values& to) {
  constexpr Format format = FORMATS[KIND - INT8];
  constexpr int width = KIND == IQ3_XXS || KIND == IQ3_S ? 4 : 8;
  to.factor = half_at(from);
  if (KIND == IQ1_M) {
    to.factor = 0;
    for (int part = 0; part < 4; part++) to.factor |= half_at(from + 48 + 2 * part) >> 12 << 4 * part;
  }
  for (int group = 0; group < format.groups(); group++) to.scales[group] = (uint16_t)read_grid_scale<KIND>(from, block, group);
  for (int eight = 0; eight < 4; eight++) {
    const Named named = read_named<KIND>(from, block, eight);
    for (int i = 0; i < 8; i++) {
      const uint8_t value = grid[named.rows[i / width] * width + i % width];
      const bool negative = named.signs >> i & 1;
      to.values[eight * 8 + i] = KIND == IQ1_S && negative ? (uint8_t)(2 - value) : (uint8_t)(value | negative << (format.bits - 1));
    }
  }
}

}  // namespace outrider
