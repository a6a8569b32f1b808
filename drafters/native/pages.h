// Random access to a file's 32-bit words, through a small page cache in the process. Not thread-safe.
#pragma once
#include <unistd.h>

#include <algorithm>

#include "array.h"

namespace outrider {

// A direct-mapped cache: page p of the file can only be in slot p mod S'.
struct Pages {
  Array<uint32_t> words;   // [S, PAGE_WORDS]
  Array<int64_t> numbers;  // [S'], a power of two >= S; the page in each slot, -1 = none
  int64_t file;            // descriptor; -1 = in memory, with every page in its slot
};

namespace pages {

constexpr int64_t PAGE_SHIFT = 6, PAGE_WORDS = 1 << PAGE_SHIFT, PAGE_BYTES = 4 * PAGE_WORDS;

// Reads a page into its slot; zeros beyond the end of the file.
inline void read_page(const Pages& pages, int64_t page, int64_t slot) {
  uint32_t* words = pages.words.data + slot * PAGE_WORDS;
  const int64_t received = std::max<int64_t>(0, pread((int)pages.file, words, PAGE_BYTES, page * PAGE_BYTES));
  std::fill(words + ((received + 3) >> 2), words + PAGE_WORDS, 0);
  pages.numbers[slot] = page;
}

// The file's 32-bit word at index `at`.
inline int64_t word(const Pages& pages, int64_t at) {
  const int64_t page = at >> PAGE_SHIFT, slot = page & (pages.numbers.size() - 1);
  if (pages.numbers[slot] != page) read_page(pages, page, slot);
  return pages.words.data[slot * PAGE_WORDS + (at & (PAGE_WORDS - 1))];
}

}  // namespace pages
}  // namespace outrider
