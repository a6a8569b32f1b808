"""Makes choices equal on every device: masses are integers, and logits are finite."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.errors import ModelError

# Masses are integers, so that their sums do not depend on the order.
MASS_SCALE = 2.0**32


def check_finite(largest: float | NDArray[np.floating[Any]]) -> None:
    """Raises ModelError unless the largest logit of each row is finite."""
    if not np.isfinite(largest).all():
        raise ModelError("The model computed NaN or infinite logits; set another model.dtype, such as bfloat16 or float32.")
