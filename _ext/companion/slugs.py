"""The names by which headings are linked."""


def jupyter_slug(title: str) -> str:
    """Return the anchor that Jupyter gives a heading: its text with dashes for spaces.

    Unlike the usual slug it keeps case and punctuation, so one link works in Jupyter and here.

    Args:
        title: The heading's text.

    Example:
        >>> jupyter_slug("Where it breaks")
        'Where-it-breaks'
    """
    return title.strip().replace(" ", "-")
