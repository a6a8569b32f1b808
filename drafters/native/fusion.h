// One tree of the likeliest paths from all sources.
#pragma once
#include "dice.h"
#include "mixture.h"

namespace outrider::fusion {

// Nodes of lower path probability are not drafted.
constexpr double MIN_PATH = 1e-6;
// A node is expanded only if a child with this probability would enter the tree: where the tree is full, and where the cost of a
// node bounds it. Nearly certain children, as in a copied passage, follow each other until a node is not worth its cost.
constexpr double FULL_EXPANSION = 0.5, OPEN_EXPANSION = 0.75;
// In a full tree, shorter contexts are skipped once the remaining mass is below this multiple of what a child needs to enter.
constexpr double MASS_MARGIN = 3;

// A tree under construction. rank[:size] holds the nodes by descending path probability. A child is never likelier than its parent,
// so this list of at most `budget` nodes is both the result and the queue.
struct Tree {
  const Sources& sources;
  const Contexts& contexts;
  const Scratch& scratch;
  const Nodes& nodes;
  const int64_t budget;
  const double least;
  const Dice& dice;
  const Array<int32_t>& rank = nodes.rows;
  int64_t size = 0;

  bool full() const { return size == budget; }

  // The bound that a path's probability must exceed.
  double worst() const { return full() ? nodes.path[rank[size - 1]] : least; }

  // Adds a child of `node` to the ranked nodes after `at`; of `budget` nodes, it replaces the least likely one.
  void insert(int64_t node, int64_t at, int64_t token, double path, int64_t source) {
    int64_t added = size + 1;
    if (full()) added = rank[--size];
    nodes.tokens[added] = (int32_t)token;
    nodes.parents[added] = (int32_t)node;
    nodes.depths[added] = nodes.depths[node] + 1;
    nodes.path[added] = (float)path;
    nodes.source[added] = (uint8_t)levels::node_source(source);
    nodes.chosen[added] = true;
    int64_t place = size++;
    for (; place > at + 1 && nodes.path[rank[place - 1]] < path; place--) rank[place] = rank[place - 1];
    rank[place] = (int32_t)added;
  }

  // Adds the lucky tokens that no table lists to the predicted ones; returns their number.
  int64_t add_lucky(const Array<double>& lucky, int64_t found, double unlisted) const {
    const int64_t listed = found;
    for (int64_t i = 1; i <= dice::LUCKY && lucky[dice::LUCKY + i] > 0; i++) {
      const int64_t token = (int64_t)lucky[i], x = scratch.index_of[token];
      if (found == scratch.out.size() || (x < listed && scratch.out[x] == token)) continue;
      scratch.out[found] = token;
      scratch.probability[found] = unlisted * lucky[dice::LUCKY + i];
      scratch.out_source[found++] = levels::LUCK;
    }
    return found;
  }

  // Adds the successors of `node`, which is number `at` in the ranking, that are among the likeliest nodes.
  void expand(int64_t node, int64_t at) {
    const float path = nodes.path[node];
    const int32_t depth = nodes.depths[node];
    const double needed = worst(), mass = full() ? MASS_MARGIN * needed / path : 0;
    int64_t found = mixture::predict(sources, contexts, node, scratch, std::max(mixture::MIN_MASS, mass));
    const auto& probability = scratch.probability;
    const double most = mixture::MAX_BOOST * (dice.strength > 0 ? dice::MAX_FACTOR : 1);
    for (int64_t x = 0; x < found; x++)
      if (most * path * probability[x] > needed)
        probability[x] = std::min(dice::MAX_PROBABILITY, probability[x] * sources.boost[mixture::cell(scratch, x)]);
    if (dice.strength > 0) {
      const double unlisted = dice.luck * dice::weigh(dice, depth, scratch.out, probability, found, needed / path);
      if (unlisted * path > needed) found = add_lucky(dice.lucky.row(dice::lucky_row(dice, depth)), found, unlisted);
    }
    for (int64_t x = 0; x < found; x++)
      if (path * probability[x] > worst()) insert(node, at, scratch.out[x], path * probability[x], scratch.out_source[x]);
  }
};

// Marks the `budget` likeliest paths, each likelier than `least`; returns the number of nodes, node 0 included.
inline int64_t grow(const Sources& sources, const Contexts& contexts, const Scratch& scratch, const Nodes& nodes, int64_t budget,
                    double least, int64_t depth, const Dice& dice) {
  nodes::reset(nodes, 0);
  Tree tree{sources, contexts, scratch, nodes, budget, least, dice};
  int64_t node = 0;
  for (int64_t at = -1;;) {  // nodes before it in the ranking are expanded
    if (nodes.depths[node] < depth) tree.expand(node, at);
    if (++at >= tree.size) break;
    node = tree.rank[at];
    const double worst = tree.worst(), expansion = tree.full() ? FULL_EXPANSION : OPEN_EXPANSION;
    if (worst > MIN_PATH && expansion * nodes.path[node] <= worst) break;
    contexts::advance(sources, contexts, nodes.parents[node], nodes.tokens[node], node);
  }
  return tree.size + 1;
}

inline void commit_all(const Sources& sources, const Contexts& contexts, const Scratch& scratch, const Array<int32_t>& tokens) {
  for (int64_t i = 0; i < tokens.size(); i++) mixture::commit(sources, contexts, scratch, tokens[i]);
}

}  // namespace outrider::fusion
