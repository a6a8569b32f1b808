// The last phase: the products of the rows that are kept with the head, scaled and capped.
#pragma once
#include "forward.h"

namespace outrider {

inline void Forward::compute_logits(const Rows& rows, float* logits) {
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

}  // namespace outrider
