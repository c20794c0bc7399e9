"""Set the address of the repository everywhere, change it, or take it away again.

    python tools/address.py https://github.com/OWNER/NAME [--tag v1.0] [--branch main]
    python tools/address.py ""

While there is no address nobody is sent anywhere: no button, no badge, no cell that installs. With
one, notebooks install the released tag and open from it, so that a notebook and its package are
always of one release; the buttons for suggesting an edit lead to the branch.
"""

import argparse
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COLAB = "https://colab.research.google.com"
BADGE = f"{COLAB}/assets/colab-badge.svg"
FIRST_CHAPTER = "chapters/how-to-read.ipynb"
REPOSITORY = re.compile(r"https://github\.com/[A-Za-z0-9][A-Za-z0-9-]{0,38}/[A-Za-z0-9._-]{1,100}")
# What git takes as a name and neither pip nor a link reads otherwise.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(/[A-Za-z0-9][A-Za-z0-9._+-]*)*")
SETTING = re.compile(r'^ADDRESS = "(?P<value>[^"\n]*)"', re.MULTILINE)
STORED = re.compile(r'(?<="ADDRESS = \\")[^"\\\n]*(?=\\")')
BADGES = re.compile(r"^\[!\[Open in Colab\].*\n\n", re.MULTILINE)
CITED = re.compile(r"^repository-code: .*\n", re.MULTILINE)


class AddressError(Exception):
    """An address that cannot be used, or a file without its place; told in one line."""


class Address(NamedTuple):
    """Where the book is published.

    Attributes:
        repository: Such as https://github.com/owner/name.
        tag: The released version that notebooks install and open from.
        branch: What edits are suggested to.
    """

    repository: str
    tag: str
    branch: str = "main"

    @property
    def package(self) -> str:
        """What pip installs."""
        return f"git+{self.repository}@{self.tag}"

    def colab(self, path: str) -> str:
        """Return the address at which Colab opens a notebook of the release."""
        names = self.repository.removeprefix("https://github.com/")
        return f"{COLAB}/github/{names}/blob/{self.tag}/{path}"

    def file(self, path: str) -> str:
        """Return the address at which the repository shows a file of the release."""
        return f"{self.repository}/blob/{self.tag}/{path}"


def checked(repository: str, tag: str, branch: str = "main") -> Address | None:
    """Return the address, or None where it is taken away.

    Args:
        repository: The repository's page, or nothing.
        tag: The tag of the release.
        branch: The branch for edits.

    Raises:
        AddressError: One of them cannot be used.
    """
    if not repository.strip():
        return None
    address = repository.strip().rstrip("/").removesuffix(".git")
    if not REPOSITORY.fullmatch(address) or address.endswith(("/.", "/..")):
        raise AddressError(
            f"'{repository}' is no repository that Colab opens: give it as https://github.com/"
            "OWNER/NAME, or nothing to take the address away"
        )
    for what, name in (("TAG", tag), ("BRANCH", branch)):
        if not NAME.fullmatch(name) or ".." in name or name.endswith((".lock", ".", "/")):
            raise AddressError(f"{what} '{name}' is no name of git's: give one such as v1.0")
    return Address(address, tag, branch)


def current(root: Path = ROOT) -> Address | None:
    """Return the address that is set, None while there is none.

    Raises:
        AddressError: The files do not say.
    """
    text = _read(root / "tools" / "setup_cell.py")
    setting = SETTING.search(text)
    if setting is None:
        raise AddressError("tools/setup_cell.py has no line 'ADDRESS = \"\"'")
    if not setting["value"]:
        return None
    repository, _, tag = setting["value"].removeprefix("git+").partition("@")
    return Address(repository, tag, _value(_read(root / "_config.yml"), "branch"))


def set_everywhere(address: Address | None, root: Path = ROOT) -> list[Path]:
    """Write the address into every file that has one; return the files that changed.

    Args:
        address: The address, None to take it away.
        root: The project's folder.

    Raises:
        AddressError: A file is missing or lacks the place; nothing is written then.
    """
    package = address.package if address else ""
    new: dict[Path, str] = {}

    def change(name: str, function) -> None:
        new[root / name] = function(_read(root / name))

    change("tools/setup_cell.py", lambda text: _once(SETTING, f'ADDRESS = "{package}"', text))
    for path in sorted((root / "chapters").glob("*.ipynb")):
        change(f"chapters/{path.name}", lambda text: _once(STORED, package, text))
    change("_config.yml", lambda text: configured(text, address))
    change("README.md", lambda text: _with_badges(text, address))
    change("CITATION.cff", lambda text: _cited(text, address))
    changed = [path for path, text in new.items() if _read(path) != text]
    for path in changed:
        part = path.with_name(path.name + ".part")
        part.write_bytes(new[path].encode())
        os.replace(part, path)
    return changed


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise AddressError(f"{path} cannot be read ({error}): run this in a whole clone") from None


def _once(pattern: re.Pattern, text: str, whole: str) -> str:
    found = pattern.findall(whole)
    if len(found) != 1:
        raise AddressError(f"one place for the address is needed in a file, {len(found)} found")
    return pattern.sub(lambda _: text, whole)


def _setting(name: str) -> re.Pattern:
    return re.compile(rf"^( +{name}: )(.*)$", re.MULTILINE)


def _value(config: str, name: str) -> str:
    return _setting(name).search(config)[2].strip('"')


def configured(text: str, address: Address | None) -> str:
    """Return the text of `_config.yml` with an address, or without one.

    Raises:
        AddressError: A line that takes a part of it is missing.
    """
    words = {
        "colab_url": f'"{COLAB if address else ""}"',
        "url": f'"{address.repository if address else ""}"',
        "branch": f'"{address.branch if address else ""}"',
        "companion_release": f'"{address.tag if address else ""}"',
        "use_edit_page_button": str(bool(address)).lower(),
        "use_repository_button": str(bool(address)).lower(),
        "use_issues_button": str(bool(address)).lower(),
    }
    for name, value in words.items():
        pattern = _setting(name)
        if len(pattern.findall(text)) != 1:
            raise AddressError(f"_config.yml needs one line '{name}:'")
        text = pattern.sub(lambda found, value=value: found[1] + value, text)
    return text


def _with_badges(text: str, address: Address | None) -> str:
    text = BADGES.sub("", text, count=1)
    title, gap, rest = text.partition("\n\n")
    if not title.startswith("# ") or not gap:
        raise AddressError("README.md must open with its title")
    if address is None:
        return text
    colab = f"[![Open in Colab]({BADGE})]({address.colab(FIRST_CHAPTER)})"
    release = f"[release {address.tag}]({address.repository}/tree/{address.tag})"
    return f"{title}{gap}{colab} {release}\n\n{rest}"


def _cited(text: str, address: Address | None) -> str:
    text = CITED.sub("", text)
    if address is None:
        return text
    line = f'repository-code: "{address.repository}"\n'
    found = re.search(r"^license: .*\n", text, re.MULTILINE)
    if not found:
        raise AddressError("CITATION.cff needs a line 'license:'")
    return text[: found.end()] + line + text[found.end() :]


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    version = tomllib.loads(_read(ROOT / "pyproject.toml"))["project"]["version"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository")
    parser.add_argument("--tag", default=f"v{version}")
    parser.add_argument("--branch", default="main")
    args = parser.parse_args(argv)
    try:
        address = checked(args.repository, args.tag, args.branch)
        changed = set_everywhere(address)
    except (AddressError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if address and version not in address.tag:
        note = f"Note: the tag {address.tag} does not name pyproject.toml's version, {version}"
        print(note, file=sys.stderr)
    said = f"{address.repository} at {address.tag}" if address else "none"
    print(f"Address: {said} ({len(changed)} files changed)")
    if address and changed:
        print(
            f"Now commit, make the tag ('git tag {address.tag}'), push both, and build the book: "
            "until the tag is there, notebooks find nothing to install"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
