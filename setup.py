"""What pyproject.toml cannot say: which packages there are, and the README as a package index shows it.

The configurations stand at the top of the repository, where people look for them, and are part of the package where it
is installed. setuptools maps a folder so, and pyproject.toml cannot say it beside packages that are found.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup


ROOT = Path(__file__).parent


def description(readme: str, address: str | None) -> str:
    """Return a README for a place that has none of the repository's files.

    Args:
        readme: Markdown whose links and images name files of the repository.
        address: of the repository. Links and images lead there. Without one, images are left out with the captions
            below them, and of links the words stay.
    """
    image, link = r'<img src="(?!https?:)([^"]+)"', r"\[([^\]]+)\]\((?!https?:)([^)]+)\)"
    if address:
        readme = re.sub(image, rf'<img src="{address}/raw/main/\1"', readme)
        return re.sub(link, rf"[\1]({address}/blob/main/\2)", readme)
    readme = re.sub(image + r"[^>]*>\s*\*.+?\*\s+", "", readme, flags=re.DOTALL)
    return re.sub(link, r"\1", readme)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    setup(
        packages=[*find_packages(include=["dc_trl*"]), "dc_trl.configs"],
        package_dir={"dc_trl.configs": "configs"},
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Repository")),
        long_description_content_type="text/markdown",
    )
