# %% assignment
# title = "Activations and regularisers"
# minutes = {q1=25, q2=35, q3=15, w1=30, q4=25, q5=40, w2=40, q6=30, q7=35, q8=25, w3=45}
# withheld = [
#     "lowgrad_utils.networks.Activation.mu",
#     "lowgrad_utils.networks.Activation.c",
#     "lowgrad_utils.networks.gaussian_mean",
#     "lowgrad_utils.third_spike.slope_moments",
#     "lowgrad_utils.third_spike.hidden_spike",
#     "lowgrad_utils.gradient_law.derivative_kernel",
#     "lowgrad_utils.gradient_law._coefficients",
#     "lowgrad_utils.gradient_law._jump_coefficients",
#     "lowgrad_utils.regularisation.jacobian_penalty_gradient",
#     "lowgrad_utils.regularisation.split_jacobian_penalty",
#     "lowgrad_utils.regularisation._curvatures",
#     "lowgrad_utils.experiments.jacobian.penalty_gradient_by_autograd",
#     "lowgrad_utils.experiments.spike_prediction.gaussian_moments",
#     "lowgrad_utils.experiments.spike_winner.expected_spikes",
#     "lowgrad_utils.experiments.filters.slope_share",
#     "lowgrad_utils.experiments.filters._slope_moments",
#     "lowgrad_utils.experiments.one_step.smoothed",
# ]

# %% [markdown]
# # Assignment: activations and regularisers
#
# Which spike of the gradient leads is not a property of the data alone. You derive what an
# activation, the scaling of the network and four regularisers do to the spikes, turn each
# derivation into a prediction, and measure where the prediction stops being true.
#
# **Learning goals.** Average slopes that jump; measure how far a slope is from a straight line,
# and say what follows for the data spike; carry a training run from one scaling to the other,
# regularisers included; compute what input noise does on average, and tell it from what one draw
# does. In the further questions: differentiate penalties on derivatives by hand and read spikes
# off the result; derive a threshold, test it, and find the reason where it fails.
#
# **You need** the chain rule, Gaussian integrals, singular values, some PyTorch. Read the chapters
# *The gradient and its pieces*, *ReLU and smooth activations*, *Mean field and NTK scaling*,
# *Weight decay*, *Input noise* and *The Jacobian penalty* first.
#
# **Notation.** Data $X = X_B + \zeta z q^\top$ of size $n \times d$ with examples $x_i$ as rows and
# a unit vector $q$; weights $W$ of size $m \times d$ with rows $w_j$, and $a \in \mathbb R^m$; the
# network $f(x) = \gamma\, a^\top \sigma(Wx)$ with preactivations $h_{ij} = w_j^\top x_i$; residues
# $r_i$, the derivatives of the loss of each example in $f(x_i)$. Its gradient in $W$, transposed
# to $d \times m$, is
#
# $$
# G = \frac{\gamma}{n} X^\top\big[(r a^\top) \circ \sigma'(XW^\top)\big] ,
# $$
#
# with $\circ$ for the entrywise product. With the mean slopes $\mu \in \mathbb R^m$ its pieces
# include the residue spike and the data spike,
#
# $$
# S_1 = \frac\gamma n\, X_B^\top r\,(a \circ \mu)^\top , \qquad
# S_2 = \frac{\gamma\zeta}{n}\, q\, z^\top\big[(r a^\top) \circ
# (\sigma'(XW^\top) - \mathbf 1 \mu^\top)\big] .
# $$
#
# All arrays are torch tensors in float64; `ACTIVATIONS[name]` has the functions `value`,
# `derivative` and `second_derivative`. The functions of `lowgrad_utils` that do a question's work
# are switched off in the grading: `mu` and `c` of an activation, `gaussian_mean`,
# `slope_moments` and the spike that is made of them, `gaussian_moments`, `slope_share`,
# `smoothed`, `derivative_kernel`, `expected_spikes`, `jacobian_penalty_gradient`,
# `split_jacobian_penalty`, `penalty_gradient_by_autograd`. All the rest may be used.

# %%
import math

import torch
from matplotlib import pyplot as plt

from lowgrad_utils import (
    ACTIVATIONS,
    TwoLayerNetwork,
    alignment,
    closed_form_gradient,
    sample_spiked_data,
    sample_targets,
)

# Colours that the colour-blind tell apart, and a marker with each.
COLOURS = plt.cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7"], marker=list("os^D"))
plt.rcParams["axes.prop_cycle"] = COLOURS

# %% [markdown]
# ## 1. A kink and where the preactivations lie
#
# A preactivation $h$ is $N(M, s^2)$ over the data. Without biases and with centred data $M = 0$;
# a bias moves it. Leaky ReLU is $\sigma(h) = h$ for $h > 0$ and $\delta h$ for $h \le 0$.
#
# **Question q1.** Write `two_slopes`: the mean slope $\mu = \mathbb E\,\sigma'(h)$, the *bend*
# $c = \partial\mu / \partial M$ (which is $\mathbb E\,\sigma''(h)$ wherever $\sigma''$ is a
# function), and the variance $v = \operatorname{Var} \sigma'(h)$, all in closed form. Each must be
# right to six digits, $v$ too, and also where nearly all preactivations lie on one side of the
# kink, such as $M = \pm 9s$. There $v$ is tiny but not 0: look at what your functions return.


# %% answer q1
def two_slopes(mean, s, delta):
    """The vectors mu, c and v of leaky ReLU, as a tuple.

    mean and s are vectors of the same length with the M and s of each preactivation; the leak
    delta is a number.
    """
    # BEGIN SOLUTION
    t = mean / s
    right, left = torch.erfc(-t / math.sqrt(2)) / 2, torch.erfc(t / math.sqrt(2)) / 2
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    return right + delta * left, (1 - delta) * density / s, (1 - delta) ** 2 * right * left
    # END SOLUTION


# %% public q1
mean, s = torch.tensor([0.0, 1.0, -0.5]).double(), torch.tensor([1.0, 2.0, 0.7]).double()
found = two_slopes(mean, s, 0.1)
assert isinstance(found, tuple | list) and len(found) == 3, "return the three vectors mu, c and v"
for name, value in zip(("mu", "c", "v"), found):
    shaped(name, value, 3)
hint = "With M = 0 half of the slopes are 1, the others delta."
close("mu for M = 0", found[0][0], 0.55, hint)
close("v for M = 0", found[2][0], 0.45**2, f"{hint} What is the variance of such a number?")
step = 1e-5
change = two_slopes(mean + step, s, 0.1)[0] - two_slopes(mean - step, s, 0.1)[0]
error = (found[1] - change / (2 * step)).abs().max()
hint = "It should be how fast your own mu changes with M (difference quotient, in float64)."
assert error < 1e-6, f"c is off by {error:.1e}. {hint}"
mean, s = torch.tensor([-2.0, 3.0]).double(), torch.tensor([0.5, 2.0]).double()
for value, wanted in zip(two_slopes(mean, s, 1.0), (1.0, 0.0, 0.0)):
    hint = "For delta = 1 the function is linear: its slope is 1, with no bend and no variance."
    assert (value - wanted).abs().max() < 1e-12, hint
far = torch.tensor([-9.0, 9.0]).double()
hint = (
    "In float64 1 - Phi(9) is 0, and so is torch.special.ndtr(-9.0); torch.erfc keeps its digits."
)
assert bool((two_slopes(far, torch.ones(2).double(), 0.1)[2] > 0).all()), f"v is 0 far out. {hint}"

# %% hidden common
SIGMA = lg.ACTIVATIONS


def part(answer, index, count):
    # Whoever stacks equal shapes into one tensor has answered, too.
    size = len(answer) if isinstance(answer, list) or np.ndim(answer) else 0
    assert size == count, f"a tuple of {count} results is needed"
    return answer[index]


def leaky_calls(rng, means):
    return [
        call("two_slopes", mean=s * means, s=s, delta=float(delta))
        for delta in (0.0, 0.3, -0.4)
        for s in [rng.uniform(0.2, 3, size=len(means))]
    ]


def tail(t):
    """P[g > t], with all its digits where it is tiny."""
    return np.array([math.erfc(x / math.sqrt(2)) / 2 for x in t])


# %% hidden q1 1: mean slope
def calls(rng):
    return leaky_calls(rng, rng.normal(size=7))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        x = c.arguments
        positive = tail(-x["mean"] / x["s"])
        expected = positive + x["delta"] * (1 - positive)
        near(part(answer, 0, 3), expected, tolerance=1e-6, name="mu")


# %% hidden q1 1: bend
def calls(rng):
    return leaky_calls(rng, rng.normal(size=7))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        x = c.arguments
        # Another way: the difference quotient of the mean slope.
        step = 1e-4 * x["s"]
        change = tail(-(x["mean"] + step) / x["s"]) - tail(-(x["mean"] - step) / x["s"])
        expected = (1 - x["delta"]) * change / (2 * step)
        near(part(answer, 1, 3), expected, tolerance=1e-6, name="c")


# %% hidden q1 1: variance
def calls(rng):
    return leaky_calls(rng, rng.normal(size=7))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        x = c.arguments
        positive = tail(-x["mean"] / x["s"])
        mu = positive + x["delta"] * (1 - positive)
        expected = positive * (1 - mu) ** 2 + (1 - positive) * (x["delta"] - mu) ** 2
        near(part(answer, 2, 3), expected, tolerance=1e-6, name="v")


# %% hidden q1 1: nearly all on one side
def calls(rng):
    return leaky_calls(rng, np.array([9.0])) + leaky_calls(rng, np.array([-9.0]))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        rare = tail([9.0])
        expected = (1 - c.arguments["delta"]) ** 2 * rare * (1 - rare)
        near(part(answer, 2, 3), expected, tolerance=1e-6, name="v far from the kink")


# %% wrong q1 1: one minus a number close to one
def two_slopes(mean, s, delta):
    t = mean / s
    right = torch.erfc(-t / math.sqrt(2)) / 2
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    mu = right + delta * (1 - right)
    return mu, (1 - delta) * density / s, (1 - delta) ** 2 * right * (1 - right)


# %% wrong q1 1: the density of g in place of that of h
def two_slopes(mean, s, delta):
    t = mean / s
    right, left = torch.erfc(-t / math.sqrt(2)) / 2, torch.erfc(t / math.sqrt(2)) / 2
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    return right + delta * left, (1 - delta) * density, (1 - delta) ** 2 * right * left


# %% wrong q1 4: as if the mean were zero
def two_slopes(mean, s, delta):
    half = torch.full_like(s, 0.5)
    bend = (1 - delta) / (s * math.sqrt(2 * math.pi))
    return (1 + delta) * half, bend, (1 - delta) ** 2 * half * half


# %% wrong q1 2: the second moment in place of the variance
def two_slopes(mean, s, delta):
    t = mean / s
    right, left = torch.erfc(-t / math.sqrt(2)) / 2, torch.erfc(t / math.sqrt(2)) / 2
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    return right + delta * left, (1 - delta) * density / s, right + delta**2 * left


# %% [markdown]
# ## 2. How straight is a slope?
#
# For any activation and $h \sim N(M, s^2)$ let $\mu + c\,(h - M)$ be the straight line closest to
# $\sigma'(h)$ in mean square. Then $\mu = \mathbb E\,\sigma'(h)$ and
# $c = \operatorname{Cov}(\sigma'(h), h)/s^2$. Integrate by parts to see that this $c$ is the bend
# of question 1. The *straight share* $c^2 s^2/\operatorname{Var}\sigma'(h)$, between 0 and 1, says
# how much of the slope's variance the line explains.
#
# **Question q2.** Write `slope_statistics` for all activations in `ACTIVATIONS`, ReLU included.
# Results must be right to six digits for smooth activations and to three for ReLU, whose slope
# jumps; random numbers are not accurate enough. The $s$ in the grading lie between $10^{-7}$ and 3,
# and for a tiny $s$ the slope hardly varies: do not let that little be lost in rounding.


# %% answer q2
def slope_statistics(activation, mean, s):
    """The vectors mu, c and straight share, as a tuple, for vectors mean and s of one length."""
    # BEGIN SOLUTION
    g = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
    weights = torch.exp(-g.square() / 2)
    weights = weights / weights.sum()
    slopes = ACTIVATIONS[activation].derivative(mean[:, None] + s[:, None] * g)
    mu = slopes @ weights
    rest = slopes - mu[:, None]
    along = rest @ (weights * g)
    return mu, along / s, along.square() / (rest.square() @ weights)
    # END SOLUTION


# %% public q2
mean, s = torch.tensor([0.4, -1.0]).double(), torch.tensor([0.5, 1.5]).double()
found = slope_statistics("erf", mean, s)
assert isinstance(found, tuple | list) and len(found) == 3, (
    "return the three vectors mu, c and straight share"
)
for name, value in zip(("mu", "c", "the share"), found):
    shaped(name, value, 2)
wide = 1 + 2 * s**2
mu = 2 / torch.sqrt(math.pi * wide) * torch.exp(-(mean**2) / wide)
hint = "For erf, mu = 2 exp(-M^2/(1+2s^2)) / sqrt(pi (1+2s^2)): is M in it, is the density's sum 1?"
assert torch.allclose(found[0], mu, rtol=1e-6), hint
hint = "For erf, c = -2 M mu / (1 + 2 s^2): check it against the covariance with h, over s^2."
assert torch.allclose(found[1], -2 * mean * mu / wide, rtol=1e-6), hint
share = found[2]
hint = "A share of a variance lies between 0 and 1."
assert bool((share >= 0).all() and (share <= 1 + 1e-9).all()), hint
mean, s = torch.tensor([0.3]).double(), torch.tensor([0.8]).double()
c = slope_statistics("relu", mean, s)[1]
density = torch.exp(-((mean / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi))
hint = (
    "For ReLU it is the density of h at the kink. Zero means that you averaged second_derivative, "
    "which does not see the jump; a small error that the grid is too coarse for a jump."
)
assert abs(c - density) < 1e-3 * density, hint

# %% hidden common
NODES, LEGENDRE = np.polynomial.legendre.leggauss(300)


def statistics(activation, mean, s):
    """mu, c and variance for smooth slopes by Gauss and Legendre, for ReLU in closed form."""
    if activation == "relu":
        t = mean / s
        positive = tail(-t)
        c = np.exp(-(t**2) / 2) / (s * math.sqrt(2 * math.pi))
        return positive, c, positive * (1 - positive)
    g = 10 * NODES
    weights = 10 * LEGENDRE * np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
    values = SIGMA[activation].derivative(torch.as_tensor(mean[:, None] + s[:, None] * g)).numpy()
    mu = values @ weights
    rest = values - mu[:, None]
    return mu, rest @ (weights * g) / s, rest**2 @ weights


def statistics_calls(rng, names):
    return [
        call(
            "slope_statistics",
            activation=name,
            mean=rng.uniform(0.3, 1.5, size=5) * rng.choice([-1, 1], size=5),
            s=rng.uniform(0.4, 2, size=5),
        )
        for name in names
    ]


# %% hidden q2 1: mean and bend of smooth activations
def calls(rng):
    centred = [
        call("slope_statistics", activation=name, mean=np.zeros(3), s=rng.uniform(0.3, 3, size=3))
        for name in ("tanh", "sigmoid", "silu")
    ]
    return centred + statistics_calls(rng, ("tanh", "softplus", "gelu"))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        mu, bend, _ = statistics(**c.arguments)
        near(part(answer, 0, 3), mu, tolerance=2e-6, name="mu")
        # Where sigma'' is odd the centred bend is zero: an error is measured by 1/s.
        found = array(part(answer, 1, 3), bend.shape, name="c")
        assert np.abs(found - bend).max() < 2e-6, f"c is off by {np.abs(found - bend).max():.1e}"


# %% hidden q2 1: straight share of smooth activations
def calls(rng):
    return statistics_calls(rng, ("tanh", "sigmoid", "softplus", "silu"))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        _, bend, variance = statistics(**c.arguments)
        expected = (bend * c.arguments["s"]) ** 2 / variance
        near(part(answer, 2, 3), expected, tolerance=1e-5, name="the straight share")


# %% hidden q2 1: a slope that jumps
def calls(rng):
    return statistics_calls(rng, ("relu",))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        _, bend, variance = statistics(**c.arguments)
        near(part(answer, 1, 3), bend, tolerance=1e-3, name="ReLU's c")
        expected = (bend * c.arguments["s"]) ** 2 / variance
        near(part(answer, 2, 3), expected, tolerance=1e-3, name="ReLU's straight share")


# %% hidden q2 1: tiny preactivations
def calls(rng):
    return [
        call(
            "slope_statistics",
            activation=name,
            mean=rng.uniform(0.2, 1, size=4),
            s=rng.uniform(1e-7, 3e-7, size=4),
        )
        for name in ("softplus", "tanh", "gelu")
    ]


def check(calls, answers):
    for answer in answers:
        near(part(answer, 2, 3), np.ones(4), tolerance=1e-5, name="the share at tiny s")


# %% wrong q2 1: a difference of two second moments
def slope_statistics(activation, mean, s):
    g = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
    weights = torch.exp(-g.square() / 2)
    weights = weights / weights.sum()
    slopes = ACTIVATIONS[activation].derivative(mean[:, None] + s[:, None] * g)
    mu, along = slopes @ weights, slopes @ (weights * g)
    return mu, along / s, along.square() / (slopes.square() @ weights - mu.square())


# %% wrong q2 1: the mean of the second derivative, which misses a jump
def slope_statistics(activation, mean, s):
    g = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    weights = torch.exp(-g.square() / 2)
    weights = weights / weights.sum()
    h = mean[:, None] + s[:, None] * g
    slopes = ACTIVATIONS[activation].derivative(h)
    mu, c = slopes @ weights, ACTIVATIONS[activation].second_derivative(h) @ weights
    return mu, c, (c * s) ** 2 / ((slopes - mu[:, None]).square() @ weights)


# %% wrong q2 4: as if the mean were zero
def slope_statistics(activation, mean, s):
    g = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
    weights = torch.exp(-g.square() / 2)
    weights = weights / weights.sum()
    slopes = ACTIVATIONS[activation].derivative(s[:, None] * g)
    mu = slopes @ weights
    rest = slopes - mu[:, None]
    along = rest @ (weights * g)
    return mu, along / s, along.square() / (rest.square() @ weights)


# %% wrong q2 4: random numbers
def slope_statistics(activation, mean, s):
    g = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slopes = ACTIVATIONS[activation].derivative(mean[:, None] + s[:, None] * g)
    mu = slopes.mean(dim=1)
    rest = slopes - mu[:, None]
    along = (rest * g).mean(dim=1)
    return mu, along / s, along.square() / rest.square().mean(dim=1)


# %% [markdown]
# ## 3. The data spike as straight lines make it
#
# Replace the slopes in $S_2$ by their lines: with a bias the same for all examples and data of mean
# zero that means $\sigma'(h_{ij}) - \mu_j \approx c_j\, w_j^\top x_i$. Then $S_2$ becomes
# $q\,v^\top$.
#
# **Question q3.** Write `straight_spike`, which returns $v$. It must not form an $n \times m$
# matrix: the grading has $n = m = 16\,000$.


# %% answer q3
def straight_spike(X, z, zeta, W, a, gamma, r, c):
    """The vector v, length m, for X (n x d), z and r (n), W (m x d), a and c (m)."""
    # BEGIN SOLUTION
    return gamma * zeta / len(X) * a * c * (W @ (X.T @ (z * r)))
    # END SOLUTION


# %% public q3
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]]).double()
W = torch.tensor([[0.1, 0.2, 0.3], [0.0, -0.5, 0.4], [1.0, 0.0, 0.0], [0.3, 0.3, -0.3]]).double()
a, c = torch.tensor([1.0, -1.0, 2.0, -1.0]).double(), torch.tensor([0.3, 0.2, -0.1, 0.4]).double()
z, r = torch.tensor([0.5, -1.5]).double(), torch.tensor([0.7, -0.2]).double()
v = straight_spike(X, z, 2.0, W, a, 0.5, r, c)
shaped("v", v, 4)
hint = "The residue enters once: twice the residue gives twice the spike."
close("v for the residue 2r", straight_spike(X, z, 2.0, W, a, 0.5, 2 * r, c), 2 * v, hint)
hint = "Entry j is a sum over i of gamma zeta / n * z_i r_i a_j times the line's value."
entry = 0.5 * 2.0 / 2 * 2.0 * -0.1 * (0.5 * 0.7 * 1.0 + 1.5 * 0.2 * 0.5)
close("v[2]", v[2], entry, hint)


# %% hidden common
def straight_case(rng, n, d, m):
    z = rng.normal(size=n)
    return {
        "X": rng.normal(size=(n, d)) + 2 * np.outer(z, rng.normal(size=d)) / math.sqrt(d),
        "z": z,
        "zeta": float(rng.uniform(1, 4)),
        "W": rng.normal(size=(m, d)),
        "a": rng.normal(size=m),
        "gamma": float(rng.uniform(0.1, 0.9)),
        "r": rng.normal(size=n),
        "c": rng.normal(size=m),
    }


def straight(X, z, zeta, W, a, gamma, r, c):
    # Another way: every line is written out.
    lines = (X @ W.T) * c
    return gamma * zeta / len(X) * z @ (np.outer(r, a) * lines)


def check_direction(v, expected):
    value = array(v, expected.shape, name="v")
    cosine = value @ expected / (np.linalg.norm(value) * np.linalg.norm(expected) + 1e-300)
    assert cosine > 1 - 1e-9, f"v is at a cosine of {cosine:.4f} to what it should be"


# %% hidden q3 1: direction
def calls(rng):
    return [call("straight_spike", **straight_case(rng, *s)) for s in ((6, 4, 9), (9, 12, 5))]


def check(calls, answers):
    for c, v in zip(calls, answers):
        check_direction(v, straight(**c.arguments))


# %% hidden q3 1: size
def calls(rng):
    return [call("straight_spike", **straight_case(rng, *s)) for s in ((6, 4, 9), (9, 12, 5))]


def check(calls, answers):
    for c, v in zip(calls, answers):
        expected = straight(**c.arguments)
        ratio = np.linalg.norm(array(v, expected.shape, name="v")) / np.linalg.norm(expected)
        assert abs(ratio - 1) < 1e-8, f"|v| is {ratio:.4g} times what it should be"


# %% hidden q3 1: no n x m matrix
def calls(rng):
    return [call("straight_spike", **straight_case(rng, 16_000, 3, 16_000))]


def check(calls, answers):
    x = calls[0].arguments
    total = sum(z * r * row for z, r, row in zip(x["z"], x["r"], x["X"]))
    expected = x["a"] * x["c"] * (x["W"] @ total)
    check_direction(answers[0], expected)


# %% wrong q3 1: the matrix of lines is formed
def straight_spike(X, z, zeta, W, a, gamma, r, c):
    return gamma * zeta / len(X) * ((z * r) @ (X @ W.T)) * a * c


# %% wrong q3 3: the spike's component forgotten
def straight_spike(X, z, zeta, W, a, gamma, r, c):
    return gamma * zeta / len(X) * a * c * (W @ (X.T @ r))


# %% wrong q3 1: no average over the examples
def straight_spike(X, z, zeta, W, a, gamma, r, c):
    return gamma * zeta * a * c * (W @ (X.T @ (z * r)))


# %% [markdown]
# ### The experiment: a bias
#
# The chapters have no biases. Here all neurons get the same one, $h = XW^\top + b$, and a residue
# with mean 1. The left panel shows the straight share, the right one $\|S_2\|/\|S_1\|$: markers are
# measured from the slopes themselves, lines come from `straight_spike`.


# %%
def bias_experiment(activation, bias, seed, d=200, nu=0.25):
    """Straight share, and |S2|/|S1| as measured and from straight lines."""
    data = sample_spiked_data(round(0.75 * d), d, nu=nu, seed=seed)
    network = TwoLayerNetwork.random(d, round(1.25 * d), seed=seed)
    W, a, gamma = network.W, network.a, network.gamma
    stream = torch.Generator().manual_seed(seed)
    r = 1 + 0.5 * torch.randn(data.n, generator=stream, dtype=torch.float64)
    s = data.preactivation_scale(W).mean()[None]
    mu, c, share = slope_statistics(activation, torch.full_like(s, bias), s)
    S1 = gamma / data.n * data.bulk_times(r).norm() * mu * math.sqrt(network.m)
    rest = ACTIVATIONS[activation].derivative(data.X @ W.T + bias) - mu
    S2 = gamma * data.zeta / data.n * (rest.T @ (data.z * r)).norm()
    line = straight_spike(data.X, data.z, data.zeta, W, a, gamma, r, c.expand(network.m))
    return [float(x) for x in (share, S2 / S1, line.norm() / S1)]


# %%
biases = torch.linspace(0, 2.5, 6).tolist()
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8))
for name, style in zip(("tanh", "sigmoid", "softplus", "relu"), COLOURS):
    rows = [[bias_experiment(name, b, seed) for seed in range(3)] for b in biases]
    share, measured, line = torch.tensor(rows).mean(dim=1).T
    axes[0].plot(biases, share, **style, label=name)
    axes[1].plot(biases, measured, **style, ls="", label=name)
    axes[1].plot(biases, line, color=style["color"], marker="")
    print(name, "measured:", [round(x, 2) for x in measured.tolist()])
    print(name, "straight lines:", [round(x, 2) for x in line.tolist()])
axes[0].set(xlabel="bias b", ylabel="straight share of the slope's variance", ylim=(-0.03, 1.03))
axes[1].set(xlabel="bias b", ylabel="‖S₂‖ / ‖S₁‖")
axes[0].legend(fontsize=8, loc="lower center", ncols=2)
axes[1].legend(fontsize=8, title="markers: measured, lines: straight slopes", ncols=2)
fig.tight_layout()
plt.show()

# %% [markdown]
# **Question w1.** The chapters say that $\tanh$ and sigmoid have hardly any data spike because
# their $\sigma''$ is odd. (a) What happens to this statement when there is a bias, and why does a
# bias do the opposite to ReLU and softplus? (b) Where do measurement and straight lines agree,
# where do they part, and what does the straight share have to do with it? (c) Without a bias,
# compute ReLU's straight share with a pencil, and say why it does not depend on $s$, while that of
# softplus tends to 1 as $s \to 0$. (Six to nine sentences.)

# %% [markdown] written w1 4
# BEGIN SOLUTION
# (a) It needs preactivations centred at 0. $\sigma'$ of $\tanh$ and sigmoid is even, so its line is
# flat there: $c = 0$. A bias moves the preactivations to the flank of $\sigma'$, where it is
# steep; $c$ grows while $\mu$, and with it $S_1$, falls: at $b = 2$ the ratio is 0.84 for $\tanh$,
# more than ReLU's 0.58 without a bias. ReLU and softplus have their largest bend at 0, and a bias
# moves away from it while $\mu$ tends to 1: ReLU falls from 0.58 to 0.03 at $b = 2.5$.
# (b) They agree to a few hundredths nearly everywhere, even where the share is no more than a
# quarter ($\tanh$ at $b = 0.5$: 0.23 against 0.22). The line's part of $S_2$ adds up over the
# examples, while what no line explains adds up like independent noise, as a root. They part where
# the share is close to 0 and only the noise is left: $\tanh$ and sigmoid without a bias (0.13 and
# 0.06 against 0), ReLU with a large one (0.03 against 0.02).
# (c) $c^2 s^2 = \frac1{2\pi}$ and the variance is $\frac14$, so the share is $2/\pi = 0.64$. ReLU's
# slope is that of $h/s$: scaling changes nothing. Softplus is smooth, so in a small range of
# preactivations its slope is a straight line, with $c \to \frac14$.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: even slopes have $c = 0$ only for centred preactivations; a bias makes $c \ne 0$
# - 1 point: why ReLU and softplus lose: less bend away from 0, larger $\mu$
# - 1 point: excess of the measured value where the share is near 0, the rest being like noise
# - 1 point: $2/\pi$, with homogeneity for ReLU and smoothness for softplus
# END RUBRIC

# %% [markdown]
# ## 4. The same run under another scaling
#
# Under mean-field scaling $\gamma = 1/m$, under NTK scaling $\gamma = 1/\sqrt m$. The chapter on
# scaling shows for the squared loss $\frac1{2n}\sum_i (f(x_i) - y_i)^2$ that one is the other with
# other targets and another step. Now add two regularisers: weight decay
# $\frac\lambda2\|W\|_F^2$ and the Jacobian penalty
# $\frac{\kappa}{2n}\sum_i \|\partial f(x_i)/\partial W\|_F^2$. A step of gradient descent replaces
# $W$ by $W - \eta D$, with $D$ the gradient in $W$ of the sum of all three; $a$ is not trained.
#
# **Question q4.** A mean-field run has targets $y$, strengths $\lambda$ and $\kappa$, step $\eta$.
# An NTK run with the same data, $W$ and $a$ has targets $t\,y$, strengths $\lambda'$ and $\kappa'$,
# step $\eta'$. Write `ntk_twin`, which returns the four numbers for which both runs pass through
# the same weights, for all data, weights and $m$.


# %% answer q4
def ntk_twin(m, decay, jacobian, step):
    """t, lambda', kappa' and eta' as a tuple, for m neurons, lambda, kappa and eta."""
    # BEGIN SOLUTION
    return math.sqrt(m), m * decay, jacobian, step / m
    # END SOLUTION


# %% public q4
def total_step(twin, m, decay, jacobian):
    """Largest difference of the weights after one step of both runs, over the step's length."""
    stream = torch.Generator().manual_seed(0)
    X, W, y = (torch.randn(k, 3, generator=stream).double() for k in (5, m, 5))
    a, y = torch.linspace(-1, 1.5, m).double(), y[:, 0]
    ends = []
    for gamma, (t, lam, kappa, step) in (
        (1 / m, (1.0, decay, jacobian, 0.7)),
        (m**-0.5, twin(m, decay, jacobian, 0.7)),
    ):
        V = W.clone().requires_grad_()
        h = torch.tanh(X @ V.T)
        norms = ((X**2).sum(dim=1) * ((1 - h**2) ** 2 @ a**2)).sum() * gamma**2
        error = (gamma * h @ a - t * y).square().sum()
        total = error / 10 + lam / 2 * V.square().sum() + kappa / 10 * norms
        ends.append(step * torch.autograd.grad(total, V)[0])
    return float((ends[0] - ends[1]).abs().max() / ends[0].abs().max())


found = ntk_twin(7, 0.2, 0.3, 0.5)
assert isinstance(found, tuple | list) and len(found) == 4, "return t, lambda', kappa' and eta'"
hint = "Both strengths are 0 here: is f - y of one run a multiple of that of the other?"
gap = total_step(ntk_twin, 7, 0.0, 0.0)
assert gap < 1e-6, f"the steps differ by {gap:.1e} of their length. {hint}"
hint = "Only decay is on: how many factors gamma has the loss's gradient, how many has lambda W?"
gap = total_step(ntk_twin, 7, 0.2, 0.0)
assert gap < 1e-6, f"the steps differ by {gap:.1e} of their length. {hint}"
hint = "Only the Jacobian penalty is on: count its factors gamma."
gap = total_step(ntk_twin, 7, 0.0, 0.3)
assert gap < 1e-6, f"the steps differ by {gap:.1e} of their length. {hint}"


# %% hidden common
def twin_calls(rng):
    return [
        call(
            "ntk_twin",
            m=int(m),
            decay=float(rng.uniform(0.1, 1)),
            jacobian=float(rng.uniform(0.1, 1)),
            step=float(rng.uniform(0.1, 1)),
        )
        for m in rng.choice(np.arange(4, 40), size=3, replace=False)
    ]


def run_parts(X, y, W, a, gamma):
    """Outputs, and the gradients in W of loss, decay and Jacobian penalty, flattened."""
    V = torch.as_tensor(W).requires_grad_()
    X, y, a = (torch.as_tensor(each) for each in (X, y, a))
    h = X @ V.T
    f = gamma * torch.tanh(h) @ a
    slopes = 1 - torch.tanh(h) ** 2
    penalty = gamma**2 * (X.square().sum(dim=1) @ (slopes**2 @ a**2)) / (2 * len(X))
    parts = ((f - y).square().sum() / (2 * len(X)), V.square().sum() / 2, penalty)
    grads = [torch.autograd.grad(p, V, retain_graph=True)[0].flatten().numpy() for p in parts]
    return f.detach().numpy(), grads


def twin(m, decay, jacobian, step):
    """t, lambda', kappa', eta' by least squares on the gradients of one random problem."""
    rng = np.random.default_rng(m)
    X, W = rng.normal(size=(9, 4)), rng.normal(size=(m, 4))
    a, y = rng.normal(size=m), rng.normal(size=9)
    f, parts = run_parts(X, y, W, a, 1 / m)
    other, _ = run_parts(X, y, W, a, m**-0.5)
    t = np.linalg.norm(other) / np.linalg.norm(f)
    _, others = run_parts(X, t * y, W, a, m**-0.5)
    wanted = step * (parts[0] + decay * parts[1] + jacobian * parts[2])
    factors = np.linalg.lstsq(np.stack(others, axis=1), wanted, rcond=None)[0]
    return t, factors[1] / factors[0], factors[2] / factors[0], factors[0]


def twin_part(index, calls, answers):
    for c, answer in zip(calls, answers):
        name = ("t", "lambda'", "kappa'", "eta'")[index]
        expected = twin(**c.arguments)[index]
        near(part(answer, index, 4), expected, tolerance=1e-7, name=name)


# %% hidden q4 1: targets
def calls(rng):
    return twin_calls(rng)


def check(calls, answers):
    twin_part(0, calls, answers)


# %% hidden q4 1: decay
def calls(rng):
    return twin_calls(rng)


def check(calls, answers):
    twin_part(1, calls, answers)


# %% hidden q4 1: Jacobian penalty
def calls(rng):
    return twin_calls(rng)


def check(calls, answers):
    twin_part(2, calls, answers)


# %% hidden q4 1: step
def calls(rng):
    return twin_calls(rng)


def check(calls, answers):
    twin_part(3, calls, answers)


# %% wrong q4 1: strengths kept
def ntk_twin(m, decay, jacobian, step):
    return math.sqrt(m), decay, jacobian, step / m


# %% wrong q4 2: the factor m on both strengths, and the step of one factor gamma
def ntk_twin(m, decay, jacobian, step):
    return math.sqrt(m), m * decay, m * jacobian, step / math.sqrt(m)


# %% wrong q4 4: exchanged
def ntk_twin(m, decay, jacobian, step):
    return 1 / math.sqrt(m), decay / m, jacobian / m, step * m


# %% wrong q4 2: targets kept
def ntk_twin(m, decay, jacobian, step):
    return 1.0, math.sqrt(m) * decay, jacobian, step / m


# %% [markdown]
# ## 5. Input noise, on average
#
# Training with input noise draws $x_i' = x_i + \tau \xi_i$ with $\xi_i \sim N(0, I)$ anew in every
# step. What does the average step see? Keep the residue $r$ fixed, take ReLU, and average the
# gradient over the noise:
#
# $$
# \mathbb E\, G' = \frac\gamma n \sum_i r_i\, \mathbb E\Big[(x_i + \tau\xi_i)\,
# \big(a \circ \sigma'(W(x_i + \tau \xi_i))\big)^\top\Big] .
# $$
#
# The factor $x_i + \tau\xi_i$ has two terms, and so has the average: *smoothed* comes from $x_i$,
# *pull* from $\tau\xi_i$.
#
# **Question q5.** Write `expected_gradient` in closed form. Rows of $W$ may have any length
# $\|w_j\| > 0$, and $\tau$ may be 0. The experiment below has $n = 180$ and $m = 300$, too many
# pairs for a loop. ($\Phi$, the distribution function of $N(0, 1)$, is `torch.special.ndtr`. For
# the second term: which part of $\xi_i$ does the slope depend on?)


# %% answer q5
def expected_gradient(X, W, a, gamma, r, tau):
    """The pair (smoothed, pull), each d x m; their sum is the mean of the noisy gradient."""
    # BEGIN SOLUTION
    lengths = W.norm(dim=1)
    h = X @ W.T
    # Far enough out nothing changes any more, and tau = 0 needs no branch of its own.
    t = h / (tau * lengths).clamp(min=1e-150)
    scale = gamma / len(X)
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    pull = W.T * (scale * tau * a / lengths * (r @ density))
    return scale * X.T @ (r[:, None] * torch.special.ndtr(t) * a), pull
    # END SOLUTION


# %% public q5
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]]).double()
W = torch.tensor([[0.1, 0.2, 0.3], [0.0, -0.5, 0.4], [1.0, 0.0, 0.0], [0.3, 0.3, -0.3]]).double()
a, r = torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), torch.tensor([0.7, -0.2]).double()
found = expected_gradient(X, W, a, 0.5, r, 0.6)
assert isinstance(found, tuple | list) and len(found) == 2, "return the pair (smoothed, pull)"
for name, value in zip(("smoothed", "pull"), found):
    shaped(name, value, 3, 4)
for j in range(4):
    column = found[1][:, j]
    off = (column - (column @ W[j]) * W[j] / (W[j] @ W[j])).norm() / (column.norm() + 1e-300)
    hint = (
        "The slope of neuron j depends on the noise along w_j alone: what is the mean of the rest?"
    )
    assert off < 1e-9, f"column {j} of pull is not along w_{j}. {hint}"
X, r = torch.tensor([[0.3, -0.2]]).double(), torch.tensor([1.0]).double()
W, a = torch.tensor([[0.6, 1.1]]).double(), torch.tensor([1.0]).double()
noise = torch.randn(400_000, 2, generator=torch.Generator().manual_seed(0)).double()
active = ((X + 0.5 * noise) @ W.T > 0).double()
hints = (
    "It is x times the share of noise draws that switch the neuron on.",
    "It is the mean of tau xi over the draws that switch the neuron on: integrate by parts.",
)
draws = (X[0] * active.mean(), 0.5 * (noise * active).mean(dim=0))
found = expected_gradient(X, W, a, 1.0, r, 0.5)
for name, value, mean, hint in zip(("smoothed", "pull"), found, draws, hints):
    error = (value[:, 0] - mean).abs().max()
    assert error < 4e-3, f"{name} is off by {error:.1e} from the mean of 400 000 draws. {hint}"


# %% hidden common
def noise_case(rng, tau, unit=False):
    n, d, m = (int(size) for size in rng.integers(3, 9, size=3))
    W = rng.normal(size=(m, d))
    lengths = np.linalg.norm(W, axis=1, keepdims=True)
    return {
        "X": rng.normal(size=(n, d)),
        "W": W / lengths if unit else W / lengths * rng.uniform(0.3, 3, size=(m, 1)),
        "a": rng.normal(size=m),
        "gamma": float(rng.uniform(0.2, 0.9)),
        "r": rng.normal(size=n),
        "tau": float(tau),
    }


def noisy_means(X, W, a, gamma, r, tau):
    """Both terms, example by example and neuron by neuron, by quadrature from the kink on."""
    nodes, weights = NODES, LEGENDRE
    smoothed, pull = np.zeros((2, X.shape[1], len(W)))
    for i, x in enumerate(X):
        for j, w in enumerate(W):
            length = np.linalg.norm(w)
            # The neuron is active where g, the noise along w_j, exceeds this.
            kink = np.clip(-(w @ x) / (tau * length), -12, 12)
            g = kink + (12 - kink) * (nodes + 1) / 2
            density = np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi) * weights * (12 - kink) / 2
            factor = gamma / len(X) * r[i] * a[j]
            smoothed[:, j] += factor * x * density.sum()
            pull[:, j] += factor * tau * (w / length) * (g @ density)
    return smoothed, pull


# %% hidden q5 1: smoothed slopes, unit rows
def calls(rng):
    return [call("expected_gradient", **noise_case(rng, tau, True)) for tau in (0.2, 1.0, 5.0)]


def check(calls, answers):
    for c, answer in zip(calls, answers):
        near(part(answer, 0, 2), noisy_means(**c.arguments)[0], name="smoothed")


# %% hidden q5 1: pull, unit rows
def calls(rng):
    return [call("expected_gradient", **noise_case(rng, tau, True)) for tau in (0.2, 1.0, 5.0)]


def check(calls, answers):
    for c, answer in zip(calls, answers):
        near(part(answer, 1, 2), noisy_means(**c.arguments)[1], name="pull")


# %% hidden q5 1: rows of any length
def calls(rng):
    return [call("expected_gradient", **noise_case(rng, tau)) for tau in (0.3, 2.0)]


def check(calls, answers):
    for c, answer in zip(calls, answers):
        smoothed, pull = noisy_means(**c.arguments)
        near(part(answer, 0, 2), smoothed, name="smoothed")
        near(part(answer, 1, 2), pull, name="pull")


# %% hidden q5 1: no noise
def calls(rng):
    return [call("expected_gradient", **noise_case(rng, 0.0, True)) for _ in range(2)]


def check(calls, answers):
    for c, answer in zip(calls, answers):
        x = c.arguments
        W = torch.as_tensor(x["W"]).requires_grad_()
        f = x["gamma"] * torch.relu(torch.as_tensor(x["X"]) @ W.T) @ torch.as_tensor(x["a"])
        total = (torch.as_tensor(x["r"]) * f).sum() / len(x["X"])
        near(part(answer, 0, 2), torch.autograd.grad(total, W)[0].T, name="smoothed without noise")
        pull = array(part(answer, 1, 2), W.shape[::-1], name="pull without noise")
        assert np.abs(pull).max() < 1e-12, "there is a pull without noise"


# %% wrong q5 1: rows taken for unit rows
def expected_gradient(X, W, a, gamma, r, tau):
    t = X @ W.T / max(tau, 1e-150)
    scale = gamma / len(X)
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    pull = W.T * (scale * tau * a * (r @ density))
    return scale * X.T @ (r[:, None] * torch.special.ndtr(t) * a), pull


# %% wrong q5 1: division by zero without noise
def expected_gradient(X, W, a, gamma, r, tau):
    lengths = W.norm(dim=1)
    t = X @ W.T / (tau * lengths)
    scale = gamma / len(X)
    bends = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi) / (tau * lengths)
    pull = tau**2 * W.T * (scale * a * (r @ bends))
    return scale * X.T @ (r[:, None] * torch.special.ndtr(t) * a), pull


# %% wrong q5 2: noise and slope taken for independent
def expected_gradient(X, W, a, gamma, r, tau):
    t = X @ W.T / (tau * W.norm(dim=1)).clamp(min=1e-150)
    smoothed = gamma / len(X) * X.T @ (r[:, None] * torch.special.ndtr(t) * a)
    return smoothed, 0 * smoothed


# %% wrong q5 3: the noise does not reach the slopes
def expected_gradient(X, W, a, gamma, r, tau):
    slopes = (X @ W.T > 0).double()
    smoothed = gamma / len(X) * X.T @ (r[:, None] * slopes * a)
    return smoothed, 0 * smoothed


# %% [markdown]
# ### The experiment: one draw, a few, all
#
# Data with a steep bulk, on which ReLU buries the residue spike, as in the chapter on input noise.
# The residue is that of the network itself without its part along $z$, so that $S_{12} = 0$, and
# it stays fixed; rows of $W$ have length one. The figure shows how well the leading left singular
# vector is aligned with the *clean* direction $X_B^\top r$: for one draw of the noise, for the mean
# of 16 draws, and for your mean over all.


# %%
def leading(G):
    """The leading left singular vector of G."""
    return torch.linalg.eigh(G @ G.T).eigenvectors[:, -1]


def noise_setting(seed, d=240, nu=1 / 8, alpha=8 / 9):
    data = sample_spiked_data(round(0.75 * d), d, nu=nu, alpha=alpha, seed=seed)
    network = TwoLayerNetwork.random(d, round(1.25 * d), activation="relu", seed=seed)
    r = network(data.X) - sample_targets(data.X, seed=seed).y
    return data, network, r - data.z * (data.z @ r) / (data.z @ data.z)


def noise_experiment(tau, seed, draws=16):
    """Alignments with the clean X_B^T r: one draw, the mean of several, the mean over all."""
    data, network, r = noise_setting(seed)
    stream = torch.Generator().manual_seed(seed)
    noisy = []
    for _ in range(draws):
        noise = torch.randn(data.X.shape, generator=stream, dtype=torch.float64)
        noisy.append(closed_form_gradient(data.X + tau * noise, network, r))
    mean = sum(expected_gradient(data.X, network.W, network.a, network.gamma, r, tau))
    clean = data.bulk_times(r)
    return [alignment(leading(G), clean) for G in (noisy[0], sum(noisy) / draws, mean)]


# %%
taus = [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 10.0]
table = torch.tensor([[noise_experiment(tau, seed) for tau in taus] for seed in range(3)])
fig, axis = plt.subplots(figsize=(6.6, 3.8))
labels = ("one draw", "mean of 16 draws", "mean over all draws (yours)")
for values, label, style in zip(table.median(dim=0).values.T, labels, COLOURS):
    axis.semilogx(taus, values, **style, label=label)
    print(f"{label}: {[round(x, 2) for x in values.tolist()]}")
axis.set(xlabel="size of the noise τ", ylabel="alignment of u₁ with the clean X_Bᵀr")
axis.legend()
fig.tight_layout()
plt.show()
for seed in range(3):
    data, network, r = noise_setting(seed)
    S1 = network.gamma / data.n * data.bulk_times(r).norm() * math.sqrt(network.m) / 2
    print(f"seed {seed}: gamma = {network.gamma:.4f}, |S1| = {S1:.5f}, mean residue {r.mean():.3f}")

# %% [markdown]
# **Question w2.** (a) One draw and the mean over all agree for weak noise and say opposite things
# at $\tau = 2$. Why? Which of them does gradient descent with fresh noise and small steps follow?
# (b) *smoothed* is a gradient with another activation. What is its slope, what are its $\mu$ and
# $c$, and so what happens to $S_1$ and $S_2$ as $\tau$ grows? (c) For strong noise every $h_{ij}$
# is small against $\tau$. Show that *pull* then is $W^\top$ times a diagonal matrix with entries of
# one size, a weight decay with signs. Weight decay $\lambda W^\top$ buries a spike $S$ when
# $\lambda > \|S\|\,(d/m)^{1/4}$. At which $\tau$ should the clean spike be lost, by the numbers
# printed for each seed, and where is it lost in the figure? (Seven to ten sentences.)

# %% [markdown] written w2 4
# BEGIN SOLUTION
# (a) In one draw the residue direction is $X_B^\top r + \tau\,\Xi^\top r$. At $\tau = 2$ the second
# term, an accident of this draw, is far longer than the first, so the spike that leads is made of
# noise (alignment 0.14). In the mean over draws it cancels, and the clean direction is left (0.94).
# Small steps with fresh noise add up many draws, so descent follows the mean.
# (b) The slope is $\Phi(h/\tau)$. With $h \sim N(0, s^2)$ its mean is still $\mu = \frac12$, its
# bend $c = 1/\sqrt{2\pi(s^2 + \tau^2)}$. So $S_1$ stays and $S_2$, proportional to $c$, shrinks:
# the clean residue spike comes to lead because its rival goes, between $\tau = 0.5$ and 1.
# (c) Then $\Phi'(h/\tau) \approx 1/\sqrt{2\pi}$ for all entries, and with unit rows column $j$ of
# *pull* is $a_j\,\gamma\tau\bar r/\sqrt{2\pi}\; w_j$, with $\bar r$ the mean residue. Signs $a_j$
# change no singular value, so it acts as decay with $\lambda = \gamma\tau|\bar r|/\sqrt{2\pi}$,
# and the spike is lost at $\tau = \sqrt{2\pi}\,\|S_1\| / (\gamma|\bar r|\,1.057)$: 8.7, 5.7 and
# 5.4 for the three seeds. In the figure the median falls to 0.74 at $\tau = 4$, to 0.31 at 6 and
# 0.14 at 10: the spike is lost around 6, as predicted.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: one draw's spike is $\tau\,\Xi^\top r$, which averages out; descent follows the mean
# - 1 point: slope $\Phi(h/\tau)$, $\mu = 1/2$, $c$ with $s^2 + \tau^2$: $S_1$ stays, $S_2$ shrinks
# - 1 point: *pull* is a decay of strength $\gamma\tau|\bar r|/\sqrt{2\pi}$, up to signs
# - 1 point: thresholds as numbers, compared with where the own curve falls
# END RUBRIC

# %% [markdown] further
# Two more penalties, on all weights and on the derivative in the input: their gradients by hand
# (q6, q7), the strength at which their spikes take the lead (q8), and where that prediction stops
# being true (w3).

# %% [markdown]
# ## 6. A penalty on all weights
#
# The paper penalises $\partial f/\partial W$. But the network has outer weights, too. Take
#
# $$
# P = \frac1{2n} \sum_i \Big( \Big\|\frac{\partial f(x_i)}{\partial W}\Big\|_F^2
# + \Big\|\frac{\partial f(x_i)}{\partial a}\Big\|^2 \Big) .
# $$
#
# **Question q6.** Write `weight_penalty`: the gradients in $W$ of the first and of the second sum,
# each transposed to $d \times m$ and with its factor $\frac1{2n}$. Entries of $a$ may be any
# numbers, and the activation any of `ACTIVATIONS`: also ReLU, whose `second_derivative` is zero.
# Derive the formulas; check them against automatic differentiation if you like.


# %% answer q6
def weight_penalty(X, W, a, gamma, activation):
    """The pair (inner, outer), each d x m: from the derivatives of f in W, and from those in a."""
    # BEGIN SOLUTION
    sigma, h = ACTIVATIONS[activation], X @ W.T
    lengths = X.square().sum(dim=1, keepdim=True)
    inner = X.T @ (lengths * sigma.derivative(h) * sigma.second_derivative(h)) * a.square()
    outer = X.T @ (sigma.value(h) * sigma.derivative(h))
    return gamma**2 / len(X) * inner, gamma**2 / len(X) * outer
    # END SOLUTION


# %% public q6
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]]).double()
W = torch.tensor([[0.1, 0.2, 0.3], [0.0, -0.5, 0.4], [1.0, 0.0, 0.0], [0.3, 0.3, -0.3]]).double()
a = torch.tensor([1.0, -1.0, 2.0, -1.0]).double()
found = weight_penalty(X, W, a, 0.5, "tanh")
assert isinstance(found, tuple | list) and len(found) == 2, "return the pair (inner, outer)"
for name, value in zip(("inner", "outer"), found):
    shaped(name, value, 3, 4)
V = W.clone().requires_grad_()
h = torch.tanh(X @ V.T)
values = 0.25 * (X**2).sum(dim=1) * ((1 - h**2) ** 2 @ a**2), 0.25 * (h**2).sum(dim=1)
hints = (
    "df/dw_j = gamma a_j sigma'(w_j . x) x: square it, sum over j, and differentiate once more.",
    "df/da_j = gamma sigma(w_j . x): square it, sum over j, and differentiate.",
)
for name, value, term, hint in zip(("inner", "outer"), found, values, hints):
    expected = torch.autograd.grad(term.sum() / 4, V, retain_graph=True)[0].T
    close(name, value, expected, hint)


# %% hidden common
def small_network(rng, activation, signs=False):
    n, d, m = (int(size) for size in rng.integers(3, 9, size=3))
    return {
        "X": rng.normal(size=(n, d)),
        "W": rng.normal(size=(m, d)) / math.sqrt(d),
        "a": rng.choice([-1.0, 1.0], size=m) if signs else rng.normal(size=m),
        "gamma": float(rng.uniform(0.2, 0.9)),
        "activation": activation,
    }


def output(X, W, a, gamma, activation):
    return gamma * SIGMA[activation].value(X @ W.T) @ a


def penalty_gradient(which, X, W, a, gamma, activation):
    """Gradient in W, d x m, of (1/2n) sum |df/d(argument)|^2: derivatives of derivatives of f."""
    X, W, a = (torch.as_tensor(each) for each in (X, W, a))

    def total(V):
        jacobian = torch.func.jacrev(output, argnums=which)(X, V, a, gamma, activation)
        return jacobian.square().sum() / (2 * len(X))

    return torch.func.grad(total)(W).T.numpy()


def penalty_calls(rng, name, activations, signs=False):
    return [call(name, **small_network(rng, each, signs)) for each in activations]


# %% hidden q6 1: inner weights, outer weights of size one, also ReLU
def calls(rng):
    return penalty_calls(rng, "weight_penalty", ("tanh", "softplus", "silu", "relu"), signs=True)


def check(calls, answers):
    for c, answer in zip(calls, answers):
        near(part(answer, 0, 2), penalty_gradient(1, **c.arguments), name="inner")


# %% hidden q6 1: inner weights, outer weights of any size
def calls(rng):
    return penalty_calls(rng, "weight_penalty", ("gelu", "sigmoid", "erf"))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        near(part(answer, 0, 2), penalty_gradient(1, **c.arguments), name="inner")


# %% hidden q6 1: outer weights
def calls(rng):
    return penalty_calls(rng, "weight_penalty", ("tanh", "softplus", "elu"))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        near(part(answer, 1, 2), penalty_gradient(2, **c.arguments), name="outer")


# %% wrong q6 1: outer weights not squared
def weight_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    lengths = X.square().sum(dim=1, keepdim=True)
    inner = X.T @ (lengths * sigma.derivative(h) * sigma.second_derivative(h)) * a.abs()
    outer = X.T @ (sigma.value(h) * sigma.derivative(h))
    return gamma**2 / len(X) * inner, gamma**2 / len(X) * outer


# %% wrong q6 1: outer weights where there are none
def weight_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    lengths = X.square().sum(dim=1, keepdim=True)
    inner = X.T @ (lengths * sigma.derivative(h) * sigma.second_derivative(h)) * a.square()
    outer = X.T @ (sigma.value(h) * sigma.derivative(h)) * a.square()
    return gamma**2 / len(X) * inner, gamma**2 / len(X) * outer


# %% wrong q6 3: the factor two of the squares forgotten
def weight_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    lengths = X.square().sum(dim=1, keepdim=True)
    inner = X.T @ (lengths * sigma.derivative(h) * sigma.second_derivative(h)) * a.square()
    outer = X.T @ (sigma.value(h) * sigma.derivative(h))
    return gamma**2 / (2 * len(X)) * inner, gamma**2 / (2 * len(X)) * outer


# %% wrong q6 2: the lengths of the examples not squared
def weight_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    lengths = X.norm(dim=1, keepdim=True)
    inner = X.T @ (lengths * sigma.derivative(h) * sigma.second_derivative(h)) * a.square()
    outer = X.T @ (sigma.value(h) * sigma.derivative(h))
    return gamma**2 / len(X) * inner, gamma**2 / len(X) * outer


# %% [markdown]
# ## 7. A penalty on the derivative in the input
#
# Others penalise how strongly the output reacts to the *input*,
#
# $$
# Q = \frac1{2n} \sum_i \Big\|\frac{\partial f}{\partial x}(x_i)\Big\|^2 , \qquad
# \frac{\partial f}{\partial x}(x_i) = \gamma\, W^\top(a \circ \sigma'(Wx_i)) .
# $$
#
# $W$ stands here in two places: as the matrix in front, and inside the slopes.
#
# **Question q7.** Write `input_penalty`: the gradient of $Q$ in $W$, transposed to $d \times m$, in
# two terms. *direct* is what comes from the matrix in front, slopes held fixed; *bent* is what
# comes from the slopes, the matrix in front held fixed. No loop over examples, and no array with
# $n\,m\,d$ entries.


# %% answer q7
def input_penalty(X, W, a, gamma, activation):
    """The pair (direct, bent), each d x m; their sum is the gradient of Q."""
    # BEGIN SOLUTION
    sigma, h = ACTIVATIONS[activation], X @ W.T
    weighted = sigma.derivative(h) * a
    inputs = weighted @ W
    bends = sigma.second_derivative(h) * a
    scale = gamma**2 / len(X)
    return scale * inputs.T @ weighted, scale * X.T @ (bends * (inputs @ W.T))
    # END SOLUTION


# %% public q7
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]]).double()
W = torch.tensor([[0.1, 0.2, 0.3], [0.0, -0.5, 0.4], [1.0, 0.0, 0.0], [0.3, 0.3, -0.3]]).double()
a = torch.tensor([1.0, -1.0, 2.0, -1.0]).double()
found = input_penalty(X, W, a, 0.5, "tanh")
assert isinstance(found, tuple | list) and len(found) == 2, "return the pair (direct, bent)"
for name, value in zip(("direct", "bent"), found):
    shaped(name, value, 3, 4)
V = W.clone().requires_grad_()
inside = W.clone().requires_grad_()
derivatives = 0.5 * ((1 - torch.tanh(X @ inside.T) ** 2) * a) @ V
both = torch.autograd.grad(derivatives.square().sum() / 4, (V, inside))
hint = "It is the gradient in the matrix in front of the slopes: the slopes count as constants."
close("direct", found[0], both[0].T, hint)
hint = (
    "It is the gradient in the W inside of the slopes, where each x_i comes out by the chain rule."
)
close("bent", found[1], both[1].T, hint)


# %% hidden common
def direct_part(X, W, a, gamma, activation):
    """Gradient of Q with the slopes held fixed, by automatic differentiation."""
    fixed = SIGMA[activation].derivative(torch.as_tensor(X @ W.T)) * torch.as_tensor(a)

    def total(V):
        return (gamma * fixed @ V).square().sum() / (2 * len(X))

    return torch.func.grad(total)(torch.as_tensor(W)).T.numpy()


def whole_part(X, W, a, gamma, activation):
    """Gradient of Q from derivatives of f itself."""
    X, W, a = (torch.as_tensor(each) for each in (X, W, a))

    def total(V):
        inputs = torch.func.grad(lambda x: output(x, V, a, gamma, activation).sum())(X)
        return inputs.square().sum() / (2 * len(X))

    return torch.func.grad(total)(W).T.numpy()


# %% hidden q7 1: direct
def calls(rng):
    return penalty_calls(rng, "input_penalty", ("tanh", "softplus", "silu", "sigmoid"))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        near(part(answer, 0, 2), direct_part(**c.arguments), name="direct")


# %% hidden q7 1: bent
def calls(rng):
    return penalty_calls(rng, "input_penalty", ("tanh", "softplus", "silu", "sigmoid"))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        expected = whole_part(**c.arguments) - direct_part(**c.arguments)
        near(part(answer, 1, 2), expected, tolerance=1e-7, name="bent")


# %% hidden q7 1: their sum is the gradient
def calls(rng):
    return penalty_calls(rng, "input_penalty", ("gelu", "erf", "elu"))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        expected = whole_part(**c.arguments)
        terms = [array(part(answer, k, 2), expected.shape, name="a term") for k in (0, 1)]
        near(sum(terms), expected, name="direct + bent")


# %% hidden q7 1: ReLU
def calls(rng):
    return penalty_calls(rng, "input_penalty", ("relu", "relu"))


def check(calls, answers):
    for c, answer in zip(calls, answers):
        expected = whole_part(**c.arguments)
        near(part(answer, 0, 2), expected, name="direct for ReLU")
        rest = array(part(answer, 1, 2), expected.shape, name="bent for ReLU")
        assert np.abs(rest).max() < 1e-12, "bent is not zero for ReLU, whose slopes do not bend"


# %% wrong q7 4: the penalty on the derivative in W
def input_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    products = sigma.derivative(h) * sigma.second_derivative(h)
    bent = X.T @ (X.square().sum(dim=1, keepdim=True) * products) * a.square()
    return 0 * bent, gamma**2 / len(X) * bent


# %% wrong q7 2: the slopes' part forgotten
def input_penalty(X, W, a, gamma, activation):
    weighted = ACTIVATIONS[activation].derivative(X @ W.T) * a
    direct = gamma**2 / len(X) * (weighted @ W).T @ weighted
    return direct, 0 * direct


# %% wrong q7 4: the derivative in x averaged before it is squared
def input_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    weighted = (sigma.derivative(h) * a).mean(dim=0)
    inputs = weighted @ W
    bends = (sigma.second_derivative(h) * a).T @ X / len(X)
    direct = gamma**2 * torch.outer(inputs, weighted)
    return direct, gamma**2 * ((inputs @ W.T)[:, None] * bends).T


# %% wrong q7 2: outer weights forgotten in the bends
def input_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    weighted = sigma.derivative(h) * a
    inputs = weighted @ W
    bends = sigma.second_derivative(h)
    scale = gamma**2 / len(X)
    return scale * inputs.T @ weighted, scale * X.T @ (bends * (inputs @ W.T))


# %% [markdown]
# ## 8. Who leads? A threshold
#
# Let $u$ and $q$ be orthogonal unit vectors and the gradient with a penalty of strength $\lambda$
#
# $$
# G(\lambda) = u\, s^\top + q\,(p + \lambda\, p_3)^\top ,
# $$
#
# with $s, p, p_3 \in \mathbb R^m$ at any angles. For which $\lambda$ is the leading left singular
# vector equally close to $u$ and to $q$? (Write $G(\lambda) G(\lambda)^\top$ as a $2 \times 2$
# matrix.)
#
# **Question q8.** Write `crossing`: the smallest $\lambda \ge 0$ at which it is at least as close
# to $q$ as to $u$; `math.inf` if there is none. Gradients are small numbers: it must not matter in
# which units the vectors are given.


# %% answer q8
def crossing(s, p, p3):
    """The smallest lambda >= 0 at which q leads, a number; 0 if it leads from the start."""
    # BEGIN SOLUTION
    missing = float(s @ s - p @ p)
    square, mixed = float(p3 @ p3), float(p @ p3)
    if missing <= 0:
        return 0.0
    if square == 0:
        return math.inf
    return (math.sqrt(mixed**2 + square * missing) - mixed) / square
    # END SOLUTION


# %% public q8
e = torch.eye(3).double()
hint = "Without p3 nothing changes with lambda, so q never leads if it does not at the start."
found = ran(hint, crossing, 2 * e[0], e[1], 0 * e[2])
assert found is not None, "it returns nothing: does it end with 'return ...'?"
assert found == math.inf, hint
hint = "Here q leads already at lambda = 0."
assert crossing(e[0], 2 * e[1], e[2]) == 0, hint
hint = "Here G has the singular values |s| = 2 and lambda: q takes over where they are equal."
close("the crossing for s = 2 e_0, p = 0, p3 = e_2", crossing(2 * e[0], 0 * e[1], e[2]), 2.0, hint)
s, p, p3 = 2 * e[0] + e[1], e[1], e[0] - 0.5 * e[1]
found = crossing(s, p, p3)
for strength, leads in ((0.99 * found, False), (1.01 * found, True)):
    left = torch.linalg.svd(torch.stack([s, p + strength * p3])).U[:, 0].abs()
    hint = "In the basis u, q the gradient is the 2 x m matrix with rows s and p + lambda p3."
    said = f"q {'leads' if leads else 'does not lead'} at {float(strength):.4f}"
    hint = f"By your answer {said}, but the singular vector disagrees. {hint}"
    assert bool(left[1] >= left[0]) == leads, hint


# %% hidden common
def q_leads(strength, s, p, p3):
    left = np.linalg.svd(np.stack([s, p + strength * p3]))[0][:, 0]
    return abs(left[1]) >= abs(left[0])


def bisected(s, p, p3):
    """The crossing from singular vectors alone."""
    low, high = 0.0, np.linalg.norm(s) / np.linalg.norm(p3)
    while not q_leads(high, s, p, p3):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if q_leads(middle, s, p, p3) else (middle, high)
    return high


def spike_case(rng, sign, size=1.0):
    """Rows of a gradient in which u leads at first; p and p3 at an acute or obtuse angle."""
    m = int(rng.integers(3, 12))
    s, p, p3 = rng.normal(size=(3, m))
    p *= rng.uniform(0.2, 0.8) * np.linalg.norm(s) / np.linalg.norm(p)
    if np.sign(p @ p3) != sign:
        p3 = p3 - 2 * (p @ p3) / (p @ p) * p
    return call("crossing", s=size * s, p=size * p, p3=size**2 * p3)


def check_crossing(calls, answers):
    for c, value in zip(calls, answers):
        expected = bisected(**c.arguments)
        near(value, expected, tolerance=1e-6, name="lambda")


# %% hidden q8 1: p and p3 at an acute angle
def calls(rng):
    return [spike_case(rng, 1) for _ in range(5)]


def check(calls, answers):
    check_crossing(calls, answers)


# %% hidden q8 1: p and p3 at an obtuse angle
def calls(rng):
    return [spike_case(rng, -1) for _ in range(5)]


def check(calls, answers):
    check_crossing(calls, answers)


# %% hidden q8 1: at once, or never
def calls(rng):
    s, p, p3 = rng.normal(size=(3, 6))
    p, s = 2 * p / np.linalg.norm(p), s / np.linalg.norm(s)
    # The second one falls below u later on, but q leads at 0.
    at_once = [call("crossing", s=s, p=p, p3=each) for each in (p3, -p, 0 * p)]
    return [*at_once, call("crossing", s=p, p=s, p3=0 * p)]


def check(calls, answers):
    for value in answers[:3]:
        assert array(value, (), name="lambda") == 0, "q leads from the start, so lambda is 0"
    assert answers[3] == math.inf, "p3 is zero and u leads, so lambda is infinite"


# %% hidden q8 1: small numbers
def calls(rng):
    return [spike_case(rng, sign, size=1e-6) for sign in (1, -1)]


def check(calls, answers):
    check_crossing(calls, answers)


# %% wrong q8 3: norms added as if parallel
def crossing(s, p, p3):
    if p.norm() >= s.norm():
        return 0.0
    return float((s.norm() - p.norm()) / p3.norm()) if p3.any() else math.inf


# %% wrong q8 3: as if orthogonal
def crossing(s, p, p3):
    missing = float(s @ s - p @ p)
    if missing <= 0:
        return 0.0
    return math.sqrt(missing / float(p3 @ p3)) if p3.any() else math.inf


# %% wrong q8 1: a grid of strengths
def crossing(s, p, p3):
    low, high = 0.0, 1e3
    if p.norm() >= s.norm():
        return 0.0
    if (p + high * p3).norm() < s.norm():
        return math.inf
    for _ in range(100):
        middle = (low + high) / 2
        if (p + middle * p3).norm() < s.norm():
            low = middle
        else:
            high = middle
    return high


# %% wrong q8 1: the special cases forgotten
def crossing(s, p, p3):
    missing, square, mixed = float(s @ s - p @ p), float(p3 @ p3), float(p @ p3)
    return (math.sqrt(mixed**2 + square * missing) - mixed) / square


# %% right q1: all questions with numpy and scipy
import numpy as np
from scipy.stats import norm


def two_slopes(mean, s, delta):
    mean, s = mean.numpy(), s.numpy()
    right, left = norm.cdf(mean / s), norm.sf(mean / s)
    return [
        right + delta * left,
        (1 - delta) * norm.pdf(0, mean, s),
        (1 - delta) ** 2 * right * left,
    ]


def slope_statistics(activation, mean, s):
    mean, s = mean.numpy()[:, None], s.numpy()[:, None]
    if activation == "relu":
        mean, s = mean[:, 0], s[:, 0]
        share, density = norm.cdf(mean / s), norm.pdf(0, mean, s)
        return share, density, (density * s) ** 2 / (share * (1 - share))
    nodes, weights = np.polynomial.legendre.leggauss(200)
    nodes, weights = 9 * nodes, 9 * weights * norm.pdf(9 * nodes)
    values = ACTIVATIONS[activation].derivative(torch.as_tensor(mean + s * nodes)).numpy()
    mu = values @ weights
    rest = values - mu[:, None]
    along = (rest * nodes) @ weights
    return mu, along / s[:, 0], along**2 / (rest**2 @ weights)


def straight_spike(X, z, zeta, W, a, gamma, r, c):
    X, z, W, a, r, c = (np.asarray(each) for each in (X, z, W, a, r, c))
    return (W * (c * a)[:, None]) @ ((z * r) @ X) * zeta * gamma / len(z)


def ntk_twin(m, decay, jacobian, step):
    old, new = 1 / m, 1 / np.sqrt(m)
    t = new / old
    longer = step * old / (new * t)
    return t, step * decay / longer, step * jacobian * old**2 / (longer * new**2), longer


def weight_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    value, first, second = (
        f(h).numpy() for f in (sigma.value, sigma.derivative, sigma.second_derivative)
    )
    X, a = X.numpy(), a.numpy()
    lengths = (X**2).sum(axis=1)
    inner = np.einsum("id,i,ij,ij,j->dj", X, lengths, first, second, a**2)
    return gamma**2 / len(X) * inner, gamma**2 / len(X) * np.einsum("id,ij,ij->dj", X, value, first)


def input_penalty(X, W, a, gamma, activation):
    sigma, h = ACTIVATIONS[activation], X @ W.T
    first, second = (a * sigma.derivative(h)).numpy(), (a * sigma.second_derivative(h)).numpy()
    X, W, scale = X.numpy(), W.numpy(), gamma**2 / len(X)
    return scale * W.T @ (first.T @ first), scale * X.T @ (second * (first @ (W @ W.T)))


def expected_gradient(X, W, a, gamma, r, tau):
    X, W, a, r = (each.numpy() for each in (X, W, a, r))
    h, spread, scale = X @ W.T, tau * np.linalg.norm(W, axis=1), gamma / len(X)
    if tau == 0:
        return scale * X.T @ (r[:, None] * (h > 0) * a), np.zeros(W.T.shape)
    smoothed = scale * X.T @ (r[:, None] * norm.cdf(h, 0, spread) * a)
    return smoothed, tau**2 * scale * W.T * (a * (r @ norm.pdf(h, 0, spread)))


def crossing(s, p, p3):
    s, p, p3 = (np.asarray(each) for each in (s, p, p3))
    if np.linalg.norm(p) >= np.linalg.norm(s):
        return 0
    if not p3.any():
        return np.inf
    unit = np.linalg.norm(p3) / np.linalg.norm(s)
    roots = np.roots([p3 @ p3 / unit**2, 2 * p @ p3 / unit, p @ p - s @ s])
    return roots[roots > 0].min() / unit


# %% right q1: all questions one entry or example at a time
def two_slopes(mean, s, delta):
    rows = []
    for M, width in zip(mean.tolist(), s.tolist()):
        t = M / width
        right, left = math.erfc(-t / 2**0.5) / 2, math.erfc(t / 2**0.5) / 2
        mu = right + delta * left
        bend = (1 - delta) * math.exp(-t * t / 2) / (width * (2 * math.pi) ** 0.5)
        # Two rare kinds of terms: the side that is rare, and how far mu is from the other slope.
        rows.append(
            [mu, bend, right * ((1 - delta) * left) ** 2 + left * ((1 - delta) * right) ** 2]
        )
    return torch.tensor(rows, dtype=torch.float64).T  # one tensor with three rows


def slope_statistics(activation, mean, s):
    edges = torch.linspace(-8.5, 8.5, 40_001, dtype=torch.float64)
    g, weights = (edges[1:] + edges[:-1]) / 2, torch.special.ndtr(edges).diff()
    rows = []
    for M, width in zip(mean, s):
        y = ACTIVATIONS[activation].derivative(M + width * g)
        mu = weights @ y
        covariance = weights @ ((y - mu) * g)
        squares = (weights @ (y - mu) ** 2) * (weights @ g**2)
        rows.append(torch.stack([mu, covariance / width, covariance**2 / squares]))
    return tuple(torch.stack(rows).T)


def straight_spike(X, z, zeta, W, a, gamma, r, c):
    v = torch.zeros(len(W), dtype=torch.float64)
    for i in range(0, len(X), 5000):
        rows = slice(i, i + 5000)
        for j in range(0, len(W), 5000):
            v[j : j + 5000] += (z * r)[rows] @ (X[rows] @ W[j : j + 5000].T)
    return v * a * c * (gamma * zeta / len(X))


def ntk_twin(m, decay, jacobian, step):
    return [m**0.5, torch.tensor(decay).double() * m, jacobian, step / m]


def weight_penalty(X, W, a, gamma, activation):
    sigma = ACTIVATIONS[activation]
    inner, outer = torch.zeros(2, *W.T.shape, dtype=torch.float64)
    for x in X:
        h = W @ x
        bends = (x @ x) * a**2 * sigma.derivative(h) * sigma.second_derivative(h)
        inner += gamma**2 / len(X) * torch.outer(x, bends)
        outer += gamma**2 / len(X) * torch.outer(x, sigma.value(h) * sigma.derivative(h))
    return inner, outer


def input_penalty(X, W, a, gamma, activation):
    sigma = ACTIVATIONS[activation]
    direct, bent = torch.zeros(2, *W.T.shape, dtype=torch.float64)
    for x in X:
        h = W @ x
        inputs = gamma * W.T @ (a * sigma.derivative(h))
        direct += gamma / len(X) * torch.outer(inputs, a * sigma.derivative(h))
        bent += gamma / len(X) * torch.outer(x, a * sigma.second_derivative(h) * (W @ inputs))
    return direct, bent


def expected_gradient(X, W, a, gamma, r, tau):
    smoothed, pull = torch.zeros(2, *W.T.shape, dtype=torch.float64)
    for x, residue in zip(X, r):
        for j, w in enumerate(W):
            h, length = float(w @ x), float(w.norm())
            share, density = float(h > 0), 0.0
            if tau > 0:
                t = h / (tau * length)
                share, density = math.erfc(-t / 2**0.5) / 2, math.exp(-t * t / 2)
            factor = gamma / len(X) * residue * a[j]
            smoothed[:, j] += factor * share * x
            pull[:, j] += factor * tau * density / (2 * math.pi) ** 0.5 * w / length
    return [smoothed, pull]


def crossing(s, p, p3):
    square, mixed, missing = p3 @ p3, 2 * (p @ p3), p @ p - s @ s
    if missing >= 0:
        return torch.tensor(0.0)
    if square == 0:
        return torch.tensor(math.inf)
    return (-mixed + torch.sqrt(mixed**2 - 4 * square * missing)) / (2 * square)


# %% right q7: automatic differentiation, with slopes held fixed; a threshold by root finding
from scipy.optimize import brentq


def weight_penalty(X, W, a, gamma, activation):
    sigma, V = ACTIVATIONS[activation], W.clone().requires_grad_()
    values = gamma**2 * sigma.value(X @ V.T).square().sum() / (2 * len(X))
    outer = torch.autograd.grad(values, V)[0].T
    if activation == "relu":
        return torch.zeros_like(outer), outer
    norms = X.square().sum(dim=1) @ (sigma.derivative(X @ V.T).square() @ a.square())
    return torch.autograd.grad(gamma**2 * norms / (2 * len(X)), V)[0].T, outer


def input_penalty(X, W, a, gamma, activation):
    front, inside = W.clone().requires_grad_(), W.clone().requires_grad_()
    inputs = gamma * (ACTIVATIONS[activation].derivative(X @ inside.T) * a) @ front
    total = inputs.square().sum() / (2 * len(X))
    direct, bent = torch.autograd.grad(total, (front, inside), allow_unused=True)
    return direct.T, torch.zeros_like(W).T if bent is None else bent.T


def crossing(s, p, p3):
    def excess(strength):
        return float((p + strength * p3).norm() / s.norm()) - 1

    if excess(0) >= 0:
        return 0.0
    if not p3.any():
        return float("inf")
    high = float(s.norm() / p3.norm())
    while excess(high) < 0:
        high *= 2
    return brentq(excess, 0, high, xtol=1e-12 * high)


# %% [markdown]
# ### The experiment: two penalties against the residue spike
#
# Now the threshold meets real gradients. $u$ is the direction of $X_B^\top r$; the penalty on all
# weights competes along $q$, the penalty on the input derivative along $k = W^\top a$ (both scaled
# to length one). The three vectors are the parts of gradient and penalty along these directions,
# $s = G^\top u$, $p = G^\top q$, $p_3 = (\nabla P)^\top q$, or the same with $k$ and $\nabla Q$.
# The prediction ignores everything else: the bulk, other directions, and the penalty's part along
# $u$. The table compares it with the strength at which the leading left singular vector of the
# whole penalised gradient is as close to $q$ (or $k$) as to $u$. The last column is the strength
# at which $\|G(\lambda)^\top u\| = \|G(\lambda)^\top k\|$ for the whole $G(\lambda)$, the
# penalty's part along $u$ included. Read it for the penalty on inputs: the other one has a bulk
# that enters these norms too.


# %%
def unit(v):
    return v / v.norm()


def penalised(activation, scaling, seed, d=160, nu=1 / 8):
    """The gradient, its direction u, and each penalty with the direction it competes along."""
    data = sample_spiked_data(round(0.75 * d), d, nu=nu, seed=seed)
    options = {"activation": activation, "scaling": scaling, "seed": seed}
    network = TwoLayerNetwork.random(d, round(1.25 * d), **options)
    r = network(data.X) - sample_targets(data.X, seed=seed).y
    args = data.X, network.W, network.a, network.gamma, activation
    rivals = {
        "weights": (sum(weight_penalty(*args)), data.q),
        "inputs": (sum(input_penalty(*args)), unit(network.W.T @ network.a)),
    }
    mean = unit(data.X_B.sum(dim=0))
    return closed_form_gradient(data.X, network, r), unit(data.bulk_times(r)), rivals, mean


def first(strengths, leads):
    """The first strength at which something is true, infinity if at none."""
    return next((float(each) for each in strengths if leads(each)), math.inf)


# %%
def turning(activation, scaling, penalty, seed):
    """Predicted strength; then measured one and that of equal norms, both over the prediction."""
    G, u, rivals, _ = penalised(activation, scaling, seed)
    gradient, k = rivals[penalty]
    predicted = float(crossing(G.T @ u, G.T @ k, gradient.T @ k))

    def turned(factor):
        top = leading(G + factor * predicted * gradient)
        return abs(top @ k) >= abs(top @ u)

    def equal(factor):
        whole = G + factor * predicted * gradient
        return (whole.T @ k).norm() >= (whole.T @ u).norm()

    factors = torch.logspace(-0.3, 0.7, 31, dtype=torch.float64)
    return predicted, first(factors, turned), first(factors, equal)


# %%
cases = [
    (a, s, p)
    for p in ("weights", "inputs")
    for s in ("ntk", "mean-field")
    for a in ("tanh", "softplus")
]
heads = ("predicted", "measured / pred.", "equal norms / pred.")
print(" " * 30 + "".join(f"{head:>21s}" for head in heads))
for activation, scaling, penalty in cases:
    rows = torch.tensor([turning(activation, scaling, penalty, seed) for seed in range(3)])
    numbers = "".join(f"{float(x):21.3g}" for x in rows.median(dim=0).values)
    print(f"{penalty:8s} {scaling:11s} {activation:8s} {numbers}")

# %%
panels = [("tanh", "weights"), ("softplus", "weights"), ("tanh", "inputs")]
fig, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
for axis, (activation, penalty) in zip(axes, panels):
    G, u, rivals, mean = penalised(activation, "ntk", seed=0)
    gradient, k = rivals[penalty]
    predicted = crossing(G.T @ u, G.T @ k, gradient.T @ k)
    factors = torch.logspace(-1, 1.5, 16, dtype=torch.float64)
    tops = [leading(G + factor * predicted * gradient) for factor in factors]
    rival = "q" if penalty == "weights" else "k = Wᵀa"
    for direction, label, style in zip((u, k, mean), ("X_Bᵀr", rival, "X_Bᵀ1"), COLOURS):
        axis.semilogx(factors, [alignment(top, direction) for top in tops], **style, label=label)
    axis.axvline(1, color="grey", lw=1)
    axis.set(xlabel="λ / predicted λ", title=f"{activation}, penalty on {penalty} (NTK)")
    axis.legend(fontsize=8, loc=(0.72, 0.5))
axes[0].set_ylabel("alignment of u₁")
fig.tight_layout()
plt.show()

# %% [markdown]
# **Question w3.** (a) Where does the prediction hold, and where does it fail entirely? Name the
# direction that wins there, and the mean over your formula of question 6 that makes it. (b) Which
# of your two terms of question 7 makes the spike along $k$? Put $\sigma' \approx \mu$ into it. What
# does its direction know of the data, and why is the turn to it gradual where that to $q$ is
# sudden? (c) Under NTK scaling the turn along $k$ comes late, under mean field it does not.
# Explain, with the last column and with what is in the residue. (d) ReLU: which of the four terms
# of questions 6 and 7 are zero? Which penalties does gradient descent see? (Seven to ten
# sentences.)

# %% [markdown] written w3 4
# BEGIN SOLUTION
# (a) It holds within a tenth for $\tanh$ and the penalty on weights, under both scalings. It fails
# for softplus: $q$ never leads, because the sample mean $X_B^\top\mathbf 1$ wins. It comes from
# *inner*: $\sigma'\sigma''$ has a mean $\kappa > 0$, which leaves
# $\frac{\gamma^2\kappa}{n} X^\top \ell\, \mathbf 1^\top$ with $\ell_i = \|x_i\|^2$. For $\tanh$ the
# product is odd and $\kappa = 0$.
# (b) *direct*. With $\sigma' \approx \mu$ it is $\gamma^2 W^\top(a \circ \mu)(a \circ \mu)^\top$:
# rank one, along a direction made of the weights alone, which knows neither data nor targets. Its
# right factor is that of $S_1$, so the two add up to one spike whose left vector turns gradually.
# The right factor along $q$ is nearly orthogonal to that of $S_1$: there two spikes exist side by
# side, and the lead changes at once.
# (c) Under NTK scaling the residue contains $f$, whose linear part is along $W^\top(a \circ \mu)$.
# Therefore $u$ and $k$ are not orthogonal, and the penalty has a part along $u$ which grows as
# well. With it (last column) the strength is as measured, 1.5 to 1.6 times the prediction. Under
# mean field $f$ is smaller by $\sqrt m$, $r \approx -y$, and the prediction holds within a tenth.
# (d) *inner* and *bent* contain $\sigma''$ and are zero. *direct* is not, so descent sees the
# penalty on the input derivative; of the penalty on the weights it sees the outer weights' part
# alone, and of the paper's penalty, on $\partial f/\partial W$ only, nothing.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: holds for $\tanh$; for softplus the sample mean, since $\sigma'\sigma''$ has a mean
# - 1 point: *direct*, along $W^\top(a \circ \mu)$, made of weights; right factor that of $S_1$
# - 1 point: $f$ in the NTK residue correlates $u$ with $k$, so that the penalty also feeds $u$
# - 1 point: *inner*, *bent* vanish for ReLU; the input penalty is seen, the other by *outer* only
# END RUBRIC
