"""Contestants over the fake driver."""

from __future__ import annotations

import sys
from pathlib import Path

from la_export.bench.peers.process import Job
from la_export.bench.peers.programs import Option
from la_export.bench.peers.race import AskedPrompt, Contestant, Entry
from la_export.bench.speed.record import PeerMode

EOS = 31


def fake_job(**options: Option) -> Job:
    """A job for the fake driver."""
    return Job(
        python=Path(sys.executable),
        driver=Path(__file__).with_name("fake_driver.py"),
        model=Path("nowhere"),
        threads=1,
        context=64,
        eos_token_ids=(EOS,),
        options=options,
    )


def fake_contestant(peer: str, mode: PeerMode = PeerMode.PLAIN, **options: Option) -> Contestant:
    """An entry over the fake driver."""
    entry = Entry(peer=peer, precision="paper", mode=mode, mode_name=mode.value)
    return Contestant(entry=entry, job=fake_job(**options))


def prompt(*token_ids: int, name: str = "one", category: str = "qa") -> AskedPrompt:
    """A prompt of these tokens."""
    return AskedPrompt(name=name, category=category, token_ids=token_ids)
