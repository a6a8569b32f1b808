// Weights of a linear layer, packed for the kernels in multiply.h.
//
// Outputs are cut into panels of PANEL. A panel holds, input after input, the weights of all its outputs side by side, so that one
// vector multiplies one input of a row. Quantised weights come in blocks of BLOCK inputs: the scales of all outputs, for 4 bits
// also their minimums, and then the values. Outputs after the last one have weights of zero.
#pragma once
#include <algorithm>
#include <cstddef>

#include "vector.h"

namespace outrider {

constexpr int BLOCK = 32;  // inputs that share a scale
constexpr int LARGEST = 127;

enum Kind : int32_t {
  FLOAT32 = 0,
  BFLOAT16 = 1,  // pairs of inputs: an output's 32 bits hold the even input in the lower half
  INT8 = 2,      // value * scale
  INT4 = 3,      // value * scale + minimum, values 0 to 15
};

// A pair of inputs is multiplied at once: the weights of an output are two 16-bit integers when they are multiplied. With 8 bits, a
// pair lies in two bytes. With 4 bits, eight inputs lie in 32 bits, the even ones in the lower half.
constexpr int PAIRS = BLOCK / 2;
constexpr int NIBBLES = 8;  // in 32 bits

struct Matrix {
  int32_t kind, outputs, inputs;  // inputs are even, and multiples of BLOCK if quantised
  void* data;

  int panels() const { return (outputs + PANEL - 1) / PANEL; }
  bool quantized() const { return kind >= INT8; }
  size_t block_bytes() const { return kind == INT8 ? (2 + BLOCK) * PANEL : (4 + BLOCK / 2) * PANEL; }
  size_t panel_bytes() const {
    if (quantized()) return block_bytes() * (inputs / BLOCK);
    return (size_t)inputs * PANEL * (kind == FLOAT32 ? 4 : 2);
  }
  size_t bytes() const { return panel_bytes() * panels(); }
  char* panel(int index) const { return (char*)data + panel_bytes() * index; }
};

// The parts of a quantised block.
inline uint16_t* scales_of(char* block) { return (uint16_t*)block; }
inline uint16_t* minimums_of(char* block) { return (uint16_t*)block + PANEL; }
inline int8_t* bytes_of(char* block) { return (int8_t*)block + 2 * PANEL; }
inline uint32_t* nibbles_of(char* block) { return (uint32_t*)(block + 4 * PANEL); }

// Where a value of a block lies.
inline int byte_place(int input, int lane) { return (input / 2 * PANEL + lane) * 2 + input % 2; }
inline int nibble_place(int input, int lane) { return input / NIBBLES * PANEL + lane; }
inline int nibble_shift(int input) { return input % NIBBLES / 2 * 4 + input % 2 * 16; }

inline void put_nibble(char* block, int input, int lane, uint32_t value) {
  uint32_t& bits = nibbles_of(block)[nibble_place(input, lane)];
  bits = (bits & ~(15u << nibble_shift(input))) | value << nibble_shift(input);
}
inline int take_nibble(char* block, int input, int lane) {
  return nibbles_of(block)[nibble_place(input, lane)] >> nibble_shift(input) & 15;
}

// Quantises 32 weights of one output, and writes them to the block.
inline void put_int8(char* block, int lane, const float* weights) {
  float most = 0;
  for (int i = 0; i < BLOCK; i++) most = std::max(most, std::fabs(weights[i]));
  const uint16_t half = to_half(most / LARGEST);
  const float scale = from_half(half);
  scales_of(block)[lane] = half;
  for (int i = 0; i < BLOCK; i++) {
    const float value = scale > 0 ? std::nearbyint(weights[i] / scale) : 0;
    bytes_of(block)[byte_place(i, lane)] = (int8_t)std::clamp(value, (float)-LARGEST, (float)LARGEST);
  }
}

// As `put_int8`. Narrower ranges round finer, but clip; the one with the smallest squared error is chosen.
inline void put_int4(char* block, int lane, const float* weights) {
  float low = weights[0], high = weights[0], least = INFINITY;
  for (int i = 1; i < BLOCK; i++) low = std::min(low, weights[i]), high = std::max(high, weights[i]);
  for (float share : {1.0f, 0.94f, 0.88f, 0.82f}) {
    const uint16_t scale_half = to_half((high - low) * share / 15);
    const float scale = from_half(scale_half);
    const uint16_t minimum_half = to_half((high + low) / 2 - 7.5f * scale);
    const float minimum = from_half(minimum_half);
    float values[BLOCK], error = 0;
    for (int i = 0; i < BLOCK; i++) {
      values[i] = scale > 0 ? std::clamp(std::nearbyint((weights[i] - minimum) / scale), 0.0f, 15.0f) : 0;
      const float difference = values[i] * scale + minimum - weights[i];
      error += difference * difference;
    }
    if (error >= least) continue;
    least = error;
    scales_of(block)[lane] = scale_half;
    minimums_of(block)[lane] = minimum_half;
    for (int i = 0; i < BLOCK; i++) put_nibble(block, i, lane, (uint32_t)values[i]);
  }
}

// Packs the weights of one output, float32 [inputs].
inline void put_floats(const Matrix& matrix, int output, const float* weights) {
  char* panel = matrix.panel(output / PANEL);
  const int lane = output % PANEL;
  if (matrix.kind == FLOAT32)
    for (int i = 0; i < matrix.inputs; i++) ((float*)panel)[i * PANEL + lane] = weights[i];
  else if (matrix.kind == BFLOAT16)
    for (int i = 0; i < matrix.inputs; i++) ((uint16_t*)panel)[(i / 2 * PANEL + lane) * 2 + i % 2] = to_bfloat16(weights[i]);
  else
    for (int b = 0; b < matrix.inputs / BLOCK; b++) {
      char* block = panel + b * matrix.block_bytes();
      (matrix.kind == INT8 ? put_int8 : put_int4)(block, lane, weights + b * BLOCK);
    }
}

// Blocks of a GGUF file that have the arithmetic of a packed matrix; their values are moved, not rounded.
enum Stored : int32_t { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8 };  // ggml's numbers

inline size_t stored_bytes(int stored) { return stored == Q8_0 ? 34 : stored == Q4_1 ? 20 : 18; }

// Packs the blocks of one output.
inline void put_stored(const Matrix& matrix, int output, int stored, const uint8_t* from) {
  const int lane = output % PANEL;
  for (int b = 0; b < matrix.inputs / BLOCK; b++, from += stored_bytes(stored)) {
    char* block = matrix.panel(output / PANEL) + b * matrix.block_bytes();
    std::memcpy(&scales_of(block)[lane], from, 2);
    if (stored == Q8_0) {
      for (int i = 0; i < BLOCK; i++) bytes_of(block)[byte_place(i, lane)] = (int8_t)from[2 + i];
      continue;
    }
    uint16_t minimum;
    if (stored == Q4_1)
      std::memcpy(&minimum, from + 2, 2);
    else
      minimum = to_half(-8 * from_half(scales_of(block)[lane]));  // exact
    minimums_of(block)[lane] = minimum;
    const uint8_t* nibbles = from + (stored == Q4_1 ? 4 : 2);
    for (int i = 0; i < BLOCK; i++) put_nibble(block, i, lane, i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4);
  }
}

// The weights of one output, float32 [inputs].
inline void take(const Matrix& matrix, int output, float* weights) {
  char* panel = matrix.panel(output / PANEL);
  const int lane = output % PANEL;
  for (int i = 0; i < matrix.inputs; i++) {
    if (matrix.kind == FLOAT32) {
      weights[i] = ((float*)panel)[i * PANEL + lane];
    } else if (matrix.kind == BFLOAT16) {
      weights[i] = from_bfloat16(((uint16_t*)panel)[(i / 2 * PANEL + lane) * 2 + i % 2]);
    } else {
      char* block = panel + i / BLOCK * matrix.block_bytes();
      const float scale = from_half(scales_of(block)[lane]);
      if (matrix.kind == INT8) {
        weights[i] = bytes_of(block)[byte_place(i % BLOCK, lane)] * scale;
      } else {
        weights[i] = take_nibble(block, i % BLOCK, lane) * scale + from_half(minimums_of(block)[lane]);
      }
    }
  }
}

}  // namespace outrider
