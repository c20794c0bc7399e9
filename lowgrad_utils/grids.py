"""Grids of measurements too long for a notebook cell: computed by a command, stored, recomputed.

``python -m lowgrad_utils.grids theorem-3-1`` runs a grid (about an hour on two cores, and it
resumes where it was stopped) and stores it in ``data/grids`` with its provenance. The tests draw
a random handful of its cells and compute them again.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from lowgrad_utils import checks, files, sweeps
from lowgrad_utils.experiments import (
    alignment_grid,
    bridge,
    clusters,
    density,
    edge_threshold,
    embedded_images,
    epochs,
    excess,
    filters,
    gradient_cell,
    hessian_sweep,
    hidden_spikes,
    input_noise,
    jacobian,
    label_moments,
    large_spikes,
    one_step,
    own_layers,
    slopes,
    spike_law,
    spike_prediction,
    spike_winner,
    trajectories,
    weight_decay,
)

Cell = dict[str, Any]

#: Sizes d and seeds over which the rates of Theorem 3.1 are fitted.
SIZES, SEEDS = (250, 400, 640, 1000, 1400, 2000), tuple(range(12))


@dataclass(frozen=True)
class Grid:
    """A named grid: which function, over which cells.

    Attributes:
        function: Called with a cell's parameters; returns numbers.
        cells: The parameters of each cell.
        about: One line for the provenance.
        spot: How many cells a spot check computes again.
        first: It chooses them among so many of the first cells, where later ones take minutes.
        atol: Absolute difference that it admits. Training amplifies rounding, which is another
            on another processor, so that what follows from it agrees only as two seeds would.
        rtol: Relative difference that it admits.
    """

    function: Callable[..., dict[str, float]]
    cells: tuple[Cell, ...]
    about: str
    spot: int = 5
    first: int | None = None
    atol: float = 1e-12
    rtol: float = 1e-6

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters of a cell."""
        return list(self.cells[0]) if self.cells else []


_NAMES = ("nu", "alpha", "activation", "loss", "residue", "weights")


def _cells(sizes, series, seeds) -> tuple[Cell, ...]:
    return tuple(
        {"d": d, **dict(zip(_NAMES, row)), "seed": seed}
        for seed, d, row in product(seeds, sizes, series)
    )


def _theorem_3_1() -> tuple[Cell, ...]:
    nus, alphas = (0.0, 0.125, 0.25, 0.375, 0.45), (0.0, 0.5)
    activations, residues = ("softplus", "tanh"), ("network", "offset", "independent")
    by_beta = [f"beta={beta}" for beta in (0.0, 0.2, 0.6, 1.0, 1.4)]
    series = [
        *product(nus, [0.0], activations, ["mse"], residues, ["uniform"]),
        *product((0.125, 0.375), [0.5], activations, ["mse"], ["network"], ["uniform"]),
        # Allowed by the text (nu < 1/4), but 2 nu > (1 - alpha) / 2: S2 should outgrow S1 here.
        # At nu = 0.05 it should not.
        *product([0.05, 0.1875], [0.5], ("softplus", "silu"), ["mse"], ["offset"], ["uniform"]),
        *product([0.2], alphas, ["softplus"], ["mse"], by_beta, ["uniform"]),
        # Two hypotheses broken on purpose: Assumption 5, and |W| = O(1).
        (0.125, 0.0, "softplus", "mse", "one-example", "uniform"),
        (0.125, 0.0, "softplus", "mse", "offset", "spike"),
    ]
    # A network's own residue scatters with z^T r; where that hides a trend it has 96 seeds.
    scattered = product((0.25, 0.375), [0.0], activations, ["mse"], ["network"], ["uniform"])
    return _cells(SIZES, series, SEEDS) + _cells(SIZES, list(scattered), range(12, 96))


def _figure_1() -> tuple[Cell, ...]:
    activations = ("softplus", "elu", "silu", "sigmoid", "tanh")
    losses, weights = ("mse", "huber", "logistic"), ("uniform", "shifted")
    series = product((0.125, 0.375), [0.0], activations, losses, ["network"], weights)
    return _cells([1000], list(series), range(60))


def _folder() -> Path:
    return files.data_folder("grids")


def _winning_cells() -> tuple[Cell, ...]:
    """The winners by test error among the stored trainings; none before those are stored."""
    path = _folder() / "hessian-training.csv"
    return tuple(hessian_sweep.winners(sweeps.load_grid(path))) if path.is_file() else ()


#: The grids by name.
GRIDS: dict[str, Grid] = {
    "theorem-3-1": Grid(
        gradient_cell,
        _theorem_3_1(),
        "Norms, singular values and alignments of the gradient's pieces behind Theorem 3.1",
    ),
    "figure-1": Grid(
        gradient_cell, _figure_1(), "The same at the paper's sizes over the panels of Figure 1"
    ),
    "residue-alignment": Grid(
        alignment_grid.alignment_cell,
        tuple(alignment_grid.alignment_cells()),
        "Alignment z^T r / (sqrt(n) |r|) in 192 scenarios and 4 extra ones behind Assumption 6",
    ),
    "rule-of-thumb": Grid(
        spike_winner.winner_cell,
        tuple(spike_winner.natural_cells()),
        "Which spike leads in 648 cases with residues of networks, measured and predicted",
    ),
    "rule-of-thumb-residues": Grid(
        spike_winner.winner_cell,
        tuple(spike_winner.prescribed_cells()),
        "Which spike leads in 324 cases with prescribed residues, measured and predicted",
    ),
    "input-noise": Grid(
        input_noise.noise_rate_cell,
        input_noise.noise_rate_cells(),
        "Pieces of the gradient under input noise of variance n^rho, behind Proposition 4.2",
    ),
    "figure-7-noise": Grid(
        input_noise.noise_cell,
        input_noise.figure_7_noise_cells(),
        "The gradient of Figure 7 (a, b) as the variance of the input noise grows",
    ),
    "large-spikes": Grid(
        large_spikes.large_spike_cell,
        large_spikes.large_spike_cells(),
        "The gradient's part along q and the rest E_L, for many weights, behind Theorem 3.2",
    ),
    "saturated-slopes": Grid(
        large_spikes.large_spike_cell,
        large_spikes.saturated_cells(),
        "The same for activations whose slopes die out along q, the control of Theorem 3.2",
    ),
    "figure-3": Grid(
        large_spikes.large_spike_cell,
        large_spikes.figure_3_cells(),
        "The same at the paper's sizes over activations and weights, behind Figure 3",
    ),
    "relu-slopes": Grid(
        slopes.slope_cell, slopes.slope_cells(), "Operator norms of sigma'_perp behind Section 3.2"
    ),
    "relu-signs": Grid(
        slopes.sign_cell,
        slopes.sign_cells(),
        "ReLU's slopes against the signs of the spike, behind Proposition 3.1",
    ),
    "figure-2": Grid(
        slopes.suppression_cell,
        slopes.figure_2_cells(),
        "The residue spike's share in the gradient over the activations of Figure 2",
    ),
    "relu-suppression": Grid(
        slopes.suppression_cell,
        slopes.suppression_cells(),
        "S2 against S1 for ReLU and smooth activations on ill-conditioned data",
    ),
    "jacobian-penalty": Grid(
        jacobian.penalty_cell,
        jacobian.penalty_cells(),
        "Pieces of the Jacobian penalty's gradient and critical strengths, behind Proposition 4.4",
    ),
    "figure-7-jacobian": Grid(
        jacobian.penalised_gradient_cell,
        jacobian.figure_7_jacobian_cells(),
        "The gradient of Figure 7 (c, d) as the Jacobian penalty grows",
    ),
    "decay-bounds": Grid(
        weight_decay.bounds_cell,
        weight_decay.bounds_cells(),
        "Norms of the spikes beside the bounds of Proposition 4.1",
    ),
    "decay-thresholds": Grid(
        weight_decay.threshold_cell,
        weight_decay.threshold_cells(),
        "The weight decay at which the gradient's top direction leaves a spike",
    ),
    "decay-powers": Grid(
        weight_decay.power_cell,
        weight_decay.power_cells(),
        "Alignments under a weight decay that is a power of n, behind Section 4's two conditions",
    ),
    "decay-curve": Grid(
        weight_decay.curve_cell,
        weight_decay.curve_cells(),
        "Alignment with a spike against weight decay, measured and predicted as for a bulk",
    ),
    "figure-8-cifar": Grid(
        embedded_images.feature_cell,
        embedded_images.feature_cells(),
        "The gradient on features of CIFAR-10 over preparations and activations, Figure 8 (a)",
    ),
    "figure-8-cifar-jacobian": Grid(
        embedded_images.penalty_cell,
        embedded_images.penalty_cells(),
        "The same under a Jacobian penalty, with critical strengths, behind Figure 8 (b)",
    ),
    "figure-4": Grid(
        trajectories.single_index_cell,
        trajectories.figure_4_cells(),
        "Alignments of the gradient's top direction under the two scalings",
    ),
    "figure-5": Grid(
        trajectories.direction_cell,
        trajectories.figure_5_cells(),
        "The gradient's top direction during training under the two scalings",
    ),
    "figure-5-weights": Grid(
        trajectories.weight_angle_cell,
        trajectories.weight_angle_cells(),
        "Angles between the weights trained under the two scalings",
        atol=2e-6,
    ),
    "figure-6": Grid(
        trajectories.spike_cell,
        trajectories.figure_6_cells(),
        "Training runs around the edge of stability along the data spike",
    ),
    "figure-6-large": Grid(
        trajectories.spike_cell,
        trajectories.figure_6_large_cells(),
        "The first steps of training runs with large data spikes",
    ),
    "filters": Grid(
        filters.filter_cell,
        filters.filter_cells(),
        "Angles of a filter's gradient to two given vectors, behind Remark 1",
    ),
    "filter-channels": Grid(
        filters.channel_cell,
        filters.channel_cells(),
        "Shared directions in the gradients of several filters",
    ),
    "hessian-clusters": Grid(
        clusters.size_cell,
        clusters.size_cells(),
        "Whether group means are clusters, over sample sizes, behind Figures 3 and 4",
        spot=1,
        first=4,
        atol=0.5,
    ),
    "hessian-epochs": Grid(
        epochs.epoch_cell,
        epochs.epoch_cells(),
        "How group means are organised, epoch by epoch, and the toy's account, behind Figure 5",
        spot=1,
        first=8,
        atol=0.1,
    ),
    "hessian-training": Grid(
        hessian_sweep.training_cell,
        hessian_sweep.stored_cells(),
        "Errors of narrow networks over data sets, sample sizes and learning rates, behind Eq. 29",
        spot=1,
        first=10,
        atol=0.3,
    ),
    "hessian-spectra": Grid(
        hessian_sweep.spectrum_cell,
        _winning_cells(),
        "Spectra of G and of its terms for the winning learning rates of hessian-training",
        spot=1,
        first=1,
        atol=0.5,
    ),
    "hessian-arms": Grid(
        hessian_sweep.spectrum_cell,
        hessian_sweep.arm_cells(),
        "The same for one network under other weight decays, label smoothing and epochs",
        spot=1,
        first=1,
        atol=1.0,
    ),
    "hessian-seeds": Grid(
        hessian_sweep.spectrum_cell,
        hessian_sweep.seed_cells(),
        "The same for six networks trained on other images from other weights",
        spot=1,
        first=1,
        atol=3.0,
    ),
    "edge-threshold": Grid(
        edge_threshold.threshold_cell,
        edge_threshold.threshold_cells(),
        "What lies above the bulk edge in the shipped networks, trained and not, and what it knows",
        spot=1,
        first=3,
        atol=0.05,
    ),
    "excess-small": Grid(
        excess.small_network_cell,
        tuple(excess.small_network_cells()),
        "Outliers of small networks' G and their predictions, everything explicit, behind claim C6",
        atol=0.05,
    ),
    "excess-networks": Grid(
        excess.network_cell,
        tuple(excess.network_cells()),
        "The same for shipped networks, from products with G",
        spot=1,
        first=3,
        atol=1e-3,
        rtol=1e-4,  # networks in float32
    ),
    "density-training": Grid(
        density.training_cell,
        density.training_cells(),
        "Top eigenpairs of Hessian and Gauss-Newton matrix and gradients in them, by epoch",
        spot=1,
        first=8,
        atol=0.1,
    ),
    "label-moments": Grid(
        label_moments.moments_cell,
        label_moments.moments_cells(),
        "Gauss-Newton matrix, empirical Fisher and Hessian of small networks over training",
        spot=2,
        first=30,
        atol=1e-6,
    ),
    "mini-bulk": Grid(
        density.mini_bulk_cell,
        density.mini_bulk_cells(),
        "Whole spectra of G and of its part within groups, where a mini-bulk is looked for",
        spot=2,
        first=16,
        atol=1e-6,
    ),
    "spike-law": Grid(
        spike_law.law_cell,
        spike_law.cells(),
        "Gradients beside the law of their population matrix: activations, losses, residues",
        # The law counts outliers and finds roots.
        atol=1e-6,
    ),
    "spike-law-sizes": Grid(
        spike_law.size_cell,
        spike_law.size_cells(),
        "The same over sizes",
        atol=1e-6,
    ),
    "spike-law-own": Grid(
        spike_law.own_cell,
        spike_law.own_cells(),
        "What a residue of the network's own outputs adds to the law",
        atol=1e-6,
    ),
    "spike-law-training": Grid(
        spike_law.training_cell,
        spike_law.training_cells(),
        "The law along training, with uniform rows and with rows that took the same steps",
        spot=2,
        atol=1e-4,
    ),
    "spike-law-late": Grid(
        spike_law.late_cell,
        spike_law.late_cells(),
        "The same in mean field up to epoch 100, when training has nearly stopped",
        spot=1,
        atol=1e-3,
    ),
    "spike-law-images": Grid(
        spike_law.image_cell,
        spike_law.image_cells(),
        "The same for MNIST and features of CIFAR-10",
        atol=1e-6,
    ),
    "bridge": Grid(
        bridge.bridge_cell,
        bridge.bridge_cells(),
        "Gauss-Newton outliers and gradients of two-layer networks, measured and predicted",
        atol=1e-6,
    ),
    "bridge-training": Grid(
        bridge.training_cell,
        bridge.training_cells(),
        "The gradient's share in two Gauss-Newton directions over training, and a frozen kernel's",
        atol=1e-6,
    ),
    "bridge-classes": Grid(
        bridge.classes_cell,
        bridge.classes_cells(),
        "Gradient, class centres and data spikes of classifiers on Gaussian mixtures",
        atol=1e-6,
    ),
    "bridge-images": Grid(
        bridge.images_cell,
        bridge.images_cells(),
        "The same for two-layer classifiers on images",
        atol=1e-6,
    ),
    "own-estimates": Grid(
        own_layers.estimate_cell,
        own_layers.estimate_cells(),
        "Spikes that diagnose estimates in two-layer networks, beside the true ones",
        # Iterated singular vectors, and the least of angles.
        atol=1e-6,
    ),
    "own-layers": Grid(
        own_layers.layer_cell,
        own_layers.layer_cells(),
        "What the gradient of each layer of shipped networks is made of, trained and untrained",
        # Float32 networks, which another processor rounds differently.
        spot=2,
        atol=0.01,
    ),
    "own-gauss-newton": Grid(
        own_layers.gauss_newton_cell,
        own_layers.gauss_newton_cells(),
        "The gradient's share in the leading Gauss-Newton directions, layer by layer",
        spot=2,
        atol=0.01,
    ),
    "own-batch-norm": Grid(
        own_layers.batch_norm_cell,
        own_layers.batch_norm_cells(),
        "The same for trained networks whose batch norms use the batch, as in training",
        spot=2,
        atol=0.01,
    ),
    "hidden-spikes": Grid(
        hidden_spikes.hidden_cell,
        hidden_spikes.hidden_cells(),
        "What the rest E hides: the third spike, higher orders, and E without them",
        # Values of the law pass through a count of outliers and root finding.
        atol=1e-7,
    ),
    "third-outlier": Grid(
        hidden_spikes.outlier_cell,
        hidden_spikes.outlier_cells(),
        "Outliers of the gradient by the angle between z and r o z, beside every prediction",
        atol=1e-7,
    ),
    "spike-prediction": Grid(
        spike_prediction.prediction_cell,
        tuple(spike_prediction.prediction_cells()),
        "The gradient's outliers and angles, measured and predicted by six routes",
        atol=1e-4,
    ),
    "spike-prediction-sizes": Grid(
        spike_prediction.size_cell,
        tuple(spike_prediction.size_cells()),
        "The law's predictions beside the gradient over sizes",
        atol=1e-4,
    ),
    "spike-phases": Grid(
        spike_prediction.phase_cell,
        tuple(spike_prediction.phase_cells()),
        "Which spikes the gradient shows over nu and alpha, measured and predicted",
        atol=2e-4,
    ),
    "spike-crossings": Grid(
        spike_prediction.crossing_cell,
        tuple(spike_prediction.crossing_cells()),
        "Where the data spike overtakes the residue spike by the law, over sizes",
        spot=2,
        first=9,
        atol=2e-3,
    ),
    "one-step": Grid(
        one_step.step_cell,
        one_step.residue_cells(),
        "Weights, features and ridge regression after one step, where the residue spike leads",
        atol=1e-5,
    ),
    "one-step-spike": Grid(
        one_step.step_cell,
        one_step.spike_cells(),
        "The same for data with a spike",
        atol=1e-5,
    ),
    "one-step-degree": Grid(
        one_step.degree_cell,
        one_step.degree_cells(),
        "How much features know of polynomials of a direction, over sizes, before and after a step",
        atol=1e-5,
    ),
    "one-step-compression": Grid(
        one_step.compression_cell,
        one_step.compression_cells(),
        "Ridge regression after one step with a compressed gradient",
        atol=1e-5,
    ),
    "one-step-longer": Grid(
        one_step.compression_cell,
        one_step.longer_cells(),
        "The same after five steps",
        atol=1e-5,
    ),
    "one-step-mnist": Grid(
        one_step.mnist_cell,
        one_step.mnist_cells(),
        "Ridge regression on features of MNIST after one step",
        atol=1e-5,
    ),
}


def stored(name: str) -> pd.DataFrame:
    """Load a stored grid after checking its hash: one row a cell.

    Args:
        name: A key of ``GRIDS``.

    Returns:
        Table with the cell's parameters and what was measured.

    Raises:
        ValueError: If the name is unknown, or the file is not the one its provenance describes.
    """
    return sweeps.load_grid(files.shipped(grid_path(name)))


def grid_path(name: str) -> Path:
    """Where the grid is stored: data/grids/<name>.csv, with its provenance beside it.

    Args:
        name: A key of ``GRIDS``.

    Raises:
        ValueError: If the name is unknown.
    """
    return _folder() / f"{checks.choice('name', name, GRIDS)}.csv"


def compute(
    name: str, *, workers: int = 2, cluster: Any = None, log: Path | None = None
) -> pd.DataFrame:
    """Run a whole grid, going on where ``log`` ends, and store it with its provenance.

    Args:
        name: A key of ``GRIDS``.
        workers: Number of processes, one thread each.
        cluster: A Dask cluster, client or scheduler's address to compute on instead.
        log: File of the finished cells; ``_build/sweeps/<name>.jsonl`` here if None.

    Raises:
        ValueError: If the name is unknown.
        RuntimeError: If a cell failed; the finished ones are kept and the next run goes on.
    """
    grid, path = GRIDS[checks.choice("name", name, GRIDS)], grid_path(name)
    log = log or Path("_build", "sweeps", f"{name}.jsonl")
    log.parent.mkdir(parents=True, exist_ok=True)
    frame = sweeps.run(grid.function, grid.cells, path=log, workers=workers, cluster=cluster)
    failed = frame["error"].notna()
    if failed.any():
        raise RuntimeError(f"{failed.sum()} cells failed, first: {frame['error'][failed].iloc[0]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    provenance = {
        "about": grid.about,
        "command": f"python -m lowgrad_utils.grids {name}",
        "cpu_minutes": round(float(frame["seconds"].sum()) / 60, 2),
        "versions": {package: version(package) for package in ("torch", "numpy", "scipy")},
    }
    sweeps.save_grid(frame.drop(columns=["error", "seconds"]), path, provenance)
    return frame


def main() -> None:
    """Compute and store one grid from the command line."""
    parser = argparse.ArgumentParser(prog="python -m lowgrad_utils.grids", description=__doc__)
    parser.add_argument("name", choices=GRIDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cluster", metavar="ADDRESS", help="a Dask scheduler's address")
    arguments = parser.parse_args()
    frame = compute(arguments.name, workers=arguments.workers, cluster=arguments.cluster)
    print(f"{len(frame)} cells stored in {grid_path(arguments.name).name}")


if __name__ == "__main__":
    main()
