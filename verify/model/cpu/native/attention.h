// Attention of rows over the keys and values of their own text.
//
// A text is cut into blocks of POSITIONS, whose keys are turned to columns: a score is one chain of sums over the values of a key,
// as an output is over the positions, so both are products of the same kernel, without a sum over lanes. Blocks are combined in the
// order of the text. A key's place in the cache, and the gap to the next key, change nothing, so a row of a draft tree has the bits
// of the same row decoded alone.
#pragma once
#include "buffer.h"
#include "pointwise.h"

namespace outrider {

constexpr int POSITIONS = 64;
constexpr int SCORES = POSITIONS + LANES;  // of a query and a block: its last vector may end after the last position
constexpr int LINE = 64;                   // bytes that memory is read by
constexpr int MOST_QUERIES = 64;           // of a call of `attend`

enum StoredAs : int32_t { STORED_FLOAT32 = 0, STORED_BFLOAT16 = 1, STORED_INT8 = 2, STORED_FLOAT16 = 3, STORED_FLOAT8 = 4 };

// Keys or values of one head of one layer in a cache.
struct Plane {
  char* data;
  int64_t stride;         // bytes from one position to the next
  int32_t stored, width;  // width: values of a position
};

// The lines of a cache that are read after those at hand. Memory is slow: they are loaded while others are read and multiplied.
struct Ahead {
  const char *line, *end;

  // From position `start` on. The positions of a head lie together.
  static Ahead of(const Plane& plane, int64_t start) {
    return {plane.data + start * plane.stride, plane.data + (start + POSITIONS) * plane.stride};
  }

  void step() {
    __builtin_prefetch(line);
    line = line + LINE < end ? line + LINE : line;
  }
};

// Reads the first values of one position as float32 [width].
inline void read_position(const Plane& plane, int64_t slot, int width, float* to, Ahead& ahead) {
  for (int64_t byte = 0; byte < plane.stride; byte += LINE) ahead.step();
  const char* from = plane.data + slot * plane.stride;
  if (plane.stored == STORED_FLOAT32) {
    std::memcpy(to, from, 4 * (size_t)width);
  } else if (plane.stored == STORED_BFLOAT16) {
    for (int i = 0; i < width; i += LANES) store(to + i, load_bfloat16((const uint16_t*)from + i));
  } else if (plane.stored == STORED_FLOAT16) {
    for (int i = 0; i < width; i += LANES) store(to + i, load_half((const uint16_t*)from + i));
  } else {  // values of one byte, zeros up to a multiple of 4, and the scale
    float scale;
    std::memcpy(&scale, from + (plane.width + 3) / 4 * 4, 4);
    if (plane.stored == STORED_FLOAT8) {
      for (int i = 0; i < width; i += LANES) store(to + i, load_float8((const uint8_t*)from + i) * all(scale));
    } else {
      for (int i = 0; i < width; i++) to[i] = (float)((const int8_t*)from)[i] * scale;
    }
  }
}

inline void write_position(const Plane& plane, int64_t slot, const float* from) {
  const int width = plane.width;
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

// The sums of a query so far. `sums` and `total` are relative to e^largest.
struct Query {
  const float* query;
  float* sums;    // [width]; at last the output
  float* scores;  // [SCORES] with the keys of a block; then their weights
  float largest, total;
};

// A matrix of float32, row after row.
struct Block {
  const float* rows;
  int64_t stride;  // values from one row to the next
  int count;       // rows
};

// Products of the factors of one query with the rows of a block, [columns], are added to `sums`.
struct Product {
  const float* factors;
  float* sums;
};

// The products of Q queries, VECTORS vectors of each from column `first` on. A vector that is loaded is multiplied by all queries.
// Each sum is one chain over the rows, in their order.
template <bool FRESH, int Q, int VECTORS>
ALWAYS_INLINE void multiply_few(const Product* products, const Block& block, int first, Ahead& ahead) {
  Floats sums[Q][VECTORS] = {};
  if constexpr (!FRESH) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[q][v] = load(products[q].sums + first + v * LANES);
  }
  const float* row = block.rows + first;
  Ahead next = ahead;  // in registers
  for (int i = 0; i < block.count; i++, row += block.stride) {
    next.step();
    Floats values[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) values[v] = load(row + v * LANES);
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) {
      const Floats factor = all(products[q].factors[i]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[q][v] = fma(factor, values[v], sums[q][v]);
    }
  }
  ahead = next;
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store(products[q].sums + first + v * LANES, sums[q][v]);
}

template <bool FRESH, int Q>
inline void multiply_queries(const Product* products, const Block& block, int columns, Ahead& ahead) {
  constexpr int VECTORS = Q > 3 ? 2 : Q > 1 ? 4 : 64 / LANES;  // whose sums fill the registers
  int first = 0;
  for (; first + VECTORS * LANES <= columns; first += VECTORS * LANES) multiply_few<FRESH, Q, VECTORS>(products, block, first, ahead);
  for (; first < columns; first += LANES) multiply_few<FRESH, Q, 1>(products, block, first, ahead);
}

// Of `count` queries. If `FRESH`, sums begin with 0. Columns are rounded up to whole vectors.
template <bool FRESH>
inline void multiply(const Product* products, int count, const Block& block, int columns, Ahead& ahead) {
  for (; count >= 6; count -= 6, products += 6) multiply_queries<FRESH, 6>(products, block, columns, ahead);
  for (; count >= 3; count -= 3, products += 3) multiply_queries<FRESH, 3>(products, block, columns, ahead);
  for (; count >= 2; count -= 2, products += 2) multiply_queries<FRESH, 2>(products, block, columns, ahead);
  for (; count > 0; count--, products++) multiply_queries<FRESH, 1>(products, block, columns, ahead);
}

// Turns a query's scores of a block into weights. `hidden` leading positions are not attended to.
inline void weigh(Query& query, int count, int hidden, int width, float scaling, float cap) {
  float* scores = query.scores;
  for (int i = 0; i < hidden && i < count; i++) scores[i] = -INFINITY;
  const int padded = (count + SUMMED - 1) / SUMMED * SUMMED;
  for (int i = count; i < padded; i++) scores[i] = -INFINITY;
  Floats most = all(-INFINITY);
  for (int i = 0; i < padded; i += LANES) {
    Floats scaled = load(scores + i) * all(scaling);
    if (cap) scaled = load(scores + i) > all(-INFINITY) ? capped(scaled, cap) : scaled;
    store(scores + i, scaled);
    most = larger(most, scaled);
  }
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
  Buffer<float> memory;
  float *rows, *shared, *own, *scores;  // shared, own: keys, then values

  // For heads of up to this width.
  void fit(int width) {
    rows = memory.of((size_t)(LANES + 2 * POSITIONS) * width + MOST_QUERIES * SCORES);
    shared = rows + LANES * width;
    own = shared + POSITIONS * width;
    scores = own + POSITIONS * width;
  }
};

// The part of a block of positions that one row attends to.
struct Part {
  int shared;            // leading positions at slots of their own number
  int own;               // positions after those, at other slots
  int hidden;            // leading positions before the row's window
  const int32_t* slots;  // of its own

  int count() const { return hidden < shared + own ? shared + own : 0; }
};

inline Part part_of(const Text& text, int start, int window) {
  const int count = std::clamp(text.length - start, 0, POSITIONS), shared = std::clamp(text.contiguous - start, 0, count);
  const int hidden = window ? std::max(0, text.length - window - start) : 0, own = count - shared;
  return {shared, own, hidden, own ? text.slots + (start + shared - text.contiguous) : nullptr};
}

// Keys of positions, as columns: [width, POSITIONS]. `slot_of(i)` is the slot of the i-th one. `rows` is space for LANES of them.
template <class SlotOf>
inline Block read_keys(const Plane& plane, int count, int width, float* rows, float* space, Ahead ahead, const SlotOf& slot_of) {
  for (int first = 0; first < count; first += LANES) {
    for (int i = 0; i < LANES; i++) {
      if (first + i < count) read_position(plane, slot_of(first + i), width, rows + i * width, ahead);
      else std::memset(rows + i * width, 0, 4 * (size_t)width);
    }
    for (int value = 0; value < width; value += LANES) {
      Floats square[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) square[i] = load(rows + i * width + value);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(space + (value + i) * POSITIONS + first, square[i]);
    }
  }
  return {space, POSITIONS, width};
}

// Values of positions: [count, width].
template <class SlotOf>
inline Block read_values(const Plane& plane, int count, int width, float* space, Ahead ahead, const SlotOf& slot_of) {
  for (int i = 0; i < count; i++) read_position(plane, slot_of(i), width, space + i * width, ahead);
  return {space, width, count};
}

// Calls `use(first, count, block, positions, place)` with the keys or the values of a block that queries attend to: of all rows at
// once if they attend to the same positions, else of row after row. `place` is that of the first position in the block.
template <class Read, class Use>
inline void visit(AttentionSpace& space, const Part* parts, int rows, int groups, int start, const Read& read, const Use& use) {
  int most = 0;
  bool are_equal = true;
  for (int row = 0; row < rows; row++) {
    most = std::max(most, parts[row].count() ? parts[row].shared : 0);
    are_equal = are_equal && parts[row].count() && !parts[row].own && parts[row].shared == parts[0].shared;
  }
  const Block shared = read(most, space.shared, [&](int i) { return start + i; });
  if (are_equal) return use(0, rows * groups, shared, most, 0);
  for (int row = 0; row < rows; row++) {
    const Part& part = parts[row];
    if (!part.count()) continue;
    use(row * groups, groups, shared, part.shared, 0);
    if (part.own) use(row * groups, groups, read(part.own, space.own, [&](int i) { return part.slots[i]; }), part.own, part.shared);
  }
}

// A position without a value: its score takes a part of the weights.
inline void add_sink(Query& query, int width, float sink) {
  const float largest = std::fmax(query.largest, sink);
  const Floats kept = exponential(all(query.largest - largest));
  query.total = query.total * kept[0] + exponential(all(sink - largest))[0];
  for (int i = 0; i < width; i += LANES) store(query.sums + i, load(query.sums + i) * kept);
}

// How scores become weights.
struct Scoring {
  float scaling, cap;  // cap: 0 = none
  int window;          // 0 = none
  const float* sinks;  // [groups]; null = none
};

// Vectors of rows and heads.
struct Heads {
  float* first;
  int64_t row, head;  // floats from one row, and from one head, to the next
  int width;

  float* at(int64_t number, int64_t group) const { return first + number * row + group * head; }
  Heads from(int64_t number, int64_t group) const { return {at(number, group), row, head, width}; }
};

// Attention of `rows` rows, each with `groups` query heads, over one head of keys and values. `values` may be the plane of keys: then,
// the first values of a key are its value.
inline void attend(AttentionSpace& space, const Plane& keys, const Plane& values, const Text* texts, int rows, int groups,
                   const Heads& queries, const Heads& outputs, const Scoring& scoring) {
  const int width = outputs.width;
  const int window = scoring.window;
  Query states[MOST_QUERIES];
  Product products[MOST_QUERIES];
  Part parts[MOST_QUERIES];
  Ahead ahead;
  int longest = 0, earliest = 0x7fffffff;
  for (int row = 0; row < rows; row++) {
    longest = std::max(longest, texts[row].length);
    earliest = std::min(earliest, window ? std::max(0, texts[row].length - window) : 0);
    for (int group = 0; group < groups; group++) {
      const int number = row * groups + group;
      float* out = outputs.at(row, group);
      states[number] = {queries.at(row, group), out, space.scores + number * SCORES, -INFINITY, 0};
      std::memset(out, 0, 4 * (size_t)width);
    }
  }
  const auto read_keys_to = [&](int count, float* to, const auto& slot_of) {
    return read_keys(keys, count, queries.width, space.rows, to, ahead, slot_of);
  };
  const auto read_values_to = [&](int count, float* to, const auto& slot_of) {
    return read_values(values, count, width, to, ahead, slot_of);
  };
  const auto score = [&](int first, int count, const Block& block, int positions, int place) {
    for (int i = 0; i < count; i++) products[i] = {states[first + i].query, states[first + i].scores + place};
    multiply<true>(products, count, block, positions, ahead);
  };
  const auto add_values = [&](int first, int count, const Block& block, int positions, int place) {
    for (int i = 0; i < count; i++) products[i] = {states[first + i].scores + place, states[first + i].sums};
    multiply<false>(products, count, {block.rows, block.stride, positions}, width, ahead);
  };
  for (int start = earliest / POSITIONS * POSITIONS; start < longest; start += POSITIONS) {
    for (int row = 0; row < rows; row++) parts[row] = part_of(texts[row], start, window);
    ahead = Ahead::of(values, start);
    visit(space, parts, rows, groups, start, read_keys_to, score);
    for (int i = 0; i < rows * groups; i++) {
      const Part& part = parts[i / groups];
      if (part.count()) weigh(states[i], part.shared + part.own, part.hidden, width, scoring.scaling, scoring.cap);
    }
    ahead = Ahead::of(keys, start + POSITIONS);
    visit(space, parts, rows, groups, start, read_values_to, add_values);
  }
  for (int i = 0; i < rows * groups; i++) {
    if (scoring.sinks) add_sink(states[i], width, scoring.sinks[i % groups]);
    const Floats total = all(states[i].total);
    for (int j = 0; j < width; j += LANES) store(states[i].sums + j, load(states[i].sums + j) / total);
  }
}

}  // namespace outrider
