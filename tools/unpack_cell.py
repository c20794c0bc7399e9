"""Make lowgrad_utils importable: installed here, or from what the cells above carry."""


def unpack_lowgrad_utils(carried):
    """Return one line on which lowgrad_utils this notebook uses; stop in one line."""
    import atexit
    import base64
    import hashlib
    import importlib.util
    import io
    import lzma
    import shutil
    import sys
    import tempfile
    import zipfile

    found = importlib.util.find_spec("lowgrad_utils")
    if found and found.origin:
        return f"lowgrad_utils is here already and stays as it is: {found.origin}"
    if sys.version_info < (3, 11):  # noqa: UP036
        raise RuntimeError(f"Python {sys.version.split()[0]} is too old: 3.11 or newer is needed.")
    parts = range(1, PARTS + 1)
    if not all(part in carried for part in parts):
        raise RuntimeError("Run the cells above first: they hold the package.")
    try:
        content = base64.b64decode("".join(carried[part] for part in parts))
    except ValueError:
        content = b""
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise RuntimeError(
            "This notebook is damaged: what it carries does not have the SHA-256 noted here. "
            "Take a fresh copy of the file."
        )
    folder = tempfile.mkdtemp(prefix="lowgrad-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    zipfile.ZipFile(io.BytesIO(lzma.decompress(content))).extractall(folder)
    # Behind everything else, so that it hides no other package.
    sys.path.append(folder)
    try:
        import lowgrad_utils  # noqa: F401
    except ImportError as error:
        sys.path.remove(folder)
        raise ImportError(f"{error}: run %pip install {PACKAGES} and repeat.") from None
    return f"lowgrad_utils {VERSION} is unpacked until Python ends, with its data: {folder}"


PARTS = 0
VERSION = ""
SHA256 = ""
PACKAGES = ""
print(unpack_lowgrad_utils(globals().get("CARRIED", {})))
