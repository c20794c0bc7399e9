import hypothesis
import torch

# One thread: the machines that run the tests are shared, and timings in them compare like to like.
torch.set_num_threads(1)

# Derandomised: a failure seen once is seen on every machine. No deadline: a slow, shared
# machine is no bug in the function under test.
hypothesis.settings.register_profile("book", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("book")
