// Rows of a product, and how they are rounded for quantised weights.
#pragma once
#include "matrix.h"

namespace outrider {

// A block of a row for quantised weights: value / scale, rounded to 9 bits. With 8 bits, a real model's answers would be those of
// another model: its activations have outliers. 9 bits are a byte and a sign, and each half of the byte fits a signed byte.
struct RowBlock {
#if QUADS
  // For tiles: halves of the values, whose sum they are. Else magnitudes, and 255 where the value is negative, else 0.
  uint8_t first[BLOCK], second[BLOCK];
#else
  int16_t integers[BLOCK];
#endif
  float scale, sums[3];  // sums: of the values, as they were rounded, of each half and of both
  int32_t negatives[2];  // sums of the magnitudes of negative values, of each half
};

constexpr float LARGEST_INPUT = 254;

// Tile registers pay from about this many rows on: with fewer, loading and storing them takes longer than the products. On an Intel
// Xeon, they paid from 4 rows on with weights of 8 bits, and from 9 to 12 on with 4 bits. Products of both may share the rows.
constexpr int TILED_ROWS = TILES ? 8 : 1 << 30;

// Rows that are multiplied together: their sums, with a panel's weights, fill the registers.
#if TILES
constexpr int MOST = 16;
constexpr int MOST_ROWS[] = {12, 12, 16};  // float32, bfloat16, quantised
#elif defined(__AVX512F__)
constexpr int MOST = 12;
constexpr int MOST_ROWS[] = {12, 12, 12};
#else
constexpr int MOST = 6;
constexpr int MOST_ROWS[] = {6, 5, 5};
#endif

// Parts of nearly equal size of `count` rows, each of which is multiplied together.
struct Parts {
  int count, number;  // of rows, and of parts

  Parts(int count, int kind) : count(count) {
    const int most = MOST_ROWS[std::min<int>(kind, INT8)];
    number = (count + most - 1) / most;
  }
  int larger() const { return count % number; }  // parts that have one row more, the first ones
  int first(int part) const { return part * (count / number) + std::min(part, larger()); }
  int size(int part) const { return count / number + (part < larger()); }
  int part_of(int row) const {
    const int most = count / number + 1;
    return row < larger() * most ? row / most : larger() + (row - larger() * most) / (count / number);
  }
};

// The rows of a product, float32 [count, inputs], and their blocks, which lie in the order in which they are multiplied:
// [parts, inputs / BLOCK, rows of the part].
struct Rows {
  int inputs, count;
  float* floats;
  RowBlock* blocks;
};

// Rounds a block of a row, for tiles or without them.
inline void quantize(const float* from, RowBlock& to, [[maybe_unused]] bool is_tiled) {
  Ints most{};  // as integers, the bits of absolute values are in their order, and NaN is the largest
  for (int i = 0; i < BLOCK; i += LANES) {
    const Ints bits = load_ints(from + i) & 0x7fffffff;
    most = most > bits ? most : bits;
  }
  const float largest = from_bits(outrider::largest(most));
  // NaN where a value is NaN or infinite, which no integer can say.
  const float scale = largest / LARGEST_INPUT + largest * 0, inverse = scale > 0 ? 1 / scale : 0;
  Ints totals[2] = {}, negatives[2] = {};
  for (int i = 0; i < BLOCK; i += LANES) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the lower bits.
    const Ints rounded = (Ints)fma(load(from + i), all(inverse), all(12582912.0f)) - all_ints(0x4b400000);
    totals[i / (BLOCK / 2)] += rounded;
#if QUADS
    if (is_tiled) {
      const Ints lower = rounded >> 1;
      store_bytes(to.first + i, lower);
      store_bytes(to.second + i, rounded - lower);
      continue;
    }
    const Ints flips = rounded >> 31;
    store_bytes(to.first + i, (rounded ^ flips) - flips);
    store_bytes(to.second + i, flips);
    negatives[i / (BLOCK / 2)] -= rounded & flips;
#else
    store_shorts(to.integers + i, rounded);
#endif
  }
  to.scale = scale;
  const int32_t sums[2] = {total(totals[0]), total(totals[1])};
  for (int half = 0; half < 2; half++) {
    to.sums[half] = scale * (float)sums[half];
    to.negatives[half] = total(negatives[half]);
  }
  to.sums[2] = scale * (float)(sums[0] + sums[1]);
}

inline void quantize(const Rows& rows, int row) {
  const Parts parts(rows.count, INT8);
  const int part = parts.part_of(row), first = parts.first(part), blocks = rows.inputs / BLOCK;
  const int size = parts.size(part);
  const float* from = rows.floats + (size_t)row * rows.inputs;
  RowBlock* to = rows.blocks + (size_t)first * blocks + row - first;
  for (int b = 0; b < blocks; b++) quantize(from + b * BLOCK, to[(size_t)b * size], size >= TILED_ROWS);
}

}  // namespace outrider
