"""Low-rank structure in deep learning: the package behind the executable companion.

The names below are the public interface. The ledger (``claims``), plotting (``figures``), stored
grids (``grids``) and the chapters' experiments (``experiments``) are modules of their own, since
only they need a notebook, a plot or a data file.
"""

from lowgrad_utils.checks import AssumptionWarning
from lowgrad_utils.convolutions import (
    FilterGradient,
    convolutional_network,
    expand_filter,
    filter_gradient,
    tie,
    tie_rank_one,
)
from lowgrad_utils.datasets import DataError, FeatureData, ImageData, load
from lowgrad_utils.gradients import (
    Decomposition,
    RankOne,
    closed_form_gradient,
    decompose,
    loss_gradient,
)
from lowgrad_utils.networks import (
    ACTIVATIONS,
    LOSSES,
    SCALINGS,
    Activation,
    Loss,
    TwoLayerNetwork,
    normalise_rows,
)
from lowgrad_utils.random_matrices import (
    bbp_eigenvalue,
    d_transform,
    marchenko_pastur_density,
    marchenko_pastur_edges,
    predict_spike,
    spiked_singular_value,
)
from lowgrad_utils.rates import (
    Rate,
    fit_rate,
    mean_interval,
    root_mean_square_rate,
    share_interval,
)
from lowgrad_utils.regularisation import (
    PenaltyGradient,
    add_input_noise,
    jacobian_penalty,
    jacobian_penalty_gradient,
    split_jacobian_penalty,
)
from lowgrad_utils.spectra import (
    SingularTriplets,
    alignment,
    bulk_edge,
    count_outliers,
    leading_singular_triplets,
    operator_norm,
    principal_angles,
)
from lowgrad_utils.spiked_data import (
    TARGETS,
    SpikedData,
    Targets,
    binary_labels,
    bulk_eigenvalues,
    estimate_nu,
    sample_spiked_data,
    sample_targets,
    split_spike,
)
from lowgrad_utils.sweeps import SweepError, grid, load_grid, run, save_grid, spot_check
from lowgrad_utils.training import (
    DivergenceError,
    DivergenceWarning,
    State,
    Trajectory,
    gradient_descent,
    train,
)

__all__ = [
    "ACTIVATIONS",
    "LOSSES",
    "SCALINGS",
    "TARGETS",
    "Activation",
    "AssumptionWarning",
    "DataError",
    "Decomposition",
    "DivergenceError",
    "DivergenceWarning",
    "FeatureData",
    "FilterGradient",
    "ImageData",
    "Loss",
    "PenaltyGradient",
    "RankOne",
    "Rate",
    "SingularTriplets",
    "SpikedData",
    "State",
    "SweepError",
    "Targets",
    "Trajectory",
    "TwoLayerNetwork",
    "add_input_noise",
    "alignment",
    "bbp_eigenvalue",
    "binary_labels",
    "bulk_edge",
    "bulk_eigenvalues",
    "closed_form_gradient",
    "convolutional_network",
    "count_outliers",
    "d_transform",
    "decompose",
    "estimate_nu",
    "expand_filter",
    "filter_gradient",
    "fit_rate",
    "gradient_descent",
    "grid",
    "jacobian_penalty",
    "jacobian_penalty_gradient",
    "leading_singular_triplets",
    "load",
    "load_grid",
    "loss_gradient",
    "marchenko_pastur_density",
    "marchenko_pastur_edges",
    "mean_interval",
    "normalise_rows",
    "operator_norm",
    "predict_spike",
    "principal_angles",
    "root_mean_square_rate",
    "run",
    "sample_spiked_data",
    "sample_targets",
    "save_grid",
    "share_interval",
    "spiked_singular_value",
    "split_jacobian_penalty",
    "split_spike",
    "spot_check",
    "tie",
    "tie_rank_one",
    "train",
]
