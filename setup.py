"""Find the packages and make the description: pyproject.toml alone cannot put folders of the root under `eagle_slim`.

The pages of docs/ go along, as messages name some.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("convert", "runtime", "vocab_tools")


def description() -> str:
    """Return README.md without pictures and links into the repository, which have no address in a wheel."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(<br>)?\n", "", Path("README.md").read_text("utf-8"))
    return re.sub(r"\[([^\]]*)\]\((?!https://)[^)]*\)", r"\1", text)


class BuildPages(build_py):
    """Copies the packages; in their pages a link to what stays in the repository becomes its path there."""

    def run(self) -> None:
        """Copy the packages, then rewrite the pages."""
        super().run()
        for page in Path(self.build_lib, "eagle_slim").rglob("*.md"):

            def kept(link: re.Match[str], folder: Path = page.parent) -> str:
                path = link[2].partition("#")[0]
                leads = "://" in path or (folder / path).exists()
                return link[0] if leads else f"{link[1]} (`{path.removeprefix('../')}` of the repository)"

            page.write_text(re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", kept, page.read_text("utf-8")), "utf-8")


found = find_namespace_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
setup(
    cmdclass={"build_py": BuildPages},
    packages=[f"eagle_slim.{name}" for name in (*found, "docs")],
    package_dir={f"eagle_slim.{name}": name for name in (*FOLDERS, "docs")},
    long_description=description(),
    long_description_content_type="text/markdown",
)
