"""An estimate as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from la_export.cli.console import format_bytes
from la_export.estimate import Estimate, is_plan

__all__ = ["print_estimate"]


def print_estimate(found: Estimate, console: Console) -> None:
    """Print the files of each target, then memory and rows of each lookahead length."""
    shape, options = found.shape, found.options
    console.print(
        f"{shape.name}: {shape.num_parameters:,} parameters, {options.build.precision.value}, "
        f"cache form {options.build.cache_form.value}, context {shape.context}, batch up to "
        f"{options.max_batch}, prompts in chunks of {options.build.prefill_chunk}"
    )
    console.print(_file_table(found))
    memory = Table(
        *("target", "k", "rows root-only / full", "weights", "cache a token", "cache", "scratch"),
        *("logits", "GPU", "host, running", "host, building"),
    )
    for target in found.targets:
        for step in target.steps:
            sizes = step.memory
            device = target.device_bytes(step)
            memory.add_row(
                target.target.value,
                str(step.k),
                " / ".join(str(rows) for rows in step.rows.values()),
                format_bytes(sizes.weights),
                format_bytes(sizes.cache_per_token),
                format_bytes(sizes.cache),
                format_bytes(sizes.scratch),
                format_bytes(sizes.logits),
                format_bytes(device) if device else "-",
                format_bytes(target.host_bytes(step)),
                format_bytes(target.build_host_bytes),
            )
        memory.add_section()
    console.print(memory)
    for note in found.notes:
        console.print(f"note: {note}")


def _file_table(found: Estimate) -> Table:
    """What every bundle holds once, then what each target adds to it."""
    table = Table("for", "file", "size")
    shared = [entry for entry in found.targets[0].files if not is_plan(entry)]
    for entry in shared:
        table.add_row("every target", entry.path, format_bytes(entry.bytes))
    for target in found.targets:
        table.add_section()
        for entry in filter(is_plan, target.files):
            table.add_row(target.target.value, entry.path, format_bytes(entry.bytes))
        table.add_row(target.target.value, "all", format_bytes(target.disk_bytes))
        table.add_row(target.target.value, "building", format_bytes(target.build_disk_bytes))
    return table
