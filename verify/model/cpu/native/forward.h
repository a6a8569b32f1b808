// The forward of a decoder: embedding, layers of attention and a feed-forward part, norm and head.
//
// One call computes a whole step. Threads, if several are faster, are woken once; between the phases of a layer they meet at a
// barrier. Activations are float32. Everything is computed row by row in one order, so a row's logits have the same bits alone,
// in a draft tree, in a prompt, and beside rows of other streams.
#pragma once
#include "altup.h"
#include "products.h"

namespace outrider {

// The largest of a size over all layers.
template <class Size>
int widest(const Model& model, const Size& size) {
  int most = 0;
  for (int layer = 0; layer < model.layers; layer++) most = std::max(most, (int)size(model.layer[layer]));
  return most;
}

// The most values of a row in `gated_`.
inline int inner_width(const Model& model) {
  return widest(model, [](const Layer& layer) {
    return std::max({layer.down.matrix.inputs, layer.embedding_output.matrix.inputs, layer.augment_up.matrix.inputs});
  });
}

// Computes a forward's phases in all threads. Those of each kind are in a header of their own, included below.
class Forward : Products {
 public:
  Forward(Engine& engine, const Model& model, int rows, int64_t* positions, std::span<const Stream> streams)
      : Products(engine, model, rows, std::max(inner_width(model), model.hidden)), positions_(positions),
        streams_(streams.begin(), streams.end()) {
    adaptation_.find(streams, rows);
    fit_embeddings();
    fit_residuals();
    fit_attention();
    fit_recurrence();
    fit_mixtures();
    const int inner = inner_width(model);
    gated_ = engine.gated.of((size_t)rows * inner);
    // Sized for the widest input, so that no phase allocates.
    engine.blocks.of((size_t)rows * (std::max({model.hidden, attended_width(), inner}) / BLOCK));
  }

  // `kept` are the rows whose logits are returned.
  void run(int thread, const int64_t* tokens, std::span<const int64_t> kept, float* logits, const Tap& tap) {
    const int last = tap.states ? model_.layers : last_writer();
    team_.share(rows_, [&](int row) { embed(row, tokens[row]); });
    if (model_.embeddings.table.rows) embed_for_layers(tokens);
    if (model_.residuals) expand();
    for (int index = 0; index < model_.layers; index++) {
      const Layer& layer = model_.layer[index];
      keep_inputs(tap, index);
      if (layer.updates) team_.share(rows_, [&](int row) { predict(*layer.updates, residuals(row), model_.epsilon, predicted(row)); });
      if (layer.heads || layer.recurrence) mix_texts(thread, layer, index);
      if (index == last) team_.share(1, [&](int) { keep(layer, kept); });
      if (!layer.parallel) feed(layer, index);
      add_fed(layer, index);
      if (layer.updates) team_.share(rows_, [&](int row) { correct_row(*layer.updates, row); });
      if (layer.embedding_gate.matrix.outputs) add_embedding(layer, index);
      if (layer.scale != 1) team_.share(rows_, [&](int row) { scale_row(row, layer.scale); });
    }
    if (model_.residuals) merge();
    if (tap.states && !tap.count)
      team_.share(rows_, [&](int row) { norm_row(model_.norm, row, tap.states + (size_t)row * model_.hidden); });
    if (last == model_.layers) team_.share(1, [&](int) { keep({}, kept); });
    compute_logits(read_residual(model_.norm, model_.head.matrix.quantized()), logits);
  }

 private:
  // The last layer that writes what other rows read: keys and values, or a state.
  int last_writer() const {
    int last = model_.layers;
    for (int index = 0; index < model_.layers; index++)
      if (model_.layer[index].key.matrix.outputs || model_.layer[index].recurrence) last = index;
    return last;
  }

  // Leaves the other rows out of all that follows.
  void keep(const Layer& layer, std::span<const int64_t> kept) {
    const int hidden = model_.hidden, embedded = model_.layers * model_.embeddings.table.width;
    const std::pair<float*, int> values[] = {{residual_, hidden},
                                             {normed_, hidden},
                                             {angles_, angles_width_},
                                             {gated_, layer.down.matrix.inputs},
                                             {embedded_, embedded},
                                             {others_, others_width_},
                                             {predicted_, model_.residuals ? hidden : 0}};
    rows_ = 0;
    for (const int64_t row : kept) {
      for (const auto& [from, width] : values)
        if (width) std::memmove(from + (size_t)rows_ * width, from + row * width, 4 * (size_t)width);
      engine_.texts[rows_] = engine_.texts[row];
      positions_[rows_++] = positions_[row];
    }
    for (Stream& stream : streams_) stream.rows = stream.kept;
    adaptation_.find(streams_, rows_);
  }

  // Attention and recurrence: what a row reads of its text.
  void mix_texts(int thread, const Layer& layer, int index) {
    const Recurrence* recurrence = layer.recurrence;
    const bool quantized =
        any_quantized({&layer.query, &layer.key, &layer.value, &layer.query_gate, &layer.augment_down}) ||
        (layer.latent && layer.latent->query_down.matrix.quantized()) ||
        (recurrence && any_quantized({&recurrence->convolved, &recurrence->keys, &recurrence->values, &recurrence->gate, &recurrence->beta,
                                      &recurrence->step, &recurrence->gate_down, &recurrence->step_down}));
    const Rows normed = read_residual(layer.attention_norm, quantized);
    if (layer.latent) project(layer, *layer.latent, normed, index);
    else if (layer.heads) project(layer, normed, index);
    if (recurrence) project(*recurrence, normed);
    if (layer.parallel) feed(layer, index);
    if (layer.heads) {
      team_.share(rows_, [&](int row) { place(layer, row); });
      attend_all(thread, layer);
      add_attended(layer, index);
    }
    if (layer.augment_up.matrix.outputs) augment(layer);
    if (recurrence) recur(thread, layer, *recurrence);
  }

  static bool any_quantized(std::initializer_list<const Linear*> linears) {
    return std::any_of(linears.begin(), linears.end(), [](const Linear* each) { return each->matrix.quantized(); });
  }

  void keep_inputs(const Tap& tap, int layer) {
    for (int number = 0; tap.states && number < tap.count; number++)
      if (tap.layers[number] == layer)
        team_.share(rows_, [&](int row) {
          float* to = tap.states + ((size_t)row * tap.count + number) * model_.hidden;
          std::memcpy(to, residual_ + (size_t)row * model_.hidden, 4 * (size_t)model_.hidden);
        });
  }

  void scale_row(int row, float scale) {
    float* to = residual_ + (size_t)row * model_.hidden;
    for (int i = 0; i < model_.hidden; i += LANES) store(to + i, load(to + i) * all(scale));
  }

  // A row's stream, and its first row.
  std::pair<int, int> locate(int row) const {
    int s = 0, first = 0;
    while (row - first >= streams_[s].rows) first += streams_[s++].rows;
    return {s, first};
  }

  // A buffer for the rows, as wide as the widest layer's.
  template <class Size>
  float* fit(Buffer<float>& buffer, const Size& size) {
    return buffer.of((size_t)rows_ * widest(model_, size));
  }

  // Of forward_embeddings.h.
  void fit_embeddings();
  void embed(int row, int64_t token);
  void embed_for_layers(const int64_t* tokens);
  void add_embedding(const Layer& layer, int index);

  // Of forward_residuals.h.
  void fit_residuals();
  Residuals residuals(int row);
  float* predicted(int row) { return predicted_ + (size_t)row * model_.hidden; }
  void expand();
  void correct_row(const Updates& updates, int row);
  void merge();
  void augment(const Layer& layer);

  // Of forward_attention.h.
  void fit_attention();
  int attended_width() const;
  void project(const Layer& layer, const Rows& rows, int index);
  void place(const Layer& layer, int row);
  void turn(const Layer& layer, const Norm& norm, int row, float* values, int heads, float scale);
  float query_scale(const Layer& layer, int row) const;
  void attend_all(int thread, const Layer& layer);
  void add_attended(const Layer& layer, int index);

  // Of forward_latent.h.
  void project(const Layer& layer, const Latent& latent, const Rows& rows, int index);
  void raise_values(const Layer& layer, const Linear& value_up);
  template <class Compute>
  void multiply_heads(const Linear& linear, int heads, float* floats, const Heads& out, const Compute& compute);

  // Of forward_recurrence.h.
  void fit_recurrence();
  void project(const Recurrence& layer, const Rows& rows);
  void recur(int thread, const Layer& layer, const Recurrence& recurrence);
  Recurring recurring(const Recurrence& layer, int stream, int first);

  // Of forward_feed.h.
  void feed(const Layer& layer, int index);
  void add_fed(const Layer& layer, int index);

  // Of forward_mixture.h.
  void fit_mixtures();
  void mix(const Layer& layer, const Mixture& mixture, int index);
  void route(const Mixture& mixture);
  void multiply_uses(const Layer& layer, const Linear* experts);
  void add_uses(const Layer& layer, const Mixture& mixture, int row);
  template <class Compute>
  void gather(int inputs, bool quantized, float* floats, const Compute& compute);
  Rows rows_of(const Uses::Part& part, int inputs, float* floats);

  // Of forward_logits.h.
  void compute_logits(const Rows& rows, float* logits);

  int64_t* positions_;
  std::vector<Stream> streams_;
  float *queries_, *keys_, *values_, *attended_, *gated_, *angles_, *embedded_, *others_, *predicted_;
  // Of latent attention: what `query` reads, [rows, inputs]; then parts of queries, [heads, rows, inputs of `key_up`]. Of recurrent
  // layers: what `gate` and `step` read.
  float* parts_;
  float *scores_, *gathered_, *inner_, *outputs_, *gates_, *mixed_, *convolved_, *matrices_ = nullptr;
  size_t space_ = 0;  // of a thread's matrices
  int angles_width_ = 0, others_width_ = 0;
};

}  // namespace outrider

#include "forward_attention.h"
#include "forward_embeddings.h"
#include "forward_feed.h"
#include "forward_latent.h"
#include "forward_logits.h"
#include "forward_mixture.h"
#include "forward_recurrence.h"
#include "forward_residuals.h"
