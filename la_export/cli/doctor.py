"""`la-export doctor`: what of this machine works, and what to do about the rest."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["doctor_command"]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def doctor_command(*, as_json: bool) -> None:
    """Say what of this machine works, and how to fix what does not.

    Looks at Python, packages and their versions, the providers of ONNX Runtime that really run, the
    GPU and its driver, the operators that an installed TensorRT imports, disk, memory and caches.
    Ends with 0 if at least one backend runs a bundle here, else with 4.
    """
    from la_export.cli.diagnosis import format_diagnosis
    from la_export.doctor.evidence import gather_evidence
    from la_export.doctor.judgement import judge

    diagnosis = judge(gather_evidence(Path("engines")))
    click.echo(json.dumps(diagnosis.record(), indent=2) if as_json else format_diagnosis(diagnosis))
    click.get_current_context().exit(int(diagnosis.exit_code))
