from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tests.report.findings import HOSTILE, SENTENCES, audit_of, failed, many, realistic, text_case, text_finding

from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import reach_verdict
from unmask.report.markdown import render_markdown

LEAK = text_finding(text_case(), 1.0, 4)
NOTHING = text_finding(text_case(defences=["noise:sigma=0.1"]), 0.0)


def render(audit: Audit) -> str:
    return render_markdown(audit, reach_verdict(audit), Path("runs/x"))


def test_the_verdict_then_gates_numbers_and_what_to_look_at():
    text = render(audit_of([LEAK, NOTHING, failed(text_case(seed=3))], ["rouge2 < 0.1"], [text_case(seed=4)]))
    assert text.startswith(
        "## unmask: Gate crossed\n\n**A gate is crossed: 'rouge2 \\< 0.1' by 1 case; 1 of 3 cases leaked.**"
    )
    assert "exit code 1" in text
    assert "| `rouge2 < 0.1` | **crossed** | 1 | 1 | 1 |" in text
    assert "| `gradients` | `smollm2-135m` | 1 | 1 | 0 | 1 | 1 |" in text
    assert f"`{LEAK.id}`" in text
    assert "`noise:sigma=0.1`" in text  # what stopped it
    assert f"`unmask audit plan.toml --out runs/x --case {LEAK.id}`" in text
    assert "### Not run yet" in text


def test_how_much_leaked_is_told_also_where_gates_hold():
    words = text_finding(text_case(defences=["int8"]), 0.93)
    text = render(audit_of([words, NOTHING], ["no exact text"]))
    assert text.startswith("## unmask: No gate crossed")
    leaks = text.partition("### How much leaked")[2]
    assert "| 93 % of tokens, 0 exact | held | leaks |" in leaks
    assert leaks.index("93 %") < leaks.index("0 % of tokens")
    assert "### Look at these first" not in text


def test_an_open_gate_says_why():
    bag = text_finding(text_case(defences=["int8"]), 0.6, looked_for=("tokens",))
    text = render(audit_of([bag], ["no near-exact text"]))
    assert "stopped early, or could not confirm its result" in text


def test_it_never_holds_a_text_and_never_calls_anything_safe():
    text = render(audit_of(realistic(), ["no exact text"]))
    assert not [sentence for sentence in SENTENCES if sentence.split()[1] in text.split()]
    assert "never mean 'safe'" in text
    assert "inconclusive" in text
    assert text.count("safe'") == 1


def test_it_fits_into_a_comment():
    assert len(render(audit_of(many(1000), ["no exact text", "rouge1 < 0.1"]))) < 65_536


def test_hostile_text_is_no_markup():
    for text in HOSTILE:
        finding = text_finding(text_case(model=text, protocol=text, defences=[text]), 1.0, 4, reason=text)
        out = render(audit_of([finding], ["no exact text"], [text_case(model=text)], title=text))
        outside = re.sub(r"`[^`\n]*`", "", out)
        assert not set("<[@") & set(outside.replace("\\<", "")), outside
        widths = {line.count("|") for line in out.splitlines() if line.startswith("| leaks")}
        assert widths == {7}


def test_an_audit_without_a_plan():
    text = render(replace(audit_of([LEAK]), manifest={}))
    assert text.startswith("## unmask: No gate set")
    assert "Gates" not in text
