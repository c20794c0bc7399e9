"""Leading eigenpairs and class centres side by side with other packages; ratios within one run.

``make bench``, or ``python benchmarks/curvature.py [--quick] [--only WORD] [--out FILE]``. Every
measurement runs in a process of its own, which brings its threads and its peak of memory; what was
measured before is read from the file and not repeated.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import nn

from lowgrad_utils import classifiers, datasets
from lowgrad_utils.curvature import LossCurvature
from lowgrad_utils.eigensolvers import top_eigenpairs

PEERS = Path(sys.prefix) / "peers"
#: Name, width, and steps of training. Images are shrunk to 16 pixels, so that all takes minutes.
NETWORKS = {"0.15 M": (1 / 8, 300), "1 M": (0.332, 150)}
SIZE = 16
K = 10
ACCURACY = 1e-3
#: Gigabytes that ours may take, and images in a batch of the others, which is their fastest.
MEMORY, BATCH = 4.0, 250
#: From loose to tight; the first that is accurate enough counts.
TOLERANCES = (0.5, 0.1, 1e-2, 1e-3, 1e-4)
SUBSPACE = K + 7
STEPS = (16, 17, 18, 20, 22, 24, 28, 32, 40, 60, 100)


def load(folder, network, n):
    """Return the trained network and n images."""
    width, _ = NETWORKS[network]
    model = classifiers.build("vgg11", channels=1, width=width, size=SIZE)
    model.load_state_dict(torch.load(Path(folder) / f"{network}.pt", weights_only=True))
    x, y = datasets.load("mnist").images(size=SIZE)
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:n]
    return model.eval(), x[rows], y[rows]


def train(folder, steps_factor):
    """Train the networks for a few seconds and store them, those that are not there yet."""
    # Training amplifies rounding, so the number of threads would make it another network.
    torch.set_num_threads(1)
    x, y = datasets.load("mnist").images(size=SIZE)
    for network, (width, steps) in NETWORKS.items():
        if (Path(folder) / f"{network}.pt").is_file():
            continue
        model = classifiers.build("vgg11", channels=1, width=width, size=SIZE, seed=0)
        steps = int(steps * steps_factor)
        classifiers.fit(model, x, y, steps=steps, lr=0.05, seed=0, progress=False)
        torch.save(model.state_dict(), Path(folder) / f"{network}.pt")


def batches(x, y):
    """Return the images in batches."""
    return list(zip(x.split(BATCH), y.split(BATCH)))


def ours(model, x, y, matrix="gauss_newton", tolerances=TOLERANCES):
    """Yield, for each tolerance, a function that returns eigenvalues and products."""
    for tolerance in tolerances:

        def solve(tolerance=tolerance):
            curvature = LossCurvature(model, (x, y), memory=MEMORY)
            pairs = top_eigenpairs(
                getattr(curvature, matrix),
                K,
                start=curvature.class_centres(),
                tolerance=tolerance,
                subspace=SUBSPACE,
                residuals=False,
            )
            return pairs.values.tolist(), pairs.products

        yield solve


def with_curvlinops(model, x, y):
    """Yield solvers of curvlinops' Gauss-Newton operator by scipy's eigsh."""
    import curvlinops

    for tolerance in TOLERANCES:

        def solve(tolerance=tolerance):
            operator = curvlinops.GGNLinearOperator(
                model,
                nn.CrossEntropyLoss(),
                list(model.parameters()),
                batches(x, y),
                check_deterministic=False,
            )
            count, size = 0, operator.shape[0]

            def product(vector):
                nonlocal count
                count += 1
                vector = torch.from_numpy(np.ascontiguousarray(vector).reshape(-1))
                return (operator @ vector).numpy()

            start = torch.randn(size, generator=torch.Generator().manual_seed(0)).numpy()
            matrix = LinearOperator((size, size), matvec=product, dtype=np.float32)
            values, _ = eigsh(matrix, K, which="LA", tol=tolerance, v0=start, ncv=SUBSPACE)
            return sorted(values.tolist(), reverse=True), count

        yield solve


def with_eigenthings(model, x, y):
    """Yield solvers of hessian-eigenthings: its own Lanczos without restarts."""
    import hessian_eigenthings as he

    for steps in STEPS:

        def solve(steps=steps):
            loss = he.supervised_loss_of_output(nn.CrossEntropyLoss())
            operator = he.GGNOperator(model, batches(x, y), he.supervised_forward, loss)
            found = he.lanczos(operator, k=K, max_iter=steps, which="LA", seed=0)
            return found.eigenvalues.tolist(), found.iterations

        yield solve


def with_pyhessian(model, x, y):
    """Yield solvers of PyHessian, which knows the Hessian alone, by power iteration."""
    import pyhessian

    for tolerance in (1e-3, 1e-4):

        def solve(tolerance=tolerance):
            hessian = pyhessian.hessian(model, nn.CrossEntropyLoss(), data=(x, y), cuda=False)
            values, _ = hessian.eigenvalues(maxIter=100, tol=tolerance, top_n=K)
            return sorted(values, reverse=True), None

        yield solve


def reference(model, x, y, matrix="gauss_newton"):
    """Return eigenvalues to about 1e-5, from a random start."""
    curvature = LossCurvature(model, (x, y), memory=MEMORY)
    pairs = top_eigenpairs(getattr(curvature, matrix), K, tolerance=1e-4, residuals=False, seed=1)
    return pairs.values.tolist()


TOOLS = {
    "ours": ours,
    "curvlinops": with_curvlinops,
    "hessian-eigenthings": with_eigenthings,
}
HESSIAN_TOOLS = {
    "ours (H)": lambda model, x, y: ours(model, x, y, "hessian"),
    "PyHessian (H)": with_pyhessian,
}


def peak_bytes():
    """Return the most memory this process ever held."""
    # In kilobytes, but on macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def eigenpairs(tool, model, x, y, expected):
    """Return time, products, error and memory of the loosest setting that is accurate enough."""
    solvers = {**TOOLS, **HESSIAN_TOOLS}[tool]
    torch.manual_seed(0)
    for solve in solvers(model, x[:60], y[:60]):
        solve()  # imports and compilation, on a few images
        break
    before = peak_bytes()
    for solve in solvers(model, x, y):
        begin, cpu = time.perf_counter(), time.process_time()
        values, products = solve()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        error = float(np.abs(np.array(values) / np.array(expected) - 1).max())
        if error <= ACCURACY:
            break
    return {
        "seconds": seconds,
        "cpu": cpu,
        "products": products,
        "error": error,
        "gigabytes": (peak_bytes() - before) / 1e9,
    }


def centres(model, x, y):
    """Return the times of one full-batch gradient and of class centres with their spectrum."""
    curvature = LossCurvature(model, (x, y), memory=MEMORY)

    def gradient():
        model.zero_grad()
        for images, labels in zip(x.split(1000), y.split(1000)):
            nn.functional.cross_entropy(model(images), labels, reduction="sum").backward()

    def spectrum():
        rows = curvature.class_centres()
        return torch.linalg.eigvalsh((rows @ rows.T).double())

    times = {gradient: [], spectrum: []}
    # In turn, so that whatever else the machine does meets both; hundredths of a second need many.
    end = time.perf_counter() + 5
    while len(times[spectrum]) < 4 or time.perf_counter() < end:
        for function, taken in times.items():
            begin = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begin)
    return {"gradient": min(times[gradient][1:]), "seconds": min(times[spectrum][1:])}


def worker(job):
    """Do one measurement and print it as a line of JSON."""
    sys.path.append(str(PEERS))
    torch.set_num_threads(job["threads"])
    model, x, y = load(job["folder"], job["network"], job["n"])
    if job["what"] == "reference":
        result = {"values": reference(model, x, y, job["matrix"])}
    elif job["what"] == "centres":
        result = centres(model, x, y)
    else:
        result = eigenpairs(job["what"], model, x, y, job["expected"])
    print(json.dumps(result))


class Measured:
    """Results of earlier measurements, one line of JSON each, and how to make new ones."""

    def __init__(self, path, folder):
        self.path, self.folder, self.known = Path(path), folder, {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf8").splitlines():
                key, result = json.loads(line)
                self.known[tuple(key)] = result

    def __call__(self, what, network, n, threads, **more):
        """Return what is known, or measure it in another process and write it down."""
        key = (what, network, n, threads, more.get("matrix", ""))
        if key not in self.known:
            job = {"what": what, "network": network, "n": n, "threads": threads, **more}
            command = [sys.executable, __file__, "--worker", json.dumps({**job, **self.folder})]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"{what} failed on {network} and {n} images: see above")
            self.known[key] = json.loads(done.stdout.splitlines()[-1])
            with self.path.open("a", encoding="utf8") as handle:
                handle.write(json.dumps([key, self.known[key]]) + "\n")
        return self.known[key]


def show(name, network, n, threads, result, ratio):
    """Print a line of the table of eigenpairs."""
    products = result["products"] or ""
    reached = "" if result["error"] <= ACCURACY else "   accuracy not reached"
    print(
        f"{network:>7s} {n:5d} {threads:7d} {name:>20s} {result['seconds']:8.2f} "
        f"{result['cpu']:8.2f} {products!s:>8s} {result['error']:8.0e} {result['gigabytes']:6.2f} "
        f"{ratio:>7s}{reached}",
        flush=True,
    )


def bench_eigenpairs(measured, tools, matrix, cases):
    """Print, case by case, what each tool takes."""
    print(
        f"{'network':>7s} {'n':>5s} {'threads':>7s} {'':>20s} {'seconds':>8s} {'CPU':>8s} "
        f"{'products':>8s} {'error':>8s} {'GB':>6s} {'/ ours':>7s}"
    )
    for network, n, threads in cases:
        expected = measured("reference", network, n, 2, matrix=matrix)["values"]
        results = {
            name: measured(name, network, n, threads, expected=expected, matrix=matrix)
            for name in tools
        }
        own = next(iter(results.values()))["seconds"]
        for name, result in results.items():
            show(name, network, n, threads, result, f"{result['seconds'] / own:.2f}x")
        fastest = min(list(results.values())[1:], key=lambda r: r["seconds"])["seconds"] / own
        print(f"        ours is {fastest:.2f} x as fast as the fastest other", flush=True)
    print()


def bench_centres(measured, cases):
    """Print class centres and their spectrum against one gradient of all images."""
    print("class centres and their spectrum against one full-batch gradient")
    for network, n, threads in cases:
        result = measured("centres", network, n, threads)
        ratio = result["seconds"] / result["gradient"]
        aim = "met" if ratio <= 1.3 else "NOT met"
        print(f"{network:>7s} {n:5d} {threads:7d} {ratio:6.2f} x   {aim}", flush=True)
    print("aim: at most 1.3 x\n")


def main():
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it out")
    parser.add_argument("--out", help="file of measurements to go on with; by default a new one")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    sizes = (200,) if arguments.quick else (1000, 5000)
    networks = list(NETWORKS)[: 1 if arguments.quick else 2]
    cases = [(name, n, threads) for threads in (1, 2) for name in networks for n in sizes]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.out:
            # What was measured belongs to these networks, so they stay beside it.
            folder = f"{arguments.out}.networks"
            Path(folder).mkdir(parents=True, exist_ok=True)
        train(folder, 0.3 if arguments.quick else 1)
        measured = Measured(arguments.out or Path(folder) / "measured.jsonl", {"folder": folder})
        print(f"the {K} leading eigenpairs of G, each eigenvalue to {ACCURACY:g}")
        bench_eigenpairs(measured, TOOLS, "gauss_newton", cases)
        print("aim: twice as fast as the fastest other\n")
        bench_centres(measured, cases)
        print(f"the {K} leading eigenpairs of the Hessian, which is all that PyHessian knows")
        bench_eigenpairs(
            measured,
            HESSIAN_TOOLS,
            "hessian",
            [c for c in cases if c[0] == networks[0] and c[1] <= 1000],
        )


if __name__ == "__main__":
    main()
