// The interface of the library: plain C, called through ctypes. Callers check all sizes.
#include <bit>

#include "forward.h"

using namespace outrider;

constexpr int64_t VERSION = 1;  // changes with what functions take and return

// Whether a product of these weights takes less time than threads take to meet: some 50 us.
static bool is_small(size_t weight_bytes, int rows) { return weight_bytes * std::max(rows / 4, 1) < (1 << 20); }

// Runs `put(output, count)` for the outputs of each panel from `first` on: threads that write to one panel would wait for its lines.
template <class Put>
static void share_panels(Engine& engine, int first, int count, const Put& put) {
  const int end = first + count, panel = first / PANEL;
  engine.team.run(false, [&](int) {
    engine.team.share((end + PANEL - 1) / PANEL - panel, [&](int i) {
      const int output = std::max(first, (panel + i) * PANEL);
      put(output, std::min(end, (panel + i + 1) * PANEL) - output);
    });
  });
}

extern "C" {

Engine* outrider_engine_new(int32_t threads) { return new Engine(threads); }
void outrider_engine_delete(Engine* engine) { delete engine; }

// The version of these functions, the sizes of the structures that callers describe, and the number of quantised kinds: others were
// written for other sources.
int32_t outrider_sizes(int64_t* sizes, int32_t most) {
  const int64_t found[] = {VERSION,        sizeof(Matrix),  sizeof(Norm),         sizeof(Linear),  sizeof(Table),   sizeof(LayerEmbeddings),
                           sizeof(Rotary), sizeof(Mixture), sizeof(Recurrence),   sizeof(Latent),  sizeof(Updates), sizeof(Layer),
                           sizeof(Model),  sizeof(LowRank), sizeof(AdapterLayer), sizeof(Adapter), sizeof(Tap),     sizeof(CachedPart),
                           sizeof(Slot),   sizeof(Stream),  std::size(FORMATS)};
  const int32_t count = (int32_t)std::size(found);
  std::copy_n(found, std::min(count, most), sizes);
  return count;
}

// Which steps the caller's thread computes alone: bit i is of 2^(i-1) to 2^i - 1 rows.
int32_t outrider_alone(Engine* engine) {
  int32_t found = 0;
  for (size_t i = 0; i < std::size(engine->habits); i++) found |= engine->habits[i].usual() << i;
  return found;
}

int64_t outrider_matrix_bytes(const Matrix* matrix) { return matrix->bytes(); }

// Packs rows of float32 weights, [count, inputs], as the outputs from `first` on.
void outrider_matrix_pack(Engine* engine, const Matrix* matrix, int32_t first, int32_t count, const float* weights) {
  share_panels(*engine, first, count, [&](int output, int outputs) {
    for (int i = output; i < output + outputs; i++) put_floats(*matrix, i, weights + (size_t)(i - first) * matrix->inputs);
  });
}

// The same for rows of blocks of a GGUF file, whose type the matrix has. `grid` is from grids.h; null = none.
void outrider_matrix_pack_stored(Engine* engine, const Matrix* matrix, int32_t first, int32_t count, const uint8_t* blocks,
                                 const uint8_t* grid) {
  const Format& format = format_of(matrix->kind);
  const size_t bytes = (size_t)format.stored * (matrix->inputs / format.stored_inputs());
  share_panels(*engine, first, count,
               [&](int output, int outputs) { put_stored(*matrix, output, outputs, {blocks + (output - first) * bytes, bytes, grid}); });
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
    engine->team.share(matrix.panels(), [&](int panel) { write_panel(*linear, panel, prepared, out, matrix.outputs); });
  });
}

// Folds rows of a slot that are committed now, and keeps `known` ones that follow.
void outrider_fold(Engine* engine, const Model* model, const Slot* slot) {
  for (int index = 0; index < model->layers; index++) {
    const Recurrence* layer = model->layer[index].recurrence;
    if (!layer) continue;
    fold_inputs(*slot, *layer);
    if (layer->kind == CONVOLUTION) continue;
    engine->team.run(false, [&](int) {
      engine->team.share(layer->heads, [&](int head) { HeadState(*slot, *layer, head).fold(slot->folded, slot->known); });
    });
  }
}

// The logits, float32 [kept_count, outputs of the head], of the rows `kept`. Returns how many experts were used, of all layers.
int32_t outrider_forward(Engine* engine, const Model* model, const Stream* streams, int32_t stream_count, float* logits, const Tap* tap) {
  std::vector<int64_t> tokens, positions, kept;
  for (const Stream& stream : std::span(streams, stream_count)) {
    tokens.insert(tokens.end(), stream.tokens, stream.tokens + stream.rows);
    for (size_t row = tokens.size() - stream.kept; row < tokens.size(); row++) kept.push_back(row);
    for (int row = 0; row < stream.rows; row++) positions.push_back(stream.length + stream.depths[row]);
  }
  const int rows = (int)tokens.size();
  engine->touched = 0;
  Forward forward(*engine, *model, rows, positions.data(), {streams, (size_t)stream_count});
  const auto job = [&](int thread) { forward.run(thread, tokens.data(), kept, logits, *tap); };
  if (rows < FEW_ROWS) engine->team.run(engine->habits[std::bit_width((uint32_t)rows)], job);
  else engine->team.run(false, job);
  return engine->touched;
}
}
