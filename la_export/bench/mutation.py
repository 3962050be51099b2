"""A mutation run: every mutant of some modules against the tests that mirror them.

Each mutant lives in a forked process of its own, in which an import hook puts it in its module's
place before anything of the project is imported; no file of the project is touched. What is known
about a mutant is kept with a digest of it and of its tests, so that a run can be resumed; other
modules that the tests read are not part of it.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import resource
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import click
from pydantic import BaseModel, ConfigDict, ValidationError

from la_export.bench.mutants import Mutant, make_mutants
from la_export.bench.results import Cell, Column, write_result
from la_runtime.errors import CheckError, LookaheadError, UsageError

__all__ = ["Fate", "MutationPlan", "Outcome", "TestedModule", "load_plan", "run_mutants"]

_LEAST_SHARE_KILLED: Final = 0.9
# A mutant that takes so much more processor time than the unchanged module counts as endless.
_PATIENCE: Final = 5.0
_MEMORY_BYTES: Final = 4 << 30
_PASSED: Final = 0
_NO_TESTS: Final = 5
_COLUMNS: Final = (
    Column(key="module", title="Module"),
    Column(key="mutants", title="Mutants"),
    Column(key="killed", title="Killed"),
    Column(key="timed_out", title="Timed out"),
    Column(key="survived", title="Survived"),
    Column(key="share_killed", title="Share killed", digits=3),
)


class Fate(StrEnum):
    """What became of a mutant; ``killed``: a test failed, ``timed-out``: it did not end."""

    KILLED = "killed"
    TIMED_OUT = "timed-out"
    SURVIVED = "survived"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TestedModule(_Record):
    """One module and what tests it.

    Args:
        path: of the module, from the root.
        tests: test files or folders, from the root, the most telling first.
        equivalent: why mutants that survive cannot be told from the module, by their keys.
    """

    __test__ = False  # for pytest

    path: str
    tests: tuple[str, ...]
    equivalent: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The name it is imported by."""
        return self.path.removesuffix(".py").replace("/", ".")


class MutationPlan(_Record):
    """What a run covers.

    Args:
        modules: the modules.
        preload: foreign modules to import once, before the first fork.
        plugins: pytest plugins to load, such as a conftest; no conftest is loaded by itself.
        fresh: packages of the project, imported anew for every mutant.
    """

    modules: tuple[TestedModule, ...]
    preload: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A mutant, what became of it, and its module."""

    module: TestedModule
    mutant: Mutant
    fate: Fate


def load_plan(path: Path) -> MutationPlan:
    """Read a plan.

    Raises:
        UsageError: the file cannot be read or is no plan.
    """
    try:
        return MutationPlan.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise UsageError(f"{path} is no plan of a mutation run: {error}") from error


def run_mutants(
    plan: MutationPlan,
    root: Path,
    known_path: Path,
    *,
    least_cpu_s: int,
    tell: Callable[[str], None],
) -> list[Outcome]:
    """Test every mutant whose fate is not known yet.

    Args:
        plan: modules and tests.
        root: folder that all paths start from.
        known_path: JSON lines; one is added for each mutant tested.
        least_cpu_s: processor seconds that every mutant may take, however quick its tests are.
        tell: hears one line per module.

    Returns:
        Every mutant of every module, in order.

    Raises:
        CheckError: tests fail without a mutant, or there are none.
    """
    known = _load_known(known_path)
    for name in plan.preload:
        importlib.import_module(name)
    gc.freeze()
    outcomes: list[Outcome] = []
    for module in plan.modules:
        source = (root / module.path).read_text(encoding="utf-8")
        tests = [root / path for path in module.tests]
        mutants = make_mutants(source)
        digests = {mutant.key: _digest([mutant.source], tests) for mutant in mutants}
        unknown = [mutant for mutant in mutants if digests[mutant.key] not in known]
        tell(f"{module.path}: {len(mutants)} mutants, {len(unknown)} to test")
        if unknown:
            used_s = _measure_baseline(plan, module, root, source)
            cpu_s = max(least_cpu_s, round(_PATIENCE * used_s))
        for mutant in unknown:
            fate = _test(plan, module, root, mutant.source, cpu_s=cpu_s)
            known[digests[mutant.key]] = fate
            _append_known(known_path, digests[mutant.key], module, mutant, fate)
        outcomes += [
            Outcome(module=module, mutant=mutant, fate=known[digests[mutant.key]])
            for mutant in mutants
        ]
    return outcomes


def _load_known(path: Path) -> dict[str, Fate]:
    if not path.exists():
        return {}
    whole, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
    if torn:  # the run before was killed while it wrote
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    records = [json.loads(line) for line in whole.splitlines()]
    return {record["digest"]: Fate(record["fate"]) for record in records}


def _append_known(
    path: Path, digest: str, module: TestedModule, mutant: Mutant, fate: Fate
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"digest": digest, "fate": fate, "module": module.path, "mutant": mutant.key}
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


def _digest(texts: Sequence[str], paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    files = [file for path in paths for file in _python_files(path)]
    for text in (*texts, *(file.read_text(encoding="utf-8") for file in files)):
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _python_files(path: Path) -> Iterator[Path]:
    return iter(sorted(path.rglob("*.py"))) if path.is_dir() else iter([path])


def _measure_baseline(plan: MutationPlan, module: TestedModule, root: Path, source: str) -> float:
    """Processor seconds of the tests with the unchanged module, which must pass them."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    unchanged = ast.unparse(ast.parse(source))
    status = _run_forked(plan, module, root, unchanged, cpu_s=None)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status == _NO_TESTS:
        raise CheckError(f"{' '.join(module.tests)} holds no test of {module.path}")
    if status != _PASSED:
        raise CheckError(
            f"the tests of {module.path} fail without a mutant; run them: "
            f"pytest {' '.join(module.tests)}"
        )
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _test(plan: MutationPlan, module: TestedModule, root: Path, source: str, *, cpu_s: int) -> Fate:
    status = _run_forked(plan, module, root, source, cpu_s=cpu_s)
    if status == _PASSED:
        return Fate.SURVIVED
    return Fate.TIMED_OUT if status < 0 else Fate.KILLED


def _run_forked(
    plan: MutationPlan, module: TestedModule, root: Path, source: str, *, cpu_s: int | None
) -> int:
    """Pytest's exit code in a process that has this source as the module; -signal if it died."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    status = 1
    try:
        if cpu_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        status = _run_tests(plan, module, root, source)
    finally:
        os._exit(status)


def _run_tests(plan: MutationPlan, module: TestedModule, root: Path, source: str) -> int:
    import pytest

    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.chdir(root)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in list(sys.modules):
        if name.partition(".")[0] in plan.fresh:
            del sys.modules[name]
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, _MutantFinder(module.name, root / module.path, source))
    _quicken_hypothesis()
    arguments = ["-x", "-q", "--tb=no", "--assert=plain", "--noconftest", "-p", "no:cacheprovider"]
    for plugin in plan.plugins:
        arguments += ["-p", plugin]
    return int(pytest.main([*arguments, *module.tests]))


def _quicken_hypothesis() -> None:
    """The examples of a normal run; a counterexample that was found is not made smaller."""
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutation",
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
    )
    settings.load_profile("mutation")
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"  # for a conftest that loads one, too


class _MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a text."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name = name
        self._path = path
        self._source = source

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(self._path))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def _summarize(outcomes: Sequence[Outcome]) -> list[dict[str, Cell]]:
    """One row per module, and one for all."""
    rows: list[dict[str, Cell]] = []
    paths = list(dict.fromkeys(outcome.module.path for outcome in outcomes))
    for title, covered in [*((path, [path]) for path in paths), ("all", paths)]:
        fates = Counter(outcome.fate for outcome in outcomes if outcome.module.path in covered)
        total = fates.total()
        rows.append(
            {
                "module": title,
                "mutants": total,
                "killed": fates[Fate.KILLED],
                "timed_out": fates[Fate.TIMED_OUT],
                "survived": fates[Fate.SURVIVED],
                "share_killed": 1 - fates[Fate.SURVIVED] / total if total else 1.0,
            }
        )
    return rows


def _list_survivors(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """Where, what, and why it is no fault; an empty reason where the plan gives none."""
    return [
        {
            "where": f"{outcome.module.path}:{outcome.mutant.line}",
            "change": outcome.mutant.key,
            "reason": outcome.module.equivalent.get(outcome.mutant.key, ""),
        }
        for outcome in outcomes
        if outcome.fate is Fate.SURVIVED
    ]


def _find_stale_reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """Reasons of the plan for mutants that are killed or do not exist."""
    survived = {
        (outcome.module.path, outcome.mutant.key)
        for outcome in outcomes
        if outcome.fate is Fate.SURVIVED
    }
    modules = {outcome.module.path: outcome.module for outcome in outcomes}
    return [
        f"{path}: {key}"
        for path, module in modules.items()
        for key in module.equivalent
        if (path, key) not in survived
    ]


@click.command()
@click.option("--plan", "plan_path", type=Path, default=Path("scripts/mutation.toml"))
@click.option("--out", type=Path, default=Path("docs/results/mutation.json"))
@click.option("--known", "known_path", type=Path, default=Path(".mutants/fates.jsonl"))
@click.option("--least-cpu-s", type=click.IntRange(min=1), default=15, show_default=True)
def _main(*, plan_path: Path, out: Path, known_path: Path, least_cpu_s: int) -> None:
    """Test every mutant of the plan's modules; run from the repository's root.

    Ends with exit code 1 if less than 90 % are killed, a survivor has no reason, or a reason has
    no survivor.
    """
    try:
        plan = load_plan(plan_path)
        outcomes = run_mutants(plan, Path.cwd(), known_path, least_cpu_s=least_cpu_s, tell=_tell)
    except LookaheadError as error:
        _tell(f"error: {error}")
        sys.exit(error.exit_code)
    rows, survivors = _summarize(outcomes), _list_survivors(outcomes)
    write_result(
        out,
        command="scripts/mutate",
        columns=_COLUMNS,
        rows=rows,
        facts=_facts(plan, survivors),
    )
    for row in rows:
        _tell(
            f"{row['module']:<28} {row['mutants']:5} mutants, {row['survived']:4} survived, "
            f"{row['share_killed']:.1%} killed"
        )
    unexplained = [survivor for survivor in survivors if not survivor["reason"]]
    for survivor in unexplained:
        _tell(f"no reason: {survivor['where']} {survivor['change']}")
    stale = _find_stale_reasons(outcomes)
    for line in stale:
        _tell(f"a reason without its survivor: {line}")
    share = rows[-1]["share_killed"]
    assert isinstance(share, float), "a share is a float"
    if share < _LEAST_SHARE_KILLED or unexplained or stale:
        sys.exit(1)


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _facts(plan: MutationPlan, survivors: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "least_share_killed": _LEAST_SHARE_KILLED,
        "tests": {module.path: list(module.tests) for module in plan.modules},
        "left_alone": "annotations, docstrings, texts, decorators, imports, strict= of zip",
        "survivors": survivors,
    }


if __name__ == "__main__":
    _main()
