import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowgrad_utils import classifiers, patch_transformer, trained_networks
from lowgrad_utils.classifiers import CheckpointError
from lowgrad_utils.diagnosis import layer_names
from lowgrad_utils.patch_transformer import PatchTransformer

TINY = {
    **patch_transformer.TRAINING,
    "width": 4,
    "blocks": 1,
    "heads": 2,
    "epochs": 1,
    "batch_size": 702,
}


def images(n=3):
    return torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def test_attention_is_that_of_torch():
    model = PatchTransformer(width=8, blocks=1, heads=2, seed=3)
    block = model.blocks[0]
    other = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        for name in ("weight", "bias"):
            parts = [getattr(layer, name) for layer in (block.query, block.key, block.value)]
            getattr(other, f"in_proj_{name}").copy_(torch.cat(parts))
            getattr(other.out_proj, name).copy_(getattr(block.output, name))
    x = images()
    # Patches by hand: four rows of four squares of 7 x 7 pixels.
    squares = [x[:, 0, 7 * i : 7 * i + 7, 7 * j : 7 * j + 7] for i in range(4) for j in range(4)]
    tokens = model.embedding(torch.stack([s.flatten(1) for s in squares], 1)) + model.positions
    normed = block.norm1(tokens)
    tokens = tokens + other(normed, normed, normed)[0]
    tokens = tokens + block.down(F.gelu(block.up(block.norm2(tokens))))
    torch.testing.assert_close(model(x), model.head(model.norm(tokens).mean(1)))


def test_the_seed_decides_and_the_global_generator_does_not_notice():
    before = torch.random.get_rng_state()
    one, same, other = (PatchTransformer(width=4, blocks=1, seed=s) for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.embedding.weight, same.embedding.weight)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="width is 6, but a multiple of heads = 4 is needed"):
        PatchTransformer(width=6)
    with pytest.raises(ValueError, match="blocks is 0"):
        PatchTransformer(blocks=0)
    with pytest.raises(ValueError, match=r"x has shape \(3, 1, 32, 32\), but N x 1 x 28 x 28"):
        PatchTransformer()(torch.zeros(3, 1, 32, 32))
    with pytest.raises(ValueError, match="epoch is 3, but one of 0, 1, 5, 40 is needed"):
        patch_transformer.load(3)


def test_what_is_stored_is_what_was_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(trained_networks, "folder", lambda: tmp_path)
    hashes = patch_transformer.store(TINY, progress=False)
    assert list(hashes) == ["0", "1"]
    manifest = json.loads((tmp_path / "patch-transformer.json").read_text())
    assert manifest["sha256"] == hashes and manifest["width"] == 4
    path = tmp_path / "patch-transformer-0.pt"
    state, about = classifiers.load_checkpoint(path, sha256=hashes["0"])
    start = PatchTransformer(width=4, blocks=1, heads=2, seed=0).state_dict()
    for name, tensor in start.items():
        torch.testing.assert_close(state[name], tensor.half().float(), rtol=0, atol=0)
    assert about["epoch"] == 0 and about["lr"] == TINY["lr"]


def test_shipped_epochs_get_better():
    networks = [patch_transformer.load(epoch) for epoch in patch_transformer.EPOCHS]
    assert len(layer_names(networks[0].model)) == 14
    accuracies = [classifiers.evaluate(n.model, *n.test_set).accuracy for n in networks]
    assert accuracies == sorted(accuracies)
    assert accuracies[0] < 0.3 and accuracies[-1] > 0.8
    assert not networks[0].model.training


def test_shipped_files_are_small_and_start_at_the_stated_weights():
    files = trained_networks.folder().glob("patch-transformer*")
    assert sum(path.stat().st_size for path in files) < 5e5
    training = patch_transformer.TRAINING
    form = {name: training[name] for name in ("width", "blocks", "heads", "seed")}
    shipped = patch_transformer.load(0).model
    assert shipped.blocks[0].up.weight.shape == PatchTransformer(**form).blocks[0].up.weight.shape


def test_damage_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(trained_networks, "folder", lambda: tmp_path)
    with pytest.raises(CheckpointError, match=r"patch-transformer.json is missing or damaged"):
        patch_transformer.load(0)
    (tmp_path / "patch-transformer.json").write_text(json.dumps({"sha256": {"0": "ab"}}))
    (tmp_path / "patch-transformer-0.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"does not have the SHA-256 ab"):
        patch_transformer.load(0)
