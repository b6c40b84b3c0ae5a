"""Updates become findings, whatever is wrong with them."""

from __future__ import annotations

import json
import logging
import shlex
import stat
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is missing; run: pip install 'unmask[flower]'")
from flwr.app import ArrayRecord
from tests.integrations.flower_grid import FRAME, TEXTS, audited_model, classifier, initial_arrays, trained, words

import unmask.integrations.federation.audit as federation_audit
from unmask.attacks.recover import recover_text
from unmask.audit.cases.case import case_id
from unmask.audit.findings.finding import ERROR, Outcome
from unmask.audit.findings.folder import read_audit
from unmask.audit.findings.verdict import FAILED, reach_verdict
from unmask.errors import EvidenceError, InputError
from unmask.evidence import load_evidence
from unmask.integrations.federation.audit import UpdateAudit
from unmask.integrations.flower.messages import FLOWER
from unmask.models import load_model
from unmask.models.adapter import Model
from unmask.protocols import observe_gradients
from unmask.recovery import Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status


@pytest.fixture
def audit(tmp_path):
    return UpdateAudit(FLOWER, model=audited_model(), out=tmp_path / "runs" / "fl")


def shown(finding):
    return {piece for piece, _ in finding.tokens}


def changed(arrays: ArrayRecord, **replaced: torch.Tensor) -> ArrayRecord:
    return ArrayRecord({**arrays.to_torch_state_dict(), **{k.replace("__", "."): v for k, v in replaced.items()}})


def test_an_update_gives_its_words_away(audit):
    finding = audit.audit(1, "11", initial_arrays(), trained(11))
    assert (finding.status, finding.outcome, finding.texts) == ("PARTIAL", Outcome.LEAK, ())
    assert shown(finding) == words(11)
    assert {mark for _, mark in finding.tokens} == {"bag"}
    assert finding.id == case_id(finding.case)
    assert not finding.metrics
    where = {"round": 1, "client": "11"}
    how = {"channel": "gradients", "protocol": "flower", "source": "flower", "attack": "default"}
    assert finding.case == {"model": audit.model_name, "seed": 0, **where, **how}
    held = read_audit(audit.folder)
    assert held.findings == (finding,)
    assert held.manifest["models"][audit.model_name]["fingerprint"] == audited_model().fingerprint()
    assert stat.S_IMODE((audit.folder / "findings.jsonl").stat().st_mode) == 0o600


def test_the_weights_of_the_round_are_those_that_were_sent(audit):
    source = audit.source.fingerprint()
    finding = audit.audit(1, "11", initial_arrays(), trained(11))
    assert finding.model_fingerprint == unmask_fingerprint(initial_arrays()) != source
    second = audit.audit(2, "11", trained(12), changed(trained(12), bert__pooler__dense__bias=torch.ones(64)))
    assert (second.status, second.outcome) == ("MISSING_EVIDENCE", Outcome.INCONCLUSIVE)
    third = audit.audit(2, "12", trained(12), trained(11))
    assert third.model_fingerprint == unmask_fingerprint(trained(12)) != finding.model_fingerprint
    assert audit.source.fingerprint() == source


def unmask_fingerprint(arrays: ArrayRecord) -> str:
    net = classifier()
    net.load_state_dict(arrays.to_torch_state_dict())
    return load_model(net).fingerprint()


def test_the_same_round_again_is_another_case(audit, tmp_path):
    arrays = initial_arrays()
    first, second = (audit.audit(1, "11", arrays, trained(11)) for _ in range(2))
    later = UpdateAudit(FLOWER, model=audited_model(), out=audit.folder).audit(1, "11", arrays, trained(11))
    assert "exchange" not in first.case
    assert [finding.case["exchange"] for finding in (second, later)] == [2, 3]
    assert len({finding.id for finding in read_audit(audit.folder).findings}) == 3


def test_side_knowledge_reaches_the_evidence(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        federation_audit, "recover_text", lambda evidence, *_, **options: seen.append((evidence, options))
    )
    known = {
        "task": "classification",
        "optimizer": "adamw",
        "num_steps": 3,
        "learning_rate": 5e-5,
        "weight_decay": 0.01,
    }
    audit = UpdateAudit(FLOWER, model=audited_model(), out=tmp_path, seed=4, num_texts=3, **known)
    finding = audit.audit(1, "11", initial_arrays(), trained(11))
    assert finding.case["task"] == "classification"
    ((evidence, options),) = seen
    assert options == {"seed": 4}
    assert evidence.task.value == "classification"
    assert (evidence.update.value, evidence.num_texts, evidence.num_steps) == ("delta", 3, 3)
    assert (evidence.optimizer, evidence.learning_rate, evidence.weight_decay) == ("adamw", 5e-5, 0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "guessing"}, "guessing"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adamw"),
        ({"num_steps": 0}, "num_steps must be a whole number"),
        ({"shares": "logits"}, "shares must be one of weights, delta, gradient"),
        ({"keep": "embeddings"}, "keep must be a list"),
        ({"learning_rates": 1.0}, "unknown option 'learning_rates'"),
    ],
)
def test_mistakes_are_told_before_the_first_round(tmp_path, options, message):
    with pytest.raises((InputError, EvidenceError), match=message):
        UpdateAudit(FLOWER, model="minilm-l6", out=tmp_path, **options)


def test_a_folder_of_another_audit_is_left_alone(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1, "engine": "local", "cases": []}))
    with pytest.raises(InputError, match="audit of the engine 'local'"):
        UpdateAudit(FLOWER, model=audited_model(), out=tmp_path).prepare()


def test_names_must_be_those_of_all_arrays(tmp_path):
    audit = UpdateAudit(FLOWER, model=audited_model(), out=tmp_path, names=["a", "b"])
    assert "but `names` has 2" in audit.audit(1, "11", initial_arrays(), trained(11)).reason


def test_weights_that_do_not_fit_are_an_error_for_each_client(audit):
    wrong = changed(initial_arrays(), bert__embeddings__word_embeddings__weight=torch.ones(3, 64))
    for client in ("11", "12"):
        assert "has the shape (3, 64), expected (500, 64)" in audit.audit(1, client, wrong, trained(11)).reason


def test_the_bag_of_words_is_shown_beside_texts_that_are_not_certain(audit, monkeypatch):
    doubtful = RecoveredText((1, 17, 2), "w17", certain=False, residual=1.0)
    certain = replace(doubtful, certain=True)

    def recovers(text, *words):
        value = RecoveredTexts((text,), frozenset(words))
        recovery = Recovery(value, Status.PARTIAL, "", Certificate.none("nothing"), Cost())
        monkeypatch.setattr(federation_audit, "recover_text", lambda *_, **__: recovery)
        return shown(audit.audit(1, "11", initial_arrays(), trained(11)))

    assert recovers(doubtful, 1, 2, 17, 99) == {"[CLS]", "[SEP]", "w17", "w99"}
    assert recovers(certain, 1, 2, 17, 99) == {"[CLS]", "[SEP]", "w17", "w99"}
    assert recovers(certain, 1, 2, 17) == set()


def test_clients_that_send_gradients_give_whole_texts_away(tmp_path):
    net = classifier()
    model = load_model(net, tokenizer=audited_model().tokenizer)
    texts = ["w17 w99 w17 w250", "w400 w30 w8"]
    gradients = observe_gradients(model, texts, task="classification").gradients
    names = {model.canonical_name(name): name for name in net.state_dict()}
    sent = ArrayRecord({names[name]: gradient for name, gradient in gradients.items() if name in names})
    audit = UpdateAudit(
        FLOWER, model=audited_model(), out=tmp_path, shares="gradient", num_texts=2, task="classification"
    )
    finding = audit.audit(1, "11", initial_arrays(), sent)
    assert finding.status == "RECOVERED"
    recovered = {"".join(piece for piece, _ in pair.recovered) for pair in finding.texts}
    assert recovered == set(texts)
    assert all(pair.certain and pair.true is None for pair in finding.texts)
    assert not finding.tokens


@pytest.mark.parametrize(("rank", "leaks"), [(32, True), (8, False)])
def test_clients_of_peft_send_their_factors_only(tmp_path, rank, leaks):
    """One step of SGD; a rank below the number of different tokens hides which they are."""
    peft = pytest.importorskip("peft", reason="PEFT is missing; run: pip install 'unmask[lora]'")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = peft.get_peft_model(classifier(), peft.LoraConfig(r=rank, target_modules=["query", "value"]))
    before = ArrayRecord({name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(net).items()})
    model = load_model(classifier(), tokenizer=audited_model().tokenizer)
    batch = model.tokenizer(TEXTS[11], padding=True, return_tensors="pt")
    net.eval()(**batch, labels=torch.tensor([0, 1, 0])).loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    after = ArrayRecord(dict(peft.get_peft_model_state_dict(net)))
    finding = UpdateAudit(FLOWER, model=model, out=tmp_path).audit(1, "11", before, after)
    assert (finding.outcome is Outcome.LEAK) == leaks
    assert finding.status != ERROR
    assert shown(finding) == (words(11) if leaks else set())


# ---- updates that something is wrong with


def test_nan_is_an_error_that_names_the_tensor(audit, caplog):
    broken = changed(trained(11), bert__embeddings__word_embeddings__weight=torch.full((500, 64), torch.nan))
    with caplog.at_level(logging.WARNING):
        finding = audit.audit(1, "11", initial_arrays(), broken)
    assert (finding.status, finding.outcome) == (ERROR, Outcome.ERROR)
    assert "'embeddings.word_embeddings.weight' holds 32000 of 32000 values that are NaN" in finding.error["message"]
    assert "round 1, client 11: error" in caplog.text
    assert reach_verdict(read_audit(audit.folder)).exit_code == FAILED


def test_a_federation_of_another_model_is_an_error(tmp_path, tiny_llama):
    audit = UpdateAudit(FLOWER, model=tiny_llama, out=tmp_path)
    finding = audit.audit(1, "11", initial_arrays(), trained(11))
    assert finding.status == ERROR
    assert "give the audit the model that the federation trains" in finding.reason


def test_a_reply_without_what_is_needed_is_inconclusive(audit):
    empty = audit.audit(1, "11", initial_arrays(), ArrayRecord())
    head = ArrayRecord({"classifier.weight": torch.zeros(2, 64)})
    only_head = audit.audit(2, "11", initial_arrays(), head)
    norms = ArrayRecord({k: v + 1 for k, v in trained(11).to_torch_state_dict().items() if "LayerNorm" in k})
    audit.keep = ["LayerNorm"]
    unreadable = audit.audit(3, "11", initial_arrays(), norms)
    for finding in (empty, only_head, unreadable):
        assert (finding.status, finding.outcome) == ("MISSING_EVIDENCE", Outcome.INCONCLUSIVE)
    assert "1 arrays of the reply" in only_head.reason
    assert "embedding rows" in unreadable.reason


def test_an_unchanged_model_gives_nothing_away(audit):
    finding = audit.audit(1, "11", initial_arrays(), initial_arrays())
    assert (finding.status, finding.outcome) == ("NOTHING_FOUND", Outcome.NO_LEAK)
    assert "sent back exactly what it got" in finding.reason


def test_nothing_is_clear_while_arrays_are_not_read(audit):
    """A client that sends its weights unchanged may send its gradient beside them."""
    clear, partial = (audit.audit(1, "11", initial_arrays(), new, ["more"]) for new in (initial_arrays(), trained(11)))
    assert (clear.status, clear.outcome) == ("MISSING_EVIDENCE", Outcome.INCONCLUSIVE)
    assert "sent back exactly what it got; the reply holds arrays that were not read, in 'more'" in clear.reason
    assert partial.outcome is Outcome.LEAK
    assert "not read, in 'more'" in partial.reason


def test_weights_that_nobody_holds_any_more_are_inconclusive(audit):
    assert audit.audit(1, "11", None, trained(11)).outcome is Outcome.INCONCLUSIVE


def test_noise_on_every_weight_is_no_leak(audit):
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in trained(11).to_torch_state_dict().items()
    }
    finding = audit.audit(1, "11", initial_arrays(), ArrayRecord(noisy))
    assert finding.outcome in (Outcome.INCONCLUSIVE, Outcome.NO_LEAK)
    assert not finding.tokens


def test_an_attack_that_raises_is_a_finding(audit, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(federation_audit, "recover_text", fail)
    finding = audit.audit(1, "11", initial_arrays(), trained(11))
    assert (finding.status, finding.error["type"]) == (ERROR, "RuntimeError")
    assert read_audit(audit.folder).findings == (finding,)


def test_a_folder_that_cannot_be_written_is_told_in_the_log(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        finding = UpdateAudit(FLOWER, model=audited_model(), out=tmp_path / "file").audit(
            1, "1", initial_arrays(), trained(11)
        )
    assert finding.status == ERROR
    assert "could not be kept" in caplog.text


# ---- evidence for later


def test_evidence_is_kept_for_a_later_attack(tmp_path):
    net = classifier()
    tokenizer = audited_model().tokenizer
    for part in (net, tokenizer):
        part.save_pretrained(tmp_path / "given")
    audit = UpdateAudit(FLOWER, model=tmp_path / "given", out=tmp_path, save_evidence=True)
    sent = initial_arrays()
    assert audit.audit(1, "11", sent, trained(11)) is None
    assert audit.audit(1, "11", sent, trained(11)) is None
    assert audit.audit(2, "12", trained(12), trained(11)) is None
    assert not read_audit(tmp_path).findings
    folder = tmp_path / "evidence"
    names = {path.name for path in folder.iterdir()}
    files = {"round-1-client-11.safetensors", "round-1-client-11-2.safetensors", "round-2-client-12.safetensors"}
    (weights,) = names - files
    assert weights.startswith("model-")
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o600 for name in files)
    first = recover_text(load_evidence(folder / "round-1-client-11.safetensors"), load_model(net, tokenizer=tokenizer))
    assert {audit.prepare().decode([token]) for token in first.value.token_set} == words(11)
    later = load_model(folder / weights)
    assert isinstance(later, Model)
    second = recover_text(load_evidence(folder / "round-2-client-12.safetensors"), later)
    assert {later.decode([token]) for token in second.value.token_set} >= FRAME


def test_a_model_in_memory_is_kept_even_if_its_weights_are_those_of_the_round(tmp_path, caplog):
    """The command that is told needs a model that can be loaded."""
    net = classifier()
    audit = UpdateAudit(
        FLOWER, model=net, tokenizer=audited_model().tokenizer, out=tmp_path / "a b", save_evidence=True
    )
    with caplog.at_level(logging.INFO):
        audit.audit(1, "11", ArrayRecord(net.state_dict()), trained(11), ["more"])
    assert "not read, in 'more'" in caplog.text
    told = next(text for text in caplog.messages if "read it with" in text)
    *_, path, option, model = shlex.split(told.split("`")[1])
    assert option == "--model"
    assert recover_text(load_evidence(path), load_model(model)).value.token_set


def test_a_reply_without_arrays_is_a_finding_even_where_evidence_is_kept(tmp_path):
    audit = UpdateAudit(FLOWER, model=audited_model(), out=tmp_path, save_evidence=True)
    assert audit.audit(1, "11", initial_arrays(), ArrayRecord()).status == "MISSING_EVIDENCE"
