# %% assignment
# title = "Class centres and outliers"
# minutes = {q1=40, q2=30, q3=35, w1=25, q4=30, q5=25, w2=25, q6=25, q7=45, w3=30, q8=35, w4=25}
# withheld = [
#     "lowgrad_utils.curvature.LossCurvature.class_centres",
#     "lowgrad_utils.curvature.LossCurvature.group_means",
#     "lowgrad_utils.curvature.LossCurvature.logit_derivatives",
#     "lowgrad_utils.curvature.LossCurvature.derivatives_along",
#     "lowgrad_utils.curvature.LossCurvature._class_means",
#     "lowgrad_utils.curvature.LossCurvature._cotangents",
#     "lowgrad_utils.eigensolvers.rayleigh_ritz",
#     "lowgrad_utils.eigensolvers.orthonormal_columns",
#     "lowgrad_utils.spectra.principal_angles",
#     "lowgrad_utils.three_levels.explicit_terms",
#     "lowgrad_utils.three_levels.ThreeLevels.organisation",
#     "lowgrad_utils.experiments.clusters.within_between",
#     "lowgrad_utils.experiments.clusters.cluster_numbers",
#     "lowgrad_utils.experiments.excess.evenness_of",
#     "lowgrad_utils.experiments.excess.split_derivatives",
#     "lowgrad_utils.experiments.excess._restricted_eigenvalues",
#     "lowgrad_utils.experiments.edge_threshold.share_between",
# ]

# %% [markdown]
# # Assignment: class centres and outliers
#
# A trained classifier with $C$ classes has about $C$ large eigenvalues of its Gauss-Newton matrix.
# You compute the class centres that are said to be behind them, find out what of an eigenvalue and
# what of an eigenvector they explain, and take apart what they do not explain. Then you ask when
# vectors are a cluster, and what a picture of t-SNE can say about it.
#
# **Learning goals.** Get a mean of many derivatives from one backward pass; restrict a matrix that
# is too large to form to a subspace, with an error bound; compute angles between subspaces without
# losing digits; split an eigenvalue into what means carry and what uneven sizes carry; build a
# counterexample to a threshold. In the further questions: tell clusters in direction from clusters
# in distance; say exactly what t-SNE does not see; split a variance over two labels that overlap.
#
# **You need** linear algebra (eigenvalues, singular values, projections, least squares), the chain
# rule, some PyTorch. Read the chapters *Outliers and class centres*, *Figures 3 and 4: are the
# group means clusters?*, *Figure 5: by logit first, by class later*, *Claim C6: does random matrix
# theory explain the excess?* and *A threshold at the bulk edge* first.
#
# All arrays are torch tensors in float64, in the tests also vectors of labels, which hold whole
# numbers from 0: write `labels.long()` where you need integers. The functions of `lowgrad_utils`
# that do a question's work (such as `class_centres`, `rayleigh_ritz`, `principal_angles`,
# `explicit_terms`) are switched off in the grading. NumPy, SciPy and PyTorch are yours to use; what
# you return should be torch tensors, since the checks and the experiments go on with them.

# %%
import math

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch.func import functional_call, jacrev, vmap

from lowgrad_utils import LossCurvature, datasets, top_eigenpairs, trained_networks
from lowgrad_utils.experiments import clusters


def logits(theta, x, network):
    """Logits, n x C, for inputs x and all parameters in one vector theta."""
    if isinstance(network, list):
        d, h, C = network
        W1, b1, W2, b2 = theta.split([h * d, h, C * h, C])
        return torch.tanh(x @ W1.view(h, d).T + b1) @ W2.view(C, h).T + b2
    like = dict(network.model.named_parameters())
    pieces = theta.split([p.numel() for p in like.values()])
    values = {name: piece.view(p.shape) for (name, p), piece in zip(like.items(), pieces)}
    return functional_call(network.model, values, (x,))


# %% [markdown]
# ## 1. A weighted centre for the price of a gradient
#
# A classifier with parameters $\theta \in \mathbb R^P$ gives example $i$ the logits
# $z_i(\theta) \in \mathbb R^C$ and the probabilities $p_i = \operatorname{softmax}(z_i)$. With the
# Jacobian $J_i = \partial z_i / \partial\theta$ ($C \times P$) and unit vectors $e_k$ its logit
# derivatives, and the Gauss-Newton matrix, are
#
# $$
# \delta_{i,k} = \sqrt{p_{i,k}}\; J_i^\top (e_k - p_i) \in \mathbb R^P, \qquad
# G = \frac1n \sum_{i=1}^n \sum_{k=1}^C \delta_{i,k}\, \delta_{i,k}^\top .
# $$
#
# The *group* $(c, k)$ holds the $\delta_{i,k}$ of the $n_c$ examples of class $c$; $\delta_{c,k}$
# is its mean. A $C \times C$ table $A$ weighs the logits of each class:
#
# $$
# \delta_c(A) = \sum_{k=1}^C A_{ck}\, \delta_{c,k} .
# $$
#
# The class centres are the case $A_{ck} = 1/(C-1)$ for $k \ne c$ and $A_{cc} = 0$; $A = I$ gives
# the means $\delta_{c,c}$, and other tables single out a confusion, or give all group means.
#
# **Question q1.** Write `centres`, which returns $\delta_1(A), \dots, \delta_C(A)$ as the rows of a
# $C \times P$ matrix. For vectors $v_i \in \mathbb R^C$ that you have to find, $\delta_c(A)$ is the
# gradient in $\theta$ of the number $\sum_{i \in c} \langle v_i, z_i(\theta)\rangle$, with the
# $v_i$ held constant: one backward pass for each class. All $\delta_{i,k}$ together may need more
# memory than there is; one test has such a size.
#
# `logits(theta, x, network)`, given above, returns all $z_i$ as rows. `network` is a list of widths
# $[d, h, C]$ (one layer of $h$ tanh units) or a network that is shipped with the book; you only
# hand it on. Each class has at least one example, in any order.


# %% answer q1
def centres(theta, x, labels, table, network):
    """The vectors delta_c(A), rows of a C x P matrix, for the table A (C x C)."""
    # BEGIN SOLUTION
    theta = theta.detach().requires_grad_()
    rows = []
    for c, weights in enumerate(table):
        own = labels == c
        z = logits(theta, x[own], network)
        p = z.detach().softmax(1)
        r = weights * p.sqrt() / own.sum()
        v = r - r.sum(1, keepdim=True) * p
        rows.append(torch.autograd.grad((v * z).sum(), theta)[0])
    return torch.stack(rows)
    # END SOLUTION


# %% public q1
widths, labels = [3, 2, 4], torch.tensor([3.0, 0.0, 3.0, 1.0, 2.0]).double()
x = torch.arange(15.0).double().view(5, 3) / 7 - 1
table = torch.tensor([[0, 1, 0, 0], [0, 0, 2, 1], [1, 0, 0, 0], [3, 0, 1, 0]]).double()
theta = torch.zeros(20).double()
hint = "Do labels come as float64 and theta without requires_grad in your code, too?"
found = ran(hint, centres, theta, x, labels, table, widths)
shaped("the matrix of centres", found, 4, 20)
# The last C entries belong to the biases b2, where J is I. With theta = 0 all p are 1/C.
found, expected = found[:, -4:], (table - table.sum(1, keepdim=True) / 4) / 2
hint = "The entries of e_k - p_i add up to 0, so those of delta_{i,k} that belong to b2 do, too."
assert found.sum(1).abs().max() < 1e-9, f"a row's part for b2 does not add up to 0. {hint}"
lengths = found.norm(dim=1) / expected.norm(dim=1)
hint = "Row c of A belongs to class c, and column k to logit k: this A is not symmetric."
close("a direction", found / lengths.clamp_min(1e-300)[:, None], expected, hint)
hint = "Class 3 has two examples here, class 0 has one, and each delta_{c,k} is a mean: over what?"
close("the length of row 3, over that of row 0,", lengths[3] / lengths[0], 1.0, hint)
hint = "Directions and ratios are right, so a factor is common to all rows: look at sqrt(p), 1/n."
close("the part for b2", found, expected, hint)

# %% public q1
widths, labels = [3, 2, 4], torch.tensor([3.0, 0.0, 3.0, 1.0, 2.0]).double()
x = torch.arange(15.0).double().view(5, 3) / 7 - 1
p = torch.tensor([0.5, 0.25, 0.125, 0.125]).double()
theta = torch.cat([torch.zeros(16).double(), p.log()])
table = torch.eye(4).double().roll(1, 1)
hint = "Do labels come as float64 and theta without requires_grad in your code, too?"
found = ran(hint, centres, theta, x, labels, table, widths)
shaped("the matrix of centres", found, 4, 20)
hint = (
    "Only A_01, A_12, A_23 and A_30 are 1 here, so row c is sqrt(p_k) (e_k - p) with the next k. "
    "Are the v_i constant, and is A used?"
)
expected = table @ (p.sqrt()[:, None] * (torch.eye(4).double() - p))
close("the part for b2 of another table", found[:, -4:], expected, hint)

# %% public q1
widths, labels = [3, 2, 4], torch.tensor([3.0, 0.0, 3.0, 1.0, 2.0]).double()
x, theta = torch.arange(15.0).double().view(5, 3) / 7 - 1, torch.arange(20.0).double().sin()
table = (torch.ones(4, 4).double() - torch.eye(4).double()) / 3
found = centres(theta, x, labels, table, widths)
shaped("the matrix of centres", found, 4, 20)
# Without the first example of class 3, and without the second.
subsets = ([1, 2, 3, 4], [0, 1, 3, 4])
ones = [centres(theta, x[kept], labels[kept], table, widths) for kept in subsets]
hint = "It has two examples, rows 0 and 2 of x. Each has its own J and its own p."
close("the centre of class 3, against the mean of its examples,", found[3], sum(ones)[3] / 2, hint)

# %% hidden common
import scipy.linalg


def random_network(rng, d, h, C):
    """Widths and parameters of a tanh network whose probabilities are far from even."""
    theta = 0.7 * rng.normal(size=h * d + h + C * h + C)
    return [int(d), int(h), int(C)], theta


def network_logits(theta, x, widths):
    d, h, C = widths
    W1, b1, W2, b2 = torch.split(theta, [h * d, h, C * h, C])
    return torch.tanh(x @ W1.view(h, d).T + b1) @ W2.view(C, h).T + b2


def classes(rng, counts):
    """Labels with these numbers of examples, in random order, as float64."""
    return rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(float)


def centre_call(rng, widths, counts, table):
    widths, theta = random_network(rng, *widths)
    labels = classes(rng, counts)
    x = rng.normal(size=(len(labels), widths[0]))
    return call("centres", theta=theta, x=x, labels=labels, table=table, network=widths)


def usual(C):
    return (1 - np.eye(C)) / (C - 1)


def explicit_centres(theta, x, labels, table, network):
    """From all logit derivatives, as they are defined."""
    theta, x = torch.as_tensor(theta), torch.as_tensor(x)
    J = torch.func.jacrev(network_logits)(theta, x, network).numpy()
    p = network_logits(theta, x, network).softmax(1).numpy()
    C = len(table)
    delta = np.einsum("ik,kji,ijP->ikP", np.sqrt(p), np.eye(C)[:, :, None] - p.T[None], J)
    means = np.stack([delta[labels == c].mean(axis=0) for c in range(C)])
    return np.einsum("ck,ckP->cP", table, means)


def centres_by_hand(theta, x, labels, table, network):
    """By backpropagation written out, group by group: needs little memory."""
    (d, h, C), rows = network, []
    W1, b1, W2, b2 = np.split(theta, np.cumsum([h * d, h, C * h]))
    for c in range(C):
        own = x[labels == c]
        hidden = np.tanh(own @ W1.reshape(h, d).T + b1)
        z = hidden @ W2.reshape(C, h).T + b2
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        total = np.zeros_like(theta)
        for k in range(C):
            back = table[c, k] * np.sqrt(p[:, [k]]) * (np.eye(C)[k] - p) / len(own)
            inner = back @ W2.reshape(C, h) * (1 - hidden**2)
            parts = (inner.T @ own, inner.sum(axis=0), back.T @ hidden, back.sum(axis=0))
            total += np.concatenate([part.ravel() for part in parts])
        rows.append(total)
    return np.stack(rows)


def directions_agree(answer, expected, name):
    """Each row is a positive multiple of the expected one."""
    value = array(answer, expected.shape, name=name)
    lengths = np.linalg.norm(value, axis=1, keepdims=True)
    assert lengths.min() > 1e-12, f"a row of {name} is zero"
    units = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    near(value / lengths, units, name=f"the directions of {name}")


# %% hidden q1 1: class centres, their directions
def calls(rng):
    sizes = (((4, 3, 3), [4, 4, 4]), ((6, 5, 5), [3] * 5))
    return [centre_call(rng, widths, counts, usual(widths[2])) for widths, counts in sizes]


def check(calls, answers):
    for c, rows in zip(calls, answers):
        directions_agree(rows, explicit_centres(**c.arguments), "the class centres")


# %% hidden q1 1: class centres of unequal classes, their sizes
def calls(rng):
    sizes = (((5, 4, 3), [2, 5, 9]), ((3, 4, 4), [1, 7, 2, 4]))
    return [centre_call(rng, widths, counts, usual(widths[2])) for widths, counts in sizes]


def check(calls, answers):
    for c, rows in zip(calls, answers):
        near(rows, explicit_centres(**c.arguments), name="the class centres of unequal classes")


# %% hidden q1 1: other tables
def calls(rng):
    tables = (np.eye(4), rng.uniform(0, 2, size=(4, 4)), np.roll(np.eye(4), 1, axis=1))
    return [centre_call(rng, (4, 6, 4), [5] * 4, table) for table in tables]


def check(calls, answers):
    for c, rows in zip(calls, answers):
        directions_agree(rows, explicit_centres(**c.arguments), "the centres of another table")


# %% hidden q1 1: more logit derivatives than fit in memory
def calls(rng):
    # 3000 x 4 x 15754 numbers are 1.5 GB.
    return [centre_call(rng, (100, 150, 4), [750] * 4, usual(4))]


def check(calls, answers):
    expected = centres_by_hand(**calls[0].arguments)
    directions_agree(answers[0], expected, "the centres of a large network")


# %% wrong q1 4: the v_i are differentiated, too
def centres(theta, x, labels, table, network):
    theta = theta.detach().requires_grad_()
    rows = []
    for c, weights in enumerate(table):
        own = labels == c
        z = logits(theta, x[own], network)
        p = z.softmax(1)
        r = weights * p.sqrt() / own.sum()
        v = r - r.sum(1, keepdim=True) * p
        rows.append(torch.autograd.grad((v * z).sum(), theta)[0])
    return torch.stack(rows)


# %% wrong q1 1: as if all classes had n / C examples
def centres(theta, x, labels, table, network):
    theta = theta.detach().requires_grad_()
    rows = []
    for c, weights in enumerate(table):
        z = logits(theta, x[labels == c], network)
        p = z.detach().softmax(1)
        r = weights * p.sqrt() * len(table) / len(x)
        v = r - r.sum(1, keepdim=True) * p
        rows.append(torch.autograd.grad((v * z).sum(), theta)[0])
    return torch.stack(rows)


# %% wrong q1 1: a mean over all examples, not over those of the class
def centres(theta, x, labels, table, network):
    theta = theta.detach().requires_grad_()
    rows = []
    for c, weights in enumerate(table):
        z = logits(theta, x[labels == c], network)
        p = z.detach().softmax(1)
        r = weights * p.sqrt() / len(x)
        v = r - r.sum(1, keepdim=True) * p
        rows.append(torch.autograd.grad((v * z).sum(), theta)[0])
    return torch.stack(rows)


# %% wrong q1 1: the table transposed
def centres(theta, x, labels, table, network):
    theta = theta.detach().requires_grad_()
    rows = []
    for c, weights in enumerate(table.T):
        own = labels == c
        z = logits(theta, x[own], network)
        p = z.detach().softmax(1)
        r = weights * p.sqrt() / own.sum()
        v = r - r.sum(1, keepdim=True) * p
        rows.append(torch.autograd.grad((v * z).sum(), theta)[0])
    return torch.stack(rows)


# %% wrong q1 4: the square root of p forgotten
def centres(theta, x, labels, table, network):
    theta = theta.detach().requires_grad_()
    rows = []
    for c, weights in enumerate(table):
        own = labels == c
        z = logits(theta, x[own], network)
        p = z.detach().softmax(1)
        r = weights * p / own.sum()
        v = r - r.sum(1, keepdim=True) * p
        rows.append(torch.autograd.grad((v * z).sum(), theta)[0])
    return torch.stack(rows)


# %% wrong q1 1: always the plain class centres
def centres(theta, x, labels, table, network):
    theta = theta.detach().requires_grad_()
    rows = []
    for c in range(len(table)):
        own = labels == c
        z = logits(theta, x[own], network)
        p = z.detach().softmax(1)
        r = p.sqrt() * (torch.arange(len(table)) != c) / (len(table) - 1) / own.sum()
        v = r - r.sum(1, keepdim=True) * p
        rows.append(torch.autograd.grad((v * z).sum(), theta)[0])
    return torch.stack(rows)


# %% wrong q1 1: all logit derivatives at once
def centres(theta, x, labels, table, network):
    J = vmap(lambda row: jacrev(logits)(theta, row[None], network)[0])(x)
    p = logits(theta, x, network).softmax(1)
    delta = p.sqrt()[..., None] * (J - (p[..., None] * J).sum(1, keepdim=True))
    means = torch.stack([delta[labels == c].mean(0) for c in range(len(table))])
    return (table[..., None] * means).sum(1)


# %% [markdown]
# ## 2. A large matrix on a small space
#
# $G$ is $P \times P$, too large to form, but products $G q$ can be had. On the span of a few
# vectors, given as the rows of $R$ ($K \times P$), *Rayleigh-Ritz* does this: with an orthonormal
# basis $Q$ ($P \times r$) of the span, take the eigenvalues $\rho_1 \ge \dots \ge \rho_r$ of
# $Q^\top G\, Q$, the *Ritz values*, and their unit eigenvectors $s_j$; the *Ritz vectors* are
# $w_j = Q s_j$. The residual norm $\|G w_j - \rho_j w_j\|$ is a certificate: some eigenvalue of $G$
# is no further than that from $\rho_j$.
#
# **Question q2.** Write `ritz`, which returns the Ritz values in falling order (length $r$), the
# Ritz vectors as the columns of a matrix ($P \times r$), and their residual norms (length $r$), all
# three in the same order.
#
# The symmetric matrix $G$ comes as something of which you may use the product `G @ Q` with a
# $P \times r$ matrix, and nothing else: a tensor in the tests, an operator for a network. Rows of
# $R$ may be linearly dependent, and their lengths may differ by many orders of magnitude; none is
# zero. Scale each row to length 1; then singular values below $10^{-8}$ of the largest count as
# zero, and $r$ is the number of the others.


# %% answer q2
def ritz(G, rows):
    """Ritz values (r, falling), vectors (P x r) and residual norms (r) of G on the rows' span."""
    # BEGIN SOLUTION
    units = rows / rows.norm(dim=1, keepdim=True)
    U, s, _ = torch.linalg.svd(units.T, full_matrices=False)
    Q = U[:, s > 1e-8 * s[0]]
    image = G @ Q
    small = Q.T @ image
    values, S = torch.linalg.eigh((small + small.T) / 2)
    values, S = values.flip(0), S.flip(1)
    vectors = Q @ S
    return values, vectors, (image @ S - vectors * values).norm(dim=0)
    # END SOLUTION


# %% public q2
G = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
rows = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]]).double()
found = ritz(G, rows)
assert isinstance(found, tuple | list) and len(found) == 3, (
    "return three things: values, vectors, residual norms"
)
values, vectors, residuals = found
shaped("the Ritz values", values, 2)
shaped("the matrix of Ritz vectors", vectors, 4, 2)
shaped("the residual norms", residuals, 2)
hint = "e_3 is an eigenvector; e_1 + e_2 has the Rayleigh quotient (1 + 2) / 2. Largest first."
close("the Ritz values", values, [3.0, 1.5], hint)
hint = "The columns must be orthonormal vectors in R^P, not in the small space."
close("the product V^T V", vectors.T @ vectors, torch.eye(2).double(), hint)

# %% public q2
G = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
rows = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]).double()
found = ritz(G, rows)
assert found is not None, "it returns nothing: does it end with 'return ...'?"
hint = "These rows are not orthogonal, and span the same plane as e_1 and e_2."
close("the sum of the Ritz values", sum(found[0]), 3.0, hint)
shaped("the matrix of Ritz vectors", found[1], 4, 2)
hint = "Any orthonormal basis of the span is not enough: the columns are the w_j = Q s_j, in order."
close("the product V^T G V", found[1].T @ G @ found[1], [[2.0, 0.0], [0.0, 1.0]], hint)
rows = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]]).double()
found = ritz(G, rows)
hint = "The residual is taken in R^P: G w - 1.5 w is not zero for w = (e_1 + e_2) / sqrt(2)."
close("the larger residual norm", max(found[2]), 0.5, hint)
hint = "The first belongs to e_3, an eigenvector: keep the order of the values."
assert abs(float(found[2][0])) < 1e-9, f"the first residual norm is not 0. {hint}"

# %% public q2
from lowgrad_utils.curvature import SymmetricOperator

matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
G = SymmetricOperator(4, matrix.dtype, matrix.device, lambda rows: rows @ matrix)
rows = torch.tensor([[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1e-12, 0.0]]).double()
found = ran("This G is an operator: it has 'G @ Q', but not 'Q.T @ G'.", ritz, G, rows)
assert found is not None, "it returns nothing: does it end with 'return ...'?"
r = len(found[0])
hint = "Rows 0 and 1 are parallel." if r > 2 else "Row 2 is short: is it scaled to length 1 first?"
assert r == 2, f"the span of these three rows has dimension 2, but there are {r} values. {hint}"
shaped("the matrix of Ritz vectors of three rows", found[1], 4, 2)
close("their Ritz values", found[0], [3.0, 1.5], "The span is that of e_1 + e_2 and e_3.")


# %% hidden common
def symmetric(rng, size):
    Z = np.linalg.qr(rng.normal(size=(size, size)))[0]
    A = Z @ (np.exp(rng.uniform(-2, 2, size=size))[:, None] * Z.T)
    return (A + A.T) / 2


def ritz_calls(rng):
    sizes = ((9, 4), (30, 7), (6, 6))
    return [call("ritz", G=symmetric(rng, P), rows=rng.normal(size=(K, P))) for P, K in sizes]


def expected_ritz(G, rows):
    """Falling, from the generalised eigenproblem of R G R^T and R R^T: no basis is made."""
    values, S = scipy.linalg.eigh(rows @ G @ rows.T, rows @ rows.T)
    return values[::-1], (rows.T @ S)[:, ::-1]


def ritz_parts(answer, P, r):
    """The three parts of an answer, in falling order of its values."""
    assert isinstance(answer, list) and len(answer) == 3, "values, vectors and residuals are needed"
    shapes = {"values": (r,), "vectors": (P, r), "residuals": (r,)}
    values, V, residuals = (
        array(part, shape, name=f"the array of {name}")
        for part, (name, shape) in zip(answer, shapes.items())
    )
    order = np.argsort(-values)
    return values[order], V[:, order], residuals[order]


# %% hidden q2 1: values, the largest first
def calls(rng):
    return ritz_calls(rng)


def check(calls, answers):
    for c, found in zip(calls, answers):
        assert isinstance(found, list) and found, "three things are needed"
        near(found[0], expected_ritz(**c.arguments)[0], name="the vector of Ritz values")


# %% hidden q2 1: vectors
def calls(rng):
    return ritz_calls(rng)


def check(calls, answers):
    for c, found in zip(calls, answers):
        rows = c.arguments["rows"]
        V = ritz_parts(found, rows.shape[1], len(rows))[1]
        near(V.T @ V, np.eye(len(rows)), name="V^T V")
        # A sign is free, the line is not: projections on each vector.
        for w, u in zip(V.T, expected_ritz(**c.arguments)[1].T):
            near(np.outer(w, w), np.outer(u, u), tolerance=1e-7, name="a Ritz vector's line")


# %% hidden q2 1: residual norms
def calls(rng):
    return ritz_calls(rng)[:2]


def check(calls, answers):
    for c, found in zip(calls, answers):
        G, rows = c.arguments["G"], c.arguments["rows"]
        values, V = expected_ritz(G, rows)
        residuals = np.linalg.norm(G @ V - V * values, axis=0)
        found = ritz_parts(found, len(G), len(rows))[2]
        near(found, residuals, tolerance=1e-7, name="the residual norms")


# %% hidden q2 1: dependent rows
def calls(rng):
    wanted = []
    for P, K, r in ((12, 5, 3), (8, 12, 8)):
        rows = rng.normal(size=(K, r)) @ rng.normal(size=(r, P))
        wanted.append(call("ritz", G=symmetric(rng, P), rows=rows))
    return wanted


def check(calls, answers):
    for c, found, r in zip(calls, answers, (3, 8)):
        G, rows = c.arguments["G"], c.arguments["rows"]
        values = ritz_parts(found, len(G), r)[0]
        near(values, expected_ritz(G, np.linalg.svd(rows)[2][:r])[0], name="the Ritz values")


# %% hidden q2 1: rows of very different lengths
def calls(rng):
    G, rows = symmetric(rng, 20), rng.normal(size=(5, 20))
    return [call("ritz", G=G, rows=rows * 10.0 ** np.array([[-11], [3], [0], [-6], [2]]))]


def check(calls, answers):
    G, rows = calls[0].arguments["G"], calls[0].arguments["rows"]
    values = ritz_parts(answers[0], 20, 5)[0]
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    near(values, expected_ritz(G, units)[0], name="the Ritz values")


# %% wrong q2 5: the rows are not made orthonormal
def ritz(G, rows):
    Q = (rows / rows.norm(dim=1, keepdim=True)).T
    values, S = torch.linalg.eigh(Q.T @ (G @ Q))
    values, S = values.flip(0), S.flip(1)
    V = Q @ S
    return values, V, (G @ V - V * values).norm(dim=0)


# %% wrong q2 1: as many values as rows
def ritz(G, rows):
    Q = torch.linalg.qr((rows / rows.norm(dim=1, keepdim=True)).T).Q
    values, S = torch.linalg.eigh(Q.T @ (G @ Q))
    values, S = values.flip(0), S.flip(1)
    V = Q @ S
    return values, V, (G @ V - V * values).norm(dim=0)


# %% wrong q2 1: long rows make short ones count as zero
def ritz(G, rows):
    U, s, _ = torch.linalg.svd(rows.T, full_matrices=False)
    Q = U[:, s > 1e-8 * s[0]]
    values, S = torch.linalg.eigh(Q.T @ (G @ Q))
    values, S = values.flip(0), S.flip(1)
    V = Q @ S
    return values, V, (G @ V - V * values).norm(dim=0)


# %% wrong q2 1: the smallest first
def ritz(G, rows):
    U, s, _ = torch.linalg.svd((rows / rows.norm(dim=1, keepdim=True)).T, full_matrices=False)
    Q = U[:, s > 1e-8 * s[0]]
    values, S = torch.linalg.eigh(Q.T @ (G @ Q))
    V = Q @ S
    return values, V, (G @ V - V * values).norm(dim=0)


# %% wrong q2 2: the vectors of the basis, not turned
def ritz(G, rows):
    U, s, _ = torch.linalg.svd((rows / rows.norm(dim=1, keepdim=True)).T, full_matrices=False)
    Q = U[:, s > 1e-8 * s[0]]
    values = torch.linalg.eigvalsh(Q.T @ (G @ Q)).flip(0)
    return values, Q, (G @ Q - Q * values).norm(dim=0)


# %% wrong q2 1: the residual inside the span, where it is zero
def ritz(G, rows):
    U, s, _ = torch.linalg.svd((rows / rows.norm(dim=1, keepdim=True)).T, full_matrices=False)
    Q = U[:, s > 1e-8 * s[0]]
    small = Q.T @ (G @ Q)
    values, S = torch.linalg.eigh(small)
    values, S = values.flip(0), S.flip(1)
    return values, Q @ S, (small @ S - S * values).norm(dim=0)


# %% [markdown]
# ## 3. Angles between spaces
#
# Where eigenvalues are nearly equal, single eigenvectors mean little, and their span means more.
# Two subspaces of dimensions $k$ and $r$ have $\min(k, r)$ *principal angles*
# $0 \le \alpha_1 \le \alpha_2 \le \dots \le \pi/2$: $\alpha_1$ is the smallest angle between a
# vector of one and a vector of the other, and so on in what is orthogonal to the vectors found.
# With orthonormal bases $Q_1$, $Q_2$ the $\cos\alpha_j$ are the singular values of $Q_1^\top Q_2$.
#
# **Question q3.** Write `angles`: the principal angles, in radians and ascending, between the span
# of the columns of $U$ ($P \times k$, independent, not necessarily orthonormal) and that of the
# rows of $R$ ($K \times P$, which may be dependent; the rank is decided as in question q2). Each
# angle must be right to $10^{-11}$, also where it is nearly 0 or nearly $\pi/2$. The arc cosine of
# a number that is right to 16 digits is not, for small angles: find out what it loses, and what is
# better there. (SciPy's `subspace_angles` falls short of this where small and large angles come
# together.)


# %% answer q3
def angles(U, rows):
    """Principal angles, ascending, between the columns of U (P x k) and the rows (K x P)."""
    # BEGIN SOLUTION
    bases = []
    for columns in (U, rows.T):
        left, s, _ = torch.linalg.svd(columns / columns.norm(dim=0), full_matrices=False)
        bases.append(left[:, s > 1e-8 * s[0]])
    small, large = sorted(bases, key=lambda basis: basis.shape[1])
    products = large.T @ small
    cosines = torch.linalg.svdvals(products)
    sines = torch.linalg.svdvals(small - large @ products).flip(0)
    return torch.atan2(sines, cosines)
    # END SOLUTION


# %% public q3
e = torch.eye(4).double()
rows = torch.stack([2 * e[0], 3 * e[1] + 3 * e[2]])
found = ran("Use U's columns and the rows' rows.", angles, e[:, :2], rows)
shaped("the vector of angles", found, 2)
hint = "The spaces share e_1 (angle 0), and e_2 meets e_2 + e_3 at 45 degrees. Smallest first."
error = float((found - torch.tensor([0.0, math.pi / 4]).double()).abs().max())
assert error < 1e-7, f"the angles are off by {error:.1e}. {hint}"
found = ran("U may have fewer columns than there are rows.", angles, 5 * e[:, 3:], rows)
shaped("the vector of angles between a line and a plane", found, 1)
close("the angle between e_4 and the rows", found, math.pi / 2, "They are orthogonal.")
U = torch.stack([e[0], 3 * e[0] + e[1]], 1)
found = ran("Neither U's columns nor the rows are orthonormal.", angles, U, rows)
shaped("the vector of angles of another basis", found, 2)
hint = "e_1 and 3 e_1 + e_2 span the same plane as e_1 and e_2: angles belong to spans."
error = float((found - torch.tensor([0.0, math.pi / 4]).double()).abs().max())
assert error < 1e-7, f"the angles of another basis are off by {error:.1e}. {hint}"
found = ran("Rows may be dependent.", angles, e[:, 1:], torch.stack([e[0], 2 * e[0]]))
hint = "These two rows span a line, which has one angle with U's columns: decide the rank as in q2."
assert found.shape == (1,), f"there are {found.numel()} angles instead of 1. {hint}"

# %% public q3
e = torch.eye(4).double()
line = torch.tensor([[1.0], [1e-7], [0.0], [0.0]]).double()
found = ran("A cosine may come out above 1.", angles, line, e[:1])
shaped("the vector of angles of two lines", found, 1)
hint = "1 - cos(1e-7) is 5e-15: what is left of it in 16 digits? The sine has all its digits."
error = abs(float(found[0]) - 1e-7)
assert error < 1e-11, f"the angle 1e-7 is off by {error:.1e}. {hint}"
planes = torch.cat([line, line.flip(0)], 1), e[[0, 2]]
found = ran("A sine may come out above 1.", angles, *planes)
shaped("the vector of angles of two planes", found, 2)
hint = "1 - sin(pi/2 - 1e-7) is 5e-15: here the sine loses digits. What has them?"
error = abs(float(found[1]) - (math.pi / 2 - 1e-7))
assert error < 1e-11, f"the angle pi/2 - 1e-7 is off by {error:.1e}. {hint}"


# %% hidden common
def spaces(rng, P, wanted, k, r):
    """Bases U (P x k), rows (r x P) of spaces with these min(k, r) angles; not orthonormal."""
    few, many = min(k, r), max(k, r)
    Z = np.linalg.qr(rng.normal(size=(P, P)))[0]
    small = Z[:, :few]
    turned = np.cos(wanted) * small + np.sin(wanted) * Z[:, few : 2 * few]
    large = np.hstack([turned, Z[:, 2 * few : few + many]])
    small, large = (
        B @ (np.eye(B.shape[1]) + 0.2 * rng.normal(size=(B.shape[1],) * 2)) for B in (small, large)
    )
    return (small, large.T) if k <= r else (large, small.T)


def compare_angles(answer, wanted):
    """Right to 1e-11, whatever the order."""
    found = np.sort(array(answer, (len(wanted),), name="the vector of angles"))
    error = np.abs(found - np.sort(wanted)).max()
    assert error < 1e-11, f"an angle is off by {error:.1e}"


# %% hidden q3 1: ordinary angles, the smallest first
def calls(rng):
    cases = [spaces(rng, P, rng.uniform(0.1, 1.4, size=k), k, k) for P, k in ((9, 3), (40, 8))]
    return [call("angles", U=U, rows=rows) for U, rows in cases]


def check(calls, answers):
    for c, found in zip(calls, answers):
        U, rows = c.arguments["U"], c.arguments["rows"]
        wanted = scipy.linalg.subspace_angles(U, rows.T)[::-1]
        near(found, wanted, name="the vector of angles")


# %% hidden q3 1: tiny angles
TINY = np.array([3e-10, 2e-8, 5e-6, 0.7])


def calls(rng):
    U, rows = spaces(rng, 15, TINY, 4, 4)
    return [call("angles", U=U, rows=rows)]


def check(calls, answers):
    compare_angles(answers[0], TINY)


# %% hidden q3 1: nearly right angles
NEARLY = np.pi / 2 - np.array([4e-9, 3e-8, 2e-7, 1.0])


def calls(rng):
    U, rows = spaces(rng, 15, NEARLY, 4, 4)
    return [call("angles", U=U, rows=rows)]


def check(calls, answers):
    compare_angles(answers[0], NEARLY)


# %% hidden q3 1: different dimensions, dependent rows
def calls(rng):
    wanted = []
    for k, r in ((2, 5), (5, 2), (3, 3)):
        few = min(k, r)
        U, rows = spaces(rng, 20, np.linspace(0.2, 1.2, few), k, r)
        rows = rng.normal(size=(r + 2, r)) @ rows
        wanted.append(call("angles", U=U, rows=rows))
    return wanted


def check(calls, answers):
    for found, few in zip(answers, (2, 2, 3)):
        compare_angles(found, np.linspace(0.2, 1.2, few))


# %% wrong q3 1: the arc cosine alone
def angles(U, rows):
    bases = []
    for columns in (U, rows.T):
        left, s, _ = torch.linalg.svd(columns, full_matrices=False)
        bases.append(left[:, s > 1e-8 * s[0]])
    return torch.arccos(torch.linalg.svdvals(bases[0].T @ bases[1]).clamp(max=1))


# %% wrong q3 1: the arc sine alone
def angles(U, rows):
    bases = []
    for columns in (U, rows.T):
        left, s, _ = torch.linalg.svd(columns, full_matrices=False)
        bases.append(left[:, s > 1e-8 * s[0]])
    small, large = sorted(bases, key=lambda basis: basis.shape[1])
    sines = torch.linalg.svdvals(small - large @ (large.T @ small)).flip(0)
    return torch.arcsin(sines.clamp(max=1))


# %% wrong q3 4: columns scaled to length 1, not made orthonormal
def angles(U, rows):
    one, two = U / U.norm(dim=0), (rows / rows.norm(dim=1, keepdim=True)).T
    return torch.arccos(torch.linalg.svdvals(one.T @ two).clamp(max=1))


# %% wrong q3 1: dependent rows span more than they do
def angles(U, rows):
    one, two = torch.linalg.qr(U).Q, torch.linalg.qr(rows.T).Q
    small, large = sorted((one, two), key=lambda basis: basis.shape[1])
    products = large.T @ small
    sines = torch.linalg.svdvals(small - large @ products).flip(0)
    return torch.atan2(sines, torch.linalg.svdvals(products))


# %% wrong q3 1: the largest first
def angles(U, rows):
    bases = []
    for columns in (U, rows.T):
        left, s, _ = torch.linalg.svd(columns, full_matrices=False)
        bases.append(left[:, s > 1e-8 * s[0]])
    small, large = sorted(bases, key=lambda basis: basis.shape[1])
    products = large.T @ small
    sines = torch.linalg.svdvals(small - large @ products).flip(0)
    return torch.atan2(sines, torch.linalg.svdvals(products)).flip(0)


# %% [markdown]
# ### The experiment: a trained network
#
# A narrow VGG11 that has learned 1000 images of MNIST; here $G$ is that of 20 of them a class.
# Three lists of eigenvalues: of $G$, of $G$ on the span of the class centres, and of
# $G_1 = (C-1) \sum_c \pi_c\, \delta_c \delta_c^\top$, what the centres make up by themselves
# ($\pi_c = n_c / n$ is the share of class $c$). And the angles between the span of the nine leading
# eigenvectors of $G$ and that of the centres, of the true classes and, as a yardstick, of classes
# dealt out at random.

# %%
network = trained_networks.load("mnist-vgg11")
x, labels = network.train_set
kept = torch.cat([torch.nonzero(labels == c).flatten()[:20] for c in range(10)])
x, labels = x[kept].double(), labels[kept]
network.model.double()  # the networks are shipped in float32
theta = torch.cat([p.detach().flatten() for p in network.model.parameters()])
# Products in parts that take at most 0.2 GB: in float64 all examples at once need much more.
G = LossCurvature(network.model, (x, labels), memory=0.2).gauss_newton
top = top_eigenpairs(G, 9, tolerance=1e-2, residuals=False)

# %%
table = (1 - torch.eye(10).double()) / 9
dealt = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
spans = {"true": labels, "dealt out": dealt}
rows = {name: centres(theta, x, each, table, network) for name, each in spans.items()}
values, vectors, residuals = ritz(G, rows["true"])
own = torch.linalg.eigvalsh(9 * rows["true"] @ rows["true"].T / 10).flip(0)
apart = {name: torch.rad2deg(angles(top.vectors, each)) for name, each in rows.items()}
print("Ritz value / eigenvalue     ", (values[:9] / top.values).numpy().round(2))
print("eigenvalue of G1 / of G     ", (own[:9] / top.values).numpy().round(2))
print("residual norm / Ritz value  ", (residuals / values)[:9].numpy().round(2))

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6))
lists = {"G": top.values, "G on the centres' span (Ritz)": values, "G₁, the centres alone": own}
for (name, each), style, colour in zip(lists.items(), "ox^", ("black", "#0072b2", "#d55e00")):
    axes[0].plot(range(1, 10), each[:9], style, color=colour, label=name)
for (name, each), style, colour in zip(apart.items(), ("o-", "s--"), ("#0072b2", "#e69f00")):
    axes[1].plot(range(1, 10), each, style, color=colour, label=f"classes: {name}")
axes[0].set(xlabel="k", ylabel="k-th eigenvalue", ylim=(0, None))
axes[1].set(xlabel="j", ylabel="j-th principal angle (degrees)", ylim=(0, 92))
for axis in axes:
    axis.legend()
plt.show()

# %% [markdown]
# **Question w1.** Compare the three lists, and the two lines of angles. Which of the orders that
# you see must hold for every network, and why? Which part of what you see is a finding? How can
# the same centres have the right directions and the wrong sizes? What do the residual norms allow
# you to say without an eigensolver? (Five to eight sentences, with numbers of your own.)

# %% [markdown] written w1 3
# BEGIN SOLUTION
# $\lambda_k(G_1) \le \rho_k \le \lambda_k(G)$ must hold for every network: the right half by
# Cauchy's interlacing, the left half since $G - G_1$ is positive semidefinite and $G_1$ lives on
# the span. How close $\rho_k$ comes is a finding: here the Ritz values are 0.72 to 0.96 of the
# eigenvalues ($k \le 9$), while $G_1$ alone has 0.10 to 0.14 of them. So the span is nearly right
# and the sizes are off by a factor of seven to ten. The angles say the same of the spaces: 8 to 50
# degrees, against 13 to 85 for classes dealt out at random; these are no poor guess, because a few
# images carry most of $G$, but the true classes are nearer at every $j$. Right directions with
# wrong sizes are no contradiction: a mean of vectors of one direction and uneven sizes keeps the
# direction, and its square is smaller than the mean of the squares. The residual norms say that $G$
# has an eigenvalue within 0.19 $\rho_1$ of $\rho_1$, and within 0.46 $\rho_8$ of $\rho_8$: certain,
# but weak, since the error of a Ritz value is of second order in the residual. That
# $\rho_k \le \lambda_k$ is certain, too.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: the order that is forced, with a reason for each half
# - 1 point: the closeness is the finding, with numbers of both lists and of both lines of angles
# - 1 point: uneven sizes turn no direction; what a residual bounds (and that it is a weak bound)
# END RUBRIC

# %% [markdown]
# ## 4. What the means leave out
#
# The group means make up $M = \sum_{c,k} \pi_c\, \delta_{c,k}\, \delta_{c,k}^\top$, with
# $\pi_c = n_c/n$. Along a vector $u$, $u^\top G u$ is the mean over examples of
# $\sum_k \langle \delta_{i,k}, u\rangle^2$, and $u^\top M u$ is the same of the group means. What
# $M$ lacks is the variance within groups. One part of that has a simple cause. The *size* of a
# member of group $(c,k)$, and the variance of sizes, are
#
# $$
# s_i = \frac{\langle \delta_{i,k}, \delta_{c,k}\rangle}{\|\delta_{c,k}\|^2}
# \quad (\text{its mean over the group is } 1), \qquad
# v_{c,k} = \frac{1}{n_c} \sum_{i \in c} (s_i - 1)^2 .
# $$
#
# If each $\delta_{i,k}$ were $s_i\, \delta_{c,k}$, then $\langle \delta_{i,k}, u\rangle$ would have
# the variance $v_{c,k}\, \langle \delta_{c,k}, u\rangle^2$. So we split exactly
#
# $$
# u^\top G u \;=\; \underbrace{\sum_{c,k} \pi_c\, \langle \delta_{c,k}, u\rangle^2}_{\text{means}}
# \;+\; \underbrace{\sum_{c,k} \pi_c\, v_{c,k}\, \langle \delta_{c,k}, u\rangle^2}_{\text{sizes}}
# \;+\; \text{rest}.
# $$
#
# (The chapters' evenness is $h = 1/(1 + v)$.)
#
# **Question q4.** Write `split_along`, which returns the vector (means, sizes, rest) for explicit
# logit derivatives: `D[i, k]` is $\delta_{i,k}$, so that $D$ has the shape $n \times C \times P$.
# The vector $u$ need not have length 1. Classes have different numbers of examples, at least one. A
# group whose mean is exactly zero has no sizes, and no part in the second sum. (The rest can be
# negative.)


# %% answer q4
def split_along(D, labels, u):
    """The parts (means, sizes, rest) of u^T G u, for D of shape n x C x P and u of length P."""
    # BEGIN SOLUTION
    means = sizes = 0
    for c in range(D.shape[1]):
        own = D[labels == c]
        share, mean = len(own) / len(D), own.mean(0)
        squares = mean.square().sum(1)
        s = (own * mean).sum(2) / torch.where(squares > 0, squares, 1)
        along = (mean @ u).square()
        means = means + share * along.sum()
        sizes = sizes + share * ((s - 1).square().mean(0) * along).sum()
    total = (D @ u).square().sum() / len(D)
    return torch.stack([means, sizes, total - means - sizes])
    # END SOLUTION


# %% public q4
labels = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]).double()
D = torch.zeros(5, 2, 3).double()
D[0, 0, 0], D[1, 0, 0], D[2:, 1, 1] = 1.0, 3.0, 2.0
found = ran("Do labels come as float64 in your code, too?", split_along, D, labels, 2 * D[0, 0])
shaped("the vector of parts (are there groups of mean zero?)", found, 3)
hint = "Here u = 2 e_1, and u^T G u = (4 + 36) / 5: the sum over examples is divided by n."
close("the sum of the parts", found.sum(), 8.0, hint)
hint = "Two of five examples are of class 0, whose mean derivative has the product 4 with u."
close("the part of the means", found[0], 6.4, hint)
hint = "The sizes are 1/2 and 3/2: their variance, divided by n_c, is 1/4."
close("the part of the sizes", found[1], 1.6, hint)

# %% public q4
labels = torch.tensor([0.0, 0.0, 1.0]).double()
D = torch.zeros(3, 2, 3).double()
D[0, 0, 0], D[1, 0, 0], D[1, 0, 1], D[2, 1, 1] = 3.0, 1.0, 2.0, 2.0
u = torch.tensor([1.0, 1.0, 0.0]).double()
found = ran("Do labels come as float64 in your code, too?", split_along, D, labels, u)
shaped("the vector of parts (class 1 has one example)", found, 3)
hint = "(3, 0) and (1, 2) have the sizes 6/5 and 4/5: projections on their mean (2, 1)."
close("the part of the sizes", found[1], 0.24, hint)
hint = "The means make up all of u^T G u here, so the rest cancels the sizes."
close("the rest", found[2], -0.24, hint)


# %% hidden common
def derivatives(rng, counts, P):
    """Logit derivatives of any kind, with means, uneven sizes and noise; and their labels."""
    C, labels = len(counts), classes(rng, counts)
    means = rng.normal(size=(C, C, P))
    sizes = rng.gamma(2.0, 0.5, size=(len(labels), C, 1))
    noise = 0.4 * rng.normal(size=(len(labels), C, P))
    return sizes * means[labels.astype(int)] + noise, labels


def split_calls(rng):
    wanted = []
    for counts, P in (([3, 8, 5], 7), ([2, 9, 4, 6], 12)):
        D, labels = derivatives(rng, counts, P)
        wanted.append(call("split_along", D=D, labels=labels, u=rng.normal(size=P)))
    return wanted


def expected_split(D, labels, u):
    """From second moments and covariances as full matrices; a variance of sizes from np.var."""
    n, C, P = D.shape
    G, M, S = (np.zeros((P, P)) for _ in range(3))
    for c in range(C):
        for k in range(C):
            group = D[labels == c, k]
            m, share = group.mean(axis=0), len(group) / n
            G += share * (np.cov(group.T, bias=True) + np.outer(m, m))
            M += share * np.outer(m, m)
            S += share * np.var(group @ m) * np.outer(m, m) / (m @ m) ** 2
    return np.array([u @ M @ u, u @ S @ u, u @ (G - M - S) @ u])


# %% hidden q4 1: the parts make up u^T G u
def calls(rng):
    # No variance along u, but sizes that vary: the rest is negative.
    D, labels = derivatives(rng, [4, 3, 6], 7)
    D[:, :, 0] = 1
    return [*split_calls(rng), call("split_along", D=D, labels=labels, u=np.eye(7)[0])]


def check(calls, answers):
    for c, found in zip(calls, answers):
        total = array(found, (3,), name="the vector of parts").sum()
        near(total, expected_split(**c.arguments).sum(), name="the sum of the parts")


# %% hidden q4 1: the means, of unequal classes
def calls(rng):
    return split_calls(rng)


def check(calls, answers):
    for c, found in zip(calls, answers):
        means = array(found, (3,), name="the vector of parts")[0]
        near(means, expected_split(**c.arguments)[0], name="the part of the means")


# %% hidden q4 1: the sizes
def calls(rng):
    return split_calls(rng)


def check(calls, answers):
    for c, found in zip(calls, answers):
        sizes = array(found, (3,), name="the vector of parts")[1]
        near(sizes, expected_split(**c.arguments)[1], name="the part of the sizes")


# %% hidden q4 1: groups whose mean is zero
def calls(rng):
    D, labels = derivatives(rng, [2, 2, 2], 5)
    for c, k in ((0, 1), (1, 1), (2, 0)):
        one, other = np.flatnonzero(labels == c)
        D[one, k] = -D[other, k]
    return [call("split_along", D=D, labels=labels, u=rng.normal(size=5))]


def check(calls, answers):
    # Values have their own tests: here the other groups must only keep their sizes.
    parts = array(answers[0], (3,), name="the vector of parts")
    assert parts[1] > 0, "no group has a part of the sizes, because some have none"


# %% wrong q4 3: classes of equal weight
def split_along(D, labels, u):
    means = sizes = total = 0
    C = D.shape[1]
    for c in range(C):
        own = D[labels == c]
        mean = own.mean(0)
        squares = mean.square().sum(1)
        s = (own * mean).sum(2) / torch.where(squares > 0, squares, 1)
        along = (mean @ u).square()
        means = means + along.sum() / C
        sizes = sizes + ((s - 1).square().mean(0) * along).sum() / C
        total = total + (own @ u).square().mean(0).sum() / C
    return torch.stack([means, sizes, total - means - sizes])


# %% wrong q4 1: the variance divided by n_c - 1
def split_along(D, labels, u):
    means = sizes = 0
    for c in range(D.shape[1]):
        own = D[labels == c]
        share, mean = len(own) / len(D), own.mean(0)
        squares = mean.square().sum(1)
        s = (own * mean).sum(2) / torch.where(squares > 0, squares, 1)
        along = (mean @ u).square()
        means = means + share * along.sum()
        sizes = sizes + share * (s.var(0) * along).sum()
    total = (D @ u).square().sum() / len(D)
    return torch.stack([means, sizes, total - means - sizes])


# %% wrong q4 1: all variance along u is put down to sizes
def split_along(D, labels, u):
    means = sizes = 0
    for c in range(D.shape[1]):
        own = D[labels == c]
        share, a = len(own) / len(D), own @ u
        means = means + share * a.mean(0).square().sum()
        sizes = sizes + share * a.var(0, correction=0).sum()
    total = (D @ u).square().sum() / len(D)
    return torch.stack([means, sizes, total - means - sizes])


# %% wrong q4 1: zero divided by zero
def split_along(D, labels, u):
    means = sizes = 0
    for c in range(D.shape[1]):
        own = D[labels == c]
        share, mean = len(own) / len(D), own.mean(0)
        s = (own * mean).sum(2) / mean.square().sum(1)
        along = (mean @ u).square()
        means = means + share * along.sum()
        sizes = sizes + share * ((s - 1).square().mean(0) * along).sum()
    total = (D @ u).square().sum() / len(D)
    return torch.stack([means, sizes, total - means - sizes])


# %% wrong q4 1: no rest below zero
def split_along(D, labels, u):
    means = sizes = 0
    for c in range(D.shape[1]):
        own = D[labels == c]
        share, mean = len(own) / len(D), own.mean(0)
        squares = mean.square().sum(1)
        s = (own * mean).sum(2) / torch.where(squares > 0, squares, 1)
        along = (mean @ u).square()
        means = means + share * along.sum()
        sizes = sizes + share * ((s - 1).square().mean(0) * along).sum()
    total = (D @ u).square().sum() / len(D)
    return torch.stack([means, sizes, (total - means - sizes).clamp_min(0)])


# %% wrong q4 1: what is not a number is replaced in the end
def split_along(D, labels, u):
    means = sizes = 0
    for c in range(D.shape[1]):
        own = D[labels == c]
        share, mean = len(own) / len(D), own.mean(0)
        s = (own * mean).sum(2) / mean.square().sum(1)
        along = (mean @ u).square()
        means = means + share * along.sum()
        sizes = sizes + share * ((s - 1).square().mean(0) * along).sum()
    total = (D @ u).square().sum() / len(D)
    return torch.stack([means, sizes, total - means - sizes]).nan_to_num()


# %% [markdown]
# ### The experiment: data whose answer is known
#
# First, vectors that are drawn: $\delta_{i,k} = s_i\, m_{c,k} + \text{noise}$, with orthogonal
# $m_{c,k}$, sizes of mean 1 and variance $v$, and noise of variance $\sigma^2$ in each of the $P$
# directions; $C$ classes of $n/C$ examples. Along $m_{c,k}/\|m_{c,k}\|$ the expected values are
# $u^\top G u = \theta\,(1 + v) + C \sigma^2$ and $u^\top M u = \theta\,(1 + vC/n) + C^2\sigma^2/n$,
# with $\theta = \|m_{c,k}\|^2/C$.


# %%
def gaussian_classes(lengths, v, sigma, n=300, P=200, seed=0):
    """Vectors D (n x C x P) with means along the axes, and labels; sizes are gamma variables."""
    C, stream = len(lengths), torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % C
    means = (lengths.flatten().diag() @ torch.eye(C * C, P).double()).view(C, C, P)
    uniform = torch.rand(n, C, round(1 / v), generator=stream).double()
    sizes = -uniform.log().mean(2)  # a mean of 1/v exponential variables: mean 1, variance v
    noise = sigma * torch.randn(n, C, P, generator=stream).double()
    return sizes[..., None] * means[labels] + noise, labels


# %%
lengths, v, sigma = torch.arange(9.0, 0.0, -1.0).double().view(3, 3), 0.5, 0.2
drawn = [gaussian_classes(lengths, v, sigma, seed=seed) for seed in range(20)]
print("axis   means (expected)   sizes    rest     sum (expected)")
for k in (0, 4, 8):
    u, strength = torch.eye(200).double()[k], float(lengths.flatten()[k]) ** 2 / 3
    found = torch.stack([split_along(D, labels, u) for D, labels in drawn]).mean(0)
    of_means = strength * (1 + v * 3 / 300) + 9 * sigma**2 / 300
    whole = strength * (1 + v) + 3 * sigma**2
    means, sizes, rest = found.tolist()
    print(f"{k + 1:4d} {means:7.3f}   ({of_means:6.3f}) {sizes:7.3f} {rest:7.3f}", end=" ")
    print(f"{means + sizes + rest:7.3f}   ({whole:6.3f})")

# %% [markdown]
# Then a network that is small enough for all its logit derivatives: 300 images of MNIST at 8 x 8
# pixels, ten tanh units, $P = 760$, before and after training. Along each of the nine leading
# eigenvectors of $G$ the three parts make up the eigenvalue. The line is $b_1 = \lambda_1(G - M)$,
# the largest eigenvalue within groups. The table has medians over the nine of each part's share and
# of $\lambda_k(M)/\lambda_k(G)$, and the number of eigenvalues of $G$ above $b_1$.


# %%
def train(theta, x, labels, widths, steps):
    """Parameters after so many steps with momentum and a little weight decay."""
    theta, velocity = theta.clone().requires_grad_(), torch.zeros_like(theta)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(logits(theta, x, widths), labels)
        (gradient,) = torch.autograd.grad(loss + 2e-4 * theta.square().sum(), theta)
        velocity = 0.9 * velocity - 0.3 * gradient
        theta = (theta + velocity).detach().requires_grad_()
    return theta.detach()


# %%
def explicit_derivatives(theta, x, widths):
    """All delta_{i,k}, n x C x P, one example after the other."""
    J = vmap(lambda row: jacrev(logits)(theta, row[None], widths)[0])(x)
    p = logits(theta, x, widths).softmax(1)
    return p.sqrt()[..., None] * (J - (p[..., None] * J).sum(1, keepdim=True))


def matrices(D, labels):
    """G and the matrix M of the group means."""
    means = torch.stack(
        [D[labels == c].mean(0) * (labels == c).double().mean().sqrt() for c in range(10)]
    )
    return (rows.flatten(0, 1).T @ rows.flatten(0, 1) for rows in (D / len(D) ** 0.5, means))


# %%
x, labels = datasets.load("mnist").images(per_class=30, size=8, dtype=torch.float64)
x, widths = x.flatten(1), [64, 10, 10]
start = torch.randn(760, generator=torch.Generator().manual_seed(0)).double() / 4
looks = {}
for steps in (0, 300):
    theta = train(start, x, labels, widths, steps)
    D = explicit_derivatives(theta, x, widths)
    G, M = matrices(D, labels)
    values, vectors = torch.linalg.eigh(G)
    parts = torch.stack([split_along(D, labels, u) for u in vectors.flip(1)[:, :9].T])
    edge = float(torch.linalg.eigvalsh(G - M)[-1])
    looks[steps] = values.flip(0), torch.linalg.eigvalsh(M).flip(0), parts, edge

# %%
SHADES = {"means": "#0072b2", "sizes": "#e69f00", "rest": "#999999"}
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6))
for axis, (steps, (_, _, parts, edge)) in zip(axes, looks.items()):
    bottoms = (torch.cumsum(parts, 1) - parts).T
    for name, each, bottom in zip(("means", "sizes", "rest"), parts.T, bottoms):
        axis.bar(range(1, 10), each, bottom=bottom, color=SHADES[name], label=name)
    axis.axhline(edge, color="black", linestyle="--", label="λ₁(G − M)")
    axis.set(xlabel="k", ylabel="parts of λₖ(G)", title=f"after {steps} steps", xticks=range(1, 10))
    axis.legend()
plt.show()

# %%
print("steps   means  sizes   rest   λ(M)/λ(G)   selected")
for steps, (values, of_means, parts, edge) in looks.items():
    shares = (parts / values[:9, None]).median(0).values.tolist()
    ratio = float((of_means[:9] / values[:9]).median())
    print(f"{steps:5d}", *(f"{share:6.2f}" for share in shares), end="")
    print(f"{ratio:12.2f} {int((values > edge).sum()):10d}")

# %% [markdown]
# ## 5. Hiding class directions from a threshold
#
# A rule that one would like: take the edge of what is *not* means, $b_1 = \lambda_1(G - M)$, and
# keep the eigenvalues of $G$ above it. Here is a model in which all is known. Let
# $u_1, \dots, u_C$ be orthonormal, one for each class, and
#
# $$
# M = \sum_c \theta_c\, u_c u_c^\top, \qquad G = \sum_c \theta_c\,(1 + v_c)\, u_c u_c^\top, \qquad
# \theta_1 > \theta_2 > \dots > \theta_C > 0 ,
# $$
#
# which is what sizes of variance $v_c \ge 0$ make of $M$. Every nonzero eigenvalue of $G$ belongs
# to a class direction. One is *selected* if it is larger than $b_1$.
#
# **Question q5.** Write `hide`: variances $v$, a vector of length $C$ of finite numbers
# $v_c \ge 0$, for which exactly $k$ of the $C$ class directions are selected. It must work for
# every $k$ from 1 to $C$, and there is more than one right answer. Keep clear of ties: a selected
# eigenvalue must exceed $b_1$ by more than a relative $10^{-9}$, which the given $\theta$ allow.


# %% answer q5
def hide(theta, k):
    """Variances v (length C) that leave exactly k eigenvalues above the edge; theta is falling."""
    # BEGIN SOLUTION
    v = torch.zeros_like(theta)
    if k < len(theta):
        # Uneven sizes along the strongest direction put the edge between theta_k and theta_{k+1}.
        v[0] = (theta[k - 1] + theta[k]) / 2 / theta[0]
    return v
    # END SOLUTION


# %% public q5
theta = torch.tensor([5.0, 3.0, 2.0, 1.0]).double()
for k in (1, 2, 4):
    v = ran("k is a whole number from 1 to C.", hide, theta.clone(), k)
    shaped(f"v for k = {k}", v, 4)
    assert (v >= 0).all(), f"a variance is not negative, but v is {v.tolist()}"
    edge = float((theta * v).max())
    count = int((theta * (1 + v) > edge * (1 + 1e-9)).sum())
    hint = "The edge is the largest theta_c v_c, the eigenvalues are theta_c (1 + v_c)."
    assert count == k, f"for k = {k} your v selects {count}: the edge is {edge:.3g}. {hint}"


# %% hidden common
def selected_by_edge(theta, v):
    """Count in explicit matrices, from pairs of vectors with sizes 1 - sqrt(v) and 1 + sqrt(v)."""
    v = array(v, theta.shape, name="v")
    assert (v >= 0).all(), "a variance is negative"
    C = len(theta)
    U = np.linalg.qr(np.random.default_rng(0).normal(size=(C + 3, C)))[0]
    sizes = np.stack([1 - np.sqrt(v), 1 + np.sqrt(v)])
    G = sum(U @ np.diag(theta * s**2) @ U.T for s in sizes) / 2
    edge = np.linalg.eigvalsh(G - U @ np.diag(theta) @ U.T)[-1]
    return int((np.linalg.eigvalsh(G) > max(edge, 0) + 1e-9 * max(edge, theta[-1] / 100)).sum())


def strengths(rng, C):
    return np.cumsum(rng.uniform(0.2, 2.0, size=C))[::-1].copy()


def hide_calls(rng, ks):
    return [call("hide", theta=strengths(rng, C), k=int(k)) for C in (4, 10) for k in ks(C)]


def compare_counts(calls, answers):
    for c, v in zip(calls, answers):
        theta, k = c.arguments["theta"], c.arguments["k"]
        found = selected_by_edge(theta, v)
        assert found == k, f"{found} of {len(theta)} are selected, not {k}"


# %% hidden q5 1: some of them
def calls(rng):
    return hide_calls(rng, lambda C: range(2, C))


def check(calls, answers):
    compare_counts(calls, answers)


# %% hidden q5 1: a single one
def calls(rng):
    return hide_calls(rng, lambda C: (1,))


def check(calls, answers):
    compare_counts(calls, answers)


# %% hidden q5 1: all of them
def calls(rng):
    return hide_calls(rng, lambda C: (C,))


def check(calls, answers):
    compare_counts(calls, answers)


# %% wrong q5 2: even sizes always
def hide(theta, k):
    return torch.zeros_like(theta)


# %% wrong q5 2: uneven sizes along the weakest direction, which lifts it above the edge
def hide(theta, k):
    v = torch.zeros_like(theta)
    if k < len(theta):
        v[-1] = (theta[k - 1] + theta[k]) / 2 / theta[-1]
    return v


# %% wrong q5 2: the edge just above theta_k, where it leaves k - 1
def hide(theta, k):
    v = torch.zeros_like(theta)
    v[0] = 1.0001 * theta[k - 1] / theta[0]
    return v


# %% [markdown]
# **Question w2.** Read the bars and the table before question q5. Which part of the nine
# eigenvalues do the means carry before training and after it, and what takes the largest part of
# what they lack? Why does training make sizes uneven? How many eigenvalues does the edge select,
# and why does no better edge follow from the same idea (use your construction)? (Five to eight
# sentences.)

# %% [markdown] written w2 3
# BEGIN SOLUTION
# Before training the means carry nearly all, 0.98 in the median over the nine; after it 0.33. Of
# what they lack after training, sizes take most: 0.54 of the eigenvalue, and 0.12 is left for all
# else. $\delta_{i,k}$ has the factor $\sqrt{p_{i,k}}$: at the start all probabilities are alike; a
# trained network is sure of most images and doubtful of a few, and these few have nearly all of a
# group's size. Before training the edge selects ten, after it four, although most of the others are
# made of means and sizes, too. So this edge is no edge of noise: sizes that vary put
# $v\,\delta_{c,k}\delta_{c,k}^\top$ into $G - M$, along the very directions that are to be
# selected, and the strongest of them hides weaker ones. The construction shows that the number
# selected says nothing about the number of class directions: all $C$ are, and uneven sizes along
# one of them leave any number from 1 to $C$ above. A rule that sees only the eigenvalues of $G$ and
# the edge cannot tell this from $k$ class directions with $C - k$ directions of noise.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: shares before and after, and that sizes are most of the rest, with numbers
# - 1 point: why training makes sizes uneven ($\sqrt{p_{i,k}}$, a few doubtful examples)
# - 1 point: $G - M$ lies along the class directions; the count is not that of class directions
# END RUBRIC

# %% [markdown] further
# When are vectors a cluster (q6), what does a picture of t-SNE say about it (q7, w3), and how much
# of the group means does each of their two labels explain (q8, w4)?

# %% [markdown]
# ## 6. Clusters by length and by direction
#
# Take the $C(C-1)$ group means with $k \ne c$ as points. When are the points of a class a cluster?
# By distance, if they lie near their centre compared with how far the centres are apart. Write
# point $j$ of a class as $g_j = \ell_j\, u_j$, with its length $\ell_j$ and a unit vector $u_j$,
# and let $\bar g_c$ be the mean of class $c$. Its points lie about it with the mean square distance
#
# $$
# \operatorname{Ave}_j \|g_j - \bar g_c\|^2
# = \underbrace{\operatorname{Ave}_j \ell_j^2 - (\operatorname{Ave}_j \ell_j)^2}_{\text{lengths}}
# + \underbrace{(\operatorname{Ave}_j \ell_j)^2 - \|\bar g_c\|^2}_{\text{directions}} ,
# $$
#
# where the first part is zero if all lengths agree, and the second if all directions do.
#
# **Question q6.** Write `spread_parts`, which returns the vector (lengths, directions, between):
# the first two are the means of these parts over the classes, and *between* is the mean square
# distance of the class means $\bar g_c$ from *their* mean. In all three each class counts the same,
# however many points it has (at least one). (The chapter's ratio of spreads is
# $\sqrt{(\text{lengths} + \text{directions})/\text{between}}$.)


# %% answer q6
def spread_parts(points, first):
    """The vector (lengths, directions, between) for points (K x P) of the classes in first (K)."""
    # BEGIN SOLUTION
    lengths = points.norm(dim=1)
    own, parts = [], []
    for c in first.unique():
        mean, size = points[first == c].mean(0), lengths[first == c]
        parts.append(torch.stack([size.var(correction=0), size.mean() ** 2 - mean @ mean]))
        own.append(mean)
    centres = torch.stack(own)
    between = (centres - centres.mean(0)).square().sum(1).mean()
    return torch.cat([torch.stack(parts).mean(0), between[None]])
    # END SOLUTION


# %% public q6
first = torch.tensor([0.0, 0.0, 1.0]).double()
points = torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 4.0]]).double()
found = ran("Do classes come as float64 in your code, too?", spread_parts, points, first)
shaped("the vector of parts (class 1 has one point)", found, 3)
hint = "The lengths 1 and 5 have the variance 4, divided by their number; one point has 0."
close("the part of the lengths", found[0], 2.0, hint)
hint = "Both points of class 0 have the direction e_1."
assert abs(float(found[1])) < 1e-12, (
    f"the part of directions is {float(found[1]):.3g}, not 0. {hint}"
)
hint = "The class means (3, 0) and (0, 4) lie both at the squared distance 6.25 from (1.5, 2)."
close("between", found[2], 6.25, hint)

# %% public q6
points = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 4.0]]).double()
found = spread_parts(points, torch.tensor([0.0, 0.0, 1.0]).double())
assert found is not None, "it returns nothing: does it end with 'return ...'?"
hint = "Class 0 has the length 2 twice, and the mean (1, 1): 4 - 2 = 2, and class 1 has 0."
close("the part of directions", found[1], 1.0, hint)


# %% hidden common
def spread_calls(rng, *more):
    wanted = []
    for counts, P in (([4, 4, 4], 6), ([2, 7, 3, 5], 10), *more):
        first = classes(rng, counts)
        points = (
            rng.normal(size=(len(first), P))
            + 2 * rng.normal(size=(len(counts), P))[first.astype(int)]
        )
        points *= rng.uniform(0.2, 3, size=(len(first), 1))
        wanted.append(call("spread_parts", points=points, first=first))
    return wanted


def expected_spreads(points, first):
    """From pairs of points: a variance is half the mean square distance of pairs."""
    lengths, directions, means = [], [], []
    for c in np.unique(first):
        own = points[first == c]
        size = np.sqrt((own**2).sum(axis=1))
        pairs = ((own[:, None] - own[None]) ** 2).sum(axis=2).mean() / 2
        lengths.append(((size[:, None] - size[None]) ** 2).mean() / 2)
        directions.append(pairs - lengths[-1])
        means.append(own.mean(axis=0))
    means = np.array(means)
    between = ((means[:, None] - means[None]) ** 2).sum(axis=2).mean() / 2
    return np.array([np.mean(lengths), np.mean(directions), between])


def spread(number, calls, answers):
    name = ("lengths", "directions", "between")[number]
    for c, found in zip(calls, answers):
        part = array(found, (3,), name="the vector of parts")[number]
        near(part, expected_spreads(**c.arguments)[number], name=f"the part '{name}'")


# %% hidden q6 1: lengths
def calls(rng):
    return spread_calls(rng, ([1, 6], 3))


def check(calls, answers):
    spread(0, calls, answers)


# %% hidden q6 1: directions
def calls(rng):
    return spread_calls(rng)


def check(calls, answers):
    spread(1, calls, answers)


# %% hidden q6 1: between
def calls(rng):
    return spread_calls(rng)


def check(calls, answers):
    spread(2, calls, answers)


# %% wrong q6 1: directions of unit vectors
def spread_parts(points, first):
    lengths = points.norm(dim=1)
    own, parts = [], []
    for c in first.unique():
        mean, size = points[first == c].mean(0), lengths[first == c]
        unit = (points[first == c] / size[:, None]).mean(0)
        parts.append(torch.stack([size.var(correction=0), 1 - unit @ unit]))
        own.append(mean)
    centres = torch.stack(own)
    between = (centres - centres.mean(0)).square().sum(1).mean()
    return torch.cat([torch.stack(parts).mean(0), between[None]])


# %% wrong q6 1: distances of the class means from the mean of all points
def spread_parts(points, first):
    lengths = points.norm(dim=1)
    own, parts = [], []
    for c in first.unique():
        mean, size = points[first == c].mean(0), lengths[first == c]
        parts.append(torch.stack([size.var(correction=0), size.mean() ** 2 - mean @ mean]))
        own.append(mean)
    between = (torch.stack(own) - points.mean(0)).square().sum(1).mean()
    return torch.cat([torch.stack(parts).mean(0), between[None]])


# %% wrong q6 2: points count the same, not classes
def spread_parts(points, first):
    lengths = points.norm(dim=1)
    own, parts = [], []
    for c in first.unique():
        mean, size = points[first == c].mean(0), lengths[first == c]
        part = torch.stack([size.var(correction=0), size.mean() ** 2 - mean @ mean])
        parts.append(len(size) / len(points) * part)
        own.append(mean)
    centres = torch.stack(own)
    between = (centres - centres.mean(0)).square().sum(1).mean()
    return torch.cat([torch.stack(parts).sum(0), between[None]])


# %% wrong q6 1: variances of lengths divided by one less, which is 0 / 0 for one point
def spread_parts(points, first):
    lengths = points.norm(dim=1)
    own, parts = [], []
    for c in first.unique():
        mean, size = points[first == c].mean(0), lengths[first == c]
        parts.append(torch.stack([size.var(), size.mean() ** 2 - mean @ mean]))
        own.append(mean)
    centres = torch.stack(own)
    between = (centres - centres.mean(0)).square().sum(1).mean()
    return torch.cat([torch.stack(parts).mean(0), between[None]])


# %% wrong q6 2: variances divided by one less
def spread_parts(points, first):
    lengths = points.norm(dim=1)
    own, parts = [], []
    for c in first.unique():
        mean, size = points[first == c].mean(0), lengths[first == c]
        more = len(size) / max(len(size) - 1, 1)
        part = torch.stack([size.var(correction=0), size.mean() ** 2 - mean @ mean])
        parts.append(more * part)
        own.append(mean)
    centres = torch.stack(own)
    between = (centres - centres.mean(0)).square().sum(1).mean()
    return torch.cat([torch.stack(parts).mean(0), between[None]])


# %% [markdown]
# ## 7. What t-SNE does not see
#
# t-SNE turns distances $d_{ij}$ into probabilities, and draws points in the plane so that theirs
# are alike. For each point $i$
#
# $$
# p_{j|i} = \frac{e^{-\beta_i d_{ij}^2}}{\sum_{l \ne i} e^{-\beta_i d_{il}^2}} \quad (j \ne i),
# \qquad p_{i|i} = 0 ,
# $$
#
# with $\beta_i > 0$ chosen *for each point* such that the perplexity $e^{H_i}$,
# $H_i = -\sum_j p_{j|i} \log p_{j|i}$, is a given number, about the number of neighbours that a
# point shall have. All that t-SNE knows of the distances are these probabilities. $e^{H_i}$ falls
# from $K - 1$ at $\beta_i = 0$ to the number of nearest neighbours.
#
# **Question q7.** Write `neighbours`: the $K \times K$ matrix with $p_{j|i}$ in row $i$, column
# $j$, such that each row's perplexity is right to a relative $10^{-7}$. The diagonal of the
# distances is not used. Distances may be of any size from $10^{-9}$ to $10^9$, and they may all be
# nearly equal, so that $\beta_i$ can be very large and very small: what happens to $e^{-\beta d^2}$
# then, and what can you subtract from all $d_{ij}^2$ of a row without changing the row's
# probabilities?


# %% answer q7
def neighbours(distances, perplexity):
    """Probabilities p_{j|i} (K x K, row i) of neighbours, from distances (K x K)."""
    # BEGIN SOLUTION
    K = len(distances)
    others = ~torch.eye(K, dtype=torch.bool)
    squares = distances[others].view(K, K - 1).square()
    gaps = squares - squares.min(1, keepdim=True).values
    gaps = gaps / gaps.mean(1, keepdim=True).clamp_min(1e-300)
    low, high = torch.full((K, 1), -40.0).double(), torch.full((K, 1), 40.0).double()
    for _ in range(100):
        middle = (low + high) / 2
        p = (-middle.exp() * gaps).softmax(1)
        wide = torch.special.entr(p).sum(1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    result = torch.zeros(K, K).double()
    result[others] = p.flatten()
    return result
    # END SOLUTION


# %% public q7
places = torch.tensor([0.0, 1.0, 2.5, 4.0, 7.0]).double()
distances = (places[:, None] - places).abs()
p = ran("Is the diagonal left out?", neighbours, distances, 3.0)
shaped("the matrix of probabilities", p, 5, 5)
hint = "Rows are distributions: do they sum to 1, with zeros on the diagonal?"
close("the sums of the rows", p.sum(1), torch.ones(5), hint)
assert p.diagonal().abs().max() == 0, f"p_ii must be 0. {hint}"
hint = "Perplexity is exp of the entropy in natural logarithms. Is beta fitted for each row?"
close("the perplexity of each row", torch.special.entr(p).sum(1).exp(), 3 * torch.ones(5), hint)

# %% public q7
places = torch.tensor([0.0, 1.0, 3.0]).double()
p = neighbours((places[:, None] - places).abs(), 1.5)
assert p is not None, "it returns nothing: does it end with 'return ...'?"
hint = "Each point has two neighbours, so the perplexity alone fixes the two numbers of its row."
nearer, farther = torch.stack([p[0, 1], p[1, 0], p[2, 1]]), torch.stack([p[0, 2], p[1, 2], p[2, 0]])
error = float((nearer - p[0, 1]).abs().max())
assert error < 1e-5, f"probabilities of the nearer neighbours differ by {error:.1e}. {hint}"
assert (nearer > farther).all(), "the nearer neighbour must have the larger probability"
places = torch.tensor([0.0, 1.0, 3.0, 7.0]).double()
row = neighbours((places[:, None] - places).abs(), 2.0)[0]
hint = "The logarithms of a row must be linear in the SQUARED distances 1, 9, 49."
close("a ratio of differences", (row[1] / row[2]).log() / (row[2] / row[3]).log(), 8 / 40, hint)

# %% public q7
places = torch.tensor([0.0, 1.0, 2.5, 4.0, 7.0]).double()
distances = (places[:, None] - places).abs()
p = neighbours(distances.clone(), 3.0)
shaped("the matrix of probabilities", p, 5, 5)
hint = "A factor of all distances goes into beta, and p stays. Between which bounds is beta found?"
for factor in (1e-8, 1e8):
    found = ran(hint, neighbours, factor * distances, 3.0)
    shaped(f"the matrix for distances times {factor:g}", found, 5, 5)
    error = float((found - p).abs().max())
    assert error < 1e-5, f"p for distances times {factor:g} is off by {error:.1e}. {hint}"
found = neighbours((1 + 1e-7 * distances**2).sqrt(), 3.0)
hint = "All e^(-beta d^2) are 0 where beta is large: what can be subtracted from the d^2 of a row?"
assert torch.isfinite(found).all(), f"for distances that are nearly equal there are NaN. {hint}"
error = float((found - p).abs().max())
assert error < 1e-5, f"p for distances that are nearly equal is off by {error:.1e}. {hint}"

# %% hidden common
import scipy.optimize


def expected_neighbours(distances, perplexity):
    """Row by row, with Brent's method on log beta."""
    K, rows = len(distances), []
    for i in range(K):
        squares = np.delete(distances[i], i) ** 2
        gaps = (squares - squares.min()) / (squares.max() - squares.min())

        def row(log_beta):
            weights = np.exp(-np.exp(log_beta) * gaps)
            return weights / weights.sum()

        def excess(log_beta):
            p = row(log_beta)
            return -np.sum(p[p > 0] * np.log(p[p > 0])) - np.log(perplexity)

        rows.append(np.insert(row(scipy.optimize.brentq(excess, -30, 30, xtol=1e-13)), i, 0))
    return np.array(rows)


def distances_of(points):
    return np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2))


def check_rows(found, perplexity, K):
    """Distributions of the right perplexity, whatever else they are."""
    p = array(found, (K, K), name="the matrix of probabilities")
    assert p.min() >= 0 and not np.diag(p).any(), "a probability is negative, or some p_ii is not 0"
    near(p.sum(axis=1), np.ones(K), tolerance=1e-9, name="the sums of the rows")
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)
    error = np.abs(np.exp(entropy) / perplexity - 1).max()
    assert error < 1e-6, f"the perplexity of a row is off by a relative {error:.1e}"


# %% hidden q7 1: distributions of the right perplexity
def calls(rng):
    cases = ((12, 3, 4.0), (25, 8, 10.5))
    return [
        call("neighbours", distances=distances_of(rng.normal(size=(K, P))), perplexity=each)
        for K, P, each in cases
    ]


def check(calls, answers):
    for c, found in zip(calls, answers):
        check_rows(found, c.arguments["perplexity"], len(c.arguments["distances"]))


# %% hidden q7 1: the probabilities themselves
def calls(rng):
    cases = ((10, 2, 3.0), (20, 5, 7.5))
    return [
        call("neighbours", distances=distances_of(rng.normal(size=(K, P))), perplexity=each)
        for K, P, each in cases
    ]


def check(calls, answers):
    for c, found in zip(calls, answers):
        near(found, expected_neighbours(**c.arguments), tolerance=1e-5, name="the matrix")


# %% hidden q7 1: distances of any size
def calls(rng):
    D = distances_of(rng.normal(size=(15, 4)))
    return [
        call("neighbours", distances=each * D, perplexity=5.0) for each in (1e-9, 1e-4, 1e4, 1e9)
    ]


def check(calls, answers):
    for found in answers:
        check_rows(found, 5.0, 15)


# %% hidden q7 1: distances that are nearly equal
def calls(rng):
    noise = rng.uniform(size=(16, 16))
    return [call("neighbours", distances=np.sqrt(1 + 1e-7 * (noise + noise.T)), perplexity=6.0)]


def check(calls, answers):
    check_rows(answers[0], 6.0, 16)


# %% wrong q7 1: distances not squared
def neighbours(distances, perplexity):
    K = len(distances)
    others = ~torch.eye(K, dtype=torch.bool)
    gaps = distances[others].view(K, K - 1)
    gaps = gaps - gaps.min(1, keepdim=True).values
    gaps = gaps / gaps.mean(1, keepdim=True)
    low, high = torch.full((K, 1), -40.0).double(), torch.full((K, 1), 40.0).double()
    for _ in range(100):
        middle = (low + high) / 2
        p = (-middle.exp() * gaps).softmax(1)
        wide = torch.special.entr(p).sum(1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    result = torch.zeros(K, K).double()
    result[others] = p.flatten()
    return result


# %% wrong q7 4: one beta for all points
def neighbours(distances, perplexity):
    K = len(distances)
    others = ~torch.eye(K, dtype=torch.bool)
    gaps = distances[others].view(K, K - 1).square()
    gaps = (gaps - gaps.min()) / (gaps - gaps.min()).mean()
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        p = (-math.exp(middle) * gaps).softmax(1)
        wide = torch.special.entr(p).sum(1).exp().mean() > perplexity
        low, high = (middle, high) if wide else (low, middle)
    result = torch.zeros(K, K).double()
    result[others] = p.flatten()
    return result


# %% wrong q7 2: beta is looked for between 0 and 1000 only
def neighbours(distances, perplexity):
    K = len(distances)
    others = ~torch.eye(K, dtype=torch.bool)
    squares = distances[others].view(K, K - 1).square()
    gaps = squares - squares.min(1, keepdim=True).values
    low, high = torch.zeros(K, 1).double(), torch.full((K, 1), 1000.0).double()
    for _ in range(100):
        middle = (low + high) / 2
        p = (-middle * gaps).softmax(1)
        wide = torch.special.entr(p).sum(1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    result = torch.zeros(K, K).double()
    result[others] = p.flatten()
    return result


# %% wrong q7 1: nothing subtracted, so that all exponentials underflow
def neighbours(distances, perplexity):
    K = len(distances)
    others = ~torch.eye(K, dtype=torch.bool)
    squares = distances[others].view(K, K - 1).square()
    squares = squares / squares.mean(1, keepdim=True)
    low, high = torch.full((K, 1), -40.0).double(), torch.full((K, 1), 40.0).double()
    for _ in range(100):
        middle = (low + high) / 2
        w = (-middle.exp() * squares).exp()
        p = w / w.sum(1, keepdim=True)
        wide = torch.special.entr(p).sum(1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    result = torch.zeros(K, K).double()
    result[others] = p.flatten()
    return result


# %% wrong q7 4: the entropy in bits
def neighbours(distances, perplexity):
    K = len(distances)
    others = ~torch.eye(K, dtype=torch.bool)
    squares = distances[others].view(K, K - 1).square()
    gaps = squares - squares.min(1, keepdim=True).values
    gaps = gaps / gaps.mean(1, keepdim=True)
    low, high = torch.full((K, 1), -40.0).double(), torch.full((K, 1), 40.0).double()
    for _ in range(100):
        middle = (low + high) / 2
        p = (-middle.exp() * gaps).softmax(1)
        wide = torch.special.entr(p).sum(1, keepdim=True) > math.log2(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    result = torch.zeros(K, K).double()
    result[others] = p.flatten()
    return result


# %% [markdown]
# ### The experiment: networks, their directions, and noise
#
# The 90 group means of the nine shipped networks, known by their inner products (`rows_of` makes
# vectors that have these), as they are and at length 1. The ratios are roots of a part over
# *between*; `own` is the mean probability, at perplexity 10, that a point's neighbour is one of its
# own class, which would be 0.09 for classes dealt out at random.


# %%
def rows_of(gram):
    """Vectors with the inner products of the group means with k != c: one row each, in R^90."""
    kept = ~torch.eye(10, dtype=torch.bool).flatten()
    values, vectors = torch.linalg.eigh(gram[kept][:, kept])
    return vectors * values.clamp_min(0).sqrt()


first, second = torch.nonzero(~torch.eye(10, dtype=torch.bool)).double().T
same = (first[:, None] == first).double()
products = np.load(trained_networks.folder() / "group-means.npz")
stored = {name: rows_of(torch.from_numpy(gram).double()) for name, gram in products.items()}


# %%
def numbers(points):
    """Ratios of lengths, of directions and of both to between; the share of own neighbours."""
    lengths, directions, between = spread_parts(points, first)
    squares = torch.stack([lengths, directions, lengths + directions]) / between
    p = neighbours(torch.cdist(points, points), 10.0)
    return [*squares.clamp_min(0).sqrt().tolist(), float((p * same).sum(1).mean())]


print("network, points              lengths  directions  both  own")
for name, points in stored.items():
    for kind, each in (("as they are", points), ("length 1", points / points.norm(dim=1)[:, None])):
        print(f"{name:24s} {kind:12s}", *(f"{number:7.2f}" for number in numbers(each)))

# %% [markdown]
# Now 90 unit vectors with the cosine $\kappa$ within each class and 0 between classes; and the
# directions of one network, each with noise of length $t$ added, in a direction of its own that is
# orthogonal to everything.


# %%
def even_clusters(kappa):
    """Unit vectors, 9 of each of 10 classes, with cosine kappa in a class and 0 between."""
    shared = torch.nn.functional.one_hot(first.long()).double()
    return torch.cat([kappa**0.5 * shared, (1 - kappa) ** 0.5 * torch.eye(90).double()], 1)


name = "fashion_mnist-vgg11"
units = stored[name] / stored[name].norm(dim=1)[:, None]
cases = {f"cosine {kappa}": even_clusters(kappa) for kappa in (0.01, 0.1, 0.5, 0.9)}
for t in (0, 1, 3):
    cases[f"{name}, noise {t}"] = torch.cat([units, t * torch.eye(90).double()], 1)
for label, points in cases.items():
    print(f"{label:30s}", *(f"{number:7.3f}" for number in numbers(points)))

# %%
shown = ["cosine 0.1", "cosine 0.9", f"{name}, noise 0", f"{name}, noise 3"]
fig, axes = plt.subplots(1, 4, figsize=(13, 3.4))
for axis, label in zip(axes, shown):
    plane = clusters.embed(torch.cdist(cases[label], cases[label]), perplexity=10)
    for c, marker in enumerate("osv^D<>Pp*"):
        colour = plt.get_cmap("viridis")(c / 9)
        axis.scatter(*plane[first == c].T, s=22, marker=marker, color=colour, label=c)
    axis.set(title=label.replace(", ", "\n"), xticks=[], yticks=[], xlabel="t-SNE, first")
axes[0].set_ylabel("t-SNE, second")
axes[-1].legend(title="class", bbox_to_anchor=(1, 1.05), fontsize="small")
plt.show()

# %% [markdown]
# **Question w3.** (a) By distance, are the group means of the networks clusters? What spoils them
# most, and what changes at length 1? (b) Show from the formula of $p_{j|i}$ that the four even
# clusters have exactly the same probabilities, and that noise which adds the same number to all
# $d_{ij}^2$ changes nothing. (c) So what does a t-SNE picture with ten islands tell you about the
# ratio of spreads, and what would you report beside it? (Six to nine sentences.)

# %% [markdown] written w3 3
# BEGIN SOLUTION
# (a) By distance they are not: the ratio *both* is 1.18 to 1.97, above 1 in all nine. Lengths are
# the larger part in seven of them, about equal with directions in one (VGG11 on CIFAR-10), and
# directions lead in DenseNet40 on CIFAR-10. At length 1 the ratio is 0.65 to 0.80 in seven networks
# and 1.00 and 1.12 in two on CIFAR-10; the share of own neighbours rises in all. (b) In an even
# cluster all $d_{ij}^2$ are $2 - 2\kappa$ within and 2 between. A number subtracted from a whole
# row cancels in $p_{j|i}$; subtract $2 - 2\kappa$, and what is left is 0 within and $2\kappa$
# between. So $p$ depends on $\kappa$ only through the product $2\kappa\beta_i$, and $\beta_i$ is
# chosen to give the perplexity: the product, and with it $p$, is the same for every $\kappa > 0$
# (0.967 within the class, while the ratio goes from 2.85 to 0.33). Noise that adds the same $2t^2$
# to all $d_{ij}^2$ cancels in the same way: the ratio goes from 0.72 to 2.34, and 0.825 stays. (c)
# Ten islands say that points of a class are *systematically* nearer to each other than to others,
# by however little; they say nothing of the ratio of spreads. Beside the picture report the ratio
# or cosines in $\mathbb R^P$, of points and of directions, and the perplexity.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: not by distance, what lengths and directions contribute, and the change at length 1
# - 1 point: both invariances from the formula (a constant cancels; $\beta_i$ absorbs a factor)
# - 1 point: what islands mean and do not mean, and a number to report beside them
# END RUBRIC

# %% [markdown]
# ## 8. By class, by logit, by both
#
# Each group mean carries two labels, its class $c$ and its logit $k$. How much of the points'
# variance does each explain? Take the sum of squared distances of the points from their mean as the
# total. A label explains the part of it that remains when each point is replaced by the mean of the
# points with its label. Both labels together explain what the best *additive* fit
# $g_j \approx a_{c(j)} + b_{k(j)}$ keeps, with vectors $a_c, b_k \in \mathbb R^P$ for each class
# and each logit that minimise $\sum_j \|g_j - a_{c(j)} - b_{k(j)}\|^2$.
#
# **Question q8.** Write `explained`, which returns the shares of the total that class, logit, and
# both together explain, a vector of three numbers from 0 to 1. Points are taken as they come (do
# not scale them to length 1). There may be any number of points of a class, of a logit, or of a
# pair of them, also none. Since classes and logits overlap (there are no points with $k = c$), the
# share of both is not the sum of the two.


# %% answer q8
def explained(points, first, second):
    """Shares of variance (by class, by logit, by both), for points K x P and labels of length K."""
    # BEGIN SOLUTION
    centred = points - points.mean(0)
    classes, by_logit = (
        torch.nn.functional.one_hot(each.long()).to(points) for each in (first, second)
    )
    shares = []
    for design in (classes, by_logit, torch.cat([classes, by_logit], 1)):
        fit = design @ (torch.linalg.pinv(design) @ centred)
        shares.append(fit.square().sum() / centred.square().sum())
    return torch.stack(shares)
    # END SOLUTION


# %% public q8
first = torch.tensor([0.0, 0.0, 1.0, 1.0]).double()
second = torch.tensor([0.0, 1.0, 0.0, 1.0]).double()
points = torch.tensor([[0.0, 0.0], [0.0, 1.0], [3.0, 0.0], [3.0, 1.0]]).double()
found = ran("Do labels come as float64 in your code, too?", explained, points, first, second)
shaped("the vector of shares", found, 3)
hint = "The total is 4 (9/4 + 1/4) = 10; class moves the first coordinate, logit the second."
close("the shares", found, torch.tensor([0.9, 0.1, 1.0]), hint)
hint = "A shift of all points changes no share: is the total taken about the mean?"
close("the shares after a shift", explained(points + 5, first, second), found, hint)

# %% public q8
first = torch.tensor([0.0, 0.0, 1.0]).double()
second = torch.tensor([0.0, 1.0, 1.0]).double()
points = torch.tensor([[0.0], [1.0], [1.0]]).double()
found = ran("Here a pair of labels is missing.", explained, points, first, second)
shaped("the vector of shares", found, 3)
hint = "Logit alone explains all here, so both do; class alone explains a quarter."
close("the shares", found, torch.tensor([0.25, 1.0, 1.0]), hint)
points = torch.tensor([[1.0], [0.0], [0.0], [1.0]]).double()
first, second = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]]).double()
found = explained(points, first, second)
hint = "No sum a_c + b_k comes near 1, 0, 0, 1: both together explain nothing."
assert float(found[2]) < 1e-9, f"the share of both is {float(found[2]):.3g}, not 0. {hint}"


# %% hidden common
def labelled(rng, pairs, P):
    """Points with these pairs of labels, in random order: effects of both, and noise."""
    pairs = rng.permutation(np.array(pairs))
    effects = rng.normal(size=(2, 8, P))
    points = (
        effects[0, pairs[:, 0]]
        + 0.7 * effects[1, pairs[:, 1]]
        + 0.5 * rng.normal(size=(len(pairs), P))
    )
    first, second = pairs.T.astype(float)
    return call("explained", points=points + 2, first=first, second=second)


def explained_calls(rng):
    off = [(c, k) for c in range(4) for k in range(4) if c != k]
    uneven = [(0, 1)] * 5 + [(0, 2), (1, 1), (1, 0), (2, 0), (2, 2), (2, 2), (3, 1)]
    return [labelled(rng, off, 6), labelled(rng, uneven, 9)]


def expected_shares(points, first, second):
    """By analysis of variance: squares of group means; both from a basis of the labels' span."""
    centred = points - points.mean(axis=0)
    fits = [
        np.stack([centred[label == each].mean(axis=0) for each in label])
        for label in (first, second)
    ]
    indicators = [label[:, None] == np.unique(label) for label in (first, second)]
    basis = scipy.linalg.orth(np.hstack(indicators).astype(float), rcond=1e-10)
    fits.append(basis @ (basis.T @ centred))
    return np.array([np.sum(fit**2) for fit in fits]) / np.sum(centred**2)


def share(number, calls, answers):
    name = ("class", "logit", "both")[number]
    for c, found in zip(calls, answers):
        value = array(found, (3,), name="the vector of shares")[number]
        wanted = expected_shares(**c.arguments)[number]
        near(value, wanted, name=f"the share by {name}")


# %% hidden q8 1: by class
def calls(rng):
    return explained_calls(rng)


def check(calls, answers):
    share(0, calls, answers)


# %% hidden q8 1: by logit
def calls(rng):
    return explained_calls(rng)


def check(calls, answers):
    share(1, calls, answers)


# %% hidden q8 1: by both
def calls(rng):
    return explained_calls(rng)


def check(calls, answers):
    share(2, calls, answers)


# %% wrong q8 1: the sum of the two shares
def explained(points, first, second):
    centred = points - points.mean(0)
    shares = []
    for label in (first, second):
        fit = torch.stack([centred[label == each].mean(0) for each in label])
        shares.append(fit.square().sum() / centred.square().sum())
    return torch.stack([*shares, shares[0] + shares[1]])


# %% wrong q8 3: squares about zero, not about the mean
def explained(points, first, second):
    classes, logit = (
        torch.nn.functional.one_hot(each.long()).to(points) for each in (first, second)
    )
    shares = []
    for design in (classes, logit, torch.cat([classes, logit], 1)):
        fit = design @ (torch.linalg.pinv(design) @ points)
        shares.append(fit.square().sum() / points.square().sum())
    return torch.stack(shares)


# %% wrong q8 2: means count once, however many points they stand for
def explained(points, first, second):
    centred = points - points.mean(0)
    shares = []
    for label in (first, second):
        means = torch.stack([centred[label == each].mean(0) for each in label.unique()])
        shares.append(means.square().sum(1).mean() / centred.square().sum(1).mean())
    design = torch.cat(
        [torch.nn.functional.one_hot(each.long()).to(points) for each in (first, second)], 1
    )
    fit = design @ (torch.linalg.pinv(design) @ centred)
    return torch.stack([*shares, fit.square().sum() / centred.square().sum()])


# %% wrong q8 1: a mean for each pair of labels, not a sum of two effects
def explained(points, first, second):
    centred = points - points.mean(0)
    shares = []
    for label in (first, second, 100 * first + second):
        fit = torch.stack([centred[label == each].mean(0) for each in label])
        shares.append(fit.square().sum() / centred.square().sum())
    return torch.stack(shares)


# %% right q1: everything in NumPy and SciPy, one group or one row after the other
def centres(theta, x, labels, table, network):
    C, rows = len(table), np.zeros((len(table), len(theta)))
    for c in range(C):
        for k in range(C):
            at = theta.clone().requires_grad_()
            z = logits(at, x[labels.long() == c], network)
            p = z.detach().softmax(1)
            z.backward(p[:, [k]].sqrt() * (torch.eye(C).to(p)[k] - p) / len(z))
            rows[c] += float(table[c, k]) * at.grad.numpy()
    return rows


def ritz(G, rows):
    units = rows.numpy() / np.linalg.norm(rows.numpy(), axis=1)[:, None]
    weights, vectors = np.linalg.eigh(units @ units.T)
    kept = weights > 1e-13 * weights.max()
    Q = np.linalg.qr(units.T @ vectors[:, kept] / np.sqrt(weights[kept]))[0]
    values, S = np.linalg.eigh(Q.T @ np.asarray(G @ torch.as_tensor(Q)))
    order = np.argsort(values)[::-1]
    V = -Q @ S[:, order]
    image = np.asarray(G @ torch.as_tensor(V))
    return [values[order], V, np.sqrt(((image - V * values[order]) ** 2).sum(axis=0))]


def angles(U, rows):
    one, other = scipy.linalg.orth(U.numpy()), scipy.linalg.orth(rows.numpy().T, rcond=1e-8)
    if one.shape[1] > other.shape[1]:
        one, other = other, one
    cosines = scipy.linalg.svdvals(other.T @ one)
    sines = scipy.linalg.svdvals(one - other @ (other.T @ one))[::-1]
    small, large = np.arcsin(np.minimum(sines, 1)), np.arccos(np.minimum(cosines, 1))
    return list(np.where(cosines > 0.7, small, large))


def split_along(D, labels, u):
    D, u, labels = D.numpy(), u.numpy(), labels.numpy().astype(int)
    n, C, _ = D.shape
    m = np.array([[D[labels == c, k].mean(axis=0) for k in range(C)] for c in range(C)])
    means = sizes = 0.0
    for i, c in enumerate(labels):
        for k in range(C):
            square, along = m[c, k] @ m[c, k], (m[c, k] @ u) ** 2
            means += along / n
            if square > 0:
                sizes += (D[i, k] @ m[c, k] / square - 1) ** 2 * along / n
    return [means, sizes, ((D @ u) ** 2).sum() / n - means - sizes]


def hide(theta, k):
    ratios = [1.0, *(theta[1:] / theta[0]).tolist(), 0.0]
    middle = (ratios[k - 1] + ratios[k]) / 2
    return [middle / (1 - middle)] * len(theta)


def spread_parts(points, first):
    X, labels = points.numpy(), first.numpy()
    sizes, names = np.sqrt((X**2).sum(axis=1)), np.unique(labels)
    means = np.stack([X[labels == c].mean(axis=0) for c in names])
    lengths = np.mean([sizes[labels == c].std() ** 2 for c in names])
    within = np.mean([((X[labels == c] - m) ** 2).sum(axis=1).mean() for c, m in zip(names, means)])
    between = (means**2).sum(axis=1).mean() - (means.mean(axis=0) ** 2).sum()
    return float(lengths), float(within - lengths), float(between)


def neighbours(distances, perplexity):
    K = len(distances)
    result = np.zeros((K, K))
    for i in range(K):
        others = np.arange(K) != i
        gaps = distances.numpy()[i, others] ** 2
        gaps = (gaps - gaps.min()) / np.median(gaps - gaps.min())

        def row(beta, gaps=gaps):
            return scipy.special.softmax(-beta * gaps)

        def excess(beta, row=row):
            return np.exp(scipy.special.entr(row(beta)).sum()) - perplexity

        high = 1.0
        while excess(high) > 0:
            high *= 2
        result[i, others] = row(scipy.optimize.brentq(excess, 0.0, high, xtol=1e-14))
    return result


def explained(points, first, second):
    X = points.numpy() - points.numpy().mean(axis=0)

    def share(*labels):
        design = np.hstack([each.numpy()[:, None] == np.unique(each.numpy()) for each in labels])
        fit = design @ np.linalg.lstsq(design.astype(float), X, rcond=None)[0]
        return 1 - ((X - fit) ** 2).sum() / (X**2).sum()

    return share(first), share(second), share(first, second)


import scipy.linalg
import scipy.optimize
import scipy.special


# %% right q1: other formulas in torch
def centres(theta, x, labels, table, network):
    z, pull = torch.func.vjp(lambda at: logits(at, x, network), theta)
    p, own = z.softmax(1), torch.nn.functional.one_hot(labels.long(), len(table)).to(z)
    r = (own @ table) * p.sqrt() / (own @ own.sum(0))[:, None]
    v = r - p * r.sum(1)[:, None]
    return torch.stack([pull(v * column[:, None])[0] for column in own.T])


def ritz(G, rows):
    _, s, Vh = torch.linalg.svd(torch.nn.functional.normalize(rows, eps=0), full_matrices=False)
    Q = Vh[s > 1e-8 * s[0]].T
    small = Q.T @ (G @ Q)
    values, S = torch.linalg.eigh(-(small + small.T) / 2)
    V = Q @ S
    return -values, V, torch.linalg.vector_norm(G @ V + V * values, dim=0)


def angles(U, rows):
    # Sines from the products with what is orthogonal to the larger space.
    spaces = []
    for vectors in (U.T, rows):
        _, s, Vh = torch.linalg.svd(torch.nn.functional.normalize(vectors))
        spaces.append(Vh.split([int((s > 1e-8 * s[0]).sum()), len(Vh) - (s > 1e-8 * s[0]).sum()]))
    (small, _), (large, beyond) = sorted(spaces, key=lambda space: len(space[0]))
    sines = torch.zeros(len(small)).double()
    found = torch.linalg.svdvals(small @ beyond.T)
    sines[: len(found)] = found
    return torch.atan2(sines.flip(0), torch.linalg.svdvals(small @ large.T))


def split_along(D, labels, u):
    own = torch.nn.functional.one_hot(labels.long(), D.shape[1]).double()
    m = torch.einsum("ic,ikp->ckp", own, D) / own.sum(0)[:, None, None]
    along = own.mean(0)[:, None] * (m @ u).square()
    a = (D * m[labels.long()]).sum(2)
    evenness = (own.T @ a).square() / (own.sum(0)[:, None] * (own.T @ a.square()))
    sizes = torch.nan_to_num((1 / evenness - 1) * along, posinf=0.0).sum()
    G = torch.einsum("ikp,ikq->pq", D, D) / len(D)
    return torch.stack([along.sum(), sizes, u @ G @ u - along.sum() - sizes])


def hide(theta, k):
    # The same edge from each of the first k directions at once.
    v = torch.zeros(len(theta), dtype=torch.float64)
    if k < len(theta):
        v[:k] = (theta[k - 1] + 2 * theta[k]) / 3 / theta[:k]
    return v


def spread_parts(points, first):
    own = (first == first.unique()[:, None]).double()
    own = own / own.sum(1, keepdim=True)
    sizes, gram = points.square().sum(1), own @ (points @ points.T) @ own.T
    mean = own @ sizes.sqrt()
    lengths = (own @ sizes - mean.square()).mean()
    directions = (mean.square() - gram.diagonal()).mean()
    return torch.stack([lengths, directions, gram.diagonal().mean() - gram.mean()])


def neighbours(distances, perplexity):
    K = len(distances)
    squares = distances.square().fill_diagonal_(torch.inf)
    squares = squares - squares.min(1, keepdim=True).values
    squares = squares / squares.fill_diagonal_(0).std(1, keepdim=True)
    squares.fill_diagonal_(torch.inf)
    beta, step = torch.ones(K, 1).double(), 1e9
    for _ in range(140):
        p = (-beta * squares).softmax(1)
        step = step**0.75 if step > 1.0001 else 1 + (step - 1) / 1.7
        wide = torch.special.entr(p).sum(1, keepdim=True).exp() > perplexity
        beta = torch.where(wide, beta * step, beta / step)
    return p


def explained(points, first, second):
    X = points - points.mean(0)

    def share(design):
        U, s, _ = torch.linalg.svd(design.double(), full_matrices=False)
        return (U[:, s > 1e-10 * s[0]].T @ X).square().sum() / X.square().sum()

    one, two = (label[:, None] == label.unique() for label in (first, second))
    return torch.stack([share(one), share(two), share(torch.hstack([one, two]))])


# %% [markdown]
# ### The experiment: a toy, and networks
#
# In the toy all examples of class $c$ have the unit feature $h_c$, two features have the cosine
# $s$, and each example has the probability $p$ for its class and $a = (1-p)/(C-1)$ for each other
# one. A linear classifier then has $\delta_{c,k} = \sqrt a\,(e_k - p_c) \otimes h_c$. All
# points have the same length here, so directions are what there is.


# %%
def toy(p, s, C=10):
    """The directions (e_k - p_c) x h_c of the toy's group means with k != c, by c, then k."""
    features = torch.cat([(1 - s) ** 0.5 * torch.eye(C), s**0.5 * torch.ones(C, 1)], 1).double()
    table = torch.full((C, C), (1 - p) / (C - 1)).double().fill_diagonal_(p)
    residues = (torch.eye(C).double() - table[:, None])[~torch.eye(C, dtype=torch.bool)]
    points = residues[:, :, None] * features.repeat_interleave(C - 1, 0)[:, None]
    return points.flatten(1) / points.flatten(1).norm(dim=1, keepdim=True)


# %%
fig, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True)
grid = torch.linspace(0.1, 1, 46).tolist()
LINES = {"class": ("-", "#0072b2"), "logit": ("--", "#d55e00"), "both": (":", "black")}
for axis, s in zip(axes, (0.0, 0.5, 1.0)):
    curves = torch.stack([explained(toy(p, s), first, second) for p in grid]).T
    for (name, (style, colour)), curve in zip(LINES.items(), curves):
        axis.plot(grid, curve, style, color=colour, label=f"by {name}")
    axis.set(xlabel="p", title=f"features of cosine {s:g}", ylim=(0, 1.05))
axes[0].set_ylabel("share of the directions' variance")
axes[0].legend()
plt.show()

# %%
print("network                   class  logit  both")
for name, points in stored.items():
    shares = explained(points / points.norm(dim=1)[:, None], first, second)
    print(f"{name:24s}", *(f"{share:6.2f}" for share in shares.tolist()))

# %% [markdown]
# **Question w4.** When does class overtake logit in the toy, and which two things must change for
# it? At $s = 1$ both together explain everything: why? And what is it that neither explains at
# $s = 0$ near $p = 1$? Where do the trained networks stand? (Four to six sentences.)

# %% [markdown] written w4 2
# BEGIN SOLUTION
# Class overtakes logit at $p \approx 0.32$ for $s = 0$ and at about 0.74 for $s = 0.5$; at $s = 1$
# they only meet at $p = 1$. Probabilities must leave $1/C$ and features of classes must part. At
# $s = 1$ the feature is common to all, and $e_k - p_c$ is a vector of the logit plus one of the
# class: additive, so both explain all. At $s = 0$, $e_k \otimes h_c$ points in another direction
# for each class, though the logit is the same: it belongs to the pair, and an additive fit misses
# it (at $p = 1$ that is $7/17 = 0.41$ of the variance). The networks leave only 0.06 to 0.19 to
# neither, as the toy does for features that are more alike; class leads in eight of nine, logit in
# DenseNet40 on CIFAR-10.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: both crossings read off, and the two conditions
# - 1 point: additive at $s = 1$, a pair's own direction at $s = 0$; where the networks stand
# END RUBRIC
