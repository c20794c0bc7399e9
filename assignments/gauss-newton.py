# %% assignment
# title = "Gauss-Newton algebra"
# minutes = {q1=30, q2=30, q3=40, w1=35, q4=25, q5=35, w2=30, w3=20, q6=35, q7=30, q8=40, w4=35}
# withheld = [
#     "lowgrad_utils.experiments.density.lanczos_without_reorthogonalisation",
#     "lowgrad_utils.experiments.density.level_spectra",
#     "lowgrad_utils.experiments.excess.rescaled_eigenvalues",
#     "lowgrad_utils.experiments.small_classifiers.logit_curvature",
#     "lowgrad_utils.experiments.small_classifiers.jacobian",
#     "lowgrad_utils.experiments.small_classifiers.loss_gradients",
#     "lowgrad_utils.experiments.small_classifiers.logit_hessians",
#     "lowgrad_utils.experiments.small_classifiers.loss_hessian",
#     "lowgrad_utils.tangent_kernel.softmax_jacobian",
#     "lowgrad_utils.eigensolvers.spectral_density",
#     "lowgrad_utils.eigensolvers._lanczos",
#     "lowgrad_utils.three_levels.explicit_terms",
#     "lowgrad_utils.three_levels.three_levels",
#     "lowgrad_utils.three_levels.within_groups",
#     "lowgrad_utils.three_levels.ThreeLevels",
#     "lowgrad_utils.curvature.LossCurvature",
#     "lowgrad_utils.curvature._others",
#     "lowgrad_utils.curvature._units_minus",
#     "lowgrad_utils.curvature._minus_mean",
# ]

# %% [markdown]
# # Assignment: Gauss-Newton algebra
#
# You write the algebra of a classifier's curvature from its first line to its spectrum: the
# derivatives of the loss in the logits, logit derivatives, products with matrices that are never
# formed, the four terms of the Gauss-Newton matrix, and estimates of its trace and its spectral
# density. Then you measure with what you wrote.
#
# **Learning goals.** Keep the digits of probabilities that are nearly one; write second
# derivatives as second moments, and say of what; multiply by a Gauss-Newton matrix and by the rest
# of the Hessian at the price of a few passes through the network; split a second moment by groups
# of unequal size. In the further questions: find a spectrum from inner products alone; estimate
# traces and densities from random vectors, and say how far to trust them.
#
# **You need** linear algebra (eigenvalues, projections), the chain rule, covariances, some PyTorch
# (`torch.func.jvp`, `torch.func.vjp` or `torch.autograd.grad`). Read the chapters *The algebra of
# the Gauss-Newton matrix*, *Three levels* and *Hessian, Gauss-Newton and the spectral density*
# first.
#
# All arrays are torch tensors in float64, also those that you return. The functions of
# `lowgrad_utils` that do a question's work (`LossCurvature`, `ThreeLevels`, `explicit_terms`,
# `softmax_jacobian`, `spectral_density`, and their like) are switched off in the grading. Do not
# call the answer to one question in another: then a mistake costs you once.
#
# **The network.** The next cell has the network of this assignment, `logits(theta, X, widths)`:
# layers of the sizes `widths`, a list of whole numbers from $d$ inputs to $C$ logits, with tanh
# between them. The vector $\theta$ of length $P$ holds, layer by layer, the weights and then the
# biases. For example $x_i$, row $i$ of $X$ ($n \times d$), $z_i \in \mathbb R^C$ are the logits,
# $p_i = \operatorname{softmax}(z_i)$, and $J_i = \partial z_i / \partial \theta$ is $C \times P$.
# Labels come as rows $y_i$ of a matrix $Y$ ($n \times C$): $y_i = e_c$ for an example of class
# $c$. The loss of an example is $\ell_i = -\sum_k y_{i,k} \log p_{i,k}$, that of the network
# $L(\theta) = \frac1n \sum_i \ell_i$.

# %%
import math
from itertools import pairwise

import torch
from matplotlib import pyplot as plt

from lowgrad_utils import load

plt.style.use("tableau-colorblind10")


def logits(theta, X, widths):
    """Logits, n x C, of the network with parameters theta (P) for data X (n x d)."""
    sizes = [size for d, m in pairwise(widths) for size in (m * d, m)]
    parts = theta.split(sizes)
    h = X
    for layer, (d, m) in enumerate(pairwise(widths)):
        W, b = parts[2 * layer].reshape(m, d), parts[2 * layer + 1]
        h = (torch.tanh(h) if layer else h) @ W.T + b
    return h


# %% [markdown]
# ## 1. Derivatives in the logits
#
# The first derivative of $\ell_i$ in the logits is the residue $r_i = p_i - y_i$, the second one
# the matrix $A_i = \operatorname{diag}(p_i) - p_i p_i^\top$. Of a well-trained network many
# examples have a $p_{i,k}$ that differs from 1 by less than float64 can hold, and then formulas
# that are right on paper return zeros.
#
# **Question q1.** Write `loss_derivatives`: the residues, and the products $A_i u_i$ with given
# vectors $u_i$, the rows of $U$. Each row of both must be right to eight digits, relative to the
# length of that row, also where the largest $p_{i,k}$ differs from 1 by as little as $10^{-20}$.
# The largest need not be that of the true class.


# %% answer q1
def loss_derivatives(Z, Y, U):
    """Residues r_i and products A_i u_i, two n x C matrices, for logits Z, labels Y, vectors U."""
    # BEGIN SOLUTION
    p = Z.softmax(1)
    others = p @ (1 - torch.eye(Z.shape[1], dtype=Z.dtype))
    residue = torch.where(Y == 1, -others, p)
    top = p.argmax(1, keepdim=True)
    change = U - U.gather(1, top)
    return residue, p * (change - (p * change).sum(1, keepdim=True))
    # END SOLUTION


# %% public q1
Z = torch.tensor([[0.2, -1.0, 0.5], [1.0, 2.0, 0.0]]).double()
Y, U = torch.eye(3).double()[[0, 2]], torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]]).double()
found = ran("It takes Z, Y and U.", loss_derivatives, Z.clone(), Y.clone(), U.clone())
hint = "return two matrices, the residues and the products"
assert isinstance(found, tuple | list) and len(found) == 2, hint
r, product = found
shaped("the matrix of residues", r, 2, 3)
shaped("the matrix of products", product, 2, 3)
hint = "Row i is the slope of -log p_c in the logits: raising the true logit must lower the loss."
assert r[0, 0] < 0 and r[1, 2] < 0, hint
step = 1e-6
change = ((Z + step * U).softmax(1) - (Z - step * U).softmax(1)) / (2 * step)
hint = "A is the derivative of softmax: compare with the change of p along u."
assert (product - change).norm() < 1e-6, hint

# %% public q1
Z = torch.tensor([[0.0, -50.0, -51.0], [-40.0, 0.0, -42.0]]).double()
Y, U = torch.eye(3).double()[[0, 0]], torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]]).double()
r, product = loss_derivatives(Z, Y, U)
hint = "Residues add up to zero. Which numbers that you know exactly is 1 - p_c made of?"
assert abs(r[0].sum()) < 1e-10 * r[0].norm(), hint
hint = "A u adds up to zero, too. Adding a constant to u changes nothing: which constant helps?"
for row in product:
    assert abs(row.sum()) < 1e-10 * row.norm(), hint

# %% hidden common
from decimal import Decimal, localcontext
from itertools import pairwise


def pair(answer, number, name):
    """One of the two values of an answer."""
    assert isinstance(answer, list) and len(answer) == 2, f"{name}: two values are expected"
    return answer[number]


def units(rng, n, C):
    """Labels as rows; the first C examples have one label each."""
    labels = np.concatenate([np.arange(C), rng.integers(C, size=n - C)])
    return np.eye(C)[labels]


def ordinary_logits(rng):
    wanted = []
    for n, C in ((7, 2), (6, 3), (12, 10)):
        Z, U = 2 * rng.normal(size=(n, C)) + rng.normal(), rng.normal(size=(n, C))
        wanted.append(call("loss_derivatives", Z=Z, Y=units(rng, n, C), U=U))
    return wanted


def confident_logits(rng):
    """One logit far ahead, of the true class or of another one."""
    n, C = 12, 4
    Y, Z = units(rng, n, C), rng.normal(size=(n, C))
    top = Y.argmax(1)
    top[::4] = (top[::4] + 1) % C
    Z[np.arange(n), top] += rng.uniform(28, 43, size=n)
    return [call("loss_derivatives", Z=Z + 100, Y=Y, U=rng.normal(size=(n, C)))]


def check_residues(calls, answers):
    for c, found in zip(calls, answers):
        Z = torch.as_tensor(c.arguments["Z"]).requires_grad_()
        logs = torch.log_softmax(Z, 1)
        loss = -(torch.as_tensor(c.arguments["Y"]) * logs).sum()
        near(pair(found, 0, "r"), torch.autograd.grad(loss, Z)[0], name="r")


def check_products(calls, answers):
    for c, found in zip(calls, answers):
        Z, U = (torch.as_tensor(c.arguments[name]) for name in "ZU")
        expected = torch.func.jvp(lambda z: z.softmax(1), (Z,), (U,))[1]
        near(pair(found, 1, "A u"), expected, name="A u")


def in_many_digits(Z, Y, U):
    """Residues and products, row by row, with 60 digits."""
    residues, products = [], []
    with localcontext() as context:
        context.prec = 60
        for z, y, u in zip(Z, Y, U):
            e = [Decimal(float(x)).exp() for x in z]
            p, u = [x / sum(e) for x in e], [Decimal(float(x)) for x in u]
            mean = sum(a * b for a, b in zip(p, u))
            residues.append([float(a - Decimal(float(b))) for a, b in zip(p, y)])
            products.append([float(a * (b - mean)) for a, b in zip(p, u)])
    return residues, products


def check_digits(number, name, calls, answers):
    for c, found in zip(calls, answers):
        expected = np.array(in_many_digits(**c.arguments)[number])
        value = array(pair(found, number, name), expected.shape, name=name)
        for i, row in enumerate(value):
            near(row, expected[i], name=f"{name} of a confident example")


# %% hidden q1 1: residues
def calls(rng):
    return ordinary_logits(rng)


def check(calls, answers):
    check_residues(calls, answers)


# %% hidden q1 1: products
def calls(rng):
    return ordinary_logits(rng)


def check(calls, answers):
    check_products(calls, answers)


# %% hidden q1 1: residues of confident examples
def calls(rng):
    return confident_logits(rng)


def check(calls, answers):
    check_digits(0, "r", calls, answers)


# %% hidden q1 1: products for confident examples
def calls(rng):
    return confident_logits(rng)


def check(calls, answers):
    check_digits(1, "A u", calls, answers)


# %% wrong q1 1: the residue as a difference
def loss_derivatives(Z, Y, U):
    p = Z.softmax(1)
    change = U - U.gather(1, p.argmax(1, keepdim=True))
    return p - Y, p * (change - (p * change).sum(1, keepdim=True))


# %% wrong q1 1: the product as a difference
def loss_derivatives(Z, Y, U):
    p = Z.softmax(1)
    others = p @ (1 - torch.eye(Z.shape[1], dtype=Z.dtype))
    return torch.where(Y == 1, -others, p), p * U - p * (p * U).sum(1, keepdim=True)


# %% wrong q1 1: relative to the true logit, not to the largest one
def loss_derivatives(Z, Y, U):
    p = Z.softmax(1)
    others = p @ (1 - torch.eye(Z.shape[1], dtype=Z.dtype))
    change = U - (U * Y).sum(1, keepdim=True)
    return torch.where(Y == 1, -others, p), p * (change - (p * change).sum(1, keepdim=True))


# %% wrong q1 2: labels minus probabilities
def loss_derivatives(Z, Y, U):
    p = Z.softmax(1)
    others = p @ (1 - torch.eye(Z.shape[1], dtype=Z.dtype))
    change = U - U.gather(1, p.argmax(1, keepdim=True))
    product = p * (change - (p * change).sum(1, keepdim=True))
    return torch.where(Y == 1, others, -p), product


# %% wrong q1 2: the plain mean of u in place of the mean under p
def loss_derivatives(Z, Y, U):
    p = Z.softmax(1)
    others = p @ (1 - torch.eye(Z.shape[1], dtype=Z.dtype))
    return torch.where(Y == 1, -others, p), p * (U - U.mean(1, keepdim=True))


# %% [markdown]
# ## 2. Logit derivatives
#
# The logit derivatives of example $i$ are the $C$ vectors of length $P$
#
# $$
# \delta_{i,c'} = \sqrt{p_{i,c'}}\; J_i^\top (e_{c'} - p_i), \qquad c' = 1, \dots, C,
# $$
#
# and the Gauss-Newton matrix is their second moment,
# $G = \frac1n \sum_i J_i^\top A_i J_i = \frac1n \sum_{i,c'} \delta_{i,c'} \delta_{i,c'}^\top$.
#
# **Question q2.** Write `logit_derivatives` for a network small enough to keep all of them. Each of
# the vectors must be right to eight digits, relative to its own length, also where $p_{i,c'}$ is
# nearly one.


# %% answer q2
def logit_derivatives(theta, X, widths):
    """The derivatives delta, n x C x P, for parameters theta (P), data X (n x d), layer sizes."""
    # BEGIN SOLUTION
    J = torch.func.jacrev(logits)(theta, X, widths)
    p = logits(theta, X, widths).softmax(1)
    C = p.shape[1]
    own = torch.eye(C, dtype=p.dtype)
    cotangents = -p[:, None].repeat(1, C, 1) * (1 - own) + own * (p @ (1 - own))[:, None]
    return torch.einsum("nc,nck,nkp->ncp", p.sqrt(), cotangents, J)
    # END SOLUTION


# %% public q2
# A single layer: J^T u has the weights u x^T, row by row, and then the biases u.
X, theta = torch.tensor([[1.0, -2.0], [0.5, 0.3]]).double(), torch.linspace(-1, 1, 9).double()
delta = ran("It takes theta, X and widths.", logit_derivatives, theta, X, [2, 3])
shaped("delta", delta, 2, 3, 9)
p = (X @ theta[:6].reshape(3, 2).T + theta[6:]).softmax(1)
hint = "Which combination of an example's vectors is zero, because p adds up to one?"
assert torch.einsum("nc,ncp->np", p.sqrt(), delta).norm() < 1e-10, hint
hint = "The bias of logit c' raises logit c', so this entry of delta_{i,c'} is positive."
assert all(delta[0, c, 6 + c] > 0 for c in range(3)), hint
hint = "Here delta_{i,c'} ends with sqrt(p_c') (e_c' - p). Do you keep p constant when you derive?"
unit = torch.tensor([0.0, 1.0, 0.0]).double()
close("the biases in delta[0, 1]", delta[0, 1, 6:], p[0, 1].sqrt() * (unit - p[0]), hint)
hint = "Before the biases come the weights, u x^T row by row with u = sqrt(p_c') (e_c' - p)."
weights = torch.outer(delta[1, 2, 6:], X[1]).flatten()
close("the weights in delta[1, 2]", delta[1, 2, :6], weights, hint)

# %% public q2
theta = torch.cat([torch.zeros(6), torch.tensor([45.0, 0.0, 1.0])]).double()
delta = logit_derivatives(theta, torch.ones(1, 2).double(), [2, 3])
hint = "Here p_1 = 1 - 1e-19, and delta_{i,1} is tiny, but its entry 7 is not 0: what is 1 - p_1?"
assert delta[0, 0, 6] > 1e-20, hint


# %% hidden common
def network(theta, X, widths):
    """Weights, inputs of each layer, and logits, as torch tensors."""
    theta, h, at, weights, inputs = torch.as_tensor(theta), torch.as_tensor(X), 0, [], []
    for d, m in pairwise(widths):
        h = torch.tanh(h) if inputs else h
        W = theta[at : at + m * d].reshape(m, d)
        weights.append(W)
        inputs.append(h)
        h = torch.addmm(theta[at + m * d : at + m * d + m], h, W.T)
        at += m * d + m
    return weights, inputs, h


def factors(theta, X, widths, cotangents):
    """J_i^T v layer by layer, as b h^T: what comes back, n x K x m, and what went in, n x d."""
    weights, inputs, _ = network(theta, X, widths)
    found, back = [], cotangents
    for W, h in zip(reversed(weights), reversed([each.numpy() for each in inputs])):
        found.append((back, h))
        back = back @ W.numpy() * (1 - h**2)[:, None]
    return found[::-1]


def pulled_back(theta, X, widths, cotangents):
    """J_i^T v for K cotangents v of each example, n x K x P."""
    parts = []
    for back, h in factors(theta, X, widths, cotangents):
        outer = back[..., None] * h[:, None, None]
        parts += [outer.reshape(*back.shape[:2], -1), back]
    return np.concatenate(parts, axis=2)


def jacobian(theta, X, widths):
    C = widths[-1]
    return pulled_back(theta, X, widths, np.broadcast_to(np.eye(C), (len(X), C, C)))


def softmax(theta, X, widths):
    z = network(theta, X, widths)[2].numpy()
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def label_residues(p):
    """p - e_c' for each logit c', n x C x C; its own entry is minus the sum of the others."""
    residues = np.repeat(p[:, None], p.shape[1], axis=1)
    for c in range(p.shape[1]):
        residues[:, c, c] = -np.delete(p, c, axis=1).sum(1)
    return residues


def draw(rng, widths, n, lead=0.0):
    """Parameters and data; the first logit is ahead by about `lead`."""
    parts = []
    for d, m in pairwise(widths):
        parts += [rng.normal(size=m * d) * 1.5 / math.sqrt(d), rng.normal(size=m) / 2]
    parts[-1][0] += lead
    return {
        "theta": np.concatenate(parts),
        "X": rng.normal(size=(n, widths[0])),
        "widths": list(widths),
    }


NETWORKS = (([3, 4], 5), ([4, 5, 3], 6), ([3, 4, 5, 2], 7))


def gauss_newton(theta, X, widths):
    """G of each example, n x P x P, with the loss differentiated twice in the logits."""
    J, z = jacobian(theta, X, widths), network(theta, X, widths)[2]
    label = torch.zeros(1, dtype=torch.int64)
    second = [
        torch.func.hessian(lambda u: torch.nn.functional.cross_entropy(u[None], label))(row)
        for row in z
    ]
    return np.einsum("nkp,nkl,nlq->npq", J, torch.stack(second).numpy(), J)


# %% hidden q2 2: their second moment is G, example by example
def calls(rng):
    return [call("logit_derivatives", **draw(rng, *each)) for each in NETWORKS]


def check(calls, answers):
    for c, delta in zip(calls, answers):
        expected = gauss_newton(**c.arguments)
        shape = (len(expected), c.arguments["widths"][-1], expected.shape[1])
        delta = array(delta, shape, name="delta")
        near(np.einsum("ncp,ncq->npq", delta, delta), expected, name="the second moment of delta")


# %% hidden q2 1: with their sign, in their order
def calls(rng):
    return [call("logit_derivatives", **draw(rng, *each)) for each in NETWORKS]


def check(calls, answers):
    for c, delta in zip(calls, answers):
        p = softmax(**c.arguments)
        cotangents = -np.sqrt(p)[..., None] * label_residues(p)
        near(delta, pulled_back(**c.arguments, cotangents=cotangents), name="delta")


# %% hidden q2 1: confident examples, up to sign
def calls(rng):
    wanted = []
    for widths in ([4, 3], [3, 5, 4]):
        wanted.append(call("logit_derivatives", **draw(rng, widths, 6, lead=40.0)))
    return wanted


def check(calls, answers):
    for c, delta in zip(calls, answers):
        p = softmax(**c.arguments)
        cotangents = np.sqrt(p)[..., None] * label_residues(p)
        expected = pulled_back(**c.arguments, cotangents=cotangents)
        delta = array(delta, expected.shape, name="delta")
        for found, vector in zip(delta.reshape(-1, delta.shape[2]), np.vstack(expected)):
            sign = math.copysign(1, found @ vector)
            near(sign * found, vector, name="a logit derivative of a confident example")


# %% wrong q2 1: as gradients of the loss, with the opposite sign
def logit_derivatives(theta, X, widths):
    J = torch.func.jacrev(logits)(theta, X, widths)
    p = logits(theta, X, widths).softmax(1)
    own = torch.eye(p.shape[1], dtype=p.dtype)
    residues = p[:, None] * (1 - own) - own * (p @ (1 - own))[:, None]
    return torch.einsum("nc,nck,nkp->ncp", p.sqrt(), residues, J)


# %% wrong q2 1: one minus p as a difference
def logit_derivatives(theta, X, widths):
    J = torch.func.jacrev(logits)(theta, X, widths)
    p = logits(theta, X, widths).softmax(1)
    return p.sqrt()[..., None] * (J - torch.einsum("nk,nkp->np", p, J)[:, None])


# %% wrong q2 4: the weight p in place of its root
def logit_derivatives(theta, X, widths):
    J = torch.func.jacrev(logits)(theta, X, widths)
    p = logits(theta, X, widths).softmax(1)
    own = torch.eye(p.shape[1], dtype=p.dtype)
    cotangents = own * (p @ (1 - own))[:, None] - p[:, None] * (1 - own)
    return torch.einsum("nc,nck,nkp->ncp", p, cotangents, J)


# %% wrong q2 4: probabilities that are differentiated
def logit_derivatives(theta, X, widths):
    def weighted(t):
        z = logits(t, X, widths)
        p = z.softmax(1)
        return p.sqrt() * (z - (p * z).sum(1, keepdim=True))

    return torch.func.jacrev(weighted)(theta)


# %% wrong q2 4: not centred
def logit_derivatives(theta, X, widths):
    J = torch.func.jacrev(logits)(theta, X, widths)
    return logits(theta, X, widths).softmax(1).sqrt()[..., None] * J


# %% [markdown]
# ## 3. Second moments of loss gradients
#
# Let $g_{i,c'}$ be the gradient in $\theta$ of $-\log p_{i,c'}$: of the loss that example $i$ would
# have if its label were $c'$. For weights $w_{i,c'} \ge 0$, any numbers, consider
#
# $$
# M_w = \frac1n \sum_i \sum_{c'} w_{i,c'}\; g_{i,c'}\, g_{i,c'}^\top .
# $$
#
# Three choices matter. For $w = p$ it is the Gauss-Newton matrix $G$. For $w = Y$ it is the second
# moment of the gradients of training, the *empirical Fisher matrix* $F$. And if $S$ labels are
# drawn for each example, $w_{i,c'}$ is the share of the draws that gave $c'$.
#
# **Question q3.** Write `moment_product`, which returns $M_w v$. It must work for networks for
# which an array of $n C P$ numbers does not fit in memory (here: 1.1 GB), and take a few seconds at
# most. Two passes through the network are enough: $g_{i,c'} = J_i^\top(\dots)$, and what is needed
# of $v$ is $J_i v$.


# %% answer q3
def moment_product(theta, X, widths, w, v):
    """The product M_w v, a vector of length P, for weights w (n x C) and a vector v (P)."""
    # BEGIN SOLUTION
    n = len(X)

    def function(t):
        return logits(t, X, widths)

    z, u = torch.func.jvp(function, (theta,), (v,))
    p = z.softmax(1)
    along = (p * u).sum(1, keepdim=True) - u
    weighted = w * along / n
    cotangent = p * weighted.sum(1, keepdim=True) - weighted
    return torch.func.vjp(function, theta)[1](cotangent)[0]
    # END SOLUTION


# %% public q3
# A single layer: the gradient of -log p_c' has the weights (p - e_c') x^T, row by row, and biases.
X, theta = torch.tensor([[1.0, -2.0], [0.5, 0.3]]).double(), torch.linspace(-1, 1, 9).double()
v = torch.linspace(1, -0.4, 9).double()
p = (X @ theta[:6].reshape(3, 2).T + theta[6:]).softmax(1)
one, other = torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
one[0, 1], other[1, 2] = 1, 1
product = ran("It takes theta, X, widths, w, v.", moment_product, theta, X, [2, 3], one, v)
shaped("M v", product, 9)
units = torch.eye(3).double()
g = [torch.cat([torch.outer(r, x).flatten(), r]) for r, x in zip(p - units[[1, 2]], X)]
hint = "With a single weight w = 1, M is g g^T / n. Is there one g on either side, and the 1/n?"
close("M v for one weight", product, g[0] * (g[0] @ v) / 2, hint)
found = moment_product(theta, X, [2, 3], 3 * one, v)
hint = "M is linear in the weights: is each used once, as it is, neither squared nor scaled?"
close("M v for three times the weight", found, 3 * product, hint)
both = moment_product(theta, X, [2, 3], one + other, v)
hint = "Weights of two examples: a sum of two outer products, not the outer product of a sum."
close("M v for two weights", both, product + g[1] * (g[1] @ v) / 2, hint)
two = torch.zeros(2, 3).double()
two[0] = torch.tensor([0.0, 1.0, 1.0])
last = torch.cat([torch.outer(p[0] - units[2], X[0]).flatten(), p[0] - units[2]])
hint = "Weights of two labels of one example: again a sum of outer products."
expected = product + last * (last @ v) / 2
close("M v for two labels", moment_product(theta, X, [2, 3], two, v), expected, hint)


# %% hidden common
def moment(theta, X, widths, w, v):
    """M_w v, with every g as outer products by layer: no derivative of anything by a program."""
    found = factors(theta, X, widths, label_residues(softmax(theta, X, widths)))
    along, at, parts = 0, 0, []
    for back, h in found:
        m, d = back.shape[2], h.shape[1]
        V, b = v[at : at + m * d].reshape(m, d), v[at + m * d : at + m * d + m]
        along, at = along + ((h @ V.T + b)[:, None] * back).sum(2), at + m * d + m
    for back, h in found:
        sums = ((w * along)[..., None] * back).sum(1) / len(X)
        parts += [(sums.T @ h).ravel(), sums.sum(0)]
    return np.concatenate(parts)


def moment_calls(rng, weights):
    wanted = []
    for widths, n in NETWORKS:
        case = draw(rng, widths, n)
        v = rng.normal(size=len(case["theta"]))
        wanted.append(call("moment_product", **case, w=weights(case, n, widths[-1]), v=v))
    return wanted


# %% hidden q3 1: labels of the model, which give G
def calls(rng):
    return moment_calls(rng, lambda case, n, C: softmax(**case))


def check(calls, answers):
    for c, product in zip(calls, answers):
        x = c.arguments
        G = gauss_newton(x["theta"], x["X"], x["widths"]).mean(0)
        near(product, G @ x["v"], name="G v")


# %% hidden q3 1: labels of the training
def calls(rng):
    return moment_calls(rng, lambda case, n, C: units(rng, n, C))


def check(calls, answers):
    for c, product in zip(calls, answers):
        x = c.arguments
        expected = 0
        for example, y in zip(x["X"], x["w"]):
            theta = torch.as_tensor(x["theta"]).requires_grad_()
            z = network(theta, example[None], x["widths"])[2]
            loss = torch.nn.functional.cross_entropy(z, torch.as_tensor(y[None]))
            g = torch.autograd.grad(loss, theta)[0].numpy()
            expected = expected + g * (g @ x["v"]) / len(x["X"])
        near(product, expected, name="F v")


# %% hidden q3 1: any weights
def calls(rng):
    return moment_calls(rng, lambda case, n, C: rng.uniform(0, 2, size=(n, C)))


def check(calls, answers):
    for c, product in zip(calls, answers):
        near(product, moment(**c.arguments), name="M v")


# %% hidden q3 1: a network of 142,000 parameters
def calls(rng):
    case = draw(rng, [700, 200, 10], 100)
    v = rng.normal(size=len(case["theta"]))
    return [call("moment_product", **case, w=softmax(**case), v=v)]


def check(calls, answers):
    near(answers[0], moment(**calls[0].arguments), name="G v")


# %% wrong q3 1: the Jacobian is formed
def moment_product(theta, X, widths, w, v):
    J = torch.func.jacrev(logits)(theta, X, widths)
    p = logits(theta, X, widths).softmax(1)
    u = J @ v
    weighted = w * ((p * u).sum(1, keepdim=True) - u) / len(X)
    return torch.einsum("nk,nkp->p", p * weighted.sum(1, keepdim=True) - weighted, J)


# %% wrong q3 2: the weights of the model, whatever is asked
def moment_product(theta, X, widths, w, v):
    z, u = torch.func.jvp(lambda t: logits(t, X, widths), (theta,), (v,))
    p = z.softmax(1)
    cotangent = p * (u - (p * u).sum(1, keepdim=True)) / len(X)
    return torch.func.vjp(lambda t: logits(t, X, widths), theta)[1](cotangent)[0]


# %% wrong q3 1: weights that are made to add up to one
def moment_product(theta, X, widths, w, v):
    w = w / w.sum(1, keepdim=True).clamp_min(1e-300)
    z, u = torch.func.jvp(lambda t: logits(t, X, widths), (theta,), (v,))
    p = z.softmax(1)
    weighted = w * ((p * u).sum(1, keepdim=True) - u) / len(X)
    cotangent = p * weighted.sum(1, keepdim=True) - weighted
    return torch.func.vjp(lambda t: logits(t, X, widths), theta)[1](cotangent)[0]


# %% wrong q3 3: each example's gradients averaged first
def moment_product(theta, X, widths, w, v):
    z, u = torch.func.jvp(lambda t: logits(t, X, widths), (theta,), (v,))
    residue = w.sum(1, keepdim=True) * z.softmax(1) - w
    cotangent = residue * (residue * u).sum(1, keepdim=True) / len(X)
    return torch.func.vjp(lambda t: logits(t, X, widths), theta)[1](cotangent)[0]


# %% wrong q3 4: the square of one mean gradient
def moment_product(theta, X, widths, w, v):
    p = logits(theta, X, widths).softmax(1)
    residue = (w.sum(1, keepdim=True) * p - w) / len(X)
    g = torch.func.vjp(lambda t: logits(t, X, widths), theta)[1](residue)[0]
    return g * (g @ v)


# %% [markdown]
# ### Experiment: whose labels?
#
# The network has 8 neurons between 64 inputs and 5 logits; the data are 180 digits of five classes,
# 8 × 8 pixels, with *unequal* numbers of examples. The next cells train it, and compare $M_w$ with
# $G$ for labels drawn from the model, for labels drawn uniformly, and for those of the training.

# %%
counts, widths = [12, 24, 36, 48, 60], [64, 8, 5]
images, classes = load("mnist").images(per_class=60, size=8, dtype=torch.float64)
rows = torch.cat([(classes == c).nonzero()[:count, 0] for c, count in enumerate(counts)])
X, Y = 3 * images[rows].flatten(1), torch.eye(5).double()[classes[rows]]
P = 8 * 64 + 8 + 5 * 8 + 5
start = 0.3 * torch.randn(P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def trained(theta, steps):
    """Theta after so many steps of Adam on all examples."""
    theta = theta.clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits(theta, X, widths), Y).backward()
        optimiser.step()
    return theta.detach()


end = trained(start, 300)


# %%
def distance(theta, w, vectors):
    """|(M_w - G) V| / |G V| for random vectors V: about |M_w - G| / |G| in Frobenius norm."""
    p = logits(theta, X, widths).softmax(1)
    G = torch.stack([moment_product(theta, X, widths, p, v) for v in vectors])
    M = torch.stack([moment_product(theta, X, widths, w, v) for v in vectors])
    return float((M - G).norm() / G.norm())


def drawn(q, S, generator):
    """Shares of the C labels among S draws from each row of q."""
    labels = torch.multinomial(q, S, replacement=True, generator=generator)
    return torch.eye(q.shape[1]).double()[labels].mean(1)


generator = torch.Generator().manual_seed(1)
vectors = torch.randn(10, P, generator=generator, dtype=torch.float64)
S_values, uniform = (1, 4, 16, 64, 256), torch.full((len(X), 5), 0.2).double()

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
for axis, theta, title in ((axes[0], start, "at the start"), (axes[1], end, "trained")):
    p = logits(theta, X, widths).softmax(1)
    for q, marker, name in ((p, "o-", "labels of the model"), (uniform, "s--", "uniform labels")):
        draws = [[drawn(q, S, generator) for S in S_values] for _ in range(4)]
        errors = torch.tensor([[distance(theta, w, vectors) for w in row] for row in draws])
        axis.loglog(S_values, errors.mean(0), marker, label=name)
        print(f"{title}, {name}:", errors.mean(0).numpy().round(3))
    training, true = distance(theta, Y, vectors), float((p * Y).sum(1).mean())
    axis.axhline(training, color="black", linestyle=":", label="labels of the training")
    print(f"{title}, labels of the training: {training:.3f}; mean p of the true class: {true:.3f}")
    axis.set(title=title, xlabel="labels drawn per example, S")
    axis.set_xticks(S_values, S_values)
    axis.set_xticks([], minor=True)
axes[0].set_ylabel("distance of M from G, relative")
axes[1].legend()
fig.tight_layout()
plt.show()

# %% [markdown]
# **Question w1.** Is $G$ "the second moment of loss gradients"? Say of which, and read from the
# figure: which curve goes to 0 and how fast in $S$, what the others go to, and what becomes of the
# training labels' distance as the network learns its data (why is it so close to that value?).
# Then compare the work: how many passes through the network does $M_w v$ take for $S$ drawn labels,
# and for $G$? When would you draw labels? (Five to seven sentences.)

# %% [markdown] written w1 3
# BEGIN SOLUTION
# It is, of gradients under labels that the model itself draws: $G = \frac1n\sum_i
# \mathbb E_{c' \sim p_i}\, g_{i,c'} g_{i,c'}^\top$. Only this curve goes to 0, by a factor of about
# 16 at the start (0.157 to 0.010) for 256 times as many draws, which is the rate $S^{-1/2}$ of a
# mean of independent draws; of the trained network it falls from 2.3 to 0.2, from a higher level,
# since $G$ is then made of rare labels with large gradients. Uniform labels converge to another
# matrix, at 0.46 and 66 times $\|G\|$. The training labels' $F$ is off by 0.71 at the start and by
# 0.97 at the end, where the mean $p$ of the true class is 0.995: each $g_{i,c}$ has a factor of the
# size $1 - p_{i,c}$, so $F$ is of second order in it and $G$ of first, and $\|F - G\|/\|G\|$ goes
# to $\|G\|/\|G\| = 1$. $M_w v$ takes one pass forward and one backward for any $w$, so that drawn
# labels cost the same and add an error. They pay only where single gradients are needed, or where
# $C$ is too large for all labels.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: of labels drawn from the model's own $p$, with the rate $S^{-1/2}$ read off; the others
#   level off, because they converge to another matrix
# - 1 point: where the data are fitted, $F$ vanishes beside $G$, so the distance goes to 1 (numbers
#   from the own figure, with a reason)
# - 1 point: the same two passes for any weights, so that drawing labels saves nothing here
# END RUBRIC

# %% [markdown]
# ## 4. The rest of the Hessian
#
# The Hessian of $L$ is $H = G + R$ with
#
# $$
# R = \frac1n \sum_i \sum_k (p_i - y_i)_k\, \frac{\partial^2 z_{i,k}}{\partial \theta^2} .
# $$
#
# **Question q4.** Write `rest_product`, which returns $R v$ by exact differentiation, without a
# matrix, and without the difference $Hv - Gv$ of large numbers. Here the rows of $Y$ may be any
# probabilities, such as smoothed labels. Mind the case in which the logits are linear in $\theta$.


# %% answer q4
def rest_product(theta, X, widths, Y, v):
    """The product R v, a vector of length P, for labels Y (n x C) and a vector v (P)."""
    # BEGIN SOLUTION
    residue = (logits(theta, X, widths).softmax(1) - Y) / len(X)

    def held(t):
        return (residue * logits(t, X, widths)).sum()

    return torch.func.jvp(torch.func.grad(held), (theta,), (v,))[1]
    # END SOLUTION


# %% public q4
X = torch.tensor([[0.5, -1.0], [1.5, 0.4]]).double()
theta, v = torch.linspace(-1, 1, 17).double(), torch.linspace(0.5, -0.7, 17).double()
Y = torch.eye(2).double()
found = ran("It takes theta, X, widths, Y, v.", rest_product, theta, X, [2, 3, 2], Y, v)
shaped("R v", found, 17)


def net(t):
    h = torch.tanh(X @ t[:6].reshape(3, 2).T + t[6:9])
    return h @ t[9:15].reshape(2, 3).T + t[15:]


# Along v, the second difference of z, weighted by the residues, is about v^T R v.
step, residue = 1e-4, net(theta).softmax(1) - Y
bend = (net(theta + step * v) - 2 * net(theta) + net(theta - step * v)) / step**2
bend = (residue * bend).sum() / 2
hint = "It is not v . R v. Are the residues p - y, held constant while z is differentiated twice?"
assert abs(found @ v - bend) < 1e-5 * max(1, abs(bend)), hint

# %% public q4
X, theta, v = torch.ones(1, 2).double(), torch.linspace(-1, 1, 9).double(), torch.ones(9).double()
hint = "With one layer z is linear in theta: its gradient is a constant, and R v = 0."
found = ran(hint, rest_product, theta, X, [2, 3], torch.eye(3).double()[:1], v)
shaped("R v for one layer", found, 9)
assert found.norm() < 1e-12, hint


# %% hidden common
def rest_calls(rng, networks, labels):
    wanted = []
    for widths, n in networks:
        case = draw(rng, widths, n)
        v = rng.normal(size=len(case["theta"]))
        wanted.append(call("rest_product", **case, Y=labels(n, widths[-1]), v=v))
    return wanted


def check_rest(calls, answers):
    """Against H - G, both as matrices."""
    for c, product in zip(calls, answers):
        x = c.arguments
        labels = torch.as_tensor(x["Y"])

        def loss(theta):
            z = network(theta, x["X"], x["widths"])[2]
            return torch.nn.functional.cross_entropy(z, labels)

        H = torch.func.hessian(loss)(torch.as_tensor(x["theta"])).numpy()
        G = gauss_newton(x["theta"], x["X"], x["widths"]).mean(0)
        near(product, (H - G) @ x["v"], name="R v")


# %% hidden q4 1: hard labels
def calls(rng):
    return rest_calls(rng, NETWORKS[1:], lambda n, C: units(rng, n, C))


def check(calls, answers):
    check_rest(calls, answers)


# %% hidden q4 1: soft labels, two hidden layers
def calls(rng):
    networks = [([2, 3, 4, 3], 5), ([3, 2, 3, 4], 6)]
    return rest_calls(rng, networks, lambda n, C: rng.dirichlet(np.ones(C), size=n))


def check(calls, answers):
    check_rest(calls, answers)


# %% hidden q4 1: logits that are linear in theta
def calls(rng):
    wanted = rest_calls(rng, [([3, 4], 6), ([5, 2], 3)], lambda n, C: units(rng, max(n, C), C)[:n])
    # Large data and small parameters: the same logits, but H and G so large that H v - G v shows.
    large = wanted[0].arguments
    return [
        *wanted,
        call("rest_product", **{**large, "X": 1e4 * large["X"], "theta": large["theta"] / 1e4}),
    ]


def check(calls, answers):
    for c, product in zip(calls, answers):
        product = array(product, c.arguments["v"].shape, name="R v")
        size = np.linalg.norm(product) / np.linalg.norm(c.arguments["v"])
        assert size < 1e-12, f"R v should be 0, but its length is {size:.1e} times that of v"


# %% wrong q4 3: the whole Hessian
def rest_product(theta, X, widths, Y, v):
    def loss(t):
        return -(Y * logits(t, X, widths).log_softmax(1)).sum() / len(X)

    return torch.func.jvp(torch.func.grad(loss), (theta,), (v,))[1]


# %% wrong q4 1: the difference of two large products
def rest_product(theta, X, widths, Y, v):
    def loss(t):
        return -(Y * logits(t, X, widths).log_softmax(1)).sum() / len(X)

    whole = torch.func.jvp(torch.func.grad(loss), (theta,), (v,))[1]
    z, u = torch.func.jvp(lambda t: logits(t, X, widths), (theta,), (v,))
    p = z.softmax(1)
    cotangent = p * (u - (p * u).sum(1, keepdim=True)) / len(X)
    return whole - torch.func.vjp(lambda t: logits(t, X, widths), theta)[1](cotangent)[0]


# %% wrong q4 3: residues that are differentiated
def rest_product(theta, X, widths, Y, v):
    def value(t):
        z = logits(t, X, widths)
        return ((z.softmax(1) - Y) * z).sum() / len(X)

    return torch.func.jvp(torch.func.grad(value), (theta,), (v,))[1]


# %% wrong q4 2: labels minus probabilities
def rest_product(theta, X, widths, Y, v):
    residue = (Y - logits(theta, X, widths).softmax(1)) / len(X)
    gradient = torch.func.grad(lambda t: (residue * logits(t, X, widths)).sum())
    return torch.func.jvp(gradient, (theta,), (v,))[1]


# %% wrong q4 2: no mean over the examples
def rest_product(theta, X, widths, Y, v):
    residue = logits(theta, X, widths).softmax(1) - Y
    gradient = torch.func.grad(lambda t: (residue * logits(t, X, widths)).sum())
    return torch.func.jvp(gradient, (theta,), (v,))[1]


# %% wrong q4 1: an error where there is no second derivative
def rest_product(theta, X, widths, Y, v):
    theta = theta.clone().requires_grad_()
    z = logits(theta, X, widths)
    residue = (z.softmax(1) - Y).detach() / len(X)
    gradient = torch.autograd.grad((residue * z).sum(), theta, create_graph=True)[0]
    return torch.autograd.grad(gradient @ v, theta)[0]


# %% [markdown]
# ## 5. Four terms
#
# Let class $c$ have $n_c$ examples, a share $\pi_c = n_c/n$. With the group means
# $\delta_{c,c'}$ (the mean of $\delta_{i,c'}$ over the examples $i$ of class $c$) and the class
# centres $\delta_c$ (the mean of $\delta_{c,c'}$ over $c' \ne c$), the Gauss-Newton matrix is
# $G_0 + G_1 + G_2 + G_3$ with
#
# $$
# G_0 = \sum_c \pi_c\, \delta_{c,c}\delta_{c,c}^\top, \qquad
# G_1 = (C-1)\sum_c \pi_c\, \delta_c\delta_c^\top,
# $$
#
# $$
# G_2 = \sum_c \pi_c \sum_{c' \ne c} (\delta_{c,c'} - \delta_c)(\delta_{c,c'} - \delta_c)^\top,
# \qquad
# G_3 = \frac1n \sum_i \sum_{c'} (\delta_{i,c'} - \delta_{c(i),c'})
# (\delta_{i,c'} - \delta_{c(i),c'})^\top,
# $$
#
# where $c(i)$ is the class of example $i$. None of them is needed as a $P \times P$ matrix: each is
# $B^\top B$ with a matrix $B$ that has $P$ columns and few rows.
#
# **Question q5.** Write `level_factors`, which returns $B_0, B_1, B_2, B_3$ with
# $G_k = B_k^\top B_k$. How many rows they have, and in which order, is up to you. Every class has
# an example, some may have only one.


# %% answer q5
def level_factors(delta, Y):
    """Matrices B0, B1, B2, B3, each with P columns, for delta (n x C x P) and labels Y (n x C)."""
    # BEGIN SOLUTION
    n, C, P = delta.shape
    shares = Y.mean(0)
    means = torch.einsum("ic,ikp->ckp", Y / Y.sum(0), delta)
    own = torch.eye(C, dtype=torch.bool)
    others = means[~own].reshape(C, C - 1, P)
    centres = others.mean(1)
    B0 = shares.sqrt()[:, None] * means[own]
    B1 = ((C - 1) * shares).sqrt()[:, None] * centres
    B2 = (shares.sqrt()[:, None, None] * (others - centres[:, None])).reshape(-1, P)
    B3 = (delta - means[Y.argmax(1)]).reshape(-1, P) / math.sqrt(n)
    return B0, B1, B2, B3
    # END SOLUTION


# %% public q5
generator = torch.Generator().manual_seed(0)
delta = torch.randn(9, 3, 5, generator=generator, dtype=torch.float64) + 1
Y = torch.eye(3).double()[[0, 1, 1, 1, 2, 2, 2, 2, 2]]
found = ran("It takes delta and Y.", level_factors, delta.clone(), Y.clone())
hint = "return the four matrices B0, B1, B2, B3"
assert isinstance(found, tuple | list) and len(found) == 4, hint
for k, B in enumerate(found):
    assert isinstance(B, torch.Tensor) and B.ndim == 2, f"B{k} must be a matrix"
    assert B.shape[1] == 5, f"B{k} has shape {tuple(B.shape)}, but 5 columns (P) are needed"
    assert torch.isfinite(B).all(), f"B{k} has NaN or infinite entries: do you divide by 0?"
ranks = [int(torch.linalg.matrix_rank(B.T @ B, rtol=1e-8)) for B in found]
hint = f"The ranks are {ranks}, but those of G0, G1 and G2 are 3, 3 and 3 here: C, C and C (C - 2)."
assert ranks[:3] == [3, 3, 3], hint
rows = delta.reshape(-1, 5)
total = sum(B.T @ B for B in found)
hint = "They must add up to the second moment of all rows of delta. Which weight has a small class?"
close("G0 + G1 + G2 + G3", total, rows.T @ rows / 9, hint)


# %% hidden common
def level_calls(rng, counts, P=9):
    """Derivatives with means of their own in each group, examples in random order."""
    C = len(counts)
    labels = rng.permutation(np.repeat(np.arange(C), counts))
    delta = 2 * rng.normal(size=(C, C, P))[labels] + rng.normal(size=(len(labels), C, P))
    return call("level_factors", delta=delta, Y=np.eye(C)[labels])


def by_definition(delta, Y):
    """G0 to G3 as sums over classes and groups, with covariances from numpy."""
    labels, (n, C, P) = Y.argmax(1), delta.shape
    terms = [np.zeros((P, P)) for _ in range(4)]
    for c in range(C):
        group = delta[labels == c]
        means = [group[:, k].mean(0) for k in range(C)]
        rest = np.array([means[k] for k in range(C) if k != c])
        parts = (
            np.outer(means[c], means[c]),
            (C - 1) * np.outer(rest.mean(0), rest.mean(0)),
            (C - 1) * np.cov(rest.T, bias=True).reshape(P, P),
            sum(np.cov(group[:, k].T, bias=True).reshape(P, P) for k in range(C)),
        )
        for term, part in zip(terms, parts):
            term += len(group) / n * part
    return terms


def check_levels(which, calls, answers):
    for c, found in zip(calls, answers):
        expected = by_definition(**c.arguments)
        assert isinstance(found, list) and len(found) == 4, "four matrices are expected"
        for k in which:
            B, P = found[k], c.arguments["delta"].shape[2]
            shape = (len(B) if isinstance(B, np.ndarray) else 0, P)
            B = array(B, shape, name=f"B{k}")
            near(B.T @ B, expected[k], name=f"B{k}^T B{k}")


# %% hidden q5 1: classes of equal size
def calls(rng):
    return [level_calls(rng, [4, 4, 4]), level_calls(rng, [3] * 5)]


def check(calls, answers):
    check_levels(range(4), calls, answers)


# %% hidden q5 1: G0 and G1, classes of unequal size
def calls(rng):
    return [level_calls(rng, [2, 3, 7]), level_calls(rng, [9, 1, 4, 2])]


def check(calls, answers):
    check_levels((0, 1), calls, answers)


# %% hidden q5 1: G2, classes of unequal size
def calls(rng):
    return [level_calls(rng, [2, 3, 7]), level_calls(rng, [9, 1, 4, 2])]


def check(calls, answers):
    check_levels((2,), calls, answers)


# %% hidden q5 1: G3, with a class of one example
def calls(rng):
    return [level_calls(rng, [1, 3, 7]), level_calls(rng, [9, 1, 4, 2])]


def check(calls, answers):
    check_levels((3,), calls, answers)


# %% wrong q5 2: all classes weigh the same in the means
def level_factors(delta, Y):
    n, C, P = delta.shape
    means = torch.einsum("ic,ikp->ckp", Y / Y.sum(0), delta)
    own = torch.eye(C, dtype=torch.bool)
    others = means[~own].reshape(C, C - 1, P)
    centres = others.mean(1)
    B1, B2 = centres * math.sqrt((C - 1) / C), (others - centres[:, None]) / math.sqrt(C)
    B3 = (delta - means[Y.argmax(1)]).reshape(-1, P) / math.sqrt(n)
    return means[own] / math.sqrt(C), B1, B2.reshape(-1, P), B3


# %% wrong q5 2: covariances divided by one less than the number
def level_factors(delta, Y):
    C, P = delta.shape[1:]
    shares, counts = Y.mean(0), Y.sum(0)
    means = torch.einsum("ic,ikp->ckp", Y / counts, delta)
    own = torch.eye(C, dtype=torch.bool)
    others = means[~own].reshape(C, C - 1, P)
    centres = others.mean(1)
    B1 = ((C - 1) * shares).sqrt()[:, None] * centres
    B2 = (shares.sqrt()[:, None, None] * (others - centres[:, None])).reshape(-1, P)
    spread = delta - means[Y.argmax(1)]
    weights = (shares / (counts - 1).clamp_min(1))[Y.argmax(1)]
    B3 = (weights.sqrt()[:, None, None] * spread).reshape(-1, P)
    return shares.sqrt()[:, None] * means[own], B1, B2, B3


# %% wrong q5 3: the own logit is in the centre
def level_factors(delta, Y):
    n, C, P = delta.shape
    shares = Y.mean(0)
    means = torch.einsum("ic,ikp->ckp", Y / Y.sum(0), delta)
    own = torch.eye(C, dtype=torch.bool)
    centres = means.mean(1)
    others = means[~own].reshape(C, C - 1, P) - centres[:, None]
    B1 = ((C - 1) * shares).sqrt()[:, None] * centres
    B2 = (shares.sqrt()[:, None, None] * others).reshape(-1, P)
    B3 = (delta - means[Y.argmax(1)]).reshape(-1, P) / math.sqrt(n)
    return shares.sqrt()[:, None] * means[own], B1, B2, B3


# %% wrong q5 2: the centre counts once
def level_factors(delta, Y):
    n, C, P = delta.shape
    shares = Y.mean(0)
    means = torch.einsum("ic,ikp->ckp", Y / Y.sum(0), delta)
    own = torch.eye(C, dtype=torch.bool)
    others = means[~own].reshape(C, C - 1, P)
    centres = others.mean(1)
    B2 = (shares.sqrt()[:, None, None] * (others - centres[:, None])).reshape(-1, P)
    B3 = (delta - means[Y.argmax(1)]).reshape(-1, P) / math.sqrt(n)
    return shares.sqrt()[:, None] * means[own], shares.sqrt()[:, None] * centres, B2, B3


# %% [markdown]
# ### Experiment: fewer examples
#
# To save time, somebody estimates the four terms of the trained network from a part of the
# examples: of each class so many draws, with replacement, that the shares $\pi_c$ stay as they are.
# The traces over many draws:

# %%
delta = logit_derivatives(end, X, widths)


def traces(rows):
    """Traces of G0 + G1 + G2, of G3 and of G, from the chosen examples."""
    B = [float(each.square().sum()) for each in level_factors(delta[rows], Y[rows])]
    return sum(B[:3]), B[3], sum(B)


def part(divisor, generator):
    """Positions of as many draws of each class as the divisor leaves of it."""
    drawn = []
    for rows in [(Y[:, c] == 1).nonzero()[:, 0] for c in range(5)]:
        chosen = torch.randint(len(rows), (len(rows) // divisor,), generator=generator)
        drawn.append(rows[chosen])
    return torch.cat(drawn)


print("examples   tr (G0 + G1 + G2)         tr G3              tr G")
print("all ", *(f"{value:13.3f}        " for value in traces(torch.arange(len(X)))))
for divisor in (2, 4, 12):
    found = torch.tensor([traces(part(divisor, generator)) for _ in range(400)])
    errors = found.std(0) / math.sqrt(len(found))
    print(f"1/{divisor:<2d}", *(f"{m:13.3f} ± {e:.3f}" for m, e in zip(found.mean(0), errors)))

# %% [markdown]
# **Question w2.** Explain the table: which trace keeps its mean and which do not, and why? Give the
# expected trace of $G_3$ for $m_c$ draws of class $c$, in terms of that class's share of the full
# one, and compare one row with it. A second person takes the same number of examples of *every*
# class, large or small: of which loss do they get the Gauss-Newton matrix? (Five to seven
# sentences.)

# %% [markdown] written w2 3
# BEGIN SOLUTION
# $G$ is a mean over examples, and a random part of each class has this mean on average: 0.82 ± 0.01
# for a half, of 0.83. A group mean of $m_c$ draws scatters about the full one with the covariance
# $\Sigma_{c,c'}/m_c$, and its square carries this along: the trace of $G_0 + G_1 + G_2$ grows by
# $\sum_c \pi_c \sum_{c'} \operatorname{tr}\Sigma_{c,c'} / m_c$, from 0.15 to 0.39 for a twelfth,
# and $G_3$ loses the same. So class $c$ contributes $1 - 1/m_c$ times its part of
# $\operatorname{tr} G_3$. With a half, $m_c$ is 6 to 30, and between 1/6 and 1/30 is lost: 0.634 of
# 0.684 are 7 % less (class by class the formula gives 0.640). With a twelfth the smallest class has
# one draw, and no part in $G_3$. With equally many of each class, shares become $1/C$: it is the
# Gauss-Newton matrix of the loss $\frac1C\sum_c \operatorname{Ave}_{i \in c} \ell_i$, in which an
# example of class $c$ has the weight $n/(C n_c)$, not of the loss that was trained.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: $G$ is a mean over examples and keeps its mean; means of few draws scatter, and their
#   squares carry this scatter from $G_3$ into the others
# - 1 point: the factor $1 - 1/m_c$, and one row compared with numbers
# - 1 point: the loss in which every class has the weight $1/C$
# END RUBRIC

# %% [markdown] further
# What the logit derivatives have to do with a sphere (w3), a spectrum from inner products alone
# (q6), and trace, norm and spectral density of a matrix of which only products are known (q7, q8,
# w4).

# %% [markdown]
# ## 6. Roots of probabilities
#
# **Question w3.** Show that $\delta_{i,c'} = 2\, \nabla_\theta \sqrt{p_{i,c'}}$. The vectors
# $(\sqrt{p_{i,1}}, \dots, \sqrt{p_{i,C}})$ lie on the unit sphere: which linear relation among the
# $C$ logit derivatives of an example follows, and of which squared distance between the
# predictions at $\theta$ and at $\theta + v$ is $v^\top G v$ the leading term, with which factor?
# (Three to five sentences.)

# %% [markdown] written w3 2
# BEGIN SOLUTION
# $\nabla_\theta \log p_{c'} = J^\top(e_{c'} - p)$, since
# $\log p_{c'} = z_{c'} - \log\sum_k e^{z_k}$, and
# $\nabla \sqrt{p_{c'}} = \tfrac12 \sqrt{p_{c'}}\, \nabla \log p_{c'} = \tfrac12\delta_{c'}$.
# Differentiating $\sum_{c'} \sqrt{p_{c'}}^2 = 1$ gives
# $\sum_{c'} \sqrt{p_{c'}}\, \delta_{c'} = 0$: the change is tangent to the sphere, so at most
# $C - 1$ of the vectors are linearly independent. To first order
# $\sqrt{p(\theta + v)} - \sqrt{p(\theta)}$ has the entries
# $\tfrac12 \langle\delta_{c'}, v\rangle$, so the mean over the examples of the squared distance
# of the root vectors (squared Hellinger distance, up to a factor) is $\tfrac14 v^\top G v$ plus
# terms of higher order.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: the identity, by way of $\nabla \log p$, and the relation $\sum \sqrt{p}\,\delta = 0$
# - 1 point: $v^\top G v$ is four times the mean squared distance of the root vectors, to leading
#   order; eight times the squared Hellinger distance is the same, if that is defined with a factor
#   of one half
# END RUBRIC

# %% [markdown]
# ## 7. A spectrum from inner products
#
# For a large network one keeps of the group means only their inner products: the matrix $K$ of size
# $C^2 \times C^2$ with $\langle \delta_{a,a'}, \delta_{b,b'} \rangle$ in row $aC + a'$ and column
# $bC + b'$ (classes and logits counted from 0). $P$ is unknown; it may be a million, or less than
# $C^2$.
#
# **Question q6.** Write `level_spectra`: from $K$ and the numbers of examples $n_c$, the
# eigenvalues of $G_0$, $G_1$, $G_2$ and $G_0 + G_1 + G_2$. Of each the $C^2$ largest, falling;
# where there are not as many, or $P$ is smaller, zeros (or what rounding makes of them).


# %% answer q6
def level_spectra(K, counts):
    """Eigenvalues of G0, G1, G2 and their sum, falling: a 4 x C^2 matrix; counts has length C."""
    # BEGIN SOLUTION
    # Any vectors with these inner products have the same spectra: take the rows of a root of K.
    values, vectors = torch.linalg.eigh(K)
    C, shares = len(counts), counts / counts.sum()
    means = (vectors * values.clamp_min(0).sqrt()).reshape(C, C, -1)
    own = torch.eye(C, dtype=torch.bool)
    others = means[~own].reshape(C, C - 1, -1)
    centres = others.mean(1)
    G0 = torch.einsum("c,cp,cq->pq", shares, means[own], means[own])
    G1 = (C - 1) * torch.einsum("c,cp,cq->pq", shares, centres, centres)
    whole = torch.einsum("c,ckp,ckq->pq", shares, means, means)
    terms = torch.stack([G0, G1, whole - G0 - G1, whole])
    return torch.linalg.eigvalsh(terms).flip(1)
    # END SOLUTION


# %% public q6
D, counts = torch.eye(9).double(), torch.tensor([1.0, 1.0, 2.0]).double()
found = ran("It takes K and counts.", level_spectra, D @ D.T, counts)
shaped("the matrix of spectra", found, 4, 9)
hint = "With orthonormal means G0 has the eigenvalues pi_c, falling."
close("the spectrum of G0", found[0, :3], [0.5, 0.25, 0.25], hint)
hint = "With orthonormal means delta_c has the squared length 1 / (C - 1), and G1 the factor C - 1."
close("the spectrum of G1", found[1, :3], [0.5, 0.25, 0.25], hint)
hint = "delta_{c,c'} - delta_c, c' != c, are C - 1 vectors that add up to 0."
close("the spectrum of G2", found[2, :4], [0.5, 0.25, 0.25, 0.0], hint)

# %% public q6
means = torch.zeros(4, 2).double()
means[0], means[1], means[3] = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0]), means[0] + 1
counts = torch.tensor([5.0, 5.0]).double()
hint = "Here P = 2 and C = 2, so K is singular."
found = ran(hint, level_spectra, means @ means.T, counts)
shaped("the matrix of spectra", found, 4, 4)
matrix = means.T @ means / 2
hint = "Eigenvalues of a sum are no sums of eigenvalues, nor those of its terms side by side."
largest = torch.linalg.eigvalsh(matrix).flip(0)
close("the two largest eigenvalues of G0 + G1 + G2", found[3, :2], largest, hint)


# %% hidden common
def spectra_calls(rng, cases):
    wanted = []
    for counts, P in cases:
        C = len(counts)
        means = rng.normal(size=(C, C, P)) + 2 * rng.normal(size=(C, 1, P))
        rows = means.reshape(C * C, P)
        K, counts = rows @ rows.T, np.array(counts, dtype=float)
        wanted.append(call("level_spectra", K=K, counts=counts))
    return wanted


def explicit_spectra(K, counts):
    """From P x P matrices, P the rank of K: group means by pivoted elimination, one at a time."""
    C, rest, columns = len(counts), np.array(K), []
    for _ in range(C * C):
        pivot = int(np.argmax(np.diag(rest)))
        if rest[pivot, pivot] < 1e-11 * np.trace(K):
            break
        columns.append(rest[:, pivot] / math.sqrt(rest[pivot, pivot]))
        rest = rest - np.outer(columns[-1], columns[-1])
    means = np.stack(columns, axis=1).reshape(C, C, -1)
    terms = [0, 0, 0]
    for c, share in enumerate(np.asarray(counts) / np.sum(counts)):
        others = np.delete(means[c], c, axis=0)
        centre = others.mean(0)
        terms[0] = terms[0] + share * np.outer(means[c, c], means[c, c])
        terms[1] = terms[1] + share * (C - 1) * np.outer(centre, centre)
        terms[2] = terms[2] + share * (others - centre).T @ (others - centre)
    spectra = [np.linalg.eigvalsh(term)[::-1] for term in (*terms, sum(terms))]
    return np.array([np.pad(each, (0, C * C - len(each))) for each in spectra])


def check_spectra(which, calls, answers):
    for c, found in zip(calls, answers):
        expected = explicit_spectra(**c.arguments)
        found = array(found, expected.shape, name="the spectra")
        for k in which:
            name = f"the spectrum of {('G0', 'G1', 'G2', 'G0 + G1 + G2')[k]}"
            near(found[k], expected[k], name=name)


# %% hidden q6 1: single terms, classes of equal size
def calls(rng):
    return spectra_calls(rng, [([1, 1, 1], 30), ([7] * 4, 20)])


def check(calls, answers):
    check_spectra((0, 1, 2), calls, answers)


# %% hidden q6 1: single terms, classes of unequal size
def calls(rng):
    return spectra_calls(rng, [([2, 5, 13], 30), ([40, 1, 3, 6], 25)])


def check(calls, answers):
    check_spectra((0, 1, 2), calls, answers)


# %% hidden q6 1: their sum, with fewer parameters than group means
def calls(rng):
    return spectra_calls(rng, [([3] * 3, 5), ([5] * 4, 7), ([2] * 5, 9)])


def check(calls, answers):
    check_spectra((3,), calls, answers)


# %% wrong q6 1: all classes weigh the same
def level_spectra(K, counts):
    values, vectors = torch.linalg.eigh(K)
    C = len(counts)
    means = (vectors * values.clamp_min(0).sqrt()).reshape(C, C, -1)
    own = torch.eye(C, dtype=torch.bool)
    others = means[~own].reshape(C, C - 1, -1)
    centres = others.mean(1)
    G0 = means[own].T @ means[own] / C
    G1 = (C - 1) / C * centres.T @ centres
    whole = means.reshape(C * C, -1).T @ means.reshape(C * C, -1) / C
    return torch.linalg.eigvalsh(torch.stack([G0, G1, whole - G0 - G1, whole])).flip(1)


# %% wrong q6 1: eigenvalues of the terms are added
def level_spectra(K, counts):
    values, vectors = torch.linalg.eigh(K)
    C, shares = len(counts), counts / counts.sum()
    means = (vectors * values.clamp_min(0).sqrt()).reshape(C, C, -1)
    own = torch.eye(C, dtype=torch.bool)
    others = means[~own].reshape(C, C - 1, -1)
    centres = others.mean(1)
    G0 = torch.einsum("c,cp,cq->pq", shares, means[own], means[own])
    G1 = (C - 1) * torch.einsum("c,cp,cq->pq", shares, centres, centres)
    whole = torch.einsum("c,ckp,ckq->pq", shares, means, means)
    spectra = torch.linalg.eigvalsh(torch.stack([G0, G1, whole - G0 - G1])).flip(1)
    return torch.cat([spectra, spectra.sum(0, keepdim=True)])


# %% wrong q6 1: a root of K that a singular K has not
def level_spectra(K, counts):
    C, shares = len(counts), counts / counts.sum()
    means = torch.linalg.cholesky(K).reshape(C, C, -1)
    own = torch.eye(C, dtype=torch.bool)
    others = means[~own].reshape(C, C - 1, -1)
    centres = others.mean(1)
    G0 = torch.einsum("c,cp,cq->pq", shares, means[own], means[own])
    G1 = (C - 1) * torch.einsum("c,cp,cq->pq", shares, centres, centres)
    whole = torch.einsum("c,ckp,ckq->pq", shares, means, means)
    return torch.linalg.eigvalsh(torch.stack([G0, G1, whole - G0 - G1, whole])).flip(1)


# %% wrong q6 2: the own logit is in the centre
def level_spectra(K, counts):
    values, vectors = torch.linalg.eigh(K)
    C, shares = len(counts), counts / counts.sum()
    means = (vectors * values.clamp_min(0).sqrt()).reshape(C, C, -1)
    own = torch.eye(C, dtype=torch.bool)
    centres = means.mean(1)
    G0 = torch.einsum("c,cp,cq->pq", shares, means[own], means[own])
    G1 = (C - 1) * torch.einsum("c,cp,cq->pq", shares, centres, centres)
    whole = torch.einsum("c,ckp,ckq->pq", shares, means, means)
    return torch.linalg.eigvalsh(torch.stack([G0, G1, whole - G0 - G1, whole])).flip(1)


# %% [markdown]
# ## 8. Trace and norm from random vectors
#
# Let $A$ be a symmetric $P \times P$ matrix of which only products are known, and let the columns
# $v_j$ of $V$ ($P \times k$) be random with independent entries of mean 0 and variance 1. Then
# $v_j^\top A v_j$ has the mean $\operatorname{tr} A$, and $|A v_j|^2$ the mean $\|A\|_F^2$. A few
# large eigenvalues make both scatter. So take them out: let the columns of $Q$ ($P \times s$) be
# orthonormal, $w_j = v_j - QQ^\top v_j$, and estimate
#
# $$
# \operatorname{tr} A \approx \operatorname{tr}(Q^\top A Q) + \frac1k \sum_j w_j^\top A w_j .
# $$
#
# This is right on average for every $Q$, whether or not $Q$ holds eigenvectors.
#
# **Question q7.** Write `deflated_estimates`. Given $V$, $AV$, $Q$ and $AQ$, and no other product,
# it returns three numbers: this estimate of the trace; its standard error, which is the standard
# deviation of the $k$ numbers $w_j^\top A w_j$ (with $k - 1$ in the denominator) over $\sqrt k$;
# and an estimate of $\|A\|_F^2$, made of the mean of the $|A w_j|^2$ and of what that misses on
# average. Find out what it misses.


# %% answer q7
def deflated_estimates(V, AV, Q, AQ):
    """Trace of A, its standard error, and |A|_F^2, as a vector of length 3.

    V and AV are P x k, Q and AQ are P x s with orthonormal columns of Q.
    """
    # BEGIN SOLUTION
    inside = Q.T @ V
    W, AW = V - Q @ inside, AV - AQ @ inside
    values = (W * AW).sum(0)
    trace = (Q * AQ).sum() + values.mean()
    error = values.std() / math.sqrt(len(values))
    return torch.stack([trace, error, AQ.square().sum() + AW.square().sum(0).mean()])
    # END SOLUTION


# %% public q7
A = torch.tensor([[4.0, 1.0, 0.0], [1.0, -1.0, 2.0], [0.0, 2.0, 0.5]]).double()
signs = torch.tensor([[a, b, c] for a in (1, -1) for b in (1, -1) for c in (1, -1)]).double().T
Q = torch.tensor([[0.6], [0.8], [0.0]]).double()
found = ran("It takes V, AV, Q and AQ.", deflated_estimates, signs, A @ signs, Q, A @ Q)
shaped("the vector of estimates", found, 3)
hint = "Over all 8 vectors of signs the mean is exact: tr A = 3.5, whatever Q is."
close("the trace", found[0], 3.5, hint)
hint = "Over all 8 vectors of signs it is exact: split |A|_F^2 into the parts A Q Q^T and the rest."
close("|A|_F^2", found[2], A.square().sum(), hint)
V = signs[:, [0, 1, 3]]
W = V - Q @ (Q.T @ V)
values = torch.stack([w @ A @ w for w in W.T])
expected = ((values - values.mean()).square().sum() / 2 / 3).sqrt()
found = deflated_estimates(V, A @ V, Q, A @ Q)
hint = "Each number is w^T A w with w = v - Q Q^T v, and Q need not hold eigenvectors."
close("the trace from 3 vectors", found[0], Q[:, 0] @ A @ Q[:, 0] + values.mean(), hint)
close("the standard error", found[1], expected, "Of the mean of 3 numbers, not of one of them.")


# %% hidden common
def deflation_calls(rng):
    wanted = []
    for P, k, q in ((8, 5, 2), (30, 12, 1), (25, 3, 6)):
        A = rng.normal(size=(P, P))
        A = A + A.T + 5 * np.outer(A[0], A[0])
        Q = np.linalg.qr(rng.normal(size=(P, q)) + 2 * A[0][:, None])[0]
        V = rng.choice([-1.0, 1.0], size=(P, k)) if k > 4 else rng.normal(size=(P, k))
        wanted.append(call("deflated_estimates", V=V, AV=A @ V, Q=Q, AQ=A @ Q))
    return wanted


def deflation_values(V, AV, Q, AQ):
    """w^T A w of each probe by expanding the product, term by term."""
    values = []
    for v, Av in zip(V.T, AV.T):
        s = Q.T @ v
        values.append(v @ Av - 2 * s @ (AQ.T @ v) + s @ (Q.T @ AQ) @ s)
    return np.array(values)


def estimates(answer):
    return array(answer, (3,), name="the estimates")


# %% hidden q7 1: the trace
def calls(rng):
    P = 9
    A = rng.normal(size=(P, P))
    signs = 1.0 - 2 * ((np.arange(2**P) >> np.arange(P)[:, None]) & 1)
    Q = np.linalg.qr(rng.normal(size=(P, 3)))[0]
    whole = call("deflated_estimates", V=signs, AV=(A + A.T) @ signs, Q=Q, AQ=(A + A.T) @ Q)
    return [whole, *deflation_calls(rng)]


def check(calls, answers):
    # All vectors of signs: the mean over probes is a mean over the distribution, and exact.
    x = calls[0].arguments
    A = x["AV"] @ np.linalg.pinv(x["V"])
    near(estimates(answers[0])[0], np.trace(A), name="the trace, over all vectors of signs")
    for c, answer in zip(calls, answers):
        expected = np.trace(c.arguments["Q"].T @ c.arguments["AQ"])
        expected += deflation_values(**c.arguments).mean()
        near(estimates(answer)[0], expected, name="the trace")


# %% hidden q7 1: its standard error
def calls(rng):
    return deflation_calls(rng)


def check(calls, answers):
    for c, answer in zip(calls, answers):
        values = deflation_values(**c.arguments)
        expected = np.std(values, ddof=1) / math.sqrt(len(values))
        near(estimates(answer)[1], expected, name="the standard error")


# %% hidden q7 1: the squared Frobenius norm
def calls(rng):
    return deflation_calls(rng)


def check(calls, answers):
    for c, answer in zip(calls, answers):
        x = c.arguments
        products = [Av - x["AQ"] @ (x["Q"].T @ v) for v, Av in zip(x["V"].T, x["AV"].T)]
        expected = np.mean([w @ w for w in products]) + np.trace(x["AQ"].T @ x["AQ"])
        near(estimates(answer)[2], expected, name="the squared Frobenius norm")


# %% wrong q7 3: as if Q held eigenvectors
def deflated_estimates(V, AV, Q, AQ):
    inside, lengths = Q.T @ V, (Q * AQ).sum(0)
    values = (V * AV).sum(0) - lengths @ inside.square()
    squares = AV.square().sum(0) - lengths.square() @ inside.square()
    error = values.std() / math.sqrt(len(values))
    norm = lengths.square().sum() + squares.mean()
    return torch.stack([lengths.sum() + values.mean(), error, norm])


# %% wrong q7 1: the scatter of one probe
def deflated_estimates(V, AV, Q, AQ):
    inside = Q.T @ V
    W, AW = V - Q @ inside, AV - AQ @ inside
    values = (W * AW).sum(0)
    norm = AQ.square().sum() + AW.square().sum(0).mean()
    return torch.stack([(Q * AQ).sum() + values.mean(), values.std(), norm])


# %% wrong q7 1: the norm of Q^T A Q in place of that of A Q
def deflated_estimates(V, AV, Q, AQ):
    inside = Q.T @ V
    W, AW = V - Q @ inside, AV - AQ @ inside
    values = (W * AW).sum(0)
    norm = (Q.T @ AQ).square().sum() + AW.square().sum(0).mean()
    error = values.std() / math.sqrt(len(values))
    return torch.stack([(Q * AQ).sum() + values.mean(), error, norm])


# %% wrong q7 3: added, but not taken out
def deflated_estimates(V, AV, Q, AQ):
    values = (V * AV).sum(0)
    error = values.std() / math.sqrt(len(values))
    norm = AQ.square().sum() + AV.square().sum(0).mean()
    return torch.stack([(Q * AQ).sum() + values.mean(), error, norm])


# %% [markdown]
# ## 9. A density from Lanczos
#
# From a vector $q$, scaled to length one, $m$ Lanczos steps build an orthonormal basis of
# $q, Aq, \dots, A^{m-1}q$ in which $A$ becomes a tridiagonal matrix $T$. Put a point at each
# eigenvalue $\theta_j$ of $T$, with the square of the *first* component of its unit eigenvector as
# its weight $w_j$. Then $\sum_j w_j \theta_j^k = q^\top A^k q$ for all $k < 2m$.
#
# **Question q8.** Write `quadrature`, which returns the points and their weights as two vectors of
# the same length: `steps` of them, or fewer if the basis is complete before (the next vector is
# then zero, or what rounding makes of it). The vector $q$ may have any length but zero. In long
# runs each eigenvalue that has converged must stay a single point: keep each new vector orthogonal
# to all before.


# %% answer q8
def quadrature(A, q, steps):
    """Points and weights, two vectors, for a symmetric matrix A (P x P) and a vector q (P)."""
    # BEGIN SOLUTION
    basis, diagonal, beside = (q / q.norm())[None], [], []
    while True:
        image = A @ basis[-1]
        diagonal.append(float(image @ basis[-1]))
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        length = float(image.norm())
        if len(basis) == steps or length <= 1e-13 * max(map(abs, diagonal + beside)):
            break
        beside.append(length)
        basis = torch.cat([basis, image[None] / length])
    T, b = torch.tensor(diagonal, dtype=A.dtype).diag(), torch.tensor(beside, dtype=A.dtype)
    points, vectors = torch.linalg.eigh(T + b.diag(1) + b.diag(-1))
    return points, vectors[0].square()
    # END SOLUTION


# %% public q8
A = torch.diag(torch.arange(1.0, 9.0).double()) + 0.5
q = torch.tensor([1.0, -1.0, 2.0, 0.5, 1.0, 1.5, -0.5, 1.0]).double()
found = ran("It takes A, q and steps.", quadrature, A.clone(), q / q.norm(), 3)
hint = "return two vectors, the points and their weights"
assert isinstance(found, tuple | list) and len(found) == 2, hint
points, weights = found
shaped("the vector of points", points, 3)
shaped("the vector of weights", weights, 3)
hint = "Weights are squared first components, over all unit eigenvectors: they add up to one."
close("the sum of the weights", weights.sum(), 1.0, hint)
u = q / q.norm()
for k in range(1, 6):
    moment = u @ torch.linalg.matrix_power(A, k) @ u
    hint = "With 3 steps all moments up to k = 5 are exact: are the weights first components?"
    close(f"the moment of degree {k}", weights @ points**k, moment, hint)
hint = "Scale q to length one first: the answer does not depend on its length."
again = ran(hint, quadrature, A, 2 * u, 3)
close("the points for 2 q", again[0], points, hint)
close("the weights for 2 q", again[1], weights, hint)
hint = "For an eigenvector the basis is complete after one step: stop, and do not divide by zero."
points, weights = ran(hint, quadrature, torch.diag(u), torch.eye(8).double()[2], 3)
assert torch.isfinite(points).all() and torch.isfinite(weights).all(), hint


# %% hidden common
def rotated(rng, values):
    """A symmetric matrix with these eigenvalues, its eigenvectors, and a random unit vector."""
    Q = np.linalg.qr(rng.normal(size=(len(values), len(values))))[0]
    q = rng.normal(size=len(values))
    return Q * values @ Q.T, Q, q / np.linalg.norm(q)


def measure(answer, steps):
    """Points and weights: at most `steps`, weights not negative, with the sum one."""
    assert isinstance(answer, list) and len(answer) == 2, "points and weights are expected"
    count = np.size(answer[0])
    assert 1 <= count <= steps, f"there are {count} points, but at most {steps} are expected"
    points, weights = (np.asarray(each, dtype=float).reshape(-1) for each in answer)
    points = array(points, (count,), name="the points")
    weights = array(weights, (count,), name="the weights")
    assert (weights > -1e-12).all(), "a weight is negative"
    near(weights.sum(), 1, name="the sum of the weights")
    return points, weights


def check_moments(calls, answers):
    for c, answer in zip(calls, answers):
        x = c.arguments
        points, weights = measure(answer, x["steps"])
        values, vectors = np.linalg.eigh(x["A"])
        share = (vectors.T @ x["q"]) ** 2 / (x["q"] @ x["q"])
        for k in range(2 * x["steps"]):
            size = share @ np.abs(values) ** k
            error = abs(weights @ points**k - share @ values**k) / size
            assert error < 1e-8, f"the moment of degree {k} is off by {error:.1e}"


# %% hidden q8 1: moments
def calls(rng):
    wanted = []
    for P, steps in ((20, 3), (40, 6), (9, 1)):
        A, _, q = rotated(rng, rng.normal(size=P))
        wanted.append(call("quadrature", A=A, q=q, steps=steps))
    return wanted


def check(calls, answers):
    check_moments(calls, answers)


# %% hidden q8 1: vectors of any length
def calls(rng):
    wanted = []
    for length in (0.01, 30.0):
        A, _, q = rotated(rng, rng.uniform(1, 3, size=15))
        wanted.append(call("quadrature", A=A, q=length * q, steps=4))
    return wanted


def check(calls, answers):
    check_moments(calls, answers)


# %% hidden q8 1: long runs keep single points
OUTLIERS = (50.0, 30.0, -20.0)


def calls(rng):
    values = np.concatenate([rng.uniform(0, 1, size=197), OUTLIERS])
    A, _, q = rotated(rng, values)
    return [call("quadrature", A=A, q=q, steps=100)]


def check(calls, answers):
    x = calls[0].arguments
    points, weights = measure(answers[0], 100)
    values, vectors = np.linalg.eigh(x["A"])
    for outlier in OUTLIERS:
        at = np.abs(points - outlier) < 1e-3
        assert at.sum() == 1, f"an outlier appears {at.sum()} times"
        share = float(vectors[:, np.argmin(np.abs(values - outlier))] @ x["q"]) ** 2
        near(weights[at], [share], tolerance=1e-6, name="the weight of an outlier")


# %% hidden q8 1: a basis that is complete early
def calls(rng):
    diagonal, unit = rng.uniform(1, 2, size=6), np.eye(6)[int(rng.integers(6))]
    A, _, q = rotated(rng, np.repeat([1.0, 3.0, 7.0], [5, 4, 3]))
    return [
        call("quadrature", A=np.diag(diagonal), q=unit, steps=4),
        call("quadrature", A=2 * np.eye(len(q)), q=q, steps=5),
        call("quadrature", A=A, q=q, steps=8),
    ]


def check(calls, answers):
    check_moments(calls, answers)


# %% wrong q8 4: squared whole eigenvectors as weights
def quadrature(A, q, steps):
    basis, diagonal, beside = (q / q.norm())[None], [], []
    while True:
        image = A @ basis[-1]
        diagonal.append(float(image @ basis[-1]))
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        length = float(image.norm())
        if len(basis) == steps or length < 1e-12:
            break
        beside.append(length)
        basis = torch.cat([basis, image[None] / length])
    T, b = torch.tensor(diagonal, dtype=A.dtype).diag(), torch.tensor(beside, dtype=A.dtype)
    points, vectors = torch.linalg.eigh(T + b.diag(1) + b.diag(-1))
    return points, vectors.square().sum(0) / len(points)


# %% wrong q8 1: only the two last vectors are taken out
def quadrature(A, q, steps):
    vector, before, length, diagonal, beside = q / q.norm(), 0 * q, 0.0, [], []
    while True:
        image = A @ vector - length * before
        diagonal.append(float(image @ vector))
        image = image - diagonal[-1] * vector
        length = float(image.norm())
        if len(diagonal) == steps or length < 1e-12:
            break
        beside.append(length)
        before, vector = vector, image / length
    T, b = torch.tensor(diagonal, dtype=A.dtype).diag(), torch.tensor(beside, dtype=A.dtype)
    points, vectors = torch.linalg.eigh(T + b.diag(1) + b.diag(-1))
    return points, vectors[0].square()


# %% wrong q8 1: no look at whether the basis is complete
def quadrature(A, q, steps):
    basis, T = (q / q.norm())[None], torch.zeros(steps, steps, dtype=A.dtype)
    for k in range(steps):
        image = A @ basis[-1]
        T[k, k] = image @ basis[-1]
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        if k + 1 < steps:
            T[k, k + 1] = T[k + 1, k] = image.norm()
            basis = torch.cat([basis, image[None] / image.norm()])
    points, vectors = torch.linalg.eigh(T)
    return points, vectors[0].square()


# %% wrong q8 1: q as it comes
def quadrature(A, q, steps):
    basis, diagonal, beside = q[None], [], []
    while True:
        image = A @ basis[-1]
        diagonal.append(float(image @ basis[-1]))
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        length = float(image.norm())
        if len(basis) == steps or length < 1e-12:
            break
        beside.append(length)
        basis = torch.cat([basis, image[None] / length])
    T, b = torch.tensor(diagonal, dtype=A.dtype).diag(), torch.tensor(beside, dtype=A.dtype)
    points, vectors = torch.linalg.eigh(T + b.diag(1) + b.diag(-1))
    return points, vectors[0].square()


# %% [markdown]
# ### Experiment: the spectrum of a small network
#
# The trained network is small enough to know its whole Hessian: 565 products with $G$ and with
# $R$. That is the truth; beside it stand the estimates.

# %%
p = logits(end, X, widths).softmax(1)
units = torch.eye(P).double()
G = torch.stack([moment_product(end, X, widths, p, unit) for unit in units])
R = torch.stack([rest_product(end, X, widths, Y, unit) for unit in units])
H = G + R
values, vectors = torch.linalg.eigh(H)
print("largest eigenvalues of H:", values.flip(0)[:8].numpy().round(4))
print("largest eigenvalues of G:", torch.linalg.eigvalsh(G).flip(0)[:8].numpy().round(4))
print(f"least of H: {float(values[0]):.4f}; trace of R: {float(R.trace()):.4f}")

# %%
V = torch.randint(2, (P, 20), generator=generator).double() * 2 - 1
rows = []
print(f"exact:  trace {float(H.trace()):.4f}                |H|_F^2 {float(H.square().sum()):.4f}")
for s in (1, 2, 4, 8, 16, 32):
    Q = vectors[:, -s:]
    trace, error, norm = deflated_estimates(V, H @ V, Q, H @ Q).tolist()
    rows.append([s, abs(trace / float(H.trace()) - 1), error / float(H.trace())])
    print(f"s = {s:2d}: trace {trace:.4f} ± {error:.4f}      |H|_F^2 {norm:.4f}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8))
top = float(values[-1])
at, width = torch.linspace(-0.08 * top, 1.08 * top, 800).double(), top / 100
probes = torch.randn(10, P, generator=generator, dtype=torch.float64)
density = torch.zeros(800).double()
for probe in probes:
    points, weights = quadrature(H, probe, 60)
    bumps = torch.exp(-0.5 * ((at[:, None] - points) / width) ** 2)
    density += bumps @ weights / (10 * width * math.sqrt(2 * math.pi))
axes[0].hist(values, bins=60, density=True, log=True, color="0.75", label="all eigenvalues")
axes[0].semilogy(at, density, label="Lanczos, 10 probes, 60 steps")
axes[0].set(xlabel="eigenvalue of H", ylabel="density", ylim=(1e-3, 500))
for column, marker, name in ((1, "o-", "actual error"), (2, "s--", "standard error")):
    axes[1].loglog([row[0] for row in rows], [row[column] for row in rows], marker, label=name)
axes[1].set(xlabel="directions taken out, s", ylabel="error of the trace, relative")
axes[1].set_xticks([row[0] for row in rows], [row[0] for row in rows])
axes[1].set_xticks([], minor=True)
for axis in axes:
    axis.legend()
fig.tight_layout()
plt.show()

# %% [markdown]
# **Question w4.** Read both panels. What does Lanczos get right with ten probes, and what not (look
# at places and at heights)? How do the two errors of the trace change with $s$, and why can the
# actual error lie on either side of the standard error? Products cost the same for $V$ and for $Q$:
# for ten more products, would you take more probes or more directions, and on which property of the
# spectrum does it depend? (Five to seven sentences.)

# %% [markdown] written w4 3
# BEGIN SOLUTION
# Places: the largest eigenvalues come out where they are, since they converge first. Heights: the
# weight of a single eigenvalue is the squared component of a random vector, right only on average,
# so the bumps at the three largest, which should be equal, have heights of 0.13 to 0.31; the bulk
# near 0 is only as fine as the smoothing, and reaches below the least eigenvalue, −0.004. The
# standard error of the trace falls from 5 % for $s = 1$ to 0.3 % for $s = 32$. The actual error is
# one draw from a distribution of about this width: it may be much smaller by chance, or two or
# three times as large, and the standard error is itself estimated. It is at most $\sqrt{2/k}$ times
# the Frobenius norm of what is left. Ten more probes, 30 for 20, reduce it by $\sqrt{20/30} = 0.8$;
# ten directions reduce it much more here, because the four largest eigenvalues alone hold 95 % of
# $\|H\|_F^2$. For a flat spectrum it would be the other way round. And here the eigenvectors were
# known: finding them costs products, too.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: places of the largest eigenvalues are right, their weights only on average; the bulk's
#   form only as fine as the smoothing
# - 1 point: the standard error falls with $s$, with numbers; one draw may be lucky or not
# - 1 point: probes reduce by $1/\sqrt k$, directions by the share of $\|H\|_F^2$ that they hold: a
#   few large eigenvalues favour directions, a flat spectrum probes
# END RUBRIC
