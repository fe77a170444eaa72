"""Which packages there are; all else is in pyproject.toml.

The configurations stand at the top of the repository, where people look for them, and are part of the package where it
is installed. setuptools maps a folder so, and pyproject.toml cannot say it beside packages that are found.
"""

from setuptools import find_packages, setup


setup(
    packages=[*find_packages(include=["dc_trl*"]), "dc_trl.configs"],
    package_dir={"dc_trl.configs": "configs"},
)
