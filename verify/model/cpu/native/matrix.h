// Weights of a linear layer, packed for the kernels in multiply.h.
//
// Outputs are cut into panels of PANEL. A panel holds, input after input, the weights of all its outputs side by side, so that one
// vector multiplies one input of a row. Quantised weights come in blocks of BLOCK inputs: the scales of all outputs, in some kinds
// their minimums, and then the values. Outputs after the last one have weights of zero.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "format.h"

namespace outrider {

struct Matrix {
  int32_t kind, outputs, inputs;  // inputs are even, and multiples of the format's if quantised
  void* data;
  const float* scales;  // of outputs, by which sums are multiplied; null = none

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
// of 16-bit integers. With 8 bits, their bytes lie together. Otherwise, the lower bits of as many inputs lie in 32 bits as fit there,
// and so do further bits, so that a shift and a mask give the values of some inputs in their places.
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
constexpr int in_word(int bits) { return 32 / bits; }  // inputs whose `bits` are in 32 bits

struct PackedBlock {
  uint16_t *factors, *minimum_factors;  // float16 [PANEL]
  char *scales, *minimums;              // [groups, PANEL]: float16, or int8; [PANEL] with nibbles, of both groups
  int8_t* bytes;                        // [BLOCK / TOGETHER, PANEL, TOGETHER]
  uint32_t *low, *high;                 // [BLOCK / in_word(bits), PANEL]
};

ALWAYS_INLINE PackedBlock block_of(const Format& format, char* panel, int index) {
  char* factors = panel + index / format.blocks() * format.bytes();
  char* scales = factors + format.factor_bytes() + index % format.blocks() * format.block_bytes();
  char *minimums = scales + format.scale_bytes(), *values = minimums + format.minimum_bytes();
  uint32_t* low = (uint32_t*)values;
  return {(uint16_t*)factors, (uint16_t*)factors + PANEL, scales, minimums, (int8_t*)values, low, low + format.low() * PANEL};
}

inline int byte_place(int input, int lane) { return (input / TOGETHER * PANEL + lane) * TOGETHER + input % TOGETHER; }
inline int bit_shift(int input, int bits) { return input / TOGETHER * bits + input % TOGETHER * (32 / TOGETHER); }
// The word of `bits` of an input, of [words, PANEL], and their shift.
inline int word_of(int input, int bits, int lane) { return input / in_word(bits) * PANEL + lane; }
inline int shift_of(int input, int bits) { return bit_shift(input % in_word(bits), bits); }

// One output's part of a block, as files have it.
struct Values {
  uint16_t factor, minimum_factor;  // float16
  uint16_t scales[2], minimums[2];  // of groups: float16, or integers
  uint8_t values[BLOCK];
};

inline void put_scales(const Format& format, Scales kind, char* to, int lane, const uint16_t* scales) {
  if (kind == NIBBLES) to[lane] = (char)(scales[0] | scales[1] << 4);
  for (int group = 0; kind != NIBBLES && group < format.groups(); group++)
    if (kind == BYTES) to[group * PANEL + lane] = (char)scales[group];
    else ((uint16_t*)to)[group * PANEL + lane] = scales[group];
}

// Values of TOGETHER inputs, in equal parts of 32 bits.
inline uint32_t spread(const uint8_t* values) {
  uint32_t found = values[0] | (uint32_t)values[1] << 16;
  if (TOGETHER == 4) std::memcpy(&found, values, 4);
  return found;
}
constexpr uint32_t SPREAD_ONE = TOGETHER == 4 ? 0x01010101 : 0x00010001;

// The format is known when this is compiled: its divisions would take most of the time.
template <const Format& FORMAT>
inline void put_block(const PackedBlock& block, int lane, const Values& from) {
  constexpr Format format = FORMAT;
  constexpr int LOW = format.low(), HIGH = format.high();
  if (format.factors()) block.factors[lane] = from.factor;
  if (format.factors() == 2) block.minimum_factors[lane] = from.minimum_factor;
  put_scales(format, format.scales, block.scales, lane, from.scales);
  if (format.minimums) put_scales(format, format.minimum_scales(), block.minimums, lane, from.minimums);
  uint32_t low[LOW] = {}, high[HIGH + 1] = {};
  for (int i = 0; i < BLOCK; i += TOGETHER) {
    if (format.bits == 8) std::memcpy(block.bytes + byte_place(i, lane), from.values + i, TOGETHER);
    const uint32_t values = spread(from.values + i);
    low[i / in_word(LOW)] |= (values & SPREAD_ONE * ((1 << LOW) - 1)) << shift_of(i, LOW);
    if constexpr (HIGH > 0) high[i / in_word(HIGH)] |= (values >> LOW & SPREAD_ONE * ((1 << HIGH) - 1)) << shift_of(i, HIGH);
  }
  if (format.bits == 8) return;
  for (int word = 0; word < LOW; word++) block.low[word * PANEL + lane] = low[word];
  for (int word = 0; word < HIGH; word++) block.high[word * PANEL + lane] = high[word];
}

inline void get_scales(const Format& format, Scales kind, const char* from, int lane, uint16_t* scales) {
  for (int group = 0; group < format.groups(); group++) {
    if (kind == NIBBLES) scales[group] = (uint8_t)from[lane] >> 4 * group & 15;
    if (kind == BYTES) scales[group] = (uint8_t)from[group * PANEL + lane];
    if (kind == HALVES) scales[group] = ((const uint16_t*)from)[group * PANEL + lane];
  }
}

// One output's part of a block.
inline Values get_block(const Format& format, const PackedBlock& block, int lane) {
  const int low = format.low(), high = format.high();
  Values found{};
  if (format.factors()) found.factor = block.factors[lane];
  if (format.factors() == 2) found.minimum_factor = block.minimum_factors[lane];
  get_scales(format, format.scales, block.scales, lane, found.scales);
  if (format.minimums) get_scales(format, format.minimum_scales(), block.minimums, lane, found.minimums);
  for (int i = 0; i < BLOCK; i++) {
    int value = block.low[word_of(i, low, lane)] >> shift_of(i, low) & ((1 << low) - 1);
    if (format.bits == 8) value = block.bytes[byte_place(i, lane)];
    if (high) value |= (block.high[word_of(i, high, lane)] >> shift_of(i, high) & ((1 << high) - 1)) << low;
    found.values[i] = (uint8_t)value;
  }
  return found;
}

// The weights of a block, float32 [BLOCK].
inline void to_floats(const Format& format, const Values& from, float* weights) {
  const auto scale_of = [&](uint16_t scale, uint16_t factor) {
    return format.has_factors() ? from_half(factor) * format.unit * (int8_t)scale : from_half(scale);
  };
  for (int group = 0; group < format.groups(); group++) {
    const float scale = scale_of(from.scales[group], from.factor);
    float minimum = 0;
    if (format.minimums == ALIKE) minimum = scale_of(from.minimums[group], from.minimum_factor);
    if (format.minimums == ZEROS) minimum = (int8_t)from.minimums[group] * scale;
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
    tried.minimums[0] = to_half((high + low) / 2 - 7.5f * scale);
    const float minimum = from_half(tried.minimums[0]);
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
      if (matrix.kind == INT8) put_block<FORMATS[INT8 - INT8]>(block, lane, to_int8(weights + b * BLOCK));
      else put_block<FORMATS[INT4 - INT8]>(block, lane, to_int4(weights + b * BLOCK));
    }
}

// The weights of one output without the output's scale, float32 [inputs].
inline void take_unscaled(const Matrix& matrix, int output, float* weights) {
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

// The weights of one output, float32 [inputs].
inline void take(const Matrix& matrix, int output, float* weights) {
  take_unscaled(matrix, output, weights);
  for (int i = 0; matrix.scales && i < matrix.inputs; i++) weights[i] *= matrix.scales[output];
}

}  // namespace outrider
