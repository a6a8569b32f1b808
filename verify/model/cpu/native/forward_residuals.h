// Operations of a forward's layers on the residual, or on several, beside adding their outputs.
#pragma once
#include "forward.h"

namespace outrider {

inline void Forward::fit_residuals() {
  others_width_ = std::max(model_.residuals - 1, 0) * model_.hidden;
  others_ = engine_.others.of((size_t)rows_ * others_width_);
  predicted_ = engine_.predicted.of(model_.residuals ? (size_t)rows_ * model_.hidden : 0);
}

inline Residuals Forward::residuals(int row) {
  return {residual_ + (size_t)row * model_.hidden, others_ + (size_t)row * others_width_, model_.residuals, model_.hidden};
}

// The other residuals of tokens' embeddings, as large as these.
inline void Forward::expand() {
  const Rows rows = read_residual({}, model_.expand->matrix.quantized());
  for (int i = 1; i < model_.residuals; i++)
    multiply_all({{&model_.expand[i - 1], others_ + (size_t)(i - 1) * model_.hidden, others_width_}}, rows, 0);
  team_.share(rows_, [&](int row) {
    for (int i = 1; i < model_.residuals; i++) rescale(residuals(row).at(i), residuals(row).first, model_.hidden);
  });
}

// The first residual becomes the mean of all, each projected and as large as it.
inline void Forward::merge() {
  const int hidden = model_.hidden;
  const float part = 1 / (float)model_.residuals;
  team_.share(rows_, [&](int row) {
    for (int i = 0; i < hidden; i++) predicted(row)[i] = residuals(row).first[i] * part;
  });
  for (int index = 1; index < model_.residuals; index++) {
    const Linear& linear = model_.merge[index - 1];
    const Rows rows = prepare(normed_, rows_, hidden, linear.matrix.quantized(),
                              [&](int row) { std::memcpy(normed_ + (size_t)row * hidden, residuals(row).at(index), 4 * (size_t)hidden); });
    multiply_all({{&linear, added_, hidden}}, rows, 0);
    team_.share(rows_, [&](int row) {
      float* added = added_ + (size_t)row * hidden;
      rescale(added, residuals(row).first, hidden);
      for (int i = 0; i < hidden; i++) predicted(row)[i] += added[i] * part;
    });
  }
  team_.share(rows_, [&](int row) { std::memcpy(residuals(row).first, predicted(row), 4 * (size_t)hidden); });
}

inline void Forward::correct_row(const Updates& updates, int row) {
  correct(updates, residuals(row), model_.epsilon, predicted(row), normed_ + (size_t)row * model_.hidden);
}

// `project` has computed the few values, and `normed_` has the normed residual.
inline void Forward::augment(const Layer& layer) {
  const Rows few = prepare(gated_, rows_, layer.augment_up.matrix.inputs, layer.augment_up.matrix.quantized());
  add_product(layer.augment_up, few, layer.augment_post_norm);
  team_.share(rows_, [&](int row) {
    float *to = residual_ + (size_t)row * model_.hidden, *normed = normed_ + (size_t)row * model_.hidden;
    for (int i = 0; i < model_.hidden; i += LANES) store(to + i, (load(to + i) + load(normed + i)) * all(std::sqrt(0.5f)));
  });
}

}  // namespace outrider
