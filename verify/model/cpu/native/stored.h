// Blocks of GGUF files, which have the arithmetic of a packed kind: their values are moved, not rounded. Tables of which a step
// reads few rows stay as they are in a file.
#pragma once
#include <array>
#include <iterator>
#include <utility>

#include "description.h"
#include "grids.h"

namespace outrider {

// The place of a value of the block with this index in its superblock: the byte of its lower bits, and their shift.
struct Place {
  int byte, shift;
};

template <int KIND>
constexpr Place place_of(int block, int i) {
  switch (KIND) {
    case Q4_K:
    case Q5_K:
      return {block / 2 * 32 + i, block % 2 * 4};
    case Q6_K:
      return {block / 4 * 64 + block % 2 * 32 + i, block % 4 / 2 * 4};
    case Q2_K:
    case Q3_K:
    case TQ2_0:
      return {block / 4 * 32 + i, block % 4 * 2};
    default:
      return {block * 16 + i % 16, i / 16 * 4};
  }
}

// Reads lower bits, and higher ones, of a block.
template <int KIND>
inline void read_values(int block, const uint8_t* low, const uint8_t* high, Values& to) {
  // Values whose bytes follow each other are read together.
  constexpr int RUN = place_of<KIND>(0, BLOCK / 2).byte ? BLOCK : BLOCK / 2;
  for (int first = 0; first < BLOCK; first += RUN) {
    const Place place = place_of<KIND>(block, first);
    for (int i = first; i < first + RUN; i++) {
      int more = 0;
      if (KIND == Q5_0 || KIND == Q5_1) more = high[i / 8] >> i % 8 & 1;
      if (KIND == Q5_K) more = high[i] >> block & 1;
      if (KIND == Q6_K) more = high[block / 4 * 32 + i] >> block % 4 * 2 & 3;
      if (KIND == Q3_K) more = high[i] >> block & 1;
      constexpr int bits = FORMATS[KIND - INT8].low();
      to.values[i] = (uint8_t)((low[place.byte + i - first] >> place.shift & ((1 << bits) - 1)) | more << bits);
    }
  }
}

// Reads scales and minimums of 6 bits, of Q4_K and Q5_K.
inline void read_scales(const uint8_t* from, int block, Values& to) {
  to.factor = half_at(from);
  to.minimum_factor = half_at(from + 2) ^ 0x8000;  // minimums are subtracted there
  const uint8_t* bits = from + 4;
  to.scales[0] = block < 4 ? bits[block] & 63 : (bits[block + 4] & 15) | bits[block - 4] >> 6 << 4;
  to.minimums[0] = block < 4 ? bits[block + 4] & 63 : bits[block + 4] >> 4 | bits[block] >> 6 << 4;
}

// A value of TQ1_0, one of five digits of base 3 in a byte, as a fraction of 256.
inline uint8_t digit_of(const uint8_t* from, int input) {
  constexpr uint8_t POWERS[] = {1, 3, 9, 27, 81};
  const int start = input < 160 ? 0 : input < 240 ? 160 : 240, width = input < 160 ? 32 : input < 240 ? 16 : 4;
  const uint8_t* bytes = from + (input < 160 ? 0 : input < 240 ? 32 : 48);
  const uint8_t fraction = (uint8_t)(bytes[(input - start) % width] * POWERS[(input - start) / width]);
  return (uint8_t)(fraction * 3 >> 8);
}

// A block of 32 inputs in a stored block, which has several if the kind has factors.
template <int KIND>
inline Values read_block(const uint8_t* from, int block, const uint8_t* grid = nullptr) {
  Values found{};
  switch (KIND) {
    case INT8:
      found.scales[0] = half_at(from);
      std::memcpy(found.values, from + 2, BLOCK);
      break;
    case Q4_0:
    case Q5_0:
    case IQ4_NL:
      found.scales[0] = half_at(from);
      read_values<KIND>(0, from + (KIND == Q5_0 ? 6 : 2), from + 2, found);
      break;
    case INT4:
    case Q5_1:
      found.scales[0] = half_at(from);
      found.minimums[0] = half_at(from + 2);
      read_values<KIND>(0, from + (KIND == Q5_1 ? 8 : 4), from + 4, found);
      break;
    case Q4_K:
    case Q5_K:
      read_scales(from, block, found);
      read_values<KIND>(block, from + (KIND == Q5_K ? 48 : 16), from + 16, found);
      break;
    case Q6_K:
      found.factor = half_at(from + 208);
      for (int group = 0; group < 2; group++) found.scales[group] = from[192 + 2 * block + group];
      read_values<KIND>(block, from, from + 128, found);
      break;
    case IQ4_XS:
      found.factor = half_at(from);
      found.scales[0] = (uint16_t)((from[4 + block / 2] >> block % 2 * 4 & 15) + (half_at(from + 2) >> 2 * block & 3) * 16 - 32);
      read_values<KIND>(block, from + 8, nullptr, found);
      break;
    case MXFP4:  // the scale is a power of two, half of which is left because values are doubled
      found.scales[0] = to_half(std::ldexp(1.0f, from[0] - 128));
      read_values<KIND>(0, from + 1, nullptr, found);
      break;
    case NVFP4:
      for (int group = 0; group < 2; group++) {
        // Without their sign, the bits of float8_e4m3 are those of a float16 that is 2^8 times smaller. Half of it is left.
        const uint8_t scale = from[2 * block + group] & 0x7f;
        found.scales[group] = to_half(from_half((uint16_t)(scale == 0x7f ? 0 : scale << 7)) * 128);
        const uint8_t* pairs = from + 4 + 8 * (2 * block + group);
        for (int i = 0; i < 16; i++) found.values[16 * group + i] = pairs[i % 8] >> i / 8 * 4 & 15;
      }
      break;
    case Q2_K:
      found.factor = half_at(from + 80);
      found.minimum_factor = half_at(from + 82) ^ 0x8000;  // minimums are subtracted there
      for (int group = 0; group < 2; group++) {
        found.scales[group] = from[2 * block + group] & 15;
        found.minimums[group] = from[2 * block + group] >> 4;
      }
      read_values<KIND>(block, from + 16, nullptr, found);
      break;
    case Q3_K:
      found.factor = half_at(from + 108);
      for (int group = 0; group < 2; group++) {
        const int number = 2 * block + group, low = from[96 + number % 8] >> number / 8 * 4 & 15;
        found.scales[group] = (uint16_t)((low | (from[104 + number % 4] >> number / 4 * 2 & 3) << 4) - 32);
      }
      read_values<KIND>(block, from + 32, from, found);
      break;
    case TQ1_0:
      found.factor = half_at(from + 52);
      found.scales[0] = 1;
      for (int i = 0; i < BLOCK; i++) found.values[i] = digit_of(from, block * BLOCK + i);
      break;
    case TQ2_0:
      found.factor = half_at(from + 64);
      found.scales[0] = 1;
      read_values<KIND>(block, from, nullptr, found);
      break;
    case ZERO4:
      found.scales[0] = half_at(from);
      found.minimums[0] = from[2];
      read_values<KIND>(0, from + 3, nullptr, found);
      break;
    case ZERO8:
      found.scales[0] = half_at(from);
      found.minimums[0] = from[2];
      std::memcpy(found.values, from + 3, BLOCK);
      break;
    default:
      read_grid<KIND>(from, block, grid, found);
  }
  return found;
}

// Rows of blocks of a file.
struct StoredRows {
  const uint8_t* blocks;
  size_t bytes;         // of a row
  const uint8_t* grid;  // from grids.h; null = none
};

// A block of all outputs before the next one, so that what is written stays in the first cache.
template <int KIND>
void put_stored_of(const Matrix& matrix, int first, int count, const StoredRows& from) {
  constexpr Format format = FORMATS[KIND - INT8];
  for (int b = 0; b < matrix.inputs / BLOCK; b++) {
    const PackedBlock block = block_of(format, matrix.panel(first / PANEL), b);
    const uint8_t* stored = from.blocks + b / format.stored_blocks() * format.stored;
    for (int i = 0; i < count; i++, stored += from.bytes)
      put_block<FORMATS[KIND - INT8]>(block, (first + i) % PANEL, read_block<KIND>(stored, b % format.stored_blocks(), from.grid));
  }
}

template <int KIND>
void take_stored_of(const uint8_t* from, int inputs, float* to) {
  constexpr Format format = FORMATS[KIND - INT8];
  for (int b = 0; b < inputs / BLOCK; b++)
    to_floats(format, read_block<KIND>(from + b / format.stored_blocks() * format.stored, b % format.stored_blocks()), to + b * BLOCK);
}

template <int... KINDS>
constexpr auto puts_of(std::integer_sequence<int, KINDS...>) {
  return std::array{put_stored_of<INT8 + KINDS>...};
}
template <int... KINDS>
constexpr auto takes_of(std::integer_sequence<int, KINDS...>) {
  return std::array{take_stored_of<INT8 + KINDS>...};
}
using Kinds = std::make_integer_sequence<int, std::size(FORMATS)>;
constexpr auto PUTS = puts_of(Kinds());
constexpr auto TAKES = takes_of(Kinds());

// Packs rows of blocks, of the file's type that the matrix has, as `count` outputs from `first` on, which are in one panel.
inline void put_stored(const Matrix& matrix, int first, int count, const StoredRows& from) {
  PUTS[matrix.kind - INT8](matrix, first, count, from);
}

// A row of a table, float32 [width]. Not of types with a grid.
inline void take(const Table& table, int64_t row, float* to) {
  if (table.kind >= INT8) {
    const Format& format = format_of(table.kind);
    return TAKES[table.kind - INT8](table.data + row * format.stored * (table.width / format.stored_inputs()), table.width, to);
  }
  if (table.kind == FLOAT32) {
    std::memcpy(to, table.data + 4 * row * table.width, 4 * (size_t)table.width);
    return;
  }
  const uint8_t* from = table.data + 2 * row * table.width;
  for (int i = 0; i < table.width; i++) {
    const uint16_t half = half_at(from + 2 * i);
    to[i] = table.kind == BFLOAT16 ? from_bfloat16(half) : from_half(half);
  }
}

}  // namespace outrider
