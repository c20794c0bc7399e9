"""Figures 6 and 7 of the second paper: do class centres carry the outliers of G?

Works on tables of ``hessian_sweep.spectrum_cell``, one row a trained network.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

#: Leading eigenvalues that are compared: C - 1 of ten classes.
LEADING = 9


def spectrum(row: Mapping[str, Any], name: str) -> np.ndarray:
    """Return the eigenvalues that a row has of one matrix, falling.

    Args:
        row: A row of a table of spectra, as a mapping or a pandas Series.
        name: ``G``, ``G1+2``, ``G1``, ``G0`` or ``ritz``; or ``inside``, the shares of G's
            eigenvectors in the span of the class centres.

    Raises:
        ValueError: If the row has none of that name.

    Example:
        >>> spectrum({"G_1": 3.0, "G_2": 1.0, "G1_1": 2.0}, "G").tolist()
        [3.0, 1.0]
    """
    values = []
    while f"{name}_{len(values) + 1}" in row:
        values.append(float(row[f"{name}_{len(values) + 1}"]))
    if not values:
        raise ValueError(f"name is {name!r}, but the row has no {name}_1")
    return np.array(values)


def summary(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what one network's spectra say about the claim, in a few numbers.

    Medians are over the 9 leading eigenvalues (C - 1).

    - ``means``: median of lambda_k(G1+2) / lambda_k(G): what is left after within-group scatter.
    - ``centres``: median of lambda_k(G1) / lambda_k(G1+2): what is left after logits are averaged.
    - ``both``: median of lambda_k(G1) / lambda_k(G).
    - ``ritz``: median of the k-th Ritz value of G on the centres' span over lambda_k(G).
    - ``inside``: mean share of the 9 leading eigenvectors of G in that span.
    - ``number``: how many of G's 15 leading eigenvectors lie in it by more than a half.
    - ``cliff``: largest fall lambda_k / lambda_{k+1} of G after k = 9 or 10; ``beyond``: after 11
      to 14.
    - ``log_correlation``: of log10 lambda_k(G) and log10 lambda_k(G1), k up to 10.
    - ``own``: lambda_1(G0) / lambda_9(G1+2).
    - ``excess``: largest relative violation of lambda(G) >= lambda(G1+2) >= lambda(G1) and
      lambda(G) >= Ritz value >= lambda(G1) over k up to 10; negative if there is none.

    Args:
        row: A row of a table of spectra.
    """
    names = ("G", "G1+2", "G1", "ritz", "G0", "inside")
    full, means, centres, ritz, own, inside = (spectrum(row, name) for name in names)
    k, top = LEADING, min(len(centres), len(ritz))
    falls = full[:-1] / full[1:]
    return {
        "means": float(np.median(means[:k] / full[:k])),
        "centres": float(np.median(centres[:k] / means[:k])),
        "both": float(np.median(centres[:k] / full[:k])),
        "ritz": float(np.median(ritz[:k] / full[:k])),
        "inside": float(inside[:k].mean()),
        "number": int((inside > 0.5).sum()),
        "cliff": float(falls[k - 1 : k + 1].max()),
        "beyond": float(falls[k + 1 :].max()),
        "log_correlation": float(np.corrcoef(np.log10(full[:top]), np.log10(centres[:top]))[0, 1]),
        "own": float(own[0] / means[k - 1]),
        "excess": max(
            excess(full[:top], means[:top]),
            excess(means[:top], centres[:top]),
            excess(full[:top], ritz[:top]),
            excess(ritz[:top], centres[:top]),
        ),
    }


def excess(larger: np.ndarray, smaller: np.ndarray) -> float:
    """Return max_k (smaller_k / larger_k - 1): above 0 if an ordering is violated.

    Args:
        larger: Eigenvalues that should be the larger ones, all positive.
        smaller: As many that should be the smaller ones.

    Example:
        >>> excess(np.array([2.0, 1.0]), np.array([1.0, 1.5]))
        0.5
    """
    return float((np.asarray(smaller) / np.asarray(larger) - 1).max())


def summaries(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of spectra with the columns of ``summary`` and ``train_accuracy`` added.

    Args:
        table: One row a network.
    """
    added = pd.DataFrame([summary(row) for row in table.to_dict("records")], index=table.index)
    added["train_accuracy"] = 1 - table["train_error"]
    # In one piece: columns added one by one scatter a wide table in memory, of which pandas warns.
    return pd.concat([table, added], axis=1)


def rank_correlation(x: pd.Series, y: pd.Series) -> float:
    """Return Spearman's rank correlation of two columns.

    Args:
        x: Numbers.
        y: As many.

    Raises:
        ValueError: If they differ in length or have fewer than three numbers.

    Example:
        >>> round(rank_correlation(pd.Series([1, 2, 3]), pd.Series([1, 8, 27])), 9)
        1.0
    """
    if len(x) != len(y) or len(x) < 3:
        raise ValueError(
            f"x has {len(x)} and y {len(y)} numbers; as many of both, at least three, are needed"
        )
    ranks = np.vstack([pd.Series(np.asarray(v)).rank() for v in (x, y)])
    return float(np.corrcoef(ranks)[0, 1])


def arm_names(table: pd.DataFrame, arms: Mapping[str, Mapping[str, Any]]) -> pd.Series:
    """Return the name of the arm that each row of a table belongs to.

    Args:
        table: Rows that differ from the first arm's only in what their arm changes.
        arms: What each arm changes, the first one nothing.

    Raises:
        ValueError: If a row belongs to no arm.
    """
    changing = sorted({name for arm in arms.values() for name in arm})
    standard = {name: table[name].iloc[0] for name in changing}
    keys = {tuple(({**standard, **arm})[n] for n in changing): name for name, arm in arms.items()}
    found = [keys.get(key) for key in table[changing].itertuples(index=False, name=None)]
    if None in found:
        raise ValueError(f"row {found.index(None)} of the table belongs to none of the arms")
    return pd.Series(found, index=table.index)
