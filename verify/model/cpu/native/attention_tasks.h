// How the attention of a step's rows is divided into tasks of threads, and what a task reads.
#pragma once
#include <span>
#include <vector>

#include "attention.h"
#include "description.h"

namespace outrider {

// The most rows of a task of attention, which read keys and values together.
constexpr int ROW_BLOCK = 16;
// Reading the keys and values of a task takes as long as the products of this many queries (measured with AVX-512).
constexpr int READING_QUERIES = 6;

inline Plane plane(const Stream& stream, const CachedPart& cached, int head, int width) {
  return {cached.data + head * cached.head_stride, cached.position_stride, stream.stored, width};
}
inline Plane keys_of(const Stream& stream, const Layer& layer, int head) {
  return plane(stream, stream.parts[2 * layer.cached], head, layer.head_dim);
}
inline Plane values_of(const Stream& stream, const Layer& layer, int head) {
  return layer.latent ? keys_of(stream, layer, head) : plane(stream, stream.parts[2 * layer.cached + 1], head, layer.value_dim);
}

// Finds the text of each row of the streams.
inline void find_texts(std::span<const Stream> streams, std::vector<Text>& texts) {
  texts.clear();
  for (const Stream& stream : streams) {
    const int32_t* slots = stream.slots;
    for (int i = 0; i < stream.rows; i++) {
      if (!stream.counts) {
        texts.push_back({stream.start + i + 1, stream.start + i + 1, nullptr});
        continue;
      }
      int common = 0;
      while (common < stream.counts[i] && slots[common] == stream.length + common) common++;
      texts.push_back({stream.length + common, stream.length + stream.counts[i], slots + common});
      slots += stream.counts[i];
    }
  }
}

// The most work of one task: some rows, and some of the query heads of one key head.
struct AttentionBlock {
  int rows, heads;
  int parts_of(const Stream& stream) const { return (stream.rows + rows - 1) / rows; }
  int parts_of(const Layer& layer) const { return (layer.heads / layer.kv_heads + heads - 1) / heads * layer.kv_heads; }
  int tasks_of(const Stream& stream, const Layer& layer) const { return parts_of(stream) * parts_of(layer); }
  int tasks_of(std::span<const Stream> streams, const Layer& layer) const {
    int tasks = 0;
    for (const Stream& stream : streams) tasks += tasks_of(stream, layer);
    return tasks;
  }
};

// The tasks with which all threads end first: smaller ones divide the work more evenly, but read more.
inline AttentionBlock best_block(const Layer& layer, std::span<const Stream> streams, int all_rows, int threads) {
  const int groups = layer.heads / layer.kv_heads, fewest = (groups + MOST_QUERIES - 1) / MOST_QUERIES;
  AttentionBlock best{};
  float least = INFINITY;
  for (int parts = fewest, rows = ROW_BLOCK; parts <= groups; rows > 1 ? rows-- : parts *= 2) {
    const AttentionBlock block{rows, (groups + parts - 1) / parts};
    const int queries = std::min(rows, all_rows) * block.heads;
    if (queries > MOST_QUERIES) continue;
    const int rounds = (block.tasks_of(streams, layer) + threads - 1) / threads;
    const float time = (float)(rounds * (READING_QUERIES + queries));
    if (time < least) least = time, best = block;
  }
  return best;
}

struct AttentionTask {
  int stream, row, rows;      // the first row, of all streams' rows
  int key_head, head, heads;  // the first query head
};

inline AttentionTask find_task(int task, const AttentionBlock& block, const Layer& layer, std::span<const Stream> streams) {
  int row = 0, s = 0;
  for (int count; task >= (count = block.tasks_of(streams[s], layer)); s++) {
    task -= count;
    row += streams[s].rows;
  }
  const int groups = layer.heads / layer.kv_heads, parts = block.parts_of(layer) / layer.kv_heads;
  const int part = task % parts * block.heads, key = task / parts % layer.kv_heads;
  const int start = task / parts / layer.kv_heads * block.rows;
  const int rows = std::min(block.rows, streams[s].rows - start), heads = std::min(block.heads, groups - part);
  return {s, row + start, rows, key, key * groups + part, heads};
}

}  // namespace outrider
