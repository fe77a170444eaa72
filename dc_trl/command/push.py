"""Pushes a run to the Hub from its output directory: one that was not pushed, or whose push failed.

    dc-trl push runs/my-run --repo_id me/my-model

What the Hub has already is not sent again. The token is that of `hf auth login` or of the environment (HF_TOKEN).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from ..config import HubDeployment
from ..hub.push import push_run
from ..settings.command_line import OptionParser, refused_in_one_line


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "push")
    parser.add_argument("run", type=Path, help="output directory of the run")
    parser.add_argument("--repo_id", required=True, help="repository, made where it is missing")
    parser.add_argument(
        "--deployment",
        choices=get_args(HubDeployment),
        default="subfolder",
        help="where the deployment checkpoint goes: deployment/, or nowhere",
    )
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch, made where it is missing")
    parser.add_argument("--base_model", help="Hub id of an adapter's base, where the run loaded it from a directory")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    options = {"deployment": args.deployment, "private": args.private}
    with refused_in_one_line():
        commit = push_run(args.run, args.repo_id, revision=args.revision, base_model=args.base_model, **options)
    print(f"Pushed: {commit}")
