"""Make lowgrad_utils importable: installed, beside this notebook, or from its address."""

import os
import sys
from importlib.util import find_spec
from subprocess import run

ADDRESS = ""  # git+https address of a released version; empty while there is none
sys.path += [os.path.abspath(p) for p in (".", "..") if os.path.isdir(f"{p}/lowgrad_utils")]
if not find_spec("lowgrad_utils"):
    if not ADDRESS:
        raise ModuleNotFoundError("No lowgrad_utils: open this notebook in a clone of the book.")
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", ADDRESS], check=True)
