from __future__ import annotations

import pytest

from la_export.bench.peers.programs import DRIVERS, Program, make_programs
from la_export.bench.speed.record import PeerMode

PROGRAMS = make_programs(frozenset({"avx2"}))


def test_all_peers_are_there_with_their_precisions() -> None:
    found = {program.name: [one.precision for one in program.weights] for program in PROGRAMS}

    assert found == {
        "onnxruntime-genai": ["int4", "fp32"],
        "llama.cpp": ["Q4_0", "Q8_0"],
        "openvino-genai": ["int8", "int4"],
        "transformers": ["fp32"],
    }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_peer_has_a_driver_pins_and_both_modes_plain_first(program: Program) -> None:
    assert (DRIVERS / program.driver).is_file()
    assert all("==" in requirement for requirement in program.environment.requirements)
    assert [way.mode for way in program.ways] == [PeerMode.PLAIN, PeerMode.BEST]
    assert not program.ways[0].options


def test_drivers_and_converters_import_nothing_of_this_project() -> None:
    scripts = [*DRIVERS.glob("*.py"), *(DRIVERS.parent / "converters").glob("*.py")]
    assert len(scripts) > 5

    for path in scripts:
        text = path.read_text(encoding="utf-8")
        if path.name != "lookahead_driver.py":
            assert "la_export" not in text, path.name
            assert "la_runtime" not in text, path.name


def test_torch_is_pinned_wherever_something_needs_it() -> None:
    for program in PROGRAMS:
        needs = {requirement.partition("==")[0] for requirement in program.environment.requirements}
        if needs & {"transformers", "optimum-intel", "nncf"}:
            assert "torch==2.13.0" in program.environment.requirements, program.name
