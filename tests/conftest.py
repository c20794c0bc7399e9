import os

# Before NumPy and torch load: their thread pools are sized at import.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import hypothesis
import torch

torch.set_num_threads(1)

# Derandomised: a failure seen once is seen on every machine. No deadline: a slow, shared
# machine is no bug in the function under test.
hypothesis.settings.register_profile("book", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("book")
