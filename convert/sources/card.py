"""The front matter of a model card: the YAML between the two `---` lines at the top of a README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..files import read_regular


def front_matter(folder: Path) -> dict[str, Any]:
    """The card's metadata; {} where there is no card, no front matter, or none that is valid YAML."""
    import yaml  # type: ignore[import-untyped]  # PyYAML's stubs are a package of their own

    try:
        text = read_regular(folder / "README.md").decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((number for number, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
    if end is None:
        return {}
    try:
        value = yaml.safe_load("\n".join(lines[1:end]))
    except yaml.YAMLError:
        # A card is prose: what its author got wrong there must not stop a conversion.
        return {}
    return value if isinstance(value, dict) else {}


def base_model(metadata: dict[str, Any]) -> str | None:
    """The one base model that a card names, or None where it names none or several."""
    value = metadata.get("base_model")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) and value else None


def licence(metadata: dict[str, Any]) -> str | None:
    """The licence that a card names, as the Hub spells it ("apache-2.0"), or None."""
    value = metadata.get("license")
    return value if isinstance(value, str) and value else None
