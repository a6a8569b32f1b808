// Products of TILED_ROWS to 16 rows at once, by the tile registers of AMX. `EMULATED_TILES` computes them in C++, for tests on other CPUs.
#pragma once
#include "quads.h"

namespace outrider {

// The registers, and what a row of each has: up to 16 rows of up to 64 bytes.
enum { LOWER, UPPER, WEIGHTS0, WEIGHTS1, SUMS0, SUMS1, TILE_COUNT };

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

#if EMULATED_TILES
struct Tiles {
  TileShapes shapes;
  int8_t data[TILE_COUNT][16][64];
};
inline Tiles& tiles() {
  static thread_local Tiles found;
  return found;
}
inline void load_shapes(const TileShapes& shapes) { tiles().shapes = shapes; }
inline void end_products() {}
template <int TILE>
void load_tile(const void* from, size_t stride) {
  for (int row = 0; row < tiles().shapes.rows[TILE]; row++)
    std::memcpy(tiles().data[TILE][row], (const char*)from + row * stride, tiles().shapes.bytes[TILE]);
}
template <int TILE>
void store_tile(void* to, size_t stride) {
  for (int row = 0; row < tiles().shapes.rows[TILE]; row++)
    std::memcpy((char*)to + row * stride, tiles().data[TILE][row], tiles().shapes.bytes[TILE]);
}
template <int TILE>
void clear_tile() {
  std::memset(tiles().data[TILE], 0, sizeof tiles().data[TILE]);
}
template <int SUMS, int ROWS, int WEIGHTS>
void add_tiles() {
  Tiles& all = tiles();
  for (int row = 0; row < all.shapes.rows[SUMS]; row++)
    for (int lane = 0; lane < all.shapes.bytes[SUMS] / 4; lane++) {
      int32_t sum;
      std::memcpy(&sum, all.data[SUMS][row] + 4 * lane, 4);
      for (int i = 0; i < all.shapes.bytes[ROWS]; i++) sum += all.data[ROWS][row][i] * all.data[WEIGHTS][i / 4][4 * lane + i % 4];
      std::memcpy(all.data[SUMS][row] + 4 * lane, &sum, 4);
    }
}
#else
// Written here, because GCC's own functions do not say that all bytes of the shapes are read.
inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void end_products() { asm volatile("tilerelease"); }
template <int TILE>
void load_tile(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
void store_tile(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int SUMS, int ROWS, int WEIGHTS>
void add_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}
#endif

// Before the products of R rows with weights of this format.
template <const Format& FORMAT, int R>
inline void begin_products() {
  TileShapes shapes;
  for (int tile : {LOWER, UPPER}) shapes.rows[tile] = R, shapes.bytes[tile] = FORMAT.group;
  for (int tile : {WEIGHTS0, WEIGHTS1}) shapes.rows[tile] = FORMAT.group / 4, shapes.bytes[tile] = 4 * LANES;
  for (int tile : {SUMS0, SUMS1}) shapes.rows[tile] = R, shapes.bytes[tile] = 4 * LANES;
  load_shapes(shapes);
}

// Sums of products of a group's weights with R rows.
template <const Format& FORMAT, int R>
inline void sum_tiles(const PackedBlock& block, int group, const int8_t (&table)[16], const RowBlock* x, Ints (&sums)[R][2]) {
  load_tile<LOWER>(x->first + group * FORMAT.group, sizeof(RowBlock));
  load_tile<UPPER>(x->second + group * FORMAT.group, sizeof(RowBlock));
  clear_tile<SUMS0>();
  clear_tile<SUMS1>();
  if constexpr (FORMAT.bits == 8) {
    load_tile<WEIGHTS0>(block.bytes, 4 * PANEL);
    load_tile<WEIGHTS1>(block.bytes + 4 * LANES, 4 * PANEL);
  } else {
    Ints values[2][FORMAT.group / 4];
    each_value<FORMAT>(block, group, table, [&](int input, Ints w0, Ints w1) ALWAYS_INLINED {
      const int quad = input % FORMAT.group / 4;
      values[0][quad] = w0;
      values[1][quad] = w1;
    });
    load_tile<WEIGHTS0>(values[0], sizeof(Ints));
    load_tile<WEIGHTS1>(values[1], sizeof(Ints));
  }
  add_tiles<SUMS0, LOWER, WEIGHTS0>();
  add_tiles<SUMS1, LOWER, WEIGHTS1>();
  add_tiles<SUMS0, UPPER, WEIGHTS0>();
  add_tiles<SUMS1, UPPER, WEIGHTS1>();
  store_tile<SUMS0>(&sums[0][0], 2 * sizeof(Ints));
  store_tile<SUMS1>(&sums[0][1], 2 * sizeof(Ints));
}

}  // namespace outrider
