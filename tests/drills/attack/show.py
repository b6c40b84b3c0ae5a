"""The attack 'moved-rows' is listed, run by its name, and planned; a case of it ends in a finding."""

from __future__ import annotations

from tests.drills.shown import audit, dry_run, group, named, texts, tiny_model

import unmask

assert "moved-rows" in named("attacks")
assert "moved-rows:least=0.5" in dry_run(group("gradients", 'attacks = ["moved-rows:least=0.5"]'))[0]

model = tiny_model()
evidence = unmask.observe_gradients(model, texts())
recovery = unmask.recover_text(evidence, model, attack="moved-rows")
assert recovery.status is unmask.Status.PARTIAL
held = {token for text in texts() for token in model.tokenizer(text)["input_ids"]}
assert recovery.value.token_set == held - {model.tokenizer.sep_token_id}  # the last token of a text is only predicted

(finding,) = audit(group("gradients", 'attacks = ["moved-rows"]'))
assert finding.outcome.name == "LEAK"
assert finding.metrics["token_recall"] == 1
assert finding.looked_for == ("tokens",)
