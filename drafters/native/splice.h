// Inserts the positions of added documents into a suffix array by bisection.
#pragma once
#include "array.h"

namespace outrider::splice {

// The suffix array sorts by this many tokens.
constexpr int64_t MAX_MATCH = 16;

// Whether the suffix at `left` sorts before that at `right`, by at most MAX_MATCH tokens of their documents.
inline bool is_before(const Array<uint32_t>& text, int64_t left, int64_t right, int64_t separator) {
  for (int64_t offset = 0; offset < MAX_MATCH; offset++) {
    const uint32_t one = text[left + offset], other = text[right + offset];
    if (one != other) return one < other;
    if (one == separator) break;
  }
  return false;
}

// Sets at[i] to the index in `old` before which added[i] belongs; both are sorted.
inline void find_places(const Array<uint32_t>& text, const Array<uint32_t>& old, const Array<uint32_t>& added, int64_t separator,
                        const Array<int64_t>& at) {
  int64_t start = 0;
  for (int64_t i = 0; i < added.size(); i++) {
    int64_t low = start, high = old.size();
    while (low < high) {
      const int64_t middle = (low + high) >> 1;
      if (is_before(text, added[i], old[middle], separator)) high = middle;
      else low = middle + 1;
    }
    at[i] = start = low;
  }
}

}  // namespace outrider::splice
