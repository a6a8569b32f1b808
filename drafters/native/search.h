// Searches likely continuations in the session's tri-gram distribution, best-first by path probability.
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

namespace search {

// A search of continuations of `text` (int32 [3], -1 = none), which ends with node 0's token.
struct Search {
  const Trigrams& trigrams;
  const Pool& pool;
  const Array<int32_t>& text;
  const Nodes& nodes = pool.nodes;
  int64_t size = 1;

  // Fills the buffer with the successors of a node; returns their number.
  int64_t successors(int64_t node) const {
    const int32_t above = nodes.parents[node], upper = above < 0 ? -1 : nodes.parents[above];
    const int32_t previous = above < 0 ? text[1] : nodes.tokens[above];
    const int32_t before = above < 0 ? text[0] : upper < 0 ? text[1] : nodes.tokens[upper];
    return learned_table::successors(trigrams.base, trigrams.rows, before, previous, nodes.tokens[node], trigrams.order, pool.row_tokens,
                                     pool.row_probabilities);
  }

  // Appends the likeliest children of `node`, and weighs them by their noise.
  void expand(int64_t node, const Dice& dice) {
    const int64_t found = std::min(successors(node), nodes.tokens.size() - size);
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

}  // namespace search
}  // namespace outrider
