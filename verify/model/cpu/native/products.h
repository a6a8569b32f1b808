// The products of a step's rows with weights, and the residual, which phases read normed and add their outputs to.
#pragma once
#include "engine.h"

namespace outrider {

// One panel of a product, with the bias.
inline void write_panel(const Linear& linear, int panel, const Rows& rows, float* out, int64_t stride) {
  const int first = panel * PANEL, size = std::min(PANEL, linear.matrix.outputs - first);
  multiply_panel(linear.matrix, panel, rows, [&](int row, const float* sums) {
    float* to = out + row * stride + first;
    for (int i = 0; i < size; i++) to[i] = linear.bias ? sums[i] + linear.bias[first + i] : sums[i];
  });
}

// One panel of act(gate x) * (up x + raised): `out` holds gate x. Without a gate, of act(up x + raised).
inline void write_inner(const Layer& layer, const Linear& gate, const Linear& up, int panel, const Rows& rows, float* out, int width,
                        const float* raised = nullptr) {
  const int first = panel * PANEL, size = std::min(PANEL, width - first);
  const bool is_gated = gate.matrix.outputs;
  multiply_panel(up.matrix, panel, rows, [&](int row, const float* sums) {
    const size_t place = (size_t)row * width + first;
    alignas(64) float gates[PANEL] = {}, ups[PANEL];
    if (is_gated) std::memcpy(gates, out + place, 4 * size);
    for (int i = 0; i < PANEL; i++) ups[i] = up.bias && i < size ? sums[i] + up.bias[first + i] : sums[i];
    for (int i = 0; raised && i < size; i++) ups[i] += raised[place + i];
    for (int i = 0; i < PANEL; i += LANES)
      store(gates + i, is_gated ? combine(load(gates + i), load(ups + i), layer) : activate(load(ups + i), layer.activation));
    std::memcpy(out + place, gates, 4 * size);
  });
}

class Products {
 protected:
  // A product of some rows, and where an adapter's part of it is.
  struct Product {
    const Linear* linear;
    float* out;
    int stride;
    LowRank AdapterLayer::* adapter = nullptr;
  };

  // `widest` values of a row are added at once, or by adapters.
  Products(Engine& engine, const Model& model, int rows, int widest)
      : engine_(engine), team_(engine.team), adaptation_(engine.adaptation), model_(model), rows_(rows),
        residual_(engine.residual.of((size_t)rows * model.hidden)), normed_(engine.normed.of((size_t)rows * model.hidden)),
        added_(engine.added.of((size_t)rows * widest)) {}

  // Computes the rows of a product by `compute(row)`, and quantises them for quantised weights.
  template <class Compute>
  Rows prepare(float* floats, int count, int inputs, bool quantized, const Compute& compute) {
    const Rows rows{inputs, count, floats, engine_.blocks.of((size_t)count * (inputs / BLOCK))};
    team_.share(count, [&](int row) {
      compute(row);
      if (quantized) quantize(rows, row);
    });
    return rows;
  }
  // Of rows that are there.
  Rows prepare(float* floats, int count, int inputs, bool quantized) {
    if (quantized) return prepare(floats, count, inputs, true, [](int) {});
    return {inputs, count, floats, nullptr};
  }

  // The normed residual.
  Rows read_residual(const Norm& norm, bool quantized) {
    const int hidden = model_.hidden;
    return prepare(normed_, rows_, hidden, quantized, [&](int row) { norm_row(norm, row, normed_ + (size_t)row * hidden); });
  }

  void norm_row(const Norm& norm, int row, float* to) {
    const float* from = residual_ + (size_t)row * model_.hidden;
    if (norm.kind == NO_NORM) std::memcpy(to, from, 4 * (size_t)model_.hidden);
    else normalize(norm, from, model_.epsilon, to);
  }

  // Norms values, as many at once as the norm says, if there is one.
  void norm_values(const Norm& norm, float* values, int count) const {
    for (int place = 0; norm.kind != NO_NORM && place < count; place += norm.size)
      normalize(norm, values + place, model_.epsilon, values + place);
  }

  // Computes products of the same rows.
  template <size_t COUNT>
  void multiply_all(const Product (&products)[COUNT], const Rows& rows, int index) {
    int panels = 0;
    for (const Product& each : products) panels += each.linear->matrix.panels();
    team_.share(panels, [&](int panel) {
      int number = 0;
      for (int count; panel >= (count = products[number].linear->matrix.panels()); number++) panel -= count;
      const auto [linear, out, stride, adapter] = products[number];
      write_panel(*linear, panel, rows, out, stride);
      if (adapter) adaptation_.raise(adapter, number, index, panel, out, stride);
    });
  }

  // Adds a product, normed if it has a norm, to the residual.
  template <LowRank AdapterLayer::* PART>
  void add(const Linear& linear, const Rows& rows, const Norm& norm, int index) {
    adaptation_.lower<PART>(team_, rows, index);
    const float scale = model_.residual_scale;
    if (norm.kind == NO_NORM)
      return team_.share(linear.matrix.panels(), [&](int panel) {
        const int first = panel * PANEL, size = std::min(PANEL, linear.matrix.outputs - first);
        multiply_panel(linear.matrix, panel, rows, [&](int row, const float* sums) {
          float* to = residual_ + (size_t)row * model_.hidden + first;
          for (int i = 0; i < size; i++) {
            const float value = linear.bias ? sums[i] + linear.bias[first + i] : sums[i];
            to[i] += scale == 1 ? value : value * scale;
          }
        });
        adaptation_.raise(PART, 0, index, panel, residual_, model_.hidden, scale);
      });
    multiply_all({{&linear, added_, model_.hidden, PART}}, rows, index);
    team_.share(rows_, [&](int row) { add_row(norm, row); });
  }

  // The same for a product that no adapter changes.
  void add_product(const Linear& linear, const Rows& rows, const Norm& norm) {
    multiply_all({{&linear, added_, model_.hidden}}, rows, 0);
    team_.share(rows_, [&](int row) { add_row(norm, row); });
  }

  // Adds a row of what is to be added, normed, to the residual.
  void add_row(const Norm& norm, int row) { add_row(norm, row, residual_ + (size_t)row * model_.hidden); }
  void add_row(const Norm& norm, int row, float* to) {
    float* added = added_ + (size_t)row * model_.hidden;
    if (norm.kind != NO_NORM) normalize(norm, added, model_.epsilon, added);
    const Floats scale = all(model_.residual_scale);
    for (int i = 0; i < model_.hidden; i += LANES) store(to + i, fma(scale, load(added + i), load(to + i)));
  }

  Engine& engine_;
  Team& team_;
  Adaptation& adaptation_;
  const Model& model_;
  int rows_;
  float *residual_, *normed_;  // [rows, hidden]
  float* added_;               // what a post-norm reads, or what adapters add to `up`
};

}  // namespace outrider
