// A mixture of experts in a forward: each expert's products are of the rows that use it.
#pragma once
#include "forward.h"

namespace outrider {

inline void Forward::fit_mixtures() {
  const int used = widest(model_, [](const Layer& layer) { return layer.mixture ? layer.mixture->used : 0; });
  const int inner = widest(model_, [](const Layer& layer) { return layer.mixture ? layer.mixture->experts[2].matrix.inputs : 0; });
  const size_t uses = (size_t)rows_ * used;
  scores_ = fit(engine_.scores, [](const Layer& layer) { return layer.mixture ? layer.mixture->count : 0; });
  gathered_ = engine_.gathered.of(uses * model_.hidden);
  inner_ = engine_.inner.of(uses * inner);
  outputs_ = engine_.outputs.of(uses * model_.hidden);
  engine_.blocks.of(uses * (std::max(model_.hidden, inner) / BLOCK));
}

// Adds the output of a mixture to the residual. `feed` has normed the rows, and computed the inner values of the shared expert.
inline void Forward::mix(const Layer& layer, const Mixture& mixture, int index) {
  if (layer.down.matrix.outputs) {
    const Rows gated = prepare(gated_, rows_, layer.down.matrix.inputs, layer.down.matrix.quantized());
    adaptation_.lower<&AdapterLayer::down>(team_, gated, index);
    multiply_all({{&layer.down, added_, model_.hidden, &AdapterLayer::down}}, gated, index);
  }
  if (mixture.router_norm.kind) read_residual(mixture.router_norm, false);
  route(mixture);
  if (mixture.norm.kind) read_residual(mixture.norm, false);
  multiply_uses(layer, mixture.experts);
  team_.share(rows_, [&](int row) { add_uses(layer, mixture, row); });
}

// The outputs of all uses of experts, in their order.
inline void Forward::multiply_uses(const Layer& layer, const Linear* experts) {
  const Uses& uses = engine_.uses;
  const int hidden = model_.hidden;
  const bool quantized = experts[0].matrix.quantized() || experts[1].matrix.quantized();
  gather(hidden, quantized, gathered_,
         [&](int use) { std::memcpy(gathered_ + (size_t)use * hidden, normed_ + (size_t)uses.rows[use] * hidden, 4 * (size_t)hidden); });
  const int width = experts[1].matrix.outputs, panels = experts[1].matrix.panels();
  team_.share_parts((int)uses.parts.size() * panels, [&](int task, int end) {
    for (int next; task < end; task = next) {
      next = std::min(end, (task / panels + 1) * panels);
      const auto& part = uses.parts[task / panels];
      const Linear *gate = experts + 3 * part.expert, *up = gate + 1;
      const Rows rows = rows_of(part, hidden, gathered_);
      float* to = inner_ + (size_t)part.first * width;
      for (int i = task; i < next && gate->matrix.outputs; i++) write_panel(*gate, i % panels, rows, to, width);
      for (int i = task; i < next; i++) write_inner(layer, *gate, *up, i % panels, rows, to, width);
    }
  });
  gather(width, experts[2].matrix.quantized(), inner_, [](int) {});
  const int last = experts[2].matrix.panels();
  team_.share((int)uses.parts.size() * last, [&](int task) {
    const auto& part = uses.parts[task / last];
    float* to = outputs_ + (size_t)part.first * hidden;
    write_panel(experts[3 * part.expert + 2], task % last, rows_of(part, width, inner_), to, hidden);
  });
}

// Adds a row's outputs, weighted, and that of the shared expert, if there is one, to the residual.
inline void Forward::add_uses(const Layer& layer, const Mixture& mixture, int row) {
  const Uses& uses = engine_.uses;
  const int hidden = model_.hidden, used = mixture.used;
  float *to = added_ + (size_t)row * hidden, *sum = normed_ + (size_t)row * hidden;
  std::fill_n(sum, hidden, 0.0f);
  for (int k = 0; k < used; k++) {
    const size_t use = (size_t)row * used + k;
    const float* from = outputs_ + (size_t)uses.places[use] * hidden;
    for (int i = 0; i < hidden; i += LANES) store(sum + i, fma(all(uses.weights[use]), load(from + i), load(sum + i)));
  }
  norm_values(mixture.post_norm, sum, hidden);
  if (!layer.down.matrix.outputs) std::fill_n(to, hidden, 0.0f);
  norm_values(mixture.shared_post_norm, to, hidden);
  const float gate = mixture.shared_gate.matrix.outputs ? 1 / (1 + std::exp(-scores_[(size_t)row * mixture.count])) : 1;
  for (int i = 0; i < hidden; i += LANES) store(to + i, fma(all(gate), load(to + i), load(sum + i)));
  add_row(layer.feed_forward_post_norm, row);
}

// Chooses the experts of all rows. Then, `scores_` has the logits of the shared expert's gate, if there is one.
inline void Forward::route(const Mixture& mixture) {
  const Rows rows = {model_.hidden, rows_, normed_, nullptr};
  Uses& uses = engine_.uses;
  team_.share(1, [&](int) { uses.resize((size_t)rows_ * mixture.used); });
  multiply_all({{&mixture.router, scores_, mixture.count}}, rows, 0);
  team_.share(rows_, [&](int row) {
    const size_t first = (size_t)row * mixture.used;
    Router(mixture).choose(scores_ + (size_t)row * mixture.count, &uses.experts[first], &uses.weights[first]);
  });
  team_.share(1, [&](int) {
    uses.sort(mixture.count, mixture.used);
    engine_.touched += (int)uses.parts.size();
    if (mixture.shared_gate.matrix.outputs) write_panel(mixture.shared_gate, 0, rows, scores_, mixture.count);
  });
}

// Computes the rows of uses, and quantises them for quantised weights.
template <class Compute>
void Forward::gather(int inputs, bool quantized, float* floats, const Compute& compute) {
  const Uses& uses = engine_.uses;
  team_.share((int)uses.rows.size(), [&](int use) {
    compute(use);
    const auto& part = uses.parts[uses.part_of[use]];
    if (quantized) quantize(rows_of(part, inputs, floats), use - part.first);
  });
}

inline Rows Forward::rows_of(const Uses::Part& part, int inputs, float* floats) {
  const size_t first = part.first, blocks = inputs / BLOCK;
  return {inputs, part.count, floats + first * inputs, engine_.blocks.of(engine_.uses.rows.size() * blocks) + first * blocks};
}

}  // namespace outrider
