// Operations on each row alone: norms, rotations and activations.
#pragma once
#include "description.h"

namespace outrider {

// Root mean square, or LayerNorm. `from` may be `to`.
inline void normalize(const Norm& norm, const float* from, float epsilon, float* to) {
  const int size = norm.size;
  Floats mean{};
  if (norm.kind == LAYER_NORM) {
    Sums sums{};
    for (int i = 0; i < size; i += SUMMED)
      for (int part = 0; part < SUMMED / LANES; part++) sums.parts[part] += load(from + i + part * LANES);
    mean = all(total(sums) / size);
  }
  Sums squares{};
  for (int i = 0; i < size; i += SUMMED)
    for (int part = 0; part < SUMMED / LANES; part++) {
      const Floats values = load(from + i + part * LANES) - mean;
      squares.parts[part] = fma(values, values, squares.parts[part]);
    }
  const Floats factor = all(1 / std::sqrt(total(squares) / size + epsilon));
  for (int i = 0; i < size; i += LANES) {
    const Floats normed = load(norm.weight + i) * ((load(from + i) - mean) * factor);
    store(to + i, norm.bias ? normed + load(norm.bias + i) : normed);
  }
}

inline float dot(const float* one, const float* other, int size) {
  Sums sums{};
  for (int i = 0; i < size; i += SUMMED)
    for (int part = 0; part < SUMMED / LANES; part++)
      sums.parts[part] = fma(load(one + i + part * LANES), load(other + i + part * LANES), sums.parts[part]);
  return total(sums);
}

// Of values, what lies above their mean and so many standard deviations stays: as many as of a normal distribution.
inline void cut(float* values, int size, float deviations) {
  constexpr int CHAINS = 16;
  double sums[CHAINS] = {}, squares[CHAINS] = {}, sum = 0, square = 0;
  for (int first = 0; first < size; first += CHAINS)
    for (int i = 0; i < std::min(CHAINS, size - first); i++) {
      const double value = values[first + i];
      sums[i] += value, squares[i] += value * value;
    }
  for (int i = 0; i < CHAINS; i++) sum += sums[i], square += squares[i];
  const double mean = sum / size, deviation = std::sqrt(std::fmax(square / size - mean * mean, 0));
  const float least = (float)(mean + deviations * deviation);
  for (int i = 0; i < size; i++) values[i] = std::fmax(values[i] - least, 0.0f);
}

inline void rotate(float* head, const float* cosines, const float* sines, int size) {
  const int half = size / 2;
  for (int i = 0; i < half; i++) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cosines[i] - second * sines[i];
    head[i + half] = second * cosines[i] + first * sines[i];
  }
}

// tanh(x) = 1 - 2 / (e^2x + 1)
inline Floats hyperbolic_tangent(Floats x) { return all(1) - all(2) / (exponential(x + x) + all(1)); }
// Bounded to the open interval between -cap and cap.
inline Floats capped(Floats x, float cap) { return all(cap) * hyperbolic_tangent(x / all(cap)); }

inline Floats activate(Floats x, int activation) {
  if (activation == SILU) return x / (all(1) + exponential(-x));
  if (activation == LOGISTIC) return all(1) / (all(1) + exponential(-x));
  if (activation == GELU_TANH) {
    const Floats y = all(0.7978845608f) * fma(all(0.044715f) * x * x, x, x);
    return all(0.5f) * x * (all(2) - all(2) / (exponential(y + y) + all(1)));
  }
  if (activation == GELU) {
    for (int lane = 0; lane < LANES; lane++) x[lane] = 0.5f * x[lane] * (1 + std::erf(x[lane] * 0.70710678f));
    return x;
  }
  const Floats positive = larger(x, all(0));
  return activation == RELU ? positive : positive * positive;
}

// act(gate) * up; of the clamped one, with up + 1.
inline Floats combine(Floats gate, Floats up, const Layer& layer) {
  if (layer.activation != CLAMPED_SILU) return activate(gate, layer.activation) * up;
  const Floats limit = all(layer.limit);
  gate = gate < limit ? gate : limit;
  up = larger(up < limit ? up : limit, -limit);
  return (up + all(1)) * (gate / (all(1) + exponential(all(-layer.alpha) * gate)));
}

}  // namespace outrider
