// The feed-forward part of a layer in a forward.
#pragma once
#include "forward.h"

namespace outrider {

// The inner values of the feed-forward part: act(gate x) * (up x), or act(up x).
inline void Forward::feed(const Layer& layer, int index) {
  if (!layer.up.matrix.outputs && !layer.mixture) return;
  const bool is_gated = layer.gate.matrix.outputs;
  const Rows rows = read_residual(layer.feed_forward_norm, layer.up.matrix.quantized() || layer.gate.matrix.quantized());
  adaptation_.lower<&AdapterLayer::gate, &AdapterLayer::up>(team_, rows, index);
  const int width = layer.up.matrix.outputs;
  const auto write_gate = [&](int panel) {
    write_panel(layer.gate, panel, rows, gated_, width);
    adaptation_.raise(&AdapterLayer::gate, 0, index, panel, gated_, width);
  };
  const bool is_cut = layer.deviations > -INFINITY;  // by all values of a row
  if (is_cut) {
    team_.share(layer.gate.matrix.panels(), write_gate);
    team_.share(rows_, [&](int row) { cut(gated_ + (size_t)row * width, width, layer.deviations); });
  }
  const auto write_up = [&](int panel) {
    const int first = panel * PANEL, size = std::min(PANEL, width - first);
    if (adaptation_.any()) {
      for (int row = 0; row < rows_; row++) std::fill_n(added_ + (size_t)row * width + first, size, 0.0f);
      adaptation_.raise(&AdapterLayer::up, 1, index, panel, added_, width);
    }
    write_inner(layer, layer.gate, layer.up, panel, rows, gated_, width, adaptation_.any() ? added_ : nullptr);
  };
  // In turns, panel by panel, each would be read with a new start.
  team_.share_parts(layer.up.matrix.panels(), [&](int first, int end) {
    for (int panel = first; panel < end && is_gated && !is_cut; panel++) write_gate(panel);
    for (int panel = first; panel < end; panel++) write_up(panel);
  });
}

// Adds the feed-forward part, if there is one, to the residual.
inline void Forward::add_fed(const Layer& layer, int index) {
  if (layer.mixture) return mix(layer, *layer.mixture, index);
  if (!layer.down.matrix.outputs) return;
  const Rows gated = prepare(gated_, rows_, layer.down.matrix.inputs, layer.down.matrix.quantized());
  add<&AdapterLayer::down>(layer.down, gated, layer.feed_forward_post_norm, index);
}

}  // namespace outrider
