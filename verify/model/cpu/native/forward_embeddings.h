// Computes the embeddings of a forward's tokens, also those of single layers, and the angles of the rows' positions.
#pragma once
#include "forward.h"
#include "stored.h"

namespace outrider {

constexpr int MOST_EMBEDDING = 1024;  // the width of a layer's embeddings

inline void Forward::fit_embeddings() {
  for (int table = 0; table < model_.rotaries; table++) angles_width_ += model_.rotary[table].size;
  angles_ = engine_.angles.of((size_t)rows_ * angles_width_);
  embedded_ = engine_.embedded.of((size_t)rows_ * model_.layers * model_.embeddings.table.width);
}

inline void Forward::embed(int row, int64_t token) {
  float* to = residual_ + (size_t)row * model_.hidden;
  take(model_.embedding, (int)token, to);
  if (model_.embedding_scale != 1)
    for (int i = 0; i < model_.hidden; i++) to[i] *= model_.embedding_scale;
  float* angles = angles_ + (size_t)row * angles_width_;
  for (int table = 0; table < model_.rotaries; table++) {
    const Rotary& rotary = model_.rotary[table];
    const int half = rotary.size / 2;
    for (int i = 0; i < half; i++) {
      const float angle = (float)positions_[row] * rotary.frequencies[i];
      angles[i] = std::cos(angle) * rotary.scaling;
      angles[half + i] = std::sin(angle) * rotary.scaling;
    }
    angles += rotary.size;
  }
}

// Each layer's embeddings of the rows' tokens: of the table, and projected from the residual, which has the tokens' own ones.
inline void Forward::embed_for_layers(const int64_t* tokens) {
  const LayerEmbeddings& known = model_.embeddings;
  const int width = known.table.width, count = known.table.rows / model_.layers;
  const Rows rows = read_residual({}, known.projection.matrix.quantized());
  multiply_all({{&known.projection, embedded_, model_.layers * width}}, rows, 0);
  const float projected = 1 / std::sqrt((float)model_.hidden), stored = std::sqrt((float)width), sum = 1 / std::sqrt(2.0f);
  team_.share(rows_ * model_.layers, [&](int part) {
    const int row = part / model_.layers, layer = part % model_.layers;
    alignas(64) float own[MOST_EMBEDDING];
    take(known.table, (tokens[row] < count ? tokens[row] : 0) * model_.layers + layer, own);
    float* to = embedded_ + (size_t)part * width;
    for (int i = 0; i < width; i++) to[i] *= projected;
    normalize(known.norm, to, model_.epsilon, to);
    for (int i = 0; i < width; i++) to[i] = (to[i] + own[i] * stored) * sum;
  });
}

// Adds what a layer makes of its embeddings to the residual.
inline void Forward::add_embedding(const Layer& layer, int index) {
  const int width = layer.embedding_gate.matrix.outputs;
  const float* scale = layer.updates ? layer.updates->scale : nullptr;
  const Rows rows = prepare(normed_, rows_, model_.hidden, layer.embedding_gate.matrix.quantized(), [&](int row) {
    float* to = normed_ + (size_t)row * model_.hidden;
    norm_row({}, row, to);
    for (int i = 0; scale && i < model_.hidden; i++) to[i] *= scale[i];
  });
  multiply_all({{&layer.embedding_gate, gated_, width}}, rows, index);
  const Rows gated = prepare(gated_, rows_, width, layer.embedding_output.matrix.quantized(), [&](int row) {
    float* to = gated_ + (size_t)row * width;
    const float* own = embedded_ + ((size_t)row * model_.layers + index) * width;
    for (int i = 0; i < width; i += LANES) store(to + i, activate(load(to + i), layer.activation) * load(own + i));
  });
  multiply_all({{&layer.embedding_output, added_, model_.hidden}}, gated, index);
  team_.share(rows_, [&](int row) {
    norm_values(layer.embedding_post_norm, added_ + (size_t)row * model_.hidden, model_.hidden);
    if (!layer.updates) add_row({}, row);
    for (int i = 1; i < model_.residuals; i++) add_row({}, row, residuals(row).at(i));
  });
}

}  // namespace outrider
