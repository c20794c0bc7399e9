"""Low-rank structure in deep learning: the package behind the executable companion.

The names below are the public interface. The ledger (``claims``), plotting (``figures``), stored
grids (``grids``) and the chapters' experiments (``experiments``) are modules of their own, since
only they need a notebook, a plot or a data file. So are the shipped networks
(``trained_networks``, ``patch_transformer``), and the functions ``three_levels.three_levels`` and
``gradient_law.gradient_law``, whose names their modules have.
"""

from lowgrad_utils.checks import AssumptionWarning
from lowgrad_utils.classifiers import (
    CheckpointError,
    Classifier,
    Evaluation,
    TrainingLog,
    build,
    count_parameters,
    evaluate,
    fit,
    load_checkpoint,
    save_checkpoint,
)
from lowgrad_utils.convolutions import (
    FilterGradient,
    convolutional_network,
    expand_filter,
    filter_gradient,
    tie,
    tie_rank_one,
)
from lowgrad_utils.curvature import LossCurvature, SymmetricOperator
from lowgrad_utils.datasets import DataError, FeatureData, ImageData, load
from lowgrad_utils.diagnosis import Diagnosis, diagnose, layer_names
from lowgrad_utils.eigensolvers import (
    ConvergenceError,
    Eigenpairs,
    SpectralDensity,
    orthonormal_columns,
    rayleigh_ritz,
    spectral_density,
    top_eigenpairs,
)
from lowgrad_utils.feature_ridge import ridge_path, ridge_theory
from lowgrad_utils.gradient_law import GradientLaw, derivative_kernel, mean_column
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
    SampleCovariance,
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
from lowgrad_utils.tangent_kernel import GaussNewtonModes, LayerJacobian
from lowgrad_utils.third_spike import hidden_spike, spike_eigenvalues, spike_pair
from lowgrad_utils.three_levels import ThreeLevels, evenness, explicit_terms, within_groups
from lowgrad_utils.trained_networks import TrainedNetwork
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
    "CheckpointError",
    "Classifier",
    "ConvergenceError",
    "DataError",
    "Decomposition",
    "Diagnosis",
    "DivergenceError",
    "DivergenceWarning",
    "Eigenpairs",
    "Evaluation",
    "FeatureData",
    "FilterGradient",
    "GaussNewtonModes",
    "GradientLaw",
    "ImageData",
    "LayerJacobian",
    "Loss",
    "LossCurvature",
    "PenaltyGradient",
    "RankOne",
    "Rate",
    "SampleCovariance",
    "SingularTriplets",
    "SpectralDensity",
    "SpikedData",
    "State",
    "SweepError",
    "SymmetricOperator",
    "Targets",
    "ThreeLevels",
    "TrainedNetwork",
    "TrainingLog",
    "Trajectory",
    "TwoLayerNetwork",
    "add_input_noise",
    "alignment",
    "bbp_eigenvalue",
    "binary_labels",
    "build",
    "bulk_edge",
    "bulk_eigenvalues",
    "closed_form_gradient",
    "convolutional_network",
    "count_outliers",
    "count_parameters",
    "d_transform",
    "decompose",
    "derivative_kernel",
    "diagnose",
    "estimate_nu",
    "evaluate",
    "evenness",
    "expand_filter",
    "explicit_terms",
    "filter_gradient",
    "fit",
    "fit_rate",
    "gradient_descent",
    "grid",
    "hidden_spike",
    "jacobian_penalty",
    "jacobian_penalty_gradient",
    "layer_names",
    "leading_singular_triplets",
    "load",
    "load_checkpoint",
    "load_grid",
    "loss_gradient",
    "marchenko_pastur_density",
    "marchenko_pastur_edges",
    "mean_column",
    "mean_interval",
    "normalise_rows",
    "operator_norm",
    "orthonormal_columns",
    "predict_spike",
    "principal_angles",
    "rayleigh_ritz",
    "ridge_path",
    "ridge_theory",
    "root_mean_square_rate",
    "run",
    "sample_spiked_data",
    "sample_targets",
    "save_checkpoint",
    "save_grid",
    "share_interval",
    "spectral_density",
    "spike_eigenvalues",
    "spike_pair",
    "spiked_singular_value",
    "split_jacobian_penalty",
    "split_spike",
    "spot_check",
    "tie",
    "tie_rank_one",
    "top_eigenpairs",
    "train",
    "within_groups",
]
