"""One thread: two on a busy core are far slower than one."""

import torch

torch.set_num_threads(1)
