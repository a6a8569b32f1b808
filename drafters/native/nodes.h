// Draft nodes under construction: the searches mark nodes, and the marked nodes become a DraftTree.
#pragma once
#include "array.h"

namespace outrider {

// Node 0 is the root, the last committed token; a parent precedes its children.
struct Nodes {
  Array<int32_t> tokens, parents, depths;  // [P]
  Array<float> path;                       // [P]; probability of the path from the root, at most the parent's
  Array<uint8_t> source;                   // [P]
  Array<bool> chosen;                      // [P]; part of the draft; the parent of a chosen node is chosen
};

namespace nodes {

inline void reset(const Nodes& nodes, int64_t last) {
  nodes.tokens[0] = (int32_t)last;
  nodes.parents[0] = -1;
  nodes.depths[0] = 0;
  nodes.path[0] = 1;
  nodes.chosen[0] = true;
}

// On ties the first, so a parent precedes its child.
inline int64_t likeliest_unchosen(const Nodes& nodes, int64_t size) {
  int64_t best = -1;
  float best_path = -1;
  for (int64_t node = 1; node < size; node++)
    if (!nodes.chosen[node] && nodes.path[node] > best_path) best = node, best_path = nodes.path[node];
  return best;
}

inline void choose_likeliest(const Nodes& nodes, int64_t size, int64_t budget) {
  for (int64_t node = 1; node < size; node++) nodes.chosen[node] = false;
  for (int64_t i = 0; i < budget; i++) {
    const int64_t best = likeliest_unchosen(nodes, size);
    if (best < 0) return;
    nodes.chosen[best] = true;
  }
}

// Clears the unlikeliest marks until at most `budget` remain; returns their number.
inline int64_t trim(const Nodes& nodes, int64_t size, int64_t budget) {
  int64_t count = 0;
  for (int64_t node = 1; node < size; node++) count += nodes.chosen[node];
  for (; count > budget; count--) {
    int64_t worst = -1;
    for (int64_t node = 1; node < size; node++)
      // "<=": on ties the later node goes, so a child goes before its parent.
      if (nodes.chosen[node] && (worst < 0 || nodes.path[node] <= nodes.path[worst])) worst = node;
    nodes.chosen[worst] = false;
  }
  return count;
}

// Orders the marked nodes depth-first, likeliest child first: node numbers into `rows`, parents' rows into `parents`.
inline void lay_out(const Nodes& nodes, int64_t size, const Array<int32_t>& marked, const Array<int32_t>& rows,
                    const Array<int32_t>& parents) {
  int32_t count = 0;
  for (int64_t node = 1; node < size; node++)
    if (nodes.chosen[node]) marked[count++] = (int32_t)node;
  int32_t at = 0, row_of_at = -1, row = 0;
  while (row < count) {
    int best = -1;
    for (int i = 0; i < count; i++) {
      const int32_t node = marked[i];
      if (node && nodes.parents[node] == at && (best < 0 || nodes.path[marked[best]] < nodes.path[node])) best = i;
    }
    if (best < 0) {  // all children of `at` are placed: back to its parent
      row_of_at = parents[row_of_at];
      at = row_of_at >= 0 ? rows[row_of_at] : 0;
      continue;
    }
    at = marked[best];
    marked[best] = 0;
    rows[row] = at;
    parents[row] = row_of_at;
    row_of_at = row++;
  }
}

}  // namespace nodes
}  // namespace outrider
