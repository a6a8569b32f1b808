// Best-first search for likely continuations, by path probability.
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

}  // namespace search
}  // namespace outrider
