"""Makes it sound to fork ranks that run backward."""

import torch

# Autograd starts one thread a device at its first backward, and a process with such threads cannot
# fork. Fake tensors register CUDA devices where there are none: so a backward comes before them.
torch.zeros((), requires_grad=True).backward()
