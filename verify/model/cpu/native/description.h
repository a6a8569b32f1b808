// Describes a model and a step to the library: plain C structures, which description.py repeats field by field. Loading
// compares the sizes of all of them.
#pragma once
#include <cstdint>

#include "matrix.h"

namespace outrider {

extern "C" {

enum NormKind : int32_t { NO_NORM = 0, RMS_NORM = 1, LAYER_NORM = 2 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, SQUARED_RELU = 4, CLAMPED_SILU = 5, LOGISTIC = 6 };
// Of the logits of a router: softmax of all, sigmoid, or softmax of those that are chosen.
enum Scores : int32_t { SOFTMAX = 0, SIGMOID = 1, CHOSEN_SOFTMAX = 2 };
// The state of a recurrent layer before a row: the last inputs of its convolution, and, except for CONVOLUTION, a matrix for
// each head.
enum StateKind : int32_t { DELTA_RULE = 0, STATE_SPACE = 1, CONVOLUTION = 2 };

struct Norm {
  const float *weight, *bias;  // bias: null = none
  int32_t kind, size;          // size: values that are normed together
};

struct Linear {
  Matrix matrix;      // no outputs = there is no such layer
  const float* bias;  // [outputs], or null
};

// Rows as a file stores them, one after the other and at any address: not packed, because a step reads few of them.
struct Table {
  const uint8_t* data;
  int32_t kind, rows, width;  // kind: Kind, or FLOAT16_ROWS
};
constexpr int32_t FLOAT16_ROWS = -1;

// Embeddings of tokens for each layer (Gemma 3n's and 4's per-layer embeddings).
struct LayerEmbeddings {
  Table table;        // [tokens * layers, width]; no rows = there are none. Further tokens have the embeddings of the first
  Linear projection;  // of a token's scaled embedding, to [layers * width]
  Norm norm;          // of the projection, [width]
};

// A table of rotary angles. Queries are also multiplied by 1 + temperature * ln(1 + floor(position / span)) (Llama 4's scaling).
struct Rotary {
  const float* frequencies;  // [size / 2]
  int32_t size;              // dimensions of a head that are rotated; of each, halves are rotated together
  float scaling;             // of cosines and sines
  float temperature, span;   // temperature: 0 = none
};

// Experts, of which each row uses some. A layer may have a shared expert beside them.
struct Mixture {
  Linear router;          // to one logit for each expert
  const float* bias;      // [count], added to scores where experts are chosen; null = none
  const Linear* experts;  // [count, 3]: gate, up and down
  Linear shared_gate;     // to one logit, whose sigmoid the shared expert's output is multiplied by; may be absent
  int32_t count, used, scores;
  int32_t normalized;           // whether the weights of a row's experts are divided by their sum
  int32_t groups, used_groups;  // experts are chosen in the groups with the largest sums of scores; 1 = no groups
  int32_t summed;               // the largest scores of a group, of which its sum is
  float scale;                  // of weights
  const float* scales;          // [count], of each expert's output; null = none
  // Of the residual, before the router and before experts, which else read what the shared expert reads; and of outputs, before both
  // are added. May be absent.
  Norm router_norm, norm, post_norm, shared_post_norm;
};

// A layer that keeps a state of the text before a row (recurrence.h).
struct Recurrence {
  // Of the normed residual. The convolution's inputs: queries and keys of all key heads, then values. CONVOLUTION: `beta` is multiplied
  // with what is convolved, and `gate` with the result.
  Linear convolved, gate, beta, step, output;
  Linear keys, values;                    // of what is convolved, where `convolved` is queries only; may be absent
  Linear gate_down, step_down;            // to what `gate` and `step` read instead; both may be absent
  const float *taps, *bias;               // of the convolution: [window + 1, channels]; [channels], or null
  const float *decay, *step_bias, *skip;  // [heads], [heads * decay_dim], [heads]; skip: null = none
  Norm norm;                              // of outputs; several groups of values if it is smaller than a row
  int32_t kind, window, channels;
  int32_t heads, key_heads, key_dim, value_dim;
  int32_t decay_dim;           // 1 = a head's matrix has one decay; key_dim = each of its rows has its own
  int32_t activation;          // of the gate
  int32_t tiled;               // whether head h reads the key head h % key_heads, and not h / (heads / key_heads)
  int32_t normed_gated;        // whether the gate comes before the norm
  int32_t convolution, state;  // numbers among the layers that have one
  float least, most;           // steps are between them
  float reach;                 // of the delta rule: the most that it corrects what a key reads by
  float epsilon;               // of the norm
};

// Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are products of one latent of a token,
// and only this and a part of the key that is rotated are cached. They are one key of a layer with a single key head: `key` computes
// them, `key_norm` norms the latent, and the latent is the value. So `query` computes of each head the part that multiplies a
// latent's key, before that part is multiplied by `key_up`, and the part that is rotated.
struct Latent {
  Linear query_down;  // to what `query` reads instead of the residual; may be absent
  Norm query_norm;    // of its outputs
  // Each head's own: [heads, latent, part of a query that is not rotated], and [heads, values, latent]. A panel is of one head.
  Linear key_up, value_up;
};

// How a layer changes several residuals (altup.h).
struct Updates {
  Norm norm;                       // before the router, whose scale it has
  const float* router;             // [residuals, hidden]
  const float *predict, *correct;  // of what it says: to [residuals * residuals], to [residuals]
  const float* scale;              // [hidden], of the first residual where the layer's embedding is added; null = none
};

struct Layer {
  // Before and after attention and the feed-forward part. The later norm takes the output, before it is added to the residual.
  Norm attention_norm, attention_post_norm, feed_forward_norm, feed_forward_post_norm;
  Norm query_norm, key_norm, value_norm;  // of each head, or of all heads together
  Norm embedding_post_norm;
  // Gate: may be absent. Value: if absent, keys before their norm are values; key: if absent, keys and values are those that another
  // layer has written. With a mixture, the last three are the shared expert.
  Linear query, key, value, output, gate, up, down;
  Linear query_gate;                        // whose sigmoid the output of attention is multiplied by; may be absent
  Linear embedding_gate, embedding_output;  // of the layer's embedding of a token: to its width, and back; may be absent
  // Of the normed residual, through few values: added, with it, to the residual and to the output of attention, and the sum is divided
  // by the root of 2 (Menghani et al., LAuReL: Learned Augmented Residual Layer). May be absent.
  Linear augment_down, augment_up;
  Norm augment_post_norm;
  const Updates* updates;                        // null = there is one residual
  const Mixture* mixture;                        // null = none
  const Recurrence* recurrence;                  // null = none
  const Latent* latent;                          // null = none
  const float* sinks;                            // [heads], scores of a position without a value; null = none
  int32_t heads, kv_heads, head_dim, value_dim;  // heads: 0 = no attention
  int32_t cached;                                // layer of the cache
  int32_t window;                                // positions that a row attends to, its own included; 0 = all
  int32_t rotary, rotated;                       // index of the table, -1 = none; the first dimension of a head that is rotated
  int32_t activation;
  int32_t parallel;    // whether the feed-forward part reads the residual before attention
  float scaling, cap;  // of scores; cap: 0 = none
  float alpha, limit;  // of CLAMPED_SILU
  float scale;         // of the residual after the layer
  float deviations;    // of the gate's values, so far above their mean ones stay; -infinity = all stay as they are
};

struct Model {
  int32_t layers, hidden, rotaries;
  float epsilon, embedding_scale, residual_scale, logit_scale, logit_cap;  // logit_cap: 0 = none
  const Layer* layer;
  const Rotary* rotary;
  Matrix embedding;
  Linear head;
  Norm norm;
  LayerEmbeddings embeddings;
  const Linear *expand, *merge;  // [residuals - 1]: from a token's embedding, and at last to what is averaged
  int32_t residuals;             // 0 = one, without these
};

// An adapter's addition to a product of a row: up (down row). No outputs = nothing. Both are float32, and `up` is scaled.
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

// Hidden states of all rows, [rows, max(count, 1) * hidden], for a draft head: the inputs of some layers, or the normed output.
struct Tap {
  int32_t count;
  const int32_t* layers;
  float* states;  // null = none are kept
};

// Keys or values of one layer of a cache: [heads, positions, width].
struct CachedPart {
  char* data;
  int64_t head_stride, position_stride;  // bytes
};

// The states of a stream, and what the rows since have written. A forward first folds rows that are committed now.
struct Slot {
  float* matrices;                     // [states, heads, key_dim, value_dim]
  float *keys, *writes, *decays;       // [states, heads, capacity, key_dim], [..., value_dim], [..., decay_dim]
  float* inputs;                       // of convolutions: [convolutions, window + capacity, channels]
  float *next_matrices, *next_inputs;  // after the rows, which then are not kept; null = they are
  const int32_t* parents;              // of known rows and rows: the one before it in its text; -1 = the committed tokens
  int32_t capacity, folded, known;     // rows to fold, and rows after them that an earlier forward has computed
};

// The rows of one stream. They are written to its cache from slot `start` on.
struct Stream {
  const CachedPart* parts;      // [layers, 2]: keys and values
  int32_t stored;               // StoredAs
  int32_t rows, start, length;  // length: committed tokens
  int32_t kept;                 // rows whose logits are returned, the last ones
  const int64_t* tokens;        // of the rows
  const int64_t* depths;        // positions of the rows after the committed tokens
  const int32_t* counts;        // of rows that each row attends to, itself included; null = all before it and itself
  const int32_t* slots;         // of these rows, row after row
  const Adapter* adapter;       // null = none
  const Slot* states;           // null = the model keeps none
};
}

}  // namespace outrider
