// Several residuals of a row, of which layers compute the first one: a layer begins with a prediction of all of them, and corrects
// it by what it has computed (Baykal et al., Alternating Updates for Efficient Transformers, algorithm 1).
#pragma once
#include "pointwise.h"

namespace outrider {

constexpr int MOST_RESIDUALS = 8;

// Of one row: [hidden], and [count - 1, hidden].
struct Residuals {
  float *first, *others;
  int count, hidden;

  float* at(int index) const { return index ? others + (size_t)(index - 1) * hidden : first; }
};

// The factors of a step, [outputs]: a matrix [outputs, count] times what the router says of the first residual.
inline void find_factors(const Updates& known, const Residuals& row, float epsilon, const float* matrix, int outputs, float* space,
                         float* factors) {
  normalize(known.norm, row.first, epsilon, space);
  std::fill_n(factors, outputs, 0.0f);
  for (int i = 0; i < row.count; i++) {
    const float said = std::tanh(dot(space, known.router + (size_t)i * row.hidden, row.hidden));
    for (int j = 0; j < outputs; j++) factors[j] += matrix[j * row.count + i] * said;
  }
}

// Residuals become their prediction, whose first one is also written to `predicted`, [hidden].
inline void predict(const Updates& known, const Residuals& row, float epsilon, float* predicted) {
  float factors[MOST_RESIDUALS * MOST_RESIDUALS];
  find_factors(known, row, epsilon, known.predict, row.count * row.count, predicted, factors);
  for (int at = 0; at < row.hidden; at += LANES) {
    Floats given[MOST_RESIDUALS];
    for (int i = 0; i < row.count; i++) given[i] = load(row.at(i) + at);
    for (int j = 0; j < row.count; j++) {
      Floats sum = given[j];
      for (int i = 0; i < row.count; i++) sum = fma(all(factors[j * row.count + i]), given[i], sum);
      store(row.at(j) + at, sum);
    }
  }
  std::memcpy(predicted, row.first, 4 * (size_t)row.hidden);
}

// The first residual has been computed; the others, and it, are their predictions and a part of how far the first one was off.
inline void correct(const Updates& known, const Residuals& row, float epsilon, const float* predicted, float* space) {
  float factors[MOST_RESIDUALS];
  find_factors(known, row, epsilon, known.correct, row.count, space, factors);
  for (int at = 0; at < row.hidden; at += LANES) {
    const Floats off = load(row.first + at) - load(predicted + at);
    for (int j = 0; j < row.count; j++) store(row.at(j) + at, fma(all(1 + factors[j]), off, load((j ? row.at(j) : predicted) + at)));
  }
}

// Scales values to the root mean square of others.
inline void rescale(float* values, const float* like, int size) {
  const float wanted = dot(like, like, size) / size, found = dot(values, values, size) / size;
  const Floats factor = all(std::sqrt(wanted) / std::sqrt(std::fmax(found, 1e-5f)));
  for (int i = 0; i < size; i += LANES) store(values + i, load(values + i) * factor);
}

}  // namespace outrider
