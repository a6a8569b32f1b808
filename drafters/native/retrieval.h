// The continuations of a text's longest suffix that occurs in a corpus, as a trie (REST, arXiv 2311.08252).
#pragma once
#include "suffix.h"
#include "trie.h"

namespace outrider::retrieval {

// Adds the continuation of every `stride`-th match (of `match` tokens) in [low, high), within its document; returns the trie's size.
inline int64_t insert(const Trie& trie, int64_t size, const Corpus& corpus, int64_t low, int64_t high, int64_t match, int64_t stride,
                      int64_t length) {
  for (int64_t i = low; i < high; i += stride) {
    const int64_t position = suffix::position_at(corpus, i) + match;
    int64_t node = 0;
    trie.counts[0]++;
    for (int64_t offset = 0; offset < length; offset++) {
      const int64_t token = suffix::token_at(corpus, position + offset);
      if (token < 0 || token == corpus.separator || size == trie.counts.size()) break;
      const Pair found = trie::child(trie, size, node, token, RETRIEVAL);
      node = found.first;
      size = found.second;
      trie.counts[node]++;
    }
  }
  return size;
}

// Updates the ranges of a text's last 0, 1, 2 ... tokens for more tokens.
inline void read(const Corpus& corpus, const Array<int32_t>& tokens, const Array<int64_t>& low, const Array<int64_t>& high) {
  for (int64_t i = 0; i < tokens.size(); i++) suffix::follow(corpus, low, high, tokens[i], low, high);
}

// Sets each path's probability to its share of the continuations, with add-one smoothing for unseen ones.
inline void weigh(const Trie& trie, int64_t size) {
  for (int64_t node = 1; node < size; node++) trie.nodes.path[node] = (float)(trie.counts[node] / (trie.counts[0] + 1.0));
}

}  // namespace outrider::retrieval
