// Contexts: where the committed text, and each draft node after it, stands in every source that predicts tokens.
#pragma once
#include "history.h"
#include "learned_table.h"

namespace outrider {

// The data that predictions are made from.
struct Sources {
  List<Corpus> corpora;  // at least one while a request runs; may be empty texts
  History history;
  BaseArrays base;
  LearnedRows rows;
  Array<int32_t> expected;    // [M+1]; the length M of the client's prediction, then its tokens
  Array<double> hits, tries;  // [BUCKETS]; trust = hits / tries
  Array<double> boost;        // [CELLS]; read-only
};

// The position of each context in each source. Row 0 is the committed text; further rows are draft nodes.
struct Contexts {
  Array<int64_t> low, high;  // [N, corpora, LENGTHS]; suffix-array ranges of the last 0, 1, 2 ... tokens
  Array<uint64_t> hashes;    // [N, LENGTHS]; of the last 0, 1, 2 ... tokens
  Array<int64_t> last;       // [N, 2 + COPY_STATE]; the last two tokens, -1 = none, and the copy
  Array<int32_t> expected;   // [N, 2]; index into `Sources.expected`, 0 = not aligned; tokens matched in a row

  Array<int64_t> copy(int64_t row) const { return last.row(row).from(2); }
};

namespace contexts {

// Contexts have 0 to LONGEST_CONTEXT tokens.
constexpr int64_t LENGTHS = suffix::LONGEST_CONTEXT + 1;

// Makes row `target` the context of row `source` followed by `token`; both may be the same row. Row 0 takes tokens that are in the
// history.
inline void advance(const Sources& sources, const Contexts& contexts, int64_t source, int64_t token, int64_t target) {
  const auto& low = contexts.low;
  const auto& high = contexts.high;
  for (int64_t c = 0; c < sources.corpora.size; c++)
    suffix::follow(sources.corpora[c], low.row(source, c), high.row(source, c), token, low.row(target, c), high.row(target, c));
  history::extend_hashes(contexts.hashes.row(source), token, contexts.hashes.row(target));
  const int64_t previous = contexts.last(source, 1);
  history::follow_copy(sources.history, contexts.copy(source), previous, token, contexts.copy(target), target == 0);
  contexts.last(target, 0) = previous;
  contexts.last(target, 1) = token;
  const int32_t index = contexts.expected(source, 0), run = contexts.expected(source, 1);
  const bool agrees = 0 < index && index <= sources.expected[0] && sources.expected[index] == token;
  contexts.expected(target, 0) = agrees ? index + 1 : 0;
  contexts.expected(target, 1) = agrees ? run + 1 : 0;
}

// Sets context row 0 to a text that ends with `ending`, without learning from it.
inline void enter(const Sources& sources, const Contexts& contexts, const Array<int32_t>& ending) {
  for (int64_t c = 0; c < contexts.low.shape[1]; c++)
    for (int64_t length = 0; length < LENGTHS; length++) contexts.low(0, c, length) = contexts.high(0, c, length) = 0;
  for (int64_t length = 0; length < LENGTHS; length++) contexts.hashes(0, length) = 0;
  for (int64_t i = 0; i < contexts.last.shape[1]; i++) contexts.last(0, i) = -1;
  contexts.expected(0, 0) = contexts.expected(0, 1) = 0;
  for (int64_t c = 0; c < sources.corpora.size; c++) contexts.high(0, c, 0) = sources.corpora[c].size;
  for (int64_t i = 0; i < ending.size(); i++) advance(sources, contexts, 0, ending[i], 0);
}

}  // namespace contexts
}  // namespace outrider
