"""Plans: every combination once, canonical texts, gates where they stand, and a message for every mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.audit.made import WORDS, make_plan, write_plan

from unmask.audit.plan import Plan, load_plan
from unmask.errors import InputError

GROUP = """
[[gradients]]
models = ["b", "a"]
data = ["notes"]
batch_sizes = [1, 4]
protocols = ["fedsgd", "fedavg: local_steps = 4"]
defences = ["none", "noise:sigma=1e-03", ["clip:norm=1.0", "int8"]]
seeds = [0, 1, 2]
"""
SERVICE = '[[queries]]\nsecrets = ["random:heads=1,width=4", "output-layer"]\nmodels = ["a"]\n'


def test_a_group_is_the_product_of_its_lists(tmp_path):
    plan = make_plan(tmp_path, GROUP)
    assert len(plan.cases) == 2 * 2 * 2 * 3 * 3
    assert len({case.id for case in plan.cases}) == len(plan.cases)
    assert {tuple(case["defences"]) for case in plan.cases} == {(), ("noise:sigma=0.001",), ("clip:norm=1", "int8")}
    assert {case["protocol"] for case in plan.cases} == {"fedsgd", "fedavg:local_steps=4"}


def test_models_stay_together_in_the_order_of_the_file(tmp_path):
    again = '[[outputs]]\nmodels = ["c", "b"]\n'
    plan = make_plan(tmp_path, GROUP, again)
    order = [case["model"] for case in plan.cases]
    assert order == sorted(order, key="bac".index)
    assert plan.models == ["b", "a", "c"]


def test_what_is_not_said_has_defaults(tmp_path):
    (case,) = make_plan(tmp_path, '[[gradients]]\nmodels = ["m"]\n').cases
    assert case.spec == {
        "channel": "gradients",
        "model": "m",
        "dtype": "float32",
        "batch_size": 4,
        "task": "default",
        "protocol": "fedsgd",
        "clients": 1,
        "defences": [],
        "attack": "default",
        "seed": 0,
        "data": case["data"],
    }
    assert case["data"]["name"] == "invented"


def test_a_specification_carries_the_hash_of_its_data(tmp_path):
    first = make_plan(tmp_path, GROUP)
    assert first.data["notes"].texts == WORDS
    assert first.cases[0]["data"] == {"name": "notes", "sha256": first.data["notes"].sha256}
    (tmp_path / "notes.txt").write_text("\n".join(reversed(WORDS)))
    assert not {case.id for case in load_plan(tmp_path / "plan.toml").cases} & {case.id for case in first.cases}


def test_another_spelling_is_the_same_case(tmp_path):
    first = make_plan(tmp_path, GROUP)
    second = make_plan(tmp_path, GROUP.replace("1e-03", "0.001").replace(": local_steps = 4", ":local_steps=4"))
    assert [case.id for case in first.cases] == [case.id for case in second.cases]
    assert first.sha256 != second.sha256


def test_random_heads_have_no_model_and_occur_once(tmp_path):
    plan = make_plan(tmp_path, SERVICE.replace('["a"]', '["a", "b"]'))
    assert [(case["secret"], case["model"]) for case in plan.cases] == [
        *(("random:heads=1,width=4", ""), ("output-layer", "a"), ("output-layer", "b")),
    ]


def test_lines_of_cases(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('title = "x"\n\n[[queries]]\nsecrets = ["random:heads=1,width=4"]\n\n  [[ queries ]]\n')
    path.write_text(path.read_text() + 'secrets = ["random:heads=2,width=4"]\n')
    assert [case.line for case in load_plan(path).cases] == [3, 6]


def test_the_title_is_the_name_of_the_file_unless_given(tmp_path):
    assert make_plan(tmp_path, SERVICE).title == "plan"
    assert make_plan(tmp_path, SERVICE, top='title = "Ours"').title == "Ours"


# ---- gates


def test_gates_stand_over_groups_without_their_own(tmp_path):
    own = SERVICE.replace("output-layer", "random:heads=2,width=4") + 'gates = ["no weights"]\n'
    plan = make_plan(tmp_path, GROUP, own, top='gates = ["no exact text", "rouge2 < 0.1"]')
    assert {case.gates for case in plan.cases if case["channel"] == "gradients"} == {("no exact text", "rouge2 < 0.1")}
    assert {case.gates for case in plan.cases if case["channel"] == "queries"} == {("no weights",)}


def test_a_gate_stands_only_over_cases_that_have_its_metric(tmp_path):
    plan = make_plan(tmp_path, GROUP, SERVICE, top='gates = ["no exact text", "no weights", "no hidden size"]')
    gates = {(case["channel"], case.spec.get("secret")): case.gates for case in plan.cases}
    assert gates == {
        ("gradients", None): ("no exact text",),
        ("queries", "random:heads=1,width=4"): ("no weights",),
        ("queries", "output-layer"): ("no weights", "no hidden size"),
    }


def test_a_case_of_two_groups_stands_under_the_gates_of_both(tmp_path):
    loose = '[[gradients]]\nmodels = ["m"]\ngates = []\n'
    strict = '[[gradients]]\nmodels = ["m"]\nseeds = [0, 1]\ngates = ["no exact text", "no token"]\n'
    strictest = '[[gradients]]\nmodels = ["m"]\ngates = ["no token", "rouge1 < 0.5"]\n'
    plan = make_plan(tmp_path, loose, strict, strictest)
    assert [case.gates for case in plan.cases] == [
        ("no exact text", "no token", "rouge1 < 0.5"),
        ("no exact text", "no token"),
    ]
    assert plan.cases[0].line == 4


# ---- mistakes


GRADIENTS = '[[gradients]]\nmodels = ["m"]\ndata = ["notes"]\n'
MISTAKES = {
    "nothing": ("", ("no case", "[[gradients]]")),
    "unknown part": ('[defaults]\nx = 1\n', ("'defaults'", "title, gates, time_limit, data")),
    "one bracket": ('[gradients]\nmodels = ["m"]\n', ("[[gradients]]", "two brackets")),
    "unknown list": (GRADIENTS + "layers = [1]\n", ("[[gradients]] in line 4", "'layers'", "batch_sizes")),
    "singular": ('[[gradients]]\nmodel = "m"\n', ("line 4", "'model'", "models")),
    "no models": ("[[gradients]]\nseeds = [1]\n", ("models of [[gradients]] in line 4", "got nothing")),
    "no list": ('[[gradients]]\nmodels = "m"\n', ("models of [[gradients]] in line 4", "a list", "'m'")),
    "empty list": (GRADIENTS + "seeds = []\n", ("seeds of [[gradients]] in line 4", "at least one entry", "[]")),
    "wrong seed": (GRADIENTS + "seeds = [0, -1]\n", ("seeds of [[gradients]] in line 4", "from 0 on", "-1")),
    "wrong size": (GRADIENTS + 'batch_sizes = ["4"]\n', ("batch_sizes of [[gradients]] in line 4", "'4'")),
    "wrong defence": (GRADIENTS + 'defences = ["noise"]\n', ("defences of [[gradients]] in line 4", "needs 'sigma'")),
    "wrong part": (GRADIENTS + 'defences = [["int8", "x"]]\n', ("defences of [[gradients]] in line 4", "'x'")),
    "wrong protocol": (GRADIENTS + 'protocols = ["fedavg:speed=1"]\n', ("protocols of [[grad", "no setting 'speed'")),
    "wrong secret": ('[[queries]]\nsecrets = ["x"]\n', ("secrets of [[queries]] in line 4", "'x'")),
    "no data": (GRADIENTS.replace("notes", "memos"), ("[[gradients]] in line 4", "'memos'", "invented, notes")),
    "small data": (GRADIENTS + "batch_sizes = [9]\n", ("line 4", "'notes' has 8 texts", "9")),
    "many clients": (GRADIENTS + "clients = [5]\n", ("line 4", "5 clients", "4 texts")),
    "clients of dpsgd": (GRADIENTS + 'clients = [2]\nprotocols = ["dpsgd"]\n', ("line 4", "dpsgd", "one client")),
    "task of fedavg": (
        GRADIENTS + 'tasks = ["masked-token"]\nprotocols = ["fedavg"]\n',
        ("line 4", "fedavg do not train for masked_token"),
    ),
    "names of states": (
        '[[outputs]]\nmodels = ["m"]\ndefences = ["withhold:pattern=x"]\n',
        ("[[outputs]] in line 4", "'withhold:pattern=x'", "no names"),
    ),
    "norm of logits": (
        SERVICE + 'defences = [["round:decimals=2", "norm:max_norm=3"]]\n',
        ("[[queries]] in line 4", "'norm:max_norm=3'", "'output-layer'"),
    ),
    "top of one number": (
        '[[queries]]\nsecrets = ["random:heads=1,width=4"]\ndefences = ["topk:k=3"]\n',
        ("[[queries]] in line 4", "'topk:k=3'", "'random:heads=1,width=4'"),
    ),
    "no model": ('[[queries]]\nsecrets = ["output-layer"]\n', ("[[queries]] in line 4", "'output-layer'", "models =")),
    "wrong gate": (GRADIENTS + 'gates = ["rouge2 < x"]\n', ("gates of [[gradients]] in line 4", "'rouge2 < x'")),
    "gates no list": (GRADIENTS + 'gates = "no token"\n', ("gates of [[gradients]] in line 4", "a list of texts")),
    "gate of elsewhere": (GRADIENTS + 'gates = ["no weights"]\n', ("line 4", "'no weights'", "do not have")),
    "gate of another secret": (
        '[[queries]]\nsecrets = ["random:heads=1,width=4"]\ngates = ["no hidden size"]\n',
        ("line 4", "'no hidden size'", "do not have"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_found_and_named(tmp_path, text, parts):
    path = write_plan(tmp_path / "plan.toml", text)
    with pytest.raises(InputError) as raised:
        load_plan(path)
    assert str(raised.value).startswith(f"{path}: ")
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("top", "part"),
    [
        ('gates = ["no weights"]', "no case has the gate 'no weights'"),
        ('gates = ["no hidden size"]', "no group measures hidden_size_found: add one that does"),
        ("gates = [3]", "gates must be a list of texts"),
        ("title = 3", "title must be a text"),
        ("queries = 3", "groups are written as [[queries]]"),
        ("queries = [3]", "groups are written as [[queries]]"),
    ],
)
def test_a_mistake_at_the_top(tmp_path, top, part):
    path = write_plan(tmp_path / "plan.toml", GRADIENTS, top=top)
    with pytest.raises(InputError, match=re.escape(part)):
        load_plan(path)


def test_a_gate_that_every_group_replaces_is_told_with_what_to_do(tmp_path):
    own = '[[queries]]\nsecrets = ["random:heads=1,width=4"]\ngates = ["weights_rate < 0.5"]\n'
    path = write_plan(tmp_path / "plan.toml", own, top='gates = ["no weights"]')
    with pytest.raises(
        InputError, match=r"have gates of their own \(line \d+\): add it there, or delete it from the top"
    ):
        load_plan(path)


def test_files_that_are_no_plans(tmp_path):
    with pytest.raises(InputError, match="there is no plan"):
        load_plan(tmp_path / "none.toml")
    with pytest.raises(InputError, match="cannot be read"):
        load_plan(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        load_plan(tmp_path / "binary.toml")
    (tmp_path / "open.toml").write_text('title = "Notes"\ngates = ["no exact text]\n\n[[gradients]]\n')
    with pytest.raises(InputError, match=r"line 2 is 'gates = \[\"no exact text\]', where a quote is not closed"):
        load_plan(tmp_path / "open.toml")
    (tmp_path / "broken.toml").write_text("[[gradients]\n")
    with pytest.raises(InputError, match=r"not TOML.*line 1"):
        load_plan(tmp_path / "broken.toml")


def test_data_that_is_missing_is_found_before_anything_runs(tmp_path):
    (tmp_path / "plan.toml").write_text('[data.notes]\nfile = "none.txt"\n' + GRADIENTS)
    with pytest.raises(InputError, match=r"no file .*none\.txt"):
        load_plan(tmp_path / "plan.toml")


# ---- shards


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(tmp_path_factory.mktemp("plan"), GROUP)


@given(count=st.integers(1, 200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shards_share_the_cases_out(plan, count):
    shards = [plan.shard(number, count) for number in range(1, count + 1)]
    ids = [case.id for shard in shards for case in shard]
    assert len(ids) == len(set(ids)) == len(plan.cases)
    assert set(ids) == {case.id for case in plan.cases}
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize(("number", "count"), [(0, 3), (4, 3), (1, 0), (-1, 2)])
def test_a_shard_that_is_none(plan, number, count):
    with pytest.raises(InputError, match="--shard must be I/N"):
        plan.shard(number, count)


def test_the_plan_of_the_docstring_is_a_plan(tmp_path: Path):
    import textwrap

    from unmask.audit import plan as module

    assert module.__doc__ is not None
    example = module.__doc__.partition("\n\n")[2].rpartition("\n\n`")[0]
    (tmp_path / "notes.txt").write_text("\n".join(WORDS))
    (tmp_path / "plan.toml").write_text(textwrap.dedent(example))
    assert len(load_plan(tmp_path / "plan.toml").cases) == 2 * 2 * 3 * 3


def test_time_limits_are_those_of_the_group_or_of_the_top(tmp_path):
    own = '[[outputs]]\nmodels = ["m"]\ntime_limit = 2.5\n'
    plan = make_plan(tmp_path, '[[gradients]]\nmodels = ["m"]\n', own, top="time_limit = 60")
    assert {case["channel"]: case.time_limit for case in plan.cases} == {"gradients": 60.0, "outputs": 2.5}
    (free,) = make_plan(tmp_path, '[[gradients]]\nmodels = ["m"]\n').cases
    assert free.time_limit is None
    assert free.id == plan.cases[0].id  # a limit changes nothing about what a case is


@pytest.mark.parametrize(("other", "joined"), [("time_limit = 90", 90.0), ("time_limit = 5", 60.0), ("", None)])
def test_a_case_of_two_groups_has_the_longer_time(tmp_path, other, joined):
    group = '[[gradients]]\nmodels = ["m"]\n'
    (case,) = make_plan(tmp_path, f"{group}time_limit = 60\n", f"{group}{other}\n").cases
    assert case.time_limit == joined


@pytest.mark.parametrize("seconds", ["0", "-1", '"60"', "true", "nan", "1e9"])
def test_time_limits_are_positive_numbers(tmp_path, seconds):
    with pytest.raises(InputError, match=r"time_limit of .* must be a number of seconds above 0"):
        make_plan(tmp_path, f'[[gradients]]\nmodels = ["m"]\ntime_limit = {seconds}\n')


def test_efforts_and_lengths_are_in_a_case_only_where_they_are_unusual(tmp_path):
    lists = 'efforts = [1, 4]\nmax_lengths = ["model", 8]\n'
    plan = make_plan(tmp_path, f'[[gradients]]\nmodels = ["m"]\n{lists}')
    seen = {(case.spec.get("effort"), case.spec.get("max_length")): case for case in plan.cases}
    assert seen.keys() == {(None, None), (None, 8), (4, None), (4, 8)}
    (plain,) = make_plan(tmp_path, '[[gradients]]\nmodels = ["m"]\n').cases
    assert seen[None, None].id == plain.id
    assert "effort 4" in str(seen[4, 8])
    assert "texts cut to 8 tokens" in str(seen[4, 8])
