// The learned table of one session: successor weights per context, over a base table (ADED, Algorithm 2).
#pragma once
#include <algorithm>

#include "base_table.h"

namespace outrider {

// An empty slot has key 0; a used slot stores its context's key + 1.
struct LearnedRows {
  Array<uint64_t> keys;   // [C], C a power of two
  Array<int64_t> stamps;  // [C]; time of the last update
  Array<int32_t> tokens;  // [C, S]; -1 = none
  Array<float> weights;   // [C, S]; the base table's probabilities plus increments
  Array<float> missing;   // [C]; weight of successors that are not in the row
  Array<int64_t> clock;   // [1]; number of updates

  int64_t width() const { return tokens.shape[1]; }
};

namespace learned_table {

using base_table::context_key;

// A probe window has this many slots.
constexpr int64_t PROBES = 8;

// The first slot of the key's probe window.
inline int64_t home(const LearnedRows& rows, uint64_t key) { return (int64_t)((key * 0x9E3779B97F4A7C15) >> 32) & (rows.keys.size() - 1); }

// The slot of the context with `key`, or -1.
inline int64_t locate(const LearnedRows& rows, uint64_t key) {
  const int64_t first = home(rows, key);
  for (int64_t probe = 0; probe < PROBES; probe++) {
    const int64_t slot = (first + probe) & (rows.keys.size() - 1);
    if (rows.keys[slot] == key + 1) return slot;
  }
  return -1;
}

// Claims a free or the least recently updated slot of the probe window; returns it, filled from the base table.
inline int64_t claim(const BaseArrays& base, const LearnedRows& rows, uint64_t key) {
  const int64_t first = home(rows, key);
  int64_t best = first;
  for (int64_t probe = 0; probe < PROBES; probe++) {
    const int64_t slot = (first + probe) & (rows.keys.size() - 1);
    if (rows.keys[slot] == 0) {
      best = slot;
      break;
    }
    if (rows.stamps[slot] < rows.stamps[best]) best = slot;
  }
  const auto tokens = rows.tokens.row(best);
  const auto weights = rows.weights.row(best);
  rows.keys[best] = key + 1;
  std::fill(tokens.data, tokens.data + tokens.size(), -1);
  std::fill(weights.data, weights.data + weights.size(), 0.0f);
  double rest = 1;
  const int64_t context = base_table::find(base, key);
  if (context >= 0) {
    const int64_t start = base.offsets[context];
    for (int64_t i = 0; i < std::min(base.offsets[context + 1] - start, rows.width()); i++) {
      const double weight = base.probabilities[start + i] / base_table::PROBABILITY_UNIT;
      tokens[i] = base.token(start + i);
      weights[i] = (float)weight;
      rest -= weight;
    }
  }
  rows.missing[best] = (float)std::max(rest, 0.0);
  return best;
}

// Finds or claims the context's slot and stamps it with the time of this update; returns the slot.
inline int64_t touch(const BaseArrays& base, const LearnedRows& rows, uint64_t key) {
  int64_t slot = locate(rows, key);
  if (slot < 0) slot = claim(base, rows, key);
  rows.stamps[slot] = ++rows.clock[0];
  return slot;
}

// The token's column in the row: its own, a free one, or the lightest, whose token is evicted.
inline int64_t place_of(const LearnedRows& rows, int64_t slot, int64_t token) {
  const auto tokens = rows.tokens.row(slot);
  const auto weights = rows.weights.row(slot);
  int64_t lightest = 0;
  for (int64_t i = 0; i < rows.width(); i++) {
    if (tokens[i] == token) return i;
    if (tokens[i] < 0) {
      lightest = i;
      break;
    }
    if (weights[i] < weights[lightest]) lightest = i;
  }
  tokens[lightest] = (int32_t)token;
  weights[lightest] = 0;
  return lightest;
}

// Raises one successor's weight by `increment`, up to `maximum`; adds the successor if it is new (Algorithm 2).
inline void raise_weight(const BaseArrays& base, const LearnedRows& rows, uint64_t key, int64_t token, double increment, double maximum) {
  const int64_t slot = touch(base, rows, key);
  float& weight = rows.weights(slot, place_of(rows, slot, token));
  weight = (float)std::min(weight + increment, maximum);
}

// Raises all n-grams of 2 to `order` tokens that end in the last `fresh` tokens of `text`.
inline void learn(const BaseArrays& base, const LearnedRows& rows, const Array<int32_t>& text, int64_t fresh, int64_t order,
                  double increment, double maximum) {
  for (int64_t i = std::max<int64_t>(1, text.size() - fresh); i < text.size(); i++) {
    const auto raise = [&](uint64_t key) { raise_weight(base, rows, key, text[i], increment, maximum); };
    raise(context_key(-1, -1, text[i - 1]));
    if (i >= 2 && order >= 3) raise(context_key(-1, text[i - 2], text[i - 1]));
    if (i >= 3 && order >= 4) raise(context_key(text[i - 3], text[i - 2], text[i - 1]));
  }
}

// The weight of all successors, missing ones included.
inline float total_of(const LearnedRows& rows, int64_t slot) {
  float total = rows.missing[slot];
  for (int64_t i = 0; i < rows.width(); i++) total += rows.weights(slot, i);
  return total;
}

// Moves the context's row towards a distribution: (1 - share) * row + share * `probabilities`.
inline void blend(const BaseArrays& base, const LearnedRows& rows, uint64_t key, const Array<int32_t>& ids,
                  const Array<float>& probabilities, double share) {
  const int64_t slot = touch(base, rows, key);
  const auto weights = rows.weights.row(slot);
  const double scale = (1 - share) / total_of(rows, slot);
  for (int64_t i = 0; i < weights.size(); i++) weights[i] = (float)(weights[i] * scale);
  for (int64_t k = 0; k < std::min(ids.size(), weights.size()); k++) {
    float& weight = weights[place_of(rows, slot, ids[k])];
    weight = (float)(weight + share * probabilities[k]);
  }
  double total = 0;
  for (int64_t i = 0; i < weights.size(); i++) total += weights[i];
  rows.missing[slot] = (float)std::max(0.0, 1 - total);
}

// Blends the target's distribution at every node of a verified tree, rejected nodes included, into the rows.
//
// `text` is [3], the last committed tokens (-1 = none); `tokens` and `parents` are the tree's, [N]; `ids` and `probabilities` are the
// target's likeliest tokens at the root and at each node, [N+1, K]. The longest context, of `order` - 1 tokens, takes the target's
// distribution; shorter contexts occur in many places and move half-way.
inline void absorb(const BaseArrays& base, const LearnedRows& rows, const Array<int32_t>& text, const Array<int32_t>& tokens,
                   const Array<int32_t>& parents, const Array<int32_t>& ids, const Array<float>& probabilities, int64_t order) {
  for (int64_t row = 0; row < ids.size(); row++) {
    int64_t before = text[0], previous = text[1], last = text[2];
    if (row > 0) {
      const int64_t above = parents[row - 1], upper = above >= 0 ? parents[above] : -2;
      before = upper >= 0 ? tokens[upper] : above >= 0 ? last : previous;
      previous = above >= 0 ? tokens[above] : last;
      last = tokens[row - 1];
    }
    for (int64_t length = 1; length < order; length++) {
      if ((length >= 2 && previous < 0) || (length >= 3 && before < 0)) continue;
      const uint64_t key = context_key(length == 3 ? before : -1, length >= 2 ? previous : -1, last);
      blend(base, rows, key, ids.row(row), probabilities.row(row), length == order - 1 ? 1.0 : 0.5);
    }
  }
}

// A list of successors that is filled context by context, the longest one first.
struct Successors {
  const Array<int32_t>& tokens;
  const Array<float>& probabilities;
  int64_t size = 0;
  double remaining = 1;  // the mass that is left to shorter contexts

  // Adds one successor, or its mass if a longer context (entries before `first`) already listed it.
  void put(int64_t first, int32_t token, double probability) {
    remaining -= probability;
    for (int64_t i = 0; i < first; i++)
      if (tokens[i] == token) {
        probabilities[i] = (float)(probabilities[i] + probability);
        return;
      }
    if (size == tokens.size()) return;
    tokens[size] = token;
    probabilities[size++] = (float)probability;
  }

  // Adds the successors of a context, which share the remaining mass.
  void collect(const BaseArrays& base, const LearnedRows& rows, uint64_t key) {
    const int64_t slot = locate(rows, key), first = size;
    const double share = remaining;
    if (slot >= 0) {
      const float total = total_of(rows, slot);
      for (int64_t i = 0; i < rows.width() && rows.tokens(slot, i) >= 0; i++)
        put(first, rows.tokens(slot, i), share * rows.weights(slot, i) / total);
      return;
    }
    const int64_t context = base_table::find(base, key);
    if (context < 0) return;
    for (int64_t i = base.offsets[context]; i < base.offsets[context + 1]; i++)
      put(first, base.token(i), share * (base.probabilities[i] / base_table::PROBABILITY_UNIT));
  }
};

// P(. | before, previous, last) into `tokens` and `probabilities`, likeliest first, up to their size; returns the number.
//
// Backs off from contexts of `order` - 1 tokens down to one: a row's missing mass is distributed by the row of the next shorter
// context. Ties keep table order.
inline int64_t successors(const BaseArrays& base, const LearnedRows& rows, int64_t before, int64_t previous, int64_t last, int64_t order,
                          const Array<int32_t>& tokens, const Array<float>& probabilities) {
  Successors list{tokens, probabilities};
  if (order >= 4 && before >= 0) list.collect(base, rows, context_key(before, previous, last));
  if (order >= 3 && previous >= 0 && list.remaining > 0) list.collect(base, rows, context_key(-1, previous, last));
  if (list.remaining > 0) list.collect(base, rows, context_key(-1, -1, last));
  for (int64_t i = 1; i < list.size; i++) {  // insertion sort: short, nearly sorted
    const int32_t token = tokens[i];
    const float probability = probabilities[i];
    int64_t j = i;
    for (; j > 0 && probabilities[j - 1] < probability; j--) tokens[j] = tokens[j - 1], probabilities[j] = probabilities[j - 1];
    tokens[j] = token;
    probabilities[j] = probability;
  }
  return list.size;
}

}  // namespace learned_table
}  // namespace outrider
