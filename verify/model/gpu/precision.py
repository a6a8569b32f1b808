"""How kernels multiply matrices of float32: with the tensor cores of NVIDIA's GPUs, and without them on AMD's.

Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import torch
import triton.language as tl

# Three products of TF32 are as good as one of float32. Triton has them for NVIDIA's GPUs only.
PRECISION = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
