"""Find the packages and make the description: pyproject.toml alone cannot put folders of the root under `eagle_slim`.

The pages of docs/ go along, as messages name some.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

FOLDERS = ("convert", "runtime", "vocab_tools")


def description() -> str:
    """Return README.md without pictures and links into the repository, which have no address in a wheel."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(<br>)?\n", "", Path("README.md").read_text("utf-8"))
    return re.sub(r"\[([^\]]*)\]\((?!https://)[^)]*\)", r"\1", text)


found = find_namespace_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
setup(
    packages=[f"eagle_slim.{name}" for name in (*found, "docs")],
    package_dir={f"eagle_slim.{name}": name for name in (*FOLDERS, "docs")},
    long_description=description(),
    long_description_content_type="text/markdown",
)
