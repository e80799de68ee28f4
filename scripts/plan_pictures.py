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
from typing import Any

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
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.search.strategy_kinds import kind_of

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MODEL = "plan llama2-7b --batch-size 128 --context 2048 --verify 0".split()
MACHINES = ("v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16")
SHOWN = "v5e:8x8"
SCHEDULES = ("gpipe", "1f1b", "zb")
STAGES, MICROBATCHES = 4, 8

# The colours of Okabe and Ito, which people with any kind of colour vision tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#8a8a8a"
KINDS = {"dp": (GREY, "o"), "fsdp": (BLUE, "o"), "tp": (GREEN, "^"), "cp": (ORANGE, "s"), "hybrid": (RED, "D")}
PARTS = {FORWARD: BLUE, BACKWARD: ORANGE, WEIGHTS: GREEN}
LAYER = [f"attention/{name}" for name in ("wq", "wk", "wv", "wo")] + [
    f"mlp/{name}" for name in ("w_gate", "w_up", "w_down")
]
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.hashsalt": "autoshard",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


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
    for kind, (colour, marker) in KINDS.items():
        if group := [each for each in priced if kind_of(each.strategy) == kind]:
            axes.scatter(
                [each.peak_bytes / 2**30 for each in group],
                [each.step_time_us / 1e6 for each in group],
                s=22, color=colour, marker=marker, alpha=0.8, linewidths=0, label=f"{kind} ({len(group)})",
            )  # fmt: skip
    limit = plan.limit_bytes / 2**30
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low * 0.9, high)
    axes.axvspan(limit, axes.get_xlim()[1], color=RED, alpha=0.07, linewidth=0)
    axes.axvline(limit, color=RED, linewidth=1)
    axes.annotate(f"does not fit {limit:.3g} GiB", (limit, high), (5, -5), textcoords="offset points", color=RED,
                  va="top")  # fmt: skip
    point = (plan.estimate.peak_memory_bytes / 2**30, plan.estimate.step_time_us / 1e6)
    axes.scatter(*point, s=120, facecolors="none", edgecolors="black", linewidths=1.5)
    axes.annotate(f"chosen: {plan.chosen}", point, (45, -17), textcoords="offset points", weight="bold", va="center",
                  arrowprops={"arrowstyle": "-", "shrinkB": 6})  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    axes.set_yticks([value for value in (1, 2, 3, 4, 5, 7, 10, 20) if low < value < high])
    axes.set(xlabel="peak memory of a device, GiB", ylabel="step time, seconds (estimated)")
    axes.legend(title="kind of plan", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


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
        text = f"{plan.chosen}{'' if plan.fits else ' (does not fit)'}"
        axes.annotate(text, (end, row), (5, 0), textcoords="offset points", va="center", weight="bold")
    axes.set_yticks(rows, [f"{target}  {plan.mesh.size} chips" for target, plan in plans.items()])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("step time, seconds (estimated)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def layer(plan: Plan) -> Figure:
    """The arrays of the layers, and the mesh axes that shard each of their dimensions."""
    parameters = {leaf.path.split("blocks/")[-1]: leaf for leaf in plan.inputs if leaf.role == "parameter"}
    kept = [each for each in plan.activations if each.role == "activation" and each.axes[0] == "layers"]
    rows = [("tokens of the batch", next(leaf for leaf in plan.inputs if leaf.path.endswith("inputs")))]
    rows += [(name, parameters[name]) for name in LAYER]
    rows += [(f"activations of {each.axes[-1]}", each) for each in kept]
    figure, axes = plt.subplots(figsize=(7.2, 0.4 * len(rows) + 0.6))
    colours = dict(zip(plan.mesh.axis_names, (BLUE, ORANGE, GREEN, RED), strict=False))
    for row, (name, leaf) in enumerate(rows):
        axes.text(-0.015, row + 0.4, name, ha="right", va="center")
        draw_array(axes, row, leaf, colours)
    handles = [Rectangle((0, 0), 1, 1, color=colour, alpha=0.4) for colour in colours.values()]
    labels = [f"split over {axis}: {size} devices" for axis, size in plan.mesh.shape.items()]
    axes.legend(handles, labels, frameon=False, loc="upper center", ncol=len(labels), bbox_to_anchor=(0.5, 0))
    axes.set(xlim=(0, 1), ylim=(len(rows), 0))
    axes.axis("off")
    return figure


def draw_array(axes: Axes, row: int, leaf: Leaf, colours: Mapping[str, str]) -> None:
    """Draws an array as a row of its dimensions. One that several mesh axes split has the colours of all."""
    spec = (*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec)))
    width = 1 / len(leaf.shape)
    for position, (name, size, sharded) in enumerate(zip(leaf.axes, leaf.shape, spec, strict=True)):
        left = position * width
        over = (sharded,) if isinstance(sharded, str) else tuple(sharded or ())
        for number, axis in enumerate(over):
            part = width / len(over)
            axes.add_patch(
                Rectangle((left + number * part, row), part, 0.8, facecolor=colours[axis], alpha=0.4, linewidth=0)
            )
        axes.add_patch(Rectangle((left, row), width, 0.8, facecolor="none", edgecolor="black", linewidth=0.8))
        text = re.sub(r"\*.*|_1$", "", name)  # of an axis that is split into several, the first name
        axes.text(left + width / 2, row + 0.42, f"{text} {size}", ha="center", va="center", fontsize=8,
                  weight="bold" if over else "normal")  # fmt: skip


def schedules(stages: int, microbatches: int, words: Sequence[str]) -> Figure:
    """What each stage runs under each schedule, and for which microbatch.

    All stages wait for the slowest part of a tick, as in the compiled program. A part has the width of its time.
    """
    figure, grid = plt.subplots(len(words), figsize=(7.2, 1.3 * len(words)), sharex=True, layout="constrained")
    for axes, word in zip(grid, words, strict=True):
        schedule = make_schedule(word, stages, microbatches)
        end = 0.0
        for tick in range(schedule.length):
            for part, colour in PARTS.items():
                here = schedule.ticks.get(part)
                if here is None or not (here == tick).any():
                    continue
                width = 2.0 if part == BACKWARD and WEIGHTS not in schedule.ticks else 1.0
                for item, stage in zip(*(here == tick).nonzero(), strict=True):
                    axes.add_patch(
                        Rectangle((end, stage), width, 0.9, facecolor=colour, edgecolor="white", linewidth=0.5)
                    )
                    axes.text(end + width / 2, stage + 0.47, str(item + 1), ha="center", va="center", fontsize=6,
                              color="white")  # fmt: skip
                end += width
        axes.set(ylim=(stages, -0.1), yticks=[stage + 0.45 for stage in range(stages)])
        axes.set_yticklabels([f"stage {stage + 1}" for stage in range(stages)])
        axes.set_title(f"{word}: {end:g}", loc="left", weight="bold")
        axes.autoscale_view(scaley=False)
    grid[-1].set_xlabel("time, in forward parts of one stage and one microbatch")
    return figure


if __name__ == "__main__":
    main()
