"""Rules of the house, read off the source: layers, the fence, nothing executable, small files, few dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import unmask

PACKAGE = Path(unmask.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = Path(__file__).parents[1]

# Each layer imports only from itself and from layers before it.
LAYERS = (
    *(
        "shapes",
        "errors",
        "wording",
        "arguments",
        "whole_files",
        "safe_text",
        "progress",
        "displays",
        "specs",
        "recovery",
        "channels",
        "metrics",
        "linalg",
        "solvers",
        "models",
        "evidence",
        "protocols",
        "proof",
        "defences",
        "observe",
        "attacks",
        "verification",
        "scores",
    ),
    *("audit.cases", "audit.findings", "audit.channels", "audit.check", "audit.plan", "audit.running", "audit.run"),
    *("audit", "report", "plot", "integrations", "terminal", "demo", "cli"),
)
SECRETS_SIDE = frozenset({"protocols", "defences", "observe", "scores", "audit", "report"})
SECRET_WORDS = re.compile(r"\b(truth|target|reference)\b", re.IGNORECASE)
# Attacks that still say themselves what is certain: of prompts, vectors, inputs and weights. No new one may.
DECIDE_THEMSELVES = frozenset(
    {
        *("baselines/dager_claim", "gradients/pairs/attack"),
        *("outputs/first_attention/attack", "outputs/prompts/claim", "outputs/prompts/encoder_claim"),
        "outputs/vectors/claim",
        *(f"outputs/layer_inputs/{name}" for name in ("attention_stack", "claim", "stack")),
        *("queries/claims", "queries/networks/relu_network", "queries/networks/transformer", "queries/one_head/signs"),
        *("queries/output_layer/attack", "queries/samples"),
    }
)
# A chapter of a room. Longer files hold two of them.
MAX_LINES = 600
VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "manager", "base"})
EXTRAS = ("gguf", "accelerate", "matplotlib", "flwr", "opacus", "ray", "peft", "rouge_score", "hypothesis")
EXTRAS += ("nvflare",)
# Libraries of vector databases.
EXTRAS += ("faiss", "chromadb", "qdrant_client", "lancedb", "pyarrow", "sentence_transformers")
EXTRAS += ("langchain_core", "llama_index")
# Modules that are about an extra and cannot be imported without it.
NEED_EXTRAS = frozenset(
    {
        *(f"unmask.integrations.flower{part}" for part in ("", ".messages")),
        "unmask.integrations.nvflare",
        *("unmask.protocols.dpsgd", "unmask.protocols.lora", "unmask.audit.running.ray_engine"),
    }
)


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parse(source: str) -> tuple[ast.AST, ...]:
    """Every node of a source, the module first."""
    return tuple(ast.walk(ast.parse(source)))


def module_name(path: Path) -> str:
    parts = ("unmask", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """The layer of a module; None for the package itself, which only names what is public and starts the command."""
    parts = module.removesuffix(".__main__").split(".")[1:]
    room = ".".join(parts[:2])
    return room if room in LAYERS else parts[0] if parts else None


def imported_modules(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Modules of unmask that a source imports, relative imports resolved; `from unmask import x` gives unmask.x."""
    for node in parse(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = module.split(".")
            kept = len(home) - node.level + is_package
            start = ".".join([*home[:kept], node.module or ""]).strip(".") if node.level else node.module or ""
            names = [f"{start}.{alias.name}" for alias in node.names] if start == "unmask" else [start]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "unmask")


def layer_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of a source from layers that come after its own, or that have no place in the list."""
    own = layer_of(module)
    if own is None:
        return []
    order = {name: place for place, name in enumerate(LAYERS)}
    if own not in order:
        return [f"{module} is in no layer"]
    faults = []
    for imported in imported_modules(source, module, is_package):
        layer = layer_of(imported)
        if layer == "__version__":
            continue
        if layer is None or order.get(layer, len(order)) > order[own]:
            faults.append(f"{module} imports {imported}")
    return faults


def fence_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What an attack must not hold: imports of the secret's side, and words for the secret."""
    faults = [
        f"{module} imports {imported}"
        for imported in imported_modules(source, module, is_package)
        if str(layer_of(imported)).split(".")[0] in SECRETS_SIDE
    ]
    lines = enumerate(source.splitlines(), start=1)
    return faults + [
        f"{module}, line {number}: '{match[0]}'" for number, line in lines for match in SECRET_WORDS.finditer(line)
    ]


def dangerous_calls(source: str) -> list[str]:
    """What could run code that was read: pickle, torch.load, eval and exec, code that comes with a model."""
    faults = []
    for node in parse(source):
        match node:
            case ast.Import(names=names):
                faults += [alias.name for alias in names if alias.name.split(".")[0] in _PICKLERS]
            case ast.ImportFrom(module=str(module), names=names):
                faults += [module] if module.split(".")[0] in _PICKLERS else []
                faults += ["torch.load" for alias in names if (module, alias.name) == ("torch", "load")]
            case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" as name)):
                faults.append(name)
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                faults.append("torch.load")
            case ast.keyword(arg="trust_remote_code", value=value) if not _is_false(value):
                faults.append("trust_remote_code")
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                faults += [
                    "trust_remote_code"
                    for key, value in pairs
                    if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and not _is_false(value)
                ]
    return faults


_PICKLERS = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"})


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


# The rules


def test_layers_import_only_from_above():
    assert not [
        fault for path in FILES for fault in layer_faults(read(path), module_name(path), path.name == "__init__.py")
    ]


def test_attacks_never_see_the_secret():
    room = [path for path in FILES if "attacks" in path.relative_to(PACKAGE).parts]
    assert len(room) > 50
    assert not [
        fault for path in room for fault in fence_faults(read(path), module_name(path), path.name == "__init__.py")
    ]


def test_nothing_that_is_read_is_executed():
    assert not {path.name: calls for path in FILES if (calls := dangerous_calls(read(path)))}


def test_every_module_says_what_it_is():
    assert not [path for path in FILES if not (ast.get_docstring(parse(read(path))[0]) or "").strip()]


def test_files_that_comments_name_exist():
    folders = [PACKAGE, *(ROOT / name for name in ("benchmarks", "docs", "examples", "tests"))]
    known = {str(path) for folder in folders for path in folder.rglob("*.py")}
    named = {(path.name, name) for path in FILES for name in re.findall(r"`([\w/]+\.py)`", read(path))}
    assert len(named) > 20
    assert not [pair for pair in named if not any(path.endswith(f"/{pair[1]}") for path in known)]


def test_a_file_is_about_one_thing():
    lengths = {str(path.relative_to(PACKAGE)): len(read(path).splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_names_of_modules_say_something():
    assert not [path for path in FILES if VAGUE_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)]


def test_transformers_is_imported_only_where_it_is_used():
    """It takes as long as torch, and every command and every worker would wait for it."""

    def names(node: ast.stmt) -> list[str]:
        return [str(node.module)] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]

    early = {
        path.parent.name
        for path in FILES
        for node in ast.parse(read(path)).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.startswith("transformers") for name in names(node))
    }
    assert early == {"trainer"}  # a callback of theirs


def test_the_core_and_every_public_name_can_be_had_without_any_extra():
    """In a fresh process in which no extra can be found, as on a machine where only the core was installed."""
    modules = [name for name in map(module_name, FILES) if name not in NEED_EXTRAS and not name.endswith("__main__")]
    public = "for name in unmask.__all__: getattr(unmask, name)"
    done = run_without(EXTRAS, "\n".join([*(f"import {module}" for module in modules), public, "print('imported')"]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("imported")


def run_without(packages: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run code where the path's finder does not find these packages; looking for them is answered with 'none'."""
    blocker = textwrap.dedent(
        f"""
        import sys
        from importlib.machinery import PathFinder

        class Blocker(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name.split(".")[0] in {packages!r}:
                    return None
                return super().find_spec(name, path, target)

        sys.meta_path[:] = [Blocker if finder is PathFinder else finder for finder in sys.meta_path]
        """
    )
    return subprocess.run([sys.executable, "-c", blocker + code], capture_output=True, text=True, timeout=120)


# The rules can be broken


def test_the_files_were_found():
    names = {str(path.relative_to(PACKAGE)) for path in FILES}
    assert {"__init__.py", "recovery.py", "linalg/subspace.py", "attacks/gradients/decoder/attack.py"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "from unmask.attacks.recover import recover_text",
        "import unmask.attacks",
        "import os, unmask.cli as cli",
        "from unmask import attacks",
        "from ..attacks import text",
        "def late():\n    from unmask.report import html",
        "import unmask",
        "from unmask.nowhere import x",
    ],
)
def test_an_import_from_below_is_seen(source):
    assert layer_faults(source, "unmask.models.gpt2")


@pytest.mark.parametrize(
    "source",
    [
        "from unmask.models.adapter import Model",
        "from .adapter import Model",
        "from unmask.shapes import Rows",
        "from unmask import errors",
        "import unmask.linalg.gap",
        "import torch",
        "from unmasked import attacks",
    ],
)
def test_an_import_from_above_is_fine(source):
    assert not layer_faults(source, "unmask.models.gpt2")


def test_a_module_of_no_layer_is_seen():
    assert layer_faults("", "unmask.datasets.fables")


def test_relative_imports_of_packages_are_resolved():
    assert list(imported_modules("from .gap import Gap", "unmask.linalg", is_package=True)) == ["unmask.linalg.gap"]
    assert list(imported_modules("from ..scores import x", "unmask.attacks", is_package=True)) == ["unmask.scores"]
    assert list(imported_modules("from ..scores import x", "unmask.attacks.recover")) == ["unmask.scores"]


@pytest.mark.parametrize(
    "source",
    [
        "from unmask.protocols import observe_gradients",
        "from unmask.scores.tokens import score_texts",
        "def attack():\n    import unmask.audit.cases.case",
        "from ..defences import noise",
        "best = distance(rows, truth)",
        "# compare with the Target",
        '"""The reference batch."""',
    ],
)
def test_a_hole_in_the_fence_is_seen(source):
    assert fence_faults(source, "unmask.attacks.recover")


@pytest.mark.parametrize(
    "source",
    ["from unmask.evidence import Task", "num_targets = 3", "# preferences, truthful", "from unmask.linalg import gap"],
)
def test_what_the_fence_lets_through(source):
    assert not fence_faults(source, "unmask.attacks.recover")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.memory",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec(text)",
        "load(name, trust_remote_code=True)",
        "load(name, trust_remote_code=flag)",
        "options = {'trust_remote_code': True}",
    ],
)
def test_a_dangerous_call_is_seen(source):
    assert dangerous_calls(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "load(name, trust_remote_code=False)",
        "options = {'trust_remote_code': False}",
        "message = 'it is a pickle or a torch.load archive'",
        "from safetensors.torch import load_file",
        "import re\nre.compile('x')",
    ],
)
def test_harmless_calls_pass(source):
    assert not dangerous_calls(source)


def test_the_blocker_blocks():
    assert run_without(("safetensors",), "import safetensors").returncode != 0
    found = run_without(EXTRAS, f"import importlib.util as u; print(*{{u.find_spec(name) for name in {EXTRAS!r}}})")
    assert found.stdout.strip() == "None"


def _decides(path: Path) -> bool:
    """Whether a module gives a recovery the status RECOVERED, and does not only ask for it."""
    nodes = parse(read(path))
    asked = {id(part) for node in nodes if isinstance(node, ast.Compare) for part in ast.walk(node)}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "RECOVERED"
        and isinstance(node.value, ast.Name)
        and node.value.id == "Status"
        and id(node) not in asked
        for node in nodes
    )


def test_updates_of_clients_are_decided_in_the_proof_alone():
    attacks = PACKAGE / "attacks"
    deciding = {str(path.relative_to(attacks).with_suffix("")) for path in attacks.rglob("*.py") if _decides(path)}
    assert deciding == DECIDE_THEMSELVES
    assert _decides(PACKAGE / "proof" / "conclusions.py")


def test_the_proof_imports_no_attack():
    imported = {
        node.module or ""
        for path in (PACKAGE / "proof").rglob("*.py")
        for node in parse(read(path))
        if isinstance(node, ast.ImportFrom)
    }
    assert len(imported) > 20
    assert not [name for name in imported if name.startswith("unmask.attacks")]
