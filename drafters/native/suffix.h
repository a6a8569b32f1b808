// A corpus index: a suffix array, and precomputed successor counts of frequent contexts.
#pragma once
#include <vector>

#include "pages.h"

namespace outrider {

// One corpus block: arrays of 32-bit words at offsets in `pages`, as `outrider.drafters.tables.suffix.Corpus` describes them.
struct Corpus {
  Pages pages;
  int64_t size;       // T
  int64_t separator;  // larger than all token ids
  int64_t narrow;     // 1 = two tokens per word
  int64_t slot_count;
  int64_t tokens, order, first, slots, rows;  // offsets
};

namespace suffix {

// The successors of frequent contexts of up to this many tokens are precomputed.
constexpr int64_t LONGEST_CONTEXT = 6;
// A context with more occurrences is frequent; WIDTH successors are stored for it.
constexpr int64_t DENSE = 32, WIDTH = 16, NONE = 0xFFFFFFFF;
constexpr int64_t DISTINCT = 0, TOTAL = 1, SUCCESSORS = 2, ROW = SUCCESSORS + 3 * WIDTH;

inline int64_t word(const Corpus& corpus, int64_t at) { return pages::word(corpus.pages, at); }

// The text's token at `position`; -1 beyond the text.
inline int64_t token_at(const Corpus& corpus, int64_t position) {
  if (position < 0 || position >= corpus.size) return -1;
  if (!corpus.narrow) return word(corpus, corpus.tokens + position);
  return (word(corpus, corpus.tokens + (position >> 1)) >> (16 * (position & 1))) & 0xFFFF;
}

// The text position at `index` of the suffix array.
inline int64_t position_at(const Corpus& corpus, int64_t index) { return word(corpus, corpus.order + index); }

// Token number `length` of the suffix at `index` of the suffix array; -1 beyond the text.
inline int64_t token_of(const Corpus& corpus, int64_t index, int64_t length) {
  return token_at(corpus, position_at(corpus, index) + length);
}

// The part of a context's range [low, high) where `token` follows, by bisection; `length` is the context's length.
inline Pair search(const Corpus& corpus, int64_t low, int64_t high, int64_t length, int64_t token) {
  int64_t a = low, b = high;
  while (a < b) {
    const int64_t middle = (a + b) >> 1;
    if (token_of(corpus, middle, length) < token) a = middle + 1;
    else b = middle;
  }
  const int64_t start = a;
  int64_t step = 1;
  while (a + step < high && token_of(corpus, a + step, length) <= token) step *= 2;
  b = std::min(high, a + step);
  while (a < b) {
    const int64_t middle = (a + b) >> 1;
    if (token_of(corpus, middle, length) <= token) a = middle + 1;
    else b = middle;
  }
  return {start, a};
}

// The first slot to probe for a frequent context.
inline int64_t home(int64_t low, int64_t length, int64_t slots) {
  const uint64_t mixed = (uint64_t)(low * 8 + length) * 0x9E3779B97F4A7C15;
  return (int64_t)((mixed >> 30) & (uint64_t)(slots - 1));
}

// The row of the frequent context of `length` tokens whose range starts at `low`, or -1.
inline int64_t frequent_row(const Corpus& corpus, int64_t low, int64_t length) {
  int64_t slot = home(low, length, corpus.slot_count);
  for (int64_t i = 0; i < corpus.slot_count; i++) {
    const int64_t at = corpus.slots + 2 * slot, start = word(corpus, at), row = word(corpus, at + 1);
    if (row == NONE) return -1;
    if (start == low && (row & 7) == length) return row >> 3;
    slot = (slot + 1) & (corpus.slot_count - 1);
  }
  return -1;
}

// The part of a context's range [low, high) where `token` follows; `length` is the context's length.
inline Pair narrow(const Corpus& corpus, int64_t low, int64_t high, int64_t length, int64_t token) {
  if (length == 0) {
    if (token < 0 || token >= corpus.separator) return {0, 0};
    return {word(corpus, corpus.first + token), word(corpus, corpus.first + token + 1)};
  }
  const int64_t row = high - low > DENSE && length <= LONGEST_CONTEXT ? frequent_row(corpus, low, length) : -1;
  if (row >= 0) {
    const int64_t at = corpus.rows + row * ROW, distinct = word(corpus, at + DISTINCT);
    for (int64_t entry = at + SUCCESSORS; entry < at + SUCCESSORS + 3 * std::min(distinct, WIDTH); entry += 3)
      if (word(corpus, entry) == token) {
        const int64_t start = word(corpus, entry + 2);
        return {start, start + word(corpus, entry + 1)};
      }
    if (distinct <= WIDTH) return {0, 0};  // the row has all successors
  }
  return search(corpus, low, high, length, token);
}

// Updates the ranges of a text's last 0, 1, 2 ... tokens for one more `token`; may update in place.
inline void follow(const Corpus& corpus, const Array<int64_t>& low, const Array<int64_t>& high, int64_t token,
                   const Array<int64_t>& next_low, const Array<int64_t>& next_high) {
  for (int64_t length = low.size() - 1; length > 0; length--) {
    Pair range = {low[length - 1], high[length - 1]};
    if (token >= corpus.separator)  // the corpus's vocabulary does not have it
      range = {0, 0};
    else if (length == 1) range = {0, corpus.size};
    if (range.first < range.second) range = narrow(corpus, range.first, range.second, length - 1, token);
    next_low[length] = range.first;
    next_high[length] = std::max(range.first, range.second);
  }
  next_low[0] = 0;
  next_high[0] = corpus.size;
}

// The end of the run of equal tokens that starts at `low`.
inline int64_t run(const Corpus& corpus, int64_t low, int64_t high, int64_t length) {
  const int64_t token = token_of(corpus, low, length);
  if (length == 0) return word(corpus, corpus.first + token + 1);
  int64_t end = low + 1;
  while (end < high && token_of(corpus, end, length) == token) end++;
  return end;
}

struct Successor {
  int64_t token, count, start;
};

// Writes row `row` of a frequent context and enters it in the hash table. Sorts the successors.
inline void write_row(const Array<uint32_t>& slots, const Array<uint32_t>& rows, int64_t row, int64_t low, int64_t length,
                      std::vector<Successor>& successors) {
  int64_t slot = home(low, length, slots.size());
  while (slots(slot, 1) != NONE) slot = (slot + 1) & (slots.size() - 1);
  slots(slot, 0) = (uint32_t)low;
  slots(slot, 1) = (uint32_t)(row * 8 + length);
  int64_t total = 0;
  for (const Successor& each : successors) total += each.count;
  rows(row, DISTINCT) = (uint32_t)successors.size();
  rows(row, TOTAL) = (uint32_t)total;
  // Stable: on ties the smaller token first.
  std::stable_sort(successors.begin(), successors.end(), [](const auto& one, const auto& other) { return one.count > other.count; });
  for (int64_t i = 0; i < std::min((int64_t)successors.size(), WIDTH); i++) {
    const int64_t entry = SUCCESSORS + 3 * i;
    rows(row, entry) = (uint32_t)successors[i].token;
    rows(row, entry + 1) = (uint32_t)successors[i].count;
    rows(row, entry + 2) = (uint32_t)successors[i].start;
  }
}

// Visits all frequent contexts, writes their rows unless `rows` is empty, and returns their number.
inline int64_t count_frequent(const Corpus& corpus, const Array<uint32_t>& slots, const Array<uint32_t>& rows) {
  struct Context {
    int64_t low, high, length;
  };
  std::vector<Successor> successors;
  std::vector<Context> stack = {{0, corpus.size, 0}};
  int64_t found = 0;
  for (; !stack.empty(); found++) {
    const auto [low, high, length] = stack.back();
    stack.pop_back();
    successors.clear();
    for (int64_t i = low, end; i < high; i = end) {
      const int64_t token = token_of(corpus, i, length);
      end = length && token >= 0 ? search(corpus, i, high, length, token).second : run(corpus, i, high, length);
      if (token < 0 || token >= corpus.separator) continue;
      successors.push_back({token, end - i, i});
      if (end - i > DENSE && length < LONGEST_CONTEXT) stack.push_back({i, end, length + 1});
    }
    if (rows.size()) write_row(slots, rows, found, low, length, successors);
  }
  return found;
}

}  // namespace suffix
}  // namespace outrider
