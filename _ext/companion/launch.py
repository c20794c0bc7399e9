"""The launch button opens a notebook of the release, whatever branch edits are suggested to."""

from typing import Any

from sphinx.application import Sphinx


def open_the_release(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: Any):
    """Replace the branch by the tag in what the theme's launch buttons lead to.

    The theme has one setting for both. A notebook of the branch may ask for functions that the
    release, which it installs, does not have yet; and a tag cannot be edited.
    """
    release = app.config.companion_release
    branch = (app.config.html_theme_options or {}).get("repository_branch")
    if not release or not branch:
        return
    for group in context.get("header_buttons", []):
        if group.get("label") == "launch-buttons":
            for button in group["buttons"]:
                button["url"] = button["url"].replace(f"/blob/{branch}/", f"/blob/{release}/", 1)
