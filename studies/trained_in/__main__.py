"""`python -m studies.trained_in`: trains what is not trained, measures what is not measured, and draws all that is there.

An interrupted study goes on where it was. Its last printed line is the folder of points.csv and figure.svg.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from transformers.utils import logging

from studies.trained_in.designs import DESIGNS, configuration, size
from studies.trained_in.figure import svg
from studies.trained_in.measure import Desk, Measured, measured
from studies.trained_in.texts import corpus, write_questions
from studies.trained_in.train import Recipe, trained

CHANCE = 0.1  # one of ten digits


def main(arguments: Sequence[str] | None = None) -> None:
    """All designs and seeds, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m studies.trained_in", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="models of each design (3)")
    parser.add_argument("--only", action="append", choices=list(DESIGNS), metavar="DESIGN", help="a design (repeatable)")
    parser.add_argument("--steps", type=int, default=Recipe.steps, metavar="N", help=f"training steps ({Recipe.steps})")
    parser.add_argument("--out", type=Path, default=Path("results/trained-in"), metavar="DIR", help="models and tables")
    options = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # tiny products: one thread is as fast as two
    logging.disable_progress_bar()
    found = study(options.out, options.only or list(DESIGNS), options.seeds, Recipe(steps=options.steps))
    print(found[["design", "seed", "recall", "bits", "bytes_per_token"]].to_string(index=False))
    print(options.out)


def study(out: Path, designs: Sequence[str], seeds: int, recipe: Recipe) -> pd.DataFrame:
    """Train and measure; the table, which is written with its figure after every model."""
    out.mkdir(parents=True, exist_ok=True)
    prose, held_out = corpus()
    desk = Desk(out / "questions.jsonl", out / "held_out.txt", out / "runs")
    write_questions(desk.questions)
    desk.prose.write_text(held_out, encoding="utf-8")
    rows: list[Measured] = []
    table = pd.DataFrame()
    for seed in range(seeds):
        for design in designs:
            print(f"{design}, seed {seed}", flush=True)
            config = configuration(design)
            model = trained(config, seed, prose, out / "models", recipe)
            rows.append(measured(model, desk, design=design, seed=seed, parameters=size(config)))
            table = written(rows, out)
    return table


def written(rows: Sequence[Measured], out: Path) -> pd.DataFrame:
    """points.csv and figure.svg of these models, in the order of the designs."""
    table = pd.DataFrame([asdict(one) for one in rows])
    table["bytes_per_token"] = table["kv_bytes"] / table["tokens"]
    place = {name: number for number, name in enumerate(DESIGNS)}
    table = table.sort_values(["design", "seed"], key=lambda one: one.map(place) if one.name == "design" else one)
    table.round(6).to_csv(out / "points.csv", index=False)
    (out / "figure.svg").write_text(svg(table, CHANCE), encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
