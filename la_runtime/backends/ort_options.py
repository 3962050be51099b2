"""How ONNX Runtime is asked to run a graph on the CPU: one place, so that what is verified is
what runs.

All but the entries below is as ONNX Runtime has it. `scripts/ort_options` measures every other
choice against that: neither arena, memory pattern, denormals nor the block base of a loop changes
the time of a step by more than steps differ anyway. Below the extended level of optimization int4
weights are widened to float32 and products of integers may saturate, and without prepacking every
step packs again. Threads that spin while they wait are fast where they have the cores to
themselves, and slow where others need them.
"""

from __future__ import annotations

from typing import Final

from la_runtime.backends.availability import explain_import_error

try:
    import onnxruntime as ort
except ImportError as error:
    raise explain_import_error(error, backend="ort-cpu") from error

__all__ = ["make_session_options"]

_ERRORS_ONLY: Final = 3
_CONFIG: Final = {
    # Of `MatMul`s with int4 weights: 1 computes in float32; the default, 4, rounds activations to
    # int8.
    "session.qdq_matmulnbits_accuracy_level": "1",
    # Of products of u8 and s8 on x86 processors without VNNI: the default adds pairs of products in
    # 16 bits, which saturate at 32,767 of up to 64,770, in silence. 1 turns the weights to u8 when
    # a session opens, whose kernels are exact; with VNNI nothing changes.
    "session.x64quantprecision": "1",
}


# Threads of a session go on looking for work for a while after a run, and are in the way of another
# session's: with two threads on two cores both took twice as long in turn.
_NO_SPINNING_BETWEEN_RUNS: Final = ("session.force_spinning_stop", "1")


def make_session_options(threads: int, *, takes_turns: bool = False) -> ort.SessionOptions:
    """The options of every session on the CPU.

    Args:
        threads: for one operator; operators run one behind the other.
        takes_turns: whether another session runs between this one's passes.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    for key, value in _CONFIG.items():
        options.add_session_config_entry(key, value)
    if takes_turns:
        options.add_session_config_entry(*_NO_SPINNING_BETWEEN_RUNS)
    return options
