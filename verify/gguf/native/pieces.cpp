// Finds a vocabulary's texts, and splits text into pieces as SentencePiece's BPE does. pieces.py declares the functions.
//
// Texts are as a GGUF file has them: UTF-8, each after its length in eight bytes. A call changes nothing that others read.
#include <cstdint>
#include <cstring>
#include <queue>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr int64_t LENGTH = 8;
constexpr int32_t NORMAL = 1;   // the type of tokens that merge
constexpr uint8_t SPECIAL = 2;  // the kind of added tokens that plain text does not have
constexpr std::string_view SPACE = "\u2581";

// The size of a UTF-8 character by its first byte.
int64_t character_size(uint8_t first) { return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

bool is_utf8(const uint8_t* text, int64_t size) {
  for (int64_t at = 0; at < size;) {
    const uint8_t first = text[at];
    if (first < 0x80) {
      ++at;
      continue;
    }
    const int64_t length = character_size(first);
    if (first < 0xC2 || first > 0xF4 || at + length > size) return false;
    for (int64_t i = 1; i < length; ++i)
      if ((text[at + i] & 0xC0) != 0x80) return false;
    const uint8_t second = text[at + 1];
    if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) || (first == 0xF0 && second < 0x90) ||
        (first == 0xF4 && second > 0x8F))
      return false;  // too long a form, a surrogate, or beyond Unicode
    at += length;
  }
  return true;
}

// A part of the text that is one token so far; `size` is 0 once it has been merged with the part before it.
struct Part {
  int64_t previous, next, start, size;
  int32_t id;
  bool merges;
};

struct Merge {
  float score;
  int32_t id;
  int64_t left_size, at;

  // Whether `other` comes first: by score, then the token, then its shorter left part, then the place.
  bool operator<(const Merge& other) const {
    if (score != other.score) return score < other.score;
    if (id != other.id) return id > other.id;
    if (left_size != other.left_size) return left_size > other.left_size;
    return at > other.at;
  }
};

class Pieces {
 public:
  Pieces(const char* texts, const uint32_t* starts, int64_t count) : texts_(texts), starts_(starts), count_(count) {
    uint64_t size = 16;
    while (size < 2 * uint64_t(count)) size *= 2;
    slots_.assign(size, -1);
    for (int64_t id = 0; id < count; ++id) slots_[slot(text_of(int32_t(id)))] = int32_t(id);  // of equal texts, the last counts
  }

  // Lets `encode` work. Types, scores and kinds are by token; `lengths` are those of added tokens, the largest first.
  void complete(const int32_t* types, const float* scores, const uint8_t* kinds, int32_t unknown) {
    types_ = types, scores_ = scores, kinds_ = kinds, unknown_ = unknown;
    for (int32_t id = 0; id < count_; ++id) {
      if (!kinds[id] || text_of(id).empty()) continue;
      auto& sizes = added_sizes_[uint8_t(text_of(id)[0])];
      const int64_t size = int64_t(text_of(id).size());
      auto place = sizes.begin();
      while (place != sizes.end() && *place > size) ++place;
      if (place == sizes.end() || *place != size) sizes.insert(place, size);
    }
    constexpr char DIGITS[] = "0123456789ABCDEF";
    for (int byte = 0; byte < 256; ++byte) bytes_[byte] = find(std::string("<0x") + DIGITS[byte >> 4] + DIGITS[byte & 15] + ">");
  }

  int32_t find(std::string_view text) const { return slots_[slot(text)]; }

  // The number of tokens written to `found`.
  int64_t encode(std::string_view text, bool plain, bool prefix, int32_t* found) const {
    int64_t count = 0, start = 0, at = 0, end = int64_t(text.size());
    while (at < end) {
      const int32_t token = added_at(text, at);
      if (token < 0) {
        ++at;
        continue;
      }
      const int64_t size = int64_t(text_of(token).size());
      if (!(plain && kinds_[token] == SPECIAL)) {
        count += merge(text.substr(start, at - start), prefix, found + count);
        found[count++] = token;
        start = at + size;
      }
      at += size;
    }
    return count + merge(text.substr(start), prefix, found + count);
  }

 private:
  std::string_view text_of(int32_t id) const { return {texts_ + starts_[id], size_t(starts_[id + 1] - starts_[id] - LENGTH)}; }

  // Where a text is or would be: linear probing.
  uint64_t slot(std::string_view text) const {
    uint64_t hash = 0xCBF29CE484222325;
    for (const char each : text) hash = (hash ^ uint8_t(each)) * 0x100000001B3;
    uint64_t at = (hash ^ hash >> 32) & (slots_.size() - 1);
    while (slots_[at] >= 0 && text_of(slots_[at]) != text) at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  // The longest added token at a place; -1 if there is none.
  int32_t added_at(std::string_view text, int64_t at) const {
    for (const int64_t size : added_sizes_[uint8_t(text[at])]) {
      if (at + size > int64_t(text.size())) continue;
      const int32_t id = find(text.substr(at, size));
      if (id >= 0 && kinds_[id]) return id;
    }
    return -1;
  }

  int64_t merge(std::string_view given, bool prefix, int32_t* found) const {
    if (given.empty()) return 0;
    std::string text(prefix ? SPACE : "");
    for (const char each : given) each == ' ' ? text.append(SPACE) : text.append(1, each);
    std::vector<Part> parts = characters(text);
    std::priority_queue<Merge> queue;
    for (int64_t at = 0; at + 1 < int64_t(parts.size()); ++at) push(queue, text, parts, at);
    while (!queue.empty()) {
      const Merge top = queue.top();
      queue.pop();
      Part& left = parts[top.at];
      if (!left.size || left.next < 0 || merged(text, left, parts[left.next]) != top.id) continue;
      Part& right = parts[left.next];
      left.id = top.id, left.size += right.size, left.next = right.next, right.size = 0;
      if (left.next >= 0) parts[left.next].previous = top.at;
      if (left.previous >= 0) push(queue, text, parts, left.previous);
      push(queue, text, parts, top.at);
    }
    int64_t count = 0;
    for (int64_t at = parts.empty() ? -1 : 0; at >= 0; at = parts[at].next) found[count++] = parts[at].id;
    return count;
  }

  // The characters' tokens; those of the bytes of a character without one; or the unknown token, once for several.
  std::vector<Part> characters(std::string_view text) const {
    std::vector<Part> parts;
    parts.reserve(text.size());
    const auto add = [&](int64_t start, int64_t size, int32_t id, bool merges) {
      const int64_t at = int64_t(parts.size());
      if (at) parts.back().next = at;
      parts.push_back({at - 1, -1, start, size, id, merges});
    };
    int64_t unknown = 0;  // the size of what has no token
    const auto flush = [&](int64_t end) {
      if (unknown) add(end - unknown, unknown, unknown_, false);
      unknown = 0;
    };
    for (int64_t at = 0, size; at < int64_t(text.size()); at += size) {
      size = character_size(uint8_t(text[at]));
      const int32_t id = find(text.substr(at, size));
      if (id >= 0) {
        flush(at);
        add(at, size, id, types_[id] == NORMAL);
        continue;
      }
      bool has_bytes = true;
      for (int64_t i = 0; i < size; ++i) has_bytes = has_bytes && bytes_[uint8_t(text[at + i])] >= 0;
      if (has_bytes)
        for (int64_t i = 0; i < size; ++i) add(at + i, 1, bytes_[uint8_t(text[at + i])], false);
      else if (unknown_ >= 0) unknown += size;
    }
    flush(int64_t(text.size()));
    return parts;
  }

  // The token that two neighbours merge to; -1 if they do not.
  int32_t merged(std::string_view text, const Part& left, const Part& right) const {
    if (!left.merges || !right.merges) return -1;
    const int32_t id = find(text.substr(left.start, left.size + right.size));
    return id >= 0 && types_[id] == NORMAL ? id : -1;
  }

  void push(std::priority_queue<Merge>& queue, std::string_view text, const std::vector<Part>& parts, int64_t at) const {
    if (parts[at].next < 0) return;
    const int32_t id = merged(text, parts[at], parts[parts[at].next]);
    if (id >= 0) queue.push({scores_[id], id, parts[at].size, at});
  }

  const char* texts_;
  const uint32_t* starts_;
  int64_t count_;
  std::vector<int32_t> slots_;
  const int32_t* types_ = nullptr;
  const float* scores_ = nullptr;
  const uint8_t* kinds_ = nullptr;
  int32_t unknown_ = -1, bytes_[256];
  std::vector<int64_t> added_sizes_[256];  // by first byte
};

}  // namespace

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C"
#endif

// Where the texts begin, from `content` on, and in the last place after all. Returns their end, or -1 if they are beyond `size`
// bytes, or -2 if one is no UTF-8.
EXPORT int64_t pieces_scan(const uint8_t* content, int64_t size, int64_t count, uint32_t* starts) {
  int64_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t length;
    if (size - at < LENGTH) return -1;
    std::memcpy(&length, content + at, LENGTH);
    if (length > uint64_t(size - at - LENGTH) || at + length > UINT32_MAX / 2) return -1;
    starts[i] = uint32_t(at + LENGTH);
    if (!is_utf8(content + at + LENGTH, int64_t(length))) return -2;
    at += LENGTH + int64_t(length);
  }
  starts[count] = uint32_t(at + LENGTH);
  return at;
}

EXPORT void* pieces_new(const char* texts, const uint32_t* starts, int64_t count) { return new Pieces(texts, starts, count); }

EXPORT void pieces_delete(void* pieces) { delete static_cast<Pieces*>(pieces); }

EXPORT int64_t pieces_find(void* pieces, const char* text, int64_t size) {
  return static_cast<Pieces*>(pieces)->find({text, size_t(size)});
}

EXPORT void pieces_complete(void* pieces, const int32_t* types, const float* scores, const uint8_t* kinds, int64_t unknown) {
  static_cast<Pieces*>(pieces)->complete(types, scores, kinds, int32_t(unknown));
}

EXPORT int64_t pieces_encode(void* pieces, const char* text, int64_t size, int64_t plain, int64_t prefix, int32_t* found) {
  return static_cast<Pieces*>(pieces)->encode({text, size_t(size)}, plain, prefix, found);
}
