"""The experiments of the chapters, one module a topic, and the cells of stored grids.

A cell is a function of plain parameters that returns plain numbers, so that ``sweeps`` can run
it anywhere and a test can recompute any stored row.
"""

from lowgrad_utils.experiments.initialisation import (
    RESIDUES,
    Scenario,
    gradient_cell,
    initial_residue,
    low_rank_singular_values,
    measure,
    noisy_image_scenario,
    output_variance,
    paper_sizes,
    residue_concentration,
    residue_with_alignment,
    scenario,
    spike_overlap,
)

__all__ = [
    "RESIDUES",
    "Scenario",
    "gradient_cell",
    "initial_residue",
    "low_rank_singular_values",
    "measure",
    "noisy_image_scenario",
    "output_variance",
    "paper_sizes",
    "residue_concentration",
    "residue_with_alignment",
    "scenario",
    "spike_overlap",
]
