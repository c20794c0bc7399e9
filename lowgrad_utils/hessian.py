"""The sweep of the second paper from the command line (Eq. 29), and the shipped networks.

``python -m lowgrad_utils.hessian train --datasets mnist --networks vgg11 --sizes 13 702 --rates 0.1
--log rows.jsonl`` trains any part of the paper's grid, at full width and its numbers of epochs, and
goes on where it was stopped; without a choice, all of it. ``measure --log rows.jsonl`` finds the
learning rates with the least test error there and measures the spectra behind Figures 6 and 7.
``networks`` trains the shipped narrow networks again.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd

from lowgrad_utils import grids, sweeps, trained_networks
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


def finished(log: str | Path) -> pd.DataFrame:
    """Return the trainings that a log of ``train`` holds, one row each; failed ones are left out.

    Args:
        log: File that ``train --log`` writes, finished or not.

    Raises:
        SweepError: If the file is missing, not a log of trainings, or has none that finished.
    """
    try:
        first, *lines = Path(log).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        named = json.loads(first)["sweep"] == "training_cell"
        cells = [{**row["parameters"], **row["measured"]} for row in rows if row["error"] is None]
    except OSError as error:
        raise sweeps.SweepError(f"{log} cannot be read ({error.strerror}); train first") from error
    except (ValueError, KeyError, TypeError) as error:
        raise sweeps.SweepError(f"{log} is not a log that `train --log` wrote") from error
    if not named or not cells:
        what = "has no finished training" if named else "is not a log that `train --log` wrote"
        raise sweeps.SweepError(f"{log} {what}")
    return pd.DataFrame(cells)


def _train(options: argparse.Namespace) -> str:
    cells = hessian_sweep.paper_cells(
        options.datasets,
        options.networks,
        options.sizes,
        options.rates,
        seeds=options.seeds,
        width=options.width,
        size=options.size,
        epochs=options.epochs,
        weight_decay=options.weight_decay,
        source=options.source,
    )
    return _run(hessian_sweep.training_cell, cells, options, options.log)


def _measure(options: argparse.Namespace) -> str:
    cells = hessian_sweep.winners(finished(options.log))
    return _run(hessian_sweep.spectrum_cell, cells, options, options.log.with_suffix(".spectra"))


def _run(function, cells: list, options: argparse.Namespace, log: Path) -> str:
    """Run the cells, write a table beside the log, and return a line about both."""
    frame = sweeps.run(
        function,
        cells,
        path=log,
        workers=options.workers,
        cluster=options.cluster,
        retry_failures=True,
    )
    table = log.with_name(log.name + ".csv")
    frame.to_csv(table, index=False)
    failed = frame["error"].dropna()
    if len(failed):
        return f"{len(frame)} rows in {table}, {len(failed)} failed; the first: {failed.iloc[0]}"
    return f"{len(frame)} rows in {table}"


def _networks(options: argparse.Namespace) -> str:
    return "\n".join(store_networks())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lowgrad_utils.hessian", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train any part of the paper's grid")
    train.set_defaults(run=_train)
    train.add_argument("--datasets", nargs="+", default=hessian_sweep.IMAGE_SETS)
    train.add_argument("--networks", nargs="+", default=hessian_sweep.CONVOLUTIONAL)
    train.add_argument("--sizes", nargs="+", type=int, help="images of each class; all 20")
    train.add_argument("--rates", nargs="+", type=float, help="learning rates; all 100")
    train.add_argument("--seeds", nargs="+", type=int, default=[0])
    train.add_argument("--width", type=float, default=1.0, help="factor of the channels")
    train.add_argument("--size", type=int, default=32, help="height and width of the images")
    train.add_argument("--epochs", type=int, help="200, and 350 for cifar10, if not given")
    train.add_argument("--weight-decay", type=float, default=5e-4)
    train.add_argument("--source", default="shipped", help="images: shipped or full (downloaded)")
    measure = commands.add_parser("measure", help="spectra of the winning learning rates of a log")
    measure.set_defaults(run=_measure)
    for command in (train, measure):
        command.add_argument("--log", type=Path, required=True, help="file of the trainings")
        command.add_argument("--workers", type=int, default=1)
        command.add_argument("--cluster", metavar="ADDRESS", help="a Dask scheduler's address")
    networks = commands.add_parser("networks", help="train the shipped networks again, store them")
    networks.set_defaults(run=_networks)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Train, measure, or store the shipped networks, from the command line.

    Args:
        arguments: Words of the command line; the process's own by default.

    Raises:
        SystemExit: With status 2, after one line that says what is wrong with them.
    """
    options = _parser().parse_args(arguments)
    try:
        print(options.run(options))
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"lowgrad_utils.hessian {options.command}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
