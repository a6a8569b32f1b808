"""The size of a deployment."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from outrider.server.ray.scale import Scale


def test_the_bounds_are_in_order() -> None:
    assert Scale(replicas=2, max_replicas=2).ingress_replicas == 1
    with pytest.raises(ValidationError, match="max_replicas must be at least replicas"):
        Scale(replicas=3, max_replicas=2)
    with pytest.raises(ValidationError):
        Scale.model_validate({"replica": 1})
