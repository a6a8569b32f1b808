// Passes over a row of logits, [count] float32: the likeliest tokens, and the tokens that keyed sampling may choose.
#include <algorithm>
#include <vector>

#include "vector.h"

using namespace outrider;

namespace {

// The largest value, or NaN if any is NaN.
float maximum(const float* values, int count) {
  Floats most = all(-INFINITY);
  Ints ordered = all_ints(-1);
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Floats next = load(values + i);
    most = larger(next, most);
    ordered &= next == next;
  }
  float found = largest(most);
  for (int lane = 0; lane < LANES; lane++)
    if (!ordered[lane]) return NAN;
  for (; i < count; i++) {
    if (std::isnan(values[i])) return NAN;
    found = std::max(found, values[i]);
  }
  return found;
}

// Calls `use(i)` for each i with values[i] >= bound(), in their order; the bound may rise meanwhile.
template <class Bound, class Use>
void at_least(const float* values, int count, const Bound& bound, const Use& use) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Ints reached = load(values + i) >= all(bound());
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= reached[lane];
    if (!any) continue;
    for (int lane = i; lane < i + LANES; lane++)
      if (values[lane] >= bound()) use(lane);
  }
  for (; i < count; i++)
    if (values[i] >= bound()) use(i);
}

// 53 random bits of a token: splitmix64, as `_random_bits` in verify/sampling/sampler.py.
inline uint64_t random_bits(uint64_t key, uint64_t token) {
  uint64_t x = token * 0x9E3779B97F4A7C15u + key;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return (x ^ (x >> 31)) >> 11;
}

double noise(uint64_t bits) { return -std::log(-std::log(((double)bits + 0.5) * 0x1p-53)); }

}  // namespace

extern "C" {

// The `most` likeliest tokens of each row [count], and their probabilities, the likeliest first; of equal ones, the smaller id.
void outrider_likeliest(const float* logits, int32_t rows, int32_t count, int32_t most, int32_t* ids, float* probabilities) {
  for (int row = 0; row < rows; row++, logits += count, ids += most, probabilities += most) {
    int held = 0;
    std::fill(ids, ids + most, 0);  // for a row of NaN
    at_least(
        logits, count, [&] { return held < most ? -INFINITY : std::nextafter(logits[ids[most - 1]], INFINITY); },
        [&](int token) {
          int place = held < most ? held++ : most - 1;
          for (; place > 0 && logits[ids[place - 1]] < logits[token]; place--) ids[place] = ids[place - 1];
          ids[place] = token;
        });
    const float top = logits[ids[0]];
    Floats sums{};
    int i = 0;
    for (; i + LANES <= count; i += LANES) sums += exponential(load(logits + i) - all(top));
    float mass = 0;
    for (int lane = 0; lane < LANES; lane++) mass += sums[lane];
    for (; i < count; i++) mass += std::exp(logits[i] - top);
    for (int k = 0; k < most; k++) probabilities[k] = std::exp(logits[ids[k]] - top) / mass;
  }
}

// Tokens of one row [count] whose scores, weight plus Gumbel noise, may be the largest: ids [count]; returns their number, or -1 if
// the largest logit is not finite. With a temperature of 0, it is the first of the likeliest tokens.
//
// Weights are (logit - maximum) / temperature. With u the uniform number behind a token's noise, its score exceeds s only if
// -log(u) < exp(weight - s), and 1 - u is at most -log(u). So a comparison excludes nearly all tokens, with s the best score so far.
// `rounding` is what scores may differ from those that the caller computes.
int32_t outrider_contenders(const float* logits, int32_t count, float temperature, uint64_t key, float rounding, int32_t* ids) {
  constexpr int PART = 512;  // tokens whose bits are computed together
  const float top = maximum(logits, count);
  if (!std::isfinite(top)) return -1;
  int32_t first_likeliest = count;
  at_least(
      logits, count, [&] { return top; }, [&](int token) { first_likeliest = std::min(first_likeliest, token); });
  if (temperature == 0) {
    ids[0] = first_likeliest;
    return 1;
  }
  std::vector<float> scores;
  float best = -INFINITY;
  int found = 0;
  const auto consider = [&](int token) {
    const float score = (logits[token] - top) / temperature + (float)noise(random_bits(key, token));
    if (score < best - rounding) return;
    best = std::max(best, score);
    ids[found++] = token;
    scores.push_back(score);
  };
  alignas(64) float excess[PART];  // what a token's bound has above 1 - u; zero or more for those to consider
  const float likeliest = (float)noise(random_bits(key, first_likeliest));
  for (int first = 0; first < count; first += PART) {
    const int size = std::min(PART, count - first);
    const float bound = std::max(best, likeliest) - rounding;
    for (int i = 0; i < size; i++) excess[i] = -(float)((1ull << 53) - random_bits(key, first + i)) * 0x1p-53f;
    int i = 0;
    for (; i + LANES <= size; i += LANES)
      store(excess + i, exponential((load(logits + first + i) - all(top)) / all(temperature) - all(bound)) + load(excess + i));
    for (; i < size; i++) excess[i] += std::exp((logits[first + i] - top) / temperature - bound);
    at_least(excess, size, [] { return -0x1p-22f; }, [&](int place) { consider(first + place); });
  }
  int kept = 0;
  for (int i = 0; i < found; i++)
    if (scores[i] >= best - rounding) ids[kept++] = ids[i];
  return kept;
}
}
