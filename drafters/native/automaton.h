// An online suffix automaton (Blumer et al., 1985) over a session's own text, in amortised O(1) per token.
#pragma once
#include <algorithm>

#include "array.h"

namespace outrider {

// State 0 is the empty string. Edges are in a linked list per state and in a hash table.
struct Automaton {
  Array<int32_t> text;                               // [T]
  Array<int64_t> size;                               // [4]: tokens, states, edges, the newest state
  Array<int32_t> lengths;                            // [S]; length of the state's longest string in tokens
  Array<int32_t> links;                              // [S]; suffix link: the state of the longest suffix that belongs to another state
  Array<int32_t> recent;                             // [S]; position after the latest occurrence of the state's strings
  Array<int32_t> counts;                             // [S]; number of their occurrences
  Array<int32_t> first_edge;                         // [S]; -1 = none
  Array<int32_t> edge_next, edge_token, edge_state;  // [E]
  Array<uint64_t> table_key;                         // [H]; 0 = free
  Array<int32_t> table_edge;                         // [H]
};

namespace automaton {

// This many suffix links are followed to record an occurrence; shorter strings keep their older record.
constexpr int HOPS = 32;
enum { TOKENS, STATES, EDGES, NEWEST };

inline void clear(const Automaton& automaton) {
  std::fill(automaton.size.data, automaton.size.data + 4, 0);
  automaton.size[STATES] = 1;
  automaton.links[0] = -1;
  automaton.lengths[0] = 0;
  automaton.first_edge[0] = -1;
  std::fill(automaton.table_key.data, automaton.table_key.data + automaton.table_key.size(), 0);
}

inline uint64_t key_of(int64_t state, int64_t token) { return ((uint64_t)state << 32) | (uint64_t)(token + 1); }

// The edge's slot in the hash table, or the free slot where it belongs.
inline int64_t slot_of(const Automaton& automaton, int64_t state, int64_t token) {
  const uint64_t key = key_of(state, token), mask = automaton.table_key.size() - 1;
  uint64_t slot = (key * 0x9E3779B97F4A7C15) >> 20 & mask;
  while (automaton.table_key[slot] != 0 && automaton.table_key[slot] != key) slot = (slot + 1) & mask;
  return (int64_t)slot;
}

// The edge of `state` with `token`, or -1.
inline int64_t follow(const Automaton& automaton, int64_t state, int64_t token) {
  const int64_t slot = slot_of(automaton, state, token);
  return automaton.table_key[slot] ? automaton.table_edge[slot] : -1;
}

inline void add_edge(const Automaton& automaton, int64_t state, int64_t token, int64_t target) {
  const int64_t edge = automaton.size[EDGES]++;
  automaton.edge_token[edge] = (int32_t)token;
  automaton.edge_state[edge] = (int32_t)target;
  automaton.edge_next[edge] = automaton.first_edge[state];
  automaton.first_edge[state] = (int32_t)edge;
  const int64_t slot = slot_of(automaton, state, token);
  automaton.table_key[slot] = key_of(state, token);
  automaton.table_edge[slot] = (int32_t)edge;
}

// Adds a state without edges; returns it.
inline int64_t new_state(const Automaton& automaton, int64_t length) {
  const int64_t state = automaton.size[STATES]++;
  automaton.lengths[state] = (int32_t)length;
  automaton.first_edge[state] = -1;
  automaton.counts[state] = 0;
  return state;
}

// Splits off the strings of `state` that `above` reaches with `token`; returns their new state.
inline int64_t clone(const Automaton& automaton, int64_t state, int64_t above, int64_t token) {
  const int64_t twin = new_state(automaton, automaton.lengths[above] + 1);
  automaton.links[twin] = automaton.links[state];
  automaton.recent[twin] = automaton.recent[state];
  automaton.counts[twin] = automaton.counts[state];
  for (int64_t edge = automaton.first_edge[state]; edge >= 0; edge = automaton.edge_next[edge])
    add_edge(automaton, twin, automaton.edge_token[edge], automaton.edge_state[edge]);
  automaton.links[state] = (int32_t)twin;
  for (; above >= 0; above = automaton.links[above]) {
    const int64_t edge = follow(automaton, above, token);
    if (edge < 0 || automaton.edge_state[edge] != state) break;
    automaton.edge_state[edge] = (int32_t)twin;
  }
  return twin;
}

// Appends one token without recording occurrences.
inline void extend(const Automaton& automaton, int64_t token) {
  const int64_t position = automaton.size[TOKENS]++;
  automaton.text[position] = (int32_t)token;
  const int64_t state = new_state(automaton, position + 1);
  int64_t above = automaton.size[NEWEST];
  for (; above >= 0 && follow(automaton, above, token) < 0; above = automaton.links[above]) add_edge(automaton, above, token, state);
  int64_t target = 0;
  if (above >= 0) {
    target = automaton.edge_state[follow(automaton, above, token)];
    if (automaton.lengths[target] != automaton.lengths[above] + 1) target = clone(automaton, target, above, token);
  }
  automaton.links[state] = (int32_t)target;
  automaton.size[NEWEST] = state;
}

// Records that the newest state's strings and their suffixes occur at the end of the text.
inline void record(const Automaton& automaton) {
  int64_t state = automaton.size[NEWEST];
  for (int hop = 0; hop < HOPS && state > 0; hop++, state = automaton.links[state]) {
    automaton.recent[state] = (int32_t)automaton.size[TOKENS];
    automaton.counts[state]++;
  }
}

// Appends tokens. A suffix is recorded once more text follows, so that it does not match itself.
inline void append(const Automaton& automaton, const Array<int32_t>& tokens) {
  const int64_t capacity = automaton.text.size();
  for (int64_t i = 0; i < tokens.size(); i++) {
    if (automaton.size[TOKENS] == capacity) {
      clear(automaton);
      for (int64_t at = capacity / 2; at < capacity; at++) {  // each token is read before it is overwritten
        if (automaton.size[TOKENS]) record(automaton);
        extend(automaton, automaton.text[at]);
      }
    }
    if (automaton.size[TOKENS]) record(automaton);
    extend(automaton, tokens[i]);
  }
}

// The state of the longest suffix of the text that occurred before; 0 if there is none.
inline int64_t repeated_suffix(const Automaton& automaton) { return std::max(0, automaton.links[automaton.size[NEWEST]]); }

}  // namespace automaton
}  // namespace outrider
