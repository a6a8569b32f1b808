// Weights of a linear layer, packed for the kernels in multiply.h.
//
// Outputs are cut into panels of PANEL. A panel holds, input after input, the weights of all its outputs side by side, so that one
// vector multiplies one input of a row. Quantised weights come in blocks of BLOCK inputs: the scales of all outputs, in some kinds
// their minimums, and then the values. Outputs after the last one have weights of zero.
#pragma once
#include <algorithm>
#include <cstddef>

#include "vector.h"

namespace outrider {

constexpr int BLOCK = 32;        // inputs of a quantised block
constexpr int SUPERBLOCK = 256;  // inputs that share the factor of their scales, in some kinds
constexpr int LARGEST = 127;

// Quantised kinds are those of GGUF files; INT8 and INT4 are also those that other weights are rounded to.
enum Kind : int32_t {
  FLOAT32,
  BFLOAT16,  // pairs of inputs: an output's 32 bits hold the even input in the lower half
  INT8,      // Q8_0
  INT4,      // Q4_1
  Q4_0,
  Q5_0,
  Q5_1,
  Q4_K,
  Q5_K,
  Q6_K,
  IQ4_NL,
  IQ4_XS,
  MXFP4,
};

// A quantised kind. A weight is (value - offset) * scale + minimum.
struct Format {
  int bits;            // of a value: 8 (signed), or 4 to 6
  int offset;
  int group;           // inputs that share a scale: BLOCK, or half of it
  bool has_minimums;   // float16 like the scales, one per block
  bool has_factors;    // scales and minimums are 8-bit integers; a superblock has float16 factors of both
  int table;           // of TABLES, of which values are indices; 0 = none
  int stored;          // bytes of a block, or of a superblock if it has factors, of one output in a file

  constexpr int high() const { return bits == 8 ? 0 : bits - 4; }
  constexpr int parts() const { return has_minimums ? 2 : 1; }
  constexpr int groups() const { return BLOCK / group; }
  constexpr int scale_bytes() const { return (has_factors ? 1 : 2) * groups() * PANEL; }  // as many for minimums
  constexpr int block_bytes() const { return scale_bytes() * parts() + bits * BLOCK / 8 * PANEL; }
  constexpr int factor_bytes() const { return has_factors ? 2 * parts() * PANEL : 0; }
  constexpr int blocks() const { return has_factors ? SUPERBLOCK / BLOCK : 1; }  // that lie together, after their factors
  constexpr int inputs() const { return blocks() * BLOCK; }
  constexpr int bytes() const { return factor_bytes() + blocks() * block_bytes(); }
};

constexpr Format FORMATS[] = {
    {8, 0, 32, false, false, 0, 34},   // INT8
    {4, 0, 32, true, false, 0, 20},    // INT4
    {4, 8, 32, false, false, 0, 18},   // Q4_0
    {5, 16, 32, false, false, 0, 22},  // Q5_0
    {5, 0, 32, true, false, 0, 24},    // Q5_1
    {4, 0, 32, true, true, 0, 144},    // Q4_K
    {5, 0, 32, true, true, 0, 176},    // Q5_K
    {6, 32, 16, false, true, 0, 210},  // Q6_K
    {4, 0, 32, false, false, 1, 18},    // IQ4_NL
    {4, 0, 32, false, true, 1, 136},    // IQ4_XS
    {4, 0, 32, false, false, 2, 17},    // MXFP4
};
constexpr const Format& format_of(int kind) { return FORMATS[kind - INT8]; }

// Of IQ4, and the values of MXFP4, doubled.
constexpr int8_t TABLES[3][16] = {{},
                                  {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
                                  {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

struct Matrix {
  int32_t kind, outputs, inputs;  // inputs are even, and multiples of the format's if quantised
  void* data;

  int panels() const { return (outputs + PANEL - 1) / PANEL; }
  bool quantized() const { return kind >= INT8; }
  size_t panel_bytes() const {
    if (quantized()) return (size_t)format_of(kind).bytes() * (inputs / format_of(kind).inputs());
    return (size_t)inputs * PANEL * (kind == FLOAT32 ? 4 : 2);
  }
  size_t bytes() const { return panel_bytes() * panels(); }
  char* panel(int index) const { return (char*)data + panel_bytes() * index; }
};

// The parts of a block.
//
// As many inputs are multiplied at once as the instructions allow: four, whose weights are bytes when they are multiplied, or a pair
// of 16-bit integers. With 8 bits, their bytes lie together. Otherwise, the lower 4 bits of eight inputs lie in 32 bits, and further
// bits in 32 bits per group, so that a shift and a mask give the values of some inputs in their places.
#if defined(__AMX_INT8__) || EMULATED_TILES
#define TILES 1
#else
#define TILES 0
#endif
#if TILES || defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define QUADS 1
#else
#define QUADS 0
#endif
constexpr int TOGETHER = QUADS ? 4 : 2;
constexpr int NIBBLES = 8;  // in 32 bits

struct PackedBlock {
  uint16_t *factors, *minimum_factors;  // float16 [PANEL]
  char *scales, *minimums;              // [groups, PANEL]: float16, or int8 with factors
  int8_t* bytes;                        // [BLOCK / TOGETHER, PANEL, TOGETHER]
  uint32_t* nibbles;                    // [BLOCK / NIBBLES, PANEL]
  uint32_t* high;                       // [groups, PANEL]
};

ALWAYS_INLINE PackedBlock block_of(const Format& format, char* panel, int index) {
  char* factors = panel + index / format.blocks() * format.bytes();
  char* scales = factors + format.factor_bytes() + index % format.blocks() * format.block_bytes();
  char* values = scales + format.scale_bytes() * format.parts();
  return {(uint16_t*)factors, (uint16_t*)factors + PANEL, scales, scales + format.scale_bytes(),
          (int8_t*)values,    (uint32_t*)values,          (uint32_t*)values + BLOCK / NIBBLES * PANEL};
}

inline int byte_place(int input, int lane) { return (input / TOGETHER * PANEL + lane) * TOGETHER + input % TOGETHER; }
inline int bit_shift(int input, int bits) { return input / TOGETHER * bits + input % TOGETHER * (32 / TOGETHER); }
inline int nibble_shift(int input) { return bit_shift(input % NIBBLES, 4); }
inline int high_shift(const Format& format, int input) { return bit_shift(input % format.group, format.high()); }

// One output's part of a block, as files have it.
struct Values {
  uint16_t factor, minimum_factor;  // float16
  uint16_t scales[2], minimum;      // float16, or integers with factors
  uint8_t values[BLOCK];
};

inline void put_scale(const Format& format, char* scales, int place, uint16_t scale) {
  if (format.has_factors)
    scales[place] = (char)scale;
  else
    ((uint16_t*)scales)[place] = scale;
}

// The format is known when this is compiled: its divisions would take most of the time.
template <const Format& FORMAT>
inline void put_block(const PackedBlock& block, int lane, const Values& from) {
  constexpr Format format = FORMAT;
  if (format.has_factors) block.factors[lane] = from.factor;
  if (format.has_factors && format.has_minimums) block.minimum_factors[lane] = from.minimum_factor;
  for (int group = 0; group < format.groups(); group++)
    put_scale(format, block.scales, group * PANEL + lane, from.scales[group]);
  if (format.has_minimums) put_scale(format, block.minimums, lane, from.minimum);
  uint32_t nibbles[BLOCK / NIBBLES] = {}, high[2] = {};
  for (int i = 0; i < BLOCK; i++) {
    if (format.bits == 8) block.bytes[byte_place(i, lane)] = (int8_t)from.values[i];
    nibbles[i / NIBBLES] |= (from.values[i] & 15u) << nibble_shift(i);
    high[i / format.group] |= (uint32_t)(from.values[i] >> 4) << high_shift(format, i);
  }
  if (format.bits == 8) return;
  for (int eight = 0; eight < BLOCK / NIBBLES; eight++) block.nibbles[eight * PANEL + lane] = nibbles[eight];
  for (int group = 0; format.high() && group < format.groups(); group++) block.high[group * PANEL + lane] = high[group];
}

inline uint16_t get_scale(const Format& format, const char* scales, int place) {
  return format.has_factors ? (uint8_t)scales[place] : ((const uint16_t*)scales)[place];
}

// One output's part of a block.
inline Values get_block(const Format& format, const PackedBlock& block, int lane) {
  Values found{};
  if (format.has_factors) found.factor = block.factors[lane];
  if (format.has_factors && format.has_minimums) found.minimum_factor = block.minimum_factors[lane];
  for (int group = 0; group < format.groups(); group++) found.scales[group] = get_scale(format, block.scales, group * PANEL + lane);
  if (format.has_minimums) found.minimum = get_scale(format, block.minimums, lane);
  for (int i = 0; i < BLOCK; i++) {
    int value = block.nibbles[i / NIBBLES * PANEL + lane] >> nibble_shift(i) & 15;
    if (format.bits == 8) value = block.bytes[byte_place(i, lane)];
    if (format.high())
      value |= (block.high[i / format.group * PANEL + lane] >> high_shift(format, i) & ((1 << format.high()) - 1)) << 4;
    found.values[i] = (uint8_t)value;
  }
  return found;
}

// The weights of a block, float32 [BLOCK].
inline void to_floats(const Format& format, const Values& from, float* weights) {
  const auto scale_of = [&](uint16_t scale, uint16_t factor) {
    return format.has_factors ? from_half(factor) * (int8_t)scale : from_half(scale);
  };
  const float minimum = format.has_minimums ? scale_of(from.minimum, from.minimum_factor) : 0;
  for (int group = 0; group < format.groups(); group++) {
    const float scale = scale_of(from.scales[group], from.factor);
    for (int i = group * format.group; i < (group + 1) * format.group; i++) {
      int value = format.bits == 8 ? (int8_t)from.values[i] : from.values[i];
      if (format.table) value = TABLES[format.table][value];
      weights[i] = (value - format.offset) * scale + minimum;
    }
  }
}

// Rounds the weights of a block to 8 bits.
inline Values to_int8(const float* weights) {
  float most = 0;
  for (int i = 0; i < BLOCK; i++) most = std::max(most, std::fabs(weights[i]));
  Values found{};
  found.scales[0] = to_half(most / LARGEST);
  const float scale = from_half(found.scales[0]);
  for (int i = 0; i < BLOCK; i++) {
    const float value = scale > 0 ? std::nearbyint(weights[i] / scale) : 0;
    found.values[i] = (uint8_t)(int8_t)std::clamp(value, (float)-LARGEST, (float)LARGEST);
  }
  return found;
}

// The same for 4 bits. Narrower ranges round finer, but clip; the one with the smallest squared error is chosen.
inline Values to_int4(const float* weights) {
  float low = weights[0], high = weights[0], least = INFINITY;
  for (int i = 1; i < BLOCK; i++) low = std::min(low, weights[i]), high = std::max(high, weights[i]);
  Values best{};
  for (float share : {1.0f, 0.94f, 0.88f, 0.82f}) {
    Values tried{};
    tried.scales[0] = to_half((high - low) * share / 15);
    const float scale = from_half(tried.scales[0]);
    tried.minimum = to_half((high + low) / 2 - 7.5f * scale);
    const float minimum = from_half(tried.minimum);
    float error = 0;
    for (int i = 0; i < BLOCK; i++) {
      const float value = scale > 0 ? std::clamp(std::nearbyint((weights[i] - minimum) / scale), 0.0f, 15.0f) : 0;
      const float difference = value * scale + minimum - weights[i];
      error += difference * difference;
      tried.values[i] = (uint8_t)value;
    }
    if (error >= least) continue;
    least = error;
    best = tried;
  }
  return best;
}

// Packs the weights of one output, float32 [inputs]. Of quantised kinds, only INT8 and INT4.
inline void put_floats(const Matrix& matrix, int output, const float* weights) {
  char* panel = matrix.panel(output / PANEL);
  const int lane = output % PANEL;
  if (matrix.kind == FLOAT32)
    for (int i = 0; i < matrix.inputs; i++) ((float*)panel)[i * PANEL + lane] = weights[i];
  else if (matrix.kind == BFLOAT16)
    for (int i = 0; i < matrix.inputs; i++) ((uint16_t*)panel)[(i / 2 * PANEL + lane) * 2 + i % 2] = to_bfloat16(weights[i]);
  else
    for (int b = 0; b < matrix.inputs / BLOCK; b++) {
      const PackedBlock block = block_of(format_of(matrix.kind), panel, b);
      if (matrix.kind == INT8)
        put_block<FORMATS[INT8 - INT8]>(block, lane, to_int8(weights + b * BLOCK));
      else
        put_block<FORMATS[INT4 - INT8]>(block, lane, to_int4(weights + b * BLOCK));
    }
}

// The weights of one output, float32 [inputs].
inline void take(const Matrix& matrix, int output, float* weights) {
  char* panel = matrix.panel(output / PANEL);
  const int lane = output % PANEL;
  if (matrix.kind == FLOAT32)
    for (int i = 0; i < matrix.inputs; i++) weights[i] = ((float*)panel)[i * PANEL + lane];
  else if (matrix.kind == BFLOAT16)
    for (int i = 0; i < matrix.inputs; i++) weights[i] = from_bfloat16(((uint16_t*)panel)[(i / 2 * PANEL + lane) * 2 + i % 2]);
  else
    for (int b = 0; b < matrix.inputs / BLOCK; b++) {
      const Format& format = format_of(matrix.kind);
      to_floats(format, get_block(format, block_of(format, panel, b), lane), weights + b * BLOCK);
    }
}

}  // namespace outrider
