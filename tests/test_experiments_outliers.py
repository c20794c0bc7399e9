import numpy as np
import pandas as pd
import pytest
import scipy.stats

from lowgrad_utils.experiments import hessian_sweep, outliers


def row(**changes):
    """A row with lambda_k(G) = 2^-k, G1+2 half of it, G1 a quarter, Ritz values 0.9 of it."""
    k = np.arange(15)
    full = 2.0**-k
    columns = {"G": full, "G1+2": full / 2, "G1": full[:10] / 4, "ritz": 0.9 * full[:10]}
    columns |= {"G0": 1e-6 * full[:10], "inside": np.where(k < 9, 0.75, 0.25), **changes}
    return {f"{name}_{i + 1}": v for name, values in columns.items() for i, v in enumerate(values)}


def test_a_summary_of_known_spectra():
    found = outliers.summary(row())
    assert found["means"] == found["centres"] == 0.5 and found["both"] == 0.25
    assert found["ritz"] == pytest.approx(0.9) and found["inside"] == 0.75
    assert found["number"] == 9 and found["cliff"] == found["beyond"] == 2
    assert found["log_correlation"] == pytest.approx(1)
    assert found["own"] == pytest.approx(1e-6 / 2.0**-9)
    # The tightest ordering is Ritz <= G.
    assert found["excess"] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"G1": np.full(10, 0.6)},
        {"G1+2": 1.5 * 2.0 ** -np.arange(15)},
        {"ritz": 1.1 * 2.0 ** -np.arange(10)},
        {"ritz": 0.1 * 2.0 ** -np.arange(10)},
    ],
)
def test_each_violated_ordering_is_seen(changes):
    assert outliers.summary(row(**changes))["excess"] > 0.05


def test_a_cliff_is_told_from_a_fall_elsewhere():
    full = np.ones(15)
    full[:9] = 8
    assert outliers.summary(row(G=full))["cliff"] == 8
    full[9] = 8
    assert outliers.summary(row(G=full))["cliff"] == 8
    full[10:12] = 8
    found = outliers.summary(row(G=full))
    assert (found["cliff"], found["beyond"]) == (1, 8)


def test_medians_leave_out_what_comes_after_the_leading_ones():
    full = 2.0 ** -np.arange(15)
    means = full / 2
    means[9:] = full[9:]
    assert outliers.summary(row(**{"G1+2": means}))["means"] == 0.5


def test_summaries_keep_rows_and_their_index():
    table = pd.DataFrame([{**row(), "train_error": 0.25}] * 2, index=[4, 7])
    found = outliers.summaries(table)
    assert list(found.index) == [4, 7] and list(found.train_accuracy) == [0.75, 0.75]
    assert list(found.both) == [0.25, 0.25]


def test_a_name_without_eigenvalues_is_refused():
    with pytest.raises(ValueError, match="no G3_1"):
        outliers.spectrum(row(), "G3")


def test_rank_correlation_is_spearmans():
    stream = np.random.default_rng(0)
    x = stream.normal(size=30).round(1)
    y = x + stream.normal(size=30).round(1)
    expected = scipy.stats.spearmanr(x, y).statistic
    assert outliers.rank_correlation(x, y) == pytest.approx(expected)
    with pytest.raises(ValueError, match="at least three"):
        outliers.rank_correlation(x[:2], y[:2])
    with pytest.raises(ValueError, match="30 and y 29"):
        outliers.rank_correlation(x, y[:29])


def test_arms_are_recognised():
    table = pd.DataFrame(hessian_sweep.arm_cells())
    names = outliers.arm_names(table, hessian_sweep.ARMS)
    assert list(names) == list(hessian_sweep.ARMS) * 3
    table.loc[5, "epochs"] = 77
    with pytest.raises(ValueError, match="row 5"):
        outliers.arm_names(table, hessian_sweep.ARMS)
