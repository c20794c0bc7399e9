"""Small classifiers of every kind, and derivatives of them by plain automatic differentiation."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowgrad_utils import classifiers

FLOAT = torch.float64
COUNTS = (3, 7, 5)  # classes of different sizes


class Tokens(nn.Module):
    """An embedding, a recurrent layer, and a linear one on its last state."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.recurrent = kind(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.recurrent(self.embedding(x))[0][:, -1])


class Transformer(nn.Module):
    """One encoder layer on embedded tokens, and a linear layer on the mean."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)).mean(1))


class Tied(nn.Module):
    """Two layers that are one parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


IMAGES = {"mlp": 1 / 64, "vgg11": 1 / 128, "resnet18": 1 / 128, "densenet40": 1 / 12}
VECTORS = {
    "linear": lambda: nn.Linear(5, 3),
    "tanh": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
    "normalised": lambda: nn.Sequential(
        nn.Linear(5, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)
    ),
    "tied": Tied,
}
TOKENS = {
    "lstm": lambda: Tokens(nn.LSTM),
    "gru": lambda: Tokens(nn.GRU),
    "transformer": Transformer,
}
KINDS = (*IMAGES, *VECTORS, *TOKENS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def example(kind, counts=COUNTS, dtype=FLOAT, scale=1.0):
    """Return a classifier of three classes in eval mode, inputs and labels in mixed order."""
    stream = generator(len(kind))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind in IMAGES:
            model = classifiers.build(kind, channels=1, classes=3, width=IMAGES[kind], size=8)
        else:
            model = (VECTORS | TOKENS)[kind]()
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=stream)]
    if kind in TOKENS:
        inputs = torch.randint(6, (len(labels), 4), generator=stream)
    else:
        shape = (1, 8, 8) if kind in IMAGES else (5,)
        inputs = torch.randn(len(labels), *shape, generator=stream, dtype=FLOAT).to(dtype)
    # Away from initialisation, where batch norm is the identity and its biases are zero.
    model = model.to(FLOAT).eval()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = 0.2 * torch.randn(tensor.shape, generator=stream, dtype=FLOAT)
            tensor += noise.abs() if name.endswith("running_var") else noise
    # Logits of size ``scale``: the larger, the more certain the classifier.
    with torch.no_grad():
        spread = model(inputs if kind in TOKENS else inputs.to(FLOAT)).std()
        for tensor in list(model.parameters())[-2:]:
            tensor *= scale / spread
    return model.to(dtype), inputs, labels


def flat(pieces):
    return torch.cat([piece.reshape(-1) for piece in pieces])


def gradient_of(value, model, **options):
    options |= {"materialize_grads": True, "retain_graph": True}
    return flat(torch.autograd.grad(value, list(model.parameters()), **options))


def jacobian(model, inputs):
    """Return dz/dtheta, n x C x P, one scalar at a time."""
    rows = []
    for x in inputs:
        logits = model(x[None])[0]
        rows.append(torch.stack([gradient_of(z, model) for z in logits]))
    return torch.stack(rows)


def sorted_by_class(inputs, labels):
    order = torch.cat([torch.nonzero(labels == c).flatten() for c in labels.unique()])
    return inputs[order], labels[order]


def naive_derivatives(model, inputs):
    """Return delta_{i,c'} from its definition, n x C x P."""
    p, jac = model(inputs).softmax(1).detach(), jacobian(model, inputs)
    n, classes, size = jac.shape
    result = torch.zeros(n, classes, size, dtype=jac.dtype)
    for i in range(n):
        for c in range(classes):
            unit = torch.zeros(classes, dtype=jac.dtype)
            unit[c] = 1
            result[i, c] = p[i, c] ** 0.5 * jac[i].T @ (unit - p[i])
    return result


def naive_gauss_newton(model, inputs):
    """Return (1/n) sum_i J_i^T (diag(p) - p p^T) J_i."""
    p, jac = model(inputs).softmax(1).detach(), jacobian(model, inputs)
    return sum(j.T @ (torch.diag(q) - torch.outer(q, q)) @ j for q, j in zip(p, jac)) / len(p)


def naive_loss(model, inputs, labels):
    with sdpa_kernel(SDPBackend.MATH):  # the only attention with a second derivative
        return nn.functional.cross_entropy(model(inputs), labels)


def naive_hessian_product(model, inputs, labels, vector):
    """Return H v as the gradient of <gradient of the loss, v>."""
    first = gradient_of(naive_loss(model, inputs, labels), model, create_graph=True)
    return gradient_of(first @ vector, model)
