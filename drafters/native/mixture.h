// P(next token) from counts alone: all levels of a context, interpolated by learned trust.
#pragma once
#include <cmath>

#include "levels.h"

namespace outrider::mixture {

// Probabilities are divided into cells by powers of two.
constexpr int64_t POWERS = 12, MAX_SUCCESSORS = 512;
// Shorter contexts are skipped once less mass remains.
constexpr double MIN_MASS = 1e-3, MAX_BOOST = 6;

// P(. | context `row`) into `scratch.out` and `scratch.probability`, unsorted; returns the number of tokens.
inline int64_t predict(const Sources& sources, const Contexts& contexts, int64_t row, const Scratch& scratch, double min_mass) {
  const int64_t count = levels::levels(sources, contexts, row, scratch, min_mass);
  int64_t size = 0;
  double remaining = 1;
  for (int64_t level = 0; level < count; level++) {
    const double trust = sources.hits[scratch.buckets[level]] / sources.tries[scratch.buckets[level]];
    const double share = remaining * trust / scratch.norms[level], discount = scratch.discounts[level];
    const int64_t source = scratch.level_sources[level], length = scratch.level_lengths[level];
    const int64_t bit = source == levels::COPY ? levels::SESSION + 1 : source <= levels::SESSION ? source + 1 : 0;
    for (int64_t i = scratch.starts[level], end = scratch.starts[level + 1]; i < end; i++) {
      const int64_t token = scratch.tokens[i];
      int64_t x = scratch.index_of[token];
      if (x >= size || scratch.out[x] != token) {
        if (size == MAX_SUCCESSORS) continue;
        x = size++;
        scratch.index_of[token] = (int32_t)x;
        scratch.out[x] = token;
        scratch.probability[x] = 0;
        scratch.out_length[x] = length;
        scratch.out_source[x] = source;
        scratch.out_agreement[x] = 0;
      }
      scratch.out_agreement[x] |= bit;
      scratch.probability[x] += share * (scratch.counts[i] - discount);
    }
    remaining *= 1 - trust;
  }
  return size;
}

// The boost table's entry for predicted token `x`: by context length, agreement, and power of two of P(t).
inline int64_t cell(const Scratch& scratch, int64_t x) {
  int exponent;
  std::frexp(scratch.probability[x], &exponent);
  const int64_t power = std::max<int64_t>(0, std::min<int64_t>(POWERS - 1, -exponent));
  return (scratch.out_length[x] * 4 + scratch.out_agreement[x]) * POWERS + power;
}

// Appends a token to row 0 and the history, and updates the trust of every level; returns the natural logarithm of the probability
// that the mixture gave the token.
//
// Trust is the mean of a level's responsibilities: the probability that it, and no shorter context, gave the token. All tokens
// count, also those that a longer context gave; EM would weigh each by the probability that the level was reached.
inline double commit(const Sources& sources, const Contexts& contexts, const Scratch& scratch, int64_t token) {
  double probability = 1e-6;
  for (int64_t level = levels::levels(sources, contexts, 0, scratch, MIN_MASS) - 1; level >= 0; level--) {
    double q = 0;
    for (int64_t i = scratch.starts[level], end = scratch.starts[level + 1]; i < end; i++)
      if (scratch.tokens[i] == token) {
        q = (scratch.counts[i] - scratch.discounts[level]) / scratch.norms[level];
        break;
      }
    double &hits = sources.hits[scratch.buckets[level]], &tries = sources.tries[scratch.buckets[level]];
    const double trust = hits / tries, mixed = trust * q + (1 - trust) * probability;
    hits += trust * q / mixed;
    tries += 1;
    probability = mixed;
  }
  history::append(sources.history, contexts.hashes.row(0), token);
  contexts::advance(sources, contexts, 0, token, 0);
  history::find_copy(sources.history, contexts.hashes(0, suffix::LONGEST_CONTEXT), contexts.copy(0));
  return std::log(probability);
}

}  // namespace outrider::mixture
