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

enum StoredAs : int32_t { STORED_FLOAT32 = 0, STORED_BFLOAT16 = 1, STORED_INT8 = 2, STORED_FLOAT16 = 3, STORED_FLOAT8 = 4 };

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
  } else {  // values of one byte, zeros up to a multiple of 4, and the scale
    float scale;
    std::memcpy(&scale, from + (width + 3) / 4 * 4, 4);
    if (plane.stored == STORED_FLOAT8) {
      for (int i = 0; i < width; i += LANES) store(to + i, load_float8((const uint8_t*)from + i) * all(scale));
    } else {
      for (int i = 0; i < width; i++) to[i] = (float)((const int8_t*)from)[i] * scale;
    }
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
    const bool is_float8 = plane.stored == STORED_FLOAT8;
    const float limit = is_float8 ? MOST_FLOAT8 : 127;
    const int padded = (width + 3) / 4 * 4;
    float most = 0;
    for (int i = 0; i < width; i++) most = std::fmax(most, std::fabs(from[i]));
    const float scale = std::fmax(most / limit, 0x1p-24f);
    for (int i = 0; i < padded; i++) {
      const float value = i < width ? std::fmin(std::fmax(from[i] / scale, -limit), limit) : 0;
      to[i] = is_float8 ? (char)to_float8(value) : (char)(int8_t)std::nearbyint(value);
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

// Keys or values of a block of positions in float32, one after the other.
struct Block {
  const float* rows;
  int64_t stride;  // values from one position to the next
  int count;

  const float* row(int index) const { return rows + index * stride; }
};

// What a query has summed so far. `sums` and `total` are relative to e^largest.
struct Query {
  const float* query;
  float* sums;    // [width]; at last the output
  float* scores;  // [POSITIONS] with the keys of a block; then their weights
  float largest, total;
};

// Scores of Q queries with K keys from `first` on. A key that is loaded is multiplied by all queries.
template <int Q, int K>
ALWAYS_INLINE void score_few(const Query* queries, const Block& keys, int first, int width, float scaling, int place) {
  const float* rows = keys.row(first);
  Sums sums[Q][K];
  for (int part = 0; part < SUMMED / LANES; part++) {
    Floats found[Q][K] = {};
    for (int i = part * LANES; i < width; i += SUMMED) {
      Floats values[Q];
#pragma GCC unroll 4
      for (int q = 0; q < Q; q++) values[q] = load(queries[q].query + i);
#pragma GCC unroll 4
      for (int k = 0; k < K; k++) {
        const Floats key = load(rows + k * keys.stride + i);
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) found[q][k] = fma(values[q], key, found[q][k]);
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
      for (int k = 0; k < K; k++) sums[q][k].parts[part] = found[q][k];
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
    float* scores = queries[q].scores + place + first;
    if constexpr (K == KEYS) {
      totals(sums[q], scores);
#pragma GCC unroll 4
      for (int k = 0; k < K; k++) scores[k] *= scaling;
    } else {
      scores[0] = total(sums[q][0]) * scaling;
    }
  }
}

template <int Q>
inline void score_queries(const Query* queries, const Block& keys, int width, float scaling, int place) {
  int first = 0;
  for (; first + KEYS <= keys.count; first += KEYS) score_few<Q, KEYS>(queries, keys, first, width, scaling, place);
  for (; first < keys.count; first++) score_few<Q, 1>(queries, keys, first, width, scaling, place);
}

// Adds values, times their weights, to the sums of Q queries, PARTS vectors of each.
template <int Q, int PARTS>
ALWAYS_INLINE void add_few(const Query* queries, const Block& values, int first, int place) {
  Floats sums[Q][PARTS];
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++) sums[q][part] = load(queries[q].sums + first + part * LANES);
  for (int key = 0; key < values.count; key++) {
    Floats row[PARTS];
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++) row[part] = load(values.row(key) + first + part * LANES);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      const Floats weight = all(queries[q].scores[place + key]);
#pragma GCC unroll 8
      for (int part = 0; part < PARTS; part++) sums[q][part] = fma(weight, row[part], sums[q][part]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++) store(queries[q].sums + first + part * LANES, sums[q][part]);
}

template <int Q>
inline void add_queries(const Query* queries, const Block& values, int width, int place) {
  constexpr int PARTS = Q == 1 ? 8 : 4;
  int first = 0;
  for (; first + PARTS * LANES <= width; first += PARTS * LANES) add_few<Q, PARTS>(queries, values, first, place);
  for (; first < width; first += LANES) add_few<Q, 1>(queries, values, first, place);
}

constexpr int TOGETHER = 3;  // queries whose sums fill the registers

inline void score(const Query* queries, int count, const Block& keys, int width, float scaling, int place) {
  for (; count >= TOGETHER; count -= TOGETHER, queries += TOGETHER) score_queries<TOGETHER>(queries, keys, width, scaling, place);
  for (; count > 0; count--, queries++) score_queries<1>(queries, keys, width, scaling, place);
}

inline void add_values(const Query* queries, int count, const Block& values, int width, int place) {
  for (; count >= TOGETHER; count -= TOGETHER, queries += TOGETHER) add_queries<TOGETHER>(queries, values, width, place);
  for (; count > 0; count--, queries++) add_queries<1>(queries, values, width, place);
}

// Turns a query's scores of a block into weights. `hidden` leading positions are not attended to.
inline void weigh(Query& query, int count, int hidden, int width) {
  float* scores = query.scores;
  for (int i = 0; i < hidden && i < count; i++) scores[i] = -INFINITY;
  const int padded = (count + SUMMED - 1) / SUMMED * SUMMED;
  for (int i = count; i < padded; i++) scores[i] = -INFINITY;
  Floats most = all(-INFINITY);
  for (int i = 0; i < padded; i += LANES) most = larger(most, load(scores + i));
  const float largest_score = std::fmax(query.largest, largest(most));
  Sums weight_sums{};
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
}

// Scratch space of a thread.
struct AttentionSpace {
  alignas(64) float shared[POSITIONS * MOST_WIDTH], own[POSITIONS * MOST_WIDTH];  // keys, then values
  alignas(64) float scores[MOST_QUERIES * POSITIONS];
};

// The part of a block of positions that one row attends to.
struct Part {
  int shared;  // leading positions at slots of their own number
  int own;     // positions after those, at other slots
  int hidden;  // leading positions before the row's window
  const int32_t* slots;  // of its own

  int count() const { return hidden < shared + own ? shared + own : 0; }
};

inline Part part_of(const Text& text, int start, int window) {
  const int count = std::clamp(text.length - start, 0, POSITIONS), shared = std::clamp(text.contiguous - start, 0, count);
  const int hidden = window ? std::max(0, text.length - window - start) : 0;
  return {shared, count - shared, hidden, text.slots + (start + shared - text.contiguous)};
}

// Positions from `start` on, at slots of their own number, in float32: in the cache itself, or in `space`.
inline Block read_shared(const Plane& plane, int start, int count, int width, float* space) {
  if (plane.stored == STORED_FLOAT32) return {(const float*)(plane.data + start * plane.stride), plane.stride / 4, count};
  for (int i = 0; i < count; i++) read_position(plane, start + i, width, space + i * width);
  return {space, width, count};
}

inline Block read_own(const Plane& plane, const Part& part, int width, float* space) {
  for (int i = 0; i < part.own; i++) read_position(plane, part.slots[i], width, space + i * width);
  return {space, width, part.own};
}

// Calls `use(queries, count, positions, place)` with the keys or the values of a block that queries attend to: of all rows at once
// if they attend to the same positions, else of row after row. `place` is that of the first one in the block.
template <class Use>
inline void visit(AttentionSpace& space, const Plane& plane, const Part* parts, int rows, int groups, Query* queries, int start,
                  int width, const Use& use) {
  int most = 0;
  bool are_equal = true;
  for (int row = 0; row < rows; row++) {
    most = std::max(most, parts[row].count() ? parts[row].shared : 0);
    are_equal = are_equal && parts[row].count() && !parts[row].own && parts[row].shared == parts[0].shared;
  }
  const Block shared = read_shared(plane, start, most, width, space.shared);
  if (are_equal) return use(queries, rows * groups, shared, 0);
  for (int row = 0; row < rows; row++) {
    if (!parts[row].count()) continue;
    use(queries + row * groups, groups, Block{shared.rows, shared.stride, parts[row].shared}, 0);
    if (parts[row].own) use(queries + row * groups, groups, read_own(plane, parts[row], width, space.own), parts[row].shared);
  }
}

// Attention of `rows` rows, each with `groups` query heads, over one head of keys and values. Queries and outputs of a row are
// [groups, width], `stride` floats from one row to the next.
inline void attend(AttentionSpace& space, const Plane& keys, const Plane& values, const Text* texts, int rows, int groups,
                   const float* queries, float* out, int64_t stride, int width, float scaling, int window) {
  Query states[MOST_QUERIES];
  Part parts[MOST_QUERIES];
  int longest = 0, earliest = 0x7fffffff;
  for (int row = 0; row < rows; row++) {
    longest = std::max(longest, texts[row].length);
    earliest = std::min(earliest, window ? std::max(0, texts[row].length - window) : 0);
    for (int group = 0; group < groups; group++) {
      const int64_t place = row * stride + group * width;
      const int number = row * groups + group;
      states[number] = {queries + place, out + place, space.scores + number * POSITIONS, -INFINITY, 0};
      std::memset(out + place, 0, 4 * (size_t)width);
    }
  }
  for (int start = earliest / POSITIONS * POSITIONS; start < longest; start += POSITIONS) {
    for (int row = 0; row < rows; row++) parts[row] = part_of(texts[row], start, window);
    visit(space, keys, parts, rows, groups, states, start, width, [&](Query* some, int count, const Block& block, int place) {
      score(some, count, block, width, scaling, place);
    });
    for (int row = 0; row < rows; row++)
      for (int group = 0; group < groups && parts[row].count(); group++)
        weigh(states[row * groups + group], parts[row].shared + parts[row].own, parts[row].hidden, width);
    visit(space, values, parts, rows, groups, states, start, width, [&](Query* some, int count, const Block& block, int place) {
      add_values(some, count, block, width, place);
    });
  }
  for (int i = 0; i < rows * groups; i++) {
    const Floats total = all(states[i].total);
    for (int j = 0; j < width; j += LANES) store(states[i].sums + j, load(states[i].sums + j) / total);
  }
}

}  // namespace outrider
