// Mixtures of experts: which experts each row uses, and the rows of each expert.
#pragma once
#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "pointwise.h"

namespace outrider {

// Chooses one row's experts, the best first; of equal ones, the first. Scores become weights.
class Router {
 public:
  explicit Router(const Mixture& mixture) : mixture_(mixture), ranks_(mixture.count) {}

  // Reads and overwrites the logits, [count].
  void choose(float* scores, int32_t* experts, float* weights) {
    const int count = mixture_.count, used = mixture_.used;
    if (mixture_.scores == SOFTMAX) normalize_exponentials(scores, scores, count);
    if (mixture_.scores == SIGMOID)
      for (int i = 0; i < count; i++) scores[i] = 1 / (1 + std::exp(-scores[i]));
    for (int i = 0; i < count; i++) ranks_[i] = mixture_.bias ? scores[i] + mixture_.bias[i] : scores[i];
    if (mixture_.groups > 1) leave_groups();
    float sum = 0;
    for (int k = 0; k < used; k++) {
      int best = -1;
      for (int i = 0; i < count; i++)
        if (!std::isnan(ranks_[i]) && (best < 0 || ranks_[i] > ranks_[best])) best = i;
      if (best < 0) best = k;  // logits are NaN, and so will be the output
      experts[k] = best;
      ranks_[best] = NAN;
      sum += weights[k] = scores[best];
    }
    if (mixture_.scores == CHOSEN_SOFTMAX) normalize_exponentials(weights, weights, used);
    else if (mixture_.normalized)
      for (int k = 0; k < used; k++) weights[k] /= sum + 1e-20f;
    for (int k = 0; k < used; k++) weights[k] *= mixture_.scale * (mixture_.scales ? mixture_.scales[experts[k]] : 1);
  }

 private:
  static void normalize_exponentials(const float* from, float* to, int count) {
    float most = from[0], sum = 0;
    for (int i = 1; i < count; i++) most = std::fmax(most, from[i]);
    for (int i = 0; i < count; i++) sum += to[i] = std::exp(from[i] - most);
    for (int i = 0; i < count; i++) to[i] /= sum;
  }

  // Only the best groups stay.
  void leave_groups() {
    const int groups = mixture_.groups, size = mixture_.count / groups;
    std::vector<float> sums(groups);
    for (int group = 0; group < groups; group++) {
      const auto first = ranks_.begin() + group * size;
      std::vector<float> best(std::min(size, mixture_.summed));
      std::partial_sort_copy(first, first + size, best.begin(), best.end(), std::greater<>());
      sums[group] = std::accumulate(best.begin(), best.end(), 0.0f);
    }
    for (int left = groups; left > mixture_.used_groups; left--) {
      const int worst = (int)(std::min_element(sums.begin(), sums.end()) - sums.begin());
      sums[worst] = INFINITY;
      for (int i = worst * size; i < (worst + 1) * size; i++) ranks_[i] = NAN;
    }
  }

  const Mixture& mixture_;
  std::vector<float> ranks_;  // NaN = not to be chosen
};

// The uses of experts by rows, sorted by expert.
struct Uses {
  std::vector<int32_t> experts;  // [rows, used]
  std::vector<float> weights;    // [rows, used]
  std::vector<int32_t> places;   // [rows, used]: of each use in the order
  std::vector<int32_t> rows;     // of each use in the order
  struct Part {
    int expert, first, count;  // uses of one expert
  };
  std::vector<Part> parts;
  std::vector<int32_t> part_of;  // of each use in the order

  void resize(size_t count) {
    experts.resize(count), weights.resize(count), places.resize(count), rows.resize(count), part_of.resize(count);
  }

  void sort(int count, int used) {
    std::vector<int32_t> ends(count + 1);
    for (int32_t expert : experts) ends[expert + 1]++;
    parts.clear();
    for (int expert = 0; expert < count; expert++) {
      if (ends[expert + 1]) parts.push_back({expert, ends[expert], ends[expert + 1]});
      ends[expert + 1] += ends[expert];
    }
    for (size_t use = 0; use < experts.size(); use++) {
      const int place = ends[experts[use]]++;
      places[use] = place;
      rows[place] = (int32_t)use / used;
    }
    for (size_t part = 0; part < parts.size(); part++)
      for (int i = 0; i < parts[part].count; i++) part_of[parts[part].first + i] = (int32_t)part;
  }
};

}  // namespace outrider
