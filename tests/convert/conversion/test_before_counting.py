"""What is looked at before the first token is counted, and what is kept of the counts when something else fails."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from eagle_slim.convert import (
    Artifact,
    ArtifactError,
    CheckpointError,
    MismatchError,
    OutputError,
    SourceError,
    VocabRequest,
    push_folder,
    verify_artifact,
)
from eagle_slim.convert.cli import main as convert_command
from eagle_slim.vocab_tools import hub_session
from eagle_slim.vocab_tools.errors import CorpusError, UsageError
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from safetensors.torch import load_file, save_file
from support.conversion import BY_ID, convert
from support.heads import TOKENS, VOCAB, eagle3_tensors, random, write_eagle1, write_eagle3, write_freq, write_target
from support.hub_server import Fault, HubServer, connected
from support.raising import raises, waiting_for_nothing
from support.token_counts import token_counts


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def chats(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": f"def main(): {n} fox"}]}
        for n in range(50)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return ("--dataset", "chat=chats.jsonl", "--workers", "0")


def never(*_):
    pytest.fail("counted, although the conversion cannot be finished")


class TestCheapChecks:
    def test_weights_of_the_target_that_are_damaged_or_missing_or_of_another_width(self, tmp_path, target):
        head = write_eagle3(tmp_path / "head", lm_head=False)
        weights = target / "model.safetensors"
        for damage in (lambda: weights.write_bytes(weights.read_bytes()[:-8]), weights.unlink):
            damage()
            with pytest.raises(CheckpointError):
                convert(head, draft_vocab=300, target=target, out=tmp_path / "out", count=never)
        save_file({"lm_head.weight": random((VOCAB, 8), 0)}, target / "model.safetensors")
        with raises(MismatchError, tensor="lm_head.weight", found=8):
            convert(head, draft_vocab=300, target=target, out=tmp_path / "out", count=never)

    def test_a_disk_that_is_too_small(self, tmp_path, target, monkeypatch):
        from eagle_slim.convert import atomic

        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(atomic.shutil, "disk_usage", lambda place: usage._replace(free=1000))
        with raises(OutputError, free=1000):
            convert(write_eagle3(tmp_path / "head"), draft_vocab=300, target=target, out=tmp_path / "out", count=never)

    @pytest.mark.parametrize(
        ("token", "name"),
        [(None, "tester/x"), ("hf_good", "other/x"), ("hf_good", "two words"), ("hf_expired", "tester/x")],
    )
    def test_a_repository_that_may_not_be_written(self, run, tmp_path, target, chats, token, name):
        head = write_eagle3(tmp_path / "head")
        with HubServer() as hub, connected(hub, tmp_path / "home", token=token):
            arguments = (head, "--draft-vocab", "300", "--target", target, *chats, "--push-to-hub", name)
            code, _, err = run(convert_command, *arguments)
        assert code == 1
        assert name in err
        assert not (tmp_path / "head-v300").exists()
        assert not hub.repos

    def test_a_dry_run_says_what_it_would_do_and_does_nothing(self, run, tmp_path, target, chats):
        head = write_eagle3(tmp_path / "head", lm_head=False)
        before = sorted(tmp_path.iterdir())
        arguments = (head, "--draft-vocab", "270,300", "--target", target, *chats, "--dry-run")
        code, out, err = run(convert_command, *arguments)
        assert code == 0, err
        for words in ("would write head-v270", "384 → 300", "forced ids", "free", "lm_head.weight of target", "chats"):
            assert words in out
        code, out, _ = run(convert_command, *arguments, "--json")
        plans = json.loads(out)
        assert [plan["draft_vocab"] for plan in plans] == [270, 300]
        assert plans[0]["num_forced"] == 259
        assert sorted(tmp_path.iterdir()) == before
        convert(head, draft_vocab=300, target=target, vocabulary=BY_ID, out=tmp_path / "done")
        assert (
            plans[1]["bytes_after"]
            == convert(head, draft_vocab=300, target=target, vocabulary=BY_ID, out=tmp_path / "again").bytes_after
        )


class TestAdvice:
    def test_how_long_a_busy_hub_is_asked_again_is_an_option(self, run, tmp_path, monkeypatch):
        pauses = []
        monkeypatch.setattr(hub_session.time, "sleep", pauses.append)
        # Put back afterwards.
        monkeypatch.setattr(hub_session.LIMITS, "patience_s", 60.0)
        monkeypatch.setattr(hub_session.LIMITS, "min_bytes_per_s", 1000.0)
        with HubServer() as hub, connected(hub, tmp_path / "home"):
            hub.inject("", Fault(any_status=503))
            code, _, err = run(convert_command, "org/head", "--draft-vocab", "8", "--patience", "2", "--min-speed", "5")
        assert code == 1, err
        assert hub_session.Limits(2.0, 5.0) == hub_session.LIMITS
        assert pauses == [1]

    def test_a_link_in_a_circle_is_called_so(self, run, tmp_path):
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        for options in (("a",), ("./a",), ("--target", "a")):
            code, _, err = run(convert_command, *options, "--draft-vocab", "8", "--order", "ids")
            assert code == 1
            assert "a: a link to nothing, or in a circle" in err

    def test_a_target_that_was_given_is_not_asked_for_again(self, tmp_path, target):
        for path in target.glob("tokenizer*"):
            path.unlink()
        with raises(UsageError, option="--tokenizer", target=str(target)) as caught:
            convert(
                write_eagle3(tmp_path / "head"), draft_vocab=300, vocabulary=BY_ID, target=target, out=tmp_path / "o"
            )
        assert "--target" not in str(caught.value)

    def test_a_repository_is_named_by_its_name(self, tmp_path, target):
        (target / "chat_template.jinja").unlink(missing_ok=True)
        config = json.loads((target / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (target / "tokenizer_config.json").write_text(json.dumps(config))
        with HubServer() as hub, connected(hub, tmp_path / "home"):
            hub.add_model("org/target", {path.name: path.read_bytes() for path in target.iterdir()})
            done = convert(
                write_eagle3(tmp_path / "head", lm_head=False), draft_vocab=300, vocabulary=BY_ID, target="org/target",
                out=tmp_path / "o",
            )  # fmt: skip
        assert any("org/target" in warning for warning in done.warnings)
        assert not any("snapshots" in warning or str(tmp_path) in warning for warning in done.warnings)


NO_TORCH = """
import sys
from eagle_slim.convert.cli import convert
convert.main(sys.argv[1:], standalone_mode=False)
print(*sorted({"torch", "datasets", "matplotlib"} & set(sys.modules)))
"""


def test_safetensors_to_safetensors_needs_no_torch(tmp_path, target):
    head = write_eagle3(tmp_path / "head", lm_head=False)
    (tmp_path / "map.json").write_text(json.dumps(list(range(320))))
    arguments = [head, "--draft-vocab", "300", "--target", target, "--token-map", tmp_path / "map.json"]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *map(str, arguments), "--out", tmp_path / "o"],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    assert torch.load(tmp_path / "o" / "freq_300.pt", weights_only=True)[-1] < 320
    assert len(torch.load(tmp_path / "o" / "freq_300.pt", weights_only=True)) == 300


class TestCountsAreKept:
    def test_when_writing_fails(self, run, tmp_path, target, chats, monkeypatch):
        from eagle_slim.convert.conversion import convert

        head = write_eagle3(tmp_path / "head")
        arguments = (head, "--draft-vocab", "300", "--target", target)

        def full(*_):
            raise OutputError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(convert, "write_slim", full)
            code, _, err = run(convert_command, *arguments, *chats)
        assert code == 1
        kept = tmp_path / ".head-v300.counts.safetensors"
        assert f"--counts {kept.name}" in err
        assert run(convert_command, *arguments, "--counts", kept)[0] == 0
        # The next run that counts for the same name leaves none.
        assert run(convert_command, *arguments, *chats, "--force")[0] == 0
        assert not kept.exists()

    def test_when_counting_ends(self, run, tmp_path, target, chats, monkeypatch):
        """An interruption says itself where the count goes on; after another error the conversion says it."""
        from eagle_slim.vocab_tools.counting import count

        arguments = (write_eagle3(tmp_path / "head"), "--draft-vocab", "300", "--target", target, *chats)
        real = count.count_tokens
        for error, words in ((CorpusError("line 3"), "the same command goes on from there"), (KeyboardInterrupt(), "")):

            def ended(*_, error=error, **options):
                options["resume_file"].write_bytes(b"what was counted")
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(count, "count_tokens", ended)
                code, _, err = run(convert_command, *arguments)
            assert code == 1
            assert words in err
        # A state that is of another count, or none, does not stand in the way of this one.
        assert count.count_tokens is real
        code, _, err = run(convert_command, *arguments)
        assert code == 0, err
        assert "starting over" in err
        assert not list(tmp_path.glob(".head-v300*"))


class TestPush:
    # huggingface_hub uploads with an argument that its HTTP library calls old.
    @pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
    def test_a_push_that_fails_names_the_command_that_ends_it(self, run, tmp_path, monkeypatch):
        from eagle_slim.convert import push

        head, chosen = write_eagle3(tmp_path / "head"), write_freq(tmp_path / "freq.pt", range(10))
        arguments = (head, "--draft-vocab", "8", "--token-map", chosen, "--push-to-hub", "tester/slim")

        def broken(*_, **__):
            raise SourceError("gone")

        with HubServer() as hub, connected(hub, tmp_path / "home", token="hf_good"):
            with monkeypatch.context() as patch:
                patch.setattr(push, "upload_files", broken)
                code, _, err = run(convert_command, *arguments)
            assert code == 1
            assert "eagle-convert --push head-v8 --push-to-hub tester/slim" in err
            assert verify_artifact(tmp_path / "head-v8").ok
            code, out, err = run(convert_command, "--push", "head-v8", "--push-to-hub", "tester/slim")
            assert code == 0, err
            assert "uploaded to" in out
            assert set(hub.repo("tester/slim").files) == {path.name for path in (tmp_path / "head-v8").iterdir()}

    @pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
    def test_only_what_the_manifest_names_is_uploaded(self, run, tmp_path, target):
        head = write_eagle3(tmp_path / "head")
        made = convert(head, draft_vocab=270, keep_rows=280, target=target, vocabulary=BY_ID, out=tmp_path / "slim")
        own = {path.name: path.read_bytes() for path in made.folder.iterdir()}
        for name in (".env", "secret.txt", "pytorch_model.bin"):
            (made.folder / name).write_text("HF_TOKEN=hf_secret")
        push = ("--push", "slim", "--push-to-hub", "tester/slim")
        with HubServer() as hub, connected(hub, tmp_path / "home", token="hf_good"):
            code, out, err = run(convert_command, *push, "--dry-run")
            assert (code, hub.repos) == (0, {}), err
            told = {line.split()[0]: "left" in line for line in out.splitlines()[1:]}
            assert told == {name: name not in own for name in (*own, ".env", "secret.txt", "pytorch_model.bin")}
            assert json.loads(run(convert_command, *push, "--dry-run", "--json")[1])["uploads"] == sorted(own)
            code, out, err = run(convert_command, *push)
            assert code == 0, err
            assert "secret.txt is not uploaded" in err
            assert hub.repo("tester/slim").files == own

    @pytest.mark.parametrize("file", ["model.safetensors", "kept_rows.eagle_slim"])
    def test_a_damaged_artifact_is_not_uploaded(self, run, tmp_path, target, file):
        head = write_eagle3(tmp_path / "head")
        made = convert(head, draft_vocab=270, keep_rows=280, target=target, vocabulary=BY_ID, out=tmp_path / "slim")
        content = bytearray((made.folder / file).read_bytes())
        content[-1] ^= 1
        (made.folder / file).write_bytes(content)
        with HubServer() as hub, connected(hub, tmp_path / "home", token="hf_good"):
            for more in ((), ("--dry-run",)):
                code, _, err = run(convert_command, "--push", "slim", "--push-to-hub", "tester/slim", *more)
                assert code == 1
                assert "the audit fails" in err
            with raises(ArtifactError, path=str(made.folder)):
                push_folder(made.folder, "tester/slim")
            assert (hub.repos, hub.requests) == ({}, [])

    def test_pushing_needs_an_artifact_a_name_and_the_hub(self, run, tmp_path):
        head = write_eagle3(tmp_path / "head")
        with HubServer() as hub, connected(hub, tmp_path / "home", token="hf_good"):
            for arguments in (("--push", head), (head, "--draft-vocab", "8", "--order", "ids")):
                code, _, err = run(convert_command, *arguments, "--push-to-hub", "tester/slim", "--offline")
                assert code == 2
                assert "--offline" in err
            assert hub.requests == []
        assert run(convert_command, "--push", head, "--push-to-hub", "tester/slim")[0] == 1
        assert run(convert_command, "--push", head)[0] == 2
        assert run(convert_command, head, "--push", head, "--push-to-hub", "tester/slim")[0] == 2


class TestNeverCounted:
    def test_ids_that_no_text_holds_are_told_of_everywhere(self, run, tmp_path, target):
        counts = [0] * TOKENS
        counts[300], counts[301], counts[302], counts[303] = 9, 8, 7, 6
        token_counts(counts, None, load_tokenizer(str(target)).tokenizer_hash).save(tmp_path / "few.safetensors")
        head = write_eagle3(tmp_path / "head")
        code, out, err = run(
            convert_command,
            head,
            "--draft-vocab",
            "320",
            "--target",
            target,
            "--counts",
            "few.safetensors",
            "--out",
            "o",
        )
        assert code == 0, err
        missing = 320 - 259 - 4
        assert f"never counted         {missing}" in out
        assert f"{missing} of the 320 ids never occur in the counted text" in err
        artifact = Artifact.load(tmp_path / "o")
        assert artifact.manifest.num_uncounted == missing
        assert f"forced ones apart: {missing}" in (tmp_path / "o" / "README.md").read_text()
        check = verify_artifact(tmp_path / "o")["ranks"]
        assert (check.status, f"{missing} never counted" in check.detail) == ("warning", True)


class TestDoubts:
    def convert(self, tmp_path, head, **options):
        request = VocabRequest(token_map=write_freq(tmp_path / "freq.pt", range(10)))
        done = convert(head, draft_vocab=8, vocabulary=request, out=tmp_path / "out", force=True, **options)
        return done

    def test_two_sets_of_weights(self, tmp_path):
        head = write_eagle3(tmp_path / "head")
        other = {name: tensor.flip(0).contiguous() for name, tensor in eagle3_tensors(rows=VOCAB).items()}
        torch.save(other, head / "pytorch_model.bin")
        chosen = self.convert(tmp_path, head, weights_file="pytorch_model.bin")
        assert chosen.manifest.head["weights_file"] == "pytorch_model.bin"
        found = load_file(chosen.folder / "model.safetensors")
        assert torch.equal(found["fc.weight"], other["fc.weight"])
        assert verify_artifact(chosen.folder, head=head).ok
        with raises(SourceError, option="--weights-file", found=["model.safetensors", "pytorch_model.bin"]):
            self.convert(tmp_path, head, weights_file="eagle.bin")

    def test_what_several_engines_make_of_a_head_is_said_once(self, tmp_path):
        done = self.convert(tmp_path, write_eagle1(tmp_path / "head"))
        assert len([warning for warning in done.warnings if "full LM head" in warning]) == 1

    @pytest.mark.parametrize(
        "name", ["config.json", "README.md", "eagle_slim.json", "model.safetensors", "hf_quant_config.json"]
    )
    def test_a_pipe_in_place_of_a_file_is_not_waited_for(self, tmp_path, name):
        head = write_eagle3(tmp_path / "head")
        (head / name).unlink(missing_ok=True)
        os.mkfifo(head / name)
        refused = pytest.raises((ArtifactError, CheckpointError))
        with waiting_for_nothing(), contextlib.nullcontext() if name == "README.md" else refused:
            self.convert(tmp_path, head)

    def test_a_changed_model_card_is_a_note(self, tmp_path):
        done = self.convert(tmp_path, write_eagle3(tmp_path / "head"))
        (done.folder / "README.md").write_text("my own words")
        check = verify_artifact(done.folder)["file checksums"]
        assert (check.status, "README.md" in check.detail) == ("ok", True)
