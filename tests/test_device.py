"""A model and data on another device than the processor, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_device import MEASURES

HERE = Path(__file__).parent
KINDS = ("tanh", "tied", "normalised", "resnet18", "transformer")


@pytest.fixture(scope="module")
def measured():
    """What each measure gave here, there, and there with data from a loader; or its error."""
    command = [sys.executable, str(HERE / "on_device.py"), *KINDS]
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("kind", KINDS)
def test_another_device_gives_the_same(measured, kind, name):
    found = measured[f"{kind} {name}"]
    assert isinstance(found, list), found
    here, there, from_loader = found
    assert max(here) > 0
    assert there == pytest.approx(here, rel=1e-9, abs=1e-10)
    assert from_loader == pytest.approx(here, rel=1e-9, abs=1e-10)


def test_the_pretended_device_refuses_what_a_gpu_refuses():
    said = subprocess.run(
        [sys.executable, "-c", _REFUSED], capture_output=True, text=True, cwd=HERE, timeout=120
    )
    assert said.stdout.split() == ["RuntimeError", "TypeError", "RuntimeError", "[2.0,", "2.0]"]


_REFUSED = """
import torch
from pretend_device import DEVICE
there = torch.ones(2).to(DEVICE)
for mistake in (
    lambda: there + torch.ones(2),
    lambda: there.numpy(),
    lambda: torch.rand(2, device=DEVICE, generator=torch.Generator()),
):
    try:
        mistake()
    except Exception as error:
        print(type(error).__name__)
print((there + there).cpu().tolist())
"""
