"""No block of a page goes unchecked: code is executed by a test, commands exist, and the rest is marked as text.

The word behind a fence says what a block is:

python   executed; EXECUTED names the test and how many blocks it runs, so a new block without a test fails here
toml     a plan that loads (tests/docs/test_plans_page.py, tests/test_readme.py)
yaml     what another system reads; compared with the action and the hooks below
json     a job of NVFlare, which its simulator runs (tests/integrations/test_nvflare.py)
diff     a drill (tests/test_drills.py)
bash     commands; their names, options, extras and files exist (below), and other tests run some of them
text     what was printed, or a formula
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
import typer
import yaml
from tests.docs.pages import PAGES, ROOT, Block, blocks_of, prose_of

from unmask.cli import app

# (page, test) → how many blocks of the page the test runs.
EXECUTED = {
    ("README.md", "tests/test_readme.py"): 2,
    ("docs/evidence-format.md", "tests/docs/test_code.py"): 1,
    ("docs/flower.md", "tests/docs/test_code.py"): 2,
    ("docs/flower.md", "tests/integrations/flower/test_flowertune.py"): 1,
    ("docs/i-have.md", "tests/docs/test_sheet.py"): 2,
    ("docs/models.md", "tests/docs/test_models_page.py"): 2,
    ("docs/nvflare.md", "tests/integrations/test_nvflare.py"): 1,
    ("docs/plans.md", "tests/docs/test_code.py"): 1,
    ("docs/queries.md", "tests/docs/test_code.py"): 1,
    ("docs/scale.md", "tests/docs/test_code.py"): 1,
    ("docs/trainer.md", "tests/integrations/trainer/test_docs_trainer.py"): 1,
    ("docs/vectors.md", "tests/docs/test_vectors_page.py"): 1,
    ("docs/verify.md", "tests/docs/test_code.py"): 1,
}
PLANS = {"README.md", "docs/plans.md", "docs/tutorial.md"}
KINDS = {"python", "toml", "yaml", "json", "diff", "bash", "text"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Commands of the system that need no check of ours.
OTHERS = {"python3", ".", "mkdir", "ray", "exit", "echo", "true", "printf"}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def test_every_block_says_what_it_is():
    assert len(BLOCKS) > 40
    assert not [(block.page, block.kind, block.text[:60]) for block in BLOCKS if block.kind not in KINDS]


def test_every_python_block_is_executed():
    counts = Counter(block.page for block in BLOCKS if block.kind == "python")
    executed: Counter[str] = Counter()
    for (page, _), number in EXECUTED.items():
        executed[page] += number
    assert counts == executed
    for page, test in EXECUTED:
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not read {page}"


def test_every_plan_is_loaded_and_every_drill_done():
    assert {block.page for block in BLOCKS if block.kind == "toml"} == PLANS
    assert {block.page for block in BLOCKS if block.kind == "diff"} == {"docs/architecture.md"}


def test_no_code_hides_in_indented_blocks():
    """Formulas may be indented; code and commands are fenced."""
    code = re.compile(r"^ {4,}(?:import |from \w+ import|unmask |pip |make |\$ )", re.M)
    assert not [page.name for page in PAGES if code.search(prose_of(page))]


def test_yaml_names_what_the_action_and_the_hooks_have():
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))}
    seen = 0
    for block in BLOCKS:
        if block.kind != "yaml":
            continue
        match yaml.safe_load(dedent(block.text)):
            case {"repos": [{"hooks": named}]}:
                assert {hook["id"] for hook in named} <= hooks
            case [_, {"uses": str(uses), "with": inputs}]:
                assert uses.startswith("unmask-audit/unmask@")
                assert set(inputs) <= set(action["inputs"])
            case other:
                pytest.fail(f"{block.page}: nobody checks {other}")
        seen += 1
    assert seen == 2


def test_commands_exist():
    blocks = [block for block in BLOCKS if block.kind == "bash"]
    assert len(blocks) > 15
    assert not [fault for block in blocks for fault in faults_of(block)]


def faults_of(block: Block) -> list[str]:
    """What a block of commands names and nobody has."""
    faults = []
    for line in block.text.splitlines():
        for command in re.split(r"&&|\|\||;", re.sub(r"(^|\s)#.*", "", line)):
            words = shlex.split(command)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words:
                faults += [f"{block.page}: {command.strip()}: {fault}" for fault in check_command(words)]
    return faults


def check_command(words: list[str]) -> list[str]:
    match words:
        case ["unmask", *rest]:
            return check_unmask(rest)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            return [f"no target {name}" for name in targets if not re.search(rf"^{name}:", makefile, re.M)]
        case ["pip", "install", *rest]:
            extras = {name for word in rest for part in re.findall(r"\[([\w,]+)\]", word) for name in part.split(",")}
            return [f"no extra {name}" for name in extras - set(PROJECT["optional-dependencies"])]
        case ["cp", source, _]:
            return [] if (ROOT / source).is_file() else [f"no file {source}"]
        case [name, *_] if name in OTHERS:
            return []
    return ["unknown command; check it here, or mark the block as text"]


@cache
def _whole_command() -> typer.core.TyperGroup:
    return typer.main.get_command(app)


def check_unmask(words: list[str]) -> list[str]:
    """Options and commands that the command line lacks."""
    command = _whole_command()
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return [f"no command {words[0]}"]
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.split("=")[0] for word in words if re.match(r"-{1,2}[a-zA-Z]", word)]
    return [f"no option {option}" for option in given if option not in known]


# The rules can be broken


@pytest.mark.parametrize(
    "text",
    [
        "unmask undo",
        "unmask recover text x.safetensors --modell y",
        "unmask audit plan.toml; unmask report runs --gates",
        "make coffee",
        "pip install '.[models,wings]'",
        "cp examples/nowhere.yml x",
        "curl https://example.org",
    ],
)
def test_a_wrong_command_is_seen(text):
    assert faults_of(Block("page", "bash", text))


@pytest.mark.parametrize("text", ["RAY_ADDRESS=A:1 unmask audit plan.toml --out runs/a # here", "make demo"])
def test_a_right_command_passes(text):
    assert not faults_of(Block("page", "bash", text))
