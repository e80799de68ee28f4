"""A plan as one self-contained HTML page: `plan.to_html(path)`.

The page makes no external request, and its Content-Security-Policy forbids them, so it can be mailed or kept with a
run. The policy allows one script, by its digest: a name from a program can never run as a script.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from autoshard._html.document import Part, document, sections
from autoshard._html.parts import folded
from autoshard._units import line_text
from autoshard.errors import PlanError
from autoshard.sharding.plan.gather_words import WORDS
from autoshard.sharding.plan.overlap_words import overlap_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.compiler_options import option_texts
from autoshard.sharding.report.kernel_blocks import kernel_texts
from autoshard.sharding.report.page.compiled import compiled_section
from autoshard.sharding.report.page.costs import collectives_section, memory_section, time_section
from autoshard.sharding.report.page.headline import headline
from autoshard.sharding.report.page.mesh import legend, mesh_section
from autoshard.sharding.report.page.parts import AxisLabels
from autoshard.sharding.report.page.script import SCRIPT
from autoshard.sharding.report.page.search import search_section
from autoshard.sharding.report.page.style import STYLE
from autoshard.sharding.report.page.tensors import tensors_section
from autoshard.sharding.report.pipeline_texts import pipeline_texts
from autoshard.sharding.report.summary import padding_texts, title, unknown_text


def to_html(plan: ShardingPlan, path: Any) -> None:
    """Write the plan as one self-contained HTML page.

    After `verify=k`, the page shows the figures of the compiled program beside the estimate. An audit from
    `Plan.verify` is shown by `plan.where(audits=(plan.verify(),)).to_html(path)`.

    Args:
        plan: The plan.
        path: The file to write.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        Path(path).write_text(page(plan), encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"to_html: '{path}' cannot be written: {error.strerror}. Give a file in a folder that exists"
        ) from error


def page(plan: ShardingPlan) -> str:
    """Return the HTML of the page."""
    style, parts = plan_parts(plan)
    body = f"{headline(plan)}{sections(parts)}"
    return document(f"Plan: {title(plan)}", STYLE + style, body, [SCRIPT])


def plan_parts(plan: ShardingPlan) -> tuple[str, list[Part]]:
    """Return the colours of the plan's logical axes as a style sheet, and the sections of the page.

    The sections need `STYLE`, and `SCRIPT` for their search fields.
    """
    paint = AxisLabels(plan)
    return paint.style, [
        ("mesh", "Mesh", mesh_section(plan, paint),
         "The devices of the machine, once for each mesh axis: one group along the axis is blue."),
        ("axes", "Logical axes", legend(paint) if paint.number else "",
         "Each tensor dimension is one of these. Click one to show the tensors that have it."),
        ("compiled", "Compiled program", compiled_section(plan),
         "What the target's compiler made of the plan, beside the estimate. The program was not run."),
        ("time", "Step time", time_section(plan),
         "Estimated by the cost model. Exposed communication is not hidden by compute."),
        ("memory", "Memory per device", memory_section(plan), "Estimated by the cost model, at the peak of a step."),
        ("search", "Search", search_section(plan), ""),
        ("collectives", "Collectives per step", collectives_section(plan, paint),
         "Bytes that each device sends, and the source line that causes it."),
        ("tensors", "Tensors", tensors_section(plan, paint),
         "Each dimension has the colour of its logical axis. Filled: sharded by a mesh axis. Dashed: sharded in "
         "storage only, gathered for use. Click a name for the reasons and all paths."),
        ("notes", "Notes", _notes(plan), ""),
    ]  # fmt: skip


def _notes(plan: ShardingPlan) -> str:
    notes = [
        f"No rule for primitive <code>{escape(name)}</code>, at {escape(', '.join(map(line_text, places)))}: "
        f"{escape(unknown_text(name))}."
        for name, places in plan.unknown.items()
    ]
    notes += [escape(f"Kernels: {record}.") for record in plan.kernels]
    notes += map(escape, [*plan.notes, *padding_texts(plan)])
    notes += [escape(text[:1].upper() + text[1:]) + "." for text in (*kernel_texts(plan), *option_texts(plan))]
    if plan.gather:
        notes.append(f"Parameters are gathered in the order <code>{escape(plan.gather)}</code>: "
                     f"{escape(WORDS[plan.gather])}.")  # fmt: skip
    if plan.stages > 1:
        notes.append(f"Pipeline: {', '.join(pipeline_texts(plan))}.")
    elif plan.microbatches > 1:
        notes.append(
            f"The step runs on {plan.microbatches} microbatches, one after the other. Their sums are accumulated."
        )
    if plan.overlap:
        notes.append(f"Overlap by module: <code>{escape(overlap_text(plan.overlap))}</code>.")
    for platform, options in plan.compiler_options.items():
        listed = "".join(f"<li><code>{escape(k)}={escape(str(v))}</code></li>" for k, v in options.items())
        if listed:
            count = f"{len(options)} compiler option{'s' * (len(options) > 1)}"
            notes.append(folded(f"{count} for {escape(platform)}", f"<ul>{listed}</ul>"))
    listed = "".join(f"<li>{n}</li>" for n in notes)
    return f"<ul>{listed}</ul>" if listed else ""
