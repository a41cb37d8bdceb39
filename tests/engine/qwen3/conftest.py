"""Kernels run on the GPU where there is one, else in Triton's interpreter."""

import os

import torch

# Triton reads this once, when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
