"""Draws the pictures of docs/how-plans-are-chosen.md from plans that the planner makes: `make pictures`.

    python -m scripts.plan_pictures            writes docs/pictures/*.svg
    python -m scripts.plan_pictures FOLDER     writes them there

The model is Llama 2 7B. Nothing is compiled, and no accelerator is needed.
"""

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from autoshard import Plan
from autoshard.cli import main as autoshard
from autoshard.sharding.pipeline.schedule_words import make_schedule
from autoshard.sharding.pipeline.schedules import BACKWARD, FORWARD, WEIGHTS

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MODEL = "plan llama2-7b --batch-size 128 --context 2048 --verify 0".split()
MACHINES = ("v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16")
SHOWN = "v5e:8x8"
SCHEDULES = ("gpipe", "1f1b", "zb")
STAGES, MICROBATCHES = 4, 8

# The colours of Okabe and Ito, which people with any kind of colour vision tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#8a8a8a"
KINDS = {"fsdp": BLUE, "zero": ORANGE, "tp": GREEN, "others": GREY}
PARTS = {FORWARD: (BLUE, "F"), BACKWARD: (ORANGE, "B"), WEIGHTS: (GREEN, "W")}
STYLE = {"font.size": 9, "svg.hashsalt": "autoshard", "axes.spines.top": False, "axes.spines.right": False}


def main() -> None:
    """Makes the plans, and writes the pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    plans = {target: made_plan(target) for target in MACHINES}
    with plt.rc_context(STYLE):
        save(candidates(plans[SHOWN]), folder / "candidates.svg")
        save(machines(plans), folder / "machines.svg")
        save(layer(plans[SHOWN]), folder / "layer.svg")
        save(schedules(STAGES, MICROBATCHES, SCHEDULES), folder / "schedules.svg")


def made_plan(target: str) -> Plan:
    """The plan of the model for a machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        if code := autoshard([*MODEL, "--target", target, "--json", str(file)]):
            sys.exit(code)
        return Plan.from_json(file.read_text())


def save(figure: Figure, file: Path) -> None:
    """Writes a picture, the same bytes each time."""
    figure.savefig(file, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)


def candidates(plan: Plan) -> Figure:
    """Step time against memory of every plan that was priced, with the limit and the chosen plan."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    priced = [each for record in plan.history for each in record.tried]
    for kind, colour in KINDS.items():
        group = [each for each in priced if kind_of(each.strategy) == kind]
        axes.scatter(
            [each.peak_bytes / 2**30 for each in group],
            [each.step_time_us / 1e6 for each in group],
            s=18, color=colour, alpha=0.75, linewidths=0, label=f"{kind} ({len(group)})",
        )  # fmt: skip
    limit = plan.limit_bytes / 2**30
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axvspan(limit, axes.get_xlim()[1], color=RED, alpha=0.07, linewidth=0)
    axes.axvline(limit, color=RED, linewidth=1)
    axes.annotate(f"memory of a chip, {limit:.3g} GiB", (limit, axes.get_ylim()[1]), (4, -4),
                  textcoords="offset points", color=RED, va="top")  # fmt: skip
    chosen = plan.estimate
    point = (chosen.peak_memory_bytes / 2**30, chosen.step_time_us / 1e6)
    axes.scatter(*point, s=110, facecolors="none", edgecolors="black", linewidths=1.5)
    axes.annotate(f"chosen: {plan.chosen}", point, (-10, -16), textcoords="offset points", ha="right", weight="bold",
                  bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1})  # fmt: skip
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set(xlabel="peak memory of a device, GiB", ylabel="step time, seconds (estimated)")
    axes.legend(title="plans priced, by their first word", frameon=False, loc="upper left")
    return figure


def kind_of(strategy: str) -> str:
    """The kind of a strategy: of its first word."""
    first = re.match(r"[a-z]+", strategy)
    return first[0] if first and first[0] in KINDS else "others"


def machines(plans: Mapping[str, Plan]) -> Figure:
    """The chosen plan and its step time on machines of growing size."""
    figure, axes = plt.subplots(figsize=(7.2, 2.9))
    rows = range(len(plans))
    compute = [plan.estimate.compute_us / 1e6 for plan in plans.values()]
    total = [plan.estimate.step_time_us / 1e6 for plan in plans.values()]
    exposed = [whole - part for whole, part in zip(total, compute, strict=True)]
    axes.barh(rows, compute, color=BLUE, label="compute")
    axes.barh(rows, exposed, left=compute, color=ORANGE, label="communication that compute does not hide")
    for row, plan, end in zip(rows, plans.values(), total, strict=True):
        fits = "" if plan.fits else "  (does not fit)"
        axes.annotate(f"{plan.chosen}{fits}", (end, row), (5, 0), textcoords="offset points", va="center", weight="bold")
    axes.set_yticks(rows, [f"{target}  {plan.mesh.size} chips" for target, plan in plans.items()])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("step time, seconds (estimated)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def layer(plan: Plan) -> Figure:
    """The arrays of one layer, and the mesh axes that shard each of their dimensions."""
    rows = [leaf for leaf in plan.inputs if leaf.role == "parameter" and "blocks" in leaf.path and len(leaf.shape) > 2]
    figure, axes = plt.subplots(figsize=(7.2, 0.42 * len(rows) + 0.7))
    colours = dict(zip(plan.mesh.axis_names, (BLUE, ORANGE, GREEN, RED), strict=False))
    for row, leaf in enumerate(rows):
        axes.text(-0.02, row + 0.4, leaf.path.split("blocks/")[-1], ha="right", va="center")
        draw_array(axes, row, leaf, colours)
    handles = [Rectangle((0, 0), 1, 1, color=colour, alpha=0.35) for colour in colours.values()]
    labels = [f"{axis}: {size} devices" for axis, size in plan.mesh.shape.items()]
    axes.legend(handles, labels, frameon=False, loc="upper center", ncol=len(labels), bbox_to_anchor=(0.5, 0))
    axes.set(xlim=(0, 1), ylim=(len(rows), 0))
    axes.axis("off")
    return figure


def draw_array(axes: Axes, row: int, leaf, colours: Mapping[str, str]) -> None:
    """Draws an array as a row of its dimensions."""
    spec = (*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec)))
    width = 1 / len(leaf.shape)
    for position, (name, size, sharded) in enumerate(zip(leaf.axes, leaf.shape, spec, strict=True)):
        over = (sharded,) if isinstance(sharded, str) else tuple(sharded or ())
        colour = colours[over[0]] if over else "white"
        axes.add_patch(
            Rectangle((position * width, row), width, 0.8, facecolor=colour, alpha=0.35, edgecolor="none")
        )
        axes.add_patch(Rectangle((position * width, row), width, 0.8, facecolor="none", edgecolor="black", linewidth=0.8))
        text = f"{name} {size}" + (f" / {'·'.join(over)}" if over else "")
        axes.text((position + 0.5) * width, row + 0.4, text, ha="center", va="center", weight="bold" if over else "normal")


def schedules(stages: int, microbatches: int, words: Sequence[str]) -> Figure:
    """The ticks of schedules: what each stage runs, and for which microbatch."""
    figure, grid = plt.subplots(len(words), figsize=(7.2, 1.25 * len(words)), sharex=True)
    for axes, word in zip(grid, words, strict=True):
        schedule = make_schedule(word, stages, microbatches)
        for part, (colour, letter) in PARTS.items():
            for item, ticks in enumerate(schedule.ticks.get(part, ())):
                for stage, tick in enumerate(ticks):
                    # A tick has a forward half and a backward half.
                    left = tick + (0.0 if part == FORWARD else 0.5)
                    axes.add_patch(Rectangle((left, stage), 0.5, 0.9, facecolor=colour, edgecolor="white", linewidth=0.5))
                    axes.text(left + 0.25, stage + 0.45, str(item + 1), ha="center", va="center", fontsize=5.5, color="white")
        axes.set(ylim=(stages, -0.1), xlim=(0, 22), yticks=[stage + 0.45 for stage in range(stages)], title=word)
        axes.set_yticklabels([f"stage {stage + 1}" for stage in range(stages)])
    grid[-1].set_xlabel("tick")
    return figure


if __name__ == "__main__":
    main()
