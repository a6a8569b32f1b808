// The dice: the target's noise, which is known before its forward, as evidence of the tokens that it will choose.
#pragma once
#include <algorithm>
#include <cmath>

#include "nodes.h"

namespace outrider {

// The noise of a request.
struct Dice {
  uint64_t seed;        // mixed
  int64_t position;     // position of the next token in the answer
  double strength;      // weight of the noise's factor, in [0, 1]; 0 = the noise is not used
  double luck;          // probability that a token which no table lists is a lucky one
  int64_t ids;          // lucky tokens have smaller ids
  Array<double> lucky;  // [POSITIONS, 1 + 2 * LUCKY]; a position, its lucky tokens, and their shares
};

namespace dice {

constexpr int64_t LUCKY = 8;
// In Zipf-Mandelbrot's law, a token's frequency is about 1 / (id + offset).
constexpr double RANK_OFFSET = 300;
// The mean of exp(G / 2): the square root of pi.
constexpr double MEAN_FACTOR = 1.7724538509055159;
// This bounds the factors that make a token worth looking up. One in 800 is larger.
constexpr double MAX_FACTOR = 16;
// This much probability is left for tokens that no table lists.
constexpr double MIN_UNLISTED = 0.01, MAX_PROBABILITY = 0.999;

inline uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// `outrider.drafters.noise.position_key` of a mixed seed.
inline uint64_t position_key(uint64_t seed, int64_t position) {
  return scramble((seed ^ (uint64_t)position * 0xD1B54A32D192ED03) + 0x9E3779B97F4A7C15);
}

// The 53 random bits behind the target's noise of a token.
inline uint64_t random_bits(uint64_t key, int64_t token) { return scramble((uint64_t)token * 0x9E3779B97F4A7C15 + key) >> 11; }

// exp(-G), for the Gumbel noise G of these bits.
inline double exponential(uint64_t bits) { return -std::log(((double)bits + 0.5) * 0x1p-53); }

// The factor of a token's probability by its noise, with mean 1; `key` is its position's.
inline double factor_of(const Dice& dice, uint64_t key, int64_t token) {
  return 1 + dice.strength * (1 / (MEAN_FACTOR * std::sqrt(exponential(random_bits(key, token)))) - 1);
}

// Multiplies the probabilities of `found` tokens after a node at `depth` by their noise's factor and renormalises them. The noise of
// tokens that stay below `least` is not computed. Returns the probability of all tokens that are not listed.
inline double weigh(const Dice& dice, int64_t depth, const Array<int64_t>& tokens, const Array<double>& probability, int64_t found,
                    double least) {
  const uint64_t key = position_key(dice.seed, dice.position + depth);
  double listed = 0, total = 0;
  for (int64_t x = 0; x < found; x++) {
    listed += probability[x];
    if (probability[x] * MAX_FACTOR > least) probability[x] *= factor_of(dice, key, tokens[x]);
    total += probability[x];
  }
  const double unlisted = std::max(MIN_UNLISTED, 1 - listed), scale = 1 / (total + unlisted);
  for (int64_t x = 0; x < found; x++) probability[x] = std::min(MAX_PROBABILITY, scale * probability[x]);
  return unlisted * scale;
}

// Multiplies the path probabilities of nodes [first, size), all children of one node, by their noise's factor. They are renormalised
// together with what the parent leaves to other tokens.
inline void weigh_children(const Dice& dice, const Nodes& nodes, int64_t first, int64_t size) {
  if (dice.strength == 0 || first == size) return;
  const int32_t parent = nodes.parents[first];
  const double above = nodes.path[parent];
  const uint64_t key = position_key(dice.seed, dice.position + nodes.depths[parent]);
  double listed = 0, total = 0;
  for (int64_t child = first; child < size; child++) {
    listed += nodes.path[child];
    nodes.path[child] = (float)(nodes.path[child] * factor_of(dice, key, nodes.tokens[child]));
    total += nodes.path[child];
  }
  const double scale = above / std::max(1e-30, total + std::max(MIN_UNLISTED * above, above - listed));
  for (int64_t child = first; child < size; child++) nodes.path[child] = (float)(nodes.path[child] * scale);
}

// `weigh_children` for the children of each of the first `size` nodes, which may be anywhere among them. `scratch` is [3, P].
inline void weigh_tree(const Dice& dice, const Nodes& nodes, int64_t size, const Array<double>& scratch) {
  if (dice.strength == 0) return;
  const auto share = scratch.row(0), listed = scratch.row(1), total = scratch.row(2);
  for (int64_t node = 0; node < size; node++) listed[node] = total[node] = 0;
  for (int64_t node = 1; node < size; node++) {
    const int32_t parent = nodes.parents[node];
    share[node] = nodes.path[node] / std::max(1e-30, (double)nodes.path[parent]);
    listed[parent] += share[node];
    share[node] *= factor_of(dice, position_key(dice.seed, dice.position + nodes.depths[parent]), nodes.tokens[node]);
    total[parent] += share[node];
  }
  for (int64_t node = 1; node < size; node++) {
    const int32_t parent = nodes.parents[node];
    const double all = total[parent] + std::max(MIN_UNLISTED, 1 - listed[parent]);
    nodes.path[node] = (float)(nodes.path[parent] * share[node] / all);
  }
}

// Ranks the token ids below `size` by their frequency times exp(G): the first LUCKY ids, then their shares. Only about 8 * LUCKY ids,
// those with the largest noise, are ranked; an id that is left out would hardly ever be among the first.
inline void find_lucky(uint64_t key, int64_t size, const Array<double>& lucky) {
  for (int64_t i = 0; i < lucky.size(); i++) lucky[i] = 0;
  const uint64_t least = (uint64_t)(0x1p53 * std::exp(-8.0 * LUCKY / (double)std::max<int64_t>(1, size)));
  double total = 1e-300;
  for (int64_t token = 0; token < size; token++) {
    const uint64_t bits = random_bits(key, token);
    if (bits < least) continue;
    const double weight = 1 / ((token + RANK_OFFSET) * exponential(bits));
    int64_t place = LUCKY;
    for (; place > 0 && lucky[LUCKY + place - 1] < weight; place--)
      if (place < LUCKY) lucky[place] = lucky[place - 1], lucky[LUCKY + place] = lucky[LUCKY + place - 1];
    if (place < LUCKY) lucky[place] = (double)token, lucky[LUCKY + place] = weight;
  }
  for (int64_t i = LUCKY; i < 2 * LUCKY; i++) total += lucky[i];
  for (int64_t i = LUCKY; i < 2 * LUCKY; i++) lucky[i] /= total;
}

// The row of `dice.lucky` for the tokens after a node at `depth`, which is filled once per position.
inline int64_t lucky_row(const Dice& dice, int64_t depth) {
  const int64_t position = dice.position + depth, row = position % dice.lucky.size();
  if (dice.lucky(row, 0) != (double)position) {
    dice.lucky(row, 0) = (double)position;
    find_lucky(position_key(dice.seed, position), dice.ids, dice.lucky.row(row).from(1));
  }
  return row;
}

}  // namespace dice
}  // namespace outrider
