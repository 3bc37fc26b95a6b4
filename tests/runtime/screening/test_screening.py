"""Making a screen: its mathematics by hand, the states it is made from, the file, and every refusal."""

import json
import shutil

import numpy as np
import pytest
import torch
from eagle_slim.convert import Artifact, ArtifactError, ConvertOptions, convert_head, verify_artifact
from eagle_slim.convert.conversion.vocab_choice import VocabRequest
from eagle_slim.convert.errors import MismatchError, OutputExistsError
from eagle_slim.convert.head.screen_file import SCREEN_NAME, open_screen_file
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.drafter.reference import ReferenceDraft
from eagle_slim.runtime.drafter.screen import Screen, best_of_groups, load_screen
from eagle_slim.runtime.screening import collect, make
from eagle_slim.runtime.screening.cli import screen as command
from eagle_slim.runtime.screening.factors import SecondMoment, screen_factors, screen_rows
from eagle_slim.runtime.screening.make import ScreenOptions, make_screen
from eagle_slim.runtime.screening.recall import are_candidates, recall
from eagle_slim.runtime.screening.states import states_a_root, states_of_text
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.vocab_tools.corpus.source import CorpusSource
from eagle_slim.vocab_tools.errors import CorpusError, UsageError
from safetensors.torch import load_file
from support.tiny_models import write_head, write_pair

CHAT = [
    "the quick brown fox jumps over the lazy dog and then over another one, which is as lazy as the first",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2), add(3, 4), add(5, 6), add(7, 8), add(9, 10))",
    "numbers are one two three four five six seven eight nine ten eleven twelve thirteen and so on for ever",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny target and head, the head slimmed to 300 of 360 rows by id, and some texts."""
    root = tmp_path_factory.mktemp("screen")
    target, head = write_pair(root)
    by_id = VocabRequest(order="ids")
    convert_head(head, ConvertOptions(draft_vocab=300, target=target, vocabulary=by_id, out=root / "slim"))
    lines = [{"text": f"{CHAT[place % 3]} {place}"} for place in range(60)]
    (root / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture
def slim(pair, tmp_path):
    return shutil.copytree(pair / "slim", tmp_path / "slim")


def options(pair, **changes):
    source = CorpusSource(str(pair / "texts.jsonl"))
    return ScreenOptions(**{"rank": 8, "states": 600, "sources": (source,), "depth": 2, "top_k": 3} | changes)


def made(pair, slim, **changes):
    return make_screen(slim, options(pair, **changes), target=pair / "target", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def screened(pair, tmp_path_factory):
    folder = shutil.copytree(pair / "slim", tmp_path_factory.mktemp("screened") / "slim")
    return folder, made(pair, folder)


def test_factors_are_the_best_of_their_rank_by_hand():
    # Two dimensions of which the second is rare: C = diag(4, 0.01). W = I, so W C^(1/2) = diag(2, 0.1).
    moment = torch.diag(torch.tensor([4.0, 0.01], dtype=torch.float64))
    project, down = screen_factors(moment, torch.eye(2), 1)
    assert torch.allclose(project, torch.tensor([[2.0], [0.0]]))  # C^(1/2) times the first axis
    assert torch.allclose(down, torch.tensor([[0.5, 0.0]]))
    assert torch.allclose(torch.eye(2) @ project @ down, torch.diag(torch.tensor([1.0, 0.0])))


def test_factors_lose_what_eckart_and_young_say_and_a_whole_rank_loses_nothing():
    torch.manual_seed(0)
    states = torch.randn(400, 12, dtype=torch.float64) @ torch.randn(12, 12, dtype=torch.float64)
    weight = torch.randn(50, 12)
    moment = SecondMoment(12, torch.device("cpu"))
    for part in states.split(150):
        moment.add_(part)
    assert moment.count == 400
    assert torch.allclose(moment.total / 400, states.t() @ states / 400)
    second = moment.damped(1e-9)
    project, down = screen_factors(second, weight, 12)
    exact = states @ weight.double().t()
    root = torch.linalg.cholesky(second)
    values = torch.linalg.svdvals(weight.double() @ root)
    for rank in (1, 5, 12):
        near = (states @ down[:rank].double().t()) @ (weight.double() @ project[:, :rank].double()).t()
        lost = ((exact - near) ** 2).sum(1).mean()
        assert float(lost) == pytest.approx(float((values[rank:] ** 2).sum()), rel=1e-4, abs=1e-6)
    assert torch.allclose(down @ project, torch.eye(12), atol=1e-4)


def test_damping_is_a_share_of_the_mean_diagonal():
    moment = SecondMoment(2, torch.device("cpu"))
    moment.add_(torch.tensor([[2.0, 0.0], [2.0, 0.0]]))
    assert torch.equal(moment.damped(0.5), torch.tensor([[4.0 + 1.0, 0.0], [0.0, 1.0]], dtype=torch.float64))


def test_recall_by_hand():
    # Rows 0..3 in two groups, one candidate of each: of logits 3, 2, 1, 0 the screen sees the first dimension alone.
    lm_head = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    state = torch.tensor([[1.0, 1.0]])
    project = torch.tensor([[1.0], [0.0]])
    blind = Screen(screen_rows(lm_head, project, torch.float32), project.t(), project, groups=2, per_group=1)
    best = torch.tensor([3.0, 2.0, 1.0, 0.0]).softmax(0)
    # Group 0 holds rows 0 and 2: row 0. Group 1 holds rows 1 and 3, which tie at 0: row 1.
    assert recall(blind, state, lm_head, [1])[1] == pytest.approx(float(best[0] + best[1]))
    whole = Screen(lm_head, torch.eye(2), torch.eye(2), groups=2, per_group=2)
    assert recall(whole, state, lm_head, [2])[2] == pytest.approx(1.0)


@pytest.mark.parametrize(("rows", "groups", "per_group"), [(5, 2, 1), (300, 128, 2), (64, 8, 3), (3, 7, 2)])
def test_candidates_are_those_of_the_rule(rows, groups, per_group):
    # Few values, so that many tie.
    scores = torch.randint(-3, 3, (20, rows), generator=torch.Generator().manual_seed(rows)).float()
    every = torch.arange(rows).expand(20, -1)
    chosen = torch.zeros(20, rows + 1, dtype=torch.bool)
    chosen.scatter_(1, best_of_groups(scores, groups, per_group) + 1, True)
    assert torch.equal(are_candidates(scores, every, groups, per_group), chosen[:, 1:])


def test_states_are_those_of_a_draft_that_stands_alone(pair):
    """Places of one text, run together, against the whole text up to each place given to `ReferenceDraft.run`."""
    model = SpeculativeModel.from_pretrained(
        pair / "target", pair / "slim", device="cpu", dtype="float32", drafter="reference",
        target_backend="transformers",
    )  # fmt: skip
    weights, tree = model.drafter.weights, TreeConfig(depth=2, top_k=3, total_tokens=4)
    tokens = torch.tensor(model.tokenizer(CHAT[0])["input_ids"][:20])
    roots = torch.tensor([1, 7, 19])
    found = states_of_text(model.target, weights, tree, tokens, roots)
    assert found.shape == (3, states_a_root(tree), weights.hidden)
    with model.target.record_features() as taps, torch.no_grad():
        model.target.model(input_ids=tokens[None])
    features = torch.cat([taps[place] for place in sorted(taps)], -1)
    for place, root in enumerate(roots.tolist()):
        seen = []

        class Recorder(ReferenceDraft):
            def final(self, output, seen=seen):
                seen.append(super().final(output))
                return seen[-1]

        cache = [torch.zeros(1, weights.num_kv_heads, 40, weights.head_dim) for _ in range(2)]
        zero = torch.zeros(1, dtype=torch.int64)
        draft = Recorder(weights, tree, zero, zero, tuple(cache))
        draft.run(features[:, :root], tokens[None, 1 : root + 1], torch.tensor([root]))
        assert torch.allclose(found[place], torch.cat(seen, 1)[0], atol=1e-4)


def test_the_screen_of_an_artifact(pair, screened):
    folder, done = screened
    head = Artifact.load(folder).head
    loaded = load_screen(folder, head)
    weights = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert (loaded.rank, loaded.groups, loaded.per_group, len(loaded.rows)) == (8, 128, 2, 300)
    assert torch.allclose(loaded.rows, weights @ loaded.project, atol=1e-4)
    told = open_screen_file(folder, head).header.metadata
    # 7 states a root; the text is the source that was named, without its path.
    assert int(told["states"]) >= 600
    assert int(told["states"]) % 7 == 0
    assert str(pair) not in json.dumps(told)
    assert json.loads(told["text"])[0]["name"] == "texts"
    assert json.loads(told["recall"])["8"] == pytest.approx(done.recall[8], abs=1e-6)
    assert done.recall[32] == pytest.approx(1.0)  # the whole width
    assert sorted(done.recall.values()) == list(done.recall.values())
    checks = verify_artifact(folder, target=pair / "target", head=pair / "head")
    assert checks.ok
    assert {check.name for check in checks.checks if check.status == "ok"} >= {
        "screen", "screen: checksums", "screen: rows",
    }  # fmt: skip


def test_the_smallest_rank_that_is_good_enough_is_chosen(pair, slim, monkeypatch):
    monkeypatch.setattr(make, "RANKS", (2, 8, 24, 32))
    done = made(pair, slim, rank="auto")
    enough = [rank for rank, share in done.recall.items() if share >= 0.995]
    assert done.rank == min(enough)
    assert f"{done.rank:>6}  {done.recall[done.rank]:>13.2%}  {done.rows_read(done.rank):,} *" in done.to_text()
    monkeypatch.setattr(make, "RANKS", (2,))
    with pytest.raises(UsageError, match=r"No rank keeps 99\.5%"):
        make_screen(slim, options(pair, rank="auto"), target=pair / "target", device="cpu", force=True)
    # What was collected stays, and a rank that is named takes it up.
    said = []
    make_screen(slim, options(pair, rank=4), target=pair / "target", device="cpu", force=True, say=said.append)
    assert any(line.startswith("going on from") for line in said)
    assert not slim.with_name("slim.screen.resume").exists()


def test_an_interrupted_run_goes_on_to_the_same_screen(pair, screened, slim, monkeypatch):
    take = collect.Collected._take

    def stop(self, text, draft):
        if self.num_texts == 5:
            raise KeyboardInterrupt
        take(self, text, draft)

    with monkeypatch.context() as patched:
        patched.setattr(collect.Collected, "_take", stop)
        with pytest.raises(KeyboardInterrupt):
            made(pair, slim)
    state = slim.with_name("slim.screen.resume")
    assert state.exists()
    assert not (slim / SCREEN_NAME).exists()
    with pytest.raises(UsageError, match="another head, target or tree"):
        made(pair, slim, top_k=4)
    made(pair, slim)
    assert not state.exists()
    assert (slim / SCREEN_NAME).read_bytes() == (screened[0] / SCREEN_NAME).read_bytes()
    state.write_bytes(b"no such thing")
    with pytest.raises(UsageError, match="cannot be read"):
        make_screen(slim, options(pair), target=pair / "target", force=True)


def test_slimming_again_keeps_the_rows_of_ids_that_stay(pair, screened, tmp_path):
    folder, _ = screened
    before = load_screen(folder, Artifact.load(folder).head)
    done = convert_head(folder, ConvertOptions(draft_vocab=(260, 280), target=pair / "target", out=tmp_path))
    for each in done:
        head = Artifact.load(each.folder).head
        after = load_screen(each.folder, head)
        assert torch.equal(after.rows, before.rows[torch.from_numpy(head.draft_ids_to_target)])
        assert torch.equal(after.down, before.down)
        assert verify_artifact(each.folder, target=pair / "target", head=folder).ok
    # A screen of other rows, or of another head, is refused by name.
    shutil.copy(done[0].folder / SCREEN_NAME, done[1].folder / SCREEN_NAME)
    with pytest.raises(MismatchError, match=r"screens 260 rows, and .* has 280"):
        load_screen(done[1].folder, Artifact.load(done[1].folder).head)
    assert {check.name for check in verify_artifact(done[1].folder).failed} == {"screen"}


def test_rows_that_the_screen_lacks_leave_it_out(pair, tmp_path):
    by_id = VocabRequest(order="ids")
    kept = ConvertOptions(draft_vocab=270, keep_rows=320, target=pair / "target", vocabulary=by_id, out=tmp_path / "a")
    convert_head(pair / "head", kept)
    made(pair, tmp_path / "a")
    said = []
    wider = ConvertOptions(draft_vocab=290, target=pair / "target", out=tmp_path / "b")
    convert_head(tmp_path / "a", wider, say=said.append)
    assert not (tmp_path / "b" / SCREEN_NAME).exists()
    assert any("lacks rows that are asked for and is left out" in line for line in said)


def test_a_head_without_an_lm_head_of_its_own(pair, tmp_path):
    vocab = len(load_file(pair / "target" / "model.safetensors")["lm_head.weight"])
    head = write_head(tmp_path / "head", kind="eagle", vocab=vocab, tie_word_embeddings=False)
    by_id = VocabRequest(order="ids")
    convert_head(head, ConvertOptions(draft_vocab=300, target=pair / "target", vocabulary=by_id, out=tmp_path / "slim"))
    made(pair, tmp_path / "slim")
    loaded = load_screen(tmp_path / "slim", Artifact.load(tmp_path / "slim").head)
    rows = load_file(pair / "target" / "model.safetensors")["lm_head.weight"]
    assert torch.allclose(loaded.rows, rows @ loaded.project, atol=1e-4)
    assert verify_artifact(tmp_path / "slim", target=pair / "target")["screen: rows"].status == "ok"
    assert verify_artifact(tmp_path / "slim")["screen: rows"].status == "skipped"


@pytest.mark.parametrize("what", ["rows", "down", "head", "format"])
def test_a_screen_that_is_not_as_it_was_made_fails(pair, screened, tmp_path, what):
    folder = shutil.copytree(screened[0], tmp_path / "slim")
    path = folder / SCREEN_NAME
    raw = bytearray(path.read_bytes())
    if what == "format":
        path.write_bytes(bytes(raw).replace(b"eagle-slim-screen-1", b"eagle-slim-screen-2"))
    elif what == "head":
        weights = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(weights[:8], "little")
        at = json.loads(weights[8 : 8 + size])["midlayer.mlp.down_proj.weight"]["data_offsets"][0] + 8 + size
        (folder / "model.safetensors").write_bytes(weights[:at] + b"\0" * 8 + weights[at + 8 :])
    else:
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        start = 8 + int.from_bytes(raw[:8], "little") + header[f"screen.{what}"]["data_offsets"][0]
        raw[start : start + 40] = np.full(10, 7.0, np.float32).tobytes()
        path.write_bytes(raw)
    failed = {check.name for check in verify_artifact(folder).failed}
    if what in ("rows", "down"):
        assert failed == {"screen: checksums", "screen: rows"}
    else:
        assert "screen" in failed
        error = ArtifactError if what == "format" else MismatchError
        with pytest.raises(error, match="screen-2" if what == "format" else "made for another head"):
            load_screen(folder, Artifact.load(folder).head)


def test_refusals(pair, screened, slim, tmp_path):
    with pytest.raises(OutputExistsError, match="--force"):
        made(pair, screened[0])
    with pytest.raises(UsageError, match="32 dimensions"):
        made(pair, slim, rank=33)
    for wrong in ({"rank": 0}, {"states": 0}, {"damping": 0.0}, {"rank": "best"}):
        with pytest.raises(UsageError, match="expected"):
            ScreenOptions(**wrong)
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"text": CHAT[0]}) + "\n")
    with pytest.raises(UsageError, match="Name more text with --dataset"):
        made(pair, slim, sources=(CorpusSource(str(few)),))
    slim.with_name("slim.screen.resume").unlink()
    few.write_text(json.dumps({"text": CHAT[0]}) + "\n" + json.dumps({"text": 7}) + "\n")
    with pytest.raises(CorpusError, match="line 2"):
        made(pair, slim, sources=(CorpusSource(str(few)),))


def test_sources_are_mixed_by_weight(pair, tmp_path):
    from eagle_slim.runtime.screening.texts import Texts
    from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer

    sources = []
    for name, weight, most in (("a", 1.0, None), ("b", 2.0, 4)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * n}) + "\n" for n in range(1, 9)))
        sources.append(CorpusSource(str(tmp_path / f"{name}.jsonl"), name, weight, max_documents=most))
    tokenizer = load_tokenizer(pair / "target", offline=True)
    texts = Texts(sources, tokenizer, lambda message: None)
    order = "".join(tokenizer.backend.decode(ids.tolist())[0] for ids in texts)
    assert order == "abbabbaaaaaa"


def test_the_command(pair, slim):
    from click.testing import CliRunner

    arguments = [str(slim), "--target", str(pair / "target"), "--device", "cpu", "--states", "300", "--rank", "4"]
    tree = ["--depth", "1", "--draft-top-k", "2", "--dataset", str(pair / "texts.jsonl"), "--json"]
    result = CliRunner().invoke(command, [*arguments, *tree], catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["rank"], told["rows"], told["hidden"]) == (4, 300, 32)
    assert set(told["recall"]) == {"4", "32"}
    assert CliRunner().invoke(command, [*arguments[:-1], "best"]).exit_code == 2
