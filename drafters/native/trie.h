// A trie of draft nodes: continuations with a common prefix share its nodes.
#pragma once
#include "nodes.h"

namespace outrider {

struct Trie {
  Nodes nodes;            // [P]
  Array<int32_t> counts;  // [P]; continuations through each node
  Array<int32_t> table;   // [H], a power of two; node number of a child
  Array<int64_t> stamps;  // [H]; generation of a table entry: it is empty unless equal to `stamp`
  Array<int64_t> stamp;   // [1]; current generation
  Array<double> scratch;  // [3, P]; for the noise
};

namespace trie {

inline void restart(const Trie& trie) {
  nodes::reset(trie.nodes, 0);
  trie.counts[0] = 0;
  trie.stamp[0]++;  // invalidates all table entries
}

// Finds or creates the child of `node` with `token`; returns it and the trie's new size. There must be room for one more node.
inline Pair child(const Trie& trie, int64_t size, int64_t node, int64_t token, int64_t source) {
  const Nodes& nodes = trie.nodes;
  const int64_t mask = trie.table.size() - 1;
  int64_t slot = (int64_t)((uint64_t)node * 0x9E3779B1 + (uint64_t)token * 0x85EBCA77) & mask;
  while (trie.stamps[slot] == trie.stamp[0]) {
    const int32_t child = trie.table[slot];
    if (nodes.parents[child] == node && nodes.tokens[child] == token) return {child, size};
    slot = (slot + 1) & mask;
  }
  trie.stamps[slot] = trie.stamp[0];
  trie.table[slot] = (int32_t)size;
  nodes.tokens[size] = (int32_t)token;
  nodes.parents[size] = (int32_t)node;
  nodes.depths[size] = nodes.depths[node] + 1;
  nodes.source[size] = (uint8_t)source;
  trie.counts[size] = 0;
  return {size, size + 1};
}

}  // namespace trie
}  // namespace outrider
