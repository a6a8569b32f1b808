// The continuations of the longest repeated suffix of the session's text.
#pragma once
#include "automaton.h"
#include "dice.h"

namespace outrider {

// Continuations of the text.
struct Candidates {
  Nodes nodes;            // [P]
  Array<int32_t> states;  // [P]; the automaton's state at each node
};

namespace lookup {

// Appends the successors of the node's state as candidates; returns the new size.
inline int64_t expand(const Automaton& automaton, const Candidates& candidates, int64_t node, int64_t size) {
  const auto& [nodes, states] = candidates;
  double total = 1;  // one count stands for unseen successors
  const int64_t first = size;
  for (int64_t edge = automaton.first_edge[states[node]]; edge >= 0 && size < nodes.tokens.size(); edge = automaton.edge_next[edge]) {
    const int32_t target = automaton.edge_state[edge];
    const double count = std::max(1, automaton.counts[target]);
    total += count;
    nodes.tokens[size] = automaton.edge_token[edge];
    nodes.parents[size] = (int32_t)node;
    nodes.depths[size] = nodes.depths[node] + 1;
    nodes.path[size] = (float)(nodes.path[node] * count);
    nodes.source[size] = LOOKUP;
    nodes.chosen[size] = false;
    states[size++] = target;
  }
  for (int64_t child = first; child < size; child++) nodes.path[child] = (float)(nodes.path[child] / total);
  return size;
}

// Marks the likeliest continuations of `state`, best first; a path's probability is the product of its shares.
inline int64_t grow(const Automaton& automaton, const Candidates& candidates, int64_t state, int64_t budget, int64_t depth,
                    const Dice& dice) {
  const Nodes& nodes = candidates.nodes;
  nodes::reset(nodes, 0);
  candidates.states[0] = (int32_t)state;
  int64_t size = expand(automaton, candidates, 0, 1);
  dice::weigh_children(dice, nodes, 1, size);
  for (int64_t i = 0; i < budget; i++) {
    const int64_t best = nodes::likeliest_unchosen(nodes, size), first = size;
    if (best < 0) break;
    nodes.chosen[best] = true;
    if (nodes.depths[best] >= depth) continue;
    size = expand(automaton, candidates, best, size);
    dice::weigh_children(dice, nodes, first, size);
  }
  return size;
}

}  // namespace lookup
}  // namespace outrider
