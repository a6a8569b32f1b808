// A session's own text, indexed by its contexts of up to LONGEST_CONTEXT tokens, and copies of its earlier spans.
#pragma once
#include "suffix.h"

namespace outrider {

// Ring buffer of C tokens, C a power of two. A position counts from the start of the session's text.
struct History {
  Array<int32_t> text;     // [C]
  Array<int64_t> size;     // [3]; tokens appended, and the last departure that left out tokens: the token before it, their number
  Array<int64_t> newest;   // [L+1, 2C]; by context length and hash: the latest position after such a context, -1 = none
  Array<int64_t> older;    // [L+1, C]; the previous position in the same chain
  Array<uint64_t> hashes;  // [L+1, C]; hashes of the contexts before the position
};

namespace history {

using suffix::LONGEST_CONTEXT;

// This many of the latest occurrences of a context are read; the empty context has its own limit, because its successors are the
// latest tokens.
constexpr int64_t MAX_OCCURRENCES = 8, MAX_RECENT = 128;
// The state of a copy: the position of the next token to copy, -1 = none; the tokens matched in a row; the departures; the tokens
// without a match since the last one; the tokens skipped before the position.
enum { POSITION, RUN, CHANGES, GAP, SKIPPED };
// This many matched tokens are compared to choose the span to copy.
constexpr int64_t LONGEST_COPY = 32;
// After this many matches in a row, the number of departures is reset.
constexpr int64_t SETTLED = 16;
// Classes of copies are separated by these numbers of matched tokens.
constexpr int64_t RUN_EDGES[] = {6, 8, 11, 15, 20, 28, 31};
// A copy ends after more tokens in a row that do not match. A departure may leave out REACH tokens of the span.
constexpr int64_t MAX_GAP = 8, REACH = 12;

inline int64_t slot_of(const History& history, uint64_t key) { return (int64_t)(key >> 33) & (2 * history.text.size() - 1); }

// Updates the hashes of the last 0, 1, 2 ... tokens for one more `token`; `after` may be `before`.
inline void extend_hashes(const Array<uint64_t>& before, int64_t token, const Array<uint64_t>& after) {
  for (int64_t length = after.size() - 1; length > 0; length--) {
    uint64_t x = length > 1 ? before[length - 1] : 0;
    x = (x + (uint64_t)token + 1) * 0x9E3779B97F4A7C15;
    after[length] = x ^ (x >> 29);
  }
  after[0] = 0;
}

// Appends a token; `hashes` are those of the contexts before it.
inline void append(const History& history, const Array<uint64_t>& hashes, int64_t token) {
  const int64_t position = history.size[0], at = position & (history.text.size() - 1);
  for (int64_t length = 0; length < hashes.size(); length++) {
    int64_t& newest = history.newest(length, slot_of(history, hashes[length]));
    history.hashes(length, at) = hashes[length];
    history.older(length, at) = newest;
    newest = position;
  }
  history.text[at] = (int32_t)token;
  history.size[0] = position + 1;
}

// Counts the successors of the context with hash `key` at its latest occurrences, into `tokens` and `counts` from `start` on; returns
// the index after the last, and the number of occurrences.
inline Pair followers(const History& history, int64_t length, uint64_t key, const Array<int64_t>& tokens, const Array<double>& counts,
                      int64_t start) {
  const int64_t mask = history.text.size() - 1, oldest = history.size[0] - history.text.size();
  const int64_t most = length ? MAX_OCCURRENCES : MAX_RECENT;
  int64_t position = history.newest(length, slot_of(history, key)), end = start, total = 0;
  while (position >= 0 && position >= oldest && total < most) {
    const int64_t at = position & mask;
    if (history.hashes(length, at) == key) {
      const int32_t token = history.text[at];
      total++;
      int64_t i = start;
      while (i < end && tokens[i] != token) i++;
      if (i == end) tokens[end] = token, counts[end++] = 0;
      counts[i] += 1;
    }
    const int64_t older = history.older(length, at);
    if (older >= position) break;  // newer text has overwritten it
    position = older;
  }
  return {end, total};
}

// Starts a copy where the longest match of the text's end occurred before, if that is longer than the copy's own match. `key` is the
// hash of the last LONGEST_CONTEXT tokens.
inline void find_copy(const History& history, uint64_t key, const Array<int64_t>& copy) {
  const auto& text = history.text;
  const int64_t size = history.size[0], mask = text.size() - 1;
  int64_t length = copy[POSITION] >= 0 ? copy[RUN] : 0, position = history.newest(LONGEST_CONTEXT, slot_of(history, key));
  for (int64_t i = 0; i < MAX_OCCURRENCES; i++) {
    if (length >= LONGEST_COPY || position < LONGEST_CONTEXT || position <= size - text.size() + LONGEST_COPY) break;
    if (history.hashes(LONGEST_CONTEXT, position & mask) == key) {
      int64_t run = LONGEST_CONTEXT;
      while (run < std::min(position, LONGEST_COPY) && text[(position - 1 - run) & mask] == text[(size - 1 - run) & mask]) run++;
      if (run > length) {
        length = run;
        copy[POSITION] = position;
        copy[RUN] = run;
        copy[CHANGES] = copy[GAP] = copy[SKIPPED] = 0;
      }
    }
    position = history.older(LONGEST_CONTEXT, position & mask);
  }
}

// The place of `token` in the REACH tokens after `position`, or else in the `back` tokens before it, or else `position`.
inline int64_t nearest(const History& history, int64_t position, int64_t back, int64_t token, int64_t end) {
  const int64_t mask = history.text.size() - 1;
  for (int64_t place = position + 1; place < std::min(position + 1 + REACH, end); place++)
    if (history.text[place & mask] == token) return place;
  for (int64_t place = position - 1; place > std::max<int64_t>(-1, position - 1 - back); place--)
    if (history.text[place & mask] == token) return place;
  return position;
}

// Updates the state of a copy for one more `token`, which follows `previous`; `after` may be `before`.
//
// A departure left tokens of the span out, or inserted tokens, or else is taken to replace one token by another. The same number of
// tokens is skipped again after the next token like that before the last omission, as with line numbers in a listing of the file.
// `token` is the end of the history if `committed`, otherwise part of a draft.
inline void follow_copy(const History& history, const Array<int64_t>& before, int64_t previous, int64_t token, const Array<int64_t>& after,
                        bool committed) {
  int64_t position = after[POSITION] = before[POSITION];
  if (position < 0) return;
  int64_t run = before[RUN], changes = before[CHANGES], gap = before[GAP], skipped = before[SKIPPED];
  const int64_t capacity = history.text.size(), end = history.size[0] - committed;
  if (history.text[position & (capacity - 1)] == token) {
    run++;
    gap = skipped = 0;
    if (run >= SETTLED) changes = 0;
    if (token == history.size[1] && position + 1 + history.size[2] < end) skipped = history.size[2];
    position += 1 + skipped;
  } else {
    const int64_t found = nearest(history, position, gap + skipped, token, end);
    if (found != position && committed && gap == 0) {
      history.size[1] = previous;
      history.size[2] = std::max<int64_t>(0, found - position + skipped);
    }
    run = found == position ? 0 : 1;
    gap = found == position ? gap + 1 : 0;
    changes++;
    skipped = 0;
    position = found + 1;
  }
  const int64_t oldest = std::max<int64_t>(0, history.size[0] - capacity + LONGEST_COPY);
  if (gap > MAX_GAP || position < oldest || position >= history.size[0]) position = -1;
  after[POSITION] = position;
  after[RUN] = run;
  after[CHANGES] = changes;
  after[GAP] = gap;
  after[SKIPPED] = skipped;
}

// The properties of a copy that its trust depends on.
struct Phase {
  int64_t phase, run, changes;  // the matched tokens or their class
};

// Phase 1 has the first tokens after a departure, phase 2 the first after a skip, phase 0 all others.
inline Phase copy_phase(const Array<int64_t>& copy) {
  const int64_t run = copy[RUN], changes = copy[CHANGES];
  if (copy[SKIPPED] == 0 && changes > 0 && run < LONGEST_CONTEXT) return {1, run, run == 0 ? copy[GAP] : changes - 1};
  int64_t size = 0;
  for (const int64_t edge : RUN_EDGES) size += run > edge;
  return {copy[SKIPPED] ? 2 : 0, size, changes};
}

}  // namespace history
}  // namespace outrider
