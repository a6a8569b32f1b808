// Layers that keep a state of the text before a row: gated delta rule (Yang et al., arXiv 2412.06464; Kimi Linear, arXiv 2510.26692),
// state space (Mamba 2; Dao and Gu, arXiv 2405.21060), and short convolutions.
//
// The state of a head is a matrix. A row multiplies it by a decay, or each of its rows by one of their own, and adds its key times
// what it writes; its output is what its query reads then. Every row is computed from the state after its parent, by the same
// operations in the same order, whether the parent is in a draft tree, in a prompt, or committed, so its bits do not depend on what is
// computed beside it.
#pragma once
#include <vector>

#include "description.h"
#include "pointwise.h"

namespace outrider {

// Vectors of a column block: their sums fill some registers, and the state's rows of a block the nearest cache.
constexpr int MOST_COLUMNS = 4;

// The update of one head's matrix by a row.
struct Write {
  const float *key, *written;  // [key_dim], [value_dim]
  const float* decay;          // of the matrix, or [key_dim]
  int stride;                  // of decays; 0 = there is one
};

// Some columns of a matrix, [key_dim, value_dim], from a vector's place on.
template <int COUNT>
struct Columns {
  static constexpr int count = COUNT;
  int key_dim, value_dim;

  // from * decay + key written^T. `to` may be `from`, or null. With a query, returns in `out` what it reads of the result.
  void write(const float* from, float* to, const Write& row, const float* query, Floats* out) const {
    Floats written[COUNT], read[COUNT] = {};
    for (int i = 0; i < COUNT; i++) written[i] = load(row.written + i * LANES);
    for (int k = 0; k < key_dim; k++) {
      const Floats key = all(row.key[k]), decay = all(row.decay[k * row.stride]), asked = all(query ? query[k] : 0);
      const size_t place = (size_t)k * value_dim;
      for (int i = 0; i < COUNT; i++) {
        const Floats value = fma(key, written[i], load(from + place + i * LANES) * decay);
        if (to) store(to + place + i * LANES, value);
        read[i] = fma(asked, value, read[i]);
      }
    }
    for (int i = 0; out && i < COUNT; i++) out[i] = read[i];
  }

  // Reads the matrix with a key.
  void read(const float* from, const float* key, Floats* out) const {
    for (int i = 0; i < COUNT; i++) out[i] = Floats{};
    for (int k = 0; k < key_dim; k++)
      for (int i = 0; i < COUNT; i++) out[i] = fma(all(key[k]), load(from + (size_t)k * value_dim + i * LANES), out[i]);
  }
};

// Calls `task(columns, first column)` for all blocks of columns.
template <class Task>
inline void for_blocks(int key_dim, int value_dim, const Task& task) {
  int first = 0;
  for (; first + MOST_COLUMNS * LANES <= value_dim; first += MOST_COLUMNS * LANES) task(Columns<MOST_COLUMNS>{key_dim, value_dim}, first);
  for (; first < value_dim; first += LANES) task(Columns<1>{key_dim, value_dim}, first);
}

// One head of one layer in a slot.
struct HeadState {
  float *matrix, *keys, *writes, *decays;
  int key_dim, value_dim, decay_dim;

  HeadState(const Slot& slot, const Recurrence& layer, int head)
      : key_dim(layer.key_dim), value_dim(layer.value_dim), decay_dim(layer.decay_dim) {
    const size_t place = (size_t)layer.state * layer.heads + head, rows = place * slot.capacity;
    matrix = slot.matrices + place * key_dim * value_dim;
    keys = slot.keys + rows * key_dim;
    writes = slot.writes + rows * value_dim;
    decays = slot.decays + rows * decay_dim;
  }

  Write row(int number) const {
    return {keys + (size_t)number * key_dim, writes + (size_t)number * value_dim, decays + (size_t)number * decay_dim, decay_dim > 1};
  }

  // Makes the first rows part of the state, and moves `known` rows that follow to the front.
  void fold(int rows, int known) {
    if (!rows) return;
    for_blocks(key_dim, value_dim, [&](auto columns, int first) {
      for (int number = 0; number < rows; number++) {
        Write each = row(number);
        each.written += first;
        columns.write(matrix + first, matrix + first, each, nullptr, nullptr);
      }
    });
    std::memmove(keys, keys + (size_t)rows * key_dim, 4 * (size_t)known * key_dim);
    std::memmove(writes, writes + (size_t)rows * value_dim, 4 * (size_t)known * value_dim);
    std::memmove(decays, decays + (size_t)rows * decay_dim, 4 * (size_t)known * decay_dim);
  }
};

// Does the same to the inputs of a convolution.
inline void fold_inputs(const Slot& slot, const Recurrence& layer) {
  float* inputs = slot.inputs + (size_t)layer.convolution * (layer.window + slot.capacity) * layer.channels;
  const size_t count = (size_t)(layer.window + slot.known) * layer.channels;
  std::memmove(inputs, inputs + (size_t)slot.folded * layer.channels, 4 * count);
}

// The matrices in which the states after the rows of a tree are: those of rows without children are not kept, and the last child takes
// its parent's.
struct Paths {
  struct Step {
    int from, to;  // -1: the committed state; none
  };
  std::vector<Step> steps;  // of known rows and rows
  int matrices = 0;

  Paths(const int32_t* parents, int rows) : steps(rows) {
    std::vector<int> last(rows, -1), free;
    for (int row = 0; row < rows; row++)
      if (parents[row] >= 0) last[parents[row]] = row;
    for (int row = 0; row < rows; row++) {
      const int parent = parents[row], from = parent < 0 ? -1 : steps[parent].to;
      const bool takes = parent >= 0 && last[parent] == row;
      int to = -1;
      if (last[row] >= 0) {
        if (takes) {
          to = from;
        } else if (free.empty()) {
          to = matrices++;
        } else {
          to = free.back();
          free.pop_back();
        }
      } else if (takes) {
        free.push_back(from);
      }
      steps[row] = {from, to};
    }
  }
};

// The values before the steps in a row of `Recurring`'s `mixed`: a state space has the sizes of steps there.
inline int beta_width(const Recurrence& layer) { return layer.kind == STATE_SPACE ? layer.heads : layer.beta.matrix.outputs; }
inline int mixed_width(const Recurrence& layer) {
  return layer.channels + layer.gate.matrix.outputs + beta_width(layer) + layer.step.matrix.outputs;
}

// The computation of one layer's rows in one stream.
class Recurring {
 public:
  // `mixed`: [rows, width], what is convolved, then gate, beta and step; `convolved`: [rows, channels].
  Recurring(const Recurrence& layer, const Slot& slot, int rows, float* mixed, float* convolved)
      : layer_(layer), slot_(slot), rows_(rows), mixed_(mixed), width_(mixed_width(layer)), convolved_(convolved),
        inputs_(slot.inputs + (size_t)layer.convolution * (layer.window + slot.capacity) * layer.channels) {}

  // Keeps a row's input of the convolution.
  void keep_input(int row) {
    float* input = mixed_ + row * width_;
    if (layer_.kind == CONVOLUTION)
      for (int i = 0; i < layer_.channels; i += LANES) store(input + i, load(input + i) * load(beta(row) + i));
    const size_t size = 4 * (size_t)layer_.channels;
    if (!slot_.next_inputs) {
      std::memcpy(inputs_ + (size_t)(layer_.window + slot_.known + row) * layer_.channels, input, size);
    } else if (row >= rows_ - layer_.window) {
      const int place = layer_.window - (rows_ - row);
      std::memcpy(slot_.next_inputs + ((size_t)layer_.convolution * layer_.window + place) * layer_.channels, input, size);
    }
  }

  // Convolves a row, and prepares what the state is written and read with.
  void convolve(int row, float* out) {
    const int channels = layer_.channels, window = layer_.window;
    const float* inputs[16];
    int at = slot_.known + row;
    for (int back = 0, before = 0; back <= window; back++) {
      if (at >= 0) {
        inputs[back] = at < slot_.known ? inputs_ + (size_t)(window + at) * channels : mixed_ + (at - slot_.known) * width_;
        at = slot_.parents[at];
      } else {
        inputs[back] = inputs_ + (size_t)(window - ++before) * channels;
      }
    }
    float* to = layer_.kind == CONVOLUTION ? out : convolved_ + (size_t)row * channels;
    for (int i = 0; i < channels; i += LANES) {
      Floats sum = load(inputs[window] + i) * load(layer_.taps + i);
      for (int tap = 1; tap <= window; tap++)
        sum = fma(load(inputs[window - tap] + i), load(layer_.taps + (size_t)tap * channels + i), sum);
      if (layer_.bias) sum += load(layer_.bias + i);
      store(to + i, layer_.kind == CONVOLUTION ? sum * load(gate(row) + i) : activate(sum, SILU));
    }
    if (layer_.kind == CONVOLUTION) return;
    for (int head = 0; layer_.kind == DELTA_RULE && head < 2 * layer_.key_heads; head++) {
      float* values = to + head * layer_.key_dim;
      Sums squares{};
      for (int i = 0; i < layer_.key_dim; i += SUMMED)
        for (int part = 0; part < SUMMED / LANES; part++) {
          const Floats each = load(values + i + part * LANES);
          squares.parts[part] = fma(each, each, squares.parts[part]);
        }
      const float length = head < layer_.key_heads ? 1 / std::sqrt((float)layer_.key_dim) : 1;
      const float factor = length / std::sqrt(total(squares) + 1e-6f);
      for (int i = 0; i < layer_.key_dim; i++) values[i] *= factor;
    }
  }

  // Computes a row's decays of a head, and what it writes is multiplied by: of a state space, its step.
  void decay(int row, int head) {
    float* steps = step(row) + head * layer_.decay_dim;
    for (int i = 0; i < layer_.decay_dim; i++) {
      const float given = steps[i] + layer_.step_bias[head * layer_.decay_dim + i];
      const float softplus = given > 20 ? given : std::log1p(std::exp(given));
      const float size = std::fmin(std::fmax(softplus, layer_.least), layer_.most);
      if (layer_.kind == STATE_SPACE) beta(row)[head] = size;
      steps[i] = std::exp(layer_.decay[head] * size);
    }
    if (layer_.kind == DELTA_RULE) beta(row)[head] = layer_.reach / (1 + std::exp(-beta(row)[head]));
  }

  // Computes the rows of one head: [rows, stride] from `out` on. `space` has room for the matrices of `paths`, and for a row's vectors.
  void scan(int head, const Paths& paths, float* space, float* out, int64_t stride) {
    HeadState state(slot_, layer_, head);
    state.fold(slot_.folded, slot_.known);
    const int key_dim = layer_.key_dim, value_dim = layer_.value_dim;
    const size_t size = (size_t)key_dim * value_dim, place = (size_t)layer_.state * layer_.heads + head;
    float* next = slot_.next_matrices ? slot_.next_matrices + place * size : nullptr;
    const int key_head = layer_.tiled ? head % layer_.key_heads : head / (layer_.heads / layer_.key_heads);
    float *const last = space + paths.matrices * size, *const decayed = last + value_dim;
    for (int at = 0; at < slot_.known + rows_; at++) {
      const auto [origin, target] = paths.steps[at];
      const float* from = origin < 0 ? state.matrix : next ? next : space + origin * size;
      float* to = next ? next : target < 0 ? nullptr : space + target * size;
      if (at < slot_.known) {
        for_blocks(key_dim, value_dim, [&](auto columns, int first) {
          Write each = state.row(at);
          each.written += first;
          if (to) columns.write(from + first, to + first, each, nullptr, nullptr);
        });
        continue;
      }
      const int row = at - slot_.known;
      const float* own = convolved_ + (size_t)row * layer_.channels;
      const float *query = own + key_head * key_dim, *key = own + (layer_.key_heads + key_head) * key_dim;
      const float* values = own + 2 * layer_.key_heads * key_dim + head * value_dim;
      decay(row, head);
      const float *decays = step(row) + head * layer_.decay_dim, factor = beta(row)[head];
      const int each = layer_.decay_dim > 1;
      // A key reads what the decay leaves.
      for (int k = 0; layer_.kind == DELTA_RULE && k < key_dim; k++) decayed[k] = key[k] * decays[k * each];
      float* kept = next ? last : state.writes + (size_t)at * value_dim;
      for_blocks(key_dim, value_dim, [&](auto columns, int first) {
        Floats found[MOST_COLUMNS], read[MOST_COLUMNS] = {};
        if (layer_.kind == DELTA_RULE) columns.read(from + first, decayed, read);
        for (int i = 0; i < columns.count; i++) {
          const int column = first + i * LANES;
          store(kept + column, all(factor) * (load(values + column) - read[i]));
        }
        columns.write(from + first, to ? to + first : nullptr, {key, kept + first, decays, each}, query, found);
        for (int i = 0; i < columns.count; i++) {
          const int column = first + i * LANES;
          store(out + row * stride + column, layer_.skip ? fma(all(layer_.skip[head]), load(values + column), found[i]) : found[i]);
        }
      });
      if (next) continue;
      std::memcpy(state.keys + (size_t)at * key_dim, key, 4 * (size_t)key_dim);
      std::memcpy(state.decays + (size_t)at * layer_.decay_dim, decays, 4 * (size_t)layer_.decay_dim);
    }
  }

  // Norms a row of outputs, and multiplies it by the activated gate.
  void finish(int row, float* out) {
    const int width = layer_.heads * layer_.value_dim;
    const auto activated = [&] {
      for (int i = 0; i < width; i += LANES) store(out + i, load(out + i) * activate(load(gate(row) + i), layer_.activation));
    };
    if (layer_.normed_gated) activated();
    for (int place = 0; layer_.norm.kind != NO_NORM && place < width; place += layer_.norm.size) {
      Norm norm = layer_.norm;
      if (layer_.kind == STATE_SPACE) norm.weight += place;  // groups have weights of their own
      normalize(norm, out + place, layer_.epsilon, out + place);
    }
    if (!layer_.normed_gated) activated();
  }

 private:
  float* gate(int row) { return mixed_ + row * width_ + layer_.channels; }
  float* beta(int row) { return gate(row) + layer_.gate.matrix.outputs; }
  float* step(int row) { return beta(row) + beta_width(layer_); }

  const Recurrence& layer_;
  const Slot& slot_;
  const int rows_;
  float* mixed_;
  const int64_t width_;
  float *convolved_, *inputs_;
};

}  // namespace outrider
