"""Version of the package, and where its documentation is; importable without its dependencies."""

from importlib.metadata import PackageNotFoundError, metadata


__version__ = "0.2.0"


def _documentation() -> str:
    try:
        urls = metadata("dc_trl").get_all("Project-URL", [])
    except PackageNotFoundError:  # a clone on the path
        urls = []
    repository = dict(url.split(", ", 1) for url in urls).get("Repository")
    return f"{repository}/blob/main/docs" if repository else "docs"


# Where messages find the pages that they name: below the Repository of pyproject.toml's urls, else in a clone.
DOCS = _documentation()
