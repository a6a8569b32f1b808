// Two searches for likely continuations: ADED's Monte Carlo tree search, and best-first search by path probability.
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

// Search nodes; a node's children are contiguous, likeliest first.
struct Pool {
  Nodes nodes;                     // [P]
  Array<int32_t> first_child;      // [P]; 0 = not expanded
  Array<int32_t> children;         // [P]; number of children
  Array<float> prior;              // [P]; probability given the parent: P(s, a) of Eq. 2
  Array<int32_t> visits;           // [P]; N(s, a)
  Array<double> reward;            // [P]; sum over visits, so Q(s, a) = reward / visits
  Array<int32_t> row_tokens;       // [S]; buffer for one successor list
  Array<float> row_probabilities;  // [S]
};

namespace search {

// How continuations are ranked: by path probability, by the sum of their visits' rewards, or nodes by their visits.
enum { PATH, SCORE, VISITS };

// The last three tokens of a text, -1 = none.
struct Ending {
  int64_t before, previous, last;
};

// A search of continuations of `text` (int32 [3], -1 = none), which ends with node 0's token.
struct Search {
  const Trigrams& trigrams;
  const Pool& pool;
  const Array<int32_t>& text;
  int64_t depth;
  const Nodes& nodes = pool.nodes;
  int64_t size = 1;

  // Empties the pool.
  void restart() const {
    nodes::reset(nodes, text[2]);
    pool.first_child[0] = pool.children[0] = pool.visits[0] = 0;
    pool.prior[0] = 1;
    pool.reward[0] = 0;
  }

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

  // Appends the `width` likeliest children of `node`.
  void expand(int64_t node, int64_t width) {
    const int64_t found = std::min({successors(ending(node)), width, nodes.tokens.size() - size});
    pool.first_child[node] = (int32_t)size;
    pool.children[node] = (int32_t)found;
    for (int64_t i = 0; i < found; i++) {
      const int64_t child = size + i;
      nodes.tokens[child] = pool.row_tokens[i];
      nodes.parents[child] = (int32_t)node;
      nodes.depths[child] = nodes.depths[node] + 1;
      pool.first_child[child] = pool.children[child] = pool.visits[child] = 0;
      nodes.path[child] = nodes.path[node] * pool.row_probabilities[i];
      pool.prior[child] = pool.row_probabilities[i];
      pool.reward[child] = 0;
      nodes.source[child] = TRIGRAM;
      nodes.chosen[child] = false;
    }
    size += found;
  }

  // The child with the highest PUCT score (Eq. 2, with E from Eq. 3).
  int64_t select(int64_t node, double c1, double c2) const {
    const int64_t first = pool.first_child[node], end = first + pool.children[node];
    int64_t total = 0, best = first;
    for (int64_t child = first; child < end; child++) total += pool.visits[child];
    const double exploration = (c1 + std::log((total + c2 + 1) / c2)) * std::sqrt((double)total);
    double best_score = -1;
    for (int64_t child = first; child < end; child++) {
      const double quality = pool.visits[child] ? pool.reward[child] / pool.visits[child] : 0;
      const double score = quality + exploration * pool.prior[child] / (1.0 + pool.visits[child]);
      if (score > best_score) best = child, best_score = score;
    }
    return best;
  }

  // Samples a continuation of `node` down to the depth; returns the geometric mean of its tokens' probabilities, in (0, 1]. If
  // `summed`, returns 1 plus the sum of these probabilities, as Algorithm 1 is printed.
  double rollout(int64_t node, uint64_t& random, bool summed) const {
    double log_probability = std::log(std::max((double)nodes.path[node], 1e-12)), total = 1;
    for (int64_t above = node; above > 0; above = nodes.parents[above]) total += pool.prior[above];
    const auto& probabilities = pool.row_probabilities;
    Ending text = ending(node);
    int64_t length = nodes.depths[node];
    for (; length < depth; length++) {
      const int64_t found = successors(text);
      if (found == 0) break;
      double mass = 0;
      for (int64_t i = 0; i < found; i++) mass += probabilities[i];
      double threshold = uniform(random) * mass;
      int64_t sampled = found - 1;
      for (int64_t i = 0; i < found; i++) {
        threshold -= probabilities[i];
        if (threshold < 0) {
          sampled = i;
          break;
        }
      }
      log_probability += std::log(std::max((double)probabilities[sampled], 1e-12));
      total += probabilities[sampled];
      text = {text.previous, text.last, pool.row_tokens[sampled]};
    }
    return summed ? total : std::exp(log_probability / (double)std::max<int64_t>(length, 1));
  }

  // The next random number in [0, 1), by xorshift64*.
  static double uniform(uint64_t& state) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (double)((state * 0x2545F4914F6CDD1D) >> 11) / 9007199254740992.0;
  }

  // The best node that is not chosen yet; -1 if there is none. By visits, any node will do; otherwise, it is a leaf or at the depth.
  // Except by path, only visited nodes count.
  int64_t best(int64_t ranking) const {
    int64_t best = -1;
    double best_value = 0;
    for (int64_t node = 1; node < size; node++) {
      if (nodes.chosen[node] || (ranking != VISITS && nodes.depths[node] != depth && pool.children[node])) continue;
      const double value = ranking == SCORE ? pool.reward[node] : ranking == VISITS ? pool.visits[node] : nodes.path[node];
      if (value > best_value) best = node, best_value = value;
    }
    return best;
  }
};

// Algorithm 1: marks the `candidates` best continuations of up to `depth` tokens; returns the pool's size.
//
// SCORE is the paper's ranking; PATH also ranks continuations that no rollout has visited or completed; VISITS, as in the authors'
// code, ranks all nodes, not only the ends of continuations.
//
// Two differences from the authors' code: the reward is the path's own probability, normalised by its length (theirs looks up the
// wrong word, so every reward is about 1), and ties go to the likelier token instead of hash order.
inline int64_t monte_carlo(const Trigrams& trigrams, const Pool& pool, const Array<int32_t>& text, int64_t depth, int64_t iterations,
                           int64_t candidates, double c1, double c2, const Array<uint64_t>& random, int64_t ranking, bool summed) {
  Search search{trigrams, pool, text, depth};
  const Nodes& nodes = pool.nodes;
  search.restart();
  for (int64_t i = 0; i < iterations; i++) {
    int64_t node = 0;
    while (pool.first_child[node] && pool.children[node] && nodes.depths[node] < depth) node = search.select(node, c1, c2);
    if (!pool.first_child[node] && nodes.depths[node] < depth && search.size < nodes.tokens.size()) {
      search.expand(node, pool.row_tokens.size());
      if (pool.children[node]) node = pool.first_child[node];
    }
    const double reward = search.rollout(node, random[0], summed);
    for (; node >= 0; node = nodes.parents[node]) {
      pool.visits[node]++;
      pool.reward[node] += reward;
    }
  }
  for (int64_t i = 0; i < candidates; i++) {
    int64_t node = search.best(ranking);
    if (node < 0) break;
    for (; node >= 0; node = nodes.parents[node]) nodes.chosen[node] = true;
  }
  return search.size;
}

// Marks the `budget` likeliest nodes of up to `depth` tokens and at least `floor` path probability; returns the size. A node has at
// most `width` children: 1 is greedy search, which gives a chain.
inline int64_t best_first(const Trigrams& trigrams, const Pool& pool, const Array<int32_t>& text, int64_t depth, int64_t budget,
                          double floor, int64_t width, const Dice& dice) {
  Search search{trigrams, pool, text, depth};
  const Nodes& nodes = pool.nodes;
  search.restart();
  search.expand(0, width);
  dice::weigh_children(dice, nodes, 1, search.size);
  for (int64_t i = 0; i < budget; i++) {
    const int64_t best = nodes::likeliest_unchosen(nodes, search.size);
    if (best < 0 || nodes.path[best] < floor) break;
    nodes.chosen[best] = true;
    if (nodes.depths[best] < depth && search.size < nodes.tokens.size()) {
      const int64_t first = search.size;
      search.expand(best, width);
      dice::weigh_children(dice, nodes, first, search.size);
    }
  }
  return search.size;
}

}  // namespace search
}  // namespace outrider
