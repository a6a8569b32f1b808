// The forward of a decoder of Llama's kind: embedding, layers of attention and a gated feed-forward part, norm and head.
//
// One call computes a whole step. Threads, if several are faster, are woken once; between the phases of a layer they meet at a barrier. Activations are
// float32. Everything is computed row by row in one order, so a row's logits have the same bits alone, in a draft tree, in a
// prompt, and beside rows of other streams. The interface is plain C, called through ctypes; callers check all sizes.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <span>
#include <vector>

#include "attention.h"
#include "multiply.h"
#include "stored.h"
#include "team.h"

using namespace outrider;

extern "C" {

struct Linear {
  Matrix matrix;
  const float* bias;  // [outputs], or null
};

struct Layer {
  const float *attention_norm, *feed_forward_norm;  // [hidden]
  const float *query_norm, *key_norm;               // [head_dim], or null
  Linear query, key, value, output, gate, up, down;
  int32_t cached;  // layer of the cache
  int32_t window;  // positions that a row attends to, its own included; 0 = all
  int32_t rotary;  // dimensions of a head that are rotated; 0 = none
};

// What an adapter adds to a product of a row: up (down row). No outputs = nothing. Both are float32, and `up` is scaled.
struct LowRank {
  Matrix down, up;  // [rank, inputs], [outputs, rank]
};

struct AdapterLayer {
  LowRank query, key, value, output, gate, up, down;
};

struct Adapter {
  const AdapterLayer* layer;
  int32_t rank;  // the largest one
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, activation;  // activation: 0 SiLU, 1 GELU by tanh
  float epsilon, scaling, rotary_scaling, embedding_scale, residual_scale, logit_scale;
  const Layer* layer;
  Matrix embedding;
  Linear head;
  const float* norm;         // [hidden]
  const float* frequencies;  // [rotary / 2]
};

// Hidden states of all rows, [rows, max(count, 1) * hidden], for a draft head: the inputs of some layers, or the normed output.
struct Tap {
  int32_t count;
  const int32_t* layers;
  float* states;  // null = none are kept
};

// The rows of one stream. They are written to its cache from slot `start` on.
struct Stream {
  char* cache;                                                     // [layers, 2, kv_heads, positions, width]
  int64_t layer_stride, part_stride, head_stride, position_stride;  // bytes
  int32_t stored;                                                  // StoredAs
  int32_t rows, start, length;                                     // length: committed tokens
  int32_t kept, padding;  // rows whose logits are returned, the last ones before the padding
  const int64_t* tokens;  // of the rows
  const int64_t* depths;  // positions of the rows after the committed tokens
  const int32_t* counts;  // of rows that each row attends to, itself included; null = all before it and itself
  const int32_t* slots;   // of these rows, row after row
  const Adapter* adapter; // null = none
};
}

namespace {

// The most rows of a task of attention, which read keys and values together.
constexpr int ROW_BLOCK = 16;
// Reading the keys and values of a task takes as long as the products of this many rows (measured with AVX-512).
constexpr float READING_ROWS = 1.6f;
constexpr int MOST_TOGETHER = 3;  // products of the same rows: queries, keys and values
constexpr int FEW_ROWS = 32;   // from which on more threads always gain: arithmetic takes the time

// Whether a product of these weights takes less time than threads take to meet: some 50 us.
bool is_small(size_t weight_bytes, int rows) { return weight_bytes * std::max(rows / 4, 1) < (1 << 20); }

template <class T>
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  T* of(size_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = count + count / 2;
      data_ = (T*)std::aligned_alloc(64, (size_ * sizeof(T) + 63) / 64 * 64);
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// The rows of a stream that has an adapter.
struct Adapted {
  const Adapter* adapter;
  int first, count;
};

}  // namespace

struct Engine {
  explicit Engine(int threads) : team(threads), spaces(threads) {}
  Team team;
  std::vector<AttentionSpace> spaces;
  Habit habits[6];  // of forwards of fewer than FEW_ROWS, by the bits of their number of rows
  Buffer<float> residual, normed, queries, keys, values, attended, gated, angles, lowered, raised;
  std::vector<Adapted> adapted;
  Buffer<RowBlock> blocks;
  std::vector<Text> texts;
};

namespace {

void normalize(const float* from, const float* weights, int size, float epsilon, float* to) {
  Sums squares{};
  for (int i = 0; i < size; i += SUMMED)
    for (int part = 0; part < SUMMED / LANES; part++) {
      const Floats values = load(from + i + part * LANES);
      squares.parts[part] = fma(values, values, squares.parts[part]);
    }
  const float factor = 1 / std::sqrt(total(squares) / size + epsilon);
  for (int i = 0; i < size; i += LANES) store(to + i, load(weights + i) * (load(from + i) * all(factor)));
}

void rotate(float* head, const float* cosines, const float* sines, int rotary) {
  const int half = rotary / 2;
  for (int i = 0; i < half; i++) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cosines[i] - second * sines[i];
    head[i + half] = second * cosines[i] + first * sines[i];
  }
}

Floats activate(Floats x, int activation) {
  if (activation == 0) return x / (all(1) + exponential(-x));
  // tanh(y) = 1 - 2 / (e^2y + 1)
  const Floats y = all(0.7978845608f) * fma(all(0.044715f) * x * x, x, x);
  return all(0.5f) * x * (all(2) - all(2) / (exponential(y + y) + all(1)));
}

// Computes a forward's phases in all threads.
class Forward {
 public:
  Forward(Engine& engine, const Model& model, int rows, const int64_t* positions, const Stream* streams, int stream_count)
      : engine_(engine), team_(engine.team), model_(model), rows_(rows), positions_(positions), streams_(streams),
        stream_count_(stream_count) {
    const size_t count = rows;
    residual_ = engine.residual.of(count * model.hidden);
    normed_ = engine.normed.of(count * model.hidden);
    queries_ = engine.queries.of(count * model.heads * model.head_dim);
    keys_ = engine.keys.of(count * model.kv_heads * model.head_dim);
    values_ = engine.values.of(count * model.kv_heads * model.head_dim);
    attended_ = engine.attended.of(count * model.heads * model.head_dim);
    gated_ = engine.gated.of(count * model.intermediate);
    angles_ = engine.angles.of(count * model.head_dim);
    find_texts();
    find_adapted();
    // Sized for the widest input, so that no phase allocates.
    const int widest = std::max({model.hidden, model.heads * model.head_dim, model.intermediate});
    engine.blocks.of((size_t)rows * (widest / BLOCK));
  }

  void run(int thread, const int64_t* tokens, const int64_t* kept, int kept_count, float* logits, const Tap& tap) {
    const int block = attention_block();
    team_.share(rows_, [&](int row) { embed(row, tokens[row]); });
    for (int index = 0; index < model_.layers; index++) {
      const Layer& layer = model_.layer[index];
      keep_inputs(tap, index);
      const Rows normed = prepare(normed_, rows_, model_.hidden, layer.query.matrix, [&](int row) {
        normalize(residual_ + (size_t)row * model_.hidden, layer.attention_norm, model_.hidden, model_.epsilon,
                  normed_ + (size_t)row * model_.hidden);
      });
      project(layer, normed, index);
      team_.share(rows_, [&](int row) { place(layer, row); });
      attend_all(thread, layer, block);
      const Rows attended = prepare(attended_, rows_, model_.heads * model_.head_dim, layer.output.matrix, [](int) {});
      add_product<&AdapterLayer::output>(layer.output, attended, index);
      const Rows again = prepare(normed_, rows_, model_.hidden, layer.gate.matrix, [&](int row) {
        normalize(residual_ + (size_t)row * model_.hidden, layer.feed_forward_norm, model_.hidden, model_.epsilon,
                  normed_ + (size_t)row * model_.hidden);
      });
      gate(layer, again, index);
      const Rows gated = prepare(gated_, rows_, model_.intermediate, layer.down.matrix, [](int) {});
      add_product<&AdapterLayer::down>(layer.down, gated, index);
    }
    if (tap.states && !tap.count)
      team_.share(rows_, [&](int row) {
        const size_t place = (size_t)row * model_.hidden;
        normalize(residual_ + place, model_.norm, model_.hidden, model_.epsilon, tap.states + place);
      });
    const Rows last = prepare(normed_, kept_count, model_.hidden, model_.head.matrix, [&](int row) {
      normalize(residual_ + (size_t)kept[row] * model_.hidden, model_.norm, model_.hidden, model_.epsilon,
                normed_ + (size_t)row * model_.hidden);
    });
    product(model_.head, last, logits, model_.head.matrix.outputs, model_.logit_scale);
  }

 private:
  void find_texts() {
    engine_.texts.resize(rows_);
    int row = 0;
    for (int s = 0; s < stream_count_; s++) {
      const Stream& stream = streams_[s];
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

  void find_adapted() {
    engine_.adapted.clear();
    int rank = 0, first = 0;
    for (int s = 0; s < stream_count_; first += streams_[s++].rows)
      if (const Adapter* adapter = streams_[s].adapter) {
        engine_.adapted.push_back({adapter, first, streams_[s].rows});
        rank = std::max(rank, adapter->rank);
      }
    if (!rank) return;
    lowered_width_ = (rank + PANEL - 1) / PANEL * PANEL;
    lowered_ = engine_.lowered.of((size_t)MOST_TOGETHER * rows_ * lowered_width_);
    raised_ = engine_.raised.of((size_t)rows_ * model_.intermediate);
  }

  // The products of rows with the `down` of their adapters, for one or several products of these rows.
  template <LowRank AdapterLayer::*... PARTS>
  void lower(const Rows& rows, int layer) {
    static constexpr LowRank AdapterLayer::*parts[] = {PARTS...};
    const int streams = (int)engine_.adapted.size(), panels = lowered_width_ / PANEL;
    if (!streams) return;
    team_.share(streams * panels * (int)sizeof...(PARTS), [&](int task) {
      const Adapted& adapted = engine_.adapted[task % streams];
      const int panel = task / streams % panels, number = task / streams / panels;
      const Matrix& down = (adapted.adapter->layer[layer].*parts[number]).down;
      if (panel >= down.panels()) return;
      const Rows own = {rows.inputs, adapted.count, rows.floats + (size_t)adapted.first * rows.inputs, nullptr};
      multiply_panel(down, panel, own, [&](int row, const float* sums) {
        std::memcpy(lowered(number, adapted.first + row) + panel * PANEL, sums, 4 * PANEL);
      });
    });
  }

  float* lowered(int number, int row) { return lowered_ + ((size_t)number * rows_ + row) * lowered_width_; }

  // Adds what the adapters add to one panel of a product, whose place among those of `lower` is `number`.
  void raise(LowRank AdapterLayer::*part, int number, int layer, int panel, float* out, int64_t stride, float scale = 1) {
    for (const Adapted& adapted : engine_.adapted) {
      const Matrix& up = (adapted.adapter->layer[layer].*part).up;
      if (panel >= up.panels()) continue;
      const int first = panel * PANEL, size = std::min(PANEL, up.outputs - first);
      const Rows own = {lowered_width_, adapted.count, lowered(number, adapted.first), nullptr};
      multiply_panel(up, panel, own, [&](int row, const float* sums) {
        float* to = out + (adapted.first + row) * stride + first;
        for (int i = 0; i < size; i++) to[i] += scale == 1 ? sums[i] : sums[i] * scale;
      });
    }
  }

  void embed(int row, int64_t token) {
    float* to = residual_ + (size_t)row * model_.hidden;
    take(model_.embedding, (int)token, to);
    if (model_.embedding_scale != 1)
      for (int i = 0; i < model_.hidden; i++) to[i] *= model_.embedding_scale;
    float* angles = angles_ + (size_t)row * model_.head_dim;
    const int half = model_.layers ? model_.layer[0].rotary / 2 : 0;
    for (int i = 0; i < half; i++) {
      const float angle = (float)positions_[row] * model_.frequencies[i];
      angles[i] = std::cos(angle) * model_.rotary_scaling;
      angles[half + i] = std::sin(angle) * model_.rotary_scaling;
    }
  }

  void keep_inputs(const Tap& tap, int layer) {
    for (int number = 0; tap.states && number < tap.count; number++)
      if (tap.layers[number] == layer)
        team_.share(rows_, [&](int row) {
          float* to = tap.states + ((size_t)row * tap.count + number) * model_.hidden;
          std::memcpy(to, residual_ + (size_t)row * model_.hidden, 4 * (size_t)model_.hidden);
        });
  }

  // Computes the rows of a product by `compute(row)`, and quantises them if the weights are quantised.
  template <class Compute>
  Rows prepare(float* floats, int count, int inputs, const Matrix& matrix, const Compute& compute) {
    const Rows rows{inputs, count, floats, engine_.blocks.of((size_t)count * (inputs / BLOCK))};
    team_.share(count, [&](int row) {
      compute(row);
      if (matrix.quantized()) quantize(rows, row);
    });
    return rows;
  }

  void project(const Layer& layer, const Rows& rows, int index) {
    lower<&AdapterLayer::query, &AdapterLayer::key, &AdapterLayer::value>(rows, index);
    static constexpr LowRank AdapterLayer::*adapters[] = {&AdapterLayer::query, &AdapterLayer::key, &AdapterLayer::value};
    const Linear* parts[] = {&layer.query, &layer.key, &layer.value};
    float* outs[] = {queries_, keys_, values_};
    const int first = layer.query.matrix.panels(), second = first + layer.key.matrix.panels();
    team_.share(second + layer.value.matrix.panels(), [&](int task) {
      const int part = task < first ? 0 : task < second ? 1 : 2;
      const int panel = task - (part == 0 ? 0 : part == 1 ? first : second), outputs = parts[part]->matrix.outputs;
      write_panel(*parts[part], panel, rows, outs[part], outputs, 1);
      raise(adapters[part], part, index, panel, outs[part], outputs);
    });
  }

  // One panel of a product, with the bias.
  static void write_panel(const Linear& linear, int panel, const Rows& rows, float* out, int64_t stride, float scale) {
    const int first = panel * PANEL, size = std::min(PANEL, linear.matrix.outputs - first);
    multiply_panel(linear.matrix, panel, rows, [&](int row, const float* sums) {
      float* to = out + row * stride + first;
      for (int i = 0; i < size; i++) {
        const float value = linear.bias ? sums[i] + linear.bias[first + i] : sums[i];
        to[i] = scale == 1 ? value : value * scale;
      }
    });
  }

  void product(const Linear& linear, const Rows& rows, float* out, int64_t stride, float scale) {
    team_.share(linear.matrix.panels(), [&](int panel) { write_panel(linear, panel, rows, out, stride, scale); });
  }

  template <LowRank AdapterLayer::*PART>
  void add_product(const Linear& linear, const Rows& rows, int index) {
    lower<PART>(rows, index);
    team_.share(linear.matrix.panels(), [&](int panel) {
      const int first = panel * PANEL, size = std::min(PANEL, linear.matrix.outputs - first);
      multiply_panel(linear.matrix, panel, rows, [&](int row, const float* sums) {
        float* to = residual_ + (size_t)row * model_.hidden + first;
        for (int i = 0; i < size; i++) {
          const float value = linear.bias ? sums[i] + linear.bias[first + i] : sums[i];
          to[i] += model_.residual_scale == 1 ? value : value * model_.residual_scale;
        }
      });
      raise(PART, 0, index, panel, residual_, model_.hidden, model_.residual_scale);
    });
  }

  void gate(const Layer& layer, const Rows& rows, int index) {
    lower<&AdapterLayer::gate, &AdapterLayer::up>(rows, index);
    const bool is_adapted = !engine_.adapted.empty();
    team_.share(layer.gate.matrix.panels(), [&](int panel) {
      const int first = panel * PANEL, size = std::min(PANEL, model_.intermediate - first);
      write_panel(layer.gate, panel, rows, gated_, model_.intermediate, 1);
      raise(&AdapterLayer::gate, 0, index, panel, gated_, model_.intermediate);
      if (is_adapted) {
        for (int row = 0; row < rows_; row++) std::fill_n(raised_ + (size_t)row * model_.intermediate + first, size, 0.0f);
        raise(&AdapterLayer::up, 1, index, panel, raised_, model_.intermediate);
      }
      multiply_panel(layer.up.matrix, panel, rows, [&](int row, const float* sums) {
        float* to = gated_ + (size_t)row * model_.intermediate + first;
        alignas(64) float gates[PANEL] = {}, ups[PANEL];
        std::memcpy(gates, to, 4 * size);
        for (int i = 0; i < PANEL; i++) ups[i] = layer.up.bias && i < size ? sums[i] + layer.up.bias[first + i] : sums[i];
        const float* raised = raised_ + (size_t)row * model_.intermediate + first;
        for (int i = 0; is_adapted && i < size; i++) ups[i] += raised[i];
        for (int i = 0; i < PANEL; i += LANES)
          store(gates + i, activate(load(gates + i), model_.activation) * load(ups + i));
        std::memcpy(to, gates, 4 * size);
      });
    });
  }

  // Norms and rotates a row's queries and keys, and writes its keys and values to the cache.
  void place(const Layer& layer, int row) {
    const int width = model_.head_dim;
    const float* cosines = angles_ + (size_t)row * width;
    const float* sines = cosines + layer.rotary / 2;
    for (int head = 0; head < model_.heads; head++) {
      float* query = queries_ + ((size_t)row * model_.heads + head) * width;
      if (layer.query_norm) normalize(query, layer.query_norm, width, model_.epsilon, query);
      rotate(query, cosines, sines, layer.rotary);
    }
    int first = 0, s = 0;
    while (row - first >= streams_[s].rows) first += streams_[s++].rows;
    const int64_t slot = streams_[s].start + row - first;
    for (int head = 0; head < model_.kv_heads; head++) {
      float* key = keys_ + ((size_t)row * model_.kv_heads + head) * width;
      if (layer.key_norm) normalize(key, layer.key_norm, width, model_.epsilon, key);
      rotate(key, cosines, sines, layer.rotary);
      write_position(plane(streams_[s], layer.cached, 0, head), slot, width, key);
      write_position(plane(streams_[s], layer.cached, 1, head), slot, width, values_ + ((size_t)row * model_.kv_heads + head) * width);
    }
  }

  static Plane plane(const Stream& stream, int layer, int part, int head) {
    return {stream.cache + layer * stream.layer_stride + part * stream.part_stride + head * stream.head_stride,
            stream.position_stride, stream.stored};
  }

  int count_attention_tasks(int block) const {
    int tasks = 0;
    for (int s = 0; s < stream_count_; s++) tasks += (streams_[s].rows + block - 1) / block * model_.kv_heads;
    return tasks;
  }

  // The rows of a task of attention with which all threads end first: fewer divide the tasks more evenly, but read more.
  int attention_block() const {
    const int most = std::max(1, std::min(ROW_BLOCK, MOST_QUERIES / (model_.heads / model_.kv_heads))), threads = team_.working();
    int best = most;
    float least = INFINITY;
    for (int block = most; block > 0; block--) {
      const float time = (float)((count_attention_tasks(block) + threads - 1) / threads) * (READING_ROWS + (float)std::min(block, rows_));
      if (time < least) least = time, best = block;
    }
    return best;
  }

  void attend_all(int thread, const Layer& layer, int block) {
    const int width = model_.head_dim, groups = model_.heads / model_.kv_heads;
    team_.share(count_attention_tasks(block), [&](int task) {
      int first = 0, s = 0;
      for (int count; task >= (count = (streams_[s].rows + block - 1) / block * model_.kv_heads); s++) {
        task -= count;
        first += streams_[s].rows;
      }
      const int head = task % model_.kv_heads, start = task / model_.kv_heads * block;
      const int rows = std::min(block, streams_[s].rows - start);
      const size_t place = (size_t)(first + start) * model_.heads * width + head * groups * width;
      attend(engine_.spaces[thread], plane(streams_[s], layer.cached, 0, head), plane(streams_[s], layer.cached, 1, head),
             engine_.texts.data() + first + start, rows, groups, queries_ + place, attended_ + place,
             (int64_t)model_.heads * width, width, model_.scaling, layer.window);
    });
  }

  Engine& engine_;
  Team& team_;
  const Model& model_;
  const int rows_;
  const int64_t* positions_;
  const Stream* streams_;
  const int stream_count_;
  float *residual_, *normed_, *queries_, *keys_, *values_, *attended_, *gated_, *angles_;
  // Rows of adapted streams: their products with `down`, [MOST_TOGETHER, rows, width], and what is added to those of `up`.
  float *lowered_ = nullptr, *raised_ = nullptr;
  int lowered_width_ = 0;
};

}  // namespace

extern "C" {

Engine* outrider_engine_new(int32_t threads) { return new Engine(threads); }
void outrider_engine_delete(Engine* engine) { delete engine; }

int64_t outrider_matrix_bytes(const Matrix* matrix) { return matrix->bytes(); }

// Packs rows of float32 weights, [count, inputs], as the outputs from `first` on.
void outrider_matrix_pack(Engine* engine, const Matrix* matrix, int32_t first, int32_t count, const float* weights) {
  engine->team.run(false, [&](int) {
    engine->team.share(count, [&](int i) { put_floats(*matrix, first + i, weights + (size_t)i * matrix->inputs); });
  });
}

// The same for rows of blocks of a GGUF file, whose type the matrix has.
void outrider_matrix_pack_stored(Engine* engine, const Matrix* matrix, int32_t first, int32_t count, const uint8_t* blocks) {
  const Format& format = format_of(matrix->kind);
  const size_t bytes = (size_t)format.stored * (matrix->inputs / format.inputs());
  engine->team.run(false, [&](int) {
    engine->team.share(count, [&](int i) { put_stored(*matrix, first + i, blocks + i * bytes); });
  });
}

// The weights of some outputs, float32 [count, inputs].
void outrider_matrix_unpack(const Matrix* matrix, const int64_t* outputs, int32_t count, float* weights) {
  for (int i = 0; i < count; i++) take(*matrix, (int)outputs[i], weights + (size_t)i * matrix->inputs);
}

// Products of rows, float32 [count, inputs], with the weights, and the bias: float32 [count, outputs].
void outrider_multiply(Engine* engine, const Linear* linear, const float* rows, int32_t count, float* out) {
  const Matrix& matrix = linear->matrix;
  const Rows prepared{matrix.inputs, count, (float*)rows, engine->blocks.of((size_t)count * (matrix.inputs / BLOCK))};
  engine->team.run(is_small(matrix.bytes(), count), [&](int) {
    if (matrix.quantized()) engine->team.share(count, [&](int row) { quantize(prepared, row); });
    engine->team.share(matrix.panels(), [&](int panel) {
      const int first = panel * PANEL, size = std::min(PANEL, matrix.outputs - first);
      multiply_panel(matrix, panel, prepared, [&](int row, const float* sums) {
        float* to = out + (size_t)row * matrix.outputs + first;
        for (int i = 0; i < size; i++) to[i] = linear->bias ? sums[i] + linear->bias[first + i] : sums[i];
      });
    });
  });
}

// The logits, float32 [kept_count, outputs of the head], of the rows `kept`.
void outrider_forward(Engine* engine, const Model* model, const Stream* streams, int32_t stream_count, float* logits, const Tap* tap) {
  std::vector<int64_t> tokens, positions, kept;
  for (const Stream& stream : std::span(streams, stream_count)) {
    const int64_t end = (int64_t)tokens.size() + stream.rows - stream.padding;
    for (int64_t row = end - stream.kept; row < end; row++) kept.push_back(row);
    tokens.insert(tokens.end(), stream.tokens, stream.tokens + stream.rows);
    for (int row = 0; row < stream.rows; row++) positions.push_back(stream.length + stream.depths[row]);
  }
  const int rows = (int)tokens.size();
  Forward forward(*engine, *model, rows, positions.data(), streams, stream_count);
  const auto job = [&](int thread) { forward.run(thread, tokens.data(), kept.data(), (int)kept.size(), logits, *tap); };
  if (rows < FEW_ROWS)
    engine->team.run(engine->habits[std::bit_width((uint32_t)rows)], job);
  else
    engine->team.run(false, job);
}
}
