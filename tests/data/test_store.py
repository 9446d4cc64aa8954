"""The token store: what it holds, its cache, damage, and several builders at once."""

import errno
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from perilune.data import (
    Corpus,
    CorpusConfig,
    PackedDataset,
    Tokenizer,
    TokenStoreError,
    inspect,
    open_stores,
    tokenize_corpus,
    train_tokenizer,
    valid_batches,
)
from perilune.data.corpus import CorpusError
from perilune.data.store import token_dtype
from perilune.data.turns import turn

CORPUS = Corpus(CorpusConfig(source="generated", num_documents=60, valid_fraction=0.2))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return train_tokenizer(CORPUS, 320, cache_dir=tmp_path_factory.mktemp("tokenizer"))


def test_store_holds_every_document_between_bos_and_eos(tokenizer, tmp_path: Path) -> None:
    stores = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path)
    for split, store in (("train", stores.train), ("valid", stores.valid)):
        texts = [document.text for document in CORPUS.documents(split)]
        assert store.num_documents == len(texts) > 0
        for number, text in enumerate(texts):
            ids = store.document(number).tolist()
            assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
            assert tokenizer.decode(ids[1:-1]) == text
        assert store.num_bytes == sum(len(text.encode()) for text in texts)
        assert store.tokens.dtype == np.uint16


def test_domains_of_held_out_documents_are_kept_and_cut_the_store_into_parts(tokenizer, tmp_path: Path) -> None:
    valid = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path).valid
    assert list(valid.domains) == [document.domain for document in CORPUS.documents("valid")]
    parts = valid.by_domain()
    sizes = [part.num_tokens for part in parts.values()]
    assert len(parts) > 1 and sizes == sorted(sizes, reverse=True) and sum(sizes) == valid.num_tokens
    for domain, part in parts.items():
        numbers = [number for number, each in enumerate(valid.domains) if each == domain]
        assert [part.document(n).tolist() for n in range(part.num_documents)] == [
            valid.document(number).tolist() for number in numbers
        ]
    joined = valid.by_domain(most=2)
    assert list(joined) == [next(iter(parts)), "others"]
    assert sum(part.num_bytes for part in joined.values()) == valid.num_bytes


def test_validation_bytes_are_those_of_the_texts(tokenizer, tmp_path: Path) -> None:
    stores = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path)
    batches = valid_batches(stores.valid, seq_len=33, rows_per_batch=4)
    assert sum(batch.num_bytes for batch in batches) == CORPUS.summary.num_bytes["valid"]


def test_tokenizer_trains_on_the_training_split_only(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t, "split": s}) + "\n" for t, s in (("aaaa " * 9, "train"), ("zqzq " * 9, "valid")))
    )
    corpus = Corpus(CorpusConfig(source=str(tmp_path / "a.jsonl"), split_field="split"))
    tokenizer = train_tokenizer(corpus, 300, cache_dir=tmp_path)
    assert len(tokenizer.encode("aaaa")) < 4
    assert len(tokenizer.encode("zqzq")) == 4


def test_second_use_reads_the_cache(tokenizer, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    first = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path, progress=lambda *call: calls.append(call))
    assert calls[-1] == ("tokenizing", 60, 60)
    calls.clear()
    second = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path, progress=lambda *call: calls.append(call))
    assert not calls
    assert first.fingerprint == second.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == [second.folder.name]


def test_fingerprint_and_folder_change_with_data_and_tokenizer(tokenizer, tmp_path: Path) -> None:
    other_corpus = Corpus(CorpusConfig(source="generated", num_documents=61, valid_fraction=0.2))
    other_tokenizer = train_tokenizer(CORPUS, 330, cache_dir=tmp_path / "tokenizer")
    stores = [
        tokenize_corpus(corpus, tok, cache_dir=tmp_path)
        for corpus, tok in ((CORPUS, tokenizer), (other_corpus, tokenizer), (CORPUS, other_tokenizer))
    ]
    assert len({store.folder for store in stores}) == 3
    assert len({PackedDataset(store.train, 16, 0).fingerprint for store in stores}) == 3
    assert stores[0].train.fingerprint != stores[0].valid.fingerprint


@pytest.mark.parametrize(
    "name", ["train.bin", "valid.bin", "train.npy", "bytes_per_token.npy", "valid.domains.json", "meta.json"]
)
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damaged_cache_is_detected_and_built_again(tokenizer, tmp_path: Path, name: str, damage: str) -> None:
    folder = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path).folder
    path = folder / name
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.unlink()
    with pytest.raises(TokenStoreError):
        open_stores(folder)
    assert tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path).folder == folder
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]


def test_builders_at_the_same_time_agree(tokenizer, tmp_path: Path) -> None:
    def build(_: int) -> str:
        corpus = Corpus(CORPUS.config)
        stores = tokenize_corpus(corpus, tokenizer, cache_dir=tmp_path)
        return f"{stores.folder} {stores.train.tokens.sum()}"

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(build, range(12)))) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_builders_at_the_same_time_repair_a_damaged_store(tokenizer, tmp_path: Path) -> None:
    folder = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path).folder
    (folder / "train.bin").write_bytes(b"")
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(tokenize_corpus, Corpus(CORPUS.config), tokenizer, cache_dir=tmp_path) for _ in range(4)]
        assert {job.result().folder for job in jobs} == {folder}
    assert len(list(tmp_path.iterdir())) == 1


def test_who_comes_second_waits_and_reads_what_the_first_built(tokenizer, tmp_path: Path) -> None:
    folder = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path / "elsewhere").folder
    entry, said = tmp_path / folder.name, []
    with ThreadPoolExecutor(1) as pool:
        with turn(entry):
            second = pool.submit(
                tokenize_corpus, CORPUS, tokenizer, cache_dir=tmp_path, progress=lambda *call: said.append(call[0])
            )
            while not said:
                assert not second.done()
                time.sleep(0.01)
            shutil.copytree(folder, entry)
        assert second.result().folder == entry
    assert said == ["waiting for another process that is tokenizing"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["elsewhere", entry.name])


def test_a_tokenizer_is_trained_once_however_many_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, train = [], Tokenizer.train.__func__
    noted = classmethod(lambda *given, **more: trained.append(1) or train(*given, **more))
    monkeypatch.setattr(Tokenizer, "train", noted)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(train_tokenizer, CORPUS, 320, cache_dir=tmp_path) for _ in range(4)]
        assert len({job.result().fingerprint for job in jobs}) == 1
    assert len(trained) == 1


def test_a_builder_is_alone_however_many_wait(tmp_path: Path) -> None:
    inside, most = [], []

    def build(_: int) -> None:
        with turn(tmp_path / "entry"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.002)
            inside.pop()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(build, range(60)))
    assert max(most) == 1 and not list(tmp_path.iterdir())


def test_who_stops_waiting_leaves_the_lock_to_its_holder(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with turn(tmp_path / "entry"):
        with pytest.raises(KeyboardInterrupt), turn(tmp_path / "entry", on_wait=interrupted):
            raise AssertionError("somebody else builds")
        assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_locked_is_built_all_the_same(tokenizer, tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path).train.num_tokens > 0


def test_full_disk_leaves_nothing_behind(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    with pytest.raises(TokenStoreError, match="cannot write the token store .*: No space left on device"):
        tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_corpus_that_changes_while_tokenizing_is_refused(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    corpus = Corpus(CorpusConfig(source=str(tmp_path)))
    corpus.fingerprint  # noqa: B018
    (tmp_path / "b.txt").write_text("other")
    with pytest.raises(CorpusError, match="changed while they were read"):
        tokenize_corpus(corpus, tokenizer, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_empty_validation_split_is_an_empty_store(tokenizer, tmp_path: Path) -> None:
    corpus = Corpus(CorpusConfig(source="generated", num_documents=3, valid_fraction=0.0))
    stores = tokenize_corpus(corpus, tokenizer, cache_dir=tmp_path)
    assert stores.valid.num_documents == stores.valid.num_tokens == 0
    with pytest.raises(ValueError, match="split of the corpus is empty"):
        next(valid_batches(stores.valid, 8, 1))


def test_large_vocabularies_use_four_bytes() -> None:
    assert token_dtype(65_536) is np.uint16
    assert token_dtype(65_537) is np.uint32


def test_inspection_fits_into_json_and_shows_borders(tokenizer, tmp_path: Path) -> None:
    stores = tokenize_corpus(CORPUS, tokenizer, cache_dir=tmp_path)
    numbers = json.loads(json.dumps(inspect(CORPUS, tokenizer, stores, seq_len=64, num_rows=4)))
    train = numbers["splits"]["train"]
    assert train["bytes"] == CORPUS.summary.num_bytes["train"]
    assert train["bytes_per_token"] == pytest.approx(
        train["bytes"] / (train["tokens"] - 2 * train["documents"]), abs=1e-3
    )
    assert train["document_tokens"]["p0"] <= train["document_tokens"]["p50"] <= train["document_tokens"]["p100"]
    assert len(numbers["rows"]) == 4
    assert all(row["text"].startswith("| ") and row["starts"][0] == 0 for row in numbers["rows"])
    assert all("\n" not in row["text"] for row in numbers["rows"])
    assert numbers["special_tokens"]["[PAD]"] == 319


def test_data_imports_no_torch() -> None:
    source = str(Path(sys.modules["perilune.data"].__file__ or "").parents[2])
    script = "import sys, perilune.data; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"
