"""``diagnose`` where the truth is known, and on every layer of trained and untrained networks."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowgrad_utils import checks, classifiers, patch_transformer, trained_networks
from lowgrad_utils.diagnosis import Diagnosis, diagnose, layer_names
from lowgrad_utils.experiments.initialisation import paper_sizes, scenario
from lowgrad_utils.networks import Activation, TwoLayerNetwork
from lowgrad_utils.random_matrices import spiked_singular_value
from lowgrad_utils.spectra import alignment, count_outliers, leading_singular_triplets

Cell = dict[str, Any]

#: The transformer's name among the networks of ``network_at``.
PATCHES = "fashion_mnist-patches"
_SETS = ("mnist", "fashion_mnist", "cifar10")
#: Layers that ``diagnose`` takes, by network.
LAYERS = {"resnet18": 21, "vgg11": 9, "patches": 14}
_WIDTH = {"resnet18": (1 / 8, 16), "vgg11": (1 / 8, 32)}


# --- the four blocks, from X and Delta themselves -------------------------------------------------


def block_errors(kind: str, seed: int) -> dict[str, float]:
    """Compare a diagnosis with autograd, and its pieces with their definition by X and Delta.

    Args:
        kind: ``vectors`` or ``tokens`` for a linear layer, ``patches`` for a convolution.
        seed: Seed of the weights and the data.

    Returns:
        Relative distances of G from autograd's gradient and of S1, S12, S2 and E from their
        definitions, and that of the sum of ``shares`` from 1.
    """
    checks.choice("kind", kind, ("vectors", "tokens", "patches"))
    stream = checks.random_stream(seed, "blocks")
    normal = functools.partial(torch.randn, generator=stream, dtype=torch.float64)
    layer = (
        nn.Conv2d(2, 7, 3, stride=2, padding=1) if kind == "patches" else nn.Linear(12, 7)
    ).double()
    head = nn.Linear(7, 4).double()
    with torch.no_grad():
        for parameter in (*layer.parameters(), *head.parameters()):
            parameter.copy_(0.3 * normal(parameter.shape))
    x = 0.5 + normal({"vectors": (60, 12), "tokens": (60, 5, 12), "patches": (60, 2, 8, 8)}[kind])
    y = torch.arange(60) % 4
    signals: list[Tensor] = []

    def read(h: Tensor) -> Tensor:
        signals[:] = [h]
        positions = {"vectors": (), "tokens": (1,), "patches": (2, 3)}[kind]
        bent = torch.tanh(h)
        return head(bent.mean(positions) if positions else bent)

    model = _Then(layer, read)
    found = diagnose(model.eval(), "layer", (x, y), F.cross_entropy)
    F.cross_entropy(model(x), y).backward(inputs=[layer.weight, signals[0]])
    if kind == "patches":
        X = F.unfold(x, 3, stride=2, padding=1).transpose(1, 2).flatten(0, 1)
        Delta = signals[0].grad.flatten(2).transpose(1, 2).flatten(0, 1)
    else:
        X, Delta = x.flatten(0, -2), signals[0].grad.flatten(0, -2)
    wanted = {"G": layer.weight.grad.flatten(1).T, **_pieces(X, Delta)}
    pieces = (found.S1.matrix(), found.S12.matrix(), found.S2.matrix(), found.E)
    errors = {
        name: float((own - wanted[name]).norm() / wanted[name].norm())
        for name, own in zip(("G", "S1", "S12", "S2", "E"), (found.G, *pieces))
    }
    return {**errors, "shares": abs(sum(found.shares.values()) - 1)}


class _Then(nn.Module):
    """A layer, then a function that keeps a hold on its output."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if h.requires_grad:
            h.retain_grad()
        return self.function(h)


def _pieces(X: Tensor, Delta: Tensor) -> dict[str, Tensor]:
    """Return S1, S12, S2 and E from the leading singular vectors of X and Delta."""
    q = torch.linalg.svd(X, full_matrices=False).Vh[0]
    U, s, Vh = torch.linalg.svd(Delta, full_matrices=False)
    r, mu = U[:, 0], s[0] * Vh[0]
    zeta_z = X @ q
    X_B, rest = X - torch.outer(zeta_z, q), Delta - torch.outer(r, mu)
    return {
        "S1": torch.outer(X_B.T @ r, mu),
        "S12": (zeta_z @ r) * torch.outer(q, mu),
        "S2": torch.outer(q, zeta_z @ rest),
        "E": X_B.T @ rest,
    }


def population_share_error(seed: int, *, d: int = 400, nu: float = 0.25) -> float:
    """Return how far the shares of ``decompose``'s pieces are from adding up to 1.

    Args:
        seed: Seed of data and network.
        d: Number of features.
        nu: Spike exponent.
    """
    parts = scenario(d, nu=nu, activation="softplus", residue="offset", seed=seed).parts
    pieces = (parts.S1.matrix(), parts.S12.matrix(), parts.S2.matrix(), parts.E)
    squares = sum(float(piece.square().sum()) for piece in pieces)
    return abs(squares / float(parts.G.square().sum()) - 1)


# --- the two-layer network ------------------------------------------------------------------------


class _Bend(nn.Module):
    def __init__(self, sigma: Activation):
        super().__init__()
        self.sigma = sigma

    def forward(self, x: Tensor) -> Tensor:
        return self.sigma.value(x)


def as_modules(network: TwoLayerNetwork) -> nn.Sequential:
    """Write f(x) = gamma a^T sigma(W x) as torch modules; the inner layer is ``0``.

    Args:
        network: The network.

    Example:
        >>> network = TwoLayerNetwork.random(5, 7, activation="tanh")
        >>> x = torch.ones(2, 5).double()
        >>> torch.allclose(as_modules(network)(x), network(x))
        True
    """
    m, d = network.W.shape
    inner, outer = nn.Linear(d, m, bias=False), nn.Linear(m, 1, bias=False)
    model = nn.Sequential(inner, _Bend(network.sigma), outer, nn.Flatten(0)).double()
    with torch.no_grad():
        inner.weight.copy_(network.W)
        outer.weight.copy_((network.gamma * network.a)[None])
    return model.eval()


def with_residue(output: Tensor, residue: Tensor) -> Tensor:
    """Return (1/n) sum_i r_i f_i, the loss whose residue is r whatever the output."""
    return (output * residue).mean()


def predicted_signal_sine(network: TwoLayerNetwork, slopes: Tensor, residue: Tensor) -> float:
    """Predict the sine of the angle between v and a o mu, to first order.

    Delta^T r = |r|^2 (a o mu) + a o sigma'_perp^T r^2, whose second term has entries of variance
    tau_j^2 sum r^4, tau_j^2 the variance of sigma'(w_j.x): sine^2 = sum_j tau_j^2 sum_i r_i^4 /
    (|mu|^2 |r|^4). Examples are taken as independent.

    Args:
        network: The network.
        slopes: sigma'(X W^T), n x m.
        residue: r, length n.
    """
    variance, mean = slopes.var(0), slopes.mean(0)
    kurtosis = residue.pow(4).sum() / residue.square().sum() ** 2
    return float((variance.sum() * kurtosis / mean.square().sum()).sqrt())


def estimate_cell(d: int, nu: float, activation: str, residue: str, seed: int) -> dict[str, float]:
    """Diagnose the two-layer network and compare with what it was made of.

    Args:
        d: Number of features; n = 0.75 d, m = 1.25 d.
        nu: Spike exponent; the bulk is isotropic.
        activation: A key of ``ACTIVATIONS``.
        residue: A key of ``RESIDUES``.
        seed: Seed of data, network, residue and signs.

    Returns:
        ``q``, ``q_predicted``: cosine of the estimated and the true spike direction, and what the
        data admit; ``v_sine``, ``v_predicted``: sine of the angle between v and a o mu;
        ``S1_direction``: cosine of the residue directions; ``S1``, ``S12``, ``S2``, ``E``:
        estimated over true norms; ``edge``: the edge over s1(E); ``outliers``, and
        ``outliers_true`` above E's second singular value by n^(-2/3), since the first can be a
        spike; ``plane``: ``Diagnosis.plane``.
    """
    case = scenario(d, nu=nu, activation=activation, residue=residue, seed=seed)
    data, parts, network = case.data, case.parts, case.network
    found = diagnose(as_modules(network), "0", (data.X, case.residue), with_residue, seed=seed)
    n, _ = paper_sizes(d)
    theta = data.zeta * float(data.z.norm()) / d**0.5
    slopes = network.sigma.derivative(data.X @ network.W.T)
    v = alignment(found.v, parts.S1.v)
    rest = leading_singular_triplets(parts.E, 2).s
    norms = {name: getattr(parts, name).norm for name in ("S1", "S12", "S2")}
    return {
        "q": alignment(found.q, data.q),
        "q_predicted": spiked_singular_value(theta, n / d).right ** 0.5,
        "v_sine": (1 - v**2) ** 0.5,
        "v_predicted": predicted_signal_sine(network, slopes, case.residue),
        "S1_direction": alignment(found.S1.u, parts.S1.u),
        **{name: found.pieces[name] / norm for name, norm in norms.items()},
        "E": found.pieces["E"] / float(rest[0]),
        "edge": found.edge / float(rest[0]),
        "outliers": found.outliers,
        "outliers_true": count_outliers(found.top.s, float(rest[1]), margin=n ** (-2 / 3)),
        "plane": found.plane,
    }


def estimate_cells() -> tuple[Cell, ...]:
    """Return the cells: sizes, spike exponents, activations and residues, six seeds."""
    return tuple(
        {"d": d, "nu": nu, "activation": activation, "residue": residue, "seed": seed}
        for seed in range(6)
        for d in (250, 400, 640)
        for nu in (0.0, 0.125, 0.25, 0.375)
        for activation in ("relu", "softplus", "tanh")
        for residue in ("independent", "offset")
    )


# --- layers of networks ---------------------------------------------------------------------------


def network_at(network: str, state: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a network in evaluation mode, and 1000 of the images it was, or would be, trained on.

    Args:
        network: A shipped one, such as ``mnist-resnet18``, or ``PATCHES``.
        state: ``trained`` or ``untrained``; of ``PATCHES`` also ``epoch 1`` and so on.
        seed: Of the untrained weights.

    Raises:
        ValueError: If the state is unknown.
    """
    if network == PATCHES:
        states = {f"epoch {epoch}": epoch for epoch in patch_transformer.EPOCHS}
        states["trained"] = patch_transformer.EPOCHS[-1]
        checks.choice("state", state, (*states, "untrained"))
        shipped = patch_transformer.load(states.get(state, 0))
        x, y = shipped.train_set
        model = shipped.model if state in states else patch_transformer.PatchTransformer(seed=seed)
        # The first hundred of each class.
        rows = torch.cat([torch.nonzero(y == label)[:, 0][:100] for label in range(10)])
        return model.eval(), (x[rows], y[rows])
    checks.choice("state", state, ("trained", "untrained"))
    shipped = trained_networks.load(network)
    if state == "trained":
        return shipped.model, shipped.train_set
    kind = network.split("-")[1]
    width, size = _WIDTH[kind]
    channels = shipped.train_set[0].shape[1]
    model = classifiers.build(kind, channels=channels, width=width, size=size, seed=seed)
    return model.eval(), shipped.train_set


def layer_cell(network: str, state: str, depth: int, seed: int) -> dict[str, float]:
    """Diagnose one layer with the data spike of raw and of centred inputs.

    Args:
        network: As ``network_at`` has it.
        state: As ``network_at`` has it.
        depth: Position of the layer among those that ``diagnose`` takes.
        seed: Of untrained weights, and of the signs.

    Returns:
        The numbers of ``Diagnosis`` but the outliers, which rounding can move (compare s1 to s5
        with the edge); ``leads_q`` and ``leads_residue``, whether the top left singular vector has
        more of one than of the other and of the rest; ``centred_u1_q`` and ``centred_leads_q`` with
        the leading direction of the centred inputs.
    """
    model, (x, y) = network_at(network, state, seed)
    layer = layer_names(model)[depth]
    found, centred = (
        diagnose(model, layer, (x, y), F.cross_entropy, centre=centre, seed=seed)
        for centre in (False, True)
    )
    return {
        **_plain(found),
        "centred_u1_q": float(centred.along_q[0]),
        "centred_leads_q": float(centred.leader == "data"),
    }


def gauss_newton_cell(network: str, depth: int, seed: int) -> dict[str, float]:
    """Measure the Gauss-Newton share of a trained network's layer, on a tenth of the images.

    Args:
        network: As ``network_at`` has it.
        depth: Position of the layer among those that ``diagnose`` takes.
        seed: Of the signs.

    Returns:
        ``gauss_newton`` and ``gauss_newton_null``, as ``Diagnosis`` has them.
    """
    model, (x, y) = network_at(network, "trained")
    layer = layer_names(model)[depth]
    few = diagnose(model, layer, (x[::10], y[::10]), F.cross_entropy, gauss_newton=True, seed=seed)
    return {"gauss_newton": few.gauss_newton, "gauss_newton_null": few.gauss_newton_null}


def gauss_newton_cells() -> tuple[Cell, ...]:
    """Return the cells: all layers of seven trained networks."""
    networks = [f"{data}-{kind}" for kind in ("vgg11", "resnet18") for data in _SETS]
    return tuple(
        {"network": network, "depth": depth, "seed": 0}
        for network in (*networks, PATCHES)
        for depth in range(LAYERS[network.split("-")[1]])
    )


def with_batch_statistics(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose batch norms use the batch, as they do in training.

    Args:
        model: Any module.

    Example:
        >>> x = torch.arange(6.0)[:, None]
        >>> norm = nn.BatchNorm1d(1).eval()
        >>> float(norm(x).mean()) > 2, abs(float(with_batch_statistics(norm)(x).mean())) < 1e-6
        (True, True)
    """
    other = copy.deepcopy(model).eval()
    for module in other.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            # Without stored statistics torch takes the batch's in either mode.
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return other


def batch_norm_cell(network: str, depth: int, seed: int) -> dict[str, float]:
    """Diagnose a layer of a trained network as in training, where batch norm uses the batch.

    Args:
        network: As ``network_at`` has it.
        depth: Position of the layer among those that ``diagnose`` takes.
        seed: Of the signs.

    Returns:
        What ``layer_cell`` returns of a single diagnosis, on every other image, as one batch.
    """
    model, (x, y) = network_at(network, "trained")
    layer = layer_names(model)[depth]
    other = with_batch_statistics(model)
    found = diagnose(other, layer, (x[::2], y[::2]), F.cross_entropy, seed=seed)
    return _plain(found)


def batch_norm_cells() -> tuple[Cell, ...]:
    """Return the cells: all layers of six networks but the last, which no batch norm follows."""
    return tuple(
        {"network": f"{data}-{kind}", "depth": depth, "seed": 0}
        for kind in ("vgg11", "resnet18")
        for data in _SETS
        for depth in range(LAYERS[kind] - 1)
    )


def _plain(found: Diagnosis) -> dict[str, float]:
    numbers = found.numbers()
    leader = numbers.pop("leader")
    for name in ("layer", "kind", "outliers", "gauss_newton", "gauss_newton_null"):
        del numbers[name]
    return {
        **{name: float(value) for name, value in numbers.items()},
        "leads_q": float(leader == "data"),
        "leads_residue": float(leader == "residue"),
    }


def layer_cells() -> tuple[Cell, ...]:
    """Return the cells: all layers of six shipped networks, trained and not, and the transformer.

    DenseNet40 is left out for its cost.
    """
    states = [
        (f"{data}-{kind}", state, seed if state == "untrained" else 0)
        for kind in ("vgg11", "resnet18")
        for seed, data in enumerate(_SETS)
        for state in ("trained", "untrained")
    ]
    states += [(PATCHES, f"epoch {epoch}", 0) for epoch in patch_transformer.EPOCHS]
    return tuple(
        {"network": network, "state": state, "depth": depth, "seed": seed}
        for network, state, seed in states
        for depth in range(LAYERS[network.split("-")[1]])
    )
