"""Benchmarks side by side with what one would use instead; ratios within one run.

``make bench``, or ``python benchmarks/run.py [--quick]``. One thread, best of several runs after a
warm-up, so that the ratios depend little on the machine.
"""

import argparse
import functools
import os
import time
import weakref

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowgrad_utils as lg
from lowgrad_utils.experiments import paper_sizes

SEPARATOR = "-" * 88


class LiveArrays(TorchDispatchMode):
    """Follows the storages that come to life inside the block, and the most alive at once."""

    def __enter__(self):
        self.live, self.peak, self.largest = {}, 0, 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage(), before)
        return result

    def _follow(self, storage, before):
        key = storage._cdata
        if key in before or key in self.live:
            return  # a view, or an operation in place
        self.live[key] = storage.nbytes()
        weakref.finalize(storage, self.live.pop, key, None)
        self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(self.live.values()))


def best_time(function, repeats):
    """Return the least time of several calls after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def case(d, dtype):
    """Draw data, network and residue at the proportions of the paper."""
    n, m = paper_sizes(d)
    data = lg.sample_spiked_data(n, d, nu=0.375, seed=0)
    parts = (x.to(dtype) for x in (data.X, data.z, data.q))
    X, z, q = parts
    data = lg.SpikedData(X, z, q / q.norm(), data.zeta, data.eigenvalues.to(dtype))
    network = lg.TwoLayerNetwork.random(d, m, activation="softplus", seed=0)
    W = lg.normalise_rows(network.W.to(dtype))
    network = lg.TwoLayerNetwork(W, network.a.to(dtype), "softplus")
    y = lg.sample_targets(data.X, seed=0).y
    return data, network, y


def autograd(data, network, y):
    """Compute the gradient of the mean squared loss by automatic differentiation."""
    W = network.W.clone().requires_grad_()
    f = network.gamma * network.sigma.value(data.X @ W.T) @ network.a
    return torch.autograd.grad(lg.LOSSES["mse"].value(f, y).mean(), W)[0]


def verdict(met):
    """Return the words for an aim."""
    return "met" if met else "NOT met"


def compare_decompose(d, dtype, repeats):
    """Time the two products, then ``decompose`` and autograd as multiples of them."""
    data, network, y = case(d, dtype)
    residue = lg.LOSSES["mse"].residue(network(data.X), y)
    slopes = torch.rand(data.n, network.m, dtype=dtype)
    products = best_time(lambda: (data.X @ network.W.T, data.X.T @ slopes), repeats)
    ours = best_time(lambda: lg.decompose(data, network, residue), repeats)
    theirs = best_time(lambda: autograd(data, network, y), repeats)
    return products, ours / products, theirs / products


def bench_decompose(sizes, repeats):
    """Compare ``decompose`` with the two products it cannot avoid, and with autograd."""
    print("decompose: all four pieces, against two bare products and against autograd")
    print(f"{'d':>6s} {'dtype':>8s} {'products s':>11s} {'decompose':>10s} {'autograd':>9s}   aim")
    for d in sizes:
        for dtype in (torch.float32, torch.float64):
            products, ours, theirs = compare_decompose(d, dtype, repeats)
            aim = verdict(ours <= 1.3 and ours <= theirs)
            name = str(dtype).removeprefix("torch.")
            print(f"{d:6d} {name:>8s} {products:11.3f} {ours:9.2f}x {theirs:8.2f}x   {aim}")
    print("aim: at most 1.3 x the products, and no slower than autograd\n")


def six_and_edge(G, E):
    """Return the six largest singular values of G, and the largest of E, in one tensor."""
    edge = lg.leading_singular_triplets(E, 1).s
    return torch.cat([lg.leading_singular_triplets(G, 6).s, edge])


def bench_spectrum(sizes, repeats):
    """Compare six singular values and the edge with a full decomposition."""
    print("leading six singular values of G, and the edge |E|, against a full SVD of each")
    print(f"{'d':>6s} {'full s':>9s} {'ours s':>9s} {'ratio':>7s} {'rel. error':>11s}   aim")
    for d in sizes:
        data, network, y = case(d, torch.float64)
        parts = lg.decompose(data, network, lg.LOSSES["mse"].residue(network(data.X), y))
        G, E = parts.G, parts.E
        begin = time.perf_counter()
        full = torch.cat([torch.linalg.svdvals(G)[:6], torch.linalg.svdvals(E)[:1]])
        slow = time.perf_counter() - begin
        fast = best_time(functools.partial(six_and_edge, G, E), repeats)
        error = float(((six_and_edge(G, E) - full) / full).abs().max())
        # The aim speaks of d = 4000; smaller sizes are shown for comparison.
        aim = verdict(slow / fast >= 10 and error < 1e-6) if d >= 4000 else ""
        print(f"{d:6d} {slow:9.2f} {fast:9.2f} {slow / fast:6.1f}x {error:11.1e}   {aim}")
    print("aim: 10 x at d = 4000, relative error below 1e-6\n")


def bench_memory(d):
    """Count arrays alive during ``decompose``, in units of an n x m array."""
    data, network, y = case(d, torch.float64)
    residue = lg.LOSSES["mse"].residue(network(data.X), y)
    unit = data.n * network.m * 8
    gradient = d * network.m * 8
    with LiveArrays() as arrays:
        lg.decompose(data, network, residue)
    print(f"memory of decompose at d = {d}, storages that came to life inside the call")
    peak = arrays.peak / unit
    print(f"most alive at once: {peak:.2f} n x m arrays   {verdict(peak <= 3)}")
    largest = arrays.largest / gradient
    print(f"largest single one: {largest:.2f} x G (d x m)   {verdict(largest <= 1)}")
    print("aim: at most three n x m arrays alive, nothing larger than G")


def main():
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it out")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    sizes, repeats = ((250, 500), 2) if quick else ((1000, 4000), 3)
    print(SEPARATOR)
    bench_decompose(sizes, repeats)
    print(SEPARATOR)
    bench_spectrum(sizes, repeats)
    print(SEPARATOR)
    bench_memory(sizes[-1] if quick else 1000)


if __name__ == "__main__":
    main()
