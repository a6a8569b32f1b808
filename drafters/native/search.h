// Two searches for likely continuations: best-first by path probability, and ADED's Monte Carlo tree search.
#pragma once
#include "dice.h"
#include "learned_table.h"

namespace outrider {

// The session's n-gram distribution: a base table, the session's rows over it, and the order.
struct Trigrams {
  BaseArrays base;
  LearnedRows rows;
  int64_t order;  // n-grams of 2 to `order` tokens
};

// Search nodes, and a buffer.
struct Pool {
  Nodes nodes;                     // [P]
  Array<int32_t> row_tokens;       // [S]; buffer for one successor list
  Array<float> row_probabilities;  // [S]
};

// What its visits gave each search node; a node's children are contiguous, likeliest first.
struct Visits {
  Array<int32_t> first_child;  // [P]; 0 = not expanded
  Array<int32_t> children;     // [P]; number of children
  Array<float> prior;          // [P]; probability given the parent: P(s, a) of Eq. 2
  Array<int32_t> counts;       // [P]; N(s, a)
  Array<double> reward;        // [P]; sum over visits, so Q(s, a) = reward / counts
};

namespace search {

// The last three tokens of a text, -1 = none.
struct Ending {
  int64_t before, previous, last;
};

// A search of continuations of `text` (int32 [3], -1 = none), which ends with node 0's token.
struct Search {
  const Trigrams& trigrams;
  const Pool& pool;
  const Array<int32_t>& text;
  const Nodes& nodes = pool.nodes;
  int64_t size = 1;

  Ending ending(int64_t node) const {
    const int32_t last = nodes.tokens[node], above = nodes.parents[node];
    if (above < 0) return {text[0], text[1], last};
    const int32_t upper = nodes.parents[above];
    return {upper < 0 ? text[1] : nodes.tokens[upper], nodes.tokens[above], last};
  }

  // Fills the buffer with the successors of a text; returns their number.
  int64_t successors(const Ending& ending) const {
    return learned_table::successors(trigrams.base, trigrams.rows, ending.before, ending.previous, ending.last, trigrams.order,
                                     pool.row_tokens, pool.row_probabilities);
  }

  // Appends the likeliest children of `node`, and weighs them by their noise.
  void expand(int64_t node, const Dice& dice) {
    const int64_t found = std::min(successors(ending(node)), nodes.tokens.size() - size);
    for (int64_t i = 0; i < found; i++) {
      const int64_t child = size + i;
      nodes.tokens[child] = pool.row_tokens[i];
      nodes.parents[child] = (int32_t)node;
      nodes.depths[child] = nodes.depths[node] + 1;
      nodes.path[child] = nodes.path[node] * pool.row_probabilities[i];
      nodes.source[child] = TRIGRAM;
      nodes.chosen[child] = false;
    }
    dice::weigh_children(dice, nodes, size, size + found);
    size += found;
  }
};

// Marks the `budget` likeliest nodes of up to `depth` tokens and at least `floor` path probability; returns the size.
inline int64_t best_first(const Trigrams& trigrams, const Pool& pool, const Array<int32_t>& text, int64_t depth, int64_t budget,
                          double floor, const Dice& dice) {
  Search search{trigrams, pool, text};
  const Nodes& nodes = pool.nodes;
  nodes::reset(nodes, text[2]);
  search.expand(0, dice);
  for (int64_t i = 0; i < budget; i++) {
    const int64_t best = nodes::likeliest_unchosen(nodes, search.size);
    if (best < 0 || nodes.path[best] < floor) break;
    nodes.chosen[best] = true;
    if (nodes.depths[best] < depth && search.size < nodes.tokens.size()) search.expand(best, dice);
  }
  return search.size;
}

// A Monte Carlo tree search of continuations of up to `depth` tokens.
struct MonteCarlo {
  Search search;
  const Visits& visits;
  int64_t depth;
  double c1, c2;  // exploration constants
  uint64_t& random;
  const Nodes& nodes = search.nodes;

  bool is_leaf(int64_t node) const { return nodes.depths[node] == depth || !visits.children[node]; }

  void clear(int64_t node, float prior) const {
    visits.first_child[node] = visits.children[node] = visits.counts[node] = 0;
    visits.prior[node] = prior;
    visits.reward[node] = 0;
  }

  void expand(int64_t node, const Dice& dice) {
    const int64_t first = search.size;
    search.expand(node, dice);
    visits.first_child[node] = (int32_t)first;
    visits.children[node] = (int32_t)(search.size - first);
    for (int64_t child = first; child < search.size; child++) clear(child, search.pool.row_probabilities[child - first]);
  }

  // The child with the highest PUCT score (Eq. 2, with E from Eq. 3).
  int64_t select(int64_t node) const {
    const int64_t first = visits.first_child[node], end = first + visits.children[node];
    int64_t total = 0, best = first;
    for (int64_t child = first; child < end; child++) total += visits.counts[child];
    const double exploration = (c1 + std::log((total + c2 + 1) / c2)) * std::sqrt((double)total);
    double best_score = -1;
    for (int64_t child = first; child < end; child++) {
      const double quality = visits.counts[child] ? visits.reward[child] / visits.counts[child] : 0;
      const double score = quality + exploration * visits.prior[child] / (1.0 + visits.counts[child]);
      if (score > best_score) best = child, best_score = score;
    }
    return best;
  }

  // Samples a continuation of `node` down to the depth; returns the geometric mean of its tokens' probabilities, in (0, 1].
  double rollout(int64_t node) const {
    const auto& probabilities = search.pool.row_probabilities;
    double log_probability = std::log(std::max((double)nodes.path[node], 1e-12));
    Ending text = search.ending(node);
    int64_t length = nodes.depths[node];
    for (; length < depth; length++) {
      const int64_t found = search.successors(text);
      if (found == 0) break;
      double threshold = 0;
      for (int64_t i = 0; i < found; i++) threshold += probabilities[i];
      threshold *= uniform();
      int64_t sampled = 0;
      while (sampled < found - 1 && (threshold -= probabilities[sampled]) >= 0) sampled++;
      log_probability += std::log(std::max((double)probabilities[sampled], 1e-12));
      text = {text.previous, text.last, search.pool.row_tokens[sampled]};
    }
    return std::exp(log_probability / (double)std::max<int64_t>(length, 1));
  }

  // The next random number in [0, 1), by xorshift64*.
  double uniform() const {
    random ^= random >> 12;
    random ^= random << 25;
    random ^= random >> 27;
    return (double)((random * 0x2545F4914F6CDD1D) >> 11) / 9007199254740992.0;
  }

  // The visited end of a continuation with the highest sum of rewards that is not chosen yet; -1 if there is none.
  int64_t best() const {
    int64_t best = -1;
    for (int64_t node = 1; node < search.size; node++)
      if (!nodes.chosen[node] && is_leaf(node) && visits.reward[node] > (best < 0 ? 0 : visits.reward[best])) best = node;
    return best;
  }
};

// Algorithm 1: marks the `candidates` best continuations of up to `depth` tokens after `iterations` rollouts; returns the size.
//
// Two differences from the authors' code: the reward is the path's own probability, normalised by its length (theirs looks up the
// wrong word, so every reward is about 1), and ties go to the likelier token instead of hash order.
inline int64_t monte_carlo(const Trigrams& trigrams, const Pool& pool, const Visits& visits, const Array<int32_t>& text, int64_t depth,
                           int64_t iterations, int64_t candidates, double c1, double c2, const Array<uint64_t>& random, const Dice& dice) {
  MonteCarlo tree{{trigrams, pool, text}, visits, depth, c1, c2, random[0]};
  const Nodes& nodes = pool.nodes;
  nodes::reset(nodes, text[2]);
  tree.clear(0, 1);
  for (int64_t i = 0; i < iterations; i++) {
    int64_t node = 0;
    while (visits.first_child[node] && !tree.is_leaf(node)) node = tree.select(node);
    if (!visits.first_child[node] && nodes.depths[node] < depth && tree.search.size < nodes.tokens.size()) {
      tree.expand(node, dice);
      if (visits.children[node]) node = visits.first_child[node];
    }
    const double reward = tree.rollout(node);
    for (; node >= 0; node = nodes.parents[node]) {
      visits.counts[node]++;
      visits.reward[node] += reward;
    }
  }
  for (int64_t i = 0; i < candidates; i++) {
    int64_t node = tree.best();
    if (node < 0) break;
    for (; node >= 0; node = nodes.parents[node]) nodes.chosen[node] = true;
  }
  return tree.search.size;
}

}  // namespace search
}  // namespace outrider
