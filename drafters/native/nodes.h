// Draft nodes under construction: the searches mark nodes, and the marked nodes become a DraftTree.
#pragma once
#include <vector>

#include "array.h"

namespace outrider {

// Node 0 is the root, the last committed token; a parent precedes its children.
struct Nodes {
  Array<int32_t> tokens, parents, depths;  // [P]
  Array<float> path;                       // [P]; probability of the path from the root, at most the parent's
  Array<uint8_t> source;                   // [P]
  Array<bool> chosen;                      // [P]; part of the draft; the parent of a chosen node is chosen
  Array<int32_t> rows;                     // [P]; nodes in the order of the draft, or of a search
  Array<int32_t> row_parents;              // [P]; the number of the parent's row in the draft, -1 = the root
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

// Trims, and orders the marked nodes depth-first, likeliest child first, into `rows` and `row_parents`; returns their number.
inline int64_t lay_out(const Nodes& nodes, int64_t size, int64_t budget) {
  const int64_t count = trim(nodes, size, budget);
  std::vector<int32_t> unplaced;
  unplaced.reserve(count);
  for (int64_t node = 1; node < size; node++)
    if (nodes.chosen[node]) unplaced.push_back((int32_t)node);
  int32_t at = 0, row_of_at = -1, row = 0;
  while (row < count) {
    auto best = unplaced.end();
    for (auto each = unplaced.begin(); each != unplaced.end(); each++)
      if (nodes.parents[*each] == at && (best == unplaced.end() || nodes.path[*best] < nodes.path[*each])) best = each;
    if (best == unplaced.end()) {  // all children of `at` are placed: back to its parent
      row_of_at = nodes.row_parents[row_of_at];
      at = row_of_at >= 0 ? nodes.rows[row_of_at] : 0;
      continue;
    }
    at = *best;
    unplaced.erase(best);
    nodes.rows[row] = at;
    nodes.row_parents[row] = row_of_at;
    row_of_at = row++;
  }
  return count;
}

}  // namespace nodes
}  // namespace outrider
