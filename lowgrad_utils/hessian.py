"""The sweep of the second paper from the command line (Eq. 29), and the shipped networks.

``python -m lowgrad_utils.hessian train --datasets mnist --networks vgg11 --sizes 13 702 --rates 0.1
--log rows.jsonl`` trains any part of the paper's grid, at full width and its numbers of epochs, and
goes on where it was stopped. ``measure`` finds the winning learning rates in such a file and
measures their spectra. ``networks`` trains the shipped narrow networks again.
"""

import argparse

from lowgrad_utils import grids, trained_networks
from lowgrad_utils.experiments import hessian_sweep


def store_networks(*, progress: bool = True) -> list[str]:
    """Train the winners at 100 images per class again and store them; return their names.

    Args:
        progress: Show a bar for each training.
    """
    trainings = grids.stored("hessian-training")
    chosen = trainings[(trainings["per_class"] == 100) & (trainings["weight_decay"] == 5e-4)]
    names = []
    for cell in hessian_sweep.winners(chosen):
        model, _, _ = hessian_sweep.train(**cell, progress=progress)
        names.append(trained_networks.store(model, cell))
    return names


def main() -> None:
    """Train, measure, or store the shipped networks, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m lowgrad_utils.hessian", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("networks", help="train the shipped networks again and store them")
    parser.parse_args()
    print(*store_networks(), sep="\n")


if __name__ == "__main__":
    main()
