// The forward of a decoder: embedding, layers of attention and a feed-forward part, norm and head.
//
// One call computes a whole step. Threads, if several are faster, are woken once; between the phases of a layer they meet at a
// barrier. Activations are float32. Everything is computed row by row in one order, so a row's logits have the same bits alone, in
// a draft tree, in a prompt, and beside rows of other streams.
#pragma once
#include "adaptation.h"
#include "altup.h"
#include "attention.h"
#include "mixture.h"
#include "recurrence.h"
#include "stored.h"

namespace outrider {

// The most rows of a task of attention, which read keys and values together.
constexpr int ROW_BLOCK = 16;
// Reading the keys and values of a task takes as long as the products of this many queries (measured with AVX-512).
constexpr int READING_QUERIES = 6;
constexpr int MOST_EMBEDDING = 1024;  // the width of a layer's embeddings
constexpr int FEW_ROWS = 32;   // from which on more threads always gain: arithmetic takes the time

// Threads, and the memory of their steps.
struct Engine {
  explicit Engine(int threads) : team(threads), spaces(threads) {}
  Team team;
  std::vector<AttentionSpace> spaces;
  Habit habits[6];  // of forwards of fewer than FEW_ROWS, by the bits of their number of rows
  Buffer<float> residual, normed, queries, keys, values, attended, gated, added, angles;
  Buffer<float> scores, gathered, inner, outputs;  // of mixtures
  Buffer<float> gates, parts;                      // of attention; of latent attention: what `parts_` has
  Buffer<float> embedded;                          // of layers, for tokens
  Buffer<float> others, predicted;                 // residuals
  Buffer<float> mixed, convolved, matrices;        // of recurrent layers
  Uses uses;
  Adaptation adaptation;
  Buffer<RowBlock> blocks;
  std::vector<Text> texts;
  std::vector<Paths> paths;  // of streams
};

// The largest of a size over all layers.
template <class Size>
int widest(const Model& model, const Size& size) {
  int most = 0;
  for (int layer = 0; layer < model.layers; layer++) most = std::max(most, (int)size(model.layer[layer]));
  return most;
}

// Computes a forward's phases in all threads.
class Forward {
 public:
  Forward(Engine& engine, const Model& model, int rows, int64_t* positions, std::span<const Stream> streams)
      : engine_(engine), team_(engine.team), adaptation_(engine.adaptation), model_(model), rows_(rows), positions_(positions),
        streams_(streams.begin(), streams.end()) {
    const size_t count = rows;
    const int attended = widest(model, [](const Layer& layer) {
      const Matrix& query = layer.query.matrix;
      return std::max({layer.heads * layer.head_dim, query.inputs, query.outputs, layer.output.matrix.inputs, inputs_of_output(layer)});
    });
    const int cached = widest(model, [](const Layer& layer) { return layer.kv_heads * layer.head_dim; });
    const int gated = widest(model, [](const Layer& layer) {
      return std::max({layer.down.matrix.inputs, layer.embedding_output.matrix.inputs, layer.augment_up.matrix.inputs});
    });
    for (int table = 0; table < model.rotaries; table++) angles_width_ += model.rotary[table].size;
    residual_ = engine.residual.of(count * model.hidden);
    normed_ = engine.normed.of(count * model.hidden);
    queries_ = engine.queries.of(count * attended);
    keys_ = engine.keys.of(count * cached);
    values_ = engine.values.of(count * cached);
    attended_ = engine.attended.of(count * attended);
    gated_ = engine.gated.of(count * gated);
    gates_ = engine.gates.of(count * widest(model, [](const Layer& layer) { return layer.query_gate.matrix.outputs; }));
    embedded_ = engine.embedded.of(count * model.layers * model.embeddings.table.width);
    others_width_ = std::max(model.residuals - 1, 0) * model.hidden;
    others_ = engine.others.of(count * others_width_);
    predicted_ = engine.predicted.of(model.residuals ? count * model.hidden : 0);
    mixed_ = engine.mixed.of(count * widest(model, [](const Layer& layer) { return layer.recurrence ? mixed_width(*layer.recurrence) : 0; }));
    parts_ = engine.parts.of(count * widest(model, [](const Layer& layer) {
      return layer.latent ? std::max(layer.latent->query_down.matrix.outputs, layer.heads * layer.latent->key_up.matrix.inputs) : 0;
    }));
    for (AttentionSpace& space : engine.spaces) space.fit(widest(model, [](const Layer& layer) { return layer.head_dim; }));
    convolved_ = engine.convolved.of(count * widest(model, [](const Layer& layer) { return layer.recurrence ? layer.recurrence->channels : 0; }));
    // What a post-norm reads, or what adapters add to `up`.
    added_ = engine.added.of(count * std::max(gated, model.hidden));
    angles_ = engine.angles.of(count * angles_width_);
    find_texts();
    adaptation_.find(streams, rows);
    find_paths();
    const size_t uses = count * widest(model, [](const Layer& layer) { return layer.mixture ? layer.mixture->used : 0; });
    const int inner = widest(model, [](const Layer& layer) { return layer.mixture ? layer.mixture->experts[2].matrix.inputs : 0; });
    scores_ = engine.scores.of(count * widest(model, [](const Layer& layer) { return layer.mixture ? layer.mixture->count : 0; }));
    gathered_ = engine.gathered.of(uses * model.hidden);
    inner_ = engine.inner.of(uses * inner);
    outputs_ = engine.outputs.of(uses * model.hidden);
    // Sized for the widest input, so that no phase allocates.
    engine.blocks.of(std::max(count * (std::max({model.hidden, attended, gated}) / BLOCK), uses * (std::max(model.hidden, inner) / BLOCK)));
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
      if (layer.updates)
        team_.share(rows_, [&](int row) { predict(*layer.updates, residuals(row), model_.epsilon, predicted(row)); });
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
    const std::pair<float*, int> values[] = {
        {residual_, hidden}, {normed_, hidden},   {angles_, angles_width_}, {gated_, layer.down.matrix.inputs},
        {embedded_, embedded}, {others_, others_width_}, {predicted_, model_.residuals ? hidden : 0}};
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
        (recurrence && any_quantized({&recurrence->convolved, &recurrence->gate, &recurrence->beta, &recurrence->step}));
    const Rows normed = read_residual(layer.attention_norm, quantized);
    if (layer.latent) project(layer, *layer.latent, normed, index);
    else if (layer.heads) project(layer, normed, index);
    if (recurrence) project(*recurrence, normed);
    if (layer.parallel) feed(layer, index);
    if (layer.heads) {
      team_.share(rows_, [&](int row) { place(layer, row); });
      attend_all(thread, layer);
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
    if (layer.augment_up.matrix.outputs) augment(layer);
    if (recurrence) recur(thread, layer, *recurrence);
  }

  // Adds the feed-forward part, if there is one, to the residual.
  void add_fed(const Layer& layer, int index) {
    if (layer.mixture) return mix(layer, *layer.mixture, index);
    if (!layer.down.matrix.outputs) return;
    const Rows gated = prepare(gated_, rows_, layer.down.matrix.inputs, layer.down.matrix.quantized());
    add<&AdapterLayer::down>(layer.down, gated, layer.feed_forward_post_norm, index);
  }

  static bool any_quantized(std::initializer_list<const Linear*> linears) {
    return std::any_of(linears.begin(), linears.end(), [](const Linear* each) { return each->matrix.quantized(); });
  }

  static int inputs_of_output(const Layer& layer) { return layer.recurrence ? layer.recurrence->output.matrix.inputs : 0; }

  void find_paths() {
    engine_.paths.clear();
    size_t matrices = 0;
    for (const Stream& stream : streams_) {
      if (!stream.states) return;
      engine_.paths.emplace_back(stream.states->parents, stream.states->known + stream.rows);
      matrices = std::max<size_t>(matrices, engine_.paths.back().matrices);
    }
    const auto size = [](const Layer& layer) { return layer.recurrence ? (layer.recurrence->key_dim + 1) * layer.recurrence->value_dim : 0; };
    space_ = (matrices + 1) * widest(model_, size);
    matrices_ = engine_.matrices.of(space_ * team_.working());
  }

  void find_texts() {
    engine_.texts.resize(rows_);
    int row = 0;
    for (const Stream& stream : streams_) {
      const int32_t* slots = stream.slots;
      for (int i = 0; i < stream.rows; i++, row++) {
        if (!stream.counts) {
          engine_.texts[row] = {stream.start + i + 1, stream.start + i + 1, nullptr};
          continue;
        }
        int common = 0;
        while (common < stream.counts[i] && slots[common] == stream.length + common) common++;
        engine_.texts[row] = {stream.length + common, stream.length + stream.counts[i], slots + common};
        slots += stream.counts[i];
      }
    }
  }

  void embed(int row, int64_t token) {
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
  void embed_for_layers(const int64_t* tokens) {
    const LayerEmbeddings& known = model_.embeddings;
    const int width = known.table.width, count = known.table.rows / model_.layers;
    const Product products[] = {{&known.projection, embedded_, model_.layers * width}};
    multiply_all(products, read_residual({}, known.projection.matrix.quantized()), 0);
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
  void add_embedding(const Layer& layer, int index) {
    const int width = layer.embedding_gate.matrix.outputs;
    const Product gates[] = {{&layer.embedding_gate, gated_, width}};
    const float* scale = layer.updates ? layer.updates->scale : nullptr;
    const Rows rows = prepare(normed_, rows_, model_.hidden, layer.embedding_gate.matrix.quantized(), [&](int row) {
      float* to = normed_ + (size_t)row * model_.hidden;
      norm_row({}, row, to);
      for (int i = 0; scale && i < model_.hidden; i++) to[i] *= scale[i];
    });
    multiply_all(gates, rows, index);
    const Rows gated = prepare(gated_, rows_, width, layer.embedding_output.matrix.quantized(), [&](int row) {
      float* to = gated_ + (size_t)row * width;
      const float* own = embedded_ + ((size_t)row * model_.layers + index) * width;
      for (int i = 0; i < width; i += LANES) store(to + i, activate(load(to + i), layer.activation) * load(own + i));
    });
    const Product products[] = {{&layer.embedding_output, added_, model_.hidden}};
    multiply_all(products, gated, index);
    team_.share(rows_, [&](int row) {
      norm_values(layer.embedding_post_norm, added_ + (size_t)row * model_.hidden, model_.hidden);
      if (!layer.updates) add_row({}, row);
      for (int i = 1; i < model_.residuals; i++) add_row({}, row, residuals(row).at(i));
    });
  }

  Residuals residuals(int row) {
    return {residual_ + (size_t)row * model_.hidden, others_ + (size_t)row * others_width_, model_.residuals, model_.hidden};
  }
  float* predicted(int row) { return predicted_ + (size_t)row * model_.hidden; }

  void correct_row(const Updates& updates, int row) {
    correct(updates, residuals(row), model_.epsilon, predicted(row), normed_ + (size_t)row * model_.hidden);
  }

  // The other residuals of tokens' embeddings, as large as these.
  void expand() {
    const Rows rows = read_residual({}, model_.expand->matrix.quantized());
    for (int i = 1; i < model_.residuals; i++) {
      const Product products[] = {{&model_.expand[i - 1], others_ + (size_t)(i - 1) * model_.hidden, others_width_}};
      multiply_all(products, rows, 0);
    }
    team_.share(rows_, [&](int row) {
      for (int i = 1; i < model_.residuals; i++) rescale(residuals(row).at(i), residuals(row).first, model_.hidden);
    });
  }

  // The first residual becomes the mean of all, each projected and as large as it.
  void merge() {
    const int hidden = model_.hidden;
    const float part = 1 / (float)model_.residuals;
    team_.share(rows_, [&](int row) {
      for (int i = 0; i < hidden; i++) predicted(row)[i] = residuals(row).first[i] * part;
    });
    for (int index = 1; index < model_.residuals; index++) {
      const Linear& linear = model_.merge[index - 1];
      const Rows rows = prepare(normed_, rows_, hidden, linear.matrix.quantized(), [&](int row) {
        std::memcpy(normed_ + (size_t)row * hidden, residuals(row).at(index), 4 * (size_t)hidden);
      });
      const Product products[] = {{&linear, added_, hidden}};
      multiply_all(products, rows, 0);
      team_.share(rows_, [&](int row) {
        float* added = added_ + (size_t)row * hidden;
        rescale(added, residuals(row).first, hidden);
        for (int i = 0; i < hidden; i++) predicted(row)[i] += added[i] * part;
      });
    }
    team_.share(rows_, [&](int row) { std::memcpy(residuals(row).first, predicted(row), 4 * (size_t)hidden); });
  }

  // `project` has computed the few values, and `normed_` has the normed residual.
  void augment(const Layer& layer) {
    const Rows few = prepare(gated_, rows_, layer.augment_up.matrix.inputs, layer.augment_up.matrix.quantized());
    add_product(layer.augment_up, few, layer.augment_post_norm);
    team_.share(rows_, [&](int row) {
      float *to = residual_ + (size_t)row * model_.hidden, *normed = normed_ + (size_t)row * model_.hidden;
      for (int i = 0; i < model_.hidden; i += LANES) store(to + i, (load(to + i) + load(normed + i)) * all(std::sqrt(0.5f)));
    });
  }

  void scale_row(int row, float scale) {
    float* to = residual_ + (size_t)row * model_.hidden;
    for (int i = 0; i < model_.hidden; i += LANES) store(to + i, load(to + i) * all(scale));
  }

  void keep_inputs(const Tap& tap, int layer) {
    for (int number = 0; tap.states && number < tap.count; number++)
      if (tap.layers[number] == layer)
        team_.share(rows_, [&](int row) {
          float* to = tap.states + ((size_t)row * tap.count + number) * model_.hidden;
          std::memcpy(to, residual_ + (size_t)row * model_.hidden, 4 * (size_t)model_.hidden);
        });
  }

  void norm_row(const Norm& norm, int row, float* to) {
    const float* from = residual_ + (size_t)row * model_.hidden;
    if (norm.kind == NO_NORM)
      std::memcpy(to, from, 4 * (size_t)model_.hidden);
    else
      normalize(norm, from, model_.epsilon, to);
  }

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
    return prepare(normed_, rows_, model_.hidden, quantized, [&](int row) { norm_row(norm, row, normed_ + (size_t)row * model_.hidden); });
  }

  // A product of some rows, and where an adapter's part of it is.
  struct Product {
    const Linear* linear;
    float* out;
    int stride;
    LowRank AdapterLayer::*adapter = nullptr;
  };

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

  void project(const Layer& layer, const Rows& rows, int index) {
    adaptation_.lower<&AdapterLayer::query, &AdapterLayer::key, &AdapterLayer::value>(team_, rows, index);
    const Product products[] = {{&layer.query, queries_, layer.query.matrix.outputs, &AdapterLayer::query},
                                {&layer.key, keys_, layer.key.matrix.outputs, &AdapterLayer::key},
                                {&layer.value, values_, layer.value.matrix.outputs, &AdapterLayer::value},
                                {&layer.query_gate, gates_, layer.query_gate.matrix.outputs},
                                {&layer.augment_down, gated_, layer.augment_down.matrix.outputs}};
    multiply_all(products, rows, index);
  }

  // Computes latents and queries of them: the part of a query that is not rotated is multiplied by `key_up`, instead of all latents.
  void project(const Layer& layer, const Latent& latent, const Rows& rows, int index) {
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
  void raise_values(const Layer& layer, const Linear& value_up) {
    const int outputs = value_up.matrix.outputs, width = outputs / layer.heads;
    multiply_heads(value_up, layer.heads, attended_, {queries_, outputs, width, width}, [](int, int, float*) {});
  }

  // Products of each head's own rows, which `compute(row, head, to)` writes to `floats`, [heads, rows, inputs], and its own weights.
  template <class Compute>
  void multiply_heads(const Linear& linear, int heads, float* floats, const Heads& out, const Compute& compute) {
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
      multiply_panel(matrix, panel, rows_of(head), [&](int row, const float* sums) {
        std::memcpy(out.at(row, head) + first, sums, 4 * PANEL);
      });
    });
  }

  void project(const Recurrence& layer, const Rows& rows) {
    const int width = mixed_width(layer), gate = layer.channels, beta = gate + layer.gate.matrix.outputs;
    const Product products[] = {{&layer.convolved, mixed_, width},
                                {&layer.gate, mixed_ + gate, width},
                                {&layer.beta, mixed_ + beta, width},
                                {&layer.step, mixed_ + beta + beta_width(layer), width}};
    multiply_all(products, rows, 0);
  }

  // Adds the output of a recurrent layer, whose inputs are projected, to the residual.
  void recur(int thread, const Layer& layer, const Recurrence& recurrence) {
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
      if (heads) recurring(recurrence, s, first).finish(row - first, model_.epsilon, attended_ + (size_t)row * width);
    });
    add_product(recurrence.output, found, layer.attention_post_norm);
  }

  Recurring recurring(const Recurrence& layer, int stream, int first) {
    return {layer, *streams_[stream].states, streams_[stream].rows, mixed_ + (size_t)first * mixed_width(layer),
            convolved_ + (size_t)first * layer.channels};
  }

  // One panel of a product, with the bias.
  static void write_panel(const Linear& linear, int panel, const Rows& rows, float* out, int64_t stride) {
    const int first = panel * PANEL, size = std::min(PANEL, linear.matrix.outputs - first);
    multiply_panel(linear.matrix, panel, rows, [&](int row, const float* sums) {
      float* to = out + row * stride + first;
      for (int i = 0; i < size; i++) to[i] = linear.bias ? sums[i] + linear.bias[first + i] : sums[i];
    });
  }

  void compute_logits(const Rows& rows, float* logits) {
    const Linear& head = model_.head;
    const float scale = model_.logit_scale, cap = model_.logit_cap;
    team_.share(head.matrix.panels(), [&](int panel) {
      const int first = panel * PANEL, size = std::min(PANEL, head.matrix.outputs - first);
      multiply_panel(head.matrix, panel, rows, [&](int row, const float* sums) {
        float* to = logits + (size_t)row * head.matrix.outputs + first;
        for (int i = 0; i < size; i++) {
          const float value = head.bias ? sums[i] + head.bias[first + i] : sums[i];
          to[i] = scale == 1 ? value : value * scale;
        }
        if (!cap) return;
        alignas(64) float found[PANEL] = {};
        std::memcpy(found, to, 4 * size);
        for (int i = 0; i < PANEL; i += LANES) store(found + i, capped(load(found + i), cap));
        std::memcpy(to, found, 4 * size);
      });
    });
  }

  // Adds a product, normed if it has a norm, to the residual.
  template <LowRank AdapterLayer::*PART>
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
    team_.share(linear.matrix.panels(), [&](int panel) {
      write_panel(linear, panel, rows, added_, model_.hidden);
      adaptation_.raise(PART, 0, index, panel, added_, model_.hidden);
    });
    team_.share(rows_, [&](int row) { add_row(norm, row); });
  }

  // The same for a product that no adapter changes.
  void add_product(const Linear& linear, const Rows& rows, const Norm& norm) {
    const Product products[] = {{&linear, added_, model_.hidden}};
    multiply_all(products, rows, 0);
    team_.share(rows_, [&](int row) { add_row(norm, row); });
  }

  // Adds a row of what is to be added, normed, to the residual.
  void add_row(const Norm& norm, int row) { add_row(norm, row, residual_ + (size_t)row * model_.hidden); }
  void add_row(const Norm& norm, int row, float* to) {
    float* added = added_ + (size_t)row * model_.hidden;
    if (norm.kind != NO_NORM) normalize(norm, added, model_.epsilon, added);
    for (int i = 0; i < model_.hidden; i += LANES) store(to + i, fma(all(model_.residual_scale), load(added + i), load(to + i)));
  }

  // Adds the output of a mixture to the residual. `feed` has normed the rows, and computed the inner values of the shared expert.
  void mix(const Layer& layer, const Mixture& mixture, int index) {
    const int hidden = model_.hidden, used = mixture.used;
    const bool is_shared = layer.down.matrix.outputs;
    if (is_shared) {
      const Rows gated = prepare(gated_, rows_, layer.down.matrix.inputs, layer.down.matrix.quantized());
      adaptation_.lower<&AdapterLayer::down>(team_, gated, index);
      team_.share(layer.down.matrix.panels(), [&](int panel) {
        write_panel(layer.down, panel, gated, added_, hidden);
        adaptation_.raise(&AdapterLayer::down, 0, index, panel, added_, hidden);
      });
    }
    if (mixture.router_norm.kind) read_residual(mixture.router_norm, false);
    route(layer, mixture);
    if (mixture.norm.kind) read_residual(mixture.norm, false);
    const Uses& uses = engine_.uses;
    const Linear* experts = mixture.experts;
    const bool quantized = experts[0].matrix.quantized() || experts[1].matrix.quantized();
    gather(hidden, quantized, gathered_, [&](int use) {
      std::memcpy(gathered_ + (size_t)use * hidden, normed_ + (size_t)uses.rows[use] * hidden, 4 * (size_t)hidden);
    });
    const int width = experts[1].matrix.outputs, panels = experts[1].matrix.panels();
    team_.share((int)uses.parts.size() * panels, [&](int task) {
      const auto& part = uses.parts[task / panels];
      const Linear *gate = experts + 3 * part.expert, *up = gate + 1;
      const Rows rows = rows_of(part, hidden, gathered_);
      float* to = inner_ + (size_t)part.first * width;
      if (gate->matrix.outputs) write_panel(*gate, task % panels, rows, to, width);
      write_inner(layer, *gate, *up, task % panels, rows, to, width);
    });
    gather(width, experts[2].matrix.quantized(), inner_, [](int) {});
    const int last = experts[2].matrix.panels();
    team_.share((int)uses.parts.size() * last, [&](int task) {
      const auto& part = uses.parts[task / last];
      write_panel(experts[3 * part.expert + 2], task % last, rows_of(part, width, inner_), outputs_ + (size_t)part.first * hidden, hidden);
    });
    team_.share(rows_, [&](int row) {
      float *to = added_ + (size_t)row * hidden, *sum = normed_ + (size_t)row * hidden;
      std::fill_n(sum, hidden, 0.0f);
      for (int k = 0; k < used; k++) {
        const size_t use = (size_t)row * used + k;
        const float* from = outputs_ + (size_t)uses.places[use] * hidden;
        for (int i = 0; i < hidden; i += LANES) store(sum + i, fma(all(uses.weights[use]), load(from + i), load(sum + i)));
      }
      norm_values(mixture.post_norm, sum, hidden);
      if (!is_shared) std::fill_n(to, hidden, 0.0f);
      norm_values(mixture.shared_post_norm, to, hidden);
      const float gate = mixture.shared_gate.matrix.outputs ? 1 / (1 + std::exp(-scores_[(size_t)row * mixture.count])) : 1;
      for (int i = 0; i < hidden; i += LANES) store(to + i, fma(all(gate), load(to + i), load(sum + i)));
      add_row(layer.feed_forward_post_norm, row);
    });
  }

  // Chooses the experts of all rows. Then, `scores_` has the logits of the shared expert's gate, if there is one.
  void route(const Layer&, const Mixture& mixture) {
    const Rows rows = {model_.hidden, rows_, normed_, nullptr};
    Uses& uses = engine_.uses;
    team_.share(1, [&](int) { uses.resize((size_t)rows_ * mixture.used); });
    team_.share(mixture.router.matrix.panels(), [&](int panel) { write_panel(mixture.router, panel, rows, scores_, mixture.count); });
    team_.share(rows_, [&](int row) {
      const size_t first = (size_t)row * mixture.used;
      Router(mixture).choose(scores_ + (size_t)row * mixture.count, &uses.experts[first], &uses.weights[first]);
    });
    team_.share(1, [&](int) {
      uses.sort(mixture.count, mixture.used);
      if (mixture.shared_gate.matrix.outputs) write_panel(mixture.shared_gate, 0, rows, scores_, mixture.count);
    });
  }

  // Computes the rows of uses, and quantises them for quantised weights.
  template <class Compute>
  void gather(int inputs, bool quantized, float* floats, const Compute& compute) {
    const Uses& uses = engine_.uses;
    team_.share((int)uses.rows.size(), [&](int use) {
      compute(use);
      const auto& part = uses.parts[uses.part_of[use]];
      if (quantized) quantize(rows_of(part, inputs, floats), use - part.first);
    });
  }

  Rows rows_of(const Uses::Part& part, int inputs, float* floats) {
    const size_t blocks = engine_.uses.rows.size() * (inputs / BLOCK);
    return {inputs, part.count, floats + (size_t)part.first * inputs, engine_.blocks.of(blocks) + (size_t)part.first * (inputs / BLOCK)};
  }

  // The inner values of the feed-forward part: act(gate x) * (up x), or act(up x).
  void feed(const Layer& layer, int index) {
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
    team_.share(layer.up.matrix.panels(), [&](int panel) {
      const int first = panel * PANEL, size = std::min(PANEL, width - first);
      if (is_gated && !is_cut) write_gate(panel);
      if (adaptation_.any()) {
        for (int row = 0; row < rows_; row++) std::fill_n(added_ + (size_t)row * width + first, size, 0.0f);
        adaptation_.raise(&AdapterLayer::up, 1, index, panel, added_, width);
      }
      write_inner(layer, layer.gate, layer.up, panel, rows, gated_, width, adaptation_.any() ? added_ : nullptr);
    });
  }

  // One panel of act(gate x) * (up x + raised): `out` holds gate x. Without a gate, of act(up x + raised).
  static void write_inner(const Layer& layer, const Linear& gate, const Linear& up, int panel, const Rows& rows, float* out, int width,
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

  // Norms values, as many at once as the norm says, if there is one.
  void norm_values(const Norm& norm, float* values, int count) const {
    for (int place = 0; norm.kind != NO_NORM && place < count; place += norm.size)
      normalize(norm, values + place, model_.epsilon, values + place);
  }

  // Norms and rotates the heads of a row's queries or keys.
  void turn(const Layer& layer, const Norm& norm, int row, float* values, int heads, float scale) {
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

  float query_scale(const Layer& layer, int row) const {
    if (layer.rotary < 0 || !model_.rotary[layer.rotary].temperature) return 1;
    const Rotary& rotary = model_.rotary[layer.rotary];
    return 1 + rotary.temperature * std::log(1 + std::floor((float)positions_[row] / rotary.span));
  }

  // Norms and rotates a row's queries and keys, and writes its keys and values to the cache if the layer has any.
  void place(const Layer& layer, int row) {
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

  // A row's stream, and its first row.
  std::pair<int, int> locate(int row) const {
    int s = 0, first = 0;
    while (row - first >= streams_[s].rows) first += streams_[s++].rows;
    return {s, first};
  }

  static Plane plane(const Stream& stream, const CachedPart& cached, int head, int width) {
    return {cached.data + head * cached.head_stride, cached.position_stride, stream.stored, width};
  }
  static Plane keys_of(const Stream& stream, const Layer& layer, int head) {
    return plane(stream, stream.parts[2 * layer.cached], head, layer.head_dim);
  }
  static Plane values_of(const Stream& stream, const Layer& layer, int head) {
    return layer.latent ? keys_of(stream, layer, head) : plane(stream, stream.parts[2 * layer.cached + 1], head, layer.value_dim);
  }

  // What a task of attention computes at most: some rows, and some of the query heads of one key head.
  struct AttentionBlock {
    int rows, heads;
    int parts_of(const Stream& stream) const { return (stream.rows + rows - 1) / rows; }
    int parts_of(const Layer& layer) const { return (layer.heads / layer.kv_heads + heads - 1) / heads * layer.kv_heads; }
  };

  int count_attention_tasks(const Layer& layer, const AttentionBlock& block) const {
    int tasks = 0;
    for (const Stream& stream : streams_) tasks += block.parts_of(stream) * block.parts_of(layer);
    return tasks;
  }

  // The tasks of attention with which all threads end first: smaller ones divide the work more evenly, but read more.
  AttentionBlock attention_block(const Layer& layer) const {
    const int groups = layer.heads / layer.kv_heads, threads = team_.working();
    AttentionBlock best{};
    float least = INFINITY;
    for (int parts = (groups + MOST_QUERIES - 1) / MOST_QUERIES, rows = ROW_BLOCK; parts <= groups; rows > 1 ? rows-- : parts *= 2) {
      const AttentionBlock block{rows, (groups + parts - 1) / parts};
      const int queries = std::min(rows, rows_) * block.heads;
      if (queries > MOST_QUERIES) continue;
      const int rounds = (count_attention_tasks(layer, block) + threads - 1) / threads;
      const float time = (float)(rounds * (READING_QUERIES + queries));
      if (time < least) least = time, best = block;
    }
    return best;
  }

  void attend_all(int thread, const Layer& layer) {
    const AttentionBlock block = attention_block(layer);
    const int groups = layer.heads / layer.kv_heads, parts = block.parts_of(layer) / layer.kv_heads;
    const int width = layer.head_dim, value = layer.value_dim;
    const Heads queries{queries_, layer.heads * width, width, width};
    Heads outputs{attended_, layer.heads * value, value, value};
    if (layer.latent) outputs = {attended_, value, (int64_t)rows_ * value, value};  // as `raise_values` reads them
    team_.share(count_attention_tasks(layer, block), [&](int task) {
      int first = 0, s = 0;
      for (int count; task >= (count = block.parts_of(streams_[s]) * block.parts_of(layer)); s++) {
        task -= count;
        first += streams_[s].rows;
      }
      const int part = task % parts * block.heads, key = task / parts % layer.kv_heads, start = task / parts / layer.kv_heads * block.rows;
      const int rows = std::min(block.rows, streams_[s].rows - start), heads = std::min(block.heads, groups - part);
      const int head = key * groups + part;
      const Scoring scoring = {layer.scaling, layer.cap, layer.window, layer.sinks ? layer.sinks + head : nullptr};
      attend(engine_.spaces[thread], keys_of(streams_[s], layer, key), values_of(streams_[s], layer, key),
             engine_.texts.data() + first + start, rows, heads, queries.from(first + start, head), outputs.from(first + start, head),
             scoring);
    });
  }

  Engine& engine_;
  Team& team_;
  Adaptation& adaptation_;
  const Model& model_;
  int rows_;
  int64_t* positions_;
  std::vector<Stream> streams_;
  float *residual_, *normed_, *queries_, *keys_, *values_, *attended_, *gated_, *added_, *angles_, *embedded_, *others_, *predicted_;
  float* parts_;  // of latent attention: what `query` reads, [rows, inputs]; then parts of queries, [heads, rows, inputs of `key_up`]
  float *scores_, *gathered_, *inner_, *outputs_, *gates_, *mixed_, *convolved_, *matrices_ = nullptr;
  size_t space_ = 0;  // of a thread's matrices
  int angles_width_ = 0, others_width_ = 0;
};

}  // namespace outrider
