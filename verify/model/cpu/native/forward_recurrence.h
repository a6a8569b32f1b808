// A recurrent layer in a forward: what its rows write to the states of their streams, and read of them.
#pragma once
#include "forward.h"

namespace outrider {

inline void Forward::fit_recurrence() {
  mixed_ = fit(engine_.mixed, [](const Layer& layer) { return layer.recurrence ? mixed_width(*layer.recurrence) : 0; });
  convolved_ = fit(engine_.convolved, [](const Layer& layer) { return layer.recurrence ? layer.recurrence->channels : 0; });
  engine_.paths.clear();
  size_t matrices = 0;
  for (const Stream& stream : streams_) {
    if (!stream.states) return;
    engine_.paths.emplace_back(stream.states->parents, stream.states->known + stream.rows);
    matrices = std::max<size_t>(matrices, engine_.paths.back().matrices);
  }
  space_ = (matrices + 1) * widest(model_, [](const Layer& layer) {
             return layer.recurrence ? (layer.recurrence->key_dim + 1) * layer.recurrence->value_dim : 0;
           });
  matrices_ = engine_.matrices.of(space_ * engine_.spaces.size());  // of all threads: who works is decided after this
}

inline void Forward::project(const Recurrence& layer, const Rows& rows) {
  const int width = mixed_width(layer), gate = layer.channels, beta = gate + layer.gate.matrix.outputs;
  const int keys = layer.convolved.matrix.outputs, values = keys + layer.keys.matrix.outputs;
  const int few = layer.gate_down.matrix.outputs, few_steps = layer.step_down.matrix.outputs;
  float* steps = parts_ + (size_t)rows_ * few;
  const Product own[] = {{&layer.gate, mixed_ + gate, width}, {&layer.step, mixed_ + beta + beta_width(layer), width}};
  const Product products[] = {{&layer.convolved, mixed_, width},
                              {&layer.keys, mixed_ + keys, width},
                              {&layer.values, mixed_ + values, width},
                              {&layer.beta, mixed_ + beta, width},
                              few ? Product{&layer.gate_down, parts_, few} : own[0],
                              few ? Product{&layer.step_down, steps, few_steps} : own[1]};
  multiply_all(products, rows, 0);
  if (!few) return;
  multiply_all({own[0]}, prepare(parts_, rows_, few, layer.gate.matrix.quantized()), 0);
  multiply_all({own[1]}, prepare(steps, rows_, few_steps, layer.step.matrix.quantized()), 0);
}

// Adds the output of a recurrent layer, whose inputs are projected, to the residual.
inline void Forward::recur(int thread, const Layer& layer, const Recurrence& recurrence) {
  const int streams = (int)streams_.size(), heads = recurrence.kind == CONVOLUTION ? 0 : recurrence.heads;
  const int width = recurrence.output.matrix.inputs;
  team_.share(streams, [&](int s) { fold_inputs(*streams_[s].states, recurrence); });
  team_.share(rows_, [&](int row) {
    const auto [s, first] = locate(row);
    recurring(recurrence, s, first).keep_input(row - first);
  });
  team_.share(rows_, [&](int row) {
    const auto [s, first] = locate(row);
    recurring(recurrence, s, first).convolve(row - first, attended_ + (size_t)row * width);
  });
  team_.share(streams * heads, [&](int task) {
    const int s = task / heads, head = task % heads;
    int first = 0;
    for (int before = 0; before < s; before++) first += streams_[before].rows;
    float* out = attended_ + (size_t)first * width + head * recurrence.value_dim;
    recurring(recurrence, s, first).scan(head, engine_.paths[s], matrices_ + thread * space_, out, width);
  });
  const Rows found = prepare(attended_, rows_, width, recurrence.output.matrix.quantized(), [&](int row) {
    const auto [s, first] = locate(row);
    if (heads) recurring(recurrence, s, first).finish(row - first, attended_ + (size_t)row * width);
  });
  add_product(recurrence.output, found, layer.attention_post_norm);
}

inline Recurring Forward::recurring(const Recurrence& layer, int stream, int first) {
  return {layer, *streams_[stream].states, streams_[stream].rows, mixed_ + (size_t)first * mixed_width(layer),
          convolved_ + (size_t)first * layer.channels};
}

}  // namespace outrider
