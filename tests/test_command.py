"""``python -m jax_dma``."""

import json

import jax_dma
from jax_dma.__main__ import main


def test_the_command_says_what_works_and_checks_it(capsys):
    """Every implementation is named, and each usable one is run against the reference."""
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {name: entry["status"] for name, entry in report["implementations"].items()} == jax_dma.status()
    assert all(entry["check"]["passed"] for entry in report["implementations"].values() if entry["available"])


def test_a_broken_implementation_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(jax_dma, "status", lambda: {"no_such_implementation": "available"})
    assert main([]) == 1
    assert "FAILED" in capsys.readouterr().out
