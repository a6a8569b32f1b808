// Adds LoRA adapters to the products of the streams that have one.
#pragma once
#include <span>
#include <vector>

#include "buffer.h"
#include "description.h"
#include "multiply.h"
#include "team.h"

namespace outrider {

class Adaptation {
 public:
  // Finds the adapters of a step's streams.
  void find(std::span<const Stream> streams, int rows) {
    adapted_.clear();
    rows_ = rows;
    int rank = 0, first = 0;
    for (const Stream& stream : streams) {
      if (stream.adapter) adapted_.push_back({stream.adapter, first, stream.rows}), rank = std::max(rank, stream.adapter->rank);
      first += stream.rows;
    }
    width_ = (rank + PANEL - 1) / PANEL * PANEL;
    lowered_ = space_.of((size_t)MOST_TOGETHER * rows * width_);
  }

  bool any() const { return !adapted_.empty(); }

  // The products of rows with the `down` of their adapters, for one or several products of these rows.
  template <LowRank AdapterLayer::*... PARTS>
  void lower(Team& team, const Rows& rows, int layer) {
    static constexpr LowRank AdapterLayer::* parts[] = {PARTS...};
    const int streams = (int)adapted_.size(), panels = width_ / PANEL;
    if (!streams) return;
    team.share(streams * panels * (int)sizeof...(PARTS), [&](int task) {
      const Adapted& adapted = adapted_[task % streams];
      const int panel = task / streams % panels, number = task / streams / panels;
      const Matrix& down = (adapted.adapter->layer[layer].*parts[number]).down;
      if (panel >= down.panels()) return;
      const Rows own = {rows.inputs, adapted.count, rows.floats + (size_t)adapted.first * rows.inputs, nullptr};
      multiply_panel(down, panel, own, [&](int row, const float* sums) {
        std::memcpy(lowered(number, adapted.first + row) + panel * PANEL, sums, 4 * PANEL);
      });
    });
  }

  // Adds what the adapters add to one panel of a product, whose place among those of `lower` is `number`.
  void raise(LowRank AdapterLayer::* part, int number, int layer, int panel, float* out, int64_t stride, float scale = 1) {
    for (const Adapted& adapted : adapted_) {
      const Matrix& up = (adapted.adapter->layer[layer].*part).up;
      if (panel >= up.panels()) continue;
      const int first = panel * PANEL, size = std::min(PANEL, up.outputs - first);
      const Rows own = {width_, adapted.count, lowered(number, adapted.first), nullptr};
      multiply_panel(up, panel, own, [&](int row, const float* sums) {
        float* to = out + (adapted.first + row) * stride + first;
        for (int i = 0; i < size; i++) to[i] += scale == 1 ? sums[i] : sums[i] * scale;
      });
    }
  }

 private:
  static constexpr int MOST_TOGETHER = 3;  // products of the same rows: queries, keys and values

  // The rows of a stream that has an adapter.
  struct Adapted {
    const Adapter* adapter;
    int first, count;
  };

  float* lowered(int number, int row) { return lowered_ + ((size_t)number * rows_ + row) * width_; }

  std::vector<Adapted> adapted_;
  Buffer<float> space_;
  float* lowered_ = nullptr;  // products with `down`, [MOST_TOGETHER, rows, width]
  int rows_ = 0, width_ = 0;
};

}  // namespace outrider
