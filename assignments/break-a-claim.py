# %% assignment
# title = "Break a hypothesis"
# minutes = {w1=35, q1=15, q2=10, q3=20, q4=30, q5=10, q6=15, q7=15, w2=20, w3=40, q8=25, w4=20}
# withheld = [
#     "lowgrad_utils.gradients.decompose",
#     "lowgrad_utils.gradients.closed_form_gradient",
#     "lowgrad_utils.gradients.loss_gradient",
#     "lowgrad_utils.rates.fit_rate",
#     "lowgrad_utils.rates.mean_interval",
#     "lowgrad_utils.rates._fit",
#     "lowgrad_utils.three_levels.explicit_terms",
#     "lowgrad_utils.three_levels.three_levels",
#     "lowgrad_utils.third_spike.spike_eigenvalues",
#     "lowgrad_utils.experiments.initialisation.residue_concentration",
#     "lowgrad_utils.experiments.initialisation.measure",
#     "lowgrad_utils.experiments.bridge.centre_identity",
#     "lowgrad_utils.experiments.bridge.centre_weights",
#     "lowgrad_utils.experiments.hidden_spikes.eigenvalue_cell",
# ]

# %% [markdown]
# # Assignment: break a hypothesis
#
# A control in this book breaks a hypothesis wholly and shows that the conclusion goes with it. You
# ask a finer question: *how much* of a hypothesis may be missing before a claim fails? You choose
# a claim, turn its hypothesis into a number, build data in which one dial moves that number and
# nothing else, fix a rule before you measure, measure, and report on about a page.
#
# **Learning goals.** Read a claim as an inequality that a measurement can contradict; break one
# hypothesis and keep the others; give an interval that covers what it promises; decide by a rule
# that was there first; say what a result does not show. In the further questions: tell the effect
# of a hypothesis from that of any disturbance.
#
# **You need** the chapter of the claim you choose (named below), *How to read this book* on
# verdicts and controls, confidence intervals for a mean, PyTorch or NumPy. **Time**: the minutes
# beside the questions are those of the claims "tails" and "signs"; the others take up to half an
# hour more.
#
# Two things are graded: your functions, by tests that know every claim of the list, and your
# plan, rule and report, by a reader. *No points depend on which verdicts you get.* A claim that
# survives, or a result that stays undecided, is as good as one that breaks.
#
# Numbers and arrays are float64. Your functions may return torch tensors or NumPy arrays, but the
# grading calls them with torch tensors. Take sizes from the arrays you are given. The functions of
# `lowgrad_utils` that would do a question's work (such as `decompose`, `fit_rate`, `mean_interval`
# and `explicit_terms`) are switched off in the grading.

# %%
import math
import time

import numpy as np
import torch
from matplotlib import pyplot as plt
from scipy import stats

#: How the values of a claim's statistic are summed up, and which array its dial turns.
KIND = {
    "concentration": "exponent",
    "weights": "exponent",
    "tails": "exponent",
    "signs": "exponent",
    "one-sign": "level",
    "classes": "level",
    "centres": "level",
}
TURNED = {
    "concentration": "r",
    "weights": "W",
    "tails": "noise",
    "signs": "a",
    "one-sign": "r",
    "classes": "labels",
    "centres": "B",
}


def sizes(n):
    """Features d and neurons m that go with n examples."""
    return round(4 * n / 3), round(5 * n / 3)


def shapes(claim, n):
    """The arrays of a case of size n and their shapes; () is a number."""
    d, m = sizes(n)
    data = {"X_B": (n, d), "z": (n,), "q": (d,), "zeta": ()}
    pieces = {**data, "W": (m, d), "a": (m,), "r": (n,)}
    return {
        "concentration": pieces,
        "weights": pieces,
        "tails": {"f": (n,), "target": (n,), "noise": (n,)},
        "signs": {"X": (n, d), "W": (m, d), "a": (m,), "y": (n,)},
        "one-sign": {**data, "r": (n,)},
        "classes": {"delta": (n, 4, 12), "labels": (n,)},
        "centres": {"H": (n, 6), "B": (4, 6), "labels": (n,)},
    }[claim]


def example(claim, n=8):
    """A case of the right form, without random numbers and without meaning."""
    case = {}
    for k, (name, shape) in enumerate(shapes(claim, n).items()):
        count = torch.arange(math.prod(shape)).double()
        case[name] = torch.sin(1 + k + 7 * count**1.5).reshape(shape)
    fixed = {
        "zeta": lambda: n**0.25,
        "q": lambda: case["q"] / case["q"].norm(),
        "W": lambda: case["W"] / case["W"].norm(dim=1, keepdim=True),
        "a": lambda: case["a"].sign(),
        "labels": lambda: torch.tensor([0, 0, 0, 1, 2, 2, 3, 1]).double().repeat(n // 8),
    }
    return {name: fixed[name]() if name in fixed else case[name] for name in case}


def as_tensor(values):
    """A float64 tensor of a number or any array; torch itself refuses a reversed one."""
    if isinstance(values, torch.Tensor):
        return values.detach().double()
    return torch.as_tensor(np.asarray(values, dtype=float).copy())


def as_tensors(case):
    """A case as the grading gives it to your functions: numbers, and arrays as tensors."""
    return {name: as_tensor(v) if np.ndim(v) else float(v) for name, v in case.items()}


# %% [markdown]
# ## The claims
#
# Choose one of the seven; the tests know these and no others. `n` is the size; $d$ and $m$ follow
# from it by `sizes(n)`. Each claim says what a *case* is (a dictionary of arrays, see `shapes` and
# `example` above), which *number* says how far its hypothesis is broken, and which *statistic*
# shows its conclusion. The *dial* runs from 0, where every hypothesis holds, to 1, where the named
# one is broken and all others still hold. "Exponent" is the exponent of the statistic in $n$,
# "level" its value at the largest size. $\|\cdot\|$ is the length of a vector and the operator norm
# of a matrix.
#
# The first two share a model: $X = X_B + \zeta z q^\top$, entries of $X_B$ and $z$ standard normal,
# $q$ a unit vector, $\zeta = n^{1/8}$; rows of $W$ uniform on the unit sphere, $a_j = \pm 1$; the
# activation softplus, whose slope $\sigma'$ is the sigmoid and whose mean slope is $\tfrac12$;
# a residue $r_i = 1 + \tfrac12 g_i$ with $g_i$ standard normal; all of these independent. With
# $\sigma'_\perp = \sigma'(XW^\top) - \tfrac12$ the pieces of the gradient are, up to one common
# factor,
#
# $$
# S_1 = \tfrac12 X_B^\top r\, a^\top, \qquad
# S_2 = \zeta\, q\, z^\top[(r a^\top) \circ \sigma'_\perp], \qquad
# E = X_B^\top[(r a^\top) \circ \sigma'_\perp].
# $$
#
# **1. `"concentration"`** (`lrg.thm-3.1.error-rate`, chapter *Theorem 3.1*). Claim:
# $\|E\|/\|S_1\| \le O(\log n\; n^{\nu - 1/2})$ with $\nu = 1/8$. Hypothesis to break: no example
# carries more than its share of the residue (Assumption 5). Number:
# $\max_i r_i^2 / \|r\|^2$; at dial 0 at most $(\log n)^2/n$, at dial 1 at least 0.9. Statistic:
# $\|E\|/\|S_1\|$, exponent; the claim says $-3/8$ or less, apart from $\log n$.
#
# **2. `"weights"`** (`lrg.thm-3.1.data-spike-rate`, chapter *Theorem 3.1*). Claim:
# $\|S_2\|/\|S_1\| \le O(\|W\| \log n\; n^{2\nu - 1/2})$ with $\|W\| = O(1)$. Hypothesis to break:
# $\|W\| = O(1)$; a common direction of the rows breaks it. Number: $\|W\|^2/m$, which is 1 if all
# rows are equal; at dial 0 at most $9/m$, at dial 1 at least 0.9. Rows stay unit vectors. For the
# claim to fail the direction matters: which one does the spike see? Statistic:
# $\|S_2\|/\|S_1\|$, exponent; the claim says $-1/4$ or less, apart from $\log n$.
#
# **3. `"tails"`** (`lrg.assumption-5`, chapter *The setting*). Claim: the residue
# $r = f - (\text{target} + \text{noise})$ of the squared loss has
# $\max_i |r_i| \le O(\log n/\sqrt n)\,\|r\|$. Hypothesis to break: the noise has light tails.
# Outputs $f$ and targets are of order one, light-tailed and fixed by the seed; the noise is
# symmetric about 0. Number: the 95 % quantile of $|\text{noise}|$ over its median, 2.9 for a
# normal and 12.7 for a Cauchy variable; at dial 0 at most 4, at dial 1 at least 6. Statistic:
# $\max_i |r_i| \sqrt n / (\|r\| \log n)$, exponent; the claim says 0 or less. (These cases are
# small: take sizes up to some thousands.)
#
# **4. `"signs"`** (`lrg.sec-3.4.residue-is-target`, chapter *Scaling*). Claim: a mean-field
# network $f = \frac1m\,\mathrm{relu}(XW^\top)\,a$ at initialisation has $r \approx -y$ for the
# squared loss, $\|r + y\|/\|y\| = O(m^{-1/2})$. Entries of $X$ are standard normal, rows of $W$
# uniform on the unit sphere, $y$ of order one. Hypothesis to break: the outer weights
# $a_j = \pm 1$ are random signs with mean 0. Number: $|\operatorname{Ave}_j a_j|$; at dial 0 at
# most $4/\sqrt m$, at dial 1 at least 0.9. Statistic: $\|r + y\|/\|y\|$, exponent (in $n$, since
# $m$ is proportional to $n$); the claim says $-1/2$.
#
# **5. `"one-sign"`** (`new.one-signed-residue`, chapter *A third spike*). Claim: if no residue is
# negative, the spike adds no eigenvalue at the lower end of $X^\top D_r X$, $D_r$ the diagonal
# matrix of $r$. The data are those of the first two, but with $\zeta = n^{3/8}$; no residue
# has more than its share, $r_i^2 \le (\log n)^2 \|r\|^2/n$, and how you draw the $|r_i|$ is up to
# you. Hypothesis to break: $r \ge 0$. Number:
# $\sum_i \max(-r_i, 0)/\sum_i |r_i|$; exactly 0 at dial 0, at least 0.4 at dial 1. Statistic: with
# $B = X_B^\top D_r X_B$, $\;(\lambda_{\min}(B) - \lambda_{\min}(X^\top D_r X)) /
# (\lambda_{\max}(B) - \lambda_{\min}(B))$, level; the claim says 0 (to rounding).
#
# **6. `"classes"`** (`tlh.eq-28`, chapter *Three levels*). Claim: with weights $1/C$ the four terms
# of Equation 28 add up to the Gauss-Newton matrix $G = \frac1n\sum_{i,c'}
# \delta_{i,c'}\delta_{i,c'}^\top$. A case has vectors `delta[i, c']` of length 12, $C = 4$ of them
# for each example, and labels 0 to 3. The identity needs nothing else of the vectors; let the
# classes differ (their mean squared lengths by a tenth or more). Hypothesis to break: classes are
# equally large ($n$ is a multiple of 4). Number: $\max_c |n_c/n - 1/C|$; 0 at dial 0, at least 0.2
# at dial 1, and no class empty. Since vectors belong to classes, `delta` may turn with `labels`.
# Statistic: $\|G - G_0 - G_1 - G_2 - G_3\|_F/\|G\|_F$ with the weights $1/C$ in place of $\pi_c$,
# level; the claim says 0.
#
# **7. `"centres"`** (`new.bridge-centres`, chapter *The bridge*). Claim: where all logits are equal
# the gradient of the mean cross-entropy lies in the span of the class centres. A linear classifier:
# features $H$ ($n \times 6$, standard normal), weights $B$ ($4 \times 6$), logits $HB^\top$,
# probabilities $p_i$ by softmax, labels with no class empty; the gradient is the one in $B$. The
# logit derivative of example $i$ and logit $c'$ is the $4 \times 6$ matrix
# $\sqrt{p_{ic'}}\,(e_{c'} - p_i) h_i^\top$, and the centre of class $c$ is its mean over the
# examples of the class and over $c' \ne c$. Hypothesis to break: all logits of an example are
# equal. Number: $\max_{i,c} |p_{ic} - 1/C|$; 0 at dial 0, at least 0.2 at dial 1. Statistic: the
# length of the part of the gradient outside of the span of the four centres over the gradient's
# length (matrices as vectors of length 24), level; the claim says 0.
#
# Labels are given as float64 numbers 0 to 3: use `labels == c`, or `labels.long()`.
#
# <details><summary>Which one to choose?</summary>
#
# "tails" and "signs" have the shortest code and a prediction you can work out in full.
# "concentration" and "weights" are the theorem itself, and their answer depends on the size in an
# interesting way. "one-sign" is about eigenvalues. "classes" and "centres" are identities: they
# have no tolerance, so the report must say what breaking an identity *a little* means.
#
# </details>

# %% [markdown]
# ## 1. The plan
#
# **Question w1.** Before any code: state (a) the conclusion of your claim as an inequality for the
# summary, (b) the hypothesis as a number and what it is at dial 0 and 1, (c) what you predict for
# the summary at dial 0 and at dial 1, with a short derivation for dial 1, and what you guess in
# between: does the claim go at once, bit by bit, or at a threshold? (Six to ten sentences.)

# %% [markdown] written w1 5
# BEGIN SOLUTION
# (Claim "concentration".) (a) The exponent $p$ of $\|E\|/\|S_1\|$ in $n$ is at most
# $\nu - 1/2 = -3/8$, plus what $\log n$ adds over the sizes measured. (b) The number is
# $h = \max_i r_i^2/\|r\|^2$. At dial 0 it is of order $\log n/n$ ($r_i = 1 + g_i/2$); at dial 1
# one example has everything, $h = 1$. (c) At dial 0 I predict $-3/8$ to $-1/2$. At dial 1,
# $r = \|r\| e_1$: then $S_1 \propto \frac12 x_{B,1} a^\top$ and
# $E \propto x_{B,1}(a \circ \sigma'_\perp(Wx_1))^\top$ have the same left factor, and the ratio is
# $2\|\sigma'_\perp(Wx_1)\|/\sqrt m$, twice the root mean square of the slope about its mean:
# a constant, so $p = 0$. In between, with $r = \sqrt{1-t}\,r_0 + \sqrt t\,\|r_0\| e_1$, the spread
# part gives about $n^{-3/8}$ and the single example about $\sqrt t$ times a constant. So for every
# fixed $t > 0$ the exponent must go to 0 in the end, but at size $n$ one sees it only once
# $\sqrt t$ is comparable with $n^{-3/8}$: I expect a gradual change, half done near
# $t = n^{-3/4}$, that is 0.02 to 0.05 between $n = 240$ and 60, if the constants are alike.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: the conclusion as an inequality for what is measured, with its number
# - 1 point: the hypothesis as a number, with its value or order at both ends
# - 2 points: the prediction at dial 1, derived (1 if only asserted, or if derived with one gap).
#   What is right: concentration 0; weights between $1/8$ and $1/4$ for rows along $q$; tails
#   $\min(k, 1/2)$ for noise of tail index $1/k$, so $1/2$ for Cauchy, less what $\log n$ takes;
#   signs 0, since $f$ then has the mean $\mathrm{E}\,\mathrm{relu}$; one-sign a value of order
#   $\zeta$ against the bulk if the signs balance (the cross term with $X_B^\top D_r z$, since
#   $\zeta^2 z^\top D_r z$ is then smaller), and of order $\zeta^2$ if most of the residue is
#   negative; classes $\|\sum_c (\pi_c - 1/C) M_c\|/\|G\|$ with $M_c$ the second moment of class
#   $c$; centres a value of order one (in proportion to the logits while these are small)
# - 1 point: a guess for what lies between, with a reason, in a form that can turn out wrong
# - A wrong prediction with a reason earns full marks; do not compare it with the result here.
#   Typical for 2 of 5: "at dial 0 the claim holds, at dial 1 it does not, in between something
#   happens".
# END RUBRIC

# %% [markdown]
# Your rule, the same for all claims: at each dial you get a 95 % interval, from `low` to `high`,
# of the summary (exponent or level). The claim **holds** there if `high <= bound`, it **fails** if
# `low > bound`, and otherwise the result is **undecided**. You fix the bound, the dials, the sizes
# and the number of seeds.
#
# **Question q1.** Write `plan`, which returns a dictionary with
# - `"claim"`: a name of the list;
# - `"bound"`: a number; what the claim says at dial 0 must be below it, with room for logarithms
#   and small sizes, and what you expect at dial 1 above it, so that the rule can come out either
#   way (for an identity: well above rounding, $10^{-13}$, and well below what a broken hypothesis
#   gives);
# - `"dials"`: a list from 0 to 1, increasing, at least four;
# - `"sizes"`: a list of whole numbers, multiples of 4, increasing, at least three, the largest at
#   least four times the smallest;
# - `"seeds"`: how many, at least 8.
#
# Sizes and seeds with which the measuring of section 6 takes a minute or two are enough. (The
# grading stops a cell after a minute. That costs no points: it calls your functions all the same.)
#
# You may change the plan until you start to measure. A *pilot* to find sizes that run in time, or
# to see the scatter, is allowed: with seeds from 1000 on, which are not used again, and said in
# your report.


# %% answer q1
def plan():
    """What will be measured and how it will be judged, as a dictionary."""
    # BEGIN SOLUTION
    return {
        "claim": "concentration",
        "bound": -0.16,
        "dials": [0.0, 0.02, 0.05, 0.1, 0.3, 1.0],
        "sizes": [60, 120, 240],
        "seeds": 24,
    }
    # END SOLUTION


# %% public q1
found = plan()
assert isinstance(found, dict), "plan() gives no dictionary: does it end with 'return {...}'?"
missing = {"claim", "bound", "dials", "sizes", "seeds"} - set(found)
assert not missing, f"the plan has no {', '.join(sorted(missing))}"
kinds = plan.__globals__["KIND"]
assert found["claim"] in kinds, f"'{found['claim']}' is none of {', '.join(kinds)}"
assert math.isfinite(found["bound"]), "the bound must be a number"
dials = list(found["dials"])
assert len(dials) >= 4 and dials == sorted(set(dials)), "at least four dials, in increasing order"
assert dials[0] == 0 and dials[-1] == 1, "the dials must run from 0 to 1"
sizes = list(found["sizes"])
assert len(sizes) >= 3 and sizes == sorted(set(sizes)), "at least three sizes, increasing"
assert all(n == int(n) and n % 4 == 0 for n in sizes), "sizes must be multiples of 4"
assert sizes[-1] >= 4 * sizes[0], "a rate needs a range: the largest size 4 times the smallest"
assert int(found["seeds"]) >= 8, "fewer than 8 seeds give intervals too wide to decide anything"

# %% hidden common
CLAIMS = ("concentration", "weights", "tails", "signs", "one-sign", "classes", "centres")
TURNED = dict(zip(CLAIMS, ("r", "W", "noise", "a", "r", "labels", "B")))
ROUNDING = 1e-9
#: Where a bound can be: above what the claim says, below what a broken hypothesis gives.
BOUNDS = {
    "concentration": (-0.37, -0.03),
    "weights": (-0.24, 0.12),
    "tails": (-0.05, 0.3),
    "signs": (-0.49, -0.03),
    "one-sign": (2e-13, 0.25),
    "classes": (2e-13, 0.01),
    "centres": (2e-13, 0.01),
}


def claim_of(found):
    """The claim that was chosen; without one there is nothing to compare with."""
    claim = found.get("claim") if isinstance(found, dict) else None
    assert claim in CLAIMS, f"the plan's claim is {str(claim)[:40]!r}, none of the list"
    return claim


def in_order(values, name):
    if isinstance(values, list):
        values = np.array(values)
    values = np.atleast_1d(array(values, np.shape(values), name=name))
    assert values.ndim == 1 and (np.diff(values) > 0).all(), f"{name} are not increasing"
    return values


# %% hidden q1 1: dials, sizes and seeds
def calls(rng):
    return [call("plan")]


def check(calls, answers):
    claim_of(answers[0])
    dials = in_order(answers[0].get("dials"), "dials")
    assert len(dials) >= 4 and dials[0] == 0 and dials[-1] == 1, "dials: four, from 0 to 1"
    n = in_order(answers[0].get("sizes"), "sizes")
    assert len(n) >= 3 and n[-1] >= 4 * n[0], "sizes: three, over a factor of 4"
    assert n[0] >= 4 and (n % 4 == 0).all(), "sizes must be multiples of 4"
    seeds = array(answers[0].get("seeds"), (), name="seeds")
    assert seeds >= 8 and seeds == np.round(seeds), "seeds: a whole number, at least 8"


# %% hidden q1 1: a bound that can be met and missed
def calls(rng):
    return [call("plan")]


def check(calls, answers):
    low, high = BOUNDS[claim_of(answers[0])]
    bound = float(array(answers[0].get("bound"), (), name="the bound"))
    assert bound >= low, f"the bound {bound:g} leaves no room above what the claim says"
    assert bound <= high, f"the bound {bound:g} would not be crossed by a broken hypothesis"


# %% wrong q1 1: a rule that cannot fail
def plan():
    return {
        "claim": "concentration",
        "bound": 0.5,
        "dials": [0, 0.1, 0.3, 1],
        "sizes": [40, 80, 160],
        "seeds": 16,
    }


# %% wrong q1 1: a rule that cannot be met
def plan():
    return {
        "claim": "concentration",
        "bound": -0.5,
        "dials": [0, 0.1, 0.3, 1],
        "sizes": [40, 80, 160],
        "seeds": 16,
    }


# %% wrong q1 1: sizes too close for a rate
def plan():
    return {
        "claim": "concentration",
        "bound": -0.2,
        "dials": [0, 0.1, 0.3, 1],
        "sizes": [100, 120, 140],
        "seeds": 16,
    }


# %% wrong q1 1: the unbroken case is not measured
def plan():
    return {
        "claim": "concentration",
        "bound": -0.2,
        "dials": [0.1, 0.3, 0.6, 1],
        "sizes": [40, 80, 160],
        "seeds": 16,
    }


# %% right q1: weights that lean to the spike
def plan():
    dials = [0, 0.05, 0.1, 0.2, 0.5, 1]
    return {
        "claim": "weights",
        "bound": -0.1,
        "dials": dials,
        "sizes": [32, 64, 128],
        "seeds": 40,
    }


def broken(case):
    return torch.linalg.svdvals(case["W"])[0] ** 2 / len(case["W"])


def statistic(case):
    data, W = (case["X_B"], case["zeta"] * case["z"]), case["W"]
    slopes = torch.sigmoid((data[0] + torch.outer(data[1], case["q"])) @ W.T)
    row = case["a"] * ((data[1] * case["r"]) @ (slopes - 0.5))
    return 2 * row.norm() / ((data[0].T @ case["r"]).norm() * len(row) ** 0.5)


def setup(dial, n, seed):
    rng = np.random.default_rng(seed)
    d, m = sizes(n)
    q = rng.standard_normal(d)
    q /= np.linalg.norm(q)
    W = rng.standard_normal((m, d))
    W /= np.linalg.norm(W, axis=1, keepdims=True)
    case = {"X_B": rng.standard_normal((n, d)), "z": rng.standard_normal(n), "q": q}
    case.update(zeta=n**0.125, a=rng.choice([-1, 1], m), r=1 + rng.standard_normal(n) / 2)
    case["W"] = turned((1 - dial) * W + dial * q)
    return {name: torch.as_tensor(value).double() for name, value in case.items()}


def turned(W):
    return W / np.linalg.norm(W, axis=1, keepdims=True)


def sham(dial, n, seed):
    case = setup(0, n, seed)
    fresh = np.random.default_rng([seed, 1]).standard_normal(case["W"].shape)
    mixed = (1 - dial) * np.asarray(case["W"]) + dial * turned(fresh)
    return {**case, "W": torch.as_tensor(turned(mixed))}


# %% right q1: noise with heavier and heavier tails
def plan():
    return {
        "claim": "tails",
        "bound": 0.1,
        "dials": np.linspace(0, 1, 6),
        "sizes": np.array([100, 400, 1600]),
        "seeds": np.int64(20),
    }


def broken(case):
    sizes = sorted(float(each) for each in abs(case["noise"]))
    return sizes[math.ceil(0.95 * len(sizes)) - 1] / np.median(sizes)


def statistic(case):
    r = np.asarray(case["f"] - case["target"] - case["noise"])
    share = np.max(np.abs(r)) / np.linalg.norm(r)
    return share * np.sqrt(len(r)) / np.log(len(r))


def setup(dial, n, seed):
    rng = np.random.default_rng(seed)
    uniform = rng.uniform(size=n)
    f, target = 0.1 * rng.standard_normal(n), np.tanh(rng.standard_normal(n))
    # Student's t with 1/dial degrees of freedom, through its quantiles: the same ranks each time.
    noise = stats.t.ppf(uniform, 1 / dial) if dial > 0 else stats.norm.ppf(uniform)
    return {"f": f, "target": target, "noise": noise}


def sham(dial, n, seed):
    case, fresh = setup(0, n, seed), np.random.default_rng([seed, 1]).standard_normal(n)
    return {**case, "noise": math.cos(dial) * case["noise"] + math.sin(dial) * fresh}


# %% right q1: outer weights with a mean
def plan():
    return dict(claim="signs", bound=-0.35, dials=[0, 0.1, 0.3, 1], sizes=[32, 96, 288], seeds=10)


def broken(case):
    return abs(case["a"].sum()) / case["a"].numel()


def statistic(case):
    f = torch.relu(case["X"] @ case["W"].T) @ case["a"] / len(case["a"])
    r = f - case["y"]
    return (r + case["y"]).norm() / case["y"].norm()


def setup(dial, n, seed):
    stream = torch.Generator().manual_seed(seed)
    d, m = sizes(n)
    X = torch.randn(n, d, generator=stream).double()
    W = torch.nn.functional.normalize(torch.randn(m, d, generator=stream).double())
    y = torch.randn(n, generator=stream).double()
    a = torch.randint(0, 2, (m,), generator=stream) * 2.0 - 1
    positive = torch.rand(m, generator=stream) < dial
    return {"X": X, "W": W, "y": y, "a": torch.where(positive, 1.0, a).double()}


def sham(dial, n, seed):
    case = setup(0, n, seed)
    m = len(case["a"])
    stream = torch.Generator().manual_seed(seed + 10**6)
    flipped = torch.rand(m, generator=stream) < dial
    fresh = torch.randint(0, 2, (m,), generator=stream).double() * 2 - 1
    case["a"] = torch.where(flipped, fresh, case["a"])
    return case


# %% right q1: residues of both signs
def plan():
    return {
        "claim": "one-sign",
        "bound": 1e-3,
        "dials": [0, 0.05, 0.2, 0.5, 1],
        "sizes": [32, 64, 128],
        "seeds": 10,
    }


def broken(case):
    r = case["r"]
    return 0.5 - 0.5 * r.sum() / r.abs().sum()


def statistic(case):
    B = case["X_B"].T @ torch.diag(case["r"]) @ case["X_B"]
    X = case["X_B"] + case["zeta"] * case["z"][:, None] * case["q"]
    low = torch.linalg.eigvalsh(X.T @ torch.diag(case["r"]) @ X).min()
    ends = torch.linalg.eigvalsh(B)
    return (ends.min() - low) / (ends.max() - ends.min())


def setup(dial, n, seed):
    rng = np.random.default_rng([seed, 77])
    d = sizes(n)[0]
    q = rng.normal(size=d)
    case = {"X_B": rng.normal(size=(n, d)), "z": rng.normal(size=n), "q": q / np.linalg.norm(q)}
    size = abs(1 + rng.normal(size=n) / 2)
    negative = np.arange(n) < round(dial * n / 2)
    case.update(zeta=n**0.375, r=np.where(negative, -size, size))
    return {name: torch.as_tensor(value) for name, value in case.items()}


def sham(dial, n, seed):
    case = setup(0, n, seed)
    other = setup(0, n, seed + 10**6)["r"]
    return {**case, "r": (1 - dial) * case["r"] + 2 * dial * other}


# %% right q1: classes of unequal size
def plan():
    return {
        "claim": "classes",
        "bound": 1e-10,
        "dials": [0, 0.1, 0.2, 0.5, 1],
        "sizes": [40, 80, 160],
        "seeds": 8,
    }


def broken(case):
    counts = torch.bincount(case["labels"].long(), minlength=4)
    return (counts / counts.sum() - 0.25).abs().max().double() * (counts > -1).all()


def statistic(case):
    delta, labels = case["delta"], case["labels"]
    n, C, _ = delta.shape
    G = torch.einsum("nkp,nkq->pq", delta, delta) / n
    total = torch.zeros_like(G)
    for c in range(C):
        own = delta[labels == c]
        means, others = own.mean(dim=0), [k for k in range(C) if k != c]
        centre = means[others].mean(dim=0)
        spread = means[others] - centre
        within = (own - means).flatten(end_dim=1)
        total += torch.outer(means[c], means[c]) / C
        total += (C - 1) / C * torch.outer(centre, centre)
        total += spread.T @ spread / C
        total += within.T @ within / len(own) / C
    return torch.linalg.matrix_norm(G - total) / torch.linalg.matrix_norm(G)


def setup(dial, n, seed):
    labels = torch.arange(n) % 4
    moved = (labels != 0) & (torch.arange(n) < round(0.6 * dial * n))
    labels = torch.where(moved, 0, labels)
    noise = torch.randn(n, 4, 12, generator=torch.Generator().manual_seed(seed)).double()
    return {"delta": (1 + labels[:, None, None]) * (noise + 0.5), "labels": labels}


def sham(dial, n, seed):
    case = setup(0, n, seed)
    share = torch.arange(n) < round(dial * n / 4) * 4
    labels = torch.where(share, 3 - case["labels"], case["labels"])
    return {**case, "labels": labels}


# %% right q1: logits that differ
def plan():
    return {
        "claim": "centres",
        "bound": 1e-8,
        "dials": [0, 0.001, 0.01, 0.1, 1],
        "sizes": [24, 48, 96],
        "seeds": 8,
    }


def broken(case):
    return (torch.softmax(case["H"] @ case["B"].T, dim=1) - 1 / len(case["B"])).abs().max()


def statistic(case):
    H, p = case["H"], torch.softmax(case["H"] @ case["B"].T, dim=1)
    C = p.shape[1]
    own = torch.nn.functional.one_hot(case["labels"].long(), C).double()
    gradient = ((p - own).T @ H).flatten()
    unit = torch.eye(C).double()
    centres = []
    for c in range(C):
        total = torch.zeros(C, H.shape[1], dtype=torch.float64)
        for k in range(C):
            if k != c:
                weights = own[:, c] * p[:, k].sqrt()
                total += (unit[k] - p).T @ (weights[:, None] * H)
        centres.append(total.flatten() / total.norm())
    basis = torch.linalg.qr(torch.stack(centres, dim=1)).Q
    return (gradient - basis @ (basis.T @ gradient)).norm() / gradient.norm()


def setup(dial, n, seed):
    stream = torch.Generator().manual_seed(seed)
    H = torch.randn(n, 6, generator=stream, dtype=torch.float64)
    B = torch.randn(4, 6, generator=stream, dtype=torch.float64)
    labels = torch.randint(0, 4, (n,), generator=stream)
    labels[:4] = torch.arange(4)
    return {"H": H, "B": dial * B, "labels": labels}


def sham(dial, n, seed):
    # The same vector in every row: it moves all logits of an example together.
    case = setup(0, n, seed)
    return {**case, "B": dial * torch.ones(4, 1).double() * torch.linspace(-1, 1, 6).double()}


# %% [markdown]
# ## 2. The hypothesis as a number
#
# **Question q2.** Write `broken`, which returns the *number* of your claim for a case: how far its
# hypothesis is broken, measured on the case and not read off a dial. `example(claim)` gives a case
# to try it on.


# %% answer q2
def broken(case):
    """How far the hypothesis is broken in a case (a dictionary of tensors): one number."""
    # BEGIN SOLUTION
    squares = case["r"] ** 2
    return squares.max() / squares.sum()
    # END SOLUTION


# %% public q2
# The notebook's other names are where the function looks for them.
notebook = broken.__globals__
chosen = notebook.get("plan", lambda: None)()
assert isinstance(chosen, dict), "question q1 comes first: its plan must end with 'return {...}'"
claim = chosen["claim"]
n = 400 if claim == "tails" else 8
case = notebook["example"](claim, n)
value = ran("Which arrays a case has is said by shapes(claim, n).", broken, case)
assert value is not None, "broken gives nothing: does it end with 'return ...'?"
expected = {
    "concentration": 0.2533504952,
    "weights": 0.2551316008,
    "tails": 1.379892067,
    "signs": 0.2307692308,
    "one-sign": 0.5883741238,
    "classes": 0.125,
    "centres": 0.6505421548,
}[claim]
# Quantiles differ a little by the rule for what lies between two values.
error, allowed = abs(float(value) / expected - 1), 0.02 if claim == "tails" else 1e-6
hint = "Go through it step by step: which sum, which largest, of what?"
text = f"for example({claim!r}, {n}) it is {expected:.6f}, but yours {float(value):.6f}. {hint}"
assert error < allowed, text


# %% hidden common
def ordinary(claim, rng):
    """A random case in which hypotheses hold or not, of sizes that no formula gives."""
    n, d, m = (int(size) for size in rng.integers(9, 26, size=3))
    normal = rng.standard_normal
    q, W = normal(d), normal((m, d)) + rng.uniform(0, 1) * normal(d)
    data = {
        "X_B": normal((n, d)),
        "z": normal(n),
        "q": q / np.linalg.norm(q),
        "zeta": float(rng.uniform(1, 4)),
    }
    W /= np.linalg.norm(W, axis=1, keepdims=True)
    a, r = rng.choice([-1.0, 1.0], size=m), rng.uniform(0, 2) + normal(n)
    labels = rng.permutation([0.0, 1, 2, 3, *rng.integers(0, 4, size=n)])
    if claim in ("concentration", "weights"):
        return {**data, "W": W, "a": a, "r": r}
    if claim == "tails":
        scales = rng.uniform(0.3, 2, size=3)
        noise = rng.standard_t(rng.uniform(1, 5), size=400)
        return dict(zip(("f", "target", "noise"), scales[:, None] * [*normal((2, 400)), noise]))
    if claim == "signs":
        return {"X": normal((n, d)), "W": W, "a": a, "y": normal(n)}
    if claim == "one-sign":
        return {**data, "r": r}
    if claim == "classes":
        return {
            "delta": normal((len(labels), 4, 7)) * (1 + labels[:, None, None]),
            "labels": labels,
        }
    return {
        "H": normal((len(labels), 5)),
        "B": rng.uniform(0.1, 1) * normal((4, 5)),
        "labels": labels,
    }


def extremes(claim, rng):
    """Two cases at the ends: one where the hypothesis holds, one where nothing is left of it.

    Other units, other signs.
    """
    whole, none = ordinary(claim, rng), ordinary(claim, rng)
    n = len(next(iter(none.values())))
    if claim == "concentration":
        whole["r"] = -700 * np.sign(whole["r"])
        none["r"] = -1e-3 * np.eye(n)[int(rng.integers(n))]
    elif claim == "weights":
        whole["W"] = np.linalg.qr(rng.standard_normal((30, 30)))[0][:, : len(whole["q"])]
        whole["W"] /= np.linalg.norm(whole["W"], axis=1, keepdims=True)
        whole.update(a=rng.choice([-1.0, 1.0], size=30), r=-700 * whole["r"])
        none.update(W=np.tile(none["q"], (len(none["a"]), 1)), r=1e-3 * none["r"])
    elif claim == "tails":
        whole["noise"] = rng.choice([-1.0, 1.0], size=n) * rng.uniform(0.9, 1, size=n)
        none["noise"] = np.where(np.arange(n) < n / 8, 1e6, -1.0) * rng.uniform(0.9, 1, size=n)
    elif claim == "signs":
        m = len(whole["a"]) // 2
        whole.update(a=np.repeat([1.0, -1.0], m), W=whole["W"][: 2 * m], y=1e-3 * whole["y"])
        none.update(a=-np.ones_like(none["a"]), y=700 * none["y"])
    elif claim == "one-sign":
        whole["r"], none["r"] = 1e-3 * abs(whole["r"]), -700 * abs(none["r"])
    elif claim == "classes":
        counts = {"whole": [5, 5, 5, 5], "none": [1, 2, 30, 1]}
        for case, sizes in ((whole, counts["whole"]), (none, counts["none"])):
            labels = np.repeat([2.0, 0.0, 3.0, 1.0], sizes)
            case.update(labels=labels, delta=1e-3 * rng.standard_normal((len(labels), 4, 7)))
            case["delta"] *= 1 + labels[:, None, None]
    else:
        # The same number on every logit of an example, so large that its exponential overflows.
        shared = 700 * rng.standard_normal(5)
        whole["B"], none["B"] = np.tile(shared, (4, 1)), none["B"] + shared
    return [whole, none]


def softmax(logits):
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def number(claim, x):
    """How far the hypothesis is broken."""
    if claim == "concentration":
        return np.max(x["r"] ** 2) / np.sum(x["r"] ** 2)
    if claim == "weights":
        # Another way: the largest eigenvalue of W^T W.
        return np.linalg.eigvalsh(x["W"].T @ x["W"])[-1] / len(x["W"])
    if claim == "tails":
        return np.quantile(abs(x["noise"]), 0.95) / np.median(abs(x["noise"]))
    if claim == "signs":
        return abs(np.mean(x["a"]))
    if claim == "one-sign":
        return -np.minimum(x["r"], 0).sum() / abs(x["r"]).sum()
    if claim == "classes":
        C = x["delta"].shape[1]
        return max(abs(np.mean(x["labels"] == c) - 1 / C) for c in range(C))
    return abs(softmax(x["H"] @ x["B"].T) - 1 / len(x["B"])).max()


def everywhere(function, cases, rng):
    """Call a function for the cases of every claim; only those of the one that is chosen count."""
    wanted = [call("plan")]
    for claim in CLAIMS:
        wanted += [optional(call(function, case=case)) for case in cases(claim, rng)]
    return wanted


def chosen(calls, answers):
    """The claim, and its pairs of case and answer."""
    claim, count = claim_of(answers[0]), (len(calls) - 1) // len(CLAIMS)
    first = 1 + count * CLAIMS.index(claim)
    pairs = []
    for c, answer in zip(calls[first : first + count], answers[first : first + count]):
        assert not isinstance(answer, Missing), answer.reason
        pairs.append((c.arguments["case"], answer))
    return claim, pairs


def like(answer, expected, tolerance, name):
    value = float(array(answer, (), name=name))
    assert abs(value - expected) <= tolerance * abs(expected) + ROUNDING, (
        f"{name} is {value:.6g}, but {expected:.6g} is right"
    )


# %% hidden q2 1: on random cases
def calls(rng):
    return everywhere("broken", lambda claim, rng: [ordinary(claim, rng) for _ in range(4)], rng)


def check(calls, answers):
    claim, pairs = chosen(calls, answers)
    for case, answer in pairs:
        # Quantiles differ by the rule for what lies between two values.
        tolerance = 0.03 if claim == "tails" else 1e-6
        like(answer, number(claim, case), tolerance, "the number")


# %% hidden q2 1: at the ends
def calls(rng):
    return everywhere("broken", extremes, rng)


def check(calls, answers):
    claim, pairs = chosen(calls, answers)
    for case, answer in pairs:
        like(answer, number(claim, case), 0.03 if claim == "tails" else 1e-6, "the number")


# %% wrong q2 2: the largest residue, not its share
def broken(case):
    return (case["r"] ** 2).max()


# %% wrong q2 1: shares without squares
def broken(case):
    return case["r"].abs().max() / case["r"].abs().sum()


# %% wrong q2 1: the largest, not the largest in size
def broken(case):
    return case["r"].max() ** 2 / (case["r"] ** 2).sum()


# %% [markdown]
# ## 3. The statistic
#
# **Question q3.** Write `statistic` for your claim. It must not depend on the units of the
# residue, and be right for every case, also where hypotheses are broken.


# %% answer q3
def statistic(case):
    """The statistic of the claim for a case (a dictionary of tensors): one number."""
    # BEGIN SOLUTION
    X = case["X_B"] + case["zeta"] * torch.outer(case["z"], case["q"])
    rest = torch.sigmoid(X @ case["W"].T) - 0.5
    E = case["X_B"].T @ (case["r"][:, None] * rest * case["a"])
    S1 = 0.5 * (case["X_B"].T @ case["r"]).norm() * case["a"].norm()
    return torch.linalg.matrix_norm(E, ord=2) / S1
    # END SOLUTION


# %% public q3
notebook = statistic.__globals__
chosen = notebook.get("plan", lambda: None)()
assert isinstance(chosen, dict), "question q1 comes first: its plan must end with 'return {...}'"
claim = chosen["claim"]
case = notebook["example"](claim)
value = ran("Which arrays a case has is said by shapes(claim, n).", statistic, case)
assert value is not None, "statistic gives nothing: does it end with 'return ...'?"
expected = {
    "concentration": 0.2489830269,
    "weights": 0.1052380798,
    "tails": 0.7255011841,
    "signs": 0.3081714175,
    "one-sign": 0.09422238226,
    "classes": 0.1746042222,
    "centres": 0.9318875765,
}[claim]
hint = "Compare its parts one by one with the claim's formulas: norms, factors, transposes."
text = f"for example({claim!r}) it is {expected:.6f}, but yours {float(value):.6f}. {hint}"
assert abs(float(value) / expected - 1) < 1e-6, text


# %% hidden common
def reference(claim, x):
    """The statistic, from full matrices and by other ways than a student would take."""
    if claim in ("concentration", "weights"):
        X = x["X_B"] + x["zeta"] * np.outer(x["z"], x["q"])
        inside = np.outer(x["r"], x["a"])
        rest = 0.5 * np.tanh(X @ x["W"].T / 2)
        side = x["X_B"] if claim == "concentration" else x["zeta"] * np.outer(x["z"], x["q"])
        largest = [
            np.linalg.eigvalsh(A @ A.T)[-1] for A in (side.T @ (inside * rest), x["X_B"].T @ inside)
        ]
        return 2 * math.sqrt(largest[0] / largest[1])
    if claim == "tails":
        r = x["f"] - x["target"] - x["noise"]
        return abs(r).max() / math.sqrt(np.mean(r**2)) / math.log(len(r))
    if claim == "signs":
        f = np.mean(np.maximum(x["X"] @ x["W"].T, 0) * x["a"], axis=1)
        return math.sqrt(np.sum(f**2) / np.sum(x["y"] ** 2))
    if claim == "one-sign":
        X = x["X_B"] + x["zeta"] * np.outer(x["z"], x["q"])
        bulk, full = (np.linalg.eigvalsh(A.T @ (x["r"][:, None] * A)) for A in (x["X_B"], X))
        return (bulk[0] - full[0]) / (bulk[-1] - bulk[0])
    if claim == "classes":
        # Another way: the four terms of a class add up to its own second moment.
        delta, C = x["delta"], x["delta"].shape[1]
        G = np.einsum("icp,icq->pq", delta, delta) / len(delta)
        own = [delta[x["labels"] == c].reshape(-1, delta.shape[2]) for c in range(C)]
        return np.linalg.norm(G - sum(v.T @ v / len(v) for v in own)) / np.linalg.norm(G)
    return outside_of_centres(**x)


def outside_of_centres(H, B, labels):
    # Another way: gradients by automatic differentiation. The logit derivative is the gradient of
    # the loss under another label, times -sqrt(p) of that label.
    p, C = softmax(H @ B.T), len(B)
    H, B = torch.as_tensor(H), torch.tensor(B, requires_grad=True)

    def slope(weights):
        loss = -(torch.log_softmax(H @ B.T, dim=1) * torch.as_tensor(weights)).sum()
        return torch.autograd.grad(loss, B)[0].flatten().numpy()

    own = np.eye(C)[labels.astype(int)]
    g = slope(own / len(labels))
    each = -np.sqrt(p) * (1 - own)
    centres = np.stack([slope(each * own[:, [c]]) for c in range(C)], axis=1)
    centres /= np.linalg.norm(centres, axis=0)
    left = g - centres @ np.linalg.lstsq(centres, g, rcond=None)[0]
    return np.linalg.norm(left) / np.linalg.norm(g)


# %% hidden q3 2: on random cases
def calls(rng):
    return everywhere("statistic", lambda claim, rng: [ordinary(claim, rng) for _ in range(4)], rng)


def check(calls, answers):
    claim, pairs = chosen(calls, answers)
    for case, answer in pairs:
        like(answer, reference(claim, case), 1e-6, "the statistic")


# %% hidden q3 1: at the ends, in other units
def calls(rng):
    return everywhere("statistic", extremes, rng)


def check(calls, answers):
    claim, pairs = chosen(calls, answers)
    for case, answer in pairs:
        like(answer, reference(claim, case), 1e-6, "the statistic")


# %% wrong q3 3: the Frobenius norm
def statistic(case):
    X = case["X_B"] + case["zeta"] * torch.outer(case["z"], case["q"])
    rest = torch.sigmoid(X @ case["W"].T) - 0.5
    E = case["X_B"].T @ (case["r"][:, None] * rest * case["a"])
    return E.norm() / (0.5 * (case["X_B"].T @ case["r"]).norm() * case["a"].norm())


# %% wrong q3 3: the mean slope forgotten in S1
def statistic(case):
    X = case["X_B"] + case["zeta"] * torch.outer(case["z"], case["q"])
    rest = torch.sigmoid(X @ case["W"].T) - 0.5
    E = case["X_B"].T @ (case["r"][:, None] * rest * case["a"])
    return torch.linalg.matrix_norm(E, ord=2) / (
        (case["X_B"].T @ case["r"]).norm() * case["a"].norm()
    )


# %% wrong q3 3: all the data in place of their bulk
def statistic(case):
    X = case["X_B"] + case["zeta"] * torch.outer(case["z"], case["q"])
    rest = torch.sigmoid(X @ case["W"].T) - 0.5
    E = X.T @ (case["r"][:, None] * rest * case["a"])
    return 2 * torch.linalg.matrix_norm(E, ord=2) / ((X.T @ case["r"]).norm() * case["a"].norm())


# %% wrong q3 1: divided by something added for safety
def statistic(case):
    X = case["X_B"] + case["zeta"] * torch.outer(case["z"], case["q"])
    rest = torch.sigmoid(X @ case["W"].T) - 0.5
    E = case["X_B"].T @ (case["r"][:, None] * rest * case["a"])
    S1 = 0.5 * (case["X_B"].T @ case["r"]).norm() * case["a"].norm()
    return torch.linalg.matrix_norm(E, ord=2) / (S1 + 1e-6)


# %% [markdown]
# ## 4. A case with a dial
#
# **Question q4.** Write `setup`. It draws a case of size $n$ (the arrays of `shapes(claim, n)`),
# such that
# - at dial 0 all hypotheses of the claim hold;
# - at dial 1 the named hypothesis is broken, as far as its claim says above; at dial 1/2 its number
#   lies strictly between, at least a fiftieth of the way from both ends;
# - all other hypotheses hold at every dial;
# - the same seed gives the same case, another seed other numbers throughout, and nothing that was
#   drawn before matters (a generator of your own, not the global one);
# - **with the same seed nothing changes with the dial but the array it turns** (`TURNED`; for
#   "classes" also `delta`). Then two dials differ by the dial alone, and not by luck.
#
# Each of these is a point. How you break the hypothesis is up to you.
#
# <details><summary>If you are stuck</summary>
#
# Write it in two parts: first draw every array of an unbroken case, always in the same order and
# without looking at the dial; then turn the one array. Two ways to turn: blend the array with one
# that is wholly broken, weights `1 - dial` and `dial` (and repair what must stay, such as unit
# rows), or break a share `dial` of its entries. If its number jumps at once or moves too late, use
# a power of the dial. Print `broken(setup(dial, 16, seed))` for some dials before you go on.
#
# </details>


# %% answer q4
def setup(dial, n, seed):
    """A case of size n in which the hypothesis is broken as far as the dial, 0 to 1, says."""
    # BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed)
    d, m = sizes(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X_B, z, q, W = normal(n, d), normal(n), normal(d), normal(m, d)
    a, r = normal(m).sign(), 1 + normal(n) / 2
    one = torch.zeros_like(r)
    one[0] = r.norm()
    return {
        "X_B": X_B,
        "z": z,
        "q": q / q.norm(),
        "zeta": n ** (1 / 8),
        "W": W / W.norm(dim=1, keepdim=True),
        "a": a,
        "r": math.sqrt(1 - dial) * r + math.sqrt(dial) * one,
    }
    # END SOLUTION


# %% public q4
notebook = setup.__globals__
chosen = notebook.get("plan", lambda: None)()
assert isinstance(chosen, dict), "question q1 comes first: its plan must end with 'return {...}'"
claim = chosen["claim"]
needed = notebook["shapes"](claim, 16)
cases = [ran("It is called as setup(0.5, 16, 3).", setup, dial, 16, 3) for dial in (0.0, 0.5, 1.0)]
for case in cases:
    assert isinstance(case, dict), "setup gives no dictionary: does it end with 'return {...}'?"
    missing = set(needed) - set(case)
    assert not missing, f"the case has no {', '.join(sorted(missing))}"
    for name, shape in needed.items():
        value = tensor(case[name])
        assert tuple(value.shape) == shape, f"{name} has shape {tuple(value.shape)}, not {shape}"
        assert torch.isfinite(value.double()).all(), f"{name} has NaN or infinite entries"
same = lambda x, y, name: torch.equal(tensor(x[name]), tensor(y[name]))
turned = {notebook["TURNED"][claim]} | ({"delta"} if claim == "classes" else set())
for name in set(needed) - turned:
    hint = "draw everything in the same order, whatever the dial is, and turn the dial afterwards"
    assert same(cases[0], cases[2], name), f"{name} changes with the dial: {hint}"
assert not same(cases[0], cases[2], notebook["TURNED"][claim]), "the dial turns nothing"

# %% public q4
notebook, many = setup.__globals__, range(16)
assert callable(notebook.get("broken")) and setup(0.0, 16, 0), (
    "questions q1 and q2 come first: does setup end with 'return {...}'?"
)
case = lambda dial, seed: notebook["as_tensors"](setup(dial, 16, seed))
number = lambda dial: sum(float(notebook["broken"](case(dial, seed))) for seed in many) / 16
start, middle, end = number(0.0), number(0.5), number(1.0)
found = f"by your broken the number is {start:.3g}, {middle:.3g}, {end:.3g} at dials 0, 1/2, 1"
assert end > start, f"{found}: it must grow"
way = (middle - start) / (end - start)
assert 0.02 < way < 0.98, f"{found}: at 1/2 it must lie clearly between, by a fiftieth of the way"

# %% public q4
drawn = setup.__globals__.get("plan", lambda: None)() and setup(0.5, 16, 3)
assert isinstance(drawn, dict), "setup gives no dictionary: does it end with 'return {...}'?"
first, again, other = setup(0.5, 16, 3), setup(0.5, 16, 3), setup(0.5, 16, 4)
same = lambda x, y, name: torch.equal(tensor(x[name]), tensor(y[name]))
changed = [name for name in first if not same(first, again, name)]
assert not changed, (
    f"the same seed gives another {', '.join(changed)}: seed a generator of your own"
)
fixed = [name for name in first if name not in ("q", "zeta", "labels", "a", "B")]
kept = [name for name in fixed if same(first, other, name)]
assert not kept, f"another seed gives the same {', '.join(kept)}: does it come from the generator?"

# %% hidden common
#: Small, since whole cases are sent; means over the seeds are what is compared.
N, SEEDS = 16, 24


def intact(claim, n):
    """The most that the number may be at dial 0."""
    neurons = round(5 * n / 3)
    return {
        "concentration": math.log(n) ** 2 / n,
        "weights": 9 / neurons,
        "tails": 4.0,
        "signs": 4 / math.sqrt(neurons),
        "one-sign": 0.0,
        "classes": 0.0,
        "centres": 0.0,
    }[claim] + ROUNDING


def gone(claim):
    """The least that the number must be at dial 1."""
    # 384 Cauchy variables give a quantile that scatters by a quarter, so 5 in place of 6.
    least = {"tails": 5.0, "one-sign": 0.4, "classes": 0.2, "centres": 0.2}
    return least.get(claim, 0.9) - ROUNDING


def shape_table(claim, n):
    d, m = round(4 * n / 3), round(5 * n / 3)
    data = {"X_B": (n, d), "z": (n,), "q": (d,), "zeta": ()}
    return {
        "concentration": {**data, "W": (m, d), "a": (m,), "r": (n,)},
        "weights": {**data, "W": (m, d), "a": (m,), "r": (n,)},
        "tails": {"f": (n,), "target": (n,), "noise": (n,)},
        "signs": {"X": (n, d), "W": (m, d), "a": (m,), "y": (n,)},
        "one-sign": {**data, "r": (n,)},
        "classes": {"delta": (n, 4, 12), "labels": (n,)},
        "centres": {"H": (n, 6), "B": (4, 6), "labels": (n,)},
    }[claim]


def as_case(claim, answer):
    """The arrays of a case, each of its shape."""
    assert isinstance(answer, dict), "a dictionary of arrays is expected"
    table = shape_table(claim, N)
    missing = sorted(set(table) - set(answer))
    assert not missing, f"the case has no {', '.join(missing)}"
    return {name: array(answer[name], shape, name=name) for name, shape in table.items()}


def typical(claim, cases):
    """The number of a claim over several cases: its mean, or that of all noise together."""
    if claim == "tails":
        return number(claim, {"noise": np.concatenate([case["noise"] for case in cases])})
    return float(np.mean([number(claim, case) for case in cases]))


def power(claim):
    return 3 / 8 if claim == "one-sign" else 1 / 8


def sound(claim, name, cases):
    """Check one array of several cases against every hypothesis but the one to be broken."""
    values = [case[name] for case in cases]
    every = np.concatenate([np.ravel(value) for value in values])
    square = float(np.mean(every**2))
    if name in ("X_B", "X", "z", "H"):
        room = 6 * math.sqrt(2 / every.size)
        assert abs(square - 1) < room, f"{name} has the mean square {square:.2f}, not 1"
    elif name == "q":
        assert abs(square * len(values[0]) - 1) < ROUNDING, "q is no unit vector"
    elif name == "zeta":
        assert abs(square - N ** (2 * power(claim))) < 1e-6, f"zeta is not n^({power(claim):g})"
    elif name == "W":
        lengths = np.concatenate([np.linalg.norm(W, axis=1) for W in values])
        assert abs(lengths - 1).max() < 1e-6, "a row of W is no unit vector"
        lean = float(np.mean([np.linalg.norm(W, 2) for W in values]))
        assert claim == "weights" or lean < 3, f"|W| is {lean:.1f}: its rows share a direction"
    elif name == "a":
        assert (abs(every) == 1).all(), "an outer weight is neither 1 nor -1"
    elif name == "r":
        assert square > 0, "r is zero"
        if claim == "weights":
            assert np.mean(every) ** 2 > square / 4, "r has not the mean that was asked for"
        most = np.mean([number("concentration", {"r": r}) for r in values])
        free = claim == "concentration"
        assert free or most < intact("concentration", N), "a few residues carry most of it"
    elif name == "labels":
        for labels in values:
            assert set(labels) == {0, 1, 2, 3}, "labels must be 0, 1, 2 and 3, no class empty"
    elif name == "delta":
        means = np.zeros(4)
        for case in cases:
            lengths = (case["delta"] ** 2).sum(axis=(1, 2))
            own = case["labels"][:, None] == range(4)
            means += lengths @ own / np.maximum(own.sum(axis=0), 1)
        assert means.max() > 1.1 * means.min(), "the classes do not differ in length"
    elif name == "noise":
        assert np.median(abs(every)) > 0, "half of the noise or more is zero"
        middle = abs(np.median(every)) / np.median(abs(every))
        assert middle < 0.5, "the noise is not symmetric about 0"
    else:
        assert name == "B" or 0.0025 < square < 400, f"{name} is not of order one"


def still(claim, cases):
    for name in cases[0]:
        if name != TURNED[claim] and (claim, name) != ("classes", "delta"):
            for case in cases[1:]:
                assert np.array_equal(case[name], cases[0][name]), f"{name} turns with the dial"


def drawn(function, dial, count, first):
    return [call(function, dial=float(dial), n=N, seed=first + k) for k in range(count)]


# %% hidden q4 1: every hypothesis holds at dial 0
def calls(rng):
    return [call("plan"), *drawn("setup", 0, SEEDS, first=int(rng.integers(1000)))]


def check(calls, answers):
    claim = claim_of(answers[0])
    cases = [as_case(claim, answer) for answer in answers[1:]]
    for name in cases[0]:
        sound(claim, name, cases)
    found, most = typical(claim, cases), intact(claim, N)
    assert found <= most, f"the hypothesis is broken at dial 0: its number is {found:.3g}"


# %% hidden q4 1: the dial breaks the hypothesis, step by step
def calls(rng):
    first = int(rng.integers(1000))
    wanted = [each for dial in (0, 0.5, 1) for each in drawn("setup", dial, SEEDS, first=first)]
    return [call("plan"), *wanted]


def check(calls, answers):
    claim = claim_of(answers[0])
    cases = [as_case(claim, answer) for answer in answers[1:]]
    start, middle, end = (typical(claim, cases[k * SEEDS : (k + 1) * SEEDS]) for k in range(3))
    assert end >= gone(claim), f"at dial 1 the number is {end:.3g}, less than {gone(claim):.2g}"
    way = (middle - start) / (end - start)
    text = f"at dial 1/2 the number has gone {way:.3f} of its way, but 0.02 to 0.98 was asked for"
    assert 0.02 < way < 0.98, text


# %% hidden q4 1: the other hypotheses hold at every dial
def calls(rng):
    first = int(rng.integers(1000))
    return [
        call("plan"),
        *drawn("setup", 0.5, 10, first=first),
        *drawn("setup", 1, 10, first=first),
    ]


def check(calls, answers):
    claim = claim_of(answers[0])
    cases = [as_case(claim, answer) for answer in answers[1:]]
    for some in (cases[:10], cases[10:]):
        for name in cases[0]:
            sound(claim, name, some)


# %% hidden q4 1: the seed decides, and nothing else
def calls(rng):
    seed = int(rng.integers(1, 1000))
    order = (seed, seed + 1, seed, seed + 1)
    return [call("plan"), *[call("setup", dial=0.5, n=N, seed=k) for k in order]]


def check(calls, answers):
    claim = claim_of(answers[0])
    cases = [as_case(claim, answer) for answer in answers[1:]]
    for name in cases[0]:
        for k in (0, 1):
            repeated = np.array_equal(cases[k][name], cases[k + 2][name])
            assert repeated, f"the same seed gives another {name} the second time"
        # Few numbers, such as labels, may be the same by design; q and B may be fixed.
        if name in ("X_B", "X", "z", "H", "W", "delta", "noise", "f", "y"):
            same = np.array_equal(cases[0][name], cases[1][name])
            assert not same, f"another seed gives the same {name}"


# %% hidden q4 1: with the same seed only the named array turns
def calls(rng):
    seed = int(rng.integers(1000))
    return [call("plan"), *[call("setup", dial=t, n=N, seed=seed) for t in (0.0, 0.3, 1.0)]]


def check(calls, answers):
    claim = claim_of(answers[0])
    still(claim, [as_case(claim, answer) for answer in answers[1:]])


# %% wrong q4 1: the seed is not used
def setup(dial, n, seed):
    generator = torch.Generator().manual_seed(0)
    d, m = sizes(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X_B, z, q, W = normal(n, d), normal(n), normal(d), normal(m, d)
    a, r = normal(m).sign(), 1 + normal(n) / 2
    r = (1 - dial) * r
    r[0] += dial * math.sqrt(n)
    W = W / W.norm(dim=1, keepdim=True)
    return dict(X_B=X_B, z=z, q=q / q.norm(), zeta=n ** (1 / 8), W=W, a=a, r=r)


# %% wrong q4 1: other numbers at every dial
def setup(dial, n, seed):
    generator = torch.Generator().manual_seed(seed + round(1000 * dial))
    d, m = sizes(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X_B, z, q, W = normal(n, d), normal(n), normal(d), normal(m, d)
    a, r = normal(m).sign(), 1 + normal(n) / 2
    r = (1 - dial) * r
    r[0] += dial * math.sqrt(n)
    W = W / W.norm(dim=1, keepdim=True)
    return dict(X_B=X_B, z=z, q=q / q.norm(), zeta=n ** (1 / 8), W=W, a=a, r=r)


# %% wrong q4 1: a switch in place of a dial
def setup(dial, n, seed):
    generator = torch.Generator().manual_seed(seed)
    d, m = sizes(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X_B, z, q, W = normal(n, d), normal(n), normal(d), normal(m, d)
    a, r = normal(m).sign(), 1 + normal(n) / 2
    if dial > 0:
        r[1:] = 0
    W = W / W.norm(dim=1, keepdim=True)
    return dict(X_B=X_B, z=z, q=q / q.norm(), zeta=n ** (1 / 8), W=W, a=a, r=r)


# %% wrong q4 1: broken by half only
def setup(dial, n, seed):
    generator = torch.Generator().manual_seed(seed)
    d, m = sizes(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X_B, z, q, W = normal(n, d), normal(n), normal(d), normal(m, d)
    a, r = normal(m).sign(), 1 + normal(n) / 2
    r[0] += dial * math.sqrt(n)
    W = W / W.norm(dim=1, keepdim=True)
    return dict(X_B=X_B, z=z, q=q / q.norm(), zeta=n ** (1 / 8), W=W, a=a, r=r)


# %% wrong q4 2: the spike grows with the dial, too
def setup(dial, n, seed):
    generator = torch.Generator().manual_seed(seed)
    d, m = sizes(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X_B, z, q, W = normal(n, d), normal(n), normal(d), normal(m, d)
    a, r = normal(m).sign(), 1 + normal(n) / 2
    r = (1 - dial) * r
    r[0] += dial * math.sqrt(n)
    W = W / W.norm(dim=1, keepdim=True)
    return dict(X_B=X_B, z=z, q=q / q.norm(), zeta=n ** (1 / 8 + dial), W=W, a=a, r=r)


# %% wrong q4 2: rows of W have length about one only
def setup(dial, n, seed):
    generator = torch.Generator().manual_seed(seed)
    d, m = sizes(n)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X_B, z, q, W = normal(n, d), normal(n), normal(d), normal(m, d) / math.sqrt(d)
    a, r = normal(m).sign(), 1 + normal(n) / 2
    r = (1 - dial) * r
    r[0] += dial * math.sqrt(n)
    return dict(X_B=X_B, z=z, q=q / q.norm(), zeta=n ** (1 / 8), W=W, a=a, r=r)


# %% [markdown]
# ## 5. From values to a verdict
#
# **Question q5.** At one dial you have a table of values, a row a seed and a column a size. Write
# `per_seed`, which sums up each row by one number: for `kind = "exponent"` the least-squares slope
# of $\log$ value against $\log$ size, for `kind = "level"` the value at the largest size. Sizes
# come in any order.


# %% answer q5
def per_seed(values, sizes, kind):
    """One number a seed: exponent or level of values (seeds x sizes), sizes a vector."""
    # BEGIN SOLUTION
    if kind == "level":
        return values[:, sizes.argmax()]
    x = torch.log(sizes) - torch.log(sizes).mean()
    return torch.log(values) @ x / (x @ x)
    # END SOLUTION


# %% public q5
sizes = torch.tensor([10.0, 20.0, 40.0]).double()
values = torch.stack([3 * sizes**2, 5 / sizes])
found = per_seed(values.clone(), sizes.clone(), "exponent")
assert found is not None, "per_seed gives nothing: does it end with 'return ...'?"
hint = "3 n^2 has the exponent 2, and 5 / n the exponent -1; both logarithms are needed."
close("the exponents of 3 n^2 and 5 / n", found, [2.0, -1.0], hint)
found = per_seed(values.clone(), sizes.clone(), "level")
close("the levels of 3 n^2 and 5 / n at n = 40", found, [4800.0, 0.125], "The value at n = 40.")


# %% hidden q5 1: exponents of scattered values
def calls(rng):
    wanted = []
    for seeds, count in ((5, 3), (9, 6)):
        sizes = rng.permutation(np.cumsum(rng.uniform(20, 100, size=count)))
        values = sizes**-0.4 * np.exp(0.3 * rng.normal(size=(seeds, count)))
        wanted.append(call("per_seed", values=values, sizes=sizes, kind="exponent"))
    return wanted


def check(calls, answers):
    for c, found in zip(calls, answers):
        x = c.arguments
        expected = [np.polyfit(np.log(x["sizes"]), np.log(row), 1)[0] for row in x["values"]]
        near(found, expected, name="the exponents")


# %% hidden q5 1: levels, sizes in any order
def calls(rng):
    wanted = []
    for best in (0, 2, 3):
        sizes = rng.uniform(20, 60, size=4)
        sizes[best] = 100.0
        values = rng.normal(size=(6, 4))
        wanted.append(call("per_seed", values=values, sizes=sizes, kind="level"))
    return wanted


def check(calls, answers):
    for best, c, found in zip((0, 2, 3), calls, answers):
        near(found, c.arguments["values"][:, best], name="the levels")


# %% wrong q5 1: the last column is taken for the largest size
def per_seed(values, sizes, kind):
    if kind == "level":
        return values[:, -1]
    x = torch.log(sizes) - torch.log(sizes).mean()
    return torch.log(values) @ x / (x @ x)


# %% wrong q5 1: first and last size only
def per_seed(values, sizes, kind):
    if kind == "level":
        return values[:, sizes.argmax()]
    return torch.log(values[:, -1] / values[:, 0]) / torch.log(sizes[-1] / sizes[0])


# %% wrong q5 1: two different logarithms
def per_seed(values, sizes, kind):
    if kind == "level":
        return values[:, sizes.argmax()]
    x = torch.log10(sizes) - torch.log10(sizes).mean()
    return torch.log(values) @ x / (x @ x)


# %% wrong q5 2: the mean over the seeds
def per_seed(values, sizes, kind):
    if kind == "level":
        return values[:, sizes.argmax()].mean()
    x = torch.log(sizes) - torch.log(sizes).mean()
    return torch.log(values).mean(dim=0) @ x / (x @ x)


# %% [markdown]
# **Question q6.** Seeds are independent; sizes of one seed need not be, and the dials share their
# seeds. So the numbers of one column, one a seed, are a sample. Write `interval`: for each column a
# 95 % interval for the mean. For normal numbers and for any number of seeds from 5 on it must cover
# the true mean 94 to 96.5 times in a hundred. (With five seeds, mean $\pm\, 1.96$ standard errors
# covers 88 times, and so do many resampling intervals. Try it.)


# %% answer q6
def interval(values):
    """Lower and upper ends of 95 % intervals for the mean of each column of values (seeds x k)."""
    # BEGIN SOLUTION
    count = len(values)
    half = stats.t.ppf(0.975, count - 1) * values.std(dim=0) / math.sqrt(count)
    return values.mean(dim=0) - half, values.mean(dim=0) + half
    # END SOLUTION


# %% public q6
generator = torch.Generator().manual_seed(0)
values = torch.randn(5, 4000, generator=generator, dtype=torch.float64)
found = ran("It is called with a table, a row a seed.", interval, 3 + 2 * values)
assert found is not None, "interval gives nothing: does it end with 'return ...'?"
low, high = (tensor(end) for end in found)
assert low.shape == high.shape == (4000,), "an interval for each column is needed"
assert bool((low <= high).all()), "lower ends come first"
covered = float(((low <= 3) & (high >= 3)).double().mean())
hint = "How is the mean of few normal numbers distributed if their variance is estimated?"
assert 0.93 < covered < 0.97, (
    f"with 5 seeds it covers the mean {100 * covered:.0f} times in 100. {hint}"
)


# %% hidden common
def sample(seeds, columns, rng):
    mean, spread = 5 * rng.normal(), rng.uniform(0.1, 3)
    return call("interval", values=mean + spread * rng.normal(size=(seeds, columns)))


def covers(c, answer, least, most):
    values = c.arguments["values"]
    seeds, columns = values.shape
    assert isinstance(answer, list) and len(answer) == 2, "two vectors are expected: low and high"
    low, high = (array(end, (columns,), name="an end") for end in answer)
    # All columns share one mean, which their own mean gives to a hundredth of an interval.
    share = np.mean((low <= values.mean()) & (values.mean() <= high))
    assert least <= share <= most, f"with {seeds} seeds it covers {100 * share:.1f} times in 100"
    off = abs((low + high) / 2 - values.mean(axis=0)).max() / values.std()
    assert off < 1, "an interval is not about the mean of its own column"


# %% hidden q6 1: five seeds
def calls(rng):
    return [sample(5, 12_000, rng)]


def check(calls, answers):
    # Four standard errors of a share of 0.95 are 0.008.
    covers(calls[0], answers[0], 0.941, 0.965)


# %% hidden q6 1: forty seeds
def calls(rng):
    return [sample(40, 3000, rng)]


def check(calls, answers):
    covers(calls[0], answers[0], 0.93, 0.97)


# %% wrong q6 1: the normal quantile
def interval(values):
    half = 1.96 * values.std(dim=0) / math.sqrt(len(values))
    return values.mean(dim=0) - half, values.mean(dim=0) + half


# %% wrong q6 2: the scatter of single seeds
def interval(values):
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(dim=0)
    return values.mean(dim=0) - half, values.mean(dim=0) + half


# %% wrong q6 2: one side only
def interval(values):
    half = stats.t.ppf(0.95, len(values) - 1) * values.std(dim=0) / math.sqrt(len(values))
    return values.mean(dim=0) - half, values.mean(dim=0) + half


# %% wrong q6 1: the variance with the wrong denominator
def interval(values):
    count = len(values)
    half = stats.t.ppf(0.975, count - 1) * values.std(dim=0, correction=0) / math.sqrt(count)
    return values.mean(dim=0) - half, values.mean(dim=0) + half


# %% [markdown]
# **Question q7.** Write `decide`: the rule of section 1, at each dial, and what follows. It returns
# a dictionary with
# - `"verdicts"`: a list of "holds", "fails" or "undecided", one a dial;
# - `"kept"`: the largest dial such that the claim holds there and at every smaller dial; $-1$ if it
#   does not hold at dial 0;
# - `"lost"`: the smallest dial at which the claim fails; `math.inf` if it fails nowhere.
#
# The dials come in increasing order. Between `kept` and `lost` lies what you do not know.


# %% answer q7
def decide(dials, low, high, bound):
    """Verdicts at each dial, and between which dials the claim is lost (all vectors but bound)."""
    # BEGIN SOLUTION
    verdicts = [
        "holds" if top <= bound else "fails" if bottom > bound else "undecided"
        for bottom, top in zip(low, high)
    ]
    kept, lost = -1.0, math.inf
    for dial, verdict in zip(dials, verdicts):
        if verdict != "holds":
            break
        kept = float(dial)
    if "fails" in verdicts:
        lost = float(dials[verdicts.index("fails")])
    return {"verdicts": verdicts, "kept": kept, "lost": lost}
    # END SOLUTION


# %% public q7
vector = lambda *numbers: torch.tensor(numbers, dtype=torch.float64)
dials, low, high = vector(0, 0.2, 0.5, 1), vector(-2, -1, -0.5, 1), vector(-1, 0, 0.5, 2)
found = ran("It is called with three vectors and a number.", decide, dials, low, high, 0.0)
assert isinstance(found, dict), "decide gives no dictionary: does it end with 'return {...}'?"
verdicts = list(found["verdicts"])
hint = "an interval that has the bound inside decides nothing, and high = bound still holds"
expected = ["holds", "holds", "undecided", "fails"]
assert verdicts == expected, f"{verdicts} in place of {expected}: {hint}"
kept, lost = float(found["kept"]), float(found["lost"])
assert (kept, lost) == (0.2, 1.0), f"kept and lost are {kept:g} and {lost:g}, not 0.2 and 1"


# %% hidden common
def by_the_rule(dials, low, high, bound):
    # Another way: by counting, without a loop that stops.
    holds, fails = high <= bound, low > bound
    words = np.select([holds, fails], ["holds", "fails"], "undecided").tolist()
    run = int(np.cumprod(holds).sum())
    return words, dials[run - 1] if run else -1.0, min(dials[fails], default=math.inf)


def synthetic(rng, order):
    """Dials, ends and a bound with the verdicts wanted, in any units."""
    bound, scale = rng.normal(), rng.uniform(0.1, 3)
    dials = np.concatenate([[0.0], np.sort(rng.uniform(0.01, 0.99, size=len(order) - 2)), [1.0]])
    ends = {"h": (-2, -0.6), "f": (0.6, 2), "u": (-0.4, 0.5), "w": (-0.1, 4)}
    low, high = (bound + scale * np.array([ends[each] for each in order])).T
    return call("decide", dials=dials, low=low, high=high, bound=float(bound))


def words_of(found):
    assert isinstance(found, dict) and isinstance(found.get("verdicts"), list), (
        "a dictionary with a list of verdicts is expected"
    )
    return found["verdicts"]


# %% hidden q7 1: verdicts of synthetic measurements
def calls(rng):
    touching = call(
        "decide",
        dials=np.array([0.0, 0.4, 1.0]),
        low=np.array([-1.0, 0.25, 0.5]),
        high=np.array([0.25, 0.5, 0.75]),
        bound=0.25,
    )
    return [touching, *[synthetic(rng, order) for order in ("hhuf", "fffff", "uwuwf", "whwh")]]


def check(calls, answers):
    for c, found in zip(calls, answers):
        expected = by_the_rule(**c.arguments)[0]
        assert words_of(found) == expected, f"{words_of(found)} in place of {expected}"


# %% hidden q7 1: where the claim is lost, also where it comes back
def calls(rng):
    return [synthetic(rng, order) for order in ("hhuff", "hhhh", "uhhf", "ffff", "hfhuf", "huuu")]


def check(calls, answers):
    for c, found in zip(calls, answers):
        words_of(found)
        _, kept, lost = by_the_rule(**c.arguments)
        for name, expected in (("kept", kept), ("lost", lost)):
            value = found.get(name)
            assert isinstance(value, int | float), f"{name} is no number"
            assert value == expected, f"{name} is {value:g}, but {expected:g} is right"


# %% wrong q7 1: never undecided
def decide(dials, low, high, bound):
    verdicts = ["holds" if a + b <= 2 * bound else "fails" for a, b in zip(low, high)]
    clear = ["holds" if b <= bound else "fails" if a > bound else "?" for a, b in zip(low, high)]
    kept, lost = -1.0, math.inf
    for dial, verdict in zip(dials, clear):
        if verdict != "holds":
            break
        kept = float(dial)
    if "fails" in clear:
        lost = float(dials[clear.index("fails")])
    return {"verdicts": verdicts, "kept": kept, "lost": lost}


# %% wrong q7 1: the largest dial that holds, whatever came before
def decide(dials, low, high, bound):
    verdicts = [
        "holds" if top <= bound else "fails" if bottom > bound else "undecided"
        for bottom, top in zip(low, high)
    ]
    good = [float(dial) for dial, verdict in zip(dials, verdicts) if verdict == "holds"]
    bad = [float(dial) for dial, verdict in zip(dials, verdicts) if verdict == "fails"]
    return {"verdicts": verdicts, "kept": max(good, default=-1), "lost": min(bad, default=math.inf)}


# %% wrong q7 2: fails as soon as the interval touches the bound
def decide(dials, low, high, bound):
    verdicts = ["holds" if top < bound else "fails" for top in high]
    run = [float(dial) for dial, verdict in zip(dials, verdicts) if verdict == "holds"]
    bad = [float(dial) for dial, verdict in zip(dials, verdicts) if verdict == "fails"]
    return {"verdicts": verdicts, "kept": max(run, default=-1), "lost": min(bad, default=math.inf)}


# %% [markdown]
# ## 6. Measure
#
# **Question w2.** Before you run the cells below: explain your rule. Why this bound (what would a
# lower and a higher one do wrong)? Why these sizes, dials and seeds? Which outcome would make you
# say that the claim does not need its hypothesis? Name the pilot if there was one. (Four to eight
# sentences.)

# %% [markdown] written w2 3
# BEGIN SOLUTION
# The claim says $-3/8$, and $\log n$ adds $\log(\log 240/\log 60)/\log 4 = 0.21$ over these sizes,
# so up to $-0.165$ nothing is contradicted; a wholly broken hypothesis gives 0. The bound is
# $-0.16$. One near $-0.4$ would call it a failure where $\log n$ or scatter is at work; one near 0
# could not fail even at dial 1, whose exponent is 0. Sizes 60 to 240 give a factor of 4 and run in
# a minute or two; the dials are close where I predict the change. In a pilot with seeds 1000 to
# 1005 single exponents scattered by 0.03 to 0.06 about their mean (dials 0, 0.05, 0.1), so 24 seeds
# give intervals of about $\pm 0.03$ there, small against the 0.16 between the bound and 0. If the
# claim holds up to dial 1, it does not need Assumption 5 at these sizes, at least not against one
# large residue.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: the bound, with what goes wrong on either side
# - 1 point: sizes, dials and seeds with a reason (time, range, where the change is expected,
#   scatter); not "as in the example"
# - 1 point: an outcome that would speak against the hypothesis being needed. It must be possible
# - Typical for 1 of 3: "I took the bound in the middle and 16 seeds to be accurate". A rule that
#   mentions results of the measurement below was not there first: no point for the bound.
# END RUBRIC


# %%
def measure(make, dials, sizes, seeds):
    """For each dial the table (seeds x sizes) of the statistic of make(dial, n, seed)."""
    tables, begin = {}, time.time()
    for dial in dials:
        cases = ([as_tensors(make(dial, n, seed)) for n in sizes] for seed in range(seeds))
        rows = [[float(statistic(case)) for case in row] for row in cases]
        tables[dial] = torch.tensor(rows, dtype=torch.float64)
        if not torch.isfinite(tables[dial]).all():
            raise ValueError(f"a value at dial {dial:g} is NaN or infinite: look at that case")
        print(f"dial {dial:g}: {time.time() - begin:.0f} s")
    return tables


rule = plan()
tables = measure(setup, rule["dials"], rule["sizes"], rule["seeds"])


# %%
def judged(tables):
    """Mean, ends of the interval, and verdicts over the dials."""
    each = torch.tensor(rule["sizes"], dtype=torch.float64)
    found = [as_tensor(per_seed(t, each, KIND[rule["claim"]])) for t in tables.values()]
    numbers = torch.stack(found, dim=1)
    low, high = (as_tensor(end) for end in interval(numbers))
    dials = torch.tensor(rule["dials"], dtype=torch.float64)
    return numbers.mean(dim=0), low, high, decide(dials, low, high, rule["bound"])


middle, low, high, verdict = judged(tables)
n, numbers = rule["sizes"][-1], []
for dial in rule["dials"]:
    cases = [as_tensors(setup(dial, n, seed)) for seed in range(8)]
    numbers.append(np.mean([float(broken(case)) for case in cases]))
print(f"kept up to {verdict['kept']:g}, lost from {verdict['lost']:g}")
for dial, number, *row, word in zip(rule["dials"], numbers, middle, low, high, verdict["verdicts"]):
    row = map(float, row)
    print("  {:6g} (number {:.3g})  {:8.3g} [{:.3g}, {:.3g}]  {}".format(dial, number, *row, word))

# %% [markdown]
# The next cell draws a first figure. Change it as your report needs it.

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8))
places, colors = range(len(rule["dials"])), ("#0072B2", "#D55E00", "#009E73")
ends = torch.stack([middle - low, high - middle]).clamp(min=0)
axes[0].errorbar(places, middle, ends, fmt="o-", color=colors[0], capsize=3, label="dial")
axes[0].axhline(rule["bound"], color="black", ls=":", label="bound")
axes[0].set_xticks(places, [f"{dial:g}" for dial in rule["dials"]])
axes[0].set(xlabel="dial", ylabel=f"{KIND[rule['claim']]}, 95 % interval")
shown = [rule["dials"][k] for k in (0, len(rule["dials"]) // 2, -1)]
for dial, marker, color in zip(shown, "o^s", colors):
    medians = tables[dial].median(dim=0).values.abs().clamp(min=1e-17)
    axes[1].loglog(rule["sizes"], medians, marker + "-", color=color, label=f"dial {dial:g}")
axes[1].set_xticks(rule["sizes"], [f"{n:g}" for n in rule["sizes"]])
axes[1].set_xticks([], minor=True)
axes[1].set(xlabel="size n", ylabel="statistic (median over seeds)")
for axis in axes:
    axis.legend()
fig.tight_layout()
plt.show()

# %% [markdown]
# ## 7. The report
#
# **Question w3.** Write about a page (300 to 500 words) for somebody who knows the chapter and not
# your notebook.
# 1. *Claim and question*: the claim, the hypothesis, the number, the dial.
# 2. *Rule*: as fixed in w2. If you changed anything after seeing a result, say what, why, and what
#    the old rule would have said. That costs nothing; hiding it does.
# 3. *Result*: verdicts with numbers and intervals at every dial, the figure read in words, `kept`
#    and `lost` as a value of the *number* as well as of the dial; how it compares with your
#    prediction in w1.
# 4. *What it does not show*: at least two limits, one of them about size, and what you would
#    measure next to lift one.
#
# Numbers in the report must be those that your cells print.

# %% [markdown] written w3 9
# BEGIN SOLUTION
# **Claim and question.** Theorem 3.1 bounds the rest by $\|E\|/\|S_1\| \le O(\log n\;
# n^{-3/8})$ for $\nu = 1/8$, if no example carries more than its share of the residue. How large
# may one share be? The number is $h = \max_i r_i^2/\|r\|^2$; the dial $t$ gives one example about
# the share $t$ of $\|r\|^2$ and leaves data and weights as they are.
#
# **Rule.** As in w2: the exponent over $n = 60, 120, 240$, 24 seeds, 95 % interval; the claim holds
# if the interval lies at or below $-0.16$, fails if it lies above. Nothing was changed.
#
# **Result.** Holds at $t = 0$: $-0.50$ $[-0.54, -0.47]$; 0.02: $-0.45$ $[-0.49, -0.42]$; 0.05:
# $-0.34$ $[-0.38, -0.30]$; 0.1: $-0.25$ $[-0.29, -0.21]$. Undecided at 0.3: $-0.13$
# $[-0.17, -0.10]$. Fails at 1: $-0.01$ $[-0.03, 0.01]$. So the claim is kept up to a share
# $h = 0.14$ and lost at $h = 1$; at $h = 0.35$ the rule does not decide. There is no threshold: the
# left panel rises all the way, and already at $t = 0.05$ the exponent is far from that of $t = 0$,
# with intervals that do not meet. "Holds" therefore says that the bound is still met, not that the
# hypothesis did not matter. The prediction $p = 0$ at dial 1 is confirmed; half of the change is
# done near 0.1, not at 0.02 to 0.05 as guessed, so the constants are not alike.
#
# **What it does not show.** (1) Size: the verdict at a fixed share belongs to these sizes. The
# right panel bends at $t = 0.1$, and by the argument of w1 every fixed share must break the claim
# in the end; I would repeat $t = 0.02$ to 0.1 at $n = 240$ to 1920. (2) One large residue is one
# way to break Assumption 5. A tenth of the examples with ten times the residue would be another,
# and may cost nothing. (3) One activation and one $\nu$; for $\tanh$, whose $\|E\|$ is smaller, the
# same share should show earlier.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: claim, hypothesis, number and dial, so that a stranger understands the question
# - 1 point: the rule as in w2, or every change said openly with the old verdict
# - 3 points: results. One for verdicts that follow from the rule at every dial (undecided named
#   undecided), one for numbers with intervals, one for `kept` and `lost` in terms of the number
# - 1 point: the figure read: what changes along the dial, what the second panel adds
# - 1 point: compared with the prediction; a wrong prediction is said to be wrong and discussed
# - 2 points: limits. One for size (an exponent over a factor of 4, a fixed bound, which way it
#   would move for larger $n$; for an identity: one size is as good as another, but the size of the
#   error depends on the case), one for another with a next step (one way of breaking it of many,
#   one activation, one residue, one $\nu$, seeds shared by the dials)
# - Never for the verdict itself. Take 1 point off for numbers that no cell prints, and 1 for
#   "proves"
# - For comparison, what our own cases gave, blends or shares as in "If you are stuck" (32 to 128
#   examples or so, 8 to 40 seeds; other dials and ways give other numbers). Weights: exponent
#   $-0.25$ at dial 0, $-0.03$ at 0.1, $0.17$ at 0.2, about $0.24$ from 0.5 on. Tails ($t$ with
#   $1/t$ degrees of freedom, sizes 100 to 1600): $-0.09$, $0.05$ at 0.2, $0.20$ at 0.4, $0.34$ at
#   the end. Signs: $-0.49$, $-0.37$ at 0.1, $-0.06$ at 0.3, $0$ at 1. One-sign: level $10^{-16}$,
#   $0.006$ at 0.05, $0.07$ at 0.5, $0.6$ at 1, skewed, so that intervals are wide. Classes: $0.05$
#   at 0.1 to $1.1$ at 1. Centres: $0.012$ at 0.001, $0.12$ at 0.01 (ten times as much broken, ten
#   times as much wrong), $0.76$ at 0.1, and less at 1
# - A good report (8 to 9) reads like the model: "undecided at 0.3 (share 0.35): $-0.13$
#   $[-0.17, -0.10]$, the bound $-0.16$ is inside"; it says that a verdict at a fixed share belongs
#   to its sizes, and where the second panel bends. A middling one (5 to 6) has verdicts, but
#   gives the dial only and not the number, or says nothing of size. A poor one (2) says: "the
#   exponent rises with the dial, so the hypothesis is necessary", without interval or rule.
# END RUBRIC

# %% [markdown] further
# The control that tells the effect of the hypothesis from that of any disturbance: a sham dial (q8)
# and what it shows (w4).

# %% [markdown]
# ## 8. A sham dial
#
# If the claim fails as your dial turns, was it the hypothesis, or would any disturbance of that
# array have done the same? A *sham* dial disturbs the same array about as much and leaves the
# hypothesis as it was at dial 0. The claim must survive it.
#
# **Question q8.** Write `sham`, with the arguments of `setup`. At every dial the number must be as
# small as at dial 0 of `setup`, and the array must still be what its claim asks for; only the array
# in `TURNED` may change with the dial (for "classes" also `delta`). From dial 0 to dial 1 it must
# change by at least a quarter of its own length at dial 0 (for "centres", where that is 0 or can
# be, by at least 1). It may call `setup`.
#
# <details><summary>If you are stuck</summary>
#
# Which property of the array does the hypothesis ask for, and which does it leave free? Turn the
# free one: another array of the same kind drawn with another seed, the same values in another
# order, or a change that the conclusion's formulas cannot see.
#
# </details>


# %% answer q8
def sham(dial, n, seed):
    """A case disturbed as far as the dial says, in which every hypothesis still holds."""
    # BEGIN SOLUTION
    case = setup(0.0, n, seed)
    # The same disturbance spread over all examples: a new residue of the same kind.
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    other = 1 + torch.randn(n, generator=generator, dtype=torch.float64) / 2
    case["r"] = math.sqrt(1 - dial) * case["r"] + math.sqrt(dial) * other
    return case
    # END SOLUTION


# %% public q8
notebook = sham.__globals__
chosen = notebook.get("plan", lambda: None)()
assert isinstance(chosen, dict), "question q1 comes first: its plan must end with 'return {...}'"
claim, turned = chosen["claim"], notebook["TURNED"][chosen["claim"]]
cases = [ran("It is called as sham(0.5, 16, 3).", sham, dial, 16, 3) for dial in (0.0, 1.0)]
for case in cases:
    assert isinstance(case, dict), "sham gives no dictionary: does it end with 'return {...}'?"
start, end = (tensor(case[turned]).double() for case in cases)
least = 1.0 if claim == "centres" else float(start.norm()) / 4
change = float((end - start).norm())
hint = "the array to disturb is the one that setup's dial turns"
assert change >= least, f"{turned} changes by {change:.3g} only, {least:.3g} is needed: {hint}"


# %% hidden common
def sham_calls(rng, dials, count):
    first = int(rng.integers(1000))
    wanted = [each for dial in dials for each in drawn("sham", dial, count, first=first)]
    return [call("plan"), *wanted]


# %% hidden q8 1: the hypothesis stays
def calls(rng):
    return sham_calls(rng, (0.5, 1), SEEDS)


def check(calls, answers):
    claim = claim_of(answers[0])
    cases = [as_case(claim, answer) for answer in answers[1:]]
    for some in (cases[:SEEDS], cases[SEEDS:]):
        sound(claim, TURNED[claim], some)
        found = typical(claim, some)
        assert found <= intact(claim, N), f"the sham breaks the hypothesis: {found:.3g}"


# %% hidden q8 1: something is disturbed, and nothing else
def calls(rng):
    return sham_calls(rng, (0, 1), 4)


def check(calls, answers):
    claim = claim_of(answers[0])
    cases, name = [as_case(claim, answer) for answer in answers[1:]], TURNED[claim]
    for start, end in zip(cases[:4], cases[4:]):
        still(claim, [start, end])
        least = 1.0 if claim == "centres" else np.linalg.norm(start[name]) / 4
        change = np.linalg.norm(end[name] - start[name])
        assert change >= least - ROUNDING, f"{name} changes by {change:.3g} only"


# %% wrong q8 1: nothing is disturbed
def sham(dial, n, seed):
    return setup(0.0, n, seed)


# %% wrong q8 1: another array is disturbed
def sham(dial, n, seed):
    case = setup(0.0, n, seed)
    case["z"] = (1 - 2 * dial) * case["z"]
    return case


# %% wrong q8 1: the sham breaks the hypothesis
def sham(dial, n, seed):
    return setup(dial, n, seed)


# %% wrong q8 1: everything is drawn anew
def sham(dial, n, seed):
    return setup(0.0, n, seed + round(1000 * dial))


# %% [markdown]
# ### The experiment: a control
#
# The same measurement under the sham dial, with the rule that you fixed: the verdicts, the number,
# and how much the sham changes its array.

# %%
shams = measure(sham, rule["dials"], rule["sizes"], rule["seeds"])
middle, low, high, verdict = judged(shams)
n, name = rule["sizes"][-1], TURNED[rule["claim"]]
untouched = [as_tensor(sham(0, n, seed)[name]) for seed in range(8)]
length = np.mean([float(x.norm()) for x in untouched])
print(f"kept up to {verdict['kept']:g}; {name} has the length {length:.3g} (mean over 8 seeds)")
for dial, *row, word in zip(rule["dials"], middle, low, high, verdict["verdicts"]):
    cases = [as_tensors(sham(dial, n, seed)) for seed in range(8)]
    number = np.mean([float(broken(case)) for case in cases])
    ends = [case[name] for case in cases]
    change = np.mean([float((end - x).norm()) for end, x in zip(ends, untouched)])
    print("  {:6g}  {:8.3g} [{:.3g}, {:.3g}]  {}".format(dial, *map(float, row), word), end="; ")
    print(f"number {number:.3g}, {name} changes by {change:.3g}")

# %% [markdown]
# **Question w4.** A paragraph for your report. What does your sham dial do to its array, and why
# does it leave the hypothesis as it was? What did you expect of it before you ran the cell above,
# and which verdicts did it get? What follows for the claim, and what would follow if the claim had
# failed here, too? (Four to six sentences, with numbers.)

# %% [markdown] written w4 3
# BEGIN SOLUTION
# The sham blends the residue into another one that is spread as evenly: a new draw of $1 + \frac12
# g_i$. No example gets more than its share, so Assumption 5 holds as before. I expected "holds" at
# every sham dial. It changed $r$ by two thirds of its length and kept the number small: the claim
# holds at all six sham dials, with exponents from $-0.51$ to $-0.48$. So it is the concentration
# that breaks the claim, not any change of the residue. Had it failed here as well, nothing would
# follow about the hypothesis: any disturbance of $r$ would do.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: what the sham does to the array, why it leaves the hypothesis, what was expected
# - 1 point: its verdicts, with exponents or levels, the number, and how much the array changed
# - 1 point: what follows: an effect of the hypothesis, not of any disturbance (or: not shown, if
#   the sham failed). Ten seeds leave some sham dials undecided for "signs"
# END RUBRIC
