"""Make lowgrad_utils importable: installed, beside this notebook, or from its address."""

import os
import sys
from importlib.util import find_spec
from subprocess import run

ADDRESS = ""
sys.path += [os.path.abspath(p) for p in (".", "..") if os.path.isdir(f"{p}/lowgrad_utils")]
if not find_spec("lowgrad_utils"):
    if not ADDRESS:
        raise ModuleNotFoundError("Open this in a clone of the book, or a copy from `make colab`.")
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", ADDRESS], check=True)
