"""Settings every test shares."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("megabench", max_examples=30, deadline=None)
settings.load_profile("megabench")

# Tests run side by side; one thread each keeps them from fighting over two cores.
torch.set_num_threads(1)
