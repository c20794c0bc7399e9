"""Measures classifiers on the processor and on the pretended device; prints both as JSON."""

import copy
import json
import sys
import warnings

import torch
from curvature_examples import example

import lowgrad_utils as lg
from lowgrad_utils.three_levels import three_levels


def _numbers(*tensors):
    return torch.cat([tensor.cpu().abs().flatten() for tensor in tensors]).tolist()


def _products(model, data):
    at = lg.LossCurvature(model, data)
    v = at.gradient()
    return _numbers(v, at.gauss_newton @ v, at.hessian @ v)


def _centres(model, data):
    at = lg.LossCurvature(model, data)
    along = at.derivatives_along(at.gradient()[None])
    return _numbers(at.class_centres(), at.group_means(), at.logit_derivatives(), along)


def _eigenpairs(model, data):
    at = lg.LossCurvature(model, data)
    levels = three_levels(at)
    top = lg.top_eigenpairs(at.gauss_newton, 3, start=levels.centres)
    ritz = lg.rayleigh_ritz(at.gauss_newton, levels.centres)
    return _numbers(top.values, ritz.values, levels.eigenvalues("G1+2"), levels.lengths)


def _density(model, data):
    density = lg.spectral_density(lg.LossCurvature(model, data).hessian, probes=2, steps=6)
    points = torch.linspace(-1, 1, 5, dtype=torch.float64)
    return [*density.mean(torch.square), *_numbers(density.smooth(points, width=0.1))]


def _diagnosis(model, data):
    # An attention's first layer is called without its module.
    layer = lg.layer_names(model)[-1 if hasattr(model, "encoder") else 0]
    found = lg.diagnose(model, layer, data, torch.nn.functional.cross_entropy)
    found.table()
    # With three classes the residues span two directions: a third singular vector is rounding.
    return [*found.pieces.values(), *_numbers(found.singular_values, found.along_q[:2])]


MEASURES = {
    "products": _products,
    "centres": _centres,
    "eigenpairs": _eigenpairs,
    "density": _density,
    "diagnosis": _diagnosis,
}


def both(kind, name):
    """Return what one measure gives here, with everything moved, and with data from a loader."""
    from pretend_device import DEVICE  # not above: it changes torch for whoever imports it

    model, inputs, labels = example(kind)
    moved = copy.deepcopy(model).to(DEVICE)
    loader = [(inputs[:7], labels[:7]), (inputs[7:], labels[7:])]
    measure = MEASURES[name]
    return (
        measure(model, (inputs, labels)),
        measure(moved, (inputs.to(DEVICE), labels.to(DEVICE))),
        measure(moved, loader),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    results = {}
    for kind in sys.argv[1:]:
        for name in MEASURES:
            try:
                results[f"{kind} {name}"] = both(kind, name)
            except Exception as error:  # whatever it is, the test of this pair tells it
                results[f"{kind} {name}"] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))
