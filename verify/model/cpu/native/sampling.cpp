// Passes over a row of logits, [count] float32: the likeliest tokens, and the tokens that keyed sampling may choose.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "vector.h"

using namespace outrider;

namespace {

// The largest values of a row's blocks, so that a later pass reads only the blocks that can hold what it looks for.
class Blocks {
 public:
  static constexpr int TOGETHER = 4;
  static constexpr int SIZE = 16 * LANES;  // values of a block

  Blocks(const float* values, int count) : values_(values), count_(count), largest_((count + SIZE - 1) / SIZE) {
    for (int block = 0; block < (int)largest_.size(); block++) {
      const int first = block * SIZE, end = std::min(count, first + SIZE);
      Floats most[TOGETHER];  // independent, so that none waits for another
      std::fill(most, most + TOGETHER, all(-INFINITY));
      Ints unordered = all_ints(0);
      int i = first;
      for (; i + TOGETHER * LANES <= end; i += TOGETHER * LANES)
        for (int k = 0; k < TOGETHER; k++) {
          const Floats next = load(values + i + k * LANES);
          most[k] = larger(next, most[k]);
          unordered |= next != next;
        }
      float found = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
      has_nan_ |= any(unordered);
      for (; i < end; i++) {
        has_nan_ |= std::isnan(values[i]);
        found = std::max(found, values[i]);
      }
      largest_[block] = found;
    }
  }

  // The largest value, or NaN if any is NaN.
  float maximum() const { return has_nan_ ? NAN : *std::max_element(largest_.begin(), largest_.end()); }

  // Calls `use(i)` for each i with values[i] >= bound(), in their order; the bound may rise meanwhile.
  template <class Bound, class Use>
  void at_least(const Bound& bound, const Use& use) const {
    for (int block = 0; block < (int)largest_.size(); block++) {
      if (!(largest_[block] >= bound())) continue;
      const int end = std::min(count_, (block + 1) * SIZE);
      for (int i = block * SIZE; i < end; i++)
        if (values_[i] >= bound()) use(i);
    }
  }

 private:
  const float* values_;
  const int count_;
  std::vector<float> largest_;
  bool has_nan_ = false;
};

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
    float bound = -INFINITY;        // what a further one must reach
    std::fill(ids, ids + most, 0);  // for a row of NaN
    Blocks(logits, count)
        .at_least([&] { return bound; },
                  [&](int token) {
                    int place = held < most ? held++ : most - 1;
                    for (; place > 0 && logits[ids[place - 1]] < logits[token]; place--) ids[place] = ids[place - 1];
                    ids[place] = token;
                    if (held == most) bound = std::nextafter(logits[ids[most - 1]], INFINITY);
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

// Tokens of one row [count] whose scores, weight plus Gumbel noise, may be the largest: the first of them in ids [most]; returns their
// number, or -1 if the largest logit is not finite. With a temperature of 0, it is the first of the likeliest tokens.
//
// Weights are (logit - maximum) / temperature. With u the uniform number behind a token's noise, its score exceeds s only if
// -log(u) < exp(weight - s), and 1 - u is at most -log(u). So a comparison excludes nearly all tokens, with s the best score so far.
// `rounding` is what scores may differ from those that the caller computes.
int32_t outrider_contenders(const float* logits, int32_t count, float temperature, uint64_t key, float rounding, int32_t most,
                            int32_t* ids) {
  constexpr int PART = 512;  // tokens that are excluded together
  const Blocks blocks(logits, count);
  const float top = blocks.maximum();
  if (!std::isfinite(top)) return -1;
  int32_t first_likeliest = count;
  blocks.at_least([&] { return top; }, [&](int token) { first_likeliest = std::min(first_likeliest, token); });
  if (temperature == 0) {
    ids[0] = first_likeliest;
    return 1;
  }
  std::vector<std::pair<float, int32_t>> found;  // scores and tokens
  float best = -INFINITY;
  const auto consider = [&](int token) {
    const float score = (logits[token] - top) / temperature + (float)noise(random_bits(key, token));
    if (score < best - rounding) return;
    best = std::max(best, score);
    found.emplace_back(score, token);
  };
  // The leading 31 of the bits bound 1 - u from below. Rounding changes the comparison by less than SLACK.
  alignas(64) int32_t leading[PART];
  constexpr float SLACK = 0x1p-22f;
  const float likeliest = (float)noise(random_bits(key, first_likeliest));
  for (int first = 0; first < count; first += PART) {
    const int size = std::min(PART, count - first);
    const float bound = std::max(best, likeliest) - rounding;
    for (int i = 0; i < size; i++) leading[i] = (int32_t)(random_bits(key, first + i) >> 22);
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
      const Floats below_one = to_floats(all_ints(INT32_MAX) - load_ints(leading + i)) * all(0x1p-31f) - all(SLACK);
      const Floats reach = exponential((load(logits + first + i) - all(top)) / all(temperature) - all(bound));
      if (!any(below_one <= reach)) continue;
      for (int lane = 0; lane < LANES; lane++)
        if (below_one[lane] <= reach[lane]) consider(first + i + lane);
    }
    for (; i < size; i++) {
      const float below_one = (float)(INT32_MAX - leading[i]) * 0x1p-31f - SLACK;
      if (below_one <= std::exp((logits[first + i] - top) / temperature - bound)) consider(first + i);
    }
  }
  int kept = 0;
  for (const auto& [score, token] : found)
    if (score >= best - rounding && kept++ < most) ids[kept - 1] = token;
  return kept;
}
}
