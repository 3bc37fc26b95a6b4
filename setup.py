"""Find the packages: pyproject.toml alone cannot put folders of the root under `eagle_slim`."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("convert", "runtime", "vocab_tools")
found = find_namespace_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
setup(
    packages=[f"eagle_slim.{name}" for name in found],
    package_dir={f"eagle_slim.{name}": name for name in FOLDERS},
)
