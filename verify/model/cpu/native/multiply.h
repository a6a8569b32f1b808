// Products of rows with a panel of weights.
//
// Each output is one sum in one order, input after input or block after block, however many rows are multiplied together: a row's
// bits do not depend on its neighbours. Rows are multiplied in blocks that fit the registers, so that a weight is loaded and
// unpacked once for all of them.
#pragma once
#include <array>
#include <iterator>
#include <utility>

#include "rows.h"
#if TILES
#include "tiles.h"  // and quads.h
#elif QUADS
#include "quads.h"
#else
#include "pairs.h"
#endif

namespace outrider {

// Bytes ahead of those that are multiplied. With half of it, weights came too late for eight rows: their arithmetic and the reading
// took turns.
constexpr int PREFETCHED = 4096;

// Fetches the weights that come next: the hardware does not look beyond a page.
inline void prefetch(const void* weights, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)weights + PREFETCHED + i, 0, 3);
}

template <int R>
void multiply_float32(const Matrix& matrix, const char* panel, const Rows& rows, int first, float* out) {
  const float* weights = (const float*)panel;
  const float* x = rows.floats + (size_t)first * rows.inputs;
  Floats sums[R][2] = {};
  for (int i = 0; i < matrix.inputs; i++, weights += PANEL) {
    prefetch(weights, 4 * PANEL);
    const Floats w0 = load(weights), w1 = load(weights + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Floats value = all(x[(size_t)r * rows.inputs + i]);
      sums[r][0] = fma(w0, value, sums[r][0]);
      sums[r][1] = fma(w1, value, sums[r][1]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int part = 0; part < 2; part++) store(out + r * PANEL + part * LANES, sums[r][part]);
}

template <int R>
void multiply_bfloat16(const Matrix& matrix, const char* panel, const Rows& rows, int first, float* out) {
  const uint16_t* weights = (const uint16_t*)panel;
  const float* x = rows.floats + (size_t)first * rows.inputs;
  Floats sums[R][2] = {};
  for (int i = 0; i < matrix.inputs; i += 2, weights += 2 * PANEL) {
    prefetch(weights, 4 * PANEL);
    const Ints pairs[2] = {load_ints(weights), load_ints(weights + 2 * LANES)};
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      const Floats w0 = (Floats)(odd ? pairs[0] & (int32_t)0xffff0000 : pairs[0] << 16);
      const Floats w1 = (Floats)(odd ? pairs[1] & (int32_t)0xffff0000 : pairs[1] << 16);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Floats value = all(x[(size_t)r * rows.inputs + i + odd]);
        sums[r][0] = fma(w0, value, sums[r][0]);
        sums[r][1] = fma(w1, value, sums[r][1]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int part = 0; part < 2; part++) store(out + r * PANEL + part * LANES, sums[r][part]);
}

// LANES 8-bit integers.
inline Ints load_bytes(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes found;
  std::memcpy(&found, from, sizeof found);
  return __builtin_convertvector(found, Ints);
#endif
}

// LANES scales of a group, or minimums, from `lane` on.
template <const Format& FORMAT>
ALWAYS_INLINE Floats load_scales(const char* scales, const uint16_t* factors, int group, int lane) {
  if constexpr (FORMAT.scales == HALVES) return load_half((const uint16_t*)scales + group * PANEL + lane);
  if constexpr (FORMAT.scales == NIBBLES) return to_floats(load_bytes(scales + lane) >> 4 * group & 15) * load_half(factors + lane);
  return to_floats(load_bytes(scales + group * PANEL + lane)) * load_half(factors + lane);
}

template <const Format& FORMAT, int R>
void multiply_blocks(const Matrix& matrix, const char* panel, const Rows& rows, int first, float* out) {
  for (int i = 0; i < R * PANEL; i += LANES) store(out + i, Floats{});
#if TILES
  if constexpr (R >= TILED_ROWS) begin_products<FORMAT, R>();
#endif
  const Format& format = format_of(matrix.kind);  // like FORMAT, except for its table and unit
  const int8_t (&table)[16] = TABLES[format.table];
  const int blocks = matrix.inputs / BLOCK;
  const RowBlock* x = rows.blocks + (size_t)first * blocks;
  for (int b = 0; b < blocks; b++, x += R) {
    const PackedBlock block = block_of(FORMAT, (char*)panel, b);
    prefetch(block.scales, FORMAT.block_bytes());
    for (int group = 0; group < FORMAT.groups(); group++) {
      asm volatile("" ::: "memory");  // keeps totals in `out`: registers are for the sums
      Ints sums[R][2];
#if TILES
      if constexpr (R >= TILED_ROWS) sum_tiles<FORMAT, R>(block, group, table, x, sums);
      else
#endif
        sum_group<FORMAT, R>(block, group, table, x, sums);
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const int lane = part * LANES;
        Floats scales = load_scales<FORMAT>(block.scales, block.factors, group, lane), minimums{};
        if constexpr (FORMAT.table != VALUES && FORMAT.has_factors()) scales *= all(format.unit);
        if constexpr (FORMAT.minimums == ALIKE) minimums = load_scales<FORMAT>(block.minimums, block.minimum_factors, group, lane);
        if constexpr (FORMAT.minimums == ZEROS) minimums = to_floats(load_bytes(block.minimums + group * PANEL + lane)) * scales;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          float* total = out + r * PANEL + lane;
          Floats sum = fma(to_floats(sums[r][part]), scales * all(x[r].scale), load(total));
          if constexpr (FORMAT.minimums != NONE) sum = fma(minimums, all(x[r].sums[FORMAT.groups() == 2 ? group : 2]), sum);
          store(total, sum);
        }
      }
    }
  }
#if TILES
  if constexpr (R >= TILED_ROWS) end_products();
#endif
}

template <int R, size_t... FORMAT>
constexpr auto kernels_of(std::index_sequence<FORMAT...>) {
  return std::array{multiply_float32<R>, multiply_bfloat16<R>, multiply_blocks<FORMATS[first_like(FORMAT)], R>...};
}
template <size_t... ROWS>
constexpr auto kernels_for(std::index_sequence<ROWS...>) {
  return std::array{kernels_of<ROWS + 1>(std::make_index_sequence<std::size(FORMATS)>())...};
}
// By rows - 1, and kind. No template has a static variable: processes that load several variants would share it.
constexpr auto KERNELS = kernels_for(std::make_index_sequence<MOST>());

// Multiplies sums, [count, PANEL], by the scales of a panel's outputs.
inline void scale_outputs(const Matrix& matrix, int panel, int count, float* out) {
  const int first = panel * PANEL, size = std::min(PANEL, matrix.outputs - first);
  for (int r = 0; r < count; r++)
    for (int i = 0; i < size; i++) out[r * PANEL + i] *= matrix.scales[first + i];
}

// Multiplies all rows with a panel, part by part, and calls `use(row, sums)` with float32 [PANEL].
template <class Use>
void multiply_panel(const Matrix& matrix, int panel, const Rows& rows, const Use& use) {
  const Parts parts(rows.count, matrix.kind);
  const char* weights = matrix.panel(panel);
  float out[MOST * PANEL];
  for (int part = 0; part < parts.number; part++) {
    const int first = parts.first(part);
    KERNELS[parts.size(part) - 1][matrix.kind](matrix, weights, rows, first, out);
    if (matrix.scales) scale_outputs(matrix, panel, parts.size(part), out);
    for (int r = 0; r < parts.size(part); r++) use(first + r, out + r * PANEL);
  }
}

}  // namespace outrider
