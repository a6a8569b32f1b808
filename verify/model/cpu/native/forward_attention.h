// Attention of a layer in a forward: queries, keys and values of the rows, what these read of their texts, and the output.
#pragma once
#include "attention_tasks.h"
#include "forward.h"

namespace outrider {

// The most values of a row that attention, or a recurrent layer, reads and returns.
inline int Forward::attended_width() const {
  return widest(model_, [](const Layer& layer) {
    const Matrix& query = layer.query.matrix;
    const int recurrent = layer.recurrence ? layer.recurrence->output.matrix.inputs : 0;
    return std::max({layer.heads * layer.head_dim, query.inputs, query.outputs, layer.output.matrix.inputs, recurrent});
  });
}

inline void Forward::fit_attention() {
  const auto cached = [](const Layer& layer) { return layer.kv_heads * layer.head_dim; };
  queries_ = engine_.queries.of((size_t)rows_ * attended_width());
  attended_ = engine_.attended.of((size_t)rows_ * attended_width());
  keys_ = fit(engine_.keys, cached);
  values_ = fit(engine_.values, cached);
  gates_ = fit(engine_.gates, [](const Layer& layer) { return layer.query_gate.matrix.outputs; });
  parts_ = fit(engine_.parts, [](const Layer& layer) {
    const Latent* latent = layer.latent;
    const Recurrence* recurrence = layer.recurrence;
    if (recurrence) return recurrence->gate_down.matrix.outputs + recurrence->step_down.matrix.outputs;
    return latent ? std::max(latent->query_down.matrix.outputs, layer.heads * latent->key_up.matrix.inputs) : 0;
  });
  for (AttentionSpace& space : engine_.spaces) space.fit(widest(model_, [](const Layer& layer) { return layer.head_dim; }));
  find_texts(streams_, engine_.texts);
}

inline void Forward::project(const Layer& layer, const Rows& rows, int index) {
  adaptation_.lower<&AdapterLayer::query, &AdapterLayer::key, &AdapterLayer::value>(team_, rows, index);
  const Product products[] = {{&layer.query, queries_, layer.query.matrix.outputs, &AdapterLayer::query},
                              {&layer.key, keys_, layer.key.matrix.outputs, &AdapterLayer::key},
                              {&layer.value, values_, layer.value.matrix.outputs, &AdapterLayer::value},
                              {&layer.query_gate, gates_, layer.query_gate.matrix.outputs},
                              {&layer.augment_down, gated_, layer.augment_down.matrix.outputs}};
  multiply_all(products, rows, index);
}

// Norms and rotates a row's queries and keys, and writes its keys and values to the cache if the layer has any.
inline void Forward::place(const Layer& layer, int row) {
  const int width = layer.head_dim;
  float *keys = keys_ + (size_t)row * layer.kv_heads * width, *values = values_ + (size_t)row * layer.kv_heads * width;
  turn(layer, layer.query_norm, row, queries_ + (size_t)row * layer.heads * width, layer.heads, query_scale(layer, row));
  if (!layer.key.matrix.outputs) return;
  if (!layer.value.matrix.outputs && !layer.latent) std::copy_n(keys, layer.kv_heads * width, values);
  turn(layer, layer.key_norm, row, keys, layer.kv_heads, 1);
  norm_values(layer.value_norm, values, layer.kv_heads * width);
  const auto [s, first] = locate(row);
  const int64_t slot = streams_[s].start + row - first;
  for (int head = 0; head < layer.kv_heads; head++) {
    write_position(keys_of(streams_[s], layer, head), slot, keys + head * width);
    if (!layer.latent) write_position(values_of(streams_[s], layer, head), slot, values + head * width);
  }
}

// Norms and rotates the heads of a row's queries or keys.
inline void Forward::turn(const Layer& layer, const Norm& norm, int row, float* values, int heads, float scale) {
  const int width = layer.head_dim;
  const float* angles = angles_ + (size_t)row * angles_width_;
  for (int table = 0; table < layer.rotary; table++) angles += model_.rotary[table].size;
  norm_values(norm, values, heads * layer.value_dim);  // of latent attention, only the latent of the one key
  for (int head = 0; layer.rotary >= 0 && head < heads; head++) {
    const int size = model_.rotary[layer.rotary].size;
    rotate(values + head * width + layer.rotated, angles, angles + size / 2, size);
  }
  for (int i = 0; scale != 1 && i < heads * width; i++) values[i] *= scale;
}

inline float Forward::query_scale(const Layer& layer, int row) const {
  if (layer.rotary < 0 || !model_.rotary[layer.rotary].temperature) return 1;
  const Rotary& rotary = model_.rotary[layer.rotary];
  return 1 + rotary.temperature * std::log(1 + std::floor((float)positions_[row] / rotary.span));
}

inline void Forward::attend_all(int thread, const Layer& layer) {
  const AttentionBlock block = best_block(layer, streams_, rows_, team_.working());
  const int width = layer.head_dim, value = layer.value_dim;
  const Heads queries{queries_, layer.heads * width, width, width};
  Heads outputs{attended_, layer.heads * value, value, value};
  if (layer.latent) outputs = {attended_, value, (int64_t)rows_ * value, value};  // as `raise_values` reads them
  team_.share(block.tasks_of(streams_, layer), [&](int number) {
    const AttentionTask task = find_task(number, block, layer, streams_);
    const Stream& stream = streams_[task.stream];
    const Scoring scoring = {layer.scaling, layer.cap, layer.window, layer.sinks ? layer.sinks + task.head : nullptr};
    attend(engine_.spaces[thread], keys_of(stream, layer, task.key_head), values_of(stream, layer, task.key_head),
           engine_.texts.data() + task.row, task.rows, task.heads, queries.from(task.row, task.head), outputs.from(task.row, task.head),
           scoring);
  });
}

// Adds the output of attention, gated if it has a gate, to the residual.
inline void Forward::add_attended(const Layer& layer, int index) {
  if (layer.latent) raise_values(layer, layer.latent->value_up);
  const int width = layer.output.matrix.inputs;
  float* found = layer.latent ? queries_ : attended_;
  const Rows attended = prepare(found, rows_, width, layer.output.matrix.quantized(), [&](int row) {
    float *to = found + (size_t)row * width, *gate = gates_ + (size_t)row * width;
    for (int i = 0; layer.query_gate.matrix.outputs && i < width; i += LANES)
      store(to + i, load(to + i) / (all(1) + exponential(-load(gate + i))));
  });
  add<&AdapterLayer::output>(layer.output, attended, layer.attention_post_norm, index);
}

}  // namespace outrider
