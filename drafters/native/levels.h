// Levels: the successors that each source lists for a context, longest context first.
#pragma once
#include "contexts.h"

namespace outrider {

// Preallocated buffers for one prediction. `W` holds the successors of all levels, one level after another.
struct Scratch {
  Array<int64_t> tokens;                        // [W]
  Array<double> counts;                         // [W]
  Array<int64_t> starts;                        // [levels + 1]; level i lists [starts[i], starts[i + 1]); starts[0] = 0
  Array<int64_t> buckets;                       // [levels]; entry of the trust table
  Array<double> discounts, norms;               // [levels]; q(t) = (count - discount) / norm
  Array<int64_t> level_lengths, level_sources;  // [levels]
  Array<int32_t> index_of;                      // [V]; a token's index in `out`
  Array<int64_t> out;                           // [MAX_SUCCESSORS]; predicted tokens
  Array<double> probability;                    // [MAX_SUCCESSORS]
  Array<int64_t> out_length, out_source;        // [MAX_SUCCESSORS]; context length and source of the first level that listed the token
  Array<int64_t> out_agreement;                 // [MAX_SUCCESSORS]; bit 0: a corpus listed the token, bit 1: the session did
  Array<int64_t> recent;                        // [3]; the session's empty context: text size when counted, successors, occurrences
  Array<int64_t> recent_tokens;                 // [MAX_RECENT]; its successors, shared by all nodes of a tree
  Array<double> recent_counts;                  // [MAX_RECENT]
  Array<int32_t> row_tokens;                    // [S]; successors in the tri-gram table
  Array<float> row_probabilities;               // [S]
};

namespace levels {

using contexts::LENGTHS;

// Luck is a source, but no level.
enum { CORPUS, SESSION, TABLE, PREDICTED, COPY, LUCK };
// Contexts share a bucket of trust by how often they occurred, and by the distinct successors per occurrence, if they have several.
constexpr int64_t SIZE_EDGES[] = {1, 2, 3, 5, 9, 20, 100};
constexpr double DIVERSITY_EDGES[] = {0.0, 0.125, 0.25, 0.5, 0.75};
constexpr int64_t SIZES = 8, DIVERSITIES = 6;
// The table's n-grams are bi-grams and tri-grams.
constexpr int64_t TABLE_ORDER = 3;
// This is subtracted from each count, for contexts that occurred more than once (absolute discounting).
constexpr double DISCOUNT = 0.5;
enum { RECENT_AT, RECENT_FOUND, RECENT_TOTAL };

// The `Source` of nodes from a level's source.
inline int64_t node_source(int64_t source) {
  constexpr uint8_t SOURCES[] = {RETRIEVAL, LOOKUP, TRIGRAM, PREDICTION, LOOKUP, NOISE};
  return SOURCES[source];
}

// The row-major index into the trust table [5, LENGTHS, SIZES, DIVERSITIES].
inline int64_t index(int64_t source, int64_t length, int64_t size, int64_t diversity) {
  return ((source * LENGTHS + length) * SIZES + size) * DIVERSITIES + diversity;
}

// The trust table's entry for a context that occurred `total` times with `distinct` successors.
inline int64_t bucket(int64_t source, int64_t length, double total, int64_t distinct) {
  int64_t size = 0, diversity = 0;
  for (const int64_t edge : SIZE_EDGES) size += total > edge;
  for (const double ratio : DIVERSITY_EDGES) diversity += distinct > 1 && distinct > ratio * total;
  return index(source, length, size, diversity);
}

// The levels of one context, as they are listed.
struct Listing {
  const Sources& sources;
  const Contexts& contexts;
  const int64_t row;
  const Scratch& scratch;
  int64_t level = 0;  // number of levels

  int64_t begin() const { return scratch.starts[level]; }

  // Records a level, whose successors end at `end` in the buffers. `entry` is that of the trust table.
  void put(int64_t end, int64_t source, int64_t length, int64_t entry, double discount, double norm) {
    scratch.starts[level + 1] = end;
    scratch.buckets[level] = entry;
    scratch.discounts[level] = discount;
    scratch.norms[level] = norm;
    scratch.level_lengths[level] = length;
    scratch.level_sources[level++] = source;
  }

  // Records a level of `distinct` successors that were counted `total` times.
  void add(int64_t end, int64_t source, int64_t length, int64_t total, int64_t distinct) {
    const double discount = total > 1 && total > DISCOUNT * distinct ? DISCOUNT : 0;
    put(end, source, length, bucket(source, length, (double)total, distinct), discount, total - discount * distinct);
  }

  // Level 0: the next `token` of the client's prediction after `run` matched tokens.
  void prediction(int64_t token, int64_t run) {
    scratch.tokens[0] = token;
    scratch.counts[0] = 1;
    put(1, PREDICTED, 0, bucket(PREDICTED, 0, (double)std::min<int64_t>(run + 1, 101), 1), 0, 1);
  }

  // The next token of the span that is copied.
  void copy(const Array<int64_t>& copy) {
    const auto& text = sources.history.text;
    scratch.tokens[begin()] = text[copy[history::POSITION] & (text.size() - 1)];
    scratch.counts[begin()] = 1;
    const auto [phase, run, changes] = history::copy_phase(copy);
    const int64_t entry = index(COPY, phase, std::min(run, SIZES - 1), std::min(changes, DIVERSITIES - 1));
    put(begin() + 1, COPY, suffix::LONGEST_CONTEXT, entry, 0, 1);
  }

  // The tri-gram table's distribution as one level. Its trust depends on the likeliest token's probability and on the mass that the
  // table leaves to other tokens.
  void table() {
    const int64_t previous = contexts.last(row, 0), last = contexts.last(row, 1);
    if (last < 0) return;
    const auto& tokens = scratch.row_tokens;
    const auto& probabilities = scratch.row_probabilities;
    const int64_t found = learned_table::successors(sources.base, sources.rows, -1, previous, last, TABLE_ORDER, tokens, probabilities);
    if (!found || probabilities[0] <= 0) return;
    double mass = 0;
    for (int64_t i = 0; i < found; i++) {
      scratch.tokens[begin() + i] = tokens[i];
      scratch.counts[begin() + i] = probabilities[i];
      mass += probabilities[i];
    }
    const int64_t size = std::min(SIZES - 1, (int64_t)((double)probabilities[0] * SIZES));
    const int64_t diversity = std::min(DIVERSITIES - 1, (int64_t)((1 - std::min(1.0, mass)) * DIVERSITIES));
    put(begin() + found, TABLE, TABLE_ORDER - 1, index(TABLE, 0, size, diversity), 0, mass);
  }

  // `followers` of the empty context, counted once per step: all nodes of a tree share it.
  Pair recent() const {
    const auto& recent = scratch.recent;
    if (recent[RECENT_AT] != sources.history.size[0]) {
      const auto [found, total] = history::followers(sources.history, 0, 0, scratch.recent_tokens, scratch.recent_counts, 0);
      recent[RECENT_FOUND] = found;
      recent[RECENT_TOTAL] = total;
      recent[RECENT_AT] = sources.history.size[0];
    }
    for (int64_t i = 0; i < recent[RECENT_FOUND]; i++) {
      scratch.tokens[begin() + i] = scratch.recent_tokens[i];
      scratch.counts[begin() + i] = scratch.recent_counts[i];
    }
    return {begin() + recent[RECENT_FOUND], recent[RECENT_TOTAL]};
  }

  // The successors of a corpus's range.
  void corpus(const Corpus& corpus, int64_t low, int64_t high, int64_t length) {
    using suffix::word;
    const int64_t start = begin();
    int64_t end = start, total = 0;
    if (high - low > suffix::DENSE) {
      const int64_t frequent = suffix::frequent_row(corpus, low, length);
      if (frequent < 0) return;
      const int64_t at = corpus.rows + frequent * suffix::ROW, distinct = word(corpus, at + suffix::DISTINCT);
      const int64_t first = at + suffix::SUCCESSORS;
      for (int64_t entry = first; entry < first + 3 * std::min(distinct, suffix::WIDTH); entry += 3) {
        scratch.tokens[end] = word(corpus, entry);
        scratch.counts[end++] = (double)word(corpus, entry + 1);
      }
      if (end > start) add(end, CORPUS, length, word(corpus, at + suffix::TOTAL), distinct);
      return;
    }
    for (int64_t index = low; index < high; index++) {
      const int64_t token = suffix::token_at(corpus, suffix::position_at(corpus, index) + length);
      if (token < 0 || token == corpus.separator) continue;
      total++;
      if (end > start && scratch.tokens[end - 1] == token) scratch.counts[end - 1] += 1;
      else scratch.tokens[end] = token, scratch.counts[end++] = 1;
    }
    if (end > start) add(end, CORPUS, length, total, end - start);
  }
};

// Lists the levels of a context, longest first, until less than `min_mass` mass remains; returns their number.
//
// A session level is skipped if the next longer one had as many occurrences, a corpus level if the next longer range is the same: it
// would repeat the same successors.
inline int64_t levels(const Sources& sources, const Contexts& contexts, int64_t row, const Scratch& scratch, double min_mass) {
  Listing listing{sources, contexts, row, scratch};
  const auto size_of = [&](int64_t c, int64_t length) { return contexts.high(row, c, length) - contexts.low(row, c, length); };
  const int32_t index = contexts.expected(row, 0);
  if (0 < index && index <= sources.expected[0]) listing.prediction(sources.expected[index], contexts.expected(row, 1));
  if (contexts.copy(row)[history::POSITION] >= 0) listing.copy(contexts.copy(row));
  const bool has_table = sources.rows.clock[0] > 0 || sources.corpora[0].size == 0;
  double remaining = 1;
  int64_t weighed = 0, session_total = -1;
  for (int64_t length = LENGTHS - 1; length >= 0; length--) {
    if (length == TABLE_ORDER - 1 && has_table) listing.table();
    const int64_t begin = listing.begin();
    const auto [end, total] =
        length ? history::followers(sources.history, length, contexts.hashes(row, length), scratch.tokens, scratch.counts, begin)
               : listing.recent();
    if (end > begin && total != session_total) {
      listing.add(end, SESSION, length, total, end - begin);
      session_total = total;
    }
    for (int64_t c = 0; c < contexts.low.shape[1]; c++)
      if (size_of(c, length) > (length + 1 < LENGTHS ? size_of(c, length + 1) : 0))
        listing.corpus(sources.corpora[c], contexts.low(row, c, length), contexts.high(row, c, length), length);
    for (; weighed < listing.level; weighed++) {
      const int64_t entry = scratch.buckets[weighed];
      remaining *= 1 - sources.hits[entry] / sources.tries[entry];
    }
    if (remaining < min_mass) break;
  }
  return listing.level;
}

}  // namespace levels
}  // namespace outrider
