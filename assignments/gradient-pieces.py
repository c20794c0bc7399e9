# %% assignment
# title = "The gradient and its pieces"
# minutes = {q1=15, q2=20, w1=15, q3=25, q4=25, w2=15, q5=25, q6=15, q7=20, q8=10, w3=20}
# withheld = [
#     "lowgrad_utils.gradients.closed_form_gradient",
#     "lowgrad_utils.gradients.loss_gradient",
#     "lowgrad_utils.gradients.decompose",
#     "lowgrad_utils.networks.Activation.mu",
#     "lowgrad_utils.networks.gaussian_mean",
#     "lowgrad_utils.networks.Loss.residue",
# ]

# %% [markdown]
# # Assignment: the gradient and its pieces
#
# You write down the gradient of a two-layer network, take it apart into the four pieces of the
# chapter *The gradient and its pieces*, and measure which piece is large when.
#
# **Learning goals.** Derive the residue of a loss and the closed form of the gradient; average a
# slope over a Gaussian accurately, for small and for large arguments; split a matrix into
# rank-one terms and a rest, and check such a split; find singular values of a low-rank matrix
# that is too large to form; choose a splitting that is best in a stated sense; fit an exponent
# and say what it shows.
#
# **You need** linear algebra (singular values, least squares), the chain rule, some PyTorch. Read
# the chapters *The setting* and *The gradient and its pieces* first.
#
# All arrays are torch tensors in float64. The functions of `lowgrad_utils` that do a question's
# work (`decompose`, `closed_form_gradient`, `mu`, `residue`) are switched off in the grading.

# %%
import math

import torch
from matplotlib import pyplot as plt

from lowgrad_utils import ACTIVATIONS, TwoLayerNetwork, sample_spiked_data, sample_targets

# %% [markdown]
# ## 1. The residue
#
# For predictions $f_i$ and targets $y_i$ the *residue* is $r_i = \partial \ell / \partial f$ at
# $(f_i, y_i)$. The losses are the squared loss $\tfrac12 (f - y)^2$; the Huber loss, which is
# $\tfrac12 t^2$ for $|t| \le 1$ and $|t| - \tfrac12$ beyond, with $t = f - y$; and the logistic
# loss $\log(1 + e^{-yf})$ with labels $y = \pm 1$.
#
# **Question q1.** Write `residue`. Your formula for the logistic loss must also work where
# $e^{-yf}$ overflows.


# %% answer q1
def residue(f, y, loss):
    """Residues r, length n, of predictions f and targets y.

    loss is "mse", "huber" or "logistic".
    """
    # BEGIN SOLUTION
    if loss == "mse":
        return f - y
    if loss == "huber":
        return (f - y).clamp(-1, 1)
    return -y * torch.sigmoid(-y * f)
    # END SOLUTION


# %% public q1
f, y = torch.tensor([0.5, 3.0]).double(), torch.tensor([1.0, -1.0]).double()
for loss in ("mse", "huber", "logistic"):
    shaped(f"the residue for {loss}", residue(f.clone(), y.clone(), loss), 2)
hint = "With f = 0.5 and y = 1 the prediction is too small, so raising it lowers the loss: r < 0."
assert residue(f, y, "mse")[0] < 0, hint
close("the residue for mse", residue(f, y, "mse"), torch.tensor([-0.5, 4.0]), "It is l'(f).")

# %% public q1
f, y = torch.tensor([0.3]).double(), torch.tensor([-1.0]).double()
step = 1e-6
slope = (torch.log1p(torch.exp(f + step)) - torch.log1p(torch.exp(f - step))) / (2 * step)
shaped("the residue for logistic", residue(f, y, "logistic"), 1)
hint = "For y = -1 the loss is log(1 + exp(f)): compare with its difference quotient."
assert abs(residue(f, y, "logistic") - slope) < 1e-6, hint

# %% hidden common
SIGMA = lg.ACTIVATIONS


def instance(rng, n, d, m, activation="tanh"):
    """Arguments of a random gradient; outer weights of any size, not only signs."""
    q = rng.normal(size=d)
    arguments = {
        "z": rng.normal(size=n),
        "q": q / np.linalg.norm(q),
        "zeta": float(rng.uniform(1, 4)),
        "W": rng.normal(size=(m, d)) / math.sqrt(d),
        "a": rng.normal(size=m),
        "gamma": float(rng.uniform(0.1, 0.9)),
        "r": rng.normal(size=n),
        "mu": rng.uniform(0.1, 0.9, size=m),
        "activation": activation,
    }
    bulk = rng.normal(size=(n, d))
    return {
        "X": bulk + arguments["zeta"] * np.outer(arguments["z"], q / np.linalg.norm(q)),
        **arguments,
    }


def slopes(X, W, activation):
    return SIGMA[activation].derivative(torch.as_tensor(X @ W.T)).numpy()


def autograd(X, W, a, gamma, r, activation):
    """The gradient, d x m, by automatic differentiation: it knows no formula."""
    X, W, a, r = (torch.as_tensor(each) for each in (X, W, a, r))
    W = W.clone().requires_grad_()
    f = gamma * SIGMA[activation].value(X @ W.T) @ a
    return torch.autograd.grad((r * f).sum() / len(X), W)[0].T.numpy()


def direction(answer, expected, name):
    """The answer is a positive multiple of what is expected."""
    value = array(answer, expected.shape, name=name)
    norm = np.linalg.norm(value)
    assert norm > 1e-12, f"{name} is zero"
    near(value / norm, expected / np.linalg.norm(expected), name=f"the direction of {name}")


# %% hidden q1 1: squared loss
def calls(rng):
    return [call("residue", f=rng.normal(size=9), y=rng.normal(size=9), loss="mse")]


def check(calls, answers):
    for c, r in zip(calls, answers):
        near(r, c.arguments["f"] - c.arguments["y"], name="r")


# %% hidden q1 1: Huber loss on both sides of its kinks
def calls(rng):
    return [call("residue", f=3 * rng.normal(size=40), y=rng.normal(size=40), loss="huber")]


def check(calls, answers):
    for c, r in zip(calls, answers):
        f, y = torch.as_tensor(c.arguments["f"]), torch.as_tensor(c.arguments["y"])
        near(r, lg.LOSSES["huber"].residue(f, y), name="r")


# %% hidden q1 1: logistic loss
def calls(rng):
    labels = rng.choice([-1.0, 1.0], size=30)
    return [call("residue", f=2 * rng.normal(size=30), y=labels, loss="logistic")]


def check(calls, answers):
    for c, r in zip(calls, answers):
        f = torch.as_tensor(c.arguments["f"]).requires_grad_()
        loss = torch.nn.functional.softplus(-torch.as_tensor(c.arguments["y"]) * f).sum()
        near(r, torch.autograd.grad(loss, f)[0], name="r")


# %% hidden q1 1: logistic loss far out
def calls(rng):
    far = rng.uniform(800, 900, size=4)
    signs = np.array([1.0, -1.0, 1.0, -1.0])
    return [call("residue", f=far * [1, 1, -1, -1], y=signs, loss="logistic")]


def check(calls, answers):
    near(answers[0], [0.0, 1.0, -1.0, 0.0], name="r")


# %% wrong q1 1: prediction and target exchanged in the squared loss
def residue(f, y, loss):
    if loss == "mse":
        return y - f
    if loss == "huber":
        return (f - y).clamp(-1, 1)
    return -y * torch.sigmoid(-y * f)


# %% wrong q1 1: the Huber loss never becomes linear
def residue(f, y, loss):
    if loss in ("mse", "huber"):
        return f - y
    return -y * torch.sigmoid(-y * f)


# %% wrong q1 1: exp overflows
def residue(f, y, loss):
    if loss == "mse":
        return f - y
    if loss == "huber":
        return (f - y).clamp(-1, 1)
    return -y * torch.exp(-y * f) / (1 + torch.exp(-y * f))


# %% [markdown]
# ## 2. The closed form
#
# The network is $f(x) = \gamma\, a^\top \sigma(W x)$ with $W$ of size $m \times d$. Write
# $L(W) = \frac1n \sum_i \ell(f(x_i), y_i)$ and let $G$ be its gradient in $W$, transposed to size
# $d \times m$.
#
# **Question q2.** Write `layer_gradient`, which computes $G$ from the residue, without automatic
# differentiation and without a loop over examples. `ACTIVATIONS[activation].derivative` is
# $\sigma'$.


# %% answer q2
def layer_gradient(X, W, a, gamma, r, activation):
    """The gradient G, d x m, for data X (n x d), weights W (m x d), a (m), residue r (n)."""
    # BEGIN SOLUTION
    slopes = ACTIVATIONS[activation].derivative(X @ W.T)
    return gamma / len(X) * X.T @ (r[:, None] * slopes * a)
    # END SOLUTION


# %% public q2
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]]).double()
W = torch.tensor([[0.1, 0.2, 0.3], [0.0, -0.5, 0.4], [1.0, 0.0, 0.0], [0.3, 0.3, -0.3]]).double()
a, r = torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), torch.tensor([0.7, -0.2]).double()
G = layer_gradient(X, W, a, 0.5, r, "tanh")
shaped("G", G, 3, 4)
hint = "Twice the residue gives twice the gradient: does every term contain r, once?"
close("G for the residue 2r", layer_gradient(X, W, a, 0.5, 2 * r, "tanh"), 2 * G, hint)
hint = "The signs of a decide the signs of the columns: does every term contain a?"
close("G for the outer weights -a", layer_gradient(X, W, -a, 0.5, r, "tanh"), -G, hint)
hint = "Entry (0, 0) is gamma / n * sum_i r_i a_0 sigma'(w_0 . x_i) x_i0: work it out by hand."
entry = 0.25 * (0.7 * (1 - math.tanh(0.2) ** 2) - 0.2 * (1 - math.tanh(0.35) ** 2) * 0.5)
close("G[0, 0]", G[0, 0], entry, hint)


# %% hidden q2 2: direction, against automatic differentiation
def calls(rng):
    wanted = []
    for activation in ("tanh", "softplus", "relu", "gelu"):
        case = instance(rng, *rng.integers(3, 12, size=3), activation)
        names = ("X", "W", "a", "gamma", "r", "activation")
        wanted.append(call("layer_gradient", **{name: case[name] for name in names}))
    return wanted


def check(calls, answers):
    for c, G in zip(calls, answers):
        direction(G, autograd(**c.arguments), "G")


# %% hidden q2 2: size, for both scalings
def calls(rng):
    wanted = []
    for gamma in (1 / 7, 1 / math.sqrt(7)):
        case = {**instance(rng, 6, 5, 7, "sigmoid"), "gamma": gamma}
        names = ("X", "W", "a", "gamma", "r", "activation")
        wanted.append(call("layer_gradient", **{name: case[name] for name in names}))
    return wanted


def check(calls, answers):
    for c, G in zip(calls, answers):
        expected = autograd(**c.arguments)
        ratio = np.linalg.norm(array(G, expected.shape, name="G")) / np.linalg.norm(expected)
        assert abs(ratio - 1) < 1e-8, f"|G| is {ratio:.4g} times what it should be"


# %% wrong q2 2: no average over the examples
def layer_gradient(X, W, a, gamma, r, activation):
    slopes = ACTIVATIONS[activation].derivative(X @ W.T)
    return gamma * X.T @ (r[:, None] * slopes * a)


# %% wrong q2 4: the activation in place of its derivative
def layer_gradient(X, W, a, gamma, r, activation):
    values = ACTIVATIONS[activation].value(X @ W.T)
    return gamma / len(X) * X.T @ (r[:, None] * values * a)


# %% wrong q2 4: transposed
def layer_gradient(X, W, a, gamma, r, activation):
    slopes = ACTIVATIONS[activation].derivative(X @ W.T)
    return (gamma / len(X) * X.T @ (r[:, None] * slopes * a)).T


# %% wrong q2 4: outer weights forgotten
def layer_gradient(X, W, a, gamma, r, activation):
    slopes = ACTIVATIONS[activation].derivative(X @ W.T)
    return gamma / len(X) * X.T @ (r[:, None] * slopes)


# %% [markdown]
# **Question w1.** For $n = 1$, which rank has $G$, and what are its singular vectors? Then say
# for general $n$ in which space the left singular vectors of $G$ live, and what they can be made
# of. (Three to five sentences.)

# %% [markdown] written w1 3
# BEGIN SOLUTION
# For $n = 1$, $G = \gamma r_1\, x_1 (a \circ \sigma'(W x_1))^\top$: rank one (zero if $r_1 = 0$),
# left singular vector $x_1/|x_1|$, right singular vector $a \circ \sigma'(W x_1)$ scaled to length
# one. In general $G = X^\top[\dots]$, so every column is a combination of the examples: left
# singular vectors live in data space $\mathbb R^d$, in the span of the rows of $X$, whose
# dimension is at most $n$.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: rank one for $n = 1$, with a reason
# - 1 point: both singular vectors for $n = 1$ (direction suffices)
# - 1 point: in general the span of the examples, in data space
# END RUBRIC

# %% [markdown]
# ## 3. The mean slope
#
# The splitting below needs $\mu(s) = \mathbb E\, \sigma'(s g)$ with $g \sim N(0, 1)$.
#
# **Question q3.** Write `mean_slope`, accurate to six digits for every $s$ from 0 to 300. Random
# numbers are not accurate enough. Mind how fast $g \mapsto \sigma'(s g)$ changes when $s$ is large.


# %% answer q3
def mean_slope(s, activation):
    """mu(s) = E sigma'(s g) for each entry of the vector s."""
    # BEGIN SOLUTION
    slope = ACTIVATIONS[activation].derivative
    count = 1 + math.ceil(200 * max(1.0, float(s.max())))
    g = torch.linspace(-9, 9, count, dtype=torch.float64)
    weights = torch.exp(-g.square() / 2) / math.sqrt(2 * math.pi) * (18 / (count - 1))
    return slope(s[:, None] * g) @ weights
    # END SOLUTION


# %% public q3
s = torch.tensor([0.0, 0.5, 2.0]).double()
mu = mean_slope(s, "softplus")
shaped("mu", mu, 3)
close("mu for softplus", mu, [0.5, 0.5, 0.5], "Its slope is 1/2 plus an odd function.")
mu = mean_slope(s, "erf")
hint = "For erf the mean is 2 / sqrt(pi (1 + 2 s^2)): is the density normalised, is the range wide?"
assert torch.allclose(mu, 2 / torch.sqrt(math.pi * (1 + 2 * s**2)), rtol=1e-6), hint


# %% hidden q3 2: moderate arguments
def calls(rng):
    names = ("tanh", "sigmoid", "erf", "gelu")
    return [call("mean_slope", s=rng.uniform(0, 4, size=8), activation=name) for name in names]


def check(calls, answers):
    for c, mu in zip(calls, answers):
        s = torch.as_tensor(c.arguments["s"])
        expected = SIGMA[c.arguments["activation"]].mu(s)
        near(mu, expected, tolerance=1e-6, name=f"mu for {c.arguments['activation']}")


# %% hidden q3 1: large arguments
def calls(rng):
    s = rng.uniform(100, 300, size=3)
    return [call("mean_slope", s=s, activation=name) for name in ("tanh", "erf")]


def check(calls, answers):
    for c, mu in zip(calls, answers):
        s = torch.as_tensor(c.arguments["s"])
        near(mu, SIGMA[c.arguments["activation"]].mu(s), tolerance=1e-6, name="mu at large s")


# %% wrong q3 1: a grid that does not follow s
def mean_slope(s, activation):
    g = torch.linspace(-9, 9, 901, dtype=torch.float64)
    weights = torch.exp(-g.square() / 2) / math.sqrt(2 * math.pi) * 0.02
    return ACTIVATIONS[activation].derivative(s[:, None] * g) @ weights


# %% wrong q3 3: the slope at the mean
def mean_slope(s, activation):
    return ACTIVATIONS[activation].derivative(0 * s)


# %% wrong q3 3: random numbers
def mean_slope(s, activation):
    g = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return ACTIVATIONS[activation].derivative(s[:, None] * g).mean(dim=1)


# %% [markdown]
# ## 4. Four pieces
#
# The data are $X = X_B + \zeta z q^\top$ with a unit vector $q$. Split the data into bulk and
# spike, and the slopes into a row vector and the rest,
#
# $$
# \sigma'(XW^\top) = \mathbf 1 \mu^\top + \sigma'_\perp ,
# $$
#
# and multiply out: $G = S_1 + S_{12} + S_2 + E$ with $S_1$ from (bulk, $\mu$), $S_{12}$ from
# (spike, $\mu$), $S_2$ from (spike, rest) and $E$ from (bulk, rest).
#
# **Question q4.** Write `pieces`.


# %% answer q4
def pieces(X, z, q, zeta, W, a, gamma, r, mu, activation):
    """The four matrices S1, S12, S2 and E, each d x m, as a tuple; mu is a vector of length m."""
    # BEGIN SOLUTION
    scale = gamma / len(X)
    bulk = X - zeta * torch.outer(z, q)
    rest = ACTIVATIONS[activation].derivative(X @ W.T) - mu
    S1 = scale * torch.outer(bulk.T @ r, a * mu)
    S12 = scale * zeta * (z @ r) * torch.outer(q, a * mu)
    S2 = scale * zeta * torch.outer(q, a * (rest.T @ (r * z)))
    E = scale * bulk.T @ (r[:, None] * rest * a)
    return S1, S12, S2, E
    # END SOLUTION


# %% public q4
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]]).double()
W = torch.tensor([[0.1, 0.2, 0.3], [0.0, -0.5, 0.4], [1.0, 0.0, 0.0], [0.3, 0.3, -0.3]]).double()
a, r = torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), torch.tensor([0.7, -0.2]).double()
z, q, mu = torch.tensor([0.5, -1.5]).double(), torch.tensor([0.6, 0.0, 0.8]).double(), 0.1 * a + 0.5
found = pieces(X, z, q, 2.0, W, a, 0.5, r, mu, "tanh")
assert isinstance(found, tuple | list) and len(found) == 4, (
    "return the four matrices S1, S12, S2, E"
)
for name, piece in zip(("S1", "S12", "S2", "E"), found):
    shaped(name, piece, 3, 4)
S1, S12, S2, E = found
for name, term in (("S1", S1), ("S12", S12), ("S2", S2)):
    second = torch.linalg.svdvals(term)[1]
    assert second < 1e-12, (
        f"{name} must have rank one, but its second singular value is {second:.1e}"
    )
total = 0.25 * X.T @ (r[:, None] * (1 - torch.tanh(X @ W.T) ** 2) * a)
hint = "Each of the four products must appear once, with the factor gamma / n."
close("S1 + S12 + S2 + E", S1 + S12 + S2 + E, total, hint)


# %% hidden common
def piece_calls(rng):
    sizes = ((5, 8, 6), (9, 4, 7))
    return [
        call("pieces", **instance(rng, *size, name)) for size, name in zip(sizes, ("tanh", "gelu"))
    ]


def piece(number, calls, answers):
    """Compare one of the four with its definition, every term a full matrix."""
    for c, found in zip(calls, answers):
        x = c.arguments
        mean = np.outer(np.ones(len(x["X"])), x["mu"])
        rest = slopes(x["X"], x["W"], x["activation"]) - mean
        spike = x["zeta"] * np.outer(x["z"], x["q"])
        bulk = x["X"] - spike
        side, part = ((bulk, mean), (spike, mean), (spike, rest), (bulk, rest))[number]
        expected = x["gamma"] / len(bulk) * side.T @ (np.outer(x["r"], x["a"]) * part)
        assert isinstance(found, list) and len(found) == 4, "four matrices are expected"
        near(found[number], expected, name=("S1", "S12", "S2", "E")[number])


# %% hidden q4 1: residue spike S1
def calls(rng):
    return piece_calls(rng)


def check(calls, answers):
    piece(0, calls, answers)


# %% hidden q4 1: interpolant S12
def calls(rng):
    return piece_calls(rng)


def check(calls, answers):
    piece(1, calls, answers)


# %% hidden q4 1: data spike S2
def calls(rng):
    return piece_calls(rng)


def check(calls, answers):
    piece(2, calls, answers)


# %% hidden q4 1: rest E
def calls(rng):
    return piece_calls(rng)


def check(calls, answers):
    piece(3, calls, answers)


# %% hidden q4 1: the sum is the gradient, whatever mu is
def calls(rng):
    cases = [instance(rng, 6, 5, 4), instance(rng, 6, 5, 4)]
    cases[1]["mu"] = np.zeros(4)
    return [call("pieces", **case) for case in cases]


def check(calls, answers):
    names = ("X", "W", "a", "gamma", "r", "activation")
    for c, found in zip(calls, answers):
        expected = autograd(**{name: c.arguments[name] for name in names})
        assert isinstance(found, list) and len(found) == 4, "four matrices are expected"
        total = sum(array(each, expected.shape, name="a piece") for each in found)
        near(total, expected, name="the sum of the pieces")


# %% wrong q4 2: S1 from all the data, and E as the difference
def pieces(X, z, q, zeta, W, a, gamma, r, mu, activation):
    scale = gamma / len(X)
    slopes = ACTIVATIONS[activation].derivative(X @ W.T)
    S1 = scale * torch.outer(X.T @ r, a * mu)
    S12 = scale * zeta * (z @ r) * torch.outer(q, a * mu)
    S2 = scale * zeta * torch.outer(q, a * ((slopes - mu).T @ (r * z)))
    return S1, S12, S2, scale * X.T @ (r[:, None] * slopes * a) - S1 - S12 - S2


# %% wrong q4 2: the strength of the spike forgotten in S12
def pieces(X, z, q, zeta, W, a, gamma, r, mu, activation):
    scale = gamma / len(X)
    bulk = X - zeta * torch.outer(z, q)
    rest = ACTIVATIONS[activation].derivative(X @ W.T) - mu
    S1 = scale * torch.outer(bulk.T @ r, a * mu)
    S12 = scale * (z @ r) * torch.outer(q, a * mu)
    S2 = scale * zeta * torch.outer(q, a * (rest.T @ (r * z)))
    return S1, S12, S2, scale * bulk.T @ (r[:, None] * rest * a)


# %% wrong q4 2: S2 from the slopes, mean included
def pieces(X, z, q, zeta, W, a, gamma, r, mu, activation):
    scale = gamma / len(X)
    bulk = X - zeta * torch.outer(z, q)
    slopes = ACTIVATIONS[activation].derivative(X @ W.T)
    S1 = scale * torch.outer(bulk.T @ r, a * mu)
    S12 = scale * zeta * (z @ r) * torch.outer(q, a * mu)
    S2 = scale * zeta * torch.outer(q, a * (slopes.T @ (r * z)))
    return S1, S12, S2, scale * bulk.T @ (r[:, None] * (slopes - mu) * a)


# %% [markdown]
# **Question w2.** Somebody calls `pieces` with $\mu = 0$. Which pieces vanish? Is the sum still
# $G$? Where has the residue spike gone, and how would you notice it in the singular values of
# the pieces? What does this say about "the" decomposition? (Four to six sentences.)

# %% [markdown] written w2 4
# BEGIN SOLUTION
# $S_1$ and $S_{12}$ vanish, since both have the factor $\mu$. The sum is still $G$: the splitting
# of the slopes is an identity for every $\mu$. What was $S_1$ is now inside $E$, and what was
# $S_{12}$ inside $S_2$; $E$ therefore has one singular value of about $\|S_1\|$ that stands out
# of the others. The pieces are a choice, $G$ is not: $\mu_j = \mathbb E\,\sigma'(w_j^\top x)$ is
# chosen to make $E$ small.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: $S_1$ and $S_{12}$ vanish
# - 1 point: the sum is still $G$, with a reason
# - 1 point: the residue spike is in $E$, seen as an outlying singular value
# - 1 point: the decomposition depends on $\mu$, the gradient does not
# END RUBRIC

# %% [markdown]
# ## 5. Two spikes without a matrix
#
# A sum of two rank-one terms, $A = u_1 v_1^\top + u_2 v_2^\top$, has at most two nonzero singular
# values, and they can be found from the four vectors.
#
# **Question q5.** Write `two_spikes`, which returns both, the larger one first. It must work for
# vectors of length 100 000, for which $A$ would fill 80 GB, and where the vectors are parallel or
# zero, so that the second singular value is 0.


# %% answer q5
def two_spikes(u1, v1, u2, v2):
    """The two largest singular values of u1 v1^T + u2 v2^T, descending, as a vector of length 2."""
    # BEGIN SOLUTION
    left = torch.linalg.qr(torch.stack([u1, u2], dim=1)).R
    right = torch.linalg.qr(torch.stack([v1, v2], dim=1)).R
    return torch.linalg.svdvals(left @ right.T)
    # END SOLUTION


# %% public q5
e = torch.eye(4).double()
values = two_spikes(3 * e[0], e[1], e[2], 2 * e[3])
shaped("the singular values", values, 2)
close("the singular values of orthogonal terms", values, [3.0, 2.0], "Here they are |u1| |v1|, ...")
values = two_spikes(e[0], e[1], e[0] + e[1], e[1])
hint = "The terms share v here, so they add up to one: (2, 1, 0, 0) e_1^T of norm sqrt(5)."
close("the larger singular value of terms that share v", values[0], math.sqrt(5), hint)


# %% hidden q5 2: random vectors, correlated and not
def calls(rng):
    wanted = []
    for shared in (0.0, 0.7, 3.0):
        d, m = (int(size) for size in rng.integers(3, 30, size=2))
        u, v = rng.normal(size=(2, d)), rng.normal(size=(2, m))
        u[1], v[1] = u[1] + shared * u[0], v[1] - shared * v[0]
        wanted.append(call("two_spikes", u1=u[0], v1=v[0], u2=u[1], v2=v[1]))
    return wanted


def check(calls, answers):
    for c, values in zip(calls, answers):
        x = c.arguments
        A = np.outer(x["u1"], x["v1"]) + np.outer(x["u2"], x["v2"])
        near(values, np.linalg.svd(A, compute_uv=False)[:2], name="the singular values")


# %% hidden q5 1: vectors too long for a matrix
def calls(rng):
    u, v = rng.normal(size=(2, 60_000)), rng.normal(size=(2, 50_000))
    return [call("two_spikes", u1=u[0], v1=v[0], u2=u[0] + u[1], v2=v[1])]


def check(calls, answers):
    for c, values in zip(calls, answers):
        x = c.arguments
        # Another way: the Gram matrices, whose product has the squares as eigenvalues.
        U, V = np.stack([x["u1"], x["u2"]]), np.stack([x["v1"], x["v2"]])
        squares = np.sort(np.linalg.eigvals(U @ U.T @ V @ V.T).real)[::-1]
        near(values, np.sqrt(squares), name="the singular values")


# %% hidden q5 1: parallel and vanishing terms
def calls(rng):
    wanted = []
    for factor in (0.0, *rng.normal(size=20)):
        u, v = rng.normal(size=7), rng.normal(size=(2, 5))
        wanted.append(call("two_spikes", u1=u, v1=v[0], u2=factor * u, v2=v[1]))
    return wanted


def check(calls, answers):
    for c, values in zip(calls, answers):
        x = c.arguments
        first = np.linalg.norm(np.outer(x["u1"], x["v1"]) + np.outer(x["u2"], x["v2"]))
        values = array(values, (2,), name="the singular values")
        near(values[0], first, name="the larger singular value")
        assert abs(values[1]) < 1e-12 * first, f"the second is {values[1]:.1e}, not 0"


# %% wrong q5 1: the matrix is formed
def two_spikes(u1, v1, u2, v2):
    return torch.linalg.svdvals(torch.outer(u1, v1) + torch.outer(u2, v2))[:2]


# %% wrong q5 4: as if the terms were orthogonal
def two_spikes(u1, v1, u2, v2):
    return torch.stack([u1.norm() * v1.norm(), u2.norm() * v2.norm()]).sort(descending=True)[0]


# %% wrong q5 1: square roots of rounding errors
def two_spikes(u1, v1, u2, v2):
    U, V = torch.stack([u1, u2]), torch.stack([v1, v2])
    squares = torch.linalg.eigvals(U @ U.T @ V @ V.T).real.abs()
    return squares.sort(descending=True)[0].sqrt()


# %% [markdown]
# ## 6. Which spike leads?
#
# **Question q6.** Write `leading_alignment`: $|\cos|$ of the angle between a vector $u$ and the
# leading *left* singular vector of $G$. A singular vector has no sign, and $u$ need not be a unit
# vector.


# %% answer q6
def leading_alignment(G, u):
    """|cos| of the angle between u, length d, and the leading left singular vector of G, d x m."""
    # BEGIN SOLUTION
    leading = torch.linalg.svd(G, full_matrices=False).U[:, 0]
    return (leading @ u).abs() / u.norm()
    # END SOLUTION


# %% public q6
G = torch.diag(torch.tensor([1.0, 3.0, 2.0]).double())[:, :2]
e = torch.eye(3).double()
hint = "Left singular vectors of G have as many entries as G has rows."
found = ran(hint, leading_alignment, G, e[1])
assert found is not None, "it returns nothing: does it end with 'return ...'?"
close("the alignment of G with its own leading direction", found, 1.0, "G e_2 = 3 e_2 is largest.")
hint = "The leading vector is e_2, and the angle to e_1 + e_2 is 45 degrees, whatever its length."
close("the alignment with e_1 + e_2", leading_alignment(G, e[0] + e[1]), math.sqrt(0.5), hint)


# %% hidden common
def alignment_case(rng, d, m):
    G = np.outer(rng.normal(size=d), rng.normal(size=m)) * 2 + rng.normal(size=(d, m))
    u = rng.normal(size=d)
    return G, u / np.linalg.norm(u)


def expected_alignment(G, u):
    # Another way: the leading eigenvector of G G^T.
    leading = np.linalg.eigh(G @ G.T)[1][:, -1]
    return abs(leading @ u) / np.linalg.norm(u)


# %% hidden q6 1: no sign
def calls(rng):
    G, u = alignment_case(rng, 9, 6)
    return [call("leading_alignment", G=s * G, u=t * u) for s in (1.0, -1.0) for t in (1.0, -1.0)]


def check(calls, answers):
    for c, value in zip(calls, answers):
        near(value, expected_alignment(**c.arguments), name="the alignment")


# %% hidden q6 1: tall and wide matrices
def calls(rng):
    cases = [alignment_case(rng, 12, 5), alignment_case(rng, 5, 12), alignment_case(rng, 40, 3)]
    return [call("leading_alignment", G=G, u=u) for G, u in cases]


def check(calls, answers):
    for c, value in zip(calls, answers):
        size = abs(array(value, (), name="the alignment"))
        near(size, expected_alignment(**c.arguments), name="the size of the alignment")


# %% hidden q6 1: vectors of any length
def calls(rng):
    cases = [(*alignment_case(rng, 8, 11), factor) for factor in (0.01, 5.0)]
    return [call("leading_alignment", G=G, u=factor * u) for G, u, factor in cases]


def check(calls, answers):
    for c, value in zip(calls, answers):
        size = abs(array(value, (), name="the alignment"))
        near(size, expected_alignment(**c.arguments), name="the size of the alignment")


# %% wrong q6 1: with a sign
def leading_alignment(G, u):
    return torch.linalg.svd(G, full_matrices=False).U[:, 0] @ u / u.norm()


# %% wrong q6 1: u not normalised
def leading_alignment(G, u):
    return (torch.linalg.svd(G, full_matrices=False).U[:, 0] @ u).abs()


# %% wrong q6 3: the least singular vector
def leading_alignment(G, u):
    return (torch.linalg.svd(G, full_matrices=False).U[:, -1] @ u).abs() / u.norm()


# %% wrong q6 3: the right singular vector
def leading_alignment(G, u):
    return (torch.linalg.svd(G, full_matrices=False).Vh[0] @ u).abs() / u.norm()


# %% [markdown]
# ## 7. The best mean
#
# The pieces depend on $\mu$. Which $\mu$ makes the rest smallest?
#
# **Question q7.** Write `best_mean`: the vector $\mu$ for which the Frobenius norm of
# $E = \frac{\gamma}{n} X_B^\top[(r a^\top) \circ (\sigma'(XW^\top) - \mathbf 1\mu^\top)]$ is
# smallest. Each neuron is a least-squares problem in one unknown. All $a_j$ are different from 0.


# %% answer q7
def best_mean(X, X_B, W, r, activation):
    """The mu, length m, that makes |E|_F smallest, for bulk X_B of the data X (both n x d)."""
    # BEGIN SOLUTION
    slopes = ACTIVATIONS[activation].derivative(X @ W.T)
    shared = X_B.T @ r
    columns = X_B.T @ (r[:, None] * slopes)
    return shared @ columns / (shared @ shared)
    # END SOLUTION


# %% public q7
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]]).double()
W = torch.tensor([[0.1, 0.2, 0.3], [0.0, -0.5, 0.4], [1.0, 0.0, 0.0], [0.3, 0.3, -0.3]]).double()
r = torch.tensor([0.7, -0.2]).double()
mu = best_mean(X, X, W, r, "tanh")
shaped("mu", mu, 4)
hint = "With one example E can be made zero: mu is that example's slope."
close(
    "mu for one example",
    best_mean(X[:1], X[:1], W, r[:1], "tanh"),
    1 - torch.tanh(W @ X[0]) ** 2,
    hint,
)
slopes = 1 - torch.tanh(X @ W.T) ** 2
size = lambda mean: (X.T @ (r[:, None] * (slopes - mean))).norm()
hint = "Moving your mu a little makes E smaller, so it is not the best one."
assert all(size(mu) <= size(mu + step) + 1e-12 for step in (0.01, -0.01)), hint


# %% hidden common
def mean_calls(rng):
    wanted = []
    for (n, d, m), name in zip(((7, 5, 6), (5, 9, 4), (20, 6, 3)), ("tanh", "softplus", "gelu")):
        case = instance(rng, n, d, m, name)
        bulk = case["X"] - case["zeta"] * np.outer(case["z"], case["q"])
        x = {name: case[name] for name in ("X", "W", "r", "activation")}
        wanted.append(call("best_mean", X_B=bulk, **x))
    return wanted


def best(X, X_B, W, r, activation):
    # Another way: least squares for each neuron.
    columns = X_B.T @ (r[:, None] * slopes(X, W, activation))
    return np.linalg.lstsq((X_B.T @ r)[:, None], columns, rcond=None)[0][0]


# %% hidden q7 2: up to a factor
def calls(rng):
    return mean_calls(rng)


def check(calls, answers):
    for c, mu in zip(calls, answers):
        direction(mu, best(**c.arguments), "mu")


# %% hidden q7 2: no vector does better
def calls(rng):
    return mean_calls(rng)


def check(calls, answers):
    for c, mu in zip(calls, answers):
        x, mu = c.arguments, array(mu, (len(c.arguments["W"]),), name="mu")
        found = slopes(x["X"], x["W"], x["activation"])

        def size(mean):
            return np.linalg.norm(x["X_B"].T @ (x["r"][:, None] * (found - mean)))

        others = [found.mean(axis=0), 1.01 * mu, 0.99 * mu, mu + 0.01, mu - 0.01, best(**x)]
        better = min(size(other) for other in others)
        assert size(mu) <= better * (1 + 1e-9), (
            f"another mu gives an E of {better / size(mu):.4f} times the size"
        )


# %% wrong q7 4: the plain mean over the examples
def best_mean(X, X_B, W, r, activation):
    return ACTIVATIONS[activation].derivative(X @ W.T).mean(dim=0)


# %% wrong q7 2: divided by a length, not by its square
def best_mean(X, X_B, W, r, activation):
    shared = X_B.T @ r
    columns = X_B.T @ (r[:, None] * ACTIVATIONS[activation].derivative(X @ W.T))
    return shared @ columns / shared.norm()


# %% wrong q7 4: the data in place of their bulk
def best_mean(X, X_B, W, r, activation):
    shared = X.T @ r
    columns = X.T @ (r[:, None] * ACTIVATIONS[activation].derivative(X @ W.T))
    return shared @ columns / (shared @ shared)


# %% [markdown]
# ## 8. How fast do the pieces grow?
#
# **Question q8.** `norms` holds, for each seed (row) and each spike strength $\zeta$ (column),
# the norm of a piece. Write `exponent`: the least-squares slope of $\log$ norm against
# $\log \zeta$, all seeds together.


# %% answer q8
def exponent(zetas, norms):
    """The fitted exponent p of norm ~ zeta^p, for zetas of length k and norms of size seeds x k."""
    # BEGIN SOLUTION
    x = torch.log(zetas) - torch.log(zetas).mean()
    y = torch.log(norms).mean(dim=0)
    return (x @ y) / (x @ x)
    # END SOLUTION


# %% public q8
zetas = torch.tensor([1.0, 2.0, 4.0]).double()
found = exponent(zetas, torch.stack([3 * zetas**2, 5 * zetas**2]))
assert found is not None, "it returns nothing: does it end with 'return ...'?"
close("the exponent of 3 zeta^2 and 5 zeta^2", found, 2.0, "The factor changes no slope.")


# %% hidden q8 1: exact power laws
def calls(rng):
    wanted = []
    for p in (-1.3, 0.4, 2.0):
        zetas = np.sort(rng.uniform(1, 9, size=6))
        factors = rng.uniform(0.1, 10, size=(4, 1))
        wanted.append(call("exponent", zetas=zetas, norms=factors * zetas**p))
    return wanted


def check(calls, answers):
    for p, value in zip((-1.3, 0.4, 2.0), answers):
        near(value, p, name="the exponent")


# %% hidden q8 1: scattered norms
def calls(rng):
    zetas = np.sort(rng.uniform(1, 9, size=7))
    norms = zetas**1.5 * np.exp(0.4 * rng.normal(size=(5, 7)))
    return [call("exponent", zetas=zetas, norms=norms)]


def check(calls, answers):
    for c, value in zip(calls, answers):
        x = np.tile(np.log(c.arguments["zetas"]), len(c.arguments["norms"]))
        expected = np.polyfit(x, np.log(c.arguments["norms"]).ravel(), 1)[0]
        near(value, expected, name="the exponent")


# %% wrong q8 1: first and last point only
def exponent(zetas, norms):
    change = torch.log(norms[:, -1] / norms[:, 0]).mean()
    return change / torch.log(zetas[-1] / zetas[0])


# %% wrong q8 1: the first seed only
def exponent(zetas, norms):
    x = torch.log(zetas) - torch.log(zetas).mean()
    return (x @ torch.log(norms[0])) / (x @ x)


# %% wrong q8 2: only one of the two logarithms
def exponent(zetas, norms):
    x = zetas - zetas.mean()
    return (x @ torch.log(norms).mean(dim=0)) / (x @ x)


# %% [markdown]
# ### The experiment
#
# Now your functions measure. The next cell draws data with spikes of growing strength
# $\zeta = n^\nu$, takes the gradient of the squared loss at initialisation apart, and keeps the
# norms of the pieces.


# %%
def experiment(nu, seed, n=90, d=120, m=150):
    """Strength of the spike, norms of S1, S12, S2 and E, and who leads, for one draw."""
    data = sample_spiked_data(n, d, nu=nu, seed=seed)
    network = TwoLayerNetwork.random(d, m, activation="softplus", seed=seed)
    y = sample_targets(data.X, "triple-index", seed=seed).y
    r = residue(network(data.X), y, "mse")
    mu = mean_slope(data.preactivation_scale(network.W), "softplus")
    parts = pieces(
        data.X, data.z, data.q, data.zeta, network.W, network.a, network.gamma, r, mu, "softplus"
    )
    norms = [float(torch.linalg.matrix_norm(part, ord=2)) for part in parts]
    G = sum(parts)
    leaders = [data.bulk_times(r), data.q]
    return data.zeta, norms, [float(leading_alignment(G, u)) for u in leaders]


# %%
nus, seeds = torch.linspace(0, 0.75, 7).tolist(), range(6)
table = [[experiment(nu, seed) for nu in nus] for seed in seeds]
zetas = torch.tensor([row[0] for row in table[0]]).double()
norms = torch.tensor([[cell[1] for cell in row] for row in table]).double()
leaders = torch.tensor([[cell[2] for cell in row] for row in table]).double()
for k, name in enumerate(("S1", "S12", "S2", "E")):
    print(f"{name:4s} exponent {float(exponent(zetas, norms[..., k])):5.2f}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6))
for k, name in enumerate(("S₁", "S₁₂", "S₂", "E")):
    axes[0].loglog(zetas, norms[..., k].median(dim=0).values, "o-", label=name)
for k, name in enumerate(("residue direction X_Bᵀr", "spike direction q")):
    axes[1].semilogx(zetas, leaders[..., k].median(dim=0).values, "o-", label=name)
axes[0].set(xlabel="spike strength ζ", ylabel="operator norm (median)")
axes[1].set(xlabel="spike strength ζ", ylabel="alignment with leading vector", ylim=(0, 1.03))
for axis in axes:
    axis.legend()
fig.tight_layout()
plt.show()

# %% [markdown]
# **Question w3.** Read the figure and the exponents. Which piece leads for a weak spike, which for
# a strong one, and near which $\zeta$ do they change places? Which exponent of $S_{12}$ does its
# formula suggest, and why can the measured one differ? Name one thing that six seeds at one size
# cannot tell you, and how you would find out. (Five to eight sentences.)

# %% [markdown] written w3 4
# BEGIN SOLUTION
# Weak spike: $S_1$ is the largest piece and the leading vector is the residue direction
# $X_B^\top r$ (alignment above 0.95 up to $\zeta \approx 3$). Strong spike: $S_{12}$ and $S_2$
# are the largest, both have the left vector $q$, and the leading vector is $q$ (above 0.9 from
# $\zeta \approx 9$). The alignments cross near $\zeta \approx 6$, the norms of $S_{12}$ and $S_1$
# near 8. The formula of $S_{12}$ has one factor $\zeta$, which suggests the exponent 1; measured
# is about 1.8, because $z^\top r$ grows with $\zeta$ as well: outputs and targets depend on the
# spike, so the residue does. Six seeds at one size say nothing about exponents in $n$, and little
# about the scatter of $z^\top r$: repeat at several sizes with $d/n$ fixed and fit, or take more
# seeds.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: who leads on either side, read off both panels
# - 1 point: where they change places, with a number from the own figure
# - 1 point: the factor $\zeta$ in $S_{12}$, and that $z^\top r$ depends on $\zeta$ and the draw
# - 1 point: a limit of the experiment, with a way to find out (sizes, seeds, other activation)
# END RUBRIC
