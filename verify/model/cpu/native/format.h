// The kinds of packed weights, and what blocks of quantised ones hold.
#pragma once
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
  Q2_K,
  Q3_K,
  IQ1_S,
  IQ1_M,
  IQ2_XXS,
  IQ2_XS,
  IQ2_S,
  IQ3_XXS,
  IQ3_S,
  TQ1_0,
  TQ2_0,
  NVFP4,
  ZERO4,  // of GPTQ and AWQ, whose zeros are integers; no type of GGUF
  ZERO8,
};

// How scales are stored: float16, or integers of so many bits (8: signed). With integers, a superblock has a float16 factor.
enum Scales { HALVES = 16, BYTES = 8, NIBBLES = 4 };
// Minimums: none, stored as scales are and with a factor of their own, or signed bytes that are multiplied by the scale.
enum Minimums { NONE, ALIKE, ZEROS };
// Tables that values are indices of: for IQ4, for MXFP4 and NVFP4 (doubled), and for types with fewer bits.
enum TableOf { VALUES, IQ4, FP4, SIGNED3, TERNARY, SHIFTED, MOVED, IQ2, IQ3_EVEN, IQ3_ODD };
constexpr int8_t TABLES[][16] = {{},
                                 {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
                                 {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
                                 {-4, -3, -2, -1, 0, 1, 2, 3},
                                 {-1, 0, 1, 2},
                                 {-7, 1, 9},
                                 {-7, 1, 9, 0, -9, -1, 7},
                                 {8, 25, 43, 0, -8, -25, -43},
                                 {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62},
                                 {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}};

// A quantised kind. A weight is (value - offset) * scale + minimum.
struct Format {
  int bits;  // of a value: 8 (signed), or 2 to 6
  int offset;
  int group;  // inputs that share a scale: BLOCK, or half of it
  Scales scales;
  Minimums minimums;
  TableOf table;
  float unit;               // of scales with a factor: a power of two
  int stored;               // bytes of a block, or of a superblock if it has factors, of one output in a file
  int stored_together = 1;  // blocks without factors that these bytes hold

  constexpr int low() const { return bits < 4 ? 2 : 4; }  // bits that lie together, and further ones
  constexpr int high() const { return bits == 8 ? 0 : bits - low(); }
  constexpr bool has_factors() const { return scales != HALVES; }
  constexpr int factors() const { return !has_factors() ? 0 : minimums == ALIKE ? 2 : 1; }
  constexpr int groups() const { return BLOCK / group; }
  constexpr Scales minimum_scales() const { return minimums == ZEROS ? BYTES : scales; }
  constexpr int scale_bytes() const { return scales * groups() / 8 * PANEL; }
  constexpr int minimum_bytes() const { return minimums == ALIKE ? scale_bytes() : minimums == ZEROS ? groups() * PANEL : 0; }
  constexpr int block_bytes() const { return scale_bytes() + minimum_bytes() + bits * BLOCK / 8 * PANEL; }
  constexpr int factor_bytes() const { return 2 * factors() * PANEL; }
  constexpr int blocks() const { return has_factors() ? SUPERBLOCK / BLOCK : 1; }  // that lie together, after their factors
  constexpr int stored_blocks() const { return std::max(blocks(), stored_together); }
  constexpr int inputs() const { return blocks() * BLOCK; }
  constexpr int stored_inputs() const { return stored_blocks() * BLOCK; }
  constexpr int bytes() const { return factor_bytes() + blocks() * block_bytes(); }
  // Whether weights are multiplied by the same instructions, with another table or unit.
  constexpr bool is_like(const Format& other) const {
    return bits == other.bits && offset == other.offset && group == other.group && scales == other.scales && minimums == other.minimums &&
           (table == VALUES) == (other.table == VALUES);
  }
};

constexpr Format FORMATS[] = {
    {8, 0, 32, HALVES, NONE, VALUES, 1, 34},       // INT8
    {4, 0, 32, HALVES, ALIKE, VALUES, 1, 20},      // INT4
    {4, 8, 32, HALVES, NONE, VALUES, 1, 18},       // Q4_0
    {5, 16, 32, HALVES, NONE, VALUES, 1, 22},      // Q5_0
    {5, 0, 32, HALVES, ALIKE, VALUES, 1, 24},      // Q5_1
    {4, 0, 32, BYTES, ALIKE, VALUES, 1, 144},      // Q4_K
    {5, 0, 32, BYTES, ALIKE, VALUES, 1, 176},      // Q5_K
    {6, 32, 16, BYTES, NONE, VALUES, 1, 210},      // Q6_K
    {4, 0, 32, HALVES, NONE, IQ4, 1, 18},          // IQ4_NL
    {4, 0, 32, BYTES, NONE, IQ4, 1, 136},          // IQ4_XS
    {4, 0, 32, HALVES, NONE, FP4, 1, 17},          // MXFP4
    {2, 0, 16, NIBBLES, ALIKE, VALUES, 1, 84},     // Q2_K
    {3, 0, 16, BYTES, NONE, SIGNED3, 1, 110},      // Q3_K
    {2, 0, 32, BYTES, NONE, SHIFTED, 0.125f, 50},  // IQ1_S
    {3, 0, 16, NIBBLES, NONE, MOVED, 0.125f, 56},  // IQ1_M
    {3, 0, 32, BYTES, NONE, IQ2, 0.125f, 66},      // IQ2_XXS
    {3, 0, 16, BYTES, NONE, IQ2, 0.125f, 74},      // IQ2_XS
    {3, 0, 16, BYTES, NONE, IQ2, 0.125f, 82},      // IQ2_S
    {4, 0, 32, BYTES, NONE, IQ3_EVEN, 0.25f, 98},  // IQ3_XXS
    {4, 0, 32, BYTES, NONE, IQ3_ODD, 1, 110},      // IQ3_S
    {2, 0, 32, BYTES, NONE, TERNARY, 1, 54},       // TQ1_0
    {2, 0, 32, BYTES, NONE, TERNARY, 1, 66},       // TQ2_0
    {4, 0, 16, HALVES, NONE, FP4, 1, 36, 2},       // NVFP4
    {4, 0, 32, HALVES, ZEROS, VALUES, 1, 19},      // ZERO4
    {8, 0, 32, HALVES, ZEROS, VALUES, 1, 35},      // ZERO8
};
constexpr const Format& format_of(int kind) { return FORMATS[kind - INT8]; }

// The first format that is like one of FORMATS, whose kernels it shares.
constexpr int first_like(int format) {
  int found = 0;
  while (!FORMATS[found].is_like(FORMATS[format])) found++;
  return found;
}

}  // namespace outrider
