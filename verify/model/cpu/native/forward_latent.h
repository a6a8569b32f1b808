// Latent attention in a forward: queries of the latents, and the values of those that attention has summed.
#pragma once
#include "forward.h"

namespace outrider {

// Computes latents and queries of them: the part of a query that is not rotated is multiplied by `key_up`, instead of all
// latents.
inline void Forward::project(const Layer& layer, const Latent& latent, const Rows& rows, int index) {
  const int heads = layer.heads, width = layer.query.matrix.outputs / heads, plain = latent.key_up.matrix.inputs;
  const int lowered = latent.query_down.matrix.outputs;
  const Product query{&layer.query, attended_, heads * width, &AdapterLayer::query}, key{&layer.key, keys_, layer.head_dim};
  if (lowered) {
    multiply_all({{&latent.query_down, parts_, lowered}, key}, rows, index);
    const Rows read = prepare(parts_, rows_, lowered, layer.query.matrix.quantized(), [&](int row) {
      float* to = parts_ + (size_t)row * lowered;
      if (latent.query_norm.kind != NO_NORM) normalize(latent.query_norm, to, model_.epsilon, to);
    });
    adaptation_.lower<&AdapterLayer::query>(team_, read, index);
    multiply_all({query}, read, index);
  } else {
    adaptation_.lower<&AdapterLayer::query>(team_, rows, index);
    multiply_all({query, key}, rows, index);
  }
  const Heads found{queries_, heads * layer.head_dim, layer.head_dim, layer.head_dim};
  multiply_heads(latent.key_up, heads, parts_, found, [&](int row, int head, float* to) {
    const float* from = attended_ + ((size_t)row * heads + head) * width;
    std::memcpy(to, from, 4 * (size_t)plain);
    std::memcpy(found.at(row, head) + layer.rotated, from + plain, 4 * (size_t)(width - plain));
  });
}

// The values of the latents that attention has summed, [heads, rows, value_dim], to `queries_`.
inline void Forward::raise_values(const Layer& layer, const Linear& value_up) {
  const int outputs = value_up.matrix.outputs, width = outputs / layer.heads;
  multiply_heads(value_up, layer.heads, attended_, {queries_, outputs, width, width}, [](int, int, float*) {});
}

// Products of each head's own rows, which `compute(row, head, to)` writes to `floats`, [heads, rows, inputs], and its own
// weights.
template <class Compute>
void Forward::multiply_heads(const Linear& linear, int heads, float* floats, const Heads& out, const Compute& compute) {
  const Matrix& matrix = linear.matrix;
  const size_t inputs = matrix.inputs, blocks = inputs / BLOCK, count = rows_;
  const int panels = matrix.panels() / heads;
  RowBlock* space = engine_.blocks.of(heads * count * blocks);
  const auto rows_of = [&](int head) { return Rows{(int)inputs, rows_, floats + head * count * inputs, space + head * count * blocks}; };
  team_.share(heads, [&](int head) {
    const Rows rows = rows_of(head);
    for (int row = 0; row < rows_; row++) {
      compute(row, head, rows.floats + row * inputs);
      if (matrix.quantized()) quantize(rows, row);
    }
  });
  team_.share(matrix.panels(), [&](int panel) {
    const int head = panel / panels, first = panel % panels * PANEL;
    multiply_panel(matrix, panel, rows_of(head),
                   [&](int row, const float* sums) { std::memcpy(out.at(row, head) + first, sums, 4 * PANEL); });
  });
}

}  // namespace outrider
