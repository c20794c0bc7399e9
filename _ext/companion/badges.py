"""A verdict in words and as a badge."""

import html
from typing import Any


def verdict_of(row: dict[str, Any]) -> str:
    """Return a row's verdict in words, told apart for controls and for what is planned."""
    verdict = row.get("verdict")
    if not verdict:
        return "planned" if row.get("status") == "planned" else "not measured"
    # A control that fails does its duty; it must not count as a failed statement.
    return f"control {verdict}" if ".control" in row["id"] else verdict


def badge(verdict: str) -> str:
    """Return a verdict as HTML, coloured by its kind."""
    slug = verdict.replace(" ", "-")
    return f'<span class="lg-verdict lg-verdict-{slug}">{html.escape(verdict)}</span>'
