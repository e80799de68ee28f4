"""The programs and commands of the README, of the pages of docs/ and of docstrings run, and links are valid.

Long ones run in `make test-all` only.
"""

import doctest
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from autoshard.commands.plan import PlanCommand
from autoshard.spmdrules.core import registry
from autoshard.train.config.command_line import parse_config
from autoshard.train.config.train_config import TrainConfig
from tests.pages import Block, blocks, differences, run_blocks

ROOT = Path(__file__).resolve().parent.parent
PAGES_WITH_PROGRAMS = ("README.md", "docs/your-code.md")
EXAMPLES = [
    (page, example)
    for page in PAGES_WITH_PROGRAMS
    for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]
# Pages whose blocks are run one after the other.
COURSES = [page for folder in ("tutorials", "coming-from") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
RUN = [page for page in COURSES if any(block.source is None for block in blocks(page))]
DOCUMENTED = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "autoshard").rglob("*.py"))
    if ">>> " in file.read_text()
]
# Their examples compile models, as the tests of these modules do.
LONG = {
    "autoshard.models.decoder.decoder", "autoshard.models.moe", "autoshard.models.vision.tower", "autoshard.models.vit",
    "autoshard.models.wide_resnet", "autoshard.serve.engine",
}  # fmt: skip
LONG_PAGES = ("long-sequences", "own-rule", "pipeline")  # tests of the package plan and run such programs too


@pytest.fixture
def own_registry(monkeypatch):
    """Registers the rules of a page in a copy of the registry."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


# Programs that save and restore are not left out: a fault in them loses a reader's work.
@pytest.mark.parametrize(
    ("page", "example"),
    [
        pytest.param(page, example, id=page, marks=[] if ".latest()" in example else [pytest.mark.few(3)])
        for page, example in EXAMPLES
    ],
)
def test_the_programs_of_a_page_run(page, example, own_registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2 if ".latest()" in example else 1):  # the second run restores what the first one saved
        exec(compile(example, str(tmp_path / "example.py"), "exec"), {"__name__": "example"})


def test_pages_have_programs():
    assert {page for page, _ in EXAMPLES} == set(PAGES_WITH_PROGRAMS)


def _marks(page: Path, *, slow: bool) -> list[pytest.MarkDecorator]:
    words = {word for block in blocks(page) for word in block.marks} if slow else set()
    words |= {"slow"} if page.stem in LONG_PAGES else set()
    return [getattr(pytest.mark, word) for word in sorted(words)]


@pytest.mark.parametrize(
    ("page", "slow"),
    [
        pytest.param(page, slow, marks=_marks(page, slow=slow), id=f"{page.stem}{'-slow' if slow else ''}")
        for page in RUN
        for slow in (False, True)
        if any(bool(block.marks) == slow and block.source is None for block in blocks(page))
    ],
)
def test_a_page_runs_from_top_to_bottom_and_prints_what_it_shows(page, slow, tmp_path, own_registry):
    compared = 0
    for block, printed in run_blocks(page, tmp_path, slow=slow):
        assert not differences(block, printed), differences(block, printed)
        compared += block.output is not None
    assert compared > 0


def test_every_page_is_run_or_shows_an_example():
    silent = [page.name for page in COURSES if not blocks(page)]
    assert silent == ["index.md"] * 2


def test_another_output_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1, 2)\n```\n\n```text\n1 ...\n```\n\n```sh\necho 3\n```\n\n```text\n4\n```\n")
    [right, wrong] = [differences(block, printed) for block, printed in run_blocks(page, tmp_path, slow=False)]
    assert right == "" and wrong.startswith("page.md:10 prints something else")


@pytest.mark.parametrize(
    "block",
    [block for page in COURSES for block in blocks(page) if block.source is not None],
    ids=lambda block: f"{block.page.stem}:{block.line}",
)
def test_a_block_of_an_example_is_a_part_of_it(block: Block):
    assert block.source is not None and block.text in block.source.read_text()


COMMANDS = [
    (name, options)
    for page in COURSES
    for block in blocks(page)
    if block.language == "sh"
    for name, options in re.findall(
        r"autoshard (?:launch .* -- )?(train|plan) +(--[^|>&]*)", block.text.replace("\\\n", " ")
    )
]


@pytest.mark.parametrize(("name", "options"), COMMANDS)
def test_the_options_of_a_command_exist(name, options):
    """What `make test` checks of the commands that it does not run."""
    config = parse_config(shlex.split(options), {"train": TrainConfig, "plan": PlanCommand}[name], name, "")
    assert (config.run_dir is not None) == (name == "train")


def test_the_readme_is_read_in_three_minutes():
    """Adults read about 240 words of English per minute (Brysbaert 2019). Tables and code count as words too."""
    assert len((ROOT / "README.md").read_text().split()) <= 3 * 240


@pytest.mark.parametrize(
    "module", [pytest.param(module, marks=pytest.mark.slow if module in LONG else ()) for module in DOCUMENTED]
)
def test_docstring_examples_run(module):
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def test_links_between_documents_are_valid():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", _without_code(page.read_text()))
        if not (page.parent / target).exists()
    ]
    assert broken == []


TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
OURS, OTHERS = TROUBLES.split("## Errors of JAX and XLA\n\n")
MESSAGES = re.findall(r"^\*\*`(.*)`\*\*$", OURS, re.MULTILINE)


@pytest.fixture(scope="module")
def templates() -> str:
    """The source of the package, with its texts in one line each and … in the place of their values."""
    source = "".join(file.read_text() for file in (ROOT / "autoshard").rglob("*.py"))
    return re.sub(r"\{[^{}\n]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", source))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_of_troubles_is_in_the_source(message, templates):
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert max(map(len, parts)) >= 12, "the fixed part is too short to find a message by"
    assert re.search(".*".join(map(re.escape, parts)), templates)


def test_the_page_of_troubles_has_the_frequent_messages():
    assert len(MESSAGES) == len(set(MESSAGES)) >= 35
    assert len(re.findall(r"^\*\*`", OTHERS, re.MULTILINE)) >= 6


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("jax._src.tpu_custom_call", "Mosaic kernels cannot be automatically partitioned"),
        ("jax._src.array", "Array has been deleted with shape="),
        ("jax._src.interpreters.mlir", "Some donated buffers were not usable"),
        ("jax._src.errors", "Attempted boolean conversion of "),
    ],
)
def test_a_message_of_jax_is_that_of_this_version(module, message):
    specification = importlib.util.find_spec(module)
    assert specification is not None and specification.origin is not None
    assert message in OTHERS and message in re.sub(r'"\s*f?"', "", Path(specification.origin).read_text())
