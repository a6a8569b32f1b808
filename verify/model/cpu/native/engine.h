// Threads that compute steps, and the memory of these: sized for a step's rows, and kept for the next one.
#pragma once
#include <vector>

#include "adaptation.h"
#include "attention.h"
#include "mixture.h"
#include "recurrence.h"

namespace outrider {

constexpr int FEW_ROWS = 32;  // from which on more threads always gain: arithmetic takes the time

struct Engine {
  explicit Engine(int threads) : team(threads), spaces(threads) {}
  Team team;
  std::vector<AttentionSpace> spaces;
  Habit habits[6];  // of forwards of fewer than FEW_ROWS, by the bits of their number of rows
  Buffer<float> residual, normed, queries, keys, values, attended, gated, added, angles;
  Buffer<float> scores, gathered, inner, outputs;  // of mixtures
  Buffer<float> gates, parts;                      // of attention; of latent attention: what `parts_` has
  Buffer<float> embedded;                          // of layers, for tokens
  Buffer<float> others, predicted;                 // residuals
  Buffer<float> mixed, convolved, matrices;        // of recurrent layers
  Uses uses;
  int touched;  // experts that the latest forward used, of all layers
  Adaptation adaptation;
  Buffer<RowBlock> blocks;
  std::vector<Text> texts;
  std::vector<Paths> paths;  // of streams
};

}  // namespace outrider
