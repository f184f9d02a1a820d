"""examples/train_lm.py: a run that was interrupted and resumed is the run that was not."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tqdm")
sys.path.append(str(Path(__file__).parents[1] / "examples"))
import train_lm  # noqa: E402

TINY = train_lm.Config(
    width=16, hidden=32, layers=2, heads=4, head_dim=8, context=160, window=16, steps=5, dtype="float32"
)  # fmt: skip
TEXT = tuple(np.random.default_rng(0).integers(97, 123, n).astype(np.uint8) for n in (5000, 1000)) + ({"bytes": 5000},)


def test_resuming(tmp_path):
    whole = train_lm.train(TINY, "dynamic", TEXT, tmp_path / "whole")
    folder = tmp_path / "parts"
    part = train_lm.train(TINY, "dynamic", TEXT, folder, until=3)
    assert part["loss"] == whole["loss"][:3]
    with pytest.raises(SystemExit, match="holds step 3 of a run"):
        train_lm.train(TINY, "dynamic", TEXT, folder)
    with pytest.raises(SystemExit, match="another configuration"):
        train_lm.train(dataclasses.replace(TINY, rate=1.0), "dynamic", TEXT, folder, resume=True)
    rest = train_lm.train(TINY, "dynamic", TEXT, folder, resume=True)
    for entry in ("loss", "held_out", "held_out_by_position"):
        np.testing.assert_allclose(rest[entry], whole[entry], rtol=1e-6)
    assert len(rest["seconds"]) == TINY.steps

    pytest.importorskip("matplotlib")
    train_lm.report({"dynamic": whole, "full": rest}, tmp_path)
    assert json.loads((tmp_path / "train_lm.json").read_text())["full"]["loss"] == rest["loss"]
    assert (tmp_path / "train_lm.png").stat().st_size > 10_000


def test_the_two_models_differ_in_the_keys_seen_alone():
    tokens = train_lm.batch_of(TEXT[0], TINY, 1)
    (start, _, dynamic), (_, _, full) = (train_lm.functions(TINY, kind) for kind in train_lm.KINDS)
    weights = start()["weights"]
    dynamic, full = dynamic(weights, tokens), full(weights, tokens)
    # Queries up to the window see all of their past in both.
    np.testing.assert_allclose(dynamic[: TINY.window], full[: TINY.window], rtol=1e-4)
    assert np.abs(dynamic - full)[TINY.window :].max() > 1e-3


def test_held_out_documents_are_in_no_other_part(monkeypatch):
    texts = [(f"package/{i}.py", f"text {i % 90}".encode()) for i in range(100)]  # the last ten are copies
    monkeypatch.setattr(train_lm, "documents", lambda: iter(texts))
    first = train_lm.load_text()
    monkeypatch.setattr(train_lm, "documents", lambda: reversed(texts))
    again = train_lm.load_text()
    assert first[2] == again[2] and first[2]["documents"] == 90
    parts = [set(bytes(part).split(b"\n\n")) - {b""} for part in first[:2]]
    assert len(parts[0]) + len(parts[1]) == 90 and parts[1] and not parts[0] & parts[1]
    for one, other in zip(first[:2], again[:2]):
        np.testing.assert_array_equal(one, other)
