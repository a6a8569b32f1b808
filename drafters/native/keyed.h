// Sampling with keyed noise.
#pragma once
#include "dice.h"

namespace outrider::keyed {

// The token whose score has the largest sum with its noise; the smaller id of equal ones.
inline int64_t largest(uint64_t seed, int64_t position, const Array<float>& scores) {
  const uint64_t key = dice::position_key(seed, position);
  int64_t best = 0;
  double most = -INFINITY;
  for (int64_t token = 0; token < scores.size(); token++) {
    if (!(scores[token] > -INFINITY)) continue;
    const double score = scores[token] - std::log(dice::exponential(dice::random_bits(key, token)));
    if (score > most) best = token, most = score;
  }
  return best;
}

}  // namespace outrider::keyed
