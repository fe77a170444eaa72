"""Makes the tables and figures of scripts/study/RESULTS.md from raw lines; no run is made.

python scripts/study/show.py docs/study.jsonl                      all of them, into build/study
python scripts/study/show.py runs/study/lines.jsonl --only lag     what `make study` has made so far of one sweep
python scripts/study/show.py build/again/lines.jsonl --only headline --against docs/study.jsonl
python scripts/study/show.py scripts/study/real_model/lines.jsonl --study scripts/study/real_model
"""

from collections.abc import Sequence
from pathlib import Path

from figures import draw_mismatch, draw_sweep
from lines import read_lines
from sweeps import SWEEPS, load_study
from tables import HEAD, NONE, Table, comparison_table, lines_of_sweeps, pairs_table, panels_table

from dc_trl.files import write_text
from dc_trl.records.tables import markdown_table, print_table
from dc_trl.settings.command_line import OptionParser, refused_in_one_line


# Columns that fit in a terminal.
ON_TERMINAL = [HEAD.index(name) for name in HEAD if name not in ("last one, %", "sampled, %", "trained, %", "λ")][:8]


def show_lines(
    lines_file: Path,
    output: Path,
    folder: Path = SWEEPS,
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    against: Path | None = None,
) -> None:
    """Print the tables of sweeps, and write them to `tables.md` in a folder, with a figure for each beside it.

    Args:
        lines_file: raw lines of runs.
        output: the folder.
        folder: of the sweep files.
        only: names of sweeps; all by default.
        seeds: take the place of the sweeps' own.
        against: raw lines of another study: a second table for each sweep says whether both ended alike.
    """
    study, lines = load_study(folder, only, seeds), read_lines(lines_file)
    others = [] if against is None else lines_of_sweeps(load_study(folder, only), read_lines(against))
    output.mkdir(parents=True, exist_ok=True)
    parts = []
    for index, found in enumerate(lines_of_sweeps(study, lines)):
        name = found.sweep.name
        parts.append(_show(name, found.table(), ON_TERMINAL))
        if tuple(map(len, found.sweep.axes)) == (2, 1):
            table = panels_table(found)
            parts.append(_show(f"{name}, by field", table, range(len(table[0]))))
        draw_sweep(found, int(study.base["max_steps"]), output / f"{name}.png")
        if others:
            table = comparison_table(found, others[index])
            parts.append(_show(f"{name}, compared", table, range(len(table[0]))))
    # All of the study's pairs, whichever sweeps are shown: those of a family are corrected together.
    pairs = pairs_table(lines_of_sweeps(load_study(folder, (), seeds), lines))
    if pairs[1]:
        parts.append(_show("pairs", pairs, range(len(pairs[0]))))
    draw_mismatch(lines, output / "mismatch.png")
    write_text(output / "tables.md", "\n".join(parts))
    print(f"wrote {output / 'tables.md'}, and the figures beside it")


def _show(title: str, table: Table, columns: Sequence[int]) -> str:
    """Print these columns of a table, but for rows without runs; return all of it as a section of `tables.md`."""
    head, rows = table
    shown = [[row[i] for i in columns] for row in rows if row[2] != NONE]
    print_table([head[i] for i in columns], shown, title)
    return f"## {title}\n\n{markdown_table(head, rows)}"


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("lines", type=Path, help="raw lines, as `make study` writes them")
    parser.add_argument("--output", type=Path, default=Path("build/study"), help="(default: build/study)")
    parser.add_argument("--only", nargs="+", default=[], metavar="SWEEP", help="names of sweeps")
    parser.add_argument("--study", type=Path, default=SWEEPS, help="folder of sweep files (default: the study's own)")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="in place of those of the sweeps")
    parser.add_argument("--against", type=Path, metavar="LINES", help="raw lines of another study to compare with")
    args = parser.parse_args()
    with refused_in_one_line():
        show_lines(args.lines, args.output, args.study, args.only, args.seeds, args.against)


if __name__ == "__main__":
    main()
