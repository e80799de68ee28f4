"""The compiled program on a plan's page: its figures beside the estimate."""

import re
from dataclasses import replace

from autoshard._units import bytes_text, ratio_text, time_text
from autoshard.sharding.report.page import page
from autoshard.sharding.report.page.compiled import audit_of, compiled_section
from tests.sharding.report.page.plans import compiled, searched


def rows(html):
    """Return the cells of each row of the first table."""
    body = html[html.index("<tbody>") : html.index("</tbody>")]
    return [[re.sub("<[^>]*>", "", cell) for cell in row.split("</td>")[:-1]] for row in body.split("</tr>")[:-1]]


def test_each_figure_is_named_for_what_it_is():
    plan = compiled()
    here = plan.estimate
    found = rows(compiled_section(plan))
    ratio = ratio_text(1000.0, here.step_time_us)
    words = "compute and exposed communication"
    assert found[0] == ["step time", time_text(here.step_time_us), "1.00 ms", ratio, words]
    assert found[1][:3] == ["compute", time_text(here.compute_us), "900 us"]
    assert found[1][4] == "by the compiler&#x27;s cycles" and found[2][1:3] == ["-", "300 us"]
    assert found[2][4].startswith("by a roofline")
    assert ["peak memory", bytes_text(here.peak_memory_bytes), "11.0 MiB"] in [row[:3] for row in found]


def test_a_peak_below_the_temporaries_is_explained():
    text = compiled_section(compiled())
    assert "12.0 MiB temporaries, an upper bound" in text
    assert "The peak is below arguments and temporaries together, because not all temporaries are alive at once" in text
    audit = compiled().audits[1]
    larger = replace(audit, memory={**audit.memory, "peak": 14 * 2**20})
    assert "The peak is below" not in compiled_section(compiled().where(audits=(larger,)))
    unreported = replace(audit, memory={**audit.memory, "peak": 0})
    assert "The compiler reports no peak" in compiled_section(compiled().where(audits=(unreported,)))


def test_every_audit_is_shown_under_the_name_of_its_plan():
    text = page(compiled())
    assert audit_of(compiled()) is compiled().audits[1]
    assert "Audit of dp:8 in full" in text and f"Audit of {compiled().audits[1].strategy} in full" in text
    assert compiled_section(searched()) == "" and "Compiled program" not in page(searched())
    assert 'see <a href="#compiled">the compiled program</a>' in text
