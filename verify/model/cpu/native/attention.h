// Attention of rows over the keys and values of their own text.
//
// A text is cut into blocks of POSITIONS. Within a block, scores and sums are added key after key in the order of the text, and
// blocks are combined in their order. What a key's place in the cache is, and what lies between it and the next, changes nothing,
// so a row of a draft tree has the bits of the same row decoded alone.
#pragma once
#include "vector.h"

namespace outrider {

constexpr int POSITIONS = 64;
constexpr int KEYS = 4;        // whose scores are computed together
constexpr int MOST_WIDTH = 256;  // of a head
constexpr int MOST_QUERIES = 64;  // of a call of `attend`

enum StoredAs : int32_t { STORED_FLOAT32 = 0, STORED_BFLOAT16 = 1, STORED_INT8 = 2, STORED_FLOAT16 = 3 };

// Keys or values of one head of one layer in a cache.
struct Plane {
  char* data;
  int64_t stride;  // bytes from one position to the next
  int32_t stored;
};

// Reads one position as float32 [width].
inline void read_position(const Plane& plane, int64_t slot, int width, float* to) {
  const char* from = plane.data + slot * plane.stride;
  if (plane.stored == STORED_FLOAT32) {
    std::memcpy(to, from, 4 * (size_t)width);
  } else if (plane.stored == STORED_BFLOAT16) {
    for (int i = 0; i < width; i += LANES) store(to + i, load_bfloat16((const uint16_t*)from + i));
  } else if (plane.stored == STORED_FLOAT16) {
    for (int i = 0; i < width; i += LANES) store(to + i, load_half((const uint16_t*)from + i));
  } else {  // values, zeros up to a multiple of 4, and the scale
    float scale;
    std::memcpy(&scale, from + (width + 3) / 4 * 4, 4);
    for (int i = 0; i < width; i++) to[i] = (float)((const int8_t*)from)[i] * scale;
  }
}

inline void write_position(const Plane& plane, int64_t slot, int width, const float* from) {
  char* to = plane.data + slot * plane.stride;
  if (plane.stored == STORED_FLOAT32) {
    std::memcpy(to, from, 4 * (size_t)width);
  } else if (plane.stored == STORED_BFLOAT16) {
    for (int i = 0; i < width; i++) ((uint16_t*)to)[i] = to_bfloat16(from[i]);
  } else if (plane.stored == STORED_FLOAT16) {
    for (int i = 0; i < width; i++) ((uint16_t*)to)[i] = to_half(from[i]);
  } else {
    const int padded = (width + 3) / 4 * 4;
    float most = 0;
    for (int i = 0; i < width; i++) most = std::fmax(most, std::fabs(from[i]));
    const float scale = std::fmax(most / 127, 0x1p-24f);
    for (int i = 0; i < padded; i++) {
      const float value = i < width ? std::nearbyint(from[i] / scale) : 0;
      to[i] = (char)(int8_t)std::fmin(std::fmax(value, -127.0f), 127.0f);
    }
    std::memcpy(to + padded, &scale, 4);
  }
}

// One row's text: position p is at slot p for p < `contiguous`, and at `slots[p - contiguous]` after that.
struct Text {
  int32_t contiguous;
  int32_t length;  // of the text, the row included
  const int32_t* slots;
};

// Keys and values of a block of positions in float32, one after the other.
struct Block {
  const float *keys, *values;
  int64_t stride;  // values from one position to the next
  int count;
};

// Scores of a query with the block's keys.
inline void score(const float* query, const Block& block, int width, float scaling, float* scores) {
  for (int first = 0; first < block.count; first += KEYS) {
    const float* keys[KEYS];
    for (int k = 0; k < KEYS; k++) keys[k] = block.keys + std::min(first + k, block.count - 1) * block.stride;
    Sums sums[KEYS];
    for (int i = 0; i < width; i += SUMMED)
#pragma GCC unroll 2
      for (int part = 0; part < SUMMED / LANES; part++) {
        const int place = i + part * LANES;
        const Floats q = load(query + place);
#pragma GCC unroll 4
        for (int k = 0; k < KEYS; k++) sums[k].parts[part] = fma(q, load(keys[k] + place), sums[k].parts[part]);
      }
    float found[KEYS];
    totals(sums, found);
    for (int k = 0; k < KEYS && first + k < block.count; k++) scores[first + k] = found[k] * scaling;
  }
}

// Adds the block's values, times their weights, to the sums.
inline void add_values(const float* weights, const Block& block, int width, float* sums) {
  constexpr int PARTS = 4;
  int i = 0;
  for (; i + PARTS * LANES <= width; i += PARTS * LANES) {
    Floats part[PARTS];
    for (int p = 0; p < PARTS; p++) part[p] = load(sums + i + p * LANES);
    for (int key = 0; key < block.count; key++) {
      const Floats weight = all(weights[key]);
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) part[p] = fma(weight, load(block.values + key * block.stride + i + p * LANES), part[p]);
    }
    for (int p = 0; p < PARTS; p++) store(sums + i + p * LANES, part[p]);
  }
  for (; i < width; i += LANES) {
    Floats part = load(sums + i);
    for (int key = 0; key < block.count; key++)
      part = fma(all(weights[key]), load(block.values + key * block.stride + i), part);
    store(sums + i, part);
  }
}

// What a query has summed so far. `sums` and `total` are relative to e^largest.
struct Query {
  const float* query;
  float* sums;  // [width]; at last the output
  float largest, total;
};

// Adds a block to a query: keys that many rows share, then the row's own. `hidden` leading positions are not attended to.
inline void add_block(Query& query, const Block& shared, const Block& own, int hidden, int width, float scaling) {
  alignas(64) float scores[POSITIONS + SUMMED];
  const int count = shared.count + own.count;
  score(query.query, shared, width, scaling, scores);
  score(query.query, own, width, scaling, scores + shared.count);
  for (int i = 0; i < hidden && i < count; i++) scores[i] = -INFINITY;
  const int padded = (count + SUMMED - 1) / SUMMED * SUMMED;
  for (int i = count; i < padded; i++) scores[i] = -INFINITY;
  Floats most = all(-INFINITY);
  for (int i = 0; i < padded; i += LANES) most = larger(most, load(scores + i));
  const float largest_score = std::fmax(query.largest, largest(most));
  if (largest_score == -INFINITY) return;
  Sums weight_sums;
  for (int i = 0; i < padded; i += SUMMED)
    for (int part = 0; part < SUMMED / LANES; part++) {
      float* place = scores + i + part * LANES;
      const Floats weights = exponential(load(place) - all(largest_score));
      store(place, weights);
      weight_sums.parts[part] += weights;
    }
  if (largest_score != query.largest) {
    const Floats kept = exponential(all(query.largest - largest_score));
    query.total *= kept[0];
    for (int i = 0; i < width; i += LANES) store(query.sums + i, load(query.sums + i) * kept);
    query.largest = largest_score;
  }
  query.total += total(weight_sums);
  add_values(scores, shared, width, query.sums);
  add_values(scores + shared.count, own, width, query.sums);
}

// Scratch space of a thread.
struct AttentionSpace {
  alignas(64) float keys[POSITIONS * MOST_WIDTH], values[POSITIONS * MOST_WIDTH];
  alignas(64) float own_keys[POSITIONS * MOST_WIDTH], own_values[POSITIONS * MOST_WIDTH];
};

// Attention of `rows` rows, each with `groups` query heads, over one head of keys and values. Queries and outputs of a row are
// [groups, width], `stride` floats from one row to the next.
inline void attend(AttentionSpace& space, const Plane& keys, const Plane& values, const Text* texts, int rows, int groups,
                   const float* queries, float* out, int64_t stride, int width, float scaling, int window) {
  Query states[MOST_QUERIES];
  int longest = 0, earliest = 0x7fffffff, most_shared = 0;
  for (int row = 0; row < rows; row++) {
    longest = std::max(longest, texts[row].length);
    most_shared = std::max(most_shared, texts[row].contiguous);
    earliest = std::min(earliest, window ? std::max(0, texts[row].length - window) : 0);
    for (int group = 0; group < groups; group++) {
      Query& state = states[row * groups + group];
      state = {queries + row * stride + group * width, out + row * stride + group * width, -INFINITY, 0};
      std::memset(state.sums, 0, 4 * (size_t)width);
    }
  }
  for (int start = earliest / POSITIONS * POSITIONS; start < longest; start += POSITIONS) {
    const int shared = std::clamp(most_shared - start, 0, POSITIONS);
    Block all_shared = {space.keys, space.values, width, shared};
    if (keys.stored == STORED_FLOAT32)
      all_shared = {(const float*)(keys.data + start * keys.stride), (const float*)(values.data + start * values.stride),
                    keys.stride / 4, shared};
    else
      for (int i = 0; i < shared; i++) {
        read_position(keys, start + i, width, space.keys + i * width);
        read_position(values, start + i, width, space.values + i * width);
      }
    for (int row = 0; row < rows; row++) {
      const Text& text = texts[row];
      const int count = std::min(POSITIONS, text.length - start);
      const int hidden = window ? std::max(0, text.length - window - start) : 0;
      if (count <= 0 || hidden >= count) continue;
      Block block = all_shared;
      block.count = std::clamp(text.contiguous - start, 0, count);
      const Block own = {space.own_keys, space.own_values, width, count - block.count};
      for (int i = 0; i < own.count; i++) {
        const int32_t slot = text.slots[start + block.count + i - text.contiguous];
        read_position(keys, slot, width, space.own_keys + i * width);
        read_position(values, slot, width, space.own_values + i * width);
      }
      for (int group = 0; group < groups; group++)
        add_block(states[row * groups + group], block, own, hidden, width, scaling);
    }
  }
  for (int i = 0; i < rows * groups; i++) {
    const Floats total = all(states[i].total);
    for (int j = 0; j < width; j += LANES) store(states[i].sums + j, load(states[i].sums + j) / total);
  }
}

}  // namespace outrider
